"""Negative phases, which sample the model's side of the gradient: CD, persistent CD, and tempered persistent CD.

A phase is settings only. The chains that it keeps between updates are a plain dictionary of tensors in the state of the
training run. Sampling from a trained model is in :mod:`mvrbm.sampling`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from mvrbm.distributed import World
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers, Masks, ParallelTempering, draw_visible, gibbs_step
from mvrbm.validation import whole_number

#: Chains between updates, by the name of their layer.
Chains = dict[str, Tensor]

TURN = "exchange.turn"  # no layer can have a name with a dot


@dataclass(frozen=True)
class NegativePhase(ABC):
    """What the chains do at an update."""

    #: The axis of the arrays in `chains` along which the chains are counted.
    chain_axis: ClassVar[int] = 0
    #: Whether `draw` launches the same work every time but the first, without reading a number back from a GPU.
    capturable: ClassVar[bool] = False

    @property
    def chain_shape(self) -> tuple[int, ...]:
        """The leading axes of the arrays in `chains`; empty where none are kept between updates."""
        return ()

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("n_chains", 1), ("n_temperatures", 2)):
            if name in {field.name for field in fields(self)}:
                whole_number(getattr(self, name), f"{name} of {type(self).__name__}", least)

    @property
    def steps(self) -> int:
        """Gibbs steps per update."""
        raise NotImplementedError

    def share(self, world: World) -> tuple[NegativePhase, float | None]:
        """Return the phase of one of several processes, and its fraction of all chains; None: as for the data."""
        return self, None

    def turn(self, chains: Chains) -> int:
        """Return which kind of work the next `draw` does, where kinds take turns."""
        return 0

    def pass_turn(self, chains: Chains) -> None:  # noqa: B027  (one kind of work has no turns)
        """Count a `draw` that was replayed: its work has been done, but the turn has not been counted."""

    def start(self, machine: BoltzmannMachine, batch: Layers, rng: RandomSource) -> Chains:
        """Return the chains before the first update; empty where none are kept between updates."""
        return {}

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
            The chains kept from the last update, or those that `start` returned. Changed in place.
        """


@dataclass(frozen=True)
class CD(NegativePhase):
    """Contrastive divergence: chains of `steps` Gibbs steps that start at the data at every update."""

    capturable: ClassVar[bool] = True

    steps: int = 1

    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        hidden = machine.hidden.sample(field, rng)  # from the field of the batch
        state = draw_visible(machine, machine.visible_fields(hidden), batch, rng, masks)
        for _ in range(self.steps - 1):
            state = gibbs_step(machine, state, rng, masks).visible
        return state


@dataclass(frozen=True)
class _Persistent(NegativePhase):
    """Chains that continue from update to update, from the first batch on."""

    n_chains: int = 100

    @property
    def chain_shape(self) -> tuple[int, ...]:
        return (self.n_chains,)

    def share(self, world: World) -> tuple[NegativePhase, float | None]:
        if self.n_chains < world.size:
            raise ValueError(f"n_chains must be at least the number of processes, {world.size}, got {self.n_chains}")
        own = len(range(self.n_chains)[world.part_of(self.n_chains)])
        return replace(self, n_chains=own), own / self.n_chains

    def start(self, machine: BoltzmannMachine, batch: Layers, rng: RandomSource) -> Chains:
        """Start at the samples of a batch, each as often as needed, or at draws from the biases if it has none."""
        n = len(next(iter(batch.values())))
        if n:
            rows = torch.arange(self.n_chains) % n
            return {name: array[rows.to(array.device)] for name, array in batch.items()}
        fields = {name: machine.like.new_zeros(self.n_chains, *unit.shape) for name, unit in machine.layers.items()}
        return {name: unit.sample(fields[name], rng) for name, unit in machine.layers.items()}


@dataclass(frozen=True)
class PCD(_Persistent):
    """Persistent contrastive divergence: `n_chains` chains that continue from update to update."""

    capturable: ClassVar[bool] = True

    steps: int = 1

    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        _check_equal_lengths(machine, masks)
        state = {name: chains[name] for name in batch}
        padding = machine.as_masks(None, state)
        for _ in range(self.steps):
            state = gibbs_step(machine, state, rng, padding).visible
        chains.update(state)
        return state


@dataclass(frozen=True)
class TemperedPCD(_Persistent):
    """Persistent chains at `n_temperatures` temperatures that exchange states; the coldest stand for the model."""

    chain_axis: ClassVar[int] = 1
    capturable: ClassVar[bool] = True

    n_temperatures: int = 10
    steps: int = 1

    @property
    def chain_shape(self) -> tuple[int, ...]:
        return self.n_temperatures, self.n_chains

    def turn(self, chains: Chains) -> int:
        """Return which pairs of temperatures the next exchange begins with."""
        return int(chains[TURN]) if chains else 0

    def start(self, machine: BoltzmannMachine, batch: Layers, rng: RandomSource) -> Chains:
        """Start the chains of all temperatures at the same states."""
        states = super().start(machine, batch, rng)
        chains = {name: array.repeat(self.n_temperatures, *[1] * array.ndim) for name, array in states.items()}
        return {**chains, TURN: torch.tensor(0)}

    def pass_turn(self, chains: Chains) -> None:
        chains[TURN] = torch.tensor((self.turn(chains) + self.steps) % 2)

    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        _check_equal_lengths(machine, masks)
        coldest = {name: chains[name][-1] for name in batch}
        tempering = ParallelTempering(machine, self.n_chains, self.n_temperatures, rng=rng, init=coldest, check=False)
        tempering.visible = {name: chains[name] for name in batch}
        tempering.turn = self.turn(chains)
        coldest = tempering.step(self.steps)
        self.pass_turn(chains)
        chains.update(tempering.visible)
        return {name: array.clone() for name, array in coldest.items()}


def _check_equal_lengths(machine: BoltzmannMachine, masks: Masks) -> None:
    # A model of documents has one log Z per length: chains of other lengths than the batch's would bias it.
    if any(unit.own_lengths for unit in machine.layers.values()):
        raise ValueError(
            "persistent chains keep their lengths, but documents have lengths of their own: use CD instead"
        )
    if any(mask is not None and bool(mask.any()) for mask in masks.values()):
        raise ValueError("persistent chains keep their lengths, but the data has rows of padding: use CD instead")
