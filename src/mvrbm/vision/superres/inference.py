r"""Mean field over whole images, as products of a few large matrices, and the losses that fine-tune it.

The hidden field of a patch is linear in its low-resolution window n, :math:`W_z G n / r` with r the scale of the patch,
so the derivatives are never formed: :math:`A = W_z G` is computed once, and mean field up and down through the hidden
layer takes two matrix products for all patches of a tile.

Contrastive divergence makes a model of all five layers. Super-resolution only needs the mean of X given the other four,
computed by one or a few cycles of mean field; the losses train the machine for that alone by backpropagation. Errors of
patches are measured in gray levels, that is, weighted by the square of the scale of the patch.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mvrbm.couplings import Coupling
from mvrbm.machine import BoltzmannMachine
from mvrbm.training.backprop import Loss
from mvrbm.units import Gaussian
from mvrbm.vision.resampling import enlarging_taps, taps_matrix
from mvrbm.vision.superres.back_projection import error_projection
from mvrbm.vision.superres.features import DERIVATIVES, HIGH, MARGIN, Geometry, centered, feature_matrix, phase_of
from mvrbm.vision.superres.training_data import Crops, TrainingPatches

#: Where patches begin after a multiple of the scale: rows and columns.
Offsets = tuple[int, int]

# Hidden units of the patches that are inferred together, on a CPU (few enough for the cache) and on a GPU.
_HIDDEN_AT_ONCE = (2**20, 2**27)
_CROPS_AT_ONCE = 256


class Maps(NamedTuple):
    """The couplings of a machine for patches of one phase, as plain matrices."""

    up: Tensor  # (K L, w w): hidden field of a window divided by the scale of its patch
    hidden_bias: Tensor  # (K L,)
    again: Tensor  # (K L, p p): hidden field of an estimate of X
    down: Tensor  # (K L, p p): mean of X
    visible_bias: Tensor  # (p p,)


def full_weights(link: Coupling) -> Tensor:
    """Return the full matrix (K L, I J) of a coupling of matrices, as one product over its rank."""
    left, right = cast("tuple[Tensor, Tensor]", link.matrix_factors())  # (R, K, I), (R, L, J)
    (_, k, i), (_, l, j) = left.shape, right.shape  # noqa: E741
    product = left.flatten(1).mT @ right.flatten(1)  # (K I, L J)
    return product.reshape(k, i, l, j).transpose(1, 2).reshape(k * l, i * j)


def feature_matrices(geometry: Geometry, like: Tensor) -> dict[Offsets, Tensor]:
    """Return the feature matrix (4 p p, w w) of every phase."""
    return {offsets: feature_matrix(geometry.scale, geometry.patch, *offsets).to(like) for offsets in geometry.offsets}


def all_maps(machine: BoltzmannMachine, matrices: dict[Offsets, Tensor]) -> dict[Offsets, Maps]:
    """Return the couplings of a machine of five Gaussian layers for every phase; differentiable."""
    layers, links = cast("dict[str, Gaussian]", machine.layers), machine.links
    patch = layers[HIGH].shape[0]

    def entries(parameter: Tensor) -> Tensor:
        return parameter.expand(patch, patch).flatten()

    weights = torch.cat([full_weights(links[name]) / entries(layers[name].scale) for name in DERIVATIVES], 1)
    high, deviation = full_weights(links[HIGH]), entries(layers[HIGH].scale)
    rest = machine.hidden.bias.flatten(), high / deviation, high * deviation, entries(layers[HIGH].bias)
    return {offsets: Maps(weights @ matrix, *rest) for offsets, matrix in matrices.items()}


def infer(maps: Maps, windows: Tensor, cycles: int = 1) -> Tensor:
    """Return the mean of X given windows: (n, w w) -> (n, p p), both divided by the scale of the patch.

    X starts at 0, which is the bicubic patch. A cycle of mean field updates the hidden layer and then X.
    """
    field = torch.addmm(maps.hidden_bias, windows, maps.up.mT)
    x = torch.addmm(maps.visible_bias, torch.sigmoid(field), maps.down)
    for _ in range(cycles - 1):
        x = torch.addmm(maps.visible_bias, torch.sigmoid(field + x @ maps.again.mT), maps.down)
    return x


class _Side:
    """The patches that cover pixels start..stop of one side of an enlarged image."""

    def __init__(self, geometry: Geometry, start: int, stop: int, size: int, like: Tensor) -> None:
        scale, patch, stride, _ = geometry
        self.first = -((patch - 1 - start) // stride)  # patch i begins at pixel i * stride
        self.count = (stop - 1) // stride + 1 - self.first
        begin = self.first * stride
        self.length = (self.count - 1) * stride + patch  # pixels that these patches cover together
        self.region = slice(start - begin, stop - begin)
        pixels = np.arange(begin - MARGIN, begin + self.length + MARGIN)
        matrix, self.window = taps_matrix(enlarging_taps(pixels, scale))
        self.enlarging = torch.from_numpy(matrix).to(like)
        self.inputs = (torch.arange(matrix.shape[1]) + self.window).clamp(0, size - 1).to(like.device)


class View(NamedTuple):
    """The part of low-resolution images that the patches of a tile depend on."""

    around: Tensor  # (n, rows, columns) of the low-resolution images, beyond their edges if necessary
    scales: Tensor  # (n, patches down, patches across)
    bicubic: Tensor  # (n, rows, columns) of the tile


class Tile:
    """A region of an enlarged image, to be predicted for one low-resolution image or many of one size.

    `size` is that of the low-resolution images; `region` is first and last row, exclusive, and first and last column of
    the enlarged image; the tensor `like` has the dtype and the device to compute with.
    """

    def __init__(
        self, geometry: Geometry, size: tuple[int, int], region: tuple[Offsets, Offsets], like: Tensor
    ) -> None:
        self.geometry = geometry
        self._sides = [_Side(geometry, *region[d], size[d], like) for d in (0, 1)]
        grid = [side.count for side in self._sides]
        ones = like.new_ones(1, geometry.patch**2, grid[0] * grid[1])
        self._counts = _fold(ones, grid, geometry.patch, geometry.stride)[0]

    def view(self, low: Tensor) -> View:
        """Return the part of low-resolution images (n, h, w), with white at 1, that the patches depend on."""
        rows, columns = self._sides
        around = low.index_select(1, rows.inputs).index_select(2, columns.inputs)
        bicubic = rows.enlarging @ around @ columns.enlarging.mT
        inner = slice(MARGIN, -MARGIN)
        return View(around, _scales(bicubic, self.geometry), bicubic[:, inner, inner][:, rows.region, columns.region])

    def difference(self, maps: dict[Offsets, Maps], around: Tensor, scales: Tensor, cycles: int = 1) -> Tensor:
        """Return the mean of the true minus the bicubic image, (n, rows, columns), given a view; differentiable."""
        rows, columns = self._sides
        total = around.new_zeros(len(around), rows.length, columns.length)
        for offsets in self.geometry.offsets:
            self._add_phase(total, maps[offsets], around, scales, offsets, cycles)
        return (total / self._counts)[:, rows.region, columns.region]

    def _add_phase(
        self, total: Tensor, maps: Maps, around: Tensor, scales: Tensor, offsets: Offsets, cycles: int
    ) -> None:
        """Add the predictions of all patches that begin at these offsets after a multiple of the scale."""
        scale, patch, stride, _ = self.geometry
        period = len(self.geometry.phases)  # the phase repeats every so many patches
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
            windows = centered(views[:, block]).reshape(len(size), -1) / size
            x = infer(maps, windows, cycles) * size
            grid = (block.stop - block.start, columns)
            folded = _fold(x.reshape(n, -1, patch * patch).mT, grid, patch, stride * period)
            top, left = (row + first * period) * stride, column * stride
            total[:, top : top + folded.shape[1], left : left + folded.shape[2]] += folded


def _scales(bicubic: Tensor, geometry: Geometry) -> Tensor:
    """Return the scale of every patch: bicubic images with a margin of 2 -> (n, patches down, patches across)."""
    b, inner = bicubic, slice(MARGIN, -MARGIN)
    squares = (b[:, inner, 3:-1] - b[:, inner, 1:-3]).square()
    squares += (b[:, 3:-1, inner] - b[:, 1:-3, inner]).square()
    squares += (b[:, inner, 4:] - 2 * b[:, inner, inner] + b[:, inner, :-4]).square()
    squares += (b[:, 4:, inner] - 2 * b[:, inner, inner] + b[:, :-4, inner]).square()
    means = F.avg_pool2d(squares[:, None], geometry.patch, geometry.stride)[:, 0] / len(DERIVATIVES)
    return means.sqrt() + geometry.floor


def _fold(patches: Tensor, grid: list[int] | tuple[int, ...], patch: int, stride: int) -> Tensor:
    """Add up overlapping patches (n, p p, patches) in place: (n, rows, columns)."""
    size = [(count - 1) * stride + patch for count in grid]
    return F.fold(patches, (size[0], size[1]), patch, stride=stride)[:, 0]


def patch_loss(
    machine: BoltzmannMachine, data: Sequence[TrainingPatches], geometry: Geometry, cycles: int = 1
) -> tuple[Loss, Tensor]:
    """Return the squared error of X after `cycles` of mean field, patch by patch, and the weights of the patches.

    The data holds the same number of patches of each phase. The loss maps row numbers (m,) to the sum of the errors of
    these patches, weighted by the square of their scales; the weights (n,) are the sums over the phases.
    """
    like = machine.like
    matrices = feature_matrices(geometry, like)
    offsets_of = [(each.rows.offset, each.columns.offset) for each in data]
    tensors = [tuple(part.flatten(1).to(like) for part in (each.windows, each.targets)) for each in data]
    squares = [each.scales.to(like).square() for each in data]

    def loss(rows: Tensor) -> Tensor:
        total, maps = like.new_zeros(()), all_maps(machine, {offsets: matrices[offsets] for offsets in offsets_of})
        for offsets, (windows, targets), weights in zip(offsets_of, tensors, squares, strict=True):
            x = infer(maps[offsets], windows.index_select(0, rows), cycles)
            errors = (x - targets.index_select(0, rows)).square().mean(1)
            total = total + (errors * weights.index_select(0, rows)).sum()
        return total

    return loss, torch.stack(squares).sum(0)


def image_loss(
    machine: BoltzmannMachine, crops: Crops, geometry: Geometry, cycles: int = 1, rounds: int = 0
) -> tuple[Loss, Tensor]:
    """Return the squared error of the image that patches make, after `rounds` of back-projection, and weights of 1.

    The loss maps row numbers (m,) to the sum of the mean errors of these crops; see :func:`patch_loss`.
    """
    like, side = machine.like, crops.truth.shape[1]
    low, truth = crops.low.to(like), crops.truth.to(like)
    region = (crops.start, crops.start + side)
    tile = Tile(geometry, (low.shape[1], low.shape[2]), (region, region), like)
    # All that does not depend on the parameters is computed once.
    views = [tile.view(part) for part in low.split(_CROPS_AT_ONCE)]
    around, scales, bicubic = (torch.cat(parts) for parts in zip(*views, strict=True))
    target = truth - bicubic
    matrices = feature_matrices(geometry, like)
    project = error_projection(side // geometry.scale, geometry.scale, rounds, like)
    border = 2 * geometry.scale if rounds else 0
    inner = slice(border, side - border)

    def loss(rows: Tensor) -> Tensor:
        maps = all_maps(machine, matrices)
        found = tile.difference(maps, around.index_select(0, rows), scales.index_select(0, rows), cycles)
        error = project(found - target.index_select(0, rows))
        return error[:, inner, inner].square().mean((1, 2)).sum()

    return loss, like.new_ones(len(low))
