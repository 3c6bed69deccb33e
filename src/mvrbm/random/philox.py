r"""Reference implementation of the random number generator: Philox 4x32-10 in PyTorch, for any device.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) maps a counter of four 32-bit words and a
key of two 32-bit words to four random words. In an array of shape (rows, \*lines, columns), the counter for an entry is

    (place // 4,  row,  step,  draw)

and the entry uses word `place % 4` of the result. `place` is the flat index of the entry within its row of the array,
except that if the number of columns is odd, the last column comes after all the others. The entries in columns 2 i and
2 i + 1 of a line, which GPU threads store together, therefore always share a counter. If `line` is the flat index over
the middle axes,

    place = line * pitch + column    if column < pitch
            lines * pitch + line     otherwise

where `pitch` is the number of columns rounded down to an even number, or 1 if there is only one column.

The value of an entry does not depend on the number of rows or on how kernels divide the array into tiles. The C code
and the Triton kernels implement the same definition, and the tests check that the results are bitwise identical.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Multipliers for the two products in each round, from the paper.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
# Increments added to the two key words after each round, from the paper.
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Number of rounds.
ROUNDS = 10
# Bit mask that selects the lower 32 bits of an integer.
_MASK = 0xFFFFFFFF

# Offset added to the draw index for the angles in the Box-Muller transform, which uses two uniform numbers per normal
# number.
ANGLES = 0x40000000

#: Step index: an integer, or a scalar GPU tensor that CUDA graphs can increment.
Step = int | Tensor


def words(key: int, quad: Tensor, row: Tensor, step: Step, draw: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four random words for each counter as int64 tensors with values less than 2**32.

    Parameters
    ----------
    key : int
        64-bit key.
    quad, row : Tensor of int64
        First and second words of the counters. Their shapes must be broadcastable.
    step : int or Tensor of int64
        Third word of the counters. Its shape must be broadcastable with `quad` and `row`.
    draw : int
        Fourth word of the counters.
    """
    steps = torch.as_tensor(step, dtype=torch.int64, device=quad.device)
    c0, c1, c2 = torch.broadcast_tensors(quad, row, steps)
    c3 = torch.full((), draw, dtype=torch.int64, device=quad.device)
    k0 = key & _MASK
    k1 = key >> 32 & _MASK
    for _ in range(ROUNDS):
        # The 64-bit products may wrap to negative numbers. Shifting and masking recover both halves.
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        c0 = (product1 >> 32 & _MASK) ^ c1 ^ k0
        c1 = product1 & _MASK
        c2 = (product0 >> 32 & _MASK) ^ c3 ^ k1
        c3 = product0 & _MASK
        k0 = (k0 + KEY_STEPS[0]) & _MASK
        k1 = (k1 + KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def layout(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return the numbers of rows, lines per row and columns per line for an array of the given shape.

    These terms are defined in the module docstring.
    """
    if not shape:
        return 1, 1, 1
    if len(shape) == 1:
        return shape[0], 1, 1
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def pitch_of(columns: int) -> int:
    """Return the pitch of lines with the given number of columns, as defined in the module docstring."""
    return columns if columns == 1 else columns - columns % 2


def uniform(
    key: int, shape: Sequence[int], step: Step, draw: int, first_row: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return an array of the given shape with uniform random numbers in the open interval (0, 1).

    The values are odd multiples of 2**-24, which float32 and float64 represent exactly. `step` and `draw` are words of
    the counters, and `first_row` is the index of the array's first row.
    """
    rows, lines, columns = layout(shape)
    pitch = pitch_of(columns)
    quad = torch.arange(-(-lines * columns // 4), device=device)
    row = torch.arange(first_row, first_row + rows, device=device)
    found = torch.stack(words(key, quad, row[:, None], step, draw), -1).flatten(1)  # (rows, places)
    pairs = found[:, : lines * pitch].view(rows, lines, pitch)
    last = found[:, lines * pitch : lines * columns].view(rows, lines, columns - pitch)
    flat = torch.cat([pairs, last], 2)
    return ((flat >> 9).to(dtype) + 0.5).mul_(2.0**-23).reshape(tuple(shape))


def sort_keys(key: int, n: int, steps: Tensor, draw: int) -> Tensor:
    """Return random 40-bit sort keys of shape (len(steps), n). Sorting each row yields a random permutation."""
    entry = torch.arange(n, device=steps.device)
    high, low, _, _ = words(key, entry, torch.zeros_like(entry[:1]), steps[:, None], draw)
    return high << 8 | low >> 24
