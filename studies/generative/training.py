"""Training in chunks: machines by our trainer, and the package `rbms`, each resumed from its last checkpoint.

``python -m studies.generative.training FOLDER`` is what each of several processes under ``torchrun`` runs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import subprocess
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
from mvrbm import CP, MPO, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker
from mvrbm.couplings import Coupling
from mvrbm.devices import resolve_device
from mvrbm.errors import DivergenceError
from mvrbm.io.atomic import replace_file
from mvrbm.saving import read_tensors
from mvrbm.training import Callback, Recipe, Trainer
from mvrbm.units import Unit
from studies.cells import Outcome, Place, write_json
from studies.generative.data import parts

__all__ = ["IMAGE", "LABEL", "build", "layers_of", "train", "train_rbms", "train_shared"]

Array = NDArray[Any]
Settings = Mapping[str, Any]

#: Names of the visible layers.
IMAGE, LABEL = "image", "label"
_CLASSES = 10
_COUPLINGS: dict[str, type[Coupling]] = {"kronecker": Kronecker, "cp": CP, "mpo": MPO, "dense": Dense}
_SECONDS_PER_CHUNK = 60.0


# -- machines ---------------------------------------------------------------------------------------


def build(settings: Settings) -> BoltzmannMachine:
    """Return the machine of some settings.

    Settings: `coupling`, such as ``"kronecker:8"``, with the rank or bond after the colon; `visible` and `hidden`,
    lists of sizes; `unit`, ``"bernoulli"`` or ``"gaussian"`` (with learned variances); `labels`, whether the label is
    a second visible layer.
    """
    kind, _, rank = settings["coupling"].partition(":")
    shape = tuple(settings["visible"])
    image = Bernoulli(shape) if settings["unit"] == "bernoulli" else Gaussian(shape, learn_variance=True)
    visible: dict[str, Unit] = {IMAGE: image}
    couplings = {IMAGE: _COUPLINGS[kind](*([int(rank)] if rank else []))}
    if settings["labels"]:
        visible[LABEL], couplings[LABEL] = Categorical(_CLASSES), Dense()
    return BoltzmannMachine(visible, Bernoulli(tuple(settings["hidden"])), couplings)


def layers_of(machine: BoltzmannMachine, images: Array, labels: Array | None) -> dict[str, Array]:
    """Return the data of a machine's visible layers: images in the layer's shape, and labels if it has that layer."""
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
    """Return the largest memory in bytes that this process has had allocated on a GPU so far; 0 on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


# -- our trainer ------------------------------------------------------------------------------------


class _Clock(Callback):
    """Counts the seconds of training over all chunks, and ends a chunk after an epoch. Saved in checkpoints."""

    def __init__(self, chunk: float) -> None:
        self.chunk, self.seconds, self._began = chunk, 0.0, 0.0

    def on_train_begin(self, trainer: Trainer) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, trainer: Trainer) -> None:
        if time.perf_counter() - self._began > self.chunk:
            trainer.stop = True

    def on_train_end(self, trainer: Trainer) -> None:
        _synchronize(trainer.machine.like.device)
        self.seconds += time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds = state["seconds"]


def _checkpoints(settings: Settings, place: Place) -> Path:
    """Return the folder of the checkpoints of a training run, by its settings."""
    key = hashlib.sha1(json.dumps(dict(settings), sort_keys=True).encode()).hexdigest()[:16]
    return place.work / "checkpoints" / key


def fit(settings: Settings, data_dir: str | None, device: torch.device, folder: Path) -> tuple[Trainer, float]:
    """Train a machine for a number of updates, from the last checkpoint in a folder on if there is one.

    Returns
    -------
    (Trainer, float)
        The trainer, and the seconds of all chunks.
    """
    data, machine = parts(settings["data"], data_dir), build(settings).to(device)
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
    """Return the states of the persistent chains at the machine's own temperature; binary ones as bytes."""
    found = {}
    for name in trainer.machine.layers:
        if name in trainer.state.chains:
            chains = trainer.state.chains[name].cpu()
            chains = chains[-1] if trainer.recipe.negative.chain_axis == 1 else chains
            whole = bool((chains == chains.round()).all())
            found[f"chains.{name}"] = chains.to(torch.uint8) if whole else chains
    return found


def train(settings: Settings, place: Place) -> Outcome:
    """Train one machine. A training run that diverges has a number `diverged`, and no model."""
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
    """Train one machine with several processes on the CPU, started by ``torchrun``."""
    folder = _checkpoints(settings, place)
    folder.mkdir(parents=True, exist_ok=True)
    data_dir = place.data_dir or os.environ.get("MVRBM_DATA")
    write_json(folder / "settings.json", {**settings, "data_dir": data_dir and str(Path(data_dir).resolve())})
    launcher = ["torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(settings["processes"])]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, "-m", *launcher, "-m", "studies.generative.training", str(folder.resolve())]
    root, environment = Path(__file__).parents[2], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)
    if done.returncode:
        raise RuntimeError(f"the processes failed: {done.stderr.strip()[-300:]}")
    machine = mvrbm.load(folder / "machine", device="cpu")
    return Outcome(json.loads(done.stdout.strip().splitlines()[-1]), machine=machine)


def main(folder: Path) -> None:
    """Train in each process; the main one saves the machine and prints the numbers."""
    torch.set_num_threads(1)
    settings = json.loads((folder / "settings.json").read_text())
    trainer, seconds = fit(settings, settings["data_dir"], torch.device("cpu"), folder / "updates")
    if trainer.world.is_main:
        mvrbm.save(trainer.machine, folder / "machine")
        found = {"parameters": trainer.machine.n_parameters, "updates": trainer.update, "training_seconds": seconds}
        print(json.dumps(found))


# -- rbms -------------------------------------------------------------------------------------------


@torch.no_grad()
def train_rbms(settings: Settings, place: Place) -> Outcome:
    """Train a dense RBM by the body of the training loop of the package `rbms`, and return it as a machine of ours.

    Settings: `data`, `hidden`, `updates`, `batch_size`, `chains`, `gibbs_steps`, `learning_rate`, `seed`, `device`.
    A run that was stopped continues from its last chunk, with new random numbers.
    """
    device = _device(settings, place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses torch.jit, which is deprecated
        step = importlib.import_module("rbms.training.pcd").fit_batch_pcd
        model = importlib.import_module("rbms.bernoulli_bernoulli.classes").BBRBM
        dataset = importlib.import_module("rbms.dataset.dataset_class").RBMDataset
    images = parts(settings["data"], place.data_dir).train
    n, size, rows = len(images), settings["batch_size"], (images.reshape(len(images), -1) > 0).astype(np.float32)
    torch.manual_seed(settings["seed"])
    ones, names = np.ones(n, np.float32), np.arange(n).astype(str)
    kept = dataset(rows, np.zeros(n, np.int32), ones, names, "digits", True, str(device), torch.float32)
    params = model.init_parameters(settings["hidden"], kept, device, torch.float32, var_init=0.01)
    params.init_grad()
    chains = params.init_chains(settings["chains"])
    optimizer = torch.optim.SGD(params.parameters(), lr=settings["learning_rate"], maximize=True)
    path = _checkpoints(settings, place) / "rbms.safetensors"
    update, seconds = 0, 0.0
    if path.is_file():
        stored = read_tensors(path)
        update, seconds = int(stored["update"]), float(stored["seconds"])
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
    """Return the machine of the parameters of `rbms`, whose weights are of shape (visible, hidden)."""
    machine = BoltzmannMachine({IMAGE: Bernoulli(shape)}, Bernoulli(len(hidden_bias)), {IMAGE: Dense()})
    machine.links[IMAGE].get_parameter("weight").copy_(weights.T)
    machine.layers[IMAGE].bias.copy_(visible_bias.reshape(shape))
    machine.hidden.bias.copy_(hidden_bias)
    return machine


if __name__ == "__main__":
    main(Path(sys.argv[1]))
