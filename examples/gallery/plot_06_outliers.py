"""
Find and explain outliers
=========================

Learn what threes look like, find digits that are not threes, and show where a corrupted three is corrupted.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import LocalOutlierFactor

from mvrbm import MVRBMOutlierDetector

digits = load_digits()
pictures = digits.images / 16
threes = pictures[digits.target == 3]
others = pictures[digits.target != 3]
train = threes[::2]
test = np.concatenate([threes[1::2], others])
is_outlier = np.arange(len(test)) >= len(threes[1::2])

detector = MVRBMOutlierDetector().fit(train)

# %%
# How well do the scores separate threes from other digits? An area under the ROC curve of 1 is perfect, and 0.5 is
# chance level.

area = roc_auc_score(is_outlier, -detector.score_samples(test))
print(f"MVRBMOutlierDetector  {area:.3f}")
for tool in (
    LocalOutlierFactor(novelty=True),
    IsolationForest(random_state=0),
):
    scores = -tool.fit(train.reshape(len(train), -1)).score_samples(
        test.reshape(len(test), -1)
    )
    area = roc_auc_score(is_outlier, scores)
    print(f"{type(tool).__name__:20s}  {area:.3f}")

# %%
# Unlike the other detectors, this one can explain its scores: ``explain`` computes how unlikely each pixel is given the
# others. Here, a square of 2 x 2 pixels is inverted in each of six threes.

corrupted = threes[1:12:2].copy()
places = np.random.default_rng(1).integers(1, 6, (len(corrupted), 2))
for picture, (row, column) in zip(corrupted, places, strict=True):
    picture[row : row + 2, column : column + 2] = (
        1 - picture[row : row + 2, column : column + 2]
    )
maps = detector.explain(corrupted)

fig, axes = plt.subplots(2, 6, figsize=(8, 3), layout="constrained")
for axis, picture in zip(axes[0], corrupted, strict=True):
    axis.imshow(picture, cmap="gray")
for axis, found, (row, column) in zip(axes[1], maps, places, strict=True):
    axis.imshow(found, cmap="magma", vmin=0)
    axis.add_patch(
        plt.Rectangle(
            (column - 0.5, row - 0.5),
            2,
            2,
            fill=False,
            edgecolor="cyan",
            linewidth=1.5,
        )
    )
for axis in axes.ravel():
    axis.set(xticks=[], yticks=[])
axes[0, 0].set_ylabel("corrupted")
axes[1, 0].set_ylabel("map")
plt.show()
