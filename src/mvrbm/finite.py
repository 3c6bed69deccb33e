"""Whether numbers are finite, found out quickly."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no entry is NaN or infinite.

    A sum is finite unless an entry is not, or it all but overflows: in the usual case there is one number to look at.
    """
    tensors = [tensor.detach() for tensor in tensors]
    total = functools.reduce(operator.add, (tensor.sum() for tensor in tensors))
    return math.isfinite(float(total)) or all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
