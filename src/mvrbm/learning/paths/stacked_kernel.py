r"""The Triton kernel of one update for a single layer of small matrices and a coupling of a few products.

As `small_step` of :mod:`mvrbm.learning.paths.triton_kernels`, with the ranks side by side, so that the sum over them is
part of a product: :math:`\sum_r U_r X V_r^\top` is one product of :math:`X^\top` with all :math:`U_r^\top`, (I, R K),
and one of the result with all :math:`V_r`, (L, R J), transposed. In the same form they serve downwards, where V comes
first, and in the gradient. Steps are launches of their own.
"""

# mypy: ignore-errors
# ruff: noqa: E741
import triton
import triton.language as tl

from mvrbm.learning.paths.triton_kernels import (
    after_previous,
    both_sizes,
    factor_at,
    fresh,
    keep_norm,
    load_sample,
    not_before,
    operand,
)
from mvrbm.learning.paths.triton_random import draw_layer, mean, numbers_of


@triton.jit
def _turn(wide, R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Transpose each of R matrices (A, B) side by side: (A, R B) -> (B, R A)."""
    return tl.reshape(tl.permute(tl.reshape(wide, [A, R, B]), (2, 1, 0)), [B, R * A])


@triton.jit
def _stack(wide, R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Put R matrices (A, B) that are side by side on top of each other: (A, R B) -> (R A, B)."""
    return tl.reshape(tl.permute(tl.reshape(wide, [A, R, B]), (1, 0, 2)), [R * A, B])


@triton.jit(do_not_specialize=["batch", "n_valid"])
def stacked_step(
    data, order, weights, gradients, gains, clock, seeds, chains, recorded, load_scale, load_shift, batch, n_valid,
    order_stride, data_stride,
    N: tl.constexpr, CHAINS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, SAMPLES: tl.constexpr,
    STRIDE: tl.constexpr, I: tl.constexpr, J: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    STEPS: tl.constexpr, PERSISTENT: tl.constexpr, VISIBLE_GAUSSIAN: tl.constexpr, HIDDEN_GAUSSIAN: tl.constexpr,
    BYTE_SCALE: tl.constexpr, NORMALISED: tl.constexpr, RECORDED: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr, EDGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one batch's gradient. Program (p, s) takes `SAMPLES` samples of model s, the last ones compute gains."""
    program, model = tl.program_id(0), tl.program_id(1)
    ROWS: tl.constexpr = CHAINS if PERSISTENT else N
    MOST: tl.constexpr = N if N > ROWS else ROWS
    PROGRAMS: tl.constexpr = (MOST + SAMPLES - 1) // SAMPLES
    AT_V: tl.constexpr = RANK * K * I
    AT_B: tl.constexpr = RANK * (K * I + L * J)
    AT_C: tl.constexpr = AT_B + I * J
    weights += model.to(tl.int64) * STRIDE
    OPERAND: tl.constexpr = tl.float16 if HALVES else tl.float32
    ri, rj, rk, rl = tl.arange(0, BI), tl.arange(0, BJ), tl.arange(0, BK), tl.arange(0, BL)
    at_x, in_x = ri[:, None] * J + rj[None, :], (ri < I)[:, None] & (rj < J)[None, :]
    at_y, in_y = rk[:, None] * L + rl[None, :], (rk < K)[:, None] & (rl < L)[None, :]
    # Columns of factors side by side: the rank, and the column within it.
    of_k, of_j = tl.arange(0, R * BK), tl.arange(0, R * BJ)
    at_u = ri[:, None] + ((of_k // BK * K + of_k % BK) * I)[None, :]  # (I, R K)
    in_u = (ri < I)[:, None] & ((of_k // BK < RANK) & (of_k % BK < K))[None, :]
    at_v = AT_V + rl[:, None] * J + (of_j // BJ * (L * J) + of_j % BJ)[None, :]  # (L, R J)
    in_v = (rl < L)[:, None] & ((of_j // BJ < RANK) & (of_j % BJ < J))[None, :]
    update, key = tl.load(clock) + batch, tl.load(seeds + model)
    data += model.to(tl.int64) * data_stride
    load_scale += model * (I * J)
    load_shift += model * (I * J)
    order += model * order_stride + batch * N
    recorded += batch * RECORDED
    # Everything that does not depend on the parameters comes before the wait.
    if SAMPLES == 1:
        x = load_sample(
            data, order, load_scale, load_shift, program, n_valid, at_x, in_x, I * J, BYTE_SCALE, VISIBLE_GAUSSIAN
        )
        to_y = numbers_of(key, update, program, 0, recorded, at_y, in_y, ROWS, K * L, HIDDEN_GAUSSIAN, RECORDED, BK, BL)
        to_x = numbers_of(
            key, update, program, 1, recorded + ROWS * K * L, at_x, in_x, ROWS, I * J, VISIBLE_GAUSSIAN, RECORDED, BI,
            BJ,
        )  # fmt: skip
    after_previous(PDL)
    if program >= PROGRAMS:
        number = program - PROGRAMS
        if NORMALISED and number % R < RANK:
            at, inside = factor_at(number, RANK, K, I, L, J, R, EDGE)
            keep_norm(fresh(weights + at, inside), gains + model * (2 * R), number, R, PRECISION)
        return
    u, v = fresh(weights + at_u, in_u), fresh(weights + at_v, in_v)
    B, C = fresh(weights + AT_B + at_x, in_x), fresh(weights + AT_C + at_y, in_y)
    u, size_u = operand(u, HALVES)
    v, size_v = operand(v, HALVES)
    size = both_sizes(size_u, size_v)
    B, C = not_before(B, size), not_before(C, size)
    gradients += model.to(tl.int64) * STRIDE
    grad_u, grad_v = tl.zeros([BI, R * BK], tl.float32), tl.zeros([BL, R * BJ], tl.float32)
    grad_b, grad_c = tl.zeros([BI, BJ], tl.float32), tl.zeros([BK, BL], tl.float32)
    # A chain counts as `weight` samples; none counts more than 1 until the end, for the sake of numbers of 16 bits.
    weight, largest = 1.0, 1.0
    if PERSISTENT:
        weight = n_valid.to(tl.float32) / CHAINS
        largest = tl.maximum(weight, 1.0)
    for s in range(SAMPLES):
        i = program * SAMPLES + s
        if SAMPLES > 1:
            x = load_sample(
                data, order, load_scale, load_shift, i, n_valid, at_x, in_x, I * J, BYTE_SCALE, VISIBLE_GAUSSIAN
            )
        positive = tl.where(i < n_valid, 1.0 / largest, 0.0)
        negative = positive
        half, field = _up(x.to(OPERAND), u, v, size, C, R, BJ, BK, PRECISION)
        h = -positive * mean(field, HIDDEN_GAUSSIAN)
        grad_b -= positive * x
        grad_c += h
        grad_u, grad_v = _add_slopes(x.to(OPERAND), h.to(OPERAND), half, v, grad_u, grad_v, R, BJ, BK, PRECISION)
        state = chains + (model * CHAINS + i).to(tl.int64) * (I * J) + at_x
        if PERSISTENT:
            x = fresh(state, in_x & (i < CHAINS)).to(tl.float32)
            half, field = _up(x.to(OPERAND), u, v, size, C, R, BJ, BK, PRECISION)
            negative = tl.where(i < CHAINS, weight / largest, 0.0)
        for step in range(STEPS):
            numbers = recorded + step * ROWS * (K * L + I * J)
            if SAMPLES > 1 or step > 0:
                to_y = numbers_of(
                    key, update, i, 2 * step, numbers, at_y, in_y, ROWS, K * L, HIDDEN_GAUSSIAN, RECORDED, BK, BL
                )
            y = draw_layer(field, to_y, HIDDEN_GAUSSIAN)
            towards = _down(y.to(OPERAND), u, v, size, B, R, BJ, BK, PRECISION)
            if SAMPLES > 1 or step > 0:
                to_x = numbers_of(
                    key, update, i, 2 * step + 1, numbers + ROWS * K * L, at_x, in_x, ROWS, I * J, VISIBLE_GAUSSIAN,
                    RECORDED, BI, BJ,
                )  # fmt: skip
            x = draw_layer(towards, to_x, VISIBLE_GAUSSIAN)
            half, field = _up(x.to(OPERAND), u, v, size, C, R, BJ, BK, PRECISION)
        h = negative * mean(field, HIDDEN_GAUSSIAN)
        if PERSISTENT:
            tl.store(state, x, mask=in_x & (i < CHAINS))
        grad_b += negative * x
        grad_c += h
        grad_u, grad_v = _add_slopes(x.to(OPERAND), h.to(OPERAND), half, v, grad_u, grad_v, R, BJ, BK, PRECISION)
    tl.atomic_add(gradients + AT_B + at_x, grad_b * (largest / N), mask=in_x, sem="relaxed")
    tl.atomic_add(gradients + AT_C + at_y, grad_c * (largest / N), mask=in_y, sem="relaxed")
    tl.atomic_add(gradients + at_v, grad_v * (largest * size_u / N), mask=in_v, sem="relaxed")
    tl.atomic_add(gradients + at_u, grad_u * (largest * size_v / N), mask=in_u, sem="relaxed")


@triton.jit
def _up(x, u, v, size, field, R: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """Return all U_r X, (K, R J), and the hidden field plus the sum of U_r X V_r'."""
    half = _turn(tl.dot(tl.trans(x), u, input_precision=PRECISION).to(u.dtype), R, BJ, BK)
    return half, field + size * tl.dot(half, tl.trans(v), input_precision=PRECISION)


@triton.jit
def _down(y, u, v, size, field, R: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the visible field plus the sum of U_r' Y V_r."""
    half = _stack(tl.dot(y, v, input_precision=PRECISION).to(u.dtype), R, BK, BJ)  # (R K, J)
    return field + size * tl.dot(u, half, input_precision=PRECISION)


@triton.jit
def _add_slopes(
    x, h, half, v, grad_u, grad_v, R: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add the gradients of all U_r transposed, X (H V_r)', and of all V_r, H' (U_r X), where `half` is all U_r X."""
    grad_v = tl.dot(tl.trans(h), half, acc=grad_v, input_precision=PRECISION)
    half = _turn(tl.dot(h, v, input_precision=PRECISION).to(v.dtype), R, BK, BJ)  # (J, R K)
    return tl.dot(x, half, acc=grad_u, input_precision=PRECISION), grad_v
