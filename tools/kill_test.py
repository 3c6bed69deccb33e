"""Does a training that is killed and resumed end like one that was not? Kill it at random moments and compare.

    python tools/kill_test.py                # twenty kills
    python tools/kill_test.py --kills 3 --passes 20

Trainings with a checkpoint after every update, and after every seventh, are killed with SIGKILL, each five
times, and resumed after each. At the end their parameters are compared with those of an undisturbed run. A
folder `.writing-*` that is left behind shows that a kill fell into the writing, or removing, of a checkpoint.
Prints a table; the exit code is 1 if a parameter differs or a checkpoint is damaged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: processes are forked below

import numpy as np
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from mvrbm import Bernoulli, BoltzmannMachine, Gaussian, Kronecker
from mvrbm.learning import PCD, Callback, Checkpoint, Monitor, Recipe, Trainer
from mvrbm.saving import StorageError, from_pretrained, read_json, read_tensors, save_pretrained

KILLS_A_TRAINING = 5
EVERY = (1, 7)  # updates between checkpoints: the first spends most of its time writing them


class Ready(Callback):
    """Says where training begins, when all has been set up."""

    def __init__(self, told: Connection) -> None:
        self.told = told

    def on_train_begin(self, trainer: Trainer) -> None:
        self.told.send(trainer.update)


def train(told: Connection, folder: Path, result: Path, every: int, passes: int) -> None:
    """Train, going on from what is in the folder, and write the machine at the end."""
    rng = np.random.default_rng(0)
    data = (rng.standard_normal((95, 6, 6)) @ rng.standard_normal((6, 6))).astype(np.float32)
    data[rng.random(data.shape) < 0.1] = np.nan
    machine = BoltzmannMachine(Gaussian((6, 6), learn_variance=True), Bernoulli((5, 5)), Kronecker(2))
    trainer = Trainer(
        machine,
        Recipe(batch_size=10, negative=PCD(20)),
        optimizer=lambda groups: torch.optim.Adam(groups, lr=0.003),
        scheduler=lambda optimiser: CosineAnnealingLR(optimiser, passes),
        callbacks=[
            Ready(told),
            Checkpoint(folder, every=every),
            Monitor(np.nan_to_num(data[:20]), every=20, pseudo_sites=0),
        ],
    )
    trainer.resume(folder)
    trainer.fit(data, passes, nan_is_missing=True)
    save_pretrained(machine, result)


class Outcome(NamedTuple):
    """One start of a training process."""

    started_at: int  # the update that it went on from
    seconds: float  # from there to its end
    killed: bool


def launch(folder: Path, result: Path, every: int, passes: int, kill_after: float | None) -> Outcome:
    """Run a training process, and kill it after some seconds unless it is through before."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=train, args=(there, folder, result, every, passes))
    process.start()
    there.close()
    started_at = here.recv()
    began = time.perf_counter()
    process.join(kill_after)
    process.kill()
    process.join()
    if process.exitcode not in (0, -9):
        raise SystemExit(f"a training ended with code {process.exitcode}")
    return Outcome(started_at, time.perf_counter() - began, process.exitcode == -9)


def damaged(folder: Path) -> list[str]:
    """Checkpoints under a folder that cannot be read."""
    bad = []
    for path in sorted(folder.glob("update-*")):
        try:
            from_pretrained(path)
            read_json(path / "trainer.json", largest=None)
            read_tensors(path / "trainer.safetensors")
        except StorageError as error:
            bad.append(str(error))
    return bad


def different(left: Path, right: Path) -> list[str]:
    """Names of the parameters that two saved machines do not share bit for bit."""
    one, other = from_pretrained(left).state_dict(), from_pretrained(right).state_dict()
    return [name for name in one if not torch.equal(one[name], other[name])]


def main() -> int:
    """Run the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--passes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    passes, failures, kills, caught_writing, training = arguments.passes, 0, 0, 0, 0
    torch.optim.SGD([torch.zeros(1)])  # loads the rest of torch once, not in every process
    with tempfile.TemporaryDirectory() as home:
        undisturbed = Path(home, "undisturbed")
        length = {
            every: launch(undisturbed / f"{every}", undisturbed / f"end-{every}", every, passes, None).seconds
            for every in EVERY
        }
        failures += len(different(*(undisturbed / f"end-{every}" for every in EVERY)))
        print("undisturbed:", ", ".join(f"{length[every]:.1f} s with a checkpoint every {every}" for every in EVERY))
        print(
            f"{'kill':>4} {'training':>8} {'every':>5} {'from update':>11} {'after (s)':>9} {'newest':>7}  left behind"
        )
        while kills < arguments.kills:
            training += 1
            every = EVERY[training % len(EVERY) - 1]
            folder, result = Path(home, f"{training}"), Path(home, f"end-{training}")
            here = min(KILLS_A_TRAINING, arguments.kills - kills)
            for _ in range(here):
                outcome = launch(folder, result, every, passes, rng.uniform(0, length[every] / here))
                if not outcome.killed:
                    break
                kills += 1
                names = sorted(path.name for path in folder.glob("update-*"))
                left = [path.name for path in folder.glob(".writing-*")]
                caught_writing += bool(left)
                bad = damaged(folder)
                failures += len(bad)
                newest = int(names[-1].removeprefix("update-")) if names else "-"
                print(
                    f"{kills:4} {training:8} {every:5} {outcome.started_at:>11} {outcome.seconds:9.3f} {newest:>7}  "
                    f"{'half a checkpoint' if left else ''}{' DAMAGED: ' + '; '.join(bad) if bad else ''}",
                    flush=True,
                )
            launch(folder, result, every, passes, None)
            wrong = different(undisturbed / f"end-{every}", result)
            failures += len(wrong)
            print(
                f"     training {training} ends {'DIFFERENT in ' + ', '.join(wrong) if wrong else 'identical'}",
                flush=True,
            )
    print(f"{kills} kills, {caught_writing} of them in the middle of a checkpoint: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
