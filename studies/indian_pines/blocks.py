"""Training blocks, test pixels and patches of a hyperspectral scene; no training patch overlaps a test patch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import binary_dilation

from studies.indian_pines.settings import Settings

__all__ = ["Split", "divide", "held_out", "patches", "whitened"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Pixels of one draw, each a row and a column.

    Parameters
    ----------
    train, test : array (n, 2)
        Labeled pixels. No training patch shares a pixel with a test patch.
    unlabeled : array (m, 2)
        Pixels, labeled or not, whose patches overlap no test patch. They include the training pixels.
    block : array (n_train,)
        The block of each training pixel.
    fold : array (n_train,)
        The group of the block of each training pixel.
    classes : array
        Labels that count in this draw.
    """

    train: Array
    test: Array
    unlabeled: Array
    block: Array
    fold: Array
    classes: Array


def divide(labels: Array, draw: int, settings: Settings | None = None, *, tries: int = 10_000) -> Split:
    """Draw training blocks; the test pixels are the labeled pixels that are far enough from all of them.

    Blocks of a grid are taken in random order until they hold the share of the labels that `settings` asks for. A draw
    with too few classes on both sides is rejected and drawn again; this depends on the places of the labels alone.

    Parameters
    ----------
    labels : array (rows, columns)
        Labels; 0 is no label.
    draw : int
        Number of the draw.
    settings : Settings, optional
        Sizes and shares.
    tries : int
        Largest number of draws that are rejected.
    """
    settings = settings or Settings()
    labels = np.asarray(labels, int)
    if settings.patch % 2 == 0:
        raise ValueError(f"patch must be odd, so that a pixel is its center, got {settings.patch}")
    rows, columns = (np.arange(size) // settings.block for size in labels.shape)
    blocks = rows[:, None] * (columns.max() + 1) + columns
    known = labels > 0
    held = np.bincount(blocks.ravel(), weights=known.ravel())  # labels per block
    random = np.random.default_rng([draw, settings.block, settings.patch])
    for _ in range(tries):
        order = random.permutation(np.flatnonzero(held))
        enough = int(np.searchsorted(np.cumsum(held[order]), settings.share * known.sum())) + 1
        chosen = order[:enough]
        train = known & np.isin(blocks, chosen)
        test = known & ~_near(train, settings.patch - 1)
        counts = [np.bincount(labels[part], minlength=labels.max() + 1) for part in (train, test)]
        classes = np.flatnonzero(np.minimum(*counts) >= settings.least)
        if len(classes) >= settings.classes:
            break
    else:
        raise ValueError(
            f"no draw of {tries:,} has {settings.classes} classes with {settings.least} pixels on both sides: "
            "ask for fewer, or use smaller blocks"
        )
    counted = np.isin(labels, classes)
    groups = dict(zip(chosen.tolist(), (np.arange(enough) % settings.folds).tolist(), strict=True))
    places = np.argwhere(train & counted)
    block = blocks[tuple(places.T)]
    return Split(
        train=places,
        test=np.argwhere(test & counted),
        unlabeled=np.argwhere(~_near(test, settings.patch - 1)),
        block=block,
        fold=np.asarray([groups[number] for number in block.tolist()]),
        classes=classes,
    )


def _near(mask: Array, reach: int) -> Array:
    """Return the pixels within `reach` rows and columns of a pixel of a mask, as a mask."""
    return np.asarray(binary_dilation(mask, np.ones((2 * reach + 1, 2 * reach + 1), bool)))


def held_out(split: Split, patch: int) -> Iterator[tuple[Array, Array]]:
    """Yield, for each group of training blocks, masks of the training pixels to fit and to validate on.

    Training pixels whose patch overlaps a held-out patch are in neither.
    """
    apart = np.abs(split.train[:, None] - split.train[None]).max(2) >= patch
    for number in np.unique(split.fold):
        tried = split.fold == number
        yield ~tried & apart[:, tried].all(1), tried


def patches(cube: Array, places: Array, size: int = 9) -> Array:
    """Cut patches around pixels; the scene is mirrored at its edges.

    Parameters
    ----------
    cube : array (rows, columns, bands)
        The scene.
    places : array (n, 2)
        Pixels.
    size : int
        Rows, and columns, of a patch; odd.

    Returns
    -------
    array (n, size, size, bands)
    """
    reach = size // 2
    padded = np.pad(cube, ((reach, reach), (reach, reach), (0, 0)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (size, size), (0, 1))
    return np.ascontiguousarray(windows[places[:, 0], places[:, 1]].transpose(0, 2, 3, 1))


def whitened(cube: Array, places: Array, floor: float) -> Array:
    """Return the scene with decorrelated bands (ZCA whitening, fitted on some pixels).

    Parameters
    ----------
    cube : array (rows, columns, bands)
        The scene.
    places : array (n, 2)
        Pixels for mean and covariance.
    floor : float
        Added to the variances of the principal components, the smallest of which are mostly noise.
    """
    spectra = cube[places[:, 0], places[:, 1]].astype(np.float64)
    mean, deviation = spectra.mean(0), spectra.std(0)
    deviation = np.where(deviation > 0, deviation, 1)
    variances, axes = np.linalg.eigh(np.cov(((spectra - mean) / deviation).T))
    turn = (axes / np.sqrt(np.maximum(variances, 0) + floor)) @ axes.T
    return np.asarray(((cube - mean) / deviation) @ turn, np.float32)
