"""Python wrapper for the C implementation of uniform random numbers."""

import math

import torch
from torch import Tensor

from mvrbm.compiled import library


def uniform(key: int, layout: tuple[int, int, int], step: int, draw: int, first_row: int) -> Tensor | None:
    """Return uniform random numbers as a flat float32 tensor on the CPU, or None if the C code was not built.

    `layout` is the result of :func:`mvrbm.random.philox.layout`. For the other arguments, see
    :func:`mvrbm.random.philox.uniform`.
    """
    code = library()
    if code is None:
        return None
    out = torch.empty(math.prod(layout), dtype=torch.float32, device="cpu")  # regardless of PyTorch's default device
    code.uniform(out.data_ptr(), *layout, key, first_row, step, draw)
    return out
