"""Outlier detection by our detector and by the usual tools, and maps of planted defects.

Every tool gets the same samples as rows, and has its default settings. Columns of tables are standardized for the other
tools. The defaults of our detector were chosen with these families of data, on other random splits, so the results are
not independent evidence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.covariance import LedoitWolf
from sklearn.decomposition import PCA
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import LocalOutlierFactor, NearestNeighbors
from sklearn.preprocessing import StandardScaler
from sklearn.svm import OneClassSVM

from mvrbm import MVRBMOutlierDetector
from studies.applications.outlier_families import FAMILIES, Task
from studies.runs import Outcome, Place, Run, Store, complete

__all__ = ["OURS", "TOOLS", "plan", "plant_defects", "share_found", "table"]

Array = NDArray[Any]
OURS = "mvrbm"

# Rows, and columns, of a planted defect.
_DEFECT = 3
# Share of the pixels of a map that must contain most of the defect.
_TOP = 0.05
_MOST_DEFECTS = 200
_N_SEEDS = 2


def _pca_error(train: Array, test: Array, seed: int) -> Array:
    pca = PCA(0.8, svd_solver="full").fit(train)
    error: Array = ((test - pca.inverse_transform(pca.transform(test))) ** 2).sum(1)
    return error


def _neighbor_distance(train: Array, test: Array, seed: int) -> Array:
    distance: Array = NearestNeighbors(n_neighbors=5).fit(train).kneighbors(test)[0].mean(1)
    return distance


def _mahalanobis(train: Array, test: Array, seed: int) -> Array:
    distance: Array = LedoitWolf().fit(train).mahalanobis(test)
    return distance


def _scikit_learn(make: Callable[[int], Any]) -> Callable[[Array, Array, int], Array]:
    return lambda train, test, seed: -make(seed).fit(train).score_samples(test)


#: Functions that take training rows, test rows and a seed, and score the test rows; higher is more unusual.
TOOLS: dict[str, Callable[[Array, Array, int], Array]] = {
    "pca-error": _pca_error,
    "mahalanobis": _mahalanobis,
    "5-nearest": _neighbor_distance,
    "isolation-forest": _scikit_learn(lambda seed: IsolationForest(random_state=seed)),
    "one-class-svm": _scikit_learn(lambda _: OneClassSVM()),
    "lof": _scikit_learn(lambda _: LocalOutlierFactor(novelty=True)),
}


def plan(families: Sequence[str] = tuple(FAMILIES)) -> list[Run]:
    """Return one run per task and seed, in which every tool is measured."""
    found = []
    for family in families:
        for task in FAMILIES[family][0]:
            for seed in range(_N_SEEDS):
                name = f"outliers-{family}-{task}-{seed}".replace(" ", "-").replace("_", "-")
                found.append(Run(name, "outliers", _compare, {"family": family, "task": task, "seed": seed}))
    return found


def _compare(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the AUC and the CPU time of every tool, and the share of defects that our maps locate in MNIST."""
    family, seed = settings["family"], settings["seed"]
    task: Task = FAMILIES[family][1](settings["task"], np.random.default_rng(seed), place.data_dir)
    test = np.concatenate([task.normal, task.outliers])
    is_outlier = np.arange(len(test)) >= len(task.normal)
    train_rows, test_rows = _rows(task.train), _rows(test)
    if family == "tables":
        scaler = StandardScaler().fit(train_rows)
        train_rows, test_rows = scaler.transform(train_rows), scaler.transform(test_rows)
    auc, seconds = {}, {}
    for tool in (OURS, *TOOLS):
        start = time.process_time()
        if tool == OURS:
            detector = MVRBMOutlierDetector().fit(task.train)
            scores = -detector.score_samples(test)
        else:
            scores = TOOLS[tool](train_rows, test_rows, seed)
        seconds[tool] = time.process_time() - start
        auc[tool] = float(roc_auc_score(is_outlier, scores))
    numbers: dict[str, Any] = {"auc": auc, "cpu_seconds": seconds}
    if family == "mnist":
        planted, where = plant_defects(task.normal[:_MOST_DEFECTS], np.random.default_rng(seed))
        numbers["defects_found"] = share_found(detector.explain(planted), where)
    return Outcome(numbers)


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
    """Return the share of maps whose top 5% contain most of the defect."""
    rows, planted = _rows(maps), _rows(where)
    top = rows >= np.quantile(rows, 1 - _TOP, axis=1, keepdims=True)
    found = (top & planted).sum(1) > planted.sum(1) / 2
    return float(found.mean())


def table(store: Store, plan: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the mean AUC by family and tool, the mean over families, and the share of defects found."""
    runs = complete(store, plan, "family")
    families = {
        family: _means([store.numbers(run)["auc"] for run in runs if run.settings["family"] == family])
        for family in dict.fromkeys(run.settings["family"] for run in runs)
    }
    found = dict(families)
    if len(families) > 1:
        found["mean of the families"] = _means(list(families.values()))
    if "mnist" in families:
        shares = [store.numbers(run)["defects_found"] for run in runs if run.settings["family"] == "mnist"]
        found["mnist, share of defects in the top 5% of the map"] = {OURS: float(np.mean(shares))}
    return found


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {tool: float(np.mean([row[tool] for row in rows])) for tool in rows[0]}


def _rows(array: Array) -> Array:
    return array.reshape(len(array), -1)
