"""Measurement of time and memory.

Machines are shared and noisy. So everything that is compared takes turns, round after round, and the results are
medians, the middle half, and ratios of medians from the same rounds.
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
from benchmarks.problems import Problem, as_problem, digits, on_device

#: Trains for a number of epochs.
Run = Callable[[int], None]

_MOST_EPOCHS = 100_000
_REST = 0.05  # seconds: after its last product, a library's threads poll for work for about half as long


# -- time -------------------------------------------------------------------------------------------


@dataclass
class Entry:
    """Something to be timed.

    Parameters
    ----------
    make : callable
        Builds it, and returns a function of a number of epochs.
    keep : bool
        Whether to keep it between its turns. Otherwise it is built again for each, so that all fit into memory.
    threads : int
        Number of threads; 0 is the present number.
    seconds : list of float
        Time per epoch, of every turn.
    failure : str, optional
        Error message, after which it is not timed any more.
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
    synchronize: Callable[[], object] = lambda: None,
) -> None:
    """Time all entries, one after the other, round after round. Results are in the entries.

    Parameters
    ----------
    entries : mapping of str to Entry
        The entries. Each round starts at another one.
    repetitions : int
        Number of rounds.
    min_seconds : float
        Approximate length of a turn, which has at least one epoch.
    most_seconds : float
        An entry with three turns and more than this in total skips further rounds.
    synchronize : callable
        Waits for the device.
    """
    kept: dict[str, Run] = {}
    epochs: dict[str, int] = {}
    names = list(entries)
    for number in range(repetitions):
        turn = number % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            entry = entries[name]
            slow = len(entry.seconds) >= 3 and sum(entry.seconds) * epochs[name] > most_seconds
            if slow or entry.failure is not None:
                continue
            try:
                with _torch_threads(entry.threads):
                    _take_turn(name, entry, kept, epochs, min_seconds, synchronize)
            except (ImportError, RuntimeError, ArithmeticError, MemoryError) as error:  # the others can still be timed
                entry.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                entry.seconds.clear()
                kept.pop(name, None)
            if not entry.keep:
                gc.collect()


def _take_turn(
    name: str,
    entry: Entry,
    kept: dict[str, Run],
    epochs: dict[str, int],
    min_seconds: float,
    synchronize: Callable[[], object],
) -> None:
    time.sleep(_REST)
    run = kept.get(name)
    if run is None:
        run = entry.make()
        _timed(run, 1, synchronize)  # compiles, allocates, touches
        if entry.keep:
            kept[name] = run
    if name not in epochs:
        # Doubled again and again: the start of a run, such as a capture, says nothing about an epoch.
        count, took = 1, _timed(run, 1, synchronize)
        while took < min_seconds and count < _MOST_EPOCHS:
            growth = min(max(2, math.ceil(min_seconds / max(took, 1e-7))), 8)
            count = min(growth * count, _MOST_EPOCHS)
            took = _timed(run, count, synchronize)
        epochs[name] = count
        entry.seconds.append(took / count)  # the last of these is the turn
        return
    entry.seconds.append(_timed(run, epochs[name], synchronize) / epochs[name])


def _timed(run: Run, epochs: int, synchronize: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    run(epochs)
    synchronize()
    return time.perf_counter() - start


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use this many threads for PyTorch, and for the linear algebra of NumPy and SciPy."""
    limits = importlib.import_module("threadpoolctl").threadpool_limits
    with _torch_threads(count), limits(count):
        torch.set_num_threads(count)
        yield


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Use this many threads for PyTorch; 0 is the present number."""
    former = torch.get_num_threads()
    if count not in (0, former):
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count not in (0, former):
            torch.set_num_threads(former)


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Return the exponent of time against size: the slope of a line through the logarithms.

    None for fewer than two different sizes.
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
    """A contestant whose peak memory is measured."""

    contestant: str
    phase: str
    problem: Problem
    recipe: str = "paper"


def peak_on_gpu(job: MemoryJob, data: Tensor) -> int:
    """Return the largest growth of the GPU's memory while a contestant is built and trained for one epoch, in bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contestant = CONTESTANTS[job.contestant](job.problem, job.phase, data, recipe=job.recipe)
    contestant.run(1)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peaks_on_cpu(jobs: Sequence[MemoryJob], n_threads: int) -> list[int | None]:
    """Return the largest growth of resident memory while a contestant is built and trained for one epoch, in bytes.

    Each job has a process of its own, with everything imported and the data in place. None where the system does not
    report it.
    """
    if not jobs or not hasattr(os, "fork") or not os.path.exists("/proc/self/clear_refs"):
        return [None] * len(jobs)
    given = json.dumps({"threads": n_threads, "jobs": [asdict(job) for job in jobs]})
    counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(n_threads))
    command = [sys.executable, "-W", "ignore", "-c", "from benchmarks.measure import measure_peaks; measure_peaks()"]
    environment = {**os.environ, **counts, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that measures memory failed: {done.stderr.strip()[-300:]}")
    return [None if peak is None else int(peak) for peak in json.loads(done.stdout)]


def measure_peaks() -> None:
    """Read jobs from standard input, fork for each before any thread is started, and print their peaks."""
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
    """Train every contestant on a tiny problem, on one thread: late imports are not its memory."""
    torch.set_num_threads(1)
    tiny = Problem((4, 4), (3, 3), 1, 2, 4)
    data = on_device(digits(tiny.visible, tiny.n_samples)[0], "cpu")
    for key, phase in parts:
        CONTESTANTS[key](tiny, phase, data).run(1)


def _grown(job: dict[str, Any], n_threads: int) -> int:
    torch.set_num_threads(n_threads)
    problem = as_problem(job["problem"])
    kind = CONTESTANTS[job["contestant"]]
    data = on_device(digits(problem.visible, problem.n_samples)[0], "cpu")
    # Libraries allocate buffers at their first product: a small one of each, on every thread.
    small = np.ones((512, 512), np.float32)
    _ = small @ small, torch.from_numpy(small) @ torch.from_numpy(small)
    gc.collect()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # reset the peak
    before = _status("VmRSS")
    contestant = kind(problem, job["phase"], data, recipe=job["recipe"])
    contestant.run(1)
    return _status("VmHWM") - before


def _status(name: str) -> int:
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
