"""Units of the entries: products of one factor per index of each axis, which follow the units of the data."""

import numpy as np
import pytest
import torch

from mvrbm import MVRBMImputer
from mvrbm.estimators.imputer.scaling import Scaling, axis_units


def units_of(x):
    known = ~np.isnan(x)
    rows, mask = (torch.from_numpy(part.reshape(len(x), -1)) for part in (np.nan_to_num(x), known))
    return axis_units(rows, mask, x.shape[1:]).reshape(x.shape[1:]).numpy()


def some_units(shape, rng):
    """Units of all entries: products of one factor between 1e-6 and 1e6 per index of each axis."""
    found = np.ones(shape)
    for axis, size in enumerate(shape):
        found *= (10 ** rng.uniform(-6, 6, size)).reshape([-1 if other == axis else 1 for other in range(len(shape))])
    return found


@pytest.mark.parametrize(("n", "shape"), [(12, (5,)), (12, (3, 8)), (12, (2, 3, 4)), (1, (3, 20))])
def test_units_follow_those_of_the_data(n, shape):
    rng = np.random.default_rng(0)
    x = 5 + rng.normal(size=(n, *shape)) * rng.gamma(1, 1, size=shape)
    x[rng.random(x.shape) < 0.1] = np.nan
    if n > 1:
        x[:, 0] = 7.1  # constant
    left, right = some_units(shape, rng), some_units(shape, rng)
    if n == 1:  # the deviations of a single sample are those along the last axis, which thus has one unit
        left, right = (np.broadcast_to(part[..., :1], shape) for part in (left, right))
    ratios = [(units_of(x * factors) / factors)[1:] for factors in (left, right)]
    np.testing.assert_allclose(*ratios, rtol=1e-6)


def test_units_are_products_in_which_all_indices_have_similar_deviations():
    rng = np.random.default_rng(0)
    factors = some_units((4, 6), rng)
    x = 3 * factors + rng.normal(size=(500, 4, 6)) * factors
    ratio = units_of(x) / factors
    np.testing.assert_allclose(ratio, ratio.mean(), rtol=0.1)
    logs = np.log(units_of(x))
    np.testing.assert_allclose(logs - logs[:1] - logs[:, :1] + logs[0, 0], 0, atol=1e-9)


def test_indices_with_few_entries_have_one_unit_unless_neighbors_differ():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3, 50)).cumsum(2)
    x[:, 1] *= 3
    units = units_of(x)  # 1000 entries per channel, and 60 per point in time
    np.testing.assert_allclose(units / units[:, :1], 1)
    assert 1.5 < units[1, 0] / units[0, 0] < 6
    x[..., 25:] *= 100
    units = units_of(x)
    assert units[0, 25] > 20 * units[0, 24]


def test_constant_entries_have_finite_units():
    x = np.full((9, 3, 4), 0.1)
    np.testing.assert_array_equal(units_of(x), 1)
    x[:, 1, 2] = np.arange(9)
    assert np.isfinite(units_of(x)).all()
    assert (units_of(x) > 0).all()


def test_the_range_of_an_entry_includes_those_of_all_samples_along_the_second_axis():
    units = torch.tensor([1.0, 2, 4, 8])  # of two samples with two entries each
    scaling = Scaling(torch.tensor(-8.0), torch.tensor(8.0), torch.zeros(2), torch.ones(2), units)
    assert [part.tolist() for part in scaling.own_range()] == [[-8, -4], [8, 4]]


@pytest.mark.parametrize(
    ("shape", "correction", "sample_axes"),
    [((5,), "none", 1), ((5,), "rectified", 1), ((3, 10), "none", 1), ((3, 10), "none", 2)],
)
def test_results_do_not_depend_on_units(shape, correction, sample_axes):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(60, 2)) @ rng.normal(size=(2, int(np.prod(shape))))).reshape(60, *shape)
    x += 0.1 * rng.normal(size=x.shape).cumsum(-1)
    hidden = rng.random(x.shape) < 0.2
    results = []
    for factors in (some_units(shape, rng), some_units(shape, rng)):
        broken = np.where(hidden, np.nan, x * factors)
        # Limits of arrays are those of all entries, so they depend on the units.
        imputer = MVRBMImputer(correction, n_epochs=2, sample_axes=sample_axes, clip=len(shape) == 1, random_state=0)
        filled = imputer.fit_transform(broken)
        results.append(np.stack([filled, imputer.standard_deviation(broken)]) / factors)
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)
    assert ((results[0][0] - x)[hidden] ** 2).mean() < 0.5 * x.var()
