"""Conversion between RGB and YCbCr, for baselines that enlarge color images as published."""

from typing import Any

import numpy as np

from mvrbm.vision.color import BT601_MATRIX, BT601_OFFSET, check_rgb
from mvrbm.vision.images import Array, to_dtype, white

_INVERSE = np.linalg.inv(BT601_MATRIX)


def to_ycbcr(image: Array) -> Array:
    """Convert RGB to luminance and chroma, without rounding.

    Parameters
    ----------
    image : array (H, W, 3)
        RGB in bytes, 16-bit numbers or floats from 0 to 1.

    Returns
    -------
    float array (H, W, 3)
        Y, Cb, Cr with white at 1: Y from 16/255 to 235/255, Cb and Cr from 16/255 to 240/255. Single precision for
        images of whole numbers, otherwise the type of the image.
    """
    image = check_rgb(image)
    kind = np.dtype(np.float32) if image.dtype.kind == "u" else image.dtype
    values = (image.astype(kind) / kind.type(white(image.dtype))) @ (BT601_MATRIX.T / 255).astype(kind)
    return np.asarray(values + (BT601_OFFSET / 255).astype(kind))


def from_ycbcr(image: Array, dtype: Any = np.float32) -> Array:
    """Convert luminance and chroma to RGB.

    Parameters
    ----------
    image : float array (H, W, 3)
        Y, Cb, Cr as returned by :func:`to_ycbcr`.
    dtype : dtype
        Type of the result: bytes or 16-bit numbers, rounded and clipped, or floats, clipped to 0 to 1.

    Returns
    -------
    array (H, W, 3)
    """
    image = check_rgb(image)
    rgb = (image - (BT601_OFFSET / 255).astype(image.dtype)) @ (_INVERSE.T * 255).astype(image.dtype)
    return to_dtype(rgb, dtype)
