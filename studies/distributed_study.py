"""When does sharing a training among processes pay? Measured on this machine, modelled up to 1,000 processes.

    python tools/distributed_study.py results/distributed/curve.json

Starts processes by torchrun, measures an update for several batch sizes and numbers of processes and the time of one
sum over them, and fits t(P) = fixed + samples * (batch / P) + latency * log2(P) + bytes * 2 (P - 1) / P / bandwidth.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from mvrbm.learning import RECIPES, Trainer
from mvrbm.learning.distributed import World
from mvrbm.models import mvrbm

BATCHES = (100, 1000, 10_000)
PROCESSES = (1, 2)
MODELLED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
VISIBLE, HIDDEN = (28, 28), (25, 25)


def measure() -> None:
    """What each process does: print the medians, in seconds."""
    import dataclasses

    torch.set_num_threads(1)
    world = World.here()
    generator = np.random.default_rng(0)
    found: dict[str, dict[str, float]] = {"update": {}, "sum": {}}
    for batch in BATCHES:
        x = torch.from_numpy((generator.random((batch, *VISIBLE)) < 0.2).astype(np.float32))
        machine = mvrbm(VISIBLE, HIDDEN)
        trainer = Trainer(machine, dataclasses.replace(RECIPES["paper"], batch_size=batch), seed=0)
        repeats = max(5, 2000 // batch)
        trainer.fit(x, 3)
        times = []
        for number in range(repeats):
            began = time.perf_counter()
            trainer.fit(x, 4 + 5 * number + 4)
            times.append((time.perf_counter() - began) / 5)
        found["update"][str(batch)] = statistics.median(times)
    for size in (2_809, 280_900):
        message = torch.zeros(size)
        times = []
        for _ in range(200):
            began = time.perf_counter()
            world.add_up(message)
            times.append(time.perf_counter() - began)
        found["sum"][str(4 * size)] = statistics.median(times)
    if world.is_main:
        print(json.dumps(found))


def run(size: int) -> dict[str, dict[str, float]]:
    """Start processes and return what the first of them found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(size)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", __file__, "--measure"]
    if size == 1:
        command = [sys.executable, __file__, "--measure"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    result: dict[str, dict[str, float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def model(alone: dict[str, float], latency: float, bandwidth: float, n_bytes: int) -> dict[str, list[float]]:
    """Speed-up over one process by batch size, for every number of processes of `MODELLED`."""
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


def main(out: Path) -> None:
    """Measure, model, and write both down."""
    measured = {str(size): run(size) for size in PROCESSES}
    sums = measured["2"]["sum"]
    small, large = sums[str(4 * 2809)], sums[str(4 * 280_900)]
    bandwidth = (4 * 280_900 - 4 * 2809) / max(1e-9, large - small)
    latency = max(1e-6, small - 4 * 2809 / bandwidth)
    result = {
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__},
        "measured_seconds": measured,
        "bytes_an_update": 4 * 2809,
        "loopback": {"latency": latency, "bandwidth": bandwidth},
        "processes": MODELLED,
        "speed_up_loopback": model(measured["1"]["update"], latency, bandwidth, 4 * 2809),
        "speed_up_fast_network": model(measured["1"]["update"], 5e-6, 1e10, 4 * 2809),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    measure() if sys.argv[1] == "--measure" else main(Path(sys.argv[1]))
