"""Time the fused GPU kernels by themselves: passes replayed from CUDA graphs, capture and compilation left out.

    python benchmarks/kernels.py --out benchmarks/gpu/kernels.json

28x28 -> 25x25, batches of 100, 20,000 MNIST digits (found through MVRBM_DATA), microseconds an update: of one model,
and of 64 at once. Medians of six passes.
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
from mvrbm.kernels.fused import FusedPasses
from mvrbm.learning import PCD, PRESETS, Trainer
from mvrbm.learning.data import as_source

PAPER, DEFAULT = PRESETS["paper"], PRESETS["default"]
CASES = {
    "paper preset, tf32": (1, PAPER, 1, "tf32"),
    "paper preset, 3xtf32": (1, PAPER, 1, "tf32x3"),
    "paper preset, fp32": (1, PAPER, 1, "ieee"),
    "paper preset, PCD-1, tf32": (1, dataclasses.replace(PAPER, negative=PCD(100)), 1, "tf32"),
    "default preset, tf32": (1, DEFAULT, 1, "tf32"),
    "default preset, rank 4, tf32": (1, DEFAULT, 4, "tf32"),
    "default preset, rank 16, tf32": (1, DEFAULT, 16, "tf32"),
    "64 models, paper preset, tf32": (64, PAPER, 1, "tf32"),
}


def microseconds(n_models, recipe, rank, precision, images, passes=6):
    """Median time of an update of all models."""
    trainers, source = [], None
    for seed in range(n_models):
        machine = models.mvrbm((28, 28), (25, 25), rank=rank, seed=seed).cuda()
        trainers.append(Trainer(machine, recipe, seed=seed))
        source = source or as_source(images, machine)
        trainers[-1]._prepare(source)
    fused = FusedPasses(trainers, [source] * n_models, precision=precision)
    orders = [torch.randperm(len(images), device="cuda") for _ in trainers]
    fused.one_pass(orders)  # compiles and captures
    times = []
    for _ in range(passes):
        torch.cuda.synchronize()
        began = time.perf_counter()
        made = fused.one_pass(orders)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / made * 1e6)
    return float(np.median(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("the kernels need a CUDA device, and PyTorch finds none")
    images = np.asarray(load("mnist", split="train").arrays)[:20_000].reshape(-1, 28, 28)
    found = {}
    for name, case in CASES.items():
        found[name] = round(microseconds(*case, images), 2)
        print(f"{name}: {found[name]:.2f} us", flush=True)
    if options.out:
        numbers = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "microseconds": found}
        options.out.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
