r"""The definition of all random numbers: Philox 4x32 with ten rounds, in PyTorch, for any device.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) maps a counter of four 32-bit words and a
key of two words to four random words. An array of shape (rows, \\*lines, last) takes its numbers from these counters:

    (line * ceil(last / 4) + column // 4,  row,  step,  draw)

where `line` is the flat index over the middle axes. The number of an entry is word `column % 4`. It does not depend on
the number of rows, or on how kernels divide an array into tiles. The C code and the Triton kernels implement the same
definition, and tests compare them bit for bit.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Multipliers of the two products per round, from the paper.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
# Increments of the two words of the key per round, from the paper.
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# Number of rounds.
ROUNDS = 10
# The lower 32 bits of an integer.
_MASK = 0xFFFFFFFF

# A normal number needs two uniform numbers. The second one, for the angle, comes from the draw with this number added.
ANGLES = 0x40000000

#: Number of a step: an integer, or a tensor () on a GPU, which CUDA graphs can increment.
Step = int | Tensor


def words(key: int, quad: Tensor, row: Tensor, step: Step, draw: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four random words of each counter as int64 tensors with values below 2**32.

    Parameters
    ----------
    key : int
        Key of 64 bits.
    quad, row : Tensor of int64
        First and second word of the counters, with shapes that broadcast.
    step : int or Tensor of int64
        Third word of the counters, with a shape that broadcasts too.
    draw : int
        Fourth word of the counters.
    """
    steps = torch.as_tensor(step, dtype=torch.int64, device=quad.device)
    c0, c1, c2 = torch.broadcast_tensors(quad, row, steps)
    c3 = torch.full((), draw, dtype=torch.int64, device=quad.device)
    k0 = key & _MASK
    k1 = key >> 32 & _MASK
    for _ in range(ROUNDS):
        # Products of 64 bits may wrap to negative numbers; shifting and masking recover both halves.
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
    """Return the number of rows of an array, of lines per row and of columns per line; see the module docstring."""
    if not shape:
        return 1, 1, 1
    if len(shape) == 1:
        return shape[0], 1, 1
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def uniform(
    key: int, shape: Sequence[int], step: Step, draw: int, first_row: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return an array of uniform numbers between 0 and 1, both excluded.

    They are odd multiples of 2**-24, which float32 and float64 both represent exactly.
    """
    rows, lines, columns = layout(shape)
    quads = -(-columns // 4)
    quad = torch.arange(lines * quads, device=device)
    row = torch.arange(first_row, first_row + rows, device=device)
    found = torch.stack(words(key, quad, row[:, None], step, draw), -1)  # (rows, lines * quads, 4)
    flat = found.view(rows, lines, 4 * quads)[:, :, :columns]
    return ((flat >> 9).to(dtype) + 0.5).mul_(2.0**-23).reshape(tuple(shape))


def sort_keys(key: int, n: int, steps: Tensor, draw: int) -> Tensor:
    """Return random keys of 40 bits, (len(steps), n). Sorting them gives one random permutation per step."""
    entry = torch.arange(n, device=steps.device)
    high, low, _, _ = words(key, entry, torch.zeros_like(entry[:1]), steps[:, None], draw)
    return high << 8 | low >> 24
