"""The update step for flat parameters, computed in C if the extension was built and in PyTorch otherwise."""

import math
from collections.abc import Mapping
from enum import IntEnum
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from mvrbm.backends.cpu.flat_arrays import FlatArrays
from mvrbm.backends.layout import factor_gains
from mvrbm.devices import one_thread
from mvrbm.updates.learning_rate import learning_rates
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.step import Move, normalize, safe_gain, step
from mvrbm.validation import all_finite


class StepResult(IntEnum):
    """Result of a step, which indicates whether all values are finite. The C code returns the same codes."""

    FINITE = 0
    GRADIENT_NOT_FINITE = 1
    PARAMETERS_NOT_FINITE = 2


class _Segment(NamedTuple):
    """A contiguous range of flat parameters with the same learning rate and weight decay."""

    size: int
    are_factors: bool


class FlatStep:
    """The update step for flat parameters.

    Parameters
    ----------
    arrays : FlatArrays
        Parameters, momenta and gradient.
    recipe : Recipe
        The training recipe.
    code : module, optional
        The compiled C extension. If None, PyTorch is used.
    """

    def __init__(self, arrays: FlatArrays, recipe: Recipe, code: ModuleType | None) -> None:
        self._arrays = arrays
        self._recipe = recipe
        self._code = code
        layout = arrays.layout
        self._factors = [factor for layer in arrays.layers for factor in layer.factors]
        self._factor_gradients = [gradient for layer in arrays.layers for gradient in layer.factor_gradients]
        momenta, _ = layout.split(arrays.momenta)
        self._factor_momenta = [momentum for *factors, _ in momenta for momentum in factors]
        self._segments = list[_Segment]()
        for layer in layout.layers:
            of_factors = sum(map(math.prod, layer.factors))
            self._segments += [_Segment(of_factors, True), _Segment(layer.size - of_factors, False)]
        self._segments.append(_Segment(layout.hidden_area, False))
        self._multiplier = arrays.packing.multiplier
        learns_variances = any(layer.learns_variance for layer in layout.layers)
        self._multiplies = learns_variances or not bool((self._multiplier == 1).all())

    def update_scales(self) -> None:
        """Update the gradient multipliers after the layer scales have changed."""
        self._multiplier.copy_(self._arrays.packing.multiplier)

    def make(self, update: int, powers: Mapping[str, Tensor]) -> StepResult:
        """Perform a step and overwrite the gradient with the previous parameters.

        If the gradient is not finite, the parameters and momenta remain unchanged.

        Parameters
        ----------
        update : int
            Zero-based index of the update.
        powers : mapping of str to Tensor
            Mean squared state of each layer with learned variances, keyed by layer name.
        """
        arrays = self._arrays
        recipe = self._recipe
        if recipe.normalized:
            normalize(zip(self._factor_gradients, self._gains(powers), strict=True))
        if self._multiplies:
            arrays.gradient.mul_(self._multiplier)
        rate, bias_rate = learning_rates(recipe, update)
        if self._code is not None:
            segments = tuple(
                (size, rate, recipe.weight_decay) if are_factors else (size, bias_rate, 0.0)
                for size, are_factors in self._segments
            )
            addresses = [flat.data_ptr() for flat in (arrays.params, arrays.momenta, arrays.gradient)]
            return StepResult(self._code.step(*addresses, segments, recipe.momentum, torch.get_num_threads()))
        if not all_finite([arrays.gradient]):
            return StepResult.GRADIENT_NOT_FINITE
        before = arrays.params.clone()
        # Update all parameters with the learning rate for biases, then add the difference for the factors.
        moves: list[Move] = [(arrays.params, arrays.momenta, bias_rate)]
        if bias_rate != rate:
            moves += [(*pair, rate - bias_rate) for pair in zip(self._factors, self._factor_momenta, strict=True)]
        factors = zip(self._factors, self._factor_gradients, strict=True)
        step([arrays.gradient], [arrays.momenta], factors, moves, recipe)
        arrays.gradient.copy_(before)
        return StepResult.FINITE if all_finite([arrays.params]) else StepResult.PARAMETERS_NOT_FINITE

    @one_thread()
    def _gains(self, powers: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the gain for each factor (see :func:`mvrbm.updates.step.gains_of`)."""
        gains = [safe_gain(gain) for gain in factor_gains([layer.factors for layer in self._arrays.layers])]
        if powers:
            names = [layer.layout.name for layer in self._arrays.layers for _ in layer.factors]
            gains = [
                gain * powers[name].clamp(min=1) if name in powers else gain
                for gain, name in zip(gains, names, strict=True)
            ]
        return gains
