"""The runner of all studies: compute the runs of a plan that are not stored yet, in one process or several.

A command that is killed loses only the runs that it was computing. The same command then resumes with the missing runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, ClassVar

import torch

import mvrbm
from mvrbm.interrupt import INTERRUPTS
from studies.arguments import say
from studies.runs import Place, Run, RunError

__all__ = ["Summary", "run_module", "run_parts", "run_plan"]

# Seconds between checks of a worker that its parent process is alive.
_WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class Summary:
    """Names of the runs of a plan by what became of them."""

    stored: tuple[str, ...]  # stored now, by this command or earlier
    computed: tuple[str, ...]  # computed by this command
    failed: Mapping[str, str]  # failed, with the reason
    lacking: Mapping[str, str]  # skipped, with the packages that are not installed
    left: tuple[str, ...]  # not started: the budget was used up, or a run that they read is missing
    KINDS: ClassVar[tuple[str, ...]] = ("stored", "computed", "failed", "left", "lacking")

    def counts(self) -> dict[str, int]:
        """Return the number of runs of each kind."""
        return {kind: len(getattr(self, kind)) for kind in self.KINDS}

    def raise_failures(self) -> None:
        """Raise :class:`RunError` if a run failed."""
        if self.failed:
            name, reason = next(iter(self.failed.items()))
            total = len(self.failed) + len(self.stored)
            raise RunError(f"{len(self.failed)} of {total} runs failed; the first: {name}: {reason}")


def run_plan(
    plan: Sequence[Run], place: Place, *, jobs: int = 1, budget: float | None = None, say: Callable[[str], None] = say
) -> Summary:
    """Compute the runs of a plan that are not stored.

    Parameters
    ----------
    plan : sequence of Run
        The runs, most important first. A run is computed after the runs that it reads, whatever its position.
    place : Place
        Where to compute them.
    jobs : int
        Number of processes. Runs that measure time run at the end, one at a time.
    budget : float, optional
        Seconds after which no further run is started.
    say : callable, optional
        Receives one line per run. Default: print to standard error.

    Raises
    ------
    KeyboardInterrupt, Terminated
        After Ctrl-C or SIGTERM. Finished runs are stored.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if budget is not None and not budget > 0:
        raise ValueError(f"budget must be positive, got {budget}")
    names = [run.name for run in plan]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"runs must have unique names, got several of {repeated}")
    end = math.inf if budget is None else time.monotonic() + budget
    with place.store.locked():
        progress = _Progress(plan, place, say, jobs)
        try:
            together = [run for run in progress.missing if not run.alone]
            if jobs > 1:
                _in_processes(progress, together, end)
            else:
                _one_by_one(progress, together, end)
            _one_by_one(progress, [run for run in progress.missing if run.alone], end)
        except INTERRUPTS:
            progress.say(
                f"interrupted: {len(progress.stored)} of {len(plan)} runs are stored, repeat the command to resume"
            )
            raise
    return progress.summary(late=time.monotonic() > end)


class _Progress:
    """Which runs of a plan are stored, missing and failed so far."""

    def __init__(self, plan: Sequence[Run], place: Place, say: Callable[[str], None], jobs: int) -> None:
        self.plan = plan
        self.place = place
        self.say = say
        self.jobs = jobs
        self.stored = {run.name for run in plan if place.store.has(run)}
        self.missing = [run for run in plan if run.name not in self.stored]
        self.computed: list[str] = []
        self.failed: dict[str, str] = {}
        self.lacking = {run.name: ", ".join(run.lacks) for run in self.missing if run.lacks}
        self.began = time.monotonic()
        if self.stored:
            say(f"{len(self.stored)} of {len(plan)} runs are stored")
        for packages in sorted(set(self.lacking.values())):
            count = list(self.lacking.values()).count(packages)
            say(f"skipping {count} runs that need {packages}, which is not installed")

    def next_of(self, queue: list[Run]) -> Run | None:
        """Remove from the queue the first run that can be started, and return it."""
        for run in queue:
            ready = all(other.name in self.stored or self.place.store.has(other) for other in run.after)
            if run.name not in self.lacking and ready:
                queue.remove(run)
                return run
        return None

    def finish(self, run: Run, seconds: float) -> None:
        self.stored.add(run.name)
        self.computed.append(run.name)
        total = time.monotonic() - self.began
        self.say(f"[{len(self.stored)}/{len(self.plan)}] {run.name}: {seconds:.1f} s ({total:.0f} s in total)")

    def fail(self, run: Run, error: BaseException) -> None:
        self.failed[run.name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.say(f"{run.name} failed: {self.failed[run.name]}")

    def summary(self, *, late: bool) -> Summary:
        left = [run.name for run in self.plan if run.name not in {*self.stored, *self.failed, *self.lacking}]
        if left:
            self.say(f"{len(left)} runs are left" + (": the budget is used up" if late else ""))
        return Summary(tuple(sorted(self.stored)), tuple(self.computed), self.failed, self.lacking, tuple(left))


def _one_by_one(progress: _Progress, queue: list[Run], end: float) -> None:
    while time.monotonic() < end and (run := progress.next_of(queue)) is not None:
        try:
            seconds = _compute(run, progress.place, 1)
        except Exception as error:  # the other runs can still be computed
            progress.fail(run, error)
        else:
            progress.finish(run, seconds)


def _in_processes(progress: _Progress, queue: list[Run], end: float) -> None:
    others = set(multiprocessing.active_children())
    with _one_thread_per_process():
        pool = ProcessPoolExecutor(progress.jobs, multiprocessing.get_context("spawn"), _start_worker, (os.getpid(),))
        running: dict[Future[float], Run] = {}
        try:
            while True:
                while len(running) < progress.jobs and time.monotonic() < end:
                    run = progress.next_of(queue)
                    if run is None:
                        break
                    with _block_interrupts():
                        running[pool.submit(_compute, run, progress.place, progress.jobs)] = run
                if not running:
                    break
                _wait_for_one(progress, running)
        except BrokenProcessPool as error:
            names = ", ".join(sorted(run.name for run in running.values()))
            raise RunError(
                f"a process died while computing one of {names}, perhaps for lack of memory: use fewer jobs than "
                f"{progress.jobs}. Finished runs are stored."
            ) from error
        except BaseException:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _wait_for_one(progress: _Progress, running: dict[Future[float], Run]) -> None:
    """Wait until a run is finished, and remove all finished runs from `running`."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        run = running[future]
        error = future.exception()
        if isinstance(error, (BrokenProcessPool, *INTERRUPTS)):
            raise error
        del running[future]
        if error is None:
            progress.finish(run, future.result())
        else:
            progress.fail(run, error)


@contextlib.contextmanager
def _one_thread_per_process() -> Iterator[None]:
    """Start processes with one thread each. With more threads they would compete for the cores."""
    former = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # processes inherit the environment
    try:
        yield
    finally:
        if former is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = former


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    """Start child processes with SIGINT and SIGTERM blocked, so that only the parent handles them.

    Children inherit blocked signals. The parent, which unblocks them afterwards, kills the children.
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
        os._exit(1)  # the parent was killed, so nobody needs the result

    threading.Thread(target=watch, daemon=True).start()


def _compute(run: Run, place: Place, jobs: int) -> float:
    """Compute and store a run, and return the seconds that it took."""
    began = time.perf_counter()
    outcome = run.compute(run.settings, place)
    seconds = time.perf_counter() - began
    place.store.write(run, outcome, {"seconds": round(seconds, 3), "on": {**_about(place.device), "jobs": jobs}})
    return seconds


def _about(device: str) -> dict[str, Any]:
    """Describe the computer and the versions."""
    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"CPU ({platform.machine()}), {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "mvrbm": mvrbm.__version__,
    }


def run_parts(
    plan: Sequence[Run],
    parts: Sequence[str],
    place: Place,
    *,
    only: str | None = None,
    jobs: int = 1,
    budget: float | None = None,
) -> dict[str, int]:
    """Compute the missing runs of some groups, one group after the other.

    Parameters
    ----------
    plan : sequence of Run
        All runs of a study. Names are unique within a group.
    parts : sequence of str
        The groups to compute, in this order.
    place, jobs, budget
        As for :func:`run_plan`. The budget is for all groups together.
    only : str, optional
        Compute only the runs whose name contains this text.

    Returns
    -------
    dict
        Numbers of runs, as in :meth:`Summary.counts`.

    Raises
    ------
    RunError
        If a run failed. The others are stored.
    """
    began = time.monotonic()
    totals = dict.fromkeys(Summary.KINDS, 0)
    summaries = []
    for part in parts:
        chosen = [run for run in plan if run.group == part and (only or "") in run.name]
        left = None if budget is None else max(1e-9, budget - (time.monotonic() - began))
        summaries.append(run_plan(chosen, place, jobs=jobs, budget=left))
        totals = {kind: totals[kind] + count for kind, count in summaries[-1].counts().items()}
    for summary in summaries:
        summary.raise_failures()
    return totals


def run_module(module: str, argument: str, processes: int = 1) -> Any:
    """Run a module of the studies in new processes of one thread each, and return what the main one prints as JSON.

    Parameters
    ----------
    module : str
        Name of the module, such as ``"studies.distributed"``.
    argument : str
        Its only argument.
    processes : int
        Number of processes. ``torchrun`` starts them if there are several.
    """
    command = ["-m", module, argument]
    if processes > 1:
        launcher = ["torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(processes)]
        command = ["-m", *launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", *command]
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
    )
    if done.returncode:
        raise RuntimeError(f"the processes of {module} failed: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
