"""The numbers of :mod:`mvrbm.random.philox` in Triton: functions for other kernels, and kernels that fill arrays."""

# mypy: ignore-errors
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Counters per program of the kernels that fill arrays.
_BLOCK = 256
_ANGLES = tl.constexpr(0x40000000)


@triton.jit
def _unit(words):
    """Return numbers between 0 and 1, both excluded, from words of 32 bits."""
    return (words >> 9).to(tl.int32).to(tl.float32) * (1.0 / 8388608.0) + (1.0 / 16777216.0)


@triton.jit
def words(key, quad, row, step, draw):
    """Return the four words of counters. All arguments except the key broadcast to the shape of `quad`."""
    none = quad * 0
    return tl.philox(
        key, quad.to(tl.uint32), (none + row).to(tl.uint32), (none + step).to(tl.uint32), (none + draw).to(tl.uint32)
    )


@triton.jit
def uniform_columns(key, row, line, step, draw, FIRST, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return uniform numbers of `WIDTH` neighboring columns from `FIRST`, an even number, on: (len(row), WIDTH).

    `row` and `line` are the rows and lines of the tile's rows, (n, 1) or scalars; lines have `COLUMNS` columns. A thread
    holds neighboring columns in pairs, as tensor cores leave them. Each pair takes half of the words of its counter.
    """
    pair = FIRST // 2 + tl.arange(0, WIDTH // 2)[None, :]
    quad = line * ((COLUMNS + 3) // 4) + pair // 2
    a, b, c, d = words(key, quad + row * 0, row, step, draw)
    first = (pair % 2 == 0) & (quad >= 0)
    left = tl.where(first, a, c)
    right = tl.where(first, b, d)
    both = tl.join(_unit(left), _unit(right))
    return tl.reshape(both, [both.shape[0], WIDTH])


@triton.jit
def normal_columns(key, row, line, step, draw, FIRST, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Return standard normal numbers, as `uniform_columns` returns uniform ones."""
    radius = uniform_columns(key, row, line, step, draw, FIRST, COLUMNS, WIDTH)
    angle = uniform_columns(key, row, line, step, draw + _ANGLES, FIRST, COLUMNS, WIDTH)
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
    tl.store(place, _unit(a), mask=inside & (column < columns))
    tl.store(place + 1, _unit(b), mask=inside & (column + 1 < columns))
    tl.store(place + 2, _unit(c), mask=inside & (column + 2 < columns))
    tl.store(place + 3, _unit(d), mask=inside & (column + 3 < columns))


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
    """Return uniform numbers; see :func:`mvrbm.random.philox.uniform`. A step in a tensor is read by the kernel."""
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
    """Return random keys of 40 bits, (len(steps), n); see :func:`mvrbm.random.philox.sort_keys`."""
    out = torch.empty(len(steps), n, dtype=torch.int64, device=steps.device)
    if math.prod(out.shape):
        _fill_keys[(-(-n // _BLOCK), len(steps))](out, steps, key, draw, n, BLOCK=_BLOCK)
    return out
