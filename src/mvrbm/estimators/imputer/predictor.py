"""Predict missing entries with the linear model and the correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvrbm.estimators.imputer.correction import Correction
from mvrbm.estimators.imputer.linear import Linear
from mvrbm.estimators.imputer.masking import Samples
from mvrbm.estimators.imputer.scaling import Scaling
from mvrbm.random import RandomSource
from mvrbm.validation import number

# Probability that a normal variable is within two standard deviations.
_TWO_DEVIATIONS = 0.9545
# Minimum number of held-out entries per level of the calibration, and the maximum number of levels.
_FEWEST_PER_LEVEL = 200
_MOST_LEVELS = 8


@dataclass(frozen=True)
class Calibration:
    """Multiples of the model's standard deviations that cover the errors on held-out entries.

    Two standard deviations cover 95.45 % of the errors. Entries that are easy to predict, such as single missing
    pixels, have other multiples than entries that are hard to predict, such as those inside a large hole.

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


@dataclass(frozen=True)
class Predictor:
    """Predictor for missing entries, which combines a linear model with an optional correction.

    In all methods, `x` contains samples, `known` is a mask of the known entries, and both have shape (n, D). Unknown
    entries must not be NaN.
    """

    linear: Linear
    correction: Correction | None
    scaling: Scaling
    calibration: Calibration

    def mean(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the predicted means of all entries given the known entries, as a tensor of shape (n, D)."""
        first = self.linear.conditional_mean(x, known)
        return first if self.correction is None else self.correction.correct(x, known, first, self.scaling)

    def deviation(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the calibrated standard deviations of all entries, as a tensor of shape (n, D)."""
        return self.calibration.apply(self.linear.deviation(x, known), self.scaling.scale)

    def draw(self, x: Tensor, known: Tensor, rng: RandomSource) -> Tensor:
        """Draw samples of all entries given the known entries, as a tensor of shape (n, D)."""
        return self.mean(x, known) + self.deviation(x, known) * self.linear.draw_errors(x, known, rng)

    @torch.no_grad()
    def calibrated(self, samples: Samples) -> Calibration:
        """Return the calibration for held-out entries, to which the models must not have been fitted."""
        tested = samples.with_held_entries().to(self.linear.factors.mean.device)
        if not len(tested.x):
            return Calibration([1.0], [1.0])
        errors = self.mean(tested.x, tested.shown) - tested.x
        deviations = self.linear.deviation(tested.x, tested.shown)
        scale = self.scaling.scale.to(errors).expand_as(errors)
        return Calibration.of(*(part[tested.held].cpu() for part in (errors, deviations, scale)))
