"""The one runner: computes, in order and in several processes if asked, the cells that are not stored yet.

A run that is killed loses the cells that were being computed; the same command resumes with the missing ones.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, ClassVar

import torch

import mvrbm
from mvrbm.interrupt import INTERRUPTS
from studies.arguments import say
from studies.cells import Cell, CellError, Place

__all__ = ["Summary", "run", "run_parts"]

_WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class Summary:
    """The outcome of a run, in names of cells."""

    stored: tuple[str, ...]  # after the run
    computed: tuple[str, ...]  # by this run
    failed: Mapping[str, str]  # with the reason
    lacking: Mapping[str, str]  # with the packages that are not installed
    left: tuple[str, ...]  # for the next run: the time was up, or a cell that they read is missing
    KINDS: ClassVar[tuple[str, ...]] = ("stored", "computed", "failed", "left", "lacking")

    def counts(self) -> dict[str, int]:
        """Return the number of cells of each kind."""
        return {kind: len(getattr(self, kind)) for kind in self.KINDS}

    def raise_failures(self) -> None:
        """Raise :class:`CellError` if a cell failed."""
        if self.failed:
            name, reason = next(iter(self.failed.items()))
            failed, tried = len(self.failed), len(self.failed) + len(self.stored)
            raise CellError(f"{failed} of {tried} cells failed; the first: {name}: {reason}")


def run(
    cells: Sequence[Cell], place: Place, *, jobs: int = 1, budget: float | None = None, say: Callable[[str], None] = say
) -> Summary:
    """Compute, in order, the cells that are not stored.

    Parameters
    ----------
    cells : sequence of Cell
        The cells, most important first. A cell is computed after the cells that it reads, whatever its position.
    place : Place
        Where to compute them.
    jobs : int
        Number of processes. Cells that measure time run at the end, one by one.
    budget : float, optional
        Seconds after which no further cell is started.
    say : callable, optional
        Receives one line per cell. Default: print to standard error.

    Raises
    ------
    KeyboardInterrupt, Terminated
        After Ctrl-C or SIGTERM. Finished cells are stored.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if budget is not None and not budget > 0:
        raise ValueError(f"budget must be positive, got {budget}")
    names = [cell.name for cell in cells]
    if len(set(names)) != len(names):
        raise ValueError(
            f"cells must have unique names, got several of {sorted({n for n in names if names.count(n) > 1})}"
        )
    end = math.inf if budget is None else time.monotonic() + budget
    with place.store.locked():
        state = _State(cells, place, say, jobs)
        try:
            together = [cell for cell in state.missing if not cell.alone]
            (_in_processes if jobs > 1 else _one_by_one)(state, together, end)
            _one_by_one(state, [cell for cell in state.missing if cell.alone], end)
        except INTERRUPTS:
            state.say(
                f"interrupted: {len(state.stored)} of {len(cells)} cells are stored, repeat the command to resume"
            )
            raise
    return state.summary(time.monotonic() > end)


class _State:
    """The progress of a run."""

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
            say(f"{count} cells need {packages}, which is not installed: skipped")

    def next_of(self, queue: list[Cell]) -> Cell | None:
        """Remove from the queue the first cell that can be started, and return it."""
        for cell in queue:
            there = all(other.name in self.stored or self.place.store.has(other) for other in cell.after)
            if cell.name not in self.lacking and there:
                queue.remove(cell)
                return cell
        return None

    def finish(self, cell: Cell, seconds: float) -> None:
        self.stored.add(cell.name)
        self.computed.append(cell.name)
        total = time.monotonic() - self.began
        self.say(f"[{len(self.stored)}/{len(self.cells)}] {cell.name}: {seconds:.1f} s ({total:.0f} s in total)")

    def fail(self, cell: Cell, error: BaseException) -> None:
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
        except Exception as error:  # the other cells can still be computed
            state.fail(cell, error)
        else:
            state.finish(cell, seconds)


def _in_processes(state: _State, queue: list[Cell], end: float) -> None:
    others = set(multiprocessing.active_children())
    # Processes inherit the environment. One thread each, or they wait for each other.
    former = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = ProcessPoolExecutor(state.jobs, multiprocessing.get_context("spawn"), _start_worker, (os.getpid(),))
    running: dict[Future[float], Cell] = {}
    try:
        while True:
            while len(running) < state.jobs and time.monotonic() < end:
                cell = state.next_of(queue)
                if cell is None:
                    break
                with _block_interrupts():
                    running[pool.submit(_compute, cell, state.place, state.jobs)] = cell
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running[future]
                error = future.exception()
                if isinstance(error, (BrokenProcessPool, *INTERRUPTS)):
                    raise error
                del running[future]
                if error is None:
                    state.finish(cell, future.result())
                else:
                    state.fail(cell, error)
    except BrokenProcessPool as error:
        raise CellError(
            f"a process died while it computed one of {', '.join(sorted(cell.name for cell in running.values()))}, "
            f"perhaps for lack of memory: use fewer jobs than {state.jobs}; finished cells are stored"
        ) from error
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.pop("OMP_NUM_THREADS") if former is None else os.environ.update(OMP_NUM_THREADS=former)


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    """Start processes that never receive Ctrl-C or SIGTERM: the parent receives them and kills the processes.

    The signals are blocked, which children inherit, and not ignored: the parent receives them afterwards.
    """
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _start_worker(parent: int) -> None:
    torch.set_num_threads(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)  # the parent was killed: nobody needs this result

    threading.Thread(target=watch, daemon=True).start()


def _compute(cell: Cell, place: Place, jobs: int) -> float:
    """Compute a cell, store it, and return the seconds that it took."""
    began = time.perf_counter()
    outcome = cell.work(cell.settings, place)
    seconds = time.perf_counter() - began
    place.store.write(cell, outcome, {"seconds": round(seconds, 3), "on": {**_about(place.device), "jobs": jobs}})
    return seconds


def _about(device: str) -> dict[str, Any]:
    """Describe the machine."""
    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()}), {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mvrbm": mvrbm.__version__,
    }


def run_parts(
    cells: Sequence[Cell],
    parts: Sequence[str],
    place: Place,
    *,
    only: str | None = None,
    jobs: int = 1,
    budget: float | None = None,
) -> dict[str, int]:
    """Compute the missing cells of some groups, one group after the other.

    Parameters
    ----------
    cells : sequence of Cell
        All cells of a study; names are unique within a group.
    parts : sequence of str
        The groups, in their order.
    place, jobs, budget
        As for :func:`run`; the budget is for all groups together.
    only : str, optional
        Compute only cells whose name contains this text.

    Returns
    -------
    dict
        Numbers of cells, as :meth:`Summary.counts` has them.

    Raises
    ------
    CellError
        If a cell failed. The others are stored.
    """
    began, totals, summaries = time.monotonic(), dict.fromkeys(Summary.KINDS, 0), []
    for part in parts:
        mine = [cell for cell in cells if cell.group == part and (only or "") in cell.name]
        left = None if budget is None else max(1e-9, budget - (time.monotonic() - began))
        summaries.append(run(mine, place, jobs=jobs, budget=left))
        totals = {kind: totals[kind] + count for kind, count in summaries[-1].counts().items()}
    for summary in summaries:
        summary.raise_failures()
    return totals
