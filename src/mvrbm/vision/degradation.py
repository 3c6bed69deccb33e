"""Estimate noise and JPEG compression in photographs, and simulate degradations for training.

Simulations run on any device and process batches of image crops of shape (n, c, h, w). Pixel values are scaled so that
white is 1.
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

#: Luminance quantization table in the JPEG standard. The quality setting scales this table.
STANDARD_STEPS = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99],
    ]
).ravel()

#: JPEG files with a quality above this value are considered free of artifacts.
HIGHEST_QUALITY = 95
#: Smallest standard deviation, as a fraction of the white level, that is considered noise.
SMALLEST_NOISE = 1.5 / 255

# Side length of the blocks used to estimate noise, in units of 2x2 pixels.
_BLOCK = 8
# Quantile of the standard deviations of all blocks that serves as the noise estimate.
_QUIET = 0.1
# Maximum ratio of axis-aligned to diagonal variance for a block to look like noise. White noise has a ratio of 1.
_MOST_ANISOTROPY = 1.4
# Minimum fraction of blocks that must look like noise. Otherwise, the noise estimate is 0.
_LEAST_NOISE_BLOCKS = 0.04
# Blocks with a larger fraction of black or white pixels are ignored, because clipping reduces the noise.
_CLIPPED = 0.02
# Minimum fraction of blocks to use, even if they are clipped.
_LEAST_UNCLIPPED = 0.25
# Minimum fraction of isolated black pixels, and of isolated white pixels, in salt-and-pepper noise.
_LEAST_SALT = 0.001
# Minimum fraction of the isolated pixels that must differ clearly from their neighbors.
_LEAST_OUTSTANDING = 0.6
# Minimum difference between a corrupted pixel and its neighbors, in standard deviations of the noise.
_STANDS_OUT = 4.0


class Degradation(NamedTuple):
    """JPEG quality and noise level of a photograph."""

    quality: int | None  # JPEG quality, or None if there are no JPEG artifacts
    noise: float  # standard deviation as a fraction of the white level

    def __str__(self) -> str:
        parts = [f"JPEG artifacts (quality {self.quality})"] if self.quality is not None else []
        parts += [f"noise (standard deviation {255 * self.noise:.1f}/255)"] if self.noise else []
        return " and ".join(parts) or "nothing"


def jpeg_steps(quality: float) -> NDArray[np.int64]:
    """Return libjpeg's luminance quantization table for a quality between 1 and 100, as an array of shape (64,)."""
    factor = 5000 // quality if quality < 50 else 200 - 2 * quality
    return np.clip((STANDARD_STEPS * factor + 50) // 100, 1, 255).astype(np.int64)


def jpeg_quality(table: Sequence[int]) -> int:
    """Return the JPEG quality, from 1 to 100, whose luminance quantization table is closest to `table` on average."""
    given = np.log(np.asarray(table, np.float64).mean())
    return min(range(1, 101), key=lambda quality: abs(math.log(jpeg_steps(quality).mean()) - given))


def estimate_noise(image: Any) -> float:
    """Estimate the standard deviation of Gaussian noise in a photograph, as a fraction of the white level.

    White noise has the same variance in all directions, whereas image detail is stronger along rows and columns than
    along diagonals. The estimate is based on the 10 percent of the image blocks with the lowest variance. It is 0 if
    too few blocks look like white noise.

    Parameters
    ----------
    image : array of shape (H, W), (H, W, 3) or (H, W, 4)
        Grayscale, RGB or RGBA image of dtype uint8, uint16 or float. Floats must be between 0 and 1. The alpha channel
        is ignored.
    """
    array = check_image(image)
    pixels = array[..., None] if array.ndim == 2 else array[..., :3]
    even = pixels[: len(pixels) // 2 * 2, : pixels.shape[1] // 2 * 2].astype(np.float32) / white(array.dtype)
    if even.size == 0:
        return 0.0
    a, b, c, d = even[::2, ::2], even[::2, 1::2], even[1::2, ::2], even[1::2, 1::2]
    # Haar wavelet coefficients of 2x2 pixels: diagonal, vertical and horizontal differences.
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
    # Expected deviation of the lowest decile from the mean, relative to the mean, if all blocks are equally noisy.
    by_chance = 1.28 / math.sqrt(2 * height * width * blocks.shape[-1])
    return float(lowest / (1 - min(by_chance, 0.5)))


def estimate_salt(image: Any) -> float:
    """Estimate the fraction of pixels replaced by salt-and-pepper noise.

    Salt-and-pepper noise is detected if the image has both isolated black pixels and isolated white pixels that differ
    from their neighbors by more than Gaussian noise could explain. Otherwise, the estimate is 0. Pixels are counted
    separately in each channel.

    Parameters
    ----------
    image : array of shape (H, W), (H, W, 3) or (H, W, 4)
        Grayscale, RGB or RGBA image of dtype uint8, uint16 or float. Floats must be between 0 and 1. The alpha channel
        is ignored.
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
    """Estimate the JPEG compression and the noise of a photograph.

    The JPEG quality is estimated from `table`, the luminance quantization table of the JPEG file. The quality is None
    if `table` is None or if the estimate is above 95. The noise level is 0 if the estimated standard deviation is at
    most 1.5/255.
    """
    quality = None if table is None else jpeg_quality(table)
    if quality is not None and quality > HIGHEST_QUALITY:
        quality = None
    sigma = estimate_noise(image)
    return Degradation(quality, sigma if sigma > SMALLEST_NOISE else 0.0)


def as_channels(array: Array) -> Tensor:
    """Convert the grayscale or RGB channels of an image to a float tensor of shape (c, h, w), with white at 1."""
    colors = array[..., None] if array.ndim == 2 else array[..., :3]
    return torch.from_numpy(np.ascontiguousarray(colors.transpose(2, 0, 1), np.float32)) / white(array.dtype)


def median_of_uncorrupted(images: Tensor, mask: Tensor) -> Tensor:
    """Replace each corrupted pixel with the median of its uncorrupted neighbors.

    The neighborhood has 3x3 pixels. If all of them are corrupted, it is enlarged to 5x5 pixels and, if necessary, to
    7x7 pixels. `images` and `mask` have shape (n, 1, h, w). `mask` is 1 for corrupted pixels.
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
    """Degraded images, target images, and the degradation levels and masks that are passed to stages."""

    images: Tensor  # (n, c, h, w)
    goal: Tensor  # (n, c, h, w)
    level: Tensor  # (n,): amount of degradation
    mask: Tensor | None  # (n, 1, h, w): 1 where pixels are corrupted


class Simulation(ABC):
    """Base class for random image degradations that stages learn to undo."""

    border = 8  # number of pixels on each side of a crop that the loss ignores
    known_level = True  # whether stages receive the level
    multiple = 1  # height and width of the images must be multiples of this number

    @abstractmethod
    def __call__(self, truth: Tensor, rng: RandomSource, level: float | None = None) -> Degraded:
        """Degrade images of shape (n, c, h, w). If `level` is None, a random level is drawn for each image."""

    def project(self, image: Tensor, truth: Tensor) -> Tensor:
        """Impose known constraints on the output of a stage. By default, the output is returned unchanged."""
        return image


def _levels(level: float | None, low: float, high: float, like: Tensor, rng: RandomSource) -> Tensor:
    """Return one level per image. If `level` is None, the levels are drawn uniformly between `low` and `high`."""
    if level is not None:
        return like.new_full((len(like),), float(level))
    return rng.uniform((len(like),), like) * (high - low) + low


class SimulatedReduction(Simulation):
    """Bicubic downscaling by a factor of `scale` followed by bicubic enlargement to the original size.

    Back-projection is applied after each stage.
    """

    known_level = False

    def __init__(self, scale: int, rounds: int) -> None:
        self.scale = scale
        self.multiple = scale
        self.rounds = rounds
        self.border = 4 * scale

    def __call__(self, truth: Tensor, rng: RandomSource, level: float | None = None) -> Degraded:
        down, up = _resampling(truth.shape[-1], self.scale, truth.dtype, truth.device)
        small = down @ truth @ down.mT
        # A constant level gives the errors of all images the same weight.
        return Degraded(up @ small @ up.mT, truth, truth.new_full((1,), 0.1), None)

    def project(self, image: Tensor, truth: Tensor) -> Tensor:
        """Return the image after back-projection.

        Back-projection does not change the true image, which is already consistent with the low-resolution image, so
        only the error of the image is projected.
        """
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
    """Gaussian noise with a standard deviation from 3/255 to 80/255. RGB images are converted to opponent colors."""

    def __call__(self, truth: Tensor, rng: RandomSource, level: float | None = None) -> Degraded:
        # Levels are uniform on a logarithmic scale. `level` is in units of 1/255.
        logarithm = _levels(None if level is None else math.log(level), math.log(3), math.log(80), truth, rng)
        sigma = logarithm.exp() / 255
        noisy = truth + sigma[:, None, None, None] * rng.normal(truth.shape, truth)
        if truth.shape[1] == 1:
            return Degraded(noisy, truth, sigma, None)
        return Degraded(to_opponent(noisy), to_opponent(truth), sigma, None)


class SimulatedJpeg(Simulation):
    """JPEG compression of the luminance with a quality between 10 and 98.

    The level of a degraded image is one quarter of the mean quantization step, as a fraction of the white level.
    """

    def __call__(self, truth: Tensor, rng: RandomSource, level: float | None = None) -> Degraded:
        quality = _levels(level, 10, 98, truth, rng).round()
        starts = (rng.uniform((2, len(truth), 1), truth) * 8).long().clamp(max=7)
        images, amount = compress(truth, quality, starts)
        return Degraded(images, truth, amount, None)


class SimulatedSalt(Simulation):
    """Salt-and-pepper noise that affects 1 to 50 percent of the pixels.

    Corrupted pixels are replaced with the median of their uncorrupted neighbors.
    """

    def __call__(self, truth: Tensor, rng: RandomSource, level: float | None = None) -> Degraded:
        share = _levels(level, 0.01, 0.5, truth, rng)
        draw = rng.uniform(truth.shape, truth)
        limit = share[:, None, None, None]
        noisy = torch.where(draw < limit, (draw < limit / 2).to(truth), truth)
        mask = ((noisy <= 0) | (noisy >= 1)).to(truth)
        return Degraded(median_of_uncorrupted(noisy, mask), truth, share, mask)


@functools.lru_cache(maxsize=8)
def _constant(name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the constant tensor with the given name.

    The tensor is cached because it cannot be copied to the device during CUDA graph capture.
    """
    values = {"opponent": OPPONENT, "waves": dct(np.eye(8), axis=0, norm="ortho"), "steps": STANDARD_STEPS}[name]
    return torch.from_numpy(values).to(device, dtype)


def to_opponent(images: Tensor) -> Tensor:
    """Convert RGB images of shape (n, 3, h, w) to opponent colors."""
    return torch.einsum("dc,nchw->ndhw", _constant("opponent", images.dtype, images.device), images)


def compress(images: Tensor, quality: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Apply JPEG compression to luminance images of shape (n, 1, h, w).

    `quality` has shape (n,) and values between 1 and 100. `starts` has shape (2, n, 1) and contains the vertical and
    horizontal offsets of the JPEG blocks in each image, between 0 and 7. Returns the decompressed images and a tensor
    of shape (n,) with their artifact levels. An artifact level is one quarter of the mean quantization step, as a
    fraction of the white level.
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
