"""A covariance that is shrunk to a separable one: EM steps compared with a plain transcription, and its selection."""

import numpy as np
import pytest
import torch

from mvrbm import RandomSource
from mvrbm.estimators.imputer.masking import Samples
from mvrbm.estimators.imputer.selection import choose_linear
from mvrbm.estimators.imputer.shrunk_covariance import Prior, ShrunkCovariance, fit_shrunk, is_applicable

NOISE, WEIGHT = 0.2, 0.5


def some_data(n=40, share=0.7):
    rng = np.random.default_rng(0)
    x = 3 + rng.normal(size=(n, 2, 3)).cumsum(1).cumsum(2) * [[1, 5, 1]]
    return x.reshape(n, 6), (rng.random((n, 6)) < share) if share < 1 else np.ones((n, 6), dtype=bool)


def prior_of(z, known, free):
    """Return the separable prior: the identity, or free covariances of both axes, scaled to a mean diagonal of 1."""
    if not free:
        return np.eye(6)
    parts = []
    for axis in (1, 2):
        rows, counts = (np.moveaxis(part.reshape(-1, 2, 3), axis, -1).reshape(-1, axis + 1) for part in (z, known))
        products = (rows.T @ rows) / (counts.T.astype(float) @ counts)
        values, vectors = np.linalg.eigh(products)
        products = (vectors * np.maximum(values, 0)) @ vectors.T
        parts.append(products / products.diagonal().mean())
    return (np.kron(*parts) + NOISE * np.eye(6)) / (1 + NOISE)


@pytest.mark.parametrize("share", [1.0, 0.7])
@pytest.mark.parametrize("free", [False, True])
def test_steps_are_those_of_a_transcription(share, free):
    x, known = some_data(share=share)
    structures = ("free", "free") if free else ("independent", "independent")
    tensors = torch.from_numpy(np.where(known, x, 0.0)), torch.from_numpy(known)
    found = fit_shrunk(*tensors, (2, 3), Prior(structures, NOISE, WEIGHT, 3))

    center = np.array([column[mask].mean() for column, mask in zip(x.T, known.T, strict=True)])
    scale = np.array([column[mask].std() for column, mask in zip(x.T, known.T, strict=True)])
    z = np.where(known, (x - center) / scale, 0.0)
    prior = prior_of(z, known, free)
    mean, covariance = np.zeros(6), prior
    for _ in range(4):
        filled, products = z.copy(), WEIGHT * len(x) * prior
        for row, k in zip(filled, known, strict=True):
            gain = np.linalg.solve(covariance[np.ix_(k, k)], covariance[np.ix_(k, ~k)]).T
            row[~k] = mean[~k] + gain @ (row[k] - mean[k])
            products[np.ix_(~k, ~k)] += covariance[np.ix_(~k, ~k)] - gain @ covariance[np.ix_(k, ~k)]
        mean = filled.mean(0)
        covariance = ((filled - mean).T @ (filled - mean) + products) / (len(x) * (1 + WEIGHT))
    np.testing.assert_allclose(found.mean, center + scale * mean, rtol=1e-9)
    total = found.loadings @ found.loadings.T + torch.diag(found.noise)
    np.testing.assert_allclose(total, scale[:, None] * covariance * scale, rtol=1e-8, atol=1e-10)


def test_the_distribution_and_its_factors_predict_the_same():
    x, known = (torch.from_numpy(part) for part in some_data())
    x = torch.where(known, x, 0.0)
    fitted = ShrunkCovariance(x, known, (2, 3), Prior(("independent", "stationary"), NOISE, WEIGHT, 0))
    normal, factors = fitted.normal(WEIGHT), fitted.factors(WEIGHT)
    found = [each.conditional_mean(x, known)[~known] for each in (normal, factors)]
    torch.testing.assert_close(*found)


def test_too_much_work_is_not_tried():
    masks = RandomSource(0).uniform((200, 1000), torch.empty(0)) < 0.5
    assert is_applicable(masks[:, :100])
    assert not is_applicable(masks)
    assert is_applicable(masks[:1].expand(200, -1))  # one mask


def test_it_is_chosen_if_there_are_many_factors_of_decreasing_size():
    generator = torch.Generator().manual_seed(0)
    loadings = torch.randn(60, 60, generator=generator).double() * torch.linspace(1, 0, 60).double() ** 3
    x = torch.randn(200, 60, generator=generator).double() @ loadings.T
    held = RandomSource(0).uniform(x.shape, x) < 0.2
    errors = {}
    chosen = choose_linear(Samples(x, ~held, held), torch.tensor(1.0), (60,), 1, None, errors.__setitem__)
    assert chosen.prior is not None
    best_factors = min(error for name, error in errors.items() if "n_factors" in name)
    assert chosen.error == errors["sample_axes=1, shrunk covariance"] < 0.8 * best_factors
    refitted = chosen.refit(x, ~held)
    torch.testing.assert_close(refitted.conditional_mean(x, ~held), chosen.linear.conditional_mean(x, ~held))
