"""What the paths by Triton kernels share: models side by side, epochs, divergence, and graphs of many updates."""

import importlib.util
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mvrbm.backends.base import EpochBackend, UpdateSettings
from mvrbm.backends.graph import too_large_reason
from mvrbm.cuda_graphs import capture
from mvrbm.data.sources import Source
from mvrbm.machine import BoltzmannMachine
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import fail

# Reading the parameters back means waiting for the GPU.
_UPDATES_UNCHECKED = 5000


class FlatForm(Protocol):
    """Converts the parameters and momenta of a state to a flat form, and back."""

    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None: ...
    def unpack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None: ...


class KernelBackend(EpochBackend):
    """Computes epochs of one state, or of several with machines of the same shapes, on flat parameters."""

    #: Updates per graph: enough to make the graph's own launch negligible, few enough to be captured quickly.
    updates_per_graph: int
    #: Whether the kernels draw missing entries of the data.
    draws_missing = False
    _params: Tensor  # (models, size)
    _momenta: Tensor
    _gradients: Tensor
    _chains: Tensor  # (models, chains, states)
    _packings: Sequence[FlatForm]

    def __init__(
        self, tasks: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> None:
        recipe, negative = tasks[0].recipe, tasks[0].negative
        self._recipes = [task.recipe for task in tasks]
        self._models, self._device = len(states), states[0].machine.like.device
        self._graphed = self._device.type == "cuda"
        # Launches overlap on Hopper and later.
        self._overlapping = (
            self._graphed and torch.version.hip is None and torch.cuda.get_device_capability(self._device) >= (9, 0)
        )
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._kept: tuple[tuple[Tensor, ...], int] = ((), 0)
        self._persistent, self._steps = bool(negative.chain_shape), int(negative.steps)
        self._normalized = recipe.normalized
        self._shared = all(source is sources[0] for source in sources)
        self.n_samples = int(sources[0].n_samples or 0)
        self.batch_size = min(recipe.batch_size, self.n_samples)
        # Chains at all temperatures, and those at the lowest, the last of them, which stand for the model.
        shape = negative.chain_shape or (self.batch_size,)
        self._n_chains, self._n_coldest = math.prod(shape), shape[-1]
        self._temperatures = self._n_chains // self._n_coldest
        self._order = torch.zeros(self._models, self.n_samples, dtype=torch.int32, device=self._device)
        self._seeds = torch.tensor([state.rng.key for state in states], device=self._device)
        # Tests put random numbers here, so many per update.
        self._recorded, self._recorded_size = states[0].machine.like.new_zeros(1), 0

    def continues_with(
        self, tasks: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> bool:
        """Take over other data and states of the same shapes, in the memory that the graphs read and write."""
        if [task.recipe for task in tasks] != self._recipes:
            return False
        for task, source in zip(tasks, sources, strict=True):
            if task.whole_epochs_unsupported_reason(source, masked=self.draws_missing) is not None:
                return False
        other = type(self)(tasks, states, sources)
        if other._layout() != self._layout():
            return False
        for mine, new in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(new)
        self._packings = other._packings
        self._check(states)
        return True

    def _tensors(self) -> list[Tensor]:
        """Return everything that kernels read and write."""
        values = [value if isinstance(value, list) else [value] for _, value in sorted(vars(self).items())]
        return [tensor for some in values for tensor in some if isinstance(tensor, Tensor)]

    def _layout(self) -> list[object]:
        """Return everything that graphs depend on but the values of tensors."""
        plain = [(name, value) for name, value in sorted(vars(self).items()) if isinstance(value, int | float | str)]
        tensors = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in self._tensors()]
        return [*[pair for pair in plain if pair[0] != "_unchecked"], *tensors]

    # -- from and to the states -------------------------------------------------------------------

    def load(self, states: Sequence[TrainState]) -> None:
        for number, (state, packing) in enumerate(zip(states, self._packings, strict=True)):
            packing.pack(state, self._params[number], self._momenta[number])
            if self._persistent and state.chains:
                self._set_chains(number, state.chains)

    def store(self, states: Sequence[TrainState]) -> list[bool]:
        diverged = self._check(states)
        for number, (state, packing) in enumerate(zip(states, self._packings, strict=True)):
            packing.unpack(state, self._params[number], self._momenta[number])
            if self._persistent and state.update > 0:
                state.chains.update(self._chain_data(number))
        return diverged

    def rates(self) -> Tensor:
        """Return the table of rates, a row per model: see `N_RATES` of `triton_kernels`."""
        rows = []
        for recipe in self._recipes:
            decay = 0.0 if recipe.rate_decay is None else 1 / recipe.rate_decay
            end = 1 / recipe.planned_updates if recipe.linear_decay and recipe.planned_updates else 0.0
            rate = float(recipe.learning_rate or 0.0)
            rows.append([rate, recipe.bias_learning_rate or rate, recipe.momentum, recipe.weight_decay, decay, end])
        return self._params.new_tensor(rows)

    def _check(self, states: Sequence[TrainState]) -> list[bool]:
        """Return which parameters are not finite.

        A single machine is set back to the last check, and DivergenceError is raised. One of several is left as it is.
        """
        self._unchecked = 0
        finite = torch.isfinite(self._params.sum(1)).tolist()
        if self._models == 1 and not finite[0]:
            kept, update = self._kept
            self._set_back(kept)
            self._packings[0].unpack(states[0], self._params[0], self._momenta[0])
            states[0].update = update
            fail(self._recipes[0], update + 1)
        self._kept = self._snapshot(), states[0].update
        return [not one for one in finite]

    def _changing(self) -> tuple[Tensor, ...]:
        """Return everything that updates change from one to the next."""
        return self._params, self._momenta, self._chains

    def _snapshot(self) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in self._changing())

    def _set_back(self, kept: tuple[Tensor, ...]) -> None:
        for place, tensor in zip(self._changing(), kept, strict=True):
            place.copy_(tensor)

    @abstractmethod
    def _chain_data(self, number: int) -> dict[str, Tensor]:
        """Return a machine's chains, in the units of the data: each layer (n_chains, *layer shape)."""

    @abstractmethod
    def _set_chains(self, number: int, data: Mapping[str, Tensor]) -> None:
        """Continue a machine's chains from data of every layer, (n_chains, ...)."""

    # -- an epoch ---------------------------------------------------------------------------------

    @torch.no_grad()
    def epoch(self, states: Sequence[TrainState], orders: Tensor, stopped: Callable[[], bool]) -> int:
        """Go through the data once, without interruption."""
        n_batches, start, update = -(-self.n_samples // self.batch_size), states[0].batch, states[0].update
        self._order.copy_(orders, non_blocking=True)
        if self._persistent and update == 0 and start == 0 and not states[0].chains:
            for number in range(self._models):
                self._start_chains(number, self._order[number, : self.batch_size].long())
        for first in range(start, n_batches, self.updates_per_graph):
            self._make_updates(first, min(self.updates_per_graph, n_batches - first), update + first - start)
        for state in states:
            state.update += n_batches - start
        self._unchecked += n_batches - start
        if self._unchecked >= _UPDATES_UNCHECKED:
            self._check(states)
        return n_batches - start

    @abstractmethod
    def _start_chains(self, number: int, rows: Tensor) -> None:
        """Start a machine's persistent chains at samples of its data, each as often as needed."""

    def _cycle(self, rows: Tensor) -> Tensor:
        """Return as many of these rows as there are chains, each as often as needed, the same at all temperatures."""
        return rows[torch.arange(self._n_chains, device=self._device) % self._n_coldest % len(rows)]

    @abstractmethod
    def _make_updates(self, first: int, count: int, update: int) -> None:
        """Make `count` updates, batch `first` of the epoch the first of them, which has number `update`."""

    def _replay(self, key: Hashable, launch: Callable[[int], None], count: int) -> None:
        """Launch `count` updates, by a graph where there is a GPU."""
        if self._graphed and key not in self._graphs:
            # Kernels are compiled before the capture, which leaves everything as it was.
            kept = self._snapshot()
            launch(min(count, 2))
            torch.cuda.synchronize(self._device)
            self._set_back(kept)
            self._gradients.zero_()
            graph = capture(lambda: launch(count))
            self._graphed = graph is not None
            if graph is not None:
                self._graphs[key] = graph
        if self._graphed:
            self._graphs[key].replay()
        else:
            launch(count)


def default_precision(machine: BoltzmannMachine) -> str:
    """Return the precision of products: 16 bits where no units are Gaussian, so that states are at most 1."""
    return "tf32" if any(unit.gaussian for unit in (machine.hidden, *machine.layers.values())) else "fp16"


def unsupported_reason(task: UpdateSettings, state: TrainState, source: Source, *, masked: bool = False) -> str | None:
    """Return why no kernels can compute a training run's updates, None if there may be some; see `UpdateSettings`."""
    like = state.machine.like
    if like.dtype != torch.float32:
        return f"its parameters are {like.dtype}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # on any device
    if not (like.is_cuda or interpreted) or importlib.util.find_spec("triton") is None:
        return f"there is no Triton for {like.device.type}"
    return task.whole_epochs_unsupported_reason(source, masked=masked) or too_large_reason(source, like.device)
