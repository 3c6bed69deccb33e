"""Color spaces: opponent colors and, as in the super-resolution literature, ITU-R BT.601 luminance (16 to 235)."""

from typing import Any

import numpy as np

from mvrbm.vision.images import Array, check_image, round_to, white

#: Matrix that converts R, G and B in [0, 1] to Y (16 to 235), Cb and Cr (16 to 240), before the offset is added.
BT601_MATRIX = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]])
BT601_OFFSET = np.array([16.0, 128.0, 128.0])

#: Increase in R, G and B per unit of luminance at constant chroma.
LUMINANCE_GAIN = 255 / float(BT601_MATRIX[0].sum())

#: Orthonormal transform from RGB to opponent colors. White noise stays white under this transform. Up to normalization,
#: the rows are brightness, red minus blue, and green subtracted from the mean of red and blue.
OPPONENT = np.array([[1, 1, 1], [1, 0, -1], [0.5, -1, 0.5]]) / np.sqrt([[3.0], [2.0], [1.5]])


def luminance(image: Array) -> Array:
    """Return the luminance of an image.

    Parameters
    ----------
    image : array of shape (H, W) or (H, W, 3)
        Grayscale or RGB image of dtype uint8, uint16 or float. Floats must be between 0 and 1. Grayscale images are
        returned unchanged.

    Returns
    -------
    array of shape (H, W)
        Luminance with the same dtype as `image`. For RGB images, it ranges from 16/255 (black) to 235/255 (white) of
        the maximum value, and integers are rounded.
    """
    if check_image(image).ndim == 2:
        return np.asarray(image)
    image = check_rgb(image)
    row = BT601_MATRIX[0] / 255
    values = sum(image[..., c] * row[c] for c in range(3)) + BT601_OFFSET[0] * white(image.dtype) / 255
    return round_to(values, image.dtype)


def check_rgb(image: Any) -> Array:
    """Convert an image to an array of shape (H, W, 3), or raise ValueError if it is not RGB."""
    array = check_image(image)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"image must be an RGB array of shape (rows, columns, 3), got shape {array.shape}")
    return array
