"""Hidden-layer centering in the flat form of :mod:`mvrbm.backends.layout`, which already includes visible offsets."""

import torch
from torch import Tensor

from mvrbm.backends.cpu.flat_arrays import FlatArrays
from mvrbm.backends.cpu.mode_products import ModeProducts
from mvrbm.backends.cpu.parallel_products import compute


class FlatCentering:
    """Centering of the gradients for the factors, with a matching correction to the visible biases.

    Attributes
    ----------
    offset : Tensor (1, *hidden shape)
        Offset for the hidden layer. The backend sets this attribute in each update before calling `apply` and `follow`.
    """

    def __init__(self, arrays: FlatArrays) -> None:
        self.offset = torch.zeros_like(arrays.hidden_bias)[None]
        self._layers = arrays.layers
        self._products = [ModeProducts(layer.layout.factors, 1, arrays.params) for layer in arrays.layers]
        # Results of `_negative_fields` from before the step.
        self._before: list[Tensor] = []

    def apply(self) -> None:
        """Center the gradients for the factors by subtracting the contribution of the hidden offset."""
        # This also computes the downward products, which the gradients below combine with the upward products.
        self._before = self._negative_fields()
        unused = torch.empty_like(self.offset).view(-1, 1)
        for layer, products in zip(self._layers, self._products, strict=True):
            compute(products.up(layer.factors, layer.bias_gradient.view(1, -1), unused, add=False))
            compute(products.gradients(layer.factor_gradients, add=True))

    def follow(self) -> None:
        """Adjust the visible biases after a step to cancel the change in the fields that the offset induces."""
        for layer, old, new in zip(self._layers, self._before, self._negative_fields(), strict=True):
            layer.bias.add_(new - old)

    def _negative_fields(self) -> list[Tensor]:
        """Return the negative of the field that the offset induces on each visible layer."""
        hidden = (-self.offset).reshape(-1, 1)
        fields = [torch.empty_like(layer.bias) for layer in self._layers]
        for layer, products, field in zip(self._layers, self._products, fields, strict=True):
            compute(products.down(layer.factors, hidden, field))
        return fields
