"""Layout of parameters and states for `full_kernels`, and conversion to and from a training state.

The statistics of all visible layers are stored as columns of one array. Each layer starts at a multiple of the tile
size. The flat vector contains the parameters of all couplings, the visible bias for each column, the hidden bias, and
the log-variance for each column if any layer learns it. Unlike in :mod:`mvrbm.backends.layout`, biases are padded like
the columns and are not shifted by the centering offsets. A packing always uses the layer scales from the time when it
was created.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.backends.cuda.kernel_backend import power_of_two
from mvrbm.couplings import Coupling
from mvrbm.machine import BoltzmannMachine
from mvrbm.random.philox import pitch_of
from mvrbm.updates.state import TrainState, is_factor

#: Layer widths are padded to a multiple of this value, which is divisible by all tile sizes.
TILE = 64


@dataclass(frozen=True)
class FullLayer:
    """Columns of one visible layer, and positions of its coupling's parameters."""

    name: str
    kind: str
    shape: tuple[int, ...]
    #: First column, and number of columns including padding.
    first: int
    width: int
    #: Stride between rows of a sample. Entry (i, j) is in column `first + i * pitch + j`. If there is one more column
    #: than `pitch`, its entries come after all others.
    pitch: int
    #: Number of Kronecker products, or 0 for a dense coupling.
    rank: int
    #: Index of the coupling's first parameter.
    parameters_at: int
    #: Position of the full matrix's gradient in scratch memory, for a coupling with factors.
    scratch_at: int
    #: Index of the layer's first factor.
    factor: int
    learns_variance: bool

    @property
    def rows(self) -> int:
        """Number of rows in a sample (all axes except the last)."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Number of columns in a sample (the last axis)."""
        return self.shape[-1]

    @property
    def site_columns(self) -> int:
        """Length of the last site axis of a categorical layer, or 1 for a single categorical variable."""
        return self.shape[-2] if len(self.shape) > 1 else 1

    def places(self) -> Tensor:
        """Return the column indices of all entries as a tensor of shape (rows * columns,)."""
        return self.first + _places(self.rows, self.columns, self.pitch)


@dataclass(frozen=True)
class FullLayout:
    """Positions of all parameters in the flat array, which ends with scratch memory for full-matrix gradients."""

    layers: tuple[FullLayer, ...]
    hidden_shape: tuple[int, ...]
    #: Name and position of each coupling parameter.
    parameters: tuple[tuple[str, int], ...]
    #: Number of coupling parameters.
    couplings_size: int
    #: Number of entries in the scratch memory.
    scratch: int

    @classmethod
    def of(cls, machine: BoltzmannMachine, ranks: Mapping[str, int]) -> FullLayout:
        """Return the layout for a machine.

        `ranks` maps each layer name to the rank to which the layer's coupling is padded. Rank 0 denotes a dense
        coupling.
        """
        n_hidden = math.prod(machine.hidden.shape)
        layers: list[FullLayer] = []
        parameters: list[tuple[str, int]] = []
        column = factor = size = scratch = 0
        for name, unit in machine.layers.items():
            rank = ranks[name]
            area = math.prod(unit.shape)
            pitch = power_of_two(unit.shape[-1]) if unit.sampled_as == "categorical" else pitch_of(unit.shape[-1])
            is_last = len(layers) + 1 == len(machine.layers)
            width = padded(max(area, math.prod(unit.shape[:-1]) * pitch) + is_last)  # the last column is all ones
            layers.append(
                FullLayer(
                    name, str(unit.sampled_as), unit.shape, column, width, pitch, rank, size, scratch, factor,
                    unit.learns_statistic,
                )
            )  # fmt: skip
            for key, parameter in machine.links[name].named_parameters():
                parameters.append((f"couplings.{name}.{key}", size))
                size += parameter.numel() // len(parameter) * rank if rank else parameter.numel()
            column += width
            scratch += n_hidden * area if rank else 0
            factor += 2 if rank else 1
        return cls(tuple(layers), machine.hidden.shape, tuple(parameters), size, scratch)

    @property
    def n_hidden(self) -> int:
        """Number of hidden units."""
        return math.prod(self.hidden_shape)

    @property
    def hidden_rows(self) -> int:
        """Number of rows in the hidden layer (all axes except the last)."""
        return math.prod(self.hidden_shape[:-1])

    @property
    def hidden_columns(self) -> int:
        """Number of columns in the hidden layer (the last axis)."""
        return self.hidden_shape[-1]

    @property
    def hidden_pitch(self) -> int:
        """Stride between rows of the hidden layer. See :attr:`FullLayer.pitch`."""
        return pitch_of(self.hidden_columns)

    @property
    def hidden(self) -> int:
        """Number of columns for the hidden layer and the column of ones, rounded up to a multiple of the tile size."""
        return padded(self.n_hidden + 1)

    @property
    def visible(self) -> int:
        """Number of columns for all visible layers, including padding."""
        return sum(layer.width for layer in self.layers)

    @property
    def n_factors(self) -> int:
        """Number of factors. A dense coupling counts as one factor."""
        return sum(2 if layer.rank else 1 for layer in self.layers)

    @property
    def varies(self) -> bool:
        """Whether any layer learns its variances."""
        return any(layer.learns_variance for layer in self.layers)

    @property
    def visible_bias(self) -> int:
        """Position of the visible bias."""
        return self.couplings_size

    @property
    def hidden_bias(self) -> int:
        """Position of the hidden bias."""
        return self.visible_bias + self.visible

    @property
    def variances(self) -> int:
        """Position of the log-variances, which follow the biases."""
        return self.hidden_bias + self.hidden

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.variances + (self.visible if self.varies else 0)

    def full_at(self, layer: FullLayer) -> int:
        """Return the position of a dense coupling's matrix, or of a factored coupling's full-matrix gradient."""
        return self.size + layer.scratch_at if layer.rank else layer.parameters_at

    def hidden_places(self) -> Tensor:
        """Return the column indices of all hidden units as a tensor of shape (n_hidden,)."""
        return _places(self.hidden_rows, self.hidden_columns, self.hidden_pitch)


def _places(rows: int, columns: int, pitch: int) -> Tensor:
    """Return the places of all entries of a layer as a tensor of shape (rows * columns,)."""
    row = torch.arange(rows)[:, None]
    column = torch.arange(columns)
    return torch.where(column < pitch, row * pitch + column, rows * pitch + row).flatten()


def padded(size: int, tile: int = TILE) -> int:
    """Round a size up to a multiple of the tile size."""
    return -(-size // tile) * tile


def factor_rank(link: Coupling) -> int:
    """Return the number of terms if a coupling is a sum of two-factor Kronecker products, and 0 otherwise."""
    factors = link.matrix_factors()
    return 0 if factors is None else len(factors[0])


class FullPacking:
    """Converter between the flat form and the parameters and momenta of a training state.

    The layout may have a higher rank than the machine. The extra terms are zero and remain zero.
    """

    def __init__(self, state: TrainState, layout: FullLayout) -> None:
        machine = state.machine
        device = machine.like.device
        positions = dict(layout.parameters)
        self._places: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}
        for name, parameter in state.learned.items():
            if is_factor(name):
                first = positions[name]
                self._places[name] = torch.arange(first, first + parameter.numel(), device=device)
        for layer in layout.layers:
            places = layer.places().to(device)
            self._places[f"visible.{layer.name}.bias"] = layout.visible_bias + places
            self._scales[f"visible.{layer.name}.bias"] = machine.layers[layer.name].inverse_scale.flatten()
            if layer.learns_variance:
                self._places[f"visible.{layer.name}.log_variance"] = layout.variances + places
        self._places["hidden.bias"] = layout.hidden_bias + layout.hidden_places().to(device)
        self._scales["hidden.bias"] = machine.hidden.inverse_scale.flatten()
        self._relative_rates = state.relative_rates
        self.columns = {layer.name: layer.places().to(device) for layer in layout.layers}

    def scale(self, layer: str) -> Tensor:
        """Return the inverse scales 1 / s of all entries in a visible layer as a flat tensor."""
        return self._scales[f"visible.{layer}.bias"]

    def multiplier(self, like: Tensor, normalized: bool) -> Tensor:
        """Return the factors by which flat gradients are multiplied before a step.

        See :mod:`mvrbm.backends.packing` for the derivation.
        """
        flat = torch.ones_like(like)
        for name, scale in self._scales.items():
            flat[self._places[name]] = torch.ones_like(scale) if normalized else scale**2
        for layer, rate in self._relative_rates.items():
            for name, places in self._places.items():
                if name.startswith(f"couplings.{layer}."):
                    flat[places] *= rate
        return flat

    @torch.no_grad()
    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        """Write a state's parameters and momenta into flat arrays."""
        params.zero_()
        momenta.zero_()
        for name, parameter in state.learned.items():
            scale = self._scales.get(name, 1.0)
            params[self._places[name]] = parameter.flatten() * scale
            if name in state.momenta:
                momenta[self._places[name]] = state.momenta[name].flatten() * scale

    @torch.no_grad()
    def unpack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        """Write flat parameters and momenta back to a state."""
        for name, parameter in state.learned.items():
            scale = self._scales.get(name, 1.0)
            place = self._places[name]
            parameter.copy_((params[place] / scale).view(parameter.shape))
            momentum = state.momentum_of(name, parameter)
            momentum.copy_((momenta[place] / scale).view(parameter.shape))
