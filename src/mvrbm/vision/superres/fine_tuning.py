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

__all__ = ["image_loss", "patch_loss"]

_CROPS_AT_ONCE = 256


def patch_loss(
    machine: BoltzmannMachine, data: Sequence[TrainingPatches], geometry: Geometry, cycles: int = 1
) -> tuple[Loss, Tensor]:
    """Squared error of X, patch by patch.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine to train.
    data : sequence of TrainingPatches
        The same number of patches of each phase.
    geometry : Geometry
        How images are cut into patches.
    cycles : int
        Cycles of mean field.

    Returns
    -------
    loss : callable
        From row numbers (m,) to the sum of the errors of these patches, weighted by the square of their scales.
    weights : Tensor (n,)
        Sum of these weights over the phases.
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
    """Squared error of the image that overlapping patches make, after `rounds` of back-projection.

    Other arguments are as for :func:`patch_loss`. The loss maps row numbers (m,) to the sum of the mean errors of these
    crops; the weights (n,) are ones.
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
