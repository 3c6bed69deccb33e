"""Luminance according to ITU-R BT.601, in the range of 16 to 235 that the literature measures in."""

from typing import Any

import numpy as np

from mvrbm.vision.images import Array, check_image, round_to, white

#: For R, G, B from 0 to 1: Y from 16 to 235 and Cb, Cr from 16 to 240, in units of a byte.
BT601_MATRIX = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]])
BT601_OFFSET = np.array([16.0, 128.0, 128.0])

#: Increase of R, G and B per increase of luminance at constant chroma.
LUMINANCE_GAIN = 255 / float(BT601_MATRIX[0].sum())


def luminance(image: Array) -> Array:
    """Return the luminance of an image.

    Parameters
    ----------
    image : array (H, W) or (H, W, 3)
        RGB in bytes, 16-bit numbers or floats from 0 to 1. A gray image is its own luminance.

    Returns
    -------
    array (H, W)
        Of the same type: black is 16/255 of white, white 235/255. Whole numbers are rounded.
    """
    if check_image(image).ndim == 2:
        return np.asarray(image)
    image = check_rgb(image)
    row = BT601_MATRIX[0] / 255
    values = sum(image[..., c] * row[c] for c in range(3)) + BT601_OFFSET[0] * white(image.dtype) / 255
    return round_to(values, image.dtype)


def check_rgb(image: Any) -> Array:
    """Return an image, or raise ValueError if it is not RGB."""
    array = check_image(image)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"image must be an array (rows, columns, 3) of RGB, got shape {array.shape}")
    return array
