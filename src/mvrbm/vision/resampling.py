r"""Bicubic resampling by a factor of 2, 3 or 4, exactly as in the super-resolution literature.

The kernel is Keys' cubic kernel with a = -1/2, widened by the scale factor when an image is downscaled. Rows are
resampled before columns, and edge pixels are repeated beyond the edge. For a scale factor of k, pixel i of the reduced
image (counted from 0) lies at position :math:`ki + (k - 1)/2` in the large image. Distances are multiples of
:math:`1/(2k)`, so all weights are integers over a common denominator. Integer images are resampled in integer
arithmetic and rounded half up along each axis.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvrbm.validation import choice
from mvrbm.vision.images import Array, check_image

#: Supported scale factors.
SCALES = (2, 3, 4)

# Number of output entries to compute at once, which limits the memory for intermediate results.
_ENTRIES_AT_ONCE = 2**20


def reduce_image(image: Array, scale: int) -> Array:
    """Reduce the size of an image by bicubic resampling.

    The image is first cropped at the bottom and right edges so that its height and width are multiples of `scale`.

    Parameters
    ----------
    image : array of shape (H, W) or (H, W, C)
        Image of dtype uint8, uint16 or float. Integers are rounded and clipped after resampling along each axis.
    scale : {2, 3, 4}
        Factor by which to reduce each side.

    Returns
    -------
    array of shape (H // scale, W // scale) or (H // scale, W // scale, C)
        The reduced image, with the same dtype as `image`.
    """
    cropped = crop_to_multiple(image, scale)
    if 0 in cropped.shape:
        raise ValueError(f"image must have at least {scale} x {scale} pixels, got shape {np.shape(image)}")
    height, width = cropped.shape[:2]
    rows, columns = (reducing_taps(np.arange(size // scale), scale, size) for size in (height, width))
    return _resample(cropped, rows, columns)


def enlarge_image(image: Array, scale: int) -> Array:
    """Enlarge an image by bicubic interpolation.

    Parameters
    ----------
    image : array of shape (H, W) or (H, W, C)
        Image of dtype uint8, uint16 or float. Integers are rounded and clipped after resampling along each axis.
    scale : {2, 3, 4}
        Factor by which to enlarge each side.

    Returns
    -------
    array of shape (H * scale, W * scale) or (H * scale, W * scale, C)
        The enlarged image, with the same dtype as `image`.
    """
    choice(scale, "scale", SCALES)
    image = check_image(image)
    rows, columns = (enlarging_taps(np.arange(size * scale), scale, size) for size in image.shape[:2])
    return _resample(image, rows, columns)


def enlarge_rows(image: Array, scale: int, rows: slice) -> NDArray[np.float32]:
    """Return selected rows of the enlarged image in single precision, without rounding.

    The image has shape (h, w) or (h, w, C) and can have any dtype. The values of the result are on the same scale as
    the input. The result has shape (rows, w * scale) or (rows, w * scale, C).
    """
    height, width = image.shape[:2]
    taps = enlarging_taps(np.arange(rows.start, rows.stop), scale, height)
    first = int(taps.places.min())
    part = image[first : int(taps.places.max()) + 1].astype(np.float32)
    tall = _along_first(part, taps._replace(places=taps.places - first))
    return _along_first(tall.swapaxes(0, 1), enlarging_taps(np.arange(width * scale), scale, width)).swapaxes(0, 1)


def crop_to_multiple(image: Array, scale: int) -> Array:
    """Crop an image at the bottom and right edges so that its height and width are multiples of `scale`."""
    choice(scale, "scale", SCALES)
    image = check_image(image)
    height, width = image.shape[:2]
    return image[: height - height % scale, : width - width % scale]


def _resample(image: Array, rows: Taps, columns: Taps) -> Array:
    """Resample an image along its first axis and then along its second axis, in blocks of output rows."""
    out = np.empty((len(rows.places), len(columns.places), *image.shape[2:]), image.dtype)
    step = max(1, _ENTRIES_AT_ONCE // max(1, out[0].size))
    for first in range(0, len(out), step):
        block = slice(first, first + step)
        tall = _along_first(image, Taps(rows.places[block], rows.weights[block], rows.denominator))
        out[block] = _along_first(tall.swapaxes(0, 1), columns).swapaxes(0, 1)
    return out


def _along_first(image: Array, taps: Taps) -> Array:
    """Resample an image along the first axis, using integer arithmetic for integer images."""
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
    """Filter taps for resampling a row or column: the input positions and weights for each output pixel."""

    places: NDArray[np.int64]  # input positions, of shape (outputs, taps)
    weights: NDArray[np.int64]  # numerators of the weights, of shape (outputs, taps)
    denominator: int  # common denominator of the weights


def reducing_taps(outputs: NDArray[np.int64], scale: int, size: int | None = None) -> Taps:
    """Return the filter taps for the given output pixels of a reduced row or column.

    `size` is the length of the input. If None, the input is treated as infinite in both directions.
    """
    i = outputs[:, None]
    places = scale * i + np.arange(-2 * scale, 3 * scale)[None, :]
    twice = 2 * places - (2 * scale * i + scale - 1)  # twice the distance in large-image pixels
    # Kernel values at a spacing of 1 sum to 1 for any offset, so values at a spacing of 1/k sum to k.
    places = places if size is None else places.clip(0, size - 1)
    return Taps(places, _kernel(twice, 2 * scale), 2 * (2 * scale) ** 3 * scale)


def enlarging_taps(outputs: NDArray[np.int64], scale: int, size: int | None = None) -> Taps:
    """Return the filter taps for the given output pixels of an enlarged row or column. See :func:`reducing_taps`."""
    j = outputs[:, None]
    places = j // scale + np.arange(-2, 3)[None, :]
    units = 2 * scale * places - (2 * j + 1 - scale)  # 2k times the distance in small-image pixels
    places = places if size is None else places.clip(0, size - 1)
    return Taps(places, _kernel(units, 2 * scale), 2 * (2 * scale) ** 3)


def taps_matrix(taps: Taps) -> tuple[NDArray[np.float64], int]:
    """Convert taps to a matrix of shape (outputs, inputs).

    Returns the matrix and the input position of its first column.
    """
    used = taps.places[taps.weights != 0]
    first = int(used.min())
    matrix = np.zeros((len(taps.places), int(used.max()) - first + 1))
    rows, columns = np.nonzero(taps.weights)
    np.add.at(matrix, (rows, taps.places[rows, columns] - first), taps.weights[rows, columns] / taps.denominator)
    return matrix, first


def _kernel(distance: NDArray[np.int64], unit: int) -> NDArray[np.int64]:
    """Evaluate Keys' cubic kernel at ``distance / unit``, scaled by ``2 * unit**3`` to obtain integers."""
    d = np.abs(distance)
    u = unit
    near = 3 * d**3 - 5 * d**2 * u + 2 * u**3
    far = -(d**3) + 5 * d**2 * u - 8 * d * u**2 + 4 * u**3
    return np.where(d <= u, near, np.where(d < 2 * u, far, 0))
