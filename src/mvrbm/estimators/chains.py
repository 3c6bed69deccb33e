"""Where the chains of `sample` start: persistent chains of training, which are kept and saved with a model; labels.

Persistent chains have followed the model through its training, so that they have mixed: chains that start from noise
can stay in modes of little probability for long.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

Chains = dict[str, Tensor]

#: Largest number of chains that are kept: binary chains of 28x28 pixels then take 10 kB.
MOST_CHAINS = 100
_STARTS = ("chains", "noise")
# Draws from which the probabilities of labels are estimated, and their Gibbs steps.
_MATCHED, _MATCHING_STEPS = 500, 200


def kept_chains(trainer: Trainer) -> Chains:
    """Return up to 100 persistent chains of a trainer, by layer, each (n, *layer shape); none for other chains."""
    chains = {name: trainer.state.chains[name] for name in trainer.machine.layers if name in trainer.state.chains}
    if trainer.recipe.negative.chain_axis:  # the coldest are last
        chains = {name: array[-1] for name, array in chains.items()}
    return {name: array[:MOST_CHAINS].detach().cpu() for name, array in chains.items()}


def write_chains(chains: Chains, folder: Path) -> None:
    """Write chains into the folder of a model, binary layers with one bit per entry. Without chains, write nothing."""
    if chains:
        write_tensors({name: _packed(array) for name, array in chains.items()}, folder / CHAINS)


def read_chains(folder: Path, machine: BoltzmannMachine) -> Chains:
    """Read the chains of a machine from a folder; none if they were not saved."""
    path = folder / CHAINS
    if not path.is_file():
        return {}
    stored = read_tensors(path)
    if set(stored) != set(machine.layers):
        raise StorageError(f"{path} has chains of {sorted(stored)}, but the layers are {sorted(machine.layers)}")
    try:
        chains = {name: _unpacked(array, machine.layers[name].shape) for name, array in stored.items()}
        return dict(machine.as_layers({name: array.to(machine.like) for name, array in chains.items()}))
    except (ValueError, RuntimeError, IndexError) as error:
        raise StorageError(f"{path} does not fit the model: {error}") from error


def _packed(array: Tensor) -> Tensor:
    if not bool(((array == 0) | (array == 1)).all()):
        return array
    return torch.from_numpy(np.packbits(array.flatten(1).numpy().astype(bool), axis=1))


def _unpacked(stored: Tensor, shape: tuple[int, ...]) -> Tensor:
    if stored.dtype != torch.uint8:
        return stored
    size = int(np.prod(shape))
    bits = np.unpackbits(stored.numpy(), axis=1)
    if not 0 <= bits.shape[1] - size < 8:
        raise ValueError(f"{bits.shape[1]} bits per chain do not fit a layer of shape {shape}")
    return torch.from_numpy(bits[:, :size].reshape(-1, *shape))


def start_of(machine: BoltzmannMachine, n: int, init: str | None, chains: Chains, rng: RandomSource) -> Chains:
    """Return n states to start from: the chains, each as often as needed, or noise.

    `init` is ``"chains"``, ``"noise"``, or None: chains if there are any, otherwise noise.
    """
    if init is not None:
        choice(init, "init", _STARTS)
    if init == "chains" and not chains:
        raise ValueError("the model has no chains to start from: it was not trained with persistent chains")
    noise = independent_sample(machine, n, rng)
    if init == "noise" or not chains:
        return noise
    rows = torch.arange(n) % len(next(iter(chains.values())))
    return {name: chains[name][rows].to(array) for name, array in noise.items()}


def start_with_labels(
    machine: BoltzmannMachine, labels: Mapping[str, Tensor], init: str | None, chains: Chains, rng: RandomSource
) -> tuple[Chains, Chains]:
    """Return states to start from, with labels, and masks that clamp the labels.

    Labels are numbers of categories (n,), by layer. A state starts at one of the chains that have its labels: chains of
    a joint distribution with some label are chains of the conditional one. If there are none, it starts at any chain.
    """
    n = len(next(iter(labels.values())))
    start = start_of(machine, n, init, chains, rng)
    if init != "noise" and chains:
        own = torch.stack([chains[name].argmax(-1) for name in labels], 1)  # (chains, layers)
        wanted = torch.stack([codes.cpu() for codes in labels.values()], 1)
        for row in wanted.unique(dim=0):
            these = torch.nonzero((wanted == row).all(1))[:, 0]
            found = torch.nonzero((own == row).all(1))[:, 0]
            if len(found):
                chosen = found[torch.arange(len(these)) % len(found)]
                for name, array in start.items():
                    array[these.to(array.device)] = chains[name][chosen].to(array)
    known = {}
    for name, codes in labels.items():
        size = machine.layers[name].shape[-1]
        start[name] = torch.nn.functional.one_hot(codes.to(start[name].device), size).to(start[name])
        known[name] = torch.ones_like(start[name], dtype=torch.bool)
    return start, known


def match_labels(trainer: Trainer, label: str, shares: Tensor, rng: RandomSource) -> None:
    """Set the bias of a trained label layer such that the model draws labels as often as the data has them: (classes,).

    Labels of persistent chains change rarely, so that training hardly learns how often the model draws each of them.
    """
    chains, machine = kept_chains(trainer), trainer.machine
    if not chains or not trainer.update or trainer.world.size > 1:  # several processes would set several biases
        return
    ends = (torch.arange(_MATCHED) + 0.5) / _MATCHED
    codes = torch.searchsorted(shares.cpu().double().cumsum(0), ends.double()).clamp(max=len(shares) - 1)
    start, known = start_with_labels(machine, {label: codes}, None, chains, rng)
    with sensible_threads(machine, _MATCHED):
        drawn = sample(machine, _MATCHED, _MATCHING_STEPS, rng, init=start, mask=known).visible
    match_label_shares(machine, drawn, label, shares.to(machine.like))


def label_codes(labels: Any, classes: Any, n: int | None) -> Tensor:
    """Return the numbers of labels among classes: (n,), from one label for all or from one label per sample.

    A text stands for the class that is written so, whatever its type: ``"7"`` for 7.
    """
    given = np.asarray(labels)
    known = list(np.asarray(classes).tolist())
    by_value = {str(value): number for number, value in enumerate(known)} | {v: k for k, v in enumerate(known)}
    unknown = [value for value in given.reshape(-1).tolist() if value not in by_value]
    if unknown:
        raise ValueError(f"label must be one of {known}, got {unknown[0]!r}")
    codes = torch.tensor([by_value[value] for value in given.reshape(-1).tolist()])
    if given.ndim == 0:
        return codes.expand(1 if n is None else n)
    if given.ndim != 1 or n not in (None, len(given)):
        raise ValueError(f"label must be one label, or n = {n} labels, got an array of shape {given.shape}")
    return codes
