"""The application topics: perplexity computed by hand, and every tool on a small corpus."""

import numpy as np
import pytest
from scipy import sparse

from studies.applications import topics
from studies.runs import Place, Store


def test_perplexity_is_that_of_normalized_and_smoothed_strengths():
    strengths = np.array([[2.0, 2.0, 0.0], [0.0, 0.0, 0.0]])  # the second document has no known words
    words = sparse.csr_matrix([[1, 0, 1], [0, 2, 0]])
    frequencies = np.array([1.0, 1.0, 2.0])
    p = [0.9 * 0.5 + 0.1 * 0.25, 0.1 * 0.5, 0.25, 0.25]
    expected = np.exp(-np.mean(np.log(p)))
    assert topics.perplexity(strengths, words, frequencies, 0.1) == pytest.approx(expected)
    assert topics.perplexity(strengths, words, frequencies, 0.0) == np.inf


def test_all_tools_are_compared_on_the_same_documents(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    parts = [sparse.csr_matrix(rng.poisson(rng.permuted([[0.05] * 9 + [1.5] * 3] * n, axis=1))) for n in (60, 20, 20)]
    monkeypatch.setattr(topics, "corpus_parts", lambda *_: (*parts, [f"w{k}" for k in range(12)]))
    monkeypatch.setattr(topics, "_N_TOPICS", 3)
    store, found = Store(tmp_path), {}
    planned = topics.plan(["docstrings"], [0])
    for run in planned:
        outcome = run.compute(run.settings, Place(store, "cpu"))
        store.write(run, outcome, {})
        found[run.settings["tool"]] = outcome.numbers["perplexity"]
    assert set(found) == {"mvrbm", "unigram", "lda", "nmf", "nmf-kl"}
    assert all(1 < value < 30 for value in found.values())
    assert topics.table(store, planned) == {"docstrings": pytest.approx(found)}
