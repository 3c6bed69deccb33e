"""Pictures for the documentation: crops at twice their size, before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from mvrbm.vision import (
    SuperResolver,
    clean_photograph,
    denoise_photograph,
    enlarge_image,
    estimate_degradation,
    reduce_image,
)
from mvrbm.vision.resampling import crop_to_multiple
from studies.photographs.measuring import degraded_picture, unseen

__all__ = ["write_pictures"]

Array = NDArray[Any]
Crop = tuple[slice, slice]

_GAP = 6


def _sheet(rows: list[list[Array]], zoom: int) -> Array:
    """Arrange crops in rows, with each pixel enlarged to a square."""

    def padded(image: Array, down: int, across: int) -> Array:
        return np.pad(image, ((0, down), (0, across), (0, 0)), constant_values=255)

    lines = [np.concatenate([padded(each.repeat(zoom, 0).repeat(zoom, 1), 0, _GAP) for each in row], 1) for row in rows]
    return np.concatenate([padded(line, _GAP, 0) for line in lines])[:-_GAP, :-_GAP]


def _color(image: Array) -> Array:
    return image if image.ndim == 3 else image[..., None].repeat(3, 2)


def _enlarged(truth: Array, scale: int, crop: Crop, quality: int | None = None) -> list[Array]:
    """Return crops of the bicubic image, of ours and of the truth. With a quality, the input is a JPEG."""
    truth = crop_to_multiple(truth, scale)
    low = reduce_image(truth, scale)
    low, table = (low, None) if quality is None else degraded_picture(low, "jpeg", quality)
    clean = clean_photograph(low, estimate_degradation(low, table), device="cpu")
    large = SuperResolver.pretrained(scale, device="cpu").upscale(clean)
    return [_color(each[crop]) for each in (enlarge_image(low, scale), large, truth)]


def _denoised(truth: Array, sigma: int, crop: Crop) -> list[Array]:
    """Return crops of the noisy image, of the denoised one and of the truth."""
    noisy, _ = degraded_picture(truth, "noise", sigma)
    return [_color(each[crop]) for each in (noisy, denoise_photograph(noisy, device="cpu"), truth)]


def _drawing() -> Array:
    """Draw thin lines, 160x160 pixels."""
    image = Image.new("L", (640, 640), 255)
    draw = ImageDraw.Draw(image)
    for size in range(40, 320, 56):
        draw.ellipse((320 - size, 320 - size, 320 + size, 320 + size), outline=0, width=6)
        draw.line((0, 2 * size, 640, 600 - 2 * size), fill=0, width=6)
    return np.asarray(image.reduce(4))


def write_pictures(folder: Path) -> list[str]:
    """Write the pictures, all of photographs that were not used for training."""
    rocket = unseen("rocket")[268:, 472:]
    motorcycle = unseen("stereo_motorcycle")[264:472, 72:304]
    page = unseen("page")[:160, 132:364]
    cat = unseen("chelsea")[4:212, 52:284]
    columns = slice(68, 168)
    tower, wheel, text, eye = ((slice(top, top + 80), columns) for top in (67, 66, 20, 66))
    lines = (slice(40, 120), slice(30, 130))
    enlarged = [_enlarged(rocket, 2, tower), _enlarged(rocket, 4, tower), _enlarged(page, 2, text)]
    sheets = {
        "super-resolution": [*enlarged, _enlarged(cat, 2, eye), _enlarged(_drawing(), 2, lines)],
        "super-resolution-jpeg": [_enlarged(motorcycle, 2, wheel, 50), _enlarged(rocket, 2, tower, 30)],
        "denoising": [
            _denoised(motorcycle, 25, wheel),
            _denoised(rocket, 50, tower),
            _denoised(page, 25, text),
            _denoised(cat, 25, eye),
        ],
    }
    for name, rows in sheets.items():
        Image.fromarray(_sheet(rows, 2)).save(folder / f"{name}.png", optimize=True)
    return [str(folder / f"{name}.png") for name in sheets]
