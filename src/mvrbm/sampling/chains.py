"""Block Gibbs sampling with clamped entries, mean-field inference, and conditional means."""

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

# Maximum number of entries in a full matrix that replaces a coupling on a GPU, where one large matrix product is faster
# than several small ones.
_LARGEST_ON_GPU = 2**23
# Maximum number of entries in a full matrix that replaces a coupling on a CPU, relative to the number of
# multiplications in the coupling.
_WORTH_MULTIPLYING = 2.5

Layers = Mapping[str, Tensor]
Masks = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class State:
    """State of n Gibbs chains: the hidden array, the visible fields given that array, and the visible arrays."""

    visible: dict[str, Tensor]  # each (n, *layer shape)
    hidden: Tensor  # (n, *hidden shape)
    fields: dict[str, Tensor]  # each (n, *layer shape)


class Drawn(Protocol):
    """Interface for layers that can be sampled given a field, such as units and tempered layers."""

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor: ...
    def redraw(self, x: Tensor, field: Tensor, rng: RandomSource) -> Tensor: ...


class Fields(Protocol):
    """Interface that a Gibbs step requires. Machines and tempered machines implement it."""

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
    """Run one block Gibbs chain from each of the given states.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model to sample from.
    visible : Tensor or mapping of str to Tensor
        Initial states. Each layer has shape (n, *layer shape).
    steps : int
        Number of full steps. Each step samples the hidden layer, then the visible layers.
    rng : RandomSource
        Random source for the samples.
    mask : Tensor or mapping of str to Tensor, optional
        True where the value is known and must not change. Padding never changes.
    mean : bool
        Whether to return the means of the unknown visible entries given the last hidden state, instead of samples.
    check : bool
        Whether to validate the arguments.

    Returns
    -------
    State
        Final states. The visible arrays were sampled given the hidden array.
    """
    whole_number(steps, "steps")
    layers, masks = start_chains(machine, visible, mask, check=check)
    states = copies(layers)
    step = _stepper(machine, states, masks)
    repeat(lambda rng: write(step(rng).visible, states), steps - 1, rng, machine.like.device)
    last = step(rng)
    if not mean:
        return last
    means = {name: unit.mean_like(states[name], last.fields[name]) for name, unit in machine.layers.items()}
    return replace(last, visible=keep_known(states, means, masks))


def _stepper(machine: BoltzmannMachine, states: Layers, masks: Masks) -> Callable[[RandomSource], State]:
    """Return a function that takes a Gibbs step from `states`, sampling unknown labels and the hidden layer jointly."""
    fast, labels = multiplied_out(machine), loose_labels(machine, masks)
    return lambda rng: gibbs_step(fast, draw_labels(fast, states, labels, rng, masks), rng, masks)


def multiplied_out(machine: BoltzmannMachine) -> BoltzmannMachine:
    """Return an equivalent machine with dense couplings, or the machine itself if dense couplings would be slower."""
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
    # Bypass the constructor, which would spend time checking again that the energy is bounded. The units are shared.
    twin = BoltzmannMachine.__new__(BoltzmannMachine)
    torch.nn.Module.__init__(twin)
    twin.visible, twin.hidden, twin.couplings = machine.visible, machine.hidden, torch.nn.ModuleDict(full)
    return twin


def copies(layers: Layers) -> dict[str, Tensor]:
    """Return contiguous copies of all layers, which sampling steps can modify in place."""
    return {name: array.clone(memory_format=torch.contiguous_format) for name, array in layers.items()}


def write(values: Layers, states: Layers) -> None:
    """Copy the values of each layer into the existing arrays in `states`."""
    for name, state in states.items():
        state.copy_(values[name])


def start_chains(
    machine: BoltzmannMachine, visible: Visible, mask: Visible | None, *, check: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Return validated initial states and masks, both keyed by layer name.

    Unknown entries that are NaN or infinite are replaced with a valid placeholder.
    """
    layers = machine.as_layers(visible, check=check, values=False)
    masks = machine.as_masks(mask, layers)
    if mask is not None:
        if not any(known is not None and bool(known.any()) for known in masks.values()):
            raise ValueError(
                "no entries are known because mask is False everywhere; pass mask=None to sample all entries"
            )
        for name, unit in machine.layers.items():
            known = masks[name]
            broken = ~torch.isfinite(layers[name])
            broken = broken if known is None else broken & ~known
            layers[name] = torch.where(broken, unit.some_state, layers[name])
    return machine.as_layers(layers, check=check), masks


@torch.no_grad()
def gibbs_step(fields: Fields, visible: Layers, rng: RandomSource, masks: Masks) -> State:
    """Sample the hidden layer, then the unknown visible entries given the hidden layer. Inputs are not validated."""
    hidden = fields.hidden.sample(fields.hidden_field(visible), rng)
    towards = fields.visible_fields(hidden)
    return State(draw_visible(fields, towards, visible, rng, masks), hidden, towards)


def draw_visible(model: Fields, fields: Layers, visible: Layers, rng: RandomSource, masks: Masks) -> dict[str, Tensor]:
    """Sample the unknown visible entries given the fields, and return all visible layers."""
    drawn = {name: unit.redraw(visible[name], fields[name], rng) for name, unit in model.layers.items()}
    return keep_known(visible, drawn, masks)


def keep_known(known: Layers, other: Layers, masks: Masks) -> dict[str, Tensor]:
    """Return arrays with the entries of `known` where the mask is True and the entries of `other` elsewhere."""
    return {
        name: array if masks[name] is None else torch.where(masks[name], known[name], array)  # type: ignore[arg-type]
        for name, array in other.items()
    }


@torch.no_grad()
def independent_sample(machine: BoltzmannMachine, n: int, rng: RandomSource) -> dict[str, Tensor]:
    """Sample n visible states at zero field, for use as random initial states of chains."""
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
    """Sample n states by block Gibbs sampling, starting from given or random initial states.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model to sample from.
    n, steps : int
        Number of chains and number of Gibbs steps.
    rng : RandomSource
        Random source for the samples.
    init : Tensor or mapping of str to Tensor, optional
        Initial states of the `n` chains. If None, all entries are sampled independently.
    mask : Tensor or mapping of str to Tensor, optional
        True where an entry of `init` is known and must not change. Requires `init`.
    mean : bool
        Whether to return the means of the unknown visible entries given the last hidden state, instead of samples.
    check : bool
        Whether to validate the shapes and values of `init`.

    Returns
    -------
    State
        Final states. See :func:`gibbs`.
    """
    machine.check_bounded()
    if init is None:
        if mask is not None:
            raise ValueError("mask requires init, because the mask marks which entries of init are known")
        layers = independent_sample(machine, n, rng)
    else:
        layers, _ = start_chains(machine, init, mask, check=check)
        check_count(layers, n, "n")
    return gibbs(machine, layers, steps, rng, mask=mask, mean=mean, check=False)


def check_count(layers: Layers, n: int, name: str) -> None:
    """Raise ValueError if the number of initial states is not n."""
    given = len(next(iter(layers.values())))
    if given != n:
        raise ValueError(f"init must contain {name} = {n} states, got {given}")


def mean_field(
    machine: BoltzmannMachine, visible: Visible, steps: int, *, mask: Visible | None = None, check: bool = True
) -> dict[str, Tensor]:
    """Run mean-field updates, which propagate means instead of samples. A single update computes a reconstruction.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model that computes the means.
    visible : Tensor or mapping of str to Tensor
        Initial states.
    steps : int
        Number of updates of the hidden layer and the visible layers.
    mask, check : optional
        See :func:`gibbs`.

    Returns
    -------
    dict of str to Tensor
        Visible means by layer name, each of shape (n, *layer shape). Known entries keep their values.
    """
    whole_number(steps, "steps")
    layers, masks = start_chains(machine, visible, mask, check=check)
    for _ in range(steps):
        fields = machine.visible_fields(machine.hidden_mean(layers, check=False))
        means = {name: unit.mean_like(layers[name], fields[name]) for name, unit in machine.layers.items()}
        layers = keep_known(layers, means, masks)
    return layers


@torch.no_grad()
def conditional_mean(
    machine: BoltzmannMachine,
    visible: Visible,
    mask: Visible | None,
    rng: RandomSource,
    *,
    steps: int = 100,
    burn_in: int = 20,
    check: bool = True,
) -> dict[str, Tensor]:
    """Estimate the mean of the unknown entries given the known entries, by clamped Gibbs sampling.

    The estimate is the average of the visible means given successive hidden samples. These means vary less than visible
    samples.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model to sample from.
    visible : Tensor or mapping of str to Tensor
        Values of the known entries, and initial values of the unknown entries.
    mask : Tensor or mapping of str to Tensor
        True where the value is known.
    rng : RandomSource
        Random source for the samples.
    steps, burn_in : int
        Number of steps to average over, and number of burn-in steps before them.
    check : bool
        Whether to validate the shapes and values of `visible`.

    Returns
    -------
    dict of str to Tensor
        Estimated means by layer name, each of shape (n, *layer shape). Known entries keep their values.
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
            total[name] += unit.mean_like(states[name], state.fields[name])

    repeat(lambda rng: write(step(rng).visible, states), burn_in, rng, machine.like.device)
    repeat(counted_step, steps, rng, machine.like.device)
    return keep_known(states, {name: value / steps for name, value in total.items()}, masks)
