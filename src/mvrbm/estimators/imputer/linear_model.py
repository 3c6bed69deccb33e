"""The linear model: factors, and the covariance of their residuals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.estimators.imputer.residual_covariance import Residuals
from mvrbm.random import RandomSource


@dataclass(frozen=True)
class Linear:
    """Linear model, which predicts the factors from the known entries, and then the residuals, if they are correlated.

    In all methods, `x` contains samples, `known` is a mask of the known entries, and both have shape (n, D).
    """

    factors: Factors
    residuals: Residuals | None = None

    def conditional_mean(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the means of all entries given the known entries, as a tensor of shape (n, D)."""
        mean = self.factors.conditional_mean(x, known)
        return mean if self.residuals is None else mean + self.residuals.conditional_mean(x - mean, known)

    def deviation(self, x: Tensor, known: Tensor) -> Tensor:
        """Return standard deviations of all entries given the known entries, as a tensor of shape (n, D).

        They are exact without correlated residuals, and approximate otherwise.
        """
        deviation = self.factors.deviation(x, known)
        if self.residuals is None:
            return deviation
        explained = (1 - self.residuals.unexplained(known)) * self.factors.noise
        return torch.sqrt(deviation**2 - explained)

    def draw_errors(self, x: Tensor, known: Tensor, rng: RandomSource) -> Tensor:
        """Draw differences from the conditional mean, in standard deviations, as a tensor of shape (n, D)."""
        differences = self.factors.draw(x, known, rng) - self.factors.conditional_mean(x, known)
        return differences / self.factors.deviation(x, known)
