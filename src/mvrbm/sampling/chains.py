"""Block Gibbs sampling with known entries clamped, mean field, and conditional means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mvrbm.couplings import Coupling, Dense
from mvrbm.cuda_graphs import repeat
from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource
from mvrbm.sampling.labels import draw_labels, loose_labels
from mvrbm.validation import whole_number

# Maximum number of entries of a coupling's full matrix on a GPU. Up to this size, one product with the full matrix is
# faster than several small products with the factors.
_LARGEST_ON_GPU = 2**23
# On a CPU, the full matrix is used if it takes at most this many times the multiplications of the factors.
_WORTH_MULTIPLYING = 2.5

Layers = Mapping[str, Tensor]
Masks = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class State:
    """Hidden states of chains, their fields on the visible layers, and the visible states drawn in these fields."""

    visible: dict[str, Tensor]  # each (n, *layer shape)
    hidden: Tensor  # (n, *hidden shape)
    fields: dict[str, Tensor]  # each (n, *layer shape)


class Drawn(Protocol):
    """A layer that can be drawn in a field: a unit, or a unit at another temperature."""

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor: ...
    def redraw(self, x: Tensor, field: Tensor, rng: RandomSource) -> Tensor: ...


class Fields(Protocol):
    """What a Gibbs step needs: a machine, or a machine at another temperature."""

    @property
    def layers(self) -> Mapping[str, Drawn]: ...
    @property
    def hidden(self) -> Drawn: ...
    def hidden_field(self, visible: Layers) -> Tensor: ...
    def visible_fields(self, hidden: Tensor) -> dict[str, Tensor]: ...


@torch.no_grad()
def gibbs(
    machine: BoltzmannMachine,
    visible: Visible,
    steps: int,
    rng: RandomSource,
    *,
    mask: Visible | None = None,
    mean: bool = False,
    check: bool = True,
) -> State:
    """Run block Gibbs chains, one from each of the given states.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    visible : Tensor or mapping of str to Tensor
        Initial states, each layer (n, *layer shape).
    steps : int
        Number of full steps: hidden, then visible.
    rng : RandomSource
        Source of the draws.
    mask : Tensor or mapping of str to Tensor, optional
        True where the value is known and must not change. Padding never changes.
    mean : bool
        Whether to return the means of the unknown visible entries given the last hidden arrays, instead of draws.
    check : bool
        Whether to check the arguments.

    Returns
    -------
    State
        Final states; the hidden array is the one given which the visible arrays were drawn.
    """
    whole_number(steps, "steps")
    layers, masks = start_chains(machine, visible, mask, check=check)
    states = copies(layers)
    step = _stepper(machine, states, masks)
    repeat(lambda rng: write(step(rng).visible, states), steps - 1, rng, machine.like.device)
    last = step(rng)
    if not mean:
        return last
    means = {name: unit.mean(last.fields[name]) for name, unit in machine.layers.items()}
    return replace(last, visible=keep_known(states, means, masks))


def _stepper(machine: BoltzmannMachine, states: Layers, masks: Masks) -> Callable[[RandomSource], State]:
    """Return a function that makes a Gibbs step from the states; unknown labels are drawn with the hidden layer."""
    fast, labels = multiplied_out(machine), loose_labels(machine, masks)
    return lambda rng: gibbs_step(fast, draw_labels(fast, states, labels, rng, masks), rng, masks)


def multiplied_out(machine: BoltzmannMachine) -> BoltzmannMachine:
    """Return the same machine with the full matrices of its couplings, or itself where these would be slower."""
    sizes = {name: math.prod((*unit.shape, *machine.hidden.shape)) for name, unit in machine.layers.items()}
    gpu = machine.like.device.type == "cuda"
    small = all(
        sizes[name] <= (_LARGEST_ON_GPU if gpu else _WORTH_MULTIPLYING * link.operations)
        for name, link in machine.links.items()
    )
    if not small:
        return machine
    full: dict[str, Coupling] = {name: Dense() for name in machine.layers}
    for name, link in machine.links.items():
        full[name].allocate(link.visible_shape, link.hidden_shape)
        full[name].weight = torch.nn.Parameter(link.dense().reshape(-1, math.prod(link.visible_shape)), False)
    # A copy that shares the units. The constructor would check again that the energy is bounded, which takes time.
    twin = BoltzmannMachine.__new__(BoltzmannMachine)
    torch.nn.Module.__init__(twin)
    twin.visible, twin.hidden, twin.couplings = machine.visible, machine.hidden, torch.nn.ModuleDict(full)
    return twin


def copies(layers: Layers) -> dict[str, Tensor]:
    """Return copies, which steps can change in place."""
    return {name: array.clone(memory_format=torch.contiguous_format) for name, array in layers.items()}


def write(values: Layers, states: Layers) -> None:
    """Copy values into states."""
    for name, state in states.items():
        state.copy_(values[name])


def start_chains(
    machine: BoltzmannMachine, visible: Visible, mask: Visible | None, *, check: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Return checked states and masks by layer. Unknown entries may be NaN; they start at any valid state."""
    layers = machine.as_layers(visible, check=check, values=False)
    masks = machine.as_masks(mask, layers)
    if mask is not None:
        if not any(known is not None and bool(known.any()) for known in masks.values()):
            raise ValueError("no entry is known: the mask is False everywhere; pass mask=None to clamp no entry")
        for name, unit in machine.layers.items():
            known = masks[name]
            broken = ~torch.isfinite(layers[name])
            broken = broken if known is None else broken & ~known
            layers[name] = torch.where(broken, unit.some_state, layers[name])
    return machine.as_layers(layers, check=check), masks


@torch.no_grad()
def gibbs_step(fields: Fields, visible: Layers, rng: RandomSource, masks: Masks) -> State:
    """Sample hidden given visible, then the unknown entries of visible given hidden, without checks."""
    hidden = fields.hidden.sample(fields.hidden_field(visible), rng)
    towards = fields.visible_fields(hidden)
    return State(draw_visible(fields, towards, visible, rng, masks), hidden, towards)


def draw_visible(model: Fields, fields: Layers, visible: Layers, rng: RandomSource, masks: Masks) -> dict[str, Tensor]:
    """Sample the unknown entries of visible in the given fields."""
    drawn = {name: unit.redraw(visible[name], fields[name], rng) for name, unit in model.layers.items()}
    return keep_known(visible, drawn, masks)


def keep_known(known: Layers, other: Layers, masks: Masks) -> dict[str, Tensor]:
    """Return `other` with the entries where a mask is True taken from `known`."""
    return {
        name: array if masks[name] is None else torch.where(masks[name], known[name], array)  # type: ignore[arg-type]
        for name, array in other.items()
    }


@torch.no_grad()
def independent_sample(machine: BoltzmannMachine, n: int, rng: RandomSource) -> dict[str, Tensor]:
    """Sample n states of each visible layer without a field, as random initial states of chains."""
    n = whole_number(n, "n")
    return {name: unit.sample(machine.like.new_zeros((n, *unit.shape)), rng) for name, unit in machine.layers.items()}


@torch.no_grad()
def sample(
    machine: BoltzmannMachine,
    n: int,
    steps: int,
    rng: RandomSource,
    *,
    init: Visible | None = None,
    mask: Visible | None = None,
    mean: bool = False,
    check: bool = True,
) -> State:
    """Draw n states by block Gibbs sampling, from given or random initial states.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    n, steps : int
        Number of chains and of Gibbs steps.
    rng : RandomSource
        Source of the draws.
    init : Tensor or mapping of str to Tensor, optional
        n initial states. Default: independent draws of all entries.
    mask : Tensor or mapping of str to Tensor, optional
        True where `init` is known and must not change. Requires `init`.
    mean : bool
        Whether to return the means of the unknown visible entries given the last hidden arrays, instead of draws.
    check : bool
        Whether to check the shapes and values of `init`.
    """
    machine.check_bounded()
    if init is None:
        if mask is not None:
            raise ValueError("a mask needs init: it marks which of its entries are known")
        layers = independent_sample(machine, n, rng)
    else:
        layers, _ = start_chains(machine, init, mask, check=check)
        check_count(layers, n, "n")
    return gibbs(machine, layers, steps, rng, mask=mask, mean=mean, check=False)


def check_count(layers: Layers, n: int, name: str) -> None:
    """Raise ValueError if there are not n states."""
    given = len(next(iter(layers.values())))
    if given != n:
        raise ValueError(f"init must have {name} = {n} states, got {given}")


def mean_field(
    machine: BoltzmannMachine, visible: Visible, steps: int, *, mask: Visible | None = None, check: bool = True
) -> dict[str, Tensor]:
    """Pass means up and down instead of samples. With one step it is the paper's reconstruction.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    visible : Tensor or mapping of str to Tensor
        Initial states.
    steps : int
        Number of passes up and down.
    mask, check : optional
        See :func:`gibbs`.
    """
    whole_number(steps, "steps")
    layers, masks = start_chains(machine, visible, mask, check=check)
    for _ in range(steps):
        means = machine.visible_mean(machine.hidden_mean(layers, check=False), check=False)
        layers = keep_known(layers, means, masks)
    return layers


@torch.no_grad()
def conditional_mean(
    machine: BoltzmannMachine,
    visible: Visible,
    mask: Visible,
    rng: RandomSource,
    *,
    steps: int = 100,
    burn_in: int = 20,
    check: bool = True,
) -> dict[str, Tensor]:
    """Estimate the mean of the unknown entries given the known ones, by clamped Gibbs sampling.

    It averages the visible means given each hidden sample, which vary less than visible samples.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    visible : Tensor or mapping of str to Tensor
        Known values; initial values of the other entries.
    mask : Tensor or mapping of str to Tensor
        True where the value is known.
    rng : RandomSource
        Source of the draws.
    steps, burn_in : int
        Number of steps to average over, and before these.
    check : bool
        Whether to check the shapes and values of `visible`.
    """
    whole_number(steps, "steps")
    whole_number(burn_in, "burn_in", 0)
    machine.check_bounded()
    layers, masks = start_chains(machine, visible, mask, check=check)
    states = copies(layers)
    step = _stepper(machine, states, masks)
    total = {name: torch.zeros_like(array) for name, array in states.items()}

    def counted_step(rng: RandomSource) -> None:
        state = step(rng)
        write(state.visible, states)
        for name, unit in machine.layers.items():
            total[name] += unit.mean(state.fields[name])

    repeat(lambda rng: write(step(rng).visible, states), burn_in, rng, machine.like.device)
    repeat(counted_step, steps, rng, machine.like.device)
    return keep_known(states, {name: value / steps for name, value in total.items()}, masks)
