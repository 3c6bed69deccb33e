"""The Triton kernel of one update for any number of layers of any size, tile by tile, states in scratch memory.

The form of the parameters is that of :mod:`mvrbm.backends.cuda.per_sample_kernels`, which has the step.
"""

# mypy: ignore-errors
# ruff: noqa: E741
import triton
import triton.language as tl

from mvrbm.backends.cuda.draws import draw_layer, mean, normal, uniform


@triton.jit
def _product(
    a, a_row, a_column, b, b_row, b_column, c, width, M, N, K,
    MODE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply matrices in memory, tile by tile: c = a b, c += a b, or c += a b by atomic additions."""
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
    """Compute weighted means of a layer from fields that include its bias."""
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        field = tl.load(source + at, mask=at < SIZE, other=0.0)
        tl.store(target + at, weight * mean(field, GAUSSIAN), mask=at < SIZE)
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
            numbers = tl.load(recorded + at, mask=inside, other=0.0)
        elif GAUSSIAN:
            numbers = tl.reshape(normal(key, update, sample, draw, start // 4, 2, BLOCK // 2), [BLOCK])
        else:
            numbers = tl.reshape(uniform(key, update, sample, draw, start // 4, 2, BLOCK // 2), [BLOCK])
        field = tl.load(source + at, mask=inside, other=0.0)
        tl.store(target + at, draw_layer(field, numbers, GAUSSIAN), mask=inside)
    tl.debug_barrier()


@triton.jit
def _add_field(
    x, U, half, field, I: tl.constexpr, J: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the field of one layer on the hidden layer, sum U_r X V_r'."""
    V = U + RANK * K * I
    for r in range(RANK):
        _product(x, J, 1, V + r * L * J, 1, J, half, L, I, L, J, "set", BLOCK, PRECISION)
        _product(U + r * K * I, I, 1, half, L, 1, field, L, K, L, I, "add", BLOCK, PRECISION)


@triton.jit
def _upwards(
    x, bias, factors, half, field, K: tl.constexpr, L: tl.constexpr, LAYERS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the hidden field with bias, from the states of all layers, one after another in memory."""
    _copy(bias, field, K * L, 1024)
    for m in tl.static_range(len(LAYERS)):
        _add_field(x + LAYERS[m][5], factors + LAYERS[m][4], half, field, LAYERS[m][0], LAYERS[m][1], LAYERS[m][2], K,
                   L, BLOCK, PRECISION)  # fmt: skip


@triton.jit
def _send_down(
    y, U, half, state, I: tl.constexpr, J: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the field of one layer with bias, B + sum U_r' Y V_r."""
    V = U + RANK * K * I
    _copy(V + RANK * L * J, state, I * J, 1024)
    for r in range(RANK):
        _product(U + r * K * I, 1, I, y, L, 1, half, L, I, L, K, "set", BLOCK, PRECISION)
        _product(half, L, 1, V + r * L * J, J, 1, state, J, I, J, L, "add", BLOCK, PRECISION)


@triton.jit
def _gradients_of(
    x, h, weight, U, to_u, half, I: tl.constexpr, J: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr,
    L: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradient of one layer's parameters for states x and weighted hidden means h."""
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
    x, h, weight, factors, gradient, half, SIZE: tl.constexpr, K: tl.constexpr, L: tl.constexpr, LAYERS: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradient of all parameters for states x of all layers and weighted hidden means h."""
    for m in tl.static_range(len(LAYERS)):
        _gradients_of(x + LAYERS[m][5], h, weight, factors + LAYERS[m][4], gradient + LAYERS[m][4], half, LAYERS[m][0],
                LAYERS[m][1], LAYERS[m][2], K, L, BLOCK, PRECISION)  # fmt: skip
    _add_all(h, gradient + SIZE - K * L, 1.0, K * L)


@triton.jit
def _add_all(source, target, weight, SIZE: tl.constexpr):
    for start in range(0, SIZE, 1024):
        at = start + tl.arange(0, 1024)
        value = weight * tl.load(source + at, mask=at < SIZE, other=0.0)
        tl.atomic_add(target + at, value, mask=at < SIZE, sem="relaxed")


@triton.jit
def _load_states(source, target, scales, shifts, factor, SIZE: tl.constexpr):
    """Convert one layer of a sample to units of its statistic around its offset."""
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
    """Compute one batch's gradient, for any number of layers of any size.

    `LAYERS` has, for each layer: I, J, rank, whether it is Gaussian, the position of its parameters, the position
    of its states among the `STATES` entries of a sample, and the factor of its data. Program (i, s) has scratch memory
    for two states, three hidden arrays and one intermediate product of `HALF` entries.
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
    gradient = gradients + model * STRIDE
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
        _all_slopes(x0, h, -1.0 / N, now, gradient, half, SIZE, K, L, LAYERS, BLOCK, PRECISION)
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
        _all_slopes(x1, h, weight, now, gradient, half, SIZE, K, L, LAYERS, BLOCK, PRECISION)
