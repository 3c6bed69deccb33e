"""Filling in parts of unseen images, digits of MNIST and Frey faces, by our imputer and by simple tools.

Tools learn from complete training images. The settings of PCA with ridge regression are chosen on held-out training
images.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm import MVRBMImputer
from mvrbm.io import datasets
from studies.applications.imputation import OURS, SETS
from studies.runs import Outcome, Place, Run, Store

__all__ = ["EPOCHS", "PARTS", "TOOLS", "missing", "plan", "table"]

Array = NDArray[Any]
#: Parts of an image that are missing.
PARTS = ("right half", "50% of the pixels", "80% of the pixels")
#: Numbers of epochs after which faces are filled in: the error must not grow with training.
EPOCHS = (1, 2, 4, 8, 16, 32, 64, 128)
# Settings of PCA with ridge regression to choose from.
_RANKS = (25, 50, 100, 200)
_PENALTIES = (0.3, 1.0, 3.0)


def missing(shape: Sequence[int], part: str) -> Array:
    """Return a mask of the missing pixels."""
    if part == "right half":
        return np.broadcast_to(np.arange(shape[2]) >= shape[2] // 2, shape)
    return np.random.default_rng(0).random(shape) < int(part[:2]) / 100


def _images(name: str, n: int | None, data_dir: str | None) -> tuple[Array, Array]:
    """Return training and test images from 0 to 1."""
    if name == "mnist":
        train, test = (datasets.load("mnist", split=split, data_dir=data_dir).arrays for split in ("train", "test"))
        return (train[:n] / 255).astype(np.float32), (test[:n] / 255).astype(np.float32)
    images = SETS[name](data_dir)[:n].astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order[len(order) // 5 :]], images[order[: len(order) // 5]]


def _mean(train: Array, x: Array) -> Array:
    return np.broadcast_to(train.mean(0), x.shape)


def _nearest(train: Array, x: Array) -> Array:
    """Return the mean of the five training images that are nearest in the known pixels."""
    known = ~np.isnan(x)
    rows = np.nan_to_num(x)
    found = np.empty_like(x)
    for i in range(0, len(x), 100):
        some = rows[i : i + 100]
        mask = known[i : i + 100].astype(x.dtype)
        distance = mask @ (train**2).T - 2 * some @ train.T
        found[i : i + 100] = train[np.argpartition(distance, 5, axis=1)[:, :5]].mean(1)
    return found


def _pca(train: Array, x: Array) -> Array:
    """Predict pixels by principal components, fitted to the known pixels by ridge regression."""
    held = train[: len(train) // 10][:300]
    rest = train[len(held) :]
    mask = np.isnan(x)[np.arange(len(held)) % len(x)]
    settings = list(itertools.product(_RANKS, _PENALTIES))
    errors = [((_ridge(rest, np.where(mask, np.nan, held), *setting) - held)[mask] ** 2).mean() for setting in settings]
    return _ridge(train, x, *settings[int(np.argmin(errors))])


def _ridge(train: Array, x: Array, rank: int, penalty: float) -> Array:
    mean = train.mean(0)
    values, vectors = np.linalg.eigh(np.cov(train.T, dtype=np.float64))
    rest = values[:-rank].mean()
    basis = (vectors[:, -rank:] * np.sqrt(values[-rank:])).astype(np.float32)  # coefficients have variance 1
    filled = np.empty_like(x)
    for row, out in zip(x, filled, strict=True):
        known = ~np.isnan(row)
        own = basis[known]
        out[:] = mean + basis @ np.linalg.solve(
            own.T @ own + penalty * rest * np.eye(rank, dtype=np.float32), own.T @ (row - mean)[known]
        )
    return filled


#: Functions that take training images and images with NaN, both as rows, and predict all pixels.
TOOLS: dict[str, Callable[[Array, Array], Array]] = {"mean": _mean, "5-nearest": _nearest, "pca-ridge": _pca}


def plan(sets: Sequence[str] = ("mnist", "frey"), *, n: int | None = None) -> list[Run]:
    """Return one run per set and tool, and for faces also one per number of epochs; `n` limits the images."""
    found = []
    for name, tool in itertools.product(sets, (*TOOLS, OURS)):
        settings = {"set": name, "tool": tool, "n": n, "epochs": None}
        found.append(Run(f"filling-{name}-{tool}", "filling", _compare, settings))
    for epochs in EPOCHS if "frey" in sets else ():
        settings = {"set": "frey", "tool": OURS, "n": n, "epochs": epochs}
        found.append(Run(f"filling-frey-{OURS}-{epochs}", "filling", _compare, settings))
    return found


def _compare(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the mean squared errors of a tool, and the CPU time of training ours."""
    train, test = _images(settings["set"], settings["n"], place.data_dir)
    start = time.process_time()
    numbers = {}
    imputer = None
    if settings["tool"] == OURS:
        imputer = MVRBMImputer(n_epochs=settings["epochs"], random_state=0, device=place.device).fit(train)
        numbers = {"cpu_seconds": time.process_time() - start, "factors": imputer.n_factors_}
    for part in PARTS:
        hidden = missing(test.shape, part)
        x = np.where(hidden, np.nan, test)
        if imputer is not None:
            found = imputer.transform(x)
        else:
            rows = TOOLS[settings["tool"]](train.reshape(len(train), -1), x.reshape(len(x), -1))
            found = np.clip(rows.reshape(x.shape), 0, 1)
        numbers[part] = float(((found - test)[hidden] ** 2).mean())
    return Outcome(numbers)


def table(store: Store, plan: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the errors of the stored runs, by task (set, part and number of epochs) and tool."""
    values: dict[str, dict[str, float]] = {}
    for run in plan:
        if store.has(run):
            epochs = run.settings["epochs"]
            for part in PARTS:
                trained = "" if epochs is None else f", after {epochs} epoch{'s' if epochs > 1 else ''}"
                task = f"{run.settings['set']}, {part}{trained}"
                values.setdefault(task, {})[run.settings["tool"]] = store.numbers(run)[part]
    return values
