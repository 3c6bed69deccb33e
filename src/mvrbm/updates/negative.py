"""Negative phases, which sample the model's side of the gradient: CD, persistent CD, and tempered persistent CD.

A negative phase holds settings only. The chains that it keeps between updates are a dictionary of tensors in
:class:`~mvrbm.updates.state.TrainState`. To sample from a trained model, see :mod:`mvrbm.sampling`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from mvrbm.distributed import World
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.random.source import Position
from mvrbm.sampling import Layers, Masks, ParallelTempering, draw_visible, gibbs_step
from mvrbm.validation import whole_number

#: Chains between updates, by the name of their layer.
Chains = dict[str, Tensor]

#: Entry of the chains that holds the swap parity of tempered chains. No layer can have a name with a dot.
TURN = "exchange.turn"


@dataclass(frozen=True)
class NegativePhase(ABC):
    """How the chains move at an update."""

    #: The axis of the arrays in `chains` that counts the chains.
    chain_axis: ClassVar[int] = 0
    #: Whether a CUDA graph can record `draw`: all calls after the first launch the same kernels, and no call waits for
    #: a value from the GPU.
    capturable: ClassVar[bool] = False

    @property
    def chain_shape(self) -> tuple[int, ...]:
        """The leading axes of the arrays in `chains`. Empty if no chains are kept between updates."""
        return ()

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("n_chains", 1), ("n_temperatures", 2)):
            if name in {field.name for field in fields(self)}:
                whole_number(getattr(self, name), f"{name} of {type(self).__name__}", least)

    @property
    def steps(self) -> int:
        """Gibbs steps per update."""
        raise NotImplementedError

    @property
    def n_chains(self) -> int:
        """Number of chains that are kept between updates, at each temperature. 0 if no chains are kept."""
        return self.chain_shape[self.chain_axis] if self.chain_shape else 0

    def share(self, world: World) -> NegativePhase:
        """Return the negative phase of one process among several, which advances its part of the chains."""
        return self

    def share_of_chains(self, chains: Chains, own: slice) -> Chains:
        """Return the chains of one process, given the chains of all processes."""
        found = {}
        for name, chain in chains.items():
            if chain.ndim:
                by_chain = chain.movedim(self.chain_axis, 0)
                found[name] = by_chain[own].movedim(0, self.chain_axis).clone(memory_format=torch.contiguous_format)
            else:
                found[name] = chain.clone()
        return found

    def turn(self, chains: Chains) -> int:
        """Return the swap parity of the next `draw`: 0, or 1 at every second exchange of tempered chains."""
        return 0

    def pass_turn(self, chains: Chains) -> None:  # noqa: B027  (without exchanges there is no parity)
        """Advance the swap parity after a graph replay, which repeats the work of `draw` but not its Python code."""

    def start(self, machine: BoltzmannMachine, batch: Layers, rng: RandomSource) -> Chains:
        """Return the chains before the first update. Empty if no chains are kept between updates."""
        return {}

    @abstractmethod
    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        """Return visible states that represent the model, each (m, *layer shape).

        Parameters
        ----------
        machine : BoltzmannMachine
            The model.
        batch : mapping of str to Tensor
            The data of this update, without missing entries.
        masks : mapping of str to Tensor or None
            Entries of the batch that are padding.
        field : Tensor (n, *hidden shape)
            Hidden field of the batch.
        rng : RandomSource
            Source of random numbers.
        chains : dict
            The chains of the previous update, or of `start`. Changed in place.
        """


@dataclass(frozen=True)
class CD(NegativePhase):
    """Contrastive divergence: at every update, chains of `steps` Gibbs steps start at the data."""

    capturable: ClassVar[bool] = True

    steps: int = 1

    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        hidden = machine.hidden.sample(field, rng)  # the first half step reuses the field of the batch
        state = draw_visible(machine, machine.visible_fields(hidden), batch, rng, masks)
        for _ in range(self.steps - 1):
            state = gibbs_step(machine, state, rng, masks).visible
        return state


@dataclass(frozen=True)
class _Persistent(NegativePhase):
    """Chains that start at the first batch and continue from update to update."""

    n_chains: int = 100

    @property
    def chain_shape(self) -> tuple[int, ...]:
        return (self.n_chains,)

    def share(self, world: World) -> NegativePhase:
        return replace(self, n_chains=len(self._chains_of(world)))

    def _chains_of(self, world: World) -> range:
        """Return the numbers of the chains that a process advances."""
        if self.n_chains < world.size:
            raise ValueError(f"n_chains must be at least the number of processes, {world.size}, got {self.n_chains}")
        return range(self.n_chains)[world.part_of(self.n_chains)]

    def start(self, machine: BoltzmannMachine, batch: Layers, rng: RandomSource) -> Chains:
        """Start chain `c` at sample `c % n` of a batch of `n` samples, or at a draw from the biases without samples."""
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
    """Persistent chains at `n_temperatures` temperatures that exchange states. The coldest represent the model."""

    chain_axis: ClassVar[int] = 1
    capturable: ClassVar[bool] = True

    n_temperatures: int = 10
    steps: int = 1

    @property
    def chain_shape(self) -> tuple[int, ...]:
        return self.n_temperatures, self.n_chains

    def share(self, world: World) -> NegativePhase:
        if world.size == 1:
            return self
        chains = self._chains_of(world)
        return _TemperedShare(len(chains), self.n_temperatures, self.steps, self.n_chains, chains.start)

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


@dataclass(frozen=True)
class _TemperedShare(TemperedPCD):
    """Tempered chains of one process, with the random numbers that a single process would draw for these chains."""

    #: Number of chains of all processes, and the number of this process's first chain among them.
    n_chains_of_all: int = 0
    first_chain: int = 0

    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        numbers = _SharedNumbers(rng, self)
        return super().draw(machine, batch, masks, field, numbers, chains)


class _SharedNumbers(RandomSource):
    """Draws the random numbers of the tempered chains of all processes, and returns those of one process."""

    def __init__(self, numbers: RandomSource, share: _TemperedShare) -> None:
        super().__init__()
        # The same seed, step and draw: only the rows differ.
        vars(self).update(vars(numbers.from_row(0)))
        self._share = share

    @property
    def position(self) -> Position:
        """Not available: a process's chains are one range of rows per temperature, which no position describes."""
        raise NotImplementedError("the rows of shared tempered chains are not consecutive: draw from the source itself")

    def _uniform(self, shape: tuple[int, ...], like: Tensor, draw: int) -> Tensor:
        return self._own(super()._uniform(self._shape_of_all(shape), like, draw), shape)

    def _by_rows(self, shape: Sequence[int]) -> bool:
        """Return whether draws have one row per temperature and chain. Draws of exchanges are (pairs, chains)."""
        return shape[0] == self._share.n_temperatures * self._share.n_chains

    def _shape_of_all(self, shape: Sequence[int]) -> tuple[int, ...]:
        n = self._share.n_chains_of_all
        return (self._share.n_temperatures * n, *shape[1:]) if self._by_rows(shape) else (shape[0], n)

    def _own(self, drawn: Tensor, shape: Sequence[int]) -> Tensor:
        share = self._share
        own = slice(share.first_chain, share.first_chain + share.n_chains)
        if not self._by_rows(shape):
            return drawn[:, own].contiguous()
        by_temperature: Tensor = drawn.unflatten(0, (share.n_temperatures, share.n_chains_of_all))
        return by_temperature[:, own].flatten(0, 1)


def _check_equal_lengths(machine: BoltzmannMachine, masks: Masks) -> None:
    # A model of documents has one log Z per length: chains with other lengths than the batch would bias the gradient.
    if any(unit.own_lengths for unit in machine.layers.values()):
        raise ValueError("persistent chains keep their lengths, but documents differ in length: use CD instead")
    if any(mask is not None and bool(mask.any()) for mask in masks.values()):
        raise ValueError("persistent chains keep their lengths, but the data has rows of padding: use CD instead")
