"""What the stages learn to undo, for batches of crops on any device: reducing, noise, JPEG, salt and pepper."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mvrbm.vision.photographs import OPPONENT, STANDARD_STEPS, median_of_uncorrupted
from mvrbm.vision.resampling import enlarging_taps, reducing_taps, taps_matrix

__all__ = ["Degraded", "Resampling", "degrade", "jpeg", "opponent"]


class Degraded(NamedTuple):
    """Images (n, c, h, w), how much each is degraded (n,), and a mask of corrupted pixels or None."""

    images: Tensor
    amount: Tensor
    mask: Tensor | None


class Resampling:
    """Reduces and enlarges square images of one side by products with matrices."""

    def __init__(self, side: int, scale: int, device: str) -> None:
        down = taps_matrix(reducing_taps(np.arange(side // scale), scale, side))[0]
        up = taps_matrix(enlarging_taps(np.arange(side), scale, side // scale))[0]
        self._down, self._up = (torch.from_numpy(each).float().to(device) for each in (down, up))

    def bicubic(self, images: Tensor) -> Tensor:
        """Reduce images, in floats, and enlarge them again."""
        small = self._down @ images @ self._down.mT
        return self._up @ small @ self._up.mT


@functools.cache
def _constant(name: str, device: torch.device) -> Tensor:
    """Return small constants, which are on the device before a step is recorded there."""
    waves = [
        [math.sqrt((1 + (k > 0)) / 8) * math.cos(math.pi * k * (2 * i + 1) / 16) for i in range(8)] for k in range(8)
    ]
    found = {"opponent": OPPONENT, "waves": np.array(waves), "steps": STANDARD_STEPS.reshape(8, 8)}[name]
    return torch.from_numpy(found).float().to(device)


def opponent(images: Tensor) -> Tensor:
    """Return RGB (n, 3, h, w) in the space of opponent colors."""
    return torch.einsum("dc,nchw->ndhw", _constant("opponent", images.device), images)


def jpeg(images: Tensor, quality: Tensor, rng: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return luminance (n, 1, h, w) after JPEG of a quality (n,), a quarter of its mean step; blocks begin anywhere."""
    n, _, h, w = images.shape
    factor = torch.where(quality < 50, 5000 / quality, 200 - 2 * quality)[:, None, None]
    steps = ((_constant("steps", images.device) * factor + 50) / 100).floor().clamp(1, 255)[:, None, None, None]
    full = (images * 255 - 16) * 255 / 219 - 128
    # Where blocks begin differs from image to image: each is moved before, and back afterwards.
    padded = F.pad(full, (8, 8 + -w % 8, 8, 8 + -h % 8), mode="replicate")
    begin = torch.randint(8, (2, n, 1), generator=rng, device=images.device)
    which = torch.arange(n, device=images.device)[:, None, None]
    rows, columns = (
        8 - begin[d] + torch.arange(size + -size % 8 + 8, device=images.device) for d, size in enumerate((h, w))
    )
    moved = padded[which, 0, rows[:, :, None], columns[:, None, :]][:, None]
    waves = _constant("waves", images.device)
    shares = waves @ moved.unfold(2, 8, 8).unfold(3, 8, 8) @ waves.mT / steps
    whole = shares.sign() * (shares.abs() + 0.5 + 1e-5).floor()  # halves away from zero, as libjpeg does it
    found = (waves.mT @ (whole * steps) @ waves).permute(0, 1, 2, 4, 3, 5).reshape(moved.shape)
    rows, columns = (begin[d] + torch.arange(size, device=images.device) for d, size in enumerate((h, w)))
    found = found[which, 0, rows[:, :, None], columns[:, None, :]][:, None]
    return ((found + 128).round().clamp(0, 255) * 219 / 255 + 16) / 255, 0.25 * steps.mean((1, 2, 3, 4, 5)) / 255


def degrade(task: str, truth: Tensor, rng: torch.Generator | None = None, level: float | None = None) -> Degraded:
    """Degrade images for a task; level: sigma of 255, quality, or share of pixels; None for any."""
    n, device = len(truth), truth.device

    def amounts(low: float, high: float) -> Tensor:
        if level is not None:
            return torch.full((n,), float(level), device=device)
        return torch.rand(n, generator=rng, device=device) * (high - low) + low

    if task in ("gray", "color"):
        sigma = amounts(math.log(3), math.log(80))
        sigma = (sigma if level is not None else sigma.exp()) / 255
        noise = torch.randn(truth.shape, generator=rng, device=device)
        noisy = truth + sigma[:, None, None, None] * noise
        return Degraded(opponent(noisy) if task == "color" else noisy, sigma, None)
    if task == "jpeg":
        return Degraded(*jpeg(truth, amounts(10, 98).round(), rng), None)
    share = amounts(0.01, 0.5)
    draw, limit = torch.rand(truth.shape, generator=rng, device=device), share[:, None, None, None]
    noisy = torch.where(draw < limit, (draw < limit / 2).float(), truth)
    mask = ((noisy <= 0) | (noisy >= 1)).float()
    return Degraded(median_of_uncorrupted(noisy, mask), share, mask)
