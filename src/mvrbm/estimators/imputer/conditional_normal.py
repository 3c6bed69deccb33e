"""Conditional means and standard deviations of a normal distribution with a full covariance matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Maximum number of entries in a sample for which the systems of several samples are solved at once, and the maximum
# number of entries in these systems.
_SMALL = 100
_BATCH_ENTRIES = 2**20


@dataclass(frozen=True)
class Normal:
    r"""Normal distribution of a signal with a full covariance matrix, plus independent noise.

    With the precision matrix :math:`P` and the deviations from the mean :math:`r`, which are 0 for the unknown entries
    :math:`u`, the conditional means of the unknown entries deviate by :math:`-P_{uu}^{-1} (P r)_u` from the mean, and
    their covariance matrix is :math:`P_{uu}^{-1}`.

    Parameters
    ----------
    mean : Tensor of shape (D,)
        Mean, in double precision.
    signal : Tensor of shape (D, D)
        Covariance matrix of the signal, in double precision.
    noise : Tensor of shape (D,)
        Variances of the noise, in double precision.
    """

    mean: Tensor
    signal: Tensor
    noise: Tensor

    @cached_property
    def _precision(self) -> Tensor:
        return torch.cholesky_inverse(torch.linalg.cholesky(self.signal + torch.diag(self.noise)))

    def given(self, x: Tensor, known: Tensor) -> Iterator[Conditional]:
        """Yield the distribution of the unknown entries given the known ones for each pattern of known entries.

        `x` contains samples, `known` is a mask of the known entries, and both have shape (n, D).
        """
        pulls = torch.where(known, x - self.mean, 0.0) @ self._precision
        patterns, which, counts = torch.unique(known, dim=0, return_inverse=True, return_counts=True)
        groups = torch.argsort(which).split(counts.tolist())
        for rows, pattern in zip(groups, patterns, strict=True):
            unknown = torch.nonzero(~pattern)[:, 0]
            if len(unknown):
                own = self._precision.index_select(0, unknown).index_select(1, unknown)
                covariance = torch.cholesky_inverse(torch.linalg.cholesky(own))
                change = -pulls.index_select(0, rows).index_select(1, unknown) @ covariance
                yield Conditional(rows, unknown, change, covariance)

    def conditional_mean(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the means of the signal given the known entries, as a tensor of shape (n, D)."""
        if len(self.mean) <= _SMALL:
            size = max(1, _BATCH_ENTRIES // len(self.mean) ** 2)
            batches = zip(x.split(size), known.split(size), strict=True)
            difference = torch.cat([self._changes(*batch) for batch in batches])
        else:
            difference = torch.where(known, x - self.mean, 0.0)
            for found in self.given(x, known):
                difference[found.rows[:, None], found.unknown] = found.change
        # Known entries contain noise, which is removed.
        without_noise = difference - (difference @ self._precision) * self.noise
        return (self.mean + without_noise).to(x)

    def _changes(self, x: Tensor, known: Tensor) -> Tensor:
        """Return differences from the mean, with conditional means of unknown entries, by one system per sample."""
        difference = torch.where(known, x - self.mean, 0.0)
        pulls = torch.where(known, 0.0, difference @ self._precision)
        # The system of a sample is that of its unknown entries. Rows and columns of known entries are the identity.
        systems = torch.where(known[:, :, None] | known[:, None, :], 0.0, self._precision)
        systems.diagonal(dim1=1, dim2=2).add_(known)
        return difference - torch.cholesky_solve(pulls[:, :, None], torch.linalg.cholesky(systems))[:, :, 0]

    def deviation(self, x: Tensor, known: Tensor) -> Tensor:
        """Return the standard deviations of all entries given the known ones. For known entries, this is the noise."""
        variances = self.noise.repeat(len(x), 1)
        for found in self.given(x, known):
            variances[found.rows[:, None], found.unknown] = found.covariance.diagonal()
        return torch.sqrt(variances).to(x)


@dataclass(frozen=True)
class Conditional:
    """Distribution of the unknown entries in samples with the same pattern of known entries."""

    rows: Tensor  # (r,), indices of the samples
    unknown: Tensor  # (u,), indices of the unknown entries
    change: Tensor  # (r, u), difference of the conditional mean from the mean
    covariance: Tensor  # (u, u)
