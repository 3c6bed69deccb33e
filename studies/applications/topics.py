"""Document completion by `ReplicatedSoftmax`, by scikit-learn's LDA and NMF, and by word frequencies.

Every tool learns from the same documents, reads half of the words of each test document, and predicts the other half.
LDA and NMF predict a mixture of topics. It is mixed with the word frequencies, in the proportion that is best on
validation documents. `ReplicatedSoftmax` has its default settings, which were chosen on held-out training documents of
20 Newsgroups and on docstrings. Only the test documents of 20 Newsgroups are new to it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import NMF, LatentDirichletAllocation

from mvrbm import ReplicatedSoftmax
from mvrbm.estimators.topics import halves
from mvrbm.io.documents import read_documents
from studies.runs import Outcome, Place, Run, Store, complete

__all__ = ["CORPORA", "TOOLS", "docstrings", "perplexity", "plan", "table"]

Array = NDArray[Any]
#: 20 Newsgroups as word counts, which must be on this machine, and docstrings, which every machine has.
CORPORA = ("20news", "docstrings")
OURS = "mvrbm"
UNIGRAM = "unigram"
_N_TOPICS = 50
# Proportions of word frequencies to choose from.
_SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
# Number of topics whose words are stored.
_SHOWN = 10
# Smallest number of letters of a docstring.
_SHORTEST = 200


def _lda(counts: Any, seed: int) -> Callable[[Any], Array]:
    model = LatentDirichletAllocation(_N_TOPICS, random_state=seed).fit(counts)
    return lambda known: np.asarray(model.transform(known) @ model.components_)


def _nmf(counts: Any, seed: int, **loss: Any) -> Callable[[Any], Array]:
    model = NMF(_N_TOPICS, random_state=seed, max_iter=500, **loss).fit(counts)
    return lambda known: np.asarray(model.transform(known) @ model.components_)


#: Functions that learn from word counts, and return a function that takes known words and scores all words.
TOOLS: dict[str, Callable[[Any, int], Callable[[Any], Array]]] = {
    UNIGRAM: lambda counts, seed: lambda known: np.zeros(known.shape),
    "lda": _lda,
    "nmf": _nmf,
    "nmf-kl": lambda counts, seed: _nmf(counts, seed, beta_loss="kullback-leibler", solver="mu"),
}


def plan(corpora: Sequence[str] = CORPORA, seeds: Sequence[int] = (0, 1, 2), *, n: int | None = None) -> list[Run]:
    """Return one run per corpus, tool and seed; `n` limits the documents."""
    found = []
    for corpus in corpora:
        for tool in (OURS, *TOOLS):
            for seed in seeds:
                settings = {"corpus": corpus, "tool": tool, "seed": seed, "n": n}
                found.append(Run(f"topics-{corpus}-{tool}-{seed}", f"topics-{corpus}", _compare, settings))
    return found


def _compare(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Measure the perplexity of a tool on test documents and its CPU time, and list words of our topics."""
    train, valid, test, words = corpus_parts(settings["corpus"], settings["n"], place.data_dir)
    start = time.process_time()
    numbers = dict[str, Any]()
    known, hidden = halves(test)
    if settings["tool"] == OURS:
        model = ReplicatedSoftmax(_N_TOPICS, random_state=settings["seed"], device=place.device).fit(train)
        numbers["cpu_seconds_fit"] = time.process_time() - start
        numbers["perplexity"] = model.perplexity(hidden, observed=known)
        numbers["topics"] = [" ".join(row) for row in model.top_words(words)[:_SHOWN]]
    else:
        predict = TOOLS[settings["tool"]](train, settings["seed"])
        numbers["cpu_seconds_fit"] = time.process_time() - start
        frequencies = np.asarray(train.sum(0)).ravel() + 1.0
        on_valid, on_test = ((predict(part), later) for part, later in (halves(valid), (known, hidden)))
        share = min(_SHARES, key=lambda share: perplexity(*on_valid, frequencies, share))
        numbers |= {"share": share, "perplexity": perplexity(*on_test, frequencies, share)}
    return Outcome({**numbers, "cpu_seconds": time.process_time() - start})


def perplexity(strengths: Array, words: Any, frequencies: Array, share: float) -> float:
    """Return the perplexity of word counts (n, n_words) under normalized scores mixed with word frequencies."""
    common = frequencies / frequencies.sum()
    totals = strengths.sum(1)
    # A document without known words has no topics.
    shares = np.where(totals > 0, share, 1.0)
    scored = words.tocoo()
    own = strengths[scored.row, scored.col] / np.where(totals > 0, totals, 1.0)[scored.row]
    mixed = (1 - shares[scored.row]) * own + shares[scored.row] * common[scored.col]
    with np.errstate(divide="ignore"):  # without smoothing, a word may have probability zero
        return float(np.exp(-(scored.data @ np.log(mixed)) / scored.data.sum()))


def corpus_parts(name: str, n: int | None, data_dir: str | Path | None) -> tuple[Any, Any, Any, list[str]]:
    """Return word counts for training, validation (a tenth of the rest) and test, and the words."""
    if name == "20news":
        folder = Path(data_dir or os.environ.get("MVRBM_DATA", "data")) / "text" / "20news"
        (rest, words), (test, _) = (
            read_documents(folder / file, vocabulary=folder / "vocab.new") for file in ("train.feat", "test.feat")
        )
        order = np.random.default_rng(0).permutation(rest.shape[0])
    else:
        counts, words = docstrings()
        order = np.random.default_rng(0).permutation(counts.shape[0])
        rest = counts
        test = counts[order[: len(order) // 5]]
        order = order[len(order) // 5 :]
    valid, train = np.split(order, [len(order) // 10])
    return rest[train[:n]], rest[valid[:n]], test[:n], words


def docstrings(packages: Sequence[str] = ("scipy", "sklearn", "skimage")) -> tuple[Any, list[str]]:
    """Return word counts of the docstrings of installed packages, and the words."""
    from sklearn.feature_extraction.text import CountVectorizer

    texts: dict[str, None] = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(folder).rglob("*.py")):
                if "tests" not in file.parts:
                    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                    kinds = (ast.FunctionDef, ast.ClassDef)
                    found = [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
                    texts |= dict.fromkeys(text for text in found if text and len(text) > _SHORTEST)
    vectorizer = CountVectorizer(stop_words="english", max_features=2000, token_pattern=r"(?u)\b[^\W\d_]{3,}\b")
    return vectorizer.fit_transform(texts), vectorizer.get_feature_names_out().tolist()


def table(store: Store, plan: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the mean perplexity over seeds, by corpus and tool, for complete corpora."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in complete(store, plan, "corpus"):
        corpus, tool = run.settings["corpus"], run.settings["tool"]
        values.setdefault(corpus, {}).setdefault(tool, []).append(store.numbers(run)["perplexity"])
    return {corpus: {tool: float(np.mean(found)) for tool, found in tools.items()} for corpus, tools in values.items()}
