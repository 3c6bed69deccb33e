"""Sample patches and crops from images, and define the objectives that are minimized to train stages.

Contrastive divergence (``"divergence"``) trains each stage as a probability model of patches. The other objectives
train the mean-field pass by backpropagation: ``"patches"`` minimizes the error of individual patches after the first
stage, and ``"images"`` minimizes the error of entire crops after each stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mvrbm.random import RandomSource
from mvrbm.training.backprop import DescentSettings, Loss
from mvrbm.validation import choice, whole_number
from mvrbm.vision.color import luminance
from mvrbm.vision.degradation import Simulation
from mvrbm.vision.images import Array, check_image, to_dtype, turned, white
from mvrbm.vision.resampling import crop_to_multiple, enlarge_image, reduce_image
from mvrbm.vision.stages import DERIVATIVES, HIGH, MARGIN, ORIENTATIONS, Stage, StageSequence, SymmetricStage

#: Objectives that a training step can minimize.
OBJECTIVES = ("divergence", "patches", "images")

# Number of patches per contrastive divergence update.
_DIVERGENCE_PATCHES = 2048
# Weight of the error after each stage except the last.
_EARLIER_STAGES = 0.2
# Value added to the degradation level of an image before its error is divided by the level.
_LEVEL_FLOOR = 0.004


@dataclass(frozen=True)
class TrainingStep:
    """Settings for a training step that minimizes one objective by gradient descent.

    Parameters
    ----------
    objective : {"divergence", "patches", "images"}
        Objective to minimize: contrastive divergence, the error of individual patches, or the error of image crops.
    n_samples : int
        Number of patches (for ``"patches"``) or crops (otherwise) to take from random positions in the images.
    n_epochs : int
        Number of epochs (passes over the samples).
    batch_size : int
        Number of samples per update.
    learning_rate : float
        Initial learning rate for Adam. It decays to zero on a cosine schedule.
    averaging : float
        Decay rate of an exponential moving average of the parameters, which replaces the parameters after training. If
        0, no average is used.
    """

    objective: str = "images"
    n_samples: int = 2000
    n_epochs: int = 1
    batch_size: int = 8
    learning_rate: float = 1e-3
    averaging: float = 0.0

    def check(self) -> DescentSettings:
        """Return the settings for gradient descent, or raise ValueError if they are invalid."""
        choice(self.objective, "objective", OBJECTIVES)
        whole_number(self.n_samples, "n_samples")
        plan = DescentSettings(self.n_epochs, self.batch_size, self.learning_rate, 0.0, "cosine", self.averaging, None)
        plan.check()
        return plan


# -- samples ----------------------------------------------------------------------------------------


def training_images(images: Any) -> list[Array]:
    """Convert a sequence of arrays or a folder of image files to a list of grayscale or RGB images.

    Alpha channels are dropped.
    """
    if isinstance(images, str) or hasattr(images, "__fspath__"):
        from mvrbm.io.pictures import read_pictures

        images = [picture.pixels for picture in read_pictures(images)]
    if len(images) == 0:
        raise ValueError("images must contain at least one image")
    arrays = [check_image(image, unit_range=True) for image in images]
    return [array[..., :3] if array.ndim == 3 else array for array in arrays]


def crop_side(images: Sequence[Array], wanted: int, least: int, multiple: int) -> int:
    """Return the side length of the crops: at most `wanted`, no larger than the images, and divisible by `multiple`.

    Raises ValueError if the side length would be smaller than `least`.
    """
    largest = max(min(int(size) for size in image.shape[:2]) for image in images)
    side = min(wanted, largest) // multiple * multiple
    if side < least:
        raise ValueError(f"at least one image must be {least} x {least} pixels or larger")
    return side


def cut_crops(images: Sequence[Array], side: int, n: int, *, color: bool, augment: bool, seed: int) -> Tensor:
    """Extract random square crops in RGB or luminance.

    The result has dtype uint8 and shape (n, c, side, side). Images smaller than a crop are skipped. If `augment` is
    True, crops are randomly flipped and rotated.
    """
    random = np.random.default_rng(seed)
    large = [_as_bytes(image, color) for image in images if min(image.shape[:2]) >= side]
    room = np.array([(image.shape[0] - side + 1) * (image.shape[1] - side + 1) for image in large], float)
    crops = np.empty((n, side, side, 3 if color else 1), np.uint8)
    for index, which in enumerate(random.choice(len(large), n, p=room / room.sum())):
        image = large[which]
        top, left = (int(random.integers(size - side + 1)) for size in image.shape[:2])
        crop = image[top : top + side, left : left + side]
        crops[index] = turned(crop, int(random.integers(ORIENTATIONS))) if augment else crop
    return torch.from_numpy(crops).permute(0, 3, 1, 2).contiguous()


def _as_bytes(image: Array, color: bool) -> Array:
    """Convert an image to an RGB or luminance array of dtype uint8 and shape (h, w, c)."""
    if color and image.ndim == 2:
        image = np.stack([image] * 3, 2)
    pixels = image if color else luminance(image)
    floats = pixels.astype(np.float32) / np.float32(white(pixels.dtype))
    return to_dtype(floats if color else floats[..., None], np.uint8)


def image_pair(image: Any, scale: int) -> tuple[Array, Array]:
    """Return the low-resolution and the high-resolution luminance of an image.

    The image has shape (H, W) or (H, W, 3) and dtype uint8, uint16 or float, with floats between 0 and 1. The results
    have shapes (h, w) and (h * scale, w * scale) and dtype float32, with white at 1. The low-resolution luminance is
    rounded to the precision of the image.
    """
    high = crop_to_multiple(luminance(check_image(image, unit_range=True)), scale)
    top = white(high.dtype)
    return (reduce_image(high, scale) / top).astype(np.float32), (high / top).astype(np.float32)


class Patches(NamedTuple):
    """Patches of enlarged images for training one stage."""

    windows: Tensor  # (n, w * w): bicubic patches with a margin of two pixels
    missing: Tensor  # (n, p * p): true patches minus bicubic patches
    scales: Tensor  # (n,): scale r of each patch

    def layers(self, stage: Stage, which: Tensor | slice = slice(None)) -> dict[str, Tensor]:
        """Return a dict with the five visible layers of the selected patches, each of shape (n, p, p)."""
        r = self.scales[which, None]
        derivatives = (self.windows[which] / r) @ stage.features.mT.to(self.windows)
        derivatives = derivatives.reshape(len(r), len(DERIVATIVES), stage.patch, stage.patch)
        high = (self.missing[which] / r).reshape(-1, stage.patch, stage.patch)
        return {HIGH: high, **{name: derivatives[:, index] for index, name in enumerate(DERIVATIVES)}}


def cut_patches(
    images: Sequence[Array],
    scale: int,
    stage: Stage,
    n: int,
    *,
    flat: float = 0.01,
    augment: bool = False,
    seed: int = 0,
) -> Patches:
    """Extract up to `n` random patches from enlarged images, at positions where the stage places patches.

    Patches whose derivatives have a root mean square below `flat` are omitted. If `augment` is True, flipped and
    rotated images are also used.
    """
    random = np.random.default_rng(seed)
    pairs = [image_pair(image, scale) for image in images if min(np.shape(image)[:2], default=0) >= scale]
    sources = [(pair, turn) for pair in pairs for turn in range(ORIENTATIONS if augment else 1)]
    step = math.gcd(scale, stage.stride)
    counts = []
    for (_, high), turn in sources:
        counts.append([max(0, (size - stage.patch) // step + 1) for size in turned(high, turn).shape])
    room = np.array([rows * columns for rows, columns in counts])
    total = int(room.sum())
    if total == 0:
        side = stage.patch
        raise ValueError(f"at least one image must be as large as a patch ({side} x {side} pixels)")
    # Draw up to 2 n distinct positions over all images, because some patches may be flat.
    numbers = np.arange(total) if 2 * n >= total else random.choice(total, 2 * n, replace=False)
    ends = np.cumsum(room)
    owner = np.searchsorted(ends, numbers, side="right")
    found = []
    for which, ((low, high), turn) in enumerate(sources):
        mine = np.sort(numbers[owner == which] - (ends - room)[which])
        if len(mine):
            bicubic = enlarge_image(low, scale)
            tops, lefts = np.divmod(mine, counts[which][1])
            pieces = [np.ascontiguousarray(turned(part, turn)) for part in (bicubic, high)]
            found.append(_cut(pieces[0], pieces[1], tops * step, lefts * step, stage, flat))
    windows, missing, scales = (torch.cat(parts) for parts in zip(*found, strict=True))
    if len(scales) == 0:
        raise ValueError("images must contain some detail, but all patches are flat")
    order = torch.from_numpy(random.permutation(len(scales))[:n])
    return Patches(windows[order], missing[order], scales[order])


def _cut(bicubic: Array, high: Array, tops: Array, lefts: Array, stage: Stage, flat: float) -> Patches:
    """Extract the patches with the given top-left corners from one image."""
    padded = np.pad(bicubic, MARGIN, mode="edge")
    y = tops[:, None, None] + np.arange(stage.window)[:, None]
    x = lefts[:, None, None] + np.arange(stage.window)
    windows = torch.from_numpy(padded[y, x]).flatten(1)
    squares = (windows @ stage.features.mT.cpu().to(windows)).square().mean(1)
    busy = squares.sqrt() >= flat
    inner = slice(MARGIN, -MARGIN)
    missing = torch.from_numpy((high - bicubic)[y[:, inner] - MARGIN, x[..., inner] - MARGIN]).flatten(1)
    return Patches(windows[busy], missing[busy], squares[busy].sqrt() + stage.floor)


# -- objectives -------------------------------------------------------------------------------------


def patch_loss(stage: Stage, patches: Patches, like: Tensor) -> tuple[Loss, Tensor]:
    """Return a loss function for individual patches, and the weight of each patch.

    The function maps patch indices of shape (m,) to the sum of the mean squared errors of these patches. Errors are
    measured in gray levels, so the weight of a patch is the square of its scale r.
    """
    windows, missing, scales = (part.to(like) for part in patches)

    def loss(rows: Tensor) -> Tensor:
        given = windows.index_select(0, rows).mT[None, None]
        x = stage.correct_patches(given, scales.index_select(0, rows)[None])[0, :, 0].mT
        return (x - missing.index_select(0, rows)).square().mean(1).sum()

    return loss, scales.square()


def errors_after_stages(
    stages: StageSequence, simulation: Simulation, truth: Tensor, rng: RandomSource, level: float | None = None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the mean squared errors after each stage, the errors of the degraded images, and the degradation levels.

    All errors and levels have shape (n,).
    """
    given = simulation(truth, rng, level)
    inner = (..., slice(simulation.border, -simulation.border), slice(simulation.border, -simulation.border))
    known = given.level if simulation.known_level else None
    image = given.images
    found = []
    for stage in stages:
        missing = stage(image, known, given.mask)
        image = image + (missing if given.mask is None else missing * given.mask)
        image = simulation.project(image, truth)
        found.append((image - given.goal)[inner].square().mean((1, 2, 3)))
    return found, (given.images - given.goal)[inner].square().mean((1, 2, 3)), given.level


def image_loss(stages: StageSequence, simulation: Simulation, crops: Tensor, rng: RandomSource) -> tuple[Loss, Tensor]:
    """Return a loss function for entire crops, and a weight of 1 for each crop.

    The function maps crop indices of shape (m,) to a sum of squared errors over these crops and all stages. Each error
    is relative to the degradation level of the crop. Each call draws a new degradation from `rng`.
    """

    def loss(rows: Tensor) -> Tensor:
        truth = _floats(crops, rows, stages)
        found, _, level = errors_after_stages(stages, simulation, truth, rng)
        parts = [100 * (each / (level + _LEVEL_FLOOR)).sum() for each in found]
        return parts[-1] + _EARLIER_STAGES * sum(parts[:-1], truth.new_zeros(()))

    return loss, crops.new_ones(len(crops), dtype=torch.float32)


def _floats(crops: Tensor, rows: Tensor, stages: StageSequence) -> Tensor:
    """Convert selected uint8 crops to floats, with white at 1."""
    return crops.index_select(0, rows).to(next(stages.parameters()).dtype) / 255


def divergence_loss(
    stages: StageSequence, simulation: Simulation, crops: Tensor, rng: RandomSource
) -> tuple[Loss, Tensor]:
    """Return a contrastive divergence loss function for all stages, and a weight of 1 for each crop.

    The function maps crop indices to the contrastive divergence on random patches of the degraded crops.
    """

    def loss(rows: Tensor) -> Tensor:
        truth = _floats(crops, rows, stages)
        given = simulation(truth, rng)
        level = given.level if simulation.known_level else None
        parts = []
        for stage in stages.symmetric:
            v = divergence_patches(stage, given.images, given.goal, level, _DIVERGENCE_PATCHES, rng)
            parts.append(contrastive_divergence(stage, v, rng))
        return torch.stack(parts).sum() * len(rows) / 1000

    return loss, crops.new_ones(len(crops), dtype=torch.float32)


def divergence_patches(
    stage: SymmetricStage, image: Tensor, goal: Tensor, level: Tensor | None, n: int, rng: RandomSource
) -> Tensor:
    """Extract random patches and return their visible layers X and Z. The result has shape (n, 5 * c, p * p)."""
    p = stage.patch
    before = stage.lead
    windows, r = stage.windows(image)
    unit = stage.unit(r, None if stage.codes is None else level)
    padded = F.pad(goal - image, (before, p - stage.stride, before, p - stage.stride))
    missing = F.unfold(padded, p, stride=stage.stride).unflatten(1, (stage.channels, p * p)) / unit[:, None, None]
    which = (rng.uniform((n,), image) * unit.numel()).long().clamp(max=unit.numel() - 1)
    x, z = (each.permute(0, 3, 1, 2).flatten(0, 1)[which] for each in (missing, windows / r[:, None, None]))
    return torch.cat([x, (z @ stage.features.mT).reshape(n, -1, p * p)], 1)


def contrastive_divergence(stage: SymmetricStage, v: Tensor, rng: RandomSource) -> Tensor:
    """Return the CD-1 loss for data of shape (n, 5 * c, p * p).

    The loss is the mean free energy of the data minus the mean free energy after one Gibbs step.
    """
    w = stage.all_weights()
    bias = stage.bias.repeat(ORIENTATIONS)
    v = v.flatten(1)
    with torch.no_grad():
        probabilities = torch.sigmoid(v @ w.mT + bias)
        y = (rng.uniform(probabilities.shape, v) < probabilities).to(v)
        other = (y - 0.5) @ w + rng.normal(v.shape, v)

    def free_energy(each: Tensor) -> Tensor:
        # Hidden units centered at 1/2 are equivalent to a visible bias of -W'1/2.
        return 0.5 * (each + 0.5 * w.sum(0)).square().sum(1) - F.softplus(each @ w.mT + bias).sum(1)

    return (free_energy(v) - free_energy(other)).mean()
