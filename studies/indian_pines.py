"""Order 3: features of hyperspectral patches, and whether they tell crops apart.

``python -m studies.indian_pines --out DIR`` takes 9x9x200 patches of Indian Pines, learns a `TVRBM` from
them without labels, and compares its features with raw spectra, raw patches and principal components, all under the
same classifiers. Training pixels lie in small blocks, and no patch of a test pixel shares a pixel with theirs: patches
of neighbours overlap, and a random choice of pixels would test on what was trained on.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import binary_dilation
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, cohen_kappa_score, recall_score
from sklearn.svm import SVC

from mvrbm import __version__
from mvrbm.estimators.rbm import TVRBM
from mvrbm.io.arrays import _replace
from mvrbm.io.datasets import load

__all__ = ["CLASSES", "Settings", "Split", "divide", "draw_map", "explain", "patches", "run", "run_draw"]

Array = NDArray[Any]

#: The scene's classes by label; 0 is no label.
CLASSES = (
    "no label",
    "alfalfa",
    "corn, no till",
    "corn, min till",
    "corn",
    "grass, pasture",
    "grass, trees",
    "grass, mown",
    "hay, windrowed",
    "oats",
    "soybean, no till",
    "soybean, min till",
    "soybean, clean",
    "wheat",
    "woods",
    "buildings, trees",
    "stone, steel",
)

_COSTS = (0.01, 0.1, 1.0, 10.0, 100.0)
_SCALINGS = ("each", "all")
_CLASSIFIERS = ("svm", "1-nn")
_TRIES = 10_000
_MOST_STEPS = 20_000  # of the support vector machine, a pair of classes; a few hundred are usual
_AT_ONCE = 500


@dataclass(frozen=True)
class Candidate:
    """A `TVRBM` to try.

    Parameters
    ----------
    data : {"raw", "whitened"}
        What it sees: patches as they are, or with decorrelated bands.
    hidden_shape : tuple of int
        Its hidden layer, of three modes.
    rank : int
        Of its coupling.
    """

    data: str
    hidden_shape: tuple[int, int, int]
    rank: int


@dataclass(frozen=True)
class Settings:
    """How the comparison is made.

    Parameters
    ----------
    patch : int
        Rows, and columns, of a patch; odd.
    block : int
        Rows, and columns, of a block of training pixels.
    share : float
        Part of the labels that is used for training.
    classes : int
        How many classes a draw needs at least.
    least : int
        How many pixels a class needs, in training and in test, to count in a draw.
    folds : int
        Groups of training blocks that are held out in turn, to choose settings on.
    unlabelled : int
        Patches that features are learned from, without labels; none of them touches a test patch.
    candidates : tuple of Candidate
        The machines to choose from.
    passes : tuple of int
        After how many passes over the unlabelled patches each is tried.
    batch_size : int
        Patches an update.
    floor : float
        What whitening adds to the variances, of bands of variance 1.
    """

    patch: int = 9
    block: int = 7
    share: float = 0.1
    classes: int = 11
    least: int = 5
    folds: int = 3
    unlabelled: int = 1200
    candidates: tuple[Candidate, ...] = (
        Candidate("whitened", (1, 1, 100), 1),
        Candidate("whitened", (2, 2, 40), 1),
        Candidate("whitened", (2, 2, 40), 3),
        Candidate("raw", (2, 2, 40), 1),
    )
    passes: tuple[int, ...] = (3, 10)
    batch_size: int = 20
    floor: float = 0.1


# -- blocks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Pixels of one draw, each a row and a column.

    Parameters
    ----------
    train, test : array (n, 2)
        Labelled pixels. No patch of the one shares a pixel with a patch of the other.
    unlabelled : array (m, 2)
        Pixels, labelled or not, whose patches touch no test patch: the training ones are among them.
    block : array (n_train,)
        The block of each training pixel.
    fold : array (n_train,)
        The group that its block is in.
    classes : array
        Labels that count in this draw.
    """

    train: Array
    test: Array
    unlabelled: Array
    block: Array
    fold: Array
    classes: Array


def divide(labels: Array, draw: int, settings: Settings | None = None) -> Split:
    """Draw training blocks, and take for testing what is far enough from all of them.

    Blocks of a grid are taken in random order until they hold the wanted share of the labels. A draw with too few
    classes on both sides is thrown away and drawn again; nothing but the labels' places decides on it.

    Parameters
    ----------
    labels : array (rows, columns)
        Labels, 0 where there is none.
    draw : int
        Number of the draw.
    settings : Settings, optional
        Sizes and shares.
    """
    settings = settings or Settings()
    labels = np.asarray(labels, int)
    if settings.patch % 2 == 0:
        raise ValueError(f"patch must be odd, for a pixel to be its middle, got {settings.patch}")
    rows, columns = (np.arange(size) // settings.block for size in labels.shape)
    blocks = rows[:, None] * (columns.max() + 1) + columns
    known = labels > 0
    held = np.bincount(blocks.ravel(), weights=known.ravel())  # labels a block
    random = np.random.default_rng([draw, settings.block, settings.patch])
    for _ in range(_TRIES):
        order = random.permutation(np.flatnonzero(held))
        enough = int(np.searchsorted(np.cumsum(held[order]), settings.share * known.sum())) + 1
        chosen = order[:enough]
        train = known & np.isin(blocks, chosen)
        test = known & ~_near(train, settings.patch - 1)
        counts = [np.bincount(labels[part], minlength=labels.max() + 1) for part in (train, test)]
        classes = np.flatnonzero(np.minimum(*counts) >= settings.least)
        if len(classes) >= settings.classes:
            break
    else:
        raise ValueError(
            f"no draw of {_TRIES:,} has {settings.classes} classes with {settings.least} pixels on both sides: "
            "ask for fewer, or use smaller blocks"
        )
    counted = np.isin(labels, classes)
    groups = dict(zip(chosen.tolist(), (np.arange(enough) % settings.folds).tolist(), strict=True))
    places = np.argwhere(train & counted)
    block = blocks[tuple(places.T)]
    return Split(
        train=places,
        test=np.argwhere(test & counted),
        unlabelled=np.argwhere(~_near(test, settings.patch - 1)),
        block=block,
        fold=np.asarray([groups[number] for number in block.tolist()]),
        classes=classes,
    )


def _near(mask: Array, reach: int) -> Array:
    """Return which pixels are at most `reach` rows and columns from one of a mask."""
    return np.asarray(binary_dilation(mask, np.ones((2 * reach + 1, 2 * reach + 1), bool)))


def held_out(split: Split, patch: int) -> Iterator[tuple[Array, Array]]:
    """Yield, for each group of training blocks, which training pixels to learn from and which to be tried on.

    Training pixels whose patch shares a pixel with a held-out one are left out of both.
    """
    apart = np.abs(split.train[:, None] - split.train[None]).max(2) >= patch
    for number in np.unique(split.fold):
        tried = split.fold == number
        yield ~tried & apart[:, tried].all(1), tried


def patches(cube: Array, places: Array, size: int = 9) -> Array:
    """Cut patches around pixels, the scene mirrored at its edges.

    Parameters
    ----------
    cube : array (rows, columns, bands)
        The scene.
    places : array (n, 2)
        Pixels.
    size : int
        Rows, and columns, of a patch; odd.

    Returns
    -------
    array (n, size, size, bands)
    """
    reach = size // 2
    padded = np.pad(cube, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (0, 1))
    return np.ascontiguousarray(windows[places[:, 0], places[:, 1]].transpose(0, 2, 3, 1))


def whitened(cube: Array, places: Array, floor: float) -> Array:
    """Return the scene with bands decorrelated as they are at some pixels, each turned as little as possible.

    Parameters
    ----------
    cube : array (rows, columns, bands)
        The scene.
    places : array (n, 2)
        Pixels that mean and covariance are taken over.
    floor : float
        Added to the variances of the bands' principal components, which without it would be mostly noise.
    """
    spectra = cube[places[:, 0], places[:, 1]].astype(np.float64)
    mean, deviation = spectra.mean(0), spectra.std(0)
    deviation = np.where(deviation > 0, deviation, 1)
    variances, axes = np.linalg.eigh(np.cov(((spectra - mean) / deviation).T))
    turn = (axes / np.sqrt(np.maximum(variances, 0) + floor)) @ axes.T
    return np.asarray(((cube - mean) / deviation) @ turn, np.float32)


# -- classifiers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """Features of training pixels, by rows, how to get those of test pixels, and how they came about."""

    train: Array
    test: Callable[[], Array]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a classifier made of features."""

    predicted: Array
    validation: float
    settings: dict[str, Any]


def best_outcome(candidates: Sequence[Features], labels: Array, folds: Sequence[Any], classifier: str) -> Outcome:
    """Choose features, their scaling and the cost on held-out training blocks, then predict the test pixels.

    Parameters
    ----------
    candidates : sequence of Features
        What to choose from.
    labels : array (n_train,)
        Labels of the training pixels.
    folds : sequence of pair of boolean array (n_train,)
        What to learn from and to be tried on.
    classifier : {"svm", "1-nn"}
        A linear support vector machine, or the nearest neighbour.
    """
    best: tuple[float, Features, str, float] | None = None
    for features in candidates:
        for scaling in _SCALINGS:
            rows = _scaled(features.train, features.train, scaling)
            products = rows @ rows.T
            for cost in _COSTS if classifier == "svm" else _COSTS[:1]:
                right = [
                    _predict(classifier, cost, products[np.ix_(use, use)], products[np.ix_(tried, use)], labels[use])
                    == labels[tried]
                    for use, tried in folds
                ]
                score = float(np.concatenate(right).mean())
                if best is None or score > best[0]:
                    best = (score, features, scaling, cost)
    if best is None:
        raise ValueError("candidates must hold at least one set of features, got none")
    score, features, scaling, cost = best
    rows = _scaled(features.train, features.train, scaling)
    cross = _scaled(features.train, features.test(), scaling) @ rows.T
    predicted = _predict(classifier, cost, rows @ rows.T, cross, labels)
    chosen = {**features.settings, "scaling": scaling, **({"cost": cost} if classifier == "svm" else {})}
    return Outcome(predicted, score, chosen)


def _scaled(train: Array, rows: Array, scaling: str) -> Array:
    """Centre features, and divide each by its deviation, or all by the mean deviation; products are then means."""
    train = train.astype(np.float64)  # products of features that say nearly the same must not drown in rounding
    deviation = train.std(0)
    deviation = deviation if scaling == "each" else np.full_like(deviation, deviation.mean())
    usable = deviation > 1e-6 * deviation.max()
    scale = np.where(usable, deviation, np.inf) * np.sqrt(train.shape[1])
    return np.asarray((rows - train.mean(0)) / scale)


def _predict(classifier: str, cost: float, products: Array, cross: Array, labels: Array) -> Array:
    """Predict from inner products, (n, n) among training rows and (m, n) of others with them."""
    if classifier == "1-nn":
        return np.asarray(labels[(np.diag(products) - 2 * cross).argmin(1)])
    with warnings.catch_warnings():
        # Hidden units that say the same make libsvm go round in circles: what it has by then will do.
        warnings.simplefilter("ignore", ConvergenceWarning)
        machine = SVC(C=cost, kernel="precomputed", max_iter=_MOST_STEPS).fit(products, labels)
    return np.asarray(machine.predict(cross))


def scores(labels: Array, predicted: Array) -> dict[str, float]:
    """Return overall accuracy, mean accuracy of the classes, and Cohen's kappa."""
    return {
        "overall": float(accuracy_score(labels, predicted)),
        "average": float(recall_score(labels, predicted, average="macro", labels=np.unique(labels), zero_division=0)),
        "kappa": float(cohen_kappa_score(labels, predicted)),
    }


# -- one draw ---------------------------------------------------------------------------------------


def run_draw(
    cube: Array, labels: Array, draw: int, settings: Settings, note: Callable[[str], None] = lambda text: None
) -> tuple[dict[str, Any], Split, dict[str, Array]]:
    """Compare all features on one draw of blocks.

    Parameters
    ----------
    cube : array (rows, columns, bands)
        The scene.
    labels : array (rows, columns)
        Its labels.
    draw : int
        Number of the draw, the seed of all that is random in it.
    settings : Settings
        How.
    note : callable
        Told what is being done.

    Returns
    -------
    result : dict
        Plain numbers: counts, classes, and by classifier and method the scores and what was chosen.
    split : Split
        The pixels.
    predicted : dict of str to array (n_test,)
        The labels that the support vector machine gave, by method.
    """
    split = divide(labels, draw, settings)
    random = np.random.default_rng([draw, 1])
    some = split.unlabelled[random.permutation(len(split.unlabelled))[: settings.unlabelled]]
    scenes = {"raw": cube.astype(np.float32), "whitened": whitened(cube, split.unlabelled, settings.floor)}
    truth, target = labels[tuple(split.train.T)].astype(int), labels[tuple(split.test.T)].astype(int)
    folds = list(held_out(split, settings.patch))
    size = settings.patch

    def features(scene: Array, function: Callable[[Array], Array], **described: Any) -> Features:
        """Apply a function to the patches of training pixels, and when asked to those of test pixels."""

        def of(places: Array) -> Array:
            parts = np.array_split(places, -(-len(places) // _AT_ONCE))
            return np.concatenate([function(patches(scene, part, size)) for part in parts])

        return Features(of(split.train), functools.partial(of, split.test), described)

    def machines() -> Iterator[Features]:
        for candidate in settings.candidates:
            scene = scenes[candidate.data]
            model = TVRBM(
                candidate.hidden_shape,
                rank=candidate.rank,
                visible="gaussian",
                batch_size=settings.batch_size,
                random_state=draw,
                device="cpu",
            )
            data = patches(scene, some, size)
            for number in range(1, max(settings.passes) + 1):
                model.partial_fit(data)
                if number in settings.passes:
                    note(f"draw {draw}: {candidate}, {number} passes")
                    yield features(scene, copy.deepcopy(model).transform, **asdict(candidate), passes=number)

    def components(number: int) -> Iterator[Features]:
        for name, scene in scenes.items():
            data = patches(scene, some, size).reshape(len(some), -1)
            model = PCA(min(number, *data.shape), svd_solver="randomized", random_state=draw).fit(data)
            yield features(scene, functools.partial(_components_of, model), data=name, size=int(model.n_components_))

    middle = size // 2
    learned = list(machines())
    fixed = {
        "spectrum": [features(scenes["raw"], lambda part: part[:, middle, middle])],
        "spectrum, whitened": [features(scenes["whitened"], lambda part: part[:, middle, middle])],
        "patch": [features(scenes["raw"], _rows)],
        "patch, whitened": [features(scenes["whitened"], _rows)],
    }
    result: dict[str, Any] = {
        "draw": draw,
        "classes": split.classes.tolist(),
        "blocks": len(np.unique(split.block)),
        "train": len(split.train),
        "test": len(split.test),
        "unlabelled": len(some),
        "scores": {},
    }
    shown = {}
    for classifier in _CLASSIFIERS:
        note(f"draw {draw}: {classifier}")
        outcomes = {"TVRBM": best_outcome(learned, truth, folds, classifier)}
        n_features = int(np.prod(outcomes["TVRBM"].settings["hidden_shape"]))
        for name, candidates in {"PCA": list(components(n_features)), **fixed}.items():
            outcomes[name] = best_outcome(candidates, truth, folds, classifier)
        result["scores"][classifier] = {
            name: {**scores(target, outcome.predicted), "validation": outcome.validation, "chosen": outcome.settings}
            for name, outcome in outcomes.items()
        }
        if classifier == "svm":
            shown = {name: outcome.predicted for name, outcome in outcomes.items()}
    return result, split, shown


def _rows(arrays: Array) -> Array:
    return arrays.reshape(len(arrays), -1)


def _components_of(model: PCA, arrays: Array) -> Array:
    return np.asarray(model.transform(_rows(arrays)))


# -- all draws --------------------------------------------------------------------------------------


def run(
    out: Path,
    *,
    draws: int = 5,
    settings: Settings | None = None,
    scene: tuple[Array, Array] | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Make the comparison over several draws, and write ``results.json`` and ``label-map.png``.

    Parameters
    ----------
    out : Path
        Folder for both; made if it is not there.
    draws : int
        Draws of blocks. The picture is of the first.
    settings : Settings, optional
        How.
    scene : pair of array, optional
        Cube (rows, columns, bands) and labels (rows, columns); Indian Pines if not given.
    note : callable
        Told what is being done.

    Returns
    -------
    dict
        What ``results.json`` holds.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    settings = settings or Settings()
    if scene is None:
        loaded = load("indian-pines")
        scene = loaded.arrays, loaded.labels
    cube, labels = scene
    out.mkdir(parents=True, exist_ok=True)
    done: list[dict[str, Any]] = []
    for draw in range(1, draws + 1):
        began = time.perf_counter()
        result, split, predicted = run_draw(cube, labels, draw, settings, note)
        done.append({**result, "seconds": round(time.perf_counter() - began, 1)})
        report = {
            "mvrbm": __version__,
            "settings": asdict(settings),
            "summary": summary(done),
            "draws": done,
        }
        _write(out / "results.json", json.dumps(report, indent=1) + "\n")
        if draw == 1:
            draw_map(labels, split, {name: predicted[name] for name in ("TVRBM", "PCA")}, out / "label-map.png")
    return report


def _write(path: Path, text: str) -> None:
    _replace(path, lambda file: file.write(text.encode()))


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean and standard deviation over draws of every score, by classifier and method."""
    table: dict[str, Any] = {}
    for classifier, methods in results[0]["scores"].items():
        table[classifier] = {}
        for method in methods:
            table[classifier][method] = {}
            for score in ("overall", "average", "kappa"):
                values = [result["scores"][classifier][method][score] for result in results]
                spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
                table[classifier][method][score] = {"mean": float(np.mean(values)), "deviation": spread}
    return table


def explain(cube: Array, labels: Array, settings: Settings | None = None, *, draws: int = 3) -> dict[str, Any]:
    """Look for reasons, after the fact and on test pixels: nothing was chosen by these numbers.

    Parameters
    ----------
    cube : array (rows, columns, bands)
        The scene.
    labels : array (rows, columns)
        Its labels.
    settings : Settings, optional
        How. The machines are its candidates of rank 1 with 2x2 spatial modes, or else the first, each after the
        fewest passes.
    draws : int
        How many of the draws to look at.

    Returns
    -------
    dict
        ``"random_pixels"``: accuracy of the nearest neighbour on raw patches, if a share of the labelled pixels is
        drawn without regard to blocks. ``"machines"``: for each draw and machine, which part of the hidden
        probabilities is within 0.05 of 0 or 1, the median correlation of hidden units with the brightness of a
        patch, accuracies from probabilities and from the fields before the sigmoid, at cost 10, and which part of the
        support vector machine's errors from probabilities is within corn or within soybean, and between the two.
    """
    settings = settings or Settings()
    size, raw = settings.patch, cube.astype(np.float32)

    def predict(classifier: str, both: Sequence[Array], truth: Array) -> Array:
        rows, others = (_scaled(both[0], part, "all") for part in both)
        return _predict(classifier, 10.0, rows @ rows.T, others @ rows.T, truth)

    known = np.random.default_rng(0).permutation(np.argwhere(labels > 0))
    few = round(settings.share * len(known))
    near, far = known[:few], known[few : few + 3000]
    cut = [_rows(patches(raw, part, size)) for part in (near, far)]
    loose = float((predict("1-nn", cut, labels[tuple(near.T)]) == labels[tuple(far.T)]).mean())
    wanted = [one for one in settings.candidates if one.rank == 1 and one.hidden_shape[:2] == (2, 2)]
    result: dict[str, Any] = {"random_pixels": loose, "machines": []}
    for draw in range(1, draws + 1):
        split = divide(labels, draw, settings)
        truth, target = labels[tuple(split.train.T)].astype(int), labels[tuple(split.test.T)].astype(int)
        some = np.random.default_rng([draw, 1]).permutation(split.unlabelled)[: settings.unlabelled]
        bright = patches(raw, split.train, size).mean((1, 2, 3))
        for candidate in wanted or settings.candidates[:1]:
            scene = raw if candidate.data == "raw" else whitened(cube, split.unlabelled, settings.floor)
            model = TVRBM(
                candidate.hidden_shape,
                rank=candidate.rank,
                visible="gaussian",
                batch_size=settings.batch_size,
                random_state=draw,
                device="cpu",
            )
            data = patches(scene, some, size)
            for _ in range(min(settings.passes)):
                model.partial_fit(data)
            both = [model.transform(patches(scene, part, size)) for part in (split.train, split.test)]
            fields = [_fields(model, patches(scene, part, size)) for part in (split.train, split.test)]
            linked = [np.corrcoef(unit, bright)[0, 1] for unit in both[0].T if unit.std() > 0]
            row: dict[str, Any] = {
                "draw": draw,
                "data": candidate.data,
                "saturated": float(((both[0] < 0.05) | (both[0] > 0.95)).mean()),
                "brightness": float(np.median(np.abs(linked))),
            }
            for classifier in _CLASSIFIERS:
                predicted = predict(classifier, both, truth)
                row[f"{classifier}, probabilities"] = float((predicted == target).mean())
                row[f"{classifier}, fields"] = float((predict(classifier, fields, truth) == target).mean())
                if classifier == "svm":
                    row["errors"] = _kinds_of_error(target, predicted)
            result["machines"].append(row)
    return result


def _fields(model: TVRBM, arrays: Array) -> Array:
    (name,) = model.machine_.layers
    with torch.no_grad():
        return _rows(model.machine_.hidden_field({name: torch.from_numpy(arrays)}).numpy())


def _kinds_of_error(labels: Array, predicted: Array) -> dict[str, float]:
    wrong = labels != predicted
    crops = np.asarray([2 if "soybean" in name else 1 if "corn" in name else 0 for name in CLASSES])
    told, given = crops[labels[wrong]], crops[predicted[wrong]]
    crop = (told > 0) & (given > 0)
    count = max(int(wrong.sum()), 1)
    return {
        "within corn or soybean": float((crop & (told == given)).sum() / count),
        "between corn and soybean": float((crop & (told != given)).sum() / count),
    }


def draw_map(labels: Array, split: Split, predicted: Mapping[str, Array], path: Path) -> None:
    """Draw the labels and what was predicted beside each other, training pixels in black.

    Parameters
    ----------
    labels : array (rows, columns)
        The truth.
    split : Split
        The pixels of a draw.
    predicted : mapping of str to array (n_test,)
        Labels of the test pixels, by the title of their panel.
    path : Path
        A PNG file.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from mvrbm.report.drawing import styled

    light, black = "#e4e4e4", "#000000"
    colours = [light, *_COLOURS, black]
    training = len(colours) - 1
    truth = np.where(np.isin(labels, split.classes), labels, 0).astype(int)
    panels = {"labels": truth}
    target = labels[tuple(split.test.T)]
    for name, values in predicted.items():
        panel = np.zeros_like(truth)
        panel[tuple(split.test.T)] = values
        panels[f"{name}: {np.mean(values == target):.3f} right"] = panel
    with styled():
        figure = Figure(figsize=(3.1 * len(panels), 3.9))
        for number, (title, panel) in enumerate(panels.items(), start=1):
            axes = figure.add_axes(((number - 1) / len(panels) + 0.01, 0.18, 1 / len(panels) - 0.02, 0.75))
            panel[tuple(split.train.T)] = training
            axes.imshow(panel, ListedColormap(colours), vmin=0, vmax=training, interpolation="nearest")
            axes.set_title(title)
            axes.set_axis_off()
        keys = [
            (colours[number], CLASSES[number] if number < len(CLASSES) else f"{number}") for number in split.classes
        ]
        keys += [(black, "training"), (light, "no label, or not tested")]
        handles = [Patch(facecolor=colour, label=name) for colour, name in keys]
        figure.legend(handles=handles, loc="lower center", ncols=5, fontsize=8.5, handlelength=1.2, columnspacing=1.2)
        figure.savefig(path, dpi=110, metadata={"Software": None})


_COLOURS = (
    "#7f5539", "#e6a817", "#f4d35e", "#b5651d", "#9bd770", "#3f9b45", "#c9f29b", "#d8b4f8",
    "#5e3c99", "#1f78b4", "#6db7ec", "#17becf", "#ff9da7", "#14532d", "#d7263d", "#8d99ae",
)  # fmt: skip


def main(args: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m studies.indian_pines", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and label-map.png")
    parser.add_argument("--draws", type=int, default=5, help="draws of blocks (5)")
    parser.add_argument("--explain", action="store_true", help="instead, look for reasons: explain.json")
    given = parser.parse_args(args)
    began = time.perf_counter()

    def note(text: str) -> None:
        print(f"{time.perf_counter() - began:7.1f} s  {text}", file=sys.stderr, flush=True)

    if given.explain:
        scene = load("indian-pines")
        given.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(explain(scene.arrays, scene.labels, draws=given.draws), indent=1)
        _write(given.out / "explain.json", text + "\n")
        print(text)
        return 0
    report = run(given.out, draws=given.draws, note=note)
    for classifier, methods in report["summary"].items():
        for method, values in methods.items():
            numbers = "  ".join(f"{name} {v['mean']:.3f} ± {v['deviation']:.3f}" for name, v in values.items())
            print(f"{classifier:<6}{method:<20}{numbers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
