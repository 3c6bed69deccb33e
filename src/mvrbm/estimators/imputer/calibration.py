"""Calibrate standard deviations on the errors of held-out entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvrbm.validation import number

# Probability that a normal variable is within two standard deviations.
_TWO_DEVIATIONS = 0.9545
# Minimum number of held-out entries per level of the calibration, and the maximum number of levels.
_FEWEST_PER_LEVEL = 200
_MOST_LEVELS = 8


@dataclass(frozen=True)
class Calibration:
    """Multiples of the model's standard deviations that cover the errors on held-out entries.

    Two standard deviations cover 95.45% of the errors. Entries that are easy to predict, such as single missing
    pixels, have different multiples from entries that are hard to predict, such as those inside a large hole.

    Parameters
    ----------
    levels : sequence of float
        Standard deviations of the model, in units of the scales of the entries, in increasing order.
    multiples : sequence of float
        Multiple for each level. Multiples between the levels are interpolated.
    """

    levels: Sequence[float]
    multiples: Sequence[float]

    @classmethod
    def of(cls, errors: Tensor, deviations: Tensor, scale: Tensor) -> Calibration:
        """Compare errors with the model's standard deviations. All arguments have shape (m,)."""
        order = torch.argsort(deviations / scale)
        levels, multiples = [], []
        for part in order.tensor_split(min(max(len(order) // _FEWEST_PER_LEVEL, 1), _MOST_LEVELS)):
            if len(part):
                ratio = float(torch.quantile((errors[part].abs() / deviations[part])[: 2**24], _TWO_DEVIATIONS)) / 2
                levels.append(float((deviations[part] / scale[part]).median()))
                multiples.append(ratio if ratio > 0 else 1.0)
        return cls(levels or [1.0], multiples or [1.0])

    @property
    def is_measured(self) -> bool:
        """Whether there were held-out entries to compare with."""
        return (list(self.levels), list(self.multiples)) != ([1.0], [1.0])

    def describe(self) -> list[list[float]]:
        """Return pairs of levels and multiples."""
        return [list(pair) for pair in zip(self.levels, self.multiples, strict=True)]

    @classmethod
    def from_description(cls, described: Any) -> Calibration:
        """Create a calibration from its description. Up to version 0.2, this was one multiple for all entries."""
        if not isinstance(described, list):
            return cls([1.0], [number(described, "calibration")])
        pairs = [[number(value, "calibration") for value in pair] for pair in described]
        levels, multiples = zip(*pairs, strict=True)
        return cls(levels, multiples)

    def apply(self, deviations: Tensor, scale: Tensor) -> Tensor:
        """Multiply standard deviations of shape (n, D)."""
        found = np.interp((deviations / scale.to(deviations)).cpu().numpy(), self.levels, self.multiples)
        return deviations * torch.from_numpy(found).to(deviations)
