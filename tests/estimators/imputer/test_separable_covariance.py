"""A separable covariance as a factor model gives the conditional means of the mixture that it was taken from."""

import numpy as np
import torch

from mvrbm import MatrixMixture
from mvrbm.estimators.imputer.separable_covariance import fit_separable


def test_conditional_means_are_those_of_the_mixture():
    rng = np.random.default_rng(0)
    x = 3 + rng.normal(size=(60, 3, 4)).cumsum(1).cumsum(2) * rng.gamma(1, 1, size=(60, 1, 1))
    known = rng.random(x.shape) < 0.7
    factors = fit_separable(*(torch.from_numpy(each).flatten(1) for each in (x, known)), (3, 4))
    found = factors.conditional_mean(torch.from_numpy(x).flatten(1), torch.from_numpy(known).flatten(1))
    gaps = np.where(known, x, np.nan)
    mixture = MatrixMixture(1, gate=False, n_epochs=15, random_state=0, device="cpu").fit(gaps)
    np.testing.assert_allclose(found.reshape(x.shape)[~known], mixture.inpaint(gaps)[~known], rtol=1e-6)
