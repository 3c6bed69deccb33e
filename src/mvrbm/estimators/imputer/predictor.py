"""Predict missing entries with the linear model and the correction."""

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
    """Predictor for missing entries, which combines a linear model with an optional correction.

    In all methods, `x` contains samples, `known` is a mask of the known entries, and both have shape (n, D). Unknown
    entries must not be NaN.
    """

    factors: Factors
    correction: Correction | None
    scaling: Scaling

    def mean(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the predicted means of all entries given the known entries, as a tensor of shape (n, D)."""
        first = self.factors.conditional_mean(x, known)
        return first if self.correction is None else self.correction.correct(x, known, first, self.scaling)

    def deviation(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the standard deviations of all entries under the linear model, as a tensor of shape (n, D)."""
        return self.factors.deviation(x, known)

    def draw(self, x: Tensor, known: Tensor, calibration: float, rng: RandomSource) -> Tensor:
        """Draw samples of all entries given the known entries, as a tensor of shape (n, D).

        Deviations from the mean are multiplied by `calibration`.
        """
        center = self.factors.conditional_mean(x, known)
        return self.mean(x, known) + calibration * (self.factors.draw(x, known, rng) - center)

    @torch.no_grad()
    def calibration(self, samples: Samples) -> float:
        """Return the root mean squared error on held-out entries, in units of the predicted standard deviations.

        If there are no held-out entries, return 1.
        """
        tested = samples.with_held_entries()
        if not len(tested.x):
            return 1.0
        tested = tested.to(self.factors.mean.device)
        errors = (self.mean(tested.x, tested.shown) - tested.x) / self.deviation(tested.x, tested.shown)
        return float(torch.sqrt((errors[tested.held] ** 2).mean()))
