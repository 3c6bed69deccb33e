"""Base class for all Triton backends. It handles epochs, divergence checks, and CUDA graphs that span many updates.

A kernel backend trains one machine, or several machines with the same shapes in parallel. It keeps data, parameters,
momenta and chains on the device, in buffers that CUDA graphs read and write. `load` and `store` convert between these
buffers and the states.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mvrbm.backends.base import EpochBackend, UpdateSettings
from mvrbm.backends.device_memory import too_large_reason
from mvrbm.cuda_graphs import capture
from mvrbm.data.sources import Source
from mvrbm.extras import triton_runs_on
from mvrbm.machine import BoltzmannMachine
from mvrbm.updates.learning_rate import initial_rates
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import fail, first_not_finite

# Number of updates between two checks for divergence. A check synchronizes with the GPU.
_UPDATES_UNCHECKED = 5000


@dataclass(frozen=True)
class RunShape:
    """Sizes of a training run, which determine the buffers and the compiled kernels."""

    models: int
    n_samples: int
    batch_size: int
    #: Number of chains per model, summed over all temperatures.
    n_chains: int
    temperatures: int
    #: Number of Gibbs steps per update.
    steps: int
    persistent: bool
    normalized: bool
    #: Whether all models have the same data.
    shared_data: bool

    @classmethod
    def of(cls, settings: Sequence[UpdateSettings], sources: Sequence[Source]) -> RunShape:
        """Return the sizes of a training run with one or more models."""
        recipe = settings[0].recipe
        negative = settings[0].negative
        n_samples = int(sources[0].n_samples or 0)
        batch_size = min(recipe.batch_size, n_samples)
        chain_shape = negative.chain_shape or (batch_size,)
        return cls(
            models=len(settings),
            n_samples=n_samples,
            batch_size=batch_size,
            n_chains=math.prod(chain_shape),
            temperatures=math.prod(chain_shape[:-1]),
            steps=int(negative.steps),
            persistent=bool(negative.chain_shape),
            normalized=recipe.normalized,
            shared_data=all(source is sources[0] for source in sources),
        )

    @property
    def n_coldest(self) -> int:
        """Number of chains at the lowest temperature. These chains represent the model and come last."""
        return self.n_chains // self.temperatures

    @property
    def rows(self) -> int:
        """Batch size or number of persistent chains per model, whichever is larger."""
        return max(self.batch_size, self.n_chains if self.persistent else 0)

    @property
    def n_batches(self) -> int:
        """Number of batches per epoch."""
        return -(-self.n_samples // self.batch_size)

    def n_valid(self, batch: int) -> int:
        """Return the number of samples in a given batch. The last batch of an epoch may be smaller."""
        return min(self.batch_size, self.n_samples - batch * self.batch_size)

    def batch_of_chains(self, rows: Tensor) -> Tensor:
        """Assign one of the given rows to each chain, repeating rows as needed.

        The rows are the same at all temperatures.
        """
        return rows[torch.arange(self.n_chains, device=rows.device) % self.n_coldest % len(rows)]


class PackedForm(Protocol):
    """Protocol for objects that convert the parameters and momenta in a state to and from flat arrays."""

    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None: ...
    def unpack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None: ...


class KernelBackend(EpochBackend):
    """Base class for Triton backends, which train one state or several states whose machines have the same shapes.

    Subclasses build their buffers for a *signature*, which contains everything that compiled kernels, graphs and buffer
    shapes depend on. Another training run with an equal signature can reuse the buffers.
    """

    #: Number of updates per graph: enough to make the launch overhead negligible, and few enough to capture quickly.
    updates_per_graph: int
    #: Whether the kernels can sample missing entries in the data.
    draws_missing = False
    #: Everything that graphs and buffer shapes depend on, except the recipes.
    signature: Hashable
    #: Converter for each model's state.
    packings: Sequence[PackedForm]

    def __init__(
        self, settings: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> None:
        self.run = RunShape.of(settings, sources)
        self.n_samples = self.run.n_samples
        self._recipes: list[Recipe] = [one.recipe for one in settings]
        self._device = states[0].machine.like.device
        self._order = torch.zeros(self.run.models, self.n_samples, dtype=torch.int32, device=self._device)
        self._keys = torch.zeros(self.run.models, dtype=torch.int64, device=self._device)
        self._graphed = self._device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        # Copies of the mutable buffers at the last check for divergence, and the number of updates at that time.
        self._kept: tuple[tuple[Tensor, ...], int] = ((), 0)
        self._unchecked = 0
        # Whether the buffers contain each model's persistent chains.
        self._chains_started = [False] * self.run.models

    @abstractmethod
    def signature_of(
        self, settings: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> Hashable:
        """Return the signature that a backend for another training run would have."""

    @property
    @abstractmethod
    def params(self) -> Tensor:
        """Flat parameters of all models, as a tensor of shape (models, size)."""

    @property
    @abstractmethod
    def momenta(self) -> Tensor:
        """Flat momenta of all models, as a tensor of shape (models, size)."""

    @abstractmethod
    def changing(self) -> tuple[Tensor, ...]:
        """Return the buffers that carry state from one update to the next."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """Set the gradients to zero, as required at the start of each series of updates."""

    @abstractmethod
    def load_run(self, states: Sequence[TrainState], sources: Sequence[Source]) -> None:
        """Copy the inputs of a training run (data, scales, etc., but not the states) into the buffers."""

    def continues_with(
        self, settings: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> bool:
        """Try to reuse the buffers and graphs for other data and states, and return whether this succeeded."""
        if [one.recipe for one in settings] != self._recipes:
            return False
        for one, source in zip(settings, sources, strict=True):
            if one.whole_epochs_unsupported_reason(source, masked=self.draws_missing) is not None:
                return False
        if self.signature_of(settings, states, sources) != self.signature:
            return False
        self.begin(states, sources)
        return True

    def begin(self, states: Sequence[TrainState], sources: Sequence[Source]) -> None:
        """Copy the data and states of a training run into the buffers."""
        self.load_run(states, sources)
        self.load(states)
        self._check(states)

    # -- from and to the states -------------------------------------------------------------------

    def load(self, states: Sequence[TrainState]) -> None:
        self._keys.copy_(torch.tensor([state.rng.key for state in states]))
        for number, (state, packing) in enumerate(zip(states, self.packings, strict=True)):
            packing.pack(state, self.params[number], self.momenta[number])
            self._chains_started[number] = bool(state.chains)
            if self.run.persistent and state.chains:
                self.set_chains(number, state.chains)

    def store(self, states: Sequence[TrainState]) -> list[bool]:
        diverged = self._check(states)
        for number, (state, packing) in enumerate(zip(states, self.packings, strict=True)):
            packing.unpack(state, self.params[number], self.momenta[number])
            if self.run.persistent and self._chains_started[number]:
                state.chains.update(self.chain_data(number))
        return diverged

    def rates(self) -> Tensor:
        """Return the table of rates, with one row per model (see `N_RATES` in `step_kernels`)."""
        rows = [rates_row(recipe) for recipe in self._recipes]
        return torch.tensor(rows, dtype=torch.float32, device=self._device)

    def _check(self, states: Sequence[TrainState]) -> list[bool]:
        """Return, for each model, whether its parameters contain non-finite values.

        If there is a single model and it has diverged, restore its state from the last check and raise
        `DivergenceError`. If there are several models, leave the parameters of diverged models unchanged.
        """
        self._unchecked = 0
        finite = torch.isfinite(self.params).all(1).tolist()
        if self.run.models == 1 and not finite[0]:
            state = states[0]
            self.packings[0].unpack(state, self.params[0], self.momenta[0])
            culprit = first_not_finite(state)
            kept, state.update = self._kept
            self._set_back(kept)
            self.packings[0].unpack(state, self.params[0], self.momenta[0])
            state.reset_after_divergence()
            self.load(states)
            fail(self._recipes[0], state.update + 1, culprit)
        self._kept = self._snapshot(), states[0].update
        return [not one for one in finite]

    def _snapshot(self) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in self.changing())

    def _set_back(self, kept: tuple[Tensor, ...]) -> None:
        for place, tensor in zip(self.changing(), kept, strict=True):
            place.copy_(tensor)

    @abstractmethod
    def chain_data(self, number: int) -> dict[str, Tensor]:
        """Return a model's chains in data units, with the shapes that a state uses."""

    @abstractmethod
    def set_chains(self, number: int, data: Mapping[str, Tensor]) -> None:
        """Load a model's chains from a state."""

    # -- an epoch ---------------------------------------------------------------------------------

    @torch.no_grad()
    def epoch(self, states: Sequence[TrainState], orders: Tensor, stopped: Callable[[], bool]) -> int:
        """Train on the remaining batches of an epoch. Training can be stopped after each graph."""
        n_batches = self.run.n_batches
        start = states[0].batch
        update = states[0].update
        self._order.copy_(orders, non_blocking=True)
        if self.run.persistent and start < n_batches:
            for number, started in enumerate(self._chains_started):
                if not started:
                    self.start_chains(number, start, update)
                    self._chains_started[number] = True
        made = 0
        while start + made < n_batches:
            count = min(self.updates_per_graph, n_batches - start - made)
            self.compute_updates(start + made, count, update + made)
            made += count
            if stopped():
                break
        for state in states:
            state.update += made
        self._unchecked += made
        if self._unchecked >= _UPDATES_UNCHECKED:
            self._check(states)
        return made

    def rows_of(self, number: int, batch: int) -> Tensor:
        """Return the indices of a model's samples in a batch of this epoch."""
        first = batch * self.run.batch_size
        return self._order[number, first : first + self.run.n_valid(batch)].long()

    @abstractmethod
    def start_chains(self, number: int, batch: int, update: int) -> None:
        """Initialize a model's persistent chains from a batch of this epoch, for update number `update`.

        Samples are repeated as needed. This method is equivalent to :func:`mvrbm.updates.update.start_chains`, but uses
        data that is already on the device in the kernels' format.
        """

    @abstractmethod
    def compute_updates(self, first: int, count: int, update: int) -> None:
        """Compute `count` updates, starting with batch `first` of the epoch and update number `update`."""

    def replay(self, key: Hashable, launch: Callable[[int], None], count: int) -> None:
        """Launch `count` updates.

        On a GPU, the first call with a given key captures a graph, and every call replays it.
        """
        if self._graphed and key not in self._graphs:
            # Compile the kernels before the capture, and restore the buffers that this run modifies.
            kept = self._snapshot()
            launch(min(count, 2))
            torch.cuda.synchronize(self._device)
            self._set_back(kept)
            self.clear_gradients()
            graph = capture(lambda: launch(count))
            self._graphed = graph is not None
            if graph is not None:
                self._graphs[key] = graph
        if self._graphed:
            self._graphs[key].replay()
        else:
            launch(count)


def rates_row(recipe: Recipe) -> list[float]:
    """Return a recipe's row in the table of rates (see `N_RATES` in `step_kernels`)."""
    rate, bias_rate = initial_rates(recipe)
    decay = 0.0 if recipe.rate_decay is None else 1 / recipe.rate_decay
    end = 1 / recipe.planned_updates if recipe.linear_decay and recipe.planned_updates else 0.0
    return [rate, bias_rate, recipe.momentum, recipe.weight_decay, decay, end]


def launches_overlap(device: torch.device) -> bool:
    """Return whether a GPU can start a kernel before the previous kernel has finished (see `overlap`)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def power_of_two(size: int) -> int:
    """Round a size up to a power of two."""
    return 1 << (size - 1).bit_length()


def default_precision(machine: BoltzmannMachine) -> str:
    """Return the default precision of matrix products.

    The default is "tf32" if any units are Gaussian. Otherwise, it is "fp16", because all states are at most 1.
    """
    return "tf32" if any(unit.gaussian for unit in (machine.hidden, *machine.layers.values())) else "fp16"


def unsupported_reason(
    settings: UpdateSettings, state: TrainState, source: Source, *, masked: bool = False
) -> str | None:
    """Return the reason why no Triton backend supports a training run, or None if one might support it.

    `masked` indicates whether the backend can sample missing entries.
    """
    like = state.machine.like
    if like.dtype != torch.float32:
        return f"its parameters are {like.dtype}"
    if not triton_runs_on(like.device):
        return f"there is no Triton for {like.device.type}"
    return settings.whole_epochs_unsupported_reason(source, masked=masked) or too_large_reason(source, like.device)
