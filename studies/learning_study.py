"""Measure what the documentation says of learning. Each study prints a table and writes JSON.

    python tools/learning_study.py defaults --out results/learning --workers 2
    python tools/learning_study.py grid
    python tools/learning_study.py seeds
    python tools/learning_study.py paper
    python tools/learning_study.py reconstruction --checkpoints runs/reconstruction
    python tools/learning_study.py likelihood
    python tools/learning_study.py memory

Full MNIST is found through MVRBM_DATA. `grid` takes patches of scikit-image's photographs, or of a
.npy file of (n, 128, 128) bytes given with --patches, where scikit-image is not installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import time
from pathlib import Path

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from mvrbm import Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker
from mvrbm.io.datasets import load
from mvrbm.learning import CD, PCD, Callback, Checkpoint, Recipe, TemperedPCD, Trainer
from mvrbm.likelihood import log_likelihood
from mvrbm.models import mvrbm
from mvrbm.sampling import mean_field

HIDDEN = (25, 25)


# -- shared -----------------------------------------------------------------------------------------


def mnist():
    train, test = load("mnist", split="train"), load("mnist", split="test")
    return train.arrays, train.labels, test.arrays, test.labels


def subset(n, seed, size=60_000):
    return np.random.default_rng(seed).choice(size, n, replace=False)


def nearest_neighbour_error(train, train_labels, test, test_labels):
    """Share of test rows whose nearest training row has another label."""
    a = torch.as_tensor(train).float().flatten(1)
    b = torch.as_tensor(test).float().flatten(1)
    squares, wrong = (a * a).sum(1), 0
    for first in range(0, len(b), 1000):
        nearest = (squares - 2 * b[first : first + 1000] @ a.T).argmin(1)
        wrong += int((train_labels[nearest.numpy()] != test_labels[first : first + 1000]).sum())
    return wrong / len(b)


@torch.no_grad()
def features(machine, images):
    parts = [machine.hidden_mean(torch.as_tensor(part) / 255) for part in np.array_split(images, 20)]
    return torch.cat(parts)


class Norms(Callback):
    """Norms of the factors after every update."""

    def __init__(self):
        self.values = []

    def on_batch_end(self, trainer, batch):
        factors = [p for name, p in trainer.machine.named_parameters() if name.startswith("couplings.")]
        self.values.append([float(factor.detach().norm()) for factor in factors])

    @property
    def peak_over_final(self):
        values = np.array(self.values)
        return float((values.max(0) / values[-1]).max())


class At(Callback):
    """Calls a function after given updates."""

    def __init__(self, updates, function):
        self.updates, self.function = set(updates), function

    def on_batch_end(self, trainer, batch):
        if trainer.update in self.updates:
            self.function(trainer)


def relative_error(machine, data):
    """Reconstruction error over the data's variance."""
    x = machine.as_layers(data)["visible"]
    with torch.no_grad():
        rebuilt = mean_field(machine, x, 1)["visible"]
    return float(((rebuilt - x) ** 2).sum() / ((x - x.mean(0)) ** 2).sum())


def in_parallel(function, jobs, workers):
    if workers == 1:
        return [function(job) for job in jobs]
    with multiprocessing.get_context("spawn").Pool(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.imap_unordered(function, jobs, chunksize=1))


def interval(values):
    """Mean and half the width of its 95 % interval."""
    values = np.asarray(values)
    # Student's t for 4 and 9 degrees of freedom, which is what five subsets and ten seeds leave.
    t = {4: 2.776, 9: 2.262, 19: 2.093}.get(len(values) - 1, 1.96)
    return float(values.mean()), float(t * values.std(ddof=1) / np.sqrt(len(values)))


# -- the default recipe on digits -------------------------------------------------------------------


def _defaults(job):
    seed, passes = job
    images, labels, test, test_labels = mnist()
    rows = subset(10_000, seed)
    row = {"subset": seed, "raw": nearest_neighbour_error(images[rows], labels[rows], test, test_labels)}
    norms = Norms()

    def measure(trainer):
        machine = trainer.machine
        here, there = features(machine, images[rows]), features(machine, test)
        error = nearest_neighbour_error(here, labels[rows], there, test_labels)
        row[f"after {trainer.update // 100} passes"] = error

    machine = mvrbm((28, 28), HIDDEN)
    trainer = Trainer(machine, "default", seed=seed, callbacks=[norms, At([100 * p for p in passes], measure)])
    trainer.fit(images[rows], max(passes))
    row["norm peak / final"] = norms.peak_over_final
    return row


def defaults(args):
    passes = [10, 100]
    rows = sorted(
        in_parallel(_defaults, [(seed, passes) for seed in range(5)], args.workers), key=lambda r: r["subset"]
    )
    summary = {f"gain after {p} passes": interval([r["raw"] - r[f"after {p} passes"] for r in rows]) for p in passes}
    return {"rows": rows, "summary": summary}


def _seeds(seed):
    images, *_ = mnist()
    rows = subset(10_000, 0)
    norms = Norms()
    machine = mvrbm((28, 28), HIDDEN)
    Trainer(machine, "default", seed=seed, callbacks=[norms]).fit(images[rows], 10)
    return {
        "seed": seed,
        "error": relative_error(machine, images[rows][:1000] / 255),
        "norm peak / final": norms.peak_over_final,
    }


def seeds(args):
    rows = sorted(in_parallel(_seeds, list(range(20)), args.workers), key=lambda r: r["seed"])
    return {"rows": rows, "summary": {f"worst {key}": max(r[key] for r in rows) for key in rows[0] if key != "seed"}}


# -- sizes, orders, ranks ---------------------------------------------------------------------------

SHAPES = [
    ((16,), (16,)),
    ((784,), (625,)),
    ((4, 4), (4, 4)),
    ((16, 16), (12, 12)),
    ((28, 28), (25, 25)),
    ((64, 64), (50, 50)),
    ((128, 128), (128, 128)),
    ((4, 4, 4), (4, 4, 4)),
    ((16, 16, 16), (10, 10, 10)),
    ((4, 4, 4, 4), (3, 3, 3, 3)),
    ((8, 8, 8, 8), (6, 6, 6, 6)),
]


def patches(path):
    if path:
        return np.load(path, mmap_mode="r")
    from mvrbm.io.datasets import patches as cut

    return np.round(255 * cut(load("natural-images").arrays, 128, 1000, seed=0)).astype(np.uint8)


def _grid(job):
    unit, visible_shape, hidden_shape, rank, seed, updates, path, cuda = job
    size = int(np.prod(visible_shape))
    side = int(np.ceil(np.sqrt(size)))
    data = np.ascontiguousarray(patches(path)[:, :side, :side]).reshape(-1, side * side)[:, :size]
    data = data.reshape(-1, *visible_shape)
    visible = Bernoulli(visible_shape) if unit == "bernoulli" else Gaussian(visible_shape, learn_variance=True)
    device = "cuda" if cuda and size * rank > 10_000 else "cpu"
    machine = BoltzmannMachine(visible, Bernoulli(hidden_shape), Kronecker(rank)).to(device)
    sample = torch.as_tensor(data[::5]).float() / (255 if unit == "bernoulli" else 1)
    row = {"unit": unit, "visible": list(visible_shape), "hidden": list(hidden_shape), "rank": rank, "seed": seed}
    norms = Norms()

    def measure(trainer):
        row[f"error at {trainer.update}"] = relative_error(trainer.machine, sample)

    trainer = Trainer(machine, "default", seed=seed, callbacks=[norms, At([100, updates], measure)])
    began = time.perf_counter()
    try:
        trainer.fit(data, -(-updates // 10))
        row["norm peak / final"] = norms.peak_over_final
    except ArithmeticError as error:
        row["diverged"] = str(error)
    row["rate"], row["seconds"] = trainer.recipe.learning_rate, time.perf_counter() - began
    if unit == "gaussian":
        row["least standard deviation"] = float(visible.scale.detach().min())
    return row


def grid(args):
    jobs = []
    for unit, (visible, hidden), rank in itertools.product(["bernoulli", "gaussian"], SHAPES, [1, 4, 16]):
        if len(visible) == 1 and rank > 1:
            continue
        for seed in range(args.grid_seeds):
            jobs.append((unit, visible, hidden, rank, seed, 400, args.patches, args.cuda))
    jobs.sort(key=lambda job: -np.prod(job[1]) * job[3])
    rows = in_parallel(_grid, jobs, args.workers)
    rows.sort(key=lambda r: (r["unit"], len(r["visible"]), np.prod(r["visible"]), r["rank"], r["seed"]))
    worst = {
        "trainings": len(rows),
        "diverged": sum("diverged" in row for row in rows),
        "worst error / variance at 100 updates": max(row.get("error at 100", 9) for row in rows),
        "worst norm peak / final": max(row.get("norm peak / final", 9) for row in rows),
    }
    return {"rows": rows, "summary": worst}


# -- Algorithm 1 ------------------------------------------------------------------------------------


def _paper(job):
    seed, passes = job
    images, labels, test, test_labels = mnist()
    rows = subset(10_000, seed)
    machine = mvrbm((28, 28), HIDDEN)
    Trainer(machine, "paper", seed=seed).fit(images[rows], passes)
    here, there = features(machine, images[rows]), features(machine, test)
    return {
        "subset": seed,
        "passes": passes,
        "error": nearest_neighbour_error(here, labels[rows], there, test_labels),
        "raw": nearest_neighbour_error(images[rows], labels[rows], test, test_labels),
    }


def paper(args):
    rows = sorted(in_parallel(_paper, [(seed, 300) for seed in range(5)], args.workers), key=lambda r: r["subset"])
    return {
        "rows": rows,
        "summary": {"mean error": interval([r["error"] for r in rows]), "raw": interval([r["raw"] for r in rows])},
    }


def reconstruction(args):
    """2,000 of each digit, 3,000 passes, taken up where it was left."""
    images, labels, test, _ = mnist()
    chosen = [np.random.default_rng(0).permutation(np.flatnonzero(labels == digit))[:2000] for digit in range(10)]
    data = images[np.concatenate(chosen)]
    device = torch.device("cuda" if torch.cuda.is_available() and args.cuda else "cpu")
    machine = mvrbm((28, 28), HIDDEN).to(device)
    folder = Path(args.checkpoints or "runs/reconstruction")
    trainer = Trainer(machine, "paper", seed=0, callbacks=[Checkpoint(folder, every=20_000), Deadline(args.seconds)])
    trainer.resume(folder)
    rows = torch.as_tensor(data).to(device) if device.type == "cuda" else data
    trainer.fit(rows, args.passes)
    x = torch.as_tensor(test).float().to(device) / 255
    with torch.no_grad():
        error = float(((mean_field(machine, x, 1)["visible"] - x) ** 2).flatten(1).sum(1).mean())
    return {
        "rows": [{"passes": trainer.epoch, "updates": trainer.update, "squared error a test digit": error}],
        "summary": {},
    }


class Deadline(Callback):
    """Stops after some seconds."""

    def __init__(self, seconds):
        self.end = time.perf_counter() + seconds

    def on_batch_end(self, trainer, batch):
        trainer.stop = trainer.stop or time.perf_counter() > self.end


# -- negative phases --------------------------------------------------------------------------------


def bars_and_stripes():
    """Every 3x3 image of full rows or full columns, with a label that says which: two layers, many modes."""
    images, labels = [], []
    for bits in itertools.product([0.0, 1.0], repeat=3):
        images += [np.tile(np.array(bits)[:, None], (1, 3)), np.tile(np.array(bits)[None], (3, 1))]
        labels += [[1.0, 0.0], [0.0, 1.0]]
    return {"image": np.array(images), "label": np.array(labels)}


def _likelihood(job):
    name, negative, seed = job
    data = bars_and_stripes()
    many = {key: np.tile(value, (64,) + (1,) * (value.ndim - 1)) for key, value in data.items()}
    machine = BoltzmannMachine(
        {"image": Bernoulli((3, 3)), "label": Categorical(2)},
        Bernoulli((4, 4)),
        {"image": Kronecker(rank=2), "label": Dense()},
    )
    curve = {}

    def measure(trainer):
        curve[trainer.update] = float(log_likelihood(trainer.machine, data).mean())

    points = [1, 500, 1000, 2000, 5000, 10_000]
    # Persistent chains follow a model only as fast as they mix: the rate has to fall, as is customary.
    passes = 10_000 // 11 + 1
    recipe = Recipe(negative=negative, learning_rate=0.1)
    trainer = Trainer(
        machine,
        recipe,
        seed=seed,
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda done: 1 - done / passes),
        callbacks=[At(points, measure)],
    )
    trainer.fit(many, passes)
    return {"negative": name, "seed": seed, **{str(k): v for k, v in curve.items()}}


def likelihood(args):
    phases = {"CD-1": CD(1), "PCD-1": PCD(100), "tempered PCD-1": TemperedPCD(100, 10)}
    jobs = [(name, phase, seed) for name, phase in phases.items() for seed in range(10)]
    rows = sorted(in_parallel(_likelihood, jobs, args.workers), key=lambda r: (r["negative"], r["seed"]))
    last = {name: np.array([r["10000"] for r in rows if r["negative"] == name]) for name in phases}
    summary = {f"{name}, nats": interval(values) for name, values in last.items()}
    summary |= {
        f"{a} minus {b}, paired": interval(last[a] - last[b])
        for a, b in [("PCD-1", "CD-1"), ("tempered PCD-1", "PCD-1")]
    }
    summary["start"] = float(np.mean([r["1"] for r in rows]))
    summary["best possible"] = -float(np.log(16))  # sixteen different pairs of image and label
    return {"rows": rows, "summary": summary}


# -- a file larger than we want to hold -------------------------------------------------------------


def anonymous_memory():
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) / 1024


def memory(args):
    path = Path(args.out) / "large.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    n = 2 * 2**30 // 784
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(n, 28, 28))
    generator = np.random.default_rng(0)
    for first in range(0, n, 100_000):
        array[first : first + 100_000] = generator.integers(0, 256, (min(100_000, n - first), 28, 28), dtype=np.uint8)
    del array
    before, peak = anonymous_memory(), 0.0

    class Watch(Callback):
        def on_batch_end(self, trainer, batch):
            nonlocal peak
            if trainer.update % 50 == 0:
                peak = max(peak, anonymous_memory())
            trainer.stop = trainer.update >= 3000

    machine = mvrbm((28, 28), HIDDEN)
    Trainer(machine, "default", callbacks=[Watch()]).fit(str(path), 1)
    size = path.stat().st_size
    path.unlink()
    return {
        "rows": [{"file, MB": size / 2**20, "before, MB": before, "peak, MB": peak}],
        "summary": {"growth, MB": peak - before},
    }


STUDIES = {f.__name__: f for f in (defaults, seeds, grid, paper, reconstruction, likelihood, memory)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES, nargs="+")
    parser.add_argument("--out", default="results/learning")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--patches", help=".npy file of (n, 128, 128) bytes for `grid`")
    parser.add_argument("--grid-seeds", type=int, default=1)
    parser.add_argument("--checkpoints")
    parser.add_argument("--passes", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args()
    for study in args.study:
        began = time.perf_counter()
        result = STUDIES[study](args)
        result["seconds"] = time.perf_counter() - began
        result["machine"] = {"processor": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        target = Path(args.out) / f"{study}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"== {study}, {result['seconds']:.0f} s")
        for row in result["rows"]:
            print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
        for key, value in result["summary"].items():
            print(f"{key}: {value}")


if __name__ == "__main__":
    main()
