"""Check that training runs which are killed, terminated or run out of disk lose nothing, and resume bit for bit.

    python tools/kills.py                          # sixty kills, and the other disturbances, over all kinds
    python tools/kills.py --kills 3 --others 0 --kinds trainer

Every run begins with an older model in the place of its result. It is disturbed at random moments, resumed each time,
and ends undisturbed. The disturbances are SIGKILL, SIGTERM (the exit code must be 143) and a limit on the size of
files, which acts like a full disk (the run must end with one of the package's own errors). After each of them, the
model in its place must load and be the older one or the result, and every checkpoint must be readable. At the end the
result must have the same bits as that of a run without disturbance, and no temporary file may be left. Prints a table;
the exit code is 1 after a failure. With TMPDIR=/dev/shm it does not wait for the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # set before torch is imported, because processes are forked below

import numpy as np
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import mvrbm
from mvrbm import (
    MVRBM,
    RBM,
    Bernoulli,
    BoltzmannMachine,
    ClassificationMVRBM,
    DeepMVRBM,
    Gaussian,
    Kronecker,
    MVRBMClassifier,
    Sweep,
)
from mvrbm.errors import MVRBMError
from mvrbm.interrupt import terminate_in_order
from mvrbm.saving import read_json, read_machine, read_tensors, save
from mvrbm.training import PCD, Checkpoint, Monitor, Recipe, Trainer
from mvrbm.vision import SuperResolver, TrainingStep

_FAILED, _TERMINATED = 1, 143
_PER_RUN = 3  # disturbances of one run
_RNG = np.random.default_rng(0)
BITS = (_RNG.random((200, 8, 8)) < 0.3).astype(np.float32)
LABELS = _RNG.integers(0, 3, 200)
IMAGE = _RNG.integers(0, 256, (60, 60), dtype=np.uint8)
SETTINGS: dict[str, Any] = {"batch_size": 10, "random_state": 0, "device": "cpu"}


# -- what is trained, each from checkpoints in a folder to a saved model ---------------------------------


def trainer(folder: Path, out: Path) -> None:
    """Train on real-valued data with gaps, with an optimizer and a scheduler; a checkpoint after every update."""
    data = np.where(BITS > 0, np.nan, _RNG.standard_normal(BITS.shape).cumsum(2).astype(np.float32))
    machine = BoltzmannMachine(Gaussian((8, 8), learn_variance=True), Bernoulli((5, 5)), Kronecker(2))
    run = Trainer(
        machine,
        Recipe(batch_size=10, negative=PCD(20)),
        optimizer=lambda groups: torch.optim.Adam(groups, lr=0.003),
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 8),
        callbacks=[Checkpoint(folder, every=1), Monitor(np.nan_to_num(data[:20]), every=20, pseudo_sites=0)],
    )
    run.resume(folder)
    run.fit(data, 8, nan_is_missing=True, initialize=True)
    run.raise_if_interrupted()
    save(machine, out)


def estimator(folder: Path, out: Path) -> None:
    model = MVRBM((6, 6), rank=2, negative="pcd", n_chains=20, n_epochs=60, **SETTINGS)
    model.fit(BITS, callbacks=[Checkpoint(folder)], resume=folder).save(out)


def deep(folder: Path, out: Path) -> None:
    model = DeepMVRBM(((6, 6), (4, 4)), feed="sample", n_epochs=25, **SETTINGS)
    model.fit(BITS, callbacks=[Checkpoint(folder, every=3)], resume=folder).save(out)


def classifier(folder: Path, out: Path) -> None:
    model = MVRBMClassifier((6, 6), pretraining=15, n_epochs=12, averaging=0.99, **SETTINGS)
    model.fit(BITS, LABELS, checkpoints=folder).save(out)


def generative(folder: Path, out: Path) -> None:
    model = ClassificationMVRBM((6, 6), mode="generative", n_epochs=50, **SETTINGS)
    model.fit(BITS, LABELS, checkpoints=folder).save(out)


def super_resolver(folder: Path, out: Path) -> None:
    steps = [TrainingStep("patches", n_samples=2000, n_epochs=12, batch_size=512, learning_rate=3e-3)]
    settings: dict[str, Any] = {"symmetric": False, "steps": steps, "device": "cpu"}
    model = SuperResolver(2, 6, (5, 5), n_patches=1000, n_epochs=20, **settings)
    model.fit([IMAGE], checkpoints=folder).save(out)


def sweep(folder: Path, out: Path) -> None:
    found = Sweep(RBM(20, n_epochs=12, **SETTINGS), {"learning_rate": [0.05, 0.1], "random_state": [0, 1, 2]})
    found.fit(BITS.reshape(len(BITS), -1), checkpoints=folder).best_estimator_.save(out)


KINDS = {work.__name__: work for work in (trainer, estimator, deep, classifier, generative, super_resolver, sweep)}
TWO_RANKS = "two_ranks"


# -- processes --------------------------------------------------------------------------------------------


class Disturbance(NamedTuple):
    """What happens to a run."""

    kind: str  # "kill", "terminate", "full disk" or "" for nothing
    when: float = 0.0  # seconds after the start, or the largest size of a file in bytes


def _work(kind: str, folder: Path, out: Path, largest: int | None) -> None:
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))  # Python ignores the signal
    with terminate_in_order():
        try:
            KINDS[kind](folder, out)
        except MVRBMError as error:
            if "cannot be written" not in str(error):
                raise
            os._exit(_FAILED)


def _fork(kind: str, folder: Path, out: Path, what: Disturbance) -> int:
    """Run one process, disturb it, and return its exit code; negative for a signal."""
    largest = int(what.when) if what.kind == "full disk" else None
    process = multiprocessing.get_context("fork").Process(target=_work, args=(kind, folder, out, largest))
    process.start()
    if what.kind in ("kill", "terminate"):
        process.join(what.when)
        if process.is_alive():
            (process.kill if what.kind == "kill" else process.terminate)()
    process.join()
    return int(process.exitcode or 0)


def _torchrun(kind: str, folder: Path, out: Path, what: Disturbance) -> int:
    """Run two processes that train together, disturb them, and return the exit code of their launcher."""
    data = folder.parent / "data.npy"
    if not data.exists():
        np.save(data, BITS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    command = f"-m mvrbm train {data} --hidden 5x5 --epochs 300 --batch-size 10 --device cpu --quiet --force"
    command += f" --out {out} --checkpoints {folder}"
    source = str(Path(mvrbm.__file__).parents[1])
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*launch, *command.split()],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if what.kind:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(what.when)
        if process.poll() is None:
            # A launcher that is terminated terminates its processes, as under a job scheduler. One that is killed does
            # not, and each of them has a session of its own.
            for number in _descendants(process.pid) if what.kind == "kill" else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            (process.kill if what.kind == "kill" else process.terminate)()
    return process.wait()


def _descendants(parent: int) -> list[int]:
    """Return the numbers of all processes that a process has started, directly or not."""
    own = [int(number) for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return own + [further for child in own for further in _descendants(child)]


# -- what must be true ------------------------------------------------------------------------------------


def unreadable(folder: Path) -> list[str]:
    """Return an error message for each checkpoint under a folder that cannot be read."""
    bad = []
    for path in [*folder.rglob("update-*/trainer.json"), *folder.rglob("descent.json")]:
        if path.parent.name.startswith(".") or path.parent.parent.name.startswith("."):
            continue
        try:
            read_json(path, largest=None)
            read_tensors(path.with_suffix(".safetensors"))
            if path.name == "trainer.json":
                read_machine(path.parent)
        except MVRBMError as error:
            bad.append(str(error))
    return bad


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a saved model, which must load."""
    mvrbm.load(model, "cpu")
    return read_tensors(model / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two models have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Checks:
    """Runs of one kind of training, and the failures found."""

    def __init__(self, kind: str, home: Path) -> None:
        self.kind, self.home = kind, home
        self.launch: Callable[..., int] = _torchrun if kind == TWO_RANKS else _fork
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        began = time.perf_counter()
        if self.launch(kind, home / "undisturbed", home / "expected", Disturbance("")) != 0:
            raise SystemExit(f"{kind}: a run without disturbance failed")
        self.seconds = time.perf_counter() - began
        self.expected = weights_of(home / "expected")
        stored = [path.stat().st_size for path in (home / "undisturbed").rglob("*.safetensors")]
        self.largest = max(stored)

    def run(self, name: str, disturbances: list[Disturbance]) -> None:
        """Make one run with disturbances, and check its files after each of them and at the end."""
        home = self.home / name
        home.mkdir()
        folder, out = home / "checkpoints", home / "model"
        older = RBM(3, n_epochs=0, random_state=1, device="cpu").fit(BITS.reshape(len(BITS), -1)[:9])
        older.save(out)
        before = weights_of(out)
        for what in disturbances:
            code = self.launch(self.kind, folder, out, what)
            self.counts[what.kind if code else "too late"] += 1
            allowed = {"kill": {-9}, "terminate": {_TERMINATED, -15}, "full disk": {_FAILED}}[what.kind] | {0}
            if code not in allowed and self.kind != TWO_RANKS:  # a launcher has its own codes
                self.failures.append(f"{name}: exit code {code} after '{what.kind}'")
            self.failures += unreadable(folder)
            if code and what.kind != "kill":
                self.failures += [f"{name}: {path} is left" for path in home.rglob(".*")]
            there = weights_of(out)
            if not equal(there, before) and not equal(there, self.expected) and self.kind != TWO_RANKS:
                self.failures.append(f"{name}: neither the older model nor the result is there")
        if self.launch(self.kind, folder, out, Disturbance("")) != 0:
            self.failures.append(f"{name}: it cannot be resumed")
        elif not equal(weights_of(out), self.expected):
            self.failures.append(f"{name}: the result is another one")
        self.failures += [f"{name}: {path} is left at the end" for path in home.rglob(".*")]


def main() -> int:
    """Disturb and resume training runs, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="number of kills, over all kinds")
    parser.add_argument("--others", type=int, default=2, help="number of SIGTERMs, and of full disks, per kind")
    parser.add_argument("--kinds", default=",".join([*KINDS, TWO_RANKS]), help="kinds of training, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the moments")
    arguments = parser.parse_args()
    rng, kinds = random.Random(arguments.seed), arguments.kinds.split(",")
    torch.optim.SGD([torch.zeros(1)])  # imports the rest of torch once, not in every process
    failures, total = 0, Counter[str]()
    print(
        f"{'kind':15} {'seconds':>7} {'kills':>6} {'SIGTERM':>8} {'full disk':>10} {'too late':>9}  failures",
        flush=True,
    )
    for index, kind in enumerate(kinds):
        with tempfile.TemporaryDirectory() as home:
            checks = Checks(kind, Path(home))
            kills, number = (arguments.kills + index) // len(kinds), 0
            while checks.counts["kill"] < kills and number < 20 * _PER_RUN:
                number += 1
                here = min(_PER_RUN, kills - checks.counts["kill"])
                moments = [rng.uniform(0, checks.seconds / here) for _ in range(here)]
                checks.run(f"killed-{number}", [Disturbance("kill", when) for when in moments])
            for number in range(arguments.others):
                when = rng.uniform(0.2 * checks.seconds, 0.8 * checks.seconds)
                checks.run(f"terminated-{number}", [Disturbance("terminate", when)])
                if kind != TWO_RANKS:
                    size = rng.uniform(0.05, 0.95) * checks.largest
                    checks.run(f"full-{number}", [Disturbance("full disk", size)])
        counts = checks.counts
        print(
            f"{kind:15} {checks.seconds:7.1f} {counts['kill']:6} {counts['terminate']:8} {counts['full disk']:10} "
            f"{counts['too late']:9}  {'; '.join(checks.failures) or 'none'}",
            flush=True,
        )
        failures, total = failures + len(checks.failures), total + counts
    print(f"{total['kill']} kills, {total['terminate']} SIGTERMs, {total['full disk']} full disks: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
