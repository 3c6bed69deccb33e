"""Measure what the documentation says of deep and discriminative learning, on full MNIST without augmentation.

    python tools/deep_study.py choose           # settings of the fine-tuned networks, on held-out training digits
    python tools/deep_study.py choose-few       # the same for few labels
    python tools/deep_study.py full             # what was chosen, retrained on all 60,000; looks at the test digits
    python tools/deep_study.py few              # few labels: ours, and logistic regression
    python tools/deep_study.py baselines        # few labels: dropout network, CNN, DBN
    python tools/deep_study.py table            # print all of it

Every run is a cell, kept in results/deep/<study>.json, and not repeated. `--only TEXT` takes the cells whose name
contains TEXT. Choices are made on the last 10,000 training digits, with networks that saw the 50,000 others, or
subsets of them. Digits are found through MVRBM_DATA.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from mvrbm import ClassificationMVRBM, DeepMVRBM, DeepMVRBMClassifier, MVRBMClassifier
from mvrbm.datasets import load
from mvrbm.experiments.digits.data import subset

OUT = Path("results/deep")
STACKS = Path("runs/deep")  # pre-trained stacks, which several cells start from
SIZES, SEEDS = (100, 600, 1000), range(5)
CHOOSING_SEEDS = (100, 101)  # subsets of the first 50,000, apart from those of the table


# -- settings -----------------------------------------------------------------------------------------

TWO = {"layers": ((32, 32), (32, 32)), "n_iter": 30, "input_dropout": 0.1, "random_state": 0}
FULL = {
    # The setting of the prototype in the design: nothing was chosen here.
    "one R16, dropout 0.3": lambda: MVRBMClassifier((32, 32), rank=16, n_iter=40, dropout=0.3, random_state=0),
    "one wide R8, dropout 0.4": lambda: MVRBMClassifier(
        (64, 64), rank=8, n_iter=30, dropout=0.4, input_dropout=0.1, averaging=0.99, random_state=0
    ),
    "two wide R4, dropout 0.3": lambda: DeepMVRBMClassifier(
        **{**TWO, "layers": ((48, 48), (32, 32))}, rank=4, dropout=0.3, averaging=0.99
    ),
    "two R8, dropout 0.2": lambda: DeepMVRBMClassifier(**TWO, rank=8, dropout=0.2, averaging=0.99),
    "two R8, dropout 0.3": lambda: DeepMVRBMClassifier(**TWO, rank=8, dropout=0.3, averaging=0.99),
    "two R16, dropout 0.3": lambda: DeepMVRBMClassifier(**TWO, rank=16, dropout=0.3, averaging=0.999),
}
CHOSEN = {"one layer": "one R16, dropout 0.3", "two layers": "two R8, dropout 0.3"}
PASSES = {"two layers": 50}  # longer than in the choice, where 30 had to do


# -- shared -------------------------------------------------------------------------------------------


def digits(split):
    data = load("mnist", split=split)
    return np.asarray(data.arrays).reshape(-1, 28, 28), np.asarray(data.labels)


def error(model, images, labels):
    return float(np.mean(model.predict(images) != labels))


def run(study, cells, only):
    """Run the cells that are not there yet, and write each as soon as it is done."""
    path = OUT / f"{study}.json"
    OUT.mkdir(parents=True, exist_ok=True)
    for name, work in cells.items():
        done = json.loads(path.read_text()) if path.exists() else {}
        if name in done or (only and only not in name):
            continue
        began = time.perf_counter()
        row = work()
        row |= {"seconds": round(time.perf_counter() - began, 1), "threads": torch.get_num_threads()}
        done = json.loads(path.read_text()) if path.exists() else {}  # another process may have written since
        done[name] = row
        staging = path.with_suffix(f".{os.getpid()}")
        staging.write_text(json.dumps(dict(sorted(done.items())), indent=1) + "\n")
        staging.replace(path)
        print(name, row, flush=True)


# -- all digits ---------------------------------------------------------------------------------------


def choose(name):
    images, labels = digits("train")
    model = FULL[name]().fit(images[:50_000], labels[:50_000])
    row = {"validation_error": error(model, images[50_000:], labels[50_000:]), "parameters": model.n_parameters_}
    return {**row, "loss": model.history_[-1]["loss"]}


def full(name):
    model = FULL[CHOSEN[name]]()
    model.set_params(n_iter=PASSES.get(name, model.n_iter)).fit(*digits("train"))
    model.save_pretrained(STACKS / f"full-{name.replace(' ', '-')}")
    row = {
        "settings": CHOSEN[name],
        "passes": model.n_iter,
        "test_error": error(model, *digits("test")),
        "parameters": model.n_parameters_,
    }
    return {**row, "loss": model.history_[-1]["loss"]}


# -- few labels ---------------------------------------------------------------------------------------

LAYERS = {"one": ((32, 32),), "two": ((32, 32), (24, 24))}


def budget(n):
    """Batch size and passes for so many labels: about 1,200 updates."""
    return {"batch_size": 20 if n < 300 else 50, "n_iter": {100: 240, 600: 100, 1000: 60}[n]}


def network(layers, n, seed, **settings):
    return DeepMVRBMClassifier(
        LAYERS[layers], rank=8, random_state=seed, **{**budget(n), "averaging": 0.99, **settings}
    )


def machine(mode, n, seed, **settings):
    return ClassificationMVRBM((24, 24), rank=8, mode=mode, random_state=seed, **{**budget(n), **settings})


RELU = {"hidden": "rectified", "input_dropout": 0.2}
SIGMOID = {"hidden": "bernoulli", "input_dropout": 0.2}
# Name: how the classifier is made, and which stack, pre-trained on all unlabelled digits, it starts from.
FEW = {
    "one, dropout 0.5": (lambda n, s: network("one", n, s, **RELU, dropout=0.5), None),
    "one, dropout 0.3": (lambda n, s: network("one", n, s, **RELU, dropout=0.3), None),
    "two, dropout 0.5": (lambda n, s: network("two", n, s, **RELU, dropout=0.5), None),
    "one, pre-trained, sigmoid": (lambda n, s: network("one", n, s, **SIGMOID, dropout=0.3, pretraining=30), None),
    "two, pre-trained, sigmoid": (lambda n, s: network("two", n, s, **SIGMOID, dropout=0.3, pretraining=30), None),
    "one, unlabelled, sigmoid": (lambda n, s: network("one", n, s, **SIGMOID, dropout=0.3), ("one", "bernoulli")),
    "one, unlabelled, rectified": (lambda n, s: network("one", n, s, **RELU, dropout=0.5), ("one", "rectified")),
    "two, unlabelled, sigmoid": (lambda n, s: network("two", n, s, **SIGMOID, dropout=0.3), ("two", "bernoulli")),
    "two, unlabelled, rectified": (lambda n, s: network("two", n, s, **RELU, dropout=0.5), ("two", "rectified")),
    "classification RBM, discriminative": (lambda n, s: machine("discriminative", n, s), None),
    "classification RBM, hybrid 0.01": (lambda n, s: machine("hybrid", n, s, blend=0.01), None),
    "classification RBM, hybrid 0.1": (lambda n, s: machine("hybrid", n, s, blend=0.1), None),
    "classification RBM, generative": (lambda n, s: machine("generative", n, s), None),
}
CHOSEN_FEW = (
    "one, dropout 0.5",
    "two, dropout 0.5",
    "one, pre-trained, sigmoid",
    "two, pre-trained, sigmoid",
    "one, unlabelled, rectified",
    "two, unlabelled, rectified",
    "classification RBM, discriminative",
    "classification RBM, hybrid 0.01",
    "classification RBM, generative",
)


def pretrained(layers, hidden, size):
    """A stack trained on the first `size` digits without labels, from its folder if it is there."""
    folder = STACKS / f"two-{hidden}-{size}"
    if not folder.exists():
        stack = DeepMVRBM(LAYERS["two"], rank=8, hidden=hidden, n_iter=10, random_state=0)
        stack.fit(digits("train")[0][:size]).save_pretrained(folder)
    stack = DeepMVRBM.from_pretrained(folder)
    # Training is greedy: the lower machine of the two is the one that would have been trained alone.
    stack.machines_ = stack.machines_[: len(LAYERS[layers])]
    return stack


def few(name, n, seed, *, held_out):
    """Learn from n labels; errors on held-out training digits, or on the test digits."""
    images, labels = digits("train")
    size = 50_000 if held_out else 60_000
    rows = subset(size, n, seed)
    make, wanted = FEW[name]
    stack = None if wanted is None else pretrained(*wanted, size)
    model = make(n, seed)
    began = time.perf_counter()
    model.fit(images[rows], labels[rows], **({} if stack is None else {"stack": stack}))
    row = {"fit_seconds": round(time.perf_counter() - began, 1), "parameters": model.n_parameters_}
    there = (images[size:], labels[size:]) if held_out else digits("test")
    return {("validation_error" if held_out else "test_error"): error(model, *there), **row}


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
    return {"test_error": wrong, "C": search.best_params_["C"], "parameters": 7850}


def baseline(name, n, seed):
    """One of the Digits issue's networks, as it is there."""
    from mvrbm.baselines import BASELINES

    images, labels = digits("train")
    rows = subset(60_000, n, seed)
    model = BASELINES[name](seed, "cpu").fit(images[rows], labels[rows])
    return {"test_error": error(model, *digits("test")), "parameters": model.n_parameters_}


def few_cells():
    cells = {}
    for seed in SEEDS:
        for n in SIZES:
            cells[f"logistic regression n{n} s{seed}"] = lambda n=n, seed=seed: logistic(n, seed)
            for name in CHOSEN_FEW:
                cells[f"{name} n{n} s{seed}"] = lambda name=name, n=n, seed=seed: few(name, n, seed, held_out=False)
    return cells


# -- tables -------------------------------------------------------------------------------------------


def read(study):
    path = OUT / f"{study}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def table():
    for study, key in (("choose", "validation_error"), ("full", "test_error")):
        for name, row in read(study).items():
            print(f"| {study} | {name} | {row['parameters']:,} | {row[key]:.4f} | {row['seconds']:.0f} s |")
    for study, sizes, key in (("choose-few", (600,), "validation_error"), ("few", SIZES, "test_error")):
        cells = {**read(study), **(read("baselines") if study == "few" else {})}
        names = dict.fromkeys(name.rsplit(" n", 1)[0] for name in cells)
        for name in names:
            line = [f"| {study} | {name} "]
            for n in sizes:
                found = [row[key] for cell, row in cells.items() if cell.startswith(f"{name} n{n} s")]
                line.append(f"{np.mean(found):.4f} ± {np.std(found):.4f} ({len(found)})" if found else "-")
            print(" | ".join(line), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["choose", "choose-few", "full", "few", "baselines", "table"])
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    studies = {
        "choose": lambda: {name: (lambda name=name: choose(name)) for name in FULL},
        "full": lambda: {name: (lambda name=name: full(name)) for name in CHOSEN},
        "choose-few": lambda: {
            f"{name} n600 s{seed}": (lambda name=name, seed=seed: few(name, 600, seed, held_out=True))
            for name in FEW
            for seed in CHOOSING_SEEDS
        },
        "few": few_cells,
        "baselines": lambda: {
            f"{name} n{n} s{seed}": (lambda name=name, n=n, seed=seed: baseline(name, n, seed))
            for seed in SEEDS
            for n in SIZES
            for name in ("dropout", "cnn", "dbn")
        },
    }
    if arguments.study == "table":
        table()
    else:
        run(arguments.study, studies[arguments.study](), arguments.only)
