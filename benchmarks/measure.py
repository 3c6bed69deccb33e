"""How time and memory are taken.

Machines are shared and noisy. So everything that is to be compared takes turns, round after round, and what is
reported is medians, the middle half, and ratios of medians from the same rounds.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.contestants import CONTESTANTS
from benchmarks.problems import Problem, digits, on_device

#: Makes so many passes.
Run = Callable[[int], None]

_MOST_PASSES = 100_000


# -- time -------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """Something to be timed.

    Parameters
    ----------
    make : callable
        Builds it and returns what makes so many passes.
    keep : bool
        Whether it stays between its turns. Otherwise it is built anew for each: for those that do not fit together.
    threads : int
        Threads it may use; 0 leaves that as it is.
    seconds : list of float
        Time of a pass, of every turn.
    failure : str, optional
        What went wrong, if anything did; it is not timed any more then.
    """

    make: Callable[[], Run]
    keep: bool = True
    threads: int = 0
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of times, in seconds."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, seconds: Sequence[float], scale: float = 1.0) -> Spread:
        """Take them from times, each multiplied by `scale`."""
        low, median, high = np.quantile(np.asarray(seconds) * scale, (0.25, 0.5, 0.75))
        return cls(float(median), float(low), float(high), len(seconds))


def take_turns(
    entries: Mapping[str, Entry],
    *,
    repetitions: int,
    min_seconds: float,
    most_seconds: float = 60.0,
    synchronise: Callable[[], object] = lambda: None,
) -> None:
    """Time all entries, one after the other, round after round. Results are in the entries.

    Parameters
    ----------
    entries : mapping of str to Entry
        What is timed. Each round starts at another one.
    repetitions : int
        Rounds.
    min_seconds : float
        A turn makes as many passes as take this long or somewhat longer, at least one.
    most_seconds : float
        An entry that has been timed three times and taken longer than this sits out further rounds.
    synchronise : callable
        Waits for the device.
    """
    kept: dict[str, Run] = {}
    passes: dict[str, int] = {}
    names = list(entries)
    for number in range(repetitions):
        turn = number % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            entry = entries[name]
            slow = len(entry.seconds) >= 3 and sum(entry.seconds) * passes[name] > most_seconds
            if slow or entry.failure is not None:
                continue
            try:
                with _threads(entry.threads):
                    _take_turn(name, entry, kept, passes, min_seconds, synchronise)
            except (ImportError, RuntimeError, ArithmeticError, MemoryError) as error:  # one's failure, not the run's
                entry.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                entry.seconds.clear()
                kept.pop(name, None)
            if not entry.keep:
                gc.collect()


def _take_turn(
    name: str,
    entry: Entry,
    kept: dict[str, Run],
    passes: dict[str, int],
    min_seconds: float,
    synchronise: Callable[[], object],
) -> None:
    run = kept.get(name)
    if run is None:
        run = entry.make()
        _timed(run, 1, synchronise)  # compiles, allocates, touches
        if entry.keep:
            kept[name] = run
    if name not in passes:
        # Doubled and doubled again, for what a run begins with, a capture say, tells nothing about a pass.
        count, took = 1, _timed(run, 1, synchronise)
        while took < min_seconds and count < _MOST_PASSES:
            growth = min(max(2, math.ceil(min_seconds / max(took, 1e-7))), 8)
            count = min(growth * count, _MOST_PASSES)
            took = _timed(run, count, synchronise)
        passes[name] = count
        entry.seconds.append(took / count)  # that was the turn
        return
    entry.seconds.append(_timed(run, passes[name], synchronise) / passes[name])


def _timed(run: Run, passes: int, synchronise: Callable[[], object]) -> float:
    synchronise()
    start = time.perf_counter()
    run(passes)
    synchronise()
    return time.perf_counter() - start


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let PyTorch, and the linear algebra of NumPy and SciPy, use so many threads within."""
    limits = importlib.import_module("threadpoolctl").threadpool_limits
    former = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with limits(count):
            torch.set_num_threads(count)
            yield
    finally:
        torch.set_num_threads(former)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    former = torch.get_num_threads()
    if count in (0, former):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Return the power of size with which time grows: the slope of a line through the logarithms.

    None if there are not two different sizes.
    """
    if len(sizes) != len(seconds):
        raise ValueError(f"sizes and seconds must be equally many, got {len(sizes)} and {len(seconds)}")
    if len(set(sizes)) < 2:
        return None
    slope, _ = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return float(slope)


# -- memory -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryJob:
    """A contestant whose peak memory is wanted."""

    contestant: str
    phase: str
    problem: Problem
    recipe: str = "paper"


def peak_on_gpu(job: MemoryJob, data: Tensor) -> int:
    """Return the bytes that building and one pass took beyond what was there, at most, on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contestant = CONTESTANTS[job.contestant](job.problem, job.phase, data, recipe=job.recipe)
    contestant.run(1)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peaks_on_cpu(jobs: Sequence[MemoryJob], n_threads: int) -> list[int | None]:
    """Return by how many bytes the resident memory of a process grows at most while it builds a model and learns.

    Each job has a process of its own, in which all is imported and the data lies ready. None where the system does
    not tell.
    """
    if not jobs or not hasattr(os, "fork") or not os.path.exists("/proc/self/clear_refs"):
        return [None] * len(jobs)
    given = json.dumps({"threads": n_threads, "jobs": [asdict(job) for job in jobs]})
    counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(n_threads))
    command = [sys.executable, "-W", "ignore", "-c", "from benchmarks.measure import _main; _main()"]
    environment = {**os.environ, **counts, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that measures memory failed: {done.stderr.strip()[-300:]}")
    return [None if peak is None else int(peak) for peak in json.loads(done.stdout)]


def _main() -> None:
    """Read jobs from standard input, fork for each before any thread was started, and print their peaks."""
    asked = json.load(sys.stdin)
    _rehearse(sorted({(job["contestant"], job["phase"]) for job in asked["jobs"]}))
    peaks: list[int | None] = []
    for job in asked["jobs"]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(reading)
                os.write(writing, str(_grown(job, asked["threads"])).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        peaks.append(int(answer) if answer else None)
    print(json.dumps(peaks))


def _rehearse(parts: Sequence[tuple[str, str]]) -> None:
    """Let every contestant learn something tiny, on one thread: much is imported only then, and is not its memory."""
    torch.set_num_threads(1)
    tiny = Problem((4, 4), (3, 3), 1, 2, 4)
    data = on_device(digits(tiny.visible, tiny.n_samples)[0], "cpu")
    for key, phase in parts:
        CONTESTANTS[key](tiny, phase, data).run(1)


def _grown(job: dict[str, Any], n_threads: int) -> int:
    torch.set_num_threads(n_threads)
    about: dict[str, Any] = job["problem"]
    problem = Problem(**{**about, "visible": tuple(about["visible"]), "hidden": tuple(about["hidden"])})
    kind = CONTESTANTS[job["contestant"]]
    data = on_device(digits(problem.visible, problem.n_samples)[0], "cpu")
    # Libraries take buffers at their first product: a small one of each, on every thread.
    small = np.ones((512, 512), np.float32)
    _ = small @ small, torch.from_numpy(small) @ torch.from_numpy(small)
    gc.collect()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # forget the peak
    before = _status("VmRSS")
    contestant = kind(problem, job["phase"], data, recipe=job["recipe"])
    contestant.run(1)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
