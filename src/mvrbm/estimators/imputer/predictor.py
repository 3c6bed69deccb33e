"""Predict missing entries with the linear model and the correction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.estimators.imputer.calibration import Calibration
from mvrbm.estimators.imputer.correction import Correction
from mvrbm.estimators.imputer.linear_model import Linear
from mvrbm.estimators.imputer.masking import Samples
from mvrbm.estimators.imputer.scaling import Scaling
from mvrbm.random import RandomSource


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
    def errors(self, samples: Samples) -> tuple[Tensor, Tensor, Tensor]:
        """Return errors, standard deviations of the linear model and scales of the held-out entries.

        The results have shape (m,). The models must not have been fitted to the held-out entries.
        """
        tested = samples.with_held_entries().to(self.linear.factors.mean.device)
        if not len(tested.x):
            return tested.x[0:0, 0], tested.x[0:0, 0], tested.x[0:0, 0]
        errors = self.mean(tested.x, tested.shown) - tested.x
        deviations = self.linear.deviation(tested.x, tested.shown)
        scale = self.scaling.scale.to(errors).expand_as(errors)
        return errors[tested.held].cpu(), deviations[tested.held].cpu(), scale[tested.held].cpu()
