r"""Parameters in the form that fast paths work on, and back.

There every layer is in units of its statistic around its offset, :math:`\tau = T(x) - \mu`. A Bernoulli layer
has :math:`\tau = x`; a Gaussian one :math:`\tau = x / s - \mu`, so that given a field it is
:math:`N(b / s - \mu + f, 1)`. The hidden bias takes in what the offsets send, :math:`c + \sum_m W_m \mu_m`.
In these variables a centred gradient is a plain one: biases need not follow the factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mvrbm.couplings import Kronecker
from mvrbm.learning.samplers import CD, PCD
from mvrbm.units import Bernoulli, Gaussian, Unit

if TYPE_CHECKING:
    from mvrbm.learning.trainer import Trainer
    from mvrbm.machine import BoltzmannMachine


@dataclass(frozen=True)
class LayerPlan:
    """One visible layer of matrices: its sizes, and where its parameters and states begin."""

    name: str
    rows: int
    columns: int
    rank: int
    gaussian: bool
    parameters_at: int
    states_at: int

    @property
    def area(self) -> int:
        """Entries of a sample."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Plan:
    """Sizes of everything that a machine of matrices has.

    Flat parameters are, for each layer, U (R, K, I), V (R, L, J) and the bias (I, J); then the hidden bias.
    """

    layers: tuple[LayerPlan, ...]
    hidden_rows: int
    hidden_columns: int
    hidden_gaussian: bool

    @classmethod
    def of(cls, machine: BoltzmannMachine, rank: int | None = None) -> Plan:
        """Lay out a machine, its couplings padded to a rank if one is given."""
        K, L = machine.hidden.shape
        layers, parameters, states = [], 0, 0
        for name, unit in machine.layers.items():
            rows, columns = unit.shape
            own = rank or int(machine.links[name].rank)  # type: ignore[arg-type]
            layers.append(LayerPlan(name, rows, columns, own, unit.gaussian, parameters, states))
            parameters += own * (K * rows + L * columns) + rows * columns
            states += rows * columns
        return cls(tuple(layers), K, L, machine.hidden.gaussian)

    @property
    def hidden_area(self) -> int:
        """Entries of the hidden layer."""
        return self.hidden_rows * self.hidden_columns

    @property
    def states(self) -> int:
        """Entries of all visible layers."""
        return sum(layer.area for layer in self.layers)

    @property
    def size(self) -> int:
        """Length of the flat parameters."""
        K, L = self.hidden_rows, self.hidden_columns
        return self.states + self.hidden_area + sum(p.rank * (K * p.rows + L * p.columns) for p in self.layers)

    def split(self, flat: Tensor) -> tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor]:
        """Views of flat parameters (size,): U, V and bias of each layer, and the hidden bias."""
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
    """Takes a trainer's parameters and momenta to the flat form, and back.

    Parameters
    ----------
    trainer : Trainer
        A training that :func:`why_not` had nothing against.
    plan : Plan
        The machine's, perhaps with a larger rank; the terms beyond the machine's own are zero and stay so,
        since each factor's gradient is proportional to the other.
    """

    def __init__(self, trainer: Trainer, plan: Plan) -> None:
        self.trainer, self.plan = trainer, plan
        machine = trainer.machine
        centre = None if trainer.centring is None else trainer.centring.centre
        self._inverse_scales = {name: _inverse_scale(unit) for name, unit in machine.layers.items()}
        self._hidden_inverse = _inverse_scale(machine.hidden)
        self._offsets = {
            name: torch.zeros_like(inverse) if centre is None else centre[name][0] * inverse
            for name, inverse in self._inverse_scales.items()
        }
        self._centred = centre is not None

    @property
    def load_scale(self) -> Tensor:
        """What data is multiplied by, all layers one after another: (states,)."""
        return torch.cat([self._inverse_scales[layer.name].reshape(-1) for layer in self.plan.layers])

    @property
    def load_shift(self) -> Tensor:
        """What is then subtracted: (states,)."""
        return torch.cat([self._offsets[layer.name].reshape(-1) for layer in self.plan.layers])

    @property
    def multiplier(self) -> Tensor:
        """What gradients of the flat form are multiplied by before a step: (size,).

        A step of b is a step of b / s here, and the gradient of b has another 1 / s, unless it is normalised.
        """
        flat = self.trainer.machine.like.new_ones(self.plan.size)
        if not self.trainer.recipe.normalised:
            layers, hidden = self.plan.split(flat)
            for p, (_, _, bias) in zip(self.plan.layers, layers, strict=True):
                bias.copy_(self._inverse_scales[p.name] ** 2)
            hidden.copy_(self._hidden_inverse**2)
        return flat

    @property
    def gain_of(self) -> Tensor:
        """Number of the factor that a parameter belongs to, -1 for biases: (size,), int32."""
        flat = torch.full((self.plan.size,), -1, dtype=torch.int32, device=self.trainer.machine.like.device)
        layers, _ = self.plan.split(flat)
        for number, (U, V, _) in enumerate(layers):
            U.fill_(2 * number)
            V.fill_(2 * number + 1)
        return flat

    @torch.no_grad()
    def pack(self, params: Tensor, momenta: Tensor) -> None:
        """Write parameters and momenta into flat arrays (size,)."""
        machine, optimizer = self.trainer.machine, self.trainer.optimizer
        assert optimizer is not None
        params.zero_()
        momenta.zero_()

        def fill(into: Tensor, momentum: Tensor, parameter: Tensor, scale: Tensor | float) -> None:
            rank = len(parameter)
            into[:rank] = parameter * scale
            buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                momentum[:rank] = buffer * scale

        (layers, hidden), (layer_momenta, hidden_momentum) = self.plan.split(params), self.plan.split(momenta)
        for p, places, moving in zip(self.plan.layers, layers, layer_momenta, strict=True):
            factors = machine.links[p.name].factors
            scales: list[Tensor | float] = [1.0, 1.0, self._inverse_scales[p.name]]
            parts = (factors[0], factors[1], machine.layers[p.name].bias)  # type: ignore[index]
            for into, momentum, part, scale in zip(places, moving, parts, scales, strict=True):
                fill(into, momentum, part, scale)
            places[2].sub_(self._offsets[p.name])
        fill(hidden, hidden_momentum, machine.hidden.bias, self._hidden_inverse)
        if self._centred:
            hidden.add_(self._from_offsets())

    @torch.no_grad()
    def unpack(self, params: Tensor, momenta: Tensor) -> None:
        """Write flat parameters and momenta back to the machine and the optimiser."""
        machine, optimizer = self.trainer.machine, self.trainer.optimizer
        assert optimizer is not None

        def give(parameter: Tensor, value: Tensor, momentum: Tensor, scale: Tensor | float) -> None:
            rank = len(parameter)
            parameter.copy_(value[:rank] / scale)
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.empty_like(parameter)
            state["momentum_buffer"].copy_(momentum[:rank] / scale)

        (layers, hidden), (layer_momenta, hidden_momentum) = self.plan.split(params), self.plan.split(momenta)
        for p, (U, V, bias), (moving_u, moving_v, moving_b) in zip(
            self.plan.layers, layers, layer_momenta, strict=True
        ):
            factors = machine.links[p.name].factors
            give(factors[0], U, moving_u, 1.0)  # type: ignore[index]
            give(factors[1], V, moving_v, 1.0)  # type: ignore[index]
            give(machine.layers[p.name].bias, bias + self._offsets[p.name], moving_b, self._inverse_scales[p.name])
        if self._centred:
            hidden = hidden - self._from_offsets()
        give(machine.hidden.bias, hidden, hidden_momentum, self._hidden_inverse)

    def _from_offsets(self) -> Tensor:
        """Field that the offsets send to the hidden layer, with the machine's factors as they are."""
        links = self.trainer.machine.links
        fields = [link.to_hidden(self._offsets[name][None])[0] for name, link in links.items()]
        return torch.stack(fields).sum(0)


def _inverse_scale(unit: Unit) -> Tensor:
    variance = getattr(unit, "log_variance", None)
    return torch.ones_like(unit.bias) if variance is None else torch.exp(-0.5 * variance.detach())


def why_not(trainer: Trainer) -> str | None:
    """Return why the fast paths cannot make a training's updates, None if they can."""
    machine, recipe = trainer.machine, trainer.recipe
    if trainer.gradient != "analytic":
        return "gradients by autograd were asked for"
    if not trainer.own_optimizer:
        return "it has an optimiser or a scheduler of its own"
    if recipe.centring == "full":
        return "the hidden layer is centred"
    if type(recipe.negative) not in (CD, PCD):  # a subclass may draw otherwise
        return f"its chains are {type(recipe.negative).__name__}"
    units = [machine.hidden, *machine.layers.values()]
    if not all(isinstance(unit, Bernoulli | Gaussian) and unit.shape == unit.bias_shape for unit in units):
        return "it has other units than Bernoulli and Gaussian ones with a bias an entry"
    if any(unit.learns_statistic for unit in units):
        return "it learns variances"
    if any(not isinstance(link, Kronecker) or len(link.factors) != 2 or link.summed_modes
           for link in machine.links.values()):  # fmt: skip
        return "not all of its couplings are Kronecker products of two factors"
    if not all(p.requires_grad for link in machine.links.values() for p in link.parameters()):
        return "some of its factors are frozen"
    return None
