r"""Triton kernel for layers with learned variances, which complements `full_kernels`.

States remain in units of the layer's initial scale :math:`s_0`. `ratios` contains :math:`q = s_0 / s` for each column,
or 1 if the variance is fixed. The full matrix used as an operand is :math:`W q`, so that products with it are the
fields on hidden units. The fields on visible units are :math:`q^{-2}` times products with this matrix, and samples have
a standard deviation of :math:`1 / q`. The gradient for a log-variance is

.. math:: -\tfrac12 \sum_k W_k G_k + \tfrac12 q^2 \sum w \{d^2 - 2 (b / s_0 - \mu) d\}.

Here, :math:`W_k` and :math:`G_k` are the entries of :math:`W` and of its gradient for hidden unit k, b is the bias,
:math:`\mu` is the center, and :math:`d = x / s_0 - \mu`. The second sum is over the data, where the weight w is
negative, and over the chains, where w is positive. The weights sum to zero.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from mvrbm.backends.cuda.full_kernels import (
    COLUMNS,
    FIRST,
    FULL,
    GATHERED,
    LEARNS,
    PITCH,
    RANK,
    ROWS,
    WIDTH,
    line_and_column,
    matrix_at,
)
from mvrbm.backends.cuda.overlap import after_previous, fresh
from mvrbm.backends.cuda.step_kernels import keep_step, rates_of


@triton.jit(do_not_specialize=["batch", "n_valid"])
def vary(
    weights, momenta, gradient, new_weights, new_momenta, cleared, weight, states, center, start, ratios, squares,
    rates, clock, batch, n_valid, N: tl.constexpr, CHAINS: tl.constexpr, PERSISTENT: tl.constexpr,
    ALL_ROWS: tl.constexpr, CHAINS_AT: tl.constexpr, HIDDEN: tl.constexpr, VISIBLE: tl.constexpr, UNITS: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, HIDDEN_PITCH: tl.constexpr, STRIDE: tl.constexpr, VISIBLE_BIAS: tl.constexpr,
    VARIANCES: tl.constexpr, LAYERS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Update the log-variances and compute the new ratios and each column's contribution to the power."""
    program, model = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = program * GATHERED + tl.arange(0, GATHERED)
    _, rate, keep, _ = rates_of(rates, model, clock, batch)
    after_previous(PDL)
    weight += model * HIDDEN * VISIBLE
    states += model * ALL_ROWS * VISIBLE
    first = model * STRIDE
    n_chains = CHAINS if PERSISTENT else n_valid
    per_chain = n_valid.to(tl.float32) / (N * CHAINS) if PERSISTENT else 1.0 / N
    for m in tl.static_range(len(LAYERS)):
        learns = (LAYERS[m][LEARNS] > 0) & (program * GATHERED >= LAYERS[m][FIRST])
        if learns & (program * GATHERED < LAYERS[m][FIRST] + LAYERS[m][WIDTH]):
            own = columns - LAYERS[m][FIRST]
            i, j = line_and_column(own, LAYERS[m][ROWS], LAYERS[m][COLUMNS], LAYERS[m][PITCH])
            real = (i < LAYERS[m][ROWS]) & (j < LAYERS[m][COLUMNS])
            ratio = fresh(ratios + model * VISIBLE + columns, True)
            mu = tl.load(center + model * VISIBLE + columns)
            product = tl.zeros([GATHERED], tl.float32)
            for u in range(0, UNITS, BLOCK):
                units = u + tl.arange(0, BLOCK)
                inside = (units < UNITS)[:, None] & real[None, :]
                at = matrix_at(units, i, j, LAYERS[m][RANK], LAYERS[m][ROWS], LAYERS[m][COLUMNS], K, L, HIDDEN_PITCH)
                G = fresh(
                    gradient + first + LAYERS[m][FULL] + at, inside
                )  # gradient for W: the gradient for W q, times q
                W = fresh(weight + units[:, None] * VISIBLE + columns[None, :], inside)  # W q
                product += tl.sum(G * W.to(tl.float32), 0)
            of_data, data_squares = _moments(states, columns, mu, n_valid, VISIBLE, N, BLOCK)
            chains = states + CHAINS_AT * VISIBLE
            of_chains, chain_squares = _moments(chains, columns, mu, n_chains, VISIBLE, CHAINS, BLOCK)
            away = 2 * (fresh(weights + first + VISIBLE_BIAS + columns, real) - mu)
            deviations = per_chain * (chain_squares - away * of_chains) - (data_squares - away * of_data) / N
            slope = 0.5 * (ratio * ratio * deviations - product / ratio)
            at = first + VARIANCES + columns
            value, momentum = fresh(weights + at, real), fresh(momenta + at, real)
            momentum = keep * momentum + slope
            value -= rate * momentum
            keep_step(new_weights, new_momenta, cleared, at, real, value, momentum)
            share = ratio * ratio * data_squares / (n_valid * (LAYERS[m][ROWS] * LAYERS[m][COLUMNS]))
            tl.store(squares + model * VISIBLE + columns, share, mask=real)
            ratio = tl.exp(-0.5 * (value - tl.load(start + model * VISIBLE + columns)))
            tl.store(ratios + model * VISIBLE + columns, ratio, mask=real)


@triton.jit
def _moments(states, columns, mu, n, VISIBLE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sums of the deviations and squared deviations over the first n rows of the given columns."""
    total, squares = tl.zeros([GATHERED], tl.float32), tl.zeros([GATHERED], tl.float32)
    for row in range(0, MOST, BLOCK):
        rows = row + tl.arange(0, BLOCK)
        inside = (rows < n)[:, None]
        x = fresh(states + rows[:, None] * VISIBLE + columns[None, :], inside).to(tl.float32)
        deviation = tl.where(inside, x - mu[None, :], 0.0)
        total += tl.sum(deviation, 0)
        squares += tl.sum(deviation * deviation, 0)
    return total, squares
