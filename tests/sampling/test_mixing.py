"""The memory of chains against exact transition probabilities, and machines whose chains mix or get stuck."""

import itertools
import math

import numpy as np
import pytest
import torch

from enumeration import every_visible_state
from environment import fixed_seeds
from mvrbm import Bernoulli, BoltzmannMachine, Categorical, Dense, Gaussian, Kronecker, RandomSource
from mvrbm.sampling import chain_memory, check_mixing, gibbs
from mvrbm.sampling.mixing import Mixing, _disagreement, _time_to_forget
from tables import generator, machine_named, random_states, randomize

MIXED_LAYERS = ["categorical | bernoulli | dense() (2, 2)->(3,)", "image and label"]


@pytest.mark.parametrize("name", MIXED_LAYERS)
def test_memory_is_its_definition(name):
    machine, rng = machine_named(name), generator(name)
    earlier, later = (random_states(machine, 7, rng) for _ in range(2))

    def overlap(one, other):
        equal = []
        for key, unit in machine.layers.items():
            first, second = (layers[key][i].reshape(unit.n_sites, -1) for layers, i in (one, other))
            equal += [bool((first[site] == second[site]).all()) for site in range(unit.n_sites)]
        return np.mean(equal)

    same = np.mean([overlap((earlier, i), (later, i)) for i in range(7)])
    other = np.mean([overlap((earlier, i), (later, j)) for i, j in itertools.permutations(range(7), 2)])
    np.testing.assert_allclose(chain_memory(machine, earlier, later), (same - other) / (1 - other))


@fixed_seeds()  # how well chains remember depends on the machine
@torch.no_grad()
def exact_chains(n):
    """A machine, n states from its exact distribution, and a function of the lag: exact memory and its error."""
    machine = randomize(BoltzmannMachine(Categorical((2, 3)), Bernoulli(2), Dense()), generator("exact"), 2.0)
    states = every_visible_state(machine)["visible"].flatten(1).numpy()
    W, b = machine.links["visible"].weight.numpy(), machine.visible["visible"].bias.numpy().ravel()
    hidden = np.array(list(itertools.product([0, 1], repeat=2)))
    joint = np.exp((states @ b)[:, None] + hidden @ machine.hidden.bias.numpy() + states @ W.T @ hidden.T)
    joint /= joint.sum()
    p = joint.sum(1)
    step = (joint / p[:, None]) @ (joint / joint.sum(0)).T  # transition probabilities
    overlap = states @ states.T / 2
    other = p @ overlap @ p

    def memory(lag):
        pairs = p[:, None] * np.linalg.matrix_power(step, lag)
        same = (pairs * overlap).sum()
        error = math.sqrt(((pairs * overlap**2).sum() - same**2) / n)
        return (same - other) / (1 - other), error / (1 - other)

    start = torch.from_numpy(states[generator("start").choice(len(p), n, p=p)]).reshape(n, 2, 3)
    return machine, start, memory


@torch.no_grad()
@pytest.mark.parametrize("steps", [1, 3])
def test_memory_of_chains_is_that_of_exact_transitions(steps):
    """Fails by chance in fewer than one of 10,000 runs."""
    machine, start, memory = exact_chains(20_000)
    later = gibbs(machine, start, steps, RandomSource(1)).visible
    expected, error = memory(steps)
    assert expected > 0.1  # the chains do remember
    assert abs(chain_memory(machine, {"visible": start}, later) - expected) < 5 * error


def test_memory_is_measured_over_half_of_the_steps():
    """Fails by chance in fewer than one of 10,000 runs."""
    machine, start, memory = exact_chains(20_000)
    found = check_mixing(machine, start, n_chains=len(start), steps=8, rng=RandomSource(1))
    assert found.lags == [1, 2, 4]
    for lag, value in zip(found.lags, found.memory["data"], strict=True):
        expected, error = memory(lag)
        assert abs(value - expected) < 5 * error
    assert memory(1)[0] - memory(2)[0] > 20 * memory(2)[1]  # another lag would be found out


def test_chains_that_do_not_move_remember_everything():
    machine = BoltzmannMachine(Categorical((6, 3)), Bernoulli(2), Dense())
    states = random_states(machine, 9, generator("still"))
    assert chain_memory(machine, states, states) == 1.0
    alike = {"visible": states["visible"][:1].expand(9, -1, -1)}
    assert chain_memory(machine, alike, alike) == 0.0


def with_modes(shift=0.0, strength=8.0):
    """A machine of 60 sites with two modes, one for each of the first two letters."""
    machine = BoltzmannMachine(Categorical((60, 3)), Bernoulli(2), Dense())
    weight = torch.zeros(2, 60, 3)
    weight[0, :, 0] = weight[1, :, 1] = strength
    with torch.no_grad():
        machine.links["visible"].weight.copy_(weight.reshape(2, 180))
        machine.hidden.bias.fill_(-37.5 * strength)
        machine.visible["visible"].bias[:, 0] = shift
    return machine


def test_independent_sites_mix_at_once():
    """The standard error of the memory is 0.006, and the threshold is 0.05."""
    machine = BoltzmannMachine(Categorical((60, 3)), Bernoulli(2), Dense())
    with torch.no_grad():
        machine.links["visible"].weight.zero_()
    data = random_states(machine, 200, generator("data"))
    found = check_mixing(machine, data, steps=16, rng=RandomSource(3))
    assert found.mixed
    assert found.time == 1
    assert found.lags == [1, 2, 4, 8]
    assert str(found) == "mixed: chains forget their states within about 1 step"


def test_chains_that_are_stuck_in_modes_have_not_mixed():
    machine = with_modes()
    data = torch.nn.functional.one_hot(torch.arange(20)[:, None].expand(-1, 60) % 2, 3).float()
    found = check_mixing(machine, data, n_chains=20, steps=32, rng=RandomSource(3))
    assert not found.mixed
    assert math.isinf(found.time)
    assert found.memory["data"][-1] > 0.9
    assert str(found).startswith("not mixed: after 16 steps, chains still have a memory of")


def test_chains_from_data_reveal_a_mode_that_others_miss():
    machine = with_modes(shift=3.0)
    data = torch.nn.functional.one_hot(torch.ones(50, 60, dtype=torch.long), 3).float()
    alone = check_mixing(machine, n_chains=50, steps=32, rng=RandomSource(3))
    assert alone.disagreement is None
    both = check_mixing(machine, data, n_chains=50, steps=32, rng=RandomSource(3))
    assert both.disagreement > 0.5
    assert not both.mixed


def test_disagreement_of_chains_frozen_in_single_states_is_1():
    """The odds that a site changes are exp(-30), or that a random chain starts in the second mode, 10 ** -20."""
    machine = with_modes(shift=3.0, strength=40.0)
    with torch.no_grad():
        machine.visible["visible"].bias[:, 2] = -60
        machine.links["visible"].weight[0].reshape(60, 3)[:, 0] = 80
    data = torch.nn.functional.one_hot(torch.ones(50, 60, dtype=torch.long), 3).float()
    found = check_mixing(machine, data, n_chains=50, steps=8, rng=RandomSource(3))
    assert found.memory == {"random": [0.0] * 3, "data": [0.0] * 3}
    assert found.disagreement == 1
    assert not found.mixed
    assert "differ by 1.00" in str(found)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_disagreement_is_from_0_to_1(share):
    """Random states with few or many letters that are the same within a set, and differ between the sets."""
    machine = BoltzmannMachine(Categorical((40, 3)), Bernoulli(2), Dense())
    rng = generator("sets")
    letters = [np.where(rng.random((30, 40)) < share, letter, rng.integers(0, 3, (30, 40))) for letter in (0, 1)]
    ends = {str(i): {"visible": torch.nn.functional.one_hot(torch.tensor(x), 3)} for i, x in enumerate(letters)}
    found = _disagreement(machine, ends)
    # Two letters are both fixed with probability share**2, and otherwise equal with probability 1/3.
    between = (1 - share**2) / 3
    assert 0 <= found <= 1
    assert found == pytest.approx(share**2 / (1 - between), abs=0.08)
    assert _disagreement(machine, {"one": ends["0"], "two": ends["0"]}) == 0


@pytest.mark.parametrize(
    ("memory", "time"),
    [
        ([0.9, 0.5, 0.2], math.inf),
        ([0.01, 0.0, 0.02], 1),
        ([0.8, 0.1, 0.0], 2 * math.sqrt(2)),
        ([0.0, 0.2, 0.0], 2 * 2**0.75),
    ],
)
def test_mixing_time_is_interpolated(memory, time):
    np.testing.assert_allclose(_time_to_forget([1, 2, 4], memory), time)


def test_verdict_depends_on_both():
    assert Mixing([1], {"random": [0.0]}, 1.0, None).mixed
    assert not Mixing([1], {"random": [0.0], "data": [0.0]}, 1.0, 0.4).mixed
    assert "differ by 0.40" in str(Mixing([1], {"random": [0.0], "data": [0.0]}, 1.0, 0.4))


def test_errors_say_what_is_wanted():
    real = BoltzmannMachine(Gaussian((2, 2)), Bernoulli((2, 2)), Kronecker())
    with pytest.raises(ValueError, match="layer 'visible' has Gaussian units"):
        check_mixing(real, rng=RandomSource(0))
    machine = with_modes()
    one = random_states(machine, 1, generator("one"))
    with pytest.raises(ValueError, match="at least 2 chains"):
        chain_memory(machine, one, one)
    with pytest.raises(ValueError, match="data must contain at least 2 states"):
        check_mixing(machine, one, rng=RandomSource(0))
    with pytest.raises(ValueError, match="steps"):
        check_mixing(machine, steps=1, rng=RandomSource(0))
