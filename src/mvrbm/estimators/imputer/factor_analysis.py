r"""Factor analysis as a machine with Gaussian visible and hidden layers, trained by EM.

Such a machine defines a normal distribution whose covariance is a diagonal matrix plus a low-rank matrix. The
likelihood, the conditional means and the EM steps have closed forms, so no sampling is required.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mvrbm.couplings import Dense
from mvrbm.estimators.imputer.conditional_normal import Normal
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.units import Gaussian

# EM stops when the mean log-variance of the noise changes by less than this tolerance.
_TOLERANCE = 1e-4
# Minimum noise variance, as a fraction of the variance of an entry.
_LEAST_NOISE = 1e-3
# Minimum variance used to standardize an entry, as a fraction of the median variance. The data is in units of the
# largest deviations, in which only entries that are constant in almost all samples have a smaller variance.
_LEAST_VARIANCE = 0.1
# Standard deviations up to this fraction of the mean are rounding errors of constant entries.
_ROUNDING = 1e-12
# Smallest eigenvalue of a covariance matrix that is written as a factor model, relative to the largest one.
_LEAST_EIGENVALUE = 1e-6
# Weight of the prior on the intercept, as a number of samples.
_INTERCEPT_PRIOR = 1e-6
# Minimum fraction of the noise variance that remains when new factors are added.
_REMAINING_NOISE = 0.1
# Maximum number of entries in a batch of factor covariance matrices.
_BATCH_ENTRIES = 2**24
# Maximum number of patterns of known entries for which the precision matrices are computed in a loop.
_FEW_PATTERNS = 16


@dataclass(frozen=True)
class Factors:
    r"""Factor model :math:`x = \mu + L t + \sqrt{\psi}\,\varepsilon` with standard normal :math:`t, \varepsilon`.

    Parameters
    ----------
    mean : Tensor of shape (D,)
        Mean :math:`\mu`.
    loadings : Tensor of shape (D, q)
        Loadings :math:`L`, with one column per factor.
    noise : Tensor of shape (D,)
        Noise variances :math:`\psi`.
    """

    mean: Tensor
    loadings: Tensor
    noise: Tensor

    @classmethod
    def of(cls, machine: BoltzmannMachine) -> Factors:
        """Return the factor model that is equivalent to a machine with one visible layer and only Gaussian units."""
        ((name, unit),) = machine.layers.items()
        with torch.no_grad():
            weights = machine.links[name].dense().reshape(machine.hidden.bias.numel(), -1).double()
            scale = 1 / unit.inverse_scale.reshape(-1).double()
            left, size, right = torch.linalg.svd(weights, full_matrices=False)
            # After dividing entries by `scale`, the precision is I - W'W, and the mean solves x = b + W'y, y = c + W x.
            bias = unit.bias.expand(unit.shape).reshape(-1).double() / scale
            pull = left.T @ machine.hidden.bias.expand(machine.hidden.shape).reshape(-1).double()
            mean = bias + right.T @ (size * (size * (right @ bias) + pull) / (1 - size**2))
            loadings = right.T * (size / torch.sqrt(1 - size**2)) * scale[:, None]
            return cls(*(part.to(unit.bias.dtype) for part in (mean * scale, loadings, scale**2)))

    @classmethod
    def of_covariance(cls, mean: Tensor, covariance: Tensor) -> Factors:
        """Return the factor model with D - 1 factors of a normal distribution, whose shapes are (D,) and (D, D)."""
        values, vectors = torch.linalg.eigh(covariance)
        noise = values[0].clamp(min=_LEAST_EIGENVALUE * values[-1])
        loadings = vectors[:, 1:] * torch.sqrt((values[1:] - noise).clamp(min=0))
        return cls(mean, loadings, noise.expand(len(mean)).clone())

    @classmethod
    def of_one_mean(cls, x: Tensor, known: Tensor) -> Factors:
        """Return the model in which all entries have the same mean and variance, with one factor of size zero."""
        count = known.sum().clamp(min=1)
        mean = (x * known).sum() / count
        variance = ((x - mean) ** 2 * known).sum() / count
        variance = torch.where(variance > 0, variance, 1.0)
        same = torch.ones_like(x[0]) if len(x) else x.new_ones(x.shape[1])
        return cls(mean * same, x.new_zeros(x.shape[1], 1), variance * same)

    def with_noise(self, multiple: float) -> Factors:
        """Return a copy of the model with the noise variances multiplied by `multiple`."""
        return Factors(self.mean, self.loadings, multiple * self.noise)

    def machine(self, shape: tuple[int, ...]) -> BoltzmannMachine:
        r"""Return the equivalent machine for samples of the given shape.

        The machine's weights are :math:`W = \sqrt{m / (1 + m)}\, U^\top`, where :math:`U` and :math:`m` are the
        eigenvectors and eigenvalues of :math:`\psi^{-1/2} L L^\top \psi^{-1/2}`.
        """
        scale = torch.sqrt(self.noise.double())
        directions, size, _ = torch.linalg.svd(self.loadings.double() / scale[:, None], full_matrices=False)
        weights = (size / torch.sqrt(1 + size**2))[:, None] * directions.T
        made = BoltzmannMachine(Gaussian(shape, learn_variance=True), Gaussian(len(size)), Dense()).to(self.mean.dtype)
        with torch.no_grad():
            unit = made.layers["visible"]
            unit.bias.copy_(self.mean.reshape(shape))
            unit.get_parameter("log_variance").copy_(torch.log(self.noise).reshape(shape))
            made.links["visible"].get_parameter("weight").copy_(weights)
            made.hidden.bias.copy_(-weights @ (self.mean.double() / scale))
        return made

    @cached_property
    def _products(self) -> tuple[Tensor, Tensor, Tensor]:
        """Precomputed terms of the posterior precision, which do not depend on the data.

        The first tensor has shape (D, q) and contains the loadings divided by the noise variances. The second has shape
        (2, m) and contains the indices of all pairs of factors. The third has shape (D, m) and contains, for each pair,
        the product of the loadings divided by the noise variances.
        """
        rank = self.loadings.shape[1]
        weighted = self.loadings / self.noise[:, None]
        above = torch.triu_indices(rank, rank, device=weighted.device)
        return weighted, above, weighted[:, above[0]] * self.loadings[:, above[1]]

    def posterior(self, x: Tensor, known: Tensor) -> Iterator[Posterior]:
        """Yield the posterior distribution of the factors given the known entries, for consecutive groups of rows.

        `x` and `known` have shape (n, D). Unknown entries of `x` can have any value except NaN.
        """
        rank = self.loadings.shape[1]
        weighted, above, products = self._products
        identity = torch.eye(rank, dtype=x.dtype, device=x.device)
        size = max(1, _BATCH_ENTRIES // max(rank**2, x.shape[1]))
        for first in range(0, len(x), size):
            rows = slice(first, first + size)
            # Samples with the same pattern of known entries, such as all complete samples, have the same covariance.
            patterns, which, counts = torch.unique(known[rows], dim=0, return_inverse=True, return_counts=True)
            if len(patterns) <= _FEW_PATTERNS:
                precision = torch.stack([weighted[own].T @ self.loadings[own] for own in patterns])
            else:
                precision = _symmetric(patterns.to(x.dtype) @ products, above, rank)
            root = torch.linalg.cholesky(precision + identity)
            projected = ((x[rows] - self.mean) * known[rows]) @ weighted
            yield Posterior(rows, _solve_by_pattern(root, projected, which, counts), root, which)

    @cached_property
    def _normal(self) -> Normal | None:
        """The distribution with its covariance matrix, if there are so many factors that it is faster to work with."""
        size, rank = self.loadings.shape
        if 2 * rank <= size:
            return None
        loadings = self.loadings.double()
        return Normal(self.mean.double(), loadings @ loadings.T, self.noise.double())

    def conditional_mean(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the means of all entries given the known entries, as a tensor of shape (n, D).

        For known entries, the result is the model's noise-free prediction rather than the known value.
        """
        if self._normal is not None:
            return self._normal.conditional_mean(x, known)
        return torch.cat([self.mean + found.mean @ self.loadings.T for found in self.posterior(x, known)])

    def deviation(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the standard deviations of all entries given the known entries, as a tensor of shape (n, D)."""
        if self._normal is not None:
            return self._normal.deviation(x, known)
        parts = [
            torch.einsum("nij,ki,kj->nk", found.covariance, self.loadings, self.loadings)[found.which]
            for found in self.posterior(x, known)
        ]
        return torch.sqrt(torch.cat(parts) + self.noise)

    def draw(self, x: Tensor, known: Tensor, rng: RandomSource) -> Tensor:
        """Draw samples of all entries given the known entries, as a tensor of shape (n, D)."""
        n, rank = len(x), self.loadings.shape[1]
        signal = rng.normal((n, rank), x) @ self.loadings.T
        noise = torch.sqrt(self.noise) * rng.normal((2, *x.shape), x)
        # The difference between a sample of the distribution and its conditional mean is independent of what is known.
        return self.conditional_mean(x - signal - noise[0], known) + signal + noise[1]


class Posterior(NamedTuple):
    """Normal posterior distributions of the factors for a group of rows."""

    rows: slice
    mean: Tensor  # (n, q)
    root: Tensor  # (p, q, q), Cholesky factor of the inverse covariance for each pattern of known entries
    which: Tensor  # (n,), pattern index of each row

    @property
    def covariance(self) -> Tensor:
        """Covariance matrices of the factors, of shape (p, q, q), one per pattern of known entries."""
        return torch.cholesky_inverse(self.root)


def _solve_by_pattern(root: Tensor, projected: Tensor, which: Tensor, counts: Tensor) -> Tensor:
    """Solve one linear system per row and return the solutions as a tensor of shape (n, q).

    `projected` has shape (n, q) and contains the right-hand sides. `root` has shape (p, q, q) and contains one Cholesky
    factor per pattern of known entries. `which` contains the pattern index of each row, and `counts` contains the
    number of rows per pattern.
    """
    if 2 * len(root) > len(which):
        return torch.cholesky_solve(projected[:, :, None], root[which])[..., 0]
    # Solve all rows with the same pattern together, because copying the matrix for each row would take too long.
    order = torch.argsort(which)
    groups = zip(projected[order].split(counts.tolist()), root, strict=True)
    mean = torch.empty_like(projected)
    mean[order] = torch.cat([torch.cholesky_solve(group.T, own).T for group, own in groups])
    return mean


@torch.no_grad()
def fit_factors(x: Tensor, known: Tensor, rank: int, n_steps: int, start: Factors | None = None) -> Factors:
    """Fit a factor model to data with unknown entries by EM and return the model.

    Parameters
    ----------
    x : Tensor of shape (n, D)
        Data. Unknown entries can have any value except NaN.
    known : Tensor of shape (n, D)
        Mask of the known entries.
    rank : int
        Number of factors.
    n_steps : int
        Maximum number of EM steps.
    start : Factors, optional
        Initial model, with at most `rank` factors. Additional factors are initialized from the residuals.
    """
    some = known.to(x.dtype)
    count = some.sum(0).clamp(min=1)
    center, variance = moments(x, known)
    scale = torch.sqrt(variance)
    z = torch.where(known, (x - center) / scale, 0.0)
    weight_of_sample = 1.0
    if bool(known.all()) and len(x) > 2 * x.shape[1]:
        weight_of_sample = 2 * x.shape[1] / len(x)
        z = _rows_with_same_moments(z)
        some = torch.ones_like(z)
        known = some > 0
        count = some.sum(0)
    found = _initial_factors(z, known, rank, start, center, scale)
    log_noise = math.inf
    for _ in range(n_steps):
        found = _em_step(found, z, known, some, count, weight_of_sample)
        before = log_noise
        log_noise = float(torch.log(found.noise).mean())
        if abs(before - log_noise) < _TOLERANCE:
            break
    return Factors(center + scale * found.mean, scale[:, None] * found.loadings, scale**2 * found.noise)


def moments(x: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and variances of the known entries, of shape (D,).

    Constant entries get the median variance. Other small variances are replaced with a tenth of it.
    """
    count = known.sum(0).clamp(min=1)
    center = (x.double() * known).sum(0) / count
    variance = ((x - center) ** 2 * known).sum(0) / count
    varying = variance > (_ROUNDING * center) ** 2
    other = variance[varying].median() if bool(varying.any()) else variance.new_tensor(1.0)
    return center.to(x), torch.where(varying, variance.clamp(min=_LEAST_VARIANCE * other), other).to(x)


def _rows_with_same_moments(z: Tensor) -> Tensor:
    """Return 2 * D rows with the same first and second moments as the centered, complete data `z`.

    The moments are sufficient statistics, so EM gives the same result for these rows as for `z`.
    """
    values, vectors = torch.linalg.eigh(z.T @ z / len(z))
    root = (torch.sqrt(values.clamp(min=0) * len(values)))[:, None] * vectors.T
    return torch.cat([root, -root])


def _initial_factors(
    z: Tensor, known: Tensor, rank: int, start: Factors | None, center: Tensor, scale: Tensor
) -> Factors:
    """Return an initial model with `rank` factors for the standardized data `z`."""
    if start is None:
        start = Factors(center, center.new_zeros(len(center), 0), scale**2)
    found = Factors((start.mean - center) / scale, start.loadings / scale[:, None], start.noise / scale**2)
    n_new = rank - found.loadings.shape[1]
    if n_new <= 0:
        return found
    residuals = torch.where(known, z - found.conditional_mean(z, known), 0.0)
    share_known = max(int(known.sum()), 1) / known.numel()
    if min(z.shape) < 4 * n_new:
        _, size, vectors = torch.linalg.svd(residuals, full_matrices=False)
    else:
        size, vectors = _largest_singular_values(residuals, n_new)
    new = vectors[:n_new].T * (size[:n_new] / math.sqrt(share_known * len(z)))
    new = torch.nn.functional.pad(new, (0, n_new - new.shape[1]))
    noise = (found.noise - (new**2).sum(1)).clamp(min=_REMAINING_NOISE * found.noise)
    return Factors(found.mean, torch.cat([found.loadings, new], 1), noise)


def _largest_singular_values(z: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Approximate the largest singular values and right singular vectors by a randomized SVD with a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, size, right = torch.svd_lowrank(z, q=min(count + 6, *z.shape), niter=4)
    return size, right.T


def _em_step(found: Factors, z: Tensor, known: Tensor, some: Tensor, count: Tensor, weight_of_sample: float) -> Factors:
    """Perform one EM step, which regresses each entry on the factors, and return the new model."""
    rank = found.loadings.shape[1]
    # Sums of products of the entries with the factors, and with 1 for the intercept.
    products = z.new_zeros(z.shape[1], rank + 1)
    above = torch.triu_indices(rank + 1, rank + 1, device=z.device)
    # Products of pairs of factors, summed over known entries. In complete data, the sums are the same for all entries.
    squares = z.new_zeros(1 if bool(known.all()) else z.shape[1], above.shape[1])
    for posterior in found.posterior(z, known):
        rows = posterior.rows
        covariance = posterior.covariance
        with_one = torch.nn.functional.pad(posterior.mean, (0, 1), value=1.0)
        products += z[rows].T @ with_one
        if len(covariance) == 1:
            square = with_one.T @ with_one
            square[:rank, :rank] += len(with_one) * covariance[0]
            squares += torch.outer(some[rows][0, : len(squares)], square[above[0], above[1]])
        else:
            each = with_one[:, :, None] * with_one[:, None, :]
            each[:, :rank, :rank] += covariance[posterior.which]
            squares += some[rows].T @ each[:, above[0], above[1]]
    # The standard normal prior on the loadings, in units of the noise, has the weight of one sample.
    prior = weight_of_sample * torch.eye(rank + 1, dtype=z.dtype, device=z.device)
    prior[-1, -1] = _INTERCEPT_PRIOR
    matrices = _symmetric(squares, above, rank + 1) + prior
    if len(matrices) == 1:
        coefficients = torch.linalg.solve(matrices[0], products.T).T
    else:
        coefficients = torch.linalg.solve(matrices, products[:, :, None])[:, :, 0]
    noise = ((z**2).sum(0) - (coefficients * products).sum(1)) / count
    return Factors(coefficients[:, -1], coefficients[:, :-1], noise.clamp(min=_LEAST_NOISE))


def _symmetric(values: Tensor, above: Tensor, size: int) -> Tensor:
    """Build symmetric matrices of shape (n, size, size) from upper triangular entries of shape (n, m)."""
    full = values.new_empty(len(values), size, size)
    full[:, above[0], above[1]] = values
    full[:, above[1], above[0]] = values
    return full
