"""Read samples, labels and masks from files, folders and named datasets, and write arrays to files.

A source is a file, a folder of images or shards, or a named dataset. `formats` and `tables` read the file formats, and
`pictures` reads images with their color channels and metadata.
"""

import io
import math
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import InputError
from mvrbm.io import datasets
from mvrbm.io.atomic import check_output, replace_file
from mvrbm.io.formats import IMAGE_SUFFIXES, LARGEST, first_line, images_by_class, open_npy, read_idx, read_npz
from mvrbm.io.pictures import as_gray, read_picture
from mvrbm.io.shards import Rows, Shards, StoredRows, is_folder_of_shards
from mvrbm.io.tables import STORES, TABLES, open_stored, read_table, table_labels, table_samples
from mvrbm.io.untrusted import check_regular_file
from mvrbm.validation import usual_dtype

__all__ = [
    "contact_sheet",
    "half_mask",
    "known_entries",
    "picture_shape",
    "read_array",
    "read_labels",
    "read_mask",
    "read_samples",
    "write_output",
]

Array = NDArray[Any]
# Size in bytes above which arrays in HDF5 files and zarr stores are read on demand instead of loaded into memory.
_IN_MEMORY = 2**30
# Names of idx files, such as "train-images-idx3-ubyte" or "train-images.idx3-ubyte".
_IDX_NAME = re.compile(r"[-.]idx[1-9]-ubyte")


def read_array(
    source: str | os.PathLike[str], *, data_dir: str | os.PathLike[str] | None = None, largest: int = LARGEST
) -> Array:
    """Read an array from a file, a folder of images or a named dataset.

    Parameters
    ----------
    source : str or path
        One of

        - a ``.npy`` file, which is memory-mapped,
        - a ``.npz``, HDF5 or zarr file with one array, or ``file.npz:key``,
        - an idx file, optionally compressed with gzip,
        - a table of numbers (CSV or Parquet), where ``file.csv:a,b`` selects columns and ``file.csv:-a`` drops a
          column,
        - an image, a folder of images of the same size, or a folder with one such subfolder per class,
        - the name of a dataset, such as ``mnist`` or ``mnist:test`` (use ``./mnist`` to read a file with that name).
    data_dir : path, optional
        Folder to search for datasets before the default locations.
    largest : int
        Maximum size, in bytes, of an array that is read into memory.

    Returns
    -------
    array
        Array of booleans, integers or floats, with samples along the first axis. Images are converted to grayscale
        with dtype uint8: 16-bit values are rounded to 8 bits, with a warning if they are below half of the range, and
        transparent images are shown on a white background.
    """
    text = os.fspath(source)
    name, _, split = text.partition(":")
    if name in datasets.NAMES:
        return _read_set(name, split or "train", data_dir)
    path, key = split_key(text)
    if path.name.endswith(TABLES) and path.exists():
        return table_samples(read_table(path, key, largest=largest), path)
    if path.suffix in STORES and path.exists():
        return _read_stored(path, key, largest)
    try:
        if path.is_dir():
            return _read_images([image for images in images_by_class(path).values() for image in images], largest)
        if not path.exists():
            raise InputError(f"{text}: no such file or dataset. Available datasets are {', '.join(datasets.NAMES)}")
        return _read_file(path, key, largest)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_stored(path: Path, key: str | None, largest: int) -> Array:
    stored = open_stored(path, key)
    if math.prod(stored.shape) * stored.dtype.itemsize > largest:
        raise InputError(
            f"{path} contains an array of shape {stored.shape} and dtype {stored.dtype}, which exceeds the limit "
            f"of {largest:,} bytes"
        )
    return np.asarray(stored[:])


def _read_file(path: Path, key: str | None, largest: int) -> Array:
    """Read a file, detecting its format from the first bytes."""
    check_regular_file(path)
    with path.open("rb") as file:
        head = file.read(6)
    if not head:
        raise InputError(f"{path} is empty")
    if head == b"\x93NUMPY":
        return open_npy(path)
    if head[:4] == b"PK\x03\x04" or path.suffix == ".npz":
        return read_npz(path, key, largest=largest)
    if head[:2] in (b"\x1f\x8b", b"\0\0") or _IDX_NAME.search(path.name):
        return read_idx(path, largest=largest)
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return _read_images([path], largest)
    raise InputError(
        f"{path} is not a .npy, .npz, idx, CSV, Parquet, HDF5 or zarr file, an image, a folder of images, or a named "
        f"dataset; its first bytes are {head.hex(' ')}"
    )


def split_key(text: str) -> tuple[Path, str | None]:
    """Split ``"file.npz:key"`` into a path and a key. The key is None if the format cannot contain several arrays."""
    place, colon, key = text.rpartition(":")
    if colon and place.endswith((".npz", *TABLES, *STORES)):
        return Path(place), key
    return Path(text), None


def read_samples(source: str | os.PathLike[str], *, data_dir: str | os.PathLike[str] | None = None) -> Array | Rows:
    """Read samples for an estimator as an array of shape (n, ...) with dtype uint8, float32 or float64.

    For a folder of ``.npy`` files or a large array in an HDF5 or zarr file, return a :class:`~mvrbm.io.shards.Rows`
    object, which reads samples from disk on demand. See :func:`read_array` for other sources.
    """
    if is_folder_of_shards(source):
        return Shards(source)
    path, key = split_key(os.fspath(source))
    if path.suffix in STORES and path.exists():
        stored = open_stored(path, key)
        if stored.ndim > 1 and math.prod(stored.shape) * stored.dtype.itemsize > _IN_MEMORY:
            return StoredRows(stored)
    array = read_array(source, data_dir=data_dir)
    if array.ndim < 2:
        raise InputError(
            f"expected samples along the first axis and at least 2 axes, but {source} has shape {array.shape}"
        )
    usual = usual_dtype(array.dtype)
    return array if array.dtype == usual and array.dtype.isnative else array.astype(usual)


def read_labels(source: str | os.PathLike[str], *, data_dir: str | os.PathLike[str] | None = None) -> Array:
    """Read labels as an array with one label or one-hot vector per sample.

    Parameters
    ----------
    source : str or path
        One of

        - a ``.txt`` file with one label per line,
        - a ``.npy`` file, which can also contain strings,
        - ``file.csv:column``, which selects a column of a table,
        - a folder with one subfolder of images per class, where the names of the subfolders are the labels,
        - the name of a dataset,
        - any other source that :func:`read_array` accepts.
    data_dir : path, optional
        Folder to search for datasets before the default locations.
    """
    text = os.fspath(source)
    path, key = split_key(text)
    if path.name.endswith(TABLES) and path.exists():
        return table_labels(read_table(path, key), path)
    if path.is_dir() and path.suffix not in STORES:
        classes = images_by_class(path)
        if list(classes) == [""]:
            raise InputError(f"{path} contains images, but labels require one subfolder of images per class")
        return np.repeat(list(classes), [len(images) for images in classes.values()])
    name, _, split = text.partition(":")
    if name in datasets.NAMES:
        labels = datasets.load(name, split=split or "train", data_dir=data_dir).labels
        if labels is None or np.ndim(labels) != 1:
            raise InputError(f"dataset '{name}' does not have one label per sample")
        return np.asarray(labels)
    if text.endswith(".txt"):
        check_regular_file(text)
        try:
            return np.array(Path(text).read_text(encoding="utf-8-sig").splitlines(), dtype=str)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{text} cannot be read: {first_line(error)}") from error
    named = path.suffix == ".npy" and path.is_file()
    array = np.asarray(open_npy(path, texts=True) if named else read_array(source, data_dir=data_dir))
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.dtype.kind == "U"):
        raise InputError(f"expected one label or one-hot vector per sample, but {source} has shape {array.shape}")
    return array


def _read_set(name: str, split: str, data_dir: str | os.PathLike[str] | None) -> Array:
    images = datasets.load(name, split=split, data_dir=data_dir).arrays
    if name == "natural-images":
        return datasets.patches(images, 16, 10_000)
    if name == "indian-pines":
        return _tiles(images, 5).astype(np.float32) / 10_000
    return np.asarray(images)


def _tiles(cube: Array, size: int) -> Array:
    """Split an array of shape (rows, columns, bands) into tiles of shape (n, size, size, bands)."""
    rows, columns = (extent // size for extent in cube.shape[:2])
    cut = cube[: rows * size, : columns * size].reshape(rows, size, columns, size, -1)
    return cut.swapaxes(1, 2).reshape(rows * columns, size, size, -1)


def _read_images(paths: list[Path], largest: int) -> Array:
    images: list[NDArray[np.uint8]] = []
    deepest = None
    for path in paths:
        pixels = read_picture(path).pixels
        if pixels.dtype == np.uint16:
            deepest = max(deepest or 0, int(pixels.max()))
        images.append(as_gray(pixels))
        sizes = [f"{image.shape[1]}x{image.shape[0]}" for image in (images[0], images[-1])]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"all images must have the same size, but {path} is {sizes[1]} and {paths[0].name} is {sizes[0]}"
            )
        if images[0].size * len(paths) > largest:
            raise InputError(f"{len(paths):,} images of size {sizes[0]} exceed the limit of {largest:,} bytes")
    if deepest is not None and deepest < 2**15:  # for example 12-bit values, which fill a sixteenth of the range
        source = paths[0] if len(paths) == 1 else paths[0].parent
        warnings.warn(
            f"{source}: images with 16 bits are rounded to 8 bits, but their values are at most {deepest:,} of 65,535, "
            f"so at most {deepest // 257 + 1} gray levels remain; to keep all values, divide them by their maximum "
            "and save them as a .npy file",
            stacklevel=3,
        )
    return np.stack(images)


# -- masks (True where an entry is known) -------------------------------------------------------------


def known_entries(samples: Array, source: str) -> NDArray[np.bool_] | None:
    """Return a mask that is False for NaN entries, or None if all entries are known.

    Infinite entries raise InputError with a message that names `source`.
    """
    if samples.dtype.kind != "f" or np.isfinite(samples).all():
        return None
    infinite = np.isinf(samples)
    if (count := int(infinite.sum())) > 0:
        first = tuple(int(index) for index in np.unravel_index(infinite.argmax(), infinite.shape))
        what = f"an infinite entry at index {first}"
        if count > 1:
            what = f"{count:,} infinite entries, the first one at index {first}"
        raise InputError(f"{source} contains {what}; replace it with a number, or with NaN if the entry is missing")
    return ~np.isnan(samples)


def read_mask(source: str | os.PathLike[str], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Read a mask that is True for the known entries of an array with the given shape.

    The source must contain booleans, the values 0 and 1, or the values 0 and 255, with the shape of all samples or of
    one sample. The axes of a sample can be flattened. The result has shape `shape`, or ``shape[1:]`` if all samples
    share one mask.
    """
    array = np.asarray(read_array(source))
    size = math.prod(shape[1:])
    one = array.shape in (shape[1:], (1, *shape[1:]), (size,))  # a picture is read as an array of one sample
    if not one and array.shape not in (shape, (shape[0], size)):
        raise InputError(
            f"a mask must have the shape of one sample, {shape[1:]}, or of all samples, {shape}, but {source} has "
            f"shape {array.shape}"
        )
    values = np.unique(array)
    if not any(np.isin(values, pair).all() for pair in ((0, 1), (0, 255))):
        raise InputError(
            f"{source} is not a mask; it must be true, 1 or 255 for known entries and false or 0 for missing entries"
        )
    return array.astype(bool).reshape(shape[1:] if one else shape)


def half_mask(shape: tuple[int, ...], hidden: str) -> NDArray[np.bool_]:
    """Return a mask of shape `shape` that is False in one half of a sample and True in the other half.

    `hidden` specifies the half that is False: ``"left"``, ``"right"``, ``"top"`` or ``"bottom"``.
    """
    if len(shape) < 2:
        raise InputError(f"a sample of shape {shape} has no {hidden} half; use a mask instead")
    known = np.ones(shape, bool)
    axis = 0 if hidden in ("top", "bottom") else 1
    middle = shape[axis] // 2
    half = slice(middle) if hidden in ("top", "left") else slice(middle, None)
    known[(slice(None),) * axis + (half,)] = False
    return known


# -- writing ----------------------------------------------------------------------------------------

# Minimum length in pixels of the longer side of a contact sheet. Smaller sheets are enlarged by an integer factor.
_SMALLEST_SHEET = 280


def as_pictures(array: Array) -> Array:
    """Reshape samples to images of shape (n, rows, columns). See :func:`picture_shape`."""
    return array.reshape(len(array), *picture_shape(array.shape[1:]))


def picture_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of rows and columns of the image of one sample.

    `shape` is the shape of the sample: (rows, columns), or (m,) where m is a perfect square. Raise InputError for other
    shapes.
    """
    if len(shape) == 1 and math.isqrt(shape[0]) ** 2 == shape[0]:
        return math.isqrt(shape[0]), math.isqrt(shape[0])
    if len(shape) != 2:
        raise InputError(f"samples of shape {tuple(shape)} are not images; write a .npy file instead")
    return shape[0], shape[1]


def contact_sheet(array: Array, *, stretch: bool = False, columns: int | None = None) -> NDArray[np.uint8]:
    """Arrange samples in a grid and return the grid as a grayscale image of dtype uint8.

    Parameters
    ----------
    array : array of shape (n, rows, columns), or (n, m) where m is a perfect square
        Samples. Values of dtype uint8 are shown unchanged. Other values are clipped to the range from 0 (black) to 1
        (white).
    stretch : bool
        Whether to map the smallest value to black and the largest value to white instead of clipping. Ignored for
        uint8.
    columns : int, optional
        Number of columns in the grid. By default, the grid is approximately square.
    """
    array = as_pictures(array)
    if array.dtype != np.uint8:
        values = array.astype(np.float64)
        low, high = (float(values.min()), float(values.max())) if stretch else (0.0, 1.0)
        array = np.rint(np.clip((values - low) / (high - low or 1.0), 0, 1) * 255).astype(np.uint8)
    n, height, width = array.shape
    if columns is not None and columns < 1:
        raise InputError(f"a contact sheet must have at least one column, got columns={columns}")
    across = math.ceil(math.sqrt(n)) if columns is None else min(columns, n)
    down = math.ceil(n / across)
    # Each tile has a gray border below and to the right.
    tiles = np.full((down * across, height + 1, width + 1), 128, np.uint8)
    tiles[:n, :height, :width] = array
    sheet = tiles.reshape(down, across, height + 1, width + 1).swapaxes(1, 2).reshape(down * (height + 1), -1)
    return sheet[:-1, :-1]


def write_output(
    path: str | os.PathLike[str],
    array: Array,
    force: bool = False,
    *,
    stretch: bool = False,
    columns: int | None = None,
) -> Path:
    """Write an array to a ``.npy`` file, or write samples to an image file as a :func:`contact_sheet`.

    Small contact sheets with several samples are enlarged by an integer factor. A single sample is not enlarged. An
    existing file is replaced only if `force` is True. Returns the path to the file.
    """
    path = check_output(path, force, (".npy", *IMAGE_SUFFIXES))
    encoded = io.BytesIO()  # If np.save fails on a real file, its error message does not give the reason.
    if path.suffix.lower() == ".npy":
        np.save(encoded, array, allow_pickle=False)
    else:
        from PIL import Image

        try:
            kind = Image.registered_extensions()[path.suffix.lower()]
            sheet = contact_sheet(array, stretch=stretch, columns=columns)
            times = 1 if len(array) == 1 else -(-_SMALLEST_SHEET // max(sheet.shape))
            Image.fromarray(sheet.repeat(times, 0).repeat(times, 1)).save(encoded, kind)
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be written: {first_line(error)}") from error
    with replace_file(path) as file:
        file.write(encoded.getbuffer())
    return path
