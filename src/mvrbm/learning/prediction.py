"""Machines that predict what a linear machine gets wrong, and masks that hide a part of the data to learn it from.

A correction is a machine with the visible layers `value` (a sample whose unknown entries hold a first prediction),
`known` (which entries are known) and `error` (by how much the first prediction is wrong). Given the first two layers,
the mean field of the third corrects the prediction. It is trained for just that, by the gradient of the squared error,
after the multi-prediction training of Goodfellow et al., "Multi-prediction deep Boltzmann machines", NeurIPS (2013).
"""

import math

import torch
from torch import Tensor

from mvrbm.couplings import Dense
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.units import Bernoulli, Gaussian, make_unit

# Standard deviations of the initial fields of the hidden layer from values and masks, and of the initial corrections.
_FIELD_SPREAD, _SMALL = 0.5, 0.003


def random_masks(n: int, shape: tuple[int, ...], rng: RandomSource, like: Tensor) -> Tensor:
    """Return which entries of n samples to show, (n, *shape): random entries, only those of a box, or all others.

    Every second mask, on average, shows random entries, at a rate that is itself random. In samples that are vectors,
    no entries are neighbours, so that boxes mean nothing: then all masks do.
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


def new_correction(size: int, hidden: str, n_hidden: int, rng: RandomSource, like: Tensor) -> BoltzmannMachine:
    """Return a correction that does almost nothing yet, for vectors that have mean 0 and variance 1."""
    layers = {"value": Gaussian(size), "known": Bernoulli(size), "error": Gaussian(size)}
    machine = BoltzmannMachine(layers, make_unit(hidden, n_hidden), {name: Dense() for name in layers}).to(like)
    stds = {"value": _FIELD_SPREAD / math.sqrt(size), "known": _FIELD_SPREAD / math.sqrt(size), "error": _SMALL}
    with torch.no_grad():
        for name, std in stds.items():
            weight = machine.links[name].get_parameter("weight")
            weight.copy_(std * rng.normal(weight.shape, weight))
    machine.layers["value"].requires_grad_(False)
    machine.layers["known"].requires_grad_(False)
    return machine


def corrected(machine: BoltzmannMachine, value: Tensor, known: Tensor) -> Tensor:
    """Return the values (n, D), with the mean field of the errors added where they are unknown."""
    field = machine.links["value"].to_hidden(value) + machine.links["known"].to_hidden(known.to(value.dtype))
    back = machine.links["error"].to_visible(machine.hidden.mean(field))  # the error is 0 where mean field starts
    return value + torch.where(known, 0.0, machine.layers["error"].mean(back))
