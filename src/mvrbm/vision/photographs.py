r"""Photographs: noise and traces of JPEG are estimated, and removed by the stages that come with the package.

Gaussian noise is removed from gray images and from the three channels of color together, in an orthonormal space of
opponent colors. JPEG is removed from luminance. Salt and pepper starts from the median of uncorrupted neighbors.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mvrbm.devices import resolve_device
from mvrbm.extras import require
from mvrbm.validation import choice, number
from mvrbm.vision.color import LUMINANCE_GAIN, luminance
from mvrbm.vision.denoising import NOISES
from mvrbm.vision.images import Array, check_image, to_dtype, white
from mvrbm.vision.shipped import ShippedStages
from mvrbm.vision.stages import Progress

#: Rows: brightness, red against blue, green against both; orthonormal, so that noise keeps its size.
OPPONENT = np.array([[1, 1, 1], [1, 0, -1], [0.5, -1, 0.5]]) / np.sqrt([[3.0], [2.0], [1.5]])

#: The luminance table of the JPEG standard, which qualities scale.
STANDARD_STEPS = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99],
    ]
).ravel()

_BLOCK = 8  # side of the blocks that the noise is estimated from, in details of 2x2 pixels
_QUIET = 0.1  # the share of blocks that hold least detail, which is taken for noise
_WHITE, _LEAST_WHITE = 1.4, 0.04  # how even the details of noise are, and the least share of such blocks
_CUT, _LEAST_CUT = 0.02, 0.25  # blocks with more black or white pixels do not count, but for the quarter with fewest
_SMALLEST_NOISE = 1.5 / 255  # what is below this is left alone, as a share of white
_HIGHEST_QUALITY = 95  # JPEG above this is left alone
_LEAST_SALT, _FAR_SALT = 0.001, 0.6  # pixels that are black or white all alone, and the share of them that stands out
# Largest pattern that is taken for noise, against it, and pixels that it is averaged over.
_ALTERNATING, _REACH = 0.1, 25
_FARTHEST = 2.0  # how far noise takes floats beyond black and white: seven standard deviations of 75 of 255
_STANDS_OUT = 4.0  # how far from its neighbors, in standard deviations of the noise


class Degradation(NamedTuple):
    """What is wrong with a photograph."""

    quality: int | None  # of JPEG, None for other files
    noise: float  # standard deviation as a share of white

    def __str__(self) -> str:
        parts = [f"JPEG of quality {self.quality}"] if self.quality is not None else []
        parts += [f"noise of {255 * self.noise:.1f} of 255"] if self.noise else []
        return " and ".join(parts) or "nothing"


def jpeg_steps(quality: float) -> NDArray[np.int64]:
    """Return the luminance table (64,) of a quality from 1 to 100, as libjpeg makes it."""
    factor = 5000 // quality if quality < 50 else 200 - 2 * quality
    return np.clip((STANDARD_STEPS * factor + 50) // 100, 1, 255).astype(np.int64)


def jpeg_quality(table: Sequence[int]) -> int:
    """Return the quality from 1 to 100 whose luminance table is nearest to a given one."""
    given = np.log(np.asarray(table, np.float64).mean())
    return min(range(1, 101), key=lambda quality: abs(math.log(jpeg_steps(quality).mean()) - given))


def estimate_noise(image: Any) -> float:
    """Return the standard deviation of Gaussian noise on a photograph, as a share of white.

    White noise is as strong in all of the finest details, and everywhere; the detail of images is stronger along rows
    and columns. Blocks of details are measured, and the quietest tenth counts. It is 0 if hardly any block is white.

    Parameters
    ----------
    image : array (H, W), (H, W, 3) or (H, W, 4)
        Bytes, 16-bit numbers or floats from 0 to 1. Alpha is ignored.
    """
    array = check_image(image)
    pixels = array[..., None] if array.ndim == 2 else array[..., :3]
    even = pixels[: len(pixels) // 2 * 2, : pixels.shape[1] // 2 * 2].astype(np.float32) / white(array.dtype)
    if even.size == 0:
        return 0.0
    a, b, c, d = even[::2, ::2], even[::2, 1::2], even[1::2, ::2], even[1::2, 1::2]
    bands = (
        np.stack([a - b - c + d, a + b - c - d, a - b + c - d]) / 2
    )  # details of 2x2 pixels: diagonal, rows, columns
    rows, columns = (max(1, size // _BLOCK) for size in a.shape[:2])
    high, wide = a.shape[0] // rows, a.shape[1] // columns

    def in_blocks(values: Array) -> Array:
        some = values[..., : rows * high, : columns * wide, :]
        return some.reshape(*values.shape[:-3], rows, high, columns, wide, values.shape[-1])

    blocks = in_blocks(bands)
    cut = in_blocks(((a == 0) | (a == 1)).astype(np.float32)).mean((1, 3, 4))
    # Where black or white cuts noise off, there is less of it.
    whole = (cut <= max(_CUT, np.quantile(cut, _LEAST_CUT))) | (cut > 1 - _CUT)
    diagonal, *others = blocks.var((2, 4)).mean(-1)
    noise = sum(others) / 2 < _WHITE * diagonal  # detail of images is stronger along rows and columns
    if max(noise.mean(), noise[whole].mean()) < _LEAST_WHITE:
        return 0.0
    deviations, counted = np.sqrt(diagonal), whole if (noise & whole).any() else np.ones_like(whole)
    lowest = min(np.quantile(deviations[some], _QUIET) for some in (counted, counted & noise))
    by_chance = 1.28 / math.sqrt(2 * high * wide * blocks.shape[-1])  # by so much a tenth of equal blocks is lower
    return float(lowest / (1 - min(by_chance, 0.5)))


def estimate_salt(image: Any) -> float:
    """Return the share of pixels that salt and pepper has hit, 0 for a photograph without it.

    It is there if pixels are black, and others white, all alone among their neighbors, and further from them than
    noise explains. Black and white count in each channel.

    Parameters
    ----------
    image : array (H, W), (H, W, 3) or (H, W, 4)
        Bytes, 16-bit numbers or floats from 0 to 1. Alpha is ignored.
    """
    pixels = _channels(check_image(image))[:, None]  # (c, 1, h, w)
    kinds = torch.stack([pixels <= 0, pixels >= 1]).float()
    alone = torch.stack([(kind > 0) & (9 * F.avg_pool2d(kind, 3, 1, 1) < 1.5) for kind in kinds])
    counts = alone.sum((1, 2, 3, 4))
    if float(counts.min()) < max(_LEAST_SALT * pixels.numel(), float(counts.max()) / 4):
        return 0.0
    hit = kinds.sum(0)
    others = median_of_uncorrupted(pixels, hit)
    noise = estimate_noise(others[:, 0].permute(1, 2, 0).numpy())
    far = (hit > 0) & ((pixels - others).abs() > max(_STANDS_OUT * noise, 0.1))
    enough = bool(((alone & far).sum((1, 2, 3, 4)) >= _FAR_SALT * counts).all())
    return float(far.float().mean()) if enough else 0.0


def _channels(array: Array) -> Tensor:
    """Return gray or the three colors of an image as floats with white at 1, (c, h, w)."""
    colors = array[..., None] if array.ndim == 2 else array[..., :3]
    return torch.from_numpy(np.ascontiguousarray(colors.transpose(2, 0, 1), np.float32)) / white(array.dtype)


def denoise_photograph(
    image: Any,
    *,
    noise: str | None = None,
    level: float | None = None,
    device: Any = "auto",
    progress: Progress | None = None,
) -> Array:
    """Remove noise from a photograph.

    Parameters
    ----------
    image : array (H, W), (H, W, 3) or (H, W, 4)
        Gray, RGB or RGBA, in bytes, 16-bit numbers or floats from 0 to 1. Alpha stays as it is.
    noise : {"gaussian", "salt-and-pepper"}, optional
        Kind of noise. Salt and pepper are the pixels that are exactly black or white, in each channel. Default: salt
        and pepper if :func:`estimate_salt` finds any, otherwise Gaussian; Gaussian if `level` is given.
    level : float, optional
        Standard deviation of Gaussian noise as a share of white; default: estimated. Not for salt and pepper.
    device : str
        ``"auto"`` is a GPU if there is one.
    progress : callable, optional
        Called with the number of finished parts and their total.

    Returns
    -------
    array like `image`
        Of the same shape and type.

    Examples
    --------
    >>> import numpy as np
    >>> from mvrbm.vision import denoise_photograph
    >>> noisy = np.random.default_rng(0).normal(128, 10, (40, 40)).astype(np.uint8)
    >>> bool(denoise_photograph(noisy, device="cpu").std() < 0.5 * noisy.std())
    True
    """
    array = check_image(image, unit_range=True, noise=_FARTHEST)
    if array.ndim == 3 and array.shape[2] not in (3, 4):
        raise ValueError(f"image must be gray, RGB or RGBA, got {array.shape[2]} channels")
    if level is not None:
        if noise == "salt-and-pepper":
            raise ValueError(f"level must be left out for salt and pepper on photographs, got {level}")
        number(level, "level, as a share of white (0.098 for 25 of 255),", 0, 1, exclude_low=True)
    if noise is None:
        noise = "salt-and-pepper" if level is None and estimate_salt(array) else "gaussian"
    salty = choice(noise, "noise", NOISES) == "salt-and-pepper"
    where = resolve_device(device)
    pixels = _channels(array).to(where)
    if salty:
        clean = torch.cat([_without_salt(each[None], where, progress) for each in pixels])
    else:
        sigma = estimate_noise(array) if level is None else level
        clean = _without_noise(pixels, sigma, progress) if sigma > 0 else pixels
    found = to_dtype(clean.cpu().numpy().transpose(1, 2, 0), array.dtype)
    return found[..., 0] if array.ndim == 2 else np.concatenate([found, array[..., 3:]], 2)


def _without_noise(pixels: Tensor, sigma: float, progress: Progress | None) -> Tensor:
    stages = ShippedStages("gray" if len(pixels) == 1 else "color", pixels.device)
    if len(pixels) == 1:
        return _without_alternation(stages.run_mirrored(pixels, level=sigma, progress=progress), sigma)
    opponent = torch.from_numpy(OPPONENT).to(pixels)
    found = stages.run_mirrored(torch.einsum("dc,chw->dhw", opponent, pixels), level=sigma, progress=progress)
    return torch.einsum("dc,dhw->chw", opponent, _without_alternation(found, sigma))


def _without_alternation(pixels: Tensor, sigma: float) -> Tensor:
    """Remove weak patterns that alternate from pixel to pixel, as far as noise explains them: (c, h, w).

    The derivatives of a stage are differences of every other pixel. They do not see such patterns, and leave them.
    """
    high, wide = (1 - 2 * (torch.arange(size, device=pixels.device) % 2) for size in pixels.shape[1:])
    weights = pixels.new_tensor([0.25, 0.5, 0.25])  # of a mean that has no such pattern
    around = F.pad(pixels[:, None], (1, 1, 1, 1), mode="replicate")
    fine = pixels - F.conv2d(around, torch.outer(weights, weights)[None, None])[:, 0]
    limit = _ALTERNATING * sigma
    for signs in (high[:, None], wide[None], torch.outer(high, wide)):
        size = F.avg_pool2d((fine * signs).clamp(-limit, limit), _REACH, 1, _REACH // 2, count_include_pad=False)
        pixels = pixels - size * signs
    return pixels


def _without_salt(channel: Tensor, device: torch.device, progress: Progress | None) -> Tensor:
    mask = ((channel <= 0) | (channel >= 1)).float()
    if not mask.any():
        return channel
    start = median_of_uncorrupted(channel[None], mask[None])[0]
    return ShippedStages("salt", device).run_mirrored(start, mask=mask, progress=progress)


def restore_photograph(image: Any, mask: Any, *, device: Any = "auto", progress: Progress | None = None) -> Array:
    """Fill scratches or text on a photograph: biharmonic interpolation, made better by the stages for salt and pepper.

    Parameters
    ----------
    image : array (H, W), (H, W, 3) or (H, W, 4)
        Gray, RGB or RGBA, in bytes, 16-bit numbers or floats from 0 to 1. Alpha stays as it is.
    mask : array (H, W)
        Where pixels are missing: True, or more than half of white.
    device, progress : str, callable, optional
        As for :func:`denoise_photograph`.

    Returns
    -------
    array like `image`
        Of the same shape and type. Pixels that are not missing are unchanged.
    """
    array, given = check_image(image, unit_range=True), np.asarray(mask)
    if given.shape != array.shape[:2]:
        raise ValueError(f"mask must be an array of the image's size, {array.shape[:2]}, got shape {given.shape}")
    missing = given if given.dtype == bool else given > white(given.dtype) / 2
    if missing.all():
        raise ValueError("mask must leave some pixels of the image, got one that is missing everywhere")
    colors = array[..., None] if array.ndim == 2 else array[..., :3]
    inpaint = require("skimage.restoration", "restoring a photograph", "data").inpaint_biharmonic
    pixels = colors.astype(np.float32) / np.float32(white(array.dtype))
    start = inpaint(pixels, missing, split_into_regions=True, channel_axis=-1).astype(np.float32)
    where = resolve_device(device)
    stages, holes = ShippedStages("salt", where), torch.from_numpy(missing.astype(np.float32))[None].to(where)
    channels = torch.from_numpy(np.ascontiguousarray(start.transpose(2, 0, 1))).to(where)
    filled = torch.cat([stages.run_mirrored(each[None], mask=holes, progress=progress) for each in channels])
    found = np.where(missing[..., None], to_dtype(filled.cpu().numpy().transpose(1, 2, 0), array.dtype), colors)
    return found[..., 0] if array.ndim == 2 else np.concatenate([found, array[..., 3:]], 2)


def median_of_uncorrupted(images: Tensor, mask: Tensor) -> Tensor:
    """Replace corrupted pixels (mask 1) by the median of the others within 3x3, 5x5 or 7x7: (n, 1, h, w) for both."""
    for side in (3, 5, 7):
        known = torch.where(mask > 0, torch.nan, images)
        around = F.unfold(F.pad(known, (side // 2,) * 4, mode="replicate"), side)
        median = around.nanmedian(1).values.reshape(images.shape)
        images = torch.where((mask > 0) & median.isfinite(), median, images)
        mask = mask * median.isnan()
    return images


def estimate_degradation(image: Any, table: Sequence[int] | None = None) -> Degradation:
    """Say what is wrong with a photograph, given the luminance table of its JPEG file if it comes from one.

    JPEG of a quality above 95 and noise below 1.5 of 255 count as nothing.
    """
    quality = None if table is None else jpeg_quality(table)
    sigma = estimate_noise(image)
    return Degradation(
        None if quality is None or quality > _HIGHEST_QUALITY else quality, sigma if sigma > _SMALLEST_NOISE else 0.0
    )


def clean_photograph(
    image: Any,
    degradation: Degradation,
    *,
    strength: float = 1.0,
    device: Any = "auto",
    progress: Progress | None = None,
) -> Array:
    """Remove traces of JPEG and then noise from a photograph, as much as `strength` says.

    `degradation` is what :func:`estimate_degradation` returns.
    """
    array = check_image(image, unit_range=True)
    number(strength, "strength", 0, 4)
    if degradation.quality is not None and strength > 0:
        level = strength * 0.25 * float(jpeg_steps(degradation.quality).mean()) / 255
        array = _without_jpeg(array, level, resolve_device(device), progress)
    if degradation.noise * strength > 0:
        array = denoise_photograph(
            array, level=min(1.0, strength * degradation.noise), device=device, progress=progress
        )
    return array


def _without_jpeg(image: Array, level: float, device: torch.device, progress: Progress | None) -> Array:
    colors = image if image.ndim == 2 else image[..., :3]
    pixels = colors.astype(np.float32) / np.float32(white(image.dtype))
    before = luminance(pixels)
    start = torch.from_numpy(np.ascontiguousarray(before))[None].to(device)
    after = ShippedStages("jpeg", device).run_mirrored(start, level=level, progress=progress)[0].cpu().numpy()
    if image.ndim == 2:
        return to_dtype(after, image.dtype)
    pixels += np.float32(LUMINANCE_GAIN) * (after - before)[..., None]
    return np.concatenate([to_dtype(pixels, image.dtype), image[..., 3:]], 2)
