"""The combination of scores, compared with its formula."""

import numpy as np
import pytest

from mvrbm.estimators.outliers import ensemble as module
from mvrbm.estimators.outliers.ensemble import Ensemble, Range, Spread, combine
from mvrbm.estimators.outliers.linear_prediction import slabs


def test_deviations_count_above_the_mean_and_far_below_it():
    z = [[3.0, -1.0, 0.0], [-2.5, 0.0, 4.0]]
    np.testing.assert_allclose(combine(np.array(z)), [np.sqrt(9 / 3), np.sqrt((1.0**2 + 16) / 3)])


def test_moments_and_ranges_ignore_missing_values():
    nan = np.nan
    values = np.array([[1.0, nan, 5, nan], [3, 7, 5, nan], [nan, 9, 5, nan]])
    spread = Spread.of(values, 0.1)
    np.testing.assert_array_equal(spread.center, [2, 8, 5, 0])
    np.testing.assert_array_equal(spread.scale, [1, 1, 0.1, 0.1])
    np.testing.assert_array_equal(spread.standardize(values[:1]), [[-1, 0, 0, 0]])
    found = Range.of(values, slabs((4,)))
    np.testing.assert_array_equal(found.low, [1, 7, 5, 0])
    np.testing.assert_array_equal(found.width, [2, 2, 2, 2])


def test_the_unit_is_the_smallest_range_of_the_slabs_through_an_entry():
    high = np.array([[1.0, 4, 2], [0, 5, 3]])
    values = np.stack([np.zeros(6), high.ravel()])
    expected = np.minimum(high.max(1)[:, None], high.max(0)[None])
    np.testing.assert_array_equal(Range.of(values, slabs((2, 3))).width, expected.ravel())


@pytest.mark.fixed_seed  # with other data, the changed sample may leave some scores of other folds as they were
def test_each_sample_is_scored_by_an_ensemble_that_was_not_fitted_to_it():
    rng = np.random.default_rng(0)
    values, none = rng.normal(size=(20, 6)), np.zeros((20, 0))
    partitions = slabs((2, 3))
    _, scores = Ensemble.fit(values, partitions, [], none)
    changed = values.copy()
    changed[0] += 100.0  # far from all others, so that it changes every fit that includes it
    _, other = Ensemble.fit(changed, partitions, [], none)
    same_fold = np.isclose(scores, other)
    assert other[0] > 10 * scores[0]
    assert same_fold.sum() == 1  # folds of two samples: the other sample of its fold


def test_missing_entries_are_not_scored():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 1)) + 0.1 * rng.normal(size=(400, 6))
    x[rng.random(x.shape) < 0.1] = np.nan
    ensemble, _ = Ensemble.fit(x, slabs((6,)), [], np.zeros((400, 0)))
    row = np.array([[0.3, 0.3, np.nan, 0.3, 0.3, 0.3]])
    wrong = np.array([[0.3, 0.3, 3.0, 0.3, 0.3, 0.3]])
    good, bad = (ensemble.scores(sample, np.zeros((1, 0)))[0] for sample in (row, wrong))
    assert good < 1.5 < bad
    filled, _ = ensemble.read(row)
    assert ensemble.range.low[2] + filled[0, 2] * ensemble.range.width[2] == pytest.approx(0.3, abs=0.1)


def test_extreme_values_are_those_far_outside_the_other_values_that_differ_from_the_median():
    nan = np.nan
    usual = np.array([np.arange(-10.0, 11), np.arange(21) > 19, np.zeros(21), np.full(21, nan)]).T
    usual[3, 0] = nan
    wrong = usual.copy()
    wrong[5, :3] = 1e9, -9999, 1  # the third column has no other value that differs, so that its value is kept
    expected = wrong.copy()
    expected[5, :2] = nan
    np.testing.assert_array_equal(module._without_extremes(wrong), expected)
    far = np.array([[49.0], [51.0]])  # the large deviation is 10
    found = module._without_extremes(np.concatenate([np.arange(-10.0, 11)[:, None]] * 4 + [far]))
    np.testing.assert_array_equal(found[-2:], [[49.0], [nan]])


def test_rare_values_of_an_entry_that_are_common_in_its_slab_are_not_extreme():
    rng = np.random.default_rng(0)
    x = 0.01 * rng.uniform(-1, 1, size=(100, 2, 3))
    x[:50, 0, 0] = 1
    x[0, 1, 1] = x[0, 0, 1] = 1  # only the second one shares a slab with the first entry
    found = module._without_extremes(x.reshape(100, 6), slabs((2, 3))).reshape(x.shape)
    assert np.argwhere(np.isnan(found)).tolist() == [[0, 1, 1]]


def test_moments_ignore_extreme_values():
    values = np.tile(np.arange(10.0), 10)[:, None]
    spread = Spread.of(np.concatenate([values, [[1e6]]]), 0.1)
    np.testing.assert_allclose([spread.center[0], spread.scale[0]], [values.mean(), values.std()])


@pytest.mark.parametrize("wrong", [1e4, -9999.0, 1e12])
def test_wrong_values_in_the_training_data_hide_no_outliers(wrong):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 1)) + 0.3 * rng.normal(size=(100, 4))
    none = np.zeros((100, 0))
    x[0, 1] = x[1, 2] = wrong
    fitted, scores = Ensemble.fit(x, slabs((4,)), [], none)
    outliers = np.array([[0.0, 9, 0, 0], [0, 0, -9, 0], [0, 0, 0, 9]])
    high = np.quantile(scores, 0.9)
    assert fitted.scores(outliers, none[:3]).min() > high
    assert scores[:2].min() > high


def test_models_of_folds_do_not_depend_on_missing_entries_of_held_out_samples(monkeypatch):
    rng = np.random.default_rng(0)
    values, none = rng.normal(size=(30, 1)) + rng.normal(size=(30, 6)), np.zeros((30, 0))
    values[rng.random(values.shape) < 0.2] = np.nan
    errors_of, models = module._log_errors, []

    def spy(linear, *others):
        models.append(linear)
        return errors_of(linear, *others)

    monkeypatch.setattr(module, "_log_errors", spy)
    for other in (1, 2):
        values[0] = values[other]  # the ranges remain the same
        Ensemble._fit(values, slabs((6,)), [], none)
    same = [np.array_equal(a.weights, b.weights) for a, b in zip(models[:5], models[5:], strict=True)]
    assert sum(same) == 1  # the fold that holds out sample 0
