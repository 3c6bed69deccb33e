r"""Bicubic resampling by 2, 3 or 4, exactly as in the literature on super-resolution.

The kernel is Keys' cubic kernel with a = -1/2, widened by the scale when an image is reduced. Rows are resampled before
columns, and edge pixels are repeated beyond the edge. Pixel i of the reduced image (from 0) lies at
:math:`ki + (k - 1)/2` of the large one. Distances are multiples of :math:`1/2k`, so all weights are integers over a
common denominator. Integer images are resampled in integer arithmetic and rounded half up along each axis.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvrbm.validation import choice
from mvrbm.vision.images import Array, check_image

#: Supported scales.
SCALES = (2, 3, 4)

# Entries of the result computed together, which bounds the intermediate memory.
_ENTRIES_AT_ONCE = 2**20


def reduce_image(image: Array, scale: int) -> Array:
    """Reduce an image by bicubic resampling, after cropping the bottom and right edges to a multiple of the scale.

    Parameters
    ----------
    image : array (H, W) or (H, W, C)
        Bytes, 16-bit integers or floats. Integers are rounded and clipped after each axis.
    scale : {2, 3, 4}
        Factor by which each side is reduced.

    Returns
    -------
    array (H // scale, W // scale) or (H // scale, W // scale, C)
        The reduced image, of the same type.
    """
    cropped = crop_to_multiple(image, scale)
    if 0 in cropped.shape:
        raise ValueError(f"image must have at least {scale} x {scale} pixels to be reduced, got {np.shape(image)}")
    height, width = cropped.shape[:2]
    rows, columns = (reducing_taps(np.arange(size // scale), scale, size) for size in (height, width))
    return _resample(cropped, rows, columns)


def enlarge_image(image: Array, scale: int) -> Array:
    """Enlarge an image by bicubic interpolation.

    Parameters
    ----------
    image : array (H, W) or (H, W, C)
        Bytes, 16-bit integers or floats. Integers are rounded and clipped after each axis.
    scale : {2, 3, 4}
        Factor by which each side is enlarged.

    Returns
    -------
    array (H * scale, W * scale) or (H * scale, W * scale, C)
        The enlarged image, of the same type.
    """
    choice(scale, "scale", SCALES)
    image = check_image(image)
    rows, columns = (enlarging_taps(np.arange(size * scale), scale, size) for size in image.shape[:2])
    return _resample(image, rows, columns)


def enlarge_rows(image: Array, scale: int, rows: slice) -> NDArray[np.float32]:
    """Compute some rows of an enlarged image in single precision, without rounding.

    The image (h, w) or (h, w, C) may have any type. The result is (rows, w * scale) or (rows, w * scale, C), with the
    same value of white.
    """
    height, width = image.shape[:2]
    taps = enlarging_taps(np.arange(rows.start, rows.stop), scale, height)
    first = int(taps.places.min())
    part = image[first : int(taps.places.max()) + 1].astype(np.float32)
    tall = _along_first(part, taps._replace(places=taps.places - first))
    return _along_first(tall.swapaxes(0, 1), enlarging_taps(np.arange(width * scale), scale, width)).swapaxes(0, 1)


def crop_to_multiple(image: Array, scale: int) -> Array:
    """Crop the bottom and right edges of an image so that its sides are multiples of the scale."""
    choice(scale, "scale", SCALES)
    image = check_image(image)
    height, width = image.shape[:2]
    return image[: height - height % scale, : width - width % scale]


def _resample(image: Array, rows: Taps, columns: Taps) -> Array:
    """Resample rows and then columns, in blocks of output rows."""
    out = np.empty((len(rows.places), len(columns.places), *image.shape[2:]), image.dtype)
    step = max(1, _ENTRIES_AT_ONCE // max(1, out[0].size))
    for first in range(0, len(out), step):
        block = slice(first, first + step)
        tall = _along_first(image, Taps(rows.places[block], rows.weights[block], rows.denominator))
        out[block] = _along_first(tall.swapaxes(0, 1), columns).swapaxes(0, 1)
    return out


def _along_first(image: Array, taps: Taps) -> Array:
    """Resample along the first axis. Integer images are resampled in integer arithmetic."""
    whole = image.dtype.kind == "u"
    kind = np.dtype(np.int64 if image.dtype == np.uint16 else np.int32) if whole else image.dtype
    weights = taps.weights.astype(kind) if whole else (taps.weights / taps.denominator).astype(kind)
    shape = (-1,) + (1,) * (image.ndim - 1)
    total = np.zeros((len(taps.places), *image.shape[1:]), kind)
    for tap in range(taps.places.shape[1]):
        if weights[:, tap].any():
            total += weights[:, tap].reshape(shape) * image[taps.places[:, tap]].astype(kind)
    if not whole:
        return total
    rounded = (2 * total + taps.denominator) // (2 * taps.denominator)
    return rounded.clip(0, np.iinfo(image.dtype).max).astype(image.dtype)


class Taps(NamedTuple):
    """Inputs of each output of a resampled line, and their weights."""

    places: NDArray[np.int64]  # (outputs, taps)
    weights: NDArray[np.int64]  # (outputs, taps), numerators
    denominator: int  # of all weights


def reducing_taps(outputs: NDArray[np.int64], scale: int, size: int | None = None) -> Taps:
    """Return the taps of pixels (n,) of a reduced line.

    `size` is the length of the input line. Default: infinite in both directions.
    """
    i = outputs[:, None]
    places = scale * i + np.arange(-2 * scale, 3 * scale)[None, :]
    twice = 2 * places - (2 * scale * i + scale - 1)  # twice the distance, in pixels of the large image
    # Kernel values at steps of 1 sum to 1 for any offset, so values at steps of 1/k sum to k.
    places = places if size is None else places.clip(0, size - 1)
    return Taps(places, _kernel(twice, 2 * scale), 2 * (2 * scale) ** 3 * scale)


def enlarging_taps(outputs: NDArray[np.int64], scale: int, size: int | None = None) -> Taps:
    """Return the taps of pixels (n,) of an enlarged line; see :func:`reducing_taps`."""
    j = outputs[:, None]
    places = j // scale + np.arange(-2, 3)[None, :]
    units = 2 * scale * places - (2 * j + 1 - scale)  # 2k times the distance, in pixels of the small image
    places = places if size is None else places.clip(0, size - 1)
    return Taps(places, _kernel(units, 2 * scale), 2 * (2 * scale) ** 3)


def taps_matrix(taps: Taps) -> tuple[NDArray[np.float64], int]:
    """Return taps as a matrix (outputs, inputs), and the index of the input in its first column."""
    used = taps.places[taps.weights != 0]
    first = int(used.min())
    matrix = np.zeros((len(taps.places), int(used.max()) - first + 1))
    rows, columns = np.nonzero(taps.weights)
    np.add.at(matrix, (rows, taps.places[rows, columns] - first), taps.weights[rows, columns] / taps.denominator)
    return matrix, first


def _kernel(distance: NDArray[np.int64], unit: int) -> NDArray[np.int64]:
    """Return Keys' kernel at `distance / unit`, multiplied by 2 unit^3 to make it an integer."""
    d = np.abs(distance)
    u = unit
    near = 3 * d**3 - 5 * d**2 * u + 2 * u**3
    far = -(d**3) + 5 * d**2 * u - 8 * d * u**2 + 4 * u**3
    return np.where(d <= u, near, np.where(d < 2 * u, far, 0))
