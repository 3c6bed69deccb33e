"""Conversion of a machine's parameters and momenta to the flat form of :mod:`mvrbm.backends.layout`, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mvrbm.backends.layout import LayerLayout, Layout
from mvrbm.devices import one_thread
from mvrbm.machine import BoltzmannMachine
from mvrbm.updates.state import TrainState


class Packing:
    """Converts the parameters and momenta of a state to flat vectors, and back.

    The layout may have a larger rank than the machine. The extra terms are zero and stay zero, since the gradient of
    each factor is proportional to the other factors.

    Parameters
    ----------
    state : TrainState
        A state with the machine and the offsets of the run.
    layout : Layout
        The layout of the flat parameters.
    normalized : bool
        Whether the recipe normalizes gradients.

    Attributes
    ----------
    affine : tuple of Tensor
        Scale and shift of all visible layers, (states,) each: ``data * scale - shift`` are states of the flat form.
    """

    def __init__(self, state: TrainState, layout: Layout, *, normalized: bool) -> None:
        machine = state.machine
        self.layout = layout
        self._normalized = normalized
        self._centered = state.centering is not None
        self._factor_names = [
            [f"couplings.{layer.name}.{name}" for name, _ in machine.links[layer.name].named_parameters()]
            for layer in layout.layers
        ]
        zeros = machine.like.new_zeros(layout.states)
        self.affine = (zeros.clone(), zeros.clone())
        self._center = zeros  # offsets of the visible layers, in the units of the data
        if state.centering is not None:
            center = state.centering.center
            self._center = torch.cat([center[layer.name].reshape(-1) for layer in layout.layers])
        self._hidden_scale = machine.hidden.inverse_scale
        self._measure(machine)

    def set_inverse_scales(self, inverse_scales: Mapping[str, Tensor]) -> None:
        """Set the scales 1 / s of some layers, and the shifts that follow from all scales."""
        scale, shift = self.affine
        for layer in self.layout.layers:
            if layer.name in inverse_scales:
                layer.states_of(scale).copy_(inverse_scales[layer.name].reshape(-1))
        torch.mul(self._center, scale, out=shift)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of flat parameters (size,) by the names of the machine's parameters, the hidden bias last."""
        layers, hidden_bias = self.layout.split(flat)
        found: dict[str, Tensor] = {}
        for layer, names, (*factors, bias) in zip(self.layout.layers, self._factor_names, layers, strict=True):
            found |= dict(zip(names, factors, strict=True))
            found[_bias_of(layer)] = bias
            if layer.learns_variance:
                found[f"visible.{layer.name}.log_variance"] = self.layout.log_variance(flat, layer)
        found["hidden.bias"] = hidden_bias
        return found

    @property
    def multiplier(self) -> Tensor:
        """Multipliers of the gradient of flat parameters before a step, (size,).

        The flat form stores b / s instead of a bias b. Its gradient is s times the gradient of b, and a step of b / s
        is 1 / s times a step of b. The multiplier 1 / s**2 makes the step of b that plain gradient descent makes.
        Normalized gradients need no multiplier.
        """
        flat = self._hidden_scale.new_ones(self.layout.size)
        if not self._normalized:
            views = self.named(flat)
            for name, scale in self._bias_scales().items():
                views[name].copy_(scale**2)
        return flat

    @torch.no_grad()
    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        """Write a state's parameters and momenta to flat vectors (size,)."""
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
        """Return whether a state has the values that `unpack` would write to it."""
        learned = state.learned
        return all(
            torch.equal(learned[name], value) and torch.equal(state.momentum_of(name, value), momentum)
            for name, value, momentum in self._unpacked(state, params, momenta)
        )

    def _unpacked(self, state: TrainState, params: Tensor, momenta: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield parameters and momenta as a state holds them, by name.

        The value of the hidden bias, which comes last, is computed from the machine's present factors.
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
            else:  # factors, which may be large, are not copied
                yield name, value, momentum

    def _measure(self, machine: BoltzmannMachine) -> None:
        """Take over the scales of a machine's layers."""
        self.set_inverse_scales({layer.name: machine.layers[layer.name].inverse_scale for layer in self.layout.layers})

    def _bias_scales(self) -> dict[str, Tensor]:
        """Return the scales of the biases, by their names."""
        scale, _ = self.affine
        scales = {_bias_of(layer): layer.states_of(scale).view(layer.shape) for layer in self.layout.layers}
        return {**scales, "hidden.bias": self._hidden_scale}

    def _shift(self, layer: LayerLayout) -> Tensor:
        return layer.states_of(self.affine[1]).view(layer.shape)

    @one_thread()
    def _field_of_offsets(self, machine: BoltzmannMachine) -> Tensor:
        """Return the field of the offsets on the hidden layer, for the machine's present factors."""
        fields = [machine.links[layer.name].to_hidden(self._shift(layer)[None])[0] for layer in self.layout.layers]
        return torch.stack(fields).sum(0)


def _bias_of(layer: LayerLayout) -> str:
    """Return the name of a layer's bias."""
    return f"visible.{layer.name}.bias"


def _write(flat: Tensor, parameter: Tensor, scale: Tensor | None) -> None:
    """Write a machine's parameter to its view of the flat parameters, multiplied by a scale if there is one."""
    part = _part(flat, parameter).copy_(parameter)
    if scale is not None:
        part.mul_(scale)


def _part(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return the view of a flat parameter, which may have a larger rank, that corresponds to a machine's parameter."""
    return flat.view(-1)[: parameter.numel()].view(parameter.shape)
