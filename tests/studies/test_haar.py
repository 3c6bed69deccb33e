"""Haar-likeness against counts and values computed by hand."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from mvrbm import MVRBM, models
from studies.haar import cosine_basis, haar_functions, haar_likeness, likeness

BAD = [
    (lambda: haar_likeness(models.mvrbm((4, 4), (3, 3), rank=2)), "machine must have one visible layer of two axes"),
    (lambda: haar_likeness(models.rbm(4, 3)), "machine must have one visible layer of two axes"),
    (lambda: likeness([[0.0, 0.0]]), "vectors must be finite and not zero"),
    (lambda: haar_functions(0), "length must be a whole number of at least 1, got 0"),
]


@pytest.mark.parametrize(("act", "message"), BAD)
def test_an_error_says_what_was_given_and_what_is_expected(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_there_are_as_many_haar_functions_as_counted_by_hand():
    functions = haar_functions(28)
    assert functions.shape == (28 * 29 // 2 + sum(28 - 2 * w + 1 for w in range(1, 15)), 28)
    np.testing.assert_allclose((functions**2).sum(1), 1)
    assert len(np.unique(functions.round(9), axis=0)) == len(functions)
    sums = functions[28 * 29 // 2 :].sum(1)  # steps are balanced
    np.testing.assert_allclose(sums, 0, atol=1e-12)


def test_the_dyadic_haar_basis_is_among_them():
    basis = np.array([[1]])  # Haar's own recursion
    while len(basis) < 16:
        n = len(basis)
        basis = np.vstack([np.kron(basis, [1, 1]), np.kron(np.eye(n), [1, -1])])
    np.testing.assert_allclose(likeness(basis), 1)


def test_haar_functions_score_one_whatever_their_sign_and_scale():
    functions = haar_functions(13)
    scales = np.random.default_rng(0).choice([-1e200, -3, 1e-200, 0.5], (len(functions), 1))
    np.testing.assert_allclose(likeness(functions * scales), 1)


def test_likeness_by_hand():
    # For (3, 1), boxes explain 9/10, 1/10 and (both) 16/20; the step (1, -1) explains 4/20.
    assert likeness([3.0, 1.0]) == pytest.approx(0.9)
    # For (2, -1), they explain 4/5, 1/5, 1/10, and the step 9/10.
    assert likeness([2.0, -1.0]) == pytest.approx(0.9)


def test_others_score_low():
    white = np.random.default_rng(0).standard_normal((500, 28))
    assert likeness(white).mean() < 0.35
    assert likeness(cosine_basis(28)[2:]).max() < 0.6
    # A step of half-width t in the middle of a full sine explains 2 (1 - cos t)^2 / (pi t) of it, at most 0.858.
    t = np.linspace(0.1, np.pi, 1000)
    expected = (2 * (1 - np.cos(t)) ** 2 / (np.pi * t)).max()
    assert likeness(np.sin(2 * np.pi * (np.arange(200) + 0.5) / 200)) == pytest.approx(expected, abs=1e-3)


def test_the_cosine_basis_is_orthonormal():
    np.testing.assert_allclose(cosine_basis(9) @ cosine_basis(9).T, np.eye(9), atol=1e-12)


def machine_of(U, V):
    machine = models.mvrbm((U.shape[1], V.shape[1]), (U.shape[0], V.shape[0])).double()
    with torch.no_grad():
        for factor, values in zip(machine.links["visible"].factors, (U, V), strict=True):
            factor[0].copy_(torch.from_numpy(values))
    return machine


def test_a_filters_likeness_is_the_best_of_all_two_dimensional_haar_functions():
    chance = np.random.default_rng(1)
    U, V = chance.standard_normal((3, 6)), chance.standard_normal((2, 5))
    found = haar_likeness(machine_of(U, V), draws=2)["filters"]
    family = np.einsum("ai,bj->abij", haar_functions(6), haar_functions(5)).reshape(-1, 30)
    filters = np.einsum("ki,lj->klij", U, V).reshape(6, 30)
    filters /= np.linalg.norm(filters, axis=1, keepdims=True)
    expected = ((filters @ family.T) ** 2).max(1).reshape(3, 2)
    np.testing.assert_allclose(found["each"], expected)
    assert found["mean"] == pytest.approx(expected.mean())


def test_haar_filters_stand_out_from_their_scrambled_selves_and_random_ones_do_not():
    chance = np.random.default_rng(2)
    functions = haar_functions(16)
    haar = functions[chance.choice(len(functions), 10)]
    found = haar_likeness(machine_of(haar, -haar), draws=50)
    for part in ("rows", "columns", "filters"):
        assert found[part]["mean"] == pytest.approx(1)
        assert found[part]["mean"] > found[part]["scrambled"] + 4 * found[part]["scrambled_std"]
    smooth = (chance.standard_normal((12, 16)) / (1 + np.arange(16))) @ cosine_basis(16)
    found = haar_likeness(machine_of(smooth, smooth), draws=50)["filters"]
    assert abs(found["mean"] - found["scrambled"]) < 4 * found["scrambled_std"]
    assert 0 < found["dct"] < found["white"] < found["scrambled"] < 1


def test_haar_likeness_of_a_trained_machine_is_bounded_and_repeatable():
    machine = MVRBM((5, 5), n_epochs=3, random_state=0, device="cpu").fit(load_digits().images[:600] / 16).machine_
    found, again = haar_likeness(machine, draws=5), haar_likeness(machine, draws=5)
    assert 0 < found["filters"]["mean"] <= 1
    assert found["filters"]["scrambled"] == again["filters"]["scrambled"]
    with torch.no_grad():  # (sU, V/s) is the same machine
        machine.links["visible"].factors[0].mul_(-7)
    assert haar_likeness(machine, draws=5)["filters"]["mean"] == pytest.approx(found["filters"]["mean"])
