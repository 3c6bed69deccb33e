"""The start of training: initial parameters from the data's moments, offsets, and a safe learning rate."""

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from mvrbm.data.moments import Moments
from mvrbm.errors import ConstantDataWarning
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.updates.recipe import Recipe

# Chosen on held-out training digits of MNIST and on patches of photographs: sizes 4x4 to 128x128, orders 1 to 4,
# ranks 1 to 16. The tables are in docs/learning.md.
_RATE, _LARGEST_RATE, _FIELD_SPREAD = 3.0, 0.5, 0.3
# Mean squared distance of samples from their mean below which there is little to couple, and weights start smaller.
_LEAST_POWER = 0.1
# A layer of constant entries is as certain as after this many samples.
_CERTAIN_COUNT = 1000
_NAMED = 8  # constant entries in a warning


@torch.no_grad()
def initialize(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments], rng: RandomSource) -> None:
    """Set every parameter to its initial value."""
    for name, unit in machine.layers.items():
        if recipe.bias_from_data:
            seen = moments[name]
            count = seen.count if bool(seen.variance.any()) else max(seen.count, _CERTAIN_COUNT)
            unit.initialize_from(seen.mean, seen.variance, count)
        else:
            unit.bias.zero_()
    machine.hidden.bias.zero_()
    power = _power(machine, moments, None)
    # Without variance there is nothing to couple: weights that gave the usual spread would be huge.
    spread = _FIELD_SPREAD * min(1.0, power / _LEAST_POWER)
    std = recipe.std if recipe.std is not None else spread / math.sqrt(power)
    for link in machine.links.values():
        link.initialize(rng, std, factor_std=recipe.factor_std)
    if recipe.centering != "none":
        # Hidden fields start around zero, however far from zero the data is.
        machine.hidden.absorb(-machine.hidden_field(offsets(machine, recipe, moments))[0])


def warn_of_constants(machine: BoltzmannMachine, moments: Mapping[str, Moments]) -> None:
    """Warn if half of the entries of a layer or more are constant. Fewer are usual, such as the margins of images."""
    for name, unit in machine.layers.items():
        # A site of categories is constant if it has one category only.
        sites = unit.site_shape or (1,)
        constant = (moments[name].variance == 0).reshape(*sites, -1).all(-1)
        places = torch.nonzero(constant).tolist()
        if 2 * len(places) >= constant.numel():
            shown = [str(tuple(place)) if len(place) > 1 else str(place[0]) for place in places[:_NAMED]]
            some = ", ".join(shown) + (", ..." if len(places) > _NAMED else "")
            what = "all" if len(places) == constant.numel() else f"{len(places)} of {constant.numel()}"
            warnings.warn(
                f"{what} entries of layer '{name}' are constant in the data ({some}): the model learns their "
                "value, and nothing else of them",
                ConstantDataWarning,
                stacklevel=2,
            )


def offsets(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    """Return the offset of every visible layer: the mean of the layers that are centered, zero for the others."""
    center = {}
    for name, unit in machine.layers.items():
        mean = moments[name].mean[None].to(machine.like)
        centered = recipe.centering == "full" or (recipe.centering == "location" and unit.arbitrary_zero)
        center[name] = mean if centered else torch.zeros_like(mean)
    return center


@torch.no_grad()
def safe_rate(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments]) -> float:
    r"""Return a learning rate for `W` that is neither too small to learn nor so large that training diverges.

    The likelihood's curvature along a row of `W` is at most the variance of a hidden unit times that of
    its input, :math:`v_h \sum \mathrm{E}\, T(x)^2` around the offset; along a column, :math:`v_v` times the
    variance of all hidden units, :math:`v_h K`. A step is safe up to about the inverse of their sum.
    """
    hidden, power = machine.hidden, _power(machine, moments, offsets(machine, recipe, moments), most=recipe.normalized)
    if power < _LEAST_POWER:  # the data hardly varies, but chains do
        power = sum(unit.fluctuation * math.prod(unit.shape) for unit in machine.layers.values())
    rows = hidden.fluctuation * power
    visible_fluctuation = max(unit.fluctuation for unit in machine.layers.values())
    columns = visible_fluctuation * hidden.fluctuation * math.prod(hidden.shape)
    # Where T is bounded, units saturate, and the curvature is far below its bound.
    ends = [end for unit in (hidden, *machine.layers.values()) for end in unit.statistic_bounds()]
    factor = recipe.rate_factor * _RATE
    if not all(map(math.isfinite, ends)):
        # Beyond the bound only for the short time before the rate decays.
        factor = 1.0 if recipe.rate_decay is None else _RATE
    return min(_LARGEST_RATE, factor / (rows + columns))


def _power(
    machine: BoltzmannMachine,
    moments: Mapping[str, Moments],
    offset: Mapping[str, Tensor] | None,
    *,
    most: bool = False,
) -> float:
    """Return the mean square of the statistic around an offset (default: the mean), summed over all entries.

    With `most`, layers that learn their variance count at most 1 per entry: what is more divides their steps, see
    :func:`mvrbm.updates.step.gains_of`.
    """
    total = 0.0
    for name, unit in machine.layers.items():
        variance, mean = (part.to(machine.like) for part in (moments[name].variance, moments[name].mean))
        away = torch.zeros_like(mean) if offset is None else mean - offset[name][0]
        own = float((unit.statistic(torch.sqrt(variance + away**2)) ** 2).sum())
        total += min(own, math.prod(unit.shape)) if most and unit.learns_statistic else own
    return max(total, 1e-6)
