"""Gradient descent on a loss by backpropagation: one loop for classifiers and for super-resolution.

Contrastive divergence is not here: see :class:`~mvrbm.training.Trainer`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from mvrbm.cuda_graphs import capture
from mvrbm.errors import DivergenceError
from mvrbm.interrupt import finish_on_interrupt
from mvrbm.progress import report
from mvrbm.random import RandomSource
from mvrbm.training.descent import Descent
from mvrbm.validation import choice, number, whole_number

__all__ = ["Loss", "Plan", "Replayed", "Score", "assign", "descend"]

#: From row numbers (m,) to the weighted sum of their losses, a scalar.
Loss = Callable[[Tensor], Tensor]
#: Error rate and cross-entropy of held-out samples.
Score = Callable[[], tuple[float, float]]

_UPDATES_UNCHECKED = 200  # reading the loss back means waiting for the device


class Plan(NamedTuple):
    """Settings of a descent."""

    n_epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    schedule: str
    averaging: float
    patience: int | None

    def check(self) -> None:
        """Raise ValueError for settings that make no sense."""
        whole_number(self.n_epochs, "n_epochs", 0)
        whole_number(self.batch_size, "batch_size")
        number(self.learning_rate, "learning_rate", exclude_low=True)
        number(self.weight_decay, "weight_decay")
        choice(self.schedule, "schedule", ("cosine", "constant"))
        number(self.averaging, "averaging", 0, 1)
        if self.patience is not None:
            whole_number(self.patience, "patience")


def descend(
    module: nn.Module,
    decaying: Sequence[nn.Parameter],
    loss: Loss,
    weights: Tensor,
    plan: Plan,
    rng: RandomSource,
    score: Score | None = None,
    *,
    draws_from: Sequence[RandomSource] | None = None,
    checkpoint: Descent | None = None,
) -> list[dict[str, float]]:
    r"""Minimize a loss with AdamW, in place.

    An update follows the gradient of :math:`\sum w_i \ell_i / (\bar w m)` over a batch, `m` being the size of a full
    batch: every sample counts by its weight, in short batches too. With the cosine schedule the learning rate decays to
    zero along half a cosine. Within an epoch nothing waits for the device.

    `loss` goes from row numbers (m,) to the weighted sum of losses, and `weights` (n,) are those of the samples. Weight
    decay applies to the parameters `decaying`; `rng` draws the order of samples. With a `score`, the module ends with
    the parameters of the epoch that was best in error rate, then in cross-entropy, and descent stops after
    `plan.patience` epochs without a better one. `draws_from` are the sources that the loss draws from; if they are
    given, the loss must not read numbers back: on a GPU an update is captured as a CUDA graph and replayed.

    With a `checkpoint`, the state after every epoch is stored there, and the descent continues from there.

    Return one row per epoch: its loss, and the scores. Ctrl-C and SIGTERM end the descent after an update: then it
    raises KeyboardInterrupt or :class:`~mvrbm.interrupt.Terminated`, and the module has the parameters so far.
    """
    learned = [p for p in module.parameters() if p.requires_grad]
    with_decay = {id(p) for p in decaying}
    groups = [
        {"params": [p for p in learned if id(p) in with_decay], "weight_decay": plan.weight_decay},
        {"params": [p for p in learned if id(p) not in with_decay], "weight_decay": 0.0},
    ]
    device, n = weights.device, len(weights)
    on_gpu, full = device.type == "cuda", min(plan.batch_size, n)
    rate = torch.tensor(plan.learning_rate, device=device) if on_gpu else plan.learning_rate
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=rate, fused=on_gpu or None, capturable=on_gpu)
    scale = 1 / (full * float(weights.mean()))
    sum_of_losses = torch.zeros((), dtype=weights.dtype, device=device)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        value = loss(rows)
        (value * scale).backward()
        optimizer.step()
        sum_of_losses.add_(value.detach())

    replayed = None if draws_from is None or not on_gpu else Replayed(step, full, device, draws_from)
    n_batches = -(-n // full)
    total, update, unchecked = plan.n_epochs * n_batches, 0, 0
    average = _average_of(module, plan.averaging) if plan.averaging else None
    history: list[dict[str, float]] = []
    losses: list[Tensor] = []
    before = [p.detach().clone() for p in learned]
    best, best_state, best_epoch = (math.inf, math.inf), None, 0
    first = 1
    if checkpoint is not None and (found_state := checkpoint.load(_shapes(learned, optimizer), rng)) is not None:
        plain, tensors = found_state
        first, update, best_epoch, history = plain["epoch"] + 1, plain["update"], plain["best_epoch"], plain["history"]
        with checkpoint.reading():
            best, losses = (plain["best"][0], plain["best"][1]), list(tensors["losses"].to(device))
            best_state = _restore(tensors, learned, before, optimizer, average)
    interrupts: list[type[BaseException]] = []
    with finish_on_interrupt(interrupts.append):
        for epoch in range(first, plan.n_epochs + 1):
            if checkpoint is not None and epoch > first:
                done = {"epoch": epoch - 1, "update": update, "best": best, "best_epoch": best_epoch}
                tensors = _tensors(learned, before, optimizer, average, best_state)
                checkpoint.save({**done, "history": history}, {**tensors, "losses": torch.stack(losses)}, rng)
            sum_of_losses.zero_()
            for rows in rng.permutation(n).to(device).split(full):
                decay = (1 + math.cos(math.pi * update / total)) / 2 if plan.schedule == "cosine" else 1.0
                for group in optimizer.param_groups:
                    if on_gpu:
                        group["lr"].fill_(plan.learning_rate * decay)
                    else:
                        group["lr"] = plan.learning_rate * decay
                (replayed if replayed is not None and len(rows) == full else step)(rows)
                update += 1
                if average is not None:
                    average.update_parameters(module)
                if interrupts:
                    break
            if interrupts:
                break
            losses.append(sum_of_losses / weights.sum())
            unchecked += n_batches
            if not on_gpu or unchecked >= _UPDATES_UNCHECKED or epoch == plan.n_epochs:
                unchecked = 0
                _check(losses[-1], epoch, plan, learned, before)
            history.append({"epoch": epoch, "loss": math.nan})
            report("epochs")
            if score is None:
                continue
            own = [p.detach().clone() for p in learned]
            if average is not None:
                assign(learned, _values(average))
            try:
                found = score()
                if found < best:
                    best, best_epoch = found, epoch
                    best_state = [p.detach().clone() for p in learned]
            finally:
                assign(learned, own)
            history[-1] |= {"validation_error": found[0], "validation_loss": found[1]}
            if plan.patience is not None and epoch - best_epoch >= plan.patience:
                _check(losses[-1], epoch, plan, learned, before)
                break
    final = best_state if best_state is not None or average is None else _values(average)
    if final is not None:
        assign(learned, final)
    for row, mean in zip(history, losses, strict=True):
        row["loss"] = float(mean)
    if interrupts:
        raise interrupts[0]
    return history


def _groups(
    learned: Sequence[Tensor], before: Sequence[Tensor], average: AveragedModel | None, best: Sequence[Tensor] | None
) -> dict[str, Sequence[Tensor]]:
    """Return the tensors of a descent that are shaped as the parameters, by what they are."""
    means = [] if average is None else _values(average)
    return {"learned": learned, "before": before, "average": means, "best": best or []}


def _tensors(
    learned: Sequence[Tensor],
    before: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    average: AveragedModel | None,
    best: Sequence[Tensor] | None,
) -> dict[str, Tensor]:
    """Return the state of a descent as named tensors."""
    groups = _groups(learned, before, average, best)
    found = {f"{name}.{index}": part for name, group in groups.items() for index, part in enumerate(group)}
    for index, entries in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{name}": value for name, value in entries.items()}
    return found if average is None else {**found, "n_averaged": average.n_averaged}


def _shapes(learned: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the shapes of the tensors that :func:`_tensors` names; None stands for any."""
    names = ("learned", "before", "average", "best")
    found: dict[str, Any] = {f"{name}.{index}": p.shape for name in names for index, p in enumerate(learned)}
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        start = f"optimizer.{index}"
        found |= {f"{start}.step": (), f"{start}.exp_avg": p.shape, f"{start}.exp_avg_sq": p.shape}
    return {**found, "n_averaged": (), "losses": None}


def _restore(
    tensors: Mapping[str, Tensor],
    learned: Sequence[nn.Parameter],
    before: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    average: AveragedModel | None,
) -> list[Tensor] | None:
    """Set a descent to a stored state, and return its best parameters so far."""
    for name, group in _groups(learned, before, average, None).items():
        for index, part in enumerate(group):
            part.detach().copy_(tensors[f"{name}.{index}"])
    if average is not None:
        average.n_averaged.copy_(tensors["n_averaged"])
    state: dict[int, dict[str, Tensor]] = {}
    for name in (name for name in tensors if name.startswith("optimizer.")):
        _, place, key = name.split(".")
        state.setdefault(int(place), {})[key] = tensors[name]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    best = [tensors[f"best.{index}"].to(p) for index, p in enumerate(learned) if f"best.{index}" in tensors]
    return best or None


def _check(loss: Tensor, epoch: int, plan: Plan, learned: Sequence[nn.Parameter], before: Sequence[Tensor]) -> None:
    """Raise DivergenceError for a loss that is not finite; the parameters are then as they were at the start."""
    if not math.isfinite(float(loss)):
        assign(learned, before)
        raise DivergenceError(f"epoch {epoch}: the loss is not finite. Lower learning_rate={plan.learning_rate:g}")


def _average_of(module: nn.Module, averaging: float) -> AveragedModel:
    """Return a running mean of the parameters: over few updates at first, over more and more up to `averaging`."""

    def average(means: Sequence[Tensor], values: Sequence[Tensor], count: Tensor | int) -> None:
        weight = max(1 - averaging, 1 / (1 + int(count) / 10))
        torch._foreach_lerp_(tuple(means), tuple(values), weight)

    averaged = AveragedModel(module, multi_avg_fn=average)
    averaged.update_parameters(module)  # the first call copies
    return averaged


def _values(average: AveragedModel) -> list[Tensor]:
    return [p.detach() for p in average.module.parameters() if p.requires_grad]


class Replayed:
    """An update of a full batch, from row numbers (batch_size,), as a CUDA graph.

    The first updates are made launch by launch, which creates the optimizer's state; then one is captured.
    """

    _EAGER_UPDATES = 3

    def __init__(
        self, step: Callable[[Tensor], None], batch_size: int, device: torch.device, draws_from: Sequence[RandomSource]
    ) -> None:
        self._step, self._sources = step, draws_from
        self._rows = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._eager: float = self._EAGER_UPDATES
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, rows: Tensor) -> None:
        """Make the update for these rows."""
        self._rows.copy_(rows)
        if self._graph is None and self._eager <= 0:
            self._graph = capture(lambda: self._step(self._rows), self._sources, what="this network")
            self._eager = self._eager if self._graph is not None else math.inf
        if self._graph is None:
            self._eager -= 1
            self._step(self._rows)
        else:
            self._graph.replay()


@torch.no_grad()
def assign(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Copy values into parameters."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
