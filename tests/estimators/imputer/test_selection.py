"""Selection of the linear model: held-out entries, weights of their errors, and the noise that predicts them best."""

import re

import numpy as np
import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.estimators.imputer.interpolation import Interpolation
from mvrbm.estimators.imputer.masking import Samples
from mvrbm.estimators.imputer.selection import Trials, choose_linear, entry_weights, surely_smaller


@pytest.mark.parametrize("multiple", [1.0, 4.0])
def test_noise_that_is_too_small_is_multiplied(multiple):
    rng = RandomSource(0)
    loadings = rng.normal((12, 3), torch.empty(0))
    true = Factors(torch.zeros(12), loadings, torch.full((12,), 4.0))
    nothing = torch.zeros(2000, 12, dtype=torch.bool)
    x, known = true.draw(torch.zeros(2000, 12), nothing, rng), rng.uniform((2000, 12), loadings) < 0.5
    trials = Trials(Samples(x, known, ~known), torch.ones(12), (12,), 1, None, print)
    found = trials.with_best_noise(true.with_noise(1 / multiple))
    assert found.noise == multiple
    assert found.error == pytest.approx(
        float((true.conditional_mean(x, known) - x)[~known].square().mean().sqrt()), rel=1e-4
    )


def test_factors_are_fitted_without_the_held_out_entries():
    rng = RandomSource(0)
    x = rng.normal((80, 6), torch.empty(0).double())
    held = rng.uniform((80, 6), x) < 0.2
    found = [
        choose_linear(Samples(values, ~held, held), torch.ones(6), (6,), 1, 2, lambda *_: None)
        for values in (x, torch.where(held, 1000.0, x))
    ]
    assert found[0].error < 2 < 500 < found[1].error
    fitted = [vars(each.linear.factors.with_noise(1 / each.noise)) for each in found]
    for left, right in zip(fitted[0].values(), fitted[1].values(), strict=True):
        torch.testing.assert_close(left, right)


def test_weights_are_inverse_variances_of_the_known_entries():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 4)) * [1, 2, 3, 0] + [0, 5, -5, 7]  # the last column is constant
    x[rng.random(x.shape) < 0.3] = np.nan
    known = torch.from_numpy(~np.isnan(x))
    variances = np.nanvar(x, 0)
    by_entry, alike = (
        entry_weights(torch.from_numpy(np.nan_to_num(x)), known, per_entry=each) for each in (True, False)
    )
    np.testing.assert_allclose(by_entry, [*1 / variances[:3], 0])
    assert float(alike) == pytest.approx(1 / variances.mean())


def random_walks(n, shape, seed=0):
    """Arrays that are random walks along the second axis, plus a bit of noise."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(n, *shape)).cumsum(2) + 0.1 * rng.normal(size=(n, *shape))).flatten(1)


def test_residuals_that_are_correlated_are_found():
    x = random_walks(60, (2, 40))
    held = RandomSource(0).uniform(x.shape, x) < 0.3
    reported = {}
    chosen = choose_linear(
        Samples(x, ~held, held), torch.tensor(1.0), (2, 40), 1, None, lambda name, error: reported.update({name: error})
    )
    residuals = chosen.linear.residuals
    if isinstance(residuals, Interpolation):
        assert residuals.axis == 1
    else:
        assert chosen.structures[0] == "independent" != chosen.structures[1]
    simple = min(error for name, error in reported.items() if re.fullmatch(r".*n_factors=\d+", name))
    assert chosen.error < 0.92 * simple


def test_differences_are_sure_beyond_their_standard_error():
    rng = np.random.default_rng(0)
    before = torch.from_numpy(rng.uniform(1, 2, size=100))
    gains = torch.from_numpy(rng.normal(size=100))
    for times in (0.9, 1.1):  # standard errors by which the mean gain differs from zero
        shifted = gains - gains.mean() + times * gains.std() / 10
        assert surely_smaller(10 + 0 * before - 1e-3 * shifted, 10 + 0 * before) == (times > 1)
    assert not surely_smaller(before, before)
    # Most samples gain, but one sample loses more than they gain together.
    assert not surely_smaller(torch.tensor([0.9] * 20 + [13.0]), torch.tensor([1.0] * 20 + [10.0]))
    # A gain of a tenth in each sample is certain, even if one sample counts more than all others.
    assert surely_smaller(torch.tensor([0.9] * 20 + [900.0]), torch.tensor([1.0] * 20 + [1000.0]))
    # A large gain in a few samples outweighs small losses in all others, unless both are required.
    few = torch.tensor([1.01] * 90 + [1.0] * 10), torch.tensor([1.0] * 90 + [3.0] * 10)
    assert surely_smaller(*few)
    assert not surely_smaller(torch.tensor([1.5] * 90 + [1.0] * 10), torch.tensor([1.0] * 90 + [9.0] * 10), both=True)
