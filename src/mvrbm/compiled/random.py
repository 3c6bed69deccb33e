"""Uniform random numbers by the C code, where it was built."""

import math

import torch
from torch import Tensor

from mvrbm.compiled import library


def uniform(key: int, layout: tuple[int, int, int], step: int, draw: int, first_row: int) -> Tensor | None:
    """Return uniform numbers (rows * lines * columns,) as float32 on the CPU, or None without the C code.

    `layout` is the numbers of rows, lines and columns. For the other arguments see
    :func:`mvrbm.random.philox.uniform`.
    """
    code = library()
    if code is None:
        return None
    out = torch.empty(math.prod(layout), dtype=torch.float32, device="cpu")  # not on the default device
    code.uniform(out.data_ptr(), *layout, key, first_row, step, draw)
    return out
