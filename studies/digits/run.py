"""How the runs of experiments 1 and 2 are computed: one function per kind of run, from settings to numbers.

Only `denoise` needs more than PyTorch and NumPy: it compares with the filters of scikit-image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm import BoltzmannMachine, models
from mvrbm.errors import DivergenceError
from mvrbm.sampling import mean_field
from mvrbm.training import RECIPES, Trainer
from studies.data import Digits, balanced, digits, photographs, subset
from studies.runs import Outcome, Place

Array = NDArray[Any]
Settings = Mapping[str, Any]

# Images that pass through a machine at once, to limit memory.
_ROWS_AT_ONCE = 4096
# Reconstructions to store for the figure.
_SHOWN = 20


# -- models -----------------------------------------------------------------------------------------


def mvrbm(visible: Sequence[int], hidden: Sequence[int]) -> BoltzmannMachine:
    """Return the paper's model."""
    return models.mvrbm(visible, hidden)


def rbm(visible: Sequence[int], hidden: Sequence[int]) -> BoltzmannMachine:
    """Return the classic RBM with the same number of hidden units."""
    return models.rbm(prod(visible), prod(hidden))


def rbm_equal(visible: Sequence[int], hidden: Sequence[int]) -> BoltzmannMachine:
    """Return the smallest classic RBM with at least as many parameters as the MVRBM."""
    wanted = mvrbm(visible, hidden).n_parameters
    size = prod(visible)
    return models.rbm(size, max(1, -(-(wanted - size) // (size + 1))))


def tvrbm(visible: Sequence[int], hidden: Sequence[int]) -> BoltzmannMachine:
    """Return the TvRBM with the same number of hidden units and no more parameters than the MVRBM."""
    return _cp(visible, hidden, prod(hidden))


def tvrbm_small(visible: Sequence[int], hidden: Sequence[int]) -> BoltzmannMachine:
    """Return the TvRBM with a tenth of the hidden units and therefore a higher rank."""
    return _cp(visible, hidden, max(1, prod(hidden) // 10))


def _cp(visible: Sequence[int], hidden: Sequence[int], n_hidden: int) -> BoltzmannMachine:
    room = mvrbm(visible, hidden).n_parameters - prod(visible) - n_hidden
    return models.cp_rbm(visible, n_hidden, max(1, room // (sum(visible) + n_hidden)))


MODELS: dict[str, Callable[[Sequence[int], Sequence[int]], BoltzmannMachine]] = {
    "mvrbm": mvrbm,
    "rbm": rbm,
    "rbm-equal": rbm_equal,
    "tvrbm": tvrbm,
    "tvrbm-small": tvrbm_small,
}


# -- shared -----------------------------------------------------------------------------------------


def _digits(settings: Settings, place: Place) -> Digits:
    return digits(settings["data"], settings["n_test"], place.data_dir)


def _training(
    machine: BoltzmannMachine, images: Array, settings: Settings, stops: Sequence[int]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Train a machine, and yield numbers after each of the given epochs, or ``"diverged"`` if training diverges."""
    device = machine.like.device
    # Keep the data on the device as bytes, so that the trainer moves nothing.
    data = torch.from_numpy(np.ascontiguousarray(images)).to(device).reshape(len(images), *_shape(machine))
    trainer = Trainer(machine, RECIPES[settings["recipe"]], seed=settings["seed"])
    seconds = 0.0
    for number, stop in enumerate(stops):
        began = _now(device)
        diverged = None
        try:
            trainer.fit(data, stop, initialize=number == 0)
        except DivergenceError as error:
            diverged = str(error)
        seconds += _now(device) - began
        trainer.raise_if_interrupted()
        so_far = {"parameters": machine.n_parameters, "updates": trainer.update, "training_seconds": round(seconds, 4)}
        if diverged is not None:
            yield trainer.epoch, {**so_far, "diverged": diverged}
            return
        yield stop, so_far


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _shape(machine: BoltzmannMachine) -> tuple[int, ...]:
    (layer,) = machine.layers.values()
    return layer.shape


def _build(settings: Settings, place: Place, visible: Sequence[int] = (28, 28)) -> BoltzmannMachine:
    return MODELS[settings["model"]](visible, settings["hidden"]).to(place.device)


def _pieces(images: Array, machine: BoltzmannMachine) -> Iterator[Tensor]:
    for first in range(0, len(images), _ROWS_AT_ONCE):
        piece = torch.from_numpy(np.ascontiguousarray(images[first : first + _ROWS_AT_ONCE])).to(machine.like.device)
        yield piece.to(machine.like.dtype).reshape(len(piece), *_shape(machine)) / 255


@torch.no_grad()
def _features(machine: BoltzmannMachine, images: Array) -> Tensor:
    """Return the hidden probabilities, one row per image."""
    return torch.cat([machine.hidden_mean(x, check=False).flatten(1) for x in _pieces(images, machine)])


@torch.no_grad()
def _reconstructions(machine: BoltzmannMachine, images: Array) -> Tensor:
    parts = [mean_field(machine, x, 1, check=False) for x in _pieces(images, machine)]
    return torch.cat([part for layers in parts for part in layers.values()])


def _squared_error(machine: BoltzmannMachine, images: Array) -> float:
    """Return the squared error of reconstructions, summed over pixels and averaged over images."""
    total = 0.0
    for first in range(0, len(images), _ROWS_AT_ONCE):
        part = images[first : first + _ROWS_AT_ONCE]
        truth = torch.cat(list(_pieces(part, machine)))
        total += float(((_reconstructions(machine, part) - truth) ** 2).double().sum())
    return total / len(images)


def _as_images(tensor: Tensor, like: Array) -> Tensor:
    return tensor.reshape(like.shape).float().cpu()


def _neighbor_error(train: Any, train_labels: Array, test: Any, test_labels: Array, place: Place) -> float:
    from studies.baselines.neighbors import nearest_neighbor_error

    return float(nearest_neighbor_error(train, train_labels, test, test_labels, device=place.device))


# -- classification ---------------------------------------------------------------------------------


def classify(settings: Settings, place: Place) -> Outcome:
    """Measure the 1-NN error on hidden probabilities after several numbers of epochs of one training run."""
    data = _digits(settings, place)
    rows = subset(len(data.train), settings["n"], settings["seed"])
    images = data.train[rows]
    labels = data.train_labels[rows]
    machine = _build(settings, place)
    numbers: dict[str, Any] = {}
    errors: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for stop, so_far in _training(machine, images, settings, settings["stops"]):
        numbers = so_far
        if "diverged" not in so_far:
            here = _features(machine, images)
            there = _features(machine, data.test)
            errors[str(stop)] = _neighbor_error(here, labels, there, data.test_labels, place)
            seconds[str(stop)] = so_far["training_seconds"]
    return Outcome({**numbers, "errors": errors, "seconds_at": seconds})


def raw_pixels(settings: Settings, place: Place) -> Outcome:
    """Measure the 1-NN error on pixels, for the same subset."""
    data = _digits(settings, place)
    rows = subset(len(data.train), settings["n"], settings["seed"])
    error = _neighbor_error(data.train[rows], data.train_labels[rows], data.test, data.test_labels, place)
    return Outcome({"error": error})


def baseline(settings: Settings, place: Place) -> Outcome:
    """Measure the error of one of the methods that the paper compares with."""
    from studies.baselines import BASELINES

    return _classifier(BASELINES[settings["baseline"]](settings["seed"], place.device), settings, place)


def fine_tune(settings: Settings, place: Place) -> Outcome:
    """Measure the error of the MVRBM with a softmax on top, fine-tuned by backpropagation."""
    from mvrbm import MVRBMClassifier

    model = MVRBMClassifier(**settings["numbers"], random_state=settings["seed"], device=place.device)
    return _classifier(model, settings, place)


def _classifier(model: Any, settings: Settings, place: Place) -> Outcome:
    """Fit a classifier to a subset of the digits, and measure its error on the test digits."""
    data = _digits(settings, place)
    rows = subset(len(data.train), settings["n"], settings["seed"])
    device = torch.device(place.device)
    began = _now(device)
    model.fit(data.train[rows], data.train_labels[rows])
    seconds = _now(device) - began
    wrong = np.asarray(model.predict(data.test)) != data.test_labels
    return Outcome(
        {"error": float(wrong.mean()), "parameters": int(model.n_parameters_), "training_seconds": round(seconds, 4)}
    )


# -- reconstruction and filters ---------------------------------------------------------------------


def reconstruct(settings: Settings, place: Place) -> Outcome:
    """Measure the squared reconstruction error of a machine trained on equally many images of each digit."""
    data = _digits(settings, place)
    images = data.train[balanced(data.train_labels, settings["each"], settings["seed"])]
    machine = _build(settings, place)
    ((_, numbers),) = _training(machine, images, settings, [settings["epochs"]])
    if "diverged" in numbers:
        return Outcome(numbers)
    shown = data.test[balanced(data.test_labels, _SHOWN // 10, 0)]
    return Outcome(
        {**numbers, "train_error": _squared_error(machine, images), "test_error": _squared_error(machine, data.test)},
        {
            "originals": torch.from_numpy(shown).float() / 255,
            "reconstructions": _as_images(_reconstructions(machine, shown), shown),
        },
        machine,
    )


def haar(settings: Settings, place: Place) -> Outcome:
    """Measure how Haar-like the filters of a stored machine are."""
    from studies.haar import haar_likeness

    found = haar_likeness(place.store.machine_of(settings["machine"], place.device))
    each = torch.from_numpy(found["filters"].pop("each"))
    return Outcome(found, {"each": each.float()})


# -- denoising --------------------------------------------------------------------------------------


def learn_nines(settings: Settings, place: Place) -> Outcome:
    """Train a machine on one digit only."""
    data = _digits(settings, place)
    ours = np.flatnonzero(data.train_labels == settings["digit"])
    images = data.train[ours[subset(len(ours), settings["n"], settings["seed"])]]
    machine = _build(settings, place)
    ((_, numbers),) = _training(machine, images, settings, [settings["epochs"]])
    return Outcome(numbers, machine=None if "diverged" in numbers else machine)


def denoise(settings: Settings, place: Place) -> Outcome:
    """Measure the PSNR of every denoiser over all test images of the digit."""
    from studies.denoising import compare

    data = _digits(settings, place)
    clean = data.test[data.test_labels == settings["digit"]]
    machine = place.store.machine_of(settings["machine"], place.device)
    found = compare(machine, clean, level=settings["level"], seed=settings["seed"])
    images = {name: torch.from_numpy(array) for name, array in found.pop("images").items()}
    return Outcome(found, images)


# -- growing images ---------------------------------------------------------------------------------


def grow(settings: Settings, place: Place) -> Outcome:
    """Measure seconds per update, and error on other photographs, for one image size and one model."""
    side = settings["side"]
    train, test = (part[:, :side, :side] for part in photographs(place.data_dir))
    train, test = train[: settings["n"]], test[: settings["n"]]
    machine = _build(settings, place, (side, side))
    # The first epoch initializes the machine and warms up, so it is not timed.
    so_far = [numbers for _, numbers in _training(machine, train, settings, [1, settings["epochs"]])]
    first = so_far[0]
    last = so_far[-1]
    if "diverged" in last:
        return Outcome(last)
    seconds = last["training_seconds"] - first["training_seconds"]
    spread = float(((test / 255 - (train / 255).mean(0)) ** 2).sum((1, 2)).mean())
    return Outcome(
        {
            "parameters": last["parameters"],
            "updates": last["updates"],
            "seconds_per_update": seconds / (last["updates"] - first["updates"]),
            "seconds_per_pass": seconds / (settings["epochs"] - 1),
            "error": _squared_error(machine, test) / side**2,
            "error_of_the_mean": spread / side**2,
        }
    )
