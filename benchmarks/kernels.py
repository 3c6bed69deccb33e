"""Time the fused GPU kernels by themselves, a whole training by them, and see that it learns what others learn.

    python benchmarks/kernels.py --out benchmarks/gpu/kernels.json

28x28 -> 25x25, batches of 100, MNIST (found through MVRBM_DATA).

* Microseconds an update, passes over 20,000 digits replayed from CUDA graphs, capture and compilation left out: of one
  model, and of many at once. Medians of six passes.
* Seconds of `fit`, 3,000 passes over 20,000 digits, with everything that belongs to it.
* Of 128 starts of the paper's recipe, how many diverge in 20 passes: in any precision some do.
* Error of 1-NN on the features of the 10,000 test digits after 300 passes over 10,000 digits, five subsets: by these
  kernels, in two precisions, and by the general path in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from pathlib import Path

import numpy as np
import torch
from studies.baselines import nearest_neighbour_error

from mvrbm import models
from mvrbm.io.datasets import load
from mvrbm.learning import PCD, RECIPES, DivergenceError, Trainer
from mvrbm.learning.data import as_source
from mvrbm.learning.paths import triton as fused
from mvrbm.learning.paths.triton import FusedPasses

PAPER, DEFAULT = RECIPES["paper"], RECIPES["default"]
PAPER_PCD = dataclasses.replace(PAPER, negative=PCD(100))
# models, recipe, rank, precision; sizes are 28x28 -> 25x25 unless they are given too
CASES = {
    "paper recipe, fp16": (1, PAPER, 1, "fp16"),
    "paper recipe, tf32": (1, PAPER, 1, "tf32"),
    "paper recipe, 3xtf32": (1, PAPER, 1, "tf32x3"),
    "paper recipe, fp32": (1, PAPER, 1, "ieee"),
    "paper recipe, PCD-1, fp16": (1, PAPER_PCD, 1, "fp16"),
    "default recipe, fp16": (1, DEFAULT, 1, "fp16"),
    "default recipe, rank 4, fp16": (1, DEFAULT, 4, "fp16"),
    "default recipe, rank 16, fp16": (1, DEFAULT, 16, "fp16"),
    "8 models, paper recipe, fp16": (8, PAPER, 1, "fp16"),
    "16 models, paper recipe, fp16": (16, PAPER, 1, "fp16"),
    "32 models, paper recipe, fp16": (32, PAPER, 1, "fp16"),
    "64 models, paper recipe, fp16": (64, PAPER, 1, "fp16"),
    "64 models, paper recipe, tf32": (64, PAPER, 1, "tf32"),
    "64 models, paper recipe, fp32": (64, PAPER, 1, "ieee"),
    "64 models, paper recipe, PCD-1, fp16": (64, PAPER_PCD, 1, "fp16"),
    "64 models, default recipe, fp16": (64, DEFAULT, 1, "fp16"),
    "64 models, default recipe, rank 4, fp16": (64, DEFAULT, 4, "fp16"),
    "128 models, paper recipe, fp16": (128, PAPER, 1, "fp16"),
    "64x64 -> 50x50, paper recipe, fp16": (1, PAPER, 1, "fp16", (64, 64), (50, 50)),
    "64x64 -> 50x50, 16 models, paper recipe, fp16": (16, PAPER, 1, "fp16", (64, 64), (50, 50)),
}


def passes_of(n_models, recipe, rank, precision, images, visible=(28, 28), hidden=(25, 25)):
    """Kernels that are ready to make passes, and an order of the samples for each model."""
    trainers, source = [], None
    if visible != images.shape[1:]:
        images = torch.nn.functional.interpolate(torch.as_tensor(images)[:, None], size=visible)[:, 0].numpy()
    for seed in range(n_models):
        machine = models.mvrbm(visible, hidden, rank=rank, seed=seed).cuda()
        trainers.append(Trainer(machine, recipe, seed=seed))
        source = source or as_source(images, machine)
        trainers[-1]._prepare(source)
    passes = FusedPasses(trainers, [source] * n_models, precision=precision)
    return passes, [torch.randperm(len(images), device="cuda") for _ in trainers]


def microseconds(passes, orders, repetitions=6):
    """Median time of an update of all models."""
    passes.one_pass(orders)  # compiles and captures
    times = []
    for _ in range(repetitions):
        torch.cuda.synchronize()
        began = time.perf_counter()
        made = passes.one_pass(orders)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / made * 1e6)
    return float(np.median(times))


def fitted(images, n_epochs, seed):
    """Train by the paper's recipe. Return the machine, None if the training diverged, and the seconds that it took."""
    machine = models.mvrbm((28, 28), (25, 25), seed=seed).cuda()
    torch.cuda.synchronize()
    began = time.perf_counter()
    try:
        Trainer(machine, PAPER, seed=seed).fit(images, n_epochs)
    except DivergenceError:
        machine = None
    torch.cuda.synchronize()
    return machine, time.perf_counter() - began


def fit_seconds(images, n_epochs=3000, wanted=3):
    """Times of whole trainings, of those that do not diverge."""
    trainings = (fitted(images, n_epochs, seed) for seed in range(100))
    return list(itertools.islice((round(seconds, 3) for machine, seconds in trainings if machine), wanted))


def n_diverged(images, precision, n_models=128, n_epochs=20):
    """How many of so many starts of the paper's recipe are lost within some passes."""
    passes, orders = passes_of(n_models, PAPER, 1, precision, images)
    for _ in range(n_epochs):
        for trainer in passes.trainers:
            trainer.update += len(images) // 100
        passes.one_pass([torch.randperm(len(images), device="cuda") for _ in orders])
    passes._check()
    return sum(passes.diverged)


def errors(train, train_labels, test, test_labels, precision, n_epochs=300, n=10_000):
    """1-NN errors on five subsets, and the starts that diverged; `precision` None for the general path."""
    found, lost = [], []
    chosen_path = fused.refuses
    original = FusedPasses.__init__
    try:
        if precision is None:
            fused.refuses = lambda trainer, source: "the general path was asked for"
        else:
            FusedPasses.__init__ = lambda *args: original(*args, precision=precision)
        for seed in range(5):
            rows = np.random.default_rng(seed).choice(len(train), n, replace=False)
            machine = None
            while machine is None:  # from another start, where one diverges
                machine, _ = fitted(train[rows], n_epochs, seed)
                lost += [seed] if machine is None else []
                seed += 100
            with torch.no_grad():
                mine, theirs = (machine.hidden_mean(torch.as_tensor(part).cuda() / 255) for part in (train[rows], test))
            found.append(nearest_neighbour_error(mine, train_labels[rows], theirs, test_labels))
    finally:
        fused.refuses, FusedPasses.__init__ = chosen_path, original
    return found, lost


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--only", default="", help="part of the names of the cases to time")
    parser.add_argument("--no-learning", action="store_true", help="leave the whole training and the errors out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernels need a CUDA device, and PyTorch finds none")
    train, test = (load("mnist", split=split) for split in ("train", "test"))
    images = np.asarray(train.arrays).reshape(-1, 28, 28)
    numbers = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "microseconds": {}}
    for name, (n_models, recipe, rank, precision, *sizes) in CASES.items():
        if options.only in name:
            passes, orders = passes_of(n_models, recipe, rank, precision, images[:20_000], *sizes)
            numbers["microseconds"][name] = round(microseconds(passes, orders), 2)
            print(f"{name}: {numbers['microseconds'][name]:.2f} us", flush=True)
    if not options.no_learning:
        numbers["seconds of fit, 3,000 passes"] = fit_seconds(images[:20_000])
        print("fit:", numbers["seconds of fit, 3,000 passes"], flush=True)
        numbers["of 128 starts lost in 20 passes"] = {
            precision: n_diverged(images[:20_000], precision) for precision in ("fp16", "tf32", "ieee")
        }
        print("lost:", numbers["of 128 starts lost in 20 passes"], flush=True)
        numbers["1-NN error"] = {}
        for name, precision in {"fp16": "fp16", "tf32": "tf32", "general path, fp32": None}.items():
            digits = np.asarray(test.arrays).reshape(-1, 28, 28)
            found, lost = errors(images, train.labels, digits, test.labels, precision)
            numbers["1-NN error"][name] = {"errors": found, "starts that diverged": lost}
            print(f"{name}: {np.mean(found):.4f} +- {np.std(found, ddof=1):.4f} {found}, diverged: {lost}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
