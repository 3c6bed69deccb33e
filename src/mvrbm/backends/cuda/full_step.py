r"""Triton kernels for the last part of an update in `full_kernels`: gradients for the factors, and the step.

`contract` computes the gradients for the factors from the gradient for their full matrix. `build` performs the step and
forms the new full matrices. If layers are centered, `compensate` then corrects the biases.
"""

# mypy: ignore-errors
# ruff: noqa: E741
import triton
import triton.language as tl

from mvrbm.backends.cuda.full_kernels import (
    COLUMNS,
    END,
    FACTORS,
    FIRST,
    FULL,
    GAINS,
    GATHERED,
    LEARNS,
    PITCH,
    PROGRAMS,
    RANK,
    ROWS,
    WIDTH,
    copy_batch,
    place_at,
)
from mvrbm.backends.cuda.overlap import after_previous, fresh, wait
from mvrbm.backends.cuda.step_kernels import factor_at, keep_norm, keep_step, power_of, rates_of, stepped


@triton.jit
def contract(
    weights, gradient, STRIDE: tl.constexpr, FACTORS_AT: tl.constexpr, FULL_AT: tl.constexpr, KI: tl.constexpr,
    LJ: tl.constexpr, R: tl.constexpr, RANKS: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute gradients for U (R, K * I) and V (R, L * J) from the gradient for their full matrix (K * I, L * J).

    The results are added to `gradient`.
    """
    model = tl.program_id(2).to(tl.int64)
    a = tl.program_id(0) * BM + tl.arange(0, BM)
    b = tl.program_id(1) * BN + tl.arange(0, BN)
    r = tl.arange(0, RANKS)
    u_at, in_u = r[:, None] * KI + a[None, :], (r < R)[:, None] & (a < KI)[None, :]
    v_at, in_v = R * KI + r[:, None] * LJ + b[None, :], (r < R)[:, None] & (b < LJ)[None, :]
    weights += model * STRIDE + FACTORS_AT
    gradient += model * STRIDE
    at = gradient + FULL_AT + a[:, None] * LJ + b[None, :]
    inside = (a < KI)[:, None] & (b < LJ)[None, :]
    # The factors were written before the previous launch, so they can be loaded before the wait.
    U, V = fresh(weights + u_at, in_u), fresh(weights + v_at, in_v)
    after_previous(PDL)
    G = fresh(at, inside)
    gradient += FACTORS_AT
    of_u = tl.dot(V, tl.trans(G), input_precision=PRECISION)
    tl.atomic_add(gradient + u_at, of_u, mask=in_u, sem="relaxed")
    of_v = tl.dot(U, G, input_precision=PRECISION)
    tl.atomic_add(gradient + v_at, of_v, mask=in_v, sem="relaxed")


@triton.jit(do_not_specialize=["batch", "n_next"])
def build(
    weights, momenta, gradient, gains, new_weights, new_momenta, cleared, new_gains, multiplier, rates, weight, data,
    order, states, visible_sums, hidden_sums, clock, ratios, squares, batch, n_next, order_stride, data_stride,
    N: tl.constexpr, ALL_ROWS: tl.constexpr, HIDDEN: tl.constexpr, VISIBLE: tl.constexpr, K: tl.constexpr,
    L: tl.constexpr, HIDDEN_PITCH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, VISIBLE_BIAS: tl.constexpr,
    N_GAINS: tl.constexpr, LAYERS: tl.constexpr, STEP: tl.constexpr, NORMALIZED: tl.constexpr, CENTERED: tl.constexpr,
    TERMS: tl.constexpr, PRECISION: tl.constexpr, BG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    EDGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Perform a step, form the full matrices of all couplings as operands of products, and copy the next batch.

    If `STEP` is set, every program performs the step for the parameters that it requires. The first program that
    requires a parameter writes the result to `new_weights` and `new_momenta`, and sets its entry in `cleared` (the next
    gradient) to zero. Separate buffers are required because other programs still read the old values. The norms of the
    new factors are written to `new_gains`. The next batch is batch number `batch` and has `n_next` samples. If `n_next`
    is zero, there is no next batch. The kernel also resets the sums over hidden means and chains to zero.
    """
    program, model = tl.program_id(0), tl.program_id(1).to(tl.int64)
    weight += model * HIDDEN * VISIBLE
    if program < VISIBLE // GATHERED:
        # No running launch still reads the previous batch (see how the backend launches `vary`).
        if n_next > 0:
            copy_batch(
                data, order, states, visible_sums, clock, batch, n_next, order_stride, data_stride, program, model, N,
                ALL_ROWS, VISIBLE, BG, CENTERED,
            )  # fmt: skip
        columns = program * GATHERED + tl.arange(0, GATHERED)
        nothing = tl.zeros([GATHERED], tl.float32)
        tl.store(visible_sums + model * (2 * VISIBLE) + VISIBLE + columns, nothing)
        for start in range(0, 2 * HIDDEN, VISIBLE):
            tl.store(hidden_sums + model * (2 * HIDDEN) + start + columns, nothing, mask=start + columns < 2 * HIDDEN)
    factor_rate, bias_rate, keep, decay = rates_of(rates, model, clock, batch - 1)
    first = model * STRIDE
    wait(PDL)
    gains += model * N_GAINS
    new_gains += model * N_GAINS
    for m in tl.static_range(len(LAYERS)):
        if (program >= LAYERS[m][PROGRAMS]) & (program < LAYERS[m][END]):
            I: tl.constexpr = LAYERS[m][ROWS]
            J: tl.constexpr = LAYERS[m][COLUMNS]
            R: tl.constexpr = LAYERS[m][RANK]
            power = power_of(squares + model * VISIBLE, LAYERS[m][FIRST], LAYERS[m][WIDTH], LAYERS[m][LEARNS])
            own = program - LAYERS[m][PROGRAMS]
            if R > 0:
                KI: tl.constexpr = K * I
                LJ: tl.constexpr = L * J
                ACROSS: tl.constexpr = (LJ + BN - 1) // BN
                a = own // ACROSS * BM + tl.arange(0, BM)
                b = own % ACROSS * BN + tl.arange(0, BN)
                r = tl.arange(0, TERMS if TERMS > 16 else 16)
                u_at, in_u = a[:, None] + r[None, :] * KI, (a < KI)[:, None] & (r < R)[None, :]
                v_at, in_v = r[:, None] * LJ + b[None, :], (r < R)[:, None] & (b < LJ)[None, :]
                u_at, v_at = first + LAYERS[m][FACTORS] + u_at, first + LAYERS[m][FACTORS] + R * KI + v_at
                U, of_u = _after_step(
                    weights, momenta, gradient, multiplier, u_at, in_u, gains + LAYERS[m][GAINS], power, factor_rate,
                    keep, decay, STEP, NORMALIZED, TERMS,
                )  # fmt: skip
                V, of_v = _after_step(
                    weights, momenta, gradient, multiplier, v_at, in_v, gains + LAYERS[m][GAINS] + TERMS, power,
                    factor_rate, keep, decay, STEP, NORMALIZED, TERMS,
                )  # fmt: skip
                if STEP:  # store after all loads, because loads would otherwise wait for the stores
                    keep_step(new_weights, new_momenta, cleared, u_at, in_u & (own % ACROSS == 0), U, of_u)
                    keep_step(new_weights, new_momenta, cleared, v_at, in_v & (own < ACROSS), V, of_v)
                W = tl.dot(U, V, input_precision=PRECISION)
                column = place_at((a % I)[:, None], (b % J)[None, :], I, J, LAYERS[m][PITCH])
                at = column + place_at((a // I)[:, None], (b // J)[None, :], K, L, HIDDEN_PITCH) * VISIBLE
                inside = (a < KI)[:, None] & (b < LJ)[None, :]
            else:
                ACROSS: tl.constexpr = (I * J + BN - 1) // BN
                a = own // ACROSS * BM + tl.arange(0, BM)
                b = own % ACROSS * BN + tl.arange(0, BN)
                inside = (a < K * L)[:, None] & (b < I * J)[None, :]
                w_at = first + LAYERS[m][FULL] + a[:, None] * (I * J) + b[None, :]
                W, of_w = _after_step(
                    weights, momenta, gradient, multiplier, w_at, inside, gains, power, factor_rate, keep, decay, STEP,
                    False, TERMS,
                )  # fmt: skip
                if STEP:
                    keep_step(new_weights, new_momenta, cleared, w_at, inside, W, of_w)
                column = place_at(b // J, b % J, I, J, LAYERS[m][PITCH])[None, :]
                at = (place_at(a // L, a % L, K, L, HIDDEN_PITCH) * VISIBLE)[:, None] + column
            if LAYERS[m][LEARNS] > 0:
                W *= fresh(ratios + model * VISIBLE + LAYERS[m][FIRST] + column, inside)
            if weight.dtype.element_ty == tl.float16:
                # Clamp to the range of 16-bit floats. All units are saturated at its limits.
                W = tl.minimum(tl.maximum(W, -60000.0), 60000.0)
            tl.store(weight + LAYERS[m][FIRST] + at, W.to(weight.dtype.element_ty), mask=inside)
    number = program - LAYERS[len(LAYERS) - 1][END]
    if NORMALIZED:
        for m in tl.static_range(len(LAYERS)):
            mine = number - LAYERS[m][GAINS]
            if (LAYERS[m][RANK] > 0) & (mine >= 0) & (mine < 2 * TERMS) & (mine % TERMS < LAYERS[m][RANK]):
                at, inside = factor_at(mine, LAYERS[m][RANK], K, LAYERS[m][ROWS], L, LAYERS[m][COLUMNS], TERMS, EDGE)
                matrix, _ = _after_step(
                    weights, momenta, gradient, multiplier, first + LAYERS[m][FACTORS] + at, inside,
                    gains + LAYERS[m][GAINS] + tl.where(mine < TERMS, 0, TERMS),
                    power_of(squares + model * VISIBLE, LAYERS[m][FIRST], LAYERS[m][WIDTH], LAYERS[m][LEARNS]),
                    factor_rate, keep, decay, STEP, True, TERMS,
                )  # fmt: skip
                keep_norm(matrix, new_gains + LAYERS[m][GAINS], mine, TERMS, PRECISION)
        number -= N_GAINS
    if STEP:
        at = VISIBLE_BIAS + number * BLOCK + tl.arange(0, BLOCK)
        inside = (number >= 0) & (at < SIZE)
        bias, of_bias = _after_step(
            weights, momenta, gradient, multiplier, first + at, inside, gains, 1.0, bias_rate, keep, 0.0, STEP, False,
            TERMS,
        )  # fmt: skip
        keep_step(new_weights, new_momenta, cleared, first + at, inside, bias, of_bias)


@triton.jit
def _after_step(
    weights, momenta, gradient, multiplier, at, inside, gains, power, rate, keep, decay, STEP: tl.constexpr,
    NORMALIZED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Return the parameters and momenta. If `STEP` is set, perform a step first.

    The step divides the gradient by its gain.
    """
    scale = 1.0
    if STEP:
        scale = tl.load(multiplier + at, mask=inside, other=0.0) / power
        if NORMALIZED:
            scale /= tl.maximum(tl.sum(fresh(gains + tl.arange(0, TERMS), True)), 1e-12)
    return stepped(weights, momenta, gradient, at, inside, scale, rate, keep, decay, STEP)


@triton.jit
def compensate(
    weights, weight, new_weight, new_offset, center, HIDDEN: tl.constexpr, VISIBLE: tl.constexpr,
    UNITS: tl.constexpr, STRIDE: tl.constexpr, VISIBLE_BIAS: tl.constexpr, FOLLOWS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Correct the biases for the change that a step in the matrices causes in the fields induced by the offsets."""
    tile_m, tile_n, model = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    units, columns = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    at = (model.to(tl.int64) * HIDDEN + units[:, None]) * VISIBLE + columns[None, :]
    mu = tl.load(center + model * VISIBLE + columns)
    wait(PDL)
    if FOLLOWS:
        follow = fresh(new_offset + model * HIDDEN + units, True)
    change = fresh(new_weight + at, True).to(tl.float32) - fresh(weight + at, True).to(tl.float32)
    weights += model.to(tl.int64) * STRIDE + VISIBLE_BIAS
    tl.atomic_add(weights + VISIBLE + units, -tl.sum(change * mu[None, :], 1), mask=units < UNITS, sem="relaxed")
    if FOLLOWS:
        tl.atomic_add(weights + columns, -tl.sum(change * follow[:, None], 0), sem="relaxed")
