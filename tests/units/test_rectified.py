"""Rectified units: against their definition; what they cannot do is an error."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn.datasets import load_digits

import mvrbm
from given_numbers import GivenNumbers
from mvrbm import Bernoulli, BoltzmannMachine, Dense, Kronecker, RandomSource, Rectified
from mvrbm.likelihood import annealed_importance_sampling, log_partition, pseudo_log_likelihood
from mvrbm.sampling import ParallelTempering, gibbs
from mvrbm.training import CD, Recipe, Trainer
from tables import DRAWN_UNITS, generator


@pytest.fixture(scope="module")
def digits():
    return (load_digits().images[:600] / 16).astype(np.float32)  # (600, 8, 8)


@pytest.mark.parametrize("name", DRAWN_UNITS)
@torch.no_grad()
def test_draws_and_means_are_those_of_the_definition(name):
    kind, draw = DRAWN_UNITS[name]
    unit = kind((2, 3), bias_shape=(1, 3)).double()
    unit.bias.copy_(torch.tensor([[-1.0, 0.5, 2.0]]))
    field = torch.from_numpy(2 * generator("field").standard_normal((4, 2, 3)))
    total = (field + unit.bias).numpy()
    normal = RandomSource(1).normal(field.shape, field)
    np.testing.assert_allclose(unit.sample(field, GivenNumbers([normal])), draw(total, normal.numpy()), atol=1e-12)

    def mean(t):
        kink = -t * np.sqrt(1 + np.exp(-t))  # where the draw leaves zero
        ends = [(max(kink, -9.0), 9.0)] if kink < 9 else []
        return sum(integrate.quad(lambda e: draw(t, e) * stats.norm.pdf(e), *end, epsabs=1e-12)[0] for end in ends)

    np.testing.assert_allclose(unit.mean(field), np.vectorize(mean)(total), atol=1e-9)


@pytest.mark.parametrize("name", DRAWN_UNITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_stay_finite_and_rise_with_the_field(name, dtype):
    unit = DRAWN_UNITS[name][0](1).to(dtype)
    mean = unit.mean(torch.tensor([-1e4, -100.0, -20.0, -1.0, 0.0, 1.0, 20.0, 1e4], dtype=dtype)[:, None])
    assert bool(torch.isfinite(mean).all())
    assert bool((mean.diff(dim=0) >= 0).all())
    torch.testing.assert_close(mean[-2:, 0], torch.tensor([20.0, 1e4], dtype=dtype))


def rectified_machine(n_visible=(2, 2)):
    machine = BoltzmannMachine(Bernoulli(n_visible), Rectified((2, 3)), Kronecker(2), std=0.5)
    return machine, torch.ones(3, *n_visible)


WITHOUT_ENERGY = {
    "energy": lambda m, x: m.energy(x, torch.ones(3, 2, 3)),
    "free energy": lambda m, x: m.free_energy(x),
    "log Z": lambda m, x: log_partition(m),
    "annealing": lambda m, x: annealed_importance_sampling(m, RandomSource(0), n_chains=2, n_steps=2),
    "pseudo-likelihood": lambda m, x: pseudo_log_likelihood(m, x),
    "tempering": lambda m, x: ParallelTempering(m, 2, rng=RandomSource(0)).step(),
    "autograd": lambda m, x: Trainer(m, backend="autograd").fit(x, 1, initialize=False),
}


@pytest.mark.parametrize("what", WITHOUT_ENERGY)
@pytest.mark.parametrize("shape", [(2, 2), (28, 28)])
def test_what_needs_an_energy_is_refused_in_one_line(what, shape):
    machine, x = rectified_machine(shape)
    with pytest.raises(ValueError, match=r"^Rectified units have no exact distribution, .*[^\n]*$"):
        WITHOUT_ENERGY[what](machine, x)


def test_rectified_data_must_not_be_negative():
    with pytest.raises(ValueError, match="require nonnegative values, got -1"):
        BoltzmannMachine(Rectified(2), Bernoulli(2), Dense()).hidden_mean(torch.tensor([[1.0, -1.0]]))


def test_gibbs_and_contrastive_divergence_work_with_rectified_units(digits, tmp_path):
    machine = BoltzmannMachine(Bernoulli((8, 8)), Rectified((10, 10)), Kronecker(4))
    Trainer(machine, Recipe(n_epochs=40, negative=CD(2)), seed=0).fit(digits, initialize=True)
    x = torch.from_numpy(digits)
    error = ((machine.visible_mean(machine.hidden_mean(x))["visible"] - x) ** 2).sum()
    assert float(error.detach()) < 0.98 * float(((x.mean(0) - x) ** 2).sum())
    hidden = gibbs(machine, x[:5], 3, RandomSource(0)).hidden
    assert bool((hidden >= 0).all())
    assert bool((hidden > 1).any())
    again = mvrbm.load(mvrbm.save(machine, tmp_path / "rectified"))
    assert torch.equal(again.hidden_mean(x), machine.hidden_mean(x))
