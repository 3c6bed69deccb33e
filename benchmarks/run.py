"""One run: all contestants and their floors on every problem, then inference. Each is a cell: a run can resume."""

from __future__ import annotations

import gc
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mvrbm
from benchmarks import floors
from benchmarks.contestants import CONTESTANTS, Contestant
from benchmarks.inference import infer
from benchmarks.measure import Entry, MemoryJob, Run, Spread, exponent, peak_on_gpu, peaks_on_cpu, take_turns, threads
from benchmarks.problems import Problem, as_problem, digits, on_device, parse
from mvrbm import compiled
from mvrbm.devices import resolve_device
from mvrbm.training import RECIPES
from mvrbm.validation import choice
from studies.arguments import say
from studies.runner import run_plan
from studies.runs import Outcome, Place, Store
from studies.runs import Run as StudyRun

_SIZES = ("28x28:25x25", "64x64:50x50", "128x128:64x64", "256x256:128x128", "16x16x16:10x10x10")
_FLOOR = "floor"  # names of floors begin with it


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Parameters
    ----------
    sizes : sequence of str
        Problems, such as ``28x28:25x25``, or ``28x28:25x25:4`` for rank 4.
    ranks : sequence of int
        Further ranks of the first size.
    contestants : sequence of str
        Keys of :data:`~benchmarks.contestants.CONTESTANTS`.
    batch_size : int
        Samples per update, and chains of PCD.
    samples : int
        Samples per epoch; 0 is up to 5,000 within 32 MiB.
    device : {"auto", "cpu", "cuda"}
        Device to train on.
    threads : int
        Threads on the CPU; 0 is one per core.
    recipe : str
        Recipe of mvrbm's machines.
    repetitions : int
        Number of rounds.
    min_seconds : float
        Approximate length of a turn.
    memory_limit : float
        Largest memory of a contestant, in GiB; 0 is half of the free memory.
    inference : int
        Number of digits for transform, reconstruct and free energy; 0 is none.
    memory : bool
        Whether peak memory is measured.
    seed : int
        Random seed.
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
        choice(self.device, "device", ("auto", "cpu", "cuda"))
        choice(self.recipe, "recipe", sorted(RECIPES))
        if self.repetitions < 1 or self.threads < 0 or self.min_seconds < 0 or self.inference < 0:
            raise ValueError(
                f"repetitions must be at least 1; threads, min_seconds and inference not negative, got "
                f"{self.repetitions}, {self.threads}, {self.min_seconds} and {self.inference}"
            )
        if not self.sizes or any(rank < 1 for rank in self.ranks):
            raise ValueError(f"sizes must not be empty and ranks at least 1, got {self.sizes} and {self.ranks}")
        self.problems()  # raises for a wrong size

    def problems(self) -> list[Problem]:
        """Return all sizes, and then the first of them in every rank."""
        read = partial(parse, batch_size=self.batch_size, n_samples=self.samples)
        found = [read(size) for size in self.sizes]
        first = found[0]
        further = [Problem(first.visible, first.hidden, rank, self.batch_size, self.samples) for rank in self.ranks]
        return list(dict.fromkeys([*found, *further]))


#: The settings that `--quick` changes: about a minute on two cores.
QUICK: dict[str, Any] = {
    "sizes": ("28x28:25x25", "64x64:50x50"),
    "ranks": (1, 4),
    "samples": 300,
    "repetitions": 3,
    "min_seconds": 0.05,
    "inference": 5000,
}


def run(settings: Settings, folder: Path | None = None) -> dict[str, Any]:
    """Measure everything that the settings ask for.

    Parameters
    ----------
    settings : Settings
        The settings.
    folder : Path, optional
        Folder for finished cells, from which an interrupted run resumes. Default: a temporary one.

    Returns
    -------
    dict
        ``machine``, ``settings``, ``rows`` (one per problem, contestant and phase), ``exponents`` and ``inference``.
    """
    device = resolve_device(settings.device).type
    n_threads = settings.threads or os.cpu_count() or 1
    limit = settings.memory_limit * 2**30 or _free_bytes(device) / 2
    warning = _busy()
    if warning:
        say(warning)
    with tempfile.TemporaryDirectory() as scratch:
        store = Store(folder or Path(scratch))
        cells = list(_cells(settings, device, n_threads, settings.memory_limit))
        run_plan(cells, Place(store, device)).raise_failures()
        records = [store.record(cell) or {} for cell in cells]
    found = {name: [r["numbers"] for c, r in zip(cells, records, strict=True) if c.group == name] for name in _GROUPS}
    rows = [row for numbers in found["problems"] for row in numbers["rows"]]
    return {
        "machine": {**_machine(device, n_threads), "warning": warning},
        "settings": {**asdict(settings), "device": device, "threads": n_threads, "memory_limit": limit / 2**30},
        "rates": next(iter(found["rates"]), {}),
        "rows": rows,
        "exponents": _exponents(rows),
        "inference": next(iter(found["inference"]), {}),
        "seconds": sum(record["seconds"] for record in records),
    }


_GROUPS = ("rates", "problems", "inference")


def _cells(settings: Settings, device: str, n_threads: int, memory_limit: float) -> Iterator[StudyRun]:
    """Return the GPU's rates, all problems and inference, each a cell that measures time."""
    rates = StudyRun("rates", "rates", gpu_rates, {}, alone=True)
    if device == "cuda":
        yield rates
    names = ("contestants", "recipe", "repetitions", "min_seconds", "memory", "seed")
    shared = {name: getattr(settings, name) for name in names}
    shared |= {"threads": n_threads, "memory_limit": memory_limit, "device": device}
    after = (rates,) if device == "cuda" else ()
    for problem in settings.problems():
        given = {**shared, "problem": asdict(problem)}
        yield StudyRun(re.sub(r"\W+", "-", problem.name), "problems", measure_problem, given, after, alone=True)
    if settings.inference:
        given = {name: shared[name] for name in ("contestants", "repetitions", "threads", "device")}
        yield StudyRun("inference", "inference", measure_inference, {**given, "n": settings.inference}, alone=True)


def gpu_rates(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the rates of the GPU."""
    return Outcome(floors.gpu_rates())


def measure_inference(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Time inference."""
    say(f"inference over {settings['n']:,} digits")
    with threads(settings["threads"]):
        return Outcome(infer(settings["n"], settings["device"], settings["repetitions"], settings["contestants"]))


def measure_problem(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Time all contestants on one problem, in turns, and measure their memory."""
    problem, device = as_problem(settings["problem"]), settings["device"]
    say(f"{problem.name}: {problem.n_samples:,} samples in batches of {problem.batch_size}")
    torch.manual_seed(settings["seed"])
    limit = settings["memory_limit"] * 2**30 or _free_bytes(device) / 2
    rates = place.store.numbers(StudyRun("rates", "rates", gpu_rates, {})) if device == "cuda" else {}
    with threads(settings["threads"]):
        rows = _one_problem(problem, settings, limit, rates)
        if settings["memory"] and device == "cpu":
            _add_peaks(problem, rows, settings)
    return Outcome({"rows": rows})


# -- one problem ------------------------------------------------------------------------------------


def _one_problem(
    problem: Problem, settings: Mapping[str, Any], limit: float, rates: dict[str, float]
) -> list[dict[str, Any]]:
    device, n_threads = settings["device"], settings["threads"]
    array, what = digits(problem.visible, problem.n_samples)
    data = on_device(array, device)
    here = partial(_place, data, on_device(array, "cpu"))
    pairs, rows = [], []
    for key in settings["contestants"]:
        kind = CONTESTANTS[key]
        # On a machine with a GPU, a contestant that stays on the CPU has the CPU's memory.
        on_cpu = device == "cuda" and not kind.on_gpu
        reason = kind.unsupported_reason(problem, min(limit, _free_bytes("cpu") / 2) if on_cpu else limit)
        if reason is None:
            pairs += [(kind, phase) for phase in kind.phases]
            continue
        say(f"  {kind.title} skipped: {reason}")
        rows.append({**_about(problem, kind, what), "phase": None, "skipped": reason})

    together = sum(kind.bytes_needed(problem) for kind, _ in pairs) <= limit
    parameters: dict[str, int] = {}

    def make(kind: type[Contestant], phase: str) -> Run:
        contestant = kind(problem, phase, here(kind), recipe=settings["recipe"], seed=settings["seed"])
        parameters[f"{kind.key} {phase}"] = contestant.n_parameters
        return contestant.run

    entries = {f"{kind.key} {phase}": Entry(partial(make, kind, phase), together) for kind, phase in pairs}
    entries |= _floor_entries(problem, pairs, device, n_threads, together)
    take_turns(
        entries,
        repetitions=settings["repetitions"],
        min_seconds=settings["min_seconds"],
        synchronize=torch.cuda.synchronize if device == "cuda" else (lambda: None),
    )
    gc.collect()
    for kind, phase in pairs:
        failure = entries[f"{kind.key} {phase}"].failure
        if failure is not None:
            say(f"  {kind.title} failed: {failure}")
            rows.append({**_about(problem, kind, what), "phase": phase, "skipped": failure})
    pairs = [(kind, phase) for kind, phase in pairs if entries[f"{kind.key} {phase}"].failure is None]
    peaks = {}
    if settings["memory"] and device == "cuda":
        jobs = {
            kind: MemoryJob(kind.key, kind.phases[0], problem, settings["recipe"]) for kind, _ in pairs if kind.on_gpu
        }
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
    """Return the number of updates per update of the others: in the same phase, or else in the one that they have."""
    key, phase = name.split()
    found = {}
    for other in CONTESTANTS.values():
        same = f"{other.key} {phase if phase in other.phases else other.phases[0]}"
        if other.key != key and same in medians:
            found[other.key] = medians[same] / other.models / (medians[name] / models)
    return found


def _add_peaks(problem: Problem, rows: Sequence[dict[str, Any]], settings: Mapping[str, Any]) -> None:
    """Measure peak memory on the CPU, in one phase of each contestant: the other phase needs the same."""
    keys = list(dict.fromkeys(row["contestant"] for row in rows if not row["skipped"]))
    jobs = [MemoryJob(key, CONTESTANTS[key].phases[0], problem, settings["recipe"]) for key in keys]
    peaks = dict(zip(keys, peaks_on_cpu(jobs, settings["threads"]), strict=True))
    for row in rows:
        if not row["skipped"]:
            row["peak_bytes"] = peaks[row["contestant"]]


# -- floors -----------------------------------------------------------------------------------------


def _floor_entries(
    problem: Problem, pairs: Sequence[tuple[type[Contestant], str]], device: str, n_threads: int, keep: bool
) -> dict[str, Entry]:
    """Return the floors that are timed on the CPU; the GPU's floors come from its rates."""
    if device == "cuda":
        return {}
    entries = {}
    for kind, phase in pairs:
        if kind.key not in ("mvrbm", "rbm"):
            continue
        for count in sorted({1, n_threads}):
            make = partial(_epochs, partial(floors.bare_products, problem, phase, dense=kind.dense), problem.updates)
            entries[f"{_FLOOR} products {kind.dense} {phase} {count}"] = Entry(make, keep, count)
        numbers = floors.random_numbers(problem, phase)
        for name, draw in (("torch", floors.draw_with_torch), ("numpy", floors.draw_with_numpy)):
            make = partial(_epochs, partial(draw, numbers), problem.updates)
            entries[f"{_FLOOR} random {phase} {name}"] = Entry(make, keep, 1)
    return entries


def _epochs(make: Callable[[], Run], updates: int) -> Run:
    """Return a function of a number of epochs, from one of a number of updates."""
    run = make()
    return lambda epochs: run(epochs * updates)


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
    """Return the exponents of time and of operations against the number of pixels, over the matrices of rank 1."""
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
            problems = [as_problem(row) for row in mine]
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
    """Return a warning if the machine is busy: threads that wait for each other suffer most, and unequally."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
    if load < 0.3 * (os.cpu_count() or 1):
        return None
    return f"the load of this machine was {load:.1f} at the start: do not quote these figures"


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
