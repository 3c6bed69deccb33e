"""Workloads of generative models on one device: microseconds per update, next to the least possible.

28x28 digits where nothing else is said. Each row is a cell: medians of whole epochs, by the path that the trainer
chooses, without compilation and capture. One row that fails leaves the others.

Floors are counted operations at the rate of tensor cores (tf32), bytes, random numbers and one node of a CUDA graph,
whichever takes longest, at the rates that the same run measured. Products are those of the factors or of the full
matrix, whichever are fewer.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import floors
from benchmarks.contestants import CONTESTANTS
from benchmarks.measure import Spread
from benchmarks.problems import Problem, digits, on_device
from benchmarks.run import gpu_rates
from benchmarks.show import grid, three_digits
from mvrbm import BoltzmannMachine, RandomSource
from mvrbm.backends.choose import EpochBackend, UpdateBackend, choose_backend
from mvrbm.couplings import Coupling, Dense, Kronecker
from mvrbm.data.sources import Source
from mvrbm.devices import resolve_device
from mvrbm.likelihood import annealed_importance_sampling
from mvrbm.training import CD, PCD, NegativePhase, Recipe, TemperedPCD, Trainer
from mvrbm.units import Bernoulli, Categorical, Gaussian, Unit
from mvrbm.updates.gradient import WHOLE
from studies.runner import run_plan
from studies.runs import Outcome, Place, Run, Store

__all__ = ["WORKLOADS", "Workload", "measure", "table"]

Settings = Mapping[str, Any]
_CLASSES = 10
_MISSING_STEPS = 5  # Gibbs steps that draw missing entries


@dataclass(frozen=True)
class Workload:
    """A training run of one or several models, or one step of annealed importance sampling.

    Parameters
    ----------
    visible, hidden : tuple of int
        Shapes of the layers.
    rank : int
        Number of Kronecker products; 0 is a dense coupling.
    batch_size : int
        Samples per update.
    chains : int
        Persistent chains; 0 is CD-1.
    temperatures : int
        Temperatures of the chains, more than 1 for `TemperedPCD`.
    centering : str
        Recipe's centering.
    labels : bool
        Whether there is a label layer, `Categorical` with a dense coupling.
    known : float
        Fraction of the entries that are known.
    learn_variance : bool
        Whether the visible layer is Gaussian with learned variances.
    models : int
        Models that train together.
    n_samples : int
        Samples per epoch.
    annealing : bool
        Whether a step of annealed importance sampling with `chains` chains is timed, instead of updates.
    peer : str
        Key of the contestant that is timed, instead of ours.
    """

    visible: tuple[int, ...] = (28, 28)
    hidden: tuple[int, ...] = (25, 25)
    rank: int = 1
    batch_size: int = 100
    chains: int = 0
    temperatures: int = 1
    centering: str = "location"
    labels: bool = False
    known: float = 1.0
    learn_variance: bool = False
    models: int = 1
    n_samples: int = 20_000
    annealing: bool = False
    peer: str = ""

    def problem(self, batch_size: int) -> Problem:
        """Return the shapes of the image's coupling, with this many samples per product."""
        return Problem(self.visible, self.hidden, max(self.rank, 1), batch_size, self.n_samples)

    @property
    def negative(self) -> NegativePhase:
        """The recipe's negative phase."""
        if self.temperatures > 1:
            return TemperedPCD(self.chains, n_temperatures=self.temperatures)
        return PCD(self.chains) if self.chains else CD(1)


_GENERATIVE = Workload(batch_size=200, chains=400)
_RANK_32 = dataclasses.replace(_GENERATIVE, hidden=(20, 25), rank=32)
_DENSE = dataclasses.replace(_GENERATIVE, hidden=(20, 25), rank=0)
_RANK_8 = Workload(rank=8, chains=100)
#: Workloads by name.
WORKLOADS: dict[str, Workload] = {
    "rank 1, CD-1": Workload(),
    "rank 4, CD-1": Workload(rank=4),
    "rank 16, CD-1": Workload(rank=16),
    "rank 8, 30x30, PCD(400)": dataclasses.replace(_GENERATIVE, hidden=(30, 30), rank=8),
    "rank 32, 20x25, PCD(400)": _RANK_32,
    "rank 32, 20x25, PCD(400), centered": dataclasses.replace(_RANK_32, centering="full"),
    "dense, 500, PCD(400)": _DENSE,
    "dense, 500, PCD(400), centered": dataclasses.replace(_DENSE, centering="full"),
    "dense, 500, PCD(400), by rbms": dataclasses.replace(_DENSE, centering="full", peer="rbms"),
    "rank 8, PCD(100)": _RANK_8,
    "rank 8, PCD(100), labels": dataclasses.replace(_RANK_8, labels=True),
    "64 models, rank 1, CD-1": Workload(models=64),
    "64 models, rank 1, PCD(100)": Workload(models=64, chains=100),
    "128x128 -> 64x64, CD-1": Workload((128, 128), (64, 64), n_samples=2000),
    "256x256 -> 128x128, CD-1": Workload((256, 256), (128, 128), n_samples=2000),
    "16x16x16 -> 10x10x10, CD-1": Workload((16, 16, 16), (10, 10, 10), n_samples=10_000),
    "16x16x16 -> 10x10x10, rank 4, CD-1": Workload((16, 16, 16), (10, 10, 10), 4, n_samples=10_000),
    "16x16x16 -> 10x10x10, PCD(100)": Workload((16, 16, 16), (10, 10, 10), chains=100, n_samples=10_000),
    "200x4 -> 20x3, CD-1": Workload((200, 4), (20, 3)),
    "annealing step, rank 8, 256 chains": Workload(rank=8, chains=256, annealing=True),
    "rank 8, TemperedPCD(100, 10)": dataclasses.replace(_RANK_8, temperatures=10),
    "rank 8, PCD(100), half masked": dataclasses.replace(_RANK_8, known=0.5),
    "rank 8, PCD(100), learned variances": dataclasses.replace(_RANK_8, learn_variance=True),
}
REPETITIONS = 7  # turns that are timed, of one epoch or of several if they are short
MIN_SECONDS = 0.3  # of all turns together
ANNEALED = (500, 4500)  # steps of two runs, whose difference is timed: many, next to which captures do not count


# -- what is timed ----------------------------------------------------------------------------------


def _machine(workload: Workload, seed: int) -> BoltzmannMachine:
    shape = workload.visible
    layers: dict[str, Unit] = {
        "image": Gaussian(shape, learn_variance=True) if workload.learn_variance else Bernoulli(shape)
    }
    links: dict[str, Coupling] = {"image": Kronecker(workload.rank) if workload.rank else Dense()}
    if workload.labels:
        layers["label"], links["label"] = Categorical(_CLASSES), Dense()
    return BoltzmannMachine(layers, Bernoulli(workload.hidden), links, seed=seed)


def _data(workload: Workload) -> dict[str, Any]:
    images, _ = digits(workload.visible, workload.n_samples)
    data: dict[str, Any] = {"image": images if workload.learn_variance else (images * 255).astype(np.uint8)}
    if workload.labels:
        data["label"] = np.eye(_CLASSES, dtype=np.float32)[np.arange(len(images)) % _CLASSES]
    return data


# Epochs whose orders are drawn together: one sort for several orders takes hardly longer than for one.
_ORDERS_AT_ONCE = 16


def epochs(workload: Workload, device: str, name: str | None = None) -> tuple[Callable[[], int], str]:
    """Return a function that computes an epoch and returns the number of updates, and the name of the backend's class.

    Parameters
    ----------
    workload : Workload
        What to train.
    device : str
        Device to train on.
    name : str, optional
        Name of the backend; see :data:`mvrbm.backends.choose.BACKENDS`. Default: the backend that a trainer chooses.
    """
    trainers, source = prepared(workload, device)
    first = trainers[0]
    states = [trainer.state for trainer in trainers]
    settings = [trainer.update_settings() for trainer in trainers]
    backend = choose_backend(settings, states, [source] * len(trainers), 1, name=name or "auto")
    done = itertools.count()
    orders: list[Tensor] = []

    def whole() -> int:
        assert isinstance(backend, EpochBackend)
        number = next(done)
        if number % _ORDERS_AT_ONCE == 0:
            orders[:] = _orders(trainers, number, backend.n_samples, device)
        return backend.epoch(states, orders[number % _ORDERS_AT_ONCE], lambda: False)

    def batch_by_batch() -> int:
        assert isinstance(backend, UpdateBackend)
        before = first.update
        for batch in source.batches(workload.batch_size, first.order_rng.at_step(next(done))):
            state = first.state
            visible = backend.draw_missing(state, batch, _MISSING_STEPS) if batch.known else batch.visible
            backend.update(state, visible, len(batch) / workload.batch_size, WHOLE)
        return first.update - before

    return whole if isinstance(backend, EpochBackend) else batch_by_batch, type(backend).__name__


def prepared(workload: Workload, device: str) -> tuple[list[Trainer], Source]:
    """Return trainers of all models of a workload, ready to train, and their data."""
    recipe = Recipe(
        learning_rate=0.01, negative=workload.negative, batch_size=workload.batch_size, centering=workload.centering
    )
    trainers = [
        Trainer(_machine(workload, seed).to(device), recipe, seed=seed, missing_steps=_MISSING_STEPS)
        for seed in range(workload.models)
    ]
    data = _data(workload)
    known = np.random.default_rng(0).random(data["image"].shape) < workload.known
    source = trainers[0].prepare(data, mask=None if workload.known == 1 else {"image": known}, initialize=True)
    for trainer in trainers[1:]:
        trainer.prepare(source, initialize=True)
    return trainers, source


def _orders(trainers: Sequence[Trainer], epoch: int, n_samples: int, device: str) -> Sequence[Tensor]:
    """Return the orders of the samples of several epochs, each (trainers, n_samples)."""
    each = [trainer.order_rng.permutations(n_samples, epoch, _ORDERS_AT_ONCE, device) for trainer in trainers]
    return torch.stack(each, 1).unbind(0)


def _peer(workload: Workload, device: str) -> tuple[Callable[[], int], str]:
    """Return the same for another package."""
    problem = workload.problem(workload.batch_size)
    data = on_device(digits(workload.visible, workload.n_samples)[0], device)
    phase = "pcd" if workload.chains else "cd"
    contestant = CONTESTANTS[workload.peer](problem, phase, data, n_chains=workload.chains)

    def epoch() -> int:
        contestant.run(1)
        return problem.updates

    return epoch, contestant.title


def _annealing(workload: Workload, device: str) -> Callable[[int], None]:
    """Return a function that runs a number of annealing steps."""
    machine = _machine(workload, 0).to(device)
    for link in machine.links.values():
        link.initialize(RandomSource(1), 0.05)

    def anneal(steps: int) -> None:
        annealed_importance_sampling(machine, RandomSource(0), n_chains=workload.chains, n_steps=steps)

    return anneal


def _seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def seconds_per_update(epoch: Callable[[], int], device: str) -> list[float]:
    """Time a function that computes an epoch and returns the number of updates, `REPETITIONS` times."""
    epoch()  # compiles and captures
    made = epoch()
    # As in a training run, several epochs follow each other before anybody waits for them.
    turns = max(1, round(MIN_SECONDS / REPETITIONS / _seconds(epoch, device)))
    return [_seconds(lambda: [epoch() for _ in range(turns)], device) / (turns * made) for _ in range(REPETITIONS)]


# -- floors -----------------------------------------------------------------------------------------


def counts(workload: Workload) -> dict[str, float]:
    """Return the operations, bytes and random numbers of an update, or of an annealing step."""
    n, m, T = workload.batch_size, workload.chains, workload.temperatures
    couplings = [(workload.problem(1), workload.rank == 0)]
    if workload.labels:
        couplings.append((Problem((1, _CLASSES), (1, couplings[0][0].n_hidden)), True))
    fewest = [
        min(floors.per_sample(p, dense=True), floors.per_sample(p, dense=dense)) for p, dense in couplings
    ]  # (field, gradient)
    field, gradient = (sum(parts) for parts in zip(*fewest, strict=True))
    hidden = couplings[0][0].n_hidden
    visible = sum(problem.n_visible for problem, _ in couplings)
    both = visible + hidden
    if workload.annealing:
        return {"operations": 2 * m * field, "bytes": 8 * m * visible, "random numbers": m * both}
    fields = n + (2 * T + 1) * m if m else 3 * n
    drawn = T * m or n
    if workload.known < 1:
        fields, drawn = fields + 2 * _MISSING_STEPS * n, drawn + _MISSING_STEPS * n
    parameters = sum(floors.parameters(problem, dense=dense) for problem, dense in couplings)
    moved = n * visible + 2 * drawn * both + 4 * parameters + (2 * T * m * visible)
    every = workload.models
    operations = every * (fields * field + (n + (m or n)) * gradient)
    return {"operations": operations, "bytes": 4 * every * moved, "random numbers": every * drawn * both}


def floor(workload: Workload, rates: Mapping[str, float]) -> dict[str, Any]:
    """Return the least microseconds, and what limits them."""
    counted = counts(workload)
    parts = {
        "arithmetic": counted["operations"] / rates["flops_tf32"],
        "memory": counted["bytes"] / rates["bytes"],
        "random numbers": counted["random numbers"] / rates["random"],
        "one graph node": rates["node"],
    }
    limit = max(parts, key=lambda name: parts[name])
    return {**counted, "floor": 1e6 * parts[limit], "limit": limit}


# -- cells ------------------------------------------------------------------------------------------


def microseconds(settings: Settings, place: Place) -> Outcome:
    """Median time of an update, or of an annealing step."""
    workload, device = WORKLOADS[settings["name"]], place.device
    gc.collect()  # what the row before has left on the device
    times: list[float] = []
    if workload.annealing:
        anneal, path = _annealing(workload, device), ""
        short, long = ANNEALED
        anneal(short)  # compiles
        while len(times) < REPETITIONS:
            more = _seconds(lambda: anneal(long), device) - _seconds(lambda: anneal(short), device)
            times.append(more / (long - short))
    else:
        epoch, path = (_peer if workload.peer else epochs)(workload, device)
        times = seconds_per_update(epoch, device)
    return Outcome({"microseconds": dataclasses.asdict(Spread.of(times, 1e6)), "path": path})


def _cells(only: str) -> Iterator[Run]:
    for name, workload in WORKLOADS.items():
        if only in name:
            settings = {"name": name, **dataclasses.asdict(workload)}
            needs = (str(CONTESTANTS[workload.peer].package),) if workload.peer else ()
            yield Run(re.sub(r"\W+", "-", name).strip("-"), "workloads", microseconds, settings, (), needs, alone=True)


def measure(folder: Path, *, only: str = "", device: str = "auto", budget: float | None = None) -> dict[str, Any]:
    """Time all workloads, and return the results as plain values.

    Parameters
    ----------
    folder : Path
        Folder for finished rows, from which an interrupted run resumes.
    only : str
        Time only the workloads whose name contains this text.
    device : {"auto", "cpu", "cuda"}
        Device to train on.
    budget : float, optional
        Seconds after which no further row is started.
    """
    kind = resolve_device(device).type
    store, rows = Store(folder), list(_cells(only))
    rates = Run("rates", "rates", gpu_rates, {}, alone=True)
    summary = run_plan([rates, *rows] if kind == "cuda" else rows, Place(store, kind), budget=budget)
    measured = store.numbers(rates) if store.has(rates) else {}
    found: dict[str, dict[str, Any]] = {}
    for cell in rows:
        record, name = store.record(cell), cell.settings["name"]
        if record is None:
            found[name] = {"missing": summary.failed.get(cell.name) or summary.lacking.get(cell.name) or "not measured"}
        else:
            found[name] = {**record["numbers"], **(floor(WORKLOADS[name], measured) if measured else {})}
    about = torch.cuda.get_device_name() if kind == "cuda" else kind
    return {"device": about, "torch": torch.__version__, "rates": measured, "workloads": found}


def table(result: Mapping[str, Any]) -> str:
    """Return the results as one table, in Markdown."""
    body = []
    for name, row in result["workloads"].items():
        if "missing" in row:
            body.append([name, "-", "", "", "", row["missing"]])
            continue
        time_, least = row["microseconds"], row.get("floor")
        low, median, high = (three_digits(time_[part]) for part in ("low", "median", "high"))
        times = ["", "", ""] if least is None else [three_digits(least), f"{time_['median'] / least:.1f}", row["limit"]]
        body.append([name, f"{median} [{low}, {high}]", *times, row["path"]])
    head = ["workload", "us per update", "floor", "x floor", "limit", "path"]
    return f"{result['device']}, torch {result['torch']}\n\n{grid(head, body)}"
