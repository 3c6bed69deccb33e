r"""Mean field over whole images, as products of a few large matrices.

The hidden field of a patch is linear in its low-resolution window n, :math:`W_z G n / r` with r the patch's scale, so
the derivatives are never formed: :math:`A = W_z G` is made once, and the pass up and down through the hidden layer
of all patches of a tile is two matrix products.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mvrbm.couplings import Coupling
from mvrbm.machine import BoltzmannMachine
from mvrbm.units import Gaussian
from mvrbm.vision.resampling import enlarging_taps, taps_matrix
from mvrbm.vision.windows import DERIVATIVES, HIGH, MARGIN, centred, feature_matrix, phase_of, phases_of

__all__ = ["Geometry", "Maps", "Sight", "Tile", "all_maps", "full_weights", "infer", "maps_of"]

# Hidden units of the patches that are inferred together: on a CPU so many that they stay in the cache.
_HIDDEN_AT_ONCE = (2**20, 2**27)


class Geometry(NamedTuple):
    """How an image is cut into patches."""

    scale: int
    patch: int
    stride: int
    floor: float  # added to the scale of each patch

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Rows and columns after a multiple of the scale at which patches begin."""
        phases = phases_of(self.scale, self.stride)
        return [(row, column) for row in phases for column in phases]


# -- patches ----------------------------------------------------------------------------------------


class Maps(NamedTuple):
    """The machine's couplings for patches of one phase, as plain matrices."""

    up: Tensor  # (K L, w w): hidden field of a window divided by its patch's scale
    hidden_bias: Tensor  # (K L,)
    again: Tensor  # (K L, p p): hidden field of an estimate of X
    down: Tensor  # (K L, p p): mean of X
    visible_bias: Tensor  # (p p,)


def full_weights(link: Coupling) -> Tensor:
    """Full matrix (K L, I J) of a Kronecker coupling of order 2, as one product over its rank."""
    left, right = cast("tuple[Tensor, Tensor]", link.factors)  # (R, K, I), (R, L, J)
    (_, k, i), (_, l, j) = left.shape, right.shape  # noqa: E741
    product = left.flatten(1).mT @ right.flatten(1)  # (K I, L J)
    return product.reshape(k, i, l, j).transpose(1, 2).reshape(k * l, i * j)


def maps_of(machine: BoltzmannMachine, scale: int, offsets: tuple[int, int], matrix: Tensor | None = None) -> Maps:
    """Return the couplings of a machine for patches that begin at these offsets; differentiable.

    Parameters
    ----------
    machine : BoltzmannMachine
        Five Gaussian layers.
    scale : int
        Scale of super-resolution.
    offsets : (int, int)
        Where patches begin after a multiple of the scale.
    matrix : Tensor (4 p p, w w), optional
        The feature matrix of these offsets, where it is at hand already.
    """
    layers, links = cast("dict[str, Gaussian]", machine.layers), machine.links
    patch = layers[HIGH].shape[0]
    matrix = feature_matrix(scale, patch, *offsets).to(machine.like) if matrix is None else matrix
    weights = [full_weights(links[name]) / _entries(layers[name].scale, patch) for name in DERIVATIVES]
    high, deviation = full_weights(links[HIGH]), _entries(layers[HIGH].scale, patch)
    bias = _entries(layers[HIGH].bias, patch)
    return Maps(torch.cat(weights, 1) @ matrix, machine.hidden.bias.flatten(), high / deviation, high * deviation, bias)


@torch.no_grad()
def all_maps(machine: BoltzmannMachine, geometry: Geometry) -> dict[tuple[int, int], Maps]:
    """Return the couplings for every phase that occurs."""
    return {offsets: maps_of(machine, geometry.scale, offsets) for offsets in geometry.offsets}


def _entries(parameter: Tensor, patch: int) -> Tensor:
    return parameter.expand(patch, patch).flatten()


def infer(maps: Maps, windows: Tensor, cycles: int = 1) -> Tensor:
    """Mean of X given windows divided by their patch's scale: (n, w w) -> (n, p p), in that scale too.

    X starts at 0, which is the bicubic patch. A cycle is one pass of mean field up and down.
    """
    field = torch.addmm(maps.hidden_bias, windows, maps.up.mT)
    x = torch.addmm(maps.visible_bias, torch.sigmoid(field), maps.down)
    for _ in range(cycles - 1):
        x = torch.addmm(maps.visible_bias, torch.sigmoid(field + x @ maps.again.mT), maps.down)
    return x


# -- images -----------------------------------------------------------------------------------------


class _Side:
    """The patches that touch pixels start..stop of one side of an enlarged image."""

    def __init__(self, geometry: Geometry, start: int, stop: int, size: int) -> None:
        stride, patch, scale = geometry.stride, geometry.patch, geometry.scale
        self.first = -((patch - 1 - start) // stride)  # patch i begins at pixel i * stride
        self.count = (stop - 1) // stride + 1 - self.first
        begin = self.first * stride
        self.length = (self.count - 1) * stride + patch  # pixels that these patches cover together
        self.wanted = slice(start - begin, stop - begin)
        reach = np.arange(begin - MARGIN, begin + self.length + MARGIN)
        matrix, self.window = taps_matrix(enlarging_taps(reach, scale))
        self.enlarging = torch.from_numpy(matrix)
        self.inputs = (torch.arange(matrix.shape[1]) + self.window).clamp(0, size - 1)

    def to(self, like: Tensor) -> _Side:
        self.enlarging, self.inputs = self.enlarging.to(like), self.inputs.to(like.device)
        return self


class Sight(NamedTuple):
    """What there is to see of low-resolution images."""

    around: Tensor  # (n, rows, columns) of the low-resolution images, beyond their edges where need be
    scales: Tensor  # (n, patches down, patches across)
    bicubic: Tensor  # (n, rows, columns) of the tile


class Tile:
    """A region of an enlarged image, to be predicted for one low-resolution image or many of one size.

    Parameters
    ----------
    geometry : Geometry
        How it is cut into patches.
    size : (int, int)
        Size of the low-resolution images.
    region : ((int, int), (int, int))
        First and last row, exclusive, and first and last column, of the enlarged image.
    like : Tensor
        Whose dtype and device to compute with.
    """

    def __init__(
        self, geometry: Geometry, size: tuple[int, int], region: tuple[tuple[int, int], tuple[int, int]], like: Tensor
    ) -> None:
        self.geometry = geometry
        self._sides = [_Side(geometry, *region[d], size[d]).to(like) for d in (0, 1)]
        grid = [side.count for side in self._sides]
        ones = like.new_ones(1, geometry.patch**2, grid[0] * grid[1])
        self._counts = _fold(ones, grid, geometry.patch, geometry.stride)[0]

    def look(self, low: Tensor) -> Sight:
        """Take from low-resolution images (n, h, w), white being 1, what the patches see of them."""
        rows, columns = self._sides
        around = low.index_select(1, rows.inputs).index_select(2, columns.inputs)
        bicubic = rows.enlarging @ around @ columns.enlarging.mT
        inner = slice(MARGIN, -MARGIN)
        return Sight(around, _scales(bicubic, self.geometry), bicubic[:, inner, inner][:, rows.wanted, columns.wanted])

    def missing(self, maps: dict[tuple[int, int], Maps], around: Tensor, scales: Tensor, cycles: int = 1) -> Tensor:
        """Mean of what is missing from the bicubic image; differentiable with respect to the machine.

        Parameters
        ----------
        maps : dict
            The machine, by the offsets of patches.
        around, scales : Tensor
            As from `look`.
        cycles : int
            Passes of mean field.

        Returns
        -------
        Tensor (n, rows, columns)
        """
        rows, columns = self._sides
        total = around.new_zeros(len(around), rows.length, columns.length)
        for offsets in self.geometry.offsets:
            self._add_phase(total, maps[offsets], around, scales, offsets, cycles)
        return (total / self._counts)[:, rows.wanted, columns.wanted]

    def _add_phase(
        self, total: Tensor, maps: Maps, around: Tensor, scales: Tensor, offsets: tuple[int, int], cycles: int
    ) -> None:
        """Add the predictions of all patches that begin at these offsets after a multiple of the scale."""
        scale, patch, stride, _ = self.geometry
        period = len(phases_of(scale, stride))  # every so many patches the phase comes again
        views, picks = around, []
        for axis, (side, offset) in enumerate(zip(self._sides, offsets, strict=True), start=1):
            phase = phase_of(scale, patch, offset)
            where = next(n for n in range(period) if (side.first + n) * stride % scale == offset)
            count = len(range(where, side.count, period))
            if count == 0:
                return
            begin = (side.first + where) * stride // scale + phase.first - side.window
            step = stride * period // scale
            views = views.narrow(axis, begin, (count - 1) * step + phase.size).unfold(axis, phase.size, step)
            picks.append((where, count))
        (row, rows), (column, columns) = picks  # views: (n, rows, columns, w, w)
        own = scales[:, row::period, column::period]
        n = len(total)
        at_once = max(1, _HIDDEN_AT_ONCE[total.device.type == "cuda"] // (n * columns * len(maps.hidden_bias)))
        for first in range(0, rows, at_once):
            block = slice(first, min(first + at_once, rows))
            size = own[:, block].reshape(-1, 1)
            windows = centred(views[:, block]).reshape(len(size), -1) / size
            x = infer(maps, windows, cycles) * size
            grid = (block.stop - block.start, columns)
            folded = _fold(x.reshape(n, -1, patch * patch).mT, grid, patch, stride * period)
            top, left = (row + first * period) * stride, column * stride
            total[:, top : top + folded.shape[1], left : left + folded.shape[2]] += folded


def _scales(bicubic: Tensor, geometry: Geometry) -> Tensor:
    """Scale of every patch: bicubic images with a margin of 2 -> (n, patches down, patches across)."""
    b, inner = bicubic, slice(MARGIN, -MARGIN)
    squares = (b[:, inner, 3:-1] - b[:, inner, 1:-3]).square()
    squares += (b[:, 3:-1, inner] - b[:, 1:-3, inner]).square()
    squares += (b[:, inner, 4:] - 2 * b[:, inner, inner] + b[:, inner, :-4]).square()
    squares += (b[:, 4:, inner] - 2 * b[:, inner, inner] + b[:, :-4, inner]).square()
    means = F.avg_pool2d(squares[:, None], geometry.patch, geometry.stride)[:, 0] / len(DERIVATIVES)
    return means.sqrt() + geometry.floor


def _fold(patches: Tensor, grid: list[int] | tuple[int, ...], patch: int, stride: int) -> Tensor:
    """Add patches (n, p p, patches) up where they lie: (n, rows, columns)."""
    size = [(count - 1) * stride + patch for count in grid]
    return F.fold(patches, (size[0], size[1]), patch, stride=stride)[:, 0]
