"""Datasets larger than memory. Samples are read on demand from shards, stored arrays or PyTorch datasets.

Shards are ``.npy`` files in a folder. They can contain different numbers of samples.
"""

from __future__ import annotations

import copy
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import InputError, ShardError
from mvrbm.io.formats import check_mapped, open_npy
from mvrbm.validation import usual_dtype

__all__ = ["DatasetRows", "Rows", "ShardError", "Shards", "StoredRows", "is_folder_of_shards"]

Array = NDArray[Any]


def is_folder_of_shards(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder that contains ``.npy`` files."""
    folder = Path(path)
    return folder.is_dir() and any(folder.glob("*.npy"))


class Rows(ABC):
    """Base class for array-like datasets that are larger than memory. Samples are read when they are indexed.

    Estimators accept these datasets in place of arrays. The `dtype` attribute is uint8, float32 or float64.
    """

    #: Whether a row can change between reads, for example because of random augmentation.
    may_change: ClassVar[bool] = False

    def __init__(self, n: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._n = n
        self._sample = tuple(shape)
        self.dtype = dtype

    @abstractmethod
    def _read(self, numbers: Array) -> Array:
        """Read the m rows with the indices in `numbers`, and return an array of shape (m, ...).

        The number of entries per row must match the shape of a sample.
        """

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._n

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dataset: the number of samples, followed by the shape of a sample."""
        return (len(self), *self._sample)

    @property
    def ndim(self) -> int:
        """Number of axes of the dataset."""
        return 1 + len(self._sample)

    def reshape(self, n: int, *shape: int) -> Self:
        """Return a dataset with the same n samples, each of shape `shape`."""
        if n != len(self) or math.prod(shape) != math.prod(self._sample):
            raise ShardError(f"rows of shape {self._sample} cannot be reshaped to {shape}")
        other = copy.copy(self)
        other._sample = tuple(shape)
        return other

    def __getitem__(self, rows: Sequence[int] | slice | Array) -> Array:
        """Read the m rows selected by indices or a slice. Return an array of shape ``(m, *shape[1:])``."""
        numbers = np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else np.asarray(rows)
        if len(numbers) and (numbers.dtype.kind not in "iu" or numbers.min() < 0 or numbers.max() >= len(self)):
            raise ShardError(f"row indices must be integers from 0 to {len(self) - 1}, got {numbers!r:.60}")
        found = self._read(numbers) if len(numbers) else np.empty(0, self.dtype)
        return np.asarray(found, self.dtype).reshape(len(numbers), *self._sample)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Read all rows into memory."""
        return np.asarray(self[:], dtype)


class Shards(Rows):
    """The rows of several ``.npy`` files, concatenated in the order of the file names.

    The files are memory-mapped. Some of them can be empty, but at least one file must contain a row.

    Parameters
    ----------
    folder : path
        Folder that contains the files.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.paths = sorted(Path(folder).glob("*.npy")) if is_folder_of_shards(folder) else []
        if not self.paths:
            raise ShardError(f"{folder} contains no .npy files")
        self._parts = [_mapped(path) for path in self.paths]
        first = self._parts[0]
        for path, part in zip(self.paths, self._parts, strict=True):
            if (part.shape[1:], part.dtype) != (first.shape[1:], first.dtype):
                raise ShardError(
                    f"{path} contains samples of shape {part.shape[1:]} and dtype {part.dtype}, "
                    f"but {self.paths[0]} contains samples of shape {first.shape[1:]} and dtype {first.dtype}"
                )
        self._ends = np.cumsum([len(part) for part in self._parts])
        super().__init__(int(self._ends[-1]), first.shape[1:], first.dtype)
        if not len(self):
            raise ShardError(f"all {len(self.paths)} shards in {folder} are empty")

    def _read(self, numbers: Array) -> Array:
        out = np.empty((len(numbers), *self._sample), self.dtype)
        files = np.searchsorted(self._ends, numbers, side="right")
        for file in np.unique(files):
            here = files == file
            start = self._ends[file] - len(self._parts[file])
            try:
                check_mapped(self._parts[file])
                out[here] = self._parts[file][numbers[here] - start].reshape(-1, *self._sample)
            except (OSError, ValueError) as error:
                raise ShardError(f"{self.paths[file]} cannot be read: {error}") from error
        return out


class StoredRows(Rows):
    """The rows of an array in an HDF5 file or a zarr store. See :func:`mvrbm.io.tables.open_stored`.

    Parameters
    ----------
    array : array
        Object that has the attributes `shape` and `dtype` and supports indexing with an array of increasing integers.
    """

    def __init__(self, array: Any) -> None:
        self._array = array
        super().__init__(array.shape[0], array.shape[1:], usual_dtype(array.dtype))

    def _read(self, numbers: Array) -> Array:
        increasing, places = np.unique(numbers, return_inverse=True)
        return np.asarray(self._array[increasing])[places]


class DatasetRows(Rows):
    """The samples in a map-style PyTorch dataset or another sequence.

    Parameters
    ----------
    dataset : sequence
        Sequence of samples, or of tuples whose first element is the sample. A sample is an array, a tensor or an image.
        The other elements of a tuple are ignored.
    """

    may_change = True

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        if len(dataset) == 0:
            raise ShardError("the data is empty, but at least one sample is required")
        first = self._item(0)
        super().__init__(len(dataset), first.shape, usual_dtype(first.dtype))

    def _item(self, number: int) -> Array:
        item = self._dataset[number]
        return np.asarray(item[0] if isinstance(item, tuple | list) else item)

    def _read(self, numbers: Array) -> Array:
        items = [self._item(int(number)) for number in numbers]
        for number, item in zip(numbers, items, strict=True):
            if item.size != math.prod(self._sample):
                raise ShardError(f"dataset item {number} has shape {item.shape}, but item 0 has shape {self._sample}")
        return np.stack(items)


def _mapped(path: Path) -> Array:
    try:
        array = open_npy(path, allow_empty=True)
    except InputError as error:
        raise ShardError(str(error)) from error
    if array.ndim < 2:
        raise ShardError(
            f"expected samples along the first axis and at least 2 axes, but {path} has shape {array.shape}"
        )
    if array.dtype not in (np.uint8, np.float32, np.float64):
        raise ShardError(f"{path} has dtype {array.dtype}, but uint8, float32 or float64 is required")
    return array
