"""Samples with unknown entries, whose values are drawn from a whitened mixture."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from mvrbm.devices import threads_worth
from mvrbm.estimators.mixture.conditional import Conditional, Patterns
from mvrbm.random import RandomSource
from mvrbm.units import WhitenedMixture
from mvrbm.units.base import pick


class EqualRows(RandomSource):
    """Random source whose rows are equal, so that draws for a sample do not depend on the other samples."""

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return super().uniform((1, *shape[1:]), like).expand(tuple(shape))

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return super().normal((1, *shape[1:]), like).expand(tuple(shape))


class Incomplete:
    r"""Samples of shape (n, \*shape) with unknown entries, and chains that draw these entries."""

    def __init__(self, unit: WhitenedMixture, x: Tensor, known: Tensor, rng: RandomSource) -> None:
        self.unit, self.rng = unit, rng
        self.x = x
        self.rows = torch.nonzero(~known.flatten(1).all(1))[:, 0]  # incomplete samples
        self.known = known.flatten(1)[self.rows]
        self.patterns = Patterns.of(self.known)
        v = (x[self.rows] - unit.center) * torch.exp(-unit.log_scale)
        self.state = v.flatten(1).double().nan_to_num()  # (m, N): standardized, with unknown entries drawn below
        with self._threads():
            self.means = self._start()

    def _threads(self) -> AbstractContextManager[int]:
        """Limit the threads for matrices with one row and column per entry."""
        return threads_worth(self.state.shape[1] ** 3, self.x.device)

    def _start(self) -> Tensor:
        """Draw the unknown entries without gates, and return their means."""
        means = self.state.clone()
        states = self.unit.n_components * self.unit.n_contrasts
        self.probabilities = means.new_zeros(len(means), states)  # of components and contrasts
        if not len(means):
            return means
        self.law = Conditional(self.unit)
        uniform, normal = self.rng.uniform((len(means), 1), means), self.rng.normal(means.shape, means)
        for number, known in enumerate(self.patterns.known):
            rows = torch.nonzero(self.patterns.which == number)[:, 0]
            found = self.law.given(self.state[rows], known)
            unknown = torch.nonzero(~known)[:, 0]
            probabilities = self.probabilities[rows] = found.log_weights.exp()
            means[rows[:, None], unknown] = torch.einsum("nm,nmu->nu", probabilities, found.means)
            state = pick(probabilities, uniform[rows])[:, 0]
            own = normal[rows[:, None], unknown][:, :, None]
            noise = torch.linalg.solve_triangular(found.factors[state].mT, own, upper=True)[:, :, 0]
            drawn = found.means[torch.arange(len(rows), device=state.device), state] + noise
            self.state[rows[:, None], unknown] = drawn
        return means

    def step(self) -> Tensor:
        """Perform one Gibbs step, and return the means from which the unknown entries were drawn."""
        with self._threads():
            self.state, means = self.law.gibbs_step(self.state, self.patterns, self.rng)
        return means

    def mean(self, steps: int, burn_in: int) -> Tensor:
        """Return the samples with the unknown entries replaced with their conditional means."""
        if not self.unit.gate or not len(self.rows):
            return self.filled(self.means)
        for _ in range(burn_in):
            self.step()
        total = torch.zeros_like(self.state)
        for _ in range(steps):
            total += self.step()
        return self.filled(total / steps)

    def draw(self, burn_in: int) -> Tensor:
        """Return the samples with the unknown entries drawn."""
        for _ in range(burn_in if self.unit.gate and len(self.rows) else 0):
            self.step()
        return self.filled(self.state)

    def filled(self, standardized: Tensor) -> Tensor:
        """Return a copy of the samples in which unknown entries have the given standardized values, (m, N)."""
        values = standardized.to(self.x).reshape(-1, *self.unit.shape)
        values = self.unit.center + values * torch.exp(self.unit.log_scale)
        known = self.known.reshape(values.shape)
        x = self.x.clone()
        x[self.rows] = torch.where(known, x[self.rows], values)
        return x


class Missing:
    """Training samples with missing entries, which are repeatedly redrawn from the model."""

    def __init__(self, unit: WhitenedMixture, x: Tensor, rng: RandomSource) -> None:
        self.unit, self.x = unit, x
        self.chains = Incomplete(unit, x, ~torch.isnan(x), rng)

    def rotated(self) -> Tensor:
        """Return the cosine coefficients of the samples with the current draws."""
        return self.unit.rotate(self.chains.filled(self.chains.state))

    def redraw(self) -> Tensor:
        """Draw the missing entries from the current model, and return the cosine coefficients of the samples."""
        self.chains.law = Conditional(self.unit)
        self.chains.step()
        return self.rotated()
