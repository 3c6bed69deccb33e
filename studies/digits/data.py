"""Digits and patches of photographs, and which of them a cell is given."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.io.datasets import DatasetError, load
from mvrbm.io.datasets import patches as cut

Array = NDArray[Any]

#: Patches of photographs as one file (n, 128, 128) of bytes, for machines without scikit-image.
PATCHES = "natural-patches.npy"
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
        Test digits, as many of each class: of the test part, or held out where there is none.
        The whole test part if not given.
    data_dir : str, optional
        Where to look for files.
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
        raise ValueError(f"{n:,} training digits are wanted, there are {size:,}")
    return np.random.default_rng(seed).choice(size, n, replace=False)


def balanced(labels: Array, each: int, seed: int) -> Array:
    """Draw `each` rows of every digit, in turn, so that the first few show all ten."""
    random = np.random.default_rng(seed)
    rows = [random.permutation(np.flatnonzero(labels == digit))[:each] for digit in range(10)]
    shortest = min(len(part) for part in rows)
    if shortest < each:
        raise ValueError(f"{each:,} of each digit are wanted, there are only {shortest:,} of one")
    return np.stack(rows, 1).reshape(-1)


# -- photographs ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def photographs(data_dir: str | None) -> tuple[Array, Array]:
    """Return training and test patches of photographs, bytes (n, 128, 128), of different photographs.

    They are cut out of ``"natural-images"``, or read from the file `PATCHES` in `data_dir` or the folder
    that ``MVRBM_DATA`` names, if there is one.
    """
    for folder in (data_dir, os.environ.get("MVRBM_DATA")):
        if folder and (Path(folder) / PATCHES).is_file():
            stored = np.load(Path(folder) / PATCHES, allow_pickle=False)
            wanted = (_TRAIN_PATCHES + _TEST_PATCHES, _PATCH, _PATCH)
            if stored.shape != wanted or stored.dtype != np.uint8:
                raise DatasetError(f"{Path(folder) / PATCHES} should be bytes of shape {wanted}, is {stored.shape}")
            return stored[:_TRAIN_PATCHES], stored[_TRAIN_PATCHES:]
    images = load("natural-images").arrays
    held_out = images[::5]
    others = [image for number, image in enumerate(images) if number % 5]
    parts = ((others, _TRAIN_PATCHES, 0), (held_out, _TEST_PATCHES, 1))
    train, test = (np.round(255 * cut(part, _PATCH, n, seed=seed)).astype(np.uint8) for part, n, seed in parts)
    return train, test


def write_photographs(folder: Path) -> Path:
    """Write the patches to a file, to be taken to a machine without scikit-image."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / PATCHES, np.concatenate(photographs(None)))
    return folder / PATCHES
