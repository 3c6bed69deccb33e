"""Runs, the units of work of a study, and the stores of their results.

A :class:`Run` is a function and its settings; together they determine the result. A study's `plan` is a list of runs,
and `studies.runner` computes the runs that are not stored yet. A :class:`Store` writes one JSON file per run, with
arrays and a model next to it. :class:`Rows` writes one JSON file per group, with one row per run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

import mvrbm
from mvrbm.errors import StorageError
from mvrbm.io.atomic import replace_file
from mvrbm.saving import read_tensors

__all__ = [
    "Outcome",
    "Place",
    "Rows",
    "Run",
    "RunError",
    "Store",
    "complete",
    "read_object",
    "seeded_plan",
    "with_dependencies",
    "write_json",
]

# Settings that had another name in earlier versions, as the keys of stored runs may still have them.
_FORMER_NAMES = {
    "n_iter": "n_epochs",
    "preset": "recipe",
    "centring": "centering",
    "normalised": "normalized",
    "unlabelled_batch_size": "unlabeled_batch_size",
}


class RunError(ValueError):
    """Runs that failed, or that cannot be computed."""


# -- runs -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of a run: numbers, and optionally arrays and a model (anything that `mvrbm.save` accepts)."""

    numbers: Mapping[str, Any]
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    machine: Any = None


@dataclass(frozen=True)
class Run:
    """A function and its settings.

    Parameters
    ----------
    name : str
        Unique name. A :class:`Store` uses it as a file name, so it may contain letters, digits, dots and dashes.
    group : str
        Group that the run belongs to. Commands can be limited to some groups.
    compute : callable
        Function of a module that takes `settings` and a :class:`Place` and returns an :class:`Outcome`.
    settings : mapping
        Plain values that determine the result. A run whose settings have changed is computed again.
    after : tuple of Run
        Runs whose results this run reads. Their settings are part of its key.
    needs : tuple of str
        Packages that the run requires. It is skipped if one is not installed.
    alone : bool
        Whether the run measures time, and must not run at the same time as others.
    """

    name: str
    group: str
    compute: Callable[[Mapping[str, Any], Place], Outcome]
    settings: Mapping[str, Any]
    after: tuple[Run, ...] = ()
    needs: tuple[str, ...] = ()
    alone: bool = False

    @property
    def key(self) -> dict[str, Any]:
        """Everything that determines the result, as plain JSON values."""
        key = {"work": self.compute.__name__, "settings": dict(self.settings)}
        if self.after:
            key["after"] = {run.name: run.key for run in self.after}
        plain: dict[str, Any] = json.loads(json.dumps(key))
        return plain

    @property
    def lacks(self) -> list[str]:
        """Required packages that are not installed."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


@dataclass(frozen=True)
class Place:
    """Where runs are computed, and where they find data and the results of other runs.

    Parameters
    ----------
    store : Store
        Results of other runs.
    device : str
        Device to compute on.
    data_dir : str, optional
        Folder with the data sets.
    work : Path, optional
        Folder for checkpoints and other files that are not results.
    """

    store: Store
    device: str
    data_dir: str | None = None
    work: Path = Path("runs")


# -- stores -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """Results in a folder, with one file per run.

    Parameters
    ----------
    folder : Path
        Holds `NAME.json` for every finished run, `NAME.safetensors` for its arrays and the folder `NAME.machine` for
        its model. The JSON file is written last, so the files next to it are complete.
    """

    folder: Path
    #: Pattern of the partial files that a killed command leaves behind.
    leftovers: ClassVar[str] = ".?*"

    @classmethod
    def within(cls, folder: Path) -> Store:
        """Return the store in the subfolder `runs` of a folder; before version 0.3 the subfolder was `cells`."""
        former = folder / "cells"
        if former.is_dir() and not (folder / "runs").exists():
            former.rename(folder / "runs")
        return cls(folder / "runs")

    def record(self, run: Run) -> dict[str, Any] | None:
        """Return the stored record of a run, or None if it is missing, damaged or has other settings."""
        record = read_object(self.folder / f"{run.name}.json")
        return record if record is not None and _renamed(record.get("key")) == run.key else None

    def has(self, run: Run) -> bool:
        """Return whether a run is stored."""
        return self.record(run) is not None

    def numbers(self, run: Run) -> dict[str, Any]:
        """Return the numbers of a stored run."""
        record = self.record(run)
        if record is None:
            raise StorageError(f"{self.folder} does not hold the run '{run.name}'")
        numbers: dict[str, Any] = record["numbers"]
        return numbers

    def arrays(self, run: Run) -> dict[str, Tensor]:
        """Return the arrays of a stored run."""
        return self.arrays_of(run.name)

    def arrays_of(self, name: str) -> dict[str, Tensor]:
        """Return the arrays of the stored run with this name."""
        return read_tensors(self.folder / f"{name}.safetensors")

    def machine(self, run: Run, device: str = "cpu") -> Any:
        """Return the model of a stored run."""
        return self.machine_of(run.name, device)

    def machine_of(self, name: str, device: str = "cpu") -> Any:
        """Return the model of the stored run with this name."""
        return mvrbm.load(self.folder / f"{name}.machine", device=device)

    def write(self, run: Run, outcome: Outcome, about: Mapping[str, Any]) -> None:
        """Store the result of a run, with further values `about` the computation."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # Remove a record of former settings first: it must never stand next to new arrays.
        (self.folder / f"{run.name}.json").unlink(missing_ok=True)
        if outcome.machine is not None:
            mvrbm.save(outcome.machine, self.folder / f"{run.name}.machine", overwrite=True)
        if outcome.arrays:
            with replace_file(self.folder / f"{run.name}.safetensors") as file:
                file.write(tensors_to_bytes({name: array.contiguous() for name, array in outcome.arrays.items()}))
        numbers = _finite(outcome.numbers)
        record = {"run": run.name, "group": run.group, "key": run.key, "numbers": numbers, **about}
        write_json(self.folder / f"{run.name}.json", record)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other commands, and remove partial files that a killed command left behind."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = (self.folder / ".lock").open("w")
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written: {error.strerror or error}") from error
        with handle:
            try:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # the system has no such locks
                pass
            except OSError as error:
                raise StorageError(
                    f"another command is computing in {self.folder}: wait for it, or use another folder"
                ) from error
            for left in self.folder.glob(self.leftovers):
                if left.name != ".lock":
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield


@dataclass(frozen=True)
class Rows(Store):
    """Results in a folder, with one file per group and one row per run.

    Unlike :class:`Store`, it identifies a run by its name alone, whatever the settings.

    Parameters
    ----------
    folder : Path
        Holds `GROUP.json`, an object that maps the names of runs to their rows.
    models : Path
        Folder for the models of the runs, `GROUP/NAME`.
    """

    models: Path
    # The folder may belong to the user and contain other hidden files.
    leftovers: ClassVar[str] = ".mvrbm-*"

    def rows(self, group: str) -> dict[str, dict[str, Any]]:
        """Return the rows of a group by name."""
        return read_object(self.folder / f"{group}.json") or {}

    def record(self, run: Run) -> dict[str, Any] | None:
        """Return the row of a run under ``"numbers"``, or None if it is missing."""
        row = self.rows(run.group).get(run.name)
        return None if row is None else {"numbers": row}

    def model_folder(self, group: str, name: str) -> Path:
        """Return the folder of a run's model."""
        return self.models / group / re.sub(r"[^A-Za-z0-9]+", "-", name)

    def write(self, run: Run, outcome: Outcome, about: Mapping[str, Any]) -> None:
        """Add the row of a run to the file of its group."""
        if outcome.machine is not None:
            mvrbm.save(outcome.machine, self.model_folder(run.group, run.name), overwrite=True)
        row = {"seconds": about["seconds"], "device": about["on"]["device"], **_finite(outcome.numbers)}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{run.group}.lock").open("w") as handle:  # another process may be writing
            with contextlib.suppress(ImportError):
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX)
            rows = {**self.rows(run.group), run.name: row}
            write_json(self.folder / f"{run.group}.json", dict(sorted(rows.items())))


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, value: Any) -> None:
    """Write plain values to a JSON file atomically."""
    with replace_file(path) as file:
        file.write((json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def _renamed(key: Any) -> Any:
    """Return a stored key with the current names of settings."""
    if isinstance(key, dict):
        return {_FORMER_NAMES.get(name, name): _renamed(value) for name, value in key.items()}
    return [_renamed(value) for value in key] if isinstance(key, list) else key


def _finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinities, which JSON cannot represent, by None."""

    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _finite(value)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {key: convert(value) for key, value in numbers.items()}


# -- plans ------------------------------------------------------------------------------------------


def with_dependencies(runs: Iterable[Run]) -> list[Run]:
    """Return runs in their order without repetitions, each preceded by the runs that it reads.

    Raises
    ------
    ValueError
        If two different runs have the same name.
    """
    found: dict[str, Run] = {}
    for run in runs:
        for one in (*run.after, run):
            if found.setdefault(one.name, one).key != one.key:
                raise ValueError(f"two runs have the name {one.name}")
    return list(found.values())


def seeded_plan(
    makers: Mapping[str, Callable[[Any, int], Iterator[Run]]],
    scale: Any,
    groups: Sequence[str],
    seeds: int,
    first_seed: int,
    most_seeds: Callable[[Run], int],
) -> list[Run]:
    """Return the runs of some groups for several seeds, and the runs that they read.

    Parameters
    ----------
    makers : mapping of str to callable
        One function per group, in the order of computation. It takes the scale and a seed and yields runs.
    scale : object
        First argument of the functions.
    groups : sequence of str
        Groups to include.
    seeds, first_seed : int
        Number of seeds, and the first seed.
    most_seeds : callable
        Returns the largest number of seeds for a run.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    return with_dependencies(
        run
        for group, make in makers.items()
        if group in groups
        for number in range(seeds)
        for run in make(scale, first_seed + number)
        if number < most_seeds(run)
    )


def complete(store: Store, plan: Sequence[Run], setting: str) -> list[Run]:
    """Return the stored runs for those values of a setting that have no run left to compute.

    A run that needs a package that is not installed does not count as left.
    """
    incomplete = {run.settings[setting] for run in plan if not (store.has(run) or run.lacks)}
    return [run for run in plan if run.settings[setting] not in incomplete and store.has(run)]
