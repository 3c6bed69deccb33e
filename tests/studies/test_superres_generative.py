"""The report on a super-resolver as a generative model, against sums over states, NumPy and closed forms."""

import itertools

import numpy as np
import pytest
import torch

from environment import fixed_seeds
from mvrbm import Gaussian
from mvrbm.models import multimodal_mvrbm
from mvrbm.vision.stages import DERIVATIVES, HIGH
from studies.superres.run import generative_report

LAYERS = (HIGH, *DERIVATIVES)


@fixed_seeds()
@torch.no_grad()
def a_machine(patch, hidden=(3, 4), rank=2, seed=0):
    """A machine of which every parameter is random, in double precision."""
    machine = multimodal_mvrbm({name: Gaussian((patch, patch)) for name in LAYERS}, hidden, rank).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in machine.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return machine


def enumerated_free_energy(machine, layers):
    """-log of the sum over all 16 hidden states."""
    states = torch.tensor(list(itertools.product((0.0, 1.0), repeat=4)), dtype=torch.float64).reshape(-1, 2, 2)
    n = len(layers[HIGH])
    energies = [machine.energy(layers, state.expand(n, 2, 2)) for state in states]
    return -torch.logsumexp(-torch.stack(energies), 0)


@fixed_seeds()
def random_layers(n, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(n, 3, 3, dtype=torch.float64, generator=generator) for name in LAYERS}


@torch.no_grad()
def test_free_energies_of_the_report_are_sums_over_states():
    machine = a_machine(3, (2, 2))
    seen, unseen = random_layers(30, 0), random_layers(2, 1)  # of two patches, the other one is the mismatch
    blind = {**unseen, HIGH: torch.zeros_like(unseen[HIGH])}
    unseen[HIGH] = machine.visible_mean(machine.hidden_mean(blind))[HIGH]  # so that each fits its own best
    own = enumerated_free_energy(machine, unseen)
    gap = float(own.mean() - enumerated_free_energy(machine, seen).mean())
    swapped = enumerated_free_energy(machine, {**unseen, HIGH: unseen[HIGH].flip(0)})
    assert (swapped > own).all()
    for seed in range(8):  # no patch is ever its own mismatch
        report = generative_report(machine, seen, unseen, steps=1, seed=seed)
        assert report["free_energy_gap"] == pytest.approx(gap)
        assert report["mismatch_gap"] == pytest.approx(float((swapped - own).mean()))
        assert report["matched"] == 1


@torch.no_grad()
def test_correlations_of_the_report_are_numpys():
    machine, unseen = a_machine(3, (2, 2)), random_layers(40, 1)
    report = generative_report(machine, unseen, unseen, steps=1)
    assert report["free_energy_gap"] == 0
    blind = {**unseen, HIGH: torch.zeros(40, 3, 3, dtype=torch.float64)}
    inferred = machine.visible_mean(machine.hidden_mean(blind))[HIGH].numpy()
    expected = np.corrcoef(inferred.ravel(), unseen[HIGH].numpy().ravel())[0, 1]
    assert report["inferred_correlation"] == pytest.approx(expected)
    for name in LAYERS:
        found, layer = report["layers"][name]["data"], unseen[name].numpy()
        assert found["mean"] == pytest.approx(layer.mean())
        assert found["std"] == pytest.approx(layer.std(ddof=1))
        neighbors = np.corrcoef(layer[:, :, 1:].ravel(), layer[:, :, :-1].ravel())[0, 1]
        assert found["neighbors"] == pytest.approx(neighbors)


@torch.no_grad()
def test_chains_of_the_report_are_drawn_from_the_machine():
    """Without couplings a layer is N(b, s^2), entry by entry: 2,000 chains tell it within 5 standard errors."""
    machine = a_machine(3, (2, 2))
    for name in LAYERS:
        for factor in machine.links[name].factors:
            factor.zero_()
        machine.layers[name].bias.fill_(0.7)
        machine.layers[name].log_variance.fill_(2 * np.log(0.3))
    report = generative_report(machine, random_layers(9, 0), random_layers(3000, 1), steps=2, n_chains=2000)
    for layer in report["layers"].values():
        n = 2000 * 9
        assert layer["chains"]["mean"] == pytest.approx(0.7, abs=5 * 0.3 / np.sqrt(n))
        assert layer["chains"]["std"] == pytest.approx(0.3, rel=5 / np.sqrt(2 * n))
        assert abs(layer["chains"]["neighbors"]) < 5 / np.sqrt(2000 * 6)
