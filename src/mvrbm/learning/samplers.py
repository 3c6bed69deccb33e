"""Negative phases, which sample the model's side of the gradient: CD, persistent CD, and tempered persistent CD.

A phase is settings only. The chains that it keeps between updates are a plain dictionary of tensors in the state of the
training run. Sampling from a trained model is in :mod:`mvrbm.sampling`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mvrbm.learning.distributed import World
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers, Masks, ParallelTempering, gibbs_step, keep_known
from mvrbm.validation import whole_number

#: Chains between updates, by the name of their layer.
Chains = dict[str, Tensor]

_TURN = "exchange.turn"  # no layer can have a name with a dot


@dataclass(frozen=True)
class NegativePhase(ABC):
    """What the chains do at an update."""

    #: The axis of the arrays in `chains` along which the chains are counted.
    chain_axis: ClassVar[int] = 0
    #: Whether `draw` launches the same work every time but the first, without reading a number back.
    capturable: ClassVar[bool] = False

    @property
    def steps(self) -> int:
        """Gibbs steps per update."""
        raise NotImplementedError

    def share(self, world: World) -> tuple[NegativePhase, float | None]:
        """Return the phase of one of several processes, and its fraction of all chains; None: as for the data."""
        return self, None

    @abstractmethod
    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        """Return the visible states that stand for the model, each (m, *layer shape).

        Parameters
        ----------
        machine : BoltzmannMachine
            The model.
        batch : mapping of str to Tensor
            The data of this update, without missing entries.
        masks : mapping of str to Tensor or None
            Entries that do not exist in the batch (padding).
        field : Tensor (n, *hidden shape)
            Hidden field of the batch.
        rng : RandomSource
            Source of the draws.
        chains : dict
            The chains kept from the last update, empty at the first. Changed in place.
        """


@dataclass(frozen=True)
class CD(NegativePhase):
    """Contrastive divergence: chains of `steps` Gibbs steps that start at the data at every update."""

    capturable: ClassVar[bool] = True

    steps: int = 1

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps of CD")

    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        """Start at the batch. The first hidden draw uses its field."""
        hidden = machine.hidden.sample(field, rng)
        towards = machine.visible_fields(hidden)
        drawn = {name: unit.sample(towards[name], rng) for name, unit in machine.layers.items()}
        state = keep_known(batch, drawn, masks)
        for _ in range(self.steps - 1):
            state = gibbs_step(machine, state, rng, masks).visible
        return state


@dataclass(frozen=True)
class PCD(NegativePhase):
    """Persistent contrastive divergence: `n_chains` chains that continue from update to update."""

    capturable: ClassVar[bool] = True

    n_chains: int = 100
    steps: int = 1

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps of PCD")
        whole_number(self.n_chains, "n_chains of PCD")

    def share(self, world: World) -> tuple[NegativePhase, float | None]:
        """Return the phase with this process's chains, and their fraction of all chains."""
        return _shared(self, self.n_chains, world)

    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        """Continue the chains, which started at the first batch."""
        _check_no_padding(masks)
        state = {name: chains[name] for name in batch} if chains else _begin(machine, batch, self.n_chains, rng)
        padding = machine.as_masks(None, state)
        for _ in range(self.steps):
            state = gibbs_step(machine, state, rng, padding).visible
        chains.update(state)
        return state


@dataclass(frozen=True)
class TemperedPCD(NegativePhase):
    """Persistent chains at `n_temperatures` temperatures that exchange states; the coldest stand for the model."""

    chain_axis: ClassVar[int] = 1

    n_chains: int = 100
    n_temperatures: int = 10
    steps: int = 1

    def __post_init__(self) -> None:
        whole_number(self.steps, "steps of TemperedPCD")
        whole_number(self.n_chains, "n_chains of TemperedPCD")
        whole_number(self.n_temperatures, "n_temperatures of TemperedPCD", 2)

    def share(self, world: World) -> tuple[NegativePhase, float | None]:
        """Return the phase with this process's chains, and their fraction of all chains."""
        return _shared(self, self.n_chains, world)

    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        """Continue all chains, which started at the first batch, and return the coldest."""
        _check_no_padding(masks)
        tempering = ParallelTempering(
            machine,
            self.n_chains,
            self.n_temperatures,
            rng=rng,
            init={name: chains[name][-1] for name in batch} if chains else _begin(machine, batch, self.n_chains, rng),
            check=False,
        )
        if chains:
            tempering.visible = {name: chains[name] for name in batch}
            tempering.turn = int(chains[_TURN])
        coldest = tempering.step(self.steps)
        chains.update(tempering.visible)
        chains[_TURN] = torch.tensor(tempering.turn)
        return {name: array.clone() for name, array in coldest.items()}


def _shared(phase: PCD | TemperedPCD, n_chains: int, world: World) -> tuple[NegativePhase, float]:
    if n_chains < world.size:
        raise ValueError(f"n_chains must be at least the number of processes, {world.size}, got {n_chains}")
    part = world.part_of(n_chains)
    own = part.stop - part.start
    return dataclasses.replace(phase, n_chains=own), own / n_chains


def _check_no_padding(masks: Masks) -> None:
    # A model of documents has one log Z per length: chains of other lengths than the batch's would bias it.
    if any(mask is not None and bool(mask.any()) for mask in masks.values()):
        raise ValueError("persistent chains keep their lengths, but the data has rows of padding: use CD instead")


def _begin(machine: BoltzmannMachine, batch: Layers, count: int, rng: RandomSource) -> dict[str, Tensor]:
    """Start chains at the batch, or at draws from the biases where another process has the whole batch."""
    if len(next(iter(batch.values()))):
        return _spread(batch, count)
    like = machine.like
    return {name: unit.sample(like.new_zeros(count, *unit.shape), rng) for name, unit in machine.layers.items()}


def _spread(batch: Layers, count: int) -> dict[str, Tensor]:
    """Return `count` states from a batch, each of its samples as often as needed."""
    n = len(next(iter(batch.values())))
    rows = torch.arange(count) % n
    return {name: array[rows.to(array.device)] for name, array in batch.items()}
