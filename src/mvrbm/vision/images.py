"""Image arrays: validation, the value of white, conversion between types, flips and rotations.

Images are NumPy arrays (rows, columns) or (rows, columns, channels) of bytes, 16-bit integers or floats, with black at
0 and white at 255, 65535 or 1. :mod:`mvrbm.io.pictures` reads and writes files.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def check_image(image: Any, *, unit_range: bool = False, noise: float = 0.0) -> Array:
    """Return an image as an array (H, W) or (H, W, C), or raise ValueError for other shapes and types.

    With `unit_range`, floats must lie in [-noise, 1 + noise].
    """
    array = np.asarray(image)
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise ValueError(f"image must be (rows, columns[, channels]) and not empty, got shape {array.shape}")
    if array.dtype not in (np.uint8, np.uint16) and array.dtype.kind != "f":
        raise ValueError(f"image must be of uint8, uint16 or floats, got {array.dtype}")
    if unit_range and array.dtype.kind == "f" and not (array.min() >= -noise and array.max() <= 1 + noise):
        raise ValueError(f"image of floats must be from 0 to 1, got {array.min():.4g} to {array.max():.4g}")
    return array


def check_gray_images(images: Any) -> Array:
    """Return gray images (rows, columns) or (n, rows, columns) as an array of bytes or finite floats."""
    array = np.asarray(images)
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise ValueError(f"images must be bytes (uint8) or floats, got {array.dtype}")
    if array.ndim not in (2, 3) or array.size == 0:
        raise ValueError(f"images must be gray, (rows, columns) or (n, rows, columns), got shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"images must be finite, got {int((~np.isfinite(array)).sum())} entries that are not")
    return array


def white(dtype: np.dtype[Any]) -> float:
    """Return the value of white: 255, 65535, or 1 for floats."""
    return float(np.iinfo(dtype).max) if dtype.kind == "u" else 1.0


def to_dtype(image: Array, dtype: Any) -> Array:
    """Convert an image of floats from 0 to 1 to another type. Values are clipped, and rounded half up to integers."""
    dtype = np.dtype(dtype)
    return round_to(np.clip(image, 0, 1) * image.dtype.type(white(dtype)), dtype)


def round_to(values: Any, dtype: np.dtype[Any]) -> Array:
    """Convert values to a type. Integers are rounded half up."""
    return np.asarray(np.floor(values + 0.5) if dtype.kind == "u" else values).astype(dtype)


def turned(image: Array, turn: int) -> Array:
    """Return the flip or rotation of an image (rows, columns, ...) with a number from 0 to 7."""
    image = np.rot90(image, turn % 4)
    return image[:, ::-1] if turn >= 4 else image


def turned_back(image: Array, turn: int) -> Array:
    """Undo :func:`turned`."""
    return np.rot90(image[:, ::-1] if turn >= 4 else image, -(turn % 4))
