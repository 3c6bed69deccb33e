"""
Find and explain outliers
=========================

In this example, a detector inspects a brick wall. It learns what bricks look like, finds patches of the wall that
contain a fault, and shows where the fault is. All training patches are free of faults, and the default settings are
used.
"""

import matplotlib.pyplot as plt
import numpy as np
from skimage import data
from sklearn.covariance import LedoitWolf
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import LocalOutlierFactor

from mvrbm import MVRBMOutlierDetector

random = np.random.default_rng(0)
wall = data.brick().astype(float)  # 512 x 512 pixels
size = 24


def patches(picture, n):
    """Cut random patches: (n, 24, 24)."""
    rows = random.integers(0, picture.shape[0] - size, n)
    columns = random.integers(0, picture.shape[1] - size, n)
    return np.stack(
        [
            picture[row : row + size, column : column + size]
            for row, column in zip(rows, columns, strict=True)
        ]
    )


train = patches(wall[:256], 1000)  # the upper half of the wall
good = patches(wall[256:], 200)  # the lower half
detector = MVRBMOutlierDetector().fit(train)

# %%
# Two faults are planted in the patches of the lower half: a thin scratch, as bright as one standard deviation of the
# wall, or a row of camera pixels that returns only the mean gray value of the patch.

y, x = np.mgrid[:size, :size]
scratched, dead = good.copy(), good.copy()
for patch in scratched:
    row, column = random.uniform(6, size - 6, 2)
    angle = random.uniform(0, np.pi)
    off = (y - row) * np.cos(angle) - (x - column) * np.sin(angle)
    near = (y - row) ** 2 + (x - column) ** 2 <= 36
    patch[(abs(off) < 0.6) & near] += train.std()
for patch in dead:
    patch[random.integers(0, size)] = patch.mean()

# %%
# ``explain`` computes how unlikely each pixel is given the others. The figure shows the first patches, without any
# selection. The maps show square roots, because the values at faults are very large.

faults = {"scratch": scratched, "dead row": dead}
shown = np.concatenate([scratched[:4], dead[4:8]])
lines = {
    "good": good[:8],
    "with a fault": shown,
    "map": detector.explain(shown),
}
fig, axes = plt.subplots(3, 8, figsize=(9, 3.7), layout="constrained")
for line, (name, pictures) in zip(axes, lines.items(), strict=True):
    line[0].set_ylabel(name)
    for axis, picture in zip(line, pictures, strict=True):
        if name == "map":
            axis.imshow(np.sqrt(picture.clip(0)), cmap="magma")
        else:
            axis.imshow(picture, cmap="gray", vmin=30, vmax=210)
        axis.set(xticks=[], yticks=[])
for number, axis in enumerate(axes[0]):
    axis.set_title("scratch" if number < 4 else "dead row", fontsize=10)
plt.show()

# %%
# How well do the scores separate patches with a fault from good ones? An area under the ROC curve of 1 is perfect, and
# 0.5 is chance level. A fault of a few pixels hardly changes distances between whole patches.


def rows_of(pictures):
    return pictures.reshape(len(pictures), -1)


def compare(tools, normal, unusual):
    """Print areas under the ROC curve: one line per tool."""
    for name, score in tools.items():
        areas = []
        for other in unusual:
            scores = np.concatenate([score(normal), score(other)])
            labels = np.repeat([0, 1], [len(normal), len(other)])
            areas.append(roc_auc_score(labels, -scores))
        print(f"{name:21s}", *(f"{area:10.3f}" for area in areas))


def fit_tools(train, detector):
    neighbors = LocalOutlierFactor(novelty=True).fit(rows_of(train))
    forest = IsolationForest(random_state=0).fit(rows_of(train))
    gaussian = LedoitWolf().fit(rows_of(train))
    return {
        "MVRBMOutlierDetector": detector.score_samples,
        "Mahalanobis distance": lambda a: (
            -gaussian.mahalanobis(rows_of(a))
        ),
        "LocalOutlierFactor": lambda a: neighbors.score_samples(
            rows_of(a)
        ),
        "IsolationForest": lambda a: forest.score_samples(rows_of(a)),
    }


print(f"{'':21s}", *(f"{name:>10s}" for name in faults))
compare(fit_tools(train, detector), good, faults.values())

# %%
# ``predict`` also needs a threshold. By default, about 2% of new normal samples are reported as outliers. The lower
# half of the wall is not exactly like the upper half, so the fraction can differ here.

for name, pictures in {"good": good, **faults}.items():
    reported = (detector.predict(pictures) == -1).mean()
    print(f"{name:9s} {reported:6.1%} reported as outliers")

# %%
# When to use something else
# --------------------------
# If unusual samples are entirely different from normal ones, distances to the nearest neighbors are enough. An example
# is finding other digits among 92 small pictures of threes. There, distances are faster to compute and separate
# outliers better. :doc:`/outliers` compares the tools on nine kinds of data.

from sklearn.datasets import load_digits

digits = load_digits()
threes = digits.images[digits.target == 3] / 16
others = digits.images[digits.target != 3] / 16
small = MVRBMOutlierDetector().fit(threes[::2])
compare(fit_tools(threes[::2], small), threes[1::2], [others])
