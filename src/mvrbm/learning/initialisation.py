"""Where learning starts, and how large its steps may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.learning.recipe import Recipe
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource

# Chosen on held-out training digits of MNIST and on patches of photographs, sizes 4x4 to 128x128, orders 1 to
# 4, ranks 1 to 16. docs/learning.md has the tables, and says what was looked at on the way.
_RATE = 3.0
_LARGEST_RATE = 0.5
_FIELD_SPREAD = 0.3


@dataclass(frozen=True)
class Moments:
    """Mean and variance of every entry of one layer over `count` samples."""

    mean: Tensor  # (*shape)
    variance: Tensor  # (*shape)
    count: int


def moments_of(total: Tensor, squares: Tensor, counts: Tensor, *, origin: Tensor) -> Moments:
    """Turn sums over known entries, of deviations from an origin, into moments.

    Entries that were never known get the moments of the others.
    """
    known = counts.clamp(min=1)
    shift = total / known
    variance = (squares / known - shift**2).clamp(min=0)
    mean = origin + shift
    never = counts == 0
    if bool(never.any()):
        some = ~never
        fill_mean = mean[some].mean() if bool(some.any()) else mean.new_tensor(0.5)
        fill_variance = variance[some].mean() if bool(some.any()) else mean.new_tensor(1.0)
        mean, variance = torch.where(never, fill_mean, mean), torch.where(never, fill_variance, variance)
    return Moments(mean, variance, int(counts.max()))


@torch.no_grad()
def initialise(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments], rng: RandomSource) -> None:
    """Set every parameter to where the recipe starts."""
    for name, unit in machine.layers.items():
        if recipe.bias_from_data:
            unit.initialise_from(moments[name].mean, moments[name].variance, moments[name].count)
        else:
            unit.bias.zero_()
    machine.hidden.bias.zero_()
    std = recipe.std if recipe.std is not None else _FIELD_SPREAD / math.sqrt(_power(machine, moments, None))
    for link in machine.links.values():
        link.initialise(rng, std, factor_std=recipe.factor_std)
    if recipe.centring != "none":
        # Hidden fields start around zero, however far from zero the data is.
        machine.hidden.absorb(-machine.hidden_field(offsets(machine, recipe, moments))[0])


def offsets(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    """Return what deviations are taken from: the mean of the layers that are centred, zero for the others."""
    everything = recipe.centring == "full"
    centre = {}
    for name, unit in machine.layers.items():
        mean = moments[name].mean[None].to(machine.like)
        centred = everything or (recipe.centring == "location" and unit.arbitrary_zero)
        centre[name] = mean if centred else torch.zeros_like(mean)
    return centre


@torch.no_grad()
def safe_rate(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments]) -> float:
    r"""Return a step size for `W` that neither idles nor runs away.

    The likelihood's curvature along a row of `W` is at most the variance of a hidden unit times that of
    what it sees, :math:`v_h \sum \mathrm{E}\, T(x)^2` around the offset; along a column, :math:`v_v` times the
    variance of all hidden units, :math:`v_h K`. A step is safe up to about the inverse of their sum.
    """
    hidden = machine.hidden
    visible_fluctuation = max(unit.fluctuation for unit in machine.layers.values())
    rows = hidden.fluctuation * _power(machine, moments, offsets(machine, recipe, moments))
    columns = visible_fluctuation * hidden.fluctuation * math.prod(hidden.shape)
    return min(_LARGEST_RATE, _RATE / (rows + columns))


def _power(machine: BoltzmannMachine, moments: Mapping[str, Moments], offset: Mapping[str, Tensor] | None) -> float:
    """Mean square of the statistic around an offset, summed over all entries; around the mean without one."""
    total = 0.0
    for name, unit in machine.layers.items():
        variance, mean = (part.to(machine.like) for part in (moments[name].variance, moments[name].mean))
        away = torch.zeros_like(mean) if offset is None else mean - offset[name][0]
        total += float((unit.statistic(torch.sqrt(variance + away**2)) ** 2).sum())
    return max(total, 1e-6)
