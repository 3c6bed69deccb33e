"""The zero-sum gauge changes parameters and nothing else."""

import numpy as np
import pytest
import torch

from enumeration import Written, every_visible_state
from mvrbm import CP, MPO, MVRBM, Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, Tucker
from mvrbm.likelihood import log_likelihood
from tables import MACHINES, full_matrix, generator, machine_named, random_layer, random_states, randomize

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def can_be_centered(name):
    machine = machine_named(name)
    free_bias = machine.hidden.bias_shape == machine.hidden.shape
    return free_bias and any(unit.one_hot for unit in machine.layers.values()) and "summed_modes" not in name


CENTERED = [name for name in MACHINES if can_be_centered(name)]


@pytest.mark.parametrize("name", CENTERED)
@torch.no_grad()
def test_differences_between_energies_stay(name):
    machine, rng = machine_named(name), generator(name)
    written = Written(machine)
    z = written.join(random_states(machine, 6, rng), random_layer(machine.hidden, 6, rng))
    before = written.energy(z)
    machine.zero_sum_gauge()
    change = Written(machine).energy(z) - before
    torch.testing.assert_close(change, change[:1].expand(6), **TOLERANCE)


@pytest.mark.parametrize("name", CENTERED)
@torch.no_grad()
def test_weights_and_biases_sum_to_zero(name):
    machine = machine_named(name)
    before = {name: full_matrix(link).reshape(-1, *link.visible_shape) for name, link in machine.links.items()}
    biases = {name: unit.bias.clone() for name, unit in machine.layers.items()}
    machine.zero_sum_gauge()
    for name, unit in machine.layers.items():
        shift = 1.0 if unit.one_hot else 0.0
        W = full_matrix(machine.links[name]).reshape(before[name].shape)
        torch.testing.assert_close(W, before[name] - shift * before[name].mean(-1, keepdim=True), **TOLERANCE)
        torch.testing.assert_close(unit.bias, biases[name] - shift * biases[name].mean(-1, keepdim=True), **TOLERANCE)


@pytest.mark.parametrize(
    "coupling", [Kronecker(2), Tucker((3, 2)), CP(3), MPO(2), Dense()], ids=lambda coupling: coupling.name
)
def test_trained_machines_keep_their_likelihoods(coupling):
    X = np.eye(3)[generator("alignment").integers(3, size=(60, 4))]
    hidden = (3,) if coupling.name == "cp" else (2, 2)
    model = MVRBM(hidden, coupling=coupling, visible="categorical", n_epochs=3, random_state=0).fit(X)
    machine = model.machine_.double()
    states = every_visible_state(machine)
    before = log_likelihood(machine, states)
    machine.zero_sum_gauge()
    torch.testing.assert_close(log_likelihood(machine, states), before, **TOLERANCE)


def test_layers_that_are_not_one_hot_stay():
    units = {"bits": Bernoulli((2, 2)), "text": Categorical((2, 3), padded=True)}
    machine = BoltzmannMachine(units, Gaussian((2, 2)), {"bits": Kronecker(), "text": Kronecker()})
    randomize(machine, generator("others"))
    before = {key: value.clone() for key, value in machine.state_dict().items()}
    machine.zero_sum_gauge()
    assert all(torch.equal(value, before[key]) for key, value in machine.state_dict().items())


def test_machines_without_a_gauge_say_so():
    tied = BoltzmannMachine(Categorical((2, 3)), Bernoulli((2, 2), bias_shape=(1, 2)), Kronecker())
    with pytest.raises(ValueError, match="one hidden bias per entry"):
        tied.zero_sum_gauge()
    summed = BoltzmannMachine(Categorical((2, 3)), Bernoulli((2, 1)), Kronecker(summed_modes=(1,)))
    with pytest.raises(ValueError, match="sums over the last mode"):
        summed.zero_sum_gauge()
