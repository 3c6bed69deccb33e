"""The fused GPU kernels by themselves: their time, whole training runs, and whether they learn what other paths learn.

28x28 -> 25x25, batches of 100, MNIST.

* Microseconds per update: epochs of 20,000 digits replayed from CUDA graphs, without capture and compilation, of one
  model and of several at once. Medians of six epochs.
* Seconds of `fit`: 3,000 epochs of 20,000 digits, everything included.
* Divergence: how many of 128 starts of the paper's recipe diverge in 20 epochs; some do in any precision.
* 1-NN error on the features of the 10,000 test digits after 300 epochs of 10,000 digits, five subsets: by these
  kernels, in two precisions, and by CUDA graphs in float32.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm import models
from mvrbm.backends.base import EpochBackend
from mvrbm.backends.cuda.per_sample import PerSampleBackend
from mvrbm.backends.graph import GraphBackend
from mvrbm.errors import DivergenceError
from mvrbm.machine import BoltzmannMachine
from mvrbm.training import PCD, RECIPES, Recipe, Trainer, TrainState
from studies.baselines import nearest_neighbor_error
from studies.data import digits, subset
from studies.runner import run_plan
from studies.runs import Outcome, Place, Run, Store

__all__ = ["CASES", "measure"]

Array = NDArray[Any]
Settings = Mapping[str, Any]

VISIBLE, HIDDEN = (28, 28), (25, 25)
REPETITIONS = 6  # timed epochs
_RECIPES = {
    "paper recipe": RECIPES["paper"],
    "default recipe": RECIPES["default"],
    "paper recipe, PCD-1": dataclasses.replace(RECIPES["paper"], negative=PCD(100)),
}
_PRECISIONS = {"fp16": "fp16", "tf32": "tf32", "3xtf32": "tf32x3", "fp32": "ieee"}
_LARGE = {"visible": (64, 64), "hidden": (50, 50)}
#: Cases by name: number of models, recipe, rank and precision, and other sizes than 28x28 -> 25x25.
CASES: dict[str, tuple[int, str, int, str, dict[str, Any]]] = {
    "paper recipe, fp16": (1, "paper recipe", 1, "fp16", {}),
    "paper recipe, tf32": (1, "paper recipe", 1, "tf32", {}),
    "paper recipe, 3xtf32": (1, "paper recipe", 1, "3xtf32", {}),
    "paper recipe, fp32": (1, "paper recipe", 1, "fp32", {}),
    "paper recipe, PCD-1, fp16": (1, "paper recipe, PCD-1", 1, "fp16", {}),
    "default recipe, fp16": (1, "default recipe", 1, "fp16", {}),
    "default recipe, rank 4, fp16": (1, "default recipe", 4, "fp16", {}),
    "8 models, paper recipe, fp16": (8, "paper recipe", 1, "fp16", {}),
    "16 models, paper recipe, fp16": (16, "paper recipe", 1, "fp16", {}),
    "32 models, paper recipe, fp16": (32, "paper recipe", 1, "fp16", {}),
    "64 models, paper recipe, fp16": (64, "paper recipe", 1, "fp16", {}),
    "64 models, paper recipe, tf32": (64, "paper recipe", 1, "tf32", {}),
    "64 models, paper recipe, fp32": (64, "paper recipe", 1, "fp32", {}),
    "64 models, paper recipe, PCD-1, fp16": (64, "paper recipe, PCD-1", 1, "fp16", {}),
    "64 models, default recipe, fp16": (64, "default recipe", 1, "fp16", {}),
    "64 models, default recipe, rank 4, fp16": (64, "default recipe", 4, "fp16", {}),
    "128 models, paper recipe, fp16": (128, "paper recipe", 1, "fp16", {}),
    "64x64 -> 50x50, paper recipe, fp16": (1, "paper recipe", 1, "fp16", _LARGE),
    "64x64 -> 50x50, 16 models, paper recipe, fp16": (16, "paper recipe", 1, "fp16", _LARGE),
}
_GENERAL = "general path, fp32"


def _path(
    machines: Sequence[BoltzmannMachine], recipe: Recipe, seeds: Sequence[int], images: Array, precision: str | None
) -> tuple[EpochBackend, list[TrainState]]:
    """Return a path that trains machines on images, and their states; precision None is CUDA graphs."""
    trainers = [Trainer(machine, recipe, seed=seed) for machine, seed in zip(machines, seeds, strict=True)]
    sources = [trainer.prepare(images, initialize=True) for trainer in trainers[:1]]
    for trainer in trainers[1:]:
        trainer.prepare(images, initialize=True)
    states = [trainer.state for trainer in trainers]
    if precision is None:
        return GraphBackend(trainers[0].update_settings(), states[0], sources[0]), states
    tasks = [trainer.update_settings() for trainer in trainers]
    return PerSampleBackend(tasks, states, sources * len(trainers), precision=precision), states


def _orders(states: Sequence[TrainState], n: int) -> Tensor:
    return torch.stack([torch.randperm(n, device=states[0].machine.like.device) for _ in states])


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _resized(images: Array, shape: tuple[int, ...]) -> Array:
    if shape == images.shape[1:]:
        return images
    return np.asarray(torch.nn.functional.interpolate(torch.as_tensor(images)[:, None], size=shape)[:, 0])


# -- cells ------------------------------------------------------------------------------------------


def microseconds(settings: Settings, place: Place) -> Outcome:
    """Median time per update of all models of a case."""
    n_models, recipe, rank, precision, sizes = CASES[settings["case"]]
    visible, hidden = sizes.get("visible", VISIBLE), sizes.get("hidden", HIDDEN)
    images = _resized(digits("mnist", None, place.data_dir).train[:20_000], visible)
    machines = [models.mvrbm(visible, hidden, rank=rank, seed=seed).to(place.device) for seed in range(n_models)]
    path, states = _path(machines, _RECIPES[recipe], range(n_models), images, _PRECISIONS[precision])
    orders = _orders(states, len(images))
    path.epoch(states, orders, lambda: False)  # compiles and captures
    times = []
    for _ in range(REPETITIONS):
        began = _now(place.device)
        made = path.epoch(states, orders, lambda: False)
        times.append((_now(place.device) - began) / made * 1e6)
    return Outcome({"microseconds": round(float(np.median(times)), 2)})


def fit_seconds(settings: Settings, place: Place) -> Outcome:
    """Seconds of whole training runs, of the first three that do not diverge."""
    images = digits("mnist", None, place.data_dir).train[:20_000]

    def runs() -> Iterator[float]:
        for seed in range(100):
            machine = models.mvrbm(VISIBLE, HIDDEN, seed=seed).to(place.device)
            began = _now(place.device)
            try:
                Trainer(machine, "paper", seed=seed).fit(images, settings["epochs"], initialize=True)
            except DivergenceError:
                continue
            yield round(_now(place.device) - began, 3)

    return Outcome({"seconds": list(itertools.islice(runs(), 3))})


def divergence(settings: Settings, place: Place) -> Outcome:
    """Number of starts of the paper's recipe that diverge within some epochs."""
    images, n_models = digits("mnist", None, place.data_dir).train[:20_000], settings["models"]
    machines = [models.mvrbm(VISIBLE, HIDDEN, seed=seed).to(place.device) for seed in range(n_models)]
    path, states = _path(machines, RECIPES["paper"], range(n_models), images, settings["precision"])
    for _ in range(settings["epochs"]):
        path.epoch(states, _orders(states, len(images)), lambda: False)
    return Outcome({"diverged": sum(path.store(states))})


def error(settings: Settings, place: Place) -> Outcome:
    """1-NN error on one subset, after training from the first start that does not diverge."""
    data = digits("mnist", None, place.data_dir)
    lost: list[int] = []
    rows = subset(len(data.train), settings["n"], settings["seed"])
    for seed in itertools.count(settings["seed"], 100):
        machine = models.mvrbm(VISIBLE, HIDDEN, seed=seed).to(place.device)
        path, states = _path([machine], RECIPES["paper"], [seed], data.train[rows], settings["precision"])
        try:
            for _ in range(settings["epochs"]):
                path.epoch(states, _orders(states, len(rows)), lambda: False)
            path.store(states)
            break
        except DivergenceError:
            lost.append(seed)
    with torch.no_grad():
        images = (torch.as_tensor(part).to(place.device) / 255 for part in (data.train[rows], data.test))
        here, there = (machine.hidden_mean(part) for part in images)
    return Outcome(
        {"error": nearest_neighbor_error(here, data.train_labels[rows], there, data.test_labels), "lost": lost}
    )


def _cells(only: str, learning: bool) -> Iterator[Run]:
    for number, case in enumerate(CASES):
        if only in case:
            yield Run(f"case-{number:02d}", "microseconds", microseconds, {"case": case}, alone=True)
    if not learning:
        return
    yield Run("fit", "fit", fit_seconds, {"epochs": 3000}, alone=True)
    for name in ("fp16", "tf32", "ieee"):
        yield Run(f"diverged-{name}", "diverged", divergence, {"precision": name, "models": 128, "epochs": 20})
    for name, precision in (("fp16", "fp16"), ("tf32", "tf32"), (_GENERAL, None)):
        for seed in range(5):
            settings: dict[str, Any] = {"name": name, "precision": precision, "seed": seed, "epochs": 300, "n": 10_000}
            yield Run(f"error-{precision or 'general'}-{seed}", "error", error, settings)


def measure(folder: Path, *, only: str = "", learning: bool = True, data_dir: str | None = None) -> dict[str, Any]:
    """Measure all cases, and return the results as plain values.

    Parameters
    ----------
    folder : Path
        Folder for finished cells, from which an interrupted run resumes.
    only : str
        Time only the cases whose name contains this text.
    learning : bool
        Whether to measure training runs, divergence and errors as well.
    data_dir : str, optional
        Folder with MNIST.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("the kernels need a CUDA device, and PyTorch finds none")
    store, cells = Store(folder), list(_cells(only, learning))
    run_plan(cells, Place(store, "cuda", data_dir)).raise_failures()
    numbers: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    numbers["microseconds"] = {}
    for cell in cells:
        each = store.numbers(cell)
        if cell.compute is microseconds:
            numbers["microseconds"][cell.settings["case"]] = each["microseconds"]
        elif cell.compute is fit_seconds:
            numbers["seconds of fit, 3,000 epochs"] = each["seconds"]
        elif cell.compute is divergence:
            numbers.setdefault("of 128 starts lost in 20 epochs", {})[cell.settings["precision"]] = each["diverged"]
        else:
            mine = numbers.setdefault("1-NN error", {}).setdefault(
                cell.settings["name"], {"errors": [], "starts that diverged": []}
            )
            mine["errors"].append(each["error"])
            mine["starts that diverged"] += each["lost"]
    return numbers
