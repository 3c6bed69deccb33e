"""Double rectified units: against integrals of their definition, and as hidden layers against sums over all states."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

import mvrbm
from mvrbm import Bernoulli, BoltzmannMachine, Categorical, Dense, DoubleRectified, Gaussian, Kronecker, RandomSource
from mvrbm.likelihood import log_partition, log_partition_interval, pseudo_log_likelihood
from mvrbm.sampling import gibbs
from mvrbm.units.double_rectified import _half_normal_quantile
from tables import generator

# Bias, gap and skew of entries: Gaussian, thresholded, bimodal, skewed, and nearly binary or nearly zero.
ENTRIES = [(0.3, 0.0, 0.0), (0.5, 1.5, 0.0), (-0.2, -2.0, 0.0), (0.1, 0.4, 0.7), (-0.4, -1.0, -0.9), (0.0, 8.0, 0.3)]
FIELDS = [-30.0, -4.0, -0.5, 0.0, 1.0, 6.0, 40.0]
FALSE_ALARM = 1e-4


def unit_of_all_entries():
    unit = DoubleRectified(len(ENTRIES)).double()
    with torch.no_grad():
        for parameter, values in zip((unit.bias, unit.gap, unit.skew), zip(*ENTRIES, strict=True), strict=True):
            parameter.copy_(torch.tensor(values, dtype=torch.float64))
    return unit


def log_density(x, bias, gap, skew, field):
    """The unnormalized log-density of the class docstring, for one number."""
    width = math.exp(math.tanh(skew if x > 0 else -skew))
    return -(x * x) / (2 * width * width) + bias * x - gap * abs(x) + field * x


def by_quadrature(function, *entry):
    """Integrate a function of x times the density, both divided by the largest density."""
    _, gap, skew, _ = entry
    peaks = [0.0]
    for sign in (1, -1):
        width = math.exp(sign * math.tanh(skew))
        peaks.append(sign * max(0.0, (sign * (entry[0] + entry[3]) - gap) * width**2))
    highest = max(log_density(x, *entry) for x in peaks)
    ends = [min(peaks) - 40, *sorted(set(peaks)), max(peaks) + 40]
    pieces = (
        integrate.quad(lambda x: function(x) * math.exp(log_density(x, *entry) - highest), a, b, epsabs=0, epsrel=1e-11)
        for a, b in itertools.pairwise(ends)
        if b > a
    )
    return sum(piece[0] for piece in pieces), highest


@pytest.mark.parametrize("field", FIELDS)
@torch.no_grad()
def test_normalizer_mean_and_variance_are_integrals(field):
    unit = unit_of_all_entries()
    fields = torch.full((1, len(ENTRIES)), field, dtype=torch.float64)
    logs, means = unit.site_log_normalizer(fields)[0], unit.mean(fields)[0]
    variances = unit.statistic_variance(fields)[0]
    for index, entry in enumerate(ENTRIES):
        area, highest = by_quadrature(lambda x: 1.0, *entry, field)
        mean = by_quadrature(lambda x: x, *entry, field)[0] / area
        square = by_quadrature(lambda x, mean=mean: (x - mean) ** 2, *entry, field)[0] / area
        np.testing.assert_allclose(logs[index], math.log(area) + highest, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(means[index], mean, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(variances[index], square, rtol=1e-6, atol=1e-9)


@torch.no_grad()
def test_without_gap_and_skew_entries_are_gaussian():
    unit, gaussian = DoubleRectified(3).double(), Gaussian(3).double()
    unit.bias.copy_(torch.tensor([-1.0, 0.0, 2.0]))
    gaussian.bias.copy_(unit.bias)
    field = torch.from_numpy(3 * generator("field").standard_normal((5, 3)))
    constant = 0.5 * unit.bias**2  # of the square in the energy of Gaussian units
    torch.testing.assert_close(unit.site_log_normalizer(field), gaussian.site_log_normalizer(field) + constant)
    torch.testing.assert_close(unit.mean(field), gaussian.mean(field))
    torch.testing.assert_close(unit.statistic_variance(field), torch.ones_like(field))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("peak", [-1000.0, -30.0, -5.0, -2.01, -1.99, 0.0, 3.0, 30.0])
def test_quantiles_of_a_normal_number_that_is_positive(peak, dtype):
    tails = torch.tensor([1e-6, 0.01, 0.3, 0.9, 0.99999], dtype=dtype)
    found = _half_normal_quantile(torch.full_like(tails, peak), tails).double().numpy()
    # erfcx, because the probabilities of both values underflow far below zero
    scaled = [special.erfcx((x - peak) / math.sqrt(2)) for x in (found, np.zeros(1))] if peak < 0 else None
    log_ratio = peak * found - found**2 / 2 + np.log(scaled[0] / scaled[1]) if scaled else None
    if scaled is None:
        log_ratio = special.log_ndtr(peak - found) - special.log_ndtr(peak)
    np.testing.assert_allclose(np.exp(log_ratio), tails.double(), rtol=1e-12 if dtype == torch.float64 else 3e-5)


@pytest.mark.parametrize("field", [-2.0, 0.0, 3.0])
@torch.no_grad()
def test_samples_have_the_distribution(field):
    """Kolmogorov-Smirnov tests, each of which fails once in 10,000 runs."""
    unit = unit_of_all_entries()
    n = 4000
    samples = unit.sample(torch.full((n, len(ENTRIES)), field, dtype=torch.float64), RandomSource(3)).numpy()
    for index, entry in enumerate(ENTRIES):
        bias, gap, skew = entry
        grid = np.linspace(-60, 60, 240_001)
        logs = (bias + field) * grid - gap * abs(grid) - grid**2 / (2 * np.exp(2 * np.tanh(skew) * np.sign(grid)))
        density = np.exp(logs - logs.max())
        cumulative = integrate.cumulative_trapezoid(density, grid, initial=0)
        expected = np.interp(samples[:, index], grid, cumulative / cumulative[-1])
        assert stats.kstest(expected, "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize(("low", "high"), [(-3.0, 4.0), (0.0, 0.5), (-20.0, -10.0)])
@torch.no_grad()
def test_alternatives_integrate_over_all_values(low, high):
    unit = unit_of_all_entries()
    for field in np.linspace(low, high, 5):
        fields = torch.full((1, len(ENTRIES)), float(field), dtype=torch.float64)
        reach = torch.tensor([low], dtype=torch.float64), torch.tensor([high], dtype=torch.float64)
        for site in range(len(ENTRIES)):
            found = unit.alternatives(torch.zeros(1, dtype=torch.float64), site, reach)
            energy = unit.site_energy(found.values.expand(-1, len(ENTRIES)))[:, site]
            total = torch.logsumexp(found.log_weights[:, 0] - energy + field * found.values[:, 0], 0)
            torch.testing.assert_close(total, unit.site_log_normalizer(fields)[0, site], rtol=1e-9, atol=1e-9)


def machine_of(visible, seed=0):
    machine = BoltzmannMachine(visible, DoubleRectified((2, 2)), Kronecker(2), std=0.5).double()
    rng = generator(f"double rectified {seed}")
    with torch.no_grad():
        for parameter in machine.parameters():
            parameter.copy_(torch.from_numpy(0.5 * rng.standard_normal(parameter.shape)))
    return machine


def all_states(unit):
    """Every state of a layer of bits or one-hot rows."""
    values = torch.eye(unit.shape[-1]) if unit.entry_modes else torch.tensor([[0.0], [1.0]])
    rows = itertools.product(values, repeat=math.prod(unit.shape) // values.shape[1])
    return torch.stack([torch.cat(row) for row in rows]).reshape(-1, *unit.shape).double()


VISIBLE = {"bits": lambda: Bernoulli((2, 3)), "letters": lambda: Categorical((3, 2))}


@pytest.mark.parametrize("kind", VISIBLE)
@torch.no_grad()
def test_free_energies_are_integrals_over_the_hidden_layer(kind):
    machine = machine_of(VISIBLE[kind]())
    x = all_states(machine.layers["visible"])[::7]
    W = machine.links["visible"].dense().reshape(4, -1)
    fields = x.flatten(1) @ W.T
    entries = torch.stack(
        [parameter.flatten() for parameter in (machine.hidden.bias, machine.hidden.gap, machine.hidden.skew)]
    )
    for row, own in zip(fields, machine.free_energy(x), strict=True):
        logs = [by_quadrature(lambda x: 1.0, *entries[:, k].tolist(), float(row[k])) for k in range(4)]
        expected = -sum(math.log(area) + highest for area, highest in logs)
        at = int((fields == row).all(1).nonzero()[0])
        expected -= float((machine.layers["visible"].bias * x[at]).sum())
        np.testing.assert_allclose(own, expected, rtol=1e-9)


@pytest.mark.parametrize("kind", VISIBLE)
@torch.no_grad()
def test_gibbs_steps_keep_the_distribution(kind):
    """A chi-square test, which fails once in 10,000 runs."""
    machine = machine_of(VISIBLE[kind]())
    states = all_states(machine.layers["visible"])
    p = torch.softmax(-machine.free_energy(states), 0)
    torch.testing.assert_close(log_partition(machine), torch.logsumexp(-machine.free_energy(states), 0))
    n = 20_000
    start = states[torch.multinomial(p, n, replacement=True, generator=torch.Generator().manual_seed(1))]
    end = gibbs(machine, {"visible": start}, 3, RandomSource(2)).visible["visible"]
    index = (end.flatten(1)[:, None] == states.flatten(1)).all(2).int().argmax(1)
    expected = n * p
    common = expected >= 5
    counts = torch.bincount(index, minlength=len(states)).double()
    observed = [*counts[common].tolist(), float(counts[~common].sum())]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    keep = [k for k, each in enumerate(wanted) if each > 0]
    assert stats.chisquare([observed[k] for k in keep], [wanted[k] for k in keep]).pvalue > FALSE_ALARM


@torch.no_grad()
def test_annealing_estimates_log_z():
    machine = machine_of(Categorical((3, 2)))
    found = log_partition_interval(machine, RandomSource(0), n_chains=100, n_steps=200)
    assert abs(found.log_z - float(log_partition(machine))) < 0.1


@torch.no_grad()
def test_pseudo_likelihood_of_a_visible_layer():
    """With one entry, the pseudo-likelihood is the likelihood."""
    machine = BoltzmannMachine(DoubleRectified(1), Bernoulli(3), Dense(), std=0.7).double()
    machine.layers["visible"].gap.fill_(0.5)
    machine.layers["visible"].skew.fill_(-0.3)
    x = torch.tensor([[-1.0], [0.2], [2.5]], dtype=torch.float64)
    values = pseudo_log_likelihood(machine, {"visible": x}, n_sites=None).values
    log_z = math.log(
        integrate.quad(lambda v: math.exp(-machine.free_energy(torch.tensor([[v]]).double())), -30, 30, points=[0])[0]
    )
    torch.testing.assert_close(values, -machine.free_energy(x) - log_z, rtol=1e-7, atol=1e-7)


def test_weights_that_make_the_energy_unbounded_are_rejected():
    machine = BoltzmannMachine(Gaussian(1), DoubleRectified(1), Dense()).double()
    with torch.no_grad():
        machine.hidden.skew.fill_(math.atanh(0.5))
        machine.links["visible"].weight.fill_(0.5)
        machine.check_parameters()
        machine.links["visible"].weight.fill_(0.7)  # the variance of the wide side is exp(1)
    with pytest.raises(ValueError, match="bounded"):
        machine.check_parameters()


def test_a_machine_with_a_gaussian_layer_is_saved(tmp_path):
    machine = BoltzmannMachine(Gaussian(3), DoubleRectified(2), Dense())
    loaded = mvrbm.load(mvrbm.save(machine, tmp_path / "machine"), "cpu")
    assert loaded.gaussian_norm() == machine.gaussian_norm()


def test_a_sequence_model_with_these_units_learns_and_is_saved(tmp_path):
    rng = np.random.default_rng(0)
    first = rng.choice(list("ACDE"), 400)
    # The second letter is that of the first site in most sequences, but not in so many that chains do not mix.
    second = np.where(rng.random(400) < 0.8, first, rng.choice(list("ACDE"), 400))
    family = ["".join(letters) for letters in zip(first, second, rng.choice(list("AC"), 400), strict=True)]
    model = mvrbm.SequenceRBM(6, hidden="drelu", identity=None, n_epochs=60, random_state=0, device="cpu").fit(family)
    independent = -(math.log(4) + math.log(4) + math.log(2))
    gained = model.score_samples(family, normalized=True).mean() - independent
    assert gained > 0.5  # 0.8 is the mutual information
    loaded = mvrbm.load(model.save(tmp_path / "model"), "cpu")
    np.testing.assert_array_equal(loaded.score_samples(family), model.score_samples(family))
