"""
Rank: from the MVRBM to the RBM
===============================

A coupling :math:`W = \\sum_{r=1}^R U_r \\otimes V_r` has rank :math:`R`. With rank 1, the model is the matrix-variate
RBM of the paper. With enough terms, the sum can be any matrix, and the model is a classic RBM. How much does each step
improve the model?
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from mvrbm import MVRBM, RBM

pictures = (load_digits().images > 7).astype(np.float32)
train, test = pictures[:1400], pictures[1400:]
ranks = [1, 2, 4, 8, 16]

found = {}
for rank in ranks:
    model = MVRBM(
        (10, 10),
        rank=rank,
        recipe="generative",
        n_epochs=100,
        random_state=0,
    ).fit(train)
    parameters = model.machine_.n_parameters
    found[parameters] = [
        model.log_likelihood(X, n_steps=200, n_chains=50).mean
        for X in (train, test)
    ]
    nats = found[parameters][1]
    print(
        f"rank {rank:2d}: {parameters:6,} parameters, test {nats:.1f} nats"
    )

classic = RBM(100, recipe="generative", n_epochs=100, random_state=0).fit(
    train
)
full = [
    classic.log_likelihood(X, n_steps=200, n_chains=50).mean
    for X in (train, test)
]
parameters = classic.machine_.n_parameters
print(f"classic: {parameters:6,} parameters, test {full[1]:.1f} nats")

# %%
# The first steps improve the model most, at least within these 1,400 updates. For such small pictures, a full matrix
# has few parameters, and the classic RBM is the best model. On digits of 28 x 28 pixels it is the other way round: the
# full matrix overfits, and sums of a few products are better, with far fewer parameters (see :doc:`/results`).

plt.figure(figsize=(7, 3.8), layout="constrained")
for place, name in enumerate(["training digits", "test digits"]):
    (line,) = plt.plot(
        list(found),
        [values[place] for values in found.values()],
        "o-",
        label=f"MVRBM, {name}",
    )
    plt.plot(
        classic.machine_.n_parameters,
        full[place],
        "s",
        color=line.get_color(),
        label=f"classic RBM, {name}",
    )
for rank, (parameters, values) in zip(ranks, found.items(), strict=True):
    plt.annotate(
        f"R = {rank}",
        (parameters, values[1]),
        xytext=(0, -14),
        textcoords="offset points",
        ha="center",
    )
plt.xscale("log")
plt.xlabel("parameters")
plt.ylabel("log-likelihood per digit, nats")
plt.legend()
plt.show()
