"""Going down a loss by backpropagation: one loop for classifiers and for super-resolution.

Contrastive divergence is not here: that is the :class:`~mvrbm.learning.Trainer`'s.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mvrbm.learning.trainer import DivergenceError
from mvrbm.random import RandomSource

__all__ = ["Loss", "Plan", "Replayed", "Score", "assign", "descend"]

#: From row numbers (m,) to the weighted sum of their losses, a scalar.
Loss = Callable[[Tensor], Tensor]
#: Error rate and cross-entropy on held-out samples.
Score = Callable[[], tuple[float, float]]

_UPDATES_UNCHECKED = 200  # to look at the loss is to wait for the device


class Plan(NamedTuple):
    """Numbers of a descent."""

    n_epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    schedule: str
    averaging: float
    patience: int | None

    def check(self) -> None:
        """Refuse what makes no sense."""
        for name, least in [("n_epochs", 0), ("batch_size", 1)]:
            value = getattr(self, name)
            if value != int(value) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate!r}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay!r}")
        if self.schedule not in ("cosine", "constant"):
            raise ValueError(f"schedule must be 'cosine' or 'constant', got {self.schedule!r}")
        if not 0 <= self.averaging < 1:
            raise ValueError(f"averaging must be at least 0 and below 1, got {self.averaging!r}")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience!r}")


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
) -> list[dict[str, float]]:
    r"""Go down a loss with Adam, in place.

    An update takes the gradient of :math:`\sum w_i \ell_i / (\bar w m)` over a batch, `m` the size of a full batch:
    every sample counts by its weight, in short batches too. The rate falls to zero along half a cosine.
    Within a pass nothing waits for the device.

    Parameters
    ----------
    module : Module
        What learns; of its parameters, those with a gradient.
    decaying : sequence of Parameter
        Those of them that weight decay pulls towards zero.
    loss : callable
        From row numbers (m,) to the weighted sum of losses.
    weights : Tensor (n,)
        Weights of the samples.
    plan : Plan
        How.
    rng : RandomSource
        Source of the order of samples.
    score : callable, optional
        Error rate and cross-entropy of held-out samples. If given, the module ends as it was after the pass that was
        best in both, in this order, and stops after `plan.patience` passes without a better one.
    draws_from : sequence of RandomSource, optional
        Streams that the loss draws from. If given, the loss never looks at a number, and on a GPU an update is
        captured as a CUDA graph and replayed.

    Returns
    -------
    list of dict
        One row a pass.
    """
    learned = [p for p in module.parameters() if p.requires_grad]
    kept = {id(p) for p in decaying}
    groups = [
        {"params": [p for p in learned if id(p) in kept], "weight_decay": plan.weight_decay},
        {"params": [p for p in learned if id(p) not in kept], "weight_decay": 0.0},
    ]
    device = weights.device
    on_gpu = device.type == "cuda"
    rate = torch.tensor(plan.learning_rate, device=device) if on_gpu else plan.learning_rate
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=rate, fused=on_gpu or None, capturable=on_gpu
    )
    n = len(weights)
    full = min(plan.batch_size, n)
    scale = 1 / (full * float(weights.mean()))
    sum_of_losses = torch.zeros((), dtype=weights.dtype, device=device)

    def step(rows: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        value = loss(rows)
        (value * scale).backward()
        optimizer.step()
        sum_of_losses.add_(value.detach())

    replayed = None if draws_from is None or not on_gpu else Replayed(step, full, device, draws_from)
    total, update, unchecked = plan.n_epochs * -(-n // full), 0, 0
    average = [p.detach().clone() for p in learned] if plan.averaging else None
    history: list[dict[str, float]] = []
    losses: list[Tensor] = []
    before = [p.detach().clone() for p in learned]
    best, best_state, best_pass = (math.inf, math.inf), None, 0
    for number in range(1, plan.n_epochs + 1):
        sum_of_losses.zero_()
        for rows in rng.permutation(n).to(device).split(full):
            falling = (1 + math.cos(math.pi * update / total)) / 2 if plan.schedule == "cosine" else 1.0
            for group in optimizer.param_groups:
                if on_gpu:
                    group["lr"].fill_(plan.learning_rate * falling)
                else:
                    group["lr"] = plan.learning_rate * falling
            if replayed is not None and len(rows) == full:
                replayed(rows)
            else:
                step(rows)
            update += 1
            if average is not None:
                # A running mean over few updates at first, over more and more until `averaging` is the limit.
                share = max(1 - plan.averaging, 1 / (1 + update / 10))
                with torch.no_grad():
                    torch._foreach_lerp_(average, tuple(learned), share)
        losses.append(sum_of_losses / weights.sum())
        unchecked += -(-n // full)
        if not on_gpu or unchecked >= _UPDATES_UNCHECKED or number == plan.n_epochs:
            unchecked = 0
            _check(losses[-1], number, plan, learned, before)
        row: dict[str, float] = {"epoch": number}
        if score is not None:
            with _swapped(learned, average):
                found = score()
                row |= {"validation_error": found[0], "validation_loss": found[1]}
                if found < best:
                    best, best_pass = found, number
                    best_state = [p.detach().clone() for p in learned]
        history.append(row)
        if score is not None and plan.patience is not None and number - best_pass >= plan.patience:
            _check(losses[-1], number, plan, learned, before)
            break
    final = best_state if best_state is not None else average
    if final is not None:
        assign(learned, final)
    means = torch.stack(losses).tolist() if losses else []
    return [{"epoch": row.pop("epoch"), "loss": mean, **row} for row, mean in zip(history, means, strict=True)]


def _check(loss: Tensor, number: int, plan: Plan, learned: Sequence[nn.Parameter], before: Sequence[Tensor]) -> None:
    """Refuse a loss that is not finite; the parameters are then as they were at the start."""
    if not math.isfinite(float(loss)):
        assign(learned, before)
        raise DivergenceError(f"pass {number}: the loss is not finite. Lower learning_rate={plan.learning_rate:g}")


class Replayed:
    """An update of a full batch as a CUDA graph.

    Some updates are made launch by launch, which creates the optimiser's state; then one is captured.

    Parameters
    ----------
    step : callable
        The update, from row numbers (batch_size,).
    batch_size : int
        Number of rows.
    device : torch.device
        Where.
    draws_from : sequence of RandomSource
        Streams that the update draws from.
    """

    _EAGER_UPDATES = 3

    def __init__(
        self, step: Callable[[Tensor], None], batch_size: int, device: torch.device, draws_from: Sequence[RandomSource]
    ) -> None:
        self._step, self._streams = step, draws_from
        self._rows = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._eager: float = self._EAGER_UPDATES
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, rows: Tensor) -> None:
        """Make the update for these rows."""
        self._rows.copy_(rows)
        if self._graph is None and self._eager <= 0:
            self._capture()
        if self._graph is None:
            self._eager -= 1
            self._step(self._rows)
        else:
            self._graph.replay()

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        before = [stream.state_dict() for stream in self._streams]
        for stream in self._streams:
            stream.register_with(graph)
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                self._step(self._rows)
        except RuntimeError as error:
            self._eager = math.inf
            for stream, state in zip(self._streams, before, strict=True):
                stream.part_from_graphs(state)
            reason = str(error).splitlines()[0]
            warnings.warn(f"this network goes without CUDA graphs: {reason}", RuntimeWarning, stacklevel=2)
            return
        self._graph = graph


class _swapped:  # noqa: N801  (a context manager)
    """Let parameters hold other values within, if there are any."""

    def __init__(self, parameters: Sequence[nn.Parameter], values: Sequence[Tensor] | None) -> None:
        self.parameters, self.values = parameters, values

    def __enter__(self) -> None:
        if self.values is not None:
            self.own = [p.detach().clone() for p in self.parameters]
            assign(self.parameters, self.values)

    def __exit__(self, *error: object) -> None:
        if self.values is not None:
            assign(self.parameters, self.own)


@torch.no_grad()
def assign(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Copy values into parameters."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
