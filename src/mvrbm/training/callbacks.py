"""Callbacks: progress, metrics, logs, early stopping and checkpoints. Hooks are named as in skorch."""

from __future__ import annotations

import contextlib
import csv
import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, TextIO

import numpy as np
import torch
from torch import Tensor

from mvrbm.data.sources import as_source
from mvrbm.errors import StorageError
from mvrbm.extras import require
from mvrbm.io.atomic import lock
from mvrbm.likelihood import log_likelihood_interval, pseudo_log_likelihood
from mvrbm.random import RandomSource
from mvrbm.sampling import mean_field
from mvrbm.validation import whole_number

#: The :class:`~mvrbm.training.Trainer` that calls back: its module imports this one, so it is not named in the types.
Run = Any


class Callback:
    """Does nothing at every hook. Subclasses override what they need."""

    #: Whether it is called after all others.
    comes_last: ClassVar[bool] = False
    #: Whether, of several processes, only the main one calls it.
    main_process_only: ClassVar[bool] = False
    #: Whether it may log metrics. Callbacks that follow metrics require one that does.
    logs: ClassVar[bool] = True

    @property
    def every_batch(self) -> bool:
        """Whether it needs every batch. If no callback does, whole epochs are computed at once, which is faster."""
        own = [getattr(hook, "__func__", None) for hook in (self.on_batch_begin, self.on_batch_end)]
        return own != [Callback.on_batch_begin, Callback.on_batch_end]

    def on_train_begin(self, trainer: Run) -> None:
        """Before the first batch of a `fit`."""

    def on_train_end(self, trainer: Run) -> None:
        """After the last batch of a `fit`, however it ended."""

    def on_epoch_begin(self, trainer: Run) -> None:
        """Before an epoch."""

    def on_epoch_end(self, trainer: Run) -> None:
        """After a complete epoch."""

    def on_batch_begin(self, trainer: Run, batch: Any) -> None:
        """Before an update."""

    def on_batch_end(self, trainer: Run, batch: Any) -> None:
        """After an update."""

    def on_log(self, trainer: Run, row: dict[str, float]) -> None:
        """After metrics were added to the history."""

    def for_layer(self, number: int) -> Callback:
        """Return the callback that follows the training of one machine of a stack."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the state that `state_dict` returned."""


class Periodic(Callback):
    """Does something regularly: every so many updates, or after every epoch."""

    def __init__(self, every: int | None) -> None:
        self.every = None if every is None else whole_number(every, "every")

    def act(self, trainer: Run) -> None:
        """Measure, save, or whatever the callback is for."""

    @property
    def every_batch(self) -> bool:
        return self.every is not None

    def on_batch_end(self, trainer: Run, batch: Any) -> None:
        if self.every is not None and trainer.update % self.every == 0:
            self.act(trainer)

    def on_epoch_end(self, trainer: Run) -> None:
        if self.every is None:
            self.act(trainer)


class Reporter(Callback):
    """Shows or writes what others measure, on the main process."""

    main_process_only = True
    logs = False


class ProgressBar(Reporter):
    """A bar on standard error: updates done, time left where the number of batches is known, and latest metrics."""

    every_batch = False  # it is enough to move the bar at the end of an epoch

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._bar: Any = None

    def on_train_begin(self, trainer: Run) -> None:
        from tqdm import tqdm

        per_epoch, file = trainer.batches_per_epoch, self._file or sys.stderr
        total = None if per_epoch is None else per_epoch * trainer.n_epochs
        self._bar = tqdm(total=total, initial=trainer.update, unit="update", file=file, mininterval=0.5, leave=True)

    def on_epoch_end(self, trainer: Run, batch: Any = None) -> None:
        self._bar.update(trainer.update - self._bar.n)

    on_batch_end = on_epoch_end

    def on_log(self, trainer: Run, row: dict[str, float]) -> None:
        shown = {key: f"{value:.4g}" for key, value in row.items() if key not in ("epoch", "update", "seconds")}
        self._bar.set_postfix(shown, refresh=False)

    def on_train_end(self, trainer: Run) -> None:
        self._bar.close()


class EpochLines(Reporter):
    """Prints one line per epoch to standard error: for logs and pipes, where a progress bar is unreadable."""

    def on_epoch_end(self, trainer: Run) -> None:
        error = trainer.history[-1].get("reconstruction_error") if trainer.history else None
        detail = "" if error is None else f", reconstruction error {error:.4g}"
        print(f"epoch {trainer.epoch} of {trainer.n_epochs}{detail}", file=sys.stderr, flush=True)


class Monitor(Periodic):
    """Measures the progress of training, and logs it.

    Parameters
    ----------
    data : array or mapping of arrays
        Training samples to measure on; a few hundred are enough.
    validation : array or mapping of arrays, optional
        As many held-out samples.
    every : int, optional
        Updates between measurements. Default: after every epoch.
    pseudo_sites : int
        Number of sites for the pseudo-likelihood; 0 leaves it out.
    annealing_steps : int
        Number of temperatures for the log-likelihood by annealed importance sampling, such as 1000; 0 leaves it out.

    Notes
    -----
    The metrics are `reconstruction_error` (squared, per sample, after one mean-field update), `pseudo_log_likelihood`
    (per sample), `log_likelihood` (per sample) with `log_likelihood_lower` and `log_likelihood_upper` (see
    :func:`~mvrbm.likelihood.log_likelihood_interval`; reverse annealing starts at 100 of the training samples), `dead`
    and `saturated` (fractions of hidden units whose mean is below 0.01 or above 0.99 for every sample), and with
    validation data `validation_error` and `free_energy_gap`: mean free energy of held-out data minus that of training
    data, which rises when the model begins to overfit. The log-likelihood of held-out data is less by this gap.
    """

    def __init__(
        self,
        data: Any,
        validation: Any = None,
        *,
        every: int | None = None,
        pseudo_sites: int = 32,
        annealing_steps: int = 0,
    ) -> None:
        super().__init__(every)
        self.annealing_steps = whole_number(annealing_steps, "annealing_steps", 0)
        self.pseudo_sites = pseudo_sites
        self._given, self._given_validation = data, validation
        self._data: dict[str, Tensor] = {}
        self._validation: dict[str, Tensor] | None = None
        self._began = 0.0

    @classmethod
    def on(cls, samples: Any, known: Any = None, *, n_samples: int = 500, **options: Any) -> Monitor:
        """Return a monitor of up to `n_samples` evenly spaced training samples (n, ...) without missing entries.

        `known` is True where an entry is known (default: everywhere); other options are those of the class.
        """
        complete = np.arange(len(samples)) if known is None else np.flatnonzero(known.reshape(len(known), -1).all(1))
        if not len(complete):
            raise ValueError("a Monitor needs at least one sample without missing entries")
        places = np.linspace(0, len(complete) - 1, min(len(complete), n_samples)).astype(int)
        return cls(samples[complete[np.unique(places)]], **options)

    def on_train_begin(self, trainer: Run) -> None:
        self._data = _all_of(self._given, trainer)
        self._validation = None if self._given_validation is None else _all_of(self._given_validation, trainer)
        self._began = time.perf_counter()

    def act(self, trainer: Run) -> None:
        trainer.log(self.measure(trainer))

    @torch.no_grad()
    def measure(self, trainer: Run) -> dict[str, float]:
        """Return all metrics at this moment."""
        machine, data = trainer.machine, self._data
        row = {"reconstruction_error": _reconstruction_error(trainer, data)}
        if self.pseudo_sites:
            pseudo = pseudo_log_likelihood(machine, data, n_sites=self.pseudo_sites, check=False)
            row["pseudo_log_likelihood"] = float(pseudo.values.mean())
        if self.annealing_steps:
            rng, start = RandomSource(0, device=machine.like.device), {name: x[:100] for name, x in data.items()}
            found = log_likelihood_interval(machine, data, rng, n_steps=self.annealing_steps, init=start)
            row["log_likelihood"] = found.mean
            row |= {"log_likelihood_lower": found.lower, "log_likelihood_upper": found.upper}
        low, high = machine.hidden.statistic_bounds()
        if high - low < float("inf"):
            mean = machine.hidden.statistic(machine.hidden_mean(data, check=False))
            row["dead"] = float((mean < low + 0.01).all(0).double().mean())
            row["saturated"] = float((mean > high - 0.01).all(0).double().mean())
        if self._validation is not None:
            row["validation_error"] = _reconstruction_error(trainer, self._validation)
            held_out = machine.free_energy(self._validation, check=False).mean()
            row["free_energy_gap"] = float(held_out - machine.free_energy(data, check=False).mean())
        row["seconds"] = time.perf_counter() - self._began
        return row


def _require_metrics(trainer: Run, name: str) -> None:
    if not any(callback.logs for callback in trainer.callbacks):
        raise ValueError(f"{name} has no metrics to follow: add a Monitor callback")


def _all_of(data: Any, trainer: Run) -> dict[str, Tensor]:
    batches = [batch.visible for batch in as_source(data, trainer.machine).head(2**62)]
    return {name: torch.cat([batch[name] for batch in batches]) for name in trainer.machine.layers}


def _reconstruction_error(trainer: Run, data: dict[str, Tensor]) -> float:
    means = mean_field(trainer.machine, data, 1, check=False)
    return sum(float(((means[name] - x) ** 2).flatten(1).sum(1).mean()) for name, x in data.items())


class CSVLog(Reporter):
    """Writes the metrics to a CSV file. A resumed training run continues the same file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._names: list[str] = []

    def on_train_begin(self, trainer: Run) -> None:
        """Write the history again: other rows in the file are of a run that was lost."""
        self.path.unlink(missing_ok=True)
        self._names = []
        for row in trainer.history:
            self.on_log(trainer, row)

    def on_log(self, trainer: Run, row: dict[str, float]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            new, self._names = not self._names, self._names or list(row)
            writer = csv.DictWriter(file, fieldnames=self._names, extrasaction="ignore")
            if new:
                writer.writeheader()
            writer.writerow(row)


class TensorBoard(Reporter):
    """Writes the metrics as TensorBoard scalars. Requires the package `tensorboard`, and a callback that logs."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def on_train_begin(self, trainer: Run) -> None:
        _require_metrics(trainer, "TensorBoard")
        board = require("torch.utils.tensorboard", "the TensorBoard callback", "logging")
        self._writer = board.SummaryWriter(str(self.folder), purge_step=trainer.update + 1)

    def on_log(self, trainer: Run, row: dict[str, float]) -> None:
        for key, value in row.items():
            if key != "update":
                self._writer.add_scalar(key, value, trainer.update)

    def on_train_end(self, trainer: Run) -> None:
        if self._writer is not None:
            self._writer.close()


class EarlyStopping(Callback):
    """Stops training when a metric has not improved for some time. Requires a callback that logs the metric.

    Parameters
    ----------
    metric : str
        Name of a metric, such as those of a :class:`Monitor`.
    patience : int
        Number of measurements without improvement after which training stops.
    larger_is_better : bool
        Whether larger values are better.
    """

    logs = False

    def __init__(self, metric: str = "validation_error", *, patience: int = 5, larger_is_better: bool = False) -> None:
        self.metric, self.patience = metric, whole_number(patience, "patience")
        self.larger_is_better, self.waited = larger_is_better, 0
        self.best: float | None = None

    def on_train_begin(self, trainer: Run) -> None:
        """Check that metrics are logged. Training that was stopped stays stopped when it is resumed."""
        _require_metrics(trainer, "EarlyStopping")
        trainer.stop = trainer.stop or self.waited >= self.patience

    def on_log(self, trainer: Run, row: dict[str, float]) -> None:
        if self.metric not in row:
            raise ValueError(f"EarlyStopping follows '{self.metric}', but only {sorted(row)} are logged")
        value, sign = row[self.metric], 1 if self.larger_is_better else -1
        if self.best is None or sign * value > sign * self.best:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
            trainer.stop = trainer.stop or self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        best = state["best"]
        self.best = None if best is None else float(best)
        self.waited = whole_number(state["waited"], "waited", 0)


class Checkpoint(Periodic):
    """Saves the training run regularly, and when it ends or is interrupted.

    Parameters
    ----------
    folder : path
        Folder of the checkpoints; see :mod:`mvrbm.training.checkpoint`.
    every : int, optional
        Updates between checkpoints. Default: after every epoch.
    keep : int
        Number of checkpoints to keep.
    """

    comes_last = True
    logs = False

    def __init__(self, folder: str | os.PathLike[str], *, every: int | None = None, keep: int = 2) -> None:
        super().__init__(every)
        self.folder, self.keep = Path(folder), whole_number(keep, "keep")
        self._lock = contextlib.ExitStack()

    def on_train_begin(self, trainer: Run) -> None:
        """Lock the folder. Raise StorageError if a new training run would be mixed with another one."""
        with trainer.world.raise_together(StorageError):
            if not trainer.world.is_main:
                return
            if trainer.update == 0 and any(self.folder.glob("update-*")):
                raise StorageError(
                    f"{self.folder} holds checkpoints of an earlier training run: resume it, or choose another folder"
                )
            self._lock.close()
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock.enter_context(lock(self.folder))
            except BlockingIOError:
                raise StorageError(
                    f"another process writes checkpoints to {self.folder}: wait for it, or choose another folder"
                ) from None
            except OSError as error:
                raise StorageError(f"{self.folder} cannot be written: {error.strerror or error}") from error

    def for_layer(self, number: int) -> Callback:
        return Checkpoint(layer_folder(self.folder, number), every=self.every, keep=self.keep)

    def act(self, trainer: Run) -> None:
        trainer.save(self.folder, self.keep)

    def on_train_end(self, trainer: Run) -> None:
        """Save at the end of training, unless it failed, and unlock the folder."""
        try:
            if trainer.update > 0 and not trainer.broken:
                self.act(trainer)
        finally:
            self._lock.close()


def layer_folder(folder: str | os.PathLike[str], number: int) -> Path:
    """Return the folder for the checkpoints of one machine of a stack."""
    return Path(folder) / f"layer-{number}"
