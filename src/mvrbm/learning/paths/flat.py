r"""Flat parameters, the form that the fast paths for matrices work on, and the conversion from and to a state.

In this form every layer is measured in units of its statistic around its offset, :math:`\tau = T(x) - \mu`. A
Bernoulli layer has :math:`\tau = x`; a Gaussian one :math:`\tau = x / s - \mu`, which is
:math:`N(b / s - \mu + f, 1)` given a field. The hidden bias includes the field of the offsets,
:math:`c + \sum_m W_m \mu_m`. In these variables a centred gradient is a plain one: biases need not follow the factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
            own = rank or _rank_of(machine, name)
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
            layers.append(
                (U.view(p.rank, K, p.rows), V.view(p.rank, L, p.columns), bias.view(p.rows, p.columns)),
            )
        return layers, flat[-self.hidden_area :].view(K, L)


class Packing:
    """Converts the parameters and momenta of a state to the flat form, and back.

    Parameters
    ----------
    state : TrainState
        A state of a training run that :func:`unsupported_reason` has nothing against.
    plan : Plan
        The machine's plan, perhaps with a larger rank; the terms beyond the machine's own are zero and stay zero,
        since each factor's gradient is proportional to the other factor.
    normalised : bool
        Whether gradients are normalised.
    """

    def __init__(self, state: TrainState, plan: Plan, *, normalised: bool) -> None:
        self.plan, self._normalised = plan, normalised
        machine = state.machine
        centre = None if state.centring is None else state.centring.centre
        self._inverse_scales = {name: unit.inverse_scale() for name, unit in machine.layers.items()}
        self._hidden_inverse = machine.hidden.inverse_scale()
        self._offsets = {
            name: torch.zeros_like(inverse) if centre is None else centre[name][0] * inverse
            for name, inverse in self._inverse_scales.items()
        }
        self._centred = centre is not None

    @property
    def load_scale(self) -> Tensor:
        """Factor of the data, all layers one after another: (states,)."""
        return torch.cat([self._inverse_scales[layer.name].reshape(-1) for layer in self.plan.layers])

    @property
    def load_shift(self) -> Tensor:
        """Offset that is then subtracted: (states,)."""
        return torch.cat([self._offsets[layer.name].reshape(-1) for layer in self.plan.layers])

    @property
    def multiplier(self) -> Tensor:
        """Factor of the gradients of the flat form before a step: (size,).

        A step of b is a step of b / s here, and the gradient of b has another 1 / s, unless it is normalised.
        """
        flat = self._hidden_inverse.new_ones(self.plan.size)
        if not self._normalised:
            layers, hidden = self.plan.split(flat)
            for p, (_, _, bias) in zip(self.plan.layers, layers, strict=True):
                bias.copy_(self._inverse_scales[p.name] ** 2)
            hidden.copy_(self._hidden_inverse**2)
        return flat

    @property
    def gain_of(self) -> Tensor:
        """Number of the factor that each parameter belongs to, -1 for biases: (size,), int32."""
        flat = torch.full((self.plan.size,), -1, dtype=torch.int32, device=self._hidden_inverse.device)
        layers, _ = self.plan.split(flat)
        for number, (U, V, _) in enumerate(layers):
            U.fill_(2 * number)
            V.fill_(2 * number + 1)
        return flat

    @torch.no_grad()
    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        """Write a state's parameters and momenta into flat arrays (size,)."""
        params.zero_()
        momenta.zero_()
        learned = state.learned
        for name, value, momentum, scale in self._parts(state.machine, params, momenta):
            rank = len(learned[name])
            value[:rank] = learned[name] * scale
            if name in state.momenta:
                momentum[:rank] = state.momenta[name] * scale
        layers, hidden = self.plan.split(params)
        for p, (_, _, bias) in zip(self.plan.layers, layers, strict=True):
            bias.sub_(self._offsets[p.name])
        if self._centred:
            hidden.add_(self._field_of_offsets(state.machine))

    @torch.no_grad()
    def unpack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        """Write flat parameters and momenta back to a state."""
        learned = state.learned
        offsets = {f"visible.{name}.bias": offset for name, offset in self._offsets.items()}
        for name, value, momentum, scale in self._parts(state.machine, params, momenta):
            parameter = learned[name]
            rank = len(parameter)
            if name in offsets:
                value = value + offsets[name]
            elif name == "hidden.bias" and self._centred:
                value = value - self._field_of_offsets(state.machine)  # the factors are in place by now
            parameter.copy_(value[:rank] / scale)
            state.momentum_of(name, parameter).copy_(momentum[:rank] / scale)

    def _parts(
        self, machine: BoltzmannMachine, params: Tensor, momenta: Tensor
    ) -> Iterator[tuple[str, Tensor, Tensor, Tensor | float]]:
        """Yield name, value, momentum and scale of every parameter, the hidden bias last."""
        (layers, hidden), (layer_momenta, hidden_momentum) = self.plan.split(params), self.plan.split(momenta)
        for p, (U, V, bias), (of_u, of_v, of_bias) in zip(self.plan.layers, layers, layer_momenta, strict=True):
            first, second = factor_names(machine, p.name)
            yield first, U, of_u, 1.0
            yield second, V, of_v, 1.0
            yield f"visible.{p.name}.bias", bias, of_bias, self._inverse_scales[p.name]
        yield "hidden.bias", hidden, hidden_momentum, self._hidden_inverse

    def _field_of_offsets(self, machine: BoltzmannMachine) -> Tensor:
        """Return the field of the offsets on the hidden layer, for the machine's present factors."""
        fields = [link.to_hidden(self._offsets[name][None])[0] for name, link in machine.links.items()]
        return torch.stack(fields).sum(0)


def factor_names(machine: BoltzmannMachine, layer: str) -> tuple[str, str]:
    """Return the names of the parameters U and V of a layer's coupling."""
    link = machine.links[layer]
    factors = link.matrix_factors()
    assert factors is not None
    names = {id(parameter): name for name, parameter in link.named_parameters()}
    first, second = (f"couplings.{layer}.{names[id(factor)]}" for factor in factors)
    return first, second


def _rank_of(machine: BoltzmannMachine, layer: str) -> int:
    factors = machine.links[layer].matrix_factors()
    assert factors is not None
    return len(factors[0])


def largest_rank(machine: BoltzmannMachine) -> int:
    """Return the largest rank of a machine's couplings."""
    return max(_rank_of(machine, name) for name in machine.layers)


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
    if any(unit.sampled_as is None or unit.shape != unit.bias_shape for unit in units):
        return "it has units other than Bernoulli and Gaussian ones with one bias per entry"
    if not all(unit.bias.requires_grad for unit in units):
        return "some of its biases are frozen"
    if any(unit.learns_statistic for unit in units):
        return "it learns variances"
    if any(link.matrix_factors() is None for link in machine.links.values()):
        return "not all of its couplings are sums of Kronecker products of two learned matrices"
    return None
