"""The data of experiments 1 and 2: digits and patches of photographs, and the random subsets of them."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import DatasetError
from mvrbm.io.datasets import load
from mvrbm.io.datasets import patches as cut

Array = NDArray[Any]

#: Patches of photographs as one file (n, 128, 128) of bytes, for machines without scikit-image: training patches and
#: test patches of other photographs, and patches of all photographs.
PATCHES, ALL_PATCHES = "natural-patches.npy", "natural-patches-all.npy"
_PATCH = 128
_TRAIN_PATCHES, _TEST_PATCHES = 1000, 250
_SPLIT_SEED = 2016  # of the digits held out where a set has no test part


@dataclass(frozen=True)
class Digits:
    """Images as bytes (n, 28, 28) and their labels."""

    train: Array
    train_labels: Array
    test: Array
    test_labels: Array


@functools.lru_cache(maxsize=2)
def digits(name: str, n_test: int | None, data_dir: str | None) -> Digits:
    """Return a set of digits in two parts.

    Parameters
    ----------
    name : str
        ``"mnist"``, which has a test part, or ``"mnist-5k"``, which has none.
    n_test : int, optional
        Number of test digits, balanced over the classes: from the test part, or held out where there is none.
        Default: the whole test part.
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
        raise ValueError(f"{n:,} training digits are requested, there are {size:,}")
    return np.random.default_rng(seed).choice(size, n, replace=False)


def balanced(labels: Array, each: int, seed: int) -> Array:
    """Draw `each` rows of every digit, in turn, so that the first few show all ten."""
    random = np.random.default_rng(seed)
    rows = [random.permutation(np.flatnonzero(labels == digit))[:each] for digit in range(10)]
    shortest = min(len(part) for part in rows)
    if shortest < each:
        raise ValueError(f"{each:,} of each digit are requested, there are only {shortest:,} of one")
    return np.stack(rows, 1).reshape(-1)


# -- photographs ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def photographs(data_dir: str | None) -> tuple[Array, Array]:
    """Return training and test patches of photographs, bytes (n, 128, 128), of different photographs.

    They are read from the file `PATCHES` in `data_dir` or in the folder that ``MVRBM_DATA`` names, if there is one,
    and otherwise cut out of ``"natural-images"``.
    """
    stored = _stored(PATCHES, _TRAIN_PATCHES + _TEST_PATCHES, data_dir)
    if stored is not None:
        return stored[:_TRAIN_PATCHES], stored[_TRAIN_PATCHES:]
    images = load("natural-images").arrays
    held_out = images[::5]
    others = [image for number, image in enumerate(images) if number % 5]
    return _cut(others, _TRAIN_PATCHES, 0), _cut(held_out, _TEST_PATCHES, 1)


def all_photographs(data_dir: str | None) -> Array:
    """Return patches of all photographs, bytes (n, 128, 128); from the file `ALL_PATCHES` if there is one."""
    stored = _stored(ALL_PATCHES, _TRAIN_PATCHES, data_dir)
    return _cut(load("natural-images").arrays, _TRAIN_PATCHES, 0) if stored is None else stored


def _cut(images: Any, n: int, seed: int) -> Array:
    return np.round(255 * cut(images, _PATCH, n, seed=seed)).astype(np.uint8)


def _stored(name: str, n: int, data_dir: str | None) -> Array | None:
    """Return the patches of a file in `data_dir` or in the folder that ``MVRBM_DATA`` names, None if there is none."""
    for folder in (data_dir, os.environ.get("MVRBM_DATA")):
        if folder and (Path(folder) / name).is_file():
            stored: Array = np.load(Path(folder) / name, allow_pickle=False)
            if stored.shape != (n, _PATCH, _PATCH) or stored.dtype != np.uint8:
                wanted = (n, _PATCH, _PATCH)
                raise DatasetError(f"{Path(folder) / name} should be bytes of shape {wanted}, is {stored.shape}")
            return stored
    return None


def write_patches(folder: Path) -> list[Path]:
    """Write both sets of patches to files, to take them to a machine without scikit-image."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, patches in ((PATCHES, np.concatenate(photographs(None))), (ALL_PATCHES, all_photographs(None))):
        np.save(folder / name, patches)
    return [folder / PATCHES, folder / ALL_PATCHES]
