"""Luminance and chroma according to ITU-R BT.601, in the range of 16 to 235 that the literature measures in."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvrbm.vision.images import Array, check_image, round_to, to_dtype, white

# For R, G, B from 0 to 1; Y from 16 to 235 and Cb, Cr from 16 to 240, in units of a byte.
_MATRIX = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]])
_OFFSET = np.array([16.0, 128.0, 128.0])
_INVERSE = np.linalg.inv(_MATRIX)

#: Increase of R, G and B per increase of luminance at constant chroma.
LUMINANCE_GAIN = 255 / float(_MATRIX[0].sum())


def luminance(image: Array) -> Array:
    """Return the luminance of an image.

    Parameters
    ----------
    image : array (H, W) or (H, W, 3)
        RGB in bytes, 16-bit numbers or floats from 0 to 1. A grey image is its own luminance.

    Returns
    -------
    array (H, W)
        Of the same type: black is 16/255 of white, white 235/255. Whole numbers are rounded.
    """
    if check_image(image).ndim == 2:
        return np.asarray(image)
    image = _check_rgb(image)
    row = _MATRIX[0] / 255
    values = sum(image[..., c] * row[c] for c in range(3)) + _OFFSET[0] * white(image.dtype) / 255
    return round_to(values, image.dtype)


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
    image = _check_rgb(image)
    kind = np.dtype(np.float32) if image.dtype.kind == "u" else image.dtype
    values = (image.astype(kind) / kind.type(white(image.dtype))) @ (_MATRIX.T / 255).astype(kind)
    return np.asarray(values + (_OFFSET / 255).astype(kind))


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
    image = _check_rgb(image)
    rgb = (image - (_OFFSET / 255).astype(image.dtype)) @ (_INVERSE.T * 255).astype(image.dtype)
    return to_dtype(rgb, dtype)


def _check_rgb(image: Any) -> Array:
    array = check_image(image)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"image must be an array (rows, columns, 3) of RGB, got shape {array.shape}")
    return array
