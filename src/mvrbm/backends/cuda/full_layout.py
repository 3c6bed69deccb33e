"""Positions of parameters and states in the form that `full_kernels` works on, and the conversion from and to a state.

All visible layers are columns of one array, in units of their statistic, each from a multiple of a tile on. The flat
parameters are those of all couplings, the visible bias of every column, the hidden bias, and the log-variance of every
column if a layer learns it. A packing keeps the scales that layers have when it is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.couplings import Coupling
from mvrbm.machine import BoltzmannMachine
from mvrbm.updates.state import TrainState, is_factor

TILE = 64  # as in `full_kernels`


@dataclass(frozen=True)
class FullLayer:
    """One visible layer: its columns, and the positions of its coupling's parameters."""

    name: str
    kind: str
    first: int
    width: int
    rows: int
    columns: int
    pitch: int
    rank: int
    parameters_at: int
    room_at: int
    numbers_at: int
    factor: int  # number of its first factor
    learns: bool  # its variances

    def places(self) -> Tensor:
        """Return the column of every entry, (rows * columns,)."""
        rows, columns = torch.arange(self.rows)[:, None], torch.arange(self.columns)
        return (self.first + rows * self.pitch + columns).flatten()


class FullLayout:
    """Positions of all parameters in the flat array: couplings, visible bias, hidden bias, log-variances if any learns.

    Room for gradients follows.

    Couplings that have factors are padded to `ranks`, by the name of their layer; others are dense, with rank 0.
    """

    def __init__(self, machine: BoltzmannMachine, ranks: Mapping[str, int]) -> None:
        hidden = machine.hidden.shape
        self.n_hidden, self.hidden = math.prod(hidden), padded(math.prod(hidden) + 1)
        self.hidden_rows, self.hidden_columns = math.prod(hidden[:-1]), hidden[-1]
        self.n_factors = self.visible = self.numbers = self.room = 0
        self.parameter_at: dict[str, int] = {}  # of every parameter of the couplings
        self.layers: list[FullLayer] = []
        size = 0
        for name, unit in machine.layers.items():
            rows, columns, rank = math.prod(unit.shape[:-1]), unit.shape[-1], ranks[name]
            categorical = unit.sampled_as == "categorical"
            pitch = power_of_two(columns) if categorical else columns
            width = padded(rows * pitch + (len(self.layers) + 1 == len(machine.layers)))  # the last column is of ones
            layer = FullLayer(
                name, str(unit.sampled_as), self.visible, width, rows, columns, pitch, rank, size,
                self.room, self.numbers, self.n_factors, unit.learns_statistic,
            )  # fmt: skip
            for key, parameter in machine.links[name].named_parameters():
                self.parameter_at[f"couplings.{name}.{key}"] = size
                size += parameter.numel() // len(parameter) * rank if rank else parameter.numel()
            self.visible += layer.width
            self.numbers += rows if categorical else rows * columns
            self.room += self.n_hidden * rows * columns if rank else 0
            self.n_factors += 2 if rank else 1
            self.layers.append(layer)
        self.visible_bias, self.hidden_bias = size, size + self.visible
        self.variances, self.varies = self.hidden_bias + self.hidden, any(layer.learns for layer in self.layers)
        self.size = self.variances + (self.visible if self.varies else 0)

    def full_at(self, layer: FullLayer) -> int:
        """Return the position of a layer's full matrix: a dense coupling's own, or that of a gradient of factors."""
        return self.size + layer.room_at if layer.rank else layer.parameters_at


def padded(size: int, tile: int = TILE) -> int:
    """Return a size rounded up to a multiple of a tile's."""
    return -(-size // tile) * tile


def power_of_two(size: int) -> int:
    """Return a size rounded up to a power of two."""
    return 1 << (size - 1).bit_length()


def factor_rank(link: Coupling) -> int:
    """Return the number of products of a coupling that is a sum of Kronecker products of two matrices, 0 for others."""
    factors = link.matrix_factors()
    return 0 if factors is None else len(factors[0])


class FullPacking:
    """Converts the parameters and momenta of a state to the flat form, and back.

    The plan may have a larger rank than the machine; the terms beyond the machine's own are zero and stay zero.
    """

    def __init__(self, state: TrainState, plan: FullLayout) -> None:
        machine, device = state.machine, state.machine.like.device
        self._places: dict[str, Tensor] = {}
        self._scales: dict[str, Tensor] = {}
        for name, parameter in state.learned.items():
            if is_factor(name):
                first = plan.parameter_at[name]
                self._places[name] = torch.arange(first, first + parameter.numel(), device=device)
        for layer in plan.layers:
            self._places[f"visible.{layer.name}.bias"] = (plan.visible_bias + layer.places()).to(device)
            self._scales[f"visible.{layer.name}.bias"] = machine.layers[layer.name].inverse_scale().flatten()
            if layer.learns:
                self._places[f"visible.{layer.name}.log_variance"] = (plan.variances + layer.places()).to(device)
        self._places["hidden.bias"] = plan.hidden_bias + torch.arange(plan.n_hidden, device=device)
        self._scales["hidden.bias"] = machine.hidden.inverse_scale().flatten()
        self.columns = {layer.name: layer.places().to(device) for layer in plan.layers}

    def scale(self, layer: str) -> Tensor:
        """Return 1 / s of every entry of a visible layer, flat."""
        return self._scales[f"visible.{layer}.bias"]

    def multiplier(self, like: Tensor, normalized: bool) -> Tensor:
        """Return the factor of gradients before a step, like a flat array; see :attr:`flat.Packing.multiplier`."""
        flat = torch.ones_like(like)
        for name, scale in self._scales.items():
            flat[self._places[name]] = torch.ones_like(scale) if normalized else scale**2
        return flat

    @torch.no_grad()
    def pack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        params.zero_()
        momenta.zero_()
        for name, parameter in state.learned.items():
            scale = self._scales.get(name, 1.0)
            params[self._places[name]] = parameter.flatten() * scale
            if name in state.momenta:
                momenta[self._places[name]] = state.momenta[name].flatten() * scale

    @torch.no_grad()
    def unpack(self, state: TrainState, params: Tensor, momenta: Tensor) -> None:
        for name, parameter in state.learned.items():
            scale, place = self._scales.get(name, 1.0), self._places[name]
            parameter.copy_((params[place] / scale).view(parameter.shape))
            momentum = state.momentum_of(name, parameter)
            momentum.copy_((momenta[place] / scale).view(parameter.shape))
