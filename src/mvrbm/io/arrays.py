"""Arrays from files and to files: .npy, .npz, idx, images. No pickle anywhere.

Nothing is allocated before what a file claims has been compared with what it can hold. What is written
is written beside its place and renamed into it, so that it is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import tempfile
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.io import datasets
from mvrbm.io.atomic import usual_mode
from mvrbm.io.datasets import LARGEST, InputError, read_idx

__all__ = ["InputError", "check_output", "contact_sheet", "read_array", "write_output"]

Array = NDArray[Any]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm", ".webp")
_LARGEST_IMAGE = 2**26  # pixels
_LARGEST_ORDER = 16
_KINDS = "a .npy, .npz or idx file, an image, a folder of images, or a named set"
# How a header is read decides what can go wrong in it; these are what NumPy's and zipfile's parsers raise.
_DAMAGE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    EOFError,
    SyntaxError,
    RecursionError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


# -- reading ----------------------------------------------------------------------------------------


def read_array(
    source: str | os.PathLike[str], *, data_dir: str | os.PathLike[str] | None = None, largest: int = LARGEST
) -> Array:
    """Read samples, along the first axis, from whatever `source` names.

    Parameters
    ----------
    source : str or path
        A ``.npy`` file (which is memory-mapped), a ``.npz`` file with one array or ``file.npz:key``, an
        idx file (also with gzip), an image, a folder of images of one size, or the name of a set, of
        which ``mnist:test`` is another part. A file called like a set is named by ``./mnist``.
    data_dir : path, optional
        Where sets are looked for first.
    largest : int
        Bytes that an array may have that has to be read into memory.

    Returns
    -------
    array
        Of bool, integers or floats. Images are grey bytes.

    Raises
    ------
    InputError
        If there is nothing of the kind, or it is damaged. The message says which.
    """
    text = os.fspath(source)
    name, _, split = text.partition(":")
    if name in datasets.NAMES:
        return _read_set(name, split or "train", data_dir)
    place, key = _split_key(text)
    path = Path(place)
    try:
        if path.is_dir():
            return _read_images(_images_in(path), largest)
        with path.open("rb") as file:
            head = file.read(6)
    except FileNotFoundError:
        raise InputError(f"{text}: no such file, and no data set of that name: {', '.join(datasets.NAMES)}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    if not head:
        raise InputError(f"{path} is empty")
    if head == b"\x93NUMPY":
        return _read_npy(path)
    if head[:4] == b"PK\x03\x04" or path.suffix == ".npz":
        return _read_npz(path, key, largest)
    if head[:2] in (b"\x1f\x8b", b"\0\0") or "idx" in path.name:
        return read_idx(path, largest=largest)
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return _read_images([path], largest)
    raise InputError(f"{path} is not {_KINDS}: it begins with {head.hex(' ')}")


def _split_key(text: str) -> tuple[str, str | None]:
    place, colon, key = text.rpartition(":")
    return (place, key) if colon and place.endswith(".npz") else (text, None)


def _read_set(name: str, split: str, data_dir: str | os.PathLike[str] | None) -> Array:
    images = datasets.load(name, split=split, data_dir=data_dir).arrays
    if name == "natural-images":
        return datasets.patches(images, 16, 10_000)
    if name == "indian-pines":
        return _tiles(images, 5).astype(np.float32) / 10_000
    return np.asarray(images)


def _tiles(cube: Array, size: int) -> Array:
    """Cut (rows, columns, bands) into (n, size, size, bands)."""
    rows, columns = (extent // size for extent in cube.shape[:2])
    cut = cube[: rows * size, : columns * size].reshape(rows, size, columns, size, -1)
    return cut.swapaxes(1, 2).reshape(rows * columns, size, size, -1)


def _read_npy(path: Path) -> Array:
    with _damage_of(path), path.open("rb") as file:
        shape, by_column, dtype = _npy_header(file, str(path))
        start, size = file.tell(), os.fstat(file.fileno()).st_size
    wanted = math.prod(shape) * dtype.itemsize
    if start + wanted > size:
        raise InputError(f"{path} is truncated: {size - start:,} of {wanted:,} bytes are there for shape {shape}")
    with _damage_of(path):
        return np.memmap(path, dtype, "r", offset=start, shape=shape, order="F" if by_column else "C")


def _read_npz(path: Path, key: str | None, largest: int) -> Array:
    with _damage_of(path), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if not members:
            raise InputError(f"{path} holds no array")
        if key is None and len(members) > 1:
            raise InputError(f"{path} holds {len(members)} arrays, {_some(members)}: name one as {path.name}:KEY")
        if key is not None and key not in members:
            raise InputError(f"{path} holds no array '{key}', only {_some(members)}")
        info = members[key] if key is not None else next(iter(members.values()))
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(f"{path} is compressed in a way that is not read: NumPy stores or deflates")
        with archive.open(info) as member:
            what = f"{path}:{info.filename.removesuffix('.npy')}"
            shape, by_column, dtype = _npy_header(member, what)
            return _read_entries(member, what, shape, by_column, dtype, info.file_size, largest)


def _read_entries(
    member: IO[bytes], what: str, shape: tuple[int, ...], by_column: bool, dtype: np.dtype[Any], most: int, largest: int
) -> Array:
    wanted = math.prod(shape) * dtype.itemsize
    if wanted > largest:
        raise InputError(f"{what} claims {wanted:,} bytes for shape {shape}: more than {largest:,} are not read")
    if wanted > most:
        raise InputError(f"{what} is truncated: shape {shape} needs {wanted:,} bytes, it has {most:,}")
    # Grown as it is read: what a zip archive says of its sizes need not be so.
    content = bytearray()
    while len(content) < wanted:
        block = member.read(min(2**20, wanted - len(content)))
        if not block:
            raise InputError(f"{what} is truncated: {len(content):,} of {wanted:,} bytes are there for shape {shape}")
        content += block
    if member.read(1):  # also lets zipfile compare the checksum
        raise InputError(f"{what} has bytes after its last entry: shape {shape} ends before")
    array = np.frombuffer(content, dtype)
    return array.reshape(shape[::-1]).T if by_column else array.reshape(shape)


def _npy_header(file: IO[bytes], what: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise InputError(f"{what} has .npy version {'.'.join(map(str, version))}: 1.0 and 2.0 are read")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of strings that Python's parser finds odd: the result is checked
        shape, by_column, dtype = read(file)
    if dtype.hasobject:
        raise InputError(f"{what} holds Python objects, which are not read: save numbers")
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or dtype.subdtype is not None:
        raise InputError(f"{what} has entries of type {dtype.name}: booleans, integers or floats are wanted")
    shape = tuple(int(size) for size in shape)
    if len(shape) > _LARGEST_ORDER:
        raise InputError(f"{what} has {len(shape)} dimensions: {_LARGEST_ORDER} are read at most")
    if any(size <= 0 for size in shape):
        raise InputError(f"{what} has no entries: its shape is {shape}")
    return shape, bool(by_column), dtype


@contextlib.contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        raise InputError(f"{path} is damaged: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:200] or type(error).__name__


def _some(names: Any, most: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


# -- images -----------------------------------------------------------------------------------------


def _images_in(folder: Path) -> list[Path]:
    entries = sorted(folder.iterdir())
    found = [path for path in entries if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")]
    if not found:
        raise InputError(f"{folder} holds no images: {' '.join(IMAGE_SUFFIXES)} are read")
    return found


def _read_images(paths: list[Path], largest: int) -> Array:
    first = _read_image(paths[0])
    if first.size * len(paths) > largest:
        raise InputError(f"{len(paths):,} images of {_size(first)} are more than {largest:,} bytes")
    images = np.empty((len(paths), *first.shape), np.uint8)
    for number, path in enumerate(paths):
        image = first if number == 0 else _read_image(path)
        if image.shape != first.shape:
            raise InputError(f"{path} is {_size(image)}, but {paths[0].name} is {_size(first)}: all need one size")
        images[number] = image
    return images


def _read_image(path: Path) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                if image.width * image.height > _LARGEST_IMAGE:
                    raise InputError(f"{path} has {image.width}x{image.height} pixels: too many for a sample")
                if image.mode.startswith("I;16"):
                    return (np.asarray(image) >> 8).astype(np.uint8)
                if image.mode in ("I", "F"):
                    raise InputError(f"{path} has pixels of mode {image.mode}: save it with 8 or 16 bits")
                return np.asarray(image.convert("L"))
    except InputError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise InputError(f"{path} claims more pixels than a sample can have: a decompression bomb?") from None
    except Exception as error:  # Pillow's readers raise nearly anything for a damaged file
        reason = getattr(error, "strerror", None) or _first_line(error)
        raise InputError(f"{path} is not an image that can be read: {reason}") from error


def _size(image: Array) -> str:
    return f"{image.shape[1]}x{image.shape[0]}"


def contact_sheet(array: Array, *, stretch: bool = False) -> NDArray[np.uint8]:
    """Lay samples out in a grid, as grey bytes.

    Parameters
    ----------
    array : array (n, rows, columns), or (n, m) with a square number m
        The samples. Bytes stay; other values count from 0, black, to 1, white, and are clipped.
    stretch : bool
        Whether the least value is to be black and the largest white instead.
    """
    if array.ndim == 2 and math.isqrt(array.shape[1]) ** 2 == array.shape[1]:
        array = array.reshape(len(array), math.isqrt(array.shape[1]), -1)
    if array.ndim != 3:
        raise InputError(f"samples of shape {tuple(array.shape[1:])} are not images: write a .npy file instead")
    n, rows, columns = array.shape
    across = math.ceil(math.sqrt(n))
    down = math.ceil(n / across)
    if array.dtype == np.uint8:
        grey = array
    else:
        values = array.astype(np.float64)
        low, high = (float(values.min()), float(values.max())) if stretch else (0.0, 1.0)
        grey = np.rint(np.clip((values - low) / (high - low or 1.0), 0, 1) * 255).astype(np.uint8)
    sheet = np.full((down * (rows + 1) - 1, across * (columns + 1) - 1), 128, np.uint8)
    for number, image in enumerate(grey):
        top, left = (number // across) * (rows + 1), (number % across) * (columns + 1)
        sheet[top : top + rows, left : left + columns] = image
    return sheet


# -- writing ----------------------------------------------------------------------------------------


def check_output(path: str | os.PathLike[str], force: bool = False, suffixes: tuple[str, ...] = ()) -> Path:
    """Say early, before the work, whether a file can be written.

    Parameters
    ----------
    path : path
        Where to.
    force : bool
        Whether a file that is there may be replaced.
    suffixes : tuple of str
        What the name may end in; anything if empty.
    """
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise InputError(f"{path} should end in one of {' '.join(suffixes)}")
    there = _exists(path)
    if there and path.is_dir():
        raise InputError(f"{path} is a folder: name a file to write to")
    if there and not force:
        raise InputError(f"{path} exists: use --force to replace it")
    if not path.parent.is_dir():
        what = "is a file" if _exists(path.parent) else "does not exist"
        raise InputError(f"{path} cannot be written: {path.parent} {what}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written: no permission to write in {path.parent}")
    return path


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    return True


def write_output(path: str | os.PathLike[str], array: Array, force: bool = False, *, stretch: bool = False) -> Path:
    """Write an array to a ``.npy`` file, or samples as a contact sheet to an image file.

    Parameters
    ----------
    path : path
        Where to; its ending says what.
    array : array
        The samples.
    force : bool
        Whether a file that is there may be replaced.
    stretch : bool
        See :func:`contact_sheet`.
    """
    path = check_output(path, force, (".npy", *IMAGE_SUFFIXES))
    if path.suffix.lower() == ".npy":
        _replace(path, lambda file: _write_npy(file, np.ascontiguousarray(array)))
        return path
    from PIL import Image

    encoded = io.BytesIO()
    kind = Image.registered_extensions()[path.suffix.lower()]
    try:
        Image.fromarray(contact_sheet(array, stretch=stretch)).save(encoded, kind)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {_first_line(error)}") from error
    _replace(path, lambda file: file.write(encoded.getvalue()))
    return path


def _write_npy(file: IO[bytes], array: Array) -> None:
    # Not by NumPy's own function, which does not say why it could not write.
    np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
    file.write(array.reshape(-1).view(np.uint8).data)


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file beside its place and rename it into it."""
    try:
        handle, staging = tempfile.mkstemp(prefix=".mvrbm-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(staging, usual_mode(0o666))
            os.replace(staging, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staging)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
