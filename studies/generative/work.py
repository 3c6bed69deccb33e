"""The cells that follow a training run: likelihoods, samples and their judge, and other models of real-valued data."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm import RandomSource
from mvrbm.devices import resolve_device
from mvrbm.likelihood import log_likelihood, log_partition_interval
from mvrbm.machine import BoltzmannMachine
from mvrbm.sampling import gibbs, independent_sample
from studies.cells import Outcome, Place
from studies.generative.data import gray_digits, parts
from studies.generative.quality import Judge, adversarial_accuracy, verdicts
from studies.generative.training import IMAGE, LABEL, layers_of

__all__ = ["baselines", "conditional", "evaluate", "judge", "sample_quality", "samples"]

Array = NDArray[Any]
Settings = Mapping[str, Any]

_ROWS, _CHAINS = 2000, 2000  # of data and of chains at once: a bound on memory
_WIDEST, _MORE_CHAINS = 1.0, 4  # width of an interval, in nats, beyond which an estimate has so many times more chains
_SHOWN = 100  # samples that are stored, for figures
_SHAPE = (28, 28)  # of digits, whatever the shape of a machine's layer
_CLASSES = 10


# -- likelihood -------------------------------------------------------------------------------------


def log_z(
    machine: BoltzmannMachine, center: Mapping[str, Tensor], chains: Mapping[str, Tensor], settings: Settings
) -> dict[str, Any]:
    """Return estimates of log Z from both sides, with their errors.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    center : mapping of str to Tensor
        The mean of the data, each layer (1, *layer shape).
    chains : mapping of str to Tensor
        States near equilibrium, from which the reverse annealing starts after as many Gibbs steps as it has itself.
    settings : mapping
        `chains` and `steps` of the annealing, and `seed`. Where the interval is wide, there are more chains.
    """
    for times in (1, _MORE_CHAINS):
        rng = RandomSource(settings["seed"], device=machine.like.device)
        n_chains, n_steps = times * settings["chains"], settings["steps"]
        found = log_partition_interval(machine, rng, n_chains=n_chains, n_steps=n_steps, init=chains, center=center)
        if found.width <= _WIDEST:
            break
    return {
        "chains": n_chains,
        "log_z": found.forward.log_z,  # what is usually published
        "standard_error": found.forward.standard_error,
        "effective_samples": found.forward.effective_samples,
        "reverse_log_z": found.reverse.log_z,
        "reverse_standard_error": found.reverse.standard_error,
        "consistent": found.consistent,
        "log_z_interval": [found.lower, found.upper],
        "log_z_bounds": list(found.bounds),
    }


def _tensors(machine: BoltzmannMachine, images: Array, labels: Array | None) -> dict[str, Tensor]:
    """Return some rows of data as tensors on the machine's device; bytes become 0 and 1."""
    scale = 255 if images.dtype == np.uint8 else 1
    arrays = layers_of(machine, images, labels)
    layers = {name: torch.as_tensor(array).to(machine.like) for name, array in arrays.items()}
    layers[IMAGE] /= scale
    return layers


def _scores(machine: BoltzmannMachine, images: Array, labels: Array | None) -> Tensor:
    """Return -F(x) of all samples, in blocks, in double precision."""
    found = []
    for first in range(0, len(images), _ROWS):
        rows = slice(first, first + _ROWS)
        some = _tensors(machine, images[rows], None if labels is None else labels[rows])
        found.append(log_likelihood(machine, some, 0.0).double().cpu())
    return torch.cat(found)


def _center(machine: BoltzmannMachine, images: Array, labels: Array | None) -> dict[str, Tensor]:
    """Return the mean of the data."""
    scale = 255.0 if images.dtype == np.uint8 else 1.0
    arrays = {name: array.mean(0, keepdims=True) for name, array in layers_of(machine, images, labels).items()}
    arrays[IMAGE] = arrays[IMAGE] / scale
    return {name: torch.as_tensor(array).to(machine.like) for name, array in arrays.items()}


def evaluate(settings: Settings, place: Place) -> Outcome:
    """Log-likelihood of test and training data by annealed importance sampling, in nats per sample.

    Settings: `model`, the name of the cell that trained it; `data`; `chains`, `steps` and `seed` of the annealing.
    A training run that diverged has no model, and no numbers here.
    """
    if not (place.store.folder / f"{settings['model']}.machine").is_dir():
        return Outcome({})
    device, data = resolve_device(place.device), parts(settings["data"], place.data_dir)
    model: BoltzmannMachine = place.store.machine_of(settings["model"], str(device))
    began = time.perf_counter()
    center = _center(model, data.train, data.train_labels)
    chains = stored_chains(place, settings["model"], model)
    if not chains:
        labels = None if data.train_labels is None else data.train_labels[: settings["chains"]]
        chains = _tensors(model, data.train[: settings["chains"]], labels)
    found = log_z(model, center, chains, settings)
    test = _scores(model, data.test, data.test_labels)
    numbers = {
        "test": float(test.mean()) - found["log_z"],
        "test_spread": float(test.std()) / math.sqrt(len(test)),  # standard error over test samples
        "train": float(_scores(model, data.train, data.train_labels).mean()) - found["log_z"],
        "reverse": float(test.mean()) - found["reverse_log_z"],
        "interval": [float(test.mean()) - end for end in reversed(found["log_z_interval"])],
        "bounds": [float(test.mean()) - end for end in reversed(found["log_z_bounds"])],
        **found,
        "seconds": time.perf_counter() - began,
    }
    return Outcome(numbers)


def stored_chains(place: Place, name: str, machine: BoltzmannMachine) -> dict[str, Tensor]:
    """Return the persistent chains of a training run, empty if it has none."""
    if not (place.store.folder / f"{name}.safetensors").is_file():
        return {}
    arrays = place.store.arrays_of(name)
    return {
        layer: arrays[f"chains.{layer}"].to(machine.like) for layer in machine.layers if f"chains.{layer}" in arrays
    }


# -- samples ----------------------------------------------------------------------------------------


def judge(settings: Settings, place: Place) -> Outcome:
    """Train the judge on real digits; its accuracy and confidence on test digits, gray and binarized."""
    data = gray_digits(settings["gray"], place.data_dir)
    network = Judge(epochs=settings["epochs"], random_state=settings["seed"], device=place.device)
    network.fit(data.train, data.train_labels)
    binary = parts(settings["data"], place.data_dir)
    numbers = {
        "gray": verdicts(network, data.test, data.test_labels),
        "binary": verdicts(network, binary.test, binary.test_labels),
        "parameters": network.n_parameters_,
        "training_seconds": network.fit_seconds_,
    }
    return Outcome(numbers, network.arrays())


def _stored_judge(settings: Settings, place: Place) -> Judge:
    return Judge.from_arrays(place.store.arrays_of(settings["judge"]), _SHAPE, str(resolve_device(place.device)))


def _images(values: Tensor) -> Array:
    """Return images of digits as bytes."""
    found: Array = (255 * values).round().to(torch.uint8).cpu().numpy().reshape(-1, *_SHAPE)
    return found


def _sampled(
    machine: BoltzmannMachine, start: Mapping[str, Tensor], steps: int, rng: RandomSource, *, known: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Run chains, with labels clamped if they are known; return final states, and images given the hidden units."""
    image = next(iter(machine.layers))  # of a single layer, whatever its name
    mask = None
    if known:
        mask = {name: torch.full_like(states, name == LABEL, dtype=torch.bool) for name, states in start.items()}
    state = gibbs(machine, start, steps, rng, mask=mask, check=False)
    return state.visible, machine.layers[image].mean(state.fields[image])


def _starts(
    machine: BoltzmannMachine, kind: str, n: int, chains: Mapping[str, Tensor], rng: RandomSource
) -> dict[str, Tensor]:
    """Return n initial states: ``"noise"``, or ``"chains"``, those of training, each as often as needed."""
    if kind == "noise":
        return independent_sample(machine, n, rng)
    if not chains:
        raise ValueError("the training run has no persistent chains to start from")
    rows = torch.arange(n) % len(next(iter(chains.values())))
    return {name: states[rows.to(states.device)] for name, states in chains.items()}


def samples(settings: Settings, place: Place) -> Outcome:
    """Samples of a machine: what the judge says about draws and means, and adversarial accuracy against the data.

    Settings: `model` and `judge`, names of cells; `data`; `start`, ``"noise"`` or ``"chains"``; `steps`, `n`, `seed`.
    """
    model: BoltzmannMachine = place.store.machine_of(settings["model"], str(resolve_device(place.device)))
    return sample_quality(model, stored_chains(place, settings["model"], model), settings, place)


def sample_quality(model: BoltzmannMachine, chains: Mapping[str, Tensor], settings: Settings, place: Place) -> Outcome:
    """Draw samples of any machine of digits, and judge them; the settings are those of :func:`samples`."""
    device, n = model.like.device, settings["n"]
    rng = RandomSource(settings["seed"], device=device)
    start = _starts(model, settings["start"], n, chains, rng)
    began, drawn, means = time.perf_counter(), [], []
    for first in range(0, n, _CHAINS):
        some = {name: states[first : first + _CHAINS] for name, states in start.items()}
        states, mean = _sampled(model, some, settings["steps"], rng)
        drawn.append(_images(next(iter(states.values()))))
        means.append(_images(mean))
    seconds = time.perf_counter() - began
    draws, gray = np.concatenate(drawn), np.concatenate(means)
    data, network = parts(settings["data"], place.data_dir), _stored_judge(settings, place)
    # As many of each: adversarial accuracy compares sets of equal size.
    m = min(n, len(data.test))
    seen = np.random.default_rng(settings["seed"]).choice(len(data.train), m, replace=False)
    numbers = {
        "draws": verdicts(network, draws),
        "means": verdicts(network, gray),
        "aats_test": adversarial_accuracy(data.test[:m] // 255, draws[:m] // 255, str(device)),
        "aats_train": adversarial_accuracy(data.train[seen] // 255, draws[:m] // 255, str(device)),
        # What a perfect model would have, up to chance: other real digits in the place of samples.
        "aats_real": adversarial_accuracy(data.test[:m] // 255, data.train[seen] // 255, str(device)),
        "aats_n": m,
        "seconds": seconds,
    }
    shown = {"draws": draws[:_SHOWN], "means": gray[:_SHOWN], "data": data.test[:_SHOWN]}
    return Outcome(numbers, {name: torch.from_numpy(np.ascontiguousarray(images)) for name, images in shown.items()})


def conditional(settings: Settings, place: Place) -> Outcome:
    """Samples of a machine with a layer of labels, given the label: how often the judge agrees.

    Settings: `model` and `judge`, names of cells; `each`, samples per class; `steps`, a list of numbers of Gibbs steps
    from noise; `seed`.
    """
    device, each = resolve_device(place.device), settings["each"]
    model: BoltzmannMachine = place.store.machine_of(settings["model"], str(device))
    network, rng = _stored_judge(settings, place), RandomSource(settings["seed"], device=device)
    labels = np.repeat(np.arange(_CLASSES), each)
    images: dict[int, dict[str, list[Array]]] = {steps: {"draws": [], "means": []} for steps in settings["steps"]}
    for digit in range(_CLASSES):
        states = independent_sample(model, each, rng)
        states[LABEL] = torch.eye(_CLASSES).to(model.like)[digit].expand(each, _CLASSES).contiguous()
        done = 0
        for steps in sorted(settings["steps"]):
            states, mean = _sampled(model, states, steps - done, rng, known=True)
            images[steps]["draws"].append(_images(states[IMAGE]))
            images[steps]["means"].append(_images(mean))
            done = steps
    numbers = {
        str(steps): {kind: verdicts(network, np.concatenate(each), labels) for kind, each in found.items()}
        for steps, found in images.items()
    }
    last = images[max(settings["steps"])]["means"]
    shown = np.stack([of_digit[: _SHOWN // _CLASSES] for of_digit in last])  # (digits, samples, 28, 28)
    return Outcome({"by_steps": numbers}, {"means": torch.from_numpy(shown)})


# -- real-valued data -------------------------------------------------------------------------------


def baselines(settings: Settings, place: Place) -> Outcome:
    """Held-out log-likelihood of Gaussian models: factor analysis, probabilistic PCA and full covariances.

    The number of components is chosen on every fifth training sample, which is not used for this; the chosen model
    then learns from all of them.
    """
    from sklearn.covariance import EmpiricalCovariance, LedoitWolf
    from sklearn.decomposition import PCA, FactorAnalysis

    data = parts(settings["data"], place.data_dir)
    train, test = (part.reshape(len(part), -1).astype(np.float64) for part in (data.train, data.test))
    rows = np.arange(len(train)) // settings["block"] % 5 == 4
    size = train.shape[1]
    numbers: dict[str, Any] = {}
    for name, kind in (("factor analysis", FactorAnalysis), ("PCA", PCA)):
        counts = [count for count in settings["components"] if count < size]
        scores = [kind(count, random_state=0).fit(train[~rows]).score(train[rows]) for count in counts]
        count = counts[int(np.argmax(scores))]
        model = kind(count, random_state=0).fit(train)
        numbers[name] = {"components": count, "parameters": size * (count + 2), **_both(model, train, test)}
    for name, kind in (("full covariance", EmpiricalCovariance), ("full covariance, shrunk", LedoitWolf)):
        found = kind().fit(train)
        numbers[name] = {"parameters": size * (size + 3) // 2, **_gaussian(found, train, test)}
    return Outcome({"models": numbers, "n_train": len(train), "n_test": len(test), "size": size})


def _both(model: Any, train: Array, test: Array) -> dict[str, float]:
    return {"test": float(model.score(test)), "train": float(model.score(train))}


def _gaussian(model: Any, train: Array, test: Array) -> dict[str, float]:
    """Return the mean log-density of a normal distribution with a fitted location and covariance."""
    size, (sign, log_det) = train.shape[1], np.linalg.slogdet(model.covariance_)
    if sign <= 0:
        return {"test": -math.inf, "train": -math.inf}
    constant = size * math.log(2 * math.pi) + log_det
    return {
        name: float(-0.5 * (constant + model.mahalanobis(part).mean()))
        for name, part in (("test", test), ("train", train))
    }
