"""Distribution of unknown entries given known entries under a whitened mixture.

Given component, contrast and gates, all entries are jointly Gaussian. Without gates, the conditional distribution is a
mixture of Gaussians, one per component and contrast, and everything here is exact. With gates, the same formulas,
in which gates are replaced with their mean variances, give initial values, and Gibbs sampling over components,
contrasts and gates is exact in the limit of many steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mvrbm.devices import one_thread
from mvrbm.random import RandomSource
from mvrbm.units.base import pick
from mvrbm.units.whitened import WhitenedMixture, mode_products

# Maximum number of entries in the arrays of one batched factorization.
_MOST_NUMBERS = 2**22


class Given(NamedTuple):
    """Conditional distribution of samples with the same unknown entries: one Gaussian per component and contrast."""

    log_weights: Tensor  # (n, K C), normalized
    means: Tensor  # (n, K C, unknown)
    factors: Tensor  # (K C, unknown, unknown): Cholesky factors of the precisions


class Patterns(NamedTuple):
    """Distinct patterns of unknown entries of samples."""

    known: Tensor  # (P, N)
    which: Tensor  # (n,): pattern of each sample
    entries: Tensor  # (P, N): indices of the entries, those of unknown entries first
    n_unknown: Tensor  # (P,)

    @classmethod
    def of(cls, known: Tensor) -> Patterns:
        """Find the patterns of samples, given a mask of known entries (n, N)."""
        patterns, which = torch.unique(known, dim=0, return_inverse=True)
        return cls(patterns, which, patterns.byte().argsort(dim=1, stable=True), (~patterns).sum(1))


class Conditional:
    """Conditional distributions of standardized arrays, flattened to rows, in double precision."""

    def __init__(self, unit: WhitenedMixture) -> None:
        self.unit = unit
        self.first = int(unit.level)
        size, K = unit.n_coefficients + self.first, unit.n_components
        bases = [matrix @ basis for matrix, basis in zip(unit.whitenings(), unit.bases(), strict=True)]
        eye = torch.eye(size, dtype=torch.float64, device=unit.center.device)
        products = mode_products(eye.reshape(1, size, *unit.shape), [basis.double() for basis in bases])
        self.columns = products.expand(K, size, size)  # (K, N, N): coefficients of arrays with a single one
        self.analysis = self.columns.mT  # (K, N, N): coefficients of an array
        offset = unit.offset if unit.means == "own" else unit.log_precision.new_zeros(K, unit.n_coefficients)
        padded = torch.nn.functional.pad(offset.double(), (self.first, 0))
        inverse = [basis.mT[None].double() for basis in unit.bases()]
        self.means = mode_products(padded.reshape(1, K, *unit.shape), inverse)[0]  # (K, N)
        self.log_determinants = unit.log_determinant().double()

    @functools.cached_property
    def _entry_precisions(self) -> Tensor:
        """Precisions of the entries under contrasts of 1 without gates, and without the level: (K, N, N)."""
        whitened = self.columns[:, :, self.first :]
        return (whitened * torch.exp(self.unit.log_precision.double())[:, None]) @ whitened.mT

    @property
    def _level_precision(self) -> float:
        """Precision that the level adds to each pair of entries."""
        if not self.first:
            return 0.0
        return float(torch.exp(-self.unit.level_log_variance.double())) / self.columns.shape[1]

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
        unknown = torch.nonzero(~known)[:, 0]
        weights, means, factors = [], [], []
        for k in range(unit.n_components):
            each = torch.full((unit.n_contrasts,), k, device=samples.device)
            precisions = self.precisions(each, logs[k][:, None].expand(-1, unit.n_coefficients))  # (C, N)
            rows = self._entry_precisions[k].index_select(0, unknown)
            rows = torch.exp(-logs[k])[:, None, None] * rows + self._level_precision  # (C, U, N)
            factor = torch.linalg.cholesky(rows.index_select(2, unknown))  # (C, U, U)
            deviation = torch.where(known, samples - self.means[k], 0.0)  # (n, N)
            pull = deviation @ rows.mT  # (C, n, U)
            step = torch.cholesky_solve(pull.mT, factor).mT  # (C, n, U)
            squares = ((deviation @ self.analysis[k].T) ** 2 @ precisions.T).T - (pull * step).sum(2)  # (C, n)
            half_log = 0.5 * precisions.log().sum(1) + self.log_determinants[k]
            half_log = half_log - factor.diagonal(dim1=1, dim2=2).log().sum(1)
            weights.append((unit.log_weights()[k].double() + half_log)[:, None] - 0.5 * squares)
            means.append(self.means[k, unknown] - step)
            factors.append(factor)
        log_weights = torch.log_softmax(torch.cat(weights).T, 1)
        return Given(log_weights, torch.cat(means).transpose(0, 1), torch.cat(factors))

    def gibbs_step(self, samples: Tensor, patterns: Patterns, rng: RandomSource) -> tuple[Tensor, Tensor]:
        """Draw component, contrast and gates given complete samples (n, N), then the unknown entries given these.

        Return the new samples and the means from which the unknown entries were drawn.
        """
        state, state_log_variances = self._draw_states(samples, rng)
        k = state // self.unit.n_contrasts
        normal = rng.normal(samples.shape, samples)
        precisions = self.precisions(k, state_log_variances)  # (n, N)
        deviation = torch.where(patterns.known[patterns.which], samples - self.means[k], 0.0)
        pull = torch.empty_like(samples)
        for i in k.unique():
            of_component = torch.nonzero(k == i)[:, 0]
            coefficients = deviation[of_component] @ self.analysis[i].T
            pull[of_component] = (precisions[of_component] * coefficients) @ self.analysis[i]
        drawn, means = samples.clone(), samples.clone()
        # Without gates, samples with the same unknown entries and the same state have the same precisions.
        same = torch.arange(len(state), device=state.device)
        if not self.unit.gate:
            same = patterns.which * self.unit.logits.numel() + state
        for rows in _batches(same, patterns.n_unknown[patterns.which], self.columns.shape[1] * self.unit.gate):
            leader = rows[:, 0]  # (B,)
            pattern = patterns.which[leader]
            counts = patterns.n_unknown[pattern]
            entries = patterns.entries[pattern][:, : int(counts.max())]  # (B, U)
            unknown = torch.arange(entries.shape[1], device=entries.device) < counts[:, None]
            if self.unit.gate:
                columns = self.columns[k[leader][:, None], entries]  # (B, U, N)
                block = (columns * precisions[leader][:, None]) @ columns.mT
            else:
                block = self._entry_precisions[k[leader][:, None, None], entries[:, :, None], entries[:, None]]
                block = block * torch.exp(-state_log_variances[leader, :1, None]) + self._level_precision
            # Padding gets the identity, so that one batch serves samples with different unknown entries.
            block = torch.where(unknown[:, :, None] & unknown[:, None], block, 0.0)
            block.diagonal(dim1=1, dim2=2).add_(~unknown)
            factor = torch.linalg.cholesky(block)  # (B, U, U)
            at = rows.clamp(min=0)[:, :, None], entries[:, None]
            step = torch.cholesky_solve(torch.where(unknown[:, None], pull[at], 0.0).mT, factor).mT  # (B, M, U)
            noise = torch.linalg.solve_triangular(factor.mT, normal[at].mT, upper=True).mT
            mean = self.means[k[leader][:, None], entries][:, None] - step
            wanted = unknown[:, None] & (rows >= 0)[:, :, None]  # (B, M, U)
            where = tuple(index.expand(wanted.shape)[wanted] for index in at)
            means[where], drawn[where] = mean[wanted], (mean + noise)[wanted]
        return drawn, means

    def _draw_states(self, samples: Tensor, rng: RandomSource) -> tuple[Tensor, Tensor]:
        """Draw component, contrast and gates given standardized samples, and return (n,) and (n, coefficients).

        The first result is the component times the number of contrasts, plus the contrast. The second result contains
        the log-variance of each coefficient's state, without its precision.
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
        return state, logs.expand(-1, z.shape[1], -1).gather(2, gate)[:, :, 0]


def _batches(group: Tensor, n_unknown: Tensor, extra: int) -> Iterator[Tensor]:
    """Divide samples into batches of groups with similar numbers of samples and of unknown entries.

    Yield the indices of the samples in the groups of each batch, as tensors of shape (B, M) that are padded with -1.
    `extra` is the number of numbers per unknown entry that a group requires in addition to its matrix and its samples.
    """
    _, group, counts = torch.unique(group, return_inverse=True, return_counts=True)
    order = group.argsort(stable=True)
    first = counts.cumsum(0) - counts
    widths, sizes = counts.tolist(), n_unknown[order[first]].tolist()
    batch: list[int] = []
    numbers = sorted(range(len(widths)), key=lambda i: (widths[i].bit_length(), sizes[i]))
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        batch.append(number)
        if following is not None and widths[following].bit_length() == widths[number].bit_length():
            largest = sizes[following] * (sizes[following] + 2 ** widths[following].bit_length() + extra)
            if (len(batch) + 1) * largest <= _MOST_NUMBERS:
                continue
        chosen = torch.tensor(batch, device=group.device)
        place = torch.arange(int(counts[chosen].max()), device=group.device)
        at = (first[chosen][:, None] + place).clamp(max=len(order) - 1)
        yield torch.where(place < counts[chosen][:, None], order[at], -1)
        batch = []


@one_thread()
def in_chunks(unit: WhitenedMixture, compute: Callable[[Tensor], Tensor], rotated: Tensor) -> Tensor:
    """Apply a function to cosine coefficients (n, N) in chunks whose intermediate values fit into memory."""
    states = unit.n_components * unit.n_contrasts * unit.state_log_variances().shape[2]
    budget = 2**21 if rotated.device.type == "cpu" else 2**27
    return torch.cat([compute(part) for part in rotated.split(max(1, budget // (states * rotated.shape[1])))])
