"""How one draw of blocks is computed: its pixels, the features, and the classifiers."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.ndimage import binary_dilation
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import accuracy_score, cohen_kappa_score, recall_score
from sklearn.svm import SVC

from mvrbm import TVRBM
from mvrbm.io.datasets import load
from studies.arguments import say
from studies.runs import Outcome, Place

__all__ = [
    "CLASSES",
    "CLASSIFIERS",
    "Candidate",
    "Features",
    "Prediction",
    "Settings",
    "Split",
    "best_outcome",
    "divide",
    "explain",
    "held_out",
    "one_draw",
    "patches",
    "predict",
    "run_draw",
    "scaled",
    "scene",
    "scores",
    "whitened",
]


#: Names of the scene's classes by label. Label 0 means no label.
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


@dataclass(frozen=True)
class Candidate:
    """A candidate `TVRBM`.

    Parameters
    ----------
    data : {"raw", "whitened"}
        Its data: raw patches, or patches with decorrelated bands.
    hidden_shape : tuple of int
        Shape of the hidden layer, with three axes.
    rank : int
        Rank of the coupling.
    """

    data: str
    hidden_shape: tuple[int, int, int]
    rank: int


@dataclass(frozen=True)
class Settings:
    """The settings of the comparison.

    Parameters
    ----------
    patch : int
        Rows, and columns, of a patch; odd.
    block : int
        Rows, and columns, of a block of training pixels.
    share : float
        Share of the labels for training.
    classes : int
        Smallest number of classes in a draw.
    least : int
        Smallest number of training pixels, and of test pixels, of a class in a draw. Other classes are ignored.
    folds : int
        Number of groups of training blocks that are held out in turn to choose settings.
    unlabeled : int
        Number of unlabeled patches to learn features from. None of them overlaps a test patch.
    candidates : tuple of Candidate
        The machines to choose from.
    passes : tuple of int
        Numbers of epochs to choose from.
    batch_size : int
        Patches per update.
    floor : float
        Added by whitening to the variances of the principal components; bands have variance 1.
    """

    patch: int = 9
    block: int = 7
    share: float = 0.1
    classes: int = 11
    least: int = 5
    folds: int = 3
    unlabeled: int = 1200
    candidates: tuple[Candidate, ...] = (
        Candidate("whitened", (1, 1, 100), 1),
        Candidate("whitened", (2, 2, 40), 1),
        Candidate("whitened", (2, 2, 40), 3),
        Candidate("raw", (2, 2, 40), 1),
    )
    passes: tuple[int, ...] = (3, 10)
    batch_size: int = 20
    floor: float = 0.1


Array = NDArray[Any]


@dataclass(frozen=True)
class Split:
    """The pixels of one draw, each given by its row and column.

    Parameters
    ----------
    train, test : array (n, 2)
        Labeled pixels. No training patch shares a pixel with a test patch.
    unlabeled : array (m, 2)
        Pixels with or without label whose patches overlap no test patch. They include the training pixels.
    block : array (n_train,)
        The block of each training pixel.
    fold : array (n_train,)
        The group of the block of each training pixel.
    classes : array
        Labels that are used in this draw.
    """

    train: Array
    test: Array
    unlabeled: Array
    block: Array
    fold: Array
    classes: Array


def divide(labels: Array, draw: int, settings: Settings | None = None, *, tries: int = 10_000) -> Split:
    """Draw training blocks. The test pixels are the labeled pixels that are far enough from all of them.

    Blocks of a grid are taken in random order until they hold the share of the labels given by `settings`. A draw with
    too few classes on both sides is rejected and drawn again, which depends only on the positions of the labels.

    Parameters
    ----------
    labels : array (rows, columns)
        Labels. 0 means no label.
    draw : int
        Number of the draw.
    settings : Settings, optional
        Sizes and shares.
    tries : int
        Largest number of rejected draws.
    """
    settings = settings or Settings()
    labels = np.asarray(labels, int)
    if settings.patch % 2 == 0:
        raise ValueError(f"patch must be odd, so that a pixel is its center, got {settings.patch}")
    rows, columns = (np.arange(size) // settings.block for size in labels.shape)
    blocks = rows[:, None] * (columns.max() + 1) + columns
    known = labels > 0
    held = np.bincount(blocks.ravel(), weights=known.ravel())  # labels per block
    random = np.random.default_rng([draw, settings.block, settings.patch])
    for _ in range(tries):
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
            f"no draw of {tries:,} has {settings.classes} classes with {settings.least} pixels on both sides: "
            "ask for fewer, or use smaller blocks"
        )
    counted = np.isin(labels, classes)
    groups = dict(zip(chosen.tolist(), (np.arange(enough) % settings.folds).tolist(), strict=True))
    places = np.argwhere(train & counted)
    block = blocks[tuple(places.T)]
    return Split(
        train=places,
        test=np.argwhere(test & counted),
        unlabeled=np.argwhere(~_near(test, settings.patch - 1)),
        block=block,
        fold=np.asarray([groups[number] for number in block.tolist()]),
        classes=classes,
    )


def _near(mask: Array, reach: int) -> Array:
    """Return a mask of the pixels within `reach` rows and columns of a masked pixel."""
    return np.asarray(binary_dilation(mask, np.ones((2 * reach + 1, 2 * reach + 1), bool)))


def held_out(split: Split, patch: int) -> Iterator[tuple[Array, Array]]:
    """Yield, for each group of training blocks, masks of the training pixels to fit and to validate on.

    Training pixels whose patch overlaps a held-out patch are in neither.
    """
    apart = np.abs(split.train[:, None] - split.train[None]).max(2) >= patch
    for number in np.unique(split.fold):
        tried = split.fold == number
        yield ~tried & apart[:, tried].all(1), tried


def patches(cube: Array, places: Array, size: int = 9) -> Array:
    """Cut patches around pixels. The scene is mirrored at its edges.

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
    """Return the scene with decorrelated bands (ZCA whitening, fitted on some pixels).

    Parameters
    ----------
    cube : array (rows, columns, bands)
        The scene.
    places : array (n, 2)
        Pixels for mean and covariance.
    floor : float
        Added to the variances of the principal components, the smallest of which are mostly noise.
    """
    spectra = cube[places[:, 0], places[:, 1]].astype(np.float64)
    mean = spectra.mean(0)
    deviation = spectra.std(0)
    deviation = np.where(deviation > 0, deviation, 1)
    variances, axes = np.linalg.eigh(np.cov(((spectra - mean) / deviation).T))
    turn = (axes / np.sqrt(np.maximum(variances, 0) + floor)) @ axes.T
    return np.asarray(((cube - mean) / deviation) @ turn, np.float32)


CLASSIFIERS = ("svm", "1-nn")
_COSTS = (0.01, 0.1, 1.0, 10.0, 100.0)
_SCALINGS = ("each", "all")
# Largest number of iterations per pair of classes; a few hundred are usual.
_SVM_STEPS = 20_000


@dataclass(frozen=True)
class Features:
    """Features of the training pixels, one row each, a function that computes those of test pixels, and settings."""

    train: Array
    test: Callable[[], Array]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Prediction:
    """The predictions of a classifier, its validation accuracy, and the chosen settings."""

    predicted: Array
    validation: float
    settings: dict[str, Any]


def best_outcome(candidates: Sequence[Features], labels: Array, folds: Sequence[Any], classifier: str) -> Prediction:
    """Choose features, scaling and cost on held-out training blocks, and predict the labels of the test pixels.

    Parameters
    ----------
    candidates : sequence of Features
        The features to choose from.
    labels : array (n_train,)
        Labels of the training pixels.
    folds : sequence of pair of boolean array (n_train,)
        Masks of the pixels to fit and to validate on.
    classifier : {"svm", "1-nn"}
        A linear support vector machine, or the nearest neighbor.
    """
    best: tuple[float, Features, str, float] | None = None
    for features in candidates:
        for scaling in _SCALINGS:
            rows = scaled(features.train, features.train, scaling)
            products = rows @ rows.T
            for cost in _COSTS if classifier == "svm" else _COSTS[:1]:
                right = [
                    predict(classifier, cost, products[np.ix_(use, use)], products[np.ix_(tried, use)], labels[use])
                    == labels[tried]
                    for use, tried in folds
                ]
                score = float(np.concatenate(right).mean())
                if best is None or score > best[0]:
                    best = (score, features, scaling, cost)
    if best is None:
        raise ValueError("candidates must hold at least one set of features, got none")
    score, features, scaling, cost = best
    rows = scaled(features.train, features.train, scaling)
    cross = scaled(features.train, features.test(), scaling) @ rows.T
    predicted = predict(classifier, cost, rows @ rows.T, cross, labels)
    chosen = {**features.settings, "scaling": scaling, **({"cost": cost} if classifier == "svm" else {})}
    return Prediction(predicted, score, chosen)


def scaled(train: Array, rows: Array, scaling: str) -> Array:
    """Center features, and divide them by each one's or the mean standard deviation and by the root of their number."""
    train = train.astype(np.float64)  # products of nearly equal features need the precision
    deviation = train.std(0)
    deviation = deviation if scaling == "each" else np.full_like(deviation, deviation.mean())
    usable = deviation > 1e-6 * deviation.max()
    scale = np.where(usable, deviation, np.inf) * np.sqrt(train.shape[1])
    return np.asarray((rows - train.mean(0)) / scale)


def predict(classifier: str, cost: float, products: Array, cross: Array, labels: Array) -> Array:
    """Predict from inner products, (n, n) among training rows and (m, n) of others with them."""
    if classifier == "1-nn":
        return np.asarray(labels[(np.diag(products) - 2 * cross).argmin(1)])
    with warnings.catch_warnings():
        # Identical hidden units can keep libsvm from converging. The last iterate is good enough.
        warnings.simplefilter("ignore", ConvergenceWarning)
        machine = SVC(C=cost, kernel="precomputed", max_iter=_SVM_STEPS).fit(products, labels)
    return np.asarray(machine.predict(cross))


def scores(labels: Array, predicted: Array) -> dict[str, float]:
    """Return overall accuracy, mean accuracy of the classes, and Cohen's kappa."""
    return {
        "overall": float(accuracy_score(labels, predicted)),
        "average": float(recall_score(labels, predicted, average="macro", labels=np.unique(labels), zero_division=0)),
        "kappa": float(cohen_kappa_score(labels, predicted)),
    }


# Patches that are transformed at once, to limit memory.
_AT_ONCE = 500


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
        Number of the draw, and its random seed.
    settings : Settings
        Settings.
    note : callable
        Called with lines of progress.

    Returns
    -------
    result : dict
        Counts, classes, and the scores and chosen settings by classifier and method.
    split : Split
        The pixels.
    predicted : dict of str to array (n_test,)
        Labels predicted by the support vector machine, by method.
    """
    split = divide(labels, draw, settings)
    random = np.random.default_rng([draw, 1])
    some = split.unlabeled[random.permutation(len(split.unlabeled))[: settings.unlabeled]]
    scenes = {"raw": cube.astype(np.float32), "whitened": whitened(cube, split.unlabeled, settings.floor)}
    truth = labels[tuple(split.train.T)].astype(int)
    target = labels[tuple(split.test.T)].astype(int)
    folds = list(held_out(split, settings.patch))
    pixels = _Draw(draw, settings, split, some, scenes)
    middle = settings.patch // 2
    learned = list(pixels.machines(note))
    fixed = {
        "spectrum": [pixels.features("raw", lambda part: part[:, middle, middle])],
        "spectrum, whitened": [pixels.features("whitened", lambda part: part[:, middle, middle])],
        "patch": [pixels.features("raw", _rows)],
        "patch, whitened": [pixels.features("whitened", _rows)],
    }
    result: dict[str, Any] = {
        "draw": draw,
        "classes": split.classes.tolist(),
        "blocks": len(np.unique(split.block)),
        "train": len(split.train),
        "test": len(split.test),
        "unlabeled": len(some),
        "scores": {},
    }
    shown = {}
    for classifier in CLASSIFIERS:
        note(f"draw {draw}: {classifier}")
        outcomes = {"TVRBM": best_outcome(learned, truth, folds, classifier)}
        n_features = int(np.prod(outcomes["TVRBM"].settings["hidden_shape"]))
        for name, candidates in {"PCA": list(pixels.components(n_features)), **fixed}.items():
            outcomes[name] = best_outcome(candidates, truth, folds, classifier)
        result["scores"][classifier] = {
            name: {**scores(target, outcome.predicted), "validation": outcome.validation, "chosen": outcome.settings}
            for name, outcome in outcomes.items()
        }
        if classifier == "svm":
            shown = {name: outcome.predicted for name, outcome in outcomes.items()}
    return result, split, shown


@dataclass(frozen=True)
class _Draw:
    """The pixels of one draw, and the features that are computed from them.

    Parameters
    ----------
    number : int
        Number of the draw, and random seed.
    settings : Settings
        Settings.
    split : Split
        Training and test pixels.
    unlabeled : array (m, 2)
        Pixels whose patches features are learned from.
    scenes : dict of str to array (rows, columns, bands)
        The scene, ``"raw"`` and ``"whitened"``.
    """

    number: int
    settings: Settings
    split: Split
    unlabeled: Array
    scenes: dict[str, Array]

    def patches(self, scene: str, places: Array) -> Array:
        """Cut patches around pixels."""
        return patches(self.scenes[scene], places, self.settings.patch)

    def features(self, scene: str, function: Callable[[Array], Array], **described: Any) -> Features:
        """Apply a function to the patches of training pixels, and later to the patches of test pixels."""

        def of(places: Array) -> Array:
            parts = np.array_split(places, -(-len(places) // _AT_ONCE))
            return np.concatenate([function(self.patches(scene, part)) for part in parts])

        return Features(of(self.split.train), functools.partial(of, self.split.test), described)

    def machines(self, note: Callable[[str], None]) -> Iterator[Features]:
        """Train the candidates, and yield their features after each number of epochs."""
        for candidate in self.settings.candidates:
            model = _tvrbm(candidate, self.settings, self.number)
            data = self.patches(candidate.data, self.unlabeled)
            for epochs in range(1, max(self.settings.passes) + 1):
                model.partial_fit(data)
                if epochs in self.settings.passes:
                    note(f"draw {self.number}: {candidate}, {epochs} epochs")
                    transform = copy.deepcopy(model).transform
                    yield self.features(candidate.data, transform, **asdict(candidate), passes=epochs)

    def components(self, count: int) -> Iterator[Features]:
        """Yield the principal components of raw and of whitened patches."""
        for scene in self.scenes:
            data = _rows(self.patches(scene, self.unlabeled))
            model = PCA(min(count, *data.shape), svd_solver="randomized", random_state=self.number).fit(data)
            function = functools.partial(_components_of, model)
            yield self.features(scene, function, data=scene, size=int(model.n_components_))


def _rows(arrays: Array) -> Array:
    return arrays.reshape(len(arrays), -1)


def _components_of(model: PCA, arrays: Array) -> Array:
    return np.asarray(model.transform(_rows(arrays)))


def _tvrbm(candidate: Candidate, settings: Settings, seed: int) -> TVRBM:
    return TVRBM(
        candidate.hidden_shape,
        rank=candidate.rank,
        visible="gaussian",
        batch_size=settings.batch_size,
        random_state=seed,
        device="cpu",
    )


def explain(cube: Array, labels: Array, settings: Settings | None = None, *, draws: int = 3) -> dict[str, Any]:
    """Measure likely reasons for the results on test pixels. Nothing is chosen by these numbers.

    Parameters
    ----------
    cube : array (rows, columns, bands)
        The scene.
    labels : array (rows, columns)
        Its labels.
    settings : Settings, optional
        Settings. The machines are its candidates of rank 1 with 2x2 spatial axes, or else the first, each after the
        smallest number of epochs.
    draws : int
        Number of draws.

    Returns
    -------
    dict
        ``"random_pixels"``: accuracy of the nearest neighbor on raw patches, if a share of the labeled pixels is
        drawn without regard to blocks. ``"machines"``: for each draw and machine, the share of hidden
        probabilities within 0.05 of 0 or 1, the median correlation of hidden units with the brightness of a
        patch, accuracies from probabilities and from the fields before the sigmoid, at cost 10, and the share of the
        support vector machine's errors from probabilities within corn or within soybean, and between the two.
    """
    settings = settings or Settings()
    size = settings.patch
    raw = cube.astype(np.float32)

    def labeled(classifier: str, both: Sequence[Array], truth: Array) -> Array:
        rows, others = (scaled(both[0], part, "all") for part in both)
        return predict(classifier, 10.0, rows @ rows.T, others @ rows.T, truth)

    known = np.random.default_rng(0).permutation(np.argwhere(labels > 0))
    few = round(settings.share * len(known))
    near = known[:few]
    far = known[few : few + 3000]
    cut = [_rows(patches(raw, part, size)) for part in (near, far)]
    loose = float((labeled("1-nn", cut, labels[tuple(near.T)]) == labels[tuple(far.T)]).mean())
    wanted = [one for one in settings.candidates if one.rank == 1 and one.hidden_shape[:2] == (2, 2)]
    result: dict[str, Any] = {"random_pixels": loose, "machines": []}
    for draw in range(1, draws + 1):
        split = divide(labels, draw, settings)
        truth = labels[tuple(split.train.T)].astype(int)
        target = labels[tuple(split.test.T)].astype(int)
        some = np.random.default_rng([draw, 1]).permutation(split.unlabeled)[: settings.unlabeled]
        bright = patches(raw, split.train, size).mean((1, 2, 3))
        for candidate in wanted or settings.candidates[:1]:
            scene = raw if candidate.data == "raw" else whitened(cube, split.unlabeled, settings.floor)
            model = _tvrbm(candidate, settings, draw)
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
            for classifier in CLASSIFIERS:
                predicted = labeled(classifier, both, truth)
                row[f"{classifier}, probabilities"] = float((predicted == target).mean())
                row[f"{classifier}, fields"] = float((labeled(classifier, fields, truth) == target).mean())
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
    true, given = crops[labels[wrong]], crops[predicted[wrong]]
    crop = (true > 0) & (given > 0)
    count = max(int(wrong.sum()), 1)
    return {
        "within corn or soybean": float((crop & (true == given)).sum() / count),
        "between corn and soybean": float((crop & (true != given)).sum() / count),
    }


# -- one run ----------------------------------------------------------------------------------------


def scene(data_dir: str | None) -> tuple[Array, Array]:
    """Return the cube (rows, columns, bands) and the labels (rows, columns) of Indian Pines."""
    loaded = load("indian-pines", data_dir=data_dir)
    return loaded.arrays, loaded.labels


def _settings(plain: Mapping[str, Any]) -> Settings:
    """Convert plain values to settings."""
    candidates = [{**one, "hidden_shape": tuple(one["hidden_shape"])} for one in plain["candidates"]]
    some = tuple(Candidate(**one) for one in candidates)
    return Settings(**{**plain, "candidates": some, "passes": tuple(plain["passes"])})


def one_draw(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Compute the scores of all methods on one draw, and the predictions of the support vector machine."""
    cube, labels = scene(place.data_dir)
    result, _, predicted = run_draw(cube, labels, settings["draw"], _settings(settings["comparison"]), say)
    return Outcome(result, {name: torch.from_numpy(np.asarray(values)) for name, values in predicted.items()})
