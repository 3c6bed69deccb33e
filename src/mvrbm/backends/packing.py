"""Conversion of parameters and momenta to and from the flat form defined in :mod:`mvrbm.backends.layout`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mvrbm.backends.layout import LayerLayout, Layout
from mvrbm.devices import one_thread
from mvrbm.machine import BoltzmannMachine
from mvrbm.updates.state import TrainState


class Packing:
    """Converter between flat vectors and the parameters and momenta of a training state.

    The layout may have a higher rank than the machine. The extra terms are zero and remain zero, because the gradient
    with respect to each factor is proportional to the other factors.

    Parameters
    ----------
    state : TrainState
        A training state with the machine and the centering offsets.
    layout : Layout
        The layout of the flat parameters.
    normalized : bool
        Whether the recipe normalizes gradients.

    Attributes
    ----------
    affine : tuple of Tensor
        Scale and shift for all visible layers, each of shape (states,). The states in flat form are
        ``data * scale - shift``.
    """

    def __init__(self, state: TrainState, layout: Layout, *, normalized: bool) -> None:
        machine = state.machine
        self.layout = layout
        self._normalized = normalized
        self._relative_rates = state.relative_rates
        self._centered = state.centering is not None
        self._factor_names = [
            [f"couplings.{layer.name}.{name}" for name, _ in machine.links[layer.name].named_parameters()]
            for layer in layout.layers
        ]
        zeros = machine.like.new_zeros(layout.states)
        self.affine = (zeros.clone(), zeros.clone())
        self._center = zeros  # visible centering offsets, in data units
        if state.centering is not None:
            center = state.centering.center
            self._center = torch.cat([center[layer.name].reshape(-1) for layer in layout.layers])
        self._hidden_scale = machine.hidden.inverse_scale
        self._measure(machine)

    def set_inverse_scales(self, inverse_scales: Mapping[str, Tensor]) -> None:
        """Set the scales 1 / s for the given layers and recompute the shifts."""
        scale, shift = self.affine
        for layer in self.layout.layers:
            if layer.name in inverse_scales:
                layer.states_of(scale).copy_(inverse_scales[layer.name].reshape(-1))
        torch.mul(self._center, scale, out=shift)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return a dictionary of views of a flat vector of shape (size,), keyed by parameter name.

        The hidden bias comes last.
        """
        layers, hidden_bias = self.layout.split(flat)
        found: dict[str, Tensor] = {}
        for layer, names, (*factors, bias) in zip(self.layout.layers, self._factor_names, layers, strict=True):
            found |= dict(zip(names, factors, strict=True))
            found[_bias_of(layer)] = bias
            for name, log_variance in self.layout.log_variances(flat, layer).items():
                found[f"visible.{layer.name}.{name}"] = log_variance
        found["hidden.bias"] = hidden_bias
        return found

    @property
    def multiplier(self) -> Tensor:
        """Tensor of shape (size,) by which the flat gradient is multiplied before a step.

        The flat form stores b / s instead of a bias b. The gradient for b / s is s times the gradient for b, and a step
        in b / s is 1 / s times a step in b. With the multiplier 1 / s**2, the resulting step in b is the same as in
        plain gradient descent. Normalized gradients require no multiplier, except that the gradient for a log-variance
        is divided by the number of entries that share it (see :meth:`mvrbm.Unit.gains`). The multiplier also contains
        the relative learning rates of the layers.
        """
        flat = self._hidden_scale.new_ones(self.layout.size)
        if self._normalized:
            for layer in self.layout.layers:
                for log_variance in self.layout.log_variances(flat, layer).values():
                    log_variance.fill_(log_variance.numel() / layer.area)
        else:
            views = self.named(flat)
            for name, scale in self._bias_scales().items():
                views[name].copy_(scale**2)
        for layer, (*factors, _) in zip(self.layout.layers, self.layout.split(flat)[0], strict=True):
            for factor in factors:
                factor.mul_(self._relative_rates.get(layer.name, 1.0))
        return flat

    @torch.no_grad()
    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        """Write a state's parameters and momenta to flat vectors of shape (size,)."""
        self._measure(state.machine)
        learned = state.learned
        scales = self._bias_scales()
        values = self.named(params.zero_())
        for name, momentum in self.named(momenta.zero_()).items():
            _write(values[name], learned[name], scales.get(name))
            if name in state.momenta:
                _write(momentum, state.momenta[name], scales.get(name))
        for layer in self.layout.layers:
            if layer.gaussian:
                values[_bias_of(layer)].sub_(self._shift(layer))
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
    def matches(self, state: TrainState, params: Tensor, momenta: Tensor) -> bool:
        """Return whether a state already contains the values that `unpack` would write to it."""
        learned = state.learned
        return all(
            torch.equal(learned[name], value) and _equal_momentum(state.momenta.get(name), momentum)
            for name, value, momentum in self._unpacked(state, params, momenta)
        )

    def _unpacked(self, state: TrainState, params: Tensor, momenta: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name, value and momentum of each parameter, in the format of a state.

        The hidden bias comes last. It is computed from the machine's current factors.
        """
        learned = state.learned
        values = self.named(params)
        scales = self._bias_scales()
        shifts = {_bias_of(layer): self._shift(layer) for layer in self.layout.layers if layer.gaussian}
        for name, momentum in self.named(momenta).items():
            value = values[name]
            if name in shifts:
                value = value + shifts[name]
            elif name == "hidden.bias" and self._centered:
                value = value - self._field_of_offsets(state.machine)
            value = _part(value, learned[name])
            momentum = _part(momentum, learned[name])
            if name in scales:
                yield name, value / scales[name], momentum / scales[name]
            else:  # avoid copying the factors, which may be large
                yield name, value, momentum

    def _measure(self, machine: BoltzmannMachine) -> None:
        """Read the scales from a machine's layers."""
        self.set_inverse_scales({layer.name: machine.layers[layer.name].inverse_scale for layer in self.layout.layers})

    def _bias_scales(self) -> dict[str, Tensor]:
        """Return the scale for each bias, keyed by parameter name."""
        scale, _ = self.affine
        scales = {_bias_of(layer): layer.states_of(scale).view(layer.shape) for layer in self.layout.layers}
        return {**scales, "hidden.bias": self._hidden_scale}

    def _shift(self, layer: LayerLayout) -> Tensor:
        return layer.states_of(self.affine[1]).view(layer.shape)

    @one_thread()
    def _field_of_offsets(self, machine: BoltzmannMachine) -> Tensor:
        """Return the field that the offsets induce on the hidden layer, using the machine's current factors."""
        fields = [machine.links[layer.name].to_hidden(self._shift(layer)[None])[0] for layer in self.layout.layers]
        return torch.stack(fields).sum(0)


def _equal_momentum(stored: Tensor | None, momentum: Tensor) -> bool:
    """Return whether a momentum in a state equals a given value. A momentum that does not exist yet counts as zero."""
    return not bool(momentum.any()) if stored is None else torch.equal(stored, momentum)


def _bias_of(layer: LayerLayout) -> str:
    """Return the name of a layer's bias."""
    return f"visible.{layer.name}.bias"


def _write(flat: Tensor, parameter: Tensor, scale: Tensor | None) -> None:
    """Multiply a machine's parameter by `scale`, if given, and write it to its view of the flat vector."""
    part = _part(flat, parameter).copy_(parameter)
    if scale is not None:
        part.mul_(scale)


def _part(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a flat parameter that stores a machine's parameter, excluding padding to a higher rank."""
    return flat.view(-1)[: parameter.numel()].view(parameter.shape)
