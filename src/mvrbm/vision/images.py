"""Validate, convert, flip and rotate image arrays.

Images are NumPy arrays of shape (rows, columns) or (rows, columns, channels). Their dtype is uint8, uint16 or a float
type, with black at 0 and white at 255, 65535 or 1, respectively. :mod:`mvrbm.io.pictures` reads and writes image files.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def check_image(image: Any, *, unit_range: bool = False, noise: float = 0.0) -> Array:
    """Convert an image to an array of shape (H, W) or (H, W, C).

    Raises ValueError if the image has another shape or an unsupported dtype. If `unit_range` is True, floats must be
    between ``-noise`` and ``1 + noise``, where `noise` is the tolerance for noisy images.
    """
    array = np.asarray(image)
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise ValueError(f"image must be nonempty and have shape (rows, columns[, channels]), got shape {array.shape}")
    if array.dtype not in (np.uint8, np.uint16) and array.dtype.kind != "f":
        raise ValueError(f"image must have dtype uint8, uint16 or float, got {array.dtype}")
    if unit_range and array.dtype.kind == "f" and not (array.min() >= -noise and array.max() <= 1 + noise):
        raise ValueError(f"float images must have values from 0 to 1, got {array.min():.4g} to {array.max():.4g}")
    return array


def check_gray_images(images: Any) -> Array:
    """Convert grayscale images of shape (rows, columns) or (n, rows, columns) to an array.

    Raises ValueError if the images have another shape, if the dtype is neither uint8 nor float, or if any value is not
    finite.
    """
    array = np.asarray(images)
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise ValueError(f"images must have dtype uint8 or float, got {array.dtype}")
    if array.ndim not in (2, 3) or array.size == 0:
        raise ValueError(f"images must have shape (rows, columns) or (n, rows, columns), got shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"images must be finite, got {int((~np.isfinite(array)).sum())} non-finite values")
    return array


def white(dtype: np.dtype[Any]) -> float:
    """Return the white level for a dtype: 255 for uint8, 65535 for uint16, and 1 for floats."""
    return float(np.iinfo(dtype).max) if dtype.kind == "u" else 1.0


def to_dtype(image: Array, dtype: Any) -> Array:
    """Convert a float image to another dtype, clipping values to [0, 1] and rounding half up for integer dtypes."""
    dtype = np.dtype(dtype)
    return round_to(np.clip(image, 0, 1) * image.dtype.type(white(dtype)), dtype)


def round_to(values: Any, dtype: np.dtype[Any]) -> Array:
    """Convert values to a dtype, rounding half up for integer dtypes."""
    return np.asarray(np.floor(values + 0.5) if dtype.kind == "u" else values).astype(dtype)


def turned(image: Array, turn: int) -> Array:
    """Apply one of the eight flips and rotations, numbered from 0 to 7, to an image of shape (rows, columns, ...)."""
    image = np.rot90(image, turn % 4)
    return image[:, ::-1] if turn >= 4 else image


def turned_back(image: Array, turn: int) -> Array:
    """Undo the flip or rotation that :func:`turned` applies."""
    return np.rot90(image[:, ::-1] if turn >= 4 else image, -(turn % 4))
