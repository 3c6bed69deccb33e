"""Selection of the linear model: held-out entries, weights of their errors, and the noise that predicts them best."""

import numpy as np
import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.imputer.factors import Factors
from mvrbm.estimators.imputer.masking import Samples
from mvrbm.estimators.imputer.selection import best_noise, choose_factors, entry_weights


@pytest.mark.parametrize("multiple", [1.0, 4.0])
def test_noise_that_is_too_small_is_multiplied(multiple):
    rng = RandomSource(0)
    loadings = rng.normal((12, 3), torch.empty(0))
    true = Factors(torch.zeros(12), loadings, torch.full((12,), 4.0))
    nothing = torch.zeros(2000, 12, dtype=torch.bool)
    x, known = true.draw(torch.zeros(2000, 12), nothing, rng), rng.uniform((2000, 12), loadings) < 0.5
    error, found = best_noise(true.with_noise(1 / multiple), Samples(x, known, ~known), torch.ones(12))
    assert found == multiple
    assert error == pytest.approx(float((true.conditional_mean(x, known) - x)[~known].square().mean().sqrt()), rel=1e-4)


def test_factors_are_fitted_without_the_held_out_entries():
    rng = RandomSource(0)
    x = rng.normal((80, 6), torch.empty(0).double())
    held = rng.uniform((80, 6), x) < 0.2
    found = [
        choose_factors(Samples(values, ~held, held), torch.ones(6), (6,), 1, 2, lambda *_: None)
        for values in (x, torch.where(held, 1000.0, x))
    ]
    assert found[0].error < 2 < 500 < found[1].error
    for left, right in zip(vars(found[0].factors).values(), vars(found[1].factors).values(), strict=True):
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
