"""The work of the processes that test_distributed.py starts.

    python distributed_jobs.py 2:equal,sweep 4:equal 2:alone:3 FOLDER  # processes, jobs, and seconds of patience
    torchrun ... distributed_jobs.py killed FOLDER

The first command imports everything once for all its processes, because imports take most of their time.
"""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mvrbm import MVRBM, BoltzmannMachine, cli
from mvrbm.couplings import CP, Dense, Kronecker
from mvrbm.distributed import World
from mvrbm.estimators.sweep import Sweep
from mvrbm.io.shards import Shards
from mvrbm.saving import write_tensors
from mvrbm.training import CD, PCD, Checkpoint, Monitor, Recipe, TemperedPCD, Trainer
from mvrbm.units import Bernoulli, Categorical, Gaussian

BATCH = 20
# The last batch of an epoch is short.
SAMPLES = 95
N_EPOCHS = 6
N_UPDATES = 30


def gray(n, *shape, seed=0):
    rng = np.random.default_rng(seed)
    base = np.linspace(0.1, 0.9, shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    return torch.from_numpy((rng.random((n, *shape)) < base + 0.2 * (rng.random((n, *[1] * len(shape))) - 0.5)) * 1.0)


def one_hot(n, k, seed=1):
    return torch.nn.functional.one_hot(
        torch.randint(k, (n,), generator=torch.Generator().manual_seed(seed)), k
    ).double()


PAPER = Recipe(batch_size=BATCH, learning_rate=0.05, bias_learning_rate=None, weight_decay=0.01, factor_std=0.3,
               bias_from_data=False, centering="none", rate_decay=None, normalized=False, balance=False)  # fmt: skip
OWN = Recipe(batch_size=BATCH)
FULL = dataclasses.replace(OWN, centering="full")


def with_gaps(x, seed=5):
    """Samples of which a fifth of the entries is missing."""
    missing = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 0.2
    return torch.where(missing, torch.nan, x)


class Case(NamedTuple):
    """A training run that has the same result with any number of processes."""

    machine: Callable[[], BoltzmannMachine]
    recipe: Recipe
    data: dict[str, torch.Tensor] = {"visible": gray(SAMPLES, 6, 5)}  # noqa: RUF012
    trainer: dict[str, Any] = {}  # noqa: RUF012
    fit: dict[str, Any] = {}  # noqa: RUF012
    weights: Any = None


def bits():
    return BoltzmannMachine(Bernoulli((6, 5)), Bernoulli((4, 3)), Kronecker(1))


def reals(rank=2):
    return BoltzmannMachine(Gaussian((6, 5)), Bernoulli((4, 3)), Kronecker(rank))


def labeled():
    layers = {"visible": Gaussian((6, 5)), "label": Categorical(3)}
    return BoltzmannMachine(layers, Bernoulli((2, 3)), {"visible": Kronecker(1), "label": Dense()})


GAPS = {"visible": with_gaps(gray(SAMPLES, 6, 5))}

# Neither 7 nor 5 chains can be divided evenly by 2, 3 or 4 processes.
CASES = {
    "bernoulli": Case(bits, PAPER),
    "gaussian": Case(reals, OWN),
    "PCD": Case(bits, dataclasses.replace(OWN, negative=PCD(BATCH, 2))),
    "PCD, uneven": Case(bits, dataclasses.replace(OWN, negative=PCD(7, 2))),
    "PCD, uneven, reals": Case(reals, dataclasses.replace(FULL, negative=PCD(7))),
    "PCD, uneven, autograd": Case(bits, dataclasses.replace(FULL, negative=PCD(7)), trainer={"backend": "autograd"}),
    "more chains than samples": Case(bits, dataclasses.replace(OWN, negative=PCD(50))),
    "tempered, uneven": Case(bits, dataclasses.replace(OWN, negative=TemperedPCD(5, 4, 2))),
    "tempered, reals": Case(reals, dataclasses.replace(OWN, negative=TemperedPCD(5, 3))),
    "missing entries": Case(bits, OWN, GAPS, fit={"nan_is_missing": True}),
    "missing entries, PCD, centered": Case(
        bits, dataclasses.replace(FULL, negative=PCD(7)), GAPS, fit={"nan_is_missing": True}
    ),
    "weights": Case(bits, dataclasses.replace(FULL, negative=PCD(7)), weights=np.arange(SAMPLES) % 5),
    "autograd": Case(bits, FULL, trainer={"backend": "autograd"}),
    "CP, centered": Case(lambda: BoltzmannMachine(Bernoulli((6, 5)), Bernoulli(7), CP(3)), FULL),
    "labels": Case(
        labeled,
        FULL,
        {"visible": gray(SAMPLES, 6, 5), "label": one_hot(SAMPLES, 3)},
        trainer={"optimizer": lambda groups: torch.optim.Adam(groups, lr=0.01)},
    ),
}


def train_case(name, world):
    case = CASES[name]
    machine = case.machine().double()
    trainer = Trainer(machine, case.recipe, seed=3, world=world, **case.trainer)
    trainer.sample_weight = case.weights
    trainer.fit(case.data, N_EPOCHS, **case.fit)
    assert trainer.update == N_UPDATES
    return {f"{name}/{key}": value for key, value in machine.state_dict().items()}


def equal(folder, world):
    """Train every case."""
    found = {}
    for name in CASES:
        found |= train_case(name, world)
    if world.is_main:
        write_tensors(found, folder / f"equal-{world.size}.safetensors")
    # The parameters have the same bits on every process.
    for value in found.values():
        first = value.clone()
        world.broadcast([first])
        assert torch.equal(first, value)


class Seen(Monitor):
    """Records the samples that this process gets in the first epoch."""

    def __init__(self):
        self.every, self.rows = 1, []

    def on_train_begin(self, trainer):
        pass

    def on_batch_end(self, trainer, batch):
        if trainer.epoch == 0:
            self.rows += batch.visible["visible"][:, 0, 0].tolist()

    def on_epoch_end(self, trainer):
        pass


def shards(folder, world):
    """Every sample occurs once per epoch, for shards of any lengths, and all processes make as many updates."""
    for name in ("unequal", "two"):
        machine = BoltzmannMachine(Gaussian((2, 2)), Bernoulli((2, 2)), Kronecker(1)).double()
        seen = Seen()
        trainer = Trainer(machine, Recipe(batch_size=7), seed=1, world=world, callbacks=[seen])
        trainer.fit(folder / name, 2, initialize=True)
        rows = torch.cat(world.gather(torch.tensor(seen.rows, dtype=torch.float64)))
        assert sorted(rows.tolist()) == sorted(Shards(folder / name)[:][:, 0, 0].tolist()), name
        assert world.sum(trainer.update) == world.size * trainer.update
        mean = machine.layers["visible"].log_variance.clone()
        world.broadcast([mean])
        assert torch.equal(mean, machine.layers["visible"].log_variance)
    if world.is_main:
        (folder / f"shards-{world.size}.json").write_text(json.dumps({"updates": trainer.update}))


def loaders(folder, world):
    """Loaders that end at different times. A process without data takes part until all have ended."""
    mine = gray(13 + 20 * world.rank, 6, 5, seed=world.rank)
    batches = list(mine.split(10))
    machine = BoltzmannMachine(Bernoulli((6, 5)), Bernoulli((4, 3)), Kronecker(1)).double()
    trainer = Trainer(machine, OWN, seed=1, world=world)
    trainer.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(mine), batch_size=10), 2, initialize=True)
    longest = int(max(len(part) for part in world.gather(torch.zeros(len(batches)))))
    assert trainer.update == 2 * longest


def long_training(checkpoints, world, *, kill=None):
    machine = BoltzmannMachine(Bernoulli((6, 5)), Bernoulli((4, 3)), Kronecker(1)).double()

    class Killer(Checkpoint):
        def on_batch_end(self, trainer, batch):
            super().on_batch_end(trainer, batch)
            if kill is not None and trainer.update == kill and trainer.world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    recipe = dataclasses.replace(OWN, negative=PCD(30))
    callbacks = [] if checkpoints is None else [Killer(checkpoints, every=4)]
    trainer = Trainer(machine, recipe, seed=4, world=world, callbacks=callbacks)
    if checkpoints is not None:
        trainer.resume(checkpoints)
    trainer.fit(gray(SAMPLES, 6, 5), 6, initialize=True)
    return trainer


def killed(folder, world):
    """One of two processes dies in the middle of the first attempt. The second attempt resumes the last checkpoint."""
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (folder / f"attempts-{world.rank}").open("a") as file:
        file.write(f"{attempt}\n")
    trainer = long_training(folder / "checkpoints", world, kill=17 if attempt == 0 else None)
    undisturbed = long_training(folder / "undisturbed", world) if attempt else trainer
    if world.is_main:
        write_tensors(trainer.machine.state_dict(), folder / "killed.safetensors")
        write_tensors(undisturbed.machine.state_dict(), folder / "undisturbed.safetensors")
        (folder / "killed.json").write_text(json.dumps({"updates": trainer.update, "attempt": attempt}))


def tempered(folder, world):
    """Write a checkpoint with tempered chains, for one process to resume."""
    machine = BoltzmannMachine(Bernoulli((6, 5)), Bernoulli((4, 3)), Kronecker(1)).double()
    recipe = dataclasses.replace(OWN, negative=TemperedPCD(6, 3))
    trainer = Trainer(machine, recipe, seed=4, world=world, callbacks=[Checkpoint(folder / "tempered")])
    trainer.fit(gray(SAMPLES, 6, 5), 2, initialize=True)
    assert trainer.state.chains["visible"].shape[:2] == (3, 6 // world.size)


def swept():
    x = gray(60, 6, 5).numpy().astype(np.float32)
    return Sweep(MVRBM((4, 3), n_epochs=2, device="cpu"), {"rank": [1, 2, 3], "random_state": [0]}).fit(x)


def sweep(folder, world):
    """Each process trains its candidates. All processes get all scores and the best model."""
    found = swept()
    assert [candidate.estimator is not None for candidate in found.candidates_] == [
        number % world.size == world.rank for number in range(3)
    ]
    best = torch.from_numpy(found.best_estimator_.components().copy())
    first = best.clone()
    world.broadcast([first])
    assert torch.equal(first, best)
    if world.is_main:
        table = {"scores": [candidate.score for candidate in found.candidates_], "best": found.best_params_}
        (folder / "sweep.json").write_text(json.dumps(table))


def corners(folder, world):
    """A stop that one process requests, resuming within an epoch, and batches without samples for some process."""

    class Enough(Monitor):
        def __init__(self):
            self.every = 1

        def on_train_begin(self, trainer):
            pass

        def on_batch_end(self, trainer, batch):
            if trainer.update == 3 and trainer.world.rank == 1:
                trainer.stop = True

    trainer = Trainer(bits().double(), OWN, seed=1, world=world, callbacks=[Enough()])
    trainer.fit(gray(SAMPLES, 6, 5), 4, initialize=True)
    assert trainer.update == 3  # all processes agree after every batch
    # Shards whose rows do not divide evenly, resumed within the second epoch.
    ends = []
    for attempt in range(2):
        machine = BoltzmannMachine(Gaussian((2, 2)), Bernoulli((2, 2)), Kronecker(1)).double()
        checkpoints = folder / "corners" / ("whole" if attempt == 0 else "part")
        if attempt and world.is_main:
            shutil.copytree(folder / "corners" / "whole" / "update-000000009", checkpoints / "update-000000009")
        world.sum(0)
        recipe = Recipe(batch_size=7, negative=PCD(5))
        callbacks = [Checkpoint(checkpoints, every=1, keep=99)]
        trainer = Trainer(machine, recipe, seed=1, world=world, callbacks=callbacks)
        trainer.resume(checkpoints)
        trainer.fit(folder / "unequal", 3, initialize=True)
        ends.append({key: value.clone() for key, value in machine.state_dict().items()})
    assert trainer.update > 12
    assert all(torch.equal(ends[0][key], value) for key, value in ends[1].items())
    # One sample in the last batch; two samples for two processes.
    for negative, n in [(TemperedPCD(4, 3), 21), (PCD(4), 21), (PCD(4), 1), (CD(1), 1)]:
        machine = bits().double()
        trainer = Trainer(machine, dataclasses.replace(FULL, negative=negative), seed=1, world=world)
        trainer.fit(gray(n, 6, 5), 2, initialize=True)
        assert trainer.update == 2 * -(-n // BATCH)
        machine = bits().double()
        Trainer(machine, dataclasses.replace(OWN, negative=negative), seed=1, world=world).fit(
            gray(n, 6, 5), 2, initialize=True
        )
    # Metrics of different samples are averaged over the processes.
    trainer = Trainer(machine, OWN, seed=1, world=world, callbacks=[Monitor(gray(9, 6, 5, seed=world.rank))])
    trainer.fit(gray(SAMPLES, 6, 5), 1, initialize=True)
    errors = world.gather(torch.tensor([trainer.history[-1]["reconstruction_error"]], dtype=torch.float64))
    assert all(torch.equal(error, errors[0]) for error in errors)


def alone(folder, world):
    """A process gives up if the others do not answer."""
    if world.is_main:
        began = time.monotonic()
        try:
            world.sum(1.0)
        except RuntimeError:
            (folder / "alone.json").write_text(json.dumps({"seconds": time.monotonic() - began}))
    else:
        end = time.monotonic() + 60
        while not (folder / "alone.json").exists() and time.monotonic() < end:
            time.sleep(0.1)


def estimator(folder, world):
    """Train an estimator in several processes, without any other change to the program."""
    x = gray(200, 6, 5).numpy()
    MVRBM((4, 3), n_epochs=5, batch_size=20, random_state=None).fit(x).save(folder / "by-estimator")


def run_command(name, data, folder, world, *arguments):
    """Run the command line, and store its exit code, output and errors."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main(["train", str(folder / data), "--out", str(folder / f"by-{name}"), *arguments])
    (folder / f"{name}-{world.rank}.json").write_text(json.dumps([code, out.getvalue(), err.getvalue()]))


def command(folder, world):
    run_command("command", "gray.npy", folder, world, "--hidden", "4x3", "--epochs", "5", "--batch-size", "20")


def unreadable(folder, world):
    """Both processes fail if one of them cannot read its shard."""
    run_command("unreadable", "unreadable", folder, world, "--hidden", "2x2")


JOBS = {
    job.__name__: job
    for job in (
        equal, shards, loaders, killed, tempered, sweep, corners, alone, estimator, command, unreadable
    )
}  # fmt: skip


def work(names, folder):
    world = World.here()
    for name in names.split(","):
        JOBS[name](folder, world)


def start(size, names, folder, patience):
    """Start processes with the environment variables of torchrun, and wait for them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    children = []
    for rank in range(size):
        children.append(os.fork())
        if not children[-1]:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "RANK": rank}
            os.environ.update({name: str(value) for name, value in where.items()}, MVRBM_TIMEOUT=patience)
            work(names, folder)
            sys.exit()
    codes = [os.waitpid(child, 0)[1] for child in children]
    if any(codes):
        sys.exit(f"{size} processes: {names} failed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    *groups, where_to = sys.argv[1:]
    if "RANK" not in os.environ:
        torch.optim.SGD([torch.zeros(1)])  # imports the rest of torch once, not in every process
    for group in groups:
        if "RANK" in os.environ:
            work(group, Path(where_to))
        else:
            number, to_do, *seconds = group.split(":")
            start(int(number), to_do, Path(where_to), *seconds or ["60"])
