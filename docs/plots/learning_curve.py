"""Reconstruction error after each epoch, for the first example of the page on training."""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from mvrbm import models
from mvrbm.training import Monitor, Trainer

digits = (load_digits().images / 16).astype(np.float32)
train, held_out = digits[:1500], digits[1500:]
trainer = Trainer(
    models.mvrbm((8, 8), (8, 8), rank=4),
    seed=0,
    callbacks=[Monitor(train[:300], held_out)],
)
trainer.fit(train, n_epochs=30)

fig, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
epochs = [row["epoch"] for row in trainer.history]
for key, name in {
    "reconstruction_error": "training digits",
    "validation_error": "held-out digits",
}.items():
    axis.plot(epochs, [row[key] for row in trainer.history], label=name)
axis.set(xlabel="epochs", ylabel="squared error per digit", ylim=(0, None))
axis.legend()
axis.grid(alpha=0.3)
