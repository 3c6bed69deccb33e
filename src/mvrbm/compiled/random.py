"""Uniform random numbers by the compiled code, if it was built."""

import math

import torch
from torch import Tensor

from mvrbm.compiled import library


def uniform(key: int, layout: tuple[int, int, int], step: int, draw: int, first_row: int) -> Tensor | None:
    """Return uniform numbers (rows * lines * columns,) as float32 on the CPU, or None without compiled code.

    The arguments are those of :func:`mvrbm.random.philox.uniform`; `layout` holds the numbers of rows, lines and
    columns.
    """
    code = library()
    if code is None:
        return None
    out = torch.empty(math.prod(layout), dtype=torch.float32, device="cpu")  # whatever the default device is
    code.uniform(out.data_ptr(), *layout, key, first_row, step, draw)
    return out
