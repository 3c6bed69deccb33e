"""Speedup of training with several processes: measured on this machine, and predicted for up to 1,000 processes.

The study starts processes with ``torchrun``, and measures the time of one update for several batch sizes and numbers of
processes, and the time of one all-reduce. It fits t(P) = fixed + samples * (batch / P) + latency * log2(P) + bytes *
2 (P - 1) / P / bandwidth. Each process is started as ``python -m studies.distributed WORKLOAD``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mvrbm.distributed import World
from mvrbm.models import mvrbm
from mvrbm.training import CD, PCD, RECIPES, Trainer
from studies.arguments import Command, Options, add_study_options
from studies.report import read_results
from studies.runner import run_module, run_plan
from studies.runs import Outcome, Place, Run, Store, write_json

__all__ = ["COMMANDS"]

#: Numbers of processes to measure.
PROCESSES = (1, 2)
#: Numbers of processes to predict the speedup for.
MODELED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
VISIBLE = (28, 28)


@dataclass(frozen=True)
class Workload:
    """A machine and its updates.

    Parameters
    ----------
    rank : int
        Number of Kronecker products.
    hidden : tuple of int
        Shape of the hidden layer.
    recipe : str
        Name of the recipe.
    batches : tuple of int
        Batch sizes in increasing order.
    chains : int
        Persistent chains per sample of a batch. 0 stands for CD-1.
    """

    rank: int
    hidden: tuple[int, int]
    recipe: str
    batches: tuple[int, ...]
    chains: int = 0

    def trainer(self, batch: int) -> Trainer:
        """Return a trainer for a batch size."""
        negative = PCD(self.chains * batch) if self.chains else CD(1)
        recipe = dataclasses.replace(RECIPES[self.recipe], batch_size=batch, negative=negative)
        return Trainer(mvrbm(VISIBLE, self.hidden, rank=self.rank), recipe, seed=0)

    @property
    def parameters(self) -> int:
        """Number of parameters, and of numbers that every update sums over the processes."""
        return int(mvrbm(VISIBLE, self.hidden, rank=self.rank).n_parameters)


WORKLOADS = {
    "rank 1, 25x25, CD-1": Workload(1, (25, 25), "paper", (100, 1000, 10_000)),
    "rank 8, 30x30, two chains per sample": Workload(8, (30, 30), "generative", (200, 1000, 4000), chains=2),
}


def measure(name: str) -> None:
    """Measure a workload in one of several processes. The main process prints the medians in seconds."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    world = World.here()
    generator = np.random.default_rng(0)
    found: dict[str, dict[str, float]] = {"update": {}, "sum": {}}
    for batch in workload.batches:
        x = torch.from_numpy((generator.random((batch, *VISIBLE)) < 0.2).astype(np.float32))
        trainer = workload.trainer(batch)
        trainer.fit(x, 3, initialize=True)
        times = []
        for number in range(max(5, 2000 // batch)):
            began = time.perf_counter()
            trainer.fit(x, 3 + 5 * (number + 1))
            times.append((time.perf_counter() - began) / 5)
        found["update"][str(batch)] = statistics.median(times)
    for size in (workload.parameters, 100 * workload.parameters):
        message = torch.zeros(size)
        times = []
        for _ in range(200):
            began = time.perf_counter()
            world.all_reduce(message)
            times.append(time.perf_counter() - began)
        found["sum"][str(4 * size)] = statistics.median(times)
    if world.is_main:
        print(json.dumps(found))


def start(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure a workload with some number of processes."""
    return Outcome(run_module("studies.distributed", settings["workload"], settings["processes"]))


def speed_up(alone: Mapping[str, float], latency: float, bandwidth: float, n_bytes: int) -> dict[str, list[float]]:
    """Predict the speedup over one process for the numbers of processes in `MODELED`, by batch size."""
    batches = sorted(map(int, alone))
    least = batches[0]
    most = batches[-1]
    per_sample = (alone[str(most)] - alone[str(least)]) / (most - least)
    fixed = max(0.0, alone[str(least)] - least * per_sample)
    curves = {}
    for batch in (*batches, 1_000_000):
        one = fixed + per_sample * batch
        curve = []
        for p in MODELED:
            talk = 0.0 if p == 1 else latency * math.log2(p) + n_bytes * 2 * (p - 1) / p / bandwidth
            curve.append(one / (fixed + per_sample * batch / p + talk))
        curves[str(batch)] = [round(value, 2) for value in curve]
    return curves


PLAN = tuple(
    Run(
        f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}-processes-{n}", "processes", start,
        {"workload": name, **dataclasses.asdict(workload), "processes": n}, alone=True,
    )
    for name, workload in WORKLOADS.items()
    for n in PROCESSES
)  # fmt: skip


def results(store: Store) -> dict[str, Any]:
    """Return the measured times and the predicted speedups of every workload."""
    found = {}
    for name, workload in WORKLOADS.items():
        runs = [run for run in PLAN if run.settings["workload"] == name]
        measured = {str(run.settings["processes"]): store.numbers(run) for run in runs}
        small = 4 * workload.parameters  # bytes
        large = 100 * small
        sums = measured["2"]["sum"]
        bandwidth = (large - small) / max(1e-9, sums[str(large)] - sums[str(small)])
        latency = max(1e-6, sums[str(small)] - small / bandwidth)
        alone = measured["1"]["update"]
        found[name] = {
            "measured_seconds": measured,
            "bytes_per_update": small,
            "loopback": {"latency": latency, "bandwidth": bandwidth},
            "speed_up_loopback": speed_up(alone, latency, bandwidth, small),
            "speed_up_fast_network": speed_up(alone, 5e-6, 1e10, small),
        }
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
    return {"machine": machine, "processes": MODELED, "workloads": found}


# -- the command ------------------------------------------------------------------------------------


def _add(parser: argparse.ArgumentParser) -> None:
    add_study_options(parser, "distributed")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    path = options.out / "curve.json"
    if not options.report_only:
        store = Store.within(options.work)
        run_plan(PLAN, Place(store, "cpu", work=options.work)).raise_failures()
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(path, results(store))
    found = read_results(path)
    lines = [f"processes: {json.dumps(found['processes'])}"]
    for workload, parts in found["workloads"].items():
        lines += [f"{workload}, {name}: {json.dumps(value)}" for name, value in parts.items()]
    return found, "\n".join(lines)


COMMANDS = {
    "distributed": Command("Speedup of training with several processes.", _add, _run, "--out results/distributed")
}

if __name__ == "__main__":
    measure(sys.argv[1])
