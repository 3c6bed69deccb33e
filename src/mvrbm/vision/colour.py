"""Luminance and chroma after ITU-R BT.601, in the range of 16 to 235 that the literature measures in."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.vision.resampling import check_image

__all__ = ["from_ycbcr", "luminance", "to_ycbcr"]

Array = NDArray[Any]

# For R, G, B from 0 to 1; Y from 16 to 235 and Cb, Cr from 16 to 240 in units of a byte.
_MATRIX = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]])
_OFFSET = np.array([16.0, 128.0, 128.0])
_INVERSE = np.linalg.inv(_MATRIX)

#: By how much R, G and B grow with luminance where chroma stays.
LUMINANCE_GAIN = 255 / float(_MATRIX[0].sum())


def white(dtype: np.dtype[Any]) -> float:
    """Value of white: 255, 65535, or 1 for floats."""
    return float(np.iinfo(dtype).max) if dtype.kind == "u" else 1.0


def luminance(image: Array) -> Array:
    """Luminance of an image.

    Parameters
    ----------
    image : array (H, W) or (H, W, 3)
        RGB in bytes, 16-bit numbers or floats from 0 to 1. A grey image is its own luminance.

    Returns
    -------
    array (H, W)
        Of the same type: black is 16/255 of white, white 235/255. Whole numbers are rounded.
    """
    image = check_image(image)
    if image.ndim == 2:
        return image
    _three_channels(image)
    top = white(image.dtype)
    row = _MATRIX[0] / 255
    values = sum(image[..., c] * row[c] for c in range(3)) + _OFFSET[0] * top / 255
    return _like(values, image.dtype)


def to_ycbcr(image: Array) -> Array:
    """Turn RGB into luminance and chroma, without rounding.

    Parameters
    ----------
    image : array (H, W, 3)
        RGB in bytes, 16-bit numbers or floats from 0 to 1.

    Returns
    -------
    float array (H, W, 3)
        Y, Cb, Cr in units of white: Y from 16/255 to 235/255, Cb and Cr from 16/255 to 240/255. Single precision
        for images of whole numbers, otherwise as given.
    """
    image = check_image(image)
    _three_channels(image)
    kind = np.dtype(np.float32) if image.dtype.kind == "u" else image.dtype
    values = (image.astype(kind) / kind.type(white(image.dtype))) @ (_MATRIX.T / 255).astype(kind)
    return np.asarray(values + (_OFFSET / 255).astype(kind))


def from_ycbcr(image: Array, dtype: Any = np.float32) -> Array:
    """Turn luminance and chroma back into RGB.

    Parameters
    ----------
    image : float array (H, W, 3)
        Y, Cb, Cr as from :func:`to_ycbcr`.
    dtype : dtype
        What to return: bytes or 16-bit numbers, rounded and clipped, or floats, clipped to 0 to 1.

    Returns
    -------
    array (H, W, 3)
    """
    image = check_image(image)
    _three_channels(image)
    rgb = (image - (_OFFSET / 255).astype(image.dtype)) @ (_INVERSE.T * 255).astype(image.dtype)
    return to_dtype(rgb, dtype)


def to_dtype(image: Array, dtype: Any) -> Array:
    """Turn an image of floats, white being 1, into one of another type: clipped, and rounded for whole numbers."""
    dtype = np.dtype(dtype)
    return _like(np.clip(image, 0, 1) * image.dtype.type(white(dtype)), dtype)


def _like(values: Any, dtype: np.dtype[Any]) -> Array:
    return np.asarray(np.floor(values + 0.5) if dtype.kind == "u" else values).astype(dtype)


def _three_channels(image: Array) -> None:
    if image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"image must be an array (rows, columns, 3) of RGB, got shape {image.shape}")
