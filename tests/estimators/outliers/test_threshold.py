"""The threshold: the share of new samples above it, few samples, and outliers among them."""

import numpy as np
import pytest

from mvrbm.estimators.outliers.threshold import threshold


@pytest.mark.parametrize("n", [49, 99, 999])
def test_a_new_score_exceeds_the_threshold_with_the_given_probability(n):
    # Of n + 1 exchangeable scores, each is the new one with the same probability.
    scores = np.abs(np.random.default_rng(0).normal(size=n + 1))  # a short tail without outliers
    above = [scores[i] > threshold(np.delete(scores, i), 0.02) for i in range(n + 1)]
    assert np.mean(above) == pytest.approx(0.02, abs=1e-9)


def test_few_scores_are_extrapolated_and_outliers_do_not_count():
    scores = np.abs(np.random.default_rng(0).normal(size=30))
    limit = threshold(scores, 0.02)
    assert scores.max() < limit < 2 * scores.max()
    scores[0] = 1e3
    assert threshold(scores, 0.02) < 2 * limit


def test_thresholds_decrease_with_the_share():
    scores = np.random.default_rng(0).exponential(size=200)
    limits = [threshold(scores, share) for share in (0.001, 0.004, 0.005, 0.01, 0.02, 0.1, 0.5)]
    assert (np.diff(limits) < 0).all()
    assert threshold(scores, 0.5) == pytest.approx(np.median(scores), rel=0.05)


def test_many_outliers_do_not_hide_each_other():
    scores = np.abs(np.random.default_rng(0).normal(size=300))
    expected = threshold(scores[30:], 0.02)
    scores[:30] = 20 + 10 * scores[:30]
    assert threshold(scores, 0.02) == pytest.approx(expected)


@pytest.mark.parametrize("n", [30, 300])
def test_the_tail_above_the_scores_does_not_depend_on_outliers(n):
    scores = np.abs(np.random.default_rng(0).normal(size=n))
    expected = threshold(scores[n // 15 :], 0.1 / n)
    scores[: n // 15] = 1e3
    assert threshold(scores, 0.1 / n) == pytest.approx(expected)
