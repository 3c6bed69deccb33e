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
def uniform_pairs(key, row, line, pair, step, draw, COLUMNS: tl.constexpr):
    """Return a tile of uniform random numbers for pairs of neighboring columns, with shape (n, 2 * w).

    In the tensor core layout, each thread stores pairs of neighboring columns. The counter is evaluated separately for
    each pair, which uses two of the four resulting words. This doubles the arithmetic but avoids exchanging data
    between threads.

    Parameters
    ----------
    row, line, pair
        Row and line of each pair, and half the index of its even column. They must broadcast to shape (n, w).
    COLUMNS
        Number of columns per line.
    """
    quad = line * ((COLUMNS + 3) // 4) + pair // 2 + row * 0
    a, b, c, d = words(key, quad, row, step, draw)
    first = (quad * 0 + pair) % 2 == 0
    both = tl.join(unit(tl.where(first, a, c)), unit(tl.where(first, b, d)))
    return tl.reshape(both, [both.shape[0], 2 * both.shape[1]])


@triton.jit
def normal_pairs(key, row, line, pair, step, draw, COLUMNS: tl.constexpr):
    """Return standard normal random numbers in the layout of `uniform_pairs`."""
    radius = uniform_pairs(key, row, line, pair, step, draw, COLUMNS)
    return _box_muller(radius, uniform_pairs(key, row, line, pair, step, draw + _ANGLES, COLUMNS))


@triton.jit
def uniform_lines(key, row, line, step, draw, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return a tile of uniform random numbers for n complete lines, with shape (n, WIDTH).

    `WIDTH` is `COLUMNS` rounded up to a power of two.
    """
    if WIDTH >= 4:
        quad = line[:, None] * ((COLUMNS + 3) // 4) + tl.arange(0, WIDTH // 4)[None, :]
        a, b, c, d = words(key, quad, row, step, draw)
        four = tl.join(tl.join(unit(a), unit(c)), tl.join(unit(b), unit(d)))
        found = tl.reshape(four, [line.shape[0], WIDTH])
    else:
        a, b, _, _ = words(key, line, row, step, draw)
        if WIDTH == 2:  # noqa: SIM108  (a compile-time branch)
            found = tl.join(unit(a), unit(b))
        else:
            found = unit(a)[:, None]
    return found


@triton.jit
def normal_lines(key, row, line, step, draw, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return standard normal random numbers in the layout of `uniform_lines`."""
    radius = uniform_lines(key, row, line, step, draw, COLUMNS, WIDTH)
    return _box_muller(radius, uniform_lines(key, row, line, step, draw + _ANGLES, COLUMNS, WIDTH))


@triton.jit
def uniform_entries(key, row, line, column, step, draw, COLUMNS: tl.constexpr):
    """Return uniform random numbers for individual entries, identified by row, line and column.

    All four words of an entry's counter are computed, but only one of them is used.
    """
    quad = line * ((COLUMNS + 3) // 4) + column // 4 + row * 0
    a, b, c, d = words(key, quad, row, step, draw)
    word = quad * 0 + column % 4
    return unit(tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d)))


@triton.jit
def _box_muller(radius, angle):
    """Convert pairs of uniform random numbers to standard normal random numbers."""
    return tl.sqrt(-2.0 * tl.log(radius)) * tl.cos(6.283185307179586 * angle)


@triton.jit
def _fill(out, clock, key, step, draw, first_row, per_row, total, lines, columns, CLOCK: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = at // per_row
    quad = at % per_row
    if CLOCK:
        step = tl.load(clock)
    a, b, c, d = words(key, quad, first_row + row, step, draw)
    quads = per_row // lines
    column = 4 * (quad % quads)
    place = out + (row * lines + quad // quads) * columns + column
    inside = at < total
    tl.store(place, unit(a), mask=inside & (column < columns))
    tl.store(place + 1, unit(b), mask=inside & (column + 1 < columns))
    tl.store(place + 2, unit(c), mask=inside & (column + 2 < columns))
    tl.store(place + 3, unit(d), mask=inside & (column + 3 < columns))


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
    per_row = lines * -(-columns // 4)
    total = rows * per_row
    clock = isinstance(step, Tensor)
    if total:
        _fill[(-(-total // _BLOCK),)](
            out, step if clock else out, key, 0 if clock else step, draw, first_row, per_row, total, lines, columns,
            CLOCK=clock, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def sort_keys(key: int, n: int, steps: Tensor, draw: int) -> Tensor:
    """Return random 40-bit keys of shape (len(steps), n). See :func:`mvrbm.random.philox.sort_keys`."""
    out = torch.empty(len(steps), n, dtype=torch.int64, device=steps.device)
    if math.prod(out.shape):
        _fill_keys[(-(-n // _BLOCK), len(steps))](out, steps, key, draw, n, BLOCK=_BLOCK)
    return out
