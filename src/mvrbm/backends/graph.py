"""GPU backend that supports every machine by replaying the operations of the reference backend as CUDA graphs.

An update requires dozens of kernel launches, which dominate the runtime for small arrays. This backend captures an
update once and replays it. The data, the sample order, the position in the epoch and the update number all stay on the
device. Small couplings are expanded to full matrices (:mod:`mvrbm.backends.expanded`), and float32 matrix products use
tensor cores (TF32).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mvrbm.backends.base import EpochBackend, UpdateSettings
from mvrbm.backends.device_memory import too_large_reason
from mvrbm.backends.expanded import ExpandedMachine
from mvrbm.backends.reference import ReferenceBackend
from mvrbm.backends.tf32 import tensor_cores
from mvrbm.cuda_graphs import capture
from mvrbm.data.sources import Source, masks_of
from mvrbm.extras import triton_runs_on
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.updates.gradient import Centering, Gradient
from mvrbm.updates.missing_entries import draw_unknown
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import fail, gains_of, normalize
from mvrbm.updates.update import apply_relative_rates, own_gradient, powers_of, recipe_step, start_chains

if TYPE_CHECKING:
    from mvrbm.backends.cuda.graph_step import FusedStep

# Number of updates between two checks for divergence. A check copies a value to the host, which synchronizes the GPU.
_UPDATES_UNCHECKED = 2000

#: The kind of an update: batch size and swap parity of the chains. Updates of the same kind launch the same kernels.
Kind = tuple[int, int]


class _DeviceBatches:
    """Training data on the device, with the sample order and the current position in the epoch.

    The graphs advance the position.
    """

    def __init__(self, source: Source, batch_size: int, device: torch.device) -> None:
        n_samples = int(source.n_samples or 0)
        self.data = {name: torch.as_tensor(array).to(device) for name, array in source.with_masks[0].items()}
        self.known = self.masks(source)
        self.order = torch.zeros(n_samples, dtype=torch.int64, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self._within = torch.arange(batch_size, device=device)

    def masks(self, source: Source) -> dict[str, Tensor]:
        """Return masks that are True where the data is known, or an empty dictionary if no entries are missing.

        There is one mask per layer. The mask for a layer without missing entries is a scalar tensor that applies to all
        entries.
        """
        known = masks_of(source)
        everything = torch.ones((), dtype=torch.bool)
        return {name: known.get(name, everything).to(array.device) for name, array in self.data.items() if known}

    def replace(self, source: Source) -> bool:
        """Replace the data in place and return True, or return False if the shapes or dtypes differ."""
        masks = self.masks(source)
        data = {name: torch.as_tensor(array) for name, array in source.with_masks[0].items()}
        if _shapes(data) != _shapes(self.data) or _shapes(masks) != _shapes(self.known):
            return False
        for name, array in data.items():
            self.data[name].copy_(array)
        for name, mask in masks.items():
            self.known[name].copy_(mask)
        return True

    def rows(self, n: int) -> Tensor:
        """Return the indices of the next n samples."""
        return self.order[self.position + self._within[:n]]

    def batch(self, machine: BoltzmannMachine, rows: Tensor) -> dict[str, Tensor]:
        """Return the given samples, converted to layer states."""
        return {name: unit.from_data(self.data[name].index_select(0, rows)) for name, unit in machine.layers.items()}

    def known_entries(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the masks of known entries for the given samples (see `masks`)."""
        return {name: mask.index_select(0, rows) if mask.ndim else mask for name, mask in self.known.items()}


class GraphBackend(EpochBackend):
    """Backend that computes epochs by replaying captured updates.

    The first update of each kind runs eagerly, which also warms up the libraries. The second update is captured. On a
    CPU, which is supported for testing, every update runs eagerly. If `exact` is True, float32 matrix products do not
    use tensor cores.
    """

    def __init__(self, settings: UpdateSettings, state: TrainState, source: Source, *, exact: bool = False) -> None:
        self.settings = settings
        self._exact = exact
        device = state.machine.like.device
        self.n_samples = int(source.n_samples or 0)
        self.batch_size = min(settings.recipe.batch_size, self.n_samples)
        self._batches = _DeviceBatches(source, self.batch_size, device)
        # Index of the next update, which determines the random numbers and learning rates.
        self._clock = torch.full((), state.update, dtype=torch.int64, device=device)
        # Whether each learned parameter is finite. Frozen after the first step that makes a parameter non-finite.
        self._finite = torch.ones(len(state.learned), dtype=torch.bool, device=device)
        self._graphs: dict[Kind, torch.cuda.CUDAGraph | None] = {}
        # Gradients for the optimizer. Every replay of a graph writes them to the same memory.
        self._gradients: dict[Kind, Gradient] = {}
        self._unchecked = 0
        self._capturing = device.type == "cuda"
        self._reference = ReferenceBackend(settings)
        # Chains and offsets, in the memory that the graphs read and write.
        self._in_place: dict[str, Tensor] = {}
        for name, parameter in state.learned.items() if settings.optimizer is None else ():
            state.momentum_of(name, parameter)
        self._kept = [torch.empty_like(parameter) for parameter in state.learned.values()]
        self._fused = self._fused_step(state)
        n_chains = settings.negative.n_chains or self.batch_size
        self._expanded = ExpandedMachine(state.machine, self.batch_size + n_chains)
        self._keep_in_place(state)
        self._memory = _memory_of(state)

    @torch.no_grad()
    def epoch(self, states: Sequence[TrainState], orders: Tensor, stopped: Callable[[], bool]) -> int:
        (state,) = states
        self._batches.order.copy_(orders[0])
        self._batches.position.fill_(state.batch * self.batch_size)
        made = 0
        with contextlib.nullcontext() if self._exact else tensor_cores():
            for first in range(state.batch * self.batch_size, self.n_samples, self.batch_size):
                self._update(state, min(self.batch_size, self.n_samples - first))
                made += 1
                if stopped():
                    break
        if self.settings.optimizer is None:
            state.update += made
            self._unchecked += made
            if self._unchecked >= _UPDATES_UNCHECKED:
                self.store(states)
        return made

    def continues_with(
        self, settings: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> bool:
        """Try to switch to other data, and return whether this succeeded.

        The data must have the same shapes and dtypes, and the captured graphs must still refer to the state's memory.
        """
        state = states[0]
        same_run = list(settings) == [self.settings] and _memory_of(state) == self._memory
        if not same_run or not self._batches.replace(sources[0]):
            return False
        self._clock.fill_(state.update)
        self._finite.fill_(True)
        if self._fused is not None:
            self._fused.reset()
        self._keep_in_place(state)
        return True

    def store(self, states: Sequence[TrainState]) -> list[bool]:
        """Raise DivergenceError if a step failed. The machine then has the parameters from before that step."""
        self._unchecked = 0
        state = states[0]
        finite = self._finite if self._fused is None else self._fused.n_not_finite == 0
        if not bool(finite.all()):
            name = list(state.learned)[finite.tolist().index(False)]
            state.update = int(self._clock)
            state.reset_after_divergence()
            fail(self.settings.recipe, state.update + 1, f"the parameter of '{name}'")
        return [False]

    def load(self, states: Sequence[TrainState]) -> None:
        """Load chains and offsets that a callback may have replaced."""
        self._keep_in_place(states[0])

    @property
    def n_captured(self) -> int:
        """Number of different kinds of updates captured so far."""
        return sum(graph is not None for graph in self._graphs.values())

    def _update(self, state: TrainState, n: int) -> None:
        kind = n, self.settings.negative.turn(state.chains)
        if self._capturing and kind in self._graphs and self._graphs[kind] is None:
            before = dict(state.chains)
            self._graphs[kind] = capture(lambda: self._compute(state, kind), what="this machine")
            # Capturing does not run the kernels, so restore the chains and offsets to the memory that replays write to.
            state.chains.update(before)
            if state.centering is not None and "offset" in self._in_place:
                state.centering.hidden = self._in_place["offset"]
            if self._graphs[kind] is None:
                self._capturing = False
        graph = self._graphs.setdefault(kind, None)
        if graph is not None:
            graph.replay()
            self.settings.negative.pass_turn(state.chains)
        else:
            self._compute(state, kind)
        if self.settings.optimizer is not None:
            self._reference.apply(state, self._gradients[kind], n / self.batch_size)
            self._clock.fill_(state.update)

    def _compute(self, state: TrainState, kind: Kind) -> None:
        """Compute an update, or only its gradient if there is an optimizer, without synchronizing with the host."""
        n = kind[0]
        rows = self._batches.rows(n)
        batch = self._batches.batch(state.machine, rows)
        expanded = self._expanded_state(state)
        self._expanded.refresh()
        if self._batches.known:
            masks = self._batches.known_entries(rows)
            rng = expanded.missing_numbers()
            batch = draw_unknown(expanded.machine, batch, masks, rng, self.settings.missing_steps)
        start_chains(self.settings, expanded, batch)
        gradient = self._expanded.pull_back(own_gradient(expanded, self.settings, batch))
        if state.centering is not None and expanded.centering is not None:
            state.centering.hidden = expanded.centering.hidden
        if self.settings.recipe.normalized:
            normalize(gains_of(state.machine, gradient, powers_of(state, batch)))
        apply_relative_rates(state, gradient)
        if self.settings.optimizer is None:
            self._step(state, expanded.centering, gradient, n / self.batch_size)
        else:
            self._gradients[kind] = gradient
        self._batches.position.add_(n)
        self._keep_in_place(state)

    def _expanded_state(self, state: TrainState) -> TrainState:
        """Return the state with small couplings replaced by full matrices and with the update number on the device.

        Everything else is shared with the original state.
        """
        machine = self._expanded.machine
        centering = copy.copy(state.centering)
        if centering is not None:
            centering.machine = machine
        return dataclasses.replace(state, machine=machine, centering=centering, device_update=self._clock)

    def _fused_step(self, state: TrainState) -> FusedStep | None:
        """Return the kernels that perform the step in two launches, or None if PyTorch must perform the step."""
        like = state.machine.like
        if self.settings.optimizer is not None or not triton_runs_on(like.device):
            return None
        from mvrbm.backends.cuda import graph_step, kernel_backend

        if state.centering is not None or not graph_step.usable([*state.learned.values(), *state.momenta.values()]):
            return None
        return graph_step.FusedStep(state, kernel_backend.rates_row(self.settings.recipe), self._clock)

    def _step(self, state: TrainState, centering: Centering | None, gradient: Gradient, weight: float) -> None:
        """Apply the recipe's update rule. Once a parameter is non-finite, further steps have no effect."""
        if self._fused is not None:
            self._fused.make(gradient, weight)
            return
        learned = list(state.learned.values())
        torch._foreach_copy_(self._kept, learned)
        before = None if centering is None else centering.fields()
        recipe_step(state, gradient, self.settings.recipe, weight, self._clock.to(state.machine.like.dtype))
        if centering is not None and before is not None:
            self._expanded.refresh()
            centering.follow(before)
        finite = torch.stack(torch._foreach_norm(learned, math.inf)) < math.inf  # False for NaN too
        torch.where(self._finite.all(), finite, self._finite, out=self._finite)
        accepted = self._finite.all()
        for parameter, kept in zip(learned, self._kept, strict=True):
            torch.where(accepted, parameter, kept, out=parameter)
        self._clock.add_(accepted)

    def _keep_in_place(self, state: TrainState) -> None:
        """Keep chains and offsets in the memory that the graphs read and write."""
        for name, chain in list(state.chains.items()):
            if chain.ndim:  # skip the swap parity, a scalar that no graph reads
                state.chains[name] = self._placed(f"chains.{name}", chain)
        if state.centering is not None and state.centering.hidden is not None:
            state.centering.hidden = self._placed("offset", state.centering.hidden)

    def _placed(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._in_place:
            self._in_place[name] = tensor.clone()
        return self._in_place[name] if tensor is self._in_place[name] else self._in_place[name].copy_(tensor)


def _shapes(arrays: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (array.shape, array.dtype) for name, array in arrays.items()}


def _memory_of(state: TrainState) -> list[int]:
    """Return the identities and memory addresses of all objects in a state that captured graphs refer to."""
    tensors = [*state.learned.values(), *state.momenta.values()]
    return [state.rng.key, id(state.centering), *(tensor.data_ptr() for tensor in tensors)]


def unsupported_reason(settings: UpdateSettings, state: TrainState, source: Source) -> str | None:
    """Return the reason why CUDA graphs do not support a training run, or None if they do."""
    device = state.machine.like.device
    if device.type != "cuda":
        return f"the machine is on {device}"
    return not_capturable_reason(settings, state, source) or too_large_reason(source, device)


def not_capturable_reason(settings: UpdateSettings, state: TrainState, source: Source) -> str | None:
    """Return the reason why an update has to synchronize with the host, or None if it does not."""
    like = state.machine.like
    if settings.by_autograd:
        return "gradients by autograd were requested"
    if (reason := settings.whole_epochs_unsupported_reason(source, masked=True)) is not None:
        return reason
    if not settings.negative.capturable:
        return f"its chains are {type(settings.negative).__name__}"
    if type(state.rng) is not RandomSource:
        return "its random source is not a plain RandomSource"
    units = state.machine.layers.values()
    if any(unit.own_lengths or unit.absent(like.new_zeros(1, *unit.shape)) is not None for unit in units):
        return "its samples differ in length"
    return None
