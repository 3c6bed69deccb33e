"""Data without variance: a model learns the values, warns of the entries, and nothing explodes."""

import warnings

import numpy as np
import pytest

from mvrbm import MVRBM, RBM
from mvrbm.errors import ConstantDataWarning

ONE = (np.random.default_rng(0).random((1, 6, 6)) < 0.3).astype(np.float32)
REAL = np.random.default_rng(0).normal(5, 2, (1, 6, 6)).astype(np.float32)

CONSTANT = [
    ("zeros", "bernoulli", np.zeros((100, 6, 6), np.float32), 1),
    ("ones", "bernoulli", np.ones((100, 6, 6), np.float32), 1),
    ("one sample", "bernoulli", ONE, 1),
    ("one sample a hundred times", "bernoulli", ONE.repeat(100, 0), 1),
    ("a constant", "gaussian", np.full((100, 6, 6), 3.0, np.float32), 3),
    ("a large constant", "gaussian", np.full((100, 6, 6), 1e4, np.float32), 1e4),
    ("a learned variance", "gaussian-learned", np.zeros((100, 6, 6), np.float32), 1),
    ("one real sample", "gaussian", REAL, 10),
    ("no counts", "poisson", np.zeros((100, 6, 6), np.float32), 1),
]


@pytest.mark.parametrize("recipe", ["default", "generative"])
@pytest.mark.parametrize(("_", "unit", "X", "size"), CONSTANT, ids=[row[0] for row in CONSTANT])
def test_constants_are_learned(_, unit, X, size, recipe):
    model = MVRBM((4, 4), visible=unit, recipe=recipe, n_epochs=20, random_state=0)
    with pytest.warns(ConstantDataWarning, match=r"all entries in layer 'visible' are constant .*\(0, 0\), \(0, 1\)"):
        model.fit(X)
    assert np.abs(model.reconstruct(X) - X).max() < 0.02 * size
    samples = model.sample(50, steps=20)
    assert np.abs(samples - X[:1]).mean() < 0.01 * size


def test_rare_entries_are_learned_as_rare():
    X = np.zeros((1000, 36), np.float32)
    X[3, 7] = 1
    with pytest.warns(ConstantDataWarning, match="35 of 36 entries"):
        model = RBM(20, n_epochs=5, random_state=0).fit(X)
    assert model.sample(200, steps=20).mean() < 0.01


def test_entries_that_are_constant_are_named():
    X = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    X[:, [1, 3]] = 7
    with pytest.warns(ConstantDataWarning, match=r"2 of 4 entries in layer 'visible' are .* \(1, 3\)"):
        RBM(3, visible="gaussian", n_epochs=1).fit(X)


def test_blank_margins_are_usual():
    X = np.zeros((50, 4, 4), np.float32)
    X[:, 1:, 1:] = np.random.default_rng(0).random((50, 3, 3)) < 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MVRBM((2, 2), n_epochs=1).fit(X)


def test_a_site_is_constant_if_it_has_one_category_only():
    X = np.eye(9, dtype=np.float32)[np.random.default_rng(0).integers(0, 2, (50, 3))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MVRBM((2, 2), visible="categorical", n_epochs=1).fit(X)
    X[:, 1:] = np.eye(9)[4]
    with pytest.warns(ConstantDataWarning, match=r"2 of 3 entries in layer 'visible' .*\(1, 2\)"):
        MVRBM((2, 2), visible="categorical", n_epochs=1).fit(X)
