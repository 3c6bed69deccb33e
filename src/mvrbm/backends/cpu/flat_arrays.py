"""Flat vectors for the parameters, momenta and gradient of a training run, with views for each layer."""

from dataclasses import dataclass

from torch import Tensor

from mvrbm.backends.layout import LayerLayout, Layout
from mvrbm.backends.packing import Packing
from mvrbm.updates.state import TrainState


@dataclass(frozen=True)
class FlatLayer:
    """Views of the flat vectors for one visible layer, and conversions between the layer's data and states.

    The states in flat form are ``data * scale - shift``.
    """

    layout: LayerLayout
    factors: list[Tensor]  # each of shape (R, K_d, I_d)
    bias: Tensor  # (*shape)
    log_variances: dict[str, Tensor]  # learned parameters, whose sum is the log-variance of each entry
    bias_momentum: Tensor
    factor_gradients: list[Tensor]
    bias_gradient: Tensor
    log_variance_gradient: Tensor | None  # (*shape), or None if the variance is fixed
    log_variance_gradients: dict[str, Tensor]  # of the parameters
    scale: Tensor  # (*shape)
    shift: Tensor  # (*shape)
    converts: bool  # whether the states differ from the data

    def write_states(self, data: Tensor, into: Tensor) -> None:
        """Convert data of shape (n, *shape) to states and write them to `into`."""
        into.copy_(data)
        if self.converts:
            into.mul_(self.scale).sub_(self.shift)

    def data_of(self, states: Tensor) -> Tensor:
        """Convert states of shape (n, *shape) to data."""
        return (states + self.shift) / self.scale if self.converts else states


class FlatArrays:
    """Flat vectors of parameters, momenta and gradients, with views for each layer.

    Attributes
    ----------
    layout : Layout
        Positions of all parameters.
    packing : Packing
        Converter between a training state and the flat vectors.
    params, momenta, gradient : Tensor (size,)
        The flat vectors.
    layers : list of FlatLayer
        Views for each visible layer.
    hidden_bias, hidden_bias_gradient : Tensor (*hidden shape)
        Views of the hidden bias and its gradient.
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
            of_variances = layout.log_variances(self.gradient, own)
            of_entries = None
            if of_variances:
                of_entries = like.new_zeros(own.shape) if own.shares_variances else next(iter(of_variances.values()))
            self.layers.append(
                FlatLayer(
                    layout=own,
                    factors=list(params[number][:-1]),
                    bias=params[number][-1],
                    log_variances=layout.log_variances(self.params, own),
                    bias_momentum=momenta[number][-1],
                    factor_gradients=list(gradients[number][:-1]),
                    bias_gradient=gradients[number][-1],
                    log_variance_gradient=of_entries,
                    log_variance_gradients=of_variances,
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
        """Return whether a state already contains the values that `store` would write to it."""
        return self.packing.matches(state, self.params, self.momenta)
