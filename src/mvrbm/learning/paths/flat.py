r"""Flat parameters, the form that the fast paths for matrices work on, and the conversion from and to a state.

In this form every layer is measured in units of its statistic around its offset, :math:`\tau = T(x) - \mu`. A
Bernoulli layer has :math:`\tau = x`; a Gaussian one :math:`\tau = x / s - \mu`, which is
:math:`N(b / s - \mu + f, 1)` given a field. The hidden bias includes the field of the offsets,
:math:`c + \sum_m W_m \mu_m`. In these variables a centred gradient is a plain one: biases need not follow the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.couplings.base import squared_norms
from mvrbm.learning.paths.base import Task
from mvrbm.learning.samplers import CD, PCD
from mvrbm.learning.state import TrainState
from mvrbm.machine import BoltzmannMachine


@dataclass(frozen=True)
class LayerPlan:
    """One visible layer of matrices: its sizes, and the positions of its parameters and states."""

    name: str
    rows: int
    columns: int
    rank: int
    gaussian: bool
    parameters_at: int
    states_at: int

    @property
    def area(self) -> int:
        """Number of entries of a sample."""
        return self.rows * self.columns

    def states_of(self, all_states: Tensor) -> Tensor:
        """Return the states of this layer, (..., area), among those of all layers, (..., states)."""
        return all_states[..., self.states_at : self.states_at + self.area]


@dataclass(frozen=True)
class Plan:
    """Sizes and positions of all parameters and states of a machine of matrices.

    Flat parameters are, for each layer, U (R, K, I), V (R, L, J) and the bias (I, J); then the hidden bias.
    """

    layers: tuple[LayerPlan, ...]
    hidden_rows: int
    hidden_columns: int
    hidden_gaussian: bool

    @classmethod
    def of(cls, machine: BoltzmannMachine, rank: int | None = None) -> Plan:
        """Return the plan of a machine, its couplings padded to `rank` (default: their own)."""
        K, L = machine.hidden.shape
        layers, parameters, states = [], 0, 0
        for name, unit in machine.layers.items():
            rows, columns = unit.shape
            factors = machine.links[name].matrix_factors()
            own = rank or (0 if factors is None else len(factors[0]))
            layers.append(LayerPlan(name, rows, columns, own, unit.sampled_as == "gaussian", parameters, states))
            parameters += own * (K * rows + L * columns) + rows * columns
            states += rows * columns
        return cls(tuple(layers), K, L, machine.hidden.sampled_as == "gaussian")

    @property
    def hidden_area(self) -> int:
        """Number of entries of the hidden layer."""
        return self.hidden_rows * self.hidden_columns

    @property
    def states(self) -> int:
        """Number of entries of all visible layers."""
        return sum(layer.area for layer in self.layers)

    @property
    def size(self) -> int:
        """Length of the flat parameters."""
        K, L = self.hidden_rows, self.hidden_columns
        return self.states + self.hidden_area + sum(p.rank * (K * p.rows + L * p.columns) for p in self.layers)

    def split(self, flat: Tensor) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
        """Return views of flat parameters (size,): U, V and bias of each layer, and the hidden bias."""
        K, L = self.hidden_rows, self.hidden_columns
        layers = []
        for p in self.layers:
            sizes = [p.rank * K * p.rows, p.rank * L * p.columns, p.area]
            U, V, bias = flat[p.parameters_at : p.parameters_at + sum(sizes)].split(sizes)
            layers.append((U.view(p.rank, K, p.rows), V.view(p.rank, L, p.columns), bias.view(p.rows, p.columns)))
        return layers, flat[-self.hidden_area :].view(K, L)

    def factors(self, flat: Tensor) -> list[Tensor]:
        """Return views of U and V of each layer, one after another."""
        return [part for U, V, _ in self.split(flat)[0] for part in (U, V)]


def factor_gains(factors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gain of each of :meth:`Plan.factors`: the norm of its partner, as `Kronecker.gains` does."""
    norms = [squared_norms(factor).sum() for factor in factors]
    return [norms[number ^ 1] for number in range(len(norms))]


class Packing:
    """Converts the parameters and momenta of a state to the flat form, and back.

    The plan may have a larger rank than the machine; the terms beyond the machine's own are zero and stay zero, since
    each factor's gradient is proportional to the other factor.
    """

    def __init__(self, state: TrainState, plan: Plan, *, normalised: bool) -> None:
        machine, centring = state.machine, state.centring
        self.plan, self._normalised, self._centred = plan, normalised, centring is not None
        self._factor_names = [_factor_names(machine, p.name) for p in plan.layers]
        # Scales of biases and offsets of layers, by the names of the biases.
        self._scales = {f"visible.{name}.bias": unit.inverse_scale() for name, unit in machine.layers.items()}
        self._offsets = {name: torch.zeros_like(scale) for name, scale in self._scales.items()}
        if centring is not None:
            for name, centre in centring.centre.items():
                self._offsets[f"visible.{name}.bias"] = centre[0] * self._scales[f"visible.{name}.bias"]
        self._scales["hidden.bias"] = machine.hidden.inverse_scale()

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of flat parameters (size,) by the names of the machine's, the hidden bias last."""
        layers, hidden = self.plan.split(flat)
        found: dict[str, Tensor] = {}
        for p, (first, second), (U, V, bias) in zip(self.plan.layers, self._factor_names, layers, strict=True):
            found |= {first: U, second: V, f"visible.{p.name}.bias": bias}
        return {**found, "hidden.bias": hidden}

    @property
    def affine(self) -> tuple[Tensor, Tensor]:
        """Factor of the data, and offset that is then subtracted, all layers one after another: (states,) each."""
        names = [f"visible.{p.name}.bias" for p in self.plan.layers]
        scale, shift = (torch.cat([by[name].reshape(-1) for name in names]) for by in (self._scales, self._offsets))
        return scale, shift

    @property
    def multiplier(self) -> Tensor:
        """Factor of the gradients of the flat form before a step: (size,).

        A step of b is a step of b / s here, and the gradient of b has another 1 / s, unless it is normalised.
        """
        flat = self._scales["hidden.bias"].new_ones(self.plan.size)
        if not self._normalised:
            views = self.named(flat)
            for name, scale in self._scales.items():
                views[name].copy_(scale**2)
        return flat

    @torch.no_grad()
    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        """Write a state's parameters and momenta into flat arrays (size,)."""
        params.zero_()
        momenta.zero_()
        learned, values = state.learned, self.named(params)
        for name, momentum in self.named(momenta).items():
            rank, scale = len(learned[name]), self._scales.get(name, 1.0)
            values[name][:rank] = learned[name] * scale
            if name in state.momenta:
                momentum[:rank] = state.momenta[name] * scale
        for name, offset in self._offsets.items():
            values[name].sub_(offset)
        if self._centred:
            values["hidden.bias"].add_(self._field_of_offsets(state.machine))

    @torch.no_grad()
    def unpack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        """Write flat parameters and momenta back to a state."""
        learned, values = state.learned, self.named(params)
        for name, momentum in self.named(momenta).items():
            parameter, value, scale = learned[name], values[name], self._scales.get(name, 1.0)
            if name in self._offsets:
                value = value + self._offsets[name]
            elif name == "hidden.bias" and self._centred:
                value = value - self._field_of_offsets(state.machine)  # the factors are in place by now
            parameter.copy_(value[: len(parameter)] / scale)
            state.momentum_of(name, parameter).copy_(momentum[: len(parameter)] / scale)

    def _field_of_offsets(self, machine: BoltzmannMachine) -> Tensor:
        """Return the field of the offsets on the hidden layer, for the machine's present factors."""
        offsets = {name: self._offsets[f"visible.{name}.bias"][None] for name in machine.layers}
        return torch.stack([link.to_hidden(offsets[name])[0] for name, link in machine.links.items()]).sum(0)


def _factor_names(machine: BoltzmannMachine, layer: str) -> tuple[str, str]:
    """Return the names of the parameters U and V of a layer's coupling."""
    link = machine.links[layer]
    names = {id(parameter): name for name, parameter in link.named_parameters()}
    first, second = (f"couplings.{layer}.{names[id(factor)]}" for factor in link.matrix_factors() or ())
    return first, second


def unsupported_reason(task: Task, state: TrainState) -> str | None:
    """Return why the flat form cannot represent a training run, None if it can."""
    machine, recipe = state.machine, task.recipe
    if task.reference:
        return "the reference backend was requested"
    if task.optimizer is not None:
        return "it has an optimiser or a scheduler of its own"
    if recipe.centring == "full":
        return "the hidden layer is centred"
    if type(recipe.negative) not in (CD, PCD):  # a subclass may draw in another way
        return f"its chains are {type(recipe.negative).__name__}"
    units = [machine.hidden, *machine.layers.values()]
    if any(unit.sampled_as not in ("bernoulli", "gaussian") or unit.shape != unit.bias_shape for unit in units):
        return "it has units other than Bernoulli and Gaussian ones with one bias per entry"
    if not all(unit.bias.requires_grad for unit in units):
        return "some of its biases are frozen"
    if any(unit.learns_statistic for unit in units):
        return "it learns variances"
    if any(link.matrix_factors() is None for link in machine.links.values()):
        return "not all of its couplings are sums of Kronecker products of two learned matrices"
    return None
