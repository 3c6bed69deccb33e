"""Topics of SciPy's documentation: every docstring is a document.

SciPy is installed with mvrbm, so this runs anywhere, in about a minute: python examples/topics.py
"""

import importlib
import inspect

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.neighbors import NearestNeighbors

from mvrbm import ReplicatedSoftmax

PARTS = (
    "fft", "integrate", "interpolate", "io", "linalg", "ndimage",
    "optimize", "signal", "sparse", "spatial", "special", "stats",
)  # fmt: skip
QUERIES = ["fft.dct", "linalg.svd", "optimize.minimize", "stats.ttest_ind", "ndimage.gaussian_filter"]


def docstrings() -> dict[str, str]:
    """Return the docstrings of the public names of SciPy, each once."""
    found = {}
    for part in PARTS:
        for name, thing in inspect.getmembers(importlib.import_module(f"scipy.{part}"), callable):
            text = inspect.getdoc(thing)
            if text and len(text) > 200:
                found.setdefault(text, f"{part}.{name}")
    return {name: text for text, name in found.items()}


def main() -> None:
    """Train, show the words of topics and functions with similar topics, and measure how well words are predicted."""
    texts = docstrings()
    vectorizer = CountVectorizer(stop_words="english", token_pattern=r"\b[a-z]{3,}\b", min_df=3, max_features=2000)
    counts = vectorizer.fit_transform(texts.values())
    test, train = np.split(np.random.default_rng(0).permutation(len(texts)), [len(texts) // 5])
    print(f"{len(texts):,} docstrings, {counts.shape[1]:,} words")

    model = ReplicatedSoftmax(20, random_state=0, verbose=1).fit(counts[train])
    print("words of the topics:")
    for topic, row in enumerate(model.top_words(vectorizer.get_feature_names_out(), n=8), start=1):
        print(f"  {topic:2d}  {' '.join(row)}")

    print("functions with the most similar topics:")
    names, features = list(texts), model.transform(counts)
    near = NearestNeighbors(n_neighbors=5).fit(features)
    for query in QUERIES:
        found = near.kneighbors(features[[names.index(query)]], return_distance=False)[0, 1:]
        print(f"  {query + ':':25s} {', '.join(names[row] for row in found)}")

    print("perplexity of half of the words of unseen docstrings:")
    later = np.asarray(counts[test].sum(0)).ravel()
    frequencies = np.asarray(counts[train].sum(0)).ravel() + 1
    unigram = np.exp(-(later @ np.log(frequencies / frequencies.sum())) / later.sum())
    print(f"  by the frequencies of words            {unigram:.0f}")
    print(f"  by ReplicatedSoftmax, given the others {model.perplexity(counts[test]):.0f}")


if __name__ == "__main__":
    main()
