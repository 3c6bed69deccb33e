"""Whitened mixtures, compared with the dense mixture of Gaussians that the same parameters describe."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.fft import dct

from mvrbm import (
    CP,
    MPO,
    Bernoulli,
    BoltzmannMachine,
    Categorical,
    Dense,
    Gaussian,
    Kronecker,
    RandomSource,
    load,
    save,
)
from mvrbm.likelihood import log_partition, log_partition_interval
from mvrbm.training.trainer import Trainer
from mvrbm.units import WhitenedMixture
from mvrbm.updates.negative import CD
from mvrbm.updates.recipe import Recipe
from tables import generator

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
CASES = {
    "all": ((2, 2), {}),
    "level": ((2, 2), {"level": True}),
    "level of three modes": ((2, 1, 2), {"level": True, "means": "shared"}),
    "no gate": ((3, 2), {"gate": False}),
    "level, no gate": ((2, 3), {"gate": False, "level": True, "means": "shared"}),
    "one mean, cosines": ((2, 2), {"means": "one", "whiten": False, "level": True}),
    "vector": ((4,), {"gate": False, "n_contrasts": 1}),
}


def unit_named(case, **options):
    shape, arguments = CASES[case]
    arguments = {"n_components": 2, "n_contrasts": 2} | arguments | options
    unit, rng = WhitenedMixture(shape, **arguments).double(), generator(case)
    with torch.no_grad():
        for name, parameter in unit.named_parameters():
            noise = torch.from_numpy(rng.standard_normal(parameter.shape))
            parameter.copy_(0.4 * noise + (torch.eye(parameter.shape[-1]) if "whitening" in name else 0))
    return unit


def dense_mixture(unit):
    """Log-weights, means and covariances of all Gaussians, one per component, contrast and states of the gates."""
    own = {name: parameter.detach().numpy() for name, parameter in unit.named_parameters()}
    shape, K, C = unit.shape, unit.n_components, unit.n_contrasts
    scale, size = np.exp(own["log_scale"]).ravel(), math.prod(shape)
    center = np.broadcast_to(own["center"], shape).ravel()
    first = int(unit.level)
    log_pi = own["logits"] - np.logaddexp.reduce(own["logits"].ravel())
    bases = [dct(np.eye(n), axis=0, norm="ortho") for n in shape]
    rotation = bases[0]
    for basis in bases[1:]:
        rotation = np.kron(rotation, basis)
    found = []
    for k, c in itertools.product(range(K), range(C)):
        whitening = np.eye(1)
        for d, n in enumerate(shape):
            matrix = np.eye(n)
            if f"whitening_{d}" in own:
                matrix[first:, first:] = own[f"whitening_{d}"][k]
            whitening = np.kron(whitening, matrix)
        gates = [0.0] if not unit.gate else own["gate_logits"][k] - np.logaddexp.reduce(own["gate_logits"][k])
        widths = [0.0] if not unit.gate else own["log_width"][k]
        offset = np.zeros(size)
        if unit.means == "own":
            offset[first:] = own["offset"][k]
        mean = center + scale * (rotation.T @ offset)
        synthesis = scale[:, None] * (rotation.T @ np.linalg.inv(whitening))
        for states in itertools.product(range(len(gates)), repeat=size - first):
            states = list(states)
            state_log_variances = own["log_contrast"][k, c] + np.array(widths)[states] - own["log_precision"][k]
            if unit.level:
                state_log_variances = np.append(own["level_log_variance"], state_log_variances)
            covariance = (synthesis * np.exp(state_log_variances)) @ synthesis.T
            found.append((log_pi[k, c] + np.array(gates)[states].sum(), mean, covariance))
    logs, means, covariances = zip(*found, strict=True)
    return np.array(logs), np.array(means), np.array(covariances)


def in_field(unit, field):
    """Log-normalizer, log-weights, means and covariances of the dense mixture, tilted by the field: one sample."""
    logs, means, covariances = dense_mixture(unit)
    f = (field + unit.bias.detach()).numpy().ravel() / unit.log_scale.detach().exp().numpy().ravel()
    moved = means + covariances @ f
    logs = logs + means @ f + 0.5 * np.einsum("i,mij,j->m", f, covariances, f)
    total = np.logaddexp.reduce(logs)
    return total, np.exp(logs - total), moved, covariances


def fields(unit, n=3):
    return torch.from_numpy(generator("field").standard_normal((n, *unit.shape)))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_density_is_that_of_the_dense_mixture(case):
    unit = unit_named(case)
    unit.bias.zero_()
    x = torch.from_numpy(2 * generator("x").standard_normal((5, *unit.shape)))
    logs, means, covariances = dense_mixture(unit)
    each = [stats.multivariate_normal.logpdf(x.flatten(1), m, s) for m, s in zip(means, covariances, strict=True)]
    expected = np.logaddexp.reduce(logs[:, None] + np.array(each))
    np.testing.assert_allclose(-unit.energy(x), expected, rtol=1e-10)
    np.testing.assert_allclose(unit.log_normalizer(torch.zeros(1, *unit.shape).double()), 0, atol=1e-10)


@torch.no_grad()
def test_density_integrates_to_its_normalizer():
    unit = WhitenedMixture((1, 2), n_components=2, n_contrasts=2).double()
    for parameter in unit.parameters():
        parameter.copy_(torch.from_numpy(0.4 * generator("quadrature").standard_normal(parameter.shape)))
    for d in range(2):
        getattr(unit, f"whitening_{d}").add_(torch.eye(d + 1))
    field, steps = 0.3 * fields(unit, 1), torch.linspace(-60, 60, 1201, dtype=torch.float64)
    x = torch.cartesian_prod(steps, steps).reshape(-1, 1, 2)
    density = torch.exp((unit.statistic(x) * field).flatten(1).sum(1) - unit.energy(x))
    total = density.sum() * 0.01  # the trapezoidal rule, with the area of a square
    torch.testing.assert_close(torch.log(total)[None], unit.log_normalizer(field), rtol=1e-6, atol=1e-6)
    mean = torch.tensordot(density, x, 1) * 0.01 / total
    torch.testing.assert_close(mean, unit.mean(field)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_normalizer_means_and_variances_are_those_of_the_dense_mixture(case):
    unit = unit_named(case)
    field = fields(unit)
    for row, f in enumerate(field):
        total, weights, means, covariances = in_field(unit, f)
        np.testing.assert_allclose(unit.log_normalizer(field)[row], total, rtol=1e-9)
        mean = weights @ means
        np.testing.assert_allclose(unit.mean(field)[row].flatten(), mean, rtol=1e-8, atol=1e-10)
        variances = weights @ (np.diagonal(covariances, axis1=1, axis2=2) + (means - mean) ** 2)
        variances = variances * unit.inverse_scale.flatten().numpy() ** 2
        np.testing.assert_allclose(unit.statistic_variance(field)[row].flatten(), variances, rtol=1e-8)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_draws_have_the_moments_of_the_dense_mixture(case):
    """Each of 14 numbers is within 5 standard errors: this fails by chance once in 100,000 runs."""
    unit, n = unit_named(case), 40_000
    field = fields(unit, 1)
    x = unit.sample(field.expand(n, *unit.shape), RandomSource(3)).flatten(1).numpy()
    _, weights, means, covariances = in_field(unit, field[0])
    mean = weights @ means
    second = np.einsum("m,mij->ij", weights, covariances + means[:, :, None] * means[:, None])
    np.testing.assert_array_less(np.abs(x.mean(0) - mean), 5 * x.std(0) / np.sqrt(n))
    products = x[:, :, None] * x[:, None]
    np.testing.assert_array_less(np.abs(products.mean(0) - second), 5 * products.std(0) / np.sqrt(n))


@torch.no_grad()
def test_draws_in_a_cosine_basis_have_the_level_of_the_data():
    unit = unit_named("level", level=True)
    x = torch.from_numpy(generator("x").standard_normal((6, *unit.shape)))
    v = (x - unit.center) * unit.inverse_scale
    torch.testing.assert_close(unit.rotate(x)[:, 0], v.flatten(1).mean(1) * 2, **TOLERANCE)
    # The level has no part in anything else: another one changes the density by its own Gaussian alone.
    rotated = unit.rotate(x)
    other = rotated.clone()
    other[:, 0] += 1.3
    change = unit.joint_log_density(other) - unit.joint_log_density(rotated)
    own = unit.level_log_density(other) - unit.level_log_density(rotated)
    torch.testing.assert_close(change, own[:, None, None].expand(change.shape), **TOLERANCE)


@torch.no_grad()
def test_large_arrays_are_multiplied_mode_by_mode():
    unit = WhitenedMixture((12, 13), n_components=3, n_contrasts=1, means="shared").double()
    rng = generator("large")
    for d in range(2):
        own = getattr(unit, f"whitening_{d}")
        own.copy_(torch.from_numpy(rng.standard_normal(own.shape)))
    x = torch.from_numpy(rng.standard_normal((4, 12, 13)))
    a, b = (getattr(unit, f"whitening_{d}") @ basis for d, basis in enumerate(unit.bases()))
    expected = torch.einsum("kab,nbc,kdc->knad", a, x, b).flatten(2)
    torch.testing.assert_close(unit.coefficients(unit.rotate(x)), expected, **TOLERANCE)


HIDDEN = {"bernoulli": lambda: Bernoulli((2, 2)), "categorical": lambda: Categorical((2, 2))}
COUPLINGS = {"dense": Dense, "kronecker": lambda: Kronecker(rank=2), "mpo": lambda: MPO(bond=2)}


def every_state(hidden):
    values = [(1.0, 0.0), (0.0, 1.0)] if hidden.entry_modes else [(0.0,), (1.0,)]
    sites = math.prod(hidden.shape) // len(values[0])
    rows = [sum(combination, ()) for combination in itertools.product(values, repeat=sites)]
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, *hidden.shape)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("hidden", HIDDEN)
@torch.no_grad()
def test_machines_have_the_log_partition_and_free_energy(hidden, coupling):
    unit = unit_named("level")
    machine = BoltzmannMachine(unit, HIDDEN[hidden](), COUPLINGS[coupling](), seed=1, std=0.5).double()
    machine.hidden.bias.copy_(torch.from_numpy(generator("hidden").standard_normal(machine.hidden.shape)))
    states = every_state(machine.hidden)
    terms = [in_field(unit, field)[0] for field in machine.visible_fields(states)["visible"]]
    own = (machine.hidden.bias * states).flatten(1).sum(1).numpy()
    np.testing.assert_allclose(log_partition(machine), np.logaddexp.reduce(own + terms), rtol=1e-9)
    x = torch.from_numpy(generator("x").standard_normal((3, *unit.shape)))
    energies = torch.stack([machine.energy(x, y.expand(3, *y.shape)) for y in states])
    torch.testing.assert_close(machine.free_energy(x), -torch.logsumexp(-energies, 0), **TOLERANCE)


@pytest.mark.parametrize("name", ["all", "level"])
@torch.no_grad()
def test_annealing_finds_the_log_partition(name):
    """From both sides. An estimate misses by 5 of its standard errors by chance once in more than 10,000 runs."""
    machine = BoltzmannMachine(unit_named(name), Bernoulli((2, 2)), Kronecker(rank=2), seed=1, std=0.5).double()
    found = log_partition_interval(machine, RandomSource(0), n_chains=400, n_steps=100)
    for run in (found.forward, found.reverse):
        assert run.standard_error < 0.1
        assert abs(run.log_z - float(log_partition(machine))) < 5 * run.standard_error


@pytest.mark.parametrize("coupling", [Dense, lambda: CP(rank=2)])
def test_gaussian_hidden_layers_are_bounded(coupling):
    unit = unit_named("level")
    _, _, _, covariances = in_field(unit, torch.zeros(unit.shape))
    widest = max(np.linalg.eigvalsh(c * np.outer(s := unit.inverse_scale.flatten(), s)).max() for c in covariances)
    assert widest <= unit.largest_spread**2 * (1 + 1e-9)
    machine = BoltzmannMachine(unit, Gaussian(3), coupling()).double()
    norm = np.linalg.norm(machine.links["visible"].dense().detach().reshape(3, -1), 2)
    np.testing.assert_allclose(machine.gaussian_norm(), norm * unit.largest_spread, rtol=1e-5)
    machine.limit_norm(0.3)
    np.testing.assert_allclose(machine.gaussian_norm(), min(0.3, norm * unit.largest_spread), rtol=1e-5)
    with pytest.raises(ValueError, match="the energy is unbounded below"):
        BoltzmannMachine(unit, Gaussian(3), Dense(), std=10.0)


def test_entries_of_one_site_are_known_together():
    machine = BoltzmannMachine(unit_named("all"), Bernoulli(2), Dense())
    mask = torch.tensor([[[True, False], [True, True]]])
    with pytest.raises(ValueError, match="must be the same for all entries of a site"):
        machine.as_masks(mask, {"visible": torch.zeros(1, 2, 2)})
    with pytest.raises(ValueError, match="no pseudo-likelihood"):
        machine.layers["visible"].alternatives(torch.zeros(1, 2, 2), 0, (torch.zeros(1), torch.zeros(1)))


@pytest.mark.parametrize(("shape", "level"), [((4,), False), ((3, 4), False), ((3, 4), True)])
@torch.no_grad()
def test_constant_entries_have_a_finite_density(shape, level):
    x = torch.from_numpy(generator("constant").standard_normal((50, *shape)))
    x[:, 1] = 3.0
    for data in (x, 1e8 * x, 1e-8 * x, torch.full_like(x, 7.0), torch.zeros_like(x)):
        unit = WhitenedMixture(shape, level=level).double()
        unit.initialize_from(data.mean(0), data.var(0, correction=0), len(data))
        unit.check_parameters("layer")
        assert bool(torch.isfinite(unit.energy(data)).all())
        assert bool(torch.isfinite(unit.mean(fields(unit))).all())


def test_a_level_needs_other_coefficients():
    with pytest.raises(ValueError, match="level=True requires"):
        WhitenedMixture((1, 1), level=True)
    with pytest.raises(ValueError, match="means must be one of"):
        WhitenedMixture(3, means="many")


@pytest.mark.parametrize("hidden", [lambda: Bernoulli((2, 2)), lambda: Categorical((1, 3)), lambda: Gaussian((2, 2))])
def test_machines_learn_with_the_gradient_of_the_free_energy(hidden):
    unit = unit_named("level")
    machine = BoltzmannMachine(unit, hidden(), Kronecker(rank=2)).double()
    x = torch.from_numpy(generator("x").standard_normal((5, 2, 2)))
    found = machine.free_energy_gradient({"visible": x})
    learned = {name: p for name, p in machine.named_parameters() if p.requires_grad}
    assert set(found) == set(learned)
    expected = torch.autograd.grad(machine.free_energy(x).mean(), list(learned.values()))
    for name, gradient in zip(learned, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, **TOLERANCE)
    trainer = Trainer(machine, Recipe(n_epochs=2, batch_size=10, learning_rate=1e-3, negative=CD(1)))
    trainer.fit({"visible": x.repeat(8, 1, 1)})
    assert all(bool(torch.isfinite(parameter).all()) for parameter in machine.parameters())


def test_saved_machines_are_the_same(tmp_path):
    machine = BoltzmannMachine(unit_named("level"), Bernoulli((2, 2)), Kronecker()).double()
    save(machine, tmp_path / "model")
    again = load(tmp_path / "model", device="cpu")
    x = torch.from_numpy(generator("x").standard_normal((5, 2, 2)))
    assert torch.equal(again.free_energy(x), machine.free_energy(x))
    assert repr(again) == repr(machine)
