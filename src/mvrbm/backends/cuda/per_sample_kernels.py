r"""Triton kernels that compute the gradient for one update on small matrices, with one program per sample.

`small_step` supports couplings of rank 1. It can also perform the step of the previous update, so that each update is a
single launch. `stacked_step` supports ranks 2 to 8, and a label in addition to the matrix. Its steps are performed by
`apply` from :mod:`mvrbm.backends.cuda.step_kernels`.

Each model's parameters are one flat array, which contains the factors U (R, K, I) and V (R, L, J) and the bias (I, J)
for each visible layer, followed by the hidden bias (K, L). Consecutive models are `STRIDE` elements apart. The state of
a layer is its *statistic relative to the offset* (for Gaussian units, :math:`x / s - \mu`; for Bernoulli units, the
values). In these variables, the mean of every layer is :math:`g(b + f)`, where g is the logistic function or the
identity (see :mod:`mvrbm.backends.layout`).

A launch processes batch number `batch` of an epoch. `PDL` is described in :mod:`mvrbm.backends.cuda.overlap`.

`stacked_step` stores the ranks side by side, so that the sum over ranks is part of a product: :math:`\sum_r U_r X
V_r^\top` takes only two products. The first multiplies :math:`X^\top` by all :math:`U_r^\top` side by side, a matrix of
shape (I, R * K). The second multiplies the result by the transpose of all :math:`V_r` side by side, a matrix of shape
(L, R * J). The same form is used in the downward direction, where V comes first, and for the gradient.

A label is a second visible layer, which consists of a single categorical variable and is coupled by a full matrix.
Here, that matrix has shape (classes, K, L), so that the weights of each category are contiguous. These weights are the
field that the category induces on the hidden layer. The constants below are the indices of the entries in the tuple
`LABEL`, which is empty if there is no label.
"""

# mypy: ignore-errors
# ruff: noqa: E741
import triton
import triton.language as tl

from mvrbm.backends.cuda.draws import draw_layer, matrix_numbers, mean
from mvrbm.backends.cuda.overlap import after_previous, fresh
from mvrbm.backends.cuda.step_kernels import factor_at, keep_norm, keep_step, rates_of, schatten, stepped
from mvrbm.random.kernels import uniform_places

# Entries in `LABEL`: number of categories.
CLASSES = tl.constexpr(0)
# Number of categories, rounded up to a power of two.
WIDE = tl.constexpr(1)
# Position of the full matrix in the flat parameters. The bias follows it.
WEIGHTS = tl.constexpr(2)
# Position of the one-hot vector in the states of a chain.
STATES_AT = tl.constexpr(3)
# Number of hidden units.
UNITS = tl.constexpr(4)
# 1 if the label comes before the matrix among the layers, otherwise 0.
FIRST = tl.constexpr(5)


@triton.jit
def load_sample(data, order, scales, shifts, i, n_valid, at, inside, AREA: tl.constexpr, BYTE_SCALE: tl.constexpr,
                GAUSSIAN: tl.constexpr):  # fmt: skip
    """Return the statistic of sample i in a batch relative to the offset, or zeros if there is no sample i."""
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


@triton.jit(do_not_specialize=["batch", "n_valid"])
def small_step(
    data, order, weights, momenta, pending, gradients, new_weights, new_momenta, cleared, gains, new_gains,
    multiplier, rates, clock, keys, chains, load_scale, load_shift,
    batch, n_valid, order_stride, data_stride,
    N: tl.constexpr, CHAINS: tl.constexpr, SAMPLES: tl.constexpr, STRIDE: tl.constexpr,
    I: tl.constexpr, J: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    STEPS: tl.constexpr, PERSISTENT: tl.constexpr, VISIBLE_GAUSSIAN: tl.constexpr, HIDDEN_GAUSSIAN: tl.constexpr,
    BYTE_SCALE: tl.constexpr, NORMALIZED: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr, PENDING: tl.constexpr, KEEPERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the gradient for one batch, for a rank-1 coupling and a layer whose dimensions each fit into one tile.

    Program (p, s) processes `SAMPLES` samples of model s sequentially and accumulates their gradient in registers.

    If `PENDING` is set, every program first performs the step for the previous batch, using `weights`, `momenta` and
    the gradient `pending`. The last programs along the first axis (at most two `KEEPERS`) do not process samples. They
    write the result of that step to `new_weights` and `new_momenta`, set the next launch's gradient `cleared` to zero,
    and compute the gains for normalized steps. The first keeper writes U and the visible bias, and the last keeper
    writes V and the hidden bias. The results are written to separate buffers because other programs still read the old
    values.

    The order of products keeps matrices in the register layout of the tensor cores: each thread has neighboring entries
    that the next product sums over. X' and Y' are the second operand in every product, except for the gradient. States
    outside a layer's bounds are arbitrary, because the factors are zero there.
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
    key = tl.load(keys + model)
    data += model.to(tl.int64) * data_stride
    multiplier += model * STRIDE
    load_scale += model * (I * J)
    load_shift += model * (I * J)
    order += model * order_stride + batch * N
    now, moving, owed = weights + model * STRIDE, momenta + model * STRIDE, pending + model * STRIDE
    mine = gradients + model * STRIDE
    i = program * SAMPLES
    # Everything that does not depend on the parameters (rates, data and random numbers) comes before the wait.
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
        to_y = matrix_numbers(key, update, i, 0, ROWS, K, L, HIDDEN_GAUSSIAN, BK, BL)
        to_x = matrix_numbers(key, update, i, 1, ROWS, I, J, VISIBLE_GAUSSIAN, BI, BJ)
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
        # A chain counts as `weight` samples. Until the end, all weights are at most 1, so that operands stay in the
        # range of 16-bit floats.
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
                if SAMPLES > 1 or step > 0:
                    to_y = matrix_numbers(key, update, i, 2 * step, ROWS, K, L, HIDDEN_GAUSSIAN, BK, BL)
                y = draw_layer(field, to_y, HIDDEN_GAUSSIAN)
                y_t = tl.trans(y).to(OPERAND)
                towards = _down(y_t, u, v, size, B, PRECISION)
                if SAMPLES > 1 or step > 0:
                    to_x = matrix_numbers(key, update, i, 2 * step + 1, ROWS, I, J, VISIBLE_GAUSSIAN, BI, BJ)
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
    """Perform the pending step, if any, for a factor and a bias, and write the results and the factor's gain."""
    factor, momentum = stepped(weights, momenta, pending, at, inside, scale, rate, keep, decay, PENDING)
    if PENDING:
        bias, of_bias = stepped(weights, momenta, pending, bias_at, in_bias, bias_scale, bias_rate, keep, 0.0, PENDING)
        keep_step(new_weights, new_momenta, cleared, at, inside, factor, momentum)
        keep_step(new_weights, new_momenta, cleared, bias_at, in_bias, bias, of_bias)
    if NORMALIZED:
        tl.store(gain, schatten(factor, PRECISION))


@triton.jit
def operand(factor, HALVES: tl.constexpr):
    """Return a factor as an operand of products, and the scale by which results must be multiplied."""
    # The largest 16-bit float is 65,504. Training may exceed it temporarily, so factors are divided by their
    # largest entry. Other operands are then at most as large as a tile is wide.
    size = 1.0
    if HALVES:
        size = tl.maximum(tl.max(tl.abs(factor)), 1e-30)
        factor = (factor * (1.0 / size)).to(tl.float16)
    return factor, size


@triton.jit
def not_before(values, size):
    """Return the values unchanged, but delay their use until `size` is known.

    By then, all loads have been issued.
    """
    # The compiler converts values to the layout of the next product as soon as they are loaded. The conversion needs a
    # barrier for all threads, which delays later loads. Sizes are never negative. If a size is the constant 1, this
    # function has no effect.
    return values + tl.minimum(size, 0.0)


@triton.jit
def both_sizes(size_u, size_v):
    """Return the product of two scales, clamped to a finite value so that zero fields remain zero."""
    return tl.minimum(size_u * size_v, 3e38)


@triton.jit
def _up(x_t, u, v, size, field, PRECISION: tl.constexpr):
    """Return V X' and the sum of the hidden field and U X V', given the transpose of X."""
    half = tl.dot(v, x_t, input_precision=PRECISION).to(v.dtype)  # (L, I)
    return half, field + size * tl.dot(u, tl.trans(half), input_precision=PRECISION)


@triton.jit
def _down(y_t, u, v, size, field, PRECISION: tl.constexpr):
    """Return the sum of the visible field and U' Y V, given the transpose of Y."""
    half = tl.trans(tl.dot(tl.trans(v), y_t, input_precision=PRECISION)).to(v.dtype)  # Y V, (K, J)
    return field + size * tl.dot(tl.trans(u), half, input_precision=PRECISION)


@triton.jit
def _add_slopes(x, h, half, u, grad_u, grad_v, PRECISION: tl.constexpr):
    """Add the gradients H (V X') for U and (H' U) X for V to the totals. `half` is V X'."""
    h = h.to(u.dtype)
    grad_u = tl.dot(h, half, acc=grad_u, input_precision=PRECISION)
    half = tl.dot(tl.trans(h), u, input_precision=PRECISION).to(u.dtype)  # (L, I)
    return grad_u, tl.dot(half, x.to(u.dtype), acc=grad_v, input_precision=PRECISION)


@triton.jit
def _turn(wide, R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Transpose each of R side-by-side matrices of shape (A, B): (A, R * B) -> (B, R * A)."""
    return tl.reshape(tl.permute(tl.reshape(wide, [A, R, B]), (2, 1, 0)), [B, R * A])


@triton.jit
def _stack(wide, R: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Stack R side-by-side matrices of shape (A, B) vertically: (A, R * B) -> (R * A, B)."""
    return tl.reshape(tl.permute(tl.reshape(wide, [A, R, B]), (1, 0, 2)), [R * A, B])


@triton.jit(do_not_specialize=["batch", "n_valid"])
def stacked_step(
    data, labels, order, weights, gradients, gains, sizes, clock, keys, chains, load_scale, load_shift,
    batch, n_valid, order_stride, data_stride, label_stride,
    N: tl.constexpr, CHAINS: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, SAMPLES: tl.constexpr,
    STRIDE: tl.constexpr, STATES: tl.constexpr, AT_U: tl.constexpr, AT_C: tl.constexpr, AT_X: tl.constexpr,
    BLOCKS: tl.constexpr, LABEL: tl.constexpr,
    I: tl.constexpr, J: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BI: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, BL: tl.constexpr,
    STEPS: tl.constexpr, PERSISTENT: tl.constexpr, VISIBLE_GAUSSIAN: tl.constexpr, HIDDEN_GAUSSIAN: tl.constexpr,
    BYTE_SCALE: tl.constexpr, NORMALIZED: tl.constexpr, PRECISION: tl.constexpr,
    HALVES: tl.constexpr, EDGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the gradient for one batch.

    Program (p, s) processes `SAMPLES` samples of model s. The last programs compute gains.
    """
    program, model = tl.program_id(0), tl.program_id(1)
    ROWS: tl.constexpr = CHAINS if PERSISTENT else N
    MOST: tl.constexpr = N if N > ROWS else ROWS
    PROGRAMS: tl.constexpr = (MOST + SAMPLES - 1) // SAMPLES
    LABELED: tl.constexpr = len(LABEL) > 0
    # Add the gradients for the data at the end if they do not fit into registers while chains are sampled.
    LATE: tl.constexpr = R > 4 or LABELED
    AT_V: tl.constexpr = AT_U + RANK * K * I
    AT_B: tl.constexpr = AT_V + RANK * L * J
    # A Gibbs step samples the hidden layer, then the visible layers in order.
    DRAWS: tl.constexpr = 3 if LABELED else 2
    MATRIX_DRAW: tl.constexpr = 1 + LABEL[FIRST] if LABELED else 1
    weights += model.to(tl.int64) * STRIDE
    OPERAND: tl.constexpr = tl.float16 if HALVES else tl.float32
    ri, rj, rk, rl = tl.arange(0, BI), tl.arange(0, BJ), tl.arange(0, BK), tl.arange(0, BL)
    at_x, in_x = ri[:, None] * J + rj[None, :], (ri < I)[:, None] & (rj < J)[None, :]
    at_y, in_y = rk[:, None] * L + rl[None, :], (rk < K)[:, None] & (rl < L)[None, :]
    # Columns of the side-by-side factors, which combine the rank and the column within a rank.
    of_k, of_j = tl.arange(0, R * BK), tl.arange(0, R * BJ)
    at_u = AT_U + ri[:, None] + ((of_k // BK * K + of_k % BK) * I)[None, :]  # (I, R K)
    in_u = (ri < I)[:, None] & ((of_k // BK < RANK) & (of_k % BK < K))[None, :]
    at_v = AT_V + rl[:, None] * J + (of_j // BJ * (L * J) + of_j % BJ)[None, :]  # (L, R J)
    in_v = (rl < L)[:, None] & ((of_j // BJ < RANK) & (of_j % BJ < J))[None, :]
    update = tl.load(clock) + batch
    key = tl.load(keys + model)
    data += model.to(tl.int64) * data_stride
    labels += model.to(tl.int64) * label_stride
    load_scale += model * STATES + AT_X
    load_shift += model * STATES + AT_X
    order += model * order_stride + batch * N
    # Everything that does not depend on the parameters comes before the wait. The launch that wrote the chains has
    # finished, because the step kernel launched in between has waited for it.
    if SAMPLES == 1:
        x, label = _sample(
            data, labels, order, load_scale, load_shift, program, n_valid, at_x, in_x, I * J, LABEL, BYTE_SCALE,
            VISIBLE_GAUSSIAN,
        )  # fmt: skip
        if PERSISTENT:
            chain, chain_label = _chain(chains, program, model, at_x, in_x, CHAINS, STATES, AT_X, LABEL)
        to_y = matrix_numbers(key, update, program, 0, ROWS, K, L, HIDDEN_GAUSSIAN, BK, BL)
        to_x = matrix_numbers(key, update, program, MATRIX_DRAW, ROWS, I, J, VISIBLE_GAUSSIAN, BI, BJ)
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
    # A chain counts as `weight` samples. Until the end, all weights are at most 1, so that operands stay in the range
    # of 16-bit floats.
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
        half, field = _up_stacked(x.to(OPERAND), u, v, size, C + own, R, BJ, BK, PRECISION)
        h, data_half, data_x, data_label = -positive * mean(field, HIDDEN_GAUSSIAN), half, x, label
        if not LATE:
            grad_u, grad_v = _add_slopes_stacked(
                x.to(OPERAND), h.to(OPERAND), half, v, grad_u, grad_v, R, BJ, BK, PRECISION
            )
        negative = positive
        if PERSISTENT:
            x, label = chain, chain_label
            half, field = _up_stacked(x.to(OPERAND), u, v, size, C + chain_own, R, BJ, BK, PRECISION)
            negative = tl.where(i < CHAINS, weight / largest, 0.0)
        for step in range(STEPS):
            draw = DRAWS * step
            if SAMPLES > 1 or step > 0:
                to_y = matrix_numbers(key, update, i, draw, ROWS, K, L, HIDDEN_GAUSSIAN, BK, BL)
            y = draw_layer(field, to_y, HIDDEN_GAUSSIAN)
            field = C
            if LABELED:
                number = uniform_places(key, i, 0, update, draw + 2 - LABEL[FIRST])
                label = _draw_label(y, weights, at_y, in_y, number, LABEL)
                field += _of_label(weights, label, at_y, in_y, LABEL)
            towards = _down_stacked(y.to(OPERAND), u, v, size, B, R, BJ, BK, PRECISION)
            if SAMPLES > 1 or step > 0:
                to_x = matrix_numbers(key, update, i, draw + MATRIX_DRAW, ROWS, I, J, VISIBLE_GAUSSIAN, BI, BJ)
            x = draw_layer(towards, to_x, VISIBLE_GAUSSIAN)
            half, field = _up_stacked(x.to(OPERAND), u, v, size, field, R, BJ, BK, PRECISION)
        chain_h = negative * mean(field, HIDDEN_GAUSSIAN)
        if PERSISTENT:
            _keep_chain(chains, x, label, i, model, at_x, in_x, CHAINS, STATES, AT_X, LABEL)
        grad_b += negative * x - positive * data_x
        grad_c += h + chain_h
        if LATE:
            grad_u, grad_v = _add_slopes_stacked(
                data_x.to(OPERAND), h.to(OPERAND), data_half, v, grad_u, grad_v, R, BJ, BK, PRECISION
            )
        grad_u, grad_v = _add_slopes_stacked(
            x.to(OPERAND), chain_h.to(OPERAND), half, v, grad_u, grad_v, R, BJ, BK, PRECISION
        )
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
    """Return the matrix and category of sample i in a batch, or zeros if there is no sample i."""
    x = load_sample(data, order, scales, shifts, i, n_valid, at_x, in_x, AREA, BYTE_SCALE, GAUSSIAN)
    label = i * 0
    if len(LABEL) > 0:
        label = tl.load(labels + tl.load(order + i, mask=i < n_valid, other=0).to(tl.int64))
    return x, label


@triton.jit
def _chain(
    chains, i, model, at_x, in_x, CHAINS: tl.constexpr, STATES: tl.constexpr, AT_X: tl.constexpr, LABEL: tl.constexpr
):  # fmt: skip
    """Return the matrix and category of persistent chain i, or zeros if there is no chain i."""
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
    """Write the state of persistent chain i."""
    state = chains + (model * CHAINS + i).to(tl.int64) * STATES
    tl.store(state + AT_X + at_x, x, mask=in_x & (i < CHAINS))
    if len(LABEL) > 0:
        classes = tl.arange(0, LABEL[WIDE])
        one_hot = (classes == label).to(chains.dtype.element_ty)
        tl.store(state + LABEL[STATES_AT] + classes, one_hot, mask=(classes < LABEL[CLASSES]) & (i < CHAINS))


@triton.jit
def _draw_label(y, weights, at_y, in_y, number, LABEL: tl.constexpr):
    """Sample a label given the hidden layer, using one uniform random number."""
    classes = tl.arange(0, LABEL[WIDE])
    exists = classes < LABEL[CLASSES]
    weights += LABEL[WEIGHTS]
    field = fresh(weights + LABEL[CLASSES] * LABEL[UNITS] + classes, exists)
    inside = exists[:, None, None] & in_y[None, :, :]
    W = fresh(weights + (classes * LABEL[UNITS])[:, None, None] + at_y[None, :, :], inside)
    field += tl.sum(tl.sum(W * y[None, :, :], 1), 1)
    field = tl.where(exists, field, float("-inf"))
    mass = tl.exp(field - tl.max(field, 0))
    passed = tl.cumsum(mass, 0) <= number * tl.sum(mass, 0)
    return tl.minimum(tl.sum(passed.to(tl.int32), 0), LABEL[CLASSES] - 1)


@triton.jit
def _of_label(weights, label, at_y, in_y, LABEL: tl.constexpr):
    """Return the field of shape (K, L) that a label induces on the hidden layer, or 0 if there is no label."""
    field = 0.0
    if len(LABEL) > 0:
        field = fresh(weights + LABEL[WEIGHTS] + label * LABEL[UNITS] + at_y, in_y)
    return field


@triton.jit
def _add_label_gradient(
    gradients, label, h, share, at_y, in_y, LABEL: tl.constexpr
):  # fmt: skip
    """Add the gradients for the weights of a label's category and for the label's bias."""
    gradients += LABEL[WEIGHTS]
    tl.atomic_add(gradients + label * LABEL[UNITS] + at_y, h, mask=in_y, sem="relaxed")
    tl.atomic_add(gradients + LABEL[CLASSES] * LABEL[UNITS] + label, share, sem="relaxed")


@triton.jit
def _up_stacked(x, u, v, size, field, R: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """Return all U_r X side by side, with shape (K, R * J), and the hidden field plus the sum of U_r X V_r'."""
    half = _turn(tl.dot(tl.trans(x), u, input_precision=PRECISION).to(u.dtype), R, BJ, BK)
    return half, field + size * tl.dot(half, tl.trans(v), input_precision=PRECISION)


@triton.jit
def _down_stacked(y, u, v, size, field, R: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the visible field plus the sum of U_r' Y V_r."""
    half = _stack(tl.dot(y, v, input_precision=PRECISION).to(u.dtype), R, BK, BJ)  # (R K, J)
    return field + size * tl.dot(u, half, input_precision=PRECISION)


@triton.jit
def _add_slopes_stacked(
    x, h, half, v, grad_u, grad_v, R: tl.constexpr, BJ: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Add the gradients X (H V_r)' for all U_r' and H' (U_r X) for all V_r to the totals. `half` contains all U_r X."""
    grad_v = tl.dot(tl.trans(h), half, acc=grad_v, input_precision=PRECISION)
    half = _turn(tl.dot(h, v, input_precision=PRECISION).to(v.dtype), R, BK, BJ)  # (J, R K)
    return tl.dot(x, half, acc=grad_u, input_precision=PRECISION), grad_v
