r"""Triton kernels for updates with couplings expanded to full matrices, using batched products.

A coupling of rank R requires R products of small matrices per sample. For large R, a single product with the full
matrix :math:`W` is faster. The gradients for the factors follow from the gradient :math:`G` for the full matrix:
:math:`\partial U_r = \sum_{lj} G_{kl,ij} V_r^{lj}` and :math:`\partial V_r = \sum_{ki} G_{kl,ij} U_r^{ki}`.

The states of a layer are the values of its statistic (for Gaussian layers, x / s with the initial scale s). All visible
layers are columns of one array of shape (rows, VISIBLE). Each layer starts at a multiple of the tile width. Padding is
zero, except for the last column, which contains ones. In the array of hidden means, the column after the last unit
contains ones. The products for the gradient therefore contain the sums required for the biases. `W` has shape (HIDDEN,
VISIBLE) and is padded with zeros, as are the rows of states after the data and the chains. The entries of a layer are
in the order of their random numbers (see :mod:`mvrbm.random.philox`): if the number of columns is odd, the last column
comes after all the others.

The flat parameters of a model are the parameters of all couplings, the padded visible bias, the padded hidden bias, and
the padded log-variances if a layer learns them. They are followed by scratch memory for the gradient `G` of each
coupling with factors. Consecutive models are `STRIDE` elements apart.

An update consists of these launches:

* `downwards` and `upwards` alternately, for the Gibbs steps that sample missing entries in the data
* `upwards` (means for the data, samples for the chains), `downwards`, and `upwards` again (means for the chains)
* `gradients`, and `vary` from `full_variances` for learned variances
* the kernels in `full_step`

Chains at several temperatures also require the kernels in `full_tempering_kernels`. The tuple `LAYERS` has one row per
visible layer. The constants below are the indices of the entries in a row.
"""

# mypy: ignore-errors
# ruff: noqa: E741
import triton
import triton.language as tl

from mvrbm.backends.cuda.draws import draw_categories, draw_layer, mean, site_numbers
from mvrbm.backends.cuda.full_tempering_kernels import beta_of, exchanges_before, other_beta, turn_of
from mvrbm.backends.cuda.overlap import begin_next, fresh, wait
from mvrbm.random.kernels import normal_pairs, uniform_pairs
from mvrbm.sampling.tempered_kernels import softplus

#: Number of data columns per program. The number is small so that many programs share the rows.
GATHERED = tl.constexpr(16)
#: Kinds of units, by :attr:`mvrbm.units.Unit.sampled_as`.
KINDS = ("bernoulli", "gaussian", "categorical")

# Entries in a row of `LAYERS`: index of the unit kind in `KINDS`.
KIND = tl.constexpr(0)
# First column.
FIRST = tl.constexpr(1)
# Number of columns, including padding.
WIDTH = tl.constexpr(2)
# Sizes I and J of a sample.
ROWS = tl.constexpr(3)
COLUMNS = tl.constexpr(4)
# Stride between rows: entry (i, j) is in column FIRST + i PITCH + j if j < PITCH, otherwise in FIRST + I PITCH + i.
PITCH = tl.constexpr(5)
# Number of Kronecker products, or 0 for a dense coupling.
RANK = tl.constexpr(6)
# Position of U (R, K, I), then V (R, L, J), in the flat parameters.
FACTORS = tl.constexpr(7)
# Position of the full matrix (H, I J), or of its gradient (K I, L J) if there are factors.
FULL = tl.constexpr(8)
# Length of the last site axis of a categorical layer, or 1 for a single categorical variable.
SITE_COLUMNS = tl.constexpr(9)
# Position of the terms of the gain for U, which are followed by the terms for V.
GAINS = tl.constexpr(10)
# Index of the layer's first program in `build`, and of the first program after the layer.
PROGRAMS = tl.constexpr(11)
END = tl.constexpr(12)
# Width as a power of two if the layer learns its variances (see `full_variances`), otherwise 0.
LEARNS = tl.constexpr(13)


@triton.jit(do_not_specialize=["batch", "n_valid"])
def gather(
    data, order, states, sums, clock, batch, n_valid, order_stride, data_stride, N: tl.constexpr,
    ALL_ROWS: tl.constexpr, VISIBLE: tl.constexpr, BG: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Copy the samples of a batch to the first rows of the states, and sum them if layers are centered."""
    copy_batch(
        data, order, states, sums, clock, batch, n_valid, order_stride, data_stride, tl.program_id(0),
        tl.program_id(1), N, ALL_ROWS, VISIBLE, BG, CENTERED,
    )  # fmt: skip


@triton.jit
def copy_batch(
    data, order, states, sums, clock, batch, n_valid, order_stride, data_stride, tile, model, N: tl.constexpr,
    ALL_ROWS: tl.constexpr, VISIBLE: tl.constexpr, BG: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Copy one tile of columns for the samples in a batch."""
    columns = tile * GATHERED + tl.arange(0, GATHERED)
    order += model * order_stride + (tl.load(clock + 1) + batch) * N
    total = tl.zeros([GATHERED], tl.float32)
    for m in range(0, N, BG):
        rows = m + tl.arange(0, BG)
        row = tl.load(order + rows, mask=rows < n_valid, other=0).to(tl.int64) + model.to(tl.int64) * data_stride
        x = tl.load(data + row[:, None] * VISIBLE + columns[None, :], mask=(rows < n_valid)[:, None], other=0.0)
        target = states + (model.to(tl.int64) * ALL_ROWS + rows[:, None]) * VISIBLE + columns[None, :]
        tl.store(target, x, mask=(rows < N)[:, None])
        if CENTERED:
            total += tl.sum(x.to(tl.float32), 0)
    if CENTERED:
        tl.store(sums + model * (2 * VISIBLE) + columns, total)


@triton.jit(do_not_specialize=["batch", "n_valid", "draw", "gibbs_step"])
def upwards(
    states, weight, bias, means, samples, sums, base, differences, turns, keys, clock, batch, n_valid, draw,
    gibbs_step, CHAINS: tl.constexpr, ALL_ROWS: tl.constexpr, CHAINS_AT: tl.constexpr, HIDDEN: tl.constexpr,
    VISIBLE: tl.constexpr, UNITS: tl.constexpr, STRIDE: tl.constexpr,
    SAMPLE_ROWS: tl.constexpr, GAUSSIAN: tl.constexpr, PERSISTENT: tl.constexpr, SUMMED: tl.constexpr,
    FIRST_TILE: tl.constexpr,
    DRAW_DATA: tl.constexpr, DRAW_CHAINS: tl.constexpr, TEMPERATURES: tl.constexpr, STEPS: tl.constexpr,
    COMPARE: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute means or samples of the hidden layer for tiles of states, starting at `FIRST_TILE`.

    Rows from `CHAINS_AT` onward are chains. Means are written to the same rows as the states, and samples are written
    to `samples`. If `SUMMED` is set, means are also summed. With several `TEMPERATURES`, each chain has its own
    temperature. If `COMPARE` is set, the kernel instead computes the change in free energy that an exchange would cause
    and adds it to `differences`.
    """
    tile_m, tile_n, model = tl.program_id(0) + FIRST_TILE, tl.program_id(1), tl.program_id(2)
    of_data = tile_m * BM < CHAINS_AT
    columns = tile_n * BN + tl.arange(0, BN)
    within = tl.arange(0, BK)
    rows = tile_m * BM + tl.arange(0, BM)
    x = states + (model.to(tl.int64) * ALL_ROWS + rows[:, None]) * VISIBLE + within[None, :]
    w = weight + (model.to(tl.int64) * HIDDEN + columns[None, :]) * VISIBLE + within[:, None]
    field = tl.zeros([BM, BN], tl.float32)
    own = rows if of_data else rows - CHAINS_AT
    turn = turn_of(turns + model, clock, batch, gibbs_step, STEPS) if TEMPERATURES > 1 else 0
    if TEMPERATURES > 1:
        draw += exchanges_before(gibbs_step, turn, TEMPERATURES)
    drawing = tl.where(of_data, 1 if DRAW_DATA else 0, 1 if DRAW_CHAINS else 0)
    numbers = tl.zeros([BM, BN], tl.float32)
    if drawing > 0:  # before the wait, so that the random numbers cost no time
        numbers = _pair_numbers(tl.load(keys + model), tl.load(clock) + batch, draw, own, tile_n * BN, BN, GAUSSIAN)
    wait(PDL)
    biases = fresh(bias + model * STRIDE + columns, True)  # prefetch: the load completes while the loop runs
    for k in range(0, VISIBLE, BK):
        field = tl.dot(tl.load(x + k), tl.load(w + k), acc=field, input_precision=PRECISION)
    begin_next(PDL)  # the next product may start, because writing results occupies few multiprocessors
    n_chains = CHAINS if PERSISTENT else n_valid
    valid = own < (n_valid if of_data else n_chains)
    exists = (columns < UNITS)[None, :] & valid[:, None]
    if TEMPERATURES > 1:
        level = fresh(base + model * HIDDEN + columns, True)[None, :]
        beta = tl.where(of_data, 1.0, beta_of(own, CHAINS, TEMPERATURES))
        slope = field - level
        field = level + beta[:, None] * slope
    field += biases[None, :]
    if COMPARE:
        other, paired = other_beta(own, turn, CHAINS, TEMPERATURES)
        moved = field + (other - beta)[:, None] * slope
        change = tl.sum(tl.where(exists, softplus(field) - softplus(moved), 0.0), 1)
        tl.atomic_add(differences + model * CHAINS + own, change, mask=paired & valid, sem="relaxed")
        return
    if of_data | (drawing == 0):
        value = tl.where(exists, mean(field, GAUSSIAN), 0.0)
        one = (columns == UNITS)[None, :] & valid[:, None]
        target = means + (model.to(tl.int64) * ALL_ROWS + rows[:, None]) * HIDDEN + columns[None, :]
        tl.store(target, tl.where(one, 1.0, value).to(means.dtype.element_ty))
        if SUMMED:
            total = sums + model * (2 * HIDDEN) + (0 if of_data else HIDDEN) + columns
            tl.atomic_add(total, tl.sum(value, 0), mask=columns < UNITS, sem="relaxed")
    if drawing > 0:
        drawn = draw_layer(field, numbers, GAUSSIAN)
        target = samples + (model.to(tl.int64) * SAMPLE_ROWS + own[:, None]) * HIDDEN + columns[None, :]
        tl.store(target, drawn.to(samples.dtype.element_ty), mask=exists)


@triton.jit
def line_and_column(place, LINES: tl.constexpr, COLUMNS_: tl.constexpr, PITCH_: tl.constexpr):
    """Return the line and column of the entry at a place in a layer."""
    line, column = place // PITCH_, place % PITCH_
    if COLUMNS_ > PITCH_:
        last = place >= LINES * PITCH_
        line, column = tl.where(last, place - LINES * PITCH_, line), tl.where(last, PITCH_, column)
    return line, column


@triton.jit
def place_at(line, column, LINES: tl.constexpr, COLUMNS_: tl.constexpr, PITCH_: tl.constexpr):
    """Return the place of an entry in a layer."""
    place = line * PITCH_ + column
    if COLUMNS_ > PITCH_:
        place = tl.where(column < PITCH_, place, LINES * PITCH_ + line)
    return place


@triton.jit
def _pair_numbers(key, update, draw, rows, first, WIDTH_: tl.constexpr, GAUSSIAN: tl.constexpr):
    """Return the random numbers that sample a tile of a layer, from the place `first` to `first + WIDTH_ - 1`."""
    place = first + 2 * tl.arange(0, WIDTH_ // 2)[None, :]
    if GAUSSIAN:
        numbers = normal_pairs(key, rows[:, None], place, update, draw)
    else:
        numbers = uniform_pairs(key, rows[:, None], place, update, draw)
    return numbers


@triton.jit(do_not_specialize=["batch", "n_valid", "draw", "gibbs_step"])
def downwards(
    samples, weight, bias, states, sums, base, differences, turns, keys, clock, ratios, known, order, batch,
    n_valid, draw, gibbs_step, order_stride, known_stride, N: tl.constexpr, CHAINS: tl.constexpr,
    ALL_ROWS: tl.constexpr, CHAINS_AT: tl.constexpr, HIDDEN: tl.constexpr, VISIBLE: tl.constexpr, STRIDE: tl.constexpr,
    SAMPLE_ROWS: tl.constexpr, LAYERS: tl.constexpr, PERSISTENT: tl.constexpr, SUMMED: tl.constexpr,
    VARIES: tl.constexpr, FILL: tl.constexpr, START: tl.constexpr, TEMPERATURES: tl.constexpr, STEPS: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sample all visible layers of the chains given samples of the hidden layer.

    If `SUMMED` is set, the samples are also summed. If `FILL` is set, the kernel samples the missing entries in the
    data instead. If `START` is also set, it samples them from the biases alone. With several `TEMPERATURES`, each chain
    is sampled at its own temperature, and the kernel adds the visible layers' contribution to `differences`. `draw` is
    the draw number of the first layer.
    """
    tile_m, tile_n, model = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    within = tl.arange(0, BK)
    y = samples + (model.to(tl.int64) * SAMPLE_ROWS + rows[:, None]) * HIDDEN + within[None, :]
    w = weight + (model.to(tl.int64) * HIDDEN + within[:, None]) * VISIBLE + columns[None, :]
    field = tl.zeros([BM, BN], tl.float32)
    key = tl.load(keys + model)
    update = tl.load(clock) + batch
    turn = turn_of(turns + model, clock, batch, gibbs_step, STEPS) if TEMPERATURES > 1 else 0
    if TEMPERATURES > 1:
        draw += exchanges_before(gibbs_step, turn, TEMPERATURES)
    numbers = tl.zeros([BM, BN], tl.float32)
    for m in tl.static_range(len(LAYERS)):  # before the wait, so that the random numbers cost no time
        first = tile_n * BN - LAYERS[m][FIRST]
        if (LAYERS[m][KIND] != 2) & (first >= 0) & (first < LAYERS[m][WIDTH]):
            numbers = _pair_numbers(key, update, draw + m, rows, first, BN, LAYERS[m][KIND] == 1)
    wait(PDL)
    biases = fresh(bias + model * STRIDE + columns, True)
    for k in range(0, 0 if START else HIDDEN, BK):
        field = tl.dot(tl.load(y + k), tl.load(w + k * VISIBLE), acc=field, input_precision=PRECISION)
    spread = 1.0
    if VARIES:
        spread = 1.0 / fresh(ratios + model * VISIBLE + columns, True)[None, :]
        field *= spread * spread
    if TEMPERATURES > 1:
        level, beta = fresh(base + model * VISIBLE + columns, True)[None, :], beta_of(rows, CHAINS, TEMPERATURES)
        field = level + beta[:, None] * (field - level)
        other, paired = other_beta(rows, turn, CHAINS, TEMPERATURES)
        gap = other - beta
    field += biases[None, :]
    exist = rows < (CHAINS if PERSISTENT and not FILL else n_valid)
    target = states + (model.to(tl.int64) * ALL_ROWS + rows[:, None]) * VISIBLE + columns[None, :]
    sums += model * (2 * VISIBLE) + columns
    drawing = (rows >= 0)[:, None] & (columns >= 0)[None, :]
    if FILL:
        row = tl.load(order + model * order_stride + (tl.load(clock + 1) + batch) * N + rows, mask=exist, other=0)
        at = known + (model.to(tl.int64) * known_stride + row.to(tl.int64))[:, None] * VISIBLE + columns[None, :]
        drawing = tl.load(at, mask=exist[:, None], other=1) == 0
    else:
        target += CHAINS_AT * VISIBLE
        sums += VISIBLE
    for m in tl.static_range(len(LAYERS)):
        if (tile_n * BN >= LAYERS[m][FIRST]) & (tile_n * BN < LAYERS[m][FIRST] + LAYERS[m][WIDTH]):
            own = columns - LAYERS[m][FIRST]
            line, column = line_and_column(own, LAYERS[m][ROWS], LAYERS[m][COLUMNS], LAYERS[m][PITCH])
            real = (line < LAYERS[m][ROWS]) & (column < LAYERS[m][COLUMNS])
            if LAYERS[m][KIND] == 2:
                SITES: tl.constexpr = BN // LAYERS[m][PITCH]
                sites = (tile_n * BN - LAYERS[m][FIRST]) // LAYERS[m][PITCH] + tl.arange(0, SITES)
                site_uniform = site_numbers(
                    key, update, rows[:, None], sites[None, :], draw + m, LAYERS[m][ROWS], LAYERS[m][SITE_COLUMNS]
                )
                categories = tl.arange(0, LAYERS[m][PITCH]) < LAYERS[m][COLUMNS]
                there = exist[:, None, None] & (sites < LAYERS[m][ROWS])[None, :, None] & categories[None, None, :]
                by_site = tl.reshape(field, [BM, SITES, LAYERS[m][PITCH]])
                drawn = tl.reshape(draw_categories(by_site, site_uniform, there, LAYERS[m][COLUMNS]), [BM, BN])
            else:
                drawn = draw_layer(field, numbers, LAYERS[m][KIND] == 1)
                if LAYERS[m][LEARNS] > 0:
                    drawn = field + spread * (drawn - field)
            drawn = tl.where(exist[:, None] & drawing, drawn, 0.0)
            tl.store(target, drawn.to(states.dtype.element_ty), mask=real[None, :] & drawing)
            if SUMMED:
                tl.atomic_add(sums, tl.sum(drawn, 0), mask=real, sem="relaxed")
            if TEMPERATURES > 1:
                change = gap * tl.sum(drawn * level, 1)
                tl.atomic_add(differences + model * CHAINS + rows, change, mask=paired & exist, sem="relaxed")


@triton.jit(do_not_specialize=["n_valid"])
def gradients(
    states, means, visible_sums, hidden_sums, gradient, offset, new_offset, center, ratios, n_valid,
    N: tl.constexpr, CHAINS: tl.constexpr, PERSISTENT: tl.constexpr, ALL_ROWS: tl.constexpr, CHAINS_AT: tl.constexpr,
    HIDDEN: tl.constexpr, VISIBLE: tl.constexpr, UNITS: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    HIDDEN_PITCH: tl.constexpr, STRIDE: tl.constexpr, VISIBLE_BIAS: tl.constexpr, LAYERS: tl.constexpr,
    CENTERED: tl.constexpr, FOLLOWS: tl.constexpr, VARIES: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r"""Compute the gradients for biases and full matrices, which are means over chains minus means over data.

    If `CENTERED` is set, the gradient for the matrices is :math:`G - s_h \mu^\top - \lambda s^\top`, where :math:`G` is
    the uncentered gradient, :math:`s` and :math:`s_h` are the gradients for the visible and hidden biases, :math:`\mu`
    is the visible offset, and :math:`\lambda` is the hidden offset. If `FOLLOWS` is set, the hidden offset is a running
    mean over the data.
    """
    tile_m, tile_n, model = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    units = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    within = tl.arange(0, BK)
    h = means + (model.to(tl.int64) * ALL_ROWS + within[None, :]) * HIDDEN + units[:, None]
    x = states + (model.to(tl.int64) * ALL_ROWS + within[:, None]) * VISIBLE + columns[None, :]
    G = tl.zeros([BM, BN], tl.float32)
    wait(PDL)
    if CENTERED:  # prefetch: the load completes while the loop runs
        visible_sums += model * (2 * VISIBLE) + columns
        hidden_sums += model * (2 * HIDDEN) + units
        of_data, of_chains = fresh(hidden_sums, True), fresh(hidden_sums + HIDDEN, True)
        visible_of_data, visible_of_chains = fresh(visible_sums, True), fresh(visible_sums + VISIBLE, True)
        mu = tl.load(center + model * VISIBLE + columns)
        if FOLLOWS:
            old = fresh(offset + model * HIDDEN + units, True)
            begun = tl.load(offset + tl.num_programs(2) * HIDDEN + model, cache_modifier=".cg")
    for k in range(0, N, BK):
        G = tl.dot(tl.load(h + k * HIDDEN), tl.load(x + k * VISIBLE), acc=G, input_precision=PRECISION)
    # A smaller batch is weighted in proportion to its size.
    per_sample = 1.0 / N
    per_chain = per_sample
    if PERSISTENT:
        per_chain = n_valid.to(tl.float32) / (N * CHAINS)
    G *= -per_sample / per_chain
    for k in range(CHAINS_AT, CHAINS_AT + CHAINS, BK):
        G = tl.dot(tl.load(h + k * HIDDEN), tl.load(x + k * VISIBLE), acc=G, input_precision=PRECISION)
    G *= per_chain
    gradient += model.to(tl.int64) * STRIDE
    if CENTERED:
        of_visible = per_chain * visible_of_chains - per_sample * visible_of_data
        of_hidden = per_chain * of_chains - per_sample * of_data
        if tile_m == 0:
            tl.store(gradient + VISIBLE_BIAS + columns, of_visible, mask=columns < VISIBLE - 1)
        if tile_n == 0:
            tl.store(gradient + VISIBLE_BIAS + VISIBLE + units, of_hidden, mask=units < UNITS)
        G -= of_hidden[:, None] * mu[None, :]
        if FOLLOWS:
            keep = tl.where(begun > 0, 0.99, 0.0)  # zero until the running mean is initialized
            follow = keep * old + (1 - keep) * of_data / n_valid
            G -= follow[:, None] * of_visible[None, :]
            if tile_n == 0:
                tl.store(new_offset + model * HIDDEN + units, follow)
                if tile_m == 0:
                    tl.store(new_offset + tl.num_programs(2) * HIDDEN + model, 1.0)
    else:
        to_visible = gradient + VISIBLE_BIAS + columns[None, :] + 0 * units[:, None]
        tl.store(to_visible, G, mask=(units == UNITS)[:, None] & (columns < VISIBLE - 1)[None, :])
        to_hidden = gradient + VISIBLE_BIAS + VISIBLE + units[:, None] + 0 * columns[None, :]
        tl.store(to_hidden, G, mask=(units < UNITS)[:, None] & (columns == VISIBLE - 1)[None, :])
    if VARIES:
        G *= fresh(ratios + model * VISIBLE + columns, True)[None, :]
    for m in tl.static_range(len(LAYERS)):
        if (tile_n * BN >= LAYERS[m][FIRST]) & (tile_n * BN < LAYERS[m][FIRST] + LAYERS[m][WIDTH]):
            own = columns - LAYERS[m][FIRST]
            i, j = line_and_column(own, LAYERS[m][ROWS], LAYERS[m][COLUMNS], LAYERS[m][PITCH])
            exists = (units < UNITS)[:, None] & ((i < LAYERS[m][ROWS]) & (j < LAYERS[m][COLUMNS]))[None, :]
            at = matrix_at(units, i, j, LAYERS[m][RANK], LAYERS[m][ROWS], LAYERS[m][COLUMNS], K, L, HIDDEN_PITCH)
            tl.store(gradient + LAYERS[m][FULL] + at, G, mask=exists)


@triton.jit
def matrix_at(
    units, i, j, RANK_: tl.constexpr, I: tl.constexpr, J: tl.constexpr, K: tl.constexpr, L: tl.constexpr,
    HIDDEN_PITCH: tl.constexpr,
):  # fmt: skip
    """Return the positions of the entries in the gradient for a full matrix.

    The gradient has shape (K * I, L * J) for a coupling with factors, and (H, I * J) for a dense coupling.
    """
    k, l = line_and_column(units, K, L, HIDDEN_PITCH)
    if RANK_ > 0:
        return ((k * I * L + l) * J)[:, None] + (i * (L * J) + j)[None, :]
    return ((k * L + l) * (I * J))[:, None] + (i * J + j)[None, :]
