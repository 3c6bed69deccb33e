"""Distribution of unknown entries given known entries under a whitened mixture.

Given component, contrast and gates, all entries are jointly Gaussian. Without gates, the conditional distribution is a
mixture of Gaussians, one per component and contrast, and everything here is exact. With gates, the same formulas,
in which gates are replaced with their mean variances, give initial values, and Gibbs sampling over components,
contrasts and gates is exact in the limit of many steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mvrbm.devices import one_thread
from mvrbm.random import RandomSource
from mvrbm.units.whitened import WhitenedMixture, mode_products, pick

# Maximum number of matrix entries in one batched factorization.
_MOST_NUMBERS = 2**23


class Given(NamedTuple):
    """Conditional distribution of samples with the same unknown entries: one Gaussian per component and contrast."""

    log_weights: Tensor  # (n, K C), normalized
    means: Tensor  # (n, K C, unknown)
    factors: Tensor  # (K C, unknown, unknown): Cholesky factors of the precisions


class Conditional:
    """Conditional distributions of standardized arrays, flattened to rows, in double precision."""

    def __init__(self, unit: WhitenedMixture) -> None:
        self.unit = unit
        self.first = int(unit.level)
        size, K = unit.n_coefficients + self.first, unit.n_components
        bases = [matrix @ basis for matrix, basis in zip(unit.whitenings(), unit.bases(), strict=True)]
        eye = torch.eye(size, dtype=torch.float64, device=unit.center.device)
        products = mode_products(eye.reshape(1, size, *unit.shape), [basis.double() for basis in bases])
        self.analysis = products.mT.expand(K, size, size)  # (K, N, N): coefficients of an array
        offset = unit.offset if unit.means == "own" else unit.log_precision.new_zeros(K, unit.n_coefficients)
        padded = torch.nn.functional.pad(offset.double(), (self.first, 0))
        inverse = [basis.mT[None].double() for basis in unit.bases()]
        self.means = mode_products(padded.reshape(1, K, *unit.shape), inverse)[0]  # (K, N)
        self.log_determinants = unit.log_determinant().double()

    def precisions(self, k: Tensor, state_log_variances: Tensor) -> Tensor:
        """Return the precisions of all coefficients: (m,), (m, coefficients) -> (m, N)."""
        own = torch.exp(self.unit.log_precision.double()[k] - state_log_variances)
        if not self.first:
            return own
        level = torch.exp(-self.unit.level_log_variance.double()).expand(len(own), 1)
        return torch.cat([level, own], 1)

    def given(self, samples: Tensor, known: Tensor) -> Given:
        """Return the distribution of the unknown entries of samples (n, N), given the entries in `known`, (N,).

        This is exact without gates. With gates, each gate is replaced with its mean variance.
        """
        unit = self.unit
        logs = unit.mean_log_variances().double()  # (K, C)
        unknown = ~known
        weights, means, factors = [], [], []
        for k in range(unit.n_components):
            each = torch.full((unit.n_contrasts,), k, device=samples.device)
            precisions = self.precisions(each, logs[k][:, None].expand(-1, unit.n_coefficients))  # (C, N)
            analysis = self.analysis[k]
            full = (analysis.T * precisions[:, None]) @ analysis  # (C, N, N): precisions of the entries
            factor = torch.linalg.cholesky(full[:, unknown][:, :, unknown])  # (C, U, U)
            deviation = torch.where(known, samples - self.means[k], 0.0)  # (n, N)
            pull = (deviation @ full)[:, :, unknown]  # (C, n, U)
            step = torch.cholesky_solve(pull.mT, factor).mT  # (C, n, U)
            squares = ((deviation @ analysis.T) ** 2 @ precisions.T).T - (pull * step).sum(2)  # (C, n)
            half_log = 0.5 * precisions.log().sum(1) + self.log_determinants[k]
            half_log = half_log - factor.diagonal(dim1=1, dim2=2).log().sum(1)
            weights.append((unit.log_weights()[k].double() + half_log)[:, None] - 0.5 * squares)
            means.append(self.means[k, unknown] - step)
            factors.append(factor)
        log_weights = torch.log_softmax(torch.cat(weights).T, 1)
        return Given(log_weights, torch.cat(means).transpose(0, 1), torch.cat(factors))

    def gibbs_step(self, samples: Tensor, known: Tensor, rng: RandomSource) -> tuple[Tensor, Tensor]:
        """Draw component, contrast and gates given complete samples (n, N), then the unknown entries given these.

        Return the new samples and the means from which the unknown entries were drawn. `known` has shape (n, N).
        """
        k, state_log_variances = self._draw_states(samples, rng)
        drawn, means = samples.clone(), samples.clone()
        size = max(1, _MOST_NUMBERS // samples.shape[1] ** 2)
        normal = rng.normal(samples.shape, samples)
        for first in range(0, len(samples), size):
            rows = slice(first, first + size)
            analysis, free = self.analysis[k[rows]], (~known[rows]).double()
            full = analysis.mT @ (self.precisions(k[rows], state_log_variances[rows])[:, :, None] * analysis)
            deviation = torch.where(known[rows], samples[rows] - self.means[k[rows]], 0.0)
            pull = free * torch.einsum("nij,nj->ni", full, deviation)
            # Known entries get the identity, so that one batch serves samples with different unknown entries.
            block = free[:, :, None] * full * free[:, None] + torch.diag_embed(1 - free)
            factor = torch.linalg.cholesky(block)
            mean = self.means[k[rows]] - torch.cholesky_solve(pull[:, :, None], factor)[:, :, 0]
            noise = torch.linalg.solve_triangular(factor.mT, normal[rows, :, None], upper=True)[:, :, 0]
            means[rows] = torch.where(known[rows], samples[rows], mean)
            drawn[rows] = torch.where(known[rows], samples[rows], mean + noise)
        return drawn, means

    def _draw_states(self, samples: Tensor, rng: RandomSource) -> tuple[Tensor, Tensor]:
        """Draw component, contrast and gates given standardized samples, and return (n,) and (n, coefficients).

        The second result contains the log-variance of each coefficient's state, without its precision.
        """
        unit = self.unit
        arrays = samples.to(unit.center).reshape(1, -1, *unit.shape)
        rotated = mode_products(arrays, [basis[None] for basis in unit.bases()])[0]
        joint = in_chunks(unit, unit.joint_log_density, rotated).flatten(1)
        state = pick(torch.softmax(joint.double(), 1), rng.uniform((len(samples), 1), samples))[:, 0]
        k, c = state // unit.n_contrasts, state % unit.n_contrasts
        z = in_chunks(unit, lambda u: unit.coefficients(u).transpose(0, 1), rotated)[torch.arange(len(k)), k]
        z = z[:, self.first :].double()  # (n, coefficients)
        logs = unit.state_log_variances().double()[k, c][:, None]  # (n, 1, G)
        squares = (z**2 * torch.exp(unit.log_precision.double()[k]))[:, :, None]
        gates = torch.softmax(unit.log_gates().double()[k][:, None] - 0.5 * (squares * torch.exp(-logs) + logs), 2)
        gate = pick(gates, rng.uniform((*z.shape, 1), samples))
        return k, logs.expand(-1, z.shape[1], -1).gather(2, gate)[:, :, 0]


@one_thread()
def in_chunks(unit: WhitenedMixture, compute: Callable[[Tensor], Tensor], rotated: Tensor) -> Tensor:
    """Apply a function to cosine coefficients (n, N) in chunks whose intermediate values fit into memory."""
    states = unit.n_components * unit.n_contrasts * unit.state_log_variances().shape[2]
    budget = 2**21 if rotated.device.type == "cpu" else 2**27
    return torch.cat([compute(part) for part in rotated.split(max(1, budget // (states * rotated.shape[1])))])
