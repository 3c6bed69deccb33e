r"""The Triton kernels of one update for a single layer of matrices that fit one tile each, and of the step.

Parameters are one flat array per model, `STRIDE` numbers apart: for each visible layer its factors U (R, K, I) and V
(R, L, J) and its bias (I, J), then the hidden bias (K, L). Layers are in *units of their statistic around the offset*
(Gaussian: :math:`x / s - \mu`; Bernoulli: the values), in which every kind of unit has mean :math:`g(b + f)` with g the
logistic function or the identity; :mod:`mvrbm.backends.cuda.per_sample` converts. Larger layers, and several of them, are
in :mod:`mvrbm.backends.cuda.tiled`. The step is the rule of :mod:`mvrbm.updates.step`, in `_step`.

A launch computes batch number `batch` of an epoch. Random numbers are a function of a model's key, the number of the
update, the sample, the draw and the entry, or, in tests, are read from memory, `RECORDED` numbers per update. With
`PDL` a launch begins while the previous one ends (programmatic dependent launch), and waits for it before it reads its
results.
"""

# mypy: ignore-errors
# ruff: noqa: E741
import triton
import triton.language as tl
from triton.language.extra import cuda

from mvrbm.backends.cuda.draws import draw_layer, mean, numbers_of

# Columns of the table of rates, with one row per model.
N_RATES = tl.constexpr(6)  # rates of factors and biases, momentum, weight decay, 1 / rate decay, 1 / planned updates


@triton.jit
def load_sample(data, order, scales, shifts, i, n_valid, at, inside, AREA: tl.constexpr, BYTE_SCALE: tl.constexpr,
                GAUSSIAN: tl.constexpr):  # fmt: skip
    """Return sample i of a batch, in units of its statistic around its offset; zeros beyond the end of the batch."""
    if i < n_valid:
        row = tl.load(order + i).to(tl.int64)
        x = tl.load(data + row * AREA + at, mask=inside, other=0).to(tl.float32) * BYTE_SCALE
        if GAUSSIAN:
            scale = tl.load(scales + at, mask=inside, other=0.0)
            shift = tl.load(shifts + at, mask=inside, other=0.0)
            x = x * scale - shift
    else:
        x = tl.zeros(at.shape, tl.float32)
    return x


@triton.jit
def _schatten(matrix, PRECISION: tl.constexpr):
    """Return the squared Schatten 8-norm, as `couplings.base.squared_norms` does."""
    gram = tl.dot(matrix, tl.trans(matrix), input_precision=PRECISION)
    gram = tl.dot(gram, gram, input_precision=PRECISION)
    return tl.sqrt(tl.sqrt(tl.sum(gram * gram)))


@triton.jit(do_not_specialize=["batch"])
def apply(
    weights, momenta, gradients, new_weights, new_momenta, gains, sizes, gain_of, multiplier, rates, clock, batch,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, N_GAINS: tl.constexpr, TERMS: tl.constexpr,
    NORMALIZED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Make the step of batch `batch` from the gradient, and set the gradient to zero.

    The gain of a factor is the sum of `TERMS` numbers, a power of two. The largest entries of every factor
    go to `sizes`, (models, N_GAINS, BLOCKS), one of each program, unless there are no `BLOCKS`.
    """
    model = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    which = tl.load(gain_of + at, mask=inside, other=-1)  # number of the factor, -1 for a bias, N_GAINS for a label
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
    value, momentum = _step(
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
def wait(PDL: tl.constexpr):
    """Wait for the previous launch."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def begin_next(PDL: tl.constexpr):
    """Let the next launch begin when all programs have come here or have ended; it waits for their results."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait for the previous launch, and let the next one begin, which waits as well."""
    wait(PDL)
    begin_next(PDL)


@triton.jit
def fresh(at, inside):
    """Load values that the previous launch wrote, zero outside."""
    # Not from a multiprocessor's own cache: it may hold outdated values that the previous launch has read.
    return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def rates_of(rates, model, clock, batch):
    """Return the rates of factors and biases at a batch, momentum and weight decay."""
    rates += model * N_RATES
    update = (tl.load(clock) + batch).to(tl.float32)
    falling = tl.maximum(1.0 - update * tl.load(rates + 5), 0.0) / tl.sqrt(1.0 + update * tl.load(rates + 4))
    return tl.load(rates) * falling, tl.load(rates + 1) * falling, tl.load(rates + 2), tl.load(rates + 3)


@triton.jit
def _step(value, momentum, gradient, rate, keep, decay):
    """Return parameters and momenta after a step: the update rule of :func:`mvrbm.updates.step.step`."""
    momentum = keep * momentum + gradient + decay * value
    return value - rate * momentum, momentum


@triton.jit(do_not_specialize=["batch", "n_valid"])
def small_step(
    data, order, weights, momenta, pending, gradients, new_weights, new_momenta, cleared, gains, new_gains,
    multiplier, rates, clock, seeds, chains, recorded, load_scale, load_shift,
    batch, n_valid, order_stride, data_stride,
    N: tl.constexpr, CHAINS: tl.constexpr, SAMPLES: tl.constexpr, STRIDE: tl.constexpr,
    I: tl.constexpr, J: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    STEPS: tl.constexpr, PERSISTENT: tl.constexpr, VISIBLE_GAUSSIAN: tl.constexpr, HIDDEN_GAUSSIAN: tl.constexpr,
    BYTE_SCALE: tl.constexpr, NORMALIZED: tl.constexpr, RECORDED: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr, PENDING: tl.constexpr, KEEPERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one batch's gradient, for one layer whose sizes fit one tile each, and rank 1.

    Program (p, s) takes `SAMPLES` samples of model s, one after another, and keeps their gradient in registers.

    With `PENDING`, a step is pending: every program makes it for itself, from `weights`, `momenta` and the gradient
    `pending` of the batch before. The last programs along the first axis, at most two `KEEPERS`, take no sample: the
    first for U and the visible bias, the last for V and the hidden bias, they write the result of that step to
    `new_weights` and `new_momenta`, set `cleared`, the next launch's gradient, to zero, and compute the gains of
    normalized steps. Other programs still read the old values, so the new ones go elsewhere.

    The order of products leaves matrices where tensor cores put them: a thread holds side by side what the next product
    sums over, X' and Y' being the second operand of every product but those of the gradient. Beyond a layer's edges
    states are arbitrary: factors are zero there.
    """
    program = tl.program_id(0)
    model = tl.program_id(1)
    AT_V: tl.constexpr = K * I
    AT_B: tl.constexpr = K * I + L * J
    AT_C: tl.constexpr = AT_B + I * J
    ROWS: tl.constexpr = CHAINS if PERSISTENT else N
    OPERAND: tl.constexpr = tl.float16 if HALVES else tl.float32
    ri, rj, rk, rl = tl.arange(0, BI), tl.arange(0, BJ), tl.arange(0, BK), tl.arange(0, BL)
    at_x = ri[:, None] * J + rj[None, :]
    in_x = (ri[:, None] < I) & (rj[None, :] < J)
    at_y = rk[:, None] * L + rl[None, :]
    in_y = (rk[:, None] < K) & (rl[None, :] < L)
    at_u = rk[:, None] * I + ri[None, :]
    in_u = (rk[:, None] < K) & (ri[None, :] < I)
    at_v = rl[:, None] * J + rj[None, :]
    in_v = (rl[:, None] < L) & (rj[None, :] < J)
    update = tl.load(clock) + batch
    key = tl.load(seeds + model)
    data += model.to(tl.int64) * data_stride
    multiplier += model * STRIDE
    load_scale += model * (I * J)
    load_shift += model * (I * J)
    order += model * order_stride + batch * N
    recorded += batch * RECORDED
    now, moving, owed = weights + model * STRIDE, momenta + model * STRIDE, pending + model * STRIDE
    mine = gradients + model * STRIDE
    i = program * SAMPLES
    # Everything that does not depend on the parameters comes before the wait: rates, data and random numbers.
    factor_rate, bias_rate, keep, decay = rates_of(rates, model, clock, batch - 1)
    scale_b, scale_c = 1.0, 1.0
    if VISIBLE_GAUSSIAN:
        scale_b = tl.load(multiplier + AT_B + at_x, mask=in_x, other=0.0)
    if HIDDEN_GAUSSIAN:
        scale_c = tl.load(multiplier + AT_C + at_y, mask=in_y, other=0.0)
    if SAMPLES == 1:
        x0 = load_sample(
            data, order, load_scale, load_shift, i, n_valid, at_x, in_x, I * J, BYTE_SCALE, VISIBLE_GAUSSIAN
        )
        to_y = numbers_of(key, update, i, 0, recorded, at_y, in_y, ROWS, K * L, HIDDEN_GAUSSIAN, RECORDED, BK, BL)
        to_x = numbers_of(
            key, update, i, 1, recorded + ROWS * K * L, at_x, in_x, ROWS, I * J, VISIBLE_GAUSSIAN, RECORDED, BI, BJ
        )
    after_previous(PDL)
    scale_u, scale_v = 1.0, 1.0
    if NORMALIZED:
        scale_u = 1.0 / tl.maximum(tl.load(gains + model * 2, cache_modifier=".cg"), 1e-12)
        scale_v = 1.0 / tl.maximum(tl.load(gains + model * 2 + 1, cache_modifier=".cg"), 1e-12)
    keeper = program - tl.num_programs(0) + KEEPERS
    if keeper < 0:
        U, _ = stepped(now, moving, owed, at_u, in_u, scale_u, factor_rate, keep, decay, PENDING)
        V, _ = stepped(now, moving, owed, AT_V + at_v, in_v, scale_v, factor_rate, keep, decay, PENDING)
        B, _ = stepped(now, moving, owed, AT_B + at_x, in_x, scale_b, bias_rate, keep, 0.0, PENDING)
        C, _ = stepped(now, moving, owed, AT_C + at_y, in_y, scale_c, bias_rate, keep, 0.0, PENDING)
        u, size_u = operand(U, HALVES)
        v, size_v = operand(V, HALVES)
        size = both_sizes(size_u, size_v)
        B, C = not_before(B, size), not_before(C, size)
        grad_u, grad_v = tl.zeros([BK, BI], tl.float32), tl.zeros([BL, BJ], tl.float32)
        grad_b, grad_c = tl.zeros([BI, BJ], tl.float32), tl.zeros([BK, BL], tl.float32)
        # A chain counts as `weight` samples, a short batch in proportion. None counts more than 1 until the end, for
        # the sake of numbers of 16 bits.
        weight, largest = 1.0, 1.0
        if PERSISTENT:
            weight = n_valid.to(tl.float32) / CHAINS
            largest = tl.maximum(weight, 1.0)
        for s in range(SAMPLES):
            if SAMPLES > 1:
                i = program * SAMPLES + s
                x0 = load_sample(
                    data, order, load_scale, load_shift, i, n_valid, at_x, in_x, I * J, BYTE_SCALE, VISIBLE_GAUSSIAN
                )
            half0, field = _up(tl.trans(x0).to(OPERAND), u, v, size, C, PRECISION)
            positive = tl.where(i < n_valid, 1.0 / largest, 0.0)
            h0 = -positive * mean(field, HIDDEN_GAUSSIAN)
            x1, half1 = x0, half0
            if PERSISTENT:
                state = chains + (model * CHAINS + i).to(tl.int64) * (I * J) + at_x
                x1 = fresh(state, in_x & (i < CHAINS)).to(tl.float32)
                half1, field = _up(tl.trans(x1).to(OPERAND), u, v, size, C, PRECISION)
                negative = tl.where(i < CHAINS, weight / largest, 0.0)
            else:
                negative = positive
            for step in range(STEPS):
                here = recorded + step * ROWS * (K * L + I * J)
                if SAMPLES > 1 or step > 0:
                    to_y = numbers_of(
                        key, update, i, 2 * step, here, at_y, in_y, ROWS, K * L, HIDDEN_GAUSSIAN, RECORDED, BK, BL
                    )
                y = draw_layer(field, to_y, HIDDEN_GAUSSIAN)
                y_t = tl.trans(y).to(OPERAND)
                towards = _down(y_t, u, v, size, B, PRECISION)
                if SAMPLES > 1 or step > 0:
                    to_x = numbers_of(
                        key, update, i, 2 * step + 1, here + ROWS * K * L, at_x, in_x, ROWS, I * J, VISIBLE_GAUSSIAN,
                        RECORDED, BI, BJ,
                    )  # fmt: skip
                x1 = draw_layer(towards, to_x, VISIBLE_GAUSSIAN)
                half1, field = _up(tl.trans(x1).to(OPERAND), u, v, size, C, PRECISION)
            h1 = negative * mean(field, HIDDEN_GAUSSIAN)
            if PERSISTENT:
                tl.store(state, x1, mask=in_x & (i < CHAINS))
            grad_b += negative * x1 - positive * x0
            grad_c += h0 + h1
            grad_u, grad_v = _add_slopes(x0, h0, half0, u, grad_u, grad_v, PRECISION)
            grad_u, grad_v = _add_slopes(x1, h1, half1, u, grad_u, grad_v, PRECISION)
        tl.atomic_add(mine + AT_B + at_x, grad_b * (largest / N), mask=in_x, sem="relaxed")
        tl.atomic_add(mine + AT_C + at_y, grad_c * (largest / N), mask=in_y, sem="relaxed")
        tl.atomic_add(mine + at_u, grad_u * (largest * size_v / N), mask=in_u, sem="relaxed")
        tl.atomic_add(mine + AT_V + at_v, grad_v * (largest * size_u / N), mask=in_v, sem="relaxed")
    if keeper == 0:
        _keep(
            now, moving, owed, new_weights + model * STRIDE, new_momenta + model * STRIDE, cleared + model * STRIDE,
            at_u, in_u, scale_u, AT_B + at_x, in_x, scale_b, factor_rate, bias_rate, keep, decay,
            new_gains + model * 2 + 1, PENDING, NORMALIZED, PRECISION,
        )  # fmt: skip
    if (keeper >= 0) & (keeper == KEEPERS - 1):
        _keep(
            now, moving, owed, new_weights + model * STRIDE, new_momenta + model * STRIDE, cleared + model * STRIDE,
            AT_V + at_v, in_v, scale_v, AT_C + at_y, in_y, scale_c, factor_rate, bias_rate, keep, decay,
            new_gains + model * 2, PENDING, NORMALIZED, PRECISION,
        )  # fmt: skip


@triton.jit
def _keep(
    weights, momenta, pending, new_weights, new_momenta, cleared, at, inside, scale, bias_at, in_bias, bias_scale,
    rate, bias_rate, keep, decay, gain, PENDING: tl.constexpr, NORMALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a factor and a bias after the pending step, if there is one, and the gain that the factor makes."""
    factor, momentum = stepped(weights, momenta, pending, at, inside, scale, rate, keep, decay, PENDING)
    if PENDING:
        bias, of_bias = stepped(weights, momenta, pending, bias_at, in_bias, bias_scale, bias_rate, keep, 0.0, PENDING)
        keep_step(new_weights, new_momenta, cleared, at, inside, factor, momentum)
        keep_step(new_weights, new_momenta, cleared, bias_at, in_bias, bias, of_bias)
    if NORMALIZED:
        tl.store(gain, _schatten(factor, PRECISION))


@triton.jit
def stepped(weights, momenta, gradients, at, inside, scale, rate, keep, decay, PENDING: tl.constexpr):
    """Return parameters and momenta, after the pending step if there is one."""
    value = fresh(weights + at, inside)
    momentum = value
    if PENDING:
        momentum = fresh(momenta + at, inside)
        gradient = fresh(gradients + at, inside) * scale
        value, momentum = _step(value, momentum, gradient, rate, keep, decay)
    return value, momentum


@triton.jit
def keep_step(weights, momenta, cleared, at, inside, value, momentum):
    """Write parameters and their momentum, and set a gradient to zero."""
    tl.store(weights + at, value, mask=inside)
    tl.store(momenta + at, momentum, mask=inside)
    tl.store(cleared + at, tl.zeros_like(value), mask=inside)


@triton.jit
def operand(factor, HALVES: tl.constexpr):
    """Return a factor as an operand, and the size that results are multiplied by."""
    # 16-bit numbers end at 65,504, which a training run may exceed for a while and recover. So factors are divided by
    # their largest entry; other operands are then at most as large as a tile is wide.
    size = 1.0
    if HALVES:
        size = tl.maximum(tl.max(tl.abs(factor)), 1e-30)
        factor = (factor * (1.0 / size)).to(tl.float16)
    return factor, size


@triton.jit
def not_before(values, size):
    """Return the values, which need not be there before `size` is known: all that is loaded is requested by then."""
    # The compiler lays values out for the next product as soon as they are there. At the barrier that this takes
    # everything waits, also loads that come later in the program. Sizes are not negative; where they are the constant
    # 1, nothing is gained.
    return values + tl.minimum(size, 0.0)


@triton.jit
def both_sizes(size_u, size_v):
    """Return the product of two sizes, kept finite: a field of zero must stay zero."""
    return tl.minimum(size_u * size_v, 3e38)


@triton.jit
def _up(x_t, u, v, size, field, PRECISION: tl.constexpr):
    """Return V X', and the hidden field plus U X V', from X transposed."""
    half = tl.dot(v, x_t, input_precision=PRECISION).to(v.dtype)  # (L, I)
    return half, field + size * tl.dot(u, tl.trans(half), input_precision=PRECISION)


@triton.jit
def _down(y_t, u, v, size, field, PRECISION: tl.constexpr):
    """Return the visible field plus U' Y V, from Y transposed."""
    half = tl.trans(tl.dot(tl.trans(v), y_t, input_precision=PRECISION)).to(v.dtype)  # Y V, (K, J)
    return field + size * tl.dot(tl.trans(u), half, input_precision=PRECISION)


@triton.jit
def _add_slopes(x, h, half, u, grad_u, grad_v, PRECISION: tl.constexpr):
    """Add the gradients of U, H (V X'), where `half` is V X', and of V, (H' U) X."""
    h = h.to(u.dtype)
    grad_u = tl.dot(h, half, acc=grad_u, input_precision=PRECISION)
    half = tl.dot(tl.trans(h), u, input_precision=PRECISION).to(u.dtype)  # (L, I)
    return grad_u, tl.dot(half, x.to(u.dtype), acc=grad_v, input_precision=PRECISION)


def n_programs(size: int, block: int) -> int:
    """Return the number of blocks that cover a flat array."""
    return int(triton.cdiv(size, block))


@triton.jit
def factor_at(
    number, RANK_: tl.constexpr, K: tl.constexpr, I: tl.constexpr, L: tl.constexpr, J: tl.constexpr,
    TERMS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Return the positions of one matrix of the factors U (R, K, I) and V (R, L, J), and which of them exist."""
    row, column = tl.arange(0, EDGE)[:, None], tl.arange(0, EDGE)[None, :]
    height, width, start = K, I, 0
    if number >= TERMS:
        height, width, start = L, J, RANK_ * K * I
    return start + (number % TERMS * height + row) * width + column, (row < height) & (column < width)


@triton.jit
def keep_norm(matrix, gains, number, TERMS: tl.constexpr, PRECISION: tl.constexpr):
    """Store one term of the gains of U and V: a squared norm, as `couplings.base.squared_norms` has it."""
    # The norms of U make the gain of V, and those of V the gain of U.
    partner = tl.where(number < TERMS, number + TERMS, number % TERMS)
    tl.store(gains + partner, _schatten(matrix, PRECISION))


@triton.jit
def power_of(squares, first, n_columns, WIDE: tl.constexpr):
    """Return the power of a layer that learns its variances, see :func:`mvrbm.updates.step.gains_of`; 1 for others.

    It has `n_columns` columns from `first` on, or none where `WIDE` is 0; squares of columns that are padded are zero.
    """
    power = 1.0
    if WIDE > 0:
        columns = tl.arange(0, WIDE)
        power = tl.maximum(tl.sum(fresh(squares + first + columns, columns < n_columns)), 1.0)
    return power
