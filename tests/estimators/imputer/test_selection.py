"""Selection of the linear model: the multiple of the noise that predicts held-out entries best."""

import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.imputer.factors import Factors
from mvrbm.estimators.imputer.masking import Samples
from mvrbm.estimators.imputer.selection import best_noise


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
