"""Training: the default recipe, the paper's Algorithm 1, negative phases, and memory.

The parts are `defaults` and `seeds` (the default recipe on digits), `grid` (the default recipe over sizes, orders and
ranks), `paper` (Algorithm 1), `reconstruction` (3,000 epochs, resumed from checkpoints), `likelihood` (negative phases
on a model with an exact likelihood) and `memory` (training from a large file). Each part has a file of results, with
one row per run and a summary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LambdaLR

from mvrbm import Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker
from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.likelihood import log_likelihood
from mvrbm.models import mvrbm
from mvrbm.sampling import mean_field
from mvrbm.training import CD, PCD, Callback, Checkpoint, Recipe, TemperedPCD, Trainer, TrainingRun
from studies.arguments import Command, Options, add_parts, add_study_options
from studies.baselines import nearest_neighbor_error
from studies.data import all_photographs, digits, subset
from studies.report import Measured
from studies.runner import run_parts
from studies.runs import Outcome, Place, Run, Store, write_json

__all__ = ["COMMANDS", "PARTS"]

Array = NDArray[Any]
Settings = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
#: Shape of the hidden layer for digits.
HIDDEN = (25, 25)


# -- shared -----------------------------------------------------------------------------------------


@torch.no_grad()
def features(machine: BoltzmannMachine, images: Array) -> torch.Tensor:
    """Return the hidden probabilities, one row per image."""
    return torch.cat([machine.hidden_mean(torch.as_tensor(part) / 255) for part in np.array_split(images, 20)])


class Norms(Callback):
    """Record the norms of the factors after every update."""

    def __init__(self) -> None:
        self.values: list[list[float]] = []

    def on_batch_end(self, trainer: TrainingRun, batch: Any) -> None:
        factors = [p for name, p in trainer.machine.named_parameters() if name.startswith("couplings.")]
        self.values.append([float(factor.detach().norm()) for factor in factors])

    @property
    def peak_over_final(self) -> float:
        """Largest ratio of a factor's largest norm to its final norm."""
        values = np.array(self.values)
        return float((values.max(0) / values[-1]).max())


class At(Callback):
    """Call a function after some updates."""

    def __init__(self, updates: Sequence[int], function: Callable[[TrainingRun], None]) -> None:
        self.updates = set(updates)
        self.function = function

    def on_batch_end(self, trainer: TrainingRun, batch: Any) -> None:
        if trainer.update in self.updates:
            self.function(trainer)


def relative_error(machine: BoltzmannMachine, data: Any) -> float:
    """Return the squared reconstruction error divided by the variance of the data."""
    x = torch.as_tensor(data).to(machine.like)
    with torch.no_grad():
        rebuilt = mean_field(machine, x, 1)["visible"]
    return float(((rebuilt - x) ** 2).sum() / ((x - x.mean(0)) ** 2).sum())


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and half the width of its 95% confidence interval."""
    found = Measured(tuple(values))
    return found.mean, found.interval


# -- the default recipe on digits -------------------------------------------------------------------

EPOCHS = (10, 100)


def defaults(settings: Settings, place: Place) -> Outcome:
    """Measure 1-NN errors on one subset of 10,000 digits."""
    data = digits("mnist", None, place.data_dir)
    seed = settings["seed"]
    rows = subset(60_000, 10_000, seed)
    images = data.train[rows]
    labels = data.train_labels[rows]
    raw = nearest_neighbor_error(images, labels, data.test, data.test_labels)
    row: dict[str, Any] = {"subset": seed, "raw": raw}
    norms = Norms()

    def measure(trainer: TrainingRun) -> None:
        here = features(trainer.machine, images)
        there = features(trainer.machine, data.test)
        error = nearest_neighbor_error(here, labels, there, data.test_labels)
        row[f"after {trainer.update // 100} passes"] = error

    callbacks = [norms, At([100 * epochs for epochs in EPOCHS], measure)]
    trainer = Trainer(mvrbm((28, 28), HIDDEN), "default", seed=seed, callbacks=callbacks)
    trainer.fit(images, max(EPOCHS), initialize=True)
    return Outcome({**row, "norm peak / final": norms.peak_over_final})


def _gains(rows: Rows) -> dict[str, Any]:
    return {
        f"gain after {epochs} passes": interval([row["raw"] - row[f"after {epochs} passes"] for row in rows])
        for epochs in EPOCHS
    }


def seeds(settings: Settings, place: Place) -> Outcome:
    """Measure reconstruction error and norms for one random seed."""
    images = digits("mnist", None, place.data_dir).train[subset(60_000, 10_000, 0)]
    norms = Norms()
    machine = mvrbm((28, 28), HIDDEN)
    Trainer(machine, "default", seed=settings["seed"], callbacks=[norms]).fit(images, 10, initialize=True)
    error = relative_error(machine, images[:1000] / 255)
    return Outcome({"seed": settings["seed"], "error": error, "norm peak / final": norms.peak_over_final})


def _worst(rows: Rows) -> dict[str, Any]:
    return {f"worst {key}": max(row[key] for row in rows) for key in rows[0] if key != "seed"}


# -- sizes, orders, ranks ---------------------------------------------------------------------------

SHAPES = [
    ((16,), (16,)),
    ((784,), (625,)),
    ((4, 4), (4, 4)),
    ((16, 16), (12, 12)),
    ((28, 28), (25, 25)),
    ((64, 64), (50, 50)),
    ((128, 128), (128, 128)),
    ((4, 4, 4), (4, 4, 4)),
    ((16, 16, 16), (10, 10, 10)),
    ((4, 4, 4, 4), (3, 3, 3, 3)),
    ((8, 8, 8, 8), (6, 6, 6, 6)),
]


def grid(settings: Settings, place: Place) -> Outcome:
    """Measure reconstruction error and norms of one machine on patches of photographs."""
    unit, rank, updates = settings["unit"], settings["rank"], settings["updates"]
    visible_shape, hidden_shape = tuple(settings["visible"]), tuple(settings["hidden"])
    size = int(np.prod(visible_shape))
    side = int(np.ceil(np.sqrt(size)))
    data = np.ascontiguousarray(all_photographs(place.data_dir)[:, :side, :side]).reshape(-1, side * side)[:, :size]
    data = data.reshape(-1, *visible_shape)
    visible = Bernoulli(visible_shape) if unit == "bernoulli" else Gaussian(visible_shape, learn_variance=True)
    device = place.device if size * rank > 10_000 else "cpu"
    machine = BoltzmannMachine(visible, Bernoulli(hidden_shape), Kronecker(rank)).to(device)
    sample = torch.as_tensor(data[::5]).float() / (255 if unit == "bernoulli" else 1)
    row: dict[str, Any] = {key: settings[key] for key in ("unit", "visible", "hidden", "rank", "seed")}
    norms = Norms()

    def measure(trainer: TrainingRun) -> None:
        row[f"error at {trainer.update}"] = relative_error(trainer.machine, sample)

    callbacks = [norms, At([100, updates], measure)]
    trainer = Trainer(machine, "default", seed=settings["seed"], callbacks=callbacks)
    began = time.perf_counter()
    try:
        trainer.fit(data, -(-updates // 10), initialize=True)
        row["norm peak / final"] = norms.peak_over_final
    except ArithmeticError as error:
        row["diverged"] = str(error)
    row["rate"] = trainer.recipe.learning_rate
    row["seconds"] = time.perf_counter() - began
    if unit == "gaussian":
        row["least standard deviation"] = 1 / float(machine.layers["visible"].inverse_scale.detach().max())
    return Outcome(row)


def _worst_of_grid(rows: Rows) -> dict[str, Any]:
    return {
        "trainings": len(rows),
        "diverged": sum("diverged" in row for row in rows),
        "worst error / variance at 100 updates": max(row.get("error at 100", 9) for row in rows),
        "worst norm peak / final": max(row.get("norm peak / final", 9) for row in rows),
    }


# -- Algorithm 1 ------------------------------------------------------------------------------------


def paper(settings: Settings, place: Place) -> Outcome:
    """Measure the 1-NN error of the paper's recipe on one subset of 10,000 digits."""
    data = digits("mnist", None, place.data_dir)
    seed = settings["seed"]
    epochs = settings["epochs"]
    rows = subset(60_000, 10_000, seed)
    images = data.train[rows]
    labels = data.train_labels[rows]
    machine = mvrbm((28, 28), HIDDEN)
    Trainer(machine, "paper", seed=seed).fit(images, epochs, initialize=True)
    here = features(machine, images)
    there = features(machine, data.test)
    return Outcome(
        {
            "subset": seed,
            "passes": epochs,
            "error": nearest_neighbor_error(here, labels, there, data.test_labels),
            "raw": nearest_neighbor_error(images, labels, data.test, data.test_labels),
        }
    )


def _mean_errors(rows: Rows) -> dict[str, Any]:
    return {"mean error": interval([row["error"] for row in rows]), "raw": interval([row["raw"] for row in rows])}


def reconstruction(settings: Settings, place: Place) -> Outcome:
    """Measure the reconstruction error of the paper's recipe on 2,000 of each digit, resuming from checkpoints."""
    data = digits("mnist", None, place.data_dir)
    of_each = [np.flatnonzero(data.train_labels == digit) for digit in range(10)]
    chosen = np.concatenate([np.random.default_rng(0).permutation(rows)[: settings["each"]] for rows in of_each])
    machine = mvrbm((28, 28), HIDDEN).to(place.device)
    folder = place.work / "reconstruction"
    trainer = Trainer(machine, "paper", seed=0, callbacks=[Checkpoint(folder, every=20_000)])
    resumed = folder.is_dir() and any(folder.iterdir())
    if resumed:
        trainer.resume(folder)
    images = torch.as_tensor(np.ascontiguousarray(data.train[chosen])).to(place.device)
    trainer.fit(images, settings["epochs"], initialize=not resumed)
    trainer.raise_if_interrupted()
    x = torch.as_tensor(data.test).float().to(place.device) / 255
    with torch.no_grad():
        error = float(((mean_field(machine, x, 1)["visible"] - x) ** 2).flatten(1).sum(1).mean())
    return Outcome({"passes": trainer.epoch, "updates": trainer.update, "squared error a test digit": error})


# -- negative phases --------------------------------------------------------------------------------

NEGATIVES = {"CD-1": CD(1), "PCD-1": PCD(100), "tempered PCD-1": TemperedPCD(100, 10)}
UPDATES = 10_000


def bars_and_stripes() -> dict[str, Array]:
    """Return all 3x3 images of full rows or full columns, labeled as one or the other: two layers, many modes."""
    images, labels = [], []
    for bits in itertools.product([0.0, 1.0], repeat=3):
        images += [np.tile(np.array(bits)[:, None], (1, 3)), np.tile(np.array(bits)[None], (3, 1))]
        labels += [[1.0, 0.0], [0.0, 1.0]]
    return {"image": np.array(images), "label": np.array(labels)}


def likelihood(settings: Settings, place: Place) -> Outcome:
    """Measure the exact log-likelihood during training with one kind of negative phase."""
    data = bars_and_stripes()
    states = {key: torch.as_tensor(value, dtype=torch.float32) for key, value in data.items()}
    many = {key: np.tile(value, (64,) + (1,) * (value.ndim - 1)) for key, value in data.items()}
    machine = BoltzmannMachine(
        {"image": Bernoulli((3, 3)), "label": Categorical(2)},
        Bernoulli((4, 4)),
        {"image": Kronecker(rank=2), "label": Dense()},
    )
    curve: dict[str, float] = {}

    def measure(trainer: TrainingRun) -> None:
        curve[str(trainer.update)] = float(log_likelihood(machine, states).mean())

    epochs = UPDATES // 11 + 1
    # Persistent chains follow the model only as fast as they mix, so the rate has to fall.
    trainer = Trainer(
        machine,
        Recipe(negative=NEGATIVES[settings["negative"]], learning_rate=0.1),
        seed=settings["seed"],
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda done: 1 - done / epochs),
        callbacks=[At([1, 500, 1000, 2000, 5000, UPDATES], measure)],
    )
    trainer.fit(many, epochs, initialize=True)
    return Outcome({"negative": settings["negative"], "seed": settings["seed"], **curve})


def _nats(rows: Rows) -> dict[str, Any]:
    last = {name: np.array([row[str(UPDATES)] for row in rows if row["negative"] == name]) for name in NEGATIVES}
    summary: dict[str, Any] = {f"{name}, nats": interval(values.tolist()) for name, values in last.items()}
    for a, b in (("PCD-1", "CD-1"), ("tempered PCD-1", "PCD-1")):
        summary[f"{a} minus {b}, paired"] = interval((last[a] - last[b]).tolist())
    summary["start"] = float(np.mean([row["1"] for row in rows]))
    summary["best possible"] = -float(np.log(16))  # there are sixteen pairs of image and label
    return summary


# -- a large file -----------------------------------------------------------------------------------


def anonymous_memory() -> float:
    """Return the anonymous memory of this process in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) / 1024


def memory(settings: Settings, place: Place) -> Outcome:
    """Measure the growth of memory while training from a file."""
    place.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.work) as folder:
        path = Path(folder) / "large.npy"
        n = settings["bytes"] // 784
        array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(n, 28, 28))
        generator = np.random.default_rng(0)
        for first in range(0, n, 100_000):
            count = min(100_000, n - first)
            array[first : first + count] = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        del array
        before = anonymous_memory()
        peak = 0.0

        class Watch(Callback):
            def on_batch_end(self, trainer: TrainingRun, batch: Any) -> None:
                nonlocal peak
                if trainer.update % 50 == 0:
                    peak = max(peak, anonymous_memory())
                trainer.stop = trainer.update >= settings["updates"]

        Trainer(mvrbm((28, 28), HIDDEN), "default", callbacks=[Watch()]).fit(str(path), 1, initialize=True)
        size = path.stat().st_size
    return Outcome({"file, MB": size / 2**20, "before, MB": before, "peak, MB": peak})


def _growth(rows: Rows) -> dict[str, Any]:
    return {"growth, MB": rows[0]["peak, MB"] - rows[0]["before, MB"]}


# -- parts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of the study: how its runs are computed, their settings, and the summary of their rows."""

    compute: Callable[[Settings, Place], Outcome]
    settings: Sequence[dict[str, Any]]
    summary: Callable[[Rows], dict[str, Any]]
    alone: bool = False


def _grid_settings() -> Iterator[dict[str, Any]]:
    for unit, (visible, hidden), rank in itertools.product(["bernoulli", "gaussian"], SHAPES, [1, 4, 16]):
        if len(visible) > 1 or rank == 1:
            yield {"unit": unit, "visible": visible, "hidden": hidden, "rank": rank, "seed": 0, "updates": 400}


def _size(settings: Mapping[str, Any]) -> tuple[Any, ...]:
    return settings["unit"], len(settings["visible"]), np.prod(settings["visible"]), settings["rank"]


PARTS = {
    "defaults": Part(defaults, [{"seed": seed} for seed in range(5)], _gains),
    "seeds": Part(seeds, [{"seed": seed} for seed in range(20)], _worst),
    "grid": Part(grid, sorted(_grid_settings(), key=_size), _worst_of_grid),
    "paper": Part(paper, [{"seed": seed, "epochs": 300} for seed in range(5)], _mean_errors),
    "reconstruction": Part(reconstruction, [{"each": 2000, "epochs": 3000}], lambda rows: {}),
    "likelihood": Part(
        likelihood, [{"negative": name, "seed": seed} for name in sorted(NEGATIVES) for seed in range(10)], _nats
    ),
    "memory": Part(memory, [{"bytes": 2 * 2**30, "updates": 3000}], _growth, alone=True),
}
PLAN = tuple(
    Run(f"{name}-{number:02d}", name, part.compute, settings, alone=part.alone)
    for name, part in PARTS.items()
    for number, settings in enumerate(part.settings)
)


def _write(name: str, store: Store, out: Path) -> None:
    """Write the results of a part if all of its runs are stored."""
    records = [store.record(run) for run in PLAN if run.group == name]
    if any(record is None for record in records):
        return
    found = [record for record in records if record is not None]
    rows = [record["numbers"] for record in found]
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
    seconds = sum(record["seconds"] for record in found)
    out.mkdir(parents=True, exist_ok=True)
    summary = PARTS[name].summary(rows)
    write_json(out / f"{name}.json", {"rows": rows, "summary": summary, "seconds": seconds, "machine": machine})


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the results of some parts as text."""
    lines = []
    for name, result in results.items():
        lines.append(f"== {name}, {result['seconds']:.0f} s")
        for row in result["rows"]:
            lines.append("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
        lines += [f"{key}: {value}" for key, value in result["summary"].items()]
    return "\n".join(lines)


# -- the command ------------------------------------------------------------------------------------


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, list(PARTS))
    add_study_options(
        parser,
        "learning",
        *("--jobs", "--budget", "--device", "--data-dir"),
        device={
            "default": "cpu",
            "help": "Device for `reconstruction` and the large machines of `grid`. Default: cpu.",
        },
    )


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    parts = options.parts or list(PARTS)
    result: dict[str, Any] = {"out": str(options.out)}
    if not options.report_only:
        torch.set_num_threads(1)
        store = Store.within(options.work)
        place = Place(store, resolve_device(options.device).type, options.data_dir, options.work)
        try:
            result |= run_parts(PLAN, parts, place, jobs=options.jobs, budget=options.budget)
        finally:
            for part in parts:
                _write(part, store, options.out)
    found = {part: options.out / f"{part}.json" for part in parts}
    missing = [part for part, path in found.items() if not path.is_file()]
    if missing and options.report_only:
        raise StorageError(f"{options.out} has no results of {', '.join(missing)}")
    result["results"] = {part: json.loads(path.read_text()) for part, path in found.items() if part not in missing}
    return result, table(result["results"])


COMMANDS = {"learning": Command("Training: recipes, negative phases and memory.", _add, _run, "defaults --jobs 2")}
