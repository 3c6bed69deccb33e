r"""The Triton kernels of one update of contrastive divergence, for matrices with Kronecker couplings.

Parameters lie in one flat array a model, `STRIDE` numbers from one model's to the next: for each visible layer its
factors U (R, K, I) and V (R, L, J) and its bias (I, J), then the hidden bias (K, L). Layers are in *units of their
statistic around the offset* (Gaussian: :math:`x / s - \mu`; Bernoulli: the values), in which every kind of unit has
mean :math:`g(b + f)` with g the logistic function or nothing; :mod:`mvrbm.learning.paths.triton` converts.

* :func:`small_step` adds up the gradient of one layer whose four sizes fit a tile each: one sample after another, all
  products in registers.
* :func:`tiled_step` does so for any number of layers and any size, tile by tile, states kept in scratch memory.
* :func:`apply` makes the step from the gradient to new parameters.

A launch takes batch number `batch` of a pass. Random numbers are a function of a model's key, of the number of the
update, the sample, the draw and the entry (Philox), or, in tests, are read from memory, `RECORDED` of them an
update. With `PDL` a launch begins while the former one ends (programmatic dependent launch), and waits for it
before it reads what that one wrote.
"""

# mypy: ignore-errors
# ruff: noqa: E741
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

# Columns of the table of rates, one row a model.
N_RATES = tl.constexpr(5)  # factors' rate, biases' rate, momentum, weight decay, 1 / rate decay


@triton.jit
def _uniform(key, update, sample, draw, base, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Uniform numbers between 0 and 1, neither of them included, (ROWS, COLS): Philox gives four of them a call."""
    # Numbers of one call go to four corners, 8 rows apart and side by side: where a thread has what tensor cores give.
    DEEP: tl.constexpr = 8 if ROWS >= 16 else ROWS // 2
    rows = tl.arange(0, ROWS // 2)[:, None]
    columns = tl.arange(0, COLS // 2)[None, :]
    entry = (base + rows * (COLS // 2) + columns).to(tl.uint32)
    nothing = entry * 0
    a, b, c, d = tl.philox(
        key,
        entry,
        nothing + sample.to(tl.uint32),
        nothing + update.to(tl.uint32),
        nothing + draw,
    )
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), [ROWS // 2 // DEEP, DEEP, COLS // 2, 2, 2])
    words = tl.reshape(tl.permute(words, [0, 3, 1, 2, 4]), [ROWS, COLS])
    return (words >> 9).to(tl.int32).to(tl.float32) * (1.0 / 8388608.0) + (1.0 / 16777216.0)


@triton.jit
def _normal(key, update, sample, draw, base, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Standard normal numbers, (ROWS, COLS), by Box and Muller."""
    radius = _uniform(key, update, sample, draw, base, ROWS, COLS)
    angle = _uniform(key, update, sample, draw + 0x40000000, base, ROWS, COLS)
    return tl.sqrt(-2.0 * tl.log(radius)) * tl.cos(6.283185307179586 * angle)


@triton.jit
def _odds(field):
    """One over the logistic function."""
    return 1.0 + tl.exp2(-1.4426950408889634 * field)


@triton.jit
def _mean(field, GAUSSIAN: tl.constexpr):
    """Mean of a layer in a field that includes its bias."""
    if not GAUSSIAN:
        root = tl.rsqrt(_odds(field))  # one instruction, where a division takes eight
        field = root * root
    return field


@triton.jit
def _draw(field, rng, GAUSSIAN: tl.constexpr):
    """Draw a layer in a field that includes its bias."""
    if GAUSSIAN:
        return field + rng
    # One where the noise is below the logistic function. By the sign bit: from a comparison, whose result has one
    # bit, the compiler concludes that products of what follows have operands of eight, and lays them out for that.
    short = rng * _odds(field) - 1.0
    return ((short.to(tl.int32, bitcast=True) >> 31) & 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def _rng(key, update, sample, draw, recorded, at, inside, DRAWN: tl.constexpr, AREA: tl.constexpr,
           GAUSSIAN: tl.constexpr, RECORDED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Numbers for one draw of a layer, of which `DRAWN` samples have one: recorded, or fresh ones of its kind."""
    if RECORDED:
        return tl.load(recorded + sample * AREA + at, mask=inside & (sample < DRAWN), other=0.5)
    if sample < DRAWN:
        if GAUSSIAN:
            rng = _normal(key, update, sample, draw, 0, ROWS, COLS)
        else:
            rng = _uniform(key, update, sample, draw, 0, ROWS, COLS)
    else:
        rng = tl.zeros([ROWS, COLS], tl.float32)
    return rng


@triton.jit
def _sample(data, order, scales, shifts, i, n_valid, at, inside, AREA: tl.constexpr, BYTE_SCALE: tl.constexpr,
            GAUSSIAN: tl.constexpr):  # fmt: skip
    """Sample i of a batch, in the units of its statistic around its offset; zeros beyond the batch's end."""
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
def _schatten(matrix):
    """Squared Schatten 8-norm: what `couplings.base.squared_norms` computes."""
    gram = tl.dot(matrix, tl.trans(matrix), input_precision="ieee")
    gram = tl.dot(gram, gram, input_precision="ieee")
    return tl.sqrt(tl.sqrt(tl.sum(gram * gram)))


@triton.jit(do_not_specialize=["batch"])
def apply(
    weights, momenta, gradients, new_weights, new_momenta, gains, gain_of, multiplier, rates, clock, batch,
    SIZE: tl.constexpr, STRIDE: tl.constexpr, N_GAINS: tl.constexpr, NORMALISED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Make the step of batch `batch` from the gradient, and set the gradient to zero."""
    model = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    which = tl.load(gain_of + at, mask=inside, other=-1)  # number of the factor, -1 for a bias
    factor = which >= 0
    factor_rate, bias_rate, keep, decay = _rates_of(rates, model, clock, batch)
    at += model * STRIDE
    scale = tl.load(multiplier + at, mask=inside, other=0.0)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    value, momentum, gradient = (
        _fresh(weights + at, inside),
        _fresh(momenta + at, inside),
        _fresh(gradients + at, inside),
    )
    gradient *= scale
    if NORMALISED:
        gain = tl.where(factor, _fresh(gains + model * N_GAINS + which, factor), 1.0)
        gradient = gradient / tl.maximum(gain, 1e-12)
    value, momentum = _step(
        value, momentum, gradient, tl.where(factor, factor_rate, bias_rate), keep, tl.where(factor, decay, 0.0)
    )
    tl.store(new_weights + at, value, mask=inside)
    tl.store(new_momenta + at, momentum, mask=inside)
    tl.store(gradients + at, tl.zeros([BLOCK], tl.float32), mask=inside)


@triton.jit
def _fresh(at, inside):
    """What the launch before this one wrote, zero outside.

    Not from a multiprocessor's own cache. A launch that begins while the one before runs finds there what that one
    has read, which may be out of date.
    """
    return tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def _rates_of(rates, model, clock, batch):
    """Rates of factors and biases after so many batches, momentum and weight decay."""
    rates += model * N_RATES
    falling = 1.0 / tl.sqrt(1.0 + (tl.load(clock) + batch).to(tl.float32) * tl.load(rates + 4))
    return tl.load(rates) * falling, tl.load(rates + 1) * falling, tl.load(rates + 2), tl.load(rates + 3)


@triton.jit
def _step(value, momentum, gradient, rate, keep, decay):
    """Parameters and their momentum after a step, as torch.optim.SGD makes it."""
    momentum = keep * momentum + gradient + decay * value
    return value - rate * momentum, momentum


@triton.jit(do_not_specialize=["batch", "n_valid"])
def small_step(
    data, order, weights, momenta, pending, gradients, new_weights, new_momenta, cleared, gains, new_gains,
    multiplier, rates, clock, seeds, chains, recorded, load_scale, load_shift,
    batch, n_valid, order_stride, data_stride,
    N: tl.constexpr, CHAINS: tl.constexpr, RANK: tl.constexpr, SAMPLES: tl.constexpr, STRIDE: tl.constexpr,
    I: tl.constexpr, J: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    STEPS: tl.constexpr, PERSISTENT: tl.constexpr, VISIBLE_GAUSSIAN: tl.constexpr, HIDDEN_GAUSSIAN: tl.constexpr,
    BYTE_SCALE: tl.constexpr, NORMALISED: tl.constexpr, RECORDED: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr, PENDING: tl.constexpr, KEEPER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add one batch's gradient up, for one layer whose sizes fit a tile.

    Program (p, s) takes `SAMPLES` samples of model s, one after another, and keeps their gradient in registers.

    With `PENDING`, a step is owed: every program makes it for itself, from `weights`, `momenta` and the gradient
    `pending` of the batch before. Where there is a `KEEPER`, the last program along the first axis, it takes no sample:
    it writes what came of that step to `new_weights` and `new_momenta`, sets `cleared`, the next launch's gradient, to
    zero, and finds the gains of normalised steps. Others read the old values meanwhile, so the new go elsewhere.

    Matrices go from product to product in an order that leaves them where tensor cores put them: what the next
    product sums over is what a thread holds side by side, X' and Y' being the second operand of every product but
    those of the gradient. Beyond a layer's edges states are whatever they are: factors are zero there.
    """
    tl.static_assert(RANK == 1 or not PENDING, "steps that are owed are made for one product alone")
    program = tl.program_id(0)
    model = tl.program_id(1)
    AT_V: tl.constexpr = RANK * K * I
    AT_B: tl.constexpr = RANK * (K * I + L * J)
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
    # What does not depend on the parameters comes before the wait for the former launch: rates, data and noise.
    factor_rate, bias_rate, keep, decay = _rates_of(rates, model, clock, batch - 1)
    scale_b, scale_c = 1.0, 1.0
    if VISIBLE_GAUSSIAN:
        scale_b = tl.load(multiplier + AT_B + at_x, mask=in_x, other=0.0)
    if HIDDEN_GAUSSIAN:
        scale_c = tl.load(multiplier + AT_C + at_y, mask=in_y, other=0.0)
    if SAMPLES == 1:
        x0 = _sample(data, order, load_scale, load_shift, i, n_valid, at_x, in_x, I * J, BYTE_SCALE, VISIBLE_GAUSSIAN)
        to_y = _rng(key, update, i, 0, recorded, at_y, in_y, ROWS, K * L, HIDDEN_GAUSSIAN, RECORDED, BK, BL)
        to_x = _rng(
            key, update, i, 1, recorded + ROWS * K * L, at_x, in_x, ROWS, I * J, VISIBLE_GAUSSIAN, RECORDED, BI, BJ
        )
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    scale_u, scale_v = 1.0, 1.0
    if NORMALISED:
        scale_u = 1.0 / tl.maximum(tl.load(gains + model * 2, cache_modifier=".cg"), 1e-12)
        scale_v = 1.0 / tl.maximum(tl.load(gains + model * 2 + 1, cache_modifier=".cg"), 1e-12)
    if program < tl.num_programs(0) - (1 if KEEPER else 0):
        U, _ = _parameter(now, moving, owed, at_u, in_u, scale_u, factor_rate, keep, decay, PENDING)
        V, _ = _parameter(now, moving, owed, AT_V + at_v, in_v, scale_v, factor_rate, keep, decay, PENDING)
        B, _ = _parameter(now, moving, owed, AT_B + at_x, in_x, scale_b, bias_rate, keep, 0.0, PENDING)
        C, _ = _parameter(now, moving, owed, AT_C + at_y, in_y, scale_c, bias_rate, keep, 0.0, PENDING)
        u, size_u = _operand(U, HALVES)
        v, size_v = _operand(V, HALVES)
        size = _both(size_u, size_v)
        slope_u, slope_v = tl.zeros([BK, BI], tl.float32), tl.zeros([BL, BJ], tl.float32)
        slope_b, slope_c = tl.zeros([BI, BJ], tl.float32), tl.zeros([BK, BL], tl.float32)
        # A chain counts as `weight` samples, a short batch in proportion. None counts more than 1 until the end, for
        # the sake of numbers of 16 bits.
        weight, largest = 1.0, 1.0
        if PERSISTENT:
            weight = n_valid.to(tl.float32) / CHAINS
            largest = tl.maximum(weight, 1.0)
        for s in range(SAMPLES):
            if SAMPLES > 1:
                i = program * SAMPLES + s
                x0 = _sample(
                    data, order, load_scale, load_shift, i, n_valid, at_x, in_x, I * J, BYTE_SCALE, VISIBLE_GAUSSIAN
                )
            x0_t = tl.trans(x0).to(OPERAND)
            field = _up(x0_t, u, v, size, C, PRECISION)
            field = _more_up(field, x0_t, now, at_u, in_u, at_v, in_v, RANK, K * I, L * J, HALVES, PRECISION)
            positive = tl.where(i < n_valid, 1.0 / largest, 0.0)
            h0 = -positive * _mean(field, HIDDEN_GAUSSIAN)
            x1, x1_t = x0, x0_t
            if PERSISTENT:
                state = chains + (model * CHAINS + i).to(tl.int64) * (I * J) + at_x
                x1 = _fresh(state, in_x & (i < CHAINS))
                x1_t = tl.trans(x1).to(OPERAND)
                field = _up(x1_t, u, v, size, C, PRECISION)
                field = _more_up(field, x1_t, now, at_u, in_u, at_v, in_v, RANK, K * I, L * J, HALVES, PRECISION)
                negative = tl.where(i < CHAINS, weight / largest, 0.0)
            else:
                negative = positive
            for step in range(STEPS):
                here = recorded + step * ROWS * (K * L + I * J)
                if SAMPLES > 1 or step > 0:
                    to_y = _rng(
                        key, update, i, 2 * step, here, at_y, in_y, ROWS, K * L, HIDDEN_GAUSSIAN, RECORDED, BK, BL
                    )
                y = _draw(field, to_y, HIDDEN_GAUSSIAN)
                y_t = tl.trans(y).to(OPERAND)
                towards = _down(y_t, u, v, size, B, PRECISION)
                for r in range(1, RANK):
                    u_r, v_r, size_u_r, size_v_r = _term(now, r, at_u, in_u, at_v, in_v, RANK, K * I, L * J, HALVES)
                    towards = _down(y_t, u_r, v_r, _both(size_u_r, size_v_r), towards, PRECISION)
                if SAMPLES > 1 or step > 0:
                    to_x = _rng(
                        key, update, i, 2 * step + 1, here + ROWS * K * L, at_x, in_x, ROWS, I * J, VISIBLE_GAUSSIAN,
                        RECORDED, BI, BJ,
                    )  # fmt: skip
                x1 = _draw(towards, to_x, VISIBLE_GAUSSIAN)
                x1_t = tl.trans(x1).to(OPERAND)
                field = _up(x1_t, u, v, size, C, PRECISION)
                field = _more_up(field, x1_t, now, at_u, in_u, at_v, in_v, RANK, K * I, L * J, HALVES, PRECISION)
            h1 = negative * _mean(field, HIDDEN_GAUSSIAN)
            if PERSISTENT:
                tl.store(state, x1, mask=in_x & (i < CHAINS))
            slope_b += negative * x1 - positive * x0
            slope_c += h0 + h1
            slope_u, slope_v = _add_slopes(x0, x0_t, h0, u, v, slope_u, slope_v, PRECISION)
            slope_u, slope_v = _add_slopes(x1, x1_t, h1, u, v, slope_u, slope_v, PRECISION)
            for r in range(1, RANK):
                u_r, v_r, size_u_r, size_v_r = _term(now, r, at_u, in_u, at_v, in_v, RANK, K * I, L * J, HALVES)
                more_u, more_v = tl.zeros([BK, BI], tl.float32), tl.zeros([BL, BJ], tl.float32)
                more_u, more_v = _add_slopes(x0, x0_t, h0, u_r, v_r, more_u, more_v, PRECISION)
                more_u, more_v = _add_slopes(x1, x1_t, h1, u_r, v_r, more_u, more_v, PRECISION)
                tl.atomic_add(mine + r * K * I + at_u, more_u * (largest * size_v_r / N), mask=in_u, sem="relaxed")
                tl.atomic_add(
                    mine + AT_V + r * L * J + at_v, more_v * (largest * size_u_r / N), mask=in_v, sem="relaxed"
                )
        tl.atomic_add(mine + AT_B + at_x, slope_b * (largest / N), mask=in_x, sem="relaxed")
        tl.atomic_add(mine + AT_C + at_y, slope_c * (largest / N), mask=in_y, sem="relaxed")
        tl.atomic_add(mine + at_u, slope_u * (largest * size_v / N), mask=in_u, sem="relaxed")
        tl.atomic_add(mine + AT_V + at_v, slope_v * (largest * size_u / N), mask=in_v, sem="relaxed")
    else:
        U, of_u = _parameter(now, moving, owed, at_u, in_u, scale_u, factor_rate, keep, decay, PENDING)
        V, of_v = _parameter(now, moving, owed, AT_V + at_v, in_v, scale_v, factor_rate, keep, decay, PENDING)
        if PENDING:
            B, of_b = _parameter(now, moving, owed, AT_B + at_x, in_x, scale_b, bias_rate, keep, 0.0, PENDING)
            C, of_c = _parameter(now, moving, owed, AT_C + at_y, in_y, scale_c, bias_rate, keep, 0.0, PENDING)
            new_weights += model * STRIDE
            new_momenta += model * STRIDE
            cleared += model * STRIDE
            _keep(new_weights, new_momenta, cleared, at_u, in_u, U, of_u)
            _keep(new_weights, new_momenta, cleared, AT_V + at_v, in_v, V, of_v)
            _keep(new_weights, new_momenta, cleared, AT_B + at_x, in_x, B, of_b)
            _keep(new_weights, new_momenta, cleared, AT_C + at_y, in_y, C, of_c)
        if NORMALISED:
            norm_u, norm_v = _schatten(U), _schatten(V)
            for r in range(1, RANK):
                norm_u += _schatten(_factor(now, r, K * I, at_u, in_u))
                norm_v += _schatten(_factor(now + AT_V, r, L * J, at_v, in_v))
            tl.store(new_gains + model * 2, norm_v)
            tl.store(new_gains + model * 2 + 1, norm_u)


@triton.jit
def _parameter(weights, momenta, gradients, at, inside, scale, rate, keep, decay, PENDING: tl.constexpr):
    """Parameters and their momentum, after the step that is owed them if one is."""
    value = _fresh(weights + at, inside)
    momentum = value
    if PENDING:
        momentum = _fresh(momenta + at, inside)
        gradient = _fresh(gradients + at, inside) * scale
        value, momentum = _step(value, momentum, gradient, rate, keep, decay)
    return value, momentum


@triton.jit
def _keep(weights, momenta, cleared, at, inside, value, momentum):
    """Write parameters and their momentum, and set a gradient to zero."""
    tl.store(weights + at, value, mask=inside)
    tl.store(momenta + at, momentum, mask=inside)
    tl.store(cleared + at, tl.zeros_like(value), mask=inside)


@triton.jit
def _factor(factors, r, AREA: tl.constexpr, at, inside):
    """Factor r of several, zero beyond its edges.

    A plain load, since it is made several times. Here steps have launches of their own, which begin when all have ended
    that have read the old factors.
    """
    return tl.load(factors + r * AREA + at, mask=inside, other=0.0)


@triton.jit
def _operand(factor, HALVES: tl.constexpr):
    """A factor as products take it, and what their results are multiplied by for it.

    Numbers of 16 bits end at 65,504, which a training that is about to diverge and to recover goes beyond. So factors
    are divided by their largest entry; other operands are at most a tile's width then.
    """
    size = 1.0
    if HALVES:
        size = tl.maximum(tl.max(tl.abs(factor)), 1e-30)
        factor = (factor * (1.0 / size)).to(tl.float16)
    return factor, size


@triton.jit
def _term(factors, r, at_u, in_u, at_v, in_v, RANK: tl.constexpr, AREA_U: tl.constexpr, AREA_V: tl.constexpr,
          HALVES: tl.constexpr):  # fmt: skip
    """Both factors of product r as operands, and their sizes."""
    u, size_u = _operand(_factor(factors, r, AREA_U, at_u, in_u), HALVES)
    v, size_v = _operand(_factor(factors + RANK * AREA_U, r, AREA_V, at_v, in_v), HALVES)
    return u, v, size_u, size_v


@triton.jit
def _both(size_u, size_v):
    """Product of two sizes that is finite: a field that is zero is to stay zero."""
    return tl.minimum(size_u * size_v, 3e38)


@triton.jit
def _up(x_t, u, v, size, field, PRECISION: tl.constexpr):
    """Hidden field plus U X V', from X transposed."""
    half = tl.trans(tl.dot(v, x_t, input_precision=PRECISION)).to(v.dtype)  # X V', (I, L)
    return field + size * tl.dot(u, half, input_precision=PRECISION)


@triton.jit
def _down(y_t, u, v, size, field, PRECISION: tl.constexpr):
    """Visible field plus U' Y V, from Y transposed."""
    half = tl.trans(tl.dot(tl.trans(v), y_t, input_precision=PRECISION)).to(v.dtype)  # Y V, (K, J)
    return field + size * tl.dot(tl.trans(u), half, input_precision=PRECISION)


@triton.jit
def _add_slopes(x, x_t, h, u, v, slope_u, slope_v, PRECISION: tl.constexpr):
    """Add the gradients of U, (H V) X', and of V, (H' U) X."""
    h = h.to(v.dtype)
    half = tl.dot(h, v, input_precision=PRECISION).to(v.dtype)  # (K, J)
    slope_u = tl.dot(half, x_t, acc=slope_u, input_precision=PRECISION)
    half = tl.dot(tl.trans(h), u, input_precision=PRECISION).to(v.dtype)  # (L, I)
    return slope_u, tl.dot(half, x.to(v.dtype), acc=slope_v, input_precision=PRECISION)


@triton.jit
def _more_up(field, x_t, factors, at_u, in_u, at_v, in_v, RANK: tl.constexpr, AREA_U: tl.constexpr,
             AREA_V: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add the terms of a hidden field beyond the first, U_r X V_r'."""
    for r in range(1, RANK):
        u_r, v_r, size_u, size_v = _term(factors, r, at_u, in_u, at_v, in_v, RANK, AREA_U, AREA_V, HALVES)
        field = _up(x_t, u_r, v_r, _both(size_u, size_v), field, PRECISION)
    return field


@triton.jit
def _product(
    a, a_row, a_column, b, b_row, b_column, c, width, M, N, K,
    MODE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Product of matrices in memory, tile by tile: c = a b, c += a b, or c += a b by atomic additions."""
    r = tl.arange(0, BLOCK)
    for m in range(0, M, BLOCK):
        rows = (m + r)[:, None]
        for n in range(0, N, BLOCK):
            columns = (n + r)[None, :]
            total = tl.zeros([BLOCK, BLOCK], tl.float32)
            for k in range(0, K, BLOCK):
                left = tl.load(
                    a + rows * a_row + (k + r)[None, :] * a_column,
                    mask=(rows < M) & ((k + r)[None, :] < K), other=0.0,
                )  # fmt: skip
                right = tl.load(
                    b + (k + r)[:, None] * b_row + columns * b_column,
                    mask=((k + r)[:, None] < K) & (columns < N), other=0.0,
                )  # fmt: skip
                total = tl.dot(left, right, acc=total, input_precision=PRECISION)
            inside = (rows < M) & (columns < N)
            at = c + rows * width + columns
            if MODE == "atomic":
                tl.atomic_add(at, total, mask=inside, sem="relaxed")
            elif MODE == "add":
                tl.store(at, total + tl.load(at, mask=inside, other=0.0), mask=inside)
            else:
                tl.store(at, total, mask=inside)
    tl.debug_barrier()


@triton.jit
def _copy(source, target, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < SIZE, other=0.0), mask=at < SIZE)
    tl.debug_barrier()


@triton.jit
def _means(source, target, weight, SIZE: tl.constexpr, GAUSSIAN: tl.constexpr, BLOCK: tl.constexpr):
    """Weighted means of a layer from fields that include its bias."""
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        field = tl.load(source + at, mask=at < SIZE, other=0.0)
        tl.store(target + at, weight * _mean(field, GAUSSIAN), mask=at < SIZE)
    tl.debug_barrier()


@triton.jit
def _draws(
    source, target, key, update, sample, draw, recorded,
    SIZE: tl.constexpr, GAUSSIAN: tl.constexpr, RECORDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draw a layer from fields that include its bias."""
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < SIZE
        if RECORDED:
            rng = tl.load(recorded + at, mask=inside, other=0.0)
        elif GAUSSIAN:
            rng = tl.reshape(_normal(key, update, sample, draw, start // 4, 2, BLOCK // 2), [BLOCK])
        else:
            rng = tl.reshape(_uniform(key, update, sample, draw, start // 4, 2, BLOCK // 2), [BLOCK])
        field = tl.load(source + at, mask=inside, other=0.0)
        tl.store(target + at, _draw(field, rng, GAUSSIAN), mask=inside)
    tl.debug_barrier()


@triton.jit
def _add_up(
    x, U, half, field, I: tl.constexpr, J: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one layer sends to the hidden layer, sum U_r X V_r'."""
    V = U + RANK * K * I
    for r in range(RANK):
        _product(x, J, 1, V + r * L * J, 1, J, half, L, I, L, J, "set", BLOCK, PRECISION)
        _product(U + r * K * I, I, 1, half, L, 1, field, L, K, L, I, "add", BLOCK, PRECISION)


@triton.jit
def _upwards(
    x, bias, factors, half, field, K: tl.constexpr, L: tl.constexpr, LAYERS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Hidden field with bias, from the states of all layers, one after another in memory."""
    _copy(bias, field, K * L, 1024)
    for m in tl.static_range(len(LAYERS)):
        _add_up(x + LAYERS[m][5], factors + LAYERS[m][4], half, field, LAYERS[m][0], LAYERS[m][1], LAYERS[m][2], K, L,
                BLOCK, PRECISION)  # fmt: skip


@triton.jit
def _send_down(
    y, U, half, state, I: tl.constexpr, J: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Field of one layer with bias, B + sum U_r' Y V_r."""
    V = U + RANK * K * I
    _copy(V + RANK * L * J, state, I * J, 1024)
    for r in range(RANK):
        _product(U + r * K * I, 1, I, y, L, 1, half, L, I, L, K, "set", BLOCK, PRECISION)
        _product(half, L, 1, V + r * L * J, J, 1, state, J, I, J, L, "add", BLOCK, PRECISION)


@triton.jit
def _slopes(
    x, h, weight, U, to_u, half, I: tl.constexpr, J: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr,
    L: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradient that states x and weighted hidden means h make to one layer's parameters."""
    V = U + RANK * K * I
    to_v = to_u + RANK * K * I
    for r in range(RANK):
        _product(x, J, 1, V + r * L * J, 1, J, half, L, I, L, J, "set", BLOCK, PRECISION)
        _product(h, L, 1, half, 1, L, to_u + r * K * I, I, K, I, L, "atomic", BLOCK, PRECISION)
        _product(U + r * K * I, 1, I, h, L, 1, half, L, I, L, K, "set", BLOCK, PRECISION)
        _product(half, 1, L, x, J, 1, to_v + r * L * J, J, L, J, I, "atomic", BLOCK, PRECISION)
    _add_all(x, to_v + RANK * L * J, weight, I * J)


@triton.jit
def _all_slopes(
    x, h, weight, factors, slopes, half, SIZE: tl.constexpr, K: tl.constexpr, L: tl.constexpr, LAYERS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradient that states x of all layers and weighted hidden means h make to every parameter."""
    for m in tl.static_range(len(LAYERS)):
        _slopes(x + LAYERS[m][5], h, weight, factors + LAYERS[m][4], slopes + LAYERS[m][4], half, LAYERS[m][0],
                LAYERS[m][1], LAYERS[m][2], K, L, BLOCK, PRECISION)  # fmt: skip
    _add_all(h, slopes + SIZE - K * L, 1.0, K * L)


@triton.jit
def _add_all(source, target, weight, SIZE: tl.constexpr):
    for start in range(0, SIZE, 1024):
        at = start + tl.arange(0, 1024)
        value = weight * tl.load(source + at, mask=at < SIZE, other=0.0)
        tl.atomic_add(target + at, value, mask=at < SIZE, sem="relaxed")


@triton.jit
def _load_states(source, target, scales, shifts, factor, SIZE: tl.constexpr):
    """Bring one layer of a sample into the units of its statistic around its offset."""
    for start in range(0, SIZE, 1024):
        at = start + tl.arange(0, 1024)
        inside = at < SIZE
        value = tl.load(source + at, mask=inside, other=0).to(tl.float32) * factor
        scale = tl.load(scales + at, mask=inside, other=0.0)
        shift = tl.load(shifts + at, mask=inside, other=0.0)
        tl.store(target + at, value * scale - shift, mask=inside)


@triton.jit(do_not_specialize=["batch", "n_valid"])
def tiled_step(
    data, order, weights, gradients, clock, seeds, chains, recorded, scratch, load_scale, load_shift,
    batch, n_valid, order_stride,
    N: tl.constexpr, CHAINS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, STATES: tl.constexpr,
    HALF: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, LAYERS: tl.constexpr, HIDDEN_GAUSSIAN: tl.constexpr,
    STEPS: tl.constexpr, PERSISTENT: tl.constexpr, SHARED_DATA: tl.constexpr, RECORDED: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one batch's gradient up, for layers of any size and number.

    `LAYERS` has, for each layer: I, J, rank, whether it is Gaussian, where its parameters begin, where its
    states begin among the `STATES` entries of a sample, and what its data is multiplied by. Program (i, s)
    has scratch memory for two states, three hidden arrays and one half-way product of `HALF` entries.
    """
    i = tl.program_id(0)
    model = tl.program_id(1)
    update = tl.load(clock) + batch
    key = tl.load(seeds + model)
    mine = scratch + (model * tl.num_programs(0) + i).to(tl.int64) * (2 * STATES + 3 * K * L + HALF)
    x0, x1 = mine, mine + STATES
    field = x1 + STATES
    y, h = field + K * L, field + 2 * K * L
    half = field + 3 * K * L
    now = weights + model * STRIDE
    bias = now + SIZE - K * L
    slopes = gradients + model * STRIDE
    load_scale += model * STATES
    load_shift += model * STATES
    if i < n_valid:
        row = tl.load(order + model * order_stride + batch * N + i).to(tl.int64)
        if not SHARED_DATA:
            row += model * order_stride
        for m in tl.static_range(len(LAYERS)):
            _load_states(data[m] + row * (LAYERS[m][0] * LAYERS[m][1]), x0 + LAYERS[m][5], load_scale + LAYERS[m][5],
                         load_shift + LAYERS[m][5], LAYERS[m][6], LAYERS[m][0] * LAYERS[m][1])  # fmt: skip
        tl.debug_barrier()
        _upwards(x0, bias, now, half, field, K, L, LAYERS, BLOCK, PRECISION)
        _means(field, h, -1.0 / N, K * L, HIDDEN_GAUSSIAN, 1024)
        _all_slopes(x0, h, -1.0 / N, now, slopes, half, SIZE, K, L, LAYERS, BLOCK, PRECISION)
    ROWS: tl.constexpr = CHAINS if PERSISTENT else N
    rows = n_valid
    weight = 1.0 / N
    if PERSISTENT:
        rows = CHAINS
        weight = n_valid.to(tl.float32) / (N * CHAINS)
        x1 = chains + (model * CHAINS + i).to(tl.int64) * STATES
    if i < rows:
        if PERSISTENT:
            _upwards(x1, bias, now, half, field, K, L, LAYERS, BLOCK, PRECISION)
        for step in range(STEPS):
            draw = (step * (len(LAYERS) + 1) + tl.full([], 0, tl.int32)).to(tl.uint32)
            block = recorded + batch * RECORDED + step * ROWS * (K * L + STATES)
            _draws(field, y, key, update, i, draw, block + i * K * L, K * L, HIDDEN_GAUSSIAN, RECORDED, 1024)
            for m in tl.static_range(len(LAYERS)):
                _send_down(y, now + LAYERS[m][4], half, x1 + LAYERS[m][5], LAYERS[m][0], LAYERS[m][1], LAYERS[m][2],
                           K, L, BLOCK, PRECISION)  # fmt: skip
                numbers = block + ROWS * (K * L + LAYERS[m][5]) + i * (LAYERS[m][0] * LAYERS[m][1])
                _draws(x1 + LAYERS[m][5], x1 + LAYERS[m][5], key, update, i, draw + 1 + m, numbers,
                       LAYERS[m][0] * LAYERS[m][1], LAYERS[m][3], RECORDED, 1024)  # fmt: skip
            _upwards(x1, bias, now, half, field, K, L, LAYERS, BLOCK, PRECISION)
        _means(field, h, weight, K * L, HIDDEN_GAUSSIAN, 1024)
        _all_slopes(x1, h, weight, now, slopes, half, SIZE, K, L, LAYERS, BLOCK, PRECISION)


def n_programs(size: int, block: int) -> int:
    """Blocks that cover a flat array."""
    return int(triton.cdiv(size, block))


def tile_of(size: int) -> int:
    """Smallest power of two that a product takes and that a mode of this size fits into."""
    return max(16, int(triton.next_power_of_2(size)))
