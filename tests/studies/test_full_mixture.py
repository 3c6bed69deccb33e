"""The mixture of Gaussians on any device equals scikit-learn's, step by step."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from studies.baselines.full_mixture import FullMixture


@pytest.fixture
def samples():
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(4, 3)) * 3
    mixing = rng.normal(size=(4, 3, 3))
    label = rng.integers(0, 4, 400)
    return centers[label] + np.einsum("nij,nj->ni", mixing[label], rng.normal(size=(400, 3)))


@pytest.mark.parametrize("steps", [1, 7])
def test_steps_are_those_of_scikit_learn(samples, steps):
    x = torch.from_numpy(samples)
    ours = FullMixture.start(x, 4, seed=0, ridge=1e-3)
    peer = GaussianMixture(
        4,
        weights_init=ours.weights.numpy(),
        means_init=ours.means.numpy(),
        precisions_init=torch.linalg.inv(ours.covariances).numpy(),
        reg_covar=1e-3,
        max_iter=steps,
        tol=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        peer.fit(samples)
    assert ours.fit(x, steps, tol=-np.inf) == steps
    np.testing.assert_allclose(ours.weights, peer.weights_, rtol=1e-6)
    np.testing.assert_allclose(ours.means, peer.means_, rtol=1e-6)
    np.testing.assert_allclose(ours.covariances, peer.covariances_, rtol=1e-6, atol=1e-9)
    assert ours.score(x) == pytest.approx(peer.score(samples), abs=1e-9)
    assert ours.n_parameters == peer._n_parameters()


def test_fit_stops_at_the_tolerance(samples):
    x = torch.from_numpy(samples)
    mixture = FullMixture.start(x, 4, seed=1)
    before = mixture.score(x)
    assert mixture.fit(x, 1000, tol=1e-6) < 1000
    assert mixture.score(x) > before
    assert abs(mixture.step(x) - mixture.score(x)) < 1e-5
