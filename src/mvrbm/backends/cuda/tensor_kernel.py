r"""Triton kernel that computes the gradient for a single layer of order 3 or more, with one program per sample.

The modes form three groups of one or two neighboring modes each. The second group may be empty. A visible state is a
tile of shape (A * B, C), and a hidden state is a tile of shape (N * M, L), where A, B and C are the visible sizes of
the groups and L, M and N are their hidden sizes, all padded. Computing a field takes one product per group. Each
product replaces the last axis and swaps the other two: (A * B, C) -> (A * N, B) -> (N * M, A) -> (N * M, L). The axes
of a hidden tile are in reverse order, so the same sequence of products computes visible fields from hidden states. The
gradient of a group's factor is the product of two operands: the operand of the group's product on the way up, and the
operand of the same product on the way down.

The factor of a group of two modes is the Kronecker product of the factors of both modes. The kernel forms it while it
loads them. Parameters, units, random numbers and `PDL` are the same as in
:mod:`mvrbm.backends.cuda.per_sample_kernels`. The step is performed in a separate launch.

A group is a tuple of numbers. The constants below are the indices of its entries.
"""

# mypy: ignore-errors
# ruff: noqa: E741
import triton
import triton.language as tl

from mvrbm.backends.cuda.draws import draw_layer, mean
from mvrbm.backends.cuda.overlap import after_previous, fresh
from mvrbm.backends.cuda.per_sample_kernels import load_sample, operand
from mvrbm.backends.cuda.step_kernels import schatten
from mvrbm.random.kernels import normal_lines, uniform_lines

# Hidden and visible sizes of the first and second modes. The sizes of a nonexistent second mode are 1.
K1 = tl.constexpr(0)
I1 = tl.constexpr(1)
K2 = tl.constexpr(2)
I2 = tl.constexpr(3)
# The same sizes, padded to powers of two.
BK1 = tl.constexpr(4)
BI1 = tl.constexpr(5)
BK2 = tl.constexpr(6)
BI2 = tl.constexpr(7)
# Positions of the factors (R, K, I) of both modes. The second is -1 if there is no second mode.
AT1 = tl.constexpr(8)
AT2 = tl.constexpr(9)


@triton.jit
def _visible(index, G: tl.constexpr):
    """Return the positions of visible entries along the axes of a group, and a mask of valid entries."""
    first, second = index // G[BI2], index % G[BI2]
    return first * G[I2] + second, (first < G[I1]) & (second < G[I2])


@triton.jit
def _hidden(index, G: tl.constexpr):
    """Return the positions of hidden entries along the axes of a group, and a mask of valid entries."""
    first, second = index // G[BK2], index % G[BK2]
    return first * G[K2] + second, (first < G[K1]) & (second < G[K2])


@triton.jit
def _visible_numbers(key, row, update, draw, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, NORMAL: tl.constexpr):
    """Return a tile of random numbers of shape (A * B, C) for a sample's visible layer."""
    SB: tl.constexpr = B[BI1] * B[BI2]
    # Lines run along the last mode and are numbered by all preceding modes.
    FURTHER: tl.constexpr = C[BI1] if C[AT2] >= 0 else 1
    COLUMNS: tl.constexpr = C[I2] if C[AT2] >= 0 else C[I1]
    WIDTH: tl.constexpr = C[BI2] if C[AT2] >= 0 else C[BI1]
    index = tl.arange(0, A[BI1] * A[BI2] * SB * FURTHER)
    a, _ = _visible(index // (SB * FURTHER), A)
    b, _ = _visible(index // FURTHER % SB, B)
    line = a * (B[I1] * B[I2]) + b
    LINES: tl.constexpr = A[I1] * A[I2] * B[I1] * B[I2] * (C[I1] if C[AT2] >= 0 else 1)
    if FURTHER > 1:
        line = line * C[I1] + index % FURTHER
    numbers = _numbers_of_lines(key, row, line, update, draw, LINES, COLUMNS, WIDTH, NORMAL)
    return tl.reshape(numbers, [A[BI1] * A[BI2] * SB, FURTHER * WIDTH])


@triton.jit
def _hidden_numbers(key, row, update, draw, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, NORMAL: tl.constexpr):
    """Return a tile of random numbers of shape (N * M, L) for a sample's hidden layer.

    Lines run along the last mode, which is part of N.
    """
    SL: tl.constexpr = A[BK1] * A[BK2]
    SM: tl.constexpr = B[BK1] * B[BK2]
    FURTHER: tl.constexpr = C[BK1] if C[AT2] >= 0 else 1
    COLUMNS: tl.constexpr = C[K2] if C[AT2] >= 0 else C[K1]
    WIDTH: tl.constexpr = C[BK2] if C[AT2] >= 0 else C[BK1]
    index = tl.arange(0, SL * SM * FURTHER)
    l, _ = _hidden(index // (SM * FURTHER), A)
    m, _ = _hidden(index // FURTHER % SM, B)
    line = l * (B[K1] * B[K2]) + m
    LINES: tl.constexpr = A[K1] * A[K2] * B[K1] * B[K2] * (C[K1] if C[AT2] >= 0 else 1)
    if FURTHER > 1:
        line = line * C[K1] + index % FURTHER
    numbers = _numbers_of_lines(key, row, line, update, draw, LINES, COLUMNS, WIDTH, NORMAL)
    numbers = tl.permute(tl.reshape(numbers, [SL, SM, FURTHER * WIDTH]), (2, 1, 0))
    return tl.reshape(numbers, [FURTHER * WIDTH * SM, SL])


@triton.jit
def _numbers_of_lines(
    key, row, line, update, draw, LINES: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, NORMAL: tl.constexpr
):  # fmt: skip
    if NORMAL:
        return normal_lines(key, row, line, update, draw, LINES, COLUMNS, WIDTH)
    return uniform_lines(key, row, line, update, draw, LINES, COLUMNS, WIDTH)


@triton.jit
def _mode(rows, columns, r, AT: tl.constexpr, K: tl.constexpr, I: tl.constexpr):
    """Return the positions of the entries in a mode's factor, and a mask of valid entries."""
    at = AT + (r * K + rows)[:, None] * I + columns[None, :]
    return at, (rows < K)[:, None] & (columns < I)[None, :]


@triton.jit
def _factor(weights, r, G: tl.constexpr, HALVES: tl.constexpr):
    """Return the factor of a group as an operand of products, and the scale by which results must be multiplied."""
    rows, columns = tl.arange(0, G[BK1] * G[BK2]), tl.arange(0, G[BI1] * G[BI2])
    at, inside = _mode(rows // G[BK2], columns // G[BI2], r, G[AT1], G[K1], G[I1])
    factor = fresh(weights + at, inside)
    if G[AT2] >= 0:
        at, inside = _mode(rows % G[BK2], columns % G[BI2], r, G[AT2], G[K2], G[I2])
        factor *= fresh(weights + at, inside)
    return operand(factor, HALVES)


@triton.jit
def _factors(weights, r, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, MIDDLE: tl.constexpr, HALVES: tl.constexpr):
    """Return the factors of all groups, and the scales by which results must be multiplied."""
    a, size_a = _factor(weights, r, A, HALVES)
    c, size_c = _factor(weights, r, C, HALVES)
    b, size_b = c, 1.0  # placeholders, unused if there is no middle group
    if MIDDLE:
        b, size_b = _factor(weights, r, B, HALVES)
    return a, b, c, size_a, size_b, size_c


@triton.jit
def _halfway(state, last, middle, P: tl.constexpr, Q: tl.constexpr, MIDDLE: tl.constexpr, PRECISION: tl.constexpr):
    """Apply two products to a tile, (P * Q, S) -> (P * T, Q) -> (T * Q', P), and return both results."""
    T: tl.constexpr = last.shape[1]
    first = tl.dot(state, last, input_precision=PRECISION).to(state.dtype)
    if MIDDLE:
        first = tl.reshape(tl.permute(tl.reshape(first, [P, Q, T]), (0, 2, 1)), [P * T, Q])
        second = tl.dot(first, middle, input_precision=PRECISION).to(state.dtype)
        NEW: tl.constexpr = middle.shape[1]
        second = tl.reshape(tl.permute(tl.reshape(second, [P, T, NEW]), (1, 2, 0)), [T * NEW, P])
    else:
        second = tl.trans(first)
    return first, second


@triton.jit
def _up(x, bias, weights, a, b, c, size, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr,
        MIDDLE: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return the hidden field of shape (N * M, L) for a visible state, given the factors of the first term."""
    P: tl.constexpr = A[BI1] * A[BI2]
    Q: tl.constexpr = B[BI1] * B[BI2]
    _, half = _halfway(x, tl.trans(c), tl.trans(b), P, Q, MIDDLE, PRECISION)
    field = bias + size * tl.dot(half, tl.trans(a), input_precision=PRECISION)
    for r in range(1, RANK):
        a, b, c, size_a, size_b, size_c = _factors(weights, r, A, B, C, MIDDLE, HALVES)
        _, half = _halfway(x, tl.trans(c), tl.trans(b), P, Q, MIDDLE, PRECISION)
        field += _product(size_a, size_b, size_c) * tl.dot(half, tl.trans(a), input_precision=PRECISION)
    return field


@triton.jit
def _down(y, bias, weights, a, b, c, size, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, RANK: tl.constexpr,
          MIDDLE: tl.constexpr, HALVES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return the visible field of shape (A * B, C) for a hidden state, given the factors of the first term."""
    P: tl.constexpr = C[BK1] * C[BK2]
    Q: tl.constexpr = B[BK1] * B[BK2]
    _, half = _halfway(y, a, b, P, Q, MIDDLE, PRECISION)
    field = bias + size * tl.dot(half, c, input_precision=PRECISION)
    for r in range(1, RANK):
        a, b, c, size_a, size_b, size_c = _factors(weights, r, A, B, C, MIDDLE, HALVES)
        _, half = _halfway(y, a, b, P, Q, MIDDLE, PRECISION)
        field += _product(size_a, size_b, size_c) * tl.dot(half, c, input_precision=PRECISION)
    return field


@triton.jit
def _product(size_a, size_b, size_c):
    """Return the product of three scales, clamped to a finite value so that zero fields remain zero."""
    return tl.minimum(tl.minimum(size_a * size_b, 3e38) * size_c, 3e38)


@triton.jit
def _pair(h, x, total, PRECISION: tl.constexpr):
    """Add the product H' X of tiles of shapes (rows, H) and (rows, X) to a total of shape (S, H, X).

    The rows are divided into S blocks, and each block is added to a separate part of the total.
    """
    S: tl.constexpr = total.shape[0]
    if S == 1:
        total = tl.dot(tl.trans(h), x, input_precision=PRECISION)[None, :, :] + total
    else:
        h = tl.permute(tl.reshape(h, [S, h.shape[0] // S, h.shape[1]]), (0, 2, 1))
        x = tl.reshape(x, [S, x.shape[0] // S, x.shape[1]])
        total = tl.dot(h, x, acc=total, input_precision=PRECISION)
    return total


@triton.jit
def _parts(ROWS: tl.constexpr, H: tl.constexpr, X: tl.constexpr):
    """Return the initial total for `_pair`, which is zero.

    Small products are divided into parts so that warps do not duplicate work.
    """
    MOST: tl.constexpr = 2048 // (H * X) if H * X < 2048 else 1
    S: tl.constexpr = ROWS // 32 if ROWS // 32 < MOST else MOST
    return tl.zeros([S if S > 0 else 1, H, X], tl.float32)


@triton.jit
def _add_slopes(x, h, a, b, c, grad_a, grad_b, grad_c, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
                MIDDLE: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add the gradients for one term's factors, given a visible state (A * B, C) and a hidden mean (N * M, L)."""
    P: tl.constexpr = A[BI1] * A[BI2]
    N: tl.constexpr = C[BK1] * C[BK2]
    M: tl.constexpr = B[BK1] * B[BK2]
    x_first, x_second = _halfway(x, tl.trans(c), tl.trans(b), P, B[BI1] * B[BI2], MIDDLE, PRECISION)
    h_first, h_second = _halfway(h, a, b, N, M, MIDDLE, PRECISION)
    grad_a, grad_c = _pair(h, x_second, grad_a, PRECISION), _pair(h_second, x, grad_c, PRECISION)
    if MIDDLE:
        h_first = tl.reshape(tl.permute(tl.reshape(h_first, [N, P, M]), (1, 0, 2)), [P * N, M])
        grad_b = _pair(h_first, x_first, grad_b, PRECISION)
    return grad_a, grad_b, grad_c


@triton.jit
def _keep_gradient(gradients, weights, gradient, r, G: tl.constexpr):
    """Add the gradient for a group's factor to the gradients for its modes."""
    k1, i1 = tl.arange(0, G[BK1]), tl.arange(0, G[BI1])
    first_at, first_in = _mode(k1, i1, r, G[AT1], G[K1], G[I1])
    if G[AT2] < 0:
        tl.atomic_add(gradients + first_at, gradient, mask=first_in, sem="relaxed")
    else:
        k2, i2 = tl.arange(0, G[BK2]), tl.arange(0, G[BI2])
        second_at, second_in = _mode(k2, i2, r, G[AT2], G[K2], G[I2])
        first, second = fresh(weights + first_at, first_in), fresh(weights + second_at, second_in)
        parts = tl.reshape(gradient, [G[BK1], G[BK2], G[BI1], G[BI2]])
        of_first = tl.sum(tl.sum(parts * second[None, :, None, :], 3), 1)
        of_second = tl.sum(tl.sum(parts * first[:, None, :, None], 2), 0)
        tl.atomic_add(gradients + first_at, of_first, mask=first_in, sem="relaxed")
        tl.atomic_add(gradients + second_at, of_second, mask=second_in, sem="relaxed")


@triton.jit
def _keep_gain(weights, gains, number, G: tl.constexpr, RANK: tl.constexpr, TERMS: tl.constexpr, EDGE: tl.constexpr,
               PRECISION: tl.constexpr):  # fmt: skip
    """Store one term of a factor's gain: the product of the squared norms of all other factors in that term.

    For each factor, `G` contains three consecutive numbers: the sizes K and I and the position.
    """
    own, r = number // RANK, number % RANK
    edge = tl.arange(0, EDGE)
    gain = 1.0
    for mode in tl.static_range(len(G) // 3):
        at, inside = _mode(edge, edge, r, G[3 * mode + 2], G[3 * mode], G[3 * mode + 1])
        matrix = fresh(weights + at, inside)
        gain *= tl.where(own == mode, 1.0, schatten(matrix, PRECISION))
    tl.store(gains + own * TERMS + r, gain)


@triton.jit(do_not_specialize=["batch", "n_valid"])
def tensor_step(
    data, order, weights, gradients, gains, clock, keys, chains, load_scale, load_shift, batch, n_valid,
    order_stride, data_stride,
    N: tl.constexpr, CHAINS: tl.constexpr, RANK: tl.constexpr, STRIDE: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, FACTORS: tl.constexpr, AT_B: tl.constexpr, VISIBLE: tl.constexpr,
    STEPS: tl.constexpr, PERSISTENT: tl.constexpr, VISIBLE_GAUSSIAN: tl.constexpr, HIDDEN_GAUSSIAN: tl.constexpr,
    BYTE_SCALE: tl.constexpr, NORMALIZED: tl.constexpr, TERMS: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr, HALVES: tl.constexpr, EDGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the gradient for one batch.

    Program (i, s) processes sample i of model s. The last programs compute gains.
    A, B and C are the groups, and `VISIBLE` is the size of the visible layer.
    """
    i, model = tl.program_id(0), tl.program_id(1)
    ROWS: tl.constexpr = CHAINS if PERSISTENT else N
    MOST: tl.constexpr = N if N > ROWS else ROWS
    MIDDLE: tl.constexpr = B[AT1] >= 0
    OPERAND: tl.constexpr = tl.float16 if HALVES else tl.float32
    weights += model.to(tl.int64) * STRIDE
    if i >= MOST:
        after_previous(PDL)
        if NORMALIZED:
            own = gains + model * (len(FACTORS) // 3 * TERMS)
            _keep_gain(weights, own, i - MOST, FACTORS, RANK, TERMS, EDGE, EXACT)
        return
    SA: tl.constexpr = A[BI1] * A[BI2]
    SB: tl.constexpr = B[BI1] * B[BI2]
    SC: tl.constexpr = C[BI1] * C[BI2]
    SL: tl.constexpr = A[BK1] * A[BK2]
    SM: tl.constexpr = B[BK1] * B[BK2]
    SN: tl.constexpr = C[BK1] * C[BK2]
    ab, nm = tl.arange(0, SA * SB), tl.arange(0, SN * SM)
    at_a, in_a = _visible(ab // SB, A)
    at_b, in_b = _visible(ab % SB, B)
    at_c, in_c = _visible(tl.arange(0, SC), C)
    at_x = ((at_a * (B[I1] * B[I2]) + at_b) * (C[I1] * C[I2]))[:, None] + at_c[None, :]
    in_x = (in_a & in_b)[:, None] & in_c[None, :]
    at_n, in_n = _hidden(nm // SM, C)
    at_m, in_m = _hidden(nm % SM, B)
    at_l, in_l = _hidden(tl.arange(0, SL), A)
    at_y = (at_m * (C[K1] * C[K2]) + at_n)[:, None] + (at_l * (B[K1] * B[K2] * C[K1] * C[K2]))[None, :]
    in_y = (in_n & in_m)[:, None] & in_l[None, :]
    update = tl.load(clock) + batch
    key = tl.load(keys + model)
    data += model.to(tl.int64) * data_stride
    load_scale += model * VISIBLE
    load_shift += model * VISIBLE
    order += model * order_stride + batch * N
    gradients += model.to(tl.int64) * STRIDE
    x0 = load_sample(data, order, load_scale, load_shift, i, n_valid, at_x, in_x, VISIBLE, BYTE_SCALE, VISIBLE_GAUSSIAN)
    after_previous(PDL)
    a, b, c, size_a, size_b, size_c = _factors(weights, 0, A, B, C, MIDDLE, HALVES)
    size = _product(size_a, size_b, size_c)
    bias_x = fresh(weights + AT_B + at_x, in_x)
    bias_y = fresh(weights + AT_B + VISIBLE + at_y, in_y)
    # A chain counts as `weight` samples. Until the end, all weights are at most 1, so that operands stay in the range
    # of 16-bit floats.
    weight, largest = 1.0, 1.0
    if PERSISTENT:
        weight = n_valid.to(tl.float32) / CHAINS
        largest = tl.maximum(weight, 1.0)
    positive = tl.where(i < n_valid, 1.0 / largest, 0.0)
    negative = positive
    field = _up(x0.to(OPERAND), bias_y, weights, a, b, c, size, A, B, C, RANK, MIDDLE, HALVES, PRECISION)
    h0 = -positive * mean(field, HIDDEN_GAUSSIAN)
    state = chains + (model * CHAINS + i).to(tl.int64) * VISIBLE + at_x
    x1 = x0
    if PERSISTENT:
        x1 = fresh(state, in_x & (i < CHAINS))
        field = _up(x1.to(OPERAND), bias_y, weights, a, b, c, size, A, B, C, RANK, MIDDLE, HALVES, PRECISION)
        negative = tl.where(i < CHAINS, weight / largest, 0.0)
    for step in range(STEPS):
        to_y = _hidden_numbers(key, i, update, 2 * step, A, B, C, HIDDEN_GAUSSIAN)
        y = draw_layer(field, to_y, HIDDEN_GAUSSIAN).to(OPERAND)
        towards = _down(y, bias_x, weights, a, b, c, size, A, B, C, RANK, MIDDLE, HALVES, PRECISION)
        to_x = _visible_numbers(key, i, update, 2 * step + 1, A, B, C, VISIBLE_GAUSSIAN)
        x1 = draw_layer(towards, to_x, VISIBLE_GAUSSIAN)
        field = _up(x1.to(OPERAND), bias_y, weights, a, b, c, size, A, B, C, RANK, MIDDLE, HALVES, PRECISION)
    if PERSISTENT:
        tl.store(state, x1, mask=in_x & (i < CHAINS))
    h1 = negative * mean(field, HIDDEN_GAUSSIAN)
    share = largest / N
    tl.atomic_add(gradients + AT_B + at_x, share * (negative * x1 - positive * x0), mask=in_x, sem="relaxed")
    tl.atomic_add(gradients + AT_B + VISIBLE + at_y, share * (h0 + h1), mask=in_y, sem="relaxed")
    x0, x1, h0, h1 = x0.to(OPERAND), x1.to(OPERAND), h0.to(OPERAND), h1.to(OPERAND)
    for r in range(RANK):
        if RANK > 1:
            a, b, c, size_a, size_b, size_c = _factors(weights, r, A, B, C, MIDDLE, HALVES)
        grad_a, grad_b, grad_c = _parts(SN * SM, SL, SA), _parts(SA * SN, SM, SB), _parts(SA * SB, SN, SC)
        grad_a, grad_b, grad_c = _add_slopes(x0, h0, a, b, c, grad_a, grad_b, grad_c, A, B, C, MIDDLE, PRECISION)
        grad_a, grad_b, grad_c = _add_slopes(x1, h1, a, b, c, grad_a, grad_b, grad_c, A, B, C, MIDDLE, PRECISION)
        _keep_gradient(gradients, weights, tl.sum(grad_a, 0) * (share * size_b * size_c), r, A)
        _keep_gradient(gradients, weights, tl.sum(grad_c, 0) * (share * size_a * size_b), r, C)
        if MIDDLE:
            _keep_gradient(gradients, weights, tl.sum(grad_b, 0) * (share * size_a * size_c), r, B)
