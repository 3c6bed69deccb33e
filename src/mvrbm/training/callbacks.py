"""Callbacks for progress reports, metrics, logging, early stopping and checkpoints. Hooks are named as in skorch."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol, TextIO

import numpy as np
import torch
from torch import Tensor

from mvrbm.data.sources import Batch, as_source
from mvrbm.distributed import World
from mvrbm.errors import InputError, StorageError
from mvrbm.extras import require
from mvrbm.io.atomic import lock, replace_file
from mvrbm.likelihood import log_likelihood_interval
from mvrbm.likelihood.pseudo import mean_pseudo_log_likelihood
from mvrbm.machine import BoltzmannMachine
from mvrbm.progress import remaining_time
from mvrbm.random import RandomSource
from mvrbm.sampling import mean_field
from mvrbm.training.part_folders import part_folder
from mvrbm.updates.state import TrainState
from mvrbm.validation import whole_number

# Default number of sites used to estimate the pseudo-likelihood.
_PSEUDO_SITES = 32


class TrainingRun(Protocol):
    """Attributes and methods of :class:`~mvrbm.training.Trainer` that callbacks can use."""

    state: TrainState
    world: World
    #: Number of epochs after which `fit` returns, including epochs from earlier calls.
    n_epochs: int
    #: Total number of epochs in the run if `fit` is called several times. If None or 0, `n_epochs` is used.
    planned_epochs: int | None
    #: Number of updates per epoch, or None if unknown.
    batches_per_epoch: int | None
    #: Set to True to stop training after the current batch.
    stop: bool
    #: Whether `fit` ended with an error.
    failed: bool

    @property
    def machine(self) -> BoltzmannMachine:
        """The machine being trained."""

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or SIGTERM stopped `fit`."""

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""

    @property
    def update(self) -> int:
        """Number of completed updates."""

    @property
    def history(self) -> list[dict[str, float]]:
        """Metrics logged by callbacks."""

    @property
    def callbacks(self) -> list[Callback]:
        """All callbacks in this run."""

    def log(self, row: dict[str, float]) -> None:
        """Add metrics to the history and pass them to the callbacks."""

    def save(self, folder: str | os.PathLike[str], keep: int = 2) -> Path:
        """Write a checkpoint to a checkpoint folder."""

    def check_owns(self, folder: str | os.PathLike[str]) -> None:
        """Raise StorageError if a folder contains checkpoints from another training run."""


class CallOrder(IntEnum):
    """When the trainer calls a hook of a callback, relative to the same hook of other callbacks."""

    BEFORE_CHECKPOINT = 0
    CHECKPOINT = 1
    AFTER_CHECKPOINT = 2


class Callback:
    """Base class for callbacks. All hooks do nothing by default."""

    #: Whether this callback is called before or after checkpoints are saved. Checkpoints include the changes made by
    #: callbacks that are called before.
    call_order: ClassVar[CallOrder] = CallOrder.BEFORE_CHECKPOINT
    #: Whether only the main process calls this callback.
    main_process_only: ClassVar[bool] = False
    #: Whether this callback may log metrics. Callbacks that monitor metrics require at least one callback that logs
    #: them.
    logs: ClassVar[bool] = True

    @property
    def every_batch(self) -> bool:
        """Whether this callback must be called for every batch.

        If no callback requires this, the backend may process whole epochs at once, which is faster.
        """
        own = [getattr(hook, "__func__", None) for hook in (self.on_batch_begin, self.on_batch_end)]
        return own != [Callback.on_batch_begin, Callback.on_batch_end]

    def on_train_begin(self, trainer: TrainingRun) -> None:
        """Called before the first batch in `fit`."""

    def on_train_end(self, trainer: TrainingRun) -> None:
        """Called when `fit` ends, even after an error, if :meth:`on_train_begin` raised no error."""

    def on_epoch_begin(self, trainer: TrainingRun) -> None:
        """Called before each epoch."""

    def on_epoch_end(self, trainer: TrainingRun) -> None:
        """Called after each complete epoch."""

    def on_batch_begin(self, trainer: TrainingRun, batch: Batch) -> None:
        """Called before each update."""

    def on_batch_end(self, trainer: TrainingRun, batch: Batch) -> None:
        """Called after each update."""

    def on_log(self, trainer: TrainingRun, row: dict[str, float]) -> None:
        """Called after metrics are added to the history."""

    def read_with(self, read: Callable[[Any], Any]) -> None:
        """Called by an estimator before training. `read` converts the estimator's data to arrays keyed by layer."""

    def for_layer(self, number: int) -> Callback:
        """Return the callback to use for one machine in a stack."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state, which is stored in checkpoints, as a JSON-serializable dictionary."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""


class Periodic(Callback):
    """Base class for callbacks that run every `every` updates, or after every epoch if `every` is None."""

    def __init__(self, every: int | None) -> None:
        self.every = None if every is None else whole_number(every, "every")

    def act(self, trainer: TrainingRun) -> None:
        """Perform the callback's action."""

    @property
    def every_batch(self) -> bool:
        return self.every is not None

    def on_batch_end(self, trainer: TrainingRun, batch: Batch) -> None:
        if self.every is not None and trainer.update % self.every == 0:
            self.act(trainer)

    def on_epoch_end(self, trainer: TrainingRun) -> None:
        if self.every is None:
            self.act(trainer)


class Reporter(Callback):
    """Base class for callbacks that display or write metrics. They run in the main process only."""

    main_process_only = True
    logs = False


class ProgressBar(Reporter):
    """Callback that shows a progress bar with the latest metrics on standard error.

    The bar also shows the estimated remaining time if the number of batches per epoch is known.
    """

    # Unless another callback requires every batch, the bar is updated once per epoch.
    every_batch = False

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._bar: Any = None

    def on_train_begin(self, trainer: TrainingRun) -> None:
        from tqdm import tqdm

        per_epoch = trainer.batches_per_epoch
        file = self._file or sys.stderr
        total = None if per_epoch is None else per_epoch * trainer.n_epochs
        self._bar = tqdm(total=total, initial=trainer.update, unit="update", file=file, mininterval=0.5, leave=True)

    def on_epoch_end(self, trainer: TrainingRun, batch: Batch | None = None) -> None:
        self._bar.update(trainer.update - self._bar.n)

    on_batch_end = on_epoch_end

    def on_log(self, trainer: TrainingRun, row: dict[str, float]) -> None:
        shown = {key: f"{value:.4g}" for key, value in row.items() if key not in ("epoch", "update", "seconds")}
        self._bar.set_postfix(shown, refresh=False)

    def on_train_end(self, trainer: TrainingRun) -> None:
        self._bar.close()


class EpochLines(Reporter):
    """Callback that prints one line per epoch to standard error, which suits log files better than a progress bar.

    The line of the first epoch in `fit` also estimates the remaining time if it exceeds a few seconds.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._first_epoch = 0

    def on_train_begin(self, trainer: TrainingRun) -> None:
        self._began = time.perf_counter()
        self._first_epoch = trainer.epoch + 1

    def on_epoch_end(self, trainer: TrainingRun) -> None:
        error = trainer.history[-1].get("reconstruction_error") if trainer.history else None
        detail = "" if error is None else f", reconstruction error {error:.4g}"
        if trainer.epoch == self._first_epoch:
            detail += remaining_time((trainer.n_epochs - trainer.epoch) * (time.perf_counter() - self._began))
        print(f"epoch {trainer.epoch} of {trainer.n_epochs}{detail}", file=sys.stderr, flush=True)


class Monitor(Periodic):
    """Callback that computes and logs training metrics.

    Parameters
    ----------
    data : array or mapping of arrays
        Training samples to compute the metrics on, in any format that `fit` accepts. A few hundred samples are enough.
    validation : array or mapping of arrays, optional
        Held-out samples. Pass about as many samples as in `data`.
    every : int, optional
        Number of updates between measurements. If None, metrics are computed after every epoch.
    pseudo_sites : int, optional
        Number of sites (entries of a sample) used to estimate the pseudo-likelihood. If the units can take many values,
        each site is evaluated on only a subset of the samples. An estimate takes about 0.1 s for 28x28 images. If 0,
        the pseudo-likelihood is not computed. Default: 32, or 0 if the units of the machine do not define it.
    annealing_steps : int
        Number of temperatures used to estimate the log-likelihood by annealed importance sampling (1000, for example).
        If 0, the log-likelihood is not computed.

    Notes
    -----
    The following metrics are logged. Errors, log-likelihoods and free energies are averaged over samples.

    - `reconstruction_error`: squared error after one mean-field update.
    - `pseudo_log_likelihood`: estimate of the pseudo-log-likelihood of the training samples.
    - `log_likelihood`, `log_likelihood_lower` and `log_likelihood_upper`: estimate of the log-likelihood and bounds of
      its interval. See :func:`~mvrbm.likelihood.log_likelihood_interval`. Reverse annealing starts from the first 100
      samples in `data`.
    - `dead` and `saturated`: fractions of hidden units whose means are within 0.01 of the lower or upper bound,
      respectively, for all samples. Only logged for hidden units with bounded values.
    - `validation_error`: reconstruction error on the held-out samples. Requires `validation`.
    - `free_energy_gap`: mean free energy of the held-out samples minus the mean free energy of the training samples.
      Requires `validation` and units that define a free energy. The gap grows when the model begins to overfit. It
      equals the mean log-likelihood of the training samples minus that of the held-out samples.
    - `seconds`: time since training started.
    """

    def __init__(
        self,
        data: Any,
        validation: Any = None,
        *,
        every: int | None = None,
        pseudo_sites: int | None = None,
        annealing_steps: int = 0,
    ) -> None:
        super().__init__(every)
        self.annealing_steps = whole_number(annealing_steps, "annealing_steps", 0)
        self.pseudo_sites = None if pseudo_sites is None else whole_number(pseudo_sites, "pseudo_sites", 0)
        self._used_sites = 0
        self._has_free_energy = False
        self._given = data
        self._given_validation = validation
        self._read: Callable[[Any], Any] | None = None
        self._data: dict[str, Tensor] = {}
        self._validation: dict[str, Tensor] | None = None
        self._began = 0.0

    @classmethod
    def on(cls, samples: Any, known: Any = None, *, n_samples: int = 500, **options: Any) -> Monitor:
        """Create a monitor that uses up to `n_samples` evenly spaced samples without missing entries.

        `samples` is an array of shape (n, ...), and `known` is a mask that is True for known entries. If `known` is
        None, all entries are known. Other arguments are passed to the constructor.
        """
        complete = np.arange(len(samples)) if known is None else np.flatnonzero(known.reshape(len(known), -1).all(1))
        if not len(complete):
            raise ValueError("Monitor requires at least one sample without missing entries")
        places = np.linspace(0, len(complete) - 1, min(len(complete), n_samples)).astype(int)
        return cls(samples[complete[np.unique(places)]], **options)

    def read_with(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def on_train_begin(self, trainer: TrainingRun) -> None:
        self._data = _all_of(self._as_layers(self._given), trainer)
        has_validation = self._given_validation is not None
        self._validation = _all_of(self._as_layers(self._given_validation), trainer) if has_validation else None
        self._read = None  # the next training run may use another estimator, or none
        self._check_metrics(trainer.machine)
        self._began = time.perf_counter()

    @torch.no_grad()
    def _check_metrics(self, machine: BoltzmannMachine) -> None:
        """Find out which metrics the machine defines. Raise ValueError if it does not define a requested metric."""
        sample = {name: x[:1] for name, x in self._data.items()}
        self._used_sites = _PSEUDO_SITES if self.pseudo_sites is None else self.pseudo_sites
        if self._used_sites:
            try:
                mean_pseudo_log_likelihood(machine, sample, n_sites=1, check=False)
            except ValueError:
                if self.pseudo_sites is not None:
                    raise
                self._used_sites = 0
        if self.annealing_steps:
            start = {name: x[:100] for name, x in self._data.items()}
            log_likelihood_interval(machine, sample, RandomSource(0), n_chains=2, n_steps=2, init=start, burn_in=1)
        try:
            machine.free_energy(sample, check=False)
            self._has_free_energy = True
        except ValueError:
            self._has_free_energy = False

    def _as_layers(self, data: Any) -> Any:
        """Convert data to arrays keyed by layer if an estimator has passed a function to `read_with`."""
        return data if self._read is None or isinstance(data, Mapping) else self._read(data)

    def act(self, trainer: TrainingRun) -> None:
        trainer.log(self.measure(trainer))

    @torch.no_grad()
    def measure(self, trainer: TrainingRun) -> dict[str, float]:
        """Return the current values of all metrics."""
        machine = trainer.machine
        data = self._data
        row = {"reconstruction_error": _reconstruction_error(trainer, data)}
        if self._used_sites:
            row["pseudo_log_likelihood"] = mean_pseudo_log_likelihood(
                machine, data, n_sites=self._used_sites, check=False
            )
        if self.annealing_steps:
            start = {name: x[:100] for name, x in data.items()}
            found = log_likelihood_interval(machine, data, RandomSource(0), n_steps=self.annealing_steps, init=start)
            row["log_likelihood"] = found.mean
            row |= {"log_likelihood_lower": found.lower, "log_likelihood_upper": found.upper}
        low, high = machine.hidden.statistic_bounds
        if high - low < float("inf"):
            mean = machine.hidden.statistic(machine.hidden_mean(data, check=False))
            row["dead"] = float((mean < low + 0.01).all(0).double().mean())
            row["saturated"] = float((mean > high - 0.01).all(0).double().mean())
        if self._validation is not None:
            row["validation_error"] = _reconstruction_error(trainer, self._validation)
            if self._has_free_energy:
                held_out = machine.free_energy(self._validation, check=False).mean()
                row["free_energy_gap"] = float(held_out - machine.free_energy(data, check=False).mean())
        row["seconds"] = time.perf_counter() - self._began
        return row


def _require_metrics(trainer: TrainingRun, name: str) -> None:
    if not any(callback.logs for callback in trainer.callbacks):
        raise ValueError(f"{name} requires logged metrics; add a Monitor callback")


def _all_of(data: Any, trainer: TrainingRun) -> dict[str, Tensor]:
    batches = [batch.visible for batch in as_source(data, trainer.machine).head(2**62)]
    return {name: torch.cat([batch[name] for batch in batches]) for name in trainer.machine.layers}


def _reconstruction_error(trainer: TrainingRun, data: dict[str, Tensor]) -> float:
    means = mean_field(trainer.machine, data, 1, check=False)
    return sum(float(((means[name] - x) ** 2).flatten(1).sum(1).mean()) for name, x in data.items())


class CSVLog(Reporter):
    """Callback that writes the metrics to a CSV file.

    A column is added when a metric is logged for the first time. It is empty in rows without this metric. A training
    run that continues or resumes also continues its file. Each machine in a stack writes a separate file, such as
    `log-layer-0.csv`.

    Parameters
    ----------
    path : path
        Output file.
    overwrite : bool
        Whether to replace an existing file that is not the log of this training run. If False, such a file raises
        `InputError` when training starts.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.overwrite = overwrite
        self._names: list[str] = []
        # File that the training run to resume wrote to.
        self._resumed: str | None = None

    def on_train_begin(self, trainer: TrainingRun) -> None:
        """Rewrite the file from the history. Rows logged after the resumed checkpoint are dropped."""
        resumed = self._resumed == str(self.path.resolve())
        if not (self.overwrite or resumed or self._is_unused() or self._continues(trainer.history)):
            raise InputError(
                f"{self.path} already exists and is not the log of this training run; choose another file or pass "
                "overwrite=True to replace it"
            )
        self._resumed = None
        self.path.unlink(missing_ok=True)
        self._names = []
        if trainer.history:
            self._rewrite(trainer.history)

    def _is_unused(self) -> bool:
        return not self.path.exists() or self.path.stat().st_size == 0

    def _continues(self, history: list[dict[str, float]]) -> bool:
        """Return whether the file starts with the rows in `history`. The last of these rows may be missing."""
        with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
            names, *rows = csv.reader(file)
        logged = [[str(row.get(name, "")) for name in names] for row in history[: len(rows)]]
        return bool(logged) and rows[: len(logged)] == logged

    def for_layer(self, number: int) -> Callback:
        path = self.path.with_stem(f"{self.path.stem}-layer-{number}")
        return CSVLog(path, overwrite=self.overwrite)

    def state_dict(self) -> dict[str, Any]:
        return {"file": str(self.path.resolve())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state.get("file")

    def on_log(self, trainer: TrainingRun, row: dict[str, float]) -> None:
        if set(row) <= set(self._names):
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._names).writerow(row)
        else:
            self._rewrite(trainer.history)

    def _rewrite(self, history: list[dict[str, float]]) -> None:
        """Replace the file by all rows, with a column for each metric."""
        self._names = list(dict.fromkeys(name for row in history for name in row))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._names)
        writer.writeheader()
        writer.writerows(history)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(self.path) as file:
            file.write(text.getvalue().encode())


class TensorBoard(Reporter):
    """Callback that writes the metrics as TensorBoard scalars.

    It requires the `tensorboard` package and another callback that logs metrics, such as :class:`Monitor`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def on_train_begin(self, trainer: TrainingRun) -> None:
        _require_metrics(trainer, "TensorBoard")
        board = require("torch.utils.tensorboard", "the TensorBoard callback", "logging")
        self._writer = board.SummaryWriter(str(self.folder), purge_step=trainer.update + 1)

    def on_log(self, trainer: TrainingRun, row: dict[str, float]) -> None:
        for key, value in row.items():
            if key != "update":
                self._writer.add_scalar(key, value, trainer.update)

    def on_train_end(self, trainer: TrainingRun) -> None:
        if self._writer is not None:
            self._writer.close()


class EarlyStopping(Callback):
    """Callback that stops training when a metric stops improving. Another callback must log the metric.

    Logged rows without the metric are ignored. If the first epoch with logged metrics does not contain the metric, the
    callback issues a warning.

    Parameters
    ----------
    metric : str
        Name of the metric to monitor. See :class:`Monitor`.
    patience : int
        Number of consecutive measurements without improvement after which training stops.
    larger_is_better : bool
        Whether larger values of the metric are better.
    restore_best : bool, default=False
        Whether to restore the parameters with the best value of the metric instead of keeping the last parameters. The
        best parameters are restored when training stops early or reaches the last epoch, but not after an interrupt.
        Checkpoints store both the best parameters so far and the current parameters, so a resumed run gives the same
        result.
    """

    logs = False
    # The best parameters are restored after a `Checkpoint` has saved the last ones, from which training can resume.
    call_order = CallOrder.AFTER_CHECKPOINT

    def __init__(
        self,
        metric: str = "validation_error",
        *,
        patience: int = 5,
        larger_is_better: bool = False,
        restore_best: bool = False,
    ) -> None:
        self.metric = metric
        self.patience = whole_number(patience, "patience")
        self.larger_is_better = larger_is_better
        self.restore_best = restore_best
        self.waited = 0
        self.best: float | None = None
        self._warned = False

    def on_train_begin(self, trainer: TrainingRun) -> None:
        """Check that another callback logs metrics. Stop immediately if the resumed run had already stopped early."""
        _require_metrics(trainer, "EarlyStopping")
        if trainer.update == 0:
            # The callback may have been used in another training run.
            self.best = None
            self.waited = 0
        if self.best is None:
            trainer.state.best = {}
        trainer.stop = trainer.stop or self.waited >= self.patience
        self._warned = False

    def on_epoch_end(self, trainer: TrainingRun) -> None:
        """Warn once if metrics have been logged, but not the monitored one. Its name may be misspelled."""
        logged = {name for row in trainer.history for name in row}
        if logged and self.metric not in logged and not self._warned:
            self._warned = True
            warnings.warn(
                f"EarlyStopping monitors '{self.metric}', but only {sorted(logged)} have been logged",
                UserWarning,
                stacklevel=2,
            )

    def on_log(self, trainer: TrainingRun, row: dict[str, float]) -> None:
        if self.metric not in row:
            return
        value = row[self.metric]
        sign = 1 if self.larger_is_better else -1
        if self.best is None or math.isnan(self.best) or sign * value > sign * self.best:
            self.best = value
            self.waited = 0
            if self.restore_best:
                trainer.state.keep_best()
        else:
            self.waited += 1
            trainer.stop = trainer.stop or self.waited >= self.patience

    def on_train_end(self, trainer: TrainingRun) -> None:
        """Restore the best parameters if `restore_best` is True and training is complete."""
        complete = self.waited >= self.patience or trainer.epoch >= (trainer.planned_epochs or trainer.n_epochs)
        if self.restore_best and complete and not trainer.failed and not trainer.interrupted:
            trainer.state.restore_best()

    def for_layer(self, number: int) -> Callback:
        settings = {"larger_is_better": self.larger_is_better, "restore_best": self.restore_best}
        return EarlyStopping(self.metric, patience=self.patience, **settings)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        best = state["best"]
        self.best = None if best is None else float(best)
        self.waited = whole_number(state["waited"], "waited", 0)


class Checkpoint(Periodic):
    """Callback that saves checkpoints at regular intervals and when training ends or is interrupted.

    Parameters
    ----------
    folder : path
        Checkpoint folder. See :mod:`mvrbm.training.checkpoints`.
    every : int, optional
        Number of updates between checkpoints. If None, a checkpoint is saved after every epoch.
    keep : int
        Number of checkpoints to keep. Older checkpoints are deleted.
    """

    call_order = CallOrder.CHECKPOINT
    logs = False

    def __init__(self, folder: str | os.PathLike[str], *, every: int | None = None, keep: int = 2) -> None:
        super().__init__(every)
        self.folder = Path(folder)
        self.keep = whole_number(keep, "keep")
        self._lock = contextlib.ExitStack()
        # Number of updates in the checkpoint that was saved last in this `fit`.
        self._saved: int | None = None

    def on_train_begin(self, trainer: TrainingRun) -> None:
        """Lock the folder. Raise StorageError if the folder contains checkpoints from another training run."""
        self._saved = None
        with trainer.world.raise_together(StorageError):
            if not trainer.world.is_main:
                return
            trainer.check_owns(self.folder)
            self._lock.close()
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock.enter_context(lock(self.folder))
            except BlockingIOError:
                raise StorageError(
                    f"another process is writing checkpoints to {self.folder}; wait for it to finish or choose "
                    "another folder"
                ) from None
            except OSError as error:
                raise StorageError(f"{self.folder} cannot be written: {error.strerror or error}") from error

    def for_layer(self, number: int) -> Callback:
        return Checkpoint(part_folder(self.folder, "layer", number), every=self.every, keep=self.keep)

    def act(self, trainer: TrainingRun) -> None:
        if trainer.update != self._saved:
            trainer.save(self.folder, self.keep)
            self._saved = trainer.update

    def on_train_end(self, trainer: TrainingRun) -> None:
        """Save the final state unless training failed, then unlock the folder."""
        try:
            if trainer.update > 0 and not trainer.failed:
                self.act(trainer)
        finally:
            self._lock.close()
