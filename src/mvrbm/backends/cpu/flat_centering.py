"""Hidden-layer centering in flat form. Visible offsets are already part of the flat form."""

import torch
from torch import Tensor

from mvrbm.backends.cpu.flat_arrays import FlatArrays
from mvrbm.backends.cpu.mode_products import ModeProducts
from mvrbm.backends.cpu.products import compute


class FlatCentering:
    """Centered gradients for the factors, and the matching correction to the visible biases."""

    def __init__(self, arrays: FlatArrays) -> None:
        self._layers = arrays.layers
        self._products = [ModeProducts(layer.layout.factors, 1, arrays.params) for layer in arrays.layers]

    def apply(self, offset: Tensor) -> list[Tensor]:
        """Center the hidden layer in the gradients for the factors by subtracting the contribution of its offset.

        Returns minus the field that the offset induces on each visible layer. `follow` requires these fields after the
        step.
        """
        # This also computes the downward products, which the gradients below combine with the upward products.
        fields = self._negative_fields(offset)
        unused = torch.empty_like(offset).view(-1, 1)
        for layer, products in zip(self._layers, self._products, strict=True):
            compute(products.up(layer.factors, layer.bias_gradient.view(1, -1), unused, add=False))
            compute(products.gradients(layer.factor_gradients, add=True))
        return fields

    def follow(self, offset: Tensor, before: list[Tensor]) -> None:
        """Correct the visible biases for the change in the offset's fields during the step.

        `before` contains the fields from before the step, as returned by `apply`.
        """
        for layer, old, new in zip(self._layers, before, self._negative_fields(offset), strict=True):
            layer.bias.add_(new - old)

    def _negative_fields(self, offset: Tensor) -> list[Tensor]:
        """Return minus the field that an offset of shape (1, *hidden shape) induces on each visible layer."""
        hidden = (-offset).reshape(-1, 1)
        fields = [torch.empty_like(layer.bias) for layer in self._layers]
        for layer, products, field in zip(self._layers, self._products, fields, strict=True):
            compute(products.down(layer.factors, hidden, field))
        return fields
