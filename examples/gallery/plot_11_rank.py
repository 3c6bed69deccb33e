"""
Rank: from the MVRBM to the RBM
===============================

A coupling :math:`W = \\sum_{r=1}^R U_r \\otimes V_r` has rank :math:`R`. With rank 1, the model is the matrix-variate
RBM of the paper. With enough terms, the sum can be any matrix, and the model is a classic RBM. What does each
additional term cost, and how much does it improve the model? This example trains both kinds of models on the same
4,000 digits, for the same number of updates, and compares the likelihood of 1,000 other digits.
"""

import matplotlib.pyplot as plt
import numpy as np

from mvrbm import MVRBM, RBM
from mvrbm.io.datasets import load

random = np.random.default_rng(0)
digits = load("mnist-5k").arrays / 255  # 28 x 28 pixels
binary = (random.random(digits.shape) < digits).astype(np.float32)
binary = binary[random.permutation(5000)]
train, test = binary[:4000], binary[4000:]

settings = {"recipe": "generative", "n_epochs": 20, "random_state": 0}
models = {
    "sum of R products": {
        f"R = {rank}": MVRBM((20, 20), rank=rank, **settings)
        for rank in (1, 2, 4, 8)
    },
    "classic RBM": {
        f"{n} units": RBM(n, **settings) for n in (2, 6, 12, 50, 400)
    },
}

found = {}
for kind, members in models.items():
    found[kind] = []
    for name, model in members.items():
        model.fit(train)
        parameters = model.machine_.n_parameters
        nats = model.log_likelihood(test, n_steps=200, n_chains=50)
        found[kind].append((parameters, nats.mean, nats.lower, nats.upper))
        print(
            f"{name:9s} {parameters:7,} parameters {nats.mean:7.1f} nats"
        )

# %%
# With equal numbers of parameters, the sums of products are far better: a classic RBM with as few parameters has only
# a handful of hidden units. With equal numbers of hidden units (400), the classic RBM has more than thirty times as
# many parameters, and its likelihood is still lower. Within these 800 updates, ranks above 2 improve the result only
# slightly. Bars show intervals of the estimates.

plt.figure(figsize=(7.5, 4), layout="constrained")
for (kind, points), marker in zip(found.items(), "os", strict=True):
    parameters, nats, low, high = np.array(points).T
    plt.errorbar(
        parameters,
        nats,
        (nats - low, high - nats),
        fmt=f"{marker}-",
        capsize=3,
        label=kind,
    )
    for name, x, y in zip(models[kind], parameters, nats, strict=True):
        above = kind.startswith("sum")
        plt.annotate(
            name,
            (x, y),
            xytext=(0, 14 if above else -18),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
plt.xscale("log")
plt.margins(x=0.1, y=0.15)
plt.xlabel("parameters")
plt.ylabel("nats per test digit")
plt.legend(loc="lower right")
plt.show()

# %%
# Longer training improves all of these models. For smaller pictures, a full matrix has few parameters: on binarized
# digits of 8 x 8 pixels, a classic RBM with 100 hidden units (6,564 parameters) was better than every rank after 1,400
# updates. :doc:`/results` compares models that were trained for much longer on all of MNIST.
