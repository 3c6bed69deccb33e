r"""The Triton kernel of one update for a layer of small matrices and a coupling of a few products, and for a label.

As `small_step` of :mod:`mvrbm.backends.cuda.per_sample_kernels`, with the ranks side by side, so that the sum over them is
part of a product: :math:`\sum_r U_r X V_r^\top` is one product of :math:`X^\top` with all :math:`U_r^\top`, (I, R K),
and one of the result with all :math:`V_r`, (L, R J), transposed. In the same form they serve downwards, where V comes
first, and in the gradient. Steps are launches of their own.

A label is a second visible layer: one category, coupled by a full matrix, which is (classes, K, L) here, so that a
category's weights are next to each other; they are its field on the hidden layer. The tuple `LABEL`, empty without a
label, has by position:
"""

# mypy: ignore-errors
# ruff: noqa: E741
import triton
import triton.language as tl

from mvrbm.backends.cuda.draws import draw_layer, mean, numbers_of, one_uniform
from mvrbm.backends.cuda.per_sample_kernels import (
    after_previous,
    both_sizes,
    factor_at,
    fresh,
    keep_norm,
    load_sample,
    not_before,
)

CLASSES = tl.constexpr(0)  # number of categories
WIDE = tl.constexpr(1)  # the same as a power of two
WEIGHTS = tl.constexpr(2)  # position of the full matrix in the flat parameters; the bias follows
STATES_AT = tl.constexpr(3)  # position of the one-hot row in the states of a chain
UNITS = tl.constexpr(4)  # number of hidden units
FIRST = tl.constexpr(5)  # 1 if the label is drawn before the matrix, else 0


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
    data, labels, order, weights, gradients, gains, sizes, clock, seeds, chains, recorded, load_scale, load_shift,
    batch, n_valid, order_stride, data_stride, label_stride,
    N: tl.constexpr, CHAINS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, SAMPLES: tl.constexpr,
    STRIDE: tl.constexpr, STATES: tl.constexpr, AT_U: tl.constexpr, AT_C: tl.constexpr, AT_X: tl.constexpr,
    BLOCKS: tl.constexpr, LABEL: tl.constexpr,
    I: tl.constexpr, J: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    STEPS: tl.constexpr, PERSISTENT: tl.constexpr, VISIBLE_GAUSSIAN: tl.constexpr, HIDDEN_GAUSSIAN: tl.constexpr,
    BYTE_SCALE: tl.constexpr, NORMALIZED: tl.constexpr, RECORDED: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr, EDGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one batch's gradient. Program (p, s) takes `SAMPLES` samples of model s, the last ones compute gains."""
    program, model = tl.program_id(0), tl.program_id(1)
    ROWS: tl.constexpr = CHAINS if PERSISTENT else N
    MOST: tl.constexpr = N if N > ROWS else ROWS
    PROGRAMS: tl.constexpr = (MOST + SAMPLES - 1) // SAMPLES
    LABELED: tl.constexpr = len(LABEL) > 0
    # Gradients of the data at the end, where registers would not hold them while chains are drawn.
    LATE: tl.constexpr = R > 4 or LABELED
    AT_V: tl.constexpr = AT_U + RANK * K * I
    AT_B: tl.constexpr = AT_V + RANK * L * J
    # Numbers of a step: the hidden layer's, then those of visible layers in their order.
    NUMBERS: tl.constexpr = ROWS * (K * L + I * J + 1) if LABELED else ROWS * (K * L + I * J)
    weights += model.to(tl.int64) * STRIDE
    OPERAND: tl.constexpr = tl.float16 if HALVES else tl.float32
    ri, rj, rk, rl = tl.arange(0, BI), tl.arange(0, BJ), tl.arange(0, BK), tl.arange(0, BL)
    at_x, in_x = ri[:, None] * J + rj[None, :], (ri < I)[:, None] & (rj < J)[None, :]
    at_y, in_y = rk[:, None] * L + rl[None, :], (rk < K)[:, None] & (rl < L)[None, :]
    # Columns of factors side by side: the rank, and the column within it.
    of_k, of_j = tl.arange(0, R * BK), tl.arange(0, R * BJ)
    at_u = AT_U + ri[:, None] + ((of_k // BK * K + of_k % BK) * I)[None, :]  # (I, R K)
    in_u = (ri < I)[:, None] & ((of_k // BK < RANK) & (of_k % BK < K))[None, :]
    at_v = AT_V + rl[:, None] * J + (of_j // BJ * (L * J) + of_j % BJ)[None, :]  # (L, R J)
    in_v = (rl < L)[:, None] & ((of_j // BJ < RANK) & (of_j % BJ < J))[None, :]
    update, key = tl.load(clock) + batch, tl.load(seeds + model)
    data += model.to(tl.int64) * data_stride
    labels += model.to(tl.int64) * label_stride
    load_scale += model * STATES + AT_X
    load_shift += model * STATES + AT_X
    order += model * order_stride + batch * N
    recorded += batch * RECORDED
    x_numbers = recorded + ROWS * K * L
    if LABELED:
        x_numbers += ROWS * LABEL[FIRST]
        LABEL_NUMBERS: tl.constexpr = ROWS * (K * L + (1 - LABEL[FIRST]) * I * J)
    # Everything that does not depend on the parameters comes before the wait. The launch that wrote the chains has
    # ended: the step that comes between has waited for it.
    if SAMPLES == 1:
        x, label = _sample(
            data, labels, order, load_scale, load_shift, program, n_valid, at_x, in_x, I * J, LABEL, BYTE_SCALE,
            VISIBLE_GAUSSIAN,
        )  # fmt: skip
        if PERSISTENT:
            chain, chain_label = _chain(chains, program, model, at_x, in_x, CHAINS, STATES, AT_X, LABEL)
        to_y = numbers_of(key, update, program, 0, recorded, at_y, in_y, ROWS, K * L, HIDDEN_GAUSSIAN, RECORDED, BK, BL)
        to_x = numbers_of(
            key, update, program, 1, x_numbers, at_x, in_x, ROWS, I * J, VISIBLE_GAUSSIAN, RECORDED, BI, BJ
        )
    after_previous(PDL)
    if program >= PROGRAMS:
        number = program - PROGRAMS
        if NORMALIZED and number % R < RANK:
            at, inside = factor_at(number, RANK, K, I, L, J, R, EDGE)
            matrix = fresh(weights + AT_U + at, inside)
            keep_norm(matrix, gains + model * (2 * R), number, R, PRECISION)
        return
    u, v = fresh(weights + at_u, in_u), fresh(weights + at_v, in_v)
    B, C = fresh(weights + AT_B + at_x, in_x), fresh(weights + AT_C + at_y, in_y)
    own, chain_own = 0.0, 0.0
    if LABELED:
        own, chain_own = tl.zeros([BK, BL], tl.float32), tl.zeros([BK, BL], tl.float32)
    if SAMPLES == 1:
        own = _of_label(weights, label, at_y, in_y, LABEL)
        if PERSISTENT:
            chain_own = _of_label(weights, chain_label, at_y, in_y, LABEL)
    size_u, size_v = 1.0, 1.0
    if HALVES:
        sizes += model * (2 * BLOCKS) + tl.arange(0, BLOCKS)
        size_u = tl.maximum(tl.max(fresh(sizes, True)), 1e-30)
        size_v = tl.maximum(tl.max(fresh(sizes + BLOCKS, True)), 1e-30)
        u, v = (u * (1.0 / size_u)).to(tl.float16), (v * (1.0 / size_v)).to(tl.float16)
    size = both_sizes(size_u, size_v)
    B, C = not_before(B, size), not_before(C, size)
    if LABELED and SAMPLES == 1:
        own, chain_own = not_before(own, size), not_before(chain_own, size)
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
            x, label = _sample(
                data, labels, order, load_scale, load_shift, i, n_valid, at_x, in_x, I * J, LABEL, BYTE_SCALE,
                VISIBLE_GAUSSIAN,
            )  # fmt: skip
            own = _of_label(weights, label, at_y, in_y, LABEL)
            if PERSISTENT:
                chain, chain_label = _chain(chains, i, model, at_x, in_x, CHAINS, STATES, AT_X, LABEL)
                chain_own = _of_label(weights, chain_label, at_y, in_y, LABEL)
        positive = tl.where(i < n_valid, 1.0 / largest, 0.0)
        half, field = _up(x.to(OPERAND), u, v, size, C + own, R, BJ, BK, PRECISION)
        h, data_half, data_x, data_label = -positive * mean(field, HIDDEN_GAUSSIAN), half, x, label
        if not LATE:
            grad_u, grad_v = _add_slopes(x.to(OPERAND), h.to(OPERAND), half, v, grad_u, grad_v, R, BJ, BK, PRECISION)
        negative = positive
        if PERSISTENT:
            x, label = chain, chain_label
            half, field = _up(x.to(OPERAND), u, v, size, C + chain_own, R, BJ, BK, PRECISION)
            negative = tl.where(i < CHAINS, weight / largest, 0.0)
        for step in range(STEPS):
            numbers = step * NUMBERS
            if SAMPLES > 1 or step > 0:
                to_y = numbers_of(
                    key, update, i, 2 * step, recorded + numbers, at_y, in_y, ROWS, K * L, HIDDEN_GAUSSIAN, RECORDED,
                    BK, BL,
                )  # fmt: skip
            y = draw_layer(field, to_y, HIDDEN_GAUSSIAN)
            field = C
            if LABELED:
                label = _draw_label(
                    y, weights, at_y, in_y, key, update, i, 2 * step + 1, recorded + numbers + LABEL_NUMBERS, LABEL,
                    ROWS, RECORDED,
                )  # fmt: skip
                field += _of_label(weights, label, at_y, in_y, LABEL)
            towards = _down(y.to(OPERAND), u, v, size, B, R, BJ, BK, PRECISION)
            if SAMPLES > 1 or step > 0:
                to_x = numbers_of(
                    key, update, i, 2 * step + 1, x_numbers + numbers, at_x, in_x, ROWS, I * J, VISIBLE_GAUSSIAN,
                    RECORDED, BI, BJ,
                )  # fmt: skip
            x = draw_layer(towards, to_x, VISIBLE_GAUSSIAN)
            half, field = _up(x.to(OPERAND), u, v, size, field, R, BJ, BK, PRECISION)
        chain_h = negative * mean(field, HIDDEN_GAUSSIAN)
        if PERSISTENT:
            _keep_chain(chains, x, label, i, model, at_x, in_x, CHAINS, STATES, AT_X, LABEL)
        grad_b += negative * x - positive * data_x
        grad_c += h + chain_h
        if LATE:
            grad_u, grad_v = _add_slopes(
                data_x.to(OPERAND), h.to(OPERAND), data_half, v, grad_u, grad_v, R, BJ, BK, PRECISION
            )
        grad_u, grad_v = _add_slopes(x.to(OPERAND), chain_h.to(OPERAND), half, v, grad_u, grad_v, R, BJ, BK, PRECISION)
        if LABELED:
            per_sample = largest / N
            _add_label_gradient(gradients, data_label, h * per_sample, -positive * per_sample, at_y, in_y, LABEL)
            _add_label_gradient(gradients, label, chain_h * per_sample, negative * per_sample, at_y, in_y, LABEL)
    tl.atomic_add(gradients + AT_B + at_x, grad_b * (largest / N), mask=in_x, sem="relaxed")
    tl.atomic_add(gradients + AT_C + at_y, grad_c * (largest / N), mask=in_y, sem="relaxed")
    tl.atomic_add(gradients + at_v, grad_v * (largest * size_u / N), mask=in_v, sem="relaxed")
    tl.atomic_add(gradients + at_u, grad_u * (largest * size_v / N), mask=in_u, sem="relaxed")


@triton.jit
def _sample(
    data, labels, order, scales, shifts, i, n_valid, at_x, in_x, AREA: tl.constexpr, LABEL: tl.constexpr,
    BYTE_SCALE: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """Return the matrix of sample i of a batch, and its category; zeros beyond the end of the batch."""
    x = load_sample(data, order, scales, shifts, i, n_valid, at_x, in_x, AREA, BYTE_SCALE, GAUSSIAN)
    label = i * 0
    if len(LABEL) > 0:
        label = tl.load(labels + tl.load(order + i, mask=i < n_valid, other=0).to(tl.int64))
    return x, label


@triton.jit
def _chain(
    chains, i, model, at_x, in_x, CHAINS: tl.constexpr, STATES: tl.constexpr, AT_X: tl.constexpr, LABEL: tl.constexpr
):  # fmt: skip
    """Return the matrix of persistent chain i, and its category; zeros beyond the last."""
    state = chains + (model * CHAINS + i).to(tl.int64) * STATES
    x = fresh(state + AT_X + at_x, in_x & (i < CHAINS)).to(tl.float32)
    label = i * 0
    if len(LABEL) > 0:
        classes = tl.arange(0, LABEL[WIDE])
        one_hot = fresh(state + LABEL[STATES_AT] + classes, (classes < LABEL[CLASSES]) & (i < CHAINS))
        label = tl.max(tl.where(one_hot > 0.5, classes, 0))
    return x, label


@triton.jit
def _keep_chain(
    chains, x, label, i, model, at_x, in_x, CHAINS: tl.constexpr, STATES: tl.constexpr, AT_X: tl.constexpr,
    LABEL: tl.constexpr,
):  # fmt: skip
    """Write persistent chain i."""
    state = chains + (model * CHAINS + i).to(tl.int64) * STATES
    tl.store(state + AT_X + at_x, x, mask=in_x & (i < CHAINS))
    if len(LABEL) > 0:
        classes = tl.arange(0, LABEL[WIDE])
        one_hot = (classes == label).to(chains.dtype.element_ty)
        tl.store(state + LABEL[STATES_AT] + classes, one_hot, mask=(classes < LABEL[CLASSES]) & (i < CHAINS))


@triton.jit
def _draw_label(
    y, weights, at_y, in_y, key, update, sample, draw, recorded, LABEL: tl.constexpr,
    ROWS: tl.constexpr, RECORDED: tl.constexpr,
):  # fmt: skip
    """Draw a label given the hidden layer, by one uniform number."""
    classes = tl.arange(0, LABEL[WIDE])
    exists = classes < LABEL[CLASSES]
    weights += LABEL[WEIGHTS]
    field = fresh(weights + LABEL[CLASSES] * LABEL[UNITS] + classes, exists)
    inside = exists[:, None, None] & in_y[None, :, :]
    W = fresh(weights + (classes * LABEL[UNITS])[:, None, None] + at_y[None, :, :], inside)
    field += tl.sum(tl.sum(W * y[None, :, :], 1), 1)
    number = one_uniform(key, update, sample, draw)
    if RECORDED:
        number = tl.load(recorded + sample, mask=sample < ROWS, other=0.5)
    field = tl.where(exists, field, float("-inf"))
    mass = tl.exp(field - tl.max(field, 0))
    passed = tl.cumsum(mass, 0) <= number * tl.sum(mass, 0)
    return tl.minimum(tl.sum(passed.to(tl.int32), 0), LABEL[CLASSES] - 1)


@triton.jit
def _of_label(weights, label, at_y, in_y, LABEL: tl.constexpr):
    """Return the field of a label on the hidden layer, (K, L), or 0 where there is none."""
    field = 0.0
    if len(LABEL) > 0:
        field = fresh(weights + LABEL[WEIGHTS] + label * LABEL[UNITS] + at_y, in_y)
    return field


@triton.jit
def _add_label_gradient(
    gradients, label, h, share, at_y, in_y, LABEL: tl.constexpr
):  # fmt: skip
    """Add a label's gradients: those of its category's weights, and of its bias."""
    gradients += LABEL[WEIGHTS]
    tl.atomic_add(gradients + label * LABEL[UNITS] + at_y, h, mask=in_y, sem="relaxed")
    tl.atomic_add(gradients + LABEL[CLASSES] * LABEL[UNITS] + label, share, sem="relaxed")


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
