"""Negative phases: sampling methods for the model term of the gradient.

The available methods are contrastive divergence (CD), persistent CD and tempered persistent CD. A negative phase stores
only settings. Persistent chains are stored in :class:`~mvrbm.updates.state.TrainState` as a dictionary of tensors. To
sample from a trained model, see :mod:`mvrbm.sampling`.
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

#: Chain states between updates, keyed by layer name.
Chains = dict[str, Tensor]

#: Key under which tempered chains store their swap parity. It contains a dot, so it cannot be the name of a layer.
TURN = "exchange.turn"


@dataclass(frozen=True)
class NegativePhase(ABC):
    """Base class for negative phases, which define how chains are sampled in each update."""

    #: Axis of the arrays in `chains` that indexes the chains.
    chain_axis: ClassVar[int] = 0
    #: Whether `draw` can be captured in a CUDA graph. This requires that every call except the first launches the same
    #: kernels and that no call reads values back from the GPU.
    capturable: ClassVar[bool] = False

    @property
    def chain_shape(self) -> tuple[int, ...]:
        """Leading dimensions of the arrays in `chains`, or an empty tuple if the chains are not persistent."""
        return ()

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("n_chains", 1), ("n_temperatures", 2)):
            if name in {field.name for field in fields(self)}:
                whole_number(getattr(self, name), f"{name} in {type(self).__name__}", least)

    @property
    def steps(self) -> int:
        """Number of Gibbs steps per update."""
        raise NotImplementedError

    @property
    def n_chains(self) -> int:
        """Number of persistent chains at each temperature, or 0 if the chains are not persistent."""
        return self.chain_shape[self.chain_axis] if self.chain_shape else 0

    def share(self, world: World) -> NegativePhase:
        """Return a negative phase that advances only this process's share of the chains."""
        return self

    def share_of_chains(self, chains: Chains, own: slice) -> Chains:
        """Select this process's share from the chains of all processes."""
        found = {}
        for name, chain in chains.items():
            if chain.ndim:
                by_chain = chain.movedim(self.chain_axis, 0)
                found[name] = by_chain[own].movedim(0, self.chain_axis).clone(memory_format=torch.contiguous_format)
            else:
                found[name] = chain.clone()
        return found

    def turn(self, chains: Chains) -> int:
        """Return the swap parity (0 or 1) for the next call to `draw`. Without tempering, the parity is always 0."""
        return 0

    def pass_turn(self, chains: Chains) -> None:  # noqa: B027  (without exchanges there is no parity)
        """Advance the swap parity after a CUDA graph replay, which does not run the Python code of `draw`."""

    def start(self, machine: BoltzmannMachine, batch: Layers, rng: RandomSource) -> Chains:
        """Return the initial states of the chains, or an empty dictionary if the chains are not persistent."""
        return {}

    @abstractmethod
    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        """Sample visible states from the model and return a tensor of shape (m, *layer shape) for each visible layer.

        Parameters
        ----------
        machine : BoltzmannMachine
            Model to sample from.
        batch : mapping of str to Tensor
            Data for this update, without missing entries.
        masks : mapping of str to Tensor or None
            Masks of padding entries in the batch.
        field : Tensor (n, *hidden shape)
            Hidden field for the batch.
        rng : RandomSource
            Random source for sampling.
        chains : dict
            Chains from the previous update or from `start`. They are updated in place.
        """


@dataclass(frozen=True)
class CD(NegativePhase):
    """Contrastive divergence. In each update, the chains start from the data and run for `steps` Gibbs steps."""

    capturable: ClassVar[bool] = True

    steps: int = 1

    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        hidden = machine.hidden.sample(field, rng)  # the first half step reuses the batch's field
        state = draw_visible(machine, machine.visible_fields(hidden), batch, rng, masks)
        for _ in range(self.steps - 1):
            state = gibbs_step(machine, state, rng, masks).visible
        return state


@dataclass(frozen=True)
class _Persistent(NegativePhase):
    """Base class for negative phases whose chains start from the first batch and persist between updates."""

    n_chains: int = 100

    @property
    def chain_shape(self) -> tuple[int, ...]:
        return (self.n_chains,)

    def share(self, world: World) -> NegativePhase:
        return replace(self, n_chains=len(self._chains_of(world)))

    def _chains_of(self, world: World) -> range:
        """Return the indices of the chains that this process advances."""
        if self.n_chains < world.size:
            raise ValueError(f"n_chains must be at least the number of processes ({world.size}), got {self.n_chains}")
        return range(self.n_chains)[world.part_of(self.n_chains)]

    def start(self, machine: BoltzmannMachine, batch: Layers, rng: RandomSource) -> Chains:
        """Initialize chain `c` with sample `c % n` in a batch of `n` samples.

        If the batch is empty, sample the initial states from the biases alone.
        """
        n = len(next(iter(batch.values())))
        if n:
            rows = torch.arange(self.n_chains) % n
            return {name: array[rows.to(array.device)] for name, array in batch.items()}
        fields = {name: machine.like.new_zeros(self.n_chains, *unit.shape) for name, unit in machine.layers.items()}
        return {name: unit.sample(fields[name], rng) for name, unit in machine.layers.items()}


@dataclass(frozen=True)
class PCD(_Persistent):
    """Persistent contrastive divergence with `n_chains` chains that continue from one update to the next."""

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
    """Persistent contrastive divergence with parallel tempering.

    Chains at `n_temperatures` temperatures exchange states. The coldest chains represent the model.
    """

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
        """Return the swap parity, which selects the pairs of temperatures for the next exchange."""
        return int(chains[TURN]) if chains else 0

    def start(self, machine: BoltzmannMachine, batch: Layers, rng: RandomSource) -> Chains:
        """Initialize the chains at all temperatures with the same states."""
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
        # All draws must come from the source of this update. `ParallelTempering.step` would derive another source for
        # many steps.
        step = tempering.stepper()
        for _ in range(self.steps):
            step(rng)
        self.pass_turn(chains)
        chains.update(tempering.visible)
        return tempering.coldest()


@dataclass(frozen=True)
class _TemperedShare(TemperedPCD):
    """Share of the tempered chains that one process advances.

    The random numbers are the same as in single-process training.
    """

    #: Total number of chains across all processes.
    n_chains_of_all: int = 0
    #: Index of this process's first chain among all chains.
    first_chain: int = 0

    def draw(
        self, machine: BoltzmannMachine, batch: Layers, masks: Masks, field: Tensor, rng: RandomSource, chains: Chains
    ) -> dict[str, Tensor]:
        numbers = _SharedNumbers(rng, self)
        return super().draw(machine, batch, masks, field, numbers, chains)


class _SharedNumbers(RandomSource):
    """Random source that generates numbers for all tempered chains but returns only those for one process."""

    def __init__(self, numbers: RandomSource, share: _TemperedShare) -> None:
        super().__init__()
        # Copy the seed, step and draw. Only the rows differ.
        vars(self).update(vars(numbers.from_row(0)))
        self._share = share

    @property
    def position(self) -> Position:
        """Not available, because a process has one range of rows per temperature rather than a single range."""
        raise NotImplementedError(
            "the rows of shared tempered chains are not consecutive; draw from the source instead"
        )

    def _uniform(self, shape: tuple[int, ...], like: Tensor, draw: int) -> Tensor:
        return self._own(super()._uniform(self._shape_of_all(shape), like, draw), shape)

    def _by_rows(self, shape: Sequence[int]) -> bool:
        """Return whether a draw has one row per temperature and chain.

        Draws for exchanges have shape (pairs, chains) instead.
        """
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
    # A document model has one log Z per length. Chains with different lengths than the batch would bias the gradient.
    if any(unit.own_lengths for unit in machine.layers.values()):
        raise ValueError("persistent chains have fixed lengths, but documents differ in length; use CD instead")
    if any(mask is not None and bool(mask.any()) for mask in masks.values()):
        raise ValueError("persistent chains have fixed lengths, but the data contains padding rows; use CD instead")
