"""Each unit by itself: the distribution of one layer in an outer field."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from given_numbers import GivenNumbers
from mvrbm import Bernoulli, Categorical, Gaussian, RandomSource
from mvrbm.units import make_unit, unit_names
from mvrbm.units.base import UNITS as REGISTERED
from tables import OTHER_UNITS, UNITS, VARIANTS, generator, random_layer

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
SHAPES = [(3,), (2, 3), (2, 1, 2)]
EVERY = list(itertools.product(VARIANTS, SHAPES))
WITH_OTHERS = EVERY + list(itertools.product(OTHER_UNITS, SHAPES))
UNTIED = [name for name in (*VARIANTS, *OTHER_UNITS) if "tied" not in name]


def unit_named(variant, shape):
    unit, rng = (VARIANTS | OTHER_UNITS)[variant](shape).double(), generator(f"{variant} {shape}")
    with torch.no_grad():
        for parameter in unit.parameters():
            parameter.copy_(torch.from_numpy(0.6 * rng.standard_normal(parameter.shape)))
    return unit


def field_for(unit, n=4):
    return torch.from_numpy(generator("field").standard_normal((n, *unit.shape)))


def every_site(unit):
    """Numbers of the entries of each site, and the values that the site can have."""
    width = unit.shape[-1] if unit.entry_modes else 1
    values = UNITS[unit.name].site_values(width)
    return [(list(range(at, at + width)), values) for at in range(0, math.prod(unit.shape), width)]


def by_quadrature(b, c, f):
    """Integrals of exp(-(c x^2 / 2 - b x + b^2 / 2c) + f x), and of x times that."""

    def density(x):
        return math.exp(-(c * x * x / 2 - b * x + b * b / (2 * c)) + f * x)

    middle, reach = (b + f) / c, 12 / math.sqrt(c)
    ends = (middle - reach, middle + reach)
    area, _ = integrate.quad(density, *ends, epsabs=1e-13, epsrel=1e-13)
    first, _ = integrate.quad(lambda x: x * density(x), *ends, epsabs=1e-13, epsrel=1e-13)
    return area, first


@pytest.mark.fixed_seed  # the sum over counts of Poisson units is long enough for these fields
@pytest.mark.parametrize(("variant", "shape"), EVERY)
@torch.no_grad()
def test_log_normalizer_and_mean_site_by_site(variant, shape):
    unit = unit_named(variant, shape)
    field = field_for(unit, 2)
    own = UNITS[unit.name].own(unit)
    for row, f in enumerate(field.flatten(1)):
        total, means = 0.0, torch.zeros(math.prod(shape), dtype=torch.float64)
        for entries, values in every_site(unit):
            b, c, s, f_here = (part[entries] for part in (own.linear, own.curvature, own.scale, f))
            if values is not None:
                weights = torch.exp(values @ (b + f_here) - UNITS[unit.name].base(values).sum(1))
                total += math.log(weights.sum())
                means[entries] = weights @ values / weights.sum()
            else:
                area, first = by_quadrature(b.item(), c.item(), (f_here / s).item())
                total += math.log(area)
                means[entries] = first / area
        np.testing.assert_allclose(unit.log_normalizer(field)[row].item(), total, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(unit.mean(field)[row].flatten(), means, **TOLERANCE)


@pytest.mark.parametrize(("variant", "shape"), WITH_OTHERS)
def test_mean_is_the_slope_of_the_log_normalizer(variant, shape):
    unit = unit_named(variant, shape)
    field = field_for(unit).requires_grad_()
    (slope,) = torch.autograd.grad(unit.log_normalizer(field).sum(), field)
    torch.testing.assert_close(unit.statistic(unit.mean(field)), slope, **TOLERANCE)


@pytest.mark.parametrize(("variant", "shape"), EVERY)
@torch.no_grad()
def test_energy_is_a_sum_over_sites(variant, shape):
    unit = unit_named(variant, shape)
    x = random_layer(unit, 4, generator("x"), padding=True)
    own = UNITS[unit.name].own(unit)
    flat = x.flatten(1)
    each = own.curvature * flat**2 / 2 - own.linear * flat + UNITS[unit.name].base(flat)
    expected = each.sum(1) + own.constant
    torch.testing.assert_close(unit.energy(x), expected, **TOLERANCE)
    assert unit.site_energy(x).shape == (4, *unit.site_shape)
    torch.testing.assert_close(unit.statistic(x).flatten(1), flat / own.scale)


@pytest.mark.parametrize(("variant", "shape"), WITH_OTHERS)
def test_gradients_are_those_of_autograd(variant, shape):
    unit = unit_named(variant, shape)
    x, field = random_layer(unit, 5, generator("x")), field_for(unit, 5)
    learned = {key: p for key, p in unit.named_parameters() if p.requires_grad}
    pull = (unit.statistic(x) * field).flatten(1).sum(1)
    weights = torch.tensor([0.5, -1.0, 0.0, 2.0, 0.3], dtype=x.dtype)
    own, normalizer, mean = unit.energy(x) - pull, unit.log_normalizer(field), unit.mean(field)
    for value, analytic in [
        (own.mean(), unit.energy_gradient(x, field)),
        (own @ weights, unit.energy_gradient(x, field, weights)),
        (normalizer.mean(), unit.normalizer_gradient(field)),
        (normalizer @ weights, unit.normalizer_gradient(field, weights, mean)),
    ]:
        expected = torch.autograd.grad(value, list(learned.values()), retain_graph=True)
        assert list(analytic) == list(learned)
        for key, gradient in zip(learned, expected, strict=True):
            torch.testing.assert_close(analytic[key], gradient, **TOLERANCE)


# -- draws: one random number in, one value out -----------------------------------------------------------


def test_bernoulli_is_one_where_the_number_falls_below_its_mean():
    unit, field = unit_named("bernoulli", (3,)), torch.zeros(1, 3).double()
    mean = unit.mean(field)
    for number, expected in [(mean - 1e-9, 1.0), (mean, 0.0), (mean + 1e-9, 0.0)]:
        assert bool((unit.sample(field, GivenNumbers([number])) == expected).all())


def test_gaussian_draws_have_its_spread():
    unit = unit_named("gaussian-learned", (2, 3))
    field = field_for(unit)
    normal = RandomSource(2).normal(field.shape, field)
    own = UNITS["gaussian"].own(unit)
    mean, spread = own.linear / own.curvature + own.scale * field.flatten(1), own.scale
    drawn = unit.sample(field, GivenNumbers([normal]))
    torch.testing.assert_close(drawn.flatten(1), mean + spread * normal.flatten(1))


def test_gaussian_density_is_that_of_scipy():
    unit = unit_named("gaussian-learned", (4,))
    field, x = field_for(unit, 1), random_layer(unit, 1, generator("x"))
    log_density = (unit.statistic(x) * field).sum() - unit.energy(x) - unit.log_normalizer(field)
    b, s = unit.bias.detach().numpy(), np.exp(unit.log_variance.detach().numpy() / 2)
    expected = stats.norm.logpdf(x.numpy(), b + s * field.numpy(), s).sum()
    np.testing.assert_allclose(log_density.item(), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["gaussian-axes", "gaussian-one"])
def test_gaussian_variances_of_axes_start_from_their_product(kind):
    variance = torch.outer(torch.tensor([0.5, 1.0, 4.0]), torch.tensor([1.0, 3.0]))
    unit = make_unit(kind, (3, 2))
    unit.initialize_from(torch.zeros(3, 2), variance, 10)
    expected = variance if kind == "gaussian-axes" else variance.mean().expand(3, 2)
    torch.testing.assert_close(unit.scale.detach().expand(3, 2).float() ** 2, expected)
    assert sum(p.numel() for p in unit.parameters()) == 6 + {"gaussian-axes": 5, "gaussian-one": 1}[kind]


def test_gaussian_variances_have_no_other_kinds():
    with pytest.raises(ValueError, match="learn_variance must be"):
        Gaussian((3, 2), learn_variance="rows")


def test_categorical_inverts_its_distribution_function():
    unit = unit_named("categorical", (1, 4))
    field = torch.zeros(1, 1, 4).double()
    edges = unit.mean(field)[0, 0].cumsum(0)
    for category in range(4):
        low = edges[category - 1] if category else torch.zeros(())
        for number in (low + 1e-9, (low + edges[category]) / 2, edges[category] - 1e-9):
            drawn = unit.sample(field, GivenNumbers([number.double().reshape(1, 1)]))
            assert drawn[0, 0].tolist() == [float(k == category) for k in range(4)]


def test_categorical_draws_a_category_when_rounding_leaves_a_gap():
    unit = Categorical((1, 3))
    drawn = unit.sample(torch.zeros(1, 1, 3), GivenNumbers([torch.ones(1, 1)]))
    assert drawn.tolist() == [[[0.0, 0.0, 1.0]]]


# Counts take one number per word: see test_counts.py.
ONE_NUMBER_PER_SITE = [name for name in VARIANTS if UNITS[VARIANTS[name]((2, 3)).name].probability]
ONE_NUMBER_PER_SITE.remove("counts-of-2")


@pytest.mark.parametrize("variant", ONE_NUMBER_PER_SITE)
@torch.no_grad()
def test_draws_at_evenly_spaced_numbers_have_the_distribution(variant):
    unit, n = unit_named(variant, (2, 3)), 20_000
    field = field_for(unit, 1)
    even = ((torch.arange(n, dtype=torch.float64) + 0.5) / n).reshape(n, *[1] * len(unit.site_shape))
    drawn = unit.sample(field.expand(n, 2, 3), GivenNumbers([even.expand(n, *unit.site_shape)])).flatten(1)
    for entries, values in every_site(unit):
        expected = UNITS[unit.name].probability(values, unit.mean(field).flatten()[entries])
        found = (drawn[:, None, entries] == values).all(2).double().mean(0)
        torch.testing.assert_close(found, expected, rtol=0, atol=1.5 / n)


@pytest.mark.parametrize(("variant", "shape"), WITH_OTHERS)
def test_large_fields_stay_finite(variant, shape):
    unit = unit_named(variant, shape)
    for size in (-1e4, 1e4):
        field = torch.full((2, *shape), size, dtype=torch.float64)
        assert bool(torch.isfinite(unit.log_normalizer(field)).all())
        assert bool(torch.isfinite(unit.mean(field)).all())


# -- start from data --------------------------------------------------------------------------------------


def moments(x):
    return x.mean(0), x.var(0, correction=0), len(x)


@pytest.mark.parametrize("variant", [*VARIANTS, *OTHER_UNITS])
def test_moments_may_be_on_another_device_than_the_unit(variant):
    unit = (VARIANTS | OTHER_UNITS)[variant]((2, 3)).to("meta")  # a device that every machine has
    unit.initialize_from(torch.full((2, 3), 0.4), torch.full((2, 3), 0.2), 10)
    assert {parameter.device.type for parameter in unit.parameters()} == {"meta"}


def test_bernoulli_starts_at_log_odds_with_a_pseudo_count():
    x = torch.tensor([[0.0, 1, 1], [0, 1, 0], [0, 1, 1]], dtype=torch.float64)
    unit = Bernoulli(3).double()
    unit.initialize_from(*moments(x))
    np.testing.assert_allclose(unit.bias.detach(), [np.log(1 / 4), np.log(4 / 1), np.log(3 / 2)])


def test_tied_bernoulli_pools_its_entries():
    x = torch.tensor([[[0.0, 1], [0, 1]], [[1, 1], [0, 0]]], dtype=torch.float64)
    unit = Bernoulli((2, 2), bias_shape=(1, 2)).double()
    unit.initialize_from(*moments(x))
    np.testing.assert_allclose(unit.bias.detach(), np.log([[(1 + 1) / (3 + 1), (3 + 1) / (1 + 1)]]))


def test_gaussian_takes_location_and_scale():
    x = 128 + 40 * torch.from_numpy(generator("gray levels").standard_normal((30, 2, 3)))
    unit = Gaussian((2, 3)).double()
    unit.initialize_from(*moments(x))
    torch.testing.assert_close(unit.bias, x.mean(0), check_dtype=False)
    torch.testing.assert_close(unit.log_variance.exp(), x.var(0, correction=0))


def test_tied_gaussian_pools_within_and_between_entries():
    x = torch.from_numpy(generator("pool").standard_normal((30, 4, 3))) + torch.arange(4.0)[:, None]
    unit = Gaussian((4, 3), bias_shape=(1, 3)).double()
    unit.initialize_from(*moments(x))
    pooled = x.reshape(-1, 3)
    torch.testing.assert_close(unit.bias[0], pooled.mean(0))
    torch.testing.assert_close(unit.log_variance.exp()[0], pooled.var(0, correction=0))


@pytest.mark.parametrize("spread", [0.0, 5.0])
def test_constant_entries_are_not_divided_by_zero(spread):
    x = torch.ones(6, 2, dtype=torch.float64) * 7
    x[::2, 1] += spread
    unit = Gaussian(2).double()
    unit.initialize_from(*moments(x))
    expected = [0.01 * spread**2 / 4, spread**2 / 4] if spread else [49e-6, 49e-6]  # a thousandth of their size
    np.testing.assert_allclose(unit.log_variance.exp().detach(), expected)


def test_scales_far_apart_are_all_kept():
    """Columns of a table in their own units: the largest says nothing of the others."""
    scales = torch.tensor([0.2, 1.0, 3.0, 300.0], dtype=torch.float64)
    x = scales * torch.from_numpy(generator("scales").standard_normal((500, 4)))
    unit = Gaussian(4).double()
    unit.initialize_from(*moments(x))
    np.testing.assert_allclose(unit.scale.detach(), x.std(0, correction=0))


def test_a_shared_bias_has_the_gain_of_all_that_share_it():
    assert float(Bernoulli((4, 6), bias_shape=(1, 6)).gains()["bias"]) == 4
    assert Bernoulli((4, 6)).gains() == {}
    gains = Gaussian((4, 6), bias_shape=(1, 1), learn_variance=True).gains()
    assert (float(gains["bias"].detach()), float(gains["log_variance"])) == (24, 24)


def test_categorical_starts_at_frequencies_with_a_pseudo_count():
    x = torch.eye(3, dtype=torch.float64)[torch.tensor([[0, 1], [0, 2], [1, 2], [0, 2]])]
    unit = Categorical((2, 3)).double()
    unit.initialize_from(*moments(x))
    mean = unit.mean(torch.zeros(1, 2, 3))[0]
    np.testing.assert_allclose(mean.detach(), np.array([[4, 2, 1], [1, 2, 4]]) / 7)


@pytest.mark.parametrize("variant", UNTIED)
@torch.no_grad()
def test_every_unit_starts_at_the_mean_of_the_data(variant):
    unit = unit_named(variant, (2, 3))
    x = unit.example(500, RandomSource(1))
    unit.initialize_from(*moments(x))
    pseudo_counts = {"rtol": 0.02, "atol": 0.005}
    torch.testing.assert_close(unit.mean(torch.zeros(1, 2, 3).double())[0], x.mean(0), **pseudo_counts)


# -- valid and invalid data -------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "shape"), WITH_OTHERS)
def test_examples_are_valid_data(variant, shape):
    unit = unit_named(variant, shape)
    x = unit.example(50, RandomSource(0))
    unit.check(x, "layer")
    low, high = unit.data_range
    assert x.shape == (50, *shape)
    assert low <= float(x.min()) <= float(x.max()) <= high
    assert not torch.equal(x[:25], x[25:])


@pytest.mark.parametrize("name", UNITS)
def test_invalid_data_is_an_error_that_names_the_layer(name):
    unit = UNITS[name].unit((2, 3))
    for value in (math.nan, math.inf, *UNITS[name].invalid):
        x = unit.example(4, RandomSource(0))
        x[2, 0, 1] = value
        with pytest.raises(ValueError, match="layer 'counts'"):
            unit.check(x, "counts")


@pytest.mark.parametrize("name", UNITS)
def test_the_first_name_of_a_row_builds_the_unit(name):
    for variant in set(UNITS[name].variants) & set(unit_names()):
        assert make_unit(variant, (2, 3)).config() == VARIANTS[variant]((2, 3)).config()
    assert type(make_unit(name, 3)) is UNITS[name].unit
    with pytest.raises(ValueError, match=r"must be one of .*'bernoulli'.* got 'bernouilli'"):
        make_unit("bernouilli", 3)


# -- in networks and fast paths ---------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "shape"), WITH_OTHERS)
@torch.no_grad()
def test_inverse_scale_is_that_of_the_statistic(variant, shape):
    unit = unit_named(variant, shape)
    torch.testing.assert_close(unit.inverse_scale, unit.statistic(torch.ones(shape).double()), **TOLERANCE)


@pytest.mark.parametrize("name", unit_names())
def test_units_that_can_be_stacked_are_stacked_as_units_that_exist(name):
    unit = make_unit(name, 3)
    assert unit.stacked_as in (None, *unit_names())
    assert unit.sampled_as in (None, "bernoulli", "gaussian", "categorical")
    assert unit.activation(torch.zeros(2, 3)).shape == (2, 3)


# -- a constant field moved into the bias -----------------------------------------------------------------


@pytest.mark.parametrize("variant", UNTIED)
@torch.no_grad()
def test_absorbing_a_field_gives_the_same_distribution(variant):
    unit = unit_named(variant, (2, 3))
    x, constant, field = random_layer(unit, 4, generator("x")), field_for(unit, 1), field_for(unit)

    def log_probability(outer):
        return (unit.statistic(x) * outer).flatten(1).sum(1) - unit.energy(x) - unit.log_normalizer(outer)

    before = log_probability(field + constant)
    unit.absorb(constant[0])
    torch.testing.assert_close(log_probability(field), before, **TOLERANCE)


# -- geometry and looks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "shape"), WITH_OTHERS)
def test_config_builds_the_unit_again(variant, shape):
    unit = unit_named(variant, shape)
    again = type(unit)(**unit.config()).double()
    again.load_state_dict(unit.state_dict())
    field = field_for(unit)
    assert torch.equal(unit.mean(field), again.mean(field))
    assert (again.shape, again.bias_shape, again.config()) == (unit.shape, unit.bias_shape, unit.config())
    assert repr(again) == repr(unit)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in unit.parameters()]


def test_sites_of_each_kind():
    assert (Bernoulli((2, 3)).n_sites, Gaussian(4).n_sites, Categorical((2, 3)).n_sites) == (6, 4, 2)
    assert (Bernoulli(2).levels, Gaussian(2).levels, Categorical((2, 5)).levels) == (2, math.inf, 5)
    assert (Categorical((2, 3)).site_shape, Categorical((2, 3)).entry_shape) == ((2,), (3,))
    assert (Categorical(3).site_shape, Categorical(3).n_sites) == ((), 1)


def test_fixed_variance_is_not_learned():
    assert not Gaussian(3).log_variance.requires_grad
    assert Gaussian(3, learn_variance=True).log_variance.requires_grad
    np.testing.assert_array_equal(Gaussian(3).scale.detach(), 1)
    assert list(Gaussian(3).double().energy_gradient(torch.zeros(1, 3).double(), torch.zeros(1, 3))) == ["bias"]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if math.isfinite(VARIANTS[name]((2, 3)).levels)])
def test_decode_lists_every_value(variant):
    unit = unit_named(variant, (2, 3))
    levels = int(unit.levels)
    values = unit.decode(torch.arange(levels)[:, None])
    expected = UNITS[unit.name].site_values(3)
    torch.testing.assert_close(values.reshape(levels, -1), expected)
    assert unit.statistic_bounds == (0.0, float(expected.max()))


@pytest.mark.parametrize(("variant", "shape"), EVERY)
def test_middle_takes_no_side(variant, shape):
    unit = unit_named(variant, shape)
    alone = unit.mean(torch.zeros(1, *shape)).flatten()  # there is no middle of infinitely many values
    for entries, values in every_site(unit):
        expected = values.mean(0) if math.isfinite(unit.levels) else alone[entries]
        torch.testing.assert_close(unit.middle.flatten()[entries], expected.detach(), **TOLERANCE)


def test_padding_is_absent_only_where_units_are_padded():
    x = torch.tensor([[[1.0, 0], [0, 0]]])
    assert Categorical((2, 2), padded=True).absent(x).tolist() == [[[False, False], [True, True]]]
    for unit in (Categorical((2, 2)), Bernoulli((2, 2)), Gaussian((2, 2))):
        assert unit.absent(x) is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_checks_are_silent_about_states_that_gradients_flow_through(variant, monkeypatch):
    """PyTorch warns of that once a process, so it is not waited for: nothing may become a number undetached."""
    unit = unit_named(variant, (2, 3))
    states = unit.sample(field_for(unit), RandomSource(0)).detach().requires_grad_() * 1.0
    looked_at = []
    real = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda x: (looked_at.append(x.requires_grad), real(x.detach()))[1])
    unit.check(states, "layer")
    assert not any(looked_at)


@pytest.mark.parametrize(
    ("name", "variants"),
    [("bernoulli", None), ("gaussian-axes", None), ("of-nobody", {"of-nobody": {}, "gaussian-axes": {}})],
)
def test_a_name_belongs_to_one_class(name, variants):
    fields = {"name": name} if variants is None else {"name": name, "variants": variants}
    before = dict(REGISTERED)
    with pytest.raises(ValueError, match=r"name of .*Mine belongs to mvrbm\.units\..*; choose another"):
        type("Mine", (Bernoulli,), fields)
    assert before == REGISTERED
