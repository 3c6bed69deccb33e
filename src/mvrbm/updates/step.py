"""The update rule: normalization, weight decay, momentum, and divergence checks.

Backends written in Python call these functions. The Triton kernels and the C code implement the same rule in fused
form. Tests compare these implementations with the functions in this module.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from mvrbm.devices import one_thread
from mvrbm.errors import DivergenceError
from mvrbm.machine import BoltzmannMachine
from mvrbm.memory import check_memory
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState
from mvrbm.validation import all_finite

#: A parameter, its momentum, and its learning rate.
Move = tuple[Tensor, Tensor, float | Tensor]

# Lower limit on gains. It keeps steps finite if all other factors are zero.
SMALLEST_GAIN = 1e-12
# Spectral norm to which :func:`limit_overshoot` limits the coupling between Gaussian layers.
LARGEST_NORM = 0.999
# Spectral norm above which :func:`limit_overshoot` treats training as diverged and does not intervene.
LARGEST_OVERSHOOT = 2.0
# The next two limits apply at the end of training, because training can recover from larger values. Beyond them, every
# unit is saturated.
# Maximum absolute value of an entry in a factor.
LARGEST_FACTOR = 1e6
# Maximum product of the largest absolute values in the factors of a coupling.
LARGEST_WEIGHT = 1e7


def normalize(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Divide gradients by their gains in place so that the learning rate applies to `W` rather than to its factors."""
    for gradient, gain in gradients:
        gradient.div_(gain)


def safe_gain(gain: Tensor) -> Tensor:
    """Clamp a gain to a positive minimum so that gradients can be divided by it."""
    return gain.clamp(min=SMALLEST_GAIN)


def gains_of(
    machine: BoltzmannMachine, gradient: Mapping[str, Tensor], powers: Mapping[str, Tensor] | None = None
) -> list[tuple[Tensor, Tensor]]:
    r"""Return pairs of gradients and gains for the learned parameters of a machine.

    Parameters
    ----------
    machine : BoltzmannMachine
        Machine whose couplings and units define the gains.
    gradient : mapping of str to Tensor
        Gradients, keyed by parameter name. Parameters without a gradient are frozen.
    powers : mapping of str to Tensor, optional
        Mean square of the deviation :math:`T(x) - \mu` in the data, for each layer that learns its variance. The
        learning rate is safe if the powers are at most 1, as is usually the case initially. When a learned variance
        becomes smaller than the variance of the data, :math:`T(x) = x / s` grows, and the curvature along a row of `W`
        grows with the square of :math:`T(x)`. Gains are therefore multiplied by powers that exceed 1.
    """
    powers = powers or {}
    found = {f"hidden.{key}": gain for key, gain in machine.hidden.gains().items()}
    for name, unit in machine.layers.items():
        found |= {f"visible.{name}.{key}": gain for key, gain in unit.gains().items()}
        gains = {f"couplings.{name}.{key}": gain for key, gain in machine.links[name].gains().items()}
        learned = [key for key in gains if key in gradient]
        if learned:
            safe = torch._foreach_clamp_min([gains[key] for key in learned], SMALLEST_GAIN)
            if name in powers:
                safe = torch._foreach_mul(safe, powers[name].clamp(min=1))
            found |= zip(learned, safe, strict=True)
    return [(gradient[key], gain) for key, gain in found.items() if key in gradient]


@torch.no_grad()
def step(
    gradients: list[Tensor],
    momenta: list[Tensor],
    factors: Iterable[tuple[Tensor, Tensor]],
    moves: Iterable[Move],
    recipe: Recipe,
) -> None:
    r"""Perform one step of gradient descent with momentum, in place.

    .. math:: g \leftarrow g + \lambda p \text{ (factors)}, \quad m \leftarrow \mu m + g, \quad p \leftarrow p - \eta m

    Parameters
    ----------
    gradients, momenta : list of Tensor
        Normalized gradients :math:`g` and the corresponding momenta :math:`m`.
    factors : iterable of (Tensor, Tensor)
        Coupling parameters and their gradients. The weight decay :math:`\lambda` applies only to these parameters.
    moves : iterable of (Tensor, Tensor, float)
        Parameters :math:`p`, their momenta :math:`m` and learning rates :math:`\eta`. Tensors may be views, and several
        moves may update the same parameter. For example, one move can update all parameters in a flat tensor with the
        learning rate for biases, and a second move can then update the factors with the difference between the two
        learning rates.
    recipe : Recipe
        Training settings. Only the momentum coefficient :math:`\mu` and the weight decay :math:`\lambda` are used.
    """
    factors = list(factors)
    if recipe.weight_decay and factors:
        parameters, parts = zip(*factors, strict=True)
        torch._foreach_add_(parts, parameters, alpha=recipe.weight_decay)
    torch._foreach_mul_(momenta, recipe.momentum)
    torch._foreach_add_(momenta, gradients)
    # Launch one kernel for consecutive moves with the same learning rate.
    for _, group in itertools.groupby(moves, key=lambda move: id(move[2])):
        parameters, followed, rates = zip(*group, strict=True)
        if isinstance(rates[0], Tensor):
            torch._foreach_sub_(parameters, torch._foreach_mul(followed, rates[0]))
        else:
            torch._foreach_add_(parameters, followed, alpha=-rates[0])


@one_thread()
def balance(machine: BoltzmannMachine, recipe: Recipe) -> None:
    """If the recipe enables `balance`, rescale the factors of each coupling to equal norms without changing `W`."""
    if recipe.balance:
        for link in machine.links.values():
            link.balance()


def limit_overshoot(machine: BoltzmannMachine) -> None:
    """Scale down the couplings between Gaussian layers if updates have increased their norm too much.

    The energy is unbounded if the spectral norm of the couplings is 1 or more. For strongly correlated data, the
    optimal norm is just below 1, and an update can exceed this limit. If the norm is much larger, training is
    diverging, and the couplings are left unchanged.
    """
    if machine.may_be_unbounded and machine.gaussian_norm() < LARGEST_OVERSHOOT:
        machine.limit_norm(LARGEST_NORM)


def fail(recipe: Recipe, update: int, what: str = "a parameter", rate: float | None = None) -> NoReturn:
    """Raise DivergenceError to report that `what` is not finite after an update."""
    rate = recipe.learning_rate if rate is None else rate
    raise DivergenceError(
        f"update {update}: {what} is not finite. Lower the learning rate (now {rate:g}) or use the default recipe"
    )


def first_not_finite(state: TrainState, gradient: Mapping[str, Tensor] | None = None) -> str:
    """Describe the first parameter, in the order of `named_parameters`, that contains a non-finite value.

    If `gradient` contains non-finite values, describe the first non-finite gradient instead.
    """
    if gradient is not None:
        for name in state.learned:
            if not all_finite([gradient[name]]):
                return f"the gradient of '{name}'"
    for name, parameter in state.learned.items():
        if not all_finite([parameter]):
            return f"the parameter of '{name}'"
    return "a parameter"


def check_size(machine: BoltzmannMachine, recipe: Recipe, update: int) -> None:
    """Raise DivergenceError if the factors are so large that they saturate every unit."""
    for name, link in machine.links.items():
        sizes = sorted(float(p.detach().abs().max()) for p in link.parameters())
        if sizes[-1] > LARGEST_FACTOR or math.prod(sizes) > LARGEST_WEIGHT:
            raise DivergenceError(
                f"update {update}: the coupling for layer '{name}' has factors of up to {sizes[-1]:.3g}, which "
                f"saturate all units. Lower the learning rate ({recipe.learning_rate:g}) or use the default recipe"
            )


def check_training_memory(machine: BoltzmannMachine, batch_size: int) -> None:
    """Raise MemoryLimitError if the arrays that every backend requires do not fit in memory."""
    visible = sum(math.prod(unit.shape) for unit in machine.layers.values())
    # Count parameters, momenta and gradients, and the visible states and fields for a batch.
    numbers = 3 * machine.n_parameters + 2 * batch_size * visible
    check_hidden_memory(machine.hidden.shape, batch_size, machine.like, numbers)


def check_hidden_memory(shape: tuple[int, ...], batch_size: int, like: Tensor, more: int = 0) -> None:
    """Raise MemoryLimitError if the hidden states and fields for a batch do not fit in memory.

    `more` is the number of additional values that must fit in memory at the same time.
    """
    what = f"training a hidden layer of shape {shape} with batches of {batch_size}"
    check_memory(more + 2 * batch_size * math.prod(shape), what, like)
