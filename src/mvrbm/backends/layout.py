r"""Flat parameters, the form that the fast paths for Kronecker and dense couplings work on, and its conversion.

In this form every visible layer is measured in units of its statistic around its offset, :math:`\tau = T(x) - \mu`. A
Bernoulli or categorical layer has :math:`\tau = x - \mu`; a Gaussian one :math:`\tau = x / s - \mu`, which is
:math:`N(b / s - \mu + f, 1)` given a field. The hidden bias includes the field of the offsets,
:math:`c + \sum_m W_m \mu_m`. In these variables a centered gradient is a plain one: the hidden bias need not follow the
factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateSettings
from mvrbm.couplings.base import squared_norms
from mvrbm.devices import one_thread
from mvrbm.machine import BoltzmannMachine
from mvrbm.updates.negative import CD, PCD, NegativePhase
from mvrbm.updates.state import TrainState


@dataclass(frozen=True)
class LayerLayout:
    """One visible layer: its sizes, and the positions of its parameters and states."""

    name: str
    shape: tuple[int, ...]
    kind: str  # of units: see Unit.sampled_as
    factors: tuple[tuple[int, int, int], ...]  # shapes (R, K_d, I_d), see Coupling.mode_factors
    learns_variance: bool
    parameters_at: int
    states_at: int

    @property
    def area(self) -> int:
        """Number of entries of a sample."""
        return math.prod(self.shape)

    @property
    def gaussian(self) -> bool:
        """Whether the units are Gaussian."""
        return self.kind == "gaussian"

    @property
    def is_matrix(self) -> bool:
        """Whether the layer is a matrix, with one factor for each of its modes."""
        return len(self.factors) == 2

    @property
    def is_label(self) -> bool:
        """Whether the layer is a single category with a dense coupling."""
        return self.kind == "categorical" and len(self.shape) == 1 and len(self.factors) == 1 and self.rank == 1

    @property
    def rows(self) -> int:
        """Rows of a matrix."""
        return self.factors[0][2]

    @property
    def columns(self) -> int:
        """Columns of a matrix, or all entries of a layer with a dense coupling."""
        return self.factors[-1][2]

    @property
    def rank(self) -> int:
        """Number of Kronecker products."""
        return self.factors[0][0]

    @property
    def numbers_shape(self) -> tuple[int, ...]:
        """Shape of the random numbers that draw a sample."""
        return self.shape[:-1] if self.kind == "categorical" else self.shape

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(map(math.prod, self.factors)) + self.area * (1 + self.learns_variance)

    def states_of(self, all_states: Tensor) -> Tensor:
        """Return the states of this layer, (..., area), among those of all layers, (..., states)."""
        return all_states[..., self.states_at : self.states_at + self.area]


@dataclass(frozen=True)
class Layout:
    """Sizes and positions of all parameters and states of a machine.

    Flat parameters are, for each layer, the factors, the bias and, where it is learned, the logarithm of the variance;
    then the hidden bias.
    """

    layers: tuple[LayerLayout, ...]
    hidden_shape: tuple[int, ...]
    hidden_gaussian: bool

    @classmethod
    def of(cls, machine: BoltzmannMachine, rank: int | None = None) -> Layout:
        """Return the plan of a machine, its couplings of several factors padded to `rank` (default: their own)."""
        layers = list[LayerLayout]()
        parameters = states = 0
        for name, unit in machine.layers.items():
            own = machine.links[name].mode_factors() or []
            padded = rank if len(own) > 1 else None
            factors = tuple((padded or len(factor), factor.shape[1], factor.shape[2]) for factor in own)
            kind, learns = str(unit.sampled_as), unit.learns_statistic
            layers.append(LayerLayout(name, unit.shape, kind, factors, learns, parameters, states))
            parameters, states = parameters + layers[-1].size, states + layers[-1].area
        return cls(tuple(layers), machine.hidden.shape, machine.hidden.sampled_as == "gaussian")

    @property
    def hidden_rows(self) -> int:
        """Rows of a hidden matrix."""
        return self.hidden_shape[0]

    @property
    def hidden_columns(self) -> int:
        """Columns of a hidden matrix."""
        return self.hidden_shape[-1]

    @property
    def hidden_area(self) -> int:
        """Number of entries of the hidden layer."""
        return math.prod(self.hidden_shape)

    @property
    def states(self) -> int:
        """Number of entries of all visible layers."""
        return sum(layer.area for layer in self.layers)

    @property
    def size(self) -> int:
        """Length of the flat parameters."""
        return sum(layer.size for layer in self.layers) + self.hidden_area

    def split(self, flat: Tensor) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        """Return views of flat parameters (size,): the factors and the bias of each layer, and the hidden bias."""
        layers = []
        for p in self.layers:
            shapes: list[tuple[int, ...]] = [*p.factors, p.shape]
            parts = flat[p.parameters_at :].split_with_sizes([*map(math.prod, shapes), len(flat) - self._end(p)])
            layers.append(tuple(part.view(shape) for part, shape in zip(parts[:-1], shapes, strict=True)))
        return layers, flat[-self.hidden_area :].view(self.hidden_shape)

    def _end(self, p: LayerLayout) -> int:
        """Return where the factors and the bias of a layer end."""
        return p.parameters_at + p.size - p.learns_variance * p.area

    def log_variance(self, flat: Tensor, p: LayerLayout) -> Tensor:
        """Return a view of the logarithms of a layer's variances, if it learns them."""
        return flat[self._end(p) : self._end(p) + p.area].view(p.shape)

    def factors(self, flat: Tensor) -> list[Tensor]:
        """Return views of the factors of each layer, one after another."""
        return [factor for *factors, _ in self.split(flat)[0] for factor in factors]


def factor_gains(layers: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the gain of each factor of each layer, one after another, as `Coupling.gains` does."""
    gains = []
    for factors in layers:
        if len(factors) == 1:  # without a product over the others, whose norms need not be computed
            gains.append(factors[0].new_full((), len(factors[0])))
            continue
        norms = torch.stack([squared_norms(factor) for factor in factors])  # (D, R)
        for mode in range(len(factors)):
            gains.append(torch.cat([norms[:mode], norms[mode + 1 :]]).prod(0).sum())
    return gains


class Packing:
    """Converts the parameters and momenta of a state to the flat form, and back.

    The plan may have a larger rank than the machine; the terms beyond the machine's own are zero and stay zero, since
    each factor's gradient is proportional to the other factors.
    """

    def __init__(self, state: TrainState, plan: Layout, *, normalized: bool) -> None:
        machine, centering = state.machine, state.centering
        self.plan, self._normalized, self._centered = plan, normalized, centering is not None
        self._factor_names = [
            [f"couplings.{p.name}.{name}" for name, _ in machine.links[p.name].named_parameters()] for p in plan.layers
        ]
        # Offsets of layers in the units of the data, and scales and offsets in the units of the flat form: (states,).
        zero = machine.like.new_zeros(plan.states)
        self._center, self.affine = zero, (zero.clone(), zero.clone())
        if centering is not None:
            self._center = torch.cat([centering.center[p.name].reshape(-1) for p in plan.layers])
        self._hidden_scale = machine.hidden.inverse_scale()
        self.measure({p.name: machine.layers[p.name].inverse_scale() for p in plan.layers})

    def measure(self, inverse_scales: dict[str, Tensor]) -> None:
        """Take over the scales 1 / s of layers."""
        scale, shift = self.affine
        for p in self.plan.layers:
            if p.name in inverse_scales:
                p.states_of(scale).copy_(inverse_scales[p.name].reshape(-1))
        torch.mul(self._center, scale, out=shift)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of flat parameters (size,) by the names of the machine's, the hidden bias last."""
        layers, hidden = self.plan.split(flat)
        found: dict[str, Tensor] = {}
        for p, names, (*factors, bias) in zip(self.plan.layers, self._factor_names, layers, strict=True):
            found |= {**dict(zip(names, factors, strict=True)), f"visible.{p.name}.bias": bias}
            if p.learns_variance:
                found[f"visible.{p.name}.log_variance"] = self.plan.log_variance(flat, p)
        return {**found, "hidden.bias": hidden}

    def _scales(self) -> dict[str, Tensor]:
        """Return the scales of the biases, by their names."""
        scales = {f"visible.{p.name}.bias": p.states_of(self.affine[0]).view(p.shape) for p in self.plan.layers}
        return {**scales, "hidden.bias": self._hidden_scale}

    def _shift(self, p: LayerLayout) -> Tensor:
        return p.states_of(self.affine[1]).view(p.shape)

    @property
    def multiplier(self) -> Tensor:
        """Factor of the gradients of the flat form before a step: (size,).

        A step of b is a step of b / s here, and the gradient of b has another 1 / s, unless it is normalized.
        """
        flat = self._hidden_scale.new_ones(self.plan.size)
        if not self._normalized:
            views = self.named(flat)
            for name, scale in self._scales().items():
                views[name].copy_(scale**2)
        return flat

    @torch.no_grad()
    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        """Write a state's parameters and momenta into flat arrays (size,)."""
        self.measure({p.name: state.machine.layers[p.name].inverse_scale() for p in self.plan.layers})
        params.zero_()
        momenta.zero_()
        learned, values, scales = state.learned, self.named(params), self._scales()
        for name, momentum in self.named(momenta).items():
            pairs = [(values[name], learned[name])]
            if name in state.momenta:
                pairs.append((momentum, state.momenta[name]))
            for flat, own in pairs:
                part = _part(flat, own).copy_(own)
                if name in scales:
                    part.mul_(scales[name])
        for p in self.plan.layers:
            if p.gaussian:
                values[f"visible.{p.name}.bias"].sub_(self._shift(p))
        if self._centered:
            values["hidden.bias"].add_(self._field_of_offsets(state.machine))

    @torch.no_grad()
    def unpack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        """Write flat parameters and momenta back to a state."""
        learned = state.learned
        for name, value, momentum in self._unpacked(state, params, momenta):
            learned[name].copy_(value)
            state.momentum_of(name, learned[name]).copy_(momentum)

    @torch.no_grad()
    def is_of(self, state: TrainState, params: Tensor, momenta: Tensor) -> bool:
        """Return whether a state has the values that `unpack` would write to it."""
        learned = state.learned
        return all(
            torch.equal(learned[name], value) and torch.equal(state.momentum_of(name, value), momentum)
            for name, value, momentum in self._unpacked(state, params, momenta)
        )

    def _unpacked(self, state: TrainState, params: Tensor, momenta: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield parameters and momenta as a state has them, by name; at the hidden bias, factors must be in place."""
        learned, values, scales = state.learned, self.named(params), self._scales()
        shifts = {f"visible.{p.name}.bias": self._shift(p) for p in self.plan.layers if p.gaussian}
        for name, momentum in self.named(momenta).items():
            parameter, value = learned[name], values[name]
            if name in shifts:
                value = value + shifts[name]
            elif name == "hidden.bias" and self._centered:
                value = value - self._field_of_offsets(state.machine)
            value, momentum = _part(value, parameter), _part(momentum, parameter)
            # Factors, which may be large, have no scale: they are not copied for one.
            yield (name, value / scales[name], momentum / scales[name]) if name in scales else (name, value, momentum)

    @one_thread()
    def _field_of_offsets(self, machine: BoltzmannMachine) -> Tensor:
        """Return the field of the offsets on the hidden layer, for the machine's present factors."""
        fields = [machine.links[p.name].to_hidden(self._shift(p)[None])[0] for p in self.plan.layers]
        return torch.stack(fields).sum(0)


def _part(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return the view of a flat parameter, which may have a larger rank, that a machine's own parameter stands for."""
    return flat.view(-1)[: parameter.numel()].view(parameter.shape)


def unsupported_reason(
    task: UpdateSettings, state: TrainState, negatives: tuple[type[NegativePhase], ...] = (CD, PCD)
) -> str | None:
    """Return why the flat form, with one of these negative phases, cannot represent a training run, None if it can."""
    machine, recipe = state.machine, task.recipe
    if task.reference:
        return "the reference backend was requested"
    if task.optimizer is not None:
        return "it has an optimizer or a scheduler of its own"
    if type(recipe.negative) not in negatives:  # a subclass may draw in another way
        return f"its chains are {type(recipe.negative).__name__}"
    units = [machine.hidden, *machine.layers.values()]
    if any(unit.sampled_as is None or unit.shape != unit.bias_shape for unit in units):
        return "it has units other than Bernoulli, Gaussian and categorical ones with one bias per entry"
    if machine.hidden.sampled_as == "categorical" or machine.hidden.learns_statistic:
        return "its hidden units are neither Bernoulli nor Gaussian ones of fixed variances"
    if any(unit.absent(unit.some_state()[None]) is not None for unit in units):
        return "its layers are padded"
    if not all(unit.bias.requires_grad for unit in units):
        return "some of its biases are frozen"
    if any(link.mode_factors() is None for link in machine.links.values()):
        return "not all of its couplings are full matrices or sums of Kronecker products of learned matrices"
    return None


def not_only_matrices_reason(state: TrainState) -> str | None:
    """Return why kernels for matrices and labels cannot compute a training run, None if they can."""
    centering = state.centering
    if centering is not None and centering.follow_hidden:
        return "the hidden layer is centered"
    layers = [p for p in Layout.of(state.machine).layers if not p.is_label]
    if not all(p.is_matrix and p.kind != "categorical" and not p.learns_variance for p in layers):
        return "not all of its layers are labels and matrices of Bernoulli units, or Gaussian ones of fixed variances"
    return None
