"""Initialization of a training run: parameters, centering offsets and a learning rate computed from the data.

The learning rate is derived in :mod:`mvrbm.updates.learning_rate`.
"""

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
from mvrbm.updates.gradient import Centering
from mvrbm.updates.learning_rate import LEAST_POWER, power_of, safe_rates
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState

# Initial standard deviation of the hidden fields.
_FIELD_SPREAD = 0.3
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
    center = offsets(machine, recipe, moments)
    state.learning_rate = recipe.learning_rate
    if state.learning_rate is None:
        rates = safe_rates(machine, recipe, moments, center)
        largest = state.learning_rate = max(rates.values())
        state.relative_rates = {name: rate / largest for name, rate in rates.items() if rate < largest}
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
    power = power_of(machine, moments, None)
    # Nearly constant data would require huge weights to reach the usual spread.
    spread = _FIELD_SPREAD * min(1.0, power / LEAST_POWER)
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
