"""How runs are computed: training, likelihoods, samples and their judge, and Gaussian models of real-valued data.

Training runs in chunks and resumes from its last checkpoint. If several processes share a training run, each of them is
started as ``python -m studies.generative.run FOLDER``.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

import mvrbm
from mvrbm import CP, MPO, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, RandomSource
from mvrbm.couplings import Coupling
from mvrbm.devices import resolve_device
from mvrbm.errors import DivergenceError
from mvrbm.io.atomic import replace_file
from mvrbm.likelihood import log_likelihood, log_partition_interval
from mvrbm.sampling import gibbs, independent_sample
from mvrbm.saving import read_tensors
from mvrbm.training import Callback, Recipe, Trainer, TrainingRun
from mvrbm.units import Unit
from studies.baselines.judge import Judge, adversarial_accuracy, verdicts
from studies.data import gray_digits, parts
from studies.runner import run_module
from studies.runs import Outcome, Place, write_json

__all__ = [
    "IMAGE",
    "LABEL",
    "baselines",
    "build",
    "conditional",
    "evaluate",
    "judge",
    "layers_of",
    "sample_quality",
    "samples",
    "train",
    "train_rbms",
    "train_shared",
]


Array = NDArray[Any]
Settings = Mapping[str, Any]

#: Names of the visible layers.
IMAGE = "image"
LABEL = "label"
_CLASSES = 10
_COUPLINGS: dict[str, type[Coupling]] = {"kronecker": Kronecker, "cp": CP, "mpo": MPO, "dense": Dense}
_SECONDS_PER_CHUNK = 60.0


# -- machines ---------------------------------------------------------------------------------------


def build(settings: Settings) -> BoltzmannMachine:
    """Build a machine from settings.

    The settings are `coupling`, such as ``"kronecker:8"``, with the rank or bond after the colon; `visible` and
    `hidden`, lists of sizes; `unit`, ``"bernoulli"`` or ``"gaussian"`` (with learned variances); and `labels`, whether
    the label is a second visible layer.
    """
    kind, _, rank = settings["coupling"].partition(":")
    shape = tuple(settings["visible"])
    image = Bernoulli(shape) if settings["unit"] == "bernoulli" else Gaussian(shape, learn_variance=True)
    visible: dict[str, Unit] = {IMAGE: image}
    couplings = {IMAGE: _COUPLINGS[kind](*([int(rank)] if rank else []))}
    if settings["labels"]:
        visible[LABEL] = Categorical(_CLASSES)
        couplings[LABEL] = Dense()
    return BoltzmannMachine(visible, Bernoulli(tuple(settings["hidden"])), couplings)


def layers_of(machine: BoltzmannMachine, images: Array, labels: Array | None) -> dict[str, Array]:
    """Return the data of a machine's visible layers: images in the layer's shape, and one-hot labels if it has them."""
    layers = {IMAGE: images.reshape(len(images), *machine.layers[IMAGE].shape)}
    if LABEL in machine.layers:
        if labels is None:
            raise ValueError("the machine has a layer of labels, but the data has no labels")
        layers[LABEL] = np.eye(_CLASSES, dtype=np.float32)[labels]
    return layers


def _device(settings: Settings, place: Place) -> torch.device:
    return resolve_device(settings["device"] or place.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process on a GPU in bytes, or 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


# -- our trainer ------------------------------------------------------------------------------------


class _Clock(Callback):
    """Count the seconds of training over all chunks, and end a chunk after an epoch. Checkpoints save the count."""

    def __init__(self, chunk: float) -> None:
        self.chunk = chunk
        self.seconds = 0.0
        self._began = 0.0

    def on_train_begin(self, trainer: TrainingRun) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, trainer: TrainingRun) -> None:
        if time.perf_counter() - self._began > self.chunk:
            trainer.stop = True

    def on_train_end(self, trainer: TrainingRun) -> None:
        _synchronize(trainer.machine.like.device)
        self.seconds += time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds = state["seconds"]


def _checkpoints(settings: Settings, place: Place) -> Path:
    """Return the folder for the checkpoints of a training run. Its name is a hash of the settings."""
    key = hashlib.sha1(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]
    return place.work / "checkpoints" / key


def fit(settings: Settings, data_dir: str | None, device: torch.device, folder: Path) -> tuple[Trainer, float]:
    """Train a machine, resuming from the last checkpoint in a folder if there is one.

    Returns
    -------
    (Trainer, float)
        The trainer, and the seconds of all chunks.
    """
    data = parts(settings["data"], data_dir)
    machine = build(settings).to(device)
    recipe = Recipe.from_config({**Recipe().config(), **settings["recipe"]})
    arrays = layers_of(machine, data.train, data.train_labels)
    n_epochs = math.ceil(settings["updates"] / math.ceil(len(data.train) / recipe.batch_size))
    recipe = replace(recipe, n_epochs=n_epochs)
    clock = _Clock(settings.get("chunk", _SECONDS_PER_CHUNK))
    trainer = Trainer(machine, recipe, seed=settings["seed"], callbacks=[clock])
    resumed = trainer.resume(folder)
    while not resumed or trainer.epoch < n_epochs:
        trainer.fit(arrays, n_epochs, initialize=not resumed)
        resumed = True
        if trainer.update:
            trainer.save(folder, keep=1)
        trainer.raise_if_interrupted()
    return trainer, clock.seconds


def _chains(trainer: Trainer) -> dict[str, Tensor]:
    """Return the states of the persistent chains at temperature 1, binary states as bytes."""
    found = {}
    for name in trainer.machine.layers:
        if name in trainer.state.chains:
            chains = trainer.state.chains[name].cpu()
            chains = chains[-1] if trainer.recipe.negative.chain_axis == 1 else chains
            whole = bool((chains == chains.round()).all())
            found[f"chains.{name}"] = chains.to(torch.uint8) if whole else chains
    return found


def train(settings: Settings, place: Place) -> Outcome:
    """Train one machine. If training diverges, the outcome has a number `diverged` and no model."""
    device = _device(settings, place)
    try:
        trainer, seconds = fit(settings, place.data_dir, device, _checkpoints(settings, place))
    except DivergenceError as error:
        return Outcome({"diverged": str(error), "parameters": build(settings).n_parameters})
    numbers = {
        "parameters": trainer.machine.n_parameters,
        "updates": trainer.update,
        "epochs": trainer.epoch,
        "learning_rate": trainer.recipe.learning_rate,
        "training_seconds": seconds,
        "cores": torch.get_num_threads(),
        "peak_device_memory": peak_memory(device),
    }
    return Outcome(numbers, _chains(trainer), trainer.machine.cpu())


# -- several processes ------------------------------------------------------------------------------


def train_shared(settings: Settings, place: Place) -> Outcome:
    """Train one machine on the CPU with several processes."""
    folder = _checkpoints(settings, place)
    folder.mkdir(parents=True, exist_ok=True)
    data_dir = place.data_dir or os.environ.get("MVRBM_DATA")
    write_json(folder / "settings.json", {**settings, "data_dir": data_dir and str(Path(data_dir).resolve())})
    numbers = run_module("studies.generative.run", str(folder.resolve()), settings["processes"])
    machine = mvrbm.load(folder / "machine", device="cpu")
    return Outcome(numbers, machine=machine)


def main(folder: Path) -> None:
    """Train in one of several processes. The main process saves the machine and prints the numbers."""
    torch.set_num_threads(1)
    settings = json.loads((folder / "settings.json").read_text())
    trainer, seconds = fit(settings, settings["data_dir"], torch.device("cpu"), folder / "updates")
    if trainer.world.is_main:
        mvrbm.save(trainer.machine, folder / "machine", overwrite=True)
        found = {"parameters": trainer.machine.n_parameters, "updates": trainer.update, "training_seconds": seconds}
        print(json.dumps(found))


# -- rbms -------------------------------------------------------------------------------------------


@torch.no_grad()
def train_rbms(settings: Settings, place: Place) -> Outcome:
    """Train a dense RBM with the body of the training loop of the package `rbms`, and convert it to a machine.

    The settings are `data`, `hidden`, `updates`, `batch_size`, `chains`, `gibbs_steps`, `learning_rate`, `seed` and
    `device`. A run that was stopped resumes from its last chunk, with new random numbers.
    """
    device = _device(settings, place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses torch.jit, which is deprecated
        step = importlib.import_module("rbms.training.pcd").fit_batch_pcd
        model = importlib.import_module("rbms.bernoulli_bernoulli.classes").BBRBM
        dataset = importlib.import_module("rbms.dataset.dataset_class").RBMDataset
    images = parts(settings["data"], place.data_dir).train
    n = len(images)
    size = settings["batch_size"]
    rows = (images.reshape(len(images), -1) > 0).astype(np.float32)
    torch.manual_seed(settings["seed"])
    ones = np.ones(n, np.float32)
    names = np.arange(n).astype(str)
    kept = dataset(rows, np.zeros(n, np.int32), ones, names, "digits", True, str(device), torch.float32)
    params = model.init_parameters(settings["hidden"], kept, device, torch.float32, var_init=0.01)
    params.init_grad()
    chains = params.init_chains(settings["chains"])
    optimizer = torch.optim.SGD(params.parameters(), lr=settings["learning_rate"], maximize=True)
    path = _checkpoints(settings, place) / "rbms.safetensors"
    update, seconds = 0, 0.0
    if path.is_file():
        stored = read_tensors(path)
        update = int(stored["update"])
        seconds = float(stored["seconds"])
        torch.manual_seed(settings["seed"] + update)
        for number, parameter in enumerate(params.parameters()):
            parameter.copy_(stored[f"parameter.{number}"])
        chains = {name: chain.to(device) for name, chain in stored.items() if name in chains}
    while update < settings["updates"]:
        began = time.perf_counter()
        while update < settings["updates"] and time.perf_counter() - began < _SECONDS_PER_CHUNK:
            chosen = torch.randint(n, (size,), device=kept.data.device)
            optimizer.zero_grad(set_to_none=False)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                batch = kept.data[chosen], kept.weights[chosen]
                chains, _ = step(batch, chains, params, gibbs_steps=settings["gibbs_steps"], beta=1.0)
            optimizer.step()
            update += 1
        _synchronize(device)
        seconds += time.perf_counter() - began
        counters = {"update": torch.tensor(update), "seconds": torch.tensor(seconds)}
        values = {f"parameter.{number}": value.cpu().clone() for number, value in enumerate(params.parameters())}
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as file:
            states = {name: chain.cpu().contiguous() for name, chain in chains.items() if isinstance(chain, Tensor)}
            file.write(tensors_to_bytes({**counters, **values, **states}))
    machine = from_rbms(params.weight_matrix, params.vbias, params.hbias, images.shape[1:])
    numbers = {"parameters": machine.n_parameters, "updates": update, "training_seconds": seconds}
    states = chains["visible"].reshape(-1, *images.shape[1:]).cpu().to(torch.uint8)
    return Outcome({**numbers, "cores": torch.get_num_threads()}, {f"chains.{IMAGE}": states}, machine)


@torch.no_grad()
def from_rbms(weights: Tensor, visible_bias: Tensor, hidden_bias: Tensor, shape: tuple[int, ...]) -> BoltzmannMachine:
    """Convert parameters of `rbms`, whose weights have shape (visible, hidden), to a machine."""
    machine = BoltzmannMachine({IMAGE: Bernoulli(shape)}, Bernoulli(len(hidden_bias)), {IMAGE: Dense()})
    machine.links[IMAGE].get_parameter("weight").copy_(weights.T)
    machine.layers[IMAGE].bias.copy_(visible_bias.reshape(shape))
    machine.hidden.bias.copy_(hidden_bias)
    return machine


# Samples, and chains, that are computed at once, to limit memory.
_ROWS = 2000
_CHAINS = 2000
# If the interval of log Z is wider than this, in nats, it is estimated again with this many times more chains.
_WIDEST = 1.0
_MORE_CHAINS = 4
# Samples to store for figures.
_SHOWN = 100
# Shape of digits, whatever the shape of a machine's layer.
_SHAPE = (28, 28)


# -- likelihood -------------------------------------------------------------------------------------


def log_z(
    machine: BoltzmannMachine, center: Mapping[str, Tensor], chains: Mapping[str, Tensor], settings: Settings
) -> dict[str, Any]:
    """Estimate log Z by forward and reverse annealing.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    center : mapping of str to Tensor
        The mean of the data, each layer (1, *layer shape).
    chains : mapping of str to Tensor
        States near equilibrium. Reverse annealing starts from them, after as many Gibbs steps as it has itself.
    settings : mapping
        `chains`, `steps` and `seed` of the annealing. If the interval is wide, more chains are used.
    """
    for times in (1, _MORE_CHAINS):
        rng = RandomSource(settings["seed"])
        n_chains = times * settings["chains"]
        n_steps = settings["steps"]
        found = log_partition_interval(machine, rng, n_chains=n_chains, n_steps=n_steps, init=chains, center=center)
        if found.width <= _WIDEST:
            break
    return {
        "chains": n_chains,
        "log_z": found.forward.log_z,  # the estimate that is usually published
        "standard_error": found.forward.standard_error,
        "effective_samples": found.forward.effective_samples,
        "reverse_log_z": found.reverse.log_z,
        "reverse_standard_error": found.reverse.standard_error,
        "consistent": found.consistent,
        "log_z_interval": [found.lower, found.upper],
        "log_z_bounds": list(found.bounds),
    }


def _tensors(machine: BoltzmannMachine, images: Array, labels: Array | None) -> dict[str, Tensor]:
    """Convert samples to tensors on the machine's device, bytes to 0 and 1."""
    scale = 255 if images.dtype == np.uint8 else 1
    arrays = layers_of(machine, images, labels)
    layers = {name: torch.as_tensor(array).to(machine.like) for name, array in arrays.items()}
    layers[IMAGE] /= scale
    return layers


def _scores(machine: BoltzmannMachine, images: Array, labels: Array | None) -> Tensor:
    """Return the unnormalized log-likelihoods -F(x) of all samples in double precision."""
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
    """Estimate the log-likelihood of test and training data by annealed importance sampling, in nats per sample.

    The settings are `model`, the name of the training run; `data`; and `chains`, `steps` and `seed` of the annealing.
    If the training run diverged, the outcome has no numbers.
    """
    if not (place.store.folder / f"{settings['model']}.machine").is_dir():
        return Outcome({})
    device = resolve_device(place.device)
    data = parts(settings["data"], place.data_dir)
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
        "test_spread": float(test.std()) / math.sqrt(len(test)),  # standard error of the mean over test samples
        "train": float(_scores(model, data.train, data.train_labels).mean()) - found["log_z"],
        "reverse": float(test.mean()) - found["reverse_log_z"],
        "interval": [float(test.mean()) - end for end in reversed(found["log_z_interval"])],
        "bounds": [float(test.mean()) - end for end in reversed(found["log_z_bounds"])],
        **found,
        "seconds": time.perf_counter() - began,
    }
    return Outcome(numbers)


def stored_chains(place: Place, name: str, machine: BoltzmannMachine) -> dict[str, Tensor]:
    """Return the persistent chains of a training run, or an empty dict if it has none."""
    if not (place.store.folder / f"{name}.safetensors").is_file():
        return {}
    arrays = place.store.arrays_of(name)
    return {
        layer: arrays[f"chains.{layer}"].to(machine.like) for layer in machine.layers if f"chains.{layer}" in arrays
    }


# -- samples ----------------------------------------------------------------------------------------


def judge(settings: Settings, place: Place) -> Outcome:
    """Train the judge, and measure its accuracy and confidence on gray and on binarized test digits."""
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
    """Convert digits from 0 and 1 to bytes."""
    found: Array = (255 * values).round().to(torch.uint8).cpu().numpy().reshape(-1, *_SHAPE)
    return found


def _sampled(
    machine: BoltzmannMachine, start: Mapping[str, Tensor], steps: int, rng: RandomSource, *, known: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Run chains, with labels clamped if `known`; return their final states, and the means given the hidden units."""
    image = next(iter(machine.layers))  # a machine with one layer may have another name for it
    mask = None
    if known:
        mask = {name: torch.full_like(states, name == LABEL, dtype=torch.bool) for name, states in start.items()}
    state = gibbs(machine, start, steps, rng, mask=mask, check=False)
    return state.visible, machine.layers[image].mean(state.fields[image])


def _starts(
    machine: BoltzmannMachine, kind: str, n: int, chains: Mapping[str, Tensor], rng: RandomSource
) -> dict[str, Tensor]:
    """Return n initial states: ``"noise"``, or the ``"chains"`` of training, repeated as often as needed."""
    if kind == "noise":
        return independent_sample(machine, n, rng)
    if not chains:
        raise ValueError("the training run has no persistent chains to start from")
    rows = torch.arange(n) % len(next(iter(chains.values())))
    return {name: states[rows.to(states.device)] for name, states in chains.items()}


def samples(settings: Settings, place: Place) -> Outcome:
    """Draw samples of a machine, judge them, and compare them with the data by adversarial accuracy.

    The settings are `model` and `judge`, names of runs; `data`; `start`, ``"noise"`` or ``"chains"``; `steps`, `n` and
    `seed`.
    """
    model: BoltzmannMachine = place.store.machine_of(settings["model"], str(resolve_device(place.device)))
    return sample_quality(model, stored_chains(place, settings["model"], model), settings, place)


def sample_quality(model: BoltzmannMachine, chains: Mapping[str, Tensor], settings: Settings, place: Place) -> Outcome:
    """Draw samples of any machine of digits, and judge them. The settings are those of :func:`samples`."""
    device = model.like.device
    n = settings["n"]
    rng = RandomSource(settings["seed"])
    start = _starts(model, settings["start"], n, chains, rng)
    began = time.perf_counter()
    drawn = []
    means = []
    for first in range(0, n, _CHAINS):
        some = {name: states[first : first + _CHAINS] for name, states in start.items()}
        states, mean = _sampled(model, some, settings["steps"], rng)
        drawn.append(_images(next(iter(states.values()))))
        means.append(_images(mean))
    seconds = time.perf_counter() - began
    draws, gray = np.concatenate(drawn), np.concatenate(means)
    data = parts(settings["data"], place.data_dir)
    network = _stored_judge(settings, place)
    # Adversarial accuracy compares sets of equal size.
    m = min(n, len(data.test))
    seen = np.random.default_rng(settings["seed"]).choice(len(data.train), m, replace=False)
    numbers = {
        "draws": verdicts(network, draws),
        "means": verdicts(network, gray),
        "aats_test": adversarial_accuracy(data.test[:m] // 255, draws[:m] // 255, str(device)),
        "aats_train": adversarial_accuracy(data.train[seen] // 255, draws[:m] // 255, str(device)),
        # Other real digits in the place of samples: a perfect model would have this value, up to chance.
        "aats_real": adversarial_accuracy(data.test[:m] // 255, data.train[seen] // 255, str(device)),
        "aats_n": m,
        "seconds": seconds,
    }
    shown = {"draws": draws[:_SHOWN], "means": gray[:_SHOWN], "data": data.test[:_SHOWN]}
    return Outcome(numbers, {name: torch.from_numpy(np.ascontiguousarray(images)) for name, images in shown.items()})


def conditional(settings: Settings, place: Place) -> Outcome:
    """Draw samples given the label, and measure how often the judge agrees with the label.

    The settings are `model` and `judge`, names of runs; `each`, the number of samples per class; `steps`, a list of
    numbers of Gibbs steps from noise; and `seed`.
    """
    device = resolve_device(place.device)
    each = settings["each"]
    model: BoltzmannMachine = place.store.machine_of(settings["model"], str(device))
    network = _stored_judge(settings, place)
    rng = RandomSource(settings["seed"])
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
    """Measure the held-out log-likelihood of factor analysis, probabilistic PCA and full-covariance Gaussians.

    The number of components is chosen on every fifth block of training samples, with models fitted to the others. The
    chosen model is then fitted to all training samples.
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
    size = train.shape[1]
    (sign, log_det) = np.linalg.slogdet(model.covariance_)
    if sign <= 0:
        return {"test": -math.inf, "train": -math.inf}
    constant = size * math.log(2 * math.pi) + log_det
    return {
        name: float(-0.5 * (constant + model.mahalanobis(part).mean()))
        for name, part in (("test", test), ("train", train))
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
