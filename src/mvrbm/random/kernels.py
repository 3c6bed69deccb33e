"""Triton implementation of :mod:`mvrbm.random.philox`: functions for use in kernels, and kernels that fill arrays."""

# mypy: ignore-errors
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of counters per program in the kernels that fill arrays.
_BLOCK = 256
# Offset added to the draw index for the angles in the Box-Muller transform. See `ANGLES` in `philox`.
_ANGLES = tl.constexpr(0x40000000)


@triton.jit
def unit(words):
    """Convert 32-bit words to floats in the open interval (0, 1)."""
    return (words >> 9).to(tl.int32).to(tl.float32) * (1.0 / 8388608.0) + (1.0 / 16777216.0)


@triton.jit
def words(key, quad, row, step, draw):
    """Return the four random 32-bit words for each counter.

    `row`, `step` and `draw` must broadcast to the shape of `quad`.
    """
    none = quad * 0
    return tl.philox(
        key, quad.to(tl.uint32), (none + row).to(tl.uint32), (none + step).to(tl.uint32), (none + draw).to(tl.uint32)
    )


@triton.jit
def pitch_of(columns):
    """Return the pitch of lines with this many columns. See :func:`mvrbm.random.philox.pitch_of`."""
    return tl.where(columns == 1, 1, columns & -2)


@triton.jit
def place_of(line, column, lines, columns):
    """Return the place of an entry in its row of an array. See :mod:`mvrbm.random.philox`."""
    pitch = pitch_of(columns)
    return tl.where(column < pitch, line * pitch + column, lines * pitch + line)


@triton.jit
def uniform_pairs(key, row, place, step, draw):
    """Return a tile of uniform random numbers for pairs of neighboring places, with shape (n, 2 * w).

    In the tensor core layout, each thread stores pairs of neighboring columns. The counter is evaluated separately for
    each pair, which uses two of the four resulting words. This doubles the arithmetic but avoids exchanging data
    between threads.

    `row` contains the row of each pair, and `place` the place of its first entry, which is even. They must broadcast to
    shape (n, w).
    """
    place += row * 0
    a, b, c, d = words(key, place >> 2, row, step, draw)
    first = (place & 3) == 0
    both = tl.join(unit(tl.where(first, a, c)), unit(tl.where(first, b, d)))
    return tl.reshape(both, [both.shape[0], 2 * both.shape[1]])


@triton.jit
def normal_pairs(key, row, place, step, draw):
    """Return standard normal random numbers in the layout of `uniform_pairs`."""
    radius = uniform_pairs(key, row, place, step, draw)
    return _box_muller(radius, uniform_pairs(key, row, place, step, draw + _ANGLES))


@triton.jit
def uniform_matrix(key, row, step, draw, LINES: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr,
                   WIDTH: tl.constexpr):  # fmt: skip
    """Return a tile of uniform random numbers for one row of an array of shape (rows, LINES, COLUMNS).

    The tile has shape (HEIGHT, WIDTH). Both are powers of two, at least `LINES` and `COLUMNS`. As in `uniform_pairs`,
    each thread evaluates the counter of each pair of columns.
    """
    PITCH: tl.constexpr = COLUMNS - COLUMNS % 2  # 0 if there is one column, which is then the last
    line = tl.arange(0, HEIGHT)[:, None]
    pair = tl.arange(0, WIDTH // 2)[None, :]
    if PITCH % 4 == 0:  # whether a pair starts with the first word of its counter does not depend on the line
        quad = line * (PITCH // 4) + pair // 2
        first = (pair + line * 0) % 2 == 0
    else:
        quad = (line * (PITCH // 2) + pair) // 2
        first = (line * (PITCH // 2) + pair) % 2 == 0
    if PITCH < COLUMNS:
        # The last column is a pair with padding, and its entry uses any of the four words.
        last = pair == PITCH // 2
        place = LINES * PITCH + line
        quad = tl.where(last, place // 4, quad)
        first = tl.where(last, place % 4 < 2, first)
    a, b, c, d = words(key, quad, row, step, draw)
    even, odd = tl.where(first, a, c), tl.where(first, b, d)
    if PITCH < COLUMNS:
        even = tl.where(last & (place % 2 == 1), odd, even)
    return tl.reshape(tl.join(unit(even), unit(odd)), [HEIGHT, WIDTH])


@triton.jit
def normal_matrix(key, row, step, draw, LINES: tl.constexpr, COLUMNS: tl.constexpr, HEIGHT: tl.constexpr,
                  WIDTH: tl.constexpr):  # fmt: skip
    """Return standard normal random numbers in the layout of `uniform_matrix`."""
    radius = uniform_matrix(key, row, step, draw, LINES, COLUMNS, HEIGHT, WIDTH)
    return _box_muller(radius, uniform_matrix(key, row, step, draw + _ANGLES, LINES, COLUMNS, HEIGHT, WIDTH))


@triton.jit
def uniform_lines(key, row, line, step, draw, LINES: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return a tile of uniform random numbers for n complete lines, with shape (n, WIDTH).

    `WIDTH` is `COLUMNS` rounded up to a power of two.
    """
    if COLUMNS % 4 == 0:
        quad = line[:, None] * (COLUMNS // 4) + tl.arange(0, WIDTH // 4)[None, :]
        a, b, c, d = words(key, quad, row, step, draw)
        four = tl.join(tl.join(unit(a), unit(c)), tl.join(unit(b), unit(d)))
        found = tl.reshape(four, [line.shape[0], WIDTH])
    else:
        place = place_of(line[:, None], tl.arange(0, WIDTH)[None, :], LINES, COLUMNS)
        found = uniform_places(key, row, place, step, draw)
    return found


@triton.jit
def normal_lines(key, row, line, step, draw, LINES: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return standard normal random numbers in the layout of `uniform_lines`."""
    radius = uniform_lines(key, row, line, step, draw, LINES, COLUMNS, WIDTH)
    return _box_muller(radius, uniform_lines(key, row, line, step, draw + _ANGLES, LINES, COLUMNS, WIDTH))


@triton.jit
def uniform_places(key, row, place, step, draw):
    """Return uniform random numbers for individual entries, identified by row and place.

    All four words of an entry's counter are computed, but only one of them is used.
    """
    place += row * 0
    a, b, c, d = words(key, place >> 2, row, step, draw)
    word = place & 3
    return unit(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@triton.jit
def _box_muller(radius, angle):
    """Convert pairs of uniform random numbers to standard normal random numbers."""
    return tl.sqrt(-2.0 * tl.log(radius)) * tl.cos(6.283185307179586 * angle)


@triton.jit
def _fill(out, clock, key, step, draw, first_row, per_row, total, lines, columns, CLOCK: tl.constexpr,
          IN_ORDER: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // per_row
    quad = at % per_row
    if CLOCK:
        step = tl.load(clock)
    a, b, c, d = words(key, quad, first_row + row, step, draw)
    out += row * (lines * columns)
    inside = at < total
    _store_place(out, 4 * quad, unit(a), inside, lines, columns, IN_ORDER)
    _store_place(out, 4 * quad + 1, unit(b), inside, lines, columns, IN_ORDER)
    _store_place(out, 4 * quad + 2, unit(c), inside, lines, columns, IN_ORDER)
    _store_place(out, 4 * quad + 3, unit(d), inside, lines, columns, IN_ORDER)


@triton.jit
def _store_place(out, place, value, inside, lines, columns, IN_ORDER: tl.constexpr):
    """Store a value at the entry with the given place in an array of shape (lines, columns).

    If `IN_ORDER` is set, the place is the flat index.
    """
    index = place
    if not IN_ORDER:  # the number of columns is odd and greater than 1
        pitch = columns - 1
        paired = place < lines * pitch
        line = tl.where(paired, place // pitch, place - lines * pitch)
        index = line * columns + tl.where(paired, place % pitch, pitch)
    tl.store(out + index, value, mask=inside & (place < lines * columns))


@triton.jit
def _fill_keys(out, steps, key, draw, n, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.program_id(1)
    high, low, _, _ = words(key, entry, 0, tl.load(steps + number), draw)
    found = (high.to(tl.int64) << 8) | (low >> 24).to(tl.int64)
    tl.store(out + number.to(tl.int64) * n + entry, found, mask=entry < n)


def uniform(
    key: int,
    shape: Sequence[int],
    layout: tuple[int, int, int],
    step: int | Tensor,
    draw: int,
    first_row: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return an array of uniform random numbers. See :func:`mvrbm.random.philox.uniform`.

    `layout` is the result of :func:`mvrbm.random.philox.layout`. If `step` is a tensor, the kernel reads its value
    from GPU memory.
    """
    rows, lines, columns = layout
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    per_row = -(-lines * columns // 4)
    total = rows * per_row
    clock = isinstance(step, Tensor)
    if total:
        _fill[(-(-total // _BLOCK),)](
            out, step if clock else out, key, 0 if clock else step, draw, first_row, per_row, total, lines, columns,
            CLOCK=clock, IN_ORDER=columns % 2 == 0 or columns == 1, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def sort_keys(key: int, n: int, steps: Tensor, draw: int) -> Tensor:
    """Return random 40-bit keys of shape (len(steps), n). See :func:`mvrbm.random.philox.sort_keys`."""
    out = torch.empty(len(steps), n, dtype=torch.int64, device=steps.device)
    if math.prod(out.shape):
        _fill_keys[(-(-n // _BLOCK), len(steps))](out, steps, key, draw, n, BLOCK=_BLOCK)
    return out
