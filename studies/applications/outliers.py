"""Outlier detection by our detector and by the usual tools, and maps of planted defects.

In each task the training samples are of one class and the test samples of all classes; the other classes are outliers.
Every tool gets the same samples as rows and has its default settings. Tables are standardized for the tools that need
it. The settings of our detector were chosen on digits 3 and 8 of MNIST, with the last 10,000 training digits as
outliers, and on digits 3 and 8 of scikit-learn, so results on these classes are not independent evidence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import LocalOutlierFactor, NearestNeighbors
from sklearn.preprocessing import StandardScaler
from sklearn.svm import OneClassSVM

from mvrbm import MVRBMOutlierDetector
from mvrbm.io import datasets
from studies.runs import Outcome, Place, Run, Store, complete

__all__ = ["DIGITS", "OURS", "TABLES", "TOOLS", "plan", "plant_defects", "share_found", "table"]

Array = NDArray[Any]
OURS = "mvrbm"
DIGITS = tuple(range(10))
#: Data sets of scikit-learn, with the classes that are normal in turn.
TABLES = {"cancer": (1,), "wine": (0, 1, 2), "digits": DIGITS}

# Rows, and columns, of a planted defect.
_DEFECT = 3
# Share of the pixels of a map that must contain most of the defect.
_TOP = 0.05
_MOST_DEFECTS = 200
# Number of seeds of the two tools that draw random numbers.
_N_SEEDS = 2


def _pca_error(train: Array, test: Array, seed: int) -> Array:
    # 80 % of the variance are about 30 components on MNIST; 20 to 40 were best for this tool on other digits.
    pca = PCA(0.8, svd_solver="full").fit(train)
    error: Array = ((test - pca.inverse_transform(pca.transform(test))) ** 2).sum(1)
    return error


def _neighbor_distance(train: Array, test: Array, seed: int) -> Array:
    distance: Array = NearestNeighbors(n_neighbors=5).fit(train).kneighbors(test)[0].mean(1)
    return distance


def _scikit_learn(make: Callable[[int], Any]) -> Callable[[Array, Array, int], Array]:
    return lambda train, test, seed: -make(seed).fit(train).score_samples(test)


def _pyod(name: str) -> Callable[[Array, Array, int], Array]:
    def score(train: Array, test: Array, seed: int) -> Array:
        import importlib

        detector = getattr(importlib.import_module(f"pyod.models.{name}"), name.upper())()
        scores: Array = detector.fit(train).decision_function(test)
        return scores

    return score


#: Functions that take training rows, test rows and a seed, and score the test rows; higher is more unusual.
TOOLS: dict[str, Callable[[Array, Array, int], Array]] = {
    "pca-error": _pca_error,
    "5-nearest": _neighbor_distance,
    "isolation-forest": _scikit_learn(lambda seed: IsolationForest(random_state=seed)),
    "one-class-svm": _scikit_learn(lambda _: OneClassSVM()),
    "lof": _scikit_learn(lambda _: LocalOutlierFactor(novelty=True)),
    "ecod": _pyod("ecod"),
    "hbos": _pyod("hbos"),
}


def plan(tasks: Sequence[str] = ("mnist", *TABLES), *, n_test: int | None = None) -> list[Run]:
    """Return one run per task, class, tool and seed; `n_test` limits the number of test digits."""
    found = []
    for task in tasks:
        for normal in DIGITS if task == "mnist" else TABLES[task]:
            for tool in (OURS, *TOOLS):
                needs = ("pyod",) if tool in ("ecod", "hbos") else ()
                for seed in range(_N_SEEDS if tool in (OURS, "isolation-forest") else 1):
                    settings = {"task": task, "normal": normal, "tool": tool, "n_test": n_test, "seed": seed}
                    name = f"outliers-{task}-{normal}-{tool}-{seed}"
                    found.append(Run(name, f"outliers-{task}", _compare, settings, (), needs))
    return found


def _compare(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the AUC and the CPU time of a tool, and the share of defects that our detector locates in digits."""
    train, test, is_outlier = _samples(settings["task"], settings["normal"], settings["n_test"], place.data_dir)
    start = time.process_time()
    numbers = {}
    if settings["tool"] == OURS:
        detector = MVRBMOutlierDetector(random_state=settings["seed"], device=place.device).fit(train)
        numbers["cpu_seconds_fit"] = time.process_time() - start
        scores = -detector.score_samples(test)
    else:
        scaler = StandardScaler().fit(_rows(train)) if settings["task"] in ("cancer", "wine") else None
        own, asked = (_rows(part) if scaler is None else scaler.transform(_rows(part)) for part in (train, test))
        scores = TOOLS[settings["tool"]](own, asked, settings["seed"])
    numbers |= {"auc": roc_auc_score(is_outlier, scores), "cpu_seconds": time.process_time() - start}
    if settings["tool"] == OURS and settings["task"] == "mnist":
        planted, where = plant_defects(test[~is_outlier][:_MOST_DEFECTS], np.random.default_rng(0))
        numbers["defects_found"] = share_found(detector.explain(planted), where)
    return Outcome(numbers)


def _samples(task: str, normal: int, n_test: int | None, data_dir: str | None) -> tuple[Array, Array, Array]:
    """Return training samples of a class, test samples, and a mask of the outliers among these."""
    if task == "mnist":
        train, test = (datasets.load("mnist", split=split, data_dir=data_dir) for split in ("train", "test"))
        rows = np.linspace(0, len(test.arrays) - 1, n_test or len(test.arrays)).astype(int)
        scaled = [(part / 255).astype(np.float32) for part in (train.arrays[train.labels == normal], test.arrays[rows])]
        return scaled[0], scaled[1], test.labels[rows] != normal
    data, target = _table(task)
    own = np.random.default_rng(0).permutation(np.flatnonzero(target == normal))
    test_rows = np.concatenate([own[len(own) // 2 :], np.flatnonzero(target != normal)])
    return data[own[: len(own) // 2]], data[test_rows], target[test_rows] != normal


def _table(name: str) -> tuple[Array, Array]:
    from sklearn.datasets import load_breast_cancer, load_digits, load_wine

    found = {"cancer": load_breast_cancer, "wine": load_wine, "digits": load_digits}[name]()
    if name == "digits":
        return (found.images / 16).astype(np.float32), found.target
    return found.data, found.target


def plant_defects(images: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return copies of images with a 3x3 square in the stroke inverted, and a mask of these squares."""
    changed = images.copy()
    where = np.zeros(images.shape, dtype=bool)
    for image, mask in zip(changed, where, strict=True):
        inner = image[1:-1, 1:-1]  # the index of a pixel here is the upper left corner of the square around it
        row, column = rng.permutation(np.argwhere(inner > 0.5))[0]
        square = np.s_[row : row + _DEFECT, column : column + _DEFECT]
        image[square] = 1 - image[square]
        mask[square] = True
    return changed, where


def share_found(maps: Array, where: Array) -> float:
    """Return the share of maps whose top 5 % contain most of the defect."""
    rows, planted = _rows(maps), _rows(where)
    top = rows >= np.quantile(rows, 1 - _TOP, axis=1, keepdims=True)
    found = (top & planted).sum(1) > planted.sum(1) / 2
    return float(found.mean())


def table(store: Store, plan: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the mean AUC over classes, by task and tool, and the share of defects found, for complete tasks."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in complete(store, plan, "task"):
        task = run.settings["task"]
        tool = run.settings["tool"]
        numbers = store.numbers(run)
        values.setdefault(task, {}).setdefault(tool, []).append(numbers["auc"])
        if "defects_found" in numbers:
            row = values.setdefault(f"{task}, share of defects in the top 5 % of the map", {})
            row.setdefault(tool, []).append(numbers["defects_found"])
    return {task: {tool: float(np.mean(found)) for tool, found in tools.items()} for task, tools in values.items()}


def _rows(array: Array) -> Array:
    return array.reshape(len(array), -1)
