"""Densities of 8x8 patches of natural images, in nats per patch.

The protocol is that of the literature: gray bytes plus uniform noise, divided by 256, without the mean of the patch
and without the last pixel, which leaves 63 dimensions. Training patches are flipped and transposed at random. The
validation patches are those of the last 20 training pictures.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.decomposition import FactorAnalysis
from sklearn.mixture import GaussianMixture

from mvrbm import MatrixMixture
from mvrbm.devices import resolve_device
from mvrbm.estimators.mixture.conditional import in_chunks
from studies.arguments import Command, Options, add_parts, add_study_options, count
from studies.baselines.full_mixture import FullMixture
from studies.data import data_file
from studies.densities import Fitted, independent
from studies.report import markdown_table, read_results
from studies.runner import run_parts
from studies.runs import Outcome, Place, Run, Store, write_json

__all__ = ["COMMANDS", "PARTS"]

Array = NDArray[Any]
# The validation set is the last 20 training pictures, with 1,100 patches each.
_VALIDATION = 22_000
_SIZE = 64
SEEDS = 3
# On a GPU, batches are larger, and there are several random flips of each training patch, in fewer epochs.
_GPU_COPIES = 8
_GPU_BATCH = 2000
# Added to the variances of the mixture of Gaussians.
_RIDGE = 1e-7

#: Settings of MatrixMixture by the largest number of parameters.
OURS: dict[str, dict[str, Any]] = {
    "100": {"n_components": 1, "n_contrasts": 12, "whiten": False, "n_epochs": 6},
    "600": {"n_components": 7, "n_contrasts": 6, "whiten": False, "n_epochs": 20},
    "3000": {"n_components": 17, "n_contrasts": 4, "n_epochs": 10},
    "12000": {"n_components": 68, "n_contrasts": 4, "n_epochs": 20},
    "23000": {"n_components": 131, "n_contrasts": 4, "n_epochs": 30},
    "90000": {"n_components": 514, "n_contrasts": 4, "n_epochs": 40},
}


# -- data -------------------------------------------------------------------------------------------


def load(place: Place, seed: int, *, validate: bool, copies: int = 1) -> tuple[Array, Array]:
    """Return training patches and those to score, with noise, as arrays of shape (n, 8, 8) between 0 and 1.

    If `validate` is True, the last 20 training pictures are held out. Otherwise, the test pictures are scored.
    """
    with np.load(data_file("patches/bsds_8x8.npz", place.data_dir)) as stored:
        train, test = stored["train"], stored["test"]
    if validate:
        train, test = train[:-_VALIDATION], train[-_VALIDATION:]
    parts = []
    for copy in range(copies):
        rng = np.random.default_rng([seed, copy])
        parts.append(with_noise(flipped(train, rng), rng))
    return np.concatenate(parts), with_noise(test, np.random.default_rng(0))


def flipped(patches: Array, rng: np.random.Generator) -> Array:
    """Flip and transpose each patch at random."""
    found = patches.copy()
    for flip in (lambda x: x[:, ::-1], lambda x: x[:, :, ::-1], lambda x: x.transpose(0, 2, 1)):
        chosen = rng.random(len(found)) < 0.5
        found[chosen] = flip(found[chosen])
    return found


def with_noise(patches: Array, rng: np.random.Generator) -> Array:
    """Add uniform noise to bytes, and divide by 256."""
    found: Array = ((patches + rng.random(patches.shape)) / 256).astype(np.float32)
    return found


def without_means(patches: Array) -> Array:
    """Subtract the mean of each patch, and drop the last pixel: (n, 8, 8) -> (n, 63)."""
    rows = patches.reshape(len(patches), -1).astype(float)
    centered: Array = rows - rows.mean(1, keepdims=True)
    return centered[:, :-1]


# -- runs -------------------------------------------------------------------------------------------


@torch.no_grad()
def score(model: MatrixMixture, patches: Array) -> float:
    """Return the mean log-density of patches without their means and without their last pixels, in nats.

    The model is a density of whole patches, and has a level. The log-density of the level is subtracted. What remains
    is a density in orthonormal coordinates of patches with mean zero. The map from there to the first 63 pixels has
    the determinant 1 / sqrt(64).
    """
    unit = model.unit_
    rotated = unit.rotate(torch.from_numpy(patches).to(unit.center))
    logs = torch.logsumexp(in_chunks(unit, unit.joint_log_density, rotated).flatten(1), 1).double()
    level = unit.level_log_density(rotated).double() - float(unit.log_scale.flatten()[0])
    return float((logs - level).mean()) + 0.5 * math.log(_SIZE)


def ours(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Fit and score `MatrixMixture` of one size."""
    gpu = place.device != "cpu"
    copies = _GPU_COPIES if gpu else 1
    train, held = load(place, settings["seed"], validate=settings["validate"], copies=copies)
    options = dict(OURS[settings["size"]])
    options["n_epochs"] = max(3, round(settings["epochs"] * options["n_epochs"] / copies))
    model = MatrixMixture(
        **{"gate": True, "level": True, "means": "one", **options},
        batch_size=_GPU_BATCH if gpu else None,
        random_state=settings["seed"],
        device=place.device,
    )
    began = time.perf_counter()
    model.fit(train)
    seconds = time.perf_counter() - began
    return Outcome({"nats": score(model, held), "parameters": model.n_parameters_, "seconds": seconds})


def _gaussian(rows: Array, seed: int, device: str) -> Fitted:
    model = GaussianMixture(1, random_state=seed).fit(rows)
    return model.score, 63 + 63 * 64 // 2


def _factors(rows: Array, seed: int, device: str) -> Fitted:
    model = FactorAnalysis(32, random_state=seed).fit(rows)
    return model.score, 63 * 34


def _mixture(rows: Array, seed: int, device: str) -> Fitted:
    x = torch.from_numpy(rows).float().to(device)
    mixture = FullMixture.start(x, 200, seed, _RIDGE)
    mixture.fit(x, max_iter=80, tol=0.01)
    return lambda held: mixture.score(torch.from_numpy(held).to(x)), mixture.n_parameters


def _independent(rows: Array, seed: int, device: str) -> Fitted:
    return independent(rows, {"shrinkage": 1e-6, "rotate": True}, seed)


PEERS: dict[str, Callable[[Array, int, str], Fitted]] = {
    "full covariance": _gaussian,
    "FactorAnalysis(32)": _factors,
    "ICA, heavy tails": _independent,
    "mixture of 200 Gaussians": _mixture,
}


def peers(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Fit and score another tool."""
    copies = 1 if place.device == "cpu" else _GPU_COPIES
    train, held = load(place, settings["seed"], validate=settings["validate"], copies=copies)
    began = time.perf_counter()
    evaluate, parameters = PEERS[settings["tool"]](without_means(train), settings["seed"], place.device)
    seconds = time.perf_counter() - began
    return Outcome({"nats": evaluate(without_means(held)), "parameters": parameters, "seconds": seconds})


PARTS = ("ours", "peers")


def plan(*, seeds: int, epochs: float, validate: bool) -> Iterator[Run]:
    """Return one run per size and seed, and one run per other tool."""
    shared = {"validate": validate}
    for seed in range(seeds):
        for size in OURS:
            yield Run(f"{size}-seed{seed}", "ours", ours, {"size": size, "seed": seed, "epochs": epochs, **shared})
    for index, tool in enumerate(PEERS):
        yield Run(f"peer{index}", "peers", peers, {"tool": tool, "seed": 0, **shared})


# -- the command ------------------------------------------------------------------------------------


def _rows(store: Store, runs: list[Run]) -> list[dict[str, Any]]:
    """Return one row per tool, with the median over seeds."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        if store.has(run):
            name = run.settings.get("tool") or f"MatrixMixture, at most {int(run.settings['size']):,} parameters"
            found.setdefault(name, []).append(store.numbers(run))
    rows = []
    for name, numbers in found.items():
        middle = sorted(numbers, key=lambda each: each["nats"])[(len(numbers) - 1) // 2]
        rows.append({"density": name, **middle, "all": [each["nats"] for each in numbers]})
    return rows


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    add_study_options(parser, "natural-patches", "--only", "--device", "--data-dir")
    parser.add_argument("--seeds", type=count, default=SEEDS, help=f"Number of seeds. Default: {SEEDS}.")
    parser.add_argument("--epochs", type=float, default=1.0, help="Factor for the numbers of epochs. Default: 1.")
    parser.add_argument("--validate", action="store_true", help="Score the validation patches instead of the test set.")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    path = options.out / ("validation.json" if options.validate else "results.json")
    if not options.report_only:
        device = resolve_device(options.device)
        store = Store.within(options.work)
        runs = list(plan(seeds=options.seeds, epochs=options.epochs, validate=options.validate))
        place = Place(store, device.type, options.data_dir, options.work)
        try:
            run_parts(runs, options.parts or list(PARTS), place, only=options.only)
        finally:
            options.out.mkdir(parents=True, exist_ok=True)
            about = {"device": device.type, "threads": torch.get_num_threads(), "epochs": options.epochs}
            write_json(path, {"rows": _rows(store, runs), **about})
    found = read_results(path)
    table = [
        [row["density"], f"{row['parameters']:,}", f"{row['nats']:.2f}", f"{row['seconds']:.0f}"]
        for row in found["rows"]
    ]
    return found, markdown_table(["density", "parameters", "nats", "seconds"], table)


COMMANDS = {
    "natural-patches": Command(
        "The likelihood of natural image patches, by the number of parameters.",
        _add,
        _run,
        "ours --only 100-seed0 --validate",
    )
}
