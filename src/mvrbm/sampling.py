"""Markov chains: block Gibbs sampling with known entries clamped, mean field, and parallel tempering.

Masks are True where a value is known; known entries never change. The chains of training are in `learning.samplers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource
from mvrbm.units.base import Unit
from mvrbm.validation import whole_number

__all__ = [
    "ParallelTempering",
    "State",
    "TemperedPath",
    "conditional_mean",
    "gibbs",
    "independent_sample",
    "mean_field",
    "sample",
]

Layers = Mapping[str, Tensor]
Masks = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class State:
    """Visible arrays by name, and the hidden array given which they were drawn."""

    visible: dict[str, Tensor]  # each (n, *layer shape)
    hidden: Tensor  # (n, *hidden shape)


class Fields(Protocol):
    """What a Gibbs step needs: a machine, or a machine at another temperature."""

    @property
    def layers(self) -> dict[str, Unit]: ...
    @property
    def hidden(self) -> Unit: ...
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
    check : bool
        Whether to check the arguments.

    Returns
    -------
    State
        Final states; the hidden array is the one given which the visible arrays were drawn.
    """
    whole_number(steps, "steps")
    layers, masks = start_chains(machine, visible, mask, check=check)
    for _ in range(steps):
        state = gibbs_step(machine, layers, rng, masks)
        layers = state.visible
    return state


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
            layers[name] = torch.where(broken, unit.some_state(), layers[name])
    return machine.as_layers(layers, check=check), masks


@torch.no_grad()
def gibbs_step(fields: Fields, visible: Layers, rng: RandomSource, masks: Masks) -> State:
    """Sample hidden given visible, then the unknown entries of visible given hidden, without checks."""
    hidden = fields.hidden.sample(fields.hidden_field(visible), rng)
    towards = fields.visible_fields(hidden)
    drawn = {name: unit.sample(towards[name], rng) for name, unit in fields.layers.items()}
    return State(keep_known(visible, drawn, masks), hidden)


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
    """
    machine.check_bounded()
    if init is None:
        if mask is not None:
            raise ValueError("a mask needs init: it marks which of its entries are known")
        return gibbs(machine, independent_sample(machine, n, rng), steps, rng, check=False)
    layers, _ = start_chains(machine, init, mask)
    _check_count(layers, n, "n")
    return gibbs(machine, layers, steps, rng, mask=mask, check=False)


def _check_count(layers: Layers, n: int, name: str) -> None:
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
    """
    whole_number(steps, "steps")
    whole_number(burn_in, "burn_in", 0)
    machine.check_bounded()
    layers, masks = start_chains(machine, visible, mask)
    total: dict[str, Tensor] = {}
    for step in range(burn_in + steps):
        state = gibbs_step(machine, layers, rng, masks)
        layers = state.visible
        if step >= burn_in:
            means = machine.visible_mean(state.hidden, check=False)
            total = {name: total[name] + mean if total else mean for name, mean in means.items()}
    return keep_known(layers, {name: value / steps for name, value in total.items()}, masks)


class TemperedPath:
    r"""Machines between independent units (:math:`\beta = 0`) and the machine itself (:math:`\beta = 1`).

    With offsets :math:`\mu_m = T_m(x_m)` and :math:`\lambda = T_h(y)` at a centre (x, y),

    .. math::

        E_\beta = \sum_m \varepsilon_m + \varepsilon_h - \sum_m \beta \langle T_h, W_m T_m\rangle
                  - (1 - \beta) \big(\langle T_h, W_m \mu_m\rangle + \langle \lambda, W_m T_m\rangle\big).

    At :math:`\beta = 0` the layers are independent, in the mean field of the centre.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine at :math:`\beta = 1`.
    centre : mapping of str to Tensor, optional
        A visible state, each layer (1, *layer shape). Default: the middle of the values that every unit can have,
        which prefers none of several modes of the distribution.
    """

    def __init__(self, machine: BoltzmannMachine, centre: Layers | None = None) -> None:
        self.machine = machine
        with torch.no_grad():
            if centre is None:
                centre = {name: unit.middle()[None] for name, unit in machine.layers.items()}
            centre = machine.as_layers(centre, values=False)
            if any(len(array) != 1 for array in centre.values()):
                raise ValueError("centre must be one visible state: each layer of shape (1, *layer shape)")
            # Fields at beta = 0, on the hidden layer and on each visible layer: (1, *shape)
            self.hidden_base = machine.hidden_field(centre)
            self.visible_base = machine.visible_fields(machine.hidden.mean(self.hidden_base))

    def at(self, beta: float | Tensor) -> Tempered:
        """Return the machine at an inverse temperature: one number, or one per sample, shape (n,)."""
        return Tempered(self, beta)

    def base_sample(self, n: int, rng: RandomSource) -> dict[str, Tensor]:
        """Draw n independent visible states at beta = 0."""
        return {
            name: unit.sample(self.visible_base[name].expand(n, *unit.shape), rng)
            for name, unit in self.machine.layers.items()
        }


class Tempered:
    """A machine on a :class:`TemperedPath`, at one inverse temperature or one per sample."""

    def __init__(self, path: TemperedPath, beta: float | Tensor) -> None:
        self._path = path
        self._beta = torch.as_tensor(beta, dtype=path.machine.like.dtype, device=path.machine.like.device)
        self.layers, self.hidden = path.machine.layers, path.machine.hidden

    def hidden_field(self, visible: Layers) -> Tensor:
        """Field on the hidden layer."""
        return self._between(self._path.hidden_base, self._path.machine.hidden_field(visible))

    def visible_fields(self, hidden: Tensor) -> dict[str, Tensor]:
        """Field on each visible layer."""
        fields = self._path.machine.visible_fields(hidden)
        return {name: self._between(self._path.visible_base[name], field) for name, field in fields.items()}

    def free_energy(self, visible: Layers) -> Tensor:
        """Free energy of visible states, shape (n,)."""
        energy = -self.hidden.log_normaliser(self.hidden_field(visible))
        for name, unit in self.layers.items():
            pull = (unit.statistic(visible[name]) * self._path.visible_base[name]).flatten(1).sum(1)
            energy = energy + unit.energy(visible[name]) - (1 - self._beta) * pull
        return energy

    def _between(self, base: Tensor, field: Tensor) -> Tensor:
        beta = self._beta.reshape(-1, *([1] * (field.ndim - 1)))
        return (1 - beta) * base + beta * field


class ParallelTempering:
    """Parallel tempering: chains at several temperatures exchange states, so that cold chains move between modes.

    One step is a Gibbs step of every chain, followed by a proposal to exchange the states of neighbouring
    temperatures, accepted by the Metropolis rule on free energies. The pairs alternate between steps.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    n_chains : int
        Number of independent sets of chains.
    betas : sequence of float, or int
        Inverse temperatures in increasing order up to 1, or their number, evenly spaced from 0 to 1.
    rng : RandomSource
        Source of all draws, including the initial states.
    init : Tensor or mapping of str to Tensor, optional
        n_chains initial states of the chains at every temperature. Default: exact draws at beta = 0.
    centre : mapping of str to Tensor, optional
        See :class:`TemperedPath`.
    check : bool
        Whether to check `init` and that the energy is bounded.

    Attributes
    ----------
    visible : dict of str to Tensor
        States of all chains, each layer (temperatures, n_chains, *layer shape), coldest last.
    """

    def __init__(
        self,
        machine: BoltzmannMachine,
        n_chains: int,
        betas: int | list[float] | Tensor = 10,
        *,
        rng: RandomSource,
        init: Visible | None = None,
        centre: Layers | None = None,
        check: bool = True,
    ) -> None:
        if isinstance(betas, int):
            betas = torch.linspace(0, 1, betas, dtype=torch.float64)
        ladder = torch.as_tensor(betas, dtype=machine.like.dtype, device=machine.like.device)
        if ladder.ndim != 1 or len(ladder) < 2 or ladder[0] < 0 or ladder[-1] != 1 or bool((ladder.diff() <= 0).any()):
            raise ValueError(
                f"betas must be at least two numbers that increase from 0 or more to 1, got {ladder.tolist()}"
            )
        whole_number(n_chains, "n_chains")
        if check:
            machine.check_bounded()
        self.machine, self.betas, self.rng = machine, ladder, rng
        self.centre = centre
        self.turn = 0
        if init is None:
            start = TemperedPath(machine, self.centre).base_sample(n_chains * len(ladder), rng)
        else:
            layers = machine.as_layers(init, check=check)
            _check_count(layers, n_chains, "n_chains")
            start = {name: array.repeat(len(ladder), *([1] * (array.ndim - 1))) for name, array in layers.items()}
        self.visible = {name: array.unflatten(0, (len(ladder), n_chains)) for name, array in start.items()}
        self._offers = torch.zeros(len(ladder) - 1)
        self._accepted = torch.zeros(len(ladder) - 1)

    @property
    def acceptance(self) -> Tensor:
        """Share of accepted exchanges so far between each pair of neighbouring temperatures."""
        return self._accepted / self._offers.clamp(min=1)

    @torch.no_grad()
    def step(self, count: int = 1) -> dict[str, Tensor]:
        """Take steps and return the visible states of the coldest chains, each (n_chains, *layer shape)."""
        # The path is built at every call, because the machine may have changed since the last one.
        path = TemperedPath(self.machine, self.centre)
        n_temperatures, n_chains = next(iter(self.visible.values())).shape[:2]
        every_beta = self.betas.repeat_interleave(n_chains)
        for _ in range(count):
            flat = {name: array.flatten(0, 1) for name, array in self.visible.items()}
            flat = gibbs_step(path.at(every_beta), flat, self.rng, self.machine.as_masks(None, flat)).visible
            self.visible = {name: array.unflatten(0, (n_temperatures, n_chains)) for name, array in flat.items()}
            self._exchange(path)
        return {name: array[-1] for name, array in self.visible.items()}

    def _exchange(self, path: TemperedPath) -> None:
        hot = torch.arange(self.turn, len(self.betas) - 1, 2)
        self.turn = 1 - self.turn
        if len(hot) == 0:
            return
        cold = hot + 1
        stay = self._free_energy(path, hot, hot) + self._free_energy(path, cold, cold)
        move = self._free_energy(path, hot, cold) + self._free_energy(path, cold, hot)
        accept = torch.log(self.rng.uniform(stay.shape, stay)) < stay - move  # (pairs, n_chains)
        for array in self.visible.values():
            swap = accept.reshape(*accept.shape, *([1] * (array.ndim - 2)))
            low, high = array[hot], array[cold]
            array[hot], array[cold] = torch.where(swap, high, low), torch.where(swap, low, high)
        self._offers[hot] += accept.shape[1]
        self._accepted[hot] += accept.sum(1).cpu()

    def _free_energy(self, path: TemperedPath, temperature: Tensor, states: Tensor) -> Tensor:
        """Return the free energy, at some temperatures, of the states at other temperatures: (pairs, n_chains)."""
        layers = {name: array[states].flatten(0, 1) for name, array in self.visible.items()}
        n_chains = next(iter(self.visible.values())).shape[1]
        beta = self.betas[temperature].repeat_interleave(n_chains)
        return path.at(beta).free_energy(layers).reshape(len(states), n_chains)
