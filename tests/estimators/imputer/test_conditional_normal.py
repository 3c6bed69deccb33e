"""Normal distributions with noise: conditional means and standard deviations are those of the textbook formulas."""

import numpy as np
import pytest
import torch

from mvrbm.estimators.imputer import conditional_normal as normal_module
from mvrbm.estimators.imputer.conditional_normal import Normal
from mvrbm.estimators.imputer.factor_analysis import Factors


def some_data(size=6, n=7):
    rng = np.random.default_rng(0)
    root = rng.normal(size=(size, size))
    x = rng.normal(size=(n, size))
    known = rng.random((n, size)) < 0.6
    known[0], known[1], known[2] = True, False, known[3]
    return rng.normal(size=size), root @ root.T, rng.uniform(0.1, 1, size), np.where(known, x, 1e3), known


@pytest.mark.parametrize("small", [0, 100])  # one system per pattern, or systems of several samples at once
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conditional_means_and_deviations_are_exact(dtype, small, monkeypatch):
    monkeypatch.setattr(normal_module, "_SMALL", small)
    monkeypatch.setattr(normal_module, "_BATCH_ENTRIES", 3 * 6**2)
    mean, signal, noise, x, known = some_data()
    normal = Normal(*(torch.from_numpy(part) for part in (mean, signal, noise)))
    arguments = torch.from_numpy(x).to(dtype), torch.from_numpy(known)
    found, deviation = normal.conditional_mean(*arguments), normal.deviation(*arguments)
    assert found.dtype == deviation.dtype == dtype
    total = signal + np.diag(noise)
    for row, k, own_mean, own_deviation in zip(x, known, found.numpy(), deviation.numpy(), strict=True):
        gain = np.linalg.solve(total[k][:, k], signal[k]).T  # the signal of known entries is predicted too
        np.testing.assert_allclose(own_mean, mean + gain @ (row[k] - mean[k]), rtol=1e-4)
        variance = total - gain @ signal[k]
        np.testing.assert_allclose(own_deviation[~k] ** 2, variance.diagonal()[~k], rtol=1e-4)
        np.testing.assert_allclose(own_deviation[k] ** 2, noise[k], rtol=1e-4)


def test_many_factors_give_the_same_results_as_few():
    mean, signal, noise, x, known = some_data()
    values, vectors = np.linalg.eigh(signal)
    loadings = (vectors * np.sqrt(values))[:, 3:]  # half as many factors as entries, or as many with zeros
    few, many = (
        Factors(*(torch.from_numpy(part) for part in (mean, np.pad(loadings, ((0, 0), (0, n))), noise))) for n in (0, 3)
    )
    arguments = torch.from_numpy(x), torch.from_numpy(known)
    torch.testing.assert_close(few.conditional_mean(*arguments), many.conditional_mean(*arguments))
    hidden = torch.from_numpy(~known)
    torch.testing.assert_close(few.deviation(*arguments)[hidden], many.deviation(*arguments)[hidden])
