"""The path for every machine on a GPU: updates of :mod:`mvrbm.learning.paths.reference`, replayed as CUDA graphs.

An update of small arrays is some eighty launches, and launching takes most of the time. Here an update is captured once
and replayed: the data, the order of an epoch, the position in it and the step all stay on the device.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mvrbm.cuda_graphs import capture
from mvrbm.learning.data import Source
from mvrbm.learning.paths.base import EpochPath, Task
from mvrbm.learning.paths.reference import ReferencePath, gradient_of, own_step
from mvrbm.learning.state import TrainState
from mvrbm.learning.step import fail
from mvrbm.random import RandomSource

# Reading the parameters back means waiting for the GPU.
_UPDATES_UNCHECKED = 2000
# Fraction of the device's memory that the data may take.
_SHARE_OF_MEMORY = 0.5


class GraphPath(EpochPath):
    """Computes epochs by replaying updates.

    The first update of each batch size is made launch by launch, which also warms up the libraries; the second is
    captured. On a CPU, which is for tests, every update is made launch by launch.
    """

    def __init__(self, task: Task, state: TrainState, source: Source) -> None:
        self.task = task
        device = state.machine.like.device
        self.n_samples = int(source.n_samples or 0)
        self.batch_size = min(task.recipe.batch_size, self.n_samples)
        self._data = {name: torch.as_tensor(array).to(device) for name, array in source.whole.items()}
        self._order = torch.zeros(self.n_samples, dtype=torch.int64, device=device)
        self._within = torch.arange(self.batch_size, device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._clock = torch.full((), state.update, dtype=torch.float64, device=device)  # updates made
        self._alive = torch.ones((), dtype=torch.bool, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._gradients: dict[int, dict[str, Tensor]] = {}  # for each batch size, where its graph leaves them
        self._unchecked = 0
        self._capturing = device.type == "cuda"
        self._reference = ReferencePath(task)
        self._in_place: dict[str, Tensor] = {}
        for name, parameter in state.learned.items() if task.optimizer is None else ():
            state.momentum_of(name, parameter)
        self._keep_in_place(state)

    @torch.no_grad()
    def epoch(self, states: Sequence[TrainState], orders: Sequence[Tensor], stopped: Callable[[], bool]) -> int:
        (state,), (order,) = states, orders
        self._order.copy_(order)
        self._position.fill_(state.batch * self.batch_size)
        made = 0
        for first in range(state.batch * self.batch_size, self.n_samples, self.batch_size):
            self._update(state, min(self.batch_size, self.n_samples - first))
            made += 1
            if stopped():
                break
        if self.task.optimizer is None:
            state.update += made
            self._unchecked += made
            if self._unchecked >= _UPDATES_UNCHECKED:
                self.store(states)
        return made

    def store(self, states: Sequence[TrainState]) -> list[bool]:
        """Raise DivergenceError if a parameter is not finite; the parameters are already in the machine."""
        self._unchecked = 0
        if not bool(self._alive):
            states[0].update = int(self._clock)
            fail(self.task.recipe, states[0].update + 1)
        return [False]

    def load(self, states: Sequence[TrainState]) -> None:
        """Take over chains and offsets that a callback may have replaced."""
        self._keep_in_place(states[0])

    def _update(self, state: TrainState, n: int) -> None:
        if self._capturing and n in self._graphs and self._graphs[n] is None:
            self._graphs[n] = capture(lambda: self._compute(state, n), [state.rng], what="this machine")
            if self._graphs[n] is None:
                self._capturing = False
                self._graphs = {}  # they draw from a generator that is no longer used
                self._take_back(state)
        graph = self._graphs.setdefault(n, None)
        if graph is not None:
            graph.replay()
        else:
            self._compute(state, n)
        if self.task.optimizer is not None:
            self._reference.apply(state, self._gradients[n], n / self.batch_size)

    def _compute(self, state: TrainState, n: int) -> None:
        """Compute an update, or its gradient where an optimiser was given, without reading a number back."""
        rows = self._order[self._position + self._within[:n]]
        layers = state.machine.layers
        batch = {name: unit.from_data(self._data[name].index_select(0, rows)) for name, unit in layers.items()}
        gradient = gradient_of(state, self.task, batch)
        if self.task.optimizer is None:
            self._step(state, gradient, n / self.batch_size)
        else:
            self._gradients[n] = gradient
        self._position.add_(n)
        self._keep_in_place(state)

    def _step(self, state: TrainState, gradient: dict[str, Tensor], weight: float) -> None:
        """Make the recipe's step; after the first number that is not finite nothing changes any more."""
        learned, centring = state.learned, state.centring
        kept = {name: p.clone() for name, p in learned.items()}
        before = None if centring is None else centring.fields()
        own_step(state, gradient, self.task, weight, self._clock)
        if centring is not None and before is not None:
            centring.follow(before)
        total = torch.stack([p.detach().sum() for p in learned.values()]).sum()
        self._alive.logical_and_(torch.isfinite(total))
        for name, parameter in learned.items():
            parameter.copy_(torch.where(self._alive, parameter, kept[name]))
        self._clock.add_(self._alive)

    def _keep_in_place(self, state: TrainState) -> None:
        """Keep chains and offsets in the memory that the graphs read and write."""
        for name, chain in list(state.chains.items()):
            state.chains[name] = self._placed(f"chains.{name}", chain)
        if state.centring is not None and state.centring.hidden is not None:
            state.centring.hidden = self._placed("offset", state.centring.hidden)

    def _take_back(self, state: TrainState) -> None:
        """Undo what a failed capture did to the state, whose tensors were never computed."""
        for name in state.chains:
            state.chains[name] = self._in_place[f"chains.{name}"]
        if state.centring is not None and "offset" in self._in_place:
            state.centring.hidden = self._in_place["offset"]

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._in_place:
            self._in_place[name] = tensor.clone()
        return self._in_place[name] if tensor is self._in_place[name] else self._in_place[name].copy_(tensor)


def unsupported_reason(task: Task, state: TrainState, source: Source) -> str | None:
    """Return why graphs cannot make a training run's updates, None if they can."""
    device = state.machine.like.device
    if device.type != "cuda":
        return f"the machine is on {device}"
    return not_capturable_reason(task, state, source) or too_large_reason(source, device)


def not_capturable_reason(task: Task, state: TrainState, source: Source) -> str | None:
    """Return why an update cannot be made without reading a number back, None if it can."""
    like = state.machine.like
    if task.reference:
        return "the reference backend was requested"
    if (reason := task.whole_epochs_unsupported_reason(source)) is not None:
        return reason
    if not task.negative.capturable:
        return f"its chains are {type(task.negative).__name__}"
    if type(state.rng) is not RandomSource or state.rng.device != like.device:
        return "its random numbers come from another device"
    if any(unit.absent(like.new_zeros(1, *unit.shape)) is not None for unit in state.machine.layers.values()):
        return "its samples differ in length"
    return None


def too_large_reason(source: Source, device: torch.device) -> str | None:
    """Return that the data is too large to be kept on a device, None if it is not."""
    size = sum(int(torch.as_tensor(array[:1]).nbytes) * len(array) for array in source.whole.values())
    # All memory, not the free memory: the same training run has to take the same path every time.
    if device.type == "cuda" and size > _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[1]:
        return f"its data, {size / 1e9:.1f} GB, would take more than half of the device's memory"
    return None
