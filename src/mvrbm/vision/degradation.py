"""Degraded photographs: estimating noise and JPEG compression, and simulating them to train with.

Simulations work on batches of crops (n, c, h, w) with white at 1, on any device.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import dct
from torch import Tensor
from torch.nn import functional as F

from mvrbm.random import RandomSource
from mvrbm.vision.back_projection import error_projection
from mvrbm.vision.color import OPPONENT
from mvrbm.vision.images import Array, check_image, white
from mvrbm.vision.resampling import enlarging_taps, reducing_taps, taps_matrix

#: The luminance quantization table of the JPEG standard, which the quality setting scales.
STANDARD_STEPS = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99],
    ]
).ravel()

#: JPEG files of a higher quality count as undamaged.
HIGHEST_QUALITY = 95
#: Weaker noise counts as none, as a fraction of white.
SMALLEST_NOISE = 1.5 / 255

# Side of the blocks that noise is estimated from, in details of 2x2 pixels.
_BLOCK = 8
# Fraction of blocks with the least detail, whose detail is assumed to be noise.
_QUIET = 0.1
# Noise has equal variance in all directions; blocks up to this ratio count as noise.
_MOST_ANISOTROPY = 1.4
# Minimum fraction of blocks that must look like noise.
_LEAST_NOISE_BLOCKS = 0.04
# Blocks with a larger fraction of black or white pixels are ignored, because clipping weakens noise.
_CLIPPED = 0.02
# At least this fraction of blocks is used, however clipped.
_LEAST_UNCLIPPED = 0.25
# Minimum fraction of isolated black and of isolated white pixels in salt-and-pepper noise.
_LEAST_SALT = 0.001
# Minimum fraction of isolated black and white pixels that stand out from their neighbors.
_LEAST_OUTSTANDING = 0.6
# Standard deviations of the noise by which a pixel stands out from its neighbors.
_STANDS_OUT = 4.0


class Degradation(NamedTuple):
    """JPEG compression and noise found in a photograph."""

    quality: int | None  # JPEG quality, None if the photograph is not compressed
    noise: float  # standard deviation as a fraction of white

    def __str__(self) -> str:
        parts = [f"JPEG of quality {self.quality}"] if self.quality is not None else []
        parts += [f"noise of {255 * self.noise:.1f} of 255"] if self.noise else []
        return " and ".join(parts) or "nothing"


def jpeg_steps(quality: float) -> NDArray[np.int64]:
    """Return the luminance quantization table (64,) that libjpeg uses for a quality from 1 to 100."""
    factor = 5000 // quality if quality < 50 else 200 - 2 * quality
    return np.clip((STANDARD_STEPS * factor + 50) // 100, 1, 255).astype(np.int64)


def jpeg_quality(table: Sequence[int]) -> int:
    """Return the quality from 1 to 100 whose luminance quantization table is closest to a given one."""
    given = np.log(np.asarray(table, np.float64).mean())
    return min(range(1, 101), key=lambda quality: abs(math.log(jpeg_steps(quality).mean()) - given))


def estimate_noise(image: Any) -> float:
    """Estimate the standard deviation of Gaussian noise in a photograph, as a fraction of white.

    White noise has the same variance in all fine details and everywhere, whereas image detail is stronger along rows
    and columns. The estimate is taken from the tenth of the image blocks with the least detail. It is 0 if hardly any
    block looks like white noise.

    Parameters
    ----------
    image : array (H, W), (H, W, 3) or (H, W, 4)
        Bytes, 16-bit integers or floats from 0 to 1. Alpha is ignored.
    """
    array = check_image(image)
    pixels = array[..., None] if array.ndim == 2 else array[..., :3]
    even = pixels[: len(pixels) // 2 * 2, : pixels.shape[1] // 2 * 2].astype(np.float32) / white(array.dtype)
    if even.size == 0:
        return 0.0
    a, b, c, d = even[::2, ::2], even[::2, 1::2], even[1::2, ::2], even[1::2, 1::2]
    # Details of 2x2 pixels: diagonal, along rows, along columns.
    bands = np.stack([a - b - c + d, a + b - c - d, a - b + c - d]) / 2
    rows, columns = (max(1, size // _BLOCK) for size in a.shape[:2])
    height = a.shape[0] // rows
    width = a.shape[1] // columns

    def in_blocks(values: Array) -> Array:
        some = values[..., : rows * height, : columns * width, :]
        return some.reshape(*values.shape[:-3], rows, height, columns, width, values.shape[-1])

    blocks = in_blocks(bands)
    clipped = in_blocks(((a == 0) | (a == 1)).astype(np.float32)).mean((1, 3, 4))
    whole = (clipped <= max(_CLIPPED, np.quantile(clipped, _LEAST_UNCLIPPED))) | (clipped > 1 - _CLIPPED)
    diagonal, *others = blocks.var((2, 4)).mean(-1)
    noise = sum(others) / 2 < _MOST_ANISOTROPY * diagonal
    if max(noise.mean(), noise[whole].mean()) < _LEAST_NOISE_BLOCKS:
        return 0.0
    deviations = np.sqrt(diagonal)
    counted = whole if (noise & whole).any() else np.ones_like(whole)
    lowest = min(np.quantile(deviations[some], _QUIET) for some in (counted, counted & noise))
    # Sampling error of the lowest tenth of equally noisy blocks.
    by_chance = 1.28 / math.sqrt(2 * height * width * blocks.shape[-1])
    return float(lowest / (1 - min(by_chance, 0.5)))


def estimate_salt(image: Any) -> float:
    """Estimate the fraction of pixels that salt-and-pepper noise has replaced, 0 for a photograph without it.

    Salt-and-pepper noise is present if there are both black and white pixels that are isolated among their neighbors
    and differ from them by more than Gaussian noise explains. Each channel counts separately.

    Parameters
    ----------
    image : array (H, W), (H, W, 3) or (H, W, 4)
        Bytes, 16-bit integers or floats from 0 to 1. Alpha is ignored.
    """
    pixels = as_channels(check_image(image))[:, None]  # (c, 1, h, w)
    kinds = torch.stack([pixels <= 0, pixels >= 1]).float()
    alone = torch.stack([(kind > 0) & (9 * F.avg_pool2d(kind, 3, 1, 1) < 1.5) for kind in kinds])
    counts = alone.sum((1, 2, 3, 4))
    if float(counts.min()) < max(_LEAST_SALT * pixels.numel(), float(counts.max()) / 4):
        return 0.0
    hit = kinds.sum(0)
    others = median_of_uncorrupted(pixels, hit)
    noise = estimate_noise(others[:, 0].permute(1, 2, 0).numpy())
    far = (hit > 0) & ((pixels - others).abs() > max(_STANDS_OUT * noise, 0.1))
    enough = bool(((alone & far).sum((1, 2, 3, 4)) >= _LEAST_OUTSTANDING * counts).all())
    return float(far.float().mean()) if enough else 0.0


def estimate_degradation(image: Any, table: Sequence[int] | None = None) -> Degradation:
    """Estimate JPEG compression and noise of a photograph.

    Compression is read from `table`, the luminance quantization table of the JPEG file. A quality above 95 and noise
    below 1.5 of 255 count as no degradation.
    """
    quality = None if table is None else jpeg_quality(table)
    if quality is not None and quality > HIGHEST_QUALITY:
        quality = None
    sigma = estimate_noise(image)
    return Degradation(quality, sigma if sigma > SMALLEST_NOISE else 0.0)


def as_channels(array: Array) -> Tensor:
    """Return the gray or RGB channels of an image as floats with white at 1, (c, h, w)."""
    colors = array[..., None] if array.ndim == 2 else array[..., :3]
    return torch.from_numpy(np.ascontiguousarray(colors.transpose(2, 0, 1), np.float32)) / white(array.dtype)


def median_of_uncorrupted(images: Tensor, mask: Tensor) -> Tensor:
    """Replace corrupted pixels (mask 1) by the median of the uncorrupted pixels around them.

    The neighborhood has 3x3 pixels, or 5x5 or 7x7 where all pixels are corrupted. Both arguments are (n, 1, h, w).
    """
    for side in (3, 5, 7):
        known = torch.where(mask > 0, torch.nan, images)
        around = F.unfold(F.pad(known, (side // 2,) * 4, mode="replicate"), side)
        median = around.nanmedian(1).values.reshape(images.shape)
        images = torch.where((mask > 0) & median.isfinite(), median, images)
        mask = mask * median.isnan()
    return images


# -- simulation -------------------------------------------------------------------------------------


class Degraded(NamedTuple):
    """Degraded images with what a stage may know about them, and the images that it should return."""

    images: Tensor  # (n, c, h, w)
    goal: Tensor  # (n, c, h, w)
    level: Tensor  # (n,): amount of degradation
    mask: Tensor | None  # (n, 1, h, w): 1 where pixels are corrupted


class Simulation(ABC):
    """A random degradation of clean images, which stages learn to undo."""

    border = 8  # pixels at each side of a crop that do not count in the loss
    known_level = True  # whether stages are given the level
    multiple = 1  # the sides of images must be multiples of this number

    @abstractmethod
    def __call__(self, truth: Tensor, rng: RandomSource, level: float | None = None) -> Degraded:
        """Degrade images (n, c, h, w) by a given level, or by a random level for each image."""

    def project(self, image: Tensor, truth: Tensor) -> Tensor:
        """Impose constraints on the result of a stage. Default: none."""
        return image


def _levels(level: float | None, low: float, high: float, like: Tensor, rng: RandomSource) -> Tensor:
    """Return the given level, or uniform random levels from `low` to `high`, for each image of a batch."""
    if level is not None:
        return like.new_full((len(like),), float(level))
    return rng.uniform((len(like),), like) * (high - low) + low


class SimulatedReduction(Simulation):
    """Images reduced by `scale` and enlarged by bicubic interpolation, with back-projection after every stage."""

    known_level = False

    def __init__(self, scale: int, rounds: int) -> None:
        self.scale = scale
        self.multiple = scale
        self.rounds = rounds
        self.border = 4 * scale

    def __call__(self, truth: Tensor, rng: RandomSource, level: float | None = None) -> Degraded:
        down, up = _resampling(truth.shape[-1], self.scale, truth.dtype, truth.device)
        small = down @ truth @ down.mT
        # A constant level: errors of all images count equally.
        return Degraded(up @ small @ up.mT, truth, truth.new_full((1,), 0.1), None)

    def project(self, image: Tensor, truth: Tensor) -> Tensor:
        """Apply back-projection, which changes only the error because the truth is consistent."""
        size = truth.shape[-1] // self.scale
        project = _projection(size, self.scale, self.rounds, truth.dtype, truth.device)
        return truth + project((image - truth)[:, 0])[:, None]


@functools.lru_cache(maxsize=8)
def _resampling(side: int, scale: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    down = taps_matrix(reducing_taps(np.arange(side // scale), scale, side))[0]
    up = taps_matrix(enlarging_taps(np.arange(side), scale, side // scale))[0]
    return torch.from_numpy(down).to(device, dtype), torch.from_numpy(up).to(device, dtype)


@functools.lru_cache(maxsize=8)
def _projection(
    size: int, scale: int, rounds: int, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], Tensor]:
    return error_projection(size, scale, rounds, torch.zeros((), dtype=dtype, device=device))


class SimulatedNoise(Simulation):
    """Gaussian noise with a standard deviation from 3 to 80 of 255. RGB is converted to opponent colors."""

    def __call__(self, truth: Tensor, rng: RandomSource, level: float | None = None) -> Degraded:
        # Uniform on a logarithmic scale. A given level is in units of 1/255.
        logarithm = _levels(None if level is None else math.log(level), math.log(3), math.log(80), truth, rng)
        sigma = logarithm.exp() / 255
        noisy = truth + sigma[:, None, None, None] * rng.normal(truth.shape, truth)
        if truth.shape[1] == 1:
            return Degraded(noisy, truth, sigma, None)
        return Degraded(to_opponent(noisy), to_opponent(truth), sigma, None)


class SimulatedJpeg(Simulation):
    """JPEG compression of luminance with a quality from 10 to 98. The level is a quarter of the mean step."""

    def __call__(self, truth: Tensor, rng: RandomSource, level: float | None = None) -> Degraded:
        quality = _levels(level, 10, 98, truth, rng).round()
        starts = (rng.uniform((2, len(truth), 1), truth) * 8).long().clamp(max=7)
        images, amount = compress(truth, quality, starts)
        return Degraded(images, truth, amount, None)


class SimulatedSalt(Simulation):
    """Black and white pixels, from 1 to 50 percent, replaced by the median of their uncorrupted neighbors."""

    def __call__(self, truth: Tensor, rng: RandomSource, level: float | None = None) -> Degraded:
        share = _levels(level, 0.01, 0.5, truth, rng)
        draw = rng.uniform(truth.shape, truth)
        limit = share[:, None, None, None]
        noisy = torch.where(draw < limit, (draw < limit / 2).to(truth), truth)
        mask = ((noisy <= 0) | (noisy >= 1)).to(truth)
        return Degraded(median_of_uncorrupted(noisy, mask), truth, share, mask)


@functools.lru_cache(maxsize=8)
def _constant(name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a small constant, cached on the device: CUDA graphs cannot copy it while they are captured."""
    values = {"opponent": OPPONENT, "waves": dct(np.eye(8), axis=0, norm="ortho"), "steps": STANDARD_STEPS}[name]
    return torch.from_numpy(values).to(device, dtype)


def to_opponent(images: Tensor) -> Tensor:
    """Convert RGB (n, 3, h, w) to opponent colors."""
    return torch.einsum("dc,nchw->ndhw", _constant("opponent", images.dtype, images.device), images)


def compress(images: Tensor, quality: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Apply JPEG compression to luminance (n, 1, h, w).

    `quality` (n,) is from 1 to 100, and `starts` (2, n, 1), from 0 to 7, is the offset of the blocks of each image.
    Return the images, and a quarter of the mean quantization step as a fraction of white, (n,).
    """
    n, _, height, width = images.shape
    device = images.device
    factor = torch.where(quality < 50, 5000 / quality, 200 - 2 * quality)[:, None, None]
    table = _constant("steps", images.dtype, device).reshape(8, 8)
    steps = ((table * factor + 50) / 100).floor().clamp(1, 255)[:, None, None, None]
    full = (images * 255 - 16) * 255 / 219 - 128
    padded = F.pad(full, (8, 8 + -width % 8, 8, 8 + -height % 8), mode="replicate")
    which = torch.arange(n, device=device)[:, None, None]
    rows, columns = (
        8 - starts[axis] + torch.arange(size + -size % 8 + 8, device=device)
        for axis, size in enumerate((height, width))
    )
    moved = padded[which, 0, rows[:, :, None], columns[:, None, :]][:, None]
    waves = _constant("waves", images.dtype, device)
    coefficients = waves @ moved.unfold(2, 8, 8).unfold(3, 8, 8) @ waves.mT / steps
    # Round half away from zero, as libjpeg does.
    rounded = coefficients.sign() * (coefficients.abs() + 0.5 + 1e-5).floor()
    found = (waves.mT @ (rounded * steps) @ waves).permute(0, 1, 2, 4, 3, 5).reshape(moved.shape)
    rows, columns = (starts[axis] + torch.arange(size, device=device) for axis, size in enumerate((height, width)))
    found = found[which, 0, rows[:, :, None], columns[:, None, :]][:, None]
    images = ((found + 128).round().clamp(0, 255) * 219 / 255 + 16) / 255
    return images, 0.25 * steps.mean((1, 2, 3, 4, 5)) / 255
