"""Effective couplings and contact maps against their formulas, written out entry by entry in NumPy."""

import itertools

import numpy as np
import pytest
import torch

from mvrbm import (
    CP,
    MPO,
    Bernoulli,
    BoltzmannMachine,
    Categorical,
    Dense,
    Gaussian,
    Kronecker,
    Rectified,
    SequenceRBM,
    Tucker,
)
from mvrbm.sequences import contact_map, contact_precision, effective_couplings, hidden_weights, ranked_pairs
from tables import full_matrix, generator, randomize

SITES, LETTERS = 5, 3
COUPLINGS = [(Kronecker(2), (2, 3)), (Tucker((3, 2)), (4,)), (CP(3), (4,)), (MPO(2), (2, 2)), (Dense(), (2, 2))]
IDS = [coupling.name for coupling, _ in COUPLINGS]


def machine_of(coupling, hidden, unit=Bernoulli):
    machine = BoltzmannMachine(Categorical((SITES, LETTERS)), unit(hidden), coupling.copy_without_shapes())
    return randomize(machine, generator(f"{coupling.name} {unit.name}"))


def codes_of(n, letters=LETTERS, sites=SITES):
    return generator("sequences").integers(letters, size=(n, sites))


def weights_by_definition(machine):
    W = full_matrix(machine.links["visible"]).detach().numpy().reshape(-1, SITES, LETTERS)
    return W - W.mean(2, keepdims=True)


def couplings_by_definition(machine, codes):
    """Average the variances of Bernoulli units over sequences, and sum over hidden units."""
    raw = full_matrix(machine.links["visible"]).detach().numpy().reshape(-1, SITES, LETTERS)
    bias, W = machine.hidden.bias.detach().numpy().ravel(), weights_by_definition(machine)
    J = np.zeros((SITES, SITES, LETTERS, LETTERS))
    for row in codes:
        for k in range(len(W)):
            p = 1 / (1 + np.exp(-bias[k] - sum(raw[k, i, a] for i, a in enumerate(row))))
            for i, j in itertools.permutations(range(SITES), 2):
                J[i, j] += p * (1 - p) * np.outer(W[k, i], W[k, j]) / len(codes)
    return J


def map_by_definition(J, letters):
    """Take the norm of each block without the gap, and subtract the average product correction."""
    scores = np.zeros((SITES, SITES))
    for i, j in itertools.permutations(range(SITES), 2):
        scores[i, j] = np.sqrt(sum(J[i, j, a, b] ** 2 for a in letters for b in letters))
    mean = scores.sum(1) / (SITES - 1)
    for i, j in itertools.permutations(range(SITES), 2):
        scores[i, j] -= mean[i] * mean[j] / mean.mean()
    return scores


@pytest.mark.parametrize(("coupling", "hidden"), COUPLINGS, ids=IDS)
def test_couplings_and_scores_are_their_formulas(coupling, hidden):
    machine, codes = machine_of(coupling, hidden), codes_of(7)
    expected = couplings_by_definition(machine, codes)
    np.testing.assert_allclose(effective_couplings(machine, codes), expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        contact_map(machine, codes), map_by_definition(expected, range(LETTERS)), rtol=1e-10, atol=1e-12
    )
    np.testing.assert_allclose(
        hidden_weights(machine).reshape(-1, SITES, LETTERS), weights_by_definition(machine), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("alphabet", ["-AC", "AC-", "ACG"])
def test_the_gap_is_left_out(alphabet):
    family = ["".join(alphabet[code] for code in row) for row in codes_of(20)]
    model = SequenceRBM((2, 2), rank=2, alphabet=alphabet, n_epochs=1, random_state=0).fit(family)
    randomize(model.machine_, generator("gap"))
    codes = codes_of(6)
    kept = [code for code, letter in enumerate(alphabet) if letter != "-"]
    expected = map_by_definition(couplings_by_definition(model.machine_, codes), kept)
    np.testing.assert_allclose(contact_map(model, model.alphabet_.decode(codes)), expected, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_gaussian_units_give_the_exact_couplings_of_a_potts_model():
    """The free energy is quadratic, so its double differences do not depend on the other sites."""
    machine = machine_of(Kronecker(3), (2, 2), Gaussian)
    found = effective_couplings(machine, codes_of(2))
    background = codes_of(1)[0]
    for i, j in itertools.combinations(range(SITES), 2):
        energies = np.zeros((LETTERS, LETTERS))
        for a, b in itertools.product(range(LETTERS), repeat=2):
            row = background.copy()
            row[[i, j]] = a, b
            energies[a, b] = machine.free_energy(torch.eye(LETTERS, dtype=torch.float64)[row][None])
        block = -energies
        block = block - block.mean(0) - block.mean(1)[:, None] + block.mean()
        np.testing.assert_allclose(found[i, j], block, atol=1e-9)
        np.testing.assert_allclose(found[j, i], block.T, atol=1e-9)


@torch.no_grad()
def test_scores_do_not_depend_on_the_gauge():
    machine, codes = machine_of(Dense(), (2, 2)), codes_of(5)
    before = contact_map(machine, codes)
    machine.zero_sum_gauge()
    np.testing.assert_allclose(contact_map(machine, codes), before, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_sites_that_share_a_hidden_unit_are_in_contact():
    pairs = [(0, 6), (1, 8), (2, 9)]
    machine = BoltzmannMachine(Categorical((10, 4)), Bernoulli(3), Dense()).double()
    weight = torch.zeros(3, 10, 4, dtype=torch.float64)
    for unit, pair in enumerate(pairs):
        weight[unit, list(pair), 0] = 3.0
    machine.links["visible"].weight.copy_(weight.reshape(3, 40))
    first, second = ranked_pairs(contact_map(machine))
    assert set(zip(first[:3].tolist(), second[:3].tolist(), strict=True)) == set(pairs)


def test_drawn_sequences_are_always_the_same():
    machine = machine_of(Kronecker(2), (2, 2))
    assert np.array_equal(contact_map(machine), contact_map(machine))


def test_precision_counts_true_contacts():
    rng = generator("precision")
    scores, distances = rng.random((9, 9)), rng.uniform(2, 14, (9, 9))
    scores, distances = scores + scores.T, distances + distances.T
    distances[0, 8] = distances[8, 0] = np.nan
    pairs = [(i, j) for i, j in itertools.combinations(range(9), 2) if j - i > 4 and (i, j) != (0, 8)]
    pairs.sort(key=lambda pair: -scores[pair])
    hits = [distances[pair] < 10 for pair in pairs]
    found = contact_precision(scores, distances, threshold=10)
    np.testing.assert_allclose(found, [sum(hits[:n]) / n for n in range(1, len(hits) + 1)])
    nearest = contact_precision(scores, distances, threshold=10, separation=0)
    assert len(nearest) == 9 * 8 // 2 - 1


def test_errors_say_what_is_wanted():
    with pytest.raises(ValueError, match="model must be a fitted SequenceRBM"):
        contact_map(3)
    two = BoltzmannMachine({"a": Categorical((2, 2)), "b": Bernoulli(2)}, Bernoulli(2), {"a": CP(1), "b": CP(1)})
    with pytest.raises(ValueError, match="one categorical visible layer"):
        contact_map(two)
    machine = machine_of(Kronecker(2), (2, 2))
    with pytest.raises(ValueError, match="have 4 sites, but the model has 5"):
        contact_map(machine, codes_of(3)[:, 1:])
    with pytest.raises(ValueError, match="codes must be from 0 to 2"):
        contact_map(machine, codes_of(3) + 1)
    with pytest.raises(ValueError, match="array of integer codes"):
        contact_map(machine, ["ACCCA"])
    with pytest.raises(ValueError, match="no closed-form variance"):
        contact_map(BoltzmannMachine(Categorical((2, 3)), Rectified((2, 2)), Kronecker()), codes_of(2, sites=2))
    with pytest.raises(ValueError, match="independent entries, got Categorical"):
        contact_map(BoltzmannMachine(Categorical((2, 3)), Categorical((2, 2)), Kronecker()), codes_of(2, sites=2))
    with pytest.raises(ValueError, match=r"distances must have shape \(3, 3\)"):
        contact_precision(np.zeros((3, 3)), np.zeros((2, 2)))
