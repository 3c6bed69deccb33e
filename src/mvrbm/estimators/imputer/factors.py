r"""Factor analysis: machines of two Gaussian layers, trained by exact steps (EM) instead of chains.

A machine with Gaussian visible and hidden layers is a normal distribution whose covariance is a diagonal matrix plus a
matrix of low rank. Its likelihood, its conditional means and the steps of its training are linear algebra.
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
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.units import Gaussian

# Steps end when the mean log-noise changes by less than this. Noise is at least this fraction of an entry's variance.
_TOLERANCE, _LEAST_NOISE = 1e-4, 1e-3
# Numbers in one batch of covariance matrices of factors; so few of them are computed one by one, from known entries.
_BATCH, _FEW = 2**24, 16


@dataclass(frozen=True)
class Factors:
    r"""Normal entries :math:`x = \mu + L t + \sqrt{\psi}\,\varepsilon`, with standard normal :math:`t, \varepsilon`.

    Parameters
    ----------
    mean, noise : Tensor (D,)
        :math:`\mu` and :math:`\psi`.
    loadings : Tensor (D, q)
        :math:`L`, one column per factor.
    """

    mean: Tensor
    loadings: Tensor
    noise: Tensor

    @classmethod
    def of(cls, machine: BoltzmannMachine) -> Factors:
        """Return the distribution of a machine with one Gaussian visible and a Gaussian hidden layer."""
        ((name, unit),) = machine.layers.items()
        with torch.no_grad():
            weights = machine.links[name].dense().reshape(machine.hidden.bias.numel(), -1).double()
            scale = 1 / unit.inverse_scale().reshape(-1).double()
            left, size, right = torch.linalg.svd(weights, full_matrices=False)
            # The precision in standard deviations is I - W'W; the mean solves x = b + W'y, y = c + W x.
            bias = unit.bias.expand(unit.shape).reshape(-1).double() / scale
            pull = left.T @ machine.hidden.bias.expand(machine.hidden.shape).reshape(-1).double()
            mean = bias + right.T @ (size * (size * (right @ bias) + pull) / (1 - size**2))
            loadings = right.T * (size / torch.sqrt(1 - size**2)) * scale[:, None]
            return cls(*(part.to(unit.bias.dtype) for part in (mean * scale, loadings, scale**2)))

    def with_noise(self, multiple: float) -> Factors:
        """Return the same factors with a multiple of the noise."""
        return Factors(self.mean, self.loadings, multiple * self.noise)

    def machine(self, shape: tuple[int, ...]) -> BoltzmannMachine:
        r"""Return the machine with this distribution: :math:`W = \sqrt{m / (1 + m)}\, U^\top` in standard deviations.

        :math:`U` and :math:`m` are the eigenvectors and eigenvalues of
        :math:`\psi^{-1/2} L L^\top \psi^{-1/2}`.
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
        """Loadings over noise (D, q), and their products with loadings, (D, m), by the pairs of factors (2, m)."""
        rank = self.loadings.shape[1]
        weighted = self.loadings / self.noise[:, None]
        above = torch.triu_indices(rank, rank, device=weighted.device)
        return weighted, above, weighted[:, above[0]] * self.loadings[:, above[1]]

    def posterior(self, x: Tensor, known: Tensor) -> Iterator[Posterior]:
        """Yield the distribution of the factors of some rows after others, given the known entries.

        `x` and `known` are (n, D); what `x` holds elsewhere does not matter, unless it is NaN.
        """
        rank = self.loadings.shape[1]
        weighted, above, products = self._products
        one = torch.eye(rank, dtype=x.dtype, device=x.device)
        size = max(1, _BATCH // max(rank**2, x.shape[1]))
        for first in range(0, len(x), size):
            rows = slice(first, first + size)
            # Samples with the same known entries, such as all complete ones, have the same covariance.
            patterns, which, counts = torch.unique(known[rows], dim=0, return_inverse=True, return_counts=True)
            if len(patterns) <= _FEW:
                precision = torch.stack([weighted[own].T @ self.loadings[own] for own in patterns])
            else:
                precision = _symmetric(patterns.to(x.dtype) @ products, above, rank)
            root = torch.linalg.cholesky(precision + one)
            projected = ((x[rows] - self.mean) * known[rows]) @ weighted
            if 2 * len(patterns) > len(which):
                mean = torch.cholesky_solve(projected[:, :, None], root[which])[..., 0]
            else:  # a copy of the matrix for every row would take most of the time
                order, mean = torch.argsort(which), torch.empty_like(projected)
                groups = zip(projected[order].split(counts.tolist()), root, strict=True)
                mean[order] = torch.cat([torch.cholesky_solve(group.T, own).T for group, own in groups])
            yield Posterior(rows, mean, root, which)

    def conditional_mean(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the mean (n, D) of the entries given the known entries, with noise of their own for these, too."""
        return torch.cat([self.mean + found.mean @ self.loadings.T for found in self.posterior(x, known)])

    def deviation(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the standard deviation (n, D) of unknown entries given the known ones."""
        parts = [
            torch.einsum("nij,ki,kj->nk", found.covariance, self.loadings, self.loadings)[found.which]
            for found in self.posterior(x, known)
        ]
        return torch.sqrt(torch.cat(parts) + self.noise)

    def draw(self, x: Tensor, known: Tensor, rng: RandomSource) -> Tensor:
        """Return values (n, D) of all entries, drawn given the known entries."""
        parts = []
        for found in self.posterior(x, known):
            root = torch.linalg.cholesky(found.covariance)[found.which]
            factors = found.mean + (root @ rng.normal(found.mean.shape, x)[:, :, None])[..., 0]
            parts.append(self.mean + factors @ self.loadings.T)
        means = torch.cat(parts)
        return means + torch.sqrt(self.noise) * rng.normal(means.shape, means)


class Posterior(NamedTuple):
    """Normal distributions of the factors of some rows."""

    rows: slice
    mean: Tensor  # (n, q)
    root: Tensor  # (p, q, q), the Cholesky factor of the inverse covariance of each pattern of known entries
    which: Tensor  # (n,): the pattern of each row

    @property
    def covariance(self) -> Tensor:
        """The covariance of the factors of each pattern, (p, q, q)."""
        return torch.cholesky_inverse(self.root)


@torch.no_grad()
def fit_factors(x: Tensor, known: Tensor, rank: int, n_steps: int, start: Factors | None = None) -> Factors:
    """Return factors fitted to data (n, D) with unknown entries, by EM.

    Parameters
    ----------
    x, known : Tensor (n, D)
        Data, and True where it is known; elsewhere it holds anything but NaN.
    rank : int
        Number of factors.
    n_steps : int
        Largest number of steps.
    start : Factors, optional
        Factors to continue from, of at most this rank. Further factors are those of what these leave unexplained.
    """
    some = known.to(x.dtype)
    count = some.sum(0).clamp(min=1)
    center = (x * some).sum(0) / count
    variance = ((x - center) ** 2 * some).sum(0) / count
    varying = variance > 0
    # Entries that hardly vary must not be divided by almost zero.
    least = 1e-2 * variance[varying].median() if bool(varying.any()) else variance.new_tensor(1.0)
    scale = torch.sqrt(variance.clamp(min=least))
    z = torch.where(known, (x - center) / scale, 0.0)
    one_sample = 1.0
    if bool(known.all()) and len(x) > 2 * x.shape[1]:  # the moments are sufficient: rows that have the same ones
        values, vectors = torch.linalg.eigh(z.T @ z / len(z))
        root = (torch.sqrt(values.clamp(min=0) * len(values)))[:, None] * vectors.T
        z = torch.cat([root, -root])
        some = torch.ones_like(z)
        known, count, one_sample = some > 0, some.sum(0), len(z) / len(x)
    found = _started(z, known, rank, start, center, scale)
    level = math.inf
    for _ in range(n_steps):
        found = _step(found, z, known, some, count, one_sample)
        before, level = level, float(torch.log(found.noise).mean())
        if abs(before - level) < _TOLERANCE:
            break
    return Factors(center + scale * found.mean, scale[:, None] * found.loadings, scale**2 * found.noise)


def _started(z: Tensor, known: Tensor, rank: int, start: Factors | None, center: Tensor, scale: Tensor) -> Factors:
    """Return factors of scaled data to start from."""
    if start is None:
        start = Factors(center, center.new_zeros(len(center), 0), scale**2)
    found = Factors((start.mean - center) / scale, start.loadings / scale[:, None], start.noise / scale**2)
    more = rank - found.loadings.shape[1]
    if more <= 0:
        return found
    rest = torch.where(known, z - found.conditional_mean(z, known), 0.0)
    share = float(known.to(z.dtype).mean())
    _, size, vectors = torch.linalg.svd(rest, full_matrices=False) if min(z.shape) < 4 * more else _largest(rest, more)
    new = vectors[:more].T * (size[:more] / math.sqrt(share * len(z)))
    new = torch.nn.functional.pad(new, (0, more - new.shape[1]))
    left = (found.noise - (new**2).sum(1)).clamp(min=0.1 * found.noise)
    return Factors(found.mean, torch.cat([found.loadings, new], 1), left)


def _largest(z: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return approximately the largest singular values, with a random start that is always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        left, size, right = torch.svd_lowrank(z, q=min(rank + 6, *z.shape), niter=4)
    return left, size, right.T


def _step(found: Factors, z: Tensor, known: Tensor, some: Tensor, count: Tensor, one_sample: float) -> Factors:
    """Return the factors after one step of EM: the regression of every entry on the factors of its samples."""
    rank = found.loadings.shape[1]
    products = z.new_zeros(z.shape[1], rank + 1)  # of entries with factors, and with 1
    above = torch.triu_indices(rank + 1, rank + 1, device=z.device)
    # Products of factors with each other where the entry is known: the same for all entries of complete data.
    squares = z.new_zeros(1 if bool(known.all()) else z.shape[1], above.shape[1])
    for posterior in found.posterior(z, known):
        rows, factors, covariance = posterior.rows, posterior.mean, posterior.covariance
        with_one = torch.nn.functional.pad(factors, (0, 1), value=1.0)
        products += z[rows].T @ with_one
        if len(covariance) == 1:
            square = with_one.T @ with_one
            square[:rank, :rank] += len(factors) * covariance[0]
            squares += torch.outer(some[rows][0, : len(squares)], square[above[0], above[1]])
        else:
            each = with_one[:, :, None] * with_one[:, None, :]
            each[:, :rank, :rank] += covariance[posterior.which]
            squares += some[rows].T @ each[:, above[0], above[1]]
    # A standard normal prior of the loadings, in units of the noise, counts as much as one sample.
    prior = one_sample * torch.eye(rank + 1, dtype=z.dtype, device=z.device)
    prior[-1, -1] = 1e-6
    matrices = _symmetric(squares, above, rank + 1) + prior
    if len(matrices) == 1:
        line = torch.linalg.solve(matrices[0], products.T).T
    else:
        line = torch.linalg.solve(matrices, products[:, :, None])[:, :, 0]
    noise = ((z**2).sum(0) - (line * products).sum(1)) / count
    return Factors(line[:, -1], line[:, :-1], noise.clamp(min=_LEAST_NOISE))


def _symmetric(values: Tensor, above: Tensor, size: int) -> Tensor:
    """Return symmetric matrices (n, size, size) from the entries (n, m) on and above their diagonals."""
    full = values.new_empty(len(values), size, size)
    full[:, above[0], above[1]] = values
    full[:, above[1], above[0]] = values
    return full
