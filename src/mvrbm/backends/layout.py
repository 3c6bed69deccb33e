r"""The flat layout of parameters, which the fast backends for Kronecker and dense couplings work on.

The parameters of a machine are one vector, and so are their momenta and their gradient. In this form a visible layer is
measured by its statistic relative to its offset, :math:`\tau = T(x) - \mu`. A Bernoulli or categorical layer has
:math:`\tau = x - \mu`. A Gaussian layer has :math:`\tau = x / s - \mu`, which is distributed as
:math:`N(b / s - \mu + f, 1)` given a field :math:`f`. The hidden bias includes the field of the offsets,
:math:`c + \sum_m W_m \mu_m`. In these variables a centered gradient is a plain one: the hidden bias need not follow the
factors. :mod:`mvrbm.backends.packing` converts a machine's parameters to this form and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateSettings
from mvrbm.couplings.base import squared_norms
from mvrbm.machine import BoltzmannMachine
from mvrbm.updates.negative import CD, PCD, NegativePhase
from mvrbm.updates.state import TrainState


@dataclass(frozen=True)
class LayerLayout:
    """One visible layer: its sizes, and the positions of its parameters and states."""

    name: str
    shape: tuple[int, ...]
    kind: str  # kind of units, see Unit.sampled_as
    factors: tuple[tuple[int, int, int], ...]  # shapes (R, K_d, I_d), see Coupling.mode_factors
    learns_variance: bool
    parameters_at: int  # position of the first parameter in the flat parameters
    states_at: int  # position of the first entry among the states of all layers

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
        """Whether the layer is a matrix with one factor per axis."""
        return len(self.factors) == 2

    @property
    def is_label(self) -> bool:
        """Whether the layer is a single category with a dense coupling."""
        return self.kind == "categorical" and len(self.shape) == 1 and len(self.factors) == 1 and self.rank == 1

    @property
    def rows(self) -> int:
        """Number of rows of a matrix."""
        return self.factors[0][2]

    @property
    def columns(self) -> int:
        """Number of columns of a matrix, or of all entries of a layer with a dense coupling."""
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
        """Return the part of this layer, (..., area), of the states of all layers, (..., states)."""
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
        """Return the layout of a machine. With `rank`, couplings of several factors are padded to that rank."""
        layers = list[LayerLayout]()
        parameters = 0
        states = 0
        for name, unit in machine.layers.items():
            own = machine.links[name].mode_factors() or []
            padded = rank if len(own) > 1 else None
            factors = tuple((padded or len(factor), factor.shape[1], factor.shape[2]) for factor in own)
            kind = str(unit.sampled_as)
            layer = LayerLayout(name, unit.shape, kind, factors, unit.learns_statistic, parameters, states)
            layers.append(layer)
            parameters += layer.size
            states += layer.area
        return cls(tuple(layers), machine.hidden.shape, machine.hidden.sampled_as == "gaussian")

    @property
    def hidden_rows(self) -> int:
        """Number of rows of a hidden matrix."""
        return self.hidden_shape[0]

    @property
    def hidden_columns(self) -> int:
        """Number of columns of a hidden matrix."""
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
        for layer in self.layers:
            shapes: list[tuple[int, ...]] = [*layer.factors, layer.shape]
            sizes = [*map(math.prod, shapes), len(flat) - self._end_of_bias(layer)]
            parts = flat[layer.parameters_at :].split_with_sizes(sizes)
            layers.append(tuple(part.view(shape) for part, shape in zip(parts[:-1], shapes, strict=True)))
        return layers, flat[-self.hidden_area :].view(self.hidden_shape)

    def log_variance(self, flat: Tensor, layer: LayerLayout) -> Tensor:
        """Return a view of the log-variances of a layer that learns them."""
        start = self._end_of_bias(layer)
        return flat[start : start + layer.area].view(layer.shape)

    def _end_of_bias(self, layer: LayerLayout) -> int:
        """Return the position after the factors and the bias of a layer."""
        return layer.parameters_at + layer.size - layer.learns_variance * layer.area


def factor_gains(layers: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the gains of all factors of all layers in one list, equal to `Coupling.gains`."""
    gains = []
    for factors in layers:
        if len(factors) == 1:  # the product over the other factors is empty: no norm is needed
            gains.append(factors[0].new_full((), len(factors[0])))
            continue
        norms = torch.stack([squared_norms(factor) for factor in factors])  # (D, R)
        for mode in range(len(factors)):
            gains.append(torch.cat([norms[:mode], norms[mode + 1 :]]).prod(0).sum())
    return gains


def unsupported_reason(
    settings: UpdateSettings, state: TrainState, negatives: tuple[type[NegativePhase], ...] = (CD, PCD)
) -> str | None:
    """Return why the flat form cannot represent a training run with one of the negative phases, or None if it can."""
    machine = state.machine
    recipe = settings.recipe
    if settings.reference:
        return "the reference backend was requested"
    if settings.optimizer is not None:
        return "it has a custom optimizer or scheduler"
    if type(recipe.negative) not in negatives:  # a subclass may draw differently
        return f"its chains are {type(recipe.negative).__name__}"
    units = [machine.hidden, *machine.layers.values()]
    if any(unit.sampled_as is None or unit.shape != unit.bias_shape for unit in units):
        return "it has units other than Bernoulli, Gaussian and categorical units with one bias per entry"
    if machine.hidden.sampled_as == "categorical" or machine.hidden.learns_statistic:
        return "its hidden units are neither Bernoulli units nor Gaussian units with fixed variances"
    if any(unit.absent(unit.some_state[None]) is not None for unit in units):
        return "its layers are padded"
    if not all(unit.bias.requires_grad for unit in units):
        return "some of its biases are frozen"
    if any(link.mode_factors() is None for link in machine.links.values()):
        return "not all of its couplings are full matrices or sums of Kronecker products of learned matrices"
    return None


def not_only_matrices_reason(state: TrainState) -> str | None:
    """Return why kernels for matrices and labels cannot compute a training run, or None if they can."""
    centering = state.centering
    if centering is not None and centering.follow_hidden:
        return "the hidden layer is centered"
    layers = [layer for layer in Layout.of(state.machine).layers if not layer.is_label]
    if not all(layer.is_matrix and layer.kind != "categorical" and not layer.learns_variance for layer in layers):
        return "it has layers other than labels and matrices of Bernoulli units or Gaussian units with fixed variances"
    return None
