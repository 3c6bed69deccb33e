"""Parameters, momenta and gradient of a training run as flat vectors, and views of each layer's parts."""

from dataclasses import dataclass

from torch import Tensor

from mvrbm.backends.layout import LayerLayout, Layout
from mvrbm.backends.packing import Packing
from mvrbm.updates.state import TrainState


@dataclass(frozen=True)
class FlatLayer:
    """Views of one visible layer's parts of the flat vectors, and the conversion of its data to states.

    The states of the flat form are ``data * scale - shift``.
    """

    layout: LayerLayout
    factors: list[Tensor]  # each (R, K_d, I_d)
    bias: Tensor  # (*shape)
    log_variance: Tensor | None  # (*shape), None for layers whose variance is fixed
    bias_momentum: Tensor
    factor_gradients: list[Tensor]
    bias_gradient: Tensor
    log_variance_gradient: Tensor | None
    scale: Tensor  # (*shape)
    shift: Tensor  # (*shape)
    converts: bool  # whether states differ from the data

    def write_states(self, data: Tensor, into: Tensor) -> None:
        """Convert data (n, *shape) to states."""
        into.copy_(data)
        if self.converts:
            into.mul_(self.scale).sub_(self.shift)

    def data_of(self, states: Tensor) -> Tensor:
        """Convert states (n, *shape) to data."""
        return (states + self.shift) / self.scale if self.converts else states


class FlatArrays:
    """Flat parameters, momenta and gradient, (size,) each, and their views.

    Attributes
    ----------
    layout : Layout
        Positions of all parameters.
    packing : Packing
        Conversion from and to a state.
    params, momenta, gradient : Tensor (size,)
        The flat vectors.
    layers : list of FlatLayer
        Views of each visible layer's parts.
    hidden_bias, hidden_bias_gradient : Tensor (*hidden shape)
        Views of the hidden layer's parts.
    """

    def __init__(self, state: TrainState, *, normalized: bool) -> None:
        like = state.machine.like
        layout = Layout.of(state.machine)
        self.layout = layout
        self.packing = Packing(state, layout, normalized=normalized)
        self.params = like.new_zeros(layout.size)
        self.momenta = like.new_zeros(layout.size)
        self.gradient = like.new_zeros(layout.size)
        params, self.hidden_bias = layout.split(self.params)
        momenta, _ = layout.split(self.momenta)
        gradients, self.hidden_bias_gradient = layout.split(self.gradient)
        self.layers = list[FlatLayer]()
        for number, own in enumerate(layout.layers):
            scale, shift = (own.states_of(part).view(own.shape) for part in self.packing.affine)
            learns = own.learns_variance
            self.layers.append(
                FlatLayer(
                    layout=own,
                    factors=list(params[number][:-1]),
                    bias=params[number][-1],
                    log_variance=layout.log_variance(self.params, own) if learns else None,
                    bias_momentum=momenta[number][-1],
                    factor_gradients=list(gradients[number][:-1]),
                    bias_gradient=gradients[number][-1],
                    log_variance_gradient=layout.log_variance(self.gradient, own) if learns else None,
                    scale=scale,
                    shift=shift,
                    converts=own.gaussian or bool(shift.any()),
                )
            )

    def load(self, state: TrainState) -> None:
        """Read parameters and momenta from a state."""
        self.packing.pack(state, self.params, self.momenta)

    def store(self, state: TrainState) -> None:
        """Write parameters and momenta to a state."""
        self.packing.unpack(state, self.params, self.momenta)

    def match(self, state: TrainState) -> bool:
        """Return whether a state has the values that `store` would write to it."""
        return self.packing.matches(state, self.params, self.momenta)
