"""One array in many files: a folder of ``.npy`` shards of different lengths, together larger than memory."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import InputError, ShardError
from mvrbm.io.formats import open_npy

__all__ = ["ShardError", "Shards", "is_folder_of_shards"]

Array = NDArray[Any]


def is_folder_of_shards(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder that holds ``.npy`` files."""
    folder = Path(path)
    return folder.is_dir() and any(folder.glob("*.npy"))


class Shards:
    """The rows of several ``.npy`` files, one file after another in the order of their names.

    Files are memory-mapped; rows are read when they are indexed. Empty files are allowed.

    Parameters
    ----------
    folder : path
        Folder with the files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.paths = sorted(Path(folder).glob("*.npy"))
        if not self.paths:
            raise ShardError(f"{folder} holds no .npy files")
        self._parts = [_mapped(path) for path in self.paths]
        first = self._parts[0]
        for path, part in zip(self.paths, self._parts, strict=True):
            if (part.shape[1:], part.dtype) != (first.shape[1:], first.dtype):
                raise ShardError(
                    f"{path} holds samples of shape {part.shape[1:]} and type {part.dtype}, "
                    f"but {self.paths[0]} holds samples of shape {first.shape[1:]} and type {first.dtype}"
                )
        self.dtype: np.dtype[Any] = first.dtype
        self._ends = np.cumsum([len(part) for part in self._parts])
        self._sample: tuple[int, ...] = first.shape[1:]
        if not len(self):
            raise ShardError(f"all {len(self.paths)} shards in {folder} are empty")

    def __len__(self) -> int:
        """Return the number of rows of all files."""
        return int(self._ends[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return (len(self), *self._sample)

    @property
    def ndim(self) -> int:
        """Number of axes of the whole array."""
        return 1 + len(self._sample)

    def reshape(self, n: int, *shape: int) -> Shards:
        """Return the same rows as arrays of another shape."""
        if n != len(self) or math.prod(shape) != math.prod(self._sample):
            raise ShardError(f"rows of shape {self._sample} cannot become {shape}")
        other = object.__new__(Shards)
        other.__dict__.update(self.__dict__)
        other._sample = tuple(shape)
        return other

    def __getitem__(self, rows: Sequence[int] | slice | Array) -> Array:
        """Read rows by number, or a slice of them: (m, *shape of a sample)."""
        numbers = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.asarray(rows)
        if len(numbers) and (numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= len(self)):
            raise ShardError(f"rows are numbers from 0 to {len(self) - 1}, got {numbers!r:.60}")
        out = np.empty((len(numbers), *self._sample), self.dtype)
        files = np.searchsorted(self._ends, numbers, side="right")
        for file in np.unique(files):
            here = files == file
            start = self._ends[file] - len(self._parts[file])
            try:
                out[here] = self._parts[file][numbers[here] - start].reshape(-1, *self._sample)
            except (OSError, ValueError) as error:
                raise ShardError(f"{self.paths[file]} cannot be read: {error}") from error
        return out


def _mapped(path: Path) -> Array:
    try:
        array = open_npy(path, allow_empty=True)
    except InputError as error:
        raise ShardError(str(error)) from error
    if array.ndim < 2:
        raise ShardError(f"{path} has shape {array.shape}: expected samples along the first axis and at least 2 axes")
    if array.dtype not in (np.uint8, np.float32, np.float64):
        raise ShardError(f"{path} holds {array.dtype}: uint8, float32 or float64 is required")
    return array
