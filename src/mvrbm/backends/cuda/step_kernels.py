r"""The update rule in Triton, and the norms used in normalized steps. All kernel families use these functions.

`step_rule` is the only Triton implementation of the update rule in :func:`mvrbm.updates.step.step`. Parameters, momenta
and gradients are flat arrays. Consecutive models are `STRIDE` elements apart.
"""

# mypy: ignore-errors
# ruff: noqa: E741
import triton
import triton.language as tl

from mvrbm.backends.cuda.overlap import after_previous, fresh

# Number of columns in the table of rates, which has one row per model: learning rate for factors, learning rate for
# biases, momentum, weight decay, 1 / rate decay, 1 / planned updates.
N_RATES = tl.constexpr(6)


@triton.jit
def rates_of(rates, model, clock, batch):
    """Return the learning rates for factors and biases in a given batch, followed by the momentum and weight decay."""
    rates += model * N_RATES
    update = (tl.load(clock) + batch).to(tl.float32)
    falling = tl.maximum(1.0 - update * tl.load(rates + 5), 0.0) / tl.sqrt(1.0 + update * tl.load(rates + 4))
    return tl.load(rates) * falling, tl.load(rates + 1) * falling, tl.load(rates + 2), tl.load(rates + 3)


@triton.jit
def step_rule(value, momentum, gradient, rate, keep, decay):
    """Return the parameters and momenta after a step with the update rule of :func:`mvrbm.updates.step.step`."""
    momentum = keep * momentum + gradient + decay * value
    return value - rate * momentum, momentum


@triton.jit
def stepped(weights, momenta, gradients, at, inside, scale, rate, keep, decay, PENDING: tl.constexpr):
    """Return the parameters and momenta after the pending step, or unchanged if no step is pending."""
    value = fresh(weights + at, inside)
    momentum = value
    if PENDING:
        momentum = fresh(momenta + at, inside)
        gradient = fresh(gradients + at, inside) * scale
        value, momentum = step_rule(value, momentum, gradient, rate, keep, decay)
    return value, momentum


@triton.jit
def keep_step(weights, momenta, cleared, at, inside, value, momentum):
    """Write the parameters and momenta to memory, and set the gradient to zero."""
    tl.store(weights + at, value, mask=inside)
    tl.store(momenta + at, momentum, mask=inside)
    tl.store(cleared + at, tl.zeros_like(value), mask=inside)


@triton.jit(do_not_specialize=["batch"])
def apply(
    weights, momenta, gradients, new_weights, new_momenta, gains, sizes, gain_of, multiplier, rates, clock, batch,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, N_GAINS: tl.constexpr, TERMS: tl.constexpr,
    NORMALIZED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Perform the step for a batch and set the gradient to zero.

    The gain for a factor is the sum of `TERMS` values, where `TERMS` is a power of two. If `BLOCKS` is nonzero, each
    program writes the largest absolute entry of every factor in its block to `sizes`, an array of shape (models,
    N_GAINS, BLOCKS).
    """
    model = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    which = tl.load(gain_of + at, mask=inside, other=-1)  # factor index, -1 for a bias, N_GAINS for a label
    factor = which >= 0
    factor_rate, bias_rate, keep, decay = rates_of(rates, model, clock, batch)
    at += model.to(tl.int64) * STRIDE
    scale = tl.load(multiplier + at, mask=inside, other=0.0)
    after_previous(PDL)
    value, momentum, gradient = (
        fresh(weights + at, inside),
        fresh(momenta + at, inside),
        fresh(gradients + at, inside),
    )
    gradient *= scale
    if NORMALIZED:
        gain = tl.full([BLOCK], 1.0, tl.float32)
        for number in tl.static_range(N_GAINS):
            terms = gains + (model * N_GAINS + number) * TERMS + tl.arange(0, TERMS)
            gain = tl.where(which == number, tl.maximum(tl.sum(fresh(terms, True)), 1e-12), gain)
        gradient = gradient / gain
    value, momentum = step_rule(
        value, momentum, gradient, tl.where(factor, factor_rate, bias_rate), keep, tl.where(factor, decay, 0.0)
    )
    tl.store(new_weights + at, value, mask=inside)
    tl.store(new_momenta + at, momentum, mask=inside)
    tl.store(gradients + at, tl.zeros([BLOCK], tl.float32), mask=inside)
    if BLOCKS > 0:
        for number in tl.static_range(N_GAINS):
            largest = tl.max(tl.where(which == number, tl.abs(value), 0.0))
            tl.store(sizes + (model * N_GAINS + number) * BLOCKS + tl.program_id(0), largest)


@triton.jit
def schatten(matrix, PRECISION: tl.constexpr):
    """Return the squared Schatten 8-norm of a matrix, as in `couplings.base.squared_norms`."""
    gram = tl.dot(matrix, tl.trans(matrix), input_precision=PRECISION)
    gram = tl.dot(gram, gram, input_precision=PRECISION)
    return tl.sqrt(tl.sqrt(tl.sum(gram * gram)))


@triton.jit
def factor_at(
    number, RANK_: tl.constexpr, K: tl.constexpr, I: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    TERMS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Return the positions of one matrix in the factors U (R, K, I) and V (R, L, J), and a mask of valid entries."""
    row, column = tl.arange(0, EDGE)[:, None], tl.arange(0, EDGE)[None, :]
    height, width, start = K, I, 0
    if number >= TERMS:
        height, width, start = L, J, RANK_ * K * I
    return start + (number % TERMS * height + row) * width + column, (row < height) & (column < width)


@triton.jit
def keep_norm(matrix, gains, number, TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """Store one term of the gains for U and V, which is a squared norm as in `couplings.base.squared_norms`."""
    # The gain for V is computed from the norms of U, and the gain for U from the norms of V.
    partner = tl.where(number < TERMS, number + TERMS, number % TERMS)
    tl.store(gains + partner, schatten(matrix, PRECISION))


@triton.jit
def power_of(squares, first, n_columns, WIDE: tl.constexpr):
    """Return the power of a layer with learned variances, or 1 for other layers.

    See :func:`mvrbm.updates.step.gains_of`. The layer has `n_columns` columns starting at `first`, or none if `WIDE` is
    0. The squares for padded columns are zero.
    """
    power = 1.0
    if WIDE > 0:
        columns = tl.arange(0, WIDE)
        power = tl.maximum(tl.sum(fresh(squares + first + columns, columns < n_columns)), 1.0)
    return power
