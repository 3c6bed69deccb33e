"""Diagnose whether Markov chains have mixed, from the overlaps of their states."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource
from mvrbm.sampling.chains import Layers, gibbs, independent_sample
from mvrbm.validation import whole_number

__all__ = ["Mixing", "chain_memory", "check_mixing"]

# Memory and disagreement below these values count as mixed. With 200 chains, their standard errors are about 0.01.
_FORGOTTEN, _AGREE = 0.05, 0.05
# Number of cyclic shifts by which chains are paired with other chains.
_SHIFTS = 20


@dataclass(frozen=True)
class Mixing:
    """Result of :func:`check_mixing`.

    Attributes
    ----------
    lags : list of int
        Lags, as numbers of Gibbs steps.
    memory : dict of str to list of float
        Memory of the chains after each lag, for each kind of initial state (``"random"`` and ``"data"``). See
        :func:`chain_memory`.
    time : float
        Estimated number of Gibbs steps after which the memory is below 0.05, or infinity if it never falls below 0.05.
    disagreement : float or None
        How much less the final states of one set of chains (from random states or from data) overlap with the states of
        the other set than with each other: 0 if the two sets agree, 1 if each set is stuck in a single state of its
        own. None if no data was given.
    """

    lags: list[int]
    memory: dict[str, list[float]]
    time: float
    disagreement: float | None

    @property
    def mixed(self) -> bool:
        """Whether the chains forget their states, and do not depend on the kind of initial state."""
        return math.isfinite(self.time) and (self.disagreement or 0.0) < _AGREE

    def __str__(self) -> str:
        longest = self.lags[-1]
        if math.isinf(self.time):
            worst = max(values[-1] for values in self.memory.values())
            return f"not mixed: after {longest:,} steps, chains still have a memory of {worst:.2f} of their states"
        steps = math.ceil(self.time)
        found = f"chains forget their states within about {steps:,} step{'' if steps == 1 else 's'}"
        if not self.mixed:
            return f"not mixed: {found}, but chains from data and from random states differ by {self.disagreement:.2f}"
        return f"mixed: {found}"


def chain_memory(machine: BoltzmannMachine, earlier: Layers, later: Layers) -> float:
    r"""Estimate how much chains remember of their earlier states.

    The overlap of two states is the fraction of sites with the same value. The memory compares the mean overlap of
    later states with earlier states of the same chain, and with earlier states of other chains:

    .. math:: \frac{q_\text{same} - q_\text{other}}{1 - q_\text{other}}

    Parameters
    ----------
    machine : BoltzmannMachine
        Model of the chains. Its visible sites must have finitely many values.
    earlier, later : mapping of str to Tensor
        States of the same independent chains at two times, at least two chains.

    Returns
    -------
    float
        1 for chains that have not moved, close to 0 for chains that have forgotten the earlier states, and 0 if all
        chains are in the same state.
    """
    _check_sites(machine)
    if _count(later) < 2:
        raise ValueError("the memory of chains requires at least 2 chains")
    same, other = _overlap(machine, earlier, later, [0]), _overlap(machine, earlier, later, _others(later))
    return (same - other) / (1 - other) if other < 1 else 0.0


def check_mixing(
    machine: BoltzmannMachine, data: Visible | None = None, *, n_chains: int = 200, steps: int = 1024, rng: RandomSource
) -> Mixing:
    """Run Gibbs chains and measure how fast they forget their states.

    Chains start from random states and, if `data` is given, also from data. The memory is measured between steps t / 2
    and t for t = 2, 4, 8, ..., so the chains have always taken as many steps before a measurement as they
    take during it. Chains that get stuck in the first mode they find seem to mix if all of them find the same mode.
    Chains that start from data reveal this.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model to sample from. Its visible sites must have finitely many values.
    data : Tensor or mapping of str to Tensor, optional
        Visible states, such as training data. The first `n_chains` are used.
    n_chains : int
        Number of chains for each kind of initial state.
    steps : int
        Maximum number of Gibbs steps.
    rng : RandomSource
        Random source for the chains.

    Returns
    -------
    Mixing
        The memory for each lag, an estimated mixing time, and whether the chains mix.
    """
    _check_sites(machine)
    whole_number(n_chains, "n_chains", 2)
    whole_number(steps, "steps", 2)
    starts: dict[str, Layers] = {"random": independent_sample(machine, n_chains, rng)}
    if data is not None:
        layers = {name: array[:n_chains] for name, array in machine.as_layers(data).items()}
        if _count(layers) < 2:
            raise ValueError("data must contain at least 2 states")
        starts["data"] = layers
    times = [2**power for power in range(1, int(math.log2(steps)) + 1)]
    memory: dict[str, list[float]] = {}
    ends: dict[str, Layers] = {}
    for kind, start in starts.items():
        states = gibbs(machine, start, 1, rng, check=False).visible
        memory[kind] = []
        for time in times:
            later = gibbs(machine, states, time // 2, rng, check=False).visible
            memory[kind].append(chain_memory(machine, states, later))
            states = later
        ends[kind] = states
    lags = [time // 2 for time in times]
    slowest = max(_time_to_forget(lags, values) for values in memory.values())
    return Mixing(lags, memory, slowest, _disagreement(machine, ends) if "data" in ends else None)


def _time_to_forget(lags: list[int], memory: list[float]) -> float:
    """Return the lag at which the memory falls below the threshold for good, interpolated on a logarithmic scale."""
    last = max((index for index, value in enumerate(memory) if value >= _FORGOTTEN), default=-1)
    if last == len(lags) - 1:
        return math.inf
    if last < 0:
        return float(lags[0])
    share = (memory[last] - _FORGOTTEN) / (memory[last] - memory[last + 1])
    return float(lags[last] * (lags[last + 1] / lags[last]) ** share)


def _disagreement(machine: BoltzmannMachine, ends: Mapping[str, Layers]) -> float:
    """Return how much less states overlap between two sets than within the sets, as in :func:`chain_memory`."""
    n = min(_count(layers) for layers in ends.values())
    first, second = ({name: array[:n] for name, array in layers.items()} for layers in ends.values())
    others = _others(first)
    inside = (_overlap(machine, first, first, others) + _overlap(machine, second, second, others)) / 2
    between = _overlap(machine, first, second, others)
    return max(0.0, (inside - between) / (1 - between)) if between < 1 else 0.0


def _check_sites(machine: BoltzmannMachine) -> None:
    for name, unit in machine.layers.items():
        if math.isinf(unit.levels):
            raise ValueError(
                f"overlaps of states require sites with finitely many values, but layer '{name}' has "
                f"{type(unit).__name__} units"
            )


def _overlap(machine: BoltzmannMachine, first: Layers, second: Layers, shifts: Sequence[int]) -> float:
    """Return the mean fraction of sites with the same value in pairs of states, one of which is shifted cyclically."""
    n_sites = sum(unit.n_sites for unit in machine.layers.values())
    equal = 0
    for name, unit in machine.layers.items():
        for shift in shifts:
            same = first[name] == second[name].roll(shift, 0)
            equal += int(same.flatten(1).unflatten(1, (unit.n_sites, -1)).all(2).sum())
    return equal / (n_sites * len(shifts) * _count(first))


def _others(layers: Layers) -> range:
    """Return cyclic shifts that pair each chain with other chains."""
    return range(1, min(_count(layers), _SHIFTS + 1))


def _count(layers: Layers) -> int:
    return len(next(iter(layers.values())))
