"""The linear model: factors, and their residuals, which are correlated or interpolated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.estimators.imputer.interpolation import Interpolation
from mvrbm.estimators.imputer.residual_covariance import Residuals
from mvrbm.random import RandomSource

# Number of unknown entries from which the size of the drawn errors is measured.
_MEASURED = 500


@dataclass(frozen=True)
class Linear:
    """Linear model, which predicts the factors from the known entries, and then the residuals, if they are correlated.

    In all methods, `x` contains samples, `known` is a mask of the known entries, and both have shape (n, D).
    """

    factors: Factors
    residuals: Residuals | Interpolation | None = None

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
        if self.residuals is None:
            differences = self.factors.draw(x, known, rng) - self.factors.conditional_mean(x, known)
            return differences / self.factors.deviation(x, known)
        unknown = ~known
        # The standard deviations are approximate, so the drawn errors are scaled to a mean square of 1.
        deviation = self.deviation(x, known).clamp(min=torch.finfo(x.dtype).tiny)
        count = max(int(unknown.sum()), 1)
        drawn = [self._draw_residuals(known, rng) / deviation for _ in range(math.ceil(_MEASURED / count))]
        square = float(sum((each[unknown] ** 2).sum() for each in drawn)) / (len(drawn) * count)
        return drawn[0] / (square**0.5 or 1.0)

    def _draw_residuals(self, known: Tensor, rng: RandomSource) -> Tensor:
        """Draw differences between samples of the model and their conditional means, as a tensor of shape (n, D)."""
        assert self.residuals is not None
        n, rank = len(known), self.factors.loadings.shape[1]
        signal = rng.normal((n, rank), self.factors.mean) @ self.factors.loadings.T
        sample = self.factors.mean + signal + self.residuals.draw(n, rng)
        return sample - self.conditional_mean(sample, known)
