r"""The update rule, once: normalization, weight decay, momentum, learning rates, divergence.

Every path that computes updates in Python calls these functions. The Triton kernels (`_step` in
:mod:`mvrbm.backends.cuda.per_sample_kernels`) and the C code (`step`) fuse this rule and are tested equal to it.
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

#: A parameter, its momentum, and the rate at which the one follows the other.
Move = tuple[Tensor, Tensor, float | Tensor]

# Where all other factors are zero, any finite step will do.
SMALLEST_GAIN = 1e-12
# A product of factors of this size saturates every unit. Training recovers from large bursts: only its result counts.
LARGEST_FACTOR, LARGEST_WEIGHT = 1e6, 1e7


def learning_rates(recipe: Recipe, update: int | Tensor) -> tuple[float, float] | tuple[Tensor, Tensor]:
    r"""Return the learning rates of factors and biases: :math:`\eta (1 - t / T) / \sqrt{1 + t / \text{rate\_decay}}`.

    The number `t` of the update counts from 0; `T` is the number of planned updates of a recipe with linear decay,
    otherwise infinite. The rates of a tensor are tensors, which a CUDA graph can compute.
    """
    rate = float(recipe.learning_rate or 0.0)
    bias_rate, slowness = recipe.bias_learning_rate or rate, recipe.rate_decay or math.inf
    planned = (recipe.planned_updates if recipe.linear_decay else None) or math.inf
    if isinstance(update, Tensor):
        decays = (1 + update / slowness).rsqrt() * (1 - update / planned).clamp(min=0)
        return decays * rate, decays * bias_rate
    decay = max(0.0, 1 - update / planned) / math.sqrt(1 + update / slowness)
    return rate * decay, bias_rate * decay


def normalize(gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Divide gradients by their gains, in place, so that steps have equal effects on `W`."""
    for gradient, gain in gradients:
        gradient.div_(gain)


def safe_gain(gain: Tensor) -> Tensor:
    """Return a gain that gradients can be divided by."""
    return gain.clamp(min=SMALLEST_GAIN)


def gains_of(
    machine: BoltzmannMachine, gradient: Mapping[str, Tensor], powers: Mapping[str, Tensor] | None = None
) -> list[tuple[Tensor, Tensor]]:
    r"""Return the gradients of a machine's parameters with the gains that couplings and units report for them.

    `powers`, for layers that learn their variance, are mean squares of the data's deviations :math:`T(x) - \mu`. Rates
    are safe for a power of at most 1, as it usually is at the start. A learned variance becomes smaller than the
    data's, so that :math:`T(x) = x / s` grows, and the curvature along a row of `W` in proportion to its square: gains
    grow with it.
    """
    powers = powers or {}
    found = {f"hidden.{key}": gain for key, gain in machine.hidden.gains().items()}
    for name, unit in machine.layers.items():
        found |= {f"visible.{name}.{key}": gain for key, gain in unit.gains().items()}
        gains = machine.links[name].gains()
        safe = torch._foreach_clamp_min(list(gains.values()), SMALLEST_GAIN)
        if name in powers:
            safe = torch._foreach_mul(safe, powers[name].clamp(min=1))
        found |= {f"couplings.{name}.{key}": gain for key, gain in zip(gains, safe, strict=True)}
    return [(gradient[key], gain) for key, gain in found.items()]


@torch.no_grad()
def step(
    gradients: list[Tensor],
    momenta: list[Tensor],
    factors: Iterable[tuple[Tensor, Tensor]],
    moves: Iterable[Move],
    recipe: Recipe,
) -> None:
    r"""Make one step of gradient descent with momentum, in place.

    .. math:: g \leftarrow g + \lambda p \text{ (factors)}, \quad m \leftarrow \mu m + g, \quad p \leftarrow p - \eta m

    Parameters
    ----------
    gradients, momenta : list of Tensor
        Normalized gradients, and momenta of the same shapes.
    factors : iterable of (Tensor, Tensor)
        Parameters of the couplings with their gradients: weight decay applies to these alone.
    moves : iterable of (Tensor, Tensor, float)
        Parameters, momenta and learning rates. Tensors may be views, and several moves may share a parameter: flat
        parameters move at the rate of the biases, then the factors among them by the difference to their own.
    recipe : Recipe
        Momentum and weight decay.
    """
    factors = list(factors)
    if recipe.weight_decay and factors:
        parameters, parts = zip(*factors, strict=True)
        torch._foreach_add_(parts, parameters, alpha=recipe.weight_decay)
    torch._foreach_mul_(momenta, recipe.momentum)
    torch._foreach_add_(momenta, gradients)
    # One launch for all neighbors that move at the same rate.
    for _, group in itertools.groupby(moves, key=lambda move: id(move[2])):
        parameters, followed, rates = zip(*group, strict=True)
        if isinstance(rates[0], Tensor):
            torch._foreach_sub_(parameters, torch._foreach_mul(followed, rates[0]))
        else:
            torch._foreach_add_(parameters, followed, alpha=-rates[0])


@one_thread()
def balance(machine: BoltzmannMachine, recipe: Recipe) -> None:
    """Rescale the factors of each coupling to equal norms if the recipe asks for it, which leaves `W` unchanged."""
    if recipe.balance:
        for link in machine.links.values():
            link.balance()


def fail(recipe: Recipe, update: int, what: str = "a parameter", rate: float | None = None) -> NoReturn:
    """Raise the error of a training run whose parameters are not finite at, or soon after, an update."""
    rate = recipe.learning_rate if rate is None else rate
    raise DivergenceError(
        f"update {update}: {what} is not finite. Lower the learning rate (now {rate:g}), raise weight_decay, or use "
        "the default recipe; start a new machine with fit(..., initialize=True); checkpoints written so far are good"
    )


def first_not_finite(named: Mapping[str, Tensor]) -> str:
    """Return the name of the first tensor with an entry that is not finite."""
    return next(name for name, tensor in named.items() if not bool(torch.isfinite(tensor).all()))


def check_size(machine: BoltzmannMachine, recipe: Recipe, update: int) -> None:
    """Raise DivergenceError if training has ended with factors so large that no unit can respond to its data."""
    for name, link in machine.links.items():
        sizes = sorted(float(p.detach().abs().max()) for p in link.parameters())
        if sizes[-1] > LARGEST_FACTOR or math.prod(sizes) > LARGEST_WEIGHT:
            raise DivergenceError(
                f"update {update}: the coupling of layer '{name}' has factors of up to {sizes[-1]:.3g}, which saturate "
                f"every unit. Lower the learning rate ({recipe.learning_rate:g}), or use the default recipe"
            )


def check_training_memory(machine: BoltzmannMachine, batch_size: int) -> None:
    """Raise MemoryLimitError if training needs more memory than there is: the least that any path needs."""
    visible = sum(math.prod(unit.shape) for unit in machine.layers.values())
    # Parameters, momenta and gradients; and states and fields of a batch.
    numbers = 3 * machine.n_parameters + 2 * batch_size * visible
    check_hidden_memory(machine.hidden.shape, batch_size, machine.like, numbers)


def check_hidden_memory(shape: tuple[int, ...], batch_size: int, like: Tensor, more: int = 0) -> None:
    """Raise MemoryLimitError if states and fields of a hidden layer, and `more` numbers, do not fit into memory."""
    what = f"training a hidden layer of shape {shape} with batches of {batch_size}"
    check_memory(more + 2 * batch_size * math.prod(shape), what, like)
