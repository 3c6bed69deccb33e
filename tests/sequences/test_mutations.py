"""Mutation scans against the free energies of all mutated sequences."""

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
    Poisson,
    SequenceRBM,
    Tucker,
)
from mvrbm.sequences import mutation_scan
from tables import generator, randomize

MACHINES = {
    "kronecker": lambda: BoltzmannMachine(Categorical((4, 3)), Bernoulli((2, 3)), Kronecker(2)),
    "tucker": lambda: BoltzmannMachine(Categorical((4, 3)), Bernoulli(5), Tucker((3, 2))),
    "cp": lambda: BoltzmannMachine(Categorical((4, 3)), Gaussian(3), CP(2)),
    "mpo": lambda: BoltzmannMachine(Categorical((4, 3)), Poisson((2, 2)), MPO(2)),
    "dense": lambda: BoltzmannMachine(Categorical((4, 3)), Categorical((2, 3)), Dense()),
    "tied": lambda: BoltzmannMachine(Categorical((4, 3), bias_shape=(1, 3)), Bernoulli((2, 2)), Kronecker()),
}


@torch.no_grad()
def scan_by_definition(machine, codes):
    letters = machine.layers["visible"].shape[1]
    hot = torch.eye(letters, dtype=machine.like.dtype)
    wild = machine.free_energy(hot[codes][None])
    found = np.zeros((len(codes), letters))
    for site in range(len(codes)):
        for letter in range(letters):
            mutant = codes.copy()
            mutant[site] = letter
            found[site, letter] = wild - machine.free_energy(hot[mutant][None])
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_scan_is_the_difference_of_free_energies(name):
    machine = randomize(MACHINES[name](), generator(name), 0.5)
    codes = generator("reference").integers(3, size=4)
    found = mutation_scan(machine, codes)
    np.testing.assert_allclose(found, scan_by_definition(machine, codes), rtol=1e-9, atol=1e-11)
    assert np.array_equal(found[range(4), codes], np.zeros(4))


def test_scan_of_an_estimator_takes_letters():
    model = SequenceRBM((2, 2), rank=1, n_epochs=1, random_state=0).fit(["ACG-", "GCUA"] * 5)
    randomize(model.machine_, generator("estimator"))
    assert model.alphabet_.letters == "-ACGU"
    expected = scan_by_definition(model.machine_, np.array([2, 0, 3, 4]))
    np.testing.assert_allclose(mutation_scan(model, "C-GU"), expected, rtol=1e-9, atol=1e-11)


def test_single_precision_does_not_lose_digits():
    """The scan adds in double precision, so it is exact to the rounding of the parameters."""
    machine = randomize(BoltzmannMachine(Categorical((40, 5)), Bernoulli((20, 5)), Kronecker(2)), generator("long"))
    codes = generator("long reference").integers(5, size=40)
    machine.float()
    found = mutation_scan(machine, codes)
    np.testing.assert_allclose(found, scan_by_definition(machine.double(), codes), rtol=1e-9, atol=1e-9)


def test_errors_say_what_is_wanted():
    model = SequenceRBM((2, 2), rank=1, n_epochs=1, random_state=0).fit(["ACG-", "GCUA"] * 5)
    with pytest.raises(ValueError, match="have 3 sites, but the model has 4"):
        mutation_scan(model, "ACG")
    with pytest.raises(ValueError, match="'E' at site 1"):
        mutation_scan(model, "AEGA")
    with pytest.raises(ValueError, match="unknown letters are not supported"):
        mutation_scan(model, "A?GA")
