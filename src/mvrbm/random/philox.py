r"""The definition of all random numbers: Philox 4x32 with ten rounds, in PyTorch, for any device.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) maps a counter of four 32-bit words and a
key of two to four random words. An array of shape (rows, \\*lines, last) takes its numbers from these counters:

    (line * ceil(last / 4) + column // 4,  row,  step,  draw)

where `line` is the flat index over the middle axes; the entry's number comes from word `column % 4`. A number is
therefore independent of the number of rows and of how kernels cut an array into tiles. C and Triton implement the same
definition, and the tests compare them bit for bit.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Multipliers of the two products per round, and the constants that advance the key, from the paper.
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_MASK = 0xFFFFFFFF

# Added to the number of a draw for the angles of normal numbers, which need two uniform numbers each.
ANGLES = 0x40000000

#: Number of a step: an integer, or a tensor () on a GPU, which CUDA graphs advance themselves.
Step = int | Tensor


def words(key: int, quad: Tensor, row: Tensor, step: Step, draw: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four random words of each counter as int64 tensors with values below 2**32.

    Parameters
    ----------
    key : int
        Key of 64 bits.
    quad, row : Tensor of int64
        First and second word of the counters. Their shapes broadcast.
    step : int or Tensor of int64
        Third word of the counters, which broadcasts too.
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
    """Return the numbers of rows, of lines per row and of columns per line of an array; see the module docstring."""
    if not shape:
        return 1, 1, 1
    if len(shape) == 1:
        return shape[0], 1, 1
    return shape[0], math.prod(shape[1:-1]), shape[-1]


def uniform(
    key: int, shape: Sequence[int], step: Step, draw: int, first_row: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return uniform numbers between 0 and 1, both excluded, of a shape.

    They are odd multiples of 2**-24, which float32 and float64 both hold exactly.
    """
    rows, lines, columns = layout(shape)
    quads = -(-columns // 4)
    quad = torch.arange(lines * quads, device=device)
    row = torch.arange(first_row, first_row + rows, device=device)
    found = torch.stack(words(key, quad, row[:, None], step, draw), -1)  # (rows, lines * quads, 4)
    flat = found.view(rows, lines, 4 * quads)[:, :, :columns]
    return ((flat >> 9).to(dtype) + 0.5).mul_(2.0**-23).reshape(tuple(shape))


def sort_keys(key: int, n: int, steps: Tensor, draw: int) -> Tensor:
    """Return random keys of 40 bits, (len(steps), n): sorting them gives a random permutation for each step."""
    entry = torch.arange(n, device=steps.device)
    high, low, _, _ = words(key, entry, torch.zeros_like(entry[:1]), steps[:, None], draw)
    return high << 8 | low >> 24
