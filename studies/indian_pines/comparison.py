"""One draw of the comparison: a `TVRBM`, principal components, patches and spectra under the same classifiers."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.decomposition import PCA

from mvrbm import TVRBM
from studies.indian_pines.blocks import Split, divide, held_out, patches, whitened
from studies.indian_pines.classifiers import CLASSIFIERS, Features, best_outcome, predict, scaled, scores
from studies.indian_pines.settings import CLASSES, Candidate, Settings

__all__ = ["explain", "run_draw"]

Array = NDArray[Any]

_AT_ONCE = 500  # patches


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
        Receives lines of progress.

    Returns
    -------
    result : dict
        Plain numbers: counts, classes, and by classifier and method the scores and the chosen settings.
    split : Split
        The pixels.
    predicted : dict of str to array (n_test,)
        Labels predicted by the support vector machine, by method.
    """
    split = divide(labels, draw, settings)
    random = np.random.default_rng([draw, 1])
    some = split.unlabeled[random.permutation(len(split.unlabeled))[: settings.unlabeled]]
    scenes = {"raw": cube.astype(np.float32), "whitened": whitened(cube, split.unlabeled, settings.floor)}
    truth, target = labels[tuple(split.train.T)].astype(int), labels[tuple(split.test.T)].astype(int)
    folds = list(held_out(split, settings.patch))
    size = settings.patch

    def features(scene: Array, function: Callable[[Array], Array], **described: Any) -> Features:
        """Apply a function to the patches of training pixels, and later to those of test pixels."""

        def of(places: Array) -> Array:
            parts = np.array_split(places, -(-len(places) // _AT_ONCE))
            return np.concatenate([function(patches(scene, part, size)) for part in parts])

        return Features(of(split.train), functools.partial(of, split.test), described)

    def machines() -> Iterator[Features]:
        for candidate in settings.candidates:
            scene = scenes[candidate.data]
            model = _tvrbm(candidate, settings, draw)
            data = patches(scene, some, size)
            for number in range(1, max(settings.passes) + 1):
                model.partial_fit(data)
                if number in settings.passes:
                    note(f"draw {draw}: {candidate}, {number} epochs")
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
        "unlabeled": len(some),
        "scores": {},
    }
    shown = {}
    for classifier in CLASSIFIERS:
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
    """Measure likely reasons for the result, afterwards and on test pixels: nothing is chosen by these numbers.

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
    size, raw = settings.patch, cube.astype(np.float32)

    def labeled(classifier: str, both: Sequence[Array], truth: Array) -> Array:
        rows, others = (scaled(both[0], part, "all") for part in both)
        return predict(classifier, 10.0, rows @ rows.T, others @ rows.T, truth)

    known = np.random.default_rng(0).permutation(np.argwhere(labels > 0))
    few = round(settings.share * len(known))
    near, far = known[:few], known[few : few + 3000]
    cut = [_rows(patches(raw, part, size)) for part in (near, far)]
    loose = float((labeled("1-nn", cut, labels[tuple(near.T)]) == labels[tuple(far.T)]).mean())
    wanted = [one for one in settings.candidates if one.rank == 1 and one.hidden_shape[:2] == (2, 2)]
    result: dict[str, Any] = {"random_pixels": loose, "machines": []}
    for draw in range(1, draws + 1):
        split = divide(labels, draw, settings)
        truth, target = labels[tuple(split.train.T)].astype(int), labels[tuple(split.test.T)].astype(int)
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
