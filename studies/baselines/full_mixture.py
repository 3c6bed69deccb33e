"""Mixture of Gaussians with full covariances by expectation maximization on any device.

The algorithm is that of :class:`sklearn.mixture.GaussianMixture`, which runs on the CPU only, in the precision of the
samples. Here, single-precision samples are summed in double precision. The test compares both, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from sklearn.cluster import kmeans_plusplus
from torch import Tensor

__all__ = ["FullMixture"]

# Maximum number of intermediate values in one chunk of samples.
_CHUNK = {"cpu": 2**22, "cuda": 2**28}
# Number of samples from which the initial centers are drawn, and number of rounds of k-means.
_SEEDING_SAMPLES = 20_000
_KMEANS_ROUNDS = 20


@dataclass
class FullMixture:
    r"""Mixture of Gaussians with full covariances. All parameters have double precision.

    Parameters
    ----------
    weights : Tensor
        Probabilities of the components, of shape (K,).
    means : Tensor
        Means of shape (K, d).
    covariances : Tensor
        Covariances of shape (K, d, d).
    ridge : float
        Number that is added to the diagonals of the covariances in every step.
    """

    weights: Tensor
    means: Tensor
    covariances: Tensor
    ridge: float = 1e-6

    @classmethod
    def start(cls, x: Tensor, n_components: int, seed: int, ridge: float = 1e-6) -> Self:
        """Initialize the components from the clusters of k-means. `x` has shape (n, d)."""
        generator = torch.Generator().manual_seed(seed)
        some = x[torch.randperm(len(x), generator=generator)[:_SEEDING_SAMPLES].to(x.device)]
        centers, _ = kmeans_plusplus(some.cpu().numpy(), n_components, random_state=seed)
        means = torch.from_numpy(centers).to(x)
        for _ in range(_KMEANS_ROUNDS):
            nearest = torch.cat([_nearest(part, means) for part in _chunks(x, n_components)])
            counts = torch.bincount(nearest, minlength=n_components).clamp(min=1)[:, None]
            means = torch.zeros_like(means).index_add_(0, nearest, x) / counts
        weights = torch.empty(n_components, dtype=torch.float64, device=x.device)
        covariances = weights.new_empty(n_components, *2 * x.shape[1:])
        found = cls(weights, means.double(), covariances, ridge)
        found._maximize(x, lambda part: torch.nn.functional.one_hot(_nearest(part, means), n_components).to(x))
        return found

    def fit(self, x: Tensor, max_iter: int, tol: float) -> int:
        """Run steps until the mean log-likelihood improves by less than `tol`, and return their number."""
        former = -math.inf
        for step in range(max_iter):
            reached = self.step(x)
            if reached - former < tol:
                return step + 1
            former = reached
        return max_iter

    def step(self, x: Tensor) -> float:
        """Perform one step, and return the mean log-likelihood before it."""
        total = 0.0

        def responsibilities(part: Tensor) -> Tensor:
            nonlocal total
            joint = self._joint(part)
            likelihoods = torch.logsumexp(joint, 1)
            total += float(likelihoods.sum())
            return torch.exp(joint - likelihoods[:, None])

        self._maximize(x, responsibilities)
        return total / len(x)

    def score(self, x: Tensor) -> float:
        """Return the mean log-likelihood."""
        return sum(float(torch.logsumexp(self._joint(part), 1).sum()) for part in _chunks(x, self._size)) / len(x)

    @property
    def n_parameters(self) -> int:
        """Number of parameters."""
        k, d = self.means.shape
        return k * (d + d * (d + 1) // 2) + k - 1

    @property
    def _size(self) -> int:
        return self.means.numel()

    def _joint(self, x: Tensor) -> Tensor:
        """Return the joint log-densities of samples and components: (n, d) -> (n, K)."""
        d = x.shape[1]
        factor = torch.linalg.cholesky(self.covariances)
        eye = torch.eye(d).to(factor).expand_as(factor)
        inverse = torch.linalg.solve_triangular(factor, eye, upper=False)  # (K, d, d)
        shift = torch.einsum("ki,kji->kj", self.means, inverse).to(x)
        white = torch.einsum("ni,kji->nkj", x, inverse.to(x)).sub_(shift)
        log_determinant = inverse.diagonal(dim1=1, dim2=2).log().sum(1)
        constants = log_determinant + self.weights.log() - 0.5 * d * math.log(2 * math.pi)
        joint: Tensor = constants - 0.5 * torch.linalg.vector_norm(white, dim=2) ** 2
        return joint

    def _maximize(self, x: Tensor, responsibilities: Callable[[Tensor], Tensor]) -> None:
        """Set the parameters to the weighted moments of the samples."""
        counts = torch.zeros_like(self.weights)
        sums = torch.zeros_like(self.means)
        squares = torch.zeros_like(self.covariances)
        for part in _chunks(x, self._size):
            share = responsibilities(part).to(x)  # (n, K)
            counts += share.sum(0)
            sums += share.T @ part
            squares += (share.T[:, :, None] * part).mT @ part
        counts += 10 * torch.finfo(counts.dtype).eps
        self.weights = counts / counts.sum()
        self.means = sums / counts[:, None]
        self.covariances = squares / counts[:, None, None] - self.means[:, :, None] * self.means[:, None]
        self.covariances.diagonal(dim1=1, dim2=2).add_(self.ridge)


def _nearest(x: Tensor, centers: Tensor) -> Tensor:
    return ((centers**2).sum(1) - 2 * x @ centers.T).argmin(1)


def _chunks(x: Tensor, per_sample: int) -> Sequence[Tensor]:
    chunks: Sequence[Tensor] = x.split(max(1, _CHUNK[x.device.type] // per_sample))
    return chunks
