r"""Fine-tuning: mean-field inference unrolled, and trained by backpropagation on the machine's own parameters.

Contrastive divergence makes a model of all five layers. What super-resolution wants of it is the mean of X given the
other four, and that only through a pass or a few of mean field; here it is trained for that alone. The patches'
errors count in grey levels, that is, by the square of the patch's scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm.learning.backprop import Loss, Plan, descend
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.vision.inference import Geometry, Tile, infer, maps_of
from mvrbm.vision.resampling import enlarging_taps, reducing_taps, taps_matrix
from mvrbm.vision.windows import MARGIN, Windows, all_pairs, feature_matrix, turned

__all__ = ["CROP_SIDE", "Crops", "Descent", "cut_crops", "image_loss", "patch_loss", "tune"]

Array = NDArray[Any]

#: Low-resolution pixels of the middle of a crop, a side.
CROP_SIDE = 24
_CROPS_AT_ONCE = 256


class Descent(NamedTuple):
    """Numbers of a fine-tuning: Adam, its rate falling along half a cosine."""

    n_epochs: int = 25
    batch_size: int = 512
    learning_rate: float = 3e-3
    averaging: float = 0.0


def tune(
    machine: BoltzmannMachine, loss: Loss, weights: Tensor, descent: Descent, rng: RandomSource
) -> list[dict[str, float]]:
    """Go down a loss, in place. Returns one row a pass."""
    plan = Plan(descent.n_epochs, descent.batch_size, descent.learning_rate, 0.0, "cosine", descent.averaging, None)
    plan.check()
    return descend(machine, [], loss, weights, plan, rng, draws_from=())


# -- patches ----------------------------------------------------------------------------------------


def patch_loss(
    machine: BoltzmannMachine, data: Sequence[Windows], geometry: Geometry, cycles: int = 1
) -> tuple[Loss, Tensor]:
    """Squared error of X, patch by patch.

    Parameters
    ----------
    machine : BoltzmannMachine
        What learns.
    data : sequence of Windows
        As many patches of each phase that occurs.
    geometry : Geometry
        How images are cut into patches.
    cycles : int
        Passes of mean field.

    Returns
    -------
    loss : callable
        From numbers of patches (m,) to the sum of their errors, weighted by the square of their scales.
    weights : Tensor (n,)
        Sum of these weights over the phases.
    """
    like, patch = machine.like, geometry.patch
    parts = []
    for each in data:
        offsets = (each.rows.offset, each.columns.offset)
        matrix = feature_matrix(geometry.scale, patch, *offsets).to(like)
        tensors = (each.windows.flatten(1).to(like), each.targets.flatten(1).to(like), each.scales.to(like).square())
        parts.append((offsets, matrix, *tensors))

    def loss(rows: Tensor) -> Tensor:
        total = like.new_zeros(())
        for offsets, matrix, windows, targets, weights in parts:
            maps = maps_of(machine, geometry.scale, offsets, matrix)
            x = infer(maps, windows.index_select(0, rows), cycles)
            errors = (x - targets.index_select(0, rows)).square().mean(1)
            total = total + (errors * weights.index_select(0, rows)).sum()
        return total

    return loss, torch.stack([part[4] for part in parts]).sum(0)


# -- images -----------------------------------------------------------------------------------------


class Crops(NamedTuple):
    """Pieces of images: what is seen, and the truth in the middle of it."""

    low: Tensor  # (n, c, c)
    truth: Tensor  # (n, s, s)
    start: int  # where the middle begins, in pixels of the enlarged crop


def cut_crops(
    images: Sequence[Any], geometry: Geometry, n: int, *, size: int = CROP_SIDE, augment: bool = True, seed: int = 0
) -> Crops:
    """Cut random pieces out of high-resolution images.

    Parameters
    ----------
    images : sequence of arrays (H, W) or (H, W, 3)
        High-resolution images.
    geometry : Geometry
        How images are cut into patches: the crops hold all that the patches in their middle see.
    n : int
        How many.
    size : int
        Low-resolution pixels of the middle, a side.
    augment : bool
        Whether to flip and turn them at random.
    seed : int
        Of the places.
    """
    scale = geometry.scale
    margin = -(-(geometry.patch - 1 + MARGIN) // scale) + 3
    random = np.random.default_rng(seed)
    pairs = all_pairs(images, scale)
    room = np.array([max(0, low.shape[0] - size + 1) * max(0, low.shape[1] - size + 1) for low, _ in pairs])
    if room.sum() == 0:
        raise ValueError(f"images must have at least {size * scale} pixels a side, none of {len(pairs)} has")
    numbers = random.choice(len(pairs), n, p=room / room.sum())
    low = np.empty((n, size + 2 * margin, size + 2 * margin), np.float32)
    truth = np.empty((n, size * scale, size * scale), np.float32)
    for index, number in enumerate(numbers):
        turn = int(random.integers(8)) if augment else 0
        small, large = (turned(part, turn) for part in pairs[number])
        top, left = (int(random.integers(side - size + 1)) for side in small.shape)
        y = np.arange(top - margin, top + size + margin).clip(0, small.shape[0] - 1)
        x = np.arange(left - margin, left + size + margin).clip(0, small.shape[1] - 1)
        low[index] = small[np.ix_(y, x)]
        truth[index] = large[top * scale : (top + size) * scale, left * scale : (left + size) * scale]
    return Crops(torch.from_numpy(low), torch.from_numpy(truth), margin * scale)


def image_loss(
    machine: BoltzmannMachine, crops: Crops, geometry: Geometry, cycles: int = 1, rounds: int = 0
) -> tuple[Loss, Tensor]:
    """Squared error of the image that overlapping patches make, after back-projection.

    Parameters
    ----------
    machine : BoltzmannMachine
        What learns.
    crops : Crops
        What it learns from.
    geometry : Geometry
        How images are cut into patches.
    cycles : int
        Passes of mean field.
    rounds : int
        Rounds of back-projection. They act on the error alone, as the truth is consistent with the low-resolution
        image but for rounding.

    Returns
    -------
    loss : callable
        From numbers of crops (m,) to the sum of their mean errors.
    weights : Tensor (n,)
        Ones.
    """
    like, side = machine.like, crops.truth.shape[1]
    low, truth = crops.low.to(like), crops.truth.to(like)
    region = (crops.start, crops.start + side)
    tile = Tile(geometry, (low.shape[1], low.shape[2]), (region, region), like)
    # What does not learn is computed once.
    sights = [tile.look(part) for part in low.split(_CROPS_AT_ONCE)]
    around, scales = torch.cat([each.around for each in sights]), torch.cat([each.scales for each in sights])
    target = truth - torch.cat([each.bicubic for each in sights])
    matrices = {
        offsets: feature_matrix(geometry.scale, geometry.patch, *offsets).to(like) for offsets in geometry.offsets
    }
    project = _projection(side // geometry.scale, geometry.scale, rounds, like)
    shave = 2 * geometry.scale if rounds else 0
    inner = slice(shave, side - shave)

    def loss(rows: Tensor) -> Tensor:
        maps = {offsets: maps_of(machine, geometry.scale, offsets, matrix) for offsets, matrix in matrices.items()}
        missing = tile.missing(maps, around.index_select(0, rows), scales.index_select(0, rows), cycles)
        error = project(missing - target.index_select(0, rows))
        return error[:, inner, inner].square().mean((1, 2)).sum()

    return loss, like.new_ones(len(low))


def _projection(size: int, scale: int, rounds: int, like: Tensor) -> Callable[[Tensor], Tensor]:
    """What rounds of back-projection leave of an error image (n, size * scale, size * scale)."""
    if rounds == 0:
        return lambda error: error
    reducing, _ = taps_matrix(reducing_taps(np.arange(size), scale), size * scale)
    enlarging, _ = taps_matrix(enlarging_taps(np.arange(size * scale), scale), size)
    down, up = torch.from_numpy(reducing), torch.from_numpy(enlarging)
    both = down @ up
    units = torch.eye(size * size, dtype=torch.float64).reshape(-1, size, size)
    total = units
    for _ in range(rounds - 1):
        total = total + units - both @ total @ both.mT
    sums = total.flatten(1).to(like)  # from a reduced error to what is to be enlarged, as rows
    down, up = down.to(like), up.to(like)

    def project(error: Tensor) -> Tensor:
        reduced = (down @ error @ down.mT).flatten(1)
        return error - up @ (reduced @ sums).reshape(-1, size, size) @ up.mT

    return project
