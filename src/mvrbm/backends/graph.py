"""The path for every machine on a GPU: updates of :mod:`mvrbm.backends.reference`, replayed as CUDA graphs.

An update of small arrays is dozens of launches, and launching takes most of the time. Here an update is captured once
and replayed: the data, the order of an epoch, the position in it and the step all stay on the device. Small couplings
are formed as full matrices (:mod:`mvrbm.backends.formed`), and products of float32 use tensor cores (TF32).
"""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mvrbm.backends.base import EpochBackend, UpdateSettings
from mvrbm.backends.formed import FormedMachine
from mvrbm.backends.reference import ReferenceBackend, own_gradient, own_step, powers_of
from mvrbm.cuda_graphs import capture
from mvrbm.data.sources import Source, masks_of
from mvrbm.random import RandomSource
from mvrbm.updates.gradient import Centering, Gradient
from mvrbm.updates.missing import draw_unknown
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import fail, gains_of, normalize

# Reading the parameters back means waiting for the GPU.
_UPDATES_UNCHECKED = 2000
# Fraction of the device's memory that the data may take.
_SHARE_OF_MEMORY = 0.5


class GraphBackend(EpochBackend):
    """Computes epochs by replaying updates.

    The first update of each kind (batch size and turn of the chains) is made launch by launch, which also warms up the
    libraries; the second is captured. On a CPU, which is for tests, every update is made launch by launch. With
    `exact`, products of float32 are those of float32.
    """

    def __init__(self, task: UpdateSettings, state: TrainState, source: Source, *, exact: bool = False) -> None:
        self.task, self._exact = task, exact
        device = state.machine.like.device
        self.n_samples = int(source.n_samples or 0)
        self.batch_size = min(task.recipe.batch_size, self.n_samples)
        self._data = {name: torch.as_tensor(array).to(device) for name, array in source.with_masks[0].items()}
        self._known = self._masks(source)
        self._order = torch.zeros(self.n_samples, dtype=torch.int64, device=device)
        self._within = torch.arange(self.batch_size, device=device)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._clock = torch.full((), state.update, dtype=torch.float64, device=device)  # updates made
        self._alive = torch.ones((), dtype=torch.bool, device=device)
        # By the batch size and the turn of the chains. Graphs leave gradients in the same memory every time.
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph | None] = {}
        self._gradients: dict[tuple[int, int], Gradient] = {}
        self._unchecked = 0
        self._capturing = device.type == "cuda"
        self._reference = ReferenceBackend(task)
        self._in_place: dict[str, Tensor] = {}
        for name, parameter in state.learned.items() if task.optimizer is None else ():
            state.momentum_of(name, parameter)
        self._kept = [torch.empty_like(parameter) for parameter in state.learned.values()]
        n_chains = int(getattr(task.negative, "n_chains", self.batch_size))
        self._formed = FormedMachine(state.machine, self.batch_size + n_chains)
        self._keep_in_place(state)
        self._memory = _memory_of(state)

    def _masks(self, source: Source) -> dict[str, Tensor]:
        """Return which entries of the data are known, for every layer if for any, or nothing if all are known."""
        known, everything = masks_of(source), torch.ones((), dtype=torch.bool)
        return {name: known.get(name, everything).to(array.device) for name, array in self._data.items() if known}

    @torch.no_grad()
    def epoch(self, states: Sequence[TrainState], orders: Tensor, stopped: Callable[[], bool]) -> int:
        (state,), (order,) = states, orders
        self._order.copy_(order)
        self._position.fill_(state.batch * self.batch_size)
        made = 0
        with contextlib.nullcontext() if self._exact else tensor_cores():
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

    def continues_with(
        self, tasks: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> bool:
        """Take over data of the same shapes and types if the graphs still read and write the memory of the state."""
        state, masks = states[0], self._masks(sources[0])
        new = {name: torch.as_tensor(array) for name, array in sources[0].with_masks[0].items()}
        same = _layout(new) == _layout(self._data) and _layout(masks) == _layout(self._known)
        if list(tasks) != [self.task] or _memory_of(state) != self._memory or not same:
            return False
        for name, array in new.items():
            self._data[name].copy_(array)
        for name, mask in masks.items():
            self._known[name].copy_(mask)
        self._clock.fill_(state.update)
        self._alive.fill_(True)
        self._keep_in_place(state)
        return True

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
        kind = n, self.task.negative.turn(state.chains)
        if self._capturing and kind in self._graphs and self._graphs[kind] is None:
            before = dict(state.chains)
            self._graphs[kind] = capture(lambda: self._compute(state, kind), what="this machine")
            # Only what is in place has been computed, or is by replays.
            state.chains.update(before)
            if state.centering is not None and "offset" in self._in_place:
                state.centering.hidden = self._in_place["offset"]
            if self._graphs[kind] is None:
                self._capturing = False
                self._graphs = {}  # they draw from a generator that is no longer used
        graph = self._graphs.setdefault(kind, None)
        if graph is not None:
            graph.replay()
            self.task.negative.pass_turn(state.chains)
        else:
            self._compute(state, kind)
        if self.task.optimizer is not None:
            self._reference.apply(state, self._gradients[kind], n / self.batch_size)

    def _compute(self, state: TrainState, kind: tuple[int, int]) -> None:
        """Compute an update, or its gradient where an optimizer was given, without reading a number back."""
        n = kind[0]
        rows = self._order[self._position + self._within[:n]]
        layers = state.machine.layers
        batch = {name: unit.from_data(self._data[name].index_select(0, rows)) for name, unit in layers.items()}
        formed = self._formed_state(state)
        self._formed.refresh()
        if self._known:
            masks = {name: known.index_select(0, rows) if known.ndim else known for name, known in self._known.items()}
            batch = draw_unknown(formed.machine, batch, masks, state.rng, self.task.missing_steps)
        gradient = self._formed.pull_back(own_gradient(formed, self.task, batch))
        if state.centering is not None and formed.centering is not None:
            state.centering.hidden = formed.centering.hidden
        if self.task.recipe.normalized:
            normalize(gains_of(state.machine, gradient, powers_of(state, batch)))
        if self.task.optimizer is None:
            self._step(state, formed.centering, gradient, n / self.batch_size)
        else:
            self._gradients[kind] = gradient
        self._position.add_(n)
        self._keep_in_place(state)

    def _formed_state(self, state: TrainState) -> TrainState:
        """Return the state with matrices instead of small couplings; it shares everything else."""
        machine, centering = self._formed.machine, copy.copy(state.centering)
        if centering is not None:
            centering.machine = machine
        return dataclasses.replace(state, machine=machine, centering=centering)

    def _step(self, state: TrainState, centering: Centering | None, gradient: Gradient, weight: float) -> None:
        """Make the recipe's step; after the first number that is not finite nothing changes any more."""
        learned = list(state.learned.values())
        torch._foreach_copy_(self._kept, learned)
        before = None if centering is None else centering.fields()
        own_step(state, gradient, self.task, weight, self._clock.to(state.machine.like.dtype))
        if centering is not None and before is not None:
            self._formed.refresh()
            centering.follow(before)
        total = torch.stack(torch._foreach_norm(learned, math.inf)).sum()
        self._alive.logical_and_(total < math.inf)  # False for NaN too
        for parameter, kept in zip(learned, self._kept, strict=True):
            torch.where(self._alive, parameter, kept, out=parameter)
        self._clock.add_(self._alive)

    def _keep_in_place(self, state: TrainState) -> None:
        """Keep chains and offsets in the memory that the graphs read and write."""
        for name, chain in list(state.chains.items()):
            if chain.ndim:  # not a turn, which no graph reads
                state.chains[name] = self._placed(f"chains.{name}", chain)
        if state.centering is not None and state.centering.hidden is not None:
            state.centering.hidden = self._placed("offset", state.centering.hidden)

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._in_place:
            self._in_place[name] = tensor.clone()
        return self._in_place[name] if tensor is self._in_place[name] else self._in_place[name].copy_(tensor)


def _layout(arrays: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def _memory_of(state: TrainState) -> list[int]:
    """Return what has to stay the same for graphs of updates of a state to be used again."""
    tensors = [*state.learned.values(), *state.momenta.values()]
    return [id(state.rng), id(state.centering), *(tensor.data_ptr() for tensor in tensors)]


@contextlib.contextmanager
def tensor_cores() -> Iterator[None]:
    """Let products of float32 on GPUs use tensor cores inside the block: operands of 11 bits, sums in float32."""
    matmul = torch.backends.cuda.matmul
    try:
        former = matmul.allow_tf32
    except RuntimeError:  # the user has allowed it by another of PyTorch's switches, which must not be mixed
        yield
        return
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = former


def unsupported_reason(task: UpdateSettings, state: TrainState, source: Source) -> str | None:
    """Return why graphs cannot make a training run's updates, None if they can."""
    device = state.machine.like.device
    if device.type != "cuda":
        return f"the machine is on {device}"
    return not_capturable_reason(task, state, source) or too_large_reason(source, device)


def not_capturable_reason(task: UpdateSettings, state: TrainState, source: Source) -> str | None:
    """Return why an update cannot be made without reading a number back, None if it can."""
    like = state.machine.like
    if task.reference:
        return "the reference backend was requested"
    if (reason := task.whole_epochs_unsupported_reason(source, masked=True)) is not None:
        return reason
    if not task.negative.capturable:
        return f"its chains are {type(task.negative).__name__}"
    if type(state.rng) is not RandomSource or state.rng.device != like.device:
        return "its random numbers come from another device"
    units = state.machine.layers.values()
    if any(unit.own_lengths or unit.absent(like.new_zeros(1, *unit.shape)) is not None for unit in units):
        return "its samples differ in length"
    return None


def too_large_reason(source: Source, device: torch.device) -> str | None:
    """Return that the data is too large to be kept on a device, None if it is not."""
    arrays, known = source.with_masks
    masks = known.values() if not source.nan_is_missing else arrays.values()  # one byte per entry
    size = sum(int(torch.as_tensor(array[:1]).nbytes) * len(array) for array in arrays.values())
    size += sum(math.prod(mask.shape) for mask in masks)
    # All memory, not the free memory: the same training run has to take the same path every time.
    if device.type == "cuda" and size > _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[1]:
        return f"its data, {size / 1e9:.1f} GB, would take more than half of the device's memory"
    return None
