"""Correlated residuals: conditional means against a dense solution, and covariances against sums over all pairs."""

import numpy as np
import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.estimators.imputer.linear_model import Linear
from mvrbm.estimators.imputer.residual_covariance import Residuals, structures_of_axis


def random_residuals(sizes, seed=0):
    rng = np.random.default_rng(seed)
    roots = [rng.normal(size=(size, size)) for size in sizes]
    matrices = tuple(torch.from_numpy(root @ root.T / size) for root, size in zip(roots, sizes, strict=True))
    return Residuals(matrices, 0.3, torch.from_numpy(rng.uniform(0.5, 2, size=int(np.prod(sizes)))))


def dense(residuals):
    """Covariance of all residuals without noise, and with noise."""
    full = np.eye(1)
    for matrix in residuals.covariances:
        full = np.kron(full, matrix.numpy())
    scale = np.diag(residuals.scale.numpy())
    return scale @ full @ scale, scale @ (full + residuals.noise * np.eye(len(full))) @ scale


@pytest.mark.parametrize("sizes", [(6,), (3, 4), (2, 3, 2)])
def test_means_are_those_of_the_normal_distribution(sizes):
    residuals = random_residuals(sizes)
    smooth, full = dense(residuals)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, len(full)))
    known = rng.random(x.shape) < 0.6
    known[4] = False
    expected = np.zeros_like(x)
    for row, k, out in zip(x, known, expected, strict=True):
        out[:] = smooth[:, k] @ np.linalg.solve(full[np.ix_(k, k)], row[k])
    found = residuals.conditional_mean(torch.from_numpy(np.where(known, x, 99.0)), torch.from_numpy(known))
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert np.abs(expected).max() > 0.5


@pytest.mark.parametrize("structure", ["free", "stationary"])
def test_covariances_are_mean_products_of_known_residuals(structure):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3, 4)).cumsum(2)
    known = rng.random(x.shape) < 0.7
    mean = rng.normal(size=12)
    factors = Factors(torch.from_numpy(mean), torch.zeros(12, 1).double(), torch.full((12,), 4.0).double())
    rows, masks = (torch.from_numpy(each.reshape(60, 12)) for each in (x, known))
    found = Residuals.fit(factors, rows, masks, (3, 4), ("independent", structure), 0.1)
    z = (x - mean.reshape(3, 4)) / 2
    sums, counts = np.zeros((4, 4)), np.zeros((4, 4))
    for sample, mask in zip(z.reshape(-1, 4), known.reshape(-1, 4), strict=True):
        for i in range(4):
            for j in range(4):
                if mask[i] and mask[j]:
                    pairs = [(a, b) for a in range(4) for b in range(4) if abs(a - b) == abs(i - j)]
                    for a, b in pairs if structure == "stationary" else [(i, j)]:
                        sums[a, b] += sample[i] * sample[j]
                        counts[a, b] += 1
    expected = sums / counts
    if structure == "stationary":
        distances = np.abs(np.subtract.outer(np.arange(4), np.arange(4)))
        expected *= (1 - distances / 4) ** 4
    assert np.linalg.eigvalsh(expected).min() > 0  # otherwise, the nearest positive matrix would be another one
    np.testing.assert_allclose(found.covariances[1], expected / expected.diagonal().mean())
    np.testing.assert_array_equal(found.covariances[0], np.eye(3))
    np.testing.assert_array_equal(found.scale, 2.0)


def test_stationary_covariances_of_few_long_series_are_positive():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(2, 600)).cumsum(1))
    known = torch.from_numpy(rng.random(x.shape) < 0.8)
    assert structures_of_axis(600) == ("stationary",)
    found = Residuals.fit(Factors.of_one_mean(x, known), x, known, (600,), ("stationary",), 0.1)
    (matrix,) = found.covariances
    assert torch.linalg.eigvalsh(matrix).min() > -1e-9
    np.testing.assert_allclose(matrix.diagonal(), 1)
    np.testing.assert_allclose(matrix.diagonal(5), matrix[0, 5])
    assert 0.5 < float(matrix[0, 5]) < 1


def test_draws_have_the_covariance_of_the_residuals():
    residuals = random_residuals((3, 4))
    drawn = residuals.draw(200_000, RandomSource(0))
    _, full = dense(residuals)
    deviations = np.sqrt(full.diagonal())
    errors = (np.cov(drawn.T.numpy()) - full) / np.outer(deviations, deviations)
    assert np.abs(errors).max() < 7 * np.sqrt(2 / 200_000)  # standard errors


def test_drawn_errors_are_correlated_and_have_the_standard_deviations_of_the_model():
    distances = np.abs(np.subtract.outer(np.arange(30), np.arange(30)))
    residuals = Residuals((torch.from_numpy(0.95**distances),), 0.01, torch.full((30,), 2.0).double())
    factors = Factors(torch.ones(30).double(), torch.full((30, 1), 0.1).double(), torch.full((30,), 4.0).double())
    linear, known = Linear(factors, residuals), (torch.arange(30) % 15 == 0).expand(4000, 30)
    drawn = linear.draw_errors(torch.ones(4000, 30).double(), known, RandomSource(0))
    assert float((drawn[:, ~known[0]] ** 2).mean()) == pytest.approx(1, abs=1e-6)
    assert float(torch.corrcoef(drawn[:, [7, 8]].T)[0, 1]) > 0.8
    assert float(drawn[:, [7, 22]].mean(0).abs().max()) < 0.1


def test_the_unexplained_variance_is_small_next_to_known_entries():
    distances = np.abs(np.subtract.outer(np.arange(9), np.arange(9)))
    residuals = Residuals((torch.from_numpy(0.9**distances),), 0.01, torch.ones(9).double())
    known = torch.arange(9)[None] == 0
    found = residuals.unexplained(known)[0]
    assert bool((found.diff() > 0).all())
    assert float(found[0]) < 0.6 * float(found[-1])
    exact = 1 - 0.9 ** (2 * np.arange(9)) / 1.01
    np.testing.assert_allclose(found[6:], exact[6:], atol=0.07)
