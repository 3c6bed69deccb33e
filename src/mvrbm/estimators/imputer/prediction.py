"""Machines that predict what a linear machine gets wrong, and masks that hide a part of the data to learn it from.

A correction is two machines, one above the other. The lower one has the visible layers `value` (a sample whose unknown
entries hold a first prediction) and `known` (which entries are known). The upper one has the hidden layer of the lower
one as its layer `below`, and a layer `filled`, whose fields are added to those of the first prediction. The pass from
`value` and `known` up and back down to `filled` is trained by the gradient of the squared error, after the
multi-prediction training of Goodfellow et al., "Multi-prediction deep Boltzmann machines", NeurIPS (2013).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mvrbm.couplings import Dense
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.units import Bernoulli, Gaussian, make_unit

# Standard deviations of the initial fields of hidden layers, by each layer below, and of the initial corrections.
_FIELD_SPREAD, _SMALL = 0.5, 0.003
# First predictions of bounded entries are at least so far from the ends: fields would be infinite there.
_LEAST = 0.01


def random_masks(n: int, shape: tuple[int, ...], rng: RandomSource, like: Tensor) -> Tensor:
    """Return which entries of n samples to show, (n, *shape): random entries, only those of a box, or all others.

    Every second mask, on average, shows random entries, at a rate that is itself random. In samples that are vectors,
    no entries are neighbors, so that boxes mean nothing: then all masks do.
    """
    one = (n, *[1] * len(shape))
    shown = rng.uniform((n, *shape), like) < rng.uniform(one, like)
    if len(shape) == 1:
        return shown
    box = torch.ones((n, *shape), dtype=torch.bool, device=like.device)
    for axis, size in enumerate(shape, 1):
        # A box has a quarter to five quarters of the side, and may reach beyond the edge: halves are boxes, too.
        start, length = 1.5 * rng.uniform((n, 1), like) - 0.5, 0.25 + rng.uniform((n, 1), like)
        middle = (torch.arange(size, device=like.device) + 0.5) / size
        inside = (middle >= start) & (middle < start + length)
        box &= inside.reshape(n, *[size if other == axis else 1 for other in range(1, len(shape) + 1)])
    inverted, boxed = (rng.uniform(one, like) < 0.5 for _ in range(2))
    return torch.where(boxed, box ^ inverted, shown)


class Correction(nn.Module):
    """A correction of first predictions.

    Parameters
    ----------
    lower, upper : BoltzmannMachine
        The machine of values and masks, and the one above it.
    """

    def __init__(self, lower: BoltzmannMachine, upper: BoltzmannMachine) -> None:
        super().__init__()
        self.lower, self.upper = lower, upper
        for unit in (*lower.layers.values(), upper.layers["below"]):
            unit.requires_grad_(False)

    @classmethod
    def new(cls, size: int, hidden: str, n_hidden: int, filled: str, rng: RandomSource, like: Tensor) -> Correction:
        """Return a correction that does almost nothing yet, for vectors of mean 0 and variance 1.

        `hidden` and `filled` name the units of the hidden layers and of what is filled in.
        """
        below = {"value": Gaussian(size), "known": Bernoulli(size)}
        above = {"below": Gaussian(n_hidden), "filled": make_unit(filled, size)}
        found = cls(
            *(
                BoltzmannMachine(layers, make_unit(hidden, n_hidden), {name: Dense() for name in layers}).to(like)
                for layers in (below, above)
            )
        )
        stds = [_FIELD_SPREAD / math.sqrt(size)] * 2 + [2 * _FIELD_SPREAD / math.sqrt(n_hidden), _SMALL]
        links = [link for machine in (found.lower, found.upper) for link in machine.links.values()]
        with torch.no_grad():
            for link, std in zip(links, stds, strict=True):
                weight = link.get_parameter("weight")
                weight.copy_(std * rng.normal(weight.shape, weight))
        return found

    @property
    def bounded(self) -> bool:
        """Whether the entries that are filled in lie between 0 and 1."""
        return self.upper.layers["filled"].data_range == (0, 1)

    def forward(self, value: Tensor, known: Tensor, first: Tensor) -> Tensor:
        """Return the predictions (n, D) of all entries, given first ones, in the units of the layer `filled`."""
        links, unit = self.lower.links, self.upper.layers["filled"]
        field = links["value"].to_hidden(value) + links["known"].to_hidden(known.to(value.dtype))
        field = self.upper.links["below"].to_hidden(self.lower.hidden.activation(field))
        field = self.upper.links["filled"].to_visible(self.upper.hidden.activation(field))
        return unit.mean(field + (torch.logit(first, _LEAST) if self.bounded else first))
