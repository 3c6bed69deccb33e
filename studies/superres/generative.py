"""A super-resolver judged as a generative model of patches: its free energies and its Gibbs chains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import sample
from mvrbm.vision.stages import HIGH

__all__ = ["generative_report"]


@torch.no_grad()
def generative_report(
    machine: BoltzmannMachine,
    seen: Mapping[str, Tensor],
    unseen: Mapping[str, Tensor],
    *,
    steps: int = 200,
    n_chains: int = 500,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure a machine as a generative model of patches.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine of a super-resolver.
    seen, unseen : mapping of str to Tensor (n, p, p)
        Training patches, and patches of other images, by layer.
    steps, n_chains : int
        Number of Gibbs steps and of chains. The chains start at unseen patches.
    seed : int
        Random seed of the chains.

    Returns
    -------
    dict
        `free_energy_gap`: mean free energy of unseen patches minus that of seen ones, in nats. `mismatch_gap`: mean
        growth of the free energy when X is taken from another patch. `matched`: the share of patches for which it
        grows (0.5 by chance). `inferred_correlation`: correlation of X with its mean after one mean-field pass from
        zero. `layers`: by layer, the mean, the standard deviation and the correlation of horizontal neighbors, of
        unseen patches and of the chains.
    """
    data, others = machine.as_layers(unseen), machine.as_layers(seen)
    energies = machine.free_energy(data)
    rng = RandomSource(seed, device=machine.like.device)
    order = rng.permutation(len(energies)).to(machine.like.device)
    mismatched = machine.free_energy({**data, HIGH: data[HIGH][order.roll(1)[order.argsort()]]})
    begun = {name: layer[:n_chains] for name, layer in data.items()}
    chains = sample(machine, len(begun[HIGH]), steps, rng, init=begun).visible
    blind = {**data, HIGH: torch.zeros_like(data[HIGH])}
    inferred = machine.visible_mean(machine.hidden_mean(blind))[HIGH]
    return {
        "free_energy_gap": float(energies.mean() - machine.free_energy(others).mean()),
        "mismatch_gap": float((mismatched - energies).mean()),
        "matched": float((mismatched > energies).double().mean()),
        "inferred_correlation": _correlation(inferred, data[HIGH]),
        "layers": {name: {"data": _moments(data[name]), "chains": _moments(chains[name])} for name in data},
    }


def _moments(layer: Tensor) -> dict[str, float]:
    centered = layer - layer.mean()
    return {
        "mean": float(layer.mean()),
        "std": float(layer.std()),
        "neighbors": _correlation(centered[:, :, 1:], centered[:, :, :-1]),
    }


def _correlation(left: Tensor, right: Tensor) -> float:
    left, right = left - left.mean(), right - right.mean()
    return float((left * right).mean() / (left.square().mean() * right.square().mean()).sqrt())
