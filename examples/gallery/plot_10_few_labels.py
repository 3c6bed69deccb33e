"""
Classify with few labels
========================

Labels are expensive, but unlabeled pictures are not. :class:`~mvrbm.MVRBMClassifier` learns from 50 or 150 labeled
digits, and from all other training digits without their labels.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC

from mvrbm import MVRBMClassifier

bunch = load_digits()
pictures = (bunch.images / 16).astype(np.float32)
labels = bunch.target
order = np.random.default_rng(0).permutation(len(pictures))
train, test = order[:1500], order[1500:]

results = {}
for n in (50, 150):
    few = train[:n]
    rows = pictures.reshape(len(pictures), -1)
    alone = MVRBMClassifier((10, 10), rank=4, random_state=0).fit(
        pictures[few], labels[few]
    )
    semi = MVRBMClassifier(
        (10, 10), rank=4, certainty=1.0, n_epochs=150, random_state=0
    )
    semi.fit(pictures[few], labels[few], unlabeled=pictures[train])
    results[n] = {
        "logistic regression": LogisticRegression(max_iter=1000)
        .fit(rows[few], labels[few])
        .score(rows[test], labels[test]),
        "support vector machine": SVC()
        .fit(rows[few], labels[few])
        .score(rows[test], labels[test]),
        "MVRBMClassifier": alone.score(pictures[test], labels[test]),
        "MVRBMClassifier, unlabeled digits too": semi.score(
            pictures[test], labels[test]
        ),
    }

for n, found in results.items():
    print(
        f"{n} labels: "
        + ", ".join(f"{name} {share:.3f}" for name, share in found.items())
    )

# %%
# These results are for one random choice of labeled digits. With other choices, the order of classifiers with
# similar accuracy may change.

fig, axis = plt.subplots(figsize=(7.5, 3.4), layout="constrained")
for place, name in enumerate(results[50]):
    shares = [found[name] for found in results.values()]
    bars = axis.bar(
        np.arange(2) + 0.2 * place - 0.3, shares, width=0.18, label=name
    )
    axis.bar_label(bars, [f"{share:.2f}" for share in shares])
axis.set(
    xticks=[0, 1],
    xticklabels=[f"{n} labels" for n in results],
    ylim=(0.7, 1.0),
    ylabel="accuracy, 297 test digits",
)
axis.legend(loc="upper left", fontsize=8)
plt.show()
