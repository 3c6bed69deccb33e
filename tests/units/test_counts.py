"""Counts: what the table of units does not cover, such as documents of unequal length."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from given_numbers import GivenNumbers
from mvrbm import RBM, Bernoulli, BoltzmannMachine, Categorical, Counts, Dense, Poisson, RandomSource
from mvrbm.likelihood import log_likelihood, log_partition, pseudo_log_likelihood
from mvrbm.sampling import conditional_mean, gibbs, mean_field
from mvrbm.training import PCD, Recipe, Trainer


def machine_of(length=None, seed=0):
    machine = BoltzmannMachine(Counts(3, length=length), Bernoulli(2), Dense(), seed=seed, std=0.8).double()
    with torch.no_grad():
        machine.layers["visible"].bias.copy_(torch.tensor([0.3, -0.2, 0.5]))
        machine.hidden.bias.copy_(torch.tensor([-0.4, 0.1]))
    return machine


@torch.no_grad()
def test_words_of_a_document_are_independent_draws_from_one_distribution():
    unit, side = Counts(3, length=2).double(), 200
    field = torch.tensor([[0.4, -1.0, 0.7]], dtype=torch.float64)
    even = (torch.arange(side, dtype=torch.float64) + 0.5) / side
    drawn = unit.sample(field.expand(side**2, 3), GivenNumbers([torch.cartesian_prod(even, even)]))
    p = torch.softmax(field, 1)[0].numpy()
    for x in [(2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 2, 0), (0, 1, 1), (0, 0, 2)]:
        expected = math.factorial(2) * np.prod([q**k / math.factorial(k) for q, k in zip(p, x, strict=True)])
        found = (drawn == torch.tensor(x)).all(1).double().mean().item()
        assert found == pytest.approx(expected, abs=3 / side)


def test_words_without_probability_are_never_drawn():
    field = torch.tensor([[-1e4, 0.0, -1e4, 0.0, -1e4]] * 2)
    edges = torch.tensor([[0.0, 1 - 2**-24]] * 2)  # the first and the last number of a source
    assert Counts(5, length=2).sample(field, GivenNumbers([edges])).tolist() == [[0, 1, 0, 1, 0]] * 2


def test_gibbs_steps_keep_the_length_of_every_document():
    documents = torch.tensor([[3, 0, 4], [0, 0, 0], [0, 1, 0], [20, 5, 1]], dtype=torch.float64)
    state = gibbs(machine_of(), documents, 5, RandomSource(0)).visible["visible"]
    assert state.sum(1).tolist() == [7, 0, 1, 26]
    assert not torch.equal(state, documents)


def test_fractions_of_words_keep_their_sum():
    weights = torch.tensor([[0.5, 0, 3.9], [0.2, 0, 0.1]], dtype=torch.float64)
    drawn = Counts(3).double().redraw(weights, torch.zeros(2, 3, dtype=torch.float64), RandomSource(0))
    torch.testing.assert_close(drawn.sum(1), weights.sum(1))
    assert int((drawn[1] > 0).sum()) == 1


def documents_of_all_lengths():
    rng = np.random.default_rng(0)
    return torch.tensor(rng.integers(0, 4, (8, 3)) * np.array([0, 1, 2, 30, 1, 5, 3, 2])[:, None]).double()


@pytest.mark.parametrize("sites", [(), (2,)])
@pytest.mark.parametrize("most", [1, 100, 10**6])
def test_words_do_not_depend_on_the_other_documents_of_a_process(monkeypatch, sites, most):
    monkeypatch.setattr("mvrbm.units.counts._MOST_NUMBERS", most)
    unit = Counts((*sites, 3)).double()
    x = documents_of_all_lengths().reshape(8, *[1] * len(sites), 3).repeat(1, *sites, 1)
    field = torch.linspace(-1, 1, x.numel()).double().reshape(x.shape)
    source = RandomSource(1).at_step(5, draw=2)
    whole, next_number = unit.redraw(x, field, source), source.uniform((1,), field)
    for first, last in ((0, 4), (4, 8), (6, 6)):
        source = RandomSource(1).at_step(5, draw=2, first_row=first)
        part = unit.redraw(x[first:last], field[first:last], source)
        torch.testing.assert_close(part, whole[first:last], rtol=0, atol=0)
        assert torch.equal(source.from_row(0).uniform((1,), field), next_number)
    if sites:
        assert not torch.equal(whole[:, 0], whole[:, 1])


def test_means_preserve_the_length_of_every_document():
    machine, documents = machine_of(), documents_of_all_lengths()
    for found in (
        gibbs(machine, documents, 2, RandomSource(0), mean=True).visible,
        mean_field(machine, documents, 2),
        conditional_mean(machine, documents, None, RandomSource(0), steps=2, burn_in=1),
    ):
        torch.testing.assert_close(found["visible"].sum(1), documents.sum(1))
    hidden = machine.hidden.mean(machine.hidden_field({"visible": documents}))
    expected = documents.sum(1, keepdim=True) * machine.visible_mean(hidden)["visible"]
    torch.testing.assert_close(mean_field(machine, documents, 1)["visible"], expected)


@torch.no_grad()
def test_documents_of_one_word_are_categories():
    of_counts, labels = machine_of(length=1), BoltzmannMachine(Categorical(3), Bernoulli(2), Dense()).double()
    labels.load_state_dict(of_counts.state_dict())
    words = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(log_likelihood(of_counts, words), log_likelihood(labels, words))
    torch.testing.assert_close(log_partition(of_counts), log_partition(labels))


@torch.no_grad()
def test_the_energy_is_that_of_salakhutdinov_and_hinton():
    """A bias that grows with the length D of a document is a constant added to the weights of all words."""
    machine, documents = machine_of(), torch.tensor([[2.0, 0, 1], [0, 4, 1]], dtype=torch.float64)
    hidden, slope = torch.tensor([[1.0, 0], [1, 1]], dtype=torch.float64), torch.tensor([0.7, -0.2]).double()
    W, b, c = machine.links["visible"].dense(), machine.layers["visible"].bias, machine.hidden.bias
    lengths = documents.sum(1)
    orders = torch.lgamma(lengths + 1) - torch.lgamma(documents + 1).sum(1)
    expected = -torch.einsum("nk,jk,nj->n", documents, W, hidden) - documents @ b - hidden @ c - orders
    expected -= lengths * (hidden @ slope)
    machine.links["visible"].get_parameter("weight").add_(slope[:, None])
    torch.testing.assert_close(machine.energy(documents, hidden), expected)


def test_each_length_has_its_own_distribution():
    documents = torch.tensor([[2.0, 0, 0], [0, 1, 0]])
    with pytest.raises(ValueError, match="documents of unequal length have no common distribution"):
        log_likelihood(machine_of(), documents)
    with pytest.raises(ValueError, match="requires documents of length 2, got a document of length 1"):
        log_likelihood(machine_of(length=2), documents)
    with pytest.raises(ValueError, match="documents differ in length; use CD"):
        Trainer(machine_of(), Recipe(negative=PCD(2), n_epochs=1)).fit(documents)
    with pytest.raises(ValueError, match="the maximum is 4096"):
        Counts(100, length=9).alternatives(torch.zeros(1, 100), 0, (torch.zeros(1), torch.zeros(1)))


@pytest.mark.parametrize(
    ("bias", "weights"),
    [
        (math.log(900), [1.4, -2.0]),  # rates of 122 to 3,650: only a sum
        (math.log(1000), [4.6, -2.3]),  # rates of 100 to 100,000: a sum and an integral
        (math.log(2300), [0.5, -0.5]),  # all rates are within the transition
        (math.log(3900), [0.02, 0.1]),
        (math.log(500_000), [0.3, -0.1]),  # only an integral
    ],
)
def test_large_poisson_counts_are_scored_as_by_a_sum_over_all_counts(bias, weights):
    machine = BoltzmannMachine(Poisson(1), Bernoulli(2), Dense()).double()
    with torch.no_grad():
        machine.layers["visible"].bias.fill_(bias)
        machine.links["visible"].weight.copy_(torch.tensor(weights).reshape(machine.links["visible"].weight.shape))
        machine.hidden.bias.copy_(torch.tensor([-math.exp(bias) * math.expm1(weight) for weight in weights]))
    largest = int(1.1 * math.exp(bias + sum(max(weight, 0) for weight in weights))) + 1000
    every = torch.arange(largest, dtype=torch.float64)[:, None]
    with torch.no_grad():
        expected = torch.log_softmax(-machine.free_energy(every), 0)
        likely = torch.multinomial(expected.exp(), 10, replacement=True, generator=torch.Generator().manual_seed(0))
        found = pseudo_log_likelihood(machine, every[likely]).values
    np.testing.assert_allclose(found, expected[likely], rtol=0, atol=1e-6)


def test_poisson_rates_that_are_too_large_raise():
    machine = BoltzmannMachine(Poisson(1), Bernoulli(2), Dense())
    with torch.no_grad():
        machine.links["visible"].weight.fill_(9)
    with pytest.raises(ValueError, match=r"a Poisson entry may have a rate of 6.57e\+07, but the limit is 16,000,000"):
        pseudo_log_likelihood(machine, torch.ones(1, 1))


@pytest.mark.parametrize("largest", [5_000, 100_000, 900_000])
def test_large_counts_are_fitted_and_scored(largest):
    x = np.random.default_rng(0).poisson(largest / 2, (50, 4)).astype(float)
    scores = RBM(3, visible="poisson", n_epochs=2, random_state=0, device="cpu").fit(x).score_samples(x)
    independent = stats.poisson.logpmf(x, x.mean(0)).sum(1)
    np.testing.assert_allclose(scores.mean(), independent.mean(), rtol=0.2)


def test_poisson_counts_beyond_the_largest_rate_are_refused():
    with pytest.raises(ValueError, match="counts of at most 1,000,000, got 2e"):
        Poisson(2).check(torch.tensor([[0.0, 2e6]]), "visible")
