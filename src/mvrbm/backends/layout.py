r"""Flat form: the parameter layout and variables that the C code and GPU kernels use for Kronecker and dense couplings.

The parameters of a machine are stored in one vector, and so are the momenta and the gradient. In addition, the states
and biases are transformed so that all machines have the same simple form:

1. **Statistics as states.** The coupling acts on a layer only through its statistic :math:`T(x)`. For Bernoulli and
   categorical units, :math:`T(x) = x`. For Gaussian units with standard deviation :math:`s`, :math:`T(x) = x / s`.
   Given a field :math:`f`, this statistic has the distribution :math:`N(b / s + f, 1)`. With :math:`T(x)` as the state
   and :math:`b / s` as the bias, all Gaussian units have variance 1. The same applies to the hidden layer.
2. **Visible states relative to offsets.** The state of a visible layer is :math:`\tau = T(x) - \mu`, where :math:`\mu`
   is the statistic of its centering offset, or zero if the layer is not centered. The interaction is
   :math:`\langle T_h, W T\rangle = \langle T_h, W \tau\rangle + \langle T_h, W \mu\rangle`. The last term becomes part
   of the hidden bias, which is :math:`c + \sum_m W_m \mu_m` in flat form. For a Gaussian layer, :math:`\tau` has the
   distribution :math:`N(b / s - \mu + f, 1)`, so the stored bias is :math:`b / s - \mu`. The biases of Bernoulli and
   categorical layers do not change, because shifting the states only adds a constant to the energy.
3. **Gradient.** In these variables, the ordinary gradient for `W` is the centered gradient. The hidden bias is a
   separate variable that already includes the offsets, so it does not have to be corrected when the factors change.
   Only an offset for the hidden layer still requires a correction to the gradient and to the visible biases
   (:mod:`mvrbm.backends.cpu.flat_centering`).

The random numbers are the same in both forms. :mod:`mvrbm.backends.packing` converts parameters and momenta to the flat
form and back, and explains how gradients for biases are scaled. If variances are learned, :math:`s` changes in every
update, and :mod:`mvrbm.backends.cpu.flat_variances` converts biases and chains to the new units. The `full_matrix`
kernels use a different layout without the shift by offsets (:mod:`mvrbm.backends.cuda.full_layout`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mvrbm.backends.base import UpdateSettings
from mvrbm.couplings.base import product_gains, squared_norms
from mvrbm.machine import BoltzmannMachine
from mvrbm.updates.negative import CD, PCD, NegativePhase
from mvrbm.updates.state import TrainState


@dataclass(frozen=True)
class LayerLayout:
    """Sizes of one visible layer and positions of its parameters and states."""

    name: str
    shape: tuple[int, ...]
    kind: str  # kind of units (see Unit.sampled_as)
    factors: tuple[tuple[int, int, int], ...]  # shapes (R, K_d, I_d) (see Coupling.mode_factors)
    variances: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of the parameters (see Unit.log_variances)
    parameters_at: int  # index of the first parameter in the flat vector
    states_at: int  # index of the first entry in the concatenated states of all layers

    @property
    def area(self) -> int:
        """Number of entries in a sample."""
        return math.prod(self.shape)

    @property
    def learns_variance(self) -> bool:
        """Whether the variances are learned."""
        return bool(self.variances)

    @property
    def shares_variances(self) -> bool:
        """Whether entries share learned variances."""
        return any(shape != self.shape for _, shape in self.variances)

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
        """Whether the layer is a single categorical variable with a dense coupling."""
        return self.kind == "categorical" and len(self.shape) == 1 and len(self.factors) == 1 and self.rank == 1

    @property
    def rows(self) -> int:
        """Number of rows of a matrix layer."""
        return self.factors[0][2]

    @property
    def columns(self) -> int:
        """Number of columns of a matrix layer, or number of entries in a layer with a dense coupling."""
        return self.factors[-1][2]

    @property
    def rank(self) -> int:
        """Number of Kronecker products in the coupling."""
        return self.factors[0][0]

    @property
    def numbers_shape(self) -> tuple[int, ...]:
        """Shape of the random numbers required to draw one sample."""
        return self.shape[:-1] if self.kind == "categorical" else self.shape

    @property
    def size(self) -> int:
        """Number of parameters in the layer."""
        return sum(map(math.prod, self.factors)) + self.area + self.n_variances

    @property
    def n_variances(self) -> int:
        """Number of learned log-variances."""
        return sum(math.prod(shape) for _, shape in self.variances)

    def states_of(self, all_states: Tensor) -> Tensor:
        """Select this layer's states from the states of all layers: (..., states) -> (..., area)."""
        return all_states[..., self.states_at : self.states_at + self.area]


@dataclass(frozen=True)
class Layout:
    """Sizes and positions of all parameters and states of a machine.

    The flat vector contains the factors and the bias of each layer, followed by its log-variances if they are learned.
    The hidden bias comes last.
    """

    layers: tuple[LayerLayout, ...]
    hidden_shape: tuple[int, ...]
    hidden_gaussian: bool

    @classmethod
    def of(cls, machine: BoltzmannMachine, rank: int | None = None) -> Layout:
        """Return the layout for a machine. Couplings with several factors are padded to `rank`, if given."""
        layers = list[LayerLayout]()
        parameters = 0
        states = 0
        for name, unit in machine.layers.items():
            own = machine.links[name].mode_factors() or []
            padded = rank if len(own) > 1 else None
            factors = tuple((padded or len(factor), factor.shape[1], factor.shape[2]) for factor in own)
            kind = str(unit.sampled_as)
            variances = tuple((key, tuple(part.shape)) for key, part in unit.log_variances.items())
            layer = LayerLayout(name, unit.shape, kind, factors, variances, parameters, states)
            layers.append(layer)
            parameters += layer.size
            states += layer.area
        return cls(tuple(layers), machine.hidden.shape, machine.hidden.sampled_as == "gaussian")

    @property
    def hidden_rows(self) -> int:
        """Number of rows of the hidden layer if it is a matrix."""
        return self.hidden_shape[0]

    @property
    def hidden_columns(self) -> int:
        """Number of columns of the hidden layer if it is a matrix."""
        return self.hidden_shape[-1]

    @property
    def hidden_area(self) -> int:
        """Number of entries in the hidden layer."""
        return math.prod(self.hidden_shape)

    @property
    def states(self) -> int:
        """Total number of entries in all visible layers."""
        return sum(layer.area for layer in self.layers)

    @property
    def size(self) -> int:
        """Length of the flat parameter vector."""
        return sum(layer.size for layer in self.layers) + self.hidden_area

    def split(self, flat: Tensor) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        """Split a flat vector of shape (size,) into views of each layer's factors and bias and of the hidden bias."""
        layers = []
        for layer in self.layers:
            shapes: list[tuple[int, ...]] = [*layer.factors, layer.shape]
            sizes = [*map(math.prod, shapes), len(flat) - self._end_of_bias(layer)]
            parts = flat[layer.parameters_at :].split_with_sizes(sizes)
            layers.append(tuple(part.view(shape) for part, shape in zip(parts[:-1], shapes, strict=True)))
        return layers, flat[-self.hidden_area :].view(self.hidden_shape)

    def log_variances(self, flat: Tensor, layer: LayerLayout) -> dict[str, Tensor]:
        """Return views of a layer's learned log-variances, keyed by parameter name."""
        sizes = [math.prod(shape) for _, shape in layer.variances]
        start = self._end_of_bias(layer)
        parts = flat[start : start + sum(sizes)].split_with_sizes(sizes)
        return {name: part.view(shape) for (name, shape), part in zip(layer.variances, parts, strict=True)}

    def _end_of_bias(self, layer: LayerLayout) -> int:
        """Return the index just after a layer's factors and bias."""
        return layer.parameters_at + layer.size - layer.n_variances


def factor_gains(layers: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the gains of all factors in all layers as one list, with the same values as `Coupling.gains`."""
    gains = list[Tensor]()
    for factors in layers:
        if len(factors) == 1:  # no norms needed: the product over the other factors is empty
            gains.append(factors[0].new_full((), len(factors[0])))
        else:
            gains += product_gains([squared_norms(factor) for factor in factors])
    return gains


def not_flat_reason(
    settings: UpdateSettings,
    state: TrainState,
    negatives: tuple[type[NegativePhase], ...] = (CD, PCD),
    *,
    shared_variances: bool = False,
) -> str | None:
    """Return the reason why a training run cannot be computed in flat form, or None if it can.

    `negatives` lists the supported negative phases. `shared_variances` indicates whether the backend supports entries
    that share learned variances.
    """
    machine = state.machine
    recipe = settings.recipe
    if settings.by_autograd:
        return "gradients by autograd were requested"
    if settings.optimizer is not None:
        return "it has a custom optimizer or scheduler"
    if type(recipe.negative) not in negatives:  # a subclass may sample differently
        return f"its chains are {type(recipe.negative).__name__}"
    units = [machine.hidden, *machine.layers.values()]
    if any(unit.sampled_as is None or unit.shape != unit.bias_shape for unit in units):
        return "it has units other than Bernoulli, Gaussian and categorical units with one bias per entry"
    if not shared_variances and any(layer.shares_variances for layer in Layout.of(machine).layers):
        return "it learns variances that several entries share"
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
    """Return the reason why the kernels for matrices and labels do not support a training run, or None if they do."""
    centering = state.centering
    if centering is not None and centering.follow_hidden:
        return "the hidden layer is centered"
    layers = [layer for layer in Layout.of(state.machine).layers if not layer.is_label]
    if not all(layer.is_matrix and layer.kind != "categorical" and not layer.learns_variance for layer in layers):
        return "it has layers other than labels and matrices of Bernoulli units or Gaussian units with fixed variances"
    return None
