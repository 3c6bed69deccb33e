"""Check that training runs that are killed, terminated or run out of disk space lose nothing and resume bit for bit.

    python tools/kills.py                          # sixty kills, and other disturbances, of all kinds of training
    python tools/kills.py --kills 3 --others 0 --kinds trainer

Every run starts with an older model at the path of its result. It is disturbed at random times, resumed after each
disturbance, and finally runs to its end. The disturbances are SIGKILL, SIGTERM (the exit code must be 143), and a limit
on the size of files, which acts like a full disk (the run must end with an exception of this package). After each
disturbance, the model at the path must load and be either the older model or the result, and every checkpoint must be
readable. At the end, the result must have the same bits as the result of a run without disturbances, and there must be
no temporary files. Prints a table. The exit code is 1 after a failure. Set TMPDIR=/dev/shm to avoid waiting for the
disk.
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

# Processes are forked below, so this must be set before PyTorch is imported.
os.environ["OMP_NUM_THREADS"] = "1"

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

# Exit code after an exception of this package.
_FAILED = 1
# Exit code after SIGTERM.
_TERMINATED = 143
# Number of disturbances per run.
_PER_RUN = 3
_RNG = np.random.default_rng(0)
BITS = (_RNG.random((200, 8, 8)) < 0.3).astype(np.float32)
LABELS = _RNG.integers(0, 3, 200)
IMAGE = _RNG.integers(0, 256, (60, 60), dtype=np.uint8)
SETTINGS: dict[str, Any] = {"batch_size": 10, "random_state": 0, "device": "cpu"}


# -- kinds of training: each resumes from the checkpoints in a folder and saves a model ------------------


def trainer(folder: Path, out: Path) -> None:
    """Train on real-valued data with missing entries, with a scheduler and a checkpoint after every update."""
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
    save(machine, out, overwrite=True)


def estimator(folder: Path, out: Path) -> None:
    model = MVRBM((6, 6), rank=2, negative="pcd", n_chains=20, n_epochs=60, **SETTINGS)
    model.fit(BITS, callbacks=[Checkpoint(folder)], resume=folder).save(out, overwrite=True)


def deep(folder: Path, out: Path) -> None:
    model = DeepMVRBM(((6, 6), (4, 4)), feed="sample", n_epochs=25, **SETTINGS)
    model.fit(BITS, callbacks=[Checkpoint(folder, every=3)], resume=folder).save(out, overwrite=True)


def classifier(folder: Path, out: Path) -> None:
    model = MVRBMClassifier((6, 6), pretraining=15, n_epochs=12, averaging=0.99, **SETTINGS)
    model.fit(BITS, LABELS, checkpoints=folder).save(out, overwrite=True)


def generative(folder: Path, out: Path) -> None:
    model = ClassificationMVRBM((6, 6), mode="generative", n_epochs=50, **SETTINGS)
    model.fit(BITS, LABELS, checkpoints=folder).save(out, overwrite=True)


def super_resolver(folder: Path, out: Path) -> None:
    steps = [TrainingStep("patches", n_samples=2000, n_epochs=12, batch_size=512, learning_rate=3e-3)]
    settings: dict[str, Any] = {"symmetric": False, "steps": steps, "device": "cpu"}
    model = SuperResolver(2, 6, (5, 5), n_patches=1000, n_epochs=20, **settings)
    model.fit([IMAGE], checkpoints=folder).save(out, overwrite=True)


def sweep(folder: Path, out: Path) -> None:
    found = Sweep(RBM(20, n_epochs=12, **SETTINGS), {"learning_rate": [0.05, 0.1], "random_state": [0, 1, 2]})
    found.fit(BITS.reshape(len(BITS), -1), checkpoints=folder).best_estimator_.save(out, overwrite=True)


KINDS = {work.__name__: work for work in (trainer, estimator, deep, classifier, generative, super_resolver, sweep)}
TWO_RANKS = "two_ranks"


# -- processes --------------------------------------------------------------------------------------------


class Disturbance(NamedTuple):
    """A disturbance of a run."""

    #: "kill", "terminate", "full disk", or "" for no disturbance.
    kind: str
    #: Seconds after the start, or the largest size of a file in bytes.
    when: float = 0.0


def _work(kind: str, folder: Path, out: Path, largest: int | None) -> None:
    if largest is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))  # Python ignores SIGXFSZ.
    with terminate_in_order():
        try:
            KINDS[kind](folder, out)
        except MVRBMError as error:
            if "cannot be written" not in str(error):
                raise
            os._exit(_FAILED)


def _fork(kind: str, folder: Path, out: Path, what: Disturbance) -> int:
    """Run one process, disturb it, and return its exit code, which is negative after a signal."""
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
    """Train with two processes, disturb them, and return the exit code of their launcher."""
    data = folder.parent / "data.npy"
    if not data.exists():
        np.save(data, BITS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "0.1"]
    command = f"-m mvrbm train {data} --hidden 5x5 --epochs 300 --batch-size 10 --device cpu --quiet --force --resume"
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
            # On SIGTERM, the launcher terminates its processes, as under a job scheduler. If it is killed, its
            # processes keep running in their own sessions, so they are killed first.
            for number in _descendants(process.pid) if what.kind == "kill" else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            (process.kill if what.kind == "kill" else process.terminate)()
    return process.wait()


def _descendants(parent: int) -> list[int]:
    """Return the IDs of all processes that a process has started, directly or indirectly."""
    own = [int(number) for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return own + [further for child in own for further in _descendants(child)]


# -- checks ------------------------------------------------------------------------------------------------


def unreadable(folder: Path) -> list[str]:
    """Return an error message for each unreadable checkpoint under a folder."""
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
    """Load a saved model, and return its tensors."""
    mvrbm.load(model, "cpu")
    return read_tensors(model / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two models have the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Checks:
    """Runs of one kind of training, and their failures."""

    def __init__(self, kind: str, home: Path) -> None:
        self.kind = kind
        self.home = home
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
        """Run one training run with disturbances, and check its files after each of them and at the end."""
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
            if code not in allowed and self.kind != TWO_RANKS:  # torchrun has its own exit codes.
                self.failures.append(f"{name}: exit code {code} after '{what.kind}'")
            self.failures += unreadable(folder)
            if code and what.kind != "kill":
                self.failures += [f"{name}: {path} was not removed" for path in home.rglob(".*")]
            there = weights_of(out)
            if not equal(there, before) and not equal(there, self.expected) and self.kind != TWO_RANKS:
                self.failures.append(f"{name}: the model is neither the older model nor the result")
        if self.launch(self.kind, folder, out, Disturbance("")) != 0:
            self.failures.append(f"{name}: the run cannot be resumed")
        elif not equal(weights_of(out), self.expected):
            self.failures.append(f"{name}: the result differs from the result without disturbances")
        self.failures += [f"{name}: {path} was not removed at the end" for path in home.rglob(".*")]


def main() -> int:
    """Disturb and resume training runs, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="number of kills, of all kinds of training together")
    parser.add_argument("--others", type=int, default=2, help="number of SIGTERMs and of full disks per kind")
    parser.add_argument("--kinds", default=",".join([*KINDS, TWO_RANKS]), help="kinds of training, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the disturbances")
    arguments = parser.parse_args()
    rng, kinds = random.Random(arguments.seed), arguments.kinds.split(",")
    torch.optim.SGD([torch.zeros(1)])  # Imports the rest of PyTorch once instead of in every process.
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
