"""False alarms of outlier detectors with automatic thresholds, on new normal samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.ensemble import IsolationForest
from sklearn.neighbors import LocalOutlierFactor

from mvrbm import MVRBMOutlierDetector
from studies.applications.outlier_families import NORMAL, normal_samples
from studies.applications.outliers import OURS
from studies.runs import Outcome, Place, Run, Store, complete

__all__ = ["DETECTORS", "plan", "table"]

# Number of new samples, and of training sets.
_N_NEW = 1000
_N_SEEDS = 10

#: Functions that take a seed and return a detector.
DETECTORS: dict[str, Callable[[int], Any]] = {
    OURS: lambda _: MVRBMOutlierDetector(),
    "lof": lambda _: LocalOutlierFactor(novelty=True),
    "isolation-forest": lambda seed: IsolationForest(random_state=seed),
}


def plan(n_training: Sequence[int] = (50, 100, 300, 1000, 5000)) -> list[Run]:
    """Return one run per number of training samples, family and seed, in which every detector is measured."""
    settings = [
        {"n": n, "family": family, "seed": seed} for n in n_training for family in NORMAL for seed in range(_N_SEEDS)
    ]
    return [Run("alarms-{family}-{n}-{seed}".format(**of), "alarms", _count, of) for of in settings]


def _count(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the share of new normal samples that are reported as outliers."""
    n, seed = settings["n"], settings["seed"]
    samples = normal_samples(settings["family"], n + _N_NEW, seed, place.data_dir)
    rows = samples.reshape(len(samples), -1)
    shares = {}
    for tool, make in DETECTORS.items():
        given = samples if tool == OURS else rows
        shares[tool] = float((make(seed).fit(given[:n]).predict(given[n:]) == -1).mean())
    return Outcome(shares)


def table(store: Store, plan: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the mean share of false alarms over families and seeds, by number of training samples and tool."""
    values: dict[str, list[Mapping[str, float]]] = {}
    for run in complete(store, plan, "n"):
        values.setdefault(f"{run.settings['n']:,} training samples", []).append(store.numbers(run))
    return {
        name: {tool: float(np.mean([shares[tool] for shares in found])) for tool in DETECTORS}
        for name, found in values.items()
    }
