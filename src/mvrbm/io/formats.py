"""Read arrays from .npy, .npz and idx files, and list image files in folders.

`pictures` reads images, and `arrays` selects the reader for a file, a folder or a dataset name. Before allocating
memory, every reader compares the array size declared in the header with the actual file size. Pickles are never read.
"""

import contextlib
import gzip
import io
import math
import mmap
import os
import struct
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import InputError
from mvrbm.io.untrusted import check_regular_file

__all__ = [
    "IMAGE_SUFFIXES",
    "LARGEST",
    "check_mapped",
    "first_line",
    "images_by_class",
    "images_in",
    "open_npy",
    "read_idx",
    "read_npz",
    "reading",
    "some_of",
]

Array = NDArray[Any]
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".pgm", ".ppm", ".webp")
#: Default maximum size in bytes of an array that is read into memory.
LARGEST = 4 * 2**30

# Maximum number of axes in an array.
_LARGEST_ORDER = 16
# Maximum size in bytes of the header in a .npy file.
_LARGEST_HEADER = 10_000
# Mapping from idx type codes to NumPy dtypes.
_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
#: Maximum compression ratio of a deflate stream.
BEST_COMPRESSION = 1032
# Block size in bytes when reading entries from a stream.
_BLOCK = 2**20


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, or the class name of the error if it has no message."""
    return next(iter(str(error).splitlines()), "")[:200] or type(error).__name__


def images_in(folder: Path) -> list[Path]:
    """Return the image files in a folder, sorted by name and excluding hidden files."""
    visible = (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    found = [path for path in visible if path.suffix.lower() in IMAGE_SUFFIXES]
    if not found:
        raise InputError(f"{folder} contains no images; supported formats are {', '.join(IMAGE_SUFFIXES)}")
    return found


def images_by_class(folder: Path) -> dict[str, list[Path]]:
    """Return a mapping from the name of each subfolder to the image files in that subfolder.

    A folder that contains images itself or has no subfolders is treated as a single class, whose name is empty.
    """
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    if not inner or any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.iterdir()):
        return {"": images_in(folder)}
    return {path.name: images_in(path) for path in inner}


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Context manager that converts errors raised while reading a file to an InputError with the file name."""
    check_regular_file(path)
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # NumPy, zipfile and gzip raise many exception types for corrupted files.
        if isinstance(error, OSError) and error.strerror:
            raise InputError(f"{path} cannot be read: {error.strerror}") from error
        raise InputError(f"{path} is corrupted or truncated: {first_line(error)}") from error


def open_npy(path: str | os.PathLike[str], *, allow_empty: bool = False, texts: bool = False) -> Array:
    """Open a ``.npy`` file as a read-only memory map.

    The file must contain booleans, integers or floats, or strings if `texts` is True.
    """
    path = Path(path)
    with reading(path), path.open("rb") as file:
        shape, by_column, dtype = _npy_header(file, str(path), allow_empty, texts)
        start = file.tell()
        size = os.fstat(file.fileno()).st_size
    if 0 in shape:
        if math.prod(size for size in shape if size) * dtype.itemsize > np.iinfo(np.intp).max:
            raise InputError(f"{path} has an invalid shape: {shape}")
        return np.empty(shape, dtype)
    needed = math.prod(shape) * dtype.itemsize
    if start + needed > size:
        raise InputError(f"{path} is truncated: it has {size - start:,} of {needed:,} bytes for shape {shape}")
    with reading(path):
        return np.memmap(path, dtype, "r", offset=start, shape=shape, order="F" if by_column else "C")


def check_mapped(array: Any) -> None:
    """Raise InputError if the file behind a memory-mapped array has been truncated.

    Reading a truncated memory map would kill the process. This function cannot detect truncation that occurs after it
    returns.
    """
    file = array
    while file is not None and not isinstance(file, mmap.mmap):
        array, file = file, getattr(file, "base", None)
    if file is None or not isinstance(array, np.memmap):
        return
    mapped = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY + len(file)
    if (size := file.size()) < mapped:
        raise InputError(f"{array.filename} has been truncated from {mapped:,} to {size:,} bytes")


def read_npz(path: str | os.PathLike[str], key: str | None = None, *, largest: int = LARGEST) -> Array:
    """Read an array from a ``.npz`` archive. `key` can be None if the archive contains only one array."""
    path = Path(path)
    with reading(path), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if not members:
            raise InputError(f"{path} contains no arrays")
        if key is None and len(members) > 1:
            raise InputError(
                f"{path} contains {len(members)} arrays ({some_of(members)}); select one with {path.name}:KEY"
            )
        if key is not None and key not in members:
            raise InputError(f"{path} contains no array '{key}', only {some_of(members)}")
        name, info = (key, members[key]) if key is not None else next(iter(members.items()))
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InputError(f"{path} uses an unsupported compression method; save it with numpy.savez_compressed")
        with archive.open(info) as member:
            what = f"{path}:{name}"
            shape, by_column, dtype = _npy_header(member, what)
            entries = _read_entries(member, what, shape, dtype, info.file_size, largest)
    return entries.reshape(shape[::-1]).T if by_column else entries.reshape(shape)


def _npy_header(
    file: IO[bytes], what: str, allow_empty: bool = False, texts: bool = False
) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise InputError(f"{what} has .npy version {'.'.join(map(str, version))}, but only 1.0 and 2.0 are supported")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    length = file.read(2 if version == (1, 0) else 4)
    size = int.from_bytes(length, "little")
    if size > _LARGEST_HEADER:  # NumPy would allocate this much memory before reading the header.
        raise InputError(f"{what} declares a header of {size:,} bytes, but the maximum is {_LARGEST_HEADER:,}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's parser warns about unusual literals. The result is validated below.
        shape, by_column, dtype = read(io.BytesIO(length + file.read(size)))
    if dtype.hasobject:
        raise InputError(f"{what} contains Python objects, which are not supported; save a numeric array instead")
    is_text = texts and dtype.kind == "U" and dtype.itemsize > 0
    if not is_text and (dtype.kind not in "biuf" or dtype.itemsize > 8 or dtype.subdtype is not None):
        raise InputError(f"{what} has dtype {dtype.name}, but booleans, integers or floats are required")
    shape = tuple(int(size) for size in shape)
    if len(shape) > _LARGEST_ORDER:
        raise InputError(f"{what} has {len(shape)} dimensions, but at most {_LARGEST_ORDER} are supported")
    if any(size < 0 for size in shape) or (0 in shape and not allow_empty):
        raise InputError(f"{what} has no entries (shape {shape})")
    return shape, bool(by_column), dtype


def _read_entries(
    file: IO[bytes], what: str, shape: tuple[int, ...], dtype: np.dtype[Any], available: int, largest: int
) -> Array:
    """Read the entries of an array and return them as a one-dimensional array.

    Raises InputError if the file does not end after the last entry.
    """
    needed = math.prod(shape) * dtype.itemsize
    if needed > largest:
        raise InputError(f"{what} declares {needed:,} bytes for shape {shape}, which exceeds the limit of {largest:,}")
    if needed > available:
        raise InputError(
            f"{what} is truncated: shape {shape} requires {needed:,} bytes, but there are at most {available:,}"
        )
    content = bytearray()  # Grows one block at a time, because the sizes in an archive's directory may be wrong.
    while len(content) < needed:
        block = file.read(min(_BLOCK, needed - len(content)))
        if not block:
            raise InputError(f"{what} is truncated: it has {len(content):,} of {needed:,} bytes for shape {shape}")
        content += block
    if file.read(1):  # Reading to the end also makes zipfile and gzip verify their checksums.
        raise InputError(f"{what} contains extra bytes after the last entry of an array of shape {shape}")
    return np.frombuffer(content, dtype)


def some_of(names: Iterable[str], most: int = 8) -> str:
    """Join names with commas. If there are more than `most` names, replace the remaining ones with an ellipsis."""
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def read_idx(path: str | os.PathLike[str], *, largest: int = LARGEST) -> Array:
    """Read an array of at most `largest` bytes from an idx file (the MNIST format), optionally compressed with gzip."""
    path = Path(path)
    with reading(path), path.open("rb") as raw:
        size = os.fstat(raw.fileno()).st_size
        compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if not size:
            raise InputError(f"{path} is empty")
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if compressed else raw
        return _parse_idx(file, path, size * (BEST_COMPRESSION if compressed else 1), largest)


def _parse_idx(file: IO[bytes], path: Path, available: int, largest: int) -> Array:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
        raise InputError(f"{path} is not an idx file: it begins with {head.hex(' ') or 'nothing'}")
    dtype = np.dtype(_IDX_TYPES[head[2]])
    order = head[3]
    if not 1 <= order <= _LARGEST_ORDER:
        raise InputError(f"{path} declares {order} dimensions, but only 1 to {_LARGEST_ORDER} are supported")
    sizes = file.read(4 * order)
    if len(sizes) < 4 * order:
        raise InputError(f"{path} is truncated: the header is incomplete")
    shape = struct.unpack(f">{order}I", sizes)
    if 0 in shape:
        raise InputError(f"{path} has no entries (shape {shape})")
    entries = _read_entries(file, str(path), shape, dtype, available - len(head) - len(sizes), largest)
    return entries.astype(dtype.newbyteorder("="), copy=False).reshape(shape)
