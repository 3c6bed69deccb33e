"""Predictions of missing entries by the linear model and its correction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.estimators.imputer.correction import Correction
from mvrbm.estimators.imputer.factors import Factors
from mvrbm.estimators.imputer.masking import Samples
from mvrbm.estimators.imputer.scaling import Scaling
from mvrbm.random import RandomSource


@dataclass(frozen=True)
class Predictor:
    """The linear model, with its correction if there is one.

    All methods take samples and masks of their known entries, (n, D). Unknown entries must not be NaN.
    """

    factors: Factors
    correction: Correction | None
    scaling: Scaling

    def mean(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the predictions of all entries given the known ones, (n, D)."""
        first = self.factors.conditional_mean(x, known)
        return first if self.correction is None else self.correction.correct(x, known, first, self.scaling)

    def deviation(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the standard deviations of the linear model given the known entries, (n, D)."""
        return self.factors.deviation(x, known)

    def draw(self, x: Tensor, known: Tensor, calibration: float, rng: RandomSource) -> Tensor:
        """Draw all entries given the known ones, with deviations multiplied by `calibration`, (n, D)."""
        center = self.factors.conditional_mean(x, known)
        return self.mean(x, known) + calibration * (self.factors.draw(x, known, rng) - center)

    @torch.no_grad()
    def calibration(self, samples: Samples) -> float:
        """Return the root mean squared error of held-out entries, in standard deviations of the linear model."""
        tested = samples.with_held_entries()
        if not len(tested.x):
            return 1.0
        tested = tested.to(self.factors.mean.device)
        errors = (self.mean(tested.x, tested.shown) - tested.x) / self.deviation(tested.x, tested.shown)
        return float(torch.sqrt((errors[tested.held] ** 2).mean()))
