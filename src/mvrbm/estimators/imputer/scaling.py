"""Range, location and scale of the entries in the training data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """Range, location and scale of the entries.

    Parameters
    ----------
    low, high : Tensor
        Smallest and largest known values, per column for 2-D data, or over all entries for data with more axes. If
        there are no known values, `low` is 1 and `high` is 0.
    center, scale : Tensor of shape (D,)
        Mean and scale of each entry in a sample, used to standardize the input to the correction.
    """

    low: Tensor
    high: Tensor
    center: Tensor
    scale: Tensor

    def clamp(self, rows: Tensor) -> Tensor:
        """Clamp values to the range of the training data, where this range is known."""
        return torch.where(self.low <= self.high, torch.clamp(rows, self.low, self.high), rows)


def data_range(x: Tensor, known: Tensor, *, per_column: bool) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest known values, either per column or over all entries. See :class:`Scaling`."""
    axes = 0 if per_column else (0, 1)
    some = known.any(axes)
    low = torch.where(some, torch.where(known, x, math.inf).amin(axes), 1.0)
    high = torch.where(some, torch.where(known, x, -math.inf).amax(axes), 0.0)
    return low, high
