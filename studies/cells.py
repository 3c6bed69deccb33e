"""Long experiments in small pieces: cells, and the stores of their results.

A :class:`Cell` is a deterministic unit of work: a function and its settings. The stores differ in their files. A
:class:`Store` has one JSON file per cell, with arrays or a model next to it, and a cell counts as missing if its
settings have changed. :class:`Rows` has one JSON file per group with one row per cell, and goes by the cell's name
alone. `studies.runner` computes the missing cells. Nothing here depends on what the cells compute.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

import mvrbm
from mvrbm.errors import StorageError
from mvrbm.io.atomic import replace_file
from mvrbm.saving import read_tensors

__all__ = ["Cell", "CellError", "Outcome", "Place", "Rows", "Store", "complete", "planned", "read_object", "write_json"]

# Settings that had another name in earlier versions, as the keys of stored runs may still have them.
_FORMER_NAMES = {
    "n_iter": "n_epochs",
    "preset": "recipe",
    "centring": "centering",
    "normalised": "normalized",
    "unlabelled_batch_size": "unlabeled_batch_size",
}


class CellError(ValueError):
    """A run that cannot continue, or that ended without all of its cells."""


# -- what a cell is ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result of a cell: numbers, and arrays or a model (anything that `mvrbm.save` takes) if it has any."""

    numbers: Mapping[str, Any]
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    machine: Any = None


@dataclass(frozen=True)
class Cell:
    """A unit of work.

    Parameters
    ----------
    name : str
        Unique name. In a :class:`Store` the name of its file: letters, digits, dots and dashes.
    group : str
        The group that it belongs to; runs can be limited to groups.
    work : callable
        A function of a module, called with `settings` and the :class:`Place`.
    settings : mapping
        Plain values that determine the result. If they change, the cell is computed again.
    after : tuple of Cell
        Cells whose results it reads. Their settings count as its own.
    needs : tuple of str
        Packages that it requires. Where one is missing, the cell is skipped.
    alone : bool
        Whether it measures time, and so must not run at the same time as other cells.
    """

    name: str
    group: str
    work: Callable[[Mapping[str, Any], Place], Outcome]
    settings: Mapping[str, Any]
    after: tuple[Cell, ...] = ()
    needs: tuple[str, ...] = ()
    alone: bool = False

    @property
    def key(self) -> dict[str, Any]:
        """Everything that determines the result, as JSON would give it back."""
        key = {"work": self.work.__name__, "settings": dict(self.settings)}
        if self.after:
            key["after"] = {cell.name: cell.key for cell in self.after}
        plain: dict[str, Any] = json.loads(json.dumps(key))
        return plain

    @property
    def lacks(self) -> list[str]:
        """Required packages that are not installed."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


@dataclass(frozen=True)
class Place:
    """Where a cell is computed.

    Parameters
    ----------
    store : Store
        The results of other cells.
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
    """Results in a folder, one file per cell.

    Parameters
    ----------
    folder : Path
        Holds `NAME.json` for every finished cell, `NAME.safetensors` for its arrays and the folder `NAME.machine` for
        its model, if it has any. The JSON is written last: the files next to it are complete.
    """

    folder: Path
    leftovers: ClassVar[str] = ".?*"  # files of a run that was killed

    def record(self, cell: Cell) -> dict[str, Any] | None:
        """Return the stored record of a cell; None if it is missing, damaged, or of other settings."""
        record = read_object(self.folder / f"{cell.name}.json")
        return record if record is not None and _renamed(record.get("key")) == cell.key else None

    def has(self, cell: Cell) -> bool:
        """Whether a cell is stored."""
        return self.record(cell) is not None

    def numbers(self, cell: Cell) -> dict[str, Any]:
        """Return the numbers of a stored cell."""
        record = self.record(cell)
        if record is None:
            raise StorageError(f"cell '{cell.name}' is not in {self.folder}")
        numbers: dict[str, Any] = record["numbers"]
        return numbers

    def arrays(self, cell: Cell) -> dict[str, Tensor]:
        """Return the arrays of a stored cell."""
        return self.arrays_of(cell.name)

    def arrays_of(self, name: str) -> dict[str, Tensor]:
        """Return the arrays of a stored cell, by its name."""
        return read_tensors(self.folder / f"{name}.safetensors")

    def machine(self, cell: Cell, device: str = "cpu") -> Any:
        """Return the model of a stored cell."""
        return self.machine_of(cell.name, device)

    def machine_of(self, name: str, device: str = "cpu") -> Any:
        """Return the model of a stored cell, by its name."""
        return mvrbm.load(self.folder / f"{name}.machine", device=device)

    def write(self, cell: Cell, outcome: Outcome, about: Mapping[str, Any]) -> None:
        """Store the result of a cell, with further values `about` the computation."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{cell.name}.json").unlink(missing_ok=True)  # of former settings: never next to new arrays
        if outcome.machine is not None:
            mvrbm.save(outcome.machine, self.folder / f"{cell.name}.machine")
        if outcome.arrays:
            with replace_file(self.folder / f"{cell.name}.safetensors") as file:
                file.write(tensors_to_bytes({name: array.contiguous() for name, array in outcome.arrays.items()}))
        numbers = _finite(outcome.numbers)
        record = {"cell": cell.name, "group": cell.group, "key": cell.key, "numbers": numbers, **about}
        write_json(self.folder / f"{cell.name}.json", record)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of this folder, and remove the partial files of a run that was killed."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = (self.folder / ".lock").open("w")
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written: {error.strerror or error}") from error
        with handle:
            try:
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except ImportError:  # no such locks on this system
                pass
            except OSError as error:
                raise StorageError(f"another run is at work in {self.folder}: wait for it, or use another") from error
            for left in self.folder.glob(self.leftovers):
                if left.name != ".lock":
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield


@dataclass(frozen=True)
class Rows(Store):
    """Results in a folder, one file per group and one row per cell.

    Parameters
    ----------
    folder : Path
        Holds `GROUP.json`, an object of the cells' rows by name. A cell is stored if its name is there.
    models : Path
        Folder for the cells' models, `GROUP/NAME`.
    """

    models: Path
    leftovers: ClassVar[str] = ".mvrbm-*"  # the folder may be anyone's, and hold hidden files of its own

    def rows(self, group: str) -> dict[str, dict[str, Any]]:
        """Return the rows of a group by name."""
        return read_object(self.folder / f"{group}.json") or {}

    def record(self, cell: Cell) -> dict[str, Any] | None:
        """Return the row of a cell under ``"numbers"``, None if it is missing."""
        row = self.rows(cell.group).get(cell.name)
        return None if row is None else {"numbers": row}

    def model_folder(self, group: str, name: str) -> Path:
        """Return the folder of a cell's model."""
        return self.models / group / re.sub(r"[^A-Za-z0-9]+", "-", name)

    def write(self, cell: Cell, outcome: Outcome, about: Mapping[str, Any]) -> None:
        """Add the row of a cell to the file of its group."""
        if outcome.machine is not None:
            mvrbm.save(outcome.machine, self.model_folder(cell.group, cell.name))
        row = {"seconds": about["seconds"], "device": about["on"]["device"], **_finite(outcome.numbers)}
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{cell.group}.lock").open("w") as handle:  # another process may be writing
            with contextlib.suppress(ImportError):
                import fcntl

                fcntl.flock(handle, fcntl.LOCK_EX)
            rows = {**self.rows(cell.group), cell.name: row}
            write_json(self.folder / f"{cell.group}.json", dict(sorted(rows.items())))


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a file, None if there is no such file or it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError, json.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, value: Any) -> None:
    """Write plain values to a file, completely or not at all."""
    with replace_file(path) as file:
        file.write((json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def _renamed(key: Any) -> Any:
    """Return a stored key with today's names of settings."""
    if isinstance(key, dict):
        return {_FORMER_NAMES.get(name, name): _renamed(value) for name, value in key.items()}
    return [_renamed(value) for value in key] if isinstance(key, list) else key


def _finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the numbers that JSON does not have by None."""
    return {
        key: _finite(value)
        if isinstance(value, Mapping)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in numbers.items()
    }


# -- plans ------------------------------------------------------------------------------------------


def complete(store: Store, planned: Sequence[Cell], setting: str) -> list[Cell]:
    """Return the cells of those values of a setting for which all cells are stored whose packages are there."""
    open_ones = {cell.settings[setting] for cell in planned if not (store.has(cell) or cell.lacks)}
    return [cell for cell in planned if cell.settings[setting] not in open_ones and store.has(cell)]


def planned(
    makers: Mapping[str, Callable[[Any, int], Iterator[Cell]]],
    scale: Any,
    groups: Sequence[str],
    seeds: int,
    first_seed: int,
    most_seeds: Callable[[Cell], int],
) -> list[Cell]:
    """Return the cells of some groups and the cells that they read, in the order in which to compute them.

    Parameters
    ----------
    makers : mapping of str to callable
        All groups: from a scale and a seed to cells.
    scale : object
        First argument of the makers.
    groups : sequence of str
        The groups to plan.
    seeds, first_seed : int
        Number of seeds, and the first of them.
    most_seeds : callable
        Largest number of seeds of a cell.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    found: dict[str, Cell] = {}
    for group, make in makers.items():
        for number in range(seeds if group in groups else 0):
            for cell in make(scale, first_seed + number):
                if number < most_seeds(cell):
                    for one in (*cell.after, cell):
                        found.setdefault(one.name, one)
    return list(found.values())
