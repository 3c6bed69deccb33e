"""Time the fused GPU kernels by themselves, a whole training by them, and see that it learns what others learn.

    python benchmarks/kernels.py --out benchmarks/gpu/kernels.json

28x28 -> 25x25, batches of 100, MNIST (found through MVRBM_DATA).

* Microseconds an update, passes over 20,000 digits replayed from CUDA graphs, capture and compilation left out: of one
  model, and of many at once. Medians of six passes.
* Seconds of `fit`, 3,000 passes over 20,000 digits, with everything that belongs to it.
* Error of 1-NN on the features of the 10,000 test digits after 300 passes over 10,000 digits, five subsets: by these
  kernels, in two precisions, and by the general path in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import torch

from mvrbm import models
from mvrbm.datasets import load
from mvrbm.kernels import fused
from mvrbm.kernels.fused import FusedPasses
from mvrbm.learning import PCD, PRESETS, Trainer
from mvrbm.learning.data import as_source

PAPER, DEFAULT = PRESETS["paper"], PRESETS["default"]
PAPER_PCD = dataclasses.replace(PAPER, negative=PCD(100))
# models, recipe, rank, precision; sizes are 28x28 -> 25x25 unless they are given too
CASES = {
    "paper preset, fp16": (1, PAPER, 1, "fp16"),
    "paper preset, tf32": (1, PAPER, 1, "tf32"),
    "paper preset, 3xtf32": (1, PAPER, 1, "tf32x3"),
    "paper preset, fp32": (1, PAPER, 1, "ieee"),
    "paper preset, PCD-1, fp16": (1, PAPER_PCD, 1, "fp16"),
    "default preset, fp16": (1, DEFAULT, 1, "fp16"),
    "default preset, rank 4, fp16": (1, DEFAULT, 4, "fp16"),
    "default preset, rank 16, fp16": (1, DEFAULT, 16, "fp16"),
    "8 models, paper preset, fp16": (8, PAPER, 1, "fp16"),
    "16 models, paper preset, fp16": (16, PAPER, 1, "fp16"),
    "32 models, paper preset, fp16": (32, PAPER, 1, "fp16"),
    "64 models, paper preset, fp16": (64, PAPER, 1, "fp16"),
    "64 models, paper preset, tf32": (64, PAPER, 1, "tf32"),
    "64 models, paper preset, fp32": (64, PAPER, 1, "ieee"),
    "64 models, paper preset, PCD-1, fp16": (64, PAPER_PCD, 1, "fp16"),
    "64 models, default preset, fp16": (64, DEFAULT, 1, "fp16"),
    "64 models, default preset, rank 4, fp16": (64, DEFAULT, 4, "fp16"),
    "128 models, paper preset, fp16": (128, PAPER, 1, "fp16"),
    "64x64 -> 50x50, paper preset, fp16": (1, PAPER, 1, "fp16", (64, 64), (50, 50)),
    "64x64 -> 50x50, 16 models, paper preset, fp16": (16, PAPER, 1, "fp16", (64, 64), (50, 50)),
}


def passes_of(n_models, recipe, rank, precision, images, visible=(28, 28), hidden=(25, 25)):
    """Kernels that are ready to make passes, and an order of the samples for each model."""
    trainers, source = [], None
    if visible != images.shape[1:]:
        enlarged = torch.nn.functional.interpolate(
            torch.as_tensor(images)[:, None], size=visible
        )  # of bytes, so nearest
        images = enlarged[:, 0].numpy()
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


def fit_seconds(images, n_iter=3000):
    """Time of a whole training by the paper's preset."""
    machine = models.mvrbm((28, 28), (25, 25), seed=0).cuda()
    trainer = Trainer(machine, PAPER, seed=0)
    torch.cuda.synchronize()
    began = time.perf_counter()
    trainer.fit(images, n_iter)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def errors(train, train_labels, test, test_labels, precision, n_iter=300, n=10_000):
    """1-NN error on five subsets; `precision` None for the general path."""
    found = []
    chosen_path = fused.refuses
    original = FusedPasses.__init__
    try:
        if precision is None:
            fused.refuses = lambda trainer, source: "the general path was asked for"
        else:
            FusedPasses.__init__ = lambda *args: original(*args, precision=precision)
        for seed in range(5):
            rows = np.random.default_rng(seed).choice(len(train), n, replace=False)
            machine = models.mvrbm((28, 28), (25, 25), seed=seed).cuda()
            Trainer(machine, PAPER, seed=seed).fit(train[rows], n_iter)
            with torch.no_grad():
                mine, theirs = (
                    machine.hidden_mean(torch.as_tensor(part).cuda() / 255).flatten(1).double()
                    for part in (train[rows], test)
                )
            nearest = torch.cat([torch.cdist(part, mine).argmin(1) for part in theirs.split(1000)]).cpu().numpy()
            found.append(float((train_labels[rows][nearest] != test_labels).mean()))
    finally:
        fused.refuses, FusedPasses.__init__ = chosen_path, original
    return found


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
        numbers["seconds of fit, 3,000 passes"] = [round(fit_seconds(images[:20_000]), 3) for _ in range(3)]
        print("fit:", numbers["seconds of fit, 3,000 passes"], flush=True)
        numbers["1-NN error"] = {}
        for name, precision in {"fp16": "fp16", "tf32": "tf32", "general path, fp32": None}.items():
            digits = np.asarray(test.arrays).reshape(-1, 28, 28)
            found = errors(images, train.labels, digits, test.labels, precision)
            numbers["1-NN error"][name] = found
            print(f"{name}: {np.mean(found):.4f} +- {np.std(found, ddof=1):.4f} {found}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
