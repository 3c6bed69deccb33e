"""Read the distances between sites in a known structure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import InputError
from mvrbm.io.formats import open_npy, reading
from mvrbm.io.untrusted import check_regular_file

__all__ = ["read_distances"]

# Maximum size of a file in bytes: the sum of a constant and a number of bytes per pair of sites.
_ALLOWANCE, _BYTES_PER_PAIR = 2**20, 256


def read_distances(path: str | os.PathLike[str], n_sites: int) -> NDArray[Any]:
    """Read distances from a matrix or from a list of pairs.

    Parameters
    ----------
    path : path
        A ``.npy`` file with a matrix, or a text file with numbers separated by spaces, tabs or commas. A text file
        contains a matrix, or one pair of sites per line: two sites, counted from 1, and their distance. Lines that
        start with ``#`` are comments.
    n_sites : int
        Number of sites.

    Returns
    -------
    array of shape (n_sites, n_sites)
        Distances. Pairs that are not in the file have distance NaN.
    """
    path = Path(path)
    if (size := check_regular_file(path)) > (largest := _ALLOWANCE + _BYTES_PER_PAIR * n_sites**2):
        raise InputError(f"{path} has {size:,} bytes, but distances between {n_sites} sites have at most {largest:,}")
    with reading(path):
        values = np.asarray(open_npy(path), dtype=float) if path.suffix == ".npy" else _numbers(path)
    if values.shape == (n_sites, n_sites):
        return values
    if values.ndim != 2 or values.shape[1] != 3:
        raise InputError(
            f"{path} contains an array of shape {values.shape}; expected a matrix of {n_sites} x {n_sites} distances, "
            "or lines with two sites and their distance"
        )
    sites = values[:, :2]
    if not ((sites == sites.round()) & (sites >= 1) & (sites <= n_sites)).all():
        raise InputError(
            f"{path}: sites must be whole numbers from 1 to {n_sites}, got {sites.min():g} to {sites.max():g}"
        )
    first, second = sites.T.astype(int) - 1
    distances = np.full((n_sites, n_sites), np.nan)
    distances[first, second] = distances[second, first] = values[:, 2]
    return distances


def _numbers(path: Path) -> NDArray[Any]:
    """Parse rows of numbers. Error messages contain the line number."""
    rows: list[list[float]] = []
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            words = line.partition("#")[0].replace(",", " ").split()
            try:
                row = [float(word) for word in words]
            except ValueError:
                raise InputError(f"{path}, line {number}: expected numbers, got {line.strip()[:40]!r}") from None
            if rows and row and len(row) != len(rows[0]):
                raise InputError(f"{path}, line {number}: expected {len(rows[0])} numbers, got {len(row)}")
            if row:
                rows.append(row)
    if not rows:
        raise InputError(f"{path} contains no distances")
    return np.array(rows)
