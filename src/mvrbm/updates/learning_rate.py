"""Learning rates: their decay, and values that are safe for given data if the recipe has no learning rate.

Safe learning rates are derived from bounds on the curvature of the likelihood.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mvrbm.data.moments import Moments
from mvrbm.machine import BoltzmannMachine
from mvrbm.units import Unit
from mvrbm.updates.recipe import Recipe

# The next two constants were tuned on held-out MNIST training digits and on photograph patches, for sizes from 4x4 to
# 128x128, orders 1 to 4, and ranks 1 to 16. The results are in docs/learning.md.
# Learning rate as a multiple of the inverse curvature.
_RATE = 3.0
# The same for coupled Gaussian layers. For a singular value w of the coupling, the gradient of CD-1 is proportional to
# w (c - c w^4 - w^2 - 1), where c is the variance of the data in that direction. Near w = 1, its slope is -4 (c + 1).
_GAUSSIAN_RATE = 0.25
# Upper limit on the product of a learning rate and the curvature along a column for units with unbounded statistics.
# With momentum 0.5, gradient descent diverges from 3.
_LARGEST_PER_COLUMN = 2.0
#: Total variance below which the data is considered nearly constant.
LEAST_POWER = 0.1


def initial_rates(recipe: Recipe) -> tuple[float, float]:
    """Return the learning rates for factors and biases before decay. Raise ValueError if no learning rate is set."""
    if recipe.learning_rate is None:
        raise ValueError("the recipe has no learning rate: Trainer.prepare computes it from the data")
    rate = recipe.learning_rate
    return rate, rate if recipe.bias_learning_rate is None else recipe.bias_learning_rate


def learning_rates(recipe: Recipe, update: int | Tensor) -> tuple[float, float] | tuple[Tensor, Tensor]:
    r"""Return the learning rates for factors and biases, :math:`\eta (1 - t / T) / \sqrt{1 + t / \text{rate\_decay}}`.

    Here, :math:`\eta` is the initial learning rate, and `t` is the update index, which starts at 0. `T` is the number
    of planned updates if the recipe uses linear decay, and infinity otherwise. If `update` is a tensor, the rates are
    also tensors, so a CUDA graph can compute them.
    """
    rate, bias_rate = initial_rates(recipe)
    slowness = recipe.rate_decay or math.inf
    planned = (recipe.planned_updates if recipe.linear_decay else None) or math.inf
    if isinstance(update, Tensor):
        decays = (1 + update / slowness).rsqrt() * (1 - update / planned).clamp(min=0)
        return decays * rate, decays * bias_rate
    decay = max(0.0, 1 - update / planned) / math.sqrt(1 + update / slowness)
    return rate * decay, bias_rate * decay


@torch.no_grad()
def safe_rates(
    machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments], center: Mapping[str, Tensor]
) -> dict[str, float]:
    r"""Compute learning rates that are large enough for fast learning but small enough to prevent divergence.

    The result has one learning rate for each coupling `W`, keyed by layer name. `center` contains the centering offsets
    :math:`\mu` of the visible layers, of shape (1, *layer shape) (see `mvrbm.updates.initialization.offsets`).

    Along a row of `W`, the curvature of the likelihood is at most :math:`v_h \sum \mathrm{E}\, (T(x) - \mu)^2`, where
    :math:`v_h` is the largest variance of a hidden unit, and the sum is the second moment of the statistics of all
    visible layers around their offsets :math:`\mu`. Along a column, the curvature is at most :math:`v_v v_h K`, where
    :math:`v_v` is the largest variance of a visible unit in the layer and :math:`K` is the number of hidden units. A
    learning rate is safe if it is at most about the inverse of the sum of these two bounds.

    Units with bounded statistics tolerate much larger learning rates than Gaussian units. If all couplings had the
    learning rate of a Gaussian layer, the other layers would hardly learn. Large rates begin with oscillations, in
    which all hidden units are on at the same time. Bounded layers recover from them, but Gaussian layers amplify them.
    In machines with both, the bound for Gaussian layers therefore contains :math:`K` instead of :math:`v_h K`, and
    bounded layers learn at half their rate.
    """
    hidden, power = (machine.hidden, power_of(machine, moments, center, most=recipe.normalized))
    if power < LEAST_POWER:
        # The chains vary even if the data is nearly constant.
        power = sum(unit.fluctuation * math.prod(unit.shape) for unit in machine.layers.values())
    rows = hidden.fluctuation * power
    bounded = {name for name, unit in machine.layers.items() if _is_bounded(unit) and _is_bounded(hidden)}
    is_mixed = 0 < len(bounded) < len(machine.layers)
    rates = {}
    for name, unit in machine.layers.items():
        columns = unit.fluctuation * hidden.fluctuation * math.prod(hidden.shape)
        if machine.may_be_unbounded:
            rate = _GAUSSIAN_RATE / (rows + columns)
        elif name in bounded:
            # Units with bounded statistics saturate, so the actual curvature is far below the bound.
            rate = min(recipe.largest_rate, recipe.rate_factor * _RATE / (rows + columns))
            rate = rate / 2 if is_mixed else rate
        else:
            if is_mixed:
                columns = unit.fluctuation * math.prod(hidden.shape)
            # The learning rate may exceed the bound only for a short time, while it decays.
            factor = 1.0 if recipe.rate_decay is None else _RATE
            rate = min(factor / (rows + columns), _LARGEST_PER_COLUMN / columns)
        rates[name] = min(recipe.largest_rate, rate)
    return rates


def _is_bounded(unit: Unit) -> bool:
    """Return whether the statistics of a unit are bounded."""
    return all(map(math.isfinite, unit.statistic_bounds))


def power_of(
    machine: BoltzmannMachine,
    moments: Mapping[str, Moments],
    offset: Mapping[str, Tensor] | None,
    *,
    most: bool = False,
) -> float:
    """Return the mean squared deviation of the statistic from an offset, summed over all entries.

    If `offset` is None, the offset is the mean. If `most` is True, a layer that learns its variance contributes at most
    1 per entry, because :func:`mvrbm.updates.step.gains_of` divides the steps of such a layer by the excess.
    """
    total = 0.0
    for name, unit in machine.layers.items():
        variance, mean = (part.to(machine.like) for part in (moments[name].variance, moments[name].mean))
        away = torch.zeros_like(mean) if offset is None else mean - offset[name][0]
        own = float((unit.statistic(torch.sqrt(variance + away**2)) ** 2).sum())
        total += min(own, math.prod(unit.shape)) if most and unit.learns_statistic else own
    return max(total, 1e-6)
