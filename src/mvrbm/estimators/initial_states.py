"""Initial states for `sample`: persistent chains from training, random states and fixed labels.

Persistent chains are updated throughout training, so they are well mixed. Chains initialized with noise can stay in
improbable modes for a long time. A model keeps up to 100 persistent chains, which are saved with the model.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mvrbm.devices import sensible_threads
from mvrbm.errors import StorageError
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import independent_sample, match_label_shares, sample
from mvrbm.saving import CHAINS, read_tensors, write_tensors
from mvrbm.training.trainer import Trainer
from mvrbm.validation import choice

#: States of the chains, keyed by layer name. Each tensor has shape (n, *layer shape).
Chains = dict[str, Tensor]

#: Maximum number of chains that a model keeps. 100 binary chains of 28x28 pixels take 10 kB.
MOST_CHAINS = 100
# Valid values for the parameter `init` of `sample`.
_INITS = ("chains", "noise")
# Number of samples that `match_labels` draws to estimate label probabilities.
_MATCHING_SAMPLES = 500
# Number of Gibbs steps per sample in `match_labels`.
_MATCHING_STEPS = 200


def kept_chains(trainer: Trainer) -> Chains:
    """Return up to 100 persistent chains of a trainer, or an empty dict if the trainer has no persistent chains."""
    chains = {name: trainer.state.chains[name] for name in trainer.machine.layers if name in trainer.state.chains}
    if trainer.recipe.negative.chain_axis:
        # The first axis indexes the temperatures. The last index corresponds to the untempered model.
        chains = {name: array[-1] for name, array in chains.items()}
    return {name: array[:MOST_CHAINS].detach().cpu() for name, array in chains.items()}


def write_chains(chains: Chains, folder: Path) -> None:
    """Save chains to a model folder, using one bit per binary entry. If there are no chains, write nothing."""
    if chains:
        write_tensors({name: _packed(array) for name, array in chains.items()}, folder / CHAINS)


def read_chains(folder: Path, machine: BoltzmannMachine) -> Chains:
    """Load a machine's chains from a model folder. Return an empty dict if the folder contains no chains."""
    path = folder / CHAINS
    if not path.is_file():
        return {}
    stored = read_tensors(path)
    if set(stored) != set(machine.layers):
        raise StorageError(
            f"{path} contains chains for layers {sorted(stored)}, but the model has layers {sorted(machine.layers)}"
        )
    try:
        chains = {name: _unpacked(array, machine.layers[name].shape) for name, array in stored.items()}
        return dict(machine.as_layers({name: array.to(machine.like) for name, array in chains.items()}))
    except (ValueError, RuntimeError, IndexError) as error:
        raise StorageError(f"{path} does not match the model: {error}") from error


def _packed(array: Tensor) -> Tensor:
    """Pack a binary tensor into bits. Return tensors with other values unchanged."""
    if not bool(((array == 0) | (array == 1)).all()):
        return array
    return torch.from_numpy(np.packbits(array.flatten(1).numpy().astype(bool), axis=1))


def _unpacked(stored: Tensor, shape: tuple[int, ...]) -> Tensor:
    if stored.dtype != torch.uint8:
        return stored
    size = int(np.prod(shape))
    bits = np.unpackbits(stored.numpy(), axis=1)
    if not 0 <= bits.shape[1] - size < 8:
        raise ValueError(f"{bits.shape[1]} bits per chain do not match a layer of shape {shape}")
    return torch.from_numpy(bits[:, :size].reshape(-1, *shape))


def initial_states(machine: BoltzmannMachine, n: int, init: str | None, chains: Chains, rng: RandomSource) -> Chains:
    """Return `n` initial states: either the given chains, repeated as needed, or random states.

    `init` is ``"chains"``, ``"noise"`` or None. None uses the chains if there are any and random states otherwise.
    """
    if init is not None:
        choice(init, "init", _INITS)
    if init == "chains" and not chains:
        raise ValueError("the model has no chains to start from because it was not trained with persistent chains")
    noise = independent_sample(machine, n, rng)
    if init == "noise" or not chains:
        return noise
    rows = torch.arange(n) % len(next(iter(chains.values())))
    return {name: chains[name][rows].to(array) for name, array in noise.items()}


def initial_states_with_labels(
    machine: BoltzmannMachine, labels: Mapping[str, Tensor], init: str | None, chains: Chains, rng: RandomSource
) -> tuple[Chains, Chains]:
    """Return initial states with the given labels, and masks that keep the labels fixed.

    `labels` maps each label layer to class indices of shape (n,). Each state is initialized from a chain with the same
    labels if there is one, because such a chain is already a sample from the conditional distribution given the labels.
    Otherwise, the state is initialized as in :func:`initial_states`.
    """
    n = len(next(iter(labels.values())))
    start = initial_states(machine, n, init, chains, rng)
    if init != "noise" and chains:
        _take_chains_with_labels(start, labels, chains)
    known = {}
    for name, codes in labels.items():
        size = machine.layers[name].shape[-1]
        start[name] = torch.nn.functional.one_hot(codes.to(start[name].device), size).to(start[name])
        known[name] = torch.ones_like(start[name], dtype=torch.bool)
    return start, known


def _take_chains_with_labels(start: Chains, labels: Mapping[str, Tensor], chains: Chains) -> None:
    """Replace states with chains that have the same labels, where such chains exist. Modifies `start` in place."""
    labels_of_chains = torch.stack([chains[name].argmax(-1) for name in labels], 1)  # (chains, layers)
    wanted = torch.stack([codes.cpu() for codes in labels.values()], 1)  # (n, layers)
    for combination in wanted.unique(dim=0):
        states = torch.nonzero((wanted == combination).all(1))[:, 0]
        found = torch.nonzero((labels_of_chains == combination).all(1))[:, 0]
        if len(found):
            chosen = found[torch.arange(len(states)) % len(found)]
            for name, array in start.items():
                array[states.to(array.device)] = chains[name][chosen].to(array)


def match_labels(trainer: Trainer, label: str, shares: Tensor, rng: RandomSource) -> None:
    """Adjust the bias of a trained label layer so that class frequencies in generated samples match those in the data.

    `shares` has shape (n_classes,) and contains the class frequencies in the data. The labels of persistent chains
    rarely change, so training alone does not learn these frequencies well.
    """
    chains = kept_chains(trainer)
    machine = trainer.machine
    # With several processes, each process would set a different bias.
    if not chains or not trainer.update or trainer.world.size > 1:
        return
    quantiles = (torch.arange(_MATCHING_SAMPLES) + 0.5) / _MATCHING_SAMPLES
    codes = torch.searchsorted(shares.cpu().double().cumsum(0), quantiles.double()).clamp(max=len(shares) - 1)
    start, known = initial_states_with_labels(machine, {label: codes}, None, chains, rng)
    with sensible_threads(machine, _MATCHING_SAMPLES):
        drawn = sample(machine, _MATCHING_SAMPLES, _MATCHING_STEPS, rng, init=start, mask=known).visible
    match_label_shares(machine, drawn, label, shares.to(machine.like))
