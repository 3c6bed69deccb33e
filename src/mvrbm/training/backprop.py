"""Gradient descent with backpropagation, used to train classifiers and super-resolution models.

For training with contrastive divergence, see :class:`~mvrbm.training.Trainer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from mvrbm.cuda_graphs import capture
from mvrbm.errors import DivergenceError
from mvrbm.interrupt import finish_on_interrupt
from mvrbm.progress import report
from mvrbm.random import RandomSource
from mvrbm.training.checkpoints import DescentCheckpoint
from mvrbm.validation import choice, number, whole_number

__all__ = ["DescentResult", "DescentSettings", "Loss", "Objective", "Score", "assign", "descend"]

#: Function that maps sample indices of shape (m,) to the weighted sum of the losses of these samples (a scalar).
Loss = Callable[[Tensor], Tensor]
#: Function that returns the error rate and the cross-entropy on held-out samples.
Score = Callable[[], tuple[float, float]]

# Number of updates between checks for divergence on a GPU. Checks are rare because reading the loss synchronizes with
# the device.
_UPDATES_UNCHECKED = 200
# Number of eager updates before an update is captured as a CUDA graph. They create the optimizer's state.
_EAGER_UPDATES = 3


class DescentSettings(NamedTuple):
    """Settings for gradient descent.

    Parameters
    ----------
    n_epochs : int
        Number of epochs.
    batch_size : int
        Number of samples per update.
    learning_rate : float
        Initial learning rate.
    weight_decay : float
        Weight decay coefficient for AdamW.
    schedule : {"cosine", "constant"}
        Learning rate schedule. ``"cosine"`` decays the learning rate to zero, and ``"constant"`` keeps it constant.
    averaging : float
        Decay rate of the exponential moving average of the parameters. At the end of training, the parameters are set
        to this average. If 0, averaging is disabled.
    patience : int, optional
        Number of consecutive epochs without improvement in the score after which training stops. If None, early
        stopping is disabled.
    """

    n_epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    schedule: str
    averaging: float
    patience: int | None

    def check(self) -> None:
        """Raise ValueError if a setting is invalid."""
        whole_number(self.n_epochs, "n_epochs", 0)
        whole_number(self.batch_size, "batch_size")
        number(self.learning_rate, "learning_rate", exclude_low=True)
        number(self.weight_decay, "weight_decay")
        choice(self.schedule, "schedule", ("cosine", "constant"))
        number(self.averaging, "averaging", 0, 1)
        if self.patience is not None:
            whole_number(self.patience, "patience")

    def identity(self) -> str:
        """Return a string that identifies these settings in checkpoints. The format is the same as in version 0.2."""
        return "Plan(" + ", ".join(f"{name}={value!r}" for name, value in self._asdict().items()) + ")"

    def rate_at(self, update: int, n_updates: int) -> float:
        """Return the learning rate for the update with index `update` out of `n_updates` updates."""
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * (1 + math.cos(math.pi * update / n_updates)) / 2


class DescentResult(NamedTuple):
    """Training history, and the interrupt that stopped gradient descent, if any."""

    #: Loss and scores for each epoch.
    history: list[dict[str, float]]
    #: Exception that `raise_if_interrupted` raises, or None if training was not interrupted.
    interrupt: type[BaseException] | None

    def raise_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C stopped training, or SystemExit (code 143) if SIGTERM did."""
        if self.interrupt is not None:
            raise self.interrupt


class Objective(NamedTuple):
    """Loss to minimize over a set of samples.

    Parameters
    ----------
    loss : callable
        Function that takes a one-dimensional tensor of sample indices and returns the weighted sum of the losses of
        these samples.
    weights : Tensor of shape (n,)
        Sample weights.
    draws_from : sequence of RandomSource
        Random sources used by the loss. They advance by one step per update.
    capturable : bool
        Whether updates can be captured as a CUDA graph. In this case, `loss` must never copy values from the GPU to the
        CPU.
    """

    loss: Loss
    weights: Tensor
    draws_from: Sequence[RandomSource] = ()
    capturable: bool = False


def descend(
    module: nn.Module,
    objective: Objective,
    settings: DescentSettings,
    rng: RandomSource,
    score: Score | None = None,
    *,
    decaying: Sequence[nn.Parameter] = (),
    checkpoint: DescentCheckpoint | None = None,
) -> DescentResult:
    r"""Train a module in place by minimizing a loss with AdamW.

    Each update uses the gradient of :math:`\sum_i w_i \ell_i / (\bar w m)`, where the sum is over the samples in a
    batch, :math:`w_i` and :math:`\ell_i` are the weight and the loss of sample :math:`i`, :math:`\bar w` is the mean
    weight of all samples, and :math:`m` is the batch size. The divisor is the same even if the last batch is smaller,
    so the effect of each sample is proportional to its weight.

    Parameters
    ----------
    module : Module
        Module to train.
    objective : Objective
        Loss to minimize, and the weights of the samples.
    settings : DescentSettings
        Training settings.
    rng : RandomSource
        Random source for the order of the samples. The order for epoch `e` is drawn at step `e` of the source.
    score : callable, optional
        Function that returns the error rate and the cross-entropy on held-out samples. It is called after every epoch.
        The final parameters are those from the epoch with the lowest error rate. Ties are broken by the lowest
        cross-entropy.
    decaying : sequence of Parameter
        Parameters to which weight decay applies.
    checkpoint : DescentCheckpoint, optional
        Checkpoint to save after every epoch. If it already exists, training resumes from it.

    Returns
    -------
    DescentResult
        Training history, and whether training was interrupted.

    Notes
    -----
    Ctrl-C and SIGTERM stop training after the current update. The module keeps the parameters reached so far. Call
    :meth:`DescentResult.raise_if_interrupted` to raise the corresponding exception.
    """
    descent = _Descent(module, decaying, objective, settings)
    if checkpoint is not None:
        descent.restore(checkpoint)
    weights = objective.weights
    captures = objective.capturable and descent.on_gpu
    updates = _CapturedUpdate(descent, weights.device) if captures else descent.update
    interrupts: list[type[BaseException]] = []
    with finish_on_interrupt(interrupts.append):
        first = descent.progress.epoch + 1
        for epoch in range(first, settings.n_epochs + 1):
            if checkpoint is not None and epoch > first:
                descent.save(checkpoint)
            order = rng.at_step(epoch).permutation(len(weights)).to(weights.device)
            descent.run_epoch(order, updates, lambda: bool(interrupts))
            if interrupts:
                break
            if score is not None and descent.stops_after(score):
                break
    descent.finish()
    return DescentResult(descent.progress.history, interrupts[0] if interrupts else None)


@dataclass
class _Progress:
    """Training progress, which is stored in checkpoints along with the parameters and the optimizer state."""

    epoch: int = 0
    update: int = 0
    best: tuple[float, float] = (math.inf, math.inf)
    best_epoch: int = 0
    best_parameters: list[Tensor] | None = None
    history: list[dict[str, float]] = field(default_factory=list)
    # Mean loss for each epoch, stored on the device.
    losses: list[Tensor] = field(default_factory=list)


class _Descent:
    """State of a training run: parameters, optimizer and progress. See :func:`descend` for the arguments."""

    def __init__(
        self, module: nn.Module, decaying: Sequence[nn.Parameter], objective: Objective, settings: DescentSettings
    ) -> None:
        weights = objective.weights
        self.progress = _Progress()
        self.on_gpu = weights.is_cuda
        self.batch_size = min(settings.batch_size, len(weights))
        self._module = module
        self._loss = objective.loss
        self._settings = settings
        self._sources = objective.draws_from
        self._learned = [p for p in module.parameters() if p.requires_grad]
        self._before = [p.detach().clone() for p in self._learned]
        self._optimizer = _optimizer(self._learned, decaying, settings, weights.device)
        self._average = _average_of(module, settings.averaging) if settings.averaging else None
        self._n_batches = -(-len(weights) // self.batch_size)
        self._total_weight = weights.sum()
        self._scale = 1 / (self.batch_size * float(weights.mean()))
        self._sum_of_losses = torch.zeros((), dtype=weights.dtype, device=weights.device)
        self._unchecked = 0
        for source in self._sources:
            if self.on_gpu:
                source.step_on(weights.device)
            source.go_to(0)

    # -- updates ----------------------------------------------------------------------------------

    @torch.enable_grad()
    def update(self, rows: Tensor) -> None:
        """Run one update. If the loss can be captured in a CUDA graph, so can the update."""
        self._optimizer.zero_grad(set_to_none=True)
        value = self._loss(rows)
        (value * self._scale).backward()
        self._optimizer.step()
        self._sum_of_losses.add_(value.detach())
        for source in self._sources:
            source.next_step()

    def run_epoch(self, order: Tensor, update: Callable[[Tensor], None], stopped: Callable[[], bool]) -> None:
        """Run the updates of one epoch. Return early if `stopped` returns True after an update."""
        progress = self.progress
        self._sum_of_losses.zero_()
        for rows in order.split(self.batch_size):
            self._set_rate()
            # The captured update only supports full batches.
            (update if len(rows) == self.batch_size else self.update)(rows)
            progress.update += 1
            if self._average is not None:
                self._average.update_parameters(self._module)
            if stopped():
                return
        progress.epoch += 1
        progress.losses.append(self._sum_of_losses / self._total_weight)
        progress.history.append({"epoch": progress.epoch, "loss": math.nan})
        self._unchecked += self._n_batches
        last = progress.epoch == self._settings.n_epochs
        if not self.on_gpu or self._unchecked >= _UPDATES_UNCHECKED or last:
            self._check()
        report("epochs")

    def _set_rate(self) -> None:
        rate = self._settings.rate_at(self.progress.update, self._settings.n_epochs * self._n_batches)
        for group in self._optimizer.param_groups:
            if self.on_gpu:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _check(self) -> None:
        """If the loss is not finite, restore the initial parameters and raise DivergenceError."""
        self._unchecked = 0
        if not math.isfinite(float(self.progress.losses[-1])):
            assign(self._learned, self._before)
            rate = self._settings.learning_rate
            raise DivergenceError(
                f"the loss is not finite in epoch {self.progress.epoch}; use a learning_rate below {rate:g}"
            )

    def stops_after(self, score: Score) -> bool:
        """Score the parameters, or their moving average if averaging is enabled. Return whether to stop early."""
        progress = self.progress
        current = [p.detach().clone() for p in self._learned]
        if self._average is not None:
            assign(self._learned, _values(self._average))
        try:
            found = score()
            if found < progress.best:
                progress.best = found
                progress.best_epoch = progress.epoch
                progress.best_parameters = [p.detach().clone() for p in self._learned]
        finally:
            assign(self._learned, current)
        progress.history[-1] |= {"validation_error": found[0], "validation_loss": found[1]}
        patience = self._settings.patience
        if patience is None or progress.epoch - progress.best_epoch < patience:
            return False
        self._check()
        return True

    def finish(self) -> None:
        """Set the module's parameters to their final values and add the losses to the history."""
        final = self.progress.best_parameters
        if final is None and self._average is not None:
            final = _values(self._average)
        if final is not None:
            assign(self._learned, final)
        for row, mean in zip(self.progress.history, self.progress.losses, strict=True):
            row["loss"] = float(mean)

    # -- checkpoints ------------------------------------------------------------------------------

    def _named(self) -> dict[str, Sequence[Tensor]]:
        """Return all copies of the parameters (current, initial, averaged and best), keyed by name."""
        return {
            "learned": self._learned,
            "before": self._before,
            "average": [] if self._average is None else _values(self._average),
            "best": self.progress.best_parameters or [],
        }

    def save(self, checkpoint: DescentCheckpoint) -> None:
        """Save the state of the training run to a checkpoint at the end of an epoch."""
        progress = self.progress
        tensors = {f"{name}.{index}": p for name, group in self._named().items() for index, p in enumerate(group)}
        for index, entries in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in entries.items()}
        if self._average is not None:
            tensors["n_averaged"] = self._average.n_averaged
        tensors["losses"] = torch.stack(progress.losses)
        plain = {
            "epoch": progress.epoch,
            "update": progress.update,
            "best": progress.best,
            "best_epoch": progress.best_epoch,
            "history": progress.history,
        }
        checkpoint.save(plain, tensors)

    def restore(self, checkpoint: DescentCheckpoint) -> None:
        """Restore the state of the training run from a checkpoint, if it exists."""
        found = checkpoint.load(self._shapes())
        if found is None:
            return
        plain, tensors = found
        with checkpoint.damage_as_storage_error():
            self._restore_tensors(tensors)
            best = [
                tensors[f"best.{index}"].to(p) for index, p in enumerate(self._learned) if f"best.{index}" in tensors
            ]
            self.progress = _Progress(
                epoch=plain["epoch"],
                update=plain["update"],
                best=(plain["best"][0], plain["best"][1]),
                best_epoch=plain["best_epoch"],
                best_parameters=best or None,
                history=plain["history"],
                losses=list(tensors["losses"].to(self._sum_of_losses.device)),
            )
        for source in self._sources:
            source.go_to(self.progress.update)

    def _restore_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        for name, group in self._named().items():
            for index, part in enumerate(group):
                part.detach().copy_(tensors[f"{name}.{index}"])
        if self._average is not None:
            self._average.n_averaged.copy_(tensors["n_averaged"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, position, key = name.split(".")
                state.setdefault(int(position), {})[key] = tensor
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _shapes(self) -> dict[str, Any]:
        """Return the expected shape of each tensor that `save` can store, keyed by name. None matches any shape."""
        found: dict[str, Any] = {"n_averaged": (), "losses": None}
        for name in self._named():
            found |= {f"{name}.{index}": p.shape for index, p in enumerate(self._learned)}
        for index, p in enumerate(p for group in self._optimizer.param_groups for p in group["params"]):
            start = f"optimizer.{index}"
            found |= {f"{start}.step": (), f"{start}.exp_avg": p.shape, f"{start}.exp_avg_sq": p.shape}
        return found


class _CapturedUpdate:
    """Update for full-size batches. After a few eager calls, it is captured and replayed as a CUDA graph."""

    def __init__(self, descent: _Descent, device: torch.device) -> None:
        self._update = descent.update
        self._rows = torch.zeros(descent.batch_size, dtype=torch.long, device=device)
        self._eager: float = _EAGER_UPDATES
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, rows: Tensor) -> None:
        """Run the update on one full-size batch."""
        self._rows.copy_(rows)
        if self._graph is None and self._eager <= 0:
            self._graph = capture(lambda: self._update(self._rows), what="this network")
            if self._graph is None:
                self._eager = math.inf
        if self._graph is None:
            self._eager -= 1
            self._update(self._rows)
        else:
            self._graph.replay()


def _optimizer(
    learned: Sequence[nn.Parameter], decaying: Sequence[nn.Parameter], settings: DescentSettings, device: torch.device
) -> torch.optim.AdamW:
    """Create an AdamW optimizer. On a GPU, the learning rate is stored in a tensor so that CUDA graphs can read it."""
    with_decay = {id(p) for p in decaying}
    groups = [
        {"params": [p for p in learned if id(p) in with_decay], "weight_decay": settings.weight_decay},
        {"params": [p for p in learned if id(p) not in with_decay], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if device.type == "cuda":
        rate = torch.tensor(settings.learning_rate, device=device)
        return torch.optim.AdamW(groups, lr=rate, fused=True, capturable=True)
    return torch.optim.AdamW(groups, lr=settings.learning_rate)


def _average_of(module: nn.Module, averaging: float) -> AveragedModel:
    """Create a moving average of the parameters. Its decay rate gradually increases to `averaging`."""

    def average(means: Sequence[Tensor], values: Sequence[Tensor], count: Tensor | int) -> None:
        weight = max(1 - averaging, 1 / (1 + int(count) / 10))
        torch._foreach_lerp_(tuple(means), tuple(values), weight)

    averaged = AveragedModel(module, multi_avg_fn=average)
    averaged.update_parameters(module)  # the first call copies the parameters
    return averaged


def _values(average: AveragedModel) -> list[Tensor]:
    return [p.detach() for p in average.module.parameters() if p.requires_grad]


@torch.no_grad()
def assign(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Copy values into parameters in place."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
