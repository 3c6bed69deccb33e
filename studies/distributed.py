"""When sharing a training run among processes pays: measured on this machine, modelled up to 1,000 processes.

Starts processes by ``torchrun``, measures one update for several batch sizes and numbers of processes and the time of
one sum over the processes, and fits t(P) = fixed + samples * (batch / P) + latency * log2(P) + bytes * 2 (P - 1) / P /
bandwidth. ``python -m studies.distributed`` is what each process runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mvrbm.errors import StorageError
from mvrbm.learning import RECIPES, Trainer
from mvrbm.learning.distributed import World
from mvrbm.models import mvrbm
from studies.arguments import Command, Options, add_options
from studies.cells import Cell, Outcome, Place, Store, write_json
from studies.runner import run

__all__ = ["COMMANDS"]

BATCHES = (100, 1000, 10_000)
PROCESSES = (1, 2)
MODELLED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
VISIBLE, HIDDEN = (28, 28), (25, 25)
_PARAMETERS = 2809  # of the machine
_SIZES = (_PARAMETERS, 100 * _PARAMETERS)  # numbers of a sum


def measure() -> None:
    """Measure in each process; the main one prints the medians, in seconds."""
    torch.set_num_threads(1)
    world = World.here()
    generator = np.random.default_rng(0)
    found: dict[str, dict[str, float]] = {"update": {}, "sum": {}}
    for batch in BATCHES:
        x = torch.from_numpy((generator.random((batch, *VISIBLE)) < 0.2).astype(np.float32))
        recipe = dataclasses.replace(RECIPES["paper"], batch_size=batch)
        trainer = Trainer(mvrbm(VISIBLE, HIDDEN), recipe, seed=0)
        trainer.fit(x, 3, initialise=True)
        times = []
        for number in range(max(5, 2000 // batch)):
            began = time.perf_counter()
            trainer.fit(x, 3 + 5 * (number + 1))
            times.append((time.perf_counter() - began) / 5)
        found["update"][str(batch)] = statistics.median(times)
    for size in _SIZES:
        message, times = torch.zeros(size), []
        for _ in range(200):
            began = time.perf_counter()
            world.all_reduce(message)
            times.append(time.perf_counter() - began)
        found["sum"][str(4 * size)] = statistics.median(times)
    if world.is_main:
        print(json.dumps(found))


def start(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Start processes, and return the medians of the main one."""
    command = [sys.executable, "-m", "studies.distributed"]
    if settings["processes"] > 1:
        launcher = ["torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(settings["processes"])]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "studies.distributed"]
        command = [sys.executable, "-m", *launcher]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)
    if done.returncode:
        raise RuntimeError(f"the processes failed: {done.stderr.strip()[-300:]}")
    return Outcome(json.loads(done.stdout.strip().splitlines()[-1]))


def speed_up(alone: Mapping[str, float], latency: float, bandwidth: float, n_bytes: int) -> dict[str, list[float]]:
    """Return the speed-up over one process by batch size, for every number of processes of `MODELLED`."""
    per_sample = (alone["10000"] - alone["100"]) / 9900
    fixed = max(0.0, alone["100"] - 100 * per_sample)
    curves = {}
    for batch in (*BATCHES, 1_000_000):
        one = fixed + per_sample * batch
        curve = []
        for p in MODELLED:
            talk = 0.0 if p == 1 else latency * math.log2(p) + n_bytes * 2 * (p - 1) / p / bandwidth
            curve.append(one / (fixed + per_sample * batch / p + talk))
        curves[str(batch)] = [round(value, 2) for value in curve]
    return curves


CELLS = tuple(Cell(f"processes-{n}", "processes", start, {"processes": n}, alone=True) for n in PROCESSES)


def results(store: Store) -> dict[str, Any]:
    """Return the measured times and the modelled speed-ups."""
    measured = {str(cell.settings["processes"]): store.numbers(cell) for cell in CELLS}
    small, large = (4 * size for size in _SIZES)  # bytes
    sums = measured["2"]["sum"]
    bandwidth = (large - small) / max(1e-9, sums[str(large)] - sums[str(small)])
    latency = max(1e-6, sums[str(small)] - small / bandwidth)
    alone = measured["1"]["update"]
    return {
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__},
        "measured_seconds": measured,
        "bytes_an_update": small,
        "loopback": {"latency": latency, "bandwidth": bandwidth},
        "processes": MODELLED,
        "speed_up_loopback": speed_up(alone, latency, bandwidth, small),
        "speed_up_fast_network": speed_up(alone, 5e-6, 1e10, small),
    }


# -- the command ------------------------------------------------------------------------------------


def _add(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        *("--out", "--work", "--report-only", "--json"),
        out={"default": Path("results/distributed"), "help": "Folder for curve.json. Default: results/distributed."},
        work={"default": Path("runs/distributed"), "help": "Folder for cells. Default: runs/distributed."},
    )


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    path = options.out / "curve.json"
    if not options.report_only:
        store = Store(options.work / "cells")
        run(CELLS, Place(store, "cpu", work=options.work)).raise_failures()
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(path, results(store))
    if not path.is_file():
        raise StorageError(f"{options.out} has no curve.json: run without --report-only first")
    found = json.loads(path.read_text())
    lines = [f"{name}: {json.dumps(value)}" for name, value in found.items()]
    return found, "\n".join(lines)


COMMANDS = {
    "distributed": Command("When sharing a training run among processes pays.", _add, _run, "--out results/distributed")
}

if __name__ == "__main__":
    measure()
