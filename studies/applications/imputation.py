"""Imputation of missing entries in six data sets, by our imputer and by other tools.

Every tool gets the same array with NaN and returns it filled in. Tools are compared by the root mean squared error of
the missing entries. Tools for tables get one row per sample. A single tensor can be cut into rows in several ways, and
the best result counts. Settings of tools without defaults are chosen on a tenth of the known entries.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.impute import KNNImputer, SimpleImputer

from mvrbm import MVRBMImputer
from studies.data import data_file
from studies.runs import Outcome, Place, Run, Store

__all__ = ["KINDS", "OURS", "SETS", "TOOLS", "hide", "plan", "probabilistic_pca", "soft_impute", "table"]

Array = NDArray[Any]
#: Name of our tool.
OURS = "mvrbm"
#: Kinds of missing entries: 20% or 50% of all entries, or a block of each sample.
KINDS = ("20", "50", "block")
# Tensors without an obvious axis of samples.
_TENSORS = ("kinetic", "covid19")
# Largest number of multiplications of scikit-learn's IterativeImputer: a few minutes on one core.
_MOST_WORK = 3e10
# Photographs of scikit-image, and the number of patches of each.
_PHOTOGRAPHS = ("camera", "astronaut", "coffee", "chelsea", "rocket")
_PATCHES = 400


def _faces(data_dir: str | None) -> Array:
    faces: Array = np.load(data_file("freyfaces/freyfaces.npy", data_dir), allow_pickle=False) / 255
    return faces


def _patches(data_dir: str | None) -> Array:
    from skimage import color, data

    rng = np.random.default_rng(0)
    found = []
    for name in _PHOTOGRAPHS:
        image = getattr(data, name)()
        image = color.rgb2gray(image) if image.ndim == 3 else image / 255
        for _ in range(_PATCHES):
            row, column = rng.integers(image.shape[0] - 8), rng.integers(image.shape[1] - 8)
            found.append(image[row : row + 8, column : column + 8])
    return np.array(found)


def _digits(data_dir: str | None) -> Array:
    from sklearn.datasets import load_digits

    images: Array = load_digits().images / 16
    return images


def _tensor(name: str, step: int = 1) -> Callable[[str | None], Array]:
    def load(data_dir: str | None) -> Array:
        import tensorly.datasets

        tensor = np.asarray(getattr(tensorly.datasets, f"load_{name}")().tensor, dtype=float)
        return tensor if step == 1 else tensor[::step, ::step].reshape(-1, tensor.shape[-1])

    return load


#: Functions that load a data set as an array with samples along the first axis. Of Indian Pines, every third pixel in
#: each direction is used.
SETS: dict[str, Callable[[str | None], Array]] = {
    "frey": _faces,
    "patches": _patches,
    "digits": _digits,
    "kinetic": _tensor("kinetic"),
    "covid19": _tensor("covid19_serology"),
    "indian-pines": _tensor("indian_pines", 3),
}


def hide(shape: Sequence[int], kind: str, seed: int = 0) -> Array:
    """Return a mask of missing entries: 20% or 50% of all, or a box of half of every side (a quarter for vectors)."""
    rng = np.random.default_rng(seed)
    if kind != "block":
        return rng.random(shape) < int(kind) / 100
    missing = np.zeros(shape, dtype=bool)
    sides = shape[1:]
    lengths = [max(1, round(side * (0.25 if len(sides) == 1 else 0.5))) for side in sides]
    for sample in missing:
        corner = [rng.integers(side - length + 1) for side, length in zip(sides, lengths, strict=True)]
        sample[tuple(slice(start, start + length) for start, length in zip(corner, lengths, strict=True))] = True
    return missing


# -- the tools --------------------------------------------------------------------------------------


def low_rank(x: Array, shrink: Callable[[Array], Array], n_steps: int = 300) -> Array:
    """Fill in rows by iterating a low-rank approximation with shrunk singular values."""
    known = ~np.isnan(x)
    mean = np.nanmean(x, axis=0)
    scale = np.nanstd(x)
    z = np.where(known, (x - mean) / scale, 0.0)
    low = np.zeros_like(z)
    for _ in range(n_steps):
        filled = np.where(known, z, low)
        wide = filled if x.shape[0] > x.shape[1] else filled.T
        squares, vectors = np.linalg.eigh(wide.T @ wide)
        size = np.sqrt(np.maximum(squares, 1e-12 * squares[-1]))
        product = (wide @ (vectors * (shrink(size) / size))) @ vectors.T
        before = low
        low = product if wide is filled else product.T
        if ((low - before) ** 2).sum() < 1e-7 * max((before**2).sum(), 1e-12):
            break
    return np.where(known, x, mean + scale * low)


def soft_impute(x: Array, penalty: float) -> Array:
    """Fill in rows by soft-thresholding the singular values (Mazumder, Hastie and Tibshirani, 2010)."""
    return low_rank(x, lambda size: np.maximum(size - penalty, 0))


def probabilistic_pca(x: Array, rank: int) -> Array:
    """Fill in rows by the largest components, shrunk by the mean variance of the others (Josse and Husson, 2016)."""

    def shrink(size: Array) -> Array:  # in increasing order
        noise = (size[:-rank] ** 2).mean()
        return np.where(np.arange(len(size)) < len(size) - rank, 0.0, np.maximum(size - noise / size, 0))

    return low_rank(x, shrink)


def _chosen(x: Array, fill: Callable[[Array, Any], Array], choices: Sequence[Any]) -> Array:
    """Fill in with the best setting on a tenth of the known entries. Stop at the first setting that is worse."""
    # A seed that `hide` cannot have: with the same random numbers all held-out entries could be missing already.
    held = ~np.isnan(x) & (np.random.default_rng((1, 1)).random(x.shape) < 0.1)
    shown = np.where(held, np.nan, x)
    best = np.inf
    chosen = choices[0]
    for choice in choices:
        error = float(((fill(shown, choice) - x)[held] ** 2).mean())
        if error > best:
            break
        best, chosen = error, choice
    return fill(x, chosen)


def _soft(x: Array) -> Array:
    largest = np.linalg.norm(np.nan_to_num((x - np.nanmean(x, axis=0)) / np.nanstd(x)), 2)
    return _chosen(x, soft_impute, [largest / 4**power for power in range(1, 7)])


def _ppca(x: Array) -> Array:
    return _chosen(x, probabilistic_pca, [2**power for power in range(9) if 2**power < min(x.shape)])


def _iterative(x: Array) -> Array:
    from sklearn.experimental import enable_iterative_imputer  # noqa: F401
    from sklearn.impute import IterativeImputer

    if x.size * x.shape[1] ** 2 > _MOST_WORK:
        raise TimeoutError(f"IterativeImputer takes too long for {x.shape[1]} columns")
    filled: Array = IterativeImputer(random_state=0, keep_empty_features=True).fit_transform(x)
    return filled


def _tensorly(x: Array) -> Array:
    from tensorly.cp_tensor import cp_to_tensor
    from tensorly.decomposition import parafac

    known = ~np.isnan(x)
    mean = np.nanmean(x)
    scale = np.nanstd(x)

    def fill(shown: Array, rank: int) -> Array:
        mask = ~np.isnan(shown)
        z = np.where(mask, (shown - mean) / scale, 0.0)
        found = parafac(z, rank, mask=mask, n_iter_max=50, init="random", random_state=0, tol=1e-5)
        filled: Array = mean + scale * cp_to_tensor(found)
        return filled

    return np.where(known, x, _chosen(x, fill, [2, 4, 8, 16, 32]))


def _best_rows(fill: Callable[[Array], Array]) -> Callable[[Array, bool], list[Array]]:
    """Return a function that fills in an array by a tool for tables; it tries all cuts of a single tensor into rows."""

    def filled(x: Array, every_cut: bool) -> list[Array]:
        found = []
        for cut in range(1, x.ndim) if every_cut else (1,):
            with contextlib.suppress(TimeoutError):  # other cuts have fewer columns
                found.append(fill(x.reshape(int(np.prod(x.shape[:cut])), -1)).reshape(x.shape))
        return found

    return filled


#: Functions that take an array with NaN, and whether it is a single tensor, and return it filled in, in one or more
#: ways.
TOOLS: dict[str, Callable[[Array, bool], list[Array]]] = {
    "mean": _best_rows(lambda x: SimpleImputer(keep_empty_features=True).fit_transform(x)),
    "5-nearest": _best_rows(lambda x: KNNImputer(keep_empty_features=True).fit_transform(x)),
    "iterative": _best_rows(_iterative),
    "soft-impute": _best_rows(_soft),
    "ppca": _best_rows(_ppca),
    "tensorly-cp": lambda x, _: [_tensorly(x)],
    OURS: lambda x, _: [MVRBMImputer(random_state=0, device="cpu").fit_transform(x.astype(np.float32))],
}


def plan(
    sets: Sequence[str] = tuple(SETS), kinds: Sequence[str] = KINDS, *, n: int | None = None, n_seeds: int = 3
) -> list[Run]:
    """Return one run per seed, data set, kind of missing entries and tool; `n` limits the samples.

    All tools are compared with the first seed before the next one.
    """
    found = []
    for seed, name, kind, tool in itertools.product(range(n_seeds), sets, kinds, TOOLS):
        settings = {"set": name, "kind": kind, "tool": tool, "n": n, "seed": seed}
        needs = {"patches": ("skimage",), "digits": (), "frey": ()}.get(name, ("tensorly",))
        needs = (*needs, *(("tensorly",) if tool == "tensorly-cp" else ()))
        found.append(Run(f"imputation-{name}-{kind}-{tool}-{seed}", "imputation", _compare, settings, (), needs))
    return found


def _compare(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the error of a tool, or None if it would take too long, and its CPU time."""
    x = SETS[settings["set"]](place.data_dir)[: settings["n"]]
    missing = hide(x.shape, settings["kind"], settings["seed"])
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some tools warn that they did not converge
        found = TOOLS[settings["tool"]](np.where(missing, np.nan, x), settings["set"] in _TENSORS)
    error = min((float(np.sqrt(((each - x)[missing] ** 2).mean())) for each in found), default=None)
    return Outcome({"rmse": error, "cpu_seconds": time.process_time() - start})


def table(store: Store, plan: Sequence[Run]) -> dict[str, dict[str, float | None]]:
    """Return mean errors over the seeds that all tools have, by task and tool. None means that a tool is too slow."""
    values: dict[str, dict[str, dict[int, float]]] = {}
    for run in plan:
        if store.has(run):
            of = values.setdefault(f"{run.settings['set']}, {run.settings['kind']}", {})
            of.setdefault(run.settings["tool"], {})[run.settings["seed"]] = store.numbers(run)["rmse"]
    found: dict[str, dict[str, float | None]] = {}
    for task, tools in values.items():
        if not (seeds := set.intersection(*map(set, tools.values()))):
            continue
        means = {tool: [errors[seed] for seed in seeds] for tool, errors in tools.items()}
        found[task] = {tool: None if None in errors else float(np.mean(errors)) for tool, errors in means.items()}
    return found
