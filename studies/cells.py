"""Long experiments in small pieces: a store of finished cells, and a loop that computes those that are missing.

A :class:`Cell` is a deterministic unit of work: a function and its settings. Its result is one JSON file in
the :class:`Store`, written whole or not at all, with arrays or a machine beside it if the cell has any. A
cell that is there with the same settings is not computed again, so a run that was killed goes on where it was.
Nothing here knows what the cells compute.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvrbm import __version__
from mvrbm.io.atomic import usual_mode
from mvrbm.machine import BoltzmannMachine
from mvrbm.saving import StorageError, read_json, read_machine, read_tensors, save_pretrained, write_tensors

__all__ = ["Cell", "CellError", "Outcome", "Place", "Store", "Summary", "planned", "run", "whole"]

_WATCH_SECONDS = 1.0


class CellError(ValueError):
    """A run that cannot go on."""


# -- what a cell is ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a cell gives: numbers, and what is too large or too exact for JSON."""

    numbers: Mapping[str, Any]
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    machine: BoltzmannMachine | None = None


@dataclass(frozen=True)
class Cell:
    """A unit of work.

    Parameters
    ----------
    name : str
        Name of its file: letters, digits, dots and dashes.
    group : str
        What it is part of; runs can be limited to groups.
    work : callable
        A function of a module, called with `settings` and the :class:`Place`.
    settings : mapping
        Plain values that decide the result. If they change, the cell is computed anew.
    after : tuple of Cell
        Cells whose results it reads. Their settings count as its own.
    needs : tuple of str
        Packages without which it is left for another day.
    alone : bool
        Whether it measures time, and so must not share the machine with other cells.
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
        """What decides the result, as JSON would give it back."""
        key = {"work": self.work.__name__, "settings": dict(self.settings)}
        if self.after:
            key["after"] = {cell.name: cell.key for cell in self.after}
        plain: dict[str, Any] = json.loads(json.dumps(key))
        return plain

    @property
    def lacks(self) -> list[str]:
        """Packages that it needs and that are not here."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]


@dataclass(frozen=True)
class Place:
    """Where a cell works: the store it may read from, the device, and where data is."""

    store: Store
    device: str
    data_dir: str | None = None


# -- where results lie ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Store:
    """Results by cell, in a folder.

    Parameters
    ----------
    folder : Path
        Holds `NAME.json` for every finished cell, and `NAME.safetensors` or the model folder `NAME.machine`
        for those that have arrays or a machine. The JSON is written last: what it stands beside is whole.
    """

    folder: Path

    def record(self, cell: Cell) -> dict[str, Any] | None:
        """Return what is stored of a cell, None if it is missing, damaged, or of other settings."""
        path = self._json(cell)
        if not path.is_file():
            return None
        try:
            record = read_json(path, largest=None)
        except StorageError:
            return None
        return record if record.get("key") == cell.key else None

    def has(self, cell: Cell) -> bool:
        """Whether a cell need not be computed."""
        return self.record(cell) is not None

    def numbers(self, cell: Cell) -> dict[str, Any]:
        """Return the numbers of a cell that is there."""
        record = self.record(cell)
        if record is None:
            raise StorageError(f"cell '{cell.name}' is not in {self.folder}")
        numbers: dict[str, Any] = record["numbers"]
        return numbers

    def arrays(self, cell: Cell) -> dict[str, Tensor]:
        """Return the arrays of a cell that is there."""
        return read_tensors(self.folder / f"{cell.name}.safetensors")

    def machine(self, cell: Cell) -> BoltzmannMachine:
        """Return the machine of a cell that is there."""
        return read_machine(self.folder / f"{cell.name}.machine")

    def write(self, cell: Cell, outcome: Outcome, about: Mapping[str, Any]) -> None:
        """Store what a cell gave, with more that is worth knowing `about` it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._json(cell).unlink(missing_ok=True)  # of former settings: never beside new arrays
        if outcome.machine is not None:
            save_pretrained(outcome.machine, self.folder / f"{cell.name}.machine")
        if outcome.arrays:
            with whole(self.folder / f"{cell.name}.safetensors") as staging:
                write_tensors(outcome.arrays, staging)
        numbers = _finite(outcome.numbers)
        record = {"cell": cell.name, "group": cell.group, "key": cell.key, "numbers": numbers, **about}
        with whole(self._json(cell)) as staging:
            staging.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of this folder, and clear away what a killed one left half-written."""
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
            for left in self.folder.glob(".?*"):
                if left.name != ".lock":
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            yield

    def _json(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"


def _finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Put None in the place of what JSON has no number for."""
    return {
        key: _finite(value)
        if isinstance(value, Mapping)
        else None
        if isinstance(value, float) and not math.isfinite(value)
        else value
        for key, value in numbers.items()
    }


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """Give a file to write to, which takes its name once it has reached the disk."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    os.close(handle)
    staging = Path(name)
    try:
        yield staging
        staging.chmod(usual_mode(0o666))
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        staging.replace(target)
    finally:
        staging.unlink(missing_ok=True)


# -- the loop ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """What a run did, in names of cells."""

    stored: tuple[str, ...]  # all that are there now
    computed: tuple[str, ...]  # of these, by this run
    failed: Mapping[str, str]  # and why
    lacking: Mapping[str, str]  # packages that are not here
    left: tuple[str, ...]  # for the next run: the time was up, or what they come after is missing


def planned(
    makers: Mapping[str, Callable[[Any, int], Iterator[Cell]]],
    scale: Any,
    groups: Sequence[str],
    seeds: int,
    first_seed: int,
    most_seeds: Callable[[Cell], int],
) -> list[Cell]:
    """Return the cells of some groups, and those that they come after, in the order in which to compute them.

    Parameters
    ----------
    makers : mapping of str to callable
        All groups: from a scale and the number of a seed to cells.
    scale : object
        What the makers are given.
    groups : sequence of str
        Which of the groups.
    seeds, first_seed : int
        How many seeds, and the first of them.
    most_seeds : callable
        How many of them a cell has at most.
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


def run(
    cells: Sequence[Cell],
    place: Place,
    *,
    jobs: int = 1,
    budget: float | None = None,
    say: Callable[[str], None] | None = None,
) -> Summary:
    """Compute, in order, the cells that are not stored.

    Parameters
    ----------
    cells : sequence of Cell
        What is wanted, the most important first. A cell comes after those it reads, whatever its place.
    place : Place
        Where to work.
    jobs : int
        Processes that share the work. Cells that measure time run at the end, one by one.
    budget : float, optional
        Seconds after which no further cell is begun.
    say : callable, optional
        Gets a line a cell; standard error if not given.

    Raises
    ------
    KeyboardInterrupt
        At Ctrl-C. What was finished is stored.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if budget is not None and not budget > 0:
        raise ValueError(f"budget must be positive, got {budget}")
    names = [cell.name for cell in cells]
    if len(set(names)) != len(names):
        raise ValueError(f"cells need names of their own, got {sorted({n for n in names if names.count(n) > 1})}")
    end = math.inf if budget is None else time.monotonic() + budget
    with place.store.locked():
        state = _State(cells, place, say or _say, jobs)
        try:
            together = [cell for cell in state.missing if not cell.alone]
            (_in_processes if jobs > 1 else _one_by_one)(state, together, end)
            _one_by_one(state, [cell for cell in state.missing if cell.alone], end)
        except KeyboardInterrupt:
            state.say(f"interrupted: {len(state.stored)} of {len(cells)} cells are stored, the same command goes on")
            raise
    return state.summary(time.monotonic() > end)


class _State:
    """What of a run is done, and what can be begun."""

    def __init__(self, cells: Sequence[Cell], place: Place, say: Callable[[str], None], jobs: int) -> None:
        self.cells, self.place, self.say, self.jobs = cells, place, say, jobs
        self.stored = {cell.name for cell in cells if place.store.has(cell)}
        self.missing = [cell for cell in cells if cell.name not in self.stored]
        self.computed: list[str] = []
        self.failed: dict[str, str] = {}
        self.lacking = {cell.name: ", ".join(cell.lacks) for cell in self.missing if cell.lacks}
        self.began = time.monotonic()
        if self.stored:
            say(f"{len(self.stored)} of {len(cells)} cells are stored")
        for packages in sorted(set(self.lacking.values())):
            count = list(self.lacking.values()).count(packages)
            say(f"{count} cells need {packages}, which is not installed: left out")

    def next_of(self, queue: list[Cell]) -> Cell | None:
        """Take from the queue the first cell that can be begun."""
        for cell in queue:
            there = all(other.name in self.stored or self.place.store.has(other) for other in cell.after)
            if cell.name not in self.lacking and there:
                queue.remove(cell)
                return cell
        return None

    def finished(self, cell: Cell, seconds: float) -> None:
        self.stored.add(cell.name)
        self.computed.append(cell.name)
        total = time.monotonic() - self.began
        self.say(f"[{len(self.stored)}/{len(self.cells)}] {cell.name}: {seconds:.1f} s ({total:.0f} s in all)")

    def broke(self, cell: Cell, error: BaseException) -> None:
        self.failed[cell.name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.say(f"{cell.name} failed: {self.failed[cell.name]}")

    def summary(self, late: bool) -> Summary:
        left = [c.name for c in self.cells if c.name not in {*self.stored, *self.failed, *self.lacking}]
        if left:
            self.say(f"{len(left)} cells are left" + (": the time was up" if late else ""))
        return Summary(tuple(sorted(self.stored)), tuple(self.computed), self.failed, self.lacking, tuple(left))


def _one_by_one(state: _State, queue: list[Cell], end: float) -> None:
    while time.monotonic() < end and (cell := state.next_of(queue)) is not None:
        try:
            seconds = _compute(cell, state.place, 1)
        except Exception as error:  # one cell's trouble is not the others'
            state.broke(cell, error)
        else:
            state.finished(cell, seconds)


def _in_processes(state: _State, queue: list[Cell], end: float) -> None:
    others = set(multiprocessing.active_children())
    # Set here, for processes begin with the environment of their parent; one thread each, or they wait for each other.
    former = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = ProcessPoolExecutor(state.jobs, multiprocessing.get_context("spawn"), _begin_worker, (os.getpid(),))
    running: dict[Future[float], Cell] = {}
    try:
        while True:
            while len(running) < state.jobs and time.monotonic() < end:
                cell = state.next_of(queue)
                if cell is None:
                    break
                with _deaf_children():
                    running[pool.submit(_compute, cell, state.place, state.jobs)] = cell
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running[future]
                error = future.exception()
                if isinstance(error, BrokenProcessPool | KeyboardInterrupt):
                    raise error
                del running[future]
                if error is None:
                    state.finished(cell, future.result())
                else:
                    state.broke(cell, error)
    except BrokenProcessPool as error:
        raise CellError(
            f"a process died while it computed one of {', '.join(sorted(cell.name for cell in running.values()))}, "
            f"perhaps for lack of memory: use fewer jobs than {state.jobs}; what is finished is stored"
        ) from error
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.pop("OMP_NUM_THREADS") if former is None else os.environ.update(OMP_NUM_THREADS=former)


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Let processes that begin here never hear Ctrl-C, from their first moment: the parent hears it and ends them.

    It is held back here, which children inherit, and not ignored: the parent is to hear it afterwards.
    """
    resource_tracker.ensure_running()  # it would stop the holding back
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _begin_worker(parent: int) -> None:
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)  # the parent was killed: nobody waits for this result

    threading.Thread(target=watch, daemon=True).start()


def _compute(cell: Cell, place: Place, jobs: int) -> float:
    """Compute a cell, store it, and return how long it took."""
    began = time.perf_counter()
    outcome = cell.work(cell.settings, place)
    seconds = time.perf_counter() - began
    place.store.write(cell, outcome, {"seconds": round(seconds, 3), "on": {**_about(place.device), "jobs": jobs}})
    return seconds


def _about(device: str) -> dict[str, Any]:
    """Say on what kind of machine this is."""
    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()}), {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mvrbm": __version__,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
