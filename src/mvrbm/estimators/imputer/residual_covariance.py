r"""Covariance of the residuals of the factor model along the axes of a sample.

Neighboring entries of a time series, a spectrum or a picture have similar residuals, so the residuals of known entries
predict those of unknown entries. The covariance is a Kronecker product of one matrix per axis, plus noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.random import RandomSource
from mvrbm.units.whitened import mode_products

# Maximum number of steps of the conjugate gradient method, and the squared relative error at which it stops.
_STEPS = 40
_TOLERANCE = 1e-8
# Variance that makes covariances positive definite.
_JITTER = 1e-6
# Maximum number of samples used to estimate covariances.
_MOST_FITTED = 1000
# Maximum lengths of axes with a free covariance matrix, and with a stationary one.
_LONGEST_FREE = 512
_LONGEST_STATIONARY = 4096
# The autocovariance at a distance d along an axis of length I is multiplied by (1 - d / I) to this power, because few
# pairs of entries have a large distance. With power 1, it is the usual estimate of complete data, whose spectrum is not
# negative. Higher powers smooth the spectrum.
_TAPER = 4

#: Structures of the covariance matrix of an axis. Along a stationary axis, it depends only on the distance.
STRUCTURES = ("independent", "stationary", "free")
#: Variance of the noise, relative to the mean variance of the correlated part of the residuals.
NOISE = 0.1


@dataclass(frozen=True)
class Residuals:
    r"""Normal distribution of residuals with covariance :math:`S (C_1 \otimes \dots \otimes C_d + \nu I) S`.

    Parameters
    ----------
    covariances : tuple of Tensor of shape (I_d, I_d)
        One matrix :math:`C_d` per axis of a sample, with a mean diagonal entry of 1.
    noise : float
        Variance :math:`\nu` of the noise.
    scale : Tensor of shape (D,)
        Scales of the entries, the diagonal of :math:`S`.
    """

    covariances: tuple[Tensor, ...]
    noise: float
    scale: Tensor

    @classmethod
    def fit(
        cls, factors: Factors, x: Tensor, known: Tensor, shape: Sequence[int], structures: Sequence[str], noise: float
    ) -> Residuals:
        """Estimate the covariances from the residuals of the known entries.

        `structures` contains an element of `STRUCTURES` per axis of a sample, whose shape is `shape`.
        """
        step = -(-len(x) // _MOST_FITTED)
        x, known = x[::step], known[::step]
        # Entries of an array have the same unit, but columns of a table do not.
        scale = torch.sqrt(factors.noise if len(shape) == 1 else factors.noise.mean().expand_as(factors.noise))
        residuals = torch.where(known, (x - factors.conditional_mean(x, known)) / scale, 0.0).reshape(-1, *shape)
        weights = known.to(x.dtype).reshape(-1, *shape)
        found = []
        for axis, (size, structure) in enumerate(zip(shape, structures, strict=True), 1):
            if structure == "independent":
                found.append(torch.eye(size, dtype=x.dtype, device=x.device))
            else:
                rows, counts = (part.movedim(axis, -1).reshape(-1, size) for part in (residuals, weights))
                found.append(_stationary(rows, counts) if structure == "stationary" else _free(rows, counts))
        return cls(tuple(found), noise, scale)

    def with_noise(self, noise: float) -> Residuals:
        """Return a copy with another variance of the noise."""
        return Residuals(self.covariances, noise, self.scale)

    def to(self, device: torch.device) -> Residuals:
        """Return a copy on the given device."""
        return Residuals(tuple(matrix.to(device) for matrix in self.covariances), self.noise, self.scale.to(device))

    def conditional_mean(self, residuals: Tensor, known: Tensor) -> Tensor:
        """Return the means of all residuals given those of the known entries, as a tensor of shape (n, D).

        For known entries, the result does not include the noise.
        """
        mask = known.to(residuals.dtype)
        # Solve the equations of the known entries by the conjugate gradient method.
        rest = mask * residuals / self.scale
        square = (rest**2).sum(1, keepdim=True)
        enough = _TOLERANCE * square
        direction, solution = rest, torch.zeros_like(rest)
        for _ in range(_STEPS):
            active = square > enough
            if not bool(active.any()):
                break
            product = mask * self._times(direction) + self.noise * direction
            curvature = (direction * product).sum(1, keepdim=True)
            step = torch.where(active, square / torch.where(active, curvature, 1.0), 0.0)
            solution = solution + step * direction
            rest = rest - step * product
            before, square = square, (rest**2).sum(1, keepdim=True)
            direction = torch.where(active, rest + square / torch.where(active, before, 1.0) * direction, direction)
        return self.scale * self._times(solution)

    def draw(self, n: int, rng: RandomSource) -> Tensor:
        """Draw residuals of `n` samples, including the noise, of shape (n, D)."""
        like = self.scale
        roots = []
        for matrix in self.covariances:
            jitter = _JITTER * torch.eye(len(matrix)).to(matrix.double())
            roots.append(torch.linalg.cholesky(matrix.double() + jitter).to(like))
        normal, noise = rng.normal((2, n, len(like)), like)
        correlated = mode_products(
            normal.reshape(1, n, *(len(root) for root in roots)), [root[None] for root in roots]
        )[0]
        drawn: Tensor = like * (correlated + self.noise**0.5 * noise)
        return drawn

    def unexplained(self, known: Tensor) -> Tensor:
        """Return the approximate fraction of the variance of each residual that the known residuals do not explain.

        The result has shape (n, D). It is exact for entries that correlate with at most one known entry, if
        correlations are small.
        """
        squares = tuple(matrix**2 for matrix in self.covariances)
        explained = Residuals(squares, 0.0, self.scale)._times(known.to(self.scale.dtype))
        return 1 / (1 + explained / (1 + self.noise) ** 2)

    def _times(self, rows: Tensor) -> Tensor:
        """Multiply rows of shape (n, D) by the Kronecker product."""
        arrays = rows.reshape(1, len(rows), *(len(matrix) for matrix in self.covariances))
        return mode_products(arrays, [matrix[None] for matrix in self.covariances])[0]


def structures_of_axis(size: int) -> tuple[str, ...]:
    """Return the structures to try for an axis of the given length, apart from independence."""
    longest = {"stationary": _LONGEST_STATIONARY, "free": _LONGEST_FREE}
    return tuple(structure for structure, most in longest.items() if 2 < size <= most)


def _free(rows: Tensor, known: Tensor) -> Tensor:
    """Return the positive semidefinite matrix nearest to the mean products, scaled to a mean diagonal entry of 1.

    `rows` contains residuals, or 0 for unknown entries, and `known` is 1 for known entries. Both have shape (m, I).
    """
    means = (rows.T @ rows) / (known.T @ known).clamp(min=1)
    values, vectors = torch.linalg.eigh(means.double())
    matrix = (vectors * values.clamp(min=0)) @ vectors.T
    level = float(matrix.diagonal().mean())
    return (matrix / level if math.isfinite(level) and level > 0 else torch.eye(len(matrix)).to(matrix)).to(rows)


def _stationary(rows: Tensor, known: Tensor) -> Tensor:
    """Return the tapered autocovariance, without negative frequencies, as a matrix with a diagonal of 1.

    The arguments are those of :func:`_free`.
    """
    size = rows.shape[1]
    sums, counts = (torch.fft.rfft(part.double(), 2 * size).abs().square().sum(0) for part in (rows, known))
    sums, counts = (torch.fft.irfft(part, 2 * size)[:size] for part in (sums, counts))
    taper = (1 - torch.arange(size).to(sums) / size) ** _TAPER
    means = taper * sums / counts.clamp(min=1)
    spectrum = torch.fft.rfft(torch.cat([means, means.new_zeros(1), means[1:].flip(0)])).real
    means = torch.fft.irfft(spectrum.clamp(min=0), 2 * size)[:size]
    level = float(means[0])
    if not (math.isfinite(level) and level > 0):
        return torch.eye(size).to(rows)
    positions = torch.arange(size, device=rows.device)
    matrix: Tensor = (means / level)[(positions[:, None] - positions).abs()]
    return matrix.to(rows)
