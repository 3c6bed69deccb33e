"""Initialization of a training run: initial parameters from the data's moments, offsets, and a safe learning rate."""

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from mvrbm.data.moments import Moments
from mvrbm.devices import one_thread
from mvrbm.distributed import World
from mvrbm.errors import ConstantDataWarning
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.updates.gradient import Centering
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState

# The next three constants were chosen on held-out training digits of MNIST and on patches of photographs, for sizes
# 4x4 to 128x128, orders 1 to 4, and ranks 1 to 16. The tables are in docs/learning.md.
# Learning rate as a multiple of the inverse curvature.
_RATE = 3.0
# Upper limit of the computed learning rate.
_LARGEST_RATE = 0.5
# Initial standard deviation of the hidden fields.
_FIELD_SPREAD = 0.3
# Mean squared distance of samples from their mean below which the data hardly varies, and weights start smaller.
_LEAST_POWER = 0.1
# Number of samples that determine the biases of a constant layer.
_CERTAIN_COUNT = 1000
# Number of constant entries that a warning lists.
_NAMED = 8


@one_thread()
def prepare_state(
    state: TrainState,
    recipe: Recipe,
    moments: Mapping[str, Moments],
    rng: RandomSource,
    world: World,
    *,
    initialize_machine: bool,
) -> None:
    """Set everything in the state of a new training run that depends on the data.

    Parameters
    ----------
    state : TrainState
        The state. Its learning rate and its offsets are set.
    recipe : Recipe
        Settings of the training run.
    moments : mapping of str to Moments
        Moments of the data by layer.
    rng : RandomSource
        Source of the initial factors.
    world : World
        The processes that share the training run.
    initialize_machine : bool
        Whether to set the machine's parameters to initial values.
    """
    machine = state.machine
    if initialize_machine:
        if world.is_main:
            warn_of_constants(machine, moments)
        initialize(machine, recipe, moments, rng)
        machine.check_bounded()
    state.learning_rate = recipe.learning_rate
    if state.learning_rate is None:
        state.learning_rate = safe_rate(machine, recipe, moments)
    center = offsets(machine, recipe, moments)
    follow_hidden = recipe.centering == "full"
    if follow_hidden or any(bool(offset.any()) for offset in center.values()):
        state.centering = Centering(machine, center, follow_hidden=follow_hidden, all_reduce=world.all_reduce)


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
    # Data that hardly varies would need huge weights for the usual spread.
    spread = _FIELD_SPREAD * min(1.0, power / _LEAST_POWER)
    std = recipe.std if recipe.std is not None else spread / math.sqrt(power)
    for link in machine.links.values():
        link.initialize(rng, std, factor_std=recipe.factor_std)
    if recipe.centering != "none":
        # The hidden bias compensates for the mean of the data, so that hidden fields start around zero.
        machine.hidden.absorb(-machine.hidden_field(offsets(machine, recipe, moments))[0])


def warn_of_constants(machine: BoltzmannMachine, moments: Mapping[str, Moments]) -> None:
    """Warn if at least half of the entries of a layer are constant. Fewer are common, such as the margins of images."""
    for name, unit in machine.layers.items():
        # A categorical site is constant if only one of its categories occurs.
        sites = unit.site_shape or (1,)
        constant = (moments[name].variance == 0).reshape(*sites, -1).all(-1)
        places = torch.nonzero(constant).tolist()
        if 2 * len(places) >= constant.numel():
            shown = [str(tuple(place)) if len(place) > 1 else str(place[0]) for place in places[:_NAMED]]
            some = ", ".join(shown) + (", ..." if len(places) > _NAMED else "")
            what = "all" if len(places) == constant.numel() else f"{len(places)} of {constant.numel()}"
            warnings.warn(
                f"{what} entries of layer '{name}' are constant in the data ({some}): the model can only learn their "
                "values",
                ConstantDataWarning,
                stacklevel=2,
            )


def offsets(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    """Return the offset of every visible layer: the mean of a centered layer, zero for other layers."""
    center = {}
    for name, unit in machine.layers.items():
        mean = moments[name].mean[None].to(machine.like)
        centered = recipe.centering == "full" or (recipe.centering == "location" and unit.arbitrary_zero)
        center[name] = mean if centered else torch.zeros_like(mean)
    return center


@torch.no_grad()
def safe_rate(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments]) -> float:
    r"""Return a learning rate for `W` that is large enough to learn and small enough not to diverge.

    Along a row of `W`, the curvature of the likelihood is at most the variance of a hidden unit times the second moment
    of its input around the offset, :math:`v_h \sum \mathrm{E}\, T(x)^2`. Along a column, it is at most :math:`v_v`
    times the variance of all hidden units, :math:`v_h K`. Steps up to about the inverse of the sum are safe.
    """
    hidden, power = machine.hidden, _power(machine, moments, offsets(machine, recipe, moments), most=recipe.normalized)
    if power < _LEAST_POWER:
        # The data hardly varies, but the chains do.
        power = sum(unit.fluctuation * math.prod(unit.shape) for unit in machine.layers.values())
    rows = hidden.fluctuation * power
    visible_fluctuation = max(unit.fluctuation for unit in machine.layers.values())
    columns = visible_fluctuation * hidden.fluctuation * math.prod(hidden.shape)
    # Units with a bounded statistic saturate, so that the curvature is far below its bound.
    ends = [end for unit in (hidden, *machine.layers.values()) for end in unit.statistic_bounds]
    factor = recipe.rate_factor * _RATE
    if not all(map(math.isfinite, ends)):
        # Only a decaying rate may exceed the bound, for a short time.
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

    With `most`, a layer that learns its variance contributes at most 1 per entry, because
    :func:`mvrbm.updates.step.gains_of` divides its steps by the excess.
    """
    total = 0.0
    for name, unit in machine.layers.items():
        variance, mean = (part.to(machine.like) for part in (moments[name].variance, moments[name].mean))
        away = torch.zeros_like(mean) if offset is None else mean - offset[name][0]
        own = float((unit.statistic(torch.sqrt(variance + away**2)) ** 2).sum())
        total += min(own, math.prod(unit.shape)) if most and unit.learns_statistic else own
    return max(total, 1e-6)
