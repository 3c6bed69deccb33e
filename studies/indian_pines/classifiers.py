"""A linear support vector machine and the nearest neighbor on features; settings are chosen on held-out blocks.

Both work on inner products, which are computed once per scaling for all folds and costs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, cohen_kappa_score, recall_score
from sklearn.svm import SVC

__all__ = ["CLASSIFIERS", "Features", "Prediction", "best_outcome", "predict", "scaled", "scores"]

Array = NDArray[Any]

CLASSIFIERS = ("svm", "1-nn")
_COSTS = (0.01, 0.1, 1.0, 10.0, 100.0)
_SCALINGS = ("each", "all")
_SVM_STEPS = 20_000  # largest number per pair of classes; a few hundred are usual


@dataclass(frozen=True)
class Features:
    """Features of the training pixels, one row each, a function for those of the test pixels, and their settings."""

    train: Array
    test: Callable[[], Array]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """The predictions of a classifier, its validation accuracy, and the chosen settings."""

    predicted: Array
    validation: float
    settings: dict[str, Any]


def best_outcome(candidates: Sequence[Features], labels: Array, folds: Sequence[Any], classifier: str) -> Prediction:
    """Choose features, their scaling and the cost on held-out training blocks; then predict the test pixels.

    Parameters
    ----------
    candidates : sequence of Features
        The features to choose from.
    labels : array (n_train,)
        Labels of the training pixels.
    folds : sequence of pair of boolean array (n_train,)
        Masks of the pixels to fit and to validate on.
    classifier : {"svm", "1-nn"}
        A linear support vector machine, or the nearest neighbor.
    """
    best: tuple[float, Features, str, float] | None = None
    for features in candidates:
        for scaling in _SCALINGS:
            rows = scaled(features.train, features.train, scaling)
            products = rows @ rows.T
            for cost in _COSTS if classifier == "svm" else _COSTS[:1]:
                right = [
                    predict(classifier, cost, products[np.ix_(use, use)], products[np.ix_(tried, use)], labels[use])
                    == labels[tried]
                    for use, tried in folds
                ]
                score = float(np.concatenate(right).mean())
                if best is None or score > best[0]:
                    best = (score, features, scaling, cost)
    if best is None:
        raise ValueError("candidates must hold at least one set of features, got none")
    score, features, scaling, cost = best
    rows = scaled(features.train, features.train, scaling)
    cross = scaled(features.train, features.test(), scaling) @ rows.T
    predicted = predict(classifier, cost, rows @ rows.T, cross, labels)
    chosen = {**features.settings, "scaling": scaling, **({"cost": cost} if classifier == "svm" else {})}
    return Prediction(predicted, score, chosen)


def scaled(train: Array, rows: Array, scaling: str) -> Array:
    """Center features, and divide by each one's deviation or by the mean deviation, and by the root of their number."""
    train = train.astype(np.float64)  # products of nearly equal features need the precision
    deviation = train.std(0)
    deviation = deviation if scaling == "each" else np.full_like(deviation, deviation.mean())
    usable = deviation > 1e-6 * deviation.max()
    scale = np.where(usable, deviation, np.inf) * np.sqrt(train.shape[1])
    return np.asarray((rows - train.mean(0)) / scale)


def predict(classifier: str, cost: float, products: Array, cross: Array, labels: Array) -> Array:
    """Predict from inner products, (n, n) among training rows and (m, n) of others with them."""
    if classifier == "1-nn":
        return np.asarray(labels[(np.diag(products) - 2 * cross).argmin(1)])
    with warnings.catch_warnings():
        # Equal hidden units can keep libsvm from converging: the last iterate is good enough.
        warnings.simplefilter("ignore", ConvergenceWarning)
        machine = SVC(C=cost, kernel="precomputed", max_iter=_SVM_STEPS).fit(products, labels)
    return np.asarray(machine.predict(cross))


def scores(labels: Array, predicted: Array) -> dict[str, float]:
    """Return overall accuracy, mean accuracy of the classes, and Cohen's kappa."""
    return {
        "overall": float(accuracy_score(labels, predicted)),
        "average": float(recall_score(labels, predicted, average="macro", labels=np.unique(labels), zero_division=0)),
        "kappa": float(cohen_kappa_score(labels, predicted)),
    }
