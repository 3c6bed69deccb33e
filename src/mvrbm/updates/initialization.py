"""Initialization of a training run: parameters, centering offsets and a learning rate computed from the data."""

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from mvrbm.data.moments import Moments
from mvrbm.devices import one_thread
from mvrbm.distributed import World
from mvrbm.errors import ConstantDataWarning
from mvrbm.machine import INITIAL_NORM, BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.units import Unit
from mvrbm.updates.gradient import Centering
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState

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
# Initial standard deviation of the hidden fields.
_FIELD_SPREAD = 0.3
# Total variance below which the data is considered nearly constant. The initial weights are then smaller.
_LEAST_POWER = 0.1
# Minimum sample count assumed when initializing the biases of a constant layer.
_CERTAIN_COUNT = 1000
# Maximum number of constant entries to list in a warning.
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
    """Set all data-dependent values in the state of a new training run.

    Parameters
    ----------
    state : TrainState
        Training state. Its learning rates and centering offsets are set in place.
    recipe : Recipe
        Training settings.
    moments : mapping of str to Moments
        Mean and variance of the data for each layer.
    rng : RandomSource
        Random source for the initial factors.
    world : World
        Processes that take part in the training run.
    initialize_machine : bool
        Whether to initialize the parameters of the machine.
    """
    machine = state.machine
    if initialize_machine:
        if world.is_main:
            warn_of_constants(machine, moments)
        initialize(machine, recipe, moments, rng)
        machine.check_bounded()
    state.learning_rate = recipe.learning_rate
    if state.learning_rate is None:
        rates = safe_rates(machine, recipe, moments)
        largest = state.learning_rate = max(rates.values())
        state.relative_rates = {name: rate / largest for name, rate in rates.items() if rate < largest}
    center = offsets(machine, recipe, moments)
    follow_hidden = recipe.centering == "full"
    if follow_hidden or any(bool(offset.any()) for offset in center.values()):
        state.centering = Centering(machine, center, follow_hidden=follow_hidden, all_reduce=world.all_reduce)


@torch.no_grad()
def initialize(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments], rng: RandomSource) -> None:
    """Initialize all parameters of the machine based on the recipe and the moments of the data."""
    for name, unit in machine.layers.items():
        if recipe.bias_from_data:
            seen = moments[name]
            count = seen.count if bool(seen.variance.any()) else max(seen.count, _CERTAIN_COUNT)
            unit.initialize_from(seen.mean, seen.variance, count)
            try:
                unit.check_parameters(name)
            except ValueError as error:
                raise ValueError(f"{error}: rescale the data so that it varies by about 1") from error
        else:
            unit.bias.zero_()
    machine.hidden.bias.zero_()
    power = _power(machine, moments, None)
    # Nearly constant data would require huge weights to reach the usual spread.
    spread = _FIELD_SPREAD * min(1.0, power / _LEAST_POWER)
    std = recipe.std if recipe.std is not None else spread / math.sqrt(power)
    for link in machine.links.values():
        link.initialize(rng, std, factor_std=recipe.factor_std)
    if recipe.std is None and recipe.factor_std is None:
        machine.limit_norm(INITIAL_NORM)
    if recipe.centering != "none":
        # The hidden bias compensates for the mean of the data, so that hidden fields are initially close to zero.
        machine.hidden.absorb(-machine.hidden_field(offsets(machine, recipe, moments))[0])


def warn_of_constants(machine: BoltzmannMachine, moments: Mapping[str, Moments]) -> None:
    """Warn if at least half of the entries in a layer are constant.

    Smaller numbers of constant entries are common, for example near the edges of images, and cause no warning.
    """
    for name, unit in machine.layers.items():
        # A categorical site is constant if only one category occurs.
        sites = unit.site_shape or (1,)
        constant = (moments[name].variance == 0).reshape(*sites, -1).all(-1)
        places = torch.nonzero(constant).tolist()
        if 2 * len(places) >= constant.numel():
            shown = [str(tuple(place)) if len(place) > 1 else str(place[0]) for place in places[:_NAMED]]
            some = ", ".join(shown) + (", ..." if len(places) > _NAMED else "")
            what = "all" if len(places) == constant.numel() else f"{len(places)} of {constant.numel()}"
            warnings.warn(
                f"{what} entries in layer '{name}' are constant in the data ({some}); the model can learn only their "
                "values",
                ConstantDataWarning,
                stacklevel=2,
            )


def offsets(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments]) -> dict[str, Tensor]:
    """Return the centering offset for each visible layer: the mean if the layer is centered, and zero otherwise."""
    center = {}
    for name, unit in machine.layers.items():
        mean = moments[name].mean[None].to(machine.like)
        centered = recipe.centering == "full" or (recipe.centering == "location" and unit.arbitrary_zero)
        center[name] = mean if centered else torch.zeros_like(mean)
    return center


@torch.no_grad()
def safe_rates(machine: BoltzmannMachine, recipe: Recipe, moments: Mapping[str, Moments]) -> dict[str, float]:
    r"""Compute learning rates that are large enough for fast learning but small enough to prevent divergence.

    The result has one learning rate for each coupling `W`, keyed by layer name.

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
    hidden, power = machine.hidden, _power(machine, moments, offsets(machine, recipe, moments), most=recipe.normalized)
    if power < _LEAST_POWER:
        # The chains vary even if the data is nearly constant.
        power = sum(unit.fluctuation * math.prod(unit.shape) for unit in machine.layers.values())
    rows = hidden.fluctuation * power
    coupled_gaussian = hidden.gaussian and any(unit.gaussian for unit in machine.layers.values())
    bounded = {name for name, unit in machine.layers.items() if _is_bounded(unit) and _is_bounded(hidden)}
    is_mixed = 0 < len(bounded) < len(machine.layers)
    rates = {}
    for name, unit in machine.layers.items():
        columns = unit.fluctuation * hidden.fluctuation * math.prod(hidden.shape)
        if coupled_gaussian:
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


def _power(
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
