"""The analytic path on a GPU as CUDA graphs: for every machine that the fused kernels do not know.

An update of small arrays is some eighty launches, and the time is that of the launching. Here an update is captured
once and replayed: the data, the order of a pass and the place in it are on the device, and so is the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mvrbm.random import RandomSource

if TYPE_CHECKING:
    from mvrbm.learning.data import Source
    from mvrbm.learning.trainer import Trainer

# To look at the parameters is to wait for the card.
_UPDATES_UNCHECKED = 2000
# Of the device's memory, what the data may take.
_SHARE_OF_MEMORY = 0.5


class GraphedPasses:
    """Makes passes over data by replaying the updates of a trainer.

    The first update of each size is made launch by launch, which also warms the libraries up; then it is captured.
    On a CPU nothing is captured, and every update is made so: this is for tests.

    Parameters
    ----------
    trainer : Trainer
        A training that :func:`refuses` had nothing against, set up.
    source : Source
        Its data.
    """

    def __init__(self, trainer: Trainer, source: Source) -> None:
        self.trainer = trainer
        like = trainer.machine.like
        self.n_samples = int(source.n_samples or 0)
        self.batch_size = min(trainer.recipe.batch_size, self.n_samples)
        self._data = {name: torch.as_tensor(array).to(like.device) for name, array in source.whole.items()}
        self._order = torch.zeros(self.n_samples, dtype=torch.int64, device=like.device)
        self._within = torch.arange(self.batch_size, device=like.device)
        self._place = torch.zeros((), dtype=torch.int64, device=like.device)
        self._clock = torch.full((), trainer.update, dtype=torch.float64, device=like.device)  # updates made
        self._alive = torch.ones((), dtype=torch.bool, device=like.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._gradients: dict[int, dict[str, Tensor]] = {}  # of each size of batch, where graphs leave them
        self._unchecked = 0
        self._capturing = like.device.type == "cuda"
        self._learned = {name: p for name, p in trainer.machine.named_parameters() if p.requires_grad}
        self._kept_states: dict[str, Tensor] = {}
        self._momenta = self._find_momenta() if trainer.own_optimizer else {}
        self._stay_in_place()

    def _find_momenta(self) -> dict[str, Tensor]:
        """Return the optimiser's own buffers, zeros where it has not begun; nothing without momentum."""
        optimizer, momentum = self.trainer.optimizer, self.trainer.recipe.momentum
        if optimizer is None or not momentum:
            return {}
        found = {}
        for name, parameter in self._learned.items():
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            found[name] = state["momentum_buffer"]
        return found

    # -- a pass -----------------------------------------------------------------------------------

    @torch.no_grad()
    def one_pass(self, orders: Sequence[Tensor], start: int = 0) -> int:
        """Go once through the data from batch `start` on, and return the number of updates.

        Parameters
        ----------
        orders : sequence of one Tensor (n_samples,)
            The order in which the samples are seen.
        start : int
            Batches to leave out.
        """
        self._order.copy_(orders[0])
        self._place.fill_(start * self.batch_size)
        updates = range(start * self.batch_size, self.n_samples, self.batch_size)
        made = 0
        for first in updates:
            self._one_update(min(self.batch_size, self.n_samples - first))
            made += 1
            if self.trainer.stop:
                break
        if self.trainer.own_optimizer:
            self._unchecked += made
            if self._unchecked >= _UPDATES_UNCHECKED:
                self._check()
            return made
        self.trainer.update -= made  # the step has counted them, as the caller will
        return made

    def push(self) -> None:
        """Make sure that all is well; the machine's own parameters are what has been learning."""
        self._check()

    def pull(self) -> None:
        """Take chains and offsets over that a callback may have put in the place of those that are known here."""
        self._stay_in_place()

    def balance(self) -> None:
        """Leave that to the trainer: it has the machine's parameters at hand."""

    def _check(self) -> None:
        self._unchecked = 0
        if not bool(self._alive):
            self.trainer.update = int(self._clock)
            self.trainer.fail(self.trainer.update + 1)

    # -- an update --------------------------------------------------------------------------------

    def _one_update(self, n: int) -> None:
        graph = self._graphs.get(n)
        if graph is not None:
            graph.replay()
        elif self._capturing and n in self._graphs:
            self._capture(n)
        else:
            self._graphs[n] = None
            self._compute(n)
        if not self.trainer.own_optimizer:
            self.trainer._step(self._gradients[n], n / self.batch_size)

    def _capture(self, n: int) -> None:
        graph, rng = torch.cuda.CUDAGraph(), self.trainer.rng
        before = rng.state_dict()
        rng.register_with(graph)
        try:
            with torch.cuda.graph(graph):
                self._compute(n)
        except RuntimeError as error:
            self._capturing = False
            reason = str(error).splitlines()[0]
            warnings.warn(f"this machine goes without CUDA graphs: {reason}", RuntimeWarning, stacklevel=2)
            self._graphs = {}  # they draw from the generator that is given up
            rng.part_from_graphs(before)
            self._take_back()
            self._one_update(n)
            return
        self._graphs[n] = graph
        graph.replay()

    def _compute(self, n: int) -> None:
        """All of one update, or all but the step of an optimiser that was given, with no look at a number."""
        rows = self._order[self._place + self._within[:n]]
        gradient = self.trainer.slopes(self._batch(rows))
        if self.trainer.own_optimizer:
            self._step(gradient, n / self.batch_size)
        else:
            self._gradients[n] = gradient
        self._place.add_(n)
        self._stay_in_place()

    def _batch(self, rows: Tensor) -> dict[str, Tensor]:
        layers = self.trainer.machine.layers
        return {name: unit.from_data(self._data[name].index_select(0, rows)) for name, unit in layers.items()}

    def _step(self, gradient: dict[str, Tensor], weight: float) -> None:
        """The trainer's own step, with its checks: from the first number that is not finite on nothing changes."""
        recipe, centring = self.trainer.recipe, self.trainer.centring
        kept = {name: p.clone() for name, p in self._learned.items()}
        before = None if centring is None else centring.fields()
        falling = 1.0 if recipe.rate_decay is None else (1 + self._clock / recipe.rate_decay).rsqrt()
        rate = float(recipe.learning_rate or 0.0)
        for name, parameter in self._learned.items():
            of_coupling = name.startswith("couplings.")
            slope = gradient[name] * weight if weight != 1 else gradient[name]
            if recipe.weight_decay and of_coupling:
                slope = slope.add(parameter, alpha=recipe.weight_decay)
            if name in self._momenta:
                slope = self._momenta[name].mul_(recipe.momentum).add_(slope)
            speed = rate if of_coupling else recipe.bias_learning_rate or rate
            parameter.sub_(slope * (falling * speed))
        if centring is not None and before is not None:
            centring.follow(before)
        total = torch.stack([p.detach().sum() for p in self._learned.values()]).sum()
        self._alive.logical_and_(torch.isfinite(total))
        for name, parameter in self._learned.items():
            parameter.copy_(torch.where(self._alive, parameter, kept[name]))
        self._clock.add_(self._alive)

    def _stay_in_place(self) -> None:
        """Keep what the trainer holds between updates where the graphs look for it."""
        trainer = self.trainer
        for name, states in list(trainer.chains.items()):
            trainer.chains[name] = self._kept(f"chains.{name}", states)
        if trainer.centring is not None and trainer.centring.hidden is not None:
            trainer.centring.hidden = self._kept("offset", trainer.centring.hidden)

    def _take_back(self) -> None:
        """Let the trainer hold what it held before a capture that failed, whose arrays were never computed."""
        trainer = self.trainer
        for name in trainer.chains:
            trainer.chains[name] = self._kept_states[f"chains.{name}"]
        if trainer.centring is not None and "offset" in self._kept_states:
            trainer.centring.hidden = self._kept_states["offset"]

    def _kept(self, name: str, states: Tensor) -> Tensor:
        if name not in self._kept_states:
            self._kept_states[name] = states.clone()
        elif states is not self._kept_states[name]:
            self._kept_states[name].copy_(states)
        return self._kept_states[name]


def refuses(trainer: Trainer, source: Source) -> str | None:
    """Return why graphs cannot make a training's updates, None if they can."""
    machine = trainer.machine
    if machine.like.device.type != "cuda":
        return f"the machine is on {machine.like.device}"
    return unfit(trainer, source) or too_large(source, machine.like.device)


def unfit(trainer: Trainer, source: Source) -> str | None:
    """Return why an update cannot be made without a look at a number, None if it can."""
    if trainer.gradient != "analytic":
        return "gradients by autograd were asked for"
    reason = no_whole_passes(trainer, source)
    if reason is not None:
        return reason
    if not trainer.negative.capturable:
        return f"its chains are {type(trainer.negative).__name__}"
    if type(trainer.rng) is not RandomSource or trainer.rng.device != trainer.machine.like.device:
        return "its random numbers come from elsewhere"
    like = trainer.machine.like
    if any(unit.absent(like.new_zeros(1, *unit.shape)) is not None for unit in trainer.machine.layers.values()):
        return "its samples differ in length"
    return None


def no_whole_passes(trainer: Trainer, source: Source) -> str | None:
    """Return why a training cannot be handed a whole pass at once, None if it can."""
    if not source.whole:
        return "its data is not a plain array, known throughout"
    if any(callback.wants_batches for callback in trainer.callbacks):
        return "a callback wants to see every batch"
    if trainer.world.size > 1:
        return "several processes share it"
    return None


def too_large(source: Source, device: torch.device) -> str | None:
    """Return that the data is too large to be kept on a device, None if it is not."""
    size = sum(_n_bytes(array) for array in source.whole.values())
    # Of all memory, not of what is free: the same training is to take the same path every time.
    if device.type == "cuda" and size > _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[1]:
        return f"its data, {size / 1e9:.1f} GB, would take more than half of the device's memory"
    return None


def _n_bytes(array: Any) -> int:
    return int(torch.as_tensor(array[:1]).nbytes) * len(array)
