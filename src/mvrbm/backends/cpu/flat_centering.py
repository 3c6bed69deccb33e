"""A centered hidden layer in the flat form. The offsets of visible layers are part of the form itself."""

import torch
from torch import Tensor

from mvrbm.backends.cpu.flat_arrays import FlatArrays
from mvrbm.backends.cpu.mode_products import ModeProducts
from mvrbm.backends.cpu.products import compute


class FlatCentering:
    """Computes gradients of factors from deviations of the hidden layer, and compensates in the visible biases."""

    def __init__(self, arrays: FlatArrays) -> None:
        self._layers = arrays.layers
        self._products = [ModeProducts(layer.layout.factors, 1, arrays.params) for layer in arrays.layers]

    def apply(self, offset: Tensor) -> list[Tensor]:
        """Center the hidden layer in the gradients of the factors: subtract the products with its offset.

        Returns the fields of the negative offset on every visible layer, which `follow` needs after the step.
        """
        # This also computes the products downwards, which the gradients below pair with those upwards.
        fields = self._negative_fields(offset)
        unused = torch.empty_like(offset).view(-1, 1)
        for layer, products in zip(self._layers, self._products, strict=True):
            compute(products.up(layer.factors, layer.bias_gradient.view(1, -1), unused, add=False))
            compute(products.gradients(layer.factor_gradients, add=True))
        return fields

    def follow(self, offset: Tensor, before: list[Tensor]) -> None:
        """Change the biases by as much as the step has changed the fields of the offset.

        `before` are the fields before the step, which `apply` returned.
        """
        for layer, old, new in zip(self._layers, before, self._negative_fields(offset), strict=True):
            layer.bias.add_(new - old)

    def _negative_fields(self, offset: Tensor) -> list[Tensor]:
        """Return minus the field of the offset (1, *hidden shape) on each visible layer."""
        hidden = (-offset).reshape(-1, 1)
        fields = [torch.empty_like(layer.bias) for layer in self._layers]
        for layer, products, field in zip(self._layers, self._products, fields, strict=True):
            compute(products.down(layer.factors, hidden, field))
        return fields
