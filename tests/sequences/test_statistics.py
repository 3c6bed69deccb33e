"""Statistics of sequences against loops over sites, letters and pairs of sequences."""

import itertools

import numpy as np
import pytest
from sklearn.decomposition import PCA

from mvrbm.sequences import adversarial_accuracy, correlations, nearest_distances, project, statistics
from tables import generator

LETTERS = "ACG"


def alignment(name, n, sites=5):
    rng = generator(name)
    common = rng.integers(3, size=sites)
    codes = np.where(rng.random((n, sites)) < 0.4, common, rng.integers(3, size=(n, sites)))
    return ["".join(LETTERS[code] for code in row) for row in codes]


def expectation(sequences, weights, letters_at):
    """Weighted share of the sequences with the given letters: {site: letter}."""
    hits = [all(row[site] == letter for site, letter in letters_at.items()) for row in sequences]
    return np.dot(hits, weights) / np.sum(weights)


def connected(sequences, weights, order):
    """The definition of a cumulant: the mean of the product of deviations, up to order three."""
    found = []
    for subset in itertools.combinations(range(len(sequences[0])), order):
        for letters in itertools.product(LETTERS, repeat=order):
            single = [expectation(sequences, weights, {s: a}) for s, a in zip(subset, letters, strict=True)]
            deviations = [
                np.prod([(row[s] == a) - f for s, a, f in zip(subset, letters, single, strict=True)])
                for row in sequences
            ]
            found.append(np.dot(deviations, weights) / np.sum(weights) if order > 1 else single[0])
    return found


@pytest.mark.parametrize("order", [1, 2, 3])
def test_correlations_are_means_of_products_of_deviations(order):
    natural, generated = alignment("natural", 11), alignment("generated", 7)
    weights = generator("weights").random(11)
    found = correlations(natural, generated, order, alphabet=LETTERS, weights=weights)
    np.testing.assert_allclose(found[0], connected(natural, weights, order), atol=1e-12)
    np.testing.assert_allclose(found[1], connected(generated, np.ones(7), order), atol=1e-12)


def test_random_subsets_are_the_same_for_both_sets():
    sequences = alignment("natural", 30, sites=12)
    first, second = correlations(sequences, sequences, 3, alphabet=LETTERS, n_subsets=20)
    assert len(first) == 20 * 27
    assert np.array_equal(first, second)
    subsets = statistics._subsets(12, 3, 20)
    assert len(set(subsets)) == 20
    assert all(len(set(subset)) == 3 for subset in subsets)


def one_hot(sequences):
    return np.eye(3)[[[LETTERS.index(letter) for letter in row] for row in sequences]].reshape(len(sequences), -1)


def test_projection_is_principal_component_analysis():
    natural, others = alignment("natural", 40), alignment("others", 9)
    found = project(natural, others, alphabet=LETTERS)
    pca = PCA(2).fit(one_hot(natural))
    for points, sequences in zip(found, (natural, others), strict=True):
        expected = pca.transform(one_hot(sequences))
        signs = np.sign((found[0] * pca.transform(one_hot(natural))).sum(0))
        np.testing.assert_allclose(points, expected * signs, atol=1e-8)


def test_a_weight_of_two_is_a_copy():
    natural = alignment("natural", 12)
    weights = generator("weights").integers(1, 4, size=12)
    copies = [row for row, count in zip(natural, weights, strict=True) for _ in range(count)]
    found = project(natural, weights=weights, alphabet=LETTERS)[0]
    expected = project(copies, natural, alphabet=LETTERS)[1]
    np.testing.assert_allclose(found, expected, atol=1e-8)


def hamming(one, other):
    return sum(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("block", [32 * 3, 2**20])
def test_nearest_neighbors(block, monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", block)
    natural, generated = alignment("natural", 13), alignment("generated", 8)
    expected = [min(hamming(row, other) for other in natural) for row in generated]
    assert nearest_distances(generated, natural, alphabet=LETTERS).tolist() == expected


def test_long_sequences_are_counted():
    rng = generator("long")
    natural = ["".join(rng.choice(list(LETTERS), 700, p=[0.9, 0.05, 0.05])) for _ in range(3)]
    assert nearest_distances(natural[:2], natural[2:], alphabet=LETTERS).tolist() == [
        hamming(natural[0], natural[2]),
        hamming(natural[1], natural[2]),
    ]


@pytest.mark.parametrize("block", [32 * 3, 2**20])
def test_adversarial_accuracy_by_definition(block, monkeypatch):
    monkeypatch.setattr(statistics, "_BLOCK", block)
    natural, generated = alignment("natural", 10), alignment("generated", 10)

    def recognized(own, other):
        shares = []
        for number, row in enumerate(own):
            inside = min(hamming(row, one) for place, one in enumerate(own) if place != number)
            outside = min(hamming(row, one) for one in other)
            shares.append(1.0 if outside > inside else 0.5 if outside == inside else 0.0)
        return np.mean(shares)

    found = adversarial_accuracy(natural, generated, alphabet=LETTERS)
    np.testing.assert_allclose(found.natural, recognized(natural, generated))
    np.testing.assert_allclose(found.generated, recognized(generated, natural))
    np.testing.assert_allclose(found.score, (found.natural + found.generated) / 2)


def test_adversarial_accuracy_of_extremes():
    distinct = ["AAAAAA", "AACCAA", "CCAACC", "GGGGCC"]
    assert adversarial_accuracy(distinct, distinct) == (0, 0, 0)
    assert adversarial_accuracy(["AAAAA", "AAAAC"], ["GGGGG", "GGGGC"]) == (1, 1, 1)
    assert adversarial_accuracy(["AAAAA"] * 3, ["AAAAA"] * 4, alphabet=LETTERS) == (0.5, 0.5, 0.5)


def test_errors_say_what_is_wanted():
    rows = alignment("natural", 4)
    with pytest.raises(ValueError, match="order must be 1, 2 or 3, got 4"):
        correlations(rows, rows, 4)
    with pytest.raises(ValueError, match="weights must be 4 nonnegative numbers"):
        correlations(rows, rows, weights=[1, 2])
    with pytest.raises(ValueError, match=r"same number of sites, got \[5, 4\]"):
        nearest_distances([row[1:] for row in rows], rows)
    with pytest.raises(ValueError, match="at least 2 natural"):
        adversarial_accuracy(rows, rows[:1])
    with pytest.raises(ValueError, match="n_components must be less than 15"):
        project(rows, alphabet=LETTERS, n_components=15)
