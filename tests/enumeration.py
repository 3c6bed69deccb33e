"""Machines written out in full: every discrete state listed, Gaussian entries integrated by their precision matrix.

Nothing here calls the package's own energies, fields or normalizers; only the parameters are read.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mvrbm import BoltzmannMachine
from tables import UNITS, full_matrix


class Terms(NamedTuple):
    """The terms of a sum over discrete states, each with a Gaussian over the free real entries."""

    states: Tensor  # (m, entries), the real entries at their conditional mean
    logs: Tensor  # (m,)
    reals: Tensor  # numbers of the free real entries
    covariance: Tensor  # (reals, reals)

    def mean(self) -> Tensor:
        """Mean of every entry."""
        return torch.softmax(self.logs, 0) @ self.states


class Site(NamedTuple):
    """Numbers of the entries of one site, the values it can have (None: any real number), and their probability."""

    entries: list[int]
    values: Tensor | None
    probability: Callable[[Tensor, Tensor], Tensor] | None


class Written:
    """The joint energy of all entries z, visible layers first: -h'z + z'Pz/2 + sum of base(z) + constant."""

    def __init__(self, machine: BoltzmannMachine) -> None:
        units = {**machine.layers, "(hidden)": machine.hidden}
        own = {name: UNITS[unit.name].own(unit) for name, unit in units.items()}
        self.shapes = {name: unit.shape for name, unit in units.items()}
        self.span: dict[str, slice] = {}
        self.sites: list[Site] = []
        start = 0
        for name, unit in units.items():
            size = math.prod(unit.shape)
            width = unit.shape[-1] if unit.entry_modes else 1
            self.span[name] = slice(start, start + size)
            for first in range(start, start + size, width):
                row = UNITS[unit.name]
                self.sites.append(Site(list(range(first, first + width)), row.site_values(width), row.probability))
            start += size
        self.hidden = self.span["(hidden)"]
        self.size, self.n_visible = start, self.hidden.start
        self.linear = torch.cat([part.linear for part in own.values()])
        self.base = [(self.span[name], UNITS[unit.name].base) for name, unit in units.items()]
        self.constant = torch.stack([part.constant for part in own.values()]).sum()
        self.precision = torch.diag(torch.cat([part.curvature for part in own.values()]))
        for name, link in machine.links.items():
            block = full_matrix(link) / own["(hidden)"].scale[:, None] / own[name].scale
            placed = torch.zeros_like(self.precision)
            placed[self.hidden, self.span[name]] = -block
            self.precision = self.precision + placed + placed.T

    def energy(self, z: Tensor) -> Tensor:
        """(m, entries) -> (m,)."""
        base = torch.stack([own(z[:, span]).sum(1) for span, own in self.base]).sum(0)
        return self.constant - z @ self.linear + 0.5 * ((z @ self.precision) * z).sum(1) + base

    def join(self, visible: Mapping[str, Tensor], hidden: Tensor | None = None) -> Tensor:
        """One row per sample: (n, entries). Hidden entries are 0 by default."""
        parts = [visible[name].flatten(1) for name in self.span if name != "(hidden)"]
        n = len(parts[0])
        hidden_size = self.size - self.n_visible
        parts.append(torch.zeros(n, hidden_size, dtype=parts[0].dtype) if hidden is None else hidden.flatten(1))
        return torch.cat(parts, 1)

    def split(self, z: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """(n, entries) -> visible layers by name, and hidden."""
        parts = {name: z[:, span].reshape(-1, *self.shapes[name]) for name, span in self.span.items()}
        return parts, parts.pop("(hidden)")

    def known(self, *, visible: bool = False, hidden: bool = False) -> Tensor:
        """Which entries are held: (entries,)."""
        known = torch.full((self.size,), visible)
        known[self.hidden] = hidden
        return known

    def terms(self, z: Tensor, known: Tensor) -> Terms:
        """All states that agree with z where it is known."""
        free = [(entries, values) for entries, values, _ in self.sites if not bool(known[entries].any())]
        listed = [(entries, values) for entries, values in free if values is not None]
        reals = torch.tensor([entries[0] for entries, values in free if values is None], dtype=torch.long)
        digits = every_combination(tuple(len(values) for _, values in listed))
        states = torch.where(known, z, torch.zeros_like(z)).repeat(len(digits), 1)
        for (entries, values), digit in zip(listed, digits.T, strict=True):
            states[:, entries] = values[digit]
        logs = -self.energy(states)
        if len(reals) == 0:
            return Terms(states, logs, reals, torch.zeros(0, 0, dtype=z.dtype))
        among = self.precision[reals][:, reals]
        pull = self.linear[reals] - (states @ self.precision)[:, reals]
        mean = torch.linalg.solve(among, pull.T).T
        logs = logs + 0.5 * (pull * mean).sum(1) + 0.5 * len(reals) * math.log(2 * math.pi) - 0.5 * torch.logdet(among)
        filled = states.index_copy(1, reals, mean)
        return Terms(filled, logs, reals, torch.linalg.inv(among))

    def log_sum(self, z: Tensor, known: Tensor) -> Tensor:
        """Log of the sum, or integral, of exp(-E) over what is not known."""
        return torch.logsumexp(self.terms(z, known).logs, 0)

    def log_partition(self) -> Tensor:
        return self.log_sum(torch.zeros(self.size, dtype=torch.float64), self.known())

    def free_energy(self, visible: Mapping[str, Tensor]) -> Tensor:
        known = self.known(visible=True)
        return -torch.stack([self.log_sum(z, known) for z in self.join(visible)])

    def representatives(self) -> tuple[Tensor, Tensor]:
        """Joint states and weights with the model's exact first and second moments given each discrete state."""
        terms = self.terms(torch.zeros(self.size, dtype=torch.float64), self.known())
        weights = torch.softmax(terms.logs, 0)
        count = len(terms.reals)
        if count == 0:
            return terms.states, weights
        offsets = torch.linalg.cholesky(count * terms.covariance).T  # one per row
        moves = torch.zeros(2 * count, self.size, dtype=torch.float64)
        moves[:, terms.reals] = torch.cat([offsets, -offsets])
        states = (terms.states[:, None] + moves).flatten(0, 1)
        return states, (weights / (2 * count)).repeat_interleave(2 * count)


@functools.cache
def every_combination(levels: tuple[int, ...]) -> Tensor:
    """All rows of digits: (product of levels, sites)."""
    rows = list(itertools.product(*(range(level) for level in levels)))
    return torch.tensor(rows, dtype=torch.long).reshape(len(rows), len(levels))


def every_visible_state(machine: BoltzmannMachine) -> dict[str, Tensor]:
    """All visible states of a machine whose visible layers are discrete."""
    written = Written(machine)
    known = written.known(hidden=True)
    with torch.no_grad():
        return written.split(written.terms(torch.zeros(written.size, dtype=torch.float64), known).states)[0]
