"""
Topics in documents
===================

Find topics in 395 articles of the Reuters news agency, list the words of each topic, and find related articles. The
corpus is part of the package ``lda``.
"""

import lda.datasets
import matplotlib.pyplot as plt
import numpy as np
from sklearn.decomposition import LatentDirichletAllocation
from sklearn.neighbors import NearestNeighbors

from mvrbm import ReplicatedSoftmax

counts = lda.datasets.load_reuters()  # (395 articles, 4,258 words)
words = np.array(lda.datasets.load_reuters_vocab())
titles = lda.datasets.load_reuters_titles()
order = np.random.default_rng(0).permutation(len(counts))
train, test = counts[order[80:]], counts[order[:80]]

model = ReplicatedSoftmax(
    n_components=20, n_epochs=200, random_state=0
).fit(train)
for topic, row in enumerate(model.top_words(words, n=7)):
    print(f"topic {topic:2d}: {' '.join(row)}")

# %%
# A topic increases the log-probability of its words. Here are four of the topics:

fig, axes = plt.subplots(1, 4, figsize=(10, 3.2), layout="constrained")
for axis, topic in zip(axes, (1, 7, 13, 14), strict=True):
    best = np.argsort(model.components_[topic])[-8:]
    axis.barh(words[best], model.components_[topic][best])
    axis.set_title(f"topic {topic}")
plt.show()

# %%
# Topics multiply the probabilities of words, so several topics can describe one document. To find related articles,
# look for articles with similar topics:

features = model.transform(counts)
near = NearestNeighbors(n_neighbors=4, metric="cosine").fit(features)
for query in (0, 33, 200):
    print(titles[query])
    (found,) = near.kneighbors(features[[query]], return_distance=False)
    for row in found[found != query][:3]:
        print("   ", titles[row])

# %%
# Given half of the words of each unseen article, how well does a model predict the other half? The perplexity is the
# number of equally likely words that would be as hard to predict, so lower is better. Latent Dirichlet allocation
# (LDA) in scikit-learn is given the same halves. Of 5, 10 and 20 topics, 20 was best for both models on held-out
# training articles. :doc:`/results` shows results for larger collections.

rng = np.random.default_rng(1)
given = rng.binomial(test, 0.5)
later = test - given

mixture = LatentDirichletAllocation(20, max_iter=50, random_state=0).fit(
    train
)
topics = mixture.components_ / mixture.components_.sum(1, keepdims=True)
by_lda = mixture.transform(given) @ topics
frequencies = (train.sum(0) + 1) / (train.sum() + train.shape[1])
for name, probabilities in {
    "frequencies of words": np.broadcast_to(frequencies, test.shape),
    "LDA, 20 topics": 0.9 * by_lda + 0.1 * frequencies,
    "ReplicatedSoftmax, 20 topics": model.predict_words(given),
}.items():
    nats = -(later * np.log(probabilities)).sum() / later.sum()
    print(f"{name:29s} {np.exp(nats):.0f}")
