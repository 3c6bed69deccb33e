"""What watches a training. Hooks are named as in skorch; each is given the trainer."""

from __future__ import annotations

import csv
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import torch
from torch import Tensor

from mvrbm.learning.checkpoint import newest
from mvrbm.learning.data import as_source
from mvrbm.likelihood import pseudo_log_likelihood
from mvrbm.sampling import mean_field

if TYPE_CHECKING:
    from mvrbm.learning.trainer import Trainer


class Callback:
    """Does nothing at every hook. Subclasses override what they need."""

    #: Whether it is told after all others, wherever it stands among them.
    comes_last: ClassVar[bool] = False
    #: Whether, of several processes, only the main one is to have it.
    main_process_only: ClassVar[bool] = False

    @property
    def wants_batches(self) -> bool:
        """Whether it has to be told of every batch. If nobody does, passes are made whole, which is faster."""
        own = [getattr(hook, "__func__", None) for hook in (self.on_batch_begin, self.on_batch_end)]
        return own != [Callback.on_batch_begin, Callback.on_batch_end]

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first batch of a `fit`."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last batch of a `fit`, however it ended."""

    def on_epoch_begin(self, trainer: Trainer) -> None:
        """Before a pass over the data."""

    def on_epoch_end(self, trainer: Trainer) -> None:
        """After a whole pass."""

    def on_batch_begin(self, trainer: Trainer, batch: Any) -> None:
        """Before an update."""

    def on_batch_end(self, trainer: Trainer, batch: Any) -> None:
        """After an update."""

    def on_log(self, trainer: Trainer, row: dict[str, float]) -> None:
        """When metrics were added to the history."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to remember, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned."""


class ProgressBar(Callback):
    """A bar on standard error: updates done, time left, and the latest metrics.

    The time left is that of the latest updates, carried on; it is not shown where the number of batches
    is not known.
    """

    main_process_only = True

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._bar: Any = None

    def on_train_begin(self, trainer: Trainer) -> None:
        """Open the bar."""
        from tqdm import tqdm

        per_epoch = trainer.batches_per_epoch
        total = None if per_epoch is None else per_epoch * trainer.n_epochs
        self._bar = tqdm(
            total=total,
            initial=trainer.update,
            unit="update",
            file=self._file or sys.stderr,
            mininterval=0.5,
            leave=True,
        )

    @property
    def wants_batches(self) -> bool:
        """No: it moves on at the end of a pass as well."""
        return False

    def on_batch_end(self, trainer: Trainer, batch: Any) -> None:
        """Move the bar."""
        self._bar.update(trainer.update - self._bar.n)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Move the bar."""
        self._bar.update(trainer.update - self._bar.n)

    def on_log(self, trainer: Trainer, row: dict[str, float]) -> None:
        """Show the metrics."""
        shown = {key: f"{value:.4g}" for key, value in row.items() if key not in ("epoch", "update", "seconds")}
        self._bar.set_postfix(shown, refresh=False)

    def on_train_end(self, trainer: Trainer) -> None:
        """Close the bar."""
        self._bar.close()


class Monitor(Callback):
    """Measures how learning goes, and logs it.

    Parameters
    ----------
    data : array or mapping of arrays
        Training samples to measure on; a few hundred will do.
    validation : array or mapping of arrays, optional
        Held-out samples, as many.
    every : int, optional
        Updates between measurements; after every pass if not given.
    pseudo_sites : int
        Sites that the pseudo-likelihood visits; 0 leaves it out.

    Notes
    -----
    Logged are `reconstruction_error` (squared, a sample, after one mean-field pass),
    `pseudo_log_likelihood` (a sample), `dead` and `saturated` (shares of hidden units whose mean is below
    0.01 or above 0.99 on every sample), and with validation data its reconstruction error and
    `free_energy_gap`: mean free energy of held-out data minus that of training data, which rises when
    the model begins to know its training data by heart.
    """

    def __init__(self, data: Any, validation: Any = None, *, every: int | None = None, pseudo_sites: int = 32) -> None:
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self.every, self.pseudo_sites = every, pseudo_sites
        self._given, self._given_validation = data, validation
        self._data: dict[str, Tensor] = {}
        self._validation: dict[str, Tensor] | None = None
        self._began = 0.0

    def on_train_begin(self, trainer: Trainer) -> None:
        """Take up the data."""
        self._data = _all_of(self._given, trainer)
        self._validation = None if self._given_validation is None else _all_of(self._given_validation, trainer)
        self._began = time.perf_counter()

    @property
    def wants_batches(self) -> bool:
        """If it measures in the middle of passes."""
        return self.every is not None

    def on_batch_end(self, trainer: Trainer, batch: Any) -> None:
        """Measure if it is time."""
        if self.every is not None and trainer.update % self.every == 0:
            trainer.log(self.measure(trainer))

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Measure if it is time."""
        if self.every is None:
            trainer.log(self.measure(trainer))

    @torch.no_grad()
    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Return all metrics now."""
        machine, data = trainer.machine, self._data
        row = {"reconstruction_error": _reconstruction_error(trainer, data)}
        if self.pseudo_sites:
            pseudo = pseudo_log_likelihood(machine, data, n_sites=self.pseudo_sites, check=False)
            row["pseudo_log_likelihood"] = float(pseudo.values.mean())
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


def _all_of(data: Any, trainer: Trainer) -> dict[str, Tensor]:
    batches = [batch.visible for batch in as_source(data, trainer.machine).head(2**62)]
    return {name: torch.cat([batch[name] for batch in batches]) for name in trainer.machine.layers}


def _reconstruction_error(trainer: Trainer, data: dict[str, Tensor]) -> float:
    means = mean_field(trainer.machine, data, 1, check=False)
    return sum(float(((means[name] - x) ** 2).flatten(1).sum(1).mean()) for name, x in data.items())


class CSVLog(Callback):
    """Writes what is logged to a CSV file. A resumed training goes on in the same file."""

    main_process_only = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def on_train_begin(self, trainer: Trainer) -> None:
        """Write the history anew: rows that it lacks are of a run that did not survive."""
        self.path.unlink(missing_ok=True)
        for row in trainer.history:
            self.on_log(trainer, row)

    def on_log(self, trainer: Trainer, row: dict[str, float]) -> None:
        """Add a row."""
        new = not self.path.exists()
        if new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            names = list(row)
        else:
            with self.path.open(newline="", encoding="utf-8") as file:
                names = next(csv.reader(file))
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=names, extrasaction="ignore")
            if new:
                writer.writeheader()
            writer.writerow(row)


class TensorBoard(Callback):
    """Writes what is logged as TensorBoard scalars. Needs the package `tensorboard`."""

    main_process_only = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def on_train_begin(self, trainer: Trainer) -> None:
        """Open the event file."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("the TensorBoard callback needs tensorboard: pip install 'mvrbm[logging]'") from error
        self._writer = SummaryWriter(str(self.folder), purge_step=trainer.update + 1)

    def on_log(self, trainer: Trainer, row: dict[str, float]) -> None:
        """Write the scalars."""
        for key, value in row.items():
            if key != "update":
                self._writer.add_scalar(key, value, trainer.update)

    def on_train_end(self, trainer: Trainer) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()


class EarlyStopping(Callback):
    """Ends training when a metric has not improved for some time.

    Parameters
    ----------
    metric : str
        What a :class:`Monitor` logs under this name.
    patience : int
        Measurements without improvement to wait for.
    larger_is_better : bool
        Which way is up.
    """

    def __init__(self, metric: str = "validation_error", *, patience: int = 5, larger_is_better: bool = False) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1, got {patience}")
        self.metric, self.patience, self.larger_is_better = metric, patience, larger_is_better
        self.best: float | None = None
        self.waited = 0

    def on_train_begin(self, trainer: Trainer) -> None:
        """Training that has been ended stays ended when it is resumed."""
        trainer.stop = trainer.stop or self.waited >= self.patience

    def on_log(self, trainer: Trainer, row: dict[str, float]) -> None:
        """Compare with the best so far."""
        if self.metric not in row:
            raise ValueError(f"EarlyStopping watches '{self.metric}', but only {sorted(row)} are logged")
        value = row[self.metric]
        sign = 1 if self.larger_is_better else -1
        if self.best is None or sign * value > sign * self.best:
            self.best, self.waited = value, 0
        else:
            self.waited += 1
            trainer.stop = trainer.stop or self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and how long ago it was."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting."""
        self.best, self.waited = state["best"], state["waited"]


class Checkpoint(Callback):
    """Saves the training from time to time, and when it ends or is interrupted.

    Parameters
    ----------
    folder : path
        Where to. See :mod:`mvrbm.learning.checkpoint` for what is there.
    every : int, optional
        Updates between checkpoints; after every pass if not given.
    keep : int
        How many of the last ones to keep.
    """

    comes_last = True

    def __init__(self, folder: str | os.PathLike[str], *, every: int | None = None, keep: int = 2) -> None:
        if keep < 1 or (every is not None and every < 1):
            raise ValueError(f"every and keep must be at least 1, got {every} and {keep}")
        self.folder, self.every, self.keep = Path(folder), every, keep

    def on_train_begin(self, trainer: Trainer) -> None:
        """Refuse to mix a new training with an old one."""
        with trainer.world.together(ValueError):
            if trainer.world.is_main and trainer.update == 0 and newest(self.folder) is not None:
                raise ValueError(
                    f"{self.folder} holds checkpoints of an earlier training: resume it, or choose another folder"
                )

    @property
    def wants_batches(self) -> bool:
        """If it saves in the middle of passes."""
        return self.every is not None

    def on_batch_end(self, trainer: Trainer, batch: Any) -> None:
        """Save if it is time."""
        if self.every is not None and trainer.update % self.every == 0:
            trainer.save(self.folder, self.keep)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Save if it is time."""
        if self.every is None:
            trainer.save(self.folder, self.keep)

    def on_train_end(self, trainer: Trainer) -> None:
        """Save where training ended, unless it broke."""
        if trainer.update > 0 and not trainer.broken:
            trainer.save(self.folder, self.keep)
