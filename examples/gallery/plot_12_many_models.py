"""
Many models at once
===================

Training a small model leaves most of a processor idle. :class:`~mvrbm.Sweep` trains models with all combinations of
the given settings at the same time, and keeps the best model.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from mvrbm import MVRBM, Sweep

pictures = (load_digits().images / 16).astype(np.float32)

start = time.perf_counter()
sweep = Sweep(
    MVRBM((8, 8), n_epochs=30, recipe="generative"),
    {
        "rank": [1, 2, 4],
        "learning_rate": [0.05, 0.2, 0.8],
        "random_state": [0, 1],
    },
).fit(pictures)
seconds = time.perf_counter() - start
print(f"{len(sweep.candidates_)} models in {seconds:.1f} s")
print(f"best: {sweep.best_params_}, score {sweep.best_score_:.2f}")

# %%
# Training with two seeds per setting shows which differences are larger than random variation. The score is the
# pseudo-log-likelihood of held-out digits.

fig, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
for rank in (1, 2, 4):
    points = [
        (c.params["learning_rate"], c.score)
        for c in sweep.candidates_
        if c.params["rank"] == rank
    ]
    rates, scores = np.array(points).T
    axis.plot(
        rates * 1.05 ** (rank - 2), scores, "o", label=f"rank {rank}"
    )
axis.set(
    xscale="log", xlabel="learning rate", ylabel="score of held-out digits"
)
axis.legend()
plt.show()
