"""
Two modalities
==============

A sample can consist of several arrays. Here, these are the left half of a digit, its right half, and its name.
:class:`~mvrbm.MMVRBM` learns them together and predicts any of them from the others.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from mvrbm import MMVRBM

bunch = load_digits()
# (1797, 8, 8), zeros and ones
pictures = (bunch.images > 7).astype(np.float32)
words = "zero one two three four five six seven eight nine".split()
names = np.array(words)[bunch.target]
train, test = slice(0, 1500), slice(1500, None)


def sample(rows):
    return {
        "left": pictures[rows][:, :, :4],
        "right": pictures[rows][:, :, 4:],
        "name": names[rows],
    }


model = MMVRBM(
    (12, 12), rank=4, recipe="generative", n_epochs=150, random_state=0
).fit(sample(train))

# %%
# Predict the name from both halves, or from one of them. For comparison, a separate logistic regression is trained for
# each of these cases, whereas the model has learned all of them at once. If you only need the name,
# :class:`~mvrbm.MVRBMClassifier` is the better choice.

both = sample(test)


def joined(rows, known):
    """Pixels of the given halves: one row per digit."""
    halves = [sample(rows)[key].reshape(-1, 32) for key in known]
    return np.concatenate(halves, axis=1)


for known in (["left", "right"], ["left"], ["right"]):
    guess = model.predict({key: both[key] for key in known}, steps=100)
    guess = guess if isinstance(guess, np.ndarray) else guess["name"]
    correct = np.mean(guess == both["name"])
    alone = LogisticRegression(max_iter=1000)
    alone.fit(joined(train, known), names[train])
    share = alone.score(joined(test, known), names[test])
    print(
        f"name from {' and '.join(known):15s} {correct:.3f} correct, "
        f"logistic regression {share:.3f}"
    )

# %%
# Predict the right half from the left half and the name. The rows show, from top to bottom, the input, the prediction,
# and the true half.

rows = np.array(
    [
        np.flatnonzero(names[test] == name)[0]
        for name in model.classes_["name"]
    ]
)
given = {"left": both["left"][rows], "name": both["name"][rows]}
found = model.predict(given, steps=200)
gray = np.full_like(found, 0.5)
lines = {"given": gray, "predicted": found, "truth": both["right"][rows]}

fig, axes = plt.subplots(3, 10, figsize=(8, 3), layout="constrained")
for line, (title, right) in zip(axes, lines.items(), strict=True):
    line[0].set_ylabel(title, rotation=0, ha="right", va="center")
    for axis, half, other in zip(line, given["left"], right, strict=True):
        axis.imshow(
            np.concatenate([half, other], 1), cmap="gray", vmin=0, vmax=1
        )
        axis.set(xticks=[], yticks=[])
for axis, name in zip(axes[0], given["name"], strict=True):
    axis.set_title(name, fontsize=9)
plt.show()
