"""Check that training runs which are killed and resumed end exactly like runs without interruption.

    python tools/kill_test.py                # twenty kills
    python tools/kill_test.py --kills 3 --epochs 20

Training runs that write a checkpoint after every update, or after every seventh, are killed with SIGKILL at random
moments, five times each, and resumed each time. At the end their parameters are compared with those of a run that was
never killed. A remaining folder `.writing-*` shows that a kill interrupted the writing, or the removal, of a
checkpoint. Prints a table; the exit code is 1 if a parameter differs or a checkpoint is damaged.
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

os.environ["OMP_NUM_THREADS"] = "1"  # set before torch is imported, because processes are forked below

import numpy as np
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from mvrbm import Bernoulli, BoltzmannMachine, Gaussian, Kronecker
from mvrbm.errors import StorageError
from mvrbm.learning import PCD, Callback, Checkpoint, Monitor, Recipe, Trainer
from mvrbm.learning.callbacks import Run
from mvrbm.saving import read_json, read_machine, read_tensors, save

KILLS_PER_RUN = 5
EVERY = (1, 7)  # updates between checkpoints: with 1, most of the time is spent writing them


class Ready(Callback):
    """Reports the update from which training continues, after everything has been set up."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def on_train_begin(self, trainer: Run) -> None:
        self.connection.send(trainer.update)


def train(connection: Connection, folder: Path, result: Path, every: int, n_epochs: int) -> None:
    """Train, resuming from the checkpoints in the folder, and save the machine at the end."""
    rng = np.random.default_rng(0)
    data = (rng.standard_normal((95, 6, 6)) @ rng.standard_normal((6, 6))).astype(np.float32)
    data[rng.random(data.shape) < 0.1] = np.nan
    machine = BoltzmannMachine(Gaussian((6, 6), learn_variance=True), Bernoulli((5, 5)), Kronecker(2))
    trainer = Trainer(
        machine,
        Recipe(batch_size=10, negative=PCD(20)),
        optimizer=lambda groups: torch.optim.Adam(groups, lr=0.003),
        scheduler=lambda optimiser: CosineAnnealingLR(optimiser, n_epochs),
        callbacks=[
            Ready(connection),
            Checkpoint(folder, every=every),
            Monitor(np.nan_to_num(data[:20]), every=20, pseudo_sites=0),
        ],
    )
    trainer.resume(folder)
    trainer.fit(data, n_epochs, nan_is_missing=True, initialise=trainer.update == 0)
    save(machine, result)


class Outcome(NamedTuple):
    """The outcome of one training process."""

    started_at: int  # the update from which it continued
    seconds: float  # from then to its end
    killed: bool


def launch(folder: Path, result: Path, every: int, n_epochs: int, kill_after: float | None) -> Outcome:
    """Run a training process, and kill it after some seconds unless it ends earlier."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=train, args=(there, folder, result, every, n_epochs))
    process.start()
    there.close()
    started_at = here.recv()
    began = time.perf_counter()
    process.join(kill_after)
    process.kill()
    process.join()
    if process.exitcode not in (0, -9):
        raise SystemExit(f"a training process ended with exit code {process.exitcode}")
    return Outcome(started_at, time.perf_counter() - began, process.exitcode == -9)


def damaged(folder: Path) -> list[str]:
    """Return an error message for each checkpoint in a folder that cannot be read."""
    bad = []
    for path in sorted(folder.glob("update-*")):
        try:
            read_machine(path)
            read_json(path / "trainer.json", largest=None)
            read_tensors(path / "trainer.safetensors")
        except StorageError as error:
            bad.append(str(error))
    return bad


def different(left: Path, right: Path) -> list[str]:
    """Return the names of the parameters that differ, in any bit, between two saved machines."""
    one, other = (read_machine(folder).state_dict() for folder in (left, right))
    return [name for name in one if not torch.equal(one[name], other[name])]


def main() -> int:
    """Kill and resume training runs, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of each training run")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the moments of the kills")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    n_epochs, failures, kills, caught_writing, run = arguments.epochs, 0, 0, 0, 0
    torch.optim.SGD([torch.zeros(1)])  # imports the rest of torch once, not in every process
    with tempfile.TemporaryDirectory() as home:
        undisturbed = Path(home, "undisturbed")
        length = {
            every: launch(undisturbed / f"{every}", undisturbed / f"end-{every}", every, n_epochs, None).seconds
            for every in EVERY
        }
        failures += len(different(*(undisturbed / f"end-{every}" for every in EVERY)))
        print("not killed:", ", ".join(f"{length[every]:.1f} s with a checkpoint every {every}" for every in EVERY))
        print(f"{'kill':>4} {'run':>8} {'every':>5} {'from update':>11} {'after (s)':>9} {'newest':>7}  remains")
        while kills < arguments.kills:
            run += 1
            every = EVERY[run % len(EVERY) - 1]
            folder, result = Path(home, f"{run}"), Path(home, f"end-{run}")
            here = min(KILLS_PER_RUN, arguments.kills - kills)
            for _ in range(here):
                outcome = launch(folder, result, every, n_epochs, rng.uniform(0, length[every] / here))
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
                    f"{kills:4} {run:8} {every:5} {outcome.started_at:>11} {outcome.seconds:9.3f} {newest:>7}  "
                    f"{'half a checkpoint' if left else ''}{' DAMAGED: ' + '; '.join(bad) if bad else ''}",
                    flush=True,
                )
            launch(folder, result, every, n_epochs, None)
            wrong = different(undisturbed / f"end-{every}", result)
            failures += len(wrong)
            print(f"     run {run} ends {'DIFFERENT in ' + ', '.join(wrong) if wrong else 'identical'}", flush=True)
    print(f"{kills} kills, {caught_writing} of them while a checkpoint was being written: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
