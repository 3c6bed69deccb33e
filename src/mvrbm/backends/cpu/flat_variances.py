"""Learned variances in flat form, where the states of a Gaussian layer are in units of its standard deviation."""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from mvrbm.backends.cpu.flat_arrays import FlatArrays
from mvrbm.devices import one_thread


class FlatVariances:
    """Log-variance gradients and unit conversions for layers that learn their variances."""

    def __init__(self, arrays: FlatArrays) -> None:
        self._arrays = arrays
        self._numbers = [m for m, layer in enumerate(arrays.layers) if layer.layout.learns_variance]

    @property
    def separate_sums(self) -> list[Tensor]:
        """Sums written by a backend that are not part of the flat gradient, because entries share variances."""
        layers = [self._arrays.layers[number] for number in self._numbers]
        found = [layer.log_variance_gradient for layer in layers if layer.layout.shares_variances]
        return [sums for sums in found if sums is not None]

    def finish_gradients(self) -> None:
        r"""Compute the gradients for log-variances from the sums that a backend has written in their place.

        A backend writes :math:`\sum w t (f - t)`, summed over all samples. Here, :math:`w` is the weight of a sample in
        the gradient for the bias :math:`b`, :math:`t` is a state, and :math:`f` is a field without the bias. The
        gradient for the log-variance is :math:`-\tfrac12 \sum w \{t f - (t - b)^2\}`. The weights sum to zero.
        """
        for number in self._numbers:
            layer = self._arrays.layers[number]
            assert layer.log_variance_gradient is not None
            each = layer.log_variance_gradient.add_(2 * layer.bias * layer.bias_gradient).mul_(-0.5)
            if layer.layout.shares_variances:
                for gradient in layer.log_variance_gradients.values():
                    gradient.copy_(each.sum_to_size(gradient.shape))

    @one_thread()
    def powers(self, batch: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        """Return this process's contribution to the mean squared state of each layer with learned variances."""
        found = {}
        for number in self._numbers:
            layer = self._arrays.layers[number]
            states = batch[layer.layout.name] * layer.scale - layer.shift
            found[layer.layout.name] = share * states.square().sum() / max(1, states.numel())
        return found

    @one_thread()
    def rescale(self, chains: list[Tensor] | None) -> None:
        """Convert biases, bias momenta and persistent chains to units of the new standard deviations."""
        packing = self._arrays.packing
        for number in self._numbers:
            layer = self._arrays.layers[number]
            log_variance = functools.reduce(torch.add, layer.log_variances.values())
            inverse_scale = torch.exp(-0.5 * log_variance)
            ratio = inverse_scale / layer.scale
            packing.set_inverse_scales({layer.layout.name: layer.scale * ratio})
            layer.bias.mul_(ratio)
            layer.bias_momentum.mul_(ratio)
            if chains is not None:
                chains[number].mul_(ratio)
