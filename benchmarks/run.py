"""One run: all contestants on all problems, floors beside them, then inference."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mvrbm
from benchmarks import floors
from benchmarks.contestants import CONTESTANTS, Contestant
from benchmarks.inference import infer
from benchmarks.measure import Entry, MemoryJob, Run, Spread, exponent, peak_on_gpu, peaks_on_cpu, take_turns, threads
from benchmarks.problems import Problem, digits, on_device, parse
from mvrbm import compiled
from mvrbm.learning import RECIPES

_SIZES = ("28x28:25x25", "64x64:50x50", "128x128:64x64", "256x256:128x128", "16x16x16:10x10x10")
_FLOOR = "floor"  # names of floors begin with it


@dataclass(frozen=True)
class Settings:
    """What a run measures, and how.

    Parameters
    ----------
    sizes : sequence of str
        Problems, such as ``28x28:25x25``, or ``28x28:25x25:4`` for rank 4.
    ranks : sequence of int
        Ranks in which the first size is learned as well.
    contestants : sequence of str
        Keys of :data:`~benchmarks.contestants.CONTESTANTS`.
    batch_size : int
        Samples an update, and chains of PCD.
    samples : int
        Samples a pass; 0 is up to 5,000 within 32 MiB.
    device : {"auto", "cpu", "cuda"}
        Where to learn.
    threads : int
        Threads on the CPU; 0 is one a core.
    recipe : str
        Recipe of mvrbm's machines.
    repetitions : int
        Rounds.
    min_seconds : float
        Length of a turn, about.
    memory_limit : float
        Gibibytes that a contestant may need; 0 is half of what is free.
    inference : int
        Digits to transform, reconstruct and find the free energy of; 0 leaves this out.
    memory : bool
        Whether peak memory is measured.
    seed : int
        Of everything random.
    """

    sizes: Sequence[str] = _SIZES
    ranks: Sequence[int] = (1, 2, 4, 8, 16)
    contestants: Sequence[str] = tuple(CONTESTANTS)
    batch_size: int = 100
    samples: int = 0
    device: str = "auto"
    threads: int = 0
    recipe: str = "paper"
    repetitions: int = 7
    min_seconds: float = 0.3
    memory_limit: float = 0.0
    inference: int = 60_000
    memory: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = [key for key in self.contestants if key not in CONTESTANTS]
        if unknown or not self.contestants:
            raise ValueError(f"contestants must be some of {list(CONTESTANTS)}, got {unknown or 'none'}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is 'cuda', but PyTorch finds no CUDA device here: use 'cpu'")
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe must be one of {sorted(RECIPES)}, got {self.recipe!r}")
        if self.repetitions < 1 or self.threads < 0 or self.min_seconds < 0 or self.inference < 0:
            raise ValueError(
                f"repetitions must be at least 1; threads, min_seconds and inference not negative, got "
                f"{self.repetitions}, {self.threads}, {self.min_seconds} and {self.inference}"
            )
        if not self.sizes or any(rank < 1 for rank in self.ranks):
            raise ValueError(f"sizes must not be empty and ranks at least 1, got {self.sizes} and {self.ranks}")

    def problems(self) -> list[Problem]:
        """Return what is learned: all sizes, and then the first of them in every rank."""
        read = partial(parse, batch_size=self.batch_size, n_samples=self.samples)
        found = [read(size) for size in self.sizes]
        first = found[0]
        further = [Problem(first.visible, first.hidden, rank, self.batch_size, self.samples) for rank in self.ranks]
        return list(dict.fromkeys([*found, *further]))


#: What `mvrbm bench --quick` changes: about a minute on two cores.
QUICK: dict[str, Any] = {
    "sizes": ("28x28:25x25", "64x64:50x50"),
    "ranks": (1, 4),
    "samples": 300,
    "repetitions": 3,
    "min_seconds": 0.05,
    "inference": 5000,
}


def run(settings: Settings, say: Callable[[str], object] = lambda text: None) -> dict[str, Any]:
    """Measure all that the settings ask for, and return it as plain values.

    Parameters
    ----------
    settings : Settings
        What, and how.
    say : callable
        Is told what is going on.

    Returns
    -------
    dict
        ``machine``, ``settings``, ``rows`` (one a problem, contestant and phase), ``exponents`` and ``inference``.
    """
    device = "cuda" if settings.device != "cpu" and torch.cuda.is_available() else "cpu"
    n_threads = settings.threads or os.cpu_count() or 1
    limit = settings.memory_limit * 2**30 or _free_bytes(device) / 2
    torch.manual_seed(settings.seed)
    warning = _busy()
    if warning:
        say(warning)
    began = time.perf_counter()
    with threads(n_threads):
        rates = floors.gpu_rates() if device == "cuda" else {}
        rows = []
        for problem in settings.problems():
            say(f"{problem.name}: {problem.n_samples:,} samples in batches of {problem.batch_size}")
            rows += _one_problem(problem, settings, device, n_threads, limit, rates, say)
        if settings.memory and device == "cpu":
            say("memory, each in a process of its own")
            _add_peaks(rows, settings, n_threads)
        inference = {}
        if settings.inference:
            say(f"inference over {settings.inference:,} digits")
            inference = infer(settings.inference, device, settings.repetitions, settings.contestants)
    return {
        "machine": {**_machine(device, n_threads), "warning": warning},
        "settings": {**asdict(settings), "device": device, "threads": n_threads, "memory_limit": limit / 2**30},
        "rates": rates,
        "rows": rows,
        "exponents": _exponents(rows),
        "inference": inference,
        "seconds": time.perf_counter() - began,
    }


# -- one problem ------------------------------------------------------------------------------------


def _one_problem(
    problem: Problem,
    settings: Settings,
    device: str,
    n_threads: int,
    limit: float,
    rates: dict[str, float],
    say: Callable[[str], object],
) -> list[dict[str, Any]]:
    array, what = digits(problem.visible, problem.n_samples)
    data = on_device(array, device)
    here = partial(_place, data, on_device(array, "cpu"))
    pairs, rows = [], []
    for key in settings.contestants:
        kind = CONTESTANTS[key]
        # One that stays on the CPU beside a GPU has the CPU's memory.
        beside = device == "cuda" and not kind.on_gpu
        reason = kind.refusal(problem, min(limit, _free_bytes("cpu") / 2) if beside else limit)
        if reason is None:
            pairs += [(kind, phase) for phase in kind.phases]
            continue
        say(f"  {kind.title} skipped: {reason}")
        rows.append({**_about(problem, kind, what), "phase": None, "skipped": reason})

    together = sum(kind.bytes_needed(problem) for kind, _ in pairs) <= limit
    parameters: dict[str, int] = {}

    def make(kind: type[Contestant], phase: str) -> Run:
        contestant = kind(problem, phase, here(kind), recipe=settings.recipe, seed=settings.seed)
        parameters[f"{kind.key} {phase}"] = contestant.n_parameters
        return contestant.run

    entries = {f"{kind.key} {phase}": Entry(partial(make, kind, phase), together) for kind, phase in pairs}
    entries |= _floor_entries(problem, pairs, device, n_threads, together)
    take_turns(
        entries,
        repetitions=settings.repetitions,
        min_seconds=settings.min_seconds,
        synchronise=torch.cuda.synchronize if device == "cuda" else (lambda: None),
    )
    gc.collect()
    for kind, phase in pairs:
        failure = entries[f"{kind.key} {phase}"].failure
        if failure is not None:
            say(f"  {kind.title} failed: {failure}")
            rows.append({**_about(problem, kind, what), "phase": phase, "skipped": failure})
    pairs = [(kind, phase) for kind, phase in pairs if entries[f"{kind.key} {phase}"].failure is None]
    peaks = {}
    if settings.memory and device == "cuda":
        jobs = {kind: MemoryJob(kind.key, kind.phases[0], problem, settings.recipe) for kind, _ in pairs if kind.on_gpu}
        peaks = {kind.key: peak_on_gpu(job, data) for kind, job in jobs.items()}

    medians = {name: Spread.of(entry.seconds).median for name, entry in entries.items() if entry.seconds}
    for kind, phase in pairs:
        name = f"{kind.key} {phase}"
        each = Spread.of(entries[name].seconds, 1 / problem.updates / kind.models)
        row = {
            **_about(problem, kind, what),
            "phase": phase,
            "skipped": None,
            "parameters": parameters[name],
            "peak_bytes": peaks.get(kind.key),
            "update": asdict(each),
            "pass": asdict(Spread.of(entries[name].seconds, 1 / kind.models)),
            "updates_per_second": 1 / each.median,
            "times_faster_than": _ratios(medians, name, kind.models),
            "floor": None,
        }
        if kind.key in ("mvrbm", "rbm"):
            row["floor"] = _floor(problem, phase, kind.dense, device, rates, medians, each.median)
        rows.append(row)
    return rows


def _place(data: Tensor, on_cpu: Tensor, kind: type[Contestant]) -> Tensor:
    return data if kind.on_gpu else on_cpu


def _about(problem: Problem, kind: type[Contestant], what: str) -> dict[str, Any]:
    return {
        "problem": problem.name,
        "visible": list(problem.visible),
        "hidden": list(problem.hidden),
        "rank": problem.rank,
        "batch_size": problem.batch_size,
        "n_samples": problem.n_samples,
        "data": what,
        "contestant": kind.key,
        "title": kind.title,
        "note": kind.note,
        "models": kind.models,
    }


def _ratios(medians: dict[str, float], name: str, models: int) -> dict[str, float]:
    """Return how many updates this makes while others make one: of the same phase, or else of the one they have."""
    key, phase = name.split()
    found = {}
    for other in CONTESTANTS.values():
        same = f"{other.key} {phase if phase in other.phases else other.phases[0]}"
        if other.key != key and same in medians:
            found[other.key] = medians[same] / other.models / (medians[name] / models)
    return found


def _add_peaks(rows: Sequence[dict[str, Any]], settings: Settings, n_threads: int) -> None:
    """Measure peak memory on the CPU, in one phase of each contestant: the other takes the same."""
    jobs: dict[tuple[str, str], MemoryJob] = {}
    for row in rows:
        if not row["skipped"]:
            phase = CONTESTANTS[row["contestant"]].phases[0]
            job = MemoryJob(row["contestant"], phase, _problem_of(row), settings.recipe)
            jobs.setdefault((row["contestant"], row["problem"]), job)
    found = dict(zip(jobs, peaks_on_cpu(list(jobs.values()), n_threads), strict=True))
    for row in rows:
        if not row["skipped"]:
            row["peak_bytes"] = found[row["contestant"], row["problem"]]


def _problem_of(row: dict[str, Any]) -> Problem:
    return Problem(tuple(row["visible"]), tuple(row["hidden"]), row["rank"], row["batch_size"], row["n_samples"])


# -- floors -----------------------------------------------------------------------------------------


def _floor_entries(
    problem: Problem, pairs: Sequence[tuple[type[Contestant], str]], device: str, n_threads: int, keep: bool
) -> dict[str, Entry]:
    """Return what is timed on the CPU beside the contestants; the GPU's floors come from its rates."""
    if device == "cuda":
        return {}
    entries = {}
    for kind, phase in pairs:
        if kind.key not in ("mvrbm", "rbm"):
            continue
        for count in sorted({1, n_threads}):
            make = partial(_passes, partial(floors.bare_products, problem, phase, dense=kind.dense), problem.updates)
            entries[f"{_FLOOR} products {kind.dense} {phase} {count}"] = Entry(make, keep, count)
        numbers = floors.random_numbers(problem, phase)
        for name, draw in (("torch", floors.draw_with_torch), ("numpy", floors.draw_with_numpy)):
            make = partial(_passes, partial(draw, numbers), problem.updates)
            entries[f"{_FLOOR} random {phase} {name}"] = Entry(make, keep, 1)
    return entries


def _passes(make: Callable[[], Run], updates: int) -> Run:
    """Turn what makes updates into what makes passes."""
    run = make()
    return lambda passes: run(passes * updates)


def _floor(
    problem: Problem,
    phase: str,
    dense: bool,
    device: str,
    rates: dict[str, float],
    medians: dict[str, float],
    seconds: float,
) -> dict[str, Any]:
    counted: dict[str, Any] = {
        "flops": floors.flops(problem, phase, dense=dense),
        "bytes": floors.traffic(problem, phase, dense=dense),
        "random_numbers": floors.random_numbers(problem, phase),
    }
    if device == "cuda":
        floor = floors.gpu_floor(problem, phase, rates, dense=dense)
        return {**counted, **floor, "times": seconds / floor["seconds"]}
    starts = {"products": f"{_FLOOR} products {dense} {phase} ", "random numbers": f"{_FLOOR} random {phase} "}
    parts: dict[str, Any] = {}
    for what, start in starts.items():
        ways = {name.removeprefix(start): medians[name] / problem.updates for name in medians if name.startswith(start)}
        parts[what] = {"seconds": min(ways.values()), "ways": ways}
    total = sum(part["seconds"] for part in parts.values())
    rate = counted["flops"] / parts["products"]["seconds"]
    return {**counted, "seconds": total, "parts": parts, "flops_per_second": rate, "times": seconds / total}


# -- all problems -----------------------------------------------------------------------------------


def _exponents(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how time grows with the number of pixels, over the matrices of rank 1, and how operations do."""
    found = []
    for kind in CONTESTANTS.values():
        for phase in kind.phases:
            mine = [
                row
                for row in rows
                if row["contestant"] == kind.key
                and row["phase"] == phase
                and not row["skipped"]
                and row["rank"] == 1
                and len(row["visible"]) == 2
            ]
            problems = [_problem_of(row) for row in mine]
            pixels = [float(problem.n_visible) for problem in problems]
            power = exponent(pixels, [row["update"]["median"] for row in mine])
            if power is None:
                continue
            operations = [float(floors.flops(problem, phase, dense=kind.dense)) for problem in problems]
            found.append(
                {
                    "contestant": kind.key,
                    "title": kind.title,
                    "phase": phase,
                    "exponent": power,
                    "operations": exponent(pixels, operations),
                    "sizes": [row["problem"] for row in mine],
                }
            )
    return found


def _free_bytes(device: str) -> float:
    if device == "cuda":
        return float(torch.cuda.mem_get_info()[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return 8 * 2.0**30


def _busy() -> str | None:
    """Return a warning if other work is going on: threads that wait for each other suffer most, and unequally."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
    if load < 0.3 * (os.cpu_count() or 1):
        return None
    return f"the load of this machine was {load:.1f} at the start: these figures are not to be quoted"


def _machine(device: str, n_threads: int) -> dict[str, Any]:
    import sklearn

    code = compiled.library()
    about = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": n_threads,
        "system": platform.system(),
        "python": platform.python_version(),
        "mvrbm": mvrbm.__version__,
        "compiled": None if code is None else code.processors()[-1],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scikit-learn": sklearn.__version__,
    }
    return {**about, "gpu": torch.cuda.get_device_name()} if device == "cuda" else about


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
