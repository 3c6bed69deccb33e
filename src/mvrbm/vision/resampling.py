r"""Resampling as the literature on super-resolution does it, exactly.

Keys' cubic kernel with a = -1/2, widened by the scale where an image is reduced; rows first, then columns; taps
beyond the edge take the edge's pixel. Pixel i of the reduced image (from 0) lies at :math:`ki + (k - 1)/2` of the
large one. Distances are whole multiples of :math:`1/2k`, so all weights are whole numbers over a common
denominator: images of whole numbers are resampled in whole numbers, and rounded half up after each pass without
any doubt about ties.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["SCALES", "check_image", "check_scale", "crop_to_multiple", "enlarge_image", "reduce_image"]

Array = NDArray[Any]

#: The scales that images are reduced and enlarged by.
SCALES = (2, 3, 4)

_ENTRIES_AT_ONCE = 2**20  # of the result, so that what is in between stays small


def reduce_image(image: Array, scale: int) -> Array:
    """Reduce an image, which is cropped at the bottom and on the right to a multiple of the scale before.

    Parameters
    ----------
    image : array (H, W) or (H, W, C)
        Bytes, 16-bit numbers or floats. Bytes and 16-bit numbers are rounded and clipped after each of the two
        passes, floats are neither.
    scale : {2, 3, 4}
        How many pixels become one.

    Returns
    -------
    array (H // scale, W // scale) or (H // scale, W // scale, C)
        Of the same type.
    """
    cropped = crop_to_multiple(image, scale)
    if 0 in cropped.shape:
        raise ValueError(f"image must have at least {scale} x {scale} pixels to be reduced, got {np.shape(image)}")
    rows, columns = (_reducing(size, scale) for size in cropped.shape[:2])
    return _resample(cropped, rows, columns)


def enlarge_image(image: Array, scale: int) -> Array:
    """Enlarge an image by bicubic interpolation.

    Parameters
    ----------
    image : array (H, W) or (H, W, C)
        Bytes, 16-bit numbers or floats. Bytes and 16-bit numbers are rounded and clipped after each of the two
        passes, floats are neither.
    scale : {2, 3, 4}
        How many pixels are made of one.

    Returns
    -------
    array (H * scale, W * scale) or (H * scale, W * scale, C)
        Of the same type.
    """
    check_scale(scale)
    image = check_image(image)
    rows, columns = (_enlarging(size, scale) for size in image.shape[:2])
    return _resample(image, rows, columns)


def enlarge_rows(image: Array, scale: int, rows: slice) -> NDArray[np.float32]:
    """Some rows of an enlarged image, in single precision and without rounding.

    Parameters
    ----------
    image : array (h, w) or (h, w, C)
        The small image, of any type.
    scale : {2, 3, 4}
        How many pixels are made of one.
    rows : slice
        Which rows of the enlarged image, from a start to a stop.

    Returns
    -------
    float32 array (rows, w * scale) or (rows, w * scale, C)
        In the image's units.
    """
    taps = _enlarging(image.shape[0], scale)
    mine = Taps(taps.places[rows], taps.weights[rows], taps.denominator)
    first = int(mine.places.min())
    part = image[first : int(mine.places.max()) + 1].astype(np.float32)
    tall = _along_first(part, mine._replace(places=mine.places - first))
    return _along_first(tall.swapaxes(0, 1), _enlarging(image.shape[1], scale)).swapaxes(0, 1)


def crop_to_multiple(image: Array, scale: int) -> Array:
    """Crop an image at the bottom and on the right so that the scale divides its sides."""
    check_scale(scale)
    image = check_image(image)
    height, width = image.shape[:2]
    return image[: height - height % scale, : width - width % scale]


def check_scale(scale: Any) -> None:
    """Refuse a scale that is not one of `SCALES`."""
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(map(str, SCALES))}, got {scale!r}")


def check_image(image: Any) -> Array:
    """Return an image as an array, or refuse what is none.

    Returns
    -------
    array (H, W) or (H, W, C)
        Bytes, 16-bit numbers or floats, as given.
    """
    array = np.asarray(image)
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise ValueError(
            "image must be an array (rows, columns) or (rows, columns, channels) that is not empty, got shape "
            f"{array.shape}"
        )
    if array.dtype not in (np.uint8, np.uint16) and array.dtype.kind != "f":
        raise ValueError(f"image must be of uint8, uint16 or floats, got {array.dtype}")
    return array


class Taps(NamedTuple):
    """Which entries of a line make each entry of the resampled line, and with what weights."""

    places: NDArray[np.int64]  # (outputs, taps)
    weights: NDArray[np.int64]  # (outputs, taps), to be divided by
    denominator: int


def _kernel(distance: NDArray[np.int64], unit: int) -> NDArray[np.int64]:
    """Keys' kernel at `distance / unit`, times 2 unit^3, which makes it a whole number."""
    d, u = np.abs(distance), unit
    near = 3 * d**3 - 5 * d**2 * u + 2 * u**3
    far = -(d**3) + 5 * d**2 * u - 8 * d * u**2 + 4 * u**3
    return np.where(d <= u, near, np.where(d < 2 * u, far, 0))


def _reducing(size: int, scale: int) -> Taps:
    taps = reducing_taps(np.arange(size // scale), scale)
    return taps._replace(places=taps.places.clip(0, size - 1))


def _enlarging(size: int, scale: int) -> Taps:
    taps = enlarging_taps(np.arange(size * scale), scale)
    return taps._replace(places=taps.places.clip(0, size - 1))


def reducing_taps(outputs: NDArray[np.int64], scale: int) -> Taps:
    """Taps that make these pixels (n,) of a reduced line, on a line without ends."""
    i = outputs[:, None]
    places = scale * i + np.arange(-2 * scale, 3 * scale)[None, :]
    twice = 2 * places - (2 * scale * i + scale - 1)  # twice the distance, in pixels of the large image
    weights = _kernel(twice, 2 * scale)
    # The kernel's values at steps of one add up to 1 wherever they start, those at steps of 1/k to k.
    return Taps(places, weights, 2 * (2 * scale) ** 3 * scale)


def enlarging_taps(outputs: NDArray[np.int64], scale: int) -> Taps:
    """Taps that make these pixels (n,) of an enlarged line, on a line without ends."""
    j = outputs[:, None]
    places = j // scale + np.arange(-2, 3)[None, :]
    units = 2 * scale * places - (2 * j + 1 - scale)  # 2k times the distance, in pixels of the small image
    return Taps(places, _kernel(units, 2 * scale), 2 * (2 * scale) ** 3)


def taps_matrix(taps: Taps, size: int | None = None) -> tuple[NDArray[np.float64], int]:
    """Taps as a matrix (outputs, inputs), and the input that its first column stands for.

    Parameters
    ----------
    taps : Taps
        Of some outputs, on a line without ends.
    size : int, optional
        Where the line ends, if it does: taps beyond take the pixel at the edge.
    """
    places = taps.places if size is None else taps.places.clip(0, size - 1)
    used = places[taps.weights != 0]
    first = int(used.min())
    matrix = np.zeros((len(places), int(used.max()) - first + 1))
    rows, columns = np.nonzero(taps.weights)
    np.add.at(matrix, (rows, places[rows, columns] - first), taps.weights[rows, columns] / taps.denominator)
    return matrix, first


def _resample(image: Array, rows: Taps, columns: Taps) -> Array:
    """Apply one set of taps along the rows' axis and one along the columns', a block of output rows at a time."""
    out = np.empty((len(rows.places), len(columns.places), *image.shape[2:]), image.dtype)
    step = max(1, _ENTRIES_AT_ONCE // max(1, out[0].size))
    for first in range(0, len(out), step):
        block = slice(first, first + step)
        part = Taps(rows.places[block], rows.weights[block], rows.denominator)
        tall = _along_first(image, part)
        out[block] = _along_first(tall.swapaxes(0, 1), columns).swapaxes(0, 1)
    return out


def _along_first(image: Array, taps: Taps) -> Array:
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
