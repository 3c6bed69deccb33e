"""Inference: the time of features, reconstructions and free energies of many digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

import mvrbm
from benchmarks.measure import Entry, Run, Spread, take_turns
from benchmarks.problems import digits

_SHAPE, _HIDDEN = (28, 28), (25, 25)
#: The tasks of every model.
TASKS = ("transform", "reconstruct", "free energy")


def infer(n: int, device: str, repetitions: int, contestants: Sequence[str]) -> dict[str, Any]:
    """Time transform, reconstruct and free energy of n digits, 28x28 -> 25x25.

    Parameters
    ----------
    n : int
        Number of digits.
    device : str
        Device of mvrbm's models. Arrays come from main memory and go back to it.
    repetitions : int
        Number of rounds.
    contestants : sequence of str
        Some of ``"mvrbm"``, ``"rbm"`` and ``"sklearn"``.

    Returns
    -------
    dict
        ``n``, ``data`` and ``rows``, one per model and task. scikit-learn reconstructs only by drawing, so its means
        are passed down here by hand; its free energy is the private function that its score uses.
    """
    images, what = digits(_SHAPE, n)
    builders: dict[str, Callable[[], dict[str, Run]]] = {
        "mvrbm": lambda: _ours(mvrbm.MVRBM(_HIDDEN, n_epochs=1, device=device, random_state=0), images),
        "rbm": lambda: _ours(mvrbm.RBM(625, n_epochs=1, device=device, random_state=0), images),
        "sklearn": lambda: _sklearn(images),
    }
    entries: dict[str, Entry] = {}
    for key, build in builders.items():
        if key in contestants:
            entries |= {f"{key}/{task}": Entry(_constant(work)) for task, work in build().items()}
    take_turns(entries, repetitions=min(repetitions, 5), min_seconds=0.0)
    rows = []
    for name, entry in entries.items():
        key, task = name.split("/")
        spread = Spread.of(entry.seconds)
        theirs = entries.get(f"sklearn/{task}")
        ratio = Spread.of(theirs.seconds).median / spread.median if theirs is not None and key != "sklearn" else None
        rows.append({"contestant": key, "task": task, "time": asdict(spread), "times_faster_than_sklearn": ratio})
    return {"n": n, "data": what, "rows": rows}


def _constant(work: Run) -> Callable[[], Run]:
    return lambda: work


def _ours(model: Any, images: Any) -> dict[str, Run]:
    rows = images.reshape(len(images), -1) if isinstance(model, mvrbm.RBM) else images
    model.fit(rows[:1000])
    tensor = torch.from_numpy(rows)

    def free_energy() -> Any:
        machine = model.machine_
        with torch.no_grad():
            parts = [machine.free_energy(part.to(machine.like)) for part in tensor.split(1000)]
        return torch.cat(parts).cpu().numpy()

    return {
        "transform": lambda times: _repeat(lambda: model.transform(rows), times),
        "reconstruct": lambda times: _repeat(lambda: model.reconstruct(rows), times),
        "free energy": lambda times: _repeat(free_energy, times),
    }


def _sklearn(images: Any) -> dict[str, Run]:
    from scipy.special import expit
    from sklearn.neural_network import BernoulliRBM

    rows = images.reshape(len(images), -1)
    model = BernoulliRBM(625, batch_size=100, n_iter=1, random_state=0).fit(rows[:1000])

    def reconstruct() -> Any:
        down = np.dot(model.transform(rows), model.components_)
        down += model.intercept_visible_
        return expit(down, out=down)

    return {
        "transform": lambda times: _repeat(lambda: model.transform(rows), times),
        "reconstruct": lambda times: _repeat(reconstruct, times),
        "free energy": lambda times: _repeat(lambda: model._free_energy(rows), times),
    }


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()
