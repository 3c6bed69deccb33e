"""Deep and discriminative learning on MNIST without augmentation.

The parts `choose` and `choose-few` try settings on held-out training digits. The parts `full`, `few` and `baselines`
train the chosen settings with five seeds and measure the error on the test digits. `defaults` measures the classifier
without arguments.

Settings are chosen by rule on the last 10,000 training digits, with networks trained on the other 50,000 or on subsets
of them. `full` takes the candidate of each kind with the lowest validation error among those with at most 160,000
parameters, a tenth of the dense deep belief network's, and trains it for 1.5 times as many epochs. `few` takes, for
each row and number of labels, the candidate with the lowest mean validation error among those with the most seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import mvrbm
from mvrbm import ClassificationMVRBM, DeepMVRBM, DeepMVRBMClassifier, Dense, Kronecker, MVRBMClassifier
from mvrbm.devices import resolve_device
from mvrbm.estimators import Layer
from mvrbm.io.datasets import load
from studies.arguments import Command, Options, add_parts, add_study_options
from studies.data import subset
from studies.runner import run_parts
from studies.runs import Outcome, Place, Rows, Run, RunError

__all__ = ["COMMANDS", "PARTS"]

Array = NDArray[Any]
Settings = Mapping[str, Any]
# Numbers of labels, and seeds, of the table.
SIZES = (100, 600, 1000)
SEEDS = range(5)
# Training digits from this index on are held out for choosing settings.
HELD_OUT = 50_000
# Seeds of the subsets for choosing settings; the table has other subsets.
CHOOSING_SEEDS = (100, 101)
# Largest number of parameters of a chosen candidate.
MOST_PARAMETERS = 160_000
# Factor by which the chosen candidate is trained longer than for the choice.
LONGER = 1.5


# -- candidates, all digits ---------------------------------------------------------------------------

TWO = (Layer((64, 64), Kronecker(12)), Layer((32, 32), Kronecker(16)))  # 123,914 parameters
TWO_EVEN = (Layer((64, 64), Kronecker(8)), Layer((64, 64), Kronecker(8)))  # 143,370
TWO_SMALL = (Layer((48, 48), Kronecker(8)), Layer((32, 32), Kronecker(16)))  # 84,234
THREE = (Layer((48, 48), Kronecker(8)), Layer((48, 48), Kronecker(8)), Layer((32, 32), Kronecker(12)))  # 111,114
DENSE_TOP = (Layer((40, 40), Kronecker(16)), Layer(64, Dense()))  # 140,554
LONG = {"n_epochs": 60, "batch_size": 256, "averaging": 0.999, "dropout": 0.3, "perturbation": 0.0}


def deep(layers: Sequence[Layer], **settings: Any) -> Callable[[int, str], Any]:
    """Return a function that makes a deep network from a seed and a device."""
    return lambda seed, device: DeepMVRBMClassifier(layers, **{**LONG, **settings}, random_state=seed, device=device)


def one(shape: tuple[int, int], rank: int, **settings: Any) -> Callable[[int, str], Any]:
    """Return a function that makes a network with one layer from a seed and a device."""
    return lambda seed, device: MVRBMClassifier(
        shape, rank=rank, **{**LONG, **settings}, random_state=seed, device=device
    )


FULL: dict[str, dict[str, Callable[[int, str], Any]]] = {
    "deep": {
        "two, distance 1.2, dropout 0": deep(TWO, perturbation=1.2, dropout=0.0),
        "two, distance 1.2, dropout 0.2": deep(TWO, perturbation=1.2, dropout=0.2),
        "two even, distance 1.2, dropout 0.2": deep(TWO_EVEN, perturbation=1.2, dropout=0.2),
        "two, distance 1.8, dropout 0": deep(TWO, perturbation=1.8, dropout=0.0),
        "three, distance 1.2, dropout 0": deep(THREE, perturbation=1.2, dropout=0.0),
        "two even, distance 1.8, dropout 0": deep(TWO_EVEN, perturbation=1.8, dropout=0.0),
        "two, distance 0.8, dropout 0.2": deep(TWO, perturbation=0.8, dropout=0.2),
        "two, dropout 0.4": deep(TWO, dropout=0.4, input_dropout=0.2, n_epochs=100),
        "dense top, distance 1.2, dropout 0.2": deep(DENSE_TOP, perturbation=1.2, dropout=0.2),
        "two small, distance 1.2, dropout 0": deep(TWO_SMALL, perturbation=1.2, dropout=0.0),
        "two, pre-trained, distance 1.2, dropout 0": deep(TWO, perturbation=1.2, dropout=0.0, pretraining=5),
        "two even, dropout 0.5": deep(TWO_EVEN, dropout=0.5, input_dropout=0.2, n_epochs=100),
    },
    "one layer": {
        "one, distance 1.2, dropout 0.2": one((64, 64), 16, perturbation=1.2, dropout=0.2),
        "one, distance 1.8, dropout 0.2": one((64, 64), 16, perturbation=1.8, dropout=0.2),
        "one, dropout 0.5": one((64, 64), 16, dropout=0.5, input_dropout=0.2, n_epochs=100),
    },
}


# -- candidates, few labels ---------------------------------------------------------------------------

SHAPES = {"one": ((32, 32),), "two": ((32, 32), (24, 24)), "wide": ((64, 64),)}
# Numbers of updates without and with unlabeled digits.
UPDATES = 2400
UPDATES_UNLABELED = 12_000


def network(
    layers: str, updates: int = UPDATES, *, batch_size: int = 50, **settings: Any
) -> Callable[[int, int, str], Any]:
    """Return a function that makes a network for few labels from their number, a seed and a device."""

    def make(n: int, seed: int, device: str) -> Any:
        size = min(batch_size, n)
        return DeepMVRBMClassifier(
            SHAPES[layers],
            **{"rank": 8, "averaging": 0.99, "dropout": 0.3, "perturbation": 0.0, **settings},
            n_epochs=round(updates * size / n),
            batch_size=size,
            random_state=seed,
            device=device,
        )

    return make


def semi(layers: str, **settings: Any) -> Callable[[int, int, str], Any]:
    """Return a function that makes a network that also learns from unlabeled digits."""
    return network(layers, UPDATES_UNLABELED, batch_size=100, **{"averaging": 0.999, "dropout": 0.0, **settings})


def machine(mode: str, **settings: Any) -> Callable[[int, int, str], Any]:
    """Return a function that makes a classification RBM."""

    def make(n: int, seed: int, device: str) -> Any:
        size = 20 if n < 300 else 50
        return ClassificationMVRBM(
            (24, 24), rank=8, mode=mode, n_epochs=round(1200 * size / n), batch_size=size, random_state=seed,
            device=device, **settings,
        )  # fmt: skip

    return make


DROPPED: dict[str, Any] = {"dropout": 0.5, "input_dropout": 0.2}
# Candidates by row of the table and by name: the function that makes the network, and its use of unlabeled digits.
FEW: dict[str, dict[str, tuple[Callable[[int, int, str], Any], str | None]]] = {
    "unlabeled, semi-supervised": {
        "semi one, distance 1, certainty 1": (semi("one", perturbation=1.0, certainty=1.0), "digits"),
        "semi wide, distance 1.5, certainty 1": (semi("wide", perturbation=1.5, certainty=1.0), "digits"),
        "semi two, stack, distance 1.5, certainty 1": (
            semi("two", perturbation=1.5, certainty=1.0),
            "digits and stack",
        ),
        "semi two, distance 1, certainty 1": (semi("two", perturbation=1.0, certainty=1.0), "digits"),
        "semi wide, distance 1, certainty 0.3": (semi("wide", perturbation=1.0, certainty=0.3), "digits"),
    },
    "labels alone": {
        "one, distance 2": (network("one", perturbation=2.0, dropout=0.0), None),
        "two, distance 2": (network("two", perturbation=2.0, dropout=0.0), None),
        "wide, distance 2": (network("wide", perturbation=2.0, dropout=0.0), None),
        "one, distance 3": (network("one", perturbation=3.0, dropout=0.0), None),
        "one, distance 2, dropout 0.5": (network("one", perturbation=2.0, **DROPPED), None),
        "wide, dropout 0.5": (network("wide", **DROPPED), None),
    },
    "unlabeled, pre-trained": {
        "stack two, distance 2": (network("two", perturbation=2.0, dropout=0.0), "stack"),
        "stack one, distance 2": (network("one", perturbation=2.0, dropout=0.0), "stack"),
        "stack two, dropout 0.5": (network("two", **DROPPED), "stack"),
    },
    "classification RBM": {
        "hybrid 0.01": (machine("hybrid", blend=0.01), None),
        "discriminative": (machine("discriminative"), None),
    },
}


# -- data -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def digits(split: str, data_dir: str | None) -> tuple[Array, Array]:
    """Return images (n, 28, 28) and labels of MNIST."""
    data = load("mnist", split=split, data_dir=data_dir)
    return np.asarray(data.arrays).reshape(-1, 28, 28), np.asarray(data.labels)


def error(model: Any, images: Array, labels: Array) -> float:
    """Return the share of images that a classifier misclassifies."""
    return float(np.mean(model.predict(images) != labels))


def _rows(place: Place, group: str) -> dict[str, dict[str, Any]]:
    assert isinstance(place.store, Rows)
    return place.store.rows(group)


# -- all digits -------------------------------------------------------------------------------------


def choose(settings: Settings, place: Place) -> Outcome:
    """Measure the validation error of a candidate."""
    images, labels = digits("train", place.data_dir)
    make = FULL[settings["kind"]][settings["candidate"]]
    model = make(0, place.device).fit(images[:HELD_OUT], labels[:HELD_OUT])
    wrong = error(model, images[HELD_OUT:], labels[HELD_OUT:])
    numbers = {"kind": settings["kind"], "validation_error": wrong, "parameters": model.n_parameters_}
    return Outcome({**numbers, "loss": model.history_[-1]["loss"]})


def chosen(kind: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the small candidate of a kind with the lowest validation error."""
    small = {n: row for n, row in rows.items() if n in FULL[kind] and row["parameters"] <= MOST_PARAMETERS}
    if not small:
        raise RunError(f"nothing is chosen for '{kind}' yet: run the part 'choose' first")
    return min(small, key=lambda name: (small[name]["validation_error"], small[name]["parameters"]))


def full(settings: Settings, place: Place) -> Outcome:
    """Train the chosen candidate on all digits, and measure its test error."""
    kind, seed = settings["kind"], settings["seed"]
    name = chosen(kind, _rows(place, "choose"))
    model = FULL[kind][name](seed, place.device)
    model.set_params(n_epochs=round(LONGER * model.n_epochs)).fit(*digits("train", place.data_dir))
    row = {"settings": name, "passes": model.n_epochs, "test_error": error(model, *digits("test", place.data_dir))}
    return Outcome({**row, "parameters": model.n_parameters_, "loss": model.history_[-1]["loss"]}, machine=model)


def defaults(settings: Settings, place: Place) -> Outcome:
    """Measure the test error of the classifier without arguments."""
    images, labels = digits("train", place.data_dir)
    rows = subset(len(images), settings["n"], settings["seed"])
    model = MVRBMClassifier(random_state=settings["seed"], device=place.device).fit(images[rows], labels[rows])
    wrong = error(model, *digits("test", place.data_dir))
    return Outcome({"test_error": wrong, "parameters": model.n_parameters_, "loss": model.history_[-1]["loss"]})


# -- few labels -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock file, so that one process at a time enters."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def pretrained(count: int, hidden: str, size: int, place: Place) -> Any:
    """Return the lowest layers of a stack trained on the first `size` digits without labels, training it once."""
    folder = place.work / f"two-{hidden}-{size}"
    with _alone(folder.with_suffix(".lock")):
        if not folder.exists():
            stack = DeepMVRBM(SHAPES["two"], rank=8, hidden=hidden, n_epochs=10, random_state=0, device=place.device)
            stack.fit(digits("train", place.data_dir)[0][:size]).save(folder)
    stack = mvrbm.load(folder, device=place.device)
    # Training is greedy, so the lower machine is the same as if it was trained alone.
    stack.machines_ = stack.machines_[:count]
    return stack


def few(settings: Settings, place: Place) -> Outcome:
    """Learn from n labels, and measure the error on held-out training digits or on the test digits."""
    row = settings["row"]
    n = settings["n"]
    seed = settings["seed"]
    name = settings.get("candidate")
    held_out = name is not None
    if name is None:
        name = chosen_few(row, n, _rows(place, "choose-few"))
    images, labels = digits("train", place.data_dir)
    size = HELD_OUT if held_out else len(images)
    rows = subset(size, n, seed)
    make, uses = FEW[row][name]
    model = make(n, seed, place.device)
    given = {}
    if uses is not None and "stack" in uses:
        given["stack"] = pretrained(len(model.layers), model.hidden, size, place)
    if uses is not None and "digits" in uses:
        given["unlabeled"] = images[:size]
    model.fit(images[rows], labels[rows], **given)
    tested = (images[size:], labels[size:]) if held_out else digits("test", place.data_dir)
    key = "validation_error" if held_out else "test_error"
    return Outcome({"settings": name, key: error(model, *tested), "parameters": model.n_parameters_})


def chosen_few(row: str, n: int, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the candidate of a row with the lowest validation error among those with the most seeds."""
    errors = {}
    for name in FEW[row]:
        found = [runs.get(f"{name} n{n} s{seed}") for seed in CHOOSING_SEEDS]
        errors[name] = [run["validation_error"] for run in found if run is not None]
    most = max(map(len, errors.values()))
    if not most:
        raise RunError(f"nothing is chosen for '{row}' and {n} labels yet: run the part 'choose-few' first")
    return min((name for name in errors if len(errors[name]) == most), key=lambda name: float(np.mean(errors[name])))


def _logistic(seed: int, device: str) -> Any:
    """Return logistic regression with C chosen by cross-validation."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    rows = FunctionTransformer(lambda images: images.reshape(len(images), -1) / 255)
    grid = {"C": [0.003, 0.01, 0.03, 0.1, 1.0]}
    return make_pipeline(rows, GridSearchCV(LogisticRegression(max_iter=5000), grid, cv=5))


def baseline(settings: Settings, place: Place) -> Outcome:
    """Measure the test error of logistic regression or of one of the baselines."""
    from studies.baselines import BASELINES

    name, n, seed = settings["baseline"], settings["n"], settings["seed"]
    images, labels = digits("train", place.data_dir)
    rows = subset(60_000, n, seed)
    model = (_logistic if name == LOGISTIC else BASELINES[name])(seed, place.device)
    model.fit(images[rows], labels[rows])
    numbers: dict[str, Any] = {"test_error": error(model, *digits("test", place.data_dir))}
    if name == LOGISTIC:
        return Outcome({**numbers, "C": model[-1].best_params_["C"], "parameters": 7850})
    return Outcome({**numbers, "parameters": model.n_parameters_})


LOGISTIC = "logistic regression"

# -- the plan ------------------------------------------------------------------------------------------


def _plan() -> Iterator[Run]:
    """Return all runs, the most important ones of each part first."""
    for kind in FULL:
        for name in FULL[kind]:
            yield Run(name, "choose", choose, {"kind": kind, "candidate": name})
    for seed in CHOOSING_SEEDS:
        for row in FEW:
            for name in FEW[row]:
                for n in SIZES:
                    settings = {"row": row, "candidate": name, "n": n, "seed": seed}
                    yield Run(f"{name} n{n} s{seed}", "choose-few", few, settings)
    for kind in FULL:
        for seed in SEEDS:
            yield Run(f"{kind} s{seed}", "full", full, {"kind": kind, "seed": seed})
    for n, seed in [*((10_000, seed) for seed in SEEDS), (60_000, 0)]:
        yield Run(f"n{n} s{seed}", "defaults", defaults, {"n": n, "seed": seed})
    for seed in SEEDS:
        for row in FEW:
            for n in SIZES:
                yield Run(f"{row} n{n} s{seed}", "few", few, {"row": row, "n": n, "seed": seed})
        for name in ("cnn", "dropout", "dbn", LOGISTIC):
            for n in SIZES:
                yield Run(f"{name} n{n} s{seed}", "baselines", baseline, {"baseline": name, "n": n, "seed": seed})


PLAN = tuple(_plan())
#: Parts of the study in their order. Each is a group of runs.
PARTS = tuple(dict.fromkeys(run.group for run in PLAN))


# -- tables -----------------------------------------------------------------------------------------


def _spread(errors: Sequence[float]) -> str:
    return f"{np.mean(errors):.4f} ± {np.std(errors):.4f} ({len(errors)})" if errors else "-"


def table(store: Rows) -> str:
    """Return all stored results as a table."""
    lines = []
    for name, row in store.rows("choose").items():
        what = f"{row['parameters']:,} | {row['validation_error']:.4f} | {row['seconds']:.0f} s"
        lines.append(f"| choose | {name} | {what} |")
    for kind in FULL:
        rows = [row for name, row in store.rows("full").items() if name.startswith(f"{kind} s")]
        if rows:
            what = f"{rows[0]['settings']} | {rows[0]['parameters']:,}"
            lines.append(f"| full | {kind} | {what} | {_spread([row['test_error'] for row in rows])} |")
    for n in (10_000, 60_000):
        rows = [row for name, row in store.rows("defaults").items() if name.startswith(f"n{n} s")]
        if rows:
            what = f"n = {n} | {np.mean([row['seconds'] for row in rows]):.0f} s | {rows[0]['parameters']:,}"
            lines.append(f"| defaults | {what} | {_spread([row['test_error'] for row in rows])} |")
    tested = {**store.rows("few"), **store.rows("baselines")}
    for part, runs, key in (
        ("choose-few", store.rows("choose-few"), "validation_error"),
        ("few", tested, "test_error"),
    ):
        for name in dict.fromkeys(name.rsplit(" n", 1)[0] for name in runs):
            found = [
                _spread([row[key] for run, row in runs.items() if run.startswith(f"{name} n{n} s")]) for n in SIZES
            ]
            lines.append(" | ".join([f"| {part} | {name}", *found]) + " |")
    return "\n".join(lines)


# -- the command ------------------------------------------------------------------------------------


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    add_study_options(parser, "deep", "--only", "--jobs", "--budget", "--device", "--data-dir")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    store = Rows(options.out, options.work)
    result: dict[str, Any] = {"out": str(options.out)}
    if not options.report_only:
        device = resolve_device(options.device).type
        torch.set_num_threads(1)
        if device == "cuda":
            torch.set_float32_matmul_precision("high")
        place = Place(store, device, options.data_dir, options.work)
        parts = options.parts or PARTS
        result |= run_parts(PLAN, parts, place, only=options.only, jobs=options.jobs, budget=options.budget)
    result["rows"] = {part: store.rows(part) for part in PARTS}
    return result, table(store)


COMMANDS = {
    "deep": Command("Deep and discriminative learning on MNIST.", _add, _run, "choose full --device cuda --jobs 4")
}
