r"""Losses for fine-tuning: mean field is unrolled, and the machine's own parameters are trained by backpropagation.

Contrastive divergence makes a model of all five layers. Super-resolution only needs the mean of X given the other four,
computed by one or a few cycles of mean field; these losses train the machine for that alone. Errors of patches are
measured in grey levels, that is, weighted by the square of the scale of the patch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mvrbm.learning.backprop import Loss
from mvrbm.machine import BoltzmannMachine
from mvrbm.vision.superres.back_projection import error_projection
from mvrbm.vision.superres.features import Geometry
from mvrbm.vision.superres.inference import Tile, all_maps, feature_matrices, infer
from mvrbm.vision.superres.training_data import Crops, TrainingPatches

_CROPS_AT_ONCE = 256


def patch_loss(
    machine: BoltzmannMachine, data: Sequence[TrainingPatches], geometry: Geometry, cycles: int = 1
) -> tuple[Loss, Tensor]:
    """Return the squared error of X after `cycles` of mean field, patch by patch, and the weights of the patches.

    The data holds the same number of patches of each phase. The loss maps row numbers (m,) to the sum of the errors of
    these patches, weighted by the square of their scales; the weights (n,) are the sums over the phases.
    """
    like = machine.like
    matrices = feature_matrices(geometry, like)
    parts = {
        (each.rows.offset, each.columns.offset): (
            each.windows.flatten(1).to(like),
            each.targets.flatten(1).to(like),
            each.scales.to(like).square(),
        )
        for each in data
    }

    def loss(rows: Tensor) -> Tensor:
        total = like.new_zeros(())
        maps = all_maps(machine, {offsets: matrices[offsets] for offsets in parts})
        for offsets, (windows, targets, weights) in parts.items():
            x = infer(maps[offsets], windows.index_select(0, rows), cycles)
            errors = (x - targets.index_select(0, rows)).square().mean(1)
            total = total + (errors * weights.index_select(0, rows)).sum()
        return total

    return loss, torch.stack([part[2] for part in parts.values()]).sum(0)


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
