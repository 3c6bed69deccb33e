r"""Normal distribution with a full covariance matrix that is shrunk to a separable one, as a factor model.

The covariance matrix has an inverse Wishart prior, whose mean is a Kronecker product of one matrix per axis plus noise.
With few samples, the distribution is close to the prior, which knows that neighbors are similar. With many samples, it
is close to the sample covariance. Missing entries are handled by EM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.estimators.imputer.conditional_normal import Normal
from mvrbm.estimators.imputer.factor_analysis import Factors, moments
from mvrbm.estimators.imputer.residual_covariance import Residuals

# Maximum number of entries in a sample, because the model has as many factors.
_MOST_ENTRIES = 1600
# Minimum number of samples.
_FEWEST_SAMPLES = 20
# Maximum number of multiplications in an EM step, and the number that takes as long as the overhead of a pattern.
_MOST_WORK = 4e10
_OVERHEAD = 5e6
#: Variances of the noise in the prior to try, relative to those of the correlated part.
NOISES = (0.01, 0.1)
#: Weights of the prior to try, as multiples of the number of samples.
WEIGHTS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


@dataclass(frozen=True)
class Prior:
    """Settings of the prior.

    Parameters
    ----------
    structures : tuple of str
        Structure of the covariance matrix of each axis. See :class:`Residuals`.
    noise : float
        Variance of the noise, relative to the variance of the correlated part.
    weight : float
        Weight of the prior, as a multiple of the number of samples.
    n_steps : int
        Number of EM steps.
    """

    structures: tuple[str, ...]
    noise: float
    weight: float
    n_steps: int


def is_applicable(known: Tensor) -> bool:
    """Return whether an EM step for samples with the given known entries, of shape (n, D), is fast enough."""
    n, size = known.shape
    if n < _FEWEST_SAMPLES or not 1 < size <= _MOST_ENTRIES:
        return False
    n_patterns = len(torch.unique(known, dim=0))
    return n_patterns * (size**3 / 3 + _OVERHEAD) <= _MOST_WORK


class ShrunkCovariance:
    """EM for a normal distribution whose covariance matrix is shrunk to a separable one.

    Parameters
    ----------
    x, known : Tensor of shape (n, D)
        Samples, and the mask of the known entries.
    shape : sequence of int
        Shape of a sample.
    prior : Prior
        Settings of the prior.
    """

    def __init__(self, x: Tensor, known: Tensor, shape: Sequence[int], prior: Prior) -> None:
        self._dtype = x.dtype
        self._known = known
        self._center, variance = moments(x.double(), known)
        self._scale = torch.sqrt(variance)
        self._z = torch.where(known, (x - self._center) / self._scale, 0.0)
        size = len(self._scale)
        unit = Factors(torch.zeros_like(self._scale), self._z.new_zeros(size, 0), torch.ones_like(self._scale))
        parts = Residuals.fit(unit, self._z, known, shape, prior.structures, prior.noise).covariances
        covariance = parts[0]
        for part in parts[1:]:
            covariance = torch.kron(covariance, part)
        self._prior = (covariance + prior.noise * torch.eye(size).to(covariance)) / (1 + prior.noise)
        self._filled = self._z
        self._remaining = torch.zeros_like(self._prior)
        self._expect(torch.zeros_like(self._scale), self._prior)

    def _expect(self, mean: Tensor, covariance: Tensor) -> None:
        """Fill in unknown entries, and sum up the covariances that remain."""
        filled = self._z.clone()
        remaining = torch.zeros_like(covariance)
        for found in Normal(mean, covariance, torch.zeros_like(mean)).given(self._z, self._known):
            filled[found.rows[:, None], found.unknown] = mean[found.unknown] + found.change
            total = len(found.rows) * found.covariance
            remaining.index_put_((found.unknown[:, None], found.unknown), total, accumulate=True)
        self._filled = filled
        self._remaining = remaining

    def _maximize(self, weight: float) -> tuple[Tensor, Tensor]:
        """Return the mean and the covariance matrix of the standardized entries."""
        mean = self._filled.mean(0)
        rest = self._filled - mean
        n = len(rest)
        return mean, (rest.T @ rest + self._remaining + weight * n * self._prior) / (n * (1 + weight))

    def step(self, weight: float) -> None:
        """Perform one EM step with the given weight of the prior."""
        self._expect(*self._maximize(weight))

    def normal(self, weight: float) -> Normal:
        """Return the distribution with the given weight of the prior."""
        mean, covariance = self._maximize(weight)
        covariance = self._scale[:, None] * covariance * self._scale
        return Normal(self._center + self._scale * mean, covariance, torch.zeros_like(self._scale))

    def factors(self, weight: float) -> Factors:
        """Return the distribution with the given weight of the prior as a factor model."""
        mean, covariance = self._maximize(weight)
        found = Factors.of_covariance(mean, covariance)
        parts = (self._center + self._scale * mean, self._scale[:, None] * found.loadings, self._scale**2 * found.noise)
        return Factors(*(part.to(self._dtype) for part in parts))


def fit_shrunk(x: Tensor, known: Tensor, shape: Sequence[int], prior: Prior) -> Factors:
    """Fit the distribution to the known entries of samples of shape (n, D), and return it as a factor model."""
    found = ShrunkCovariance(x, known, shape, prior)
    for _ in range(prior.n_steps):
        found.step(prior.weight)
    return found.factors(prior.weight)
