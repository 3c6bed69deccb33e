"""
Write your own unit
===================

A unit defines the distribution of a layer in an external field. This example defines spins, with values -1 and 1, in
thirty lines. All couplings, samplers and likelihoods then work with them. A machine with spins learns the Ising model,
a lattice in which neighbors tend to agree.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.functional import softplus

from mvrbm import MVRBM
from mvrbm.units.base import Alternatives, Unit


class Spin(Unit):
    r"""Entries of -1 or 1.

    The energy is :math:`-\langle b, x\rangle`, so
    :math:`E[x \mid f] = \tanh(b + f)`.
    """

    name = "spin"  # the name that estimators and the command line accept
    data_range = (-1.0, 1.0)
    levels = 2.0  # number of values of one site
    fluctuation = 1.0  # largest variance in a fixed field

    def site_energy(self, x):
        return -self.bias * x

    def site_log_normalizer(self, field):
        total = self.bias + field  # log 2 cosh(t) = softplus(2 t) - t
        return softplus(2 * total) - total

    def mean(self, field):
        return torch.tanh(self.bias + field)

    def sample(self, field, rng):
        up = torch.sigmoid(2 * (self.bias + field))
        return 2 * (rng.uniform(up.shape, up) < up).to(up.dtype) - 1

    @torch.no_grad()
    def initialize_from(self, mean, variance, count):
        self.bias.copy_(
            torch.atanh(self._pool(mean) * count / (count + 2))
        )

    def decode(self, digits):
        return 2 * digits.to(self.bias.dtype) - 1

    def alternatives(self, value, site, reach):
        values = torch.stack(
            [-torch.ones_like(value), torch.ones_like(value)]
        )
        shares = torch.stack([1 - value, 1 + value]) / 2
        return Alternatives(values, torch.zeros_like(shares), shares)


# %%
# The data are states of a 12 x 12 lattice with periodic boundaries, drawn by Metropolis steps on a checkerboard.

rng = np.random.default_rng(0)
size = 12
coupling = 0.35
lattice = rng.choice([-1.0, 1.0], (1000, size, size))
checkerboard = np.indices((size, size)).sum(0) % 2
for step in range(600):
    around = sum(
        np.roll(lattice, shift, axis)
        for axis in (1, 2)
        for shift in (-1, 1)
    )
    flip = rng.random(lattice.shape) < np.exp(
        -2 * coupling * lattice * around
    )
    lattice[flip & (checkerboard == step % 2)] *= -1

model = MVRBM(
    (12, 12),
    rank=8,
    visible="spin",
    recipe="generative",
    n_epochs=60,
    random_state=0,
).fit(lattice)
drawn = model.sample(1000, steps=200)

# %%
# Does the correlation of spins decay with distance in the model as it does in the lattice?

distances = np.arange(1, 7)


def correlation(x):
    return [
        np.mean([(x * np.roll(x, d, axis)).mean() for axis in (1, 2)])
        for d in distances
    ]


fig, axes = plt.subplots(
    1, 3, figsize=(10, 3.2), layout="constrained", width_ratios=[1, 1, 1.4]
)
for axis, title, states in zip(
    axes,
    ["Ising model", "samples of the machine"],
    [lattice, drawn],
    strict=False,
):
    axis.imshow(
        np.block(
            [[states[2 * i + j] for j in range(2)] for i in range(2)]
        ),
        cmap="gray",
    )
    axis.set(title=title, xticks=[], yticks=[])
axes[2].plot(distances, correlation(lattice), "o-", label="Ising model")
axes[2].plot(
    distances, correlation(drawn), "s--", label="machine of spins"
)
axes[2].set(xlabel="distance", ylabel="correlation of two spins")
axes[2].legend()
plt.show()
