"""Noise on images: adding it, and a robust estimate of its standard deviation. Its removal is in ``denoising``."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvrbm.validation import choice, number
from mvrbm.vision.images import Array, check_grey_images, white

#: The kinds of noise. The level of salt-and-pepper noise is the share of pixels that it replaces, half of them by
#: black and half by white; the level of Gaussian noise is its standard deviation as a share of white.
NOISES = ("salt-and-pepper", "gaussian")


def add_noise(images: Any, noise: str = "salt-and-pepper", level: float = 0.1, seed: int = 0) -> Array:
    r"""Return images with noise.

    Parameters
    ----------
    images : array (n, rows, columns) or (rows, columns)
        Grey images: bytes, or floats from 0 (black) to 1 (white).
    noise : {"salt-and-pepper", "gaussian"}
        Salt-and-pepper noise replaces a pixel with probability `level` by black or white, which are equally likely.
        Gaussian noise is added: :math:`y = x + \text{level} \cdot \varepsilon`, :math:`\varepsilon \sim N(0, 1)`.
    level : float
        Amount of noise: from 0 to 1 for salt-and-pepper noise, and the standard deviation of Gaussian noise as a
        share of white, so that 0.1 is 25.5 for bytes.
    seed : int
        Random seed.

    Returns
    -------
    array like `images`
        Of the same shape and type. Bytes are rounded and clipped to 0 to 255; floats are not clipped.
    """
    array = check_grey_images(images)
    random, top = np.random.default_rng(seed), int(white(array.dtype))
    if choice(noise, "noise", NOISES) == "gaussian":
        noisy = array + number(level, "level") * top * random.standard_normal(array.shape)
        return (np.clip(np.rint(noisy), 0, 255) if top == 255 else noisy).astype(array.dtype)
    number(level, "level", 0, 1, exclude_high=False)
    draws = random.random(array.shape)
    return np.where(draws < level / 2, 0, np.where(draws < level, top, array)).astype(array.dtype)


def robust_sigma(images: Array) -> float:
    r"""Return the standard deviation of Gaussian noise on images (n, rows, columns), from their finest details.

    For each block of 2x2 pixels :math:`d = (a - b - c + e) / 2` has the standard deviation of the noise and hardly
    depends on a smooth image; :math:`\operatorname{median} |d| / 0.6745` is robust against the few edges (Donoho and
    Johnstone, 1994). It is 0 if images have no 2x2 blocks.
    """
    rows, columns = images.shape[1] // 2 * 2, images.shape[2] // 2 * 2
    if not rows * columns:
        return 0.0
    even = np.asarray(images[:, :rows, :columns], np.float64)
    detail = (even[:, ::2, ::2] - even[:, 1::2, ::2] - even[:, ::2, 1::2] + even[:, 1::2, 1::2]) / 2
    return float(np.median(np.abs(detail)) / 0.67448975)
