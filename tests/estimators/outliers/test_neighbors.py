"""Distances to neighbors, compared with plain loops."""

import numpy as np

from mvrbm.estimators.outliers.neighbors import Neighbors


def plain(x, row, skip):
    """Mean distance of a sample to its five nearest others, and the indices of these."""
    distances = np.sqrt(((x - row) ** 2).sum(1))
    if skip is not None:
        distances[skip] = np.inf
    nearest = np.argsort(distances)[:5]
    return distances[nearest].mean(), nearest


def expected(x, row, skip=None):
    own = np.array([plain(x, other, j)[0] for j, other in enumerate(x)])
    distance, nearest = plain(x, row, skip)
    least = 0.1 * np.median(own)
    return np.log(distance + least), np.log((distance + least) / (own[nearest].mean() + least))


def test_distances_are_absolute_and_relative_to_those_of_the_neighbors():
    rng = np.random.default_rng(0)
    x, new = rng.normal(size=(30, 4)), rng.normal(size=(6, 4))
    found = Neighbors(x)
    np.testing.assert_allclose(found.own_scores(), [expected(x, row, i) for i, row in enumerate(x)])
    np.testing.assert_allclose(found.scores(new), [expected(x, row) for row in new])


def test_copies_have_finite_distances():
    x = np.repeat(np.eye(3), 8, axis=0)
    assert np.isfinite(Neighbors(x).own_scores()).all()
    assert np.isfinite(Neighbors(x[:2]).scores(x)).all()


def test_training_samples_are_found():
    x = np.random.default_rng(0).normal(size=(20, 4))
    x[5] = 1e9  # a large range must not make all other samples equal
    new, observed = x[[3, 17, 17, 8]], np.ones((4, 4), dtype=bool)
    new[1:3, 2] += 1e-12
    observed[2, 2] = False  # entries that were filled in have rounding errors
    new[3, 0] += 1e-6
    assert Neighbors(x).find(new, observed).tolist() == [3, -1, 17, -1]
