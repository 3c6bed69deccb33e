"""Measure what the documentation says of deep and discriminative learning, on full MNIST without augmentation.

    python tools/deep_study.py choose choose-few      # settings, on held-out training digits
    python tools/deep_study.py full few baselines     # what they chose, five seeds; looks at the test digits
    python tools/deep_study.py table                  # print all of it

Every run is a cell, kept in results/deep/<study>.json as soon as it is done, and not repeated. The cells of the
studies that are named are run in that order, the most important ones of each first; `--only TEXT` takes those whose
name contains TEXT, `--jobs J` runs J at a time, and after `--budget SECONDS` none is begun. Digits are found through
MVRBM_DATA.

Choices are made on the last 10,000 training digits, with networks that saw the 50,000 others or subsets of them, and
by rule. `full` takes the candidate of each kind that has the lowest validation error of those with at most 160,000
parameters, a tenth of the dense deep belief network's, and trains it half as long again. `few` takes, for each row
and number of labels, the candidate with the lowest mean validation error of those with the most seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch

from mvrbm import ClassificationMVRBM, DeepMVRBM, DeepMVRBMClassifier, Dense, Kronecker, MVRBMClassifier
from mvrbm.estimators.deep import Layer
from mvrbm.io.datasets import load
from studies.digits.data import subset

STACKS = Path("runs/deep")  # pre-trained stacks, which several cells start from
SIZES, SEEDS = (100, 600, 1000), range(5)
CHOOSING_SEEDS = (100, 101)  # subsets of the first 50,000, apart from those of the table
MOST_PARAMETERS = 160_000
LONGER = 1.5  # passes of what was chosen, times those of the choice


class Place:
    """Where cells are computed and kept; set once a process."""

    out = Path("results/deep")
    device = "cpu"
    deadline = float("inf")


# -- candidates, all digits ---------------------------------------------------------------------------

TWO = (Layer((64, 64), Kronecker(12)), Layer((32, 32), Kronecker(16)))  # 123,914 parameters
TWO_EVEN = (Layer((64, 64), Kronecker(8)), Layer((64, 64), Kronecker(8)))  # 143,370
TWO_SMALL = (Layer((48, 48), Kronecker(8)), Layer((32, 32), Kronecker(16)))  # 84,234
THREE = (Layer((48, 48), Kronecker(8)), Layer((48, 48), Kronecker(8)), Layer((32, 32), Kronecker(12)))  # 111,114
DENSE_TOP = (Layer((40, 40), Kronecker(16)), Layer(64, Dense()))  # 140,554
LONG = {"n_epochs": 60, "batch_size": 256, "averaging": 0.999}


def deep(layers, **settings):
    return lambda seed: DeepMVRBMClassifier(layers, **{**LONG, **settings}, random_state=seed, device=Place.device)


def one(shape, rank, **settings):
    return lambda seed: MVRBMClassifier(
        shape, rank=rank, **{**LONG, **settings}, random_state=seed, device=Place.device
    )


FULL = {
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
UPDATES, UPDATES_WITH_OTHERS = 2400, 12_000


def network(layers, updates=UPDATES, *, batch_size=50, **settings):
    def make(n, seed):
        size = min(batch_size, n)
        return DeepMVRBMClassifier(
            SHAPES[layers],
            **{"rank": 8, "averaging": 0.99, **settings},
            n_epochs=round(updates * size / n),
            batch_size=size,
            random_state=seed,
            device=Place.device,
        )

    return make


def semi(layers, **settings):
    return network(layers, UPDATES_WITH_OTHERS, batch_size=100, **{"averaging": 0.999, "dropout": 0.0, **settings})


def machine(mode, **settings):
    def make(n, seed):
        size = 20 if n < 300 else 50
        return ClassificationMVRBM(
            (24, 24), rank=8, mode=mode, n_epochs=round(1200 * size / n), batch_size=size, random_state=seed,
            device=Place.device, **settings,
        )  # fmt: skip

    return make


DROPPED = {"dropout": 0.5, "input_dropout": 0.2}
# Rows of the table: candidates by name, each how it is made and what it has of the digits without labels.
FEW = {
    "unlabelled, semi-supervised": {
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
    "unlabelled, pre-trained": {
        "stack two, distance 2": (network("two", perturbation=2.0, dropout=0.0), "stack"),
        "stack one, distance 2": (network("one", perturbation=2.0, dropout=0.0), "stack"),
        "stack two, dropout 0.5": (network("two", **DROPPED), "stack"),
    },
    "classification RBM": {
        "hybrid 0.01": (machine("hybrid", blend=0.01), None),
        "discriminative": (machine("discriminative"), None),
    },
}


# -- shared -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def digits(split):
    data = load("mnist", split=split)
    return np.asarray(data.arrays).reshape(-1, 28, 28), np.asarray(data.labels)


def error(model, images, labels):
    return float(np.mean(model.predict(images) != labels))


def read(study):
    path = Place.out / f"{study}.json"
    return json.loads(path.read_text()) if path.exists() else {}


@contextlib.contextmanager
def alone(path):
    """Hold a lock file: one process at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def keep(study, name, row):
    """Add a cell to its study's file."""
    path = Place.out / f"{study}.json"
    with alone(STACKS / f"{study}.lock"):
        done = {**read(study), name: row}
        staging = path.with_suffix(".part")
        staging.write_text(json.dumps(dict(sorted(done.items())), indent=1) + "\n")
        staging.replace(path)


# -- all digits ---------------------------------------------------------------------------------------


def choose(kind, name):
    images, labels = digits("train")
    model = FULL[kind][name](0).fit(images[:50_000], labels[:50_000])
    row = {"validation_error": error(model, images[50_000:], labels[50_000:]), "parameters": model.n_parameters_}
    return {"kind": kind, **row, "loss": model.history_[-1]["loss"]}


def chosen(kind):
    """Name of the candidate of a kind that is best on held-out digits, of those that are small enough."""
    found = {name: row for name, row in read("choose").items() if name in FULL[kind]}
    small = {name: row for name, row in found.items() if row["parameters"] <= MOST_PARAMETERS}
    if not small:
        raise SystemExit(f"nothing is chosen for '{kind}' yet: run the study 'choose' first")
    return min(small, key=lambda name: (small[name]["validation_error"], small[name]["parameters"]))


def full(kind, seed):
    name = chosen(kind)
    model = FULL[kind][name](seed)
    model.set_params(n_epochs=round(LONGER * model.n_epochs)).fit(*digits("train"))
    model.save_pretrained(STACKS / f"full-{kind.replace(' ', '-')}-{seed}")
    row = {"settings": name, "passes": model.n_epochs, "test_error": error(model, *digits("test"))}
    return {**row, "parameters": model.n_parameters_, "loss": model.history_[-1]["loss"]}


# -- few labels ---------------------------------------------------------------------------------------


def pretrained(count, hidden, size):
    """The lowest layers of a stack trained on the first `size` digits, without labels; from its folder if there."""
    folder = STACKS / f"two-{hidden}-{size}"
    with alone(folder.with_suffix(".lock")):
        if not folder.exists():
            stack = DeepMVRBM(SHAPES["two"], rank=8, hidden=hidden, n_epochs=10, random_state=0, device=Place.device)
            stack.fit(digits("train")[0][:size]).save_pretrained(folder)
    stack = DeepMVRBM.from_pretrained(folder, device=Place.device)
    # Training is greedy: the lower machine of the two is the one that would have been trained alone.
    stack.machines_ = stack.machines_[:count]
    return stack


def few(row, name, n, seed, *, held_out):
    """Learn from n labels; errors on held-out training digits, or on the test digits."""
    images, labels = digits("train")
    size = 50_000 if held_out else 60_000
    rows = subset(size, n, seed)
    make, has = FEW[row][name]
    model, given = make(n, seed), {}
    if has is not None and "stack" in has:
        given["stack"] = pretrained(len(model.layers), model.hidden, size)
    if has is not None and "digits" in has:
        given["unlabelled"] = images[:size]
    began = time.perf_counter()
    model.fit(images[rows], labels[rows], **given)
    numbers = {"fit_seconds": round(time.perf_counter() - began, 1), "parameters": model.n_parameters_}
    there = (images[size:], labels[size:]) if held_out else digits("test")
    return {"settings": name, ("validation_error" if held_out else "test_error"): error(model, *there), **numbers}


def chosen_few(row, n):
    """Name of the candidate of a row that is best on held-out digits, of those with the most seeds."""
    cells, errors = read("choose-few"), {}
    for name in FEW[row]:
        found = [cells.get(f"{name} n{n} s{seed}") for seed in CHOOSING_SEEDS]
        errors[name] = [cell["validation_error"] for cell in found if cell is not None]
    most = max(map(len, errors.values()))
    if not most:
        raise SystemExit(f"nothing is chosen for '{row}' and {n} labels yet: run the study 'choose-few' first")
    return min((name for name in errors if len(errors[name]) == most), key=lambda name: np.mean(errors[name]))


def logistic(n, seed):
    """Logistic regression, C by cross-validation."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV

    images, labels = digits("train")
    rows = subset(60_000, n, seed)
    search = GridSearchCV(LogisticRegression(max_iter=5000), {"C": [0.003, 0.01, 0.03, 0.1, 1.0]}, cv=5)
    search.fit(images[rows].reshape(n, -1) / 255, labels[rows])
    there, truth = digits("test")
    wrong = float(np.mean(search.predict(there.reshape(len(there), -1) / 255) != truth))
    return {"test_error": wrong, "C": search.best_params_["C"], "parameters": 7850, "device": "cpu"}


def baseline(name, n, seed):
    """One of the networks that the digits are classified with elsewhere, as it is there."""
    if name == "logistic regression":
        return logistic(n, seed)
    from studies.baselines import BASELINES

    images, labels = digits("train")
    rows = subset(60_000, n, seed)
    model = BASELINES[name](seed, Place.device).fit(images[rows], labels[rows])
    return {"test_error": error(model, *digits("test")), "parameters": model.n_parameters_}


# -- cells --------------------------------------------------------------------------------------------


def all_cells(study):
    """The cells of a study by name, most important first."""
    if study == "choose":
        return {name: functools.partial(choose, kind, name) for kind in FULL for name in FULL[kind]}
    if study == "full":
        return {f"{kind} s{seed}": functools.partial(full, kind, seed) for kind in FULL for seed in SEEDS}
    if study == "choose-few":
        return {
            f"{name} n{n} s{seed}": functools.partial(few, row, name, n, seed, held_out=True)
            for seed in CHOOSING_SEEDS
            for row in FEW
            for name in FEW[row]
            for n in SIZES
        }
    if study == "few":
        return {
            f"{row} n{n} s{seed}": lambda row=row, n=n, seed=seed: few(row, chosen_few(row, n), n, seed, held_out=False)
            for seed in SEEDS
            for row in FEW
            for n in SIZES
        }
    return {
        f"{name} n{n} s{seed}": functools.partial(baseline, name, n, seed)
        for seed in SEEDS
        for name in ("cnn", "dropout", "dbn", "logistic regression")
        for n in SIZES
    }


def begin(out, device, deadline):
    """Set up a process."""
    Place.out, Place.device, Place.deadline = out, device, deadline
    torch.set_num_threads(1)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")


def run_cell(cell):
    """Run a cell if there is time, keep its row, and return whether it failed, with what to say about it."""
    study, name = cell
    if time.time() > Place.deadline:
        return False, f"{study}: {name}: no time left"
    began = time.perf_counter()
    try:
        row = all_cells(study)[name]()
    except (Exception, SystemExit):
        return True, f"{study}: {name}: {traceback.format_exc()}"
    row = {"device": Place.device, **row, "seconds": round(time.perf_counter() - began, 1)}
    keep(study, name, row)
    return False, f"{study}: {name}: {row}"


def run(studies, only, jobs):
    """Run the cells that are not there yet; return how many failed."""
    missing = [(study, name) for study in studies for name in all_cells(study) if name not in read(study)]
    cells, failures = [cell for cell in missing if only in cell[1]], 0
    Place.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if jobs > 1:
            os.environ["OMP_NUM_THREADS"] = "1"
            settings = (Place.out, Place.device, Place.deadline)
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs, begin, settings))
            results = pool.imap_unordered(run_cell, cells)
        else:
            results = map(run_cell, cells)
        for failed, line in results:
            failures += failed
            print(line, flush=True)
    return failures


# -- tables -------------------------------------------------------------------------------------------


def spread(errors):
    return f"{np.mean(errors):.4f} ± {np.std(errors):.4f} ({len(errors)})" if errors else "-"


def table():
    for name, row in read("choose").items():
        print(f"| choose | {name} | {row['parameters']:,} | {row['validation_error']:.4f} | {row['seconds']:.0f} s |")
    for kind in FULL:
        rows = [row for name, row in read("full").items() if name.startswith(f"{kind} s")]
        if rows:
            what = f"{rows[0]['settings']} | {rows[0]['parameters']:,}"
            print(f"| full | {kind} | {what} | {spread([row['test_error'] for row in rows])} |")
    few_and_baselines = {**read("few"), **read("baselines")}
    for study, cells, key in (
        ("choose-few", read("choose-few"), "validation_error"),
        ("few", few_and_baselines, "test_error"),
    ):
        for name in dict.fromkeys(name.rsplit(" n", 1)[0] for name in cells):
            found = [
                spread([row[key] for cell, row in cells.items() if cell.startswith(f"{name} n{n} s")]) for n in SIZES
            ]
            print(" | ".join([f"| {study} | {name}", *found]), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ["choose", "choose-few", "full", "few", "baselines", "table"]
    parser.add_argument("studies", nargs="+", choices=known)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell is begun")
    parser.add_argument("--out", type=Path, default=Place.out)
    arguments = parser.parse_args()
    begin(arguments.out, arguments.device, time.time() + arguments.budget)
    if "table" in arguments.studies:
        table()
    elif run(arguments.studies, arguments.only, arguments.jobs):
        sys.exit(1)
