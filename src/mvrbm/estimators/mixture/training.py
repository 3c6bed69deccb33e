"""Train whitened mixtures on samples in memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mvrbm.devices import one_thread
from mvrbm.estimators.mixture.em import Fitting, Prior
from mvrbm.estimators.mixture.incomplete import Missing
from mvrbm.estimators.mixture.posterior import MOST_CANDIDATES, likely_log_density
from mvrbm.interrupt import finish_on_interrupt
from mvrbm.random import RandomSource
from mvrbm.units import WhitenedMixture

# Limits of the default number of epochs. With batches, they visit a number of samples that grows with the number of
# components.
_VISITS, _VISITS_PER_COMPONENT = 250_000, 35_000
_FEWEST_EPOCHS, _MOST_EPOCHS = 5, 200
# Fraction of these visits in runs that only choose settings.
_TRIAL = 0.3
# Number of epochs of expectation maximization after epochs of batches.
_FULL_EPOCHS = 2
# Number of epochs of expectation maximization that may revive components.
_SETTLED_EPOCHS = 5
# Maximum number of samples to train on without batches, and the batch size for more samples.
_MOST_AT_ONCE = 4000
_BATCH_SIZE = 500
# Initial learning rate of Adam, which falls to zero linearly.
_LEARNING_RATE = 0.03
# Training stops if the likelihood of held-out samples has improved by less than this, in nats per entry, over this
# number of epochs.
_WORTHWHILE = 1e-3
_PATIENCE = 10


class Stop:
    """Exception to raise after a signal has stopped training, if any."""

    error: BaseException | None = None

    @contextlib.contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """Record the first Ctrl-C or SIGTERM within this context instead of ending the program."""

        def notify(kind: type[BaseException]) -> None:
            self.error = kind()

        with finish_on_interrupt(notify):
            yield


@dataclass(frozen=True)
class Samples:
    r"""Samples with weights.

    Parameters
    ----------
    values : Tensor
        Samples of shape (n, \*shape). NaN entries are unknown.
    weights : Tensor
        Weights of shape (n,) with sum 1.
    total : float
        Number of samples that the weights stand for.
    """

    values: Tensor
    weights: Tensor
    total: float

    def __len__(self) -> int:
        return len(self.values)

    def part(self, rows: Tensor) -> Samples:
        """Return the samples at the given indices."""
        share = self.weights[rows].sum()
        return Samples(self.values[rows], self.weights[rows] / share, self.total * float(share))

    def standardized(self, unit: WhitenedMixture) -> Samples:
        """Return the samples in single precision, with the center and scale of a mixture as zero and one.

        Differences of values are computed in the precision of the samples. Those that are rounding errors compared with
        the scale become zero, so that constant entries remain constant.
        """
        values = (self.values - unit.center) * torch.exp(-unit.log_scale)
        values = torch.where(values.abs() < torch.finfo(torch.float32).eps, 0.0, values)
        return Samples(values.float(), self.weights.float(), self.total)

    def complete(self) -> Tensor:
        """Return the indices of the samples without unknown entries."""
        return torch.nonzero(~torch.isnan(self.values).flatten(1).any(1))[:, 0]


@dataclass
class Course:
    """History of a training run."""

    history: list[float] = field(default_factory=list)  # mean log-likelihood of the training samples per epoch
    held_out: list[float] = field(default_factory=list)  # mean log-likelihood of held-out samples after each epoch
    converged: bool = False


def _mean_gain(history: list[float]) -> float:
    """Return the mean increase of the log-likelihood per epoch, from the means of two successive periods.

    With unknown entries, which are redrawn in each epoch, the likelihoods of single epochs cannot be compared.
    """
    recent, before = history[-_PATIENCE:], history[-2 * _PATIENCE : -_PATIENCE]
    return (sum(recent) - sum(before)) / _PATIENCE**2 if len(before) == _PATIENCE else math.inf


@one_thread()
def log_likelihood(unit: WhitenedMixture, samples: Samples) -> float:
    """Return the weighted mean log-density of complete samples under their likely components and contrasts."""
    return float(samples.weights @ likely_log_density(unit, unit.rotate(samples.values)))


@dataclass(frozen=True)
class Training:
    """Training settings. See :class:`mvrbm.MatrixMixture`."""

    n_epochs: int | None
    batch_size: int | None
    shrinkage: float
    tol: float
    verbose: bool

    def run(
        self, unit: WhitenedMixture, samples: Samples, rng: RandomSource, stop: Stop, held: Samples | None = None
    ) -> Course:
        """Train a mixture.

        If samples are held out, training stops when their likelihood hardly improves, and only the likely components of
        each sample are considered.
        """
        from tqdm import tqdm

        x, n = samples.values, len(samples)
        batch_size = self.batch_size or (n if n <= _MOST_AT_ONCE else _BATCH_SIZE)
        batches = n > batch_size
        epochs = self.n_epochs or _MOST_EPOCHS
        if batches and self.n_epochs is None:
            visits = (_VISITS + _VISITS_PER_COMPONENT * unit.n_components) * (1 if held is None else _TRIAL)
            epochs = min(max(math.ceil(visits / n), _FEWEST_EPOCHS), _MOST_EPOCHS)
        missing = Missing(unit, x, rng) if bool(torch.isnan(x).any()) else None
        rotated = unit.rotate(x) if missing is None else missing.rotated()
        prior = Prior.of(unit, rotated, samples.weights, self.shrinkage / samples.total, samples.total)
        exact = held is None and not batches and unit.n_components <= MOST_CANDIDATES
        fitting = Fitting(unit, samples.weights, batch_size, prior, rng, exact=exact)
        course = Course(fitting.history)
        last = epochs - 1
        # Batches are followed by epochs of all samples, unless there is only one epoch.
        batch_epochs = epochs - min(_FULL_EPOCHS, last) if batches else 0
        with tqdm(total=epochs, unit="epoch", disable=held is not None or not self.verbose) as bar:
            for epoch in range(epochs):
                if stop.error is not None:
                    break
                if missing is not None and epoch:
                    rotated = missing.redraw()
                    fitting.forget()  # the likelihoods of different draws cannot be compared
                if epoch < batch_epochs:
                    rate, step = _LEARNING_RATE * (1 - epoch / batch_epochs), _LEARNING_RATE / batch_epochs
                    fitting.epoch_of_batches(rotated, rate, rate - step, lambda: stop.error is not None)
                else:
                    fitting.full_epoch(
                        rotated, update=epoch < last or missing is not None, may_revive=epoch < _SETTLED_EPOCHS
                    )
                bar.update()
                bar.set_postfix(score=f"{fitting.history[-1]:.4f}")
                if held is not None and (not batches or epoch == last):
                    course.held_out.append(log_likelihood(unit, held))
                    recent = course.held_out[-_PATIENCE:]
                    before = course.held_out[:-_PATIENCE]
                    if before and max(recent) < max(before) + _WORTHWHILE * x[0].numel():
                        break
                gain = fitting.gain if missing is None else _mean_gain(fitting.history)
                if not batches and _SETTLED_EPOCHS <= epoch < last and gain < self.tol:
                    course.converged = True
                    break
        if missing is None:
            fitting.undo_last_update()
        return course
