"""Color spaces: ITU-R BT.601 luminance in the range 16 to 235, as the literature measures it, and opponent colors."""

from typing import Any

import numpy as np

from mvrbm.vision.images import Array, check_image, round_to, white

#: Matrix from R, G, B in [0, 1] to Y (16 to 235) and Cb, Cr (16 to 240), in bytes, before the offset.
BT601_MATRIX = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]])
BT601_OFFSET = np.array([16.0, 128.0, 128.0])

#: Increase of R, G and B per unit of luminance at constant chroma.
LUMINANCE_GAIN = 255 / float(BT601_MATRIX[0].sum())

#: Orthonormal opponent colors, which keep white noise white. Rows: brightness, red minus blue, green minus both.
OPPONENT = np.array([[1, 1, 1], [1, 0, -1], [0.5, -1, 0.5]]) / np.sqrt([[3.0], [2.0], [1.5]])


def luminance(image: Array) -> Array:
    """Return the luminance of an image.

    Parameters
    ----------
    image : array (H, W) or (H, W, 3)
        RGB in bytes, 16-bit integers or floats from 0 to 1. Gray images are returned unchanged.

    Returns
    -------
    array (H, W)
        Luminance of the same type: black is 16/255 and white 235/255 of its white. Integers are rounded.
    """
    if check_image(image).ndim == 2:
        return np.asarray(image)
    image = check_rgb(image)
    row = BT601_MATRIX[0] / 255
    values = sum(image[..., c] * row[c] for c in range(3)) + BT601_OFFSET[0] * white(image.dtype) / 255
    return round_to(values, image.dtype)


def check_rgb(image: Any) -> Array:
    """Return an image as an array, or raise ValueError if it is not RGB."""
    array = check_image(image)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"image must be an array (rows, columns, 3) of RGB, got shape {array.shape}")
    return array
