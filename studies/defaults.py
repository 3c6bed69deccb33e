"""Default settings: scores after more epochs, predictions from additional layers, and class frequencies of samples.

`epochs` trains each estimator that has a score for 1, 2, 4 and 8 times its default number of epochs. `layers` predicts
labels by `MMVRBM` from an image, and from the image and a second layer, and compares with logistic regression.
`classes` counts the classes of samples. All data is made from installed packages, except for 20 Newsgroups. Its
validation documents were also used to choose the prior of the topics, and the letters of `layers` to choose the
learning rates of layers.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import string
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from mvrbm import (
    MMVRBM,
    MVRBM,
    RBM,
    ClassificationMVRBM,
    DeepMVRBM,
    DeepMVRBMClassifier,
    MatrixMixture,
    MVRBMClassifier,
    ReplicatedSoftmax,
)
from studies.applications.topics import corpus_parts
from studies.arguments import Command, Options, add_parts, add_study_options
from studies.report import markdown_table, read_results
from studies.runner import run_plan
from studies.runs import Outcome, Place, Run, Store, write_json

__all__ = ["COMMANDS", "LAYERS", "MODELS"]

Array = NDArray[Any]
PARTS = ("epochs", "layers", "classes")
TIMES = (1, 2, 4, 8)
_SEEDS = {"epochs": 3, "layers": 5, "classes": 1}
_N_DOCUMENTS = 2000
_N_SAMPLES = 2000
# Numbers of `_measure_classes` in the table, and their titles.
_CLASSES = {
    "p_value": "p of these frequencies",
    "agreement_with_posterior": "read by the model",
    "agreement_with_logistic_regression": "read by logistic regression",
}


# -- data -------------------------------------------------------------------------------------------


def digits(seed: int) -> tuple[Array, Array]:
    """Return the 1,797 digits of scikit-learn and their labels, in random order."""
    loaded = load_digits()
    order = np.random.default_rng(seed).permutation(len(loaded.target))
    return (loaded.images[order] / 16).astype(np.float32), loaded.target[order]


def letters(n: int, seed: int, size: int = 16) -> tuple[Array, Array]:
    """Render capital letters in the fonts of matplotlib, moved and rotated, with noise. Return images and labels."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = sorted(path for path in folder.glob("DejaVu*.ttf") if "Display" not in path.name)
    font = functools.cache(lambda number, points: ImageFont.truetype(str(files[number]), points))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 26, n)
    images = np.zeros((n, size, size))
    for image, label in zip(images, labels, strict=True):
        canvas = Image.new("L", (size, size))
        face = font(int(rng.integers(len(files))), int(rng.integers(12, 14)))
        letter = string.ascii_uppercase[label]
        draw = ImageDraw.Draw(canvas)
        left, top, right, bottom = draw.textbbox((0, 0), letter, font=face)
        x, y = rng.uniform(-1, 1, 2)
        draw.text(((size - right - left) / 2 + x, (size - bottom - top) / 2 + y), letter, fill=255, font=face)
        image[:] = np.asarray(canvas.rotate(rng.uniform(-5, 5), resample=Image.Resampling.BILINEAR)) / 255
    return np.clip(images + rng.normal(0, 0.05, images.shape), 0, 1).astype(np.float32), labels


# -- more epochs ------------------------------------------------------------------------------------


def _on_digits(model: Any, seed: int, *, labels: bool) -> float:
    x, y = digits(seed)
    given = (y[:1000],) if labels else ()
    return float(model.fit(x[:1000], *given).score(x[1000:], *((y[1000:],) if labels else ())))


def _multimodal(model: Any, seed: int) -> float:
    x, y = digits(seed)
    model.fit({"image": x[:1000], "digit": y[:1000]})
    return float(np.mean(model.predict({"image": x[1000:]}) == y[1000:]))


def _topics(model: Any, seed: int, data_dir: str | None) -> float:
    train, valid, _, _ = corpus_parts("20news", None, data_dir)
    chosen = np.random.default_rng(seed).permutation(train.shape[0])[:_N_DOCUMENTS]
    return float(model.fit(train[chosen]).score(valid))


#: Functions that create an estimator, its default number of epochs, and what its score is.
MODELS: dict[str, tuple[Callable[..., Any], int, str]] = {
    "ReplicatedSoftmax": (ReplicatedSoftmax, 50, "nats per word"),
    "MVRBMClassifier": (MVRBMClassifier, 30, "accuracy"),
    "DeepMVRBMClassifier": (DeepMVRBMClassifier, 30, "accuracy"),
    "ClassificationMVRBM, discriminative": (ClassificationMVRBM, 30, "accuracy"),
    "ClassificationMVRBM, hybrid": (functools.partial(ClassificationMVRBM, mode="hybrid"), 30, "accuracy"),
    "ClassificationMVRBM, generative": (functools.partial(ClassificationMVRBM, mode="generative"), 100, "accuracy"),
    "MMVRBM": (MMVRBM, 100, "accuracy"),
    "RBM, default": (RBM, 10, "pseudo-log-likelihood"),
    "RBM, generative": (functools.partial(RBM, recipe="generative"), 100, "pseudo-log-likelihood"),
    "MVRBM, default": (MVRBM, 10, "pseudo-log-likelihood"),
    "MVRBM, generative": (functools.partial(MVRBM, rank=4, recipe="generative"), 100, "pseudo-log-likelihood"),
    "DeepMVRBM": (DeepMVRBM, 10, "log-probability of reconstructions"),
    "MatrixMixture": (MatrixMixture, 200, "log-likelihood"),
}


def _measure_epochs(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the score of an estimator on test samples after a multiple of its default epochs."""
    new, epochs, _ = MODELS[settings["model"]]
    seed = settings["seed"]
    model = new(n_epochs=settings["times"] * epochs, random_state=seed, device=place.device)
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if settings["model"] == "ReplicatedSoftmax":
            score = _topics(model, seed, place.data_dir)
        elif settings["model"] == "MMVRBM":
            score = _multimodal(model, seed)
        else:
            score = _on_digits(model, seed, labels=hasattr(model, "predict_proba"))
    return Outcome({"score": score, "cpu_seconds": time.process_time() - start})


# -- additional layers ------------------------------------------------------------------------------


def _with_vector(seed: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return letters, their labels, and a vector: the embedding of the letter, with noise."""
    x, y = letters(2000, 10 + seed)
    embedding = np.random.default_rng(12345).normal(size=(26, 10))
    return x, y, (embedding[y] + rng.normal(size=(len(y), 10))).astype(np.float32)


def _with_category(seed: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return letters, their labels, and a category: the letter in 60% of the samples."""
    x, y = letters(2000, 10 + seed)
    read = np.where(rng.random(len(y)) < 0.6, y, rng.integers(0, 26, len(y)))
    return x, y, np.eye(26, dtype=np.uint8)[read]


def _with_image(seed: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return the left halves of digits, their labels, and the right halves."""
    x, y = digits(seed)
    return x[:, :, :4], y, x[:, :, 4:]


def _with_curves(seed: int, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Return the left halves of digits, their labels, and real matrices: six curves of each class, with noise."""
    x, y = digits(seed)
    curves = np.random.default_rng(5).normal(size=(10, 12, 6)).cumsum(1)
    return x[:, :, :4], y, (20 + 0.75 * curves[y] + 3 * rng.normal(size=(len(y), 12, 6))).astype(np.float32)


#: Functions that return images, labels and a second layer, and the units of the second layer.
LAYERS: dict[str, tuple[Callable[..., tuple[Array, Array, Array]], str]] = {
    "letters and a vector": (_with_vector, "gaussian"),
    "letters and a vector, learned variances": (_with_vector, "gaussian-learned"),
    "letters and a noisy category": (_with_category, "categorical"),
    "left and right halves of digits": (_with_image, "bernoulli"),
    "left halves and real matrices": (_with_curves, "gaussian"),
}


def _measure_layers(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the accuracy of labels predicted from an image alone and with a second layer."""
    load, kind = LAYERS[settings["layers"]]
    seed = settings["seed"]
    x, y, second = load(seed, np.random.default_rng(100 + seed))
    train, test = slice(0, 1300), slice(1300, None)
    start = time.process_time()
    found: dict[str, Any] = {}
    for name, parts in (("one", {"image": x}), ("both", {"image": x, "second": second})):
        kinds = {"image": "bernoulli", "second": kind} if name == "both" else {"image": "bernoulli"}
        model = MMVRBM(visible=kinds, random_state=seed, device=place.device)
        model.fit({**{key: part[train] for key, part in parts.items()}, "label": y[train]})
        predicted = model.predict({key: part[test] for key, part in parts.items()})
        found[name] = float(np.mean(predicted == y[test]))
        rows = np.concatenate([part.reshape(len(part), -1) for part in parts.values()], 1)
        simple = LogisticRegression(C=0.1, max_iter=1000).fit(rows[train], y[train])
        found[f"{name}, logistic regression"] = float(simple.score(rows[test], y[test]))
    return Outcome({**found, "cpu_seconds": time.process_time() - start})


# -- classes of samples -----------------------------------------------------------------------------


def _measure_classes(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Draw samples without giving labels, and compare the frequencies of the classes with those of the data."""
    seed = settings["seed"]
    x, y = letters(2600, seed)
    start = time.process_time()
    if settings["model"] == "MMVRBM":
        model: Any = MMVRBM(rank=4, random_state=seed, device=place.device).fit({"image": x, "letter": y})
        drawn = model.sample(_N_SAMPLES, steps=200)
        images, labels = drawn["image"], drawn["letter"]
        read = model.predict({"image": images})
    else:
        model = ClassificationMVRBM(rank=4, mode="generative", random_state=seed, device=place.device).fit(x, y)
        images, labels = model.sample(_N_SAMPLES, steps=200)
        read = model.predict(images)
    judge = LogisticRegression(C=0.1, max_iter=1000).fit(x.reshape(len(x), -1), y)
    judged = judge.predict(images.reshape(len(images), -1))
    expected = _N_SAMPLES * np.bincount(y, minlength=26) / len(y)
    counts = np.bincount(labels, minlength=26)
    numbers = {
        "counts": counts.tolist(),
        "p_value": float(stats.chisquare(counts, expected).pvalue),
        "agreement_with_posterior": float(np.mean(read == labels)),
        "agreement_with_logistic_regression": float(np.mean(judged == labels)),
    }
    return Outcome({**numbers, "cpu_seconds": time.process_time() - start})


# -- plan and tables --------------------------------------------------------------------------------


def plan() -> list[Run]:
    """Return all runs: one per estimator, multiple of epochs and seed, one per pair of layers and seed, and so on."""
    found = []
    for seed, times in itertools.product(range(_SEEDS["epochs"]), TIMES):
        for number, name in enumerate(MODELS):
            settings = {"model": name, "times": times, "seed": seed}
            found.append(Run(f"epochs-{number}-{times}-{seed}", "epochs", _measure_epochs, settings))
    for number, name in enumerate(LAYERS):
        for seed in range(_SEEDS["layers"]):
            settings = {"layers": name, "seed": seed}
            found.append(Run(f"layers-{number}-{seed}", "layers", _measure_layers, settings))
    for name in ("MMVRBM", "ClassificationMVRBM"):
        found.append(Run(f"classes-{name}", "classes", _measure_classes, {"model": name, "seed": 0}))
    return found


def _rows(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Return settings and numbers of the stored runs, by part."""
    rows: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for run in plan():
        if store.has(run):
            rows[run.group].append({**run.settings, **store.numbers(run)})
    return rows


def _collected(rows: list[dict[str, Any]], value: str, **settings: Any) -> Array:
    return np.array([row[value] for row in rows if all(row[key] == wanted for key, wanted in settings.items())])


def _with_spread(values: Array) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}" if len(values) else "–"
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


def _tables(rows: Mapping[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return header and rows of the table of each part.

    A mean score is marked if it is worse than that of the default epochs by more than their standard deviation.
    """
    of_epochs = []
    for name, (_, epochs, score) in MODELS.items():
        default, *more = (_collected(rows["epochs"], "score", model=name, times=times) for times in TIMES)
        cells = [_with_spread(default)]
        for found in more:
            worse = min(len(found), len(default)) > 1 and found.mean() < default.mean() - default.std(ddof=1)
            cells.append(_with_spread(found) + (" (worse)" if worse else ""))
        of_epochs.append([name, score, str(epochs), *cells])
    kinds = {"one": "image", "both": "both layers"}
    kinds |= {f"{key}, logistic regression": f"{name}, logistic regression" for key, name in kinds.items()}
    of_layers = [
        [name, *(_with_spread(_collected(rows["layers"], kind, layers=name)) for kind in kinds)] for name in LAYERS
    ]
    of_classes = [
        [row["model"], f"{min(row['counts'])} to {max(row['counts'])}", *(f"{row[key]:.2f}" for key in _CLASSES)]
        for row in rows["classes"]
    ]
    return {
        "epochs": {"header": ["estimator", "score", "epochs", *(f"x {k}" for k in TIMES)], "rows": of_epochs},
        "layers": {"header": ["accuracy", *kinds.values()], "rows": of_layers},
        "classes": {"header": ["model", "samples per letter", *_CLASSES.values()], "rows": of_classes},
    }


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    add_study_options(parser, "defaults", "--data-dir", "--only", "--budget")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    path = options.out / "results.json"
    if not options.report_only:
        store = Store.within(options.work)
        wanted = [run for run in plan() if run.group in (options.parts or PARTS)]
        wanted = [run for run in wanted if options.only is None or options.only in run.name]
        summary = run_plan(wanted, Place(store, "cpu", options.data_dir, options.work), budget=options.budget)
        summary.raise_failures()
        options.out.mkdir(parents=True, exist_ok=True)
        rows = _rows(store)
        write_json(path, {"runs": rows, "tables": _tables(rows)})
    found = read_results(path)
    return found, "\n\n".join(markdown_table(table["header"], table["rows"]) for table in found["tables"].values())


COMMANDS = {
    "defaults": Command(
        "The default settings: more epochs, additional layers and the classes of samples.",
        _add,
        _run,
        "layers --out results/defaults",
    )
}
