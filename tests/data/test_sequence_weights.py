"""Weights by identity equal a brute-force count, with and without the compiled code."""

import numpy as np
import pytest

from mvrbm.compiled import library
from mvrbm.data import sequence_weights
from mvrbm.data.sequence_weights import identity_weights
from mvrbm.progress import listening

SHAPES = [(1, 1), (3, 5), (63, 7), (64, 255), (65, 256), (40, 600), (200, 31)]


def family(n, sites, seed=0):
    """Sequences of which half are mutated copies."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (n, sites), dtype=np.uint8)
    codes[n // 2 :] = codes[: n - n // 2]
    changed = rng.random(codes.shape) < 0.15
    codes[changed] = 7
    return codes


def brute_force(codes, threshold):
    """One divided by the number of similar sequences, one pair at a time."""
    weights = []
    for one in codes:
        shares = [sum(a == b for a, b in zip(one, other, strict=True)) / len(one) for other in codes]
        weights.append(1 / sum(share > threshold - 1e-9 for share in shares))
    return weights


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_those_of_all_pairs(monkeypatch, shape, compiled):
    if not compiled:
        monkeypatch.setattr(sequence_weights, "count_similar", lambda *_: None)
    elif library("_identity") is None:
        pytest.skip("no compiled code")
    codes = family(*shape)
    agree = (codes[:, None] == codes[None]).sum(2)
    for threshold in (0, 0.5, 0.8, 1):
        similar = agree >= threshold * shape[1] - 1e-9
        np.testing.assert_array_equal(identity_weights(codes, threshold), 1 / similar.sum(1))


def test_weights_are_the_plain_definition():
    codes = family(30, 10)
    for threshold in (0.3, 0.8):
        np.testing.assert_array_equal(identity_weights(codes, threshold), brute_force(codes, threshold))


def test_a_pair_at_the_threshold_is_similar():
    codes = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 2], [1, 1, 1, 3, 4]])
    assert identity_weights(codes, 0.8).tolist() == [1 / 2, 1 / 2, 1]
    assert identity_weights(codes, 0.6).tolist() == [1 / 3, 1 / 3, 1 / 3]
    # 0.56 * 25 is slightly above 14 in floating point.
    long = np.zeros((2, 25), int)
    long[1, :11] = 1
    assert identity_weights(long, 0.56).tolist() == [1 / 2, 1 / 2]


def test_progress_counts_every_sequence():
    seen = []
    with listening(lambda unit, count: seen.append((unit, count))):
        identity_weights(family(130, 9))
    assert {unit for unit, _ in seen} == {"sequences"}
    assert sum(count for _, count in seen) == 130


def test_a_threshold_is_a_fraction():
    with pytest.raises(ValueError, match="threshold must be at least 0 and at most 1, got 80"):
        identity_weights(family(3, 5), 80)
