"""Tables (CSV, Parquet) and stored arrays (HDF5, zarr), by packages that are imported where they are used.

Which of them a file is, and what an estimator gets, is decided in `arrays`.
"""

import csv
import gzip
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import InputError
from mvrbm.extras import require
from mvrbm.io.formats import BEST_COMPRESSION, LARGEST, first_line, reading, some_of
from mvrbm.io.parquet import check_pages
from mvrbm.io.untrusted import ALLOWANCE, Budget, check_regular_file

__all__ = ["STORES", "TABLES", "open_stored", "read_table", "table_labels", "table_samples"]

Array = NDArray[Any]
#: How the names of tables, and of files and folders of stored arrays, end.
TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
STORES = (".h5", ".hdf5", ".zarr")
# Memory that pandas takes for each column of a CSV file, however few rows it has.
_BYTES_PER_COLUMN = 1000


def read_table(path: Path, columns: str | None = None, *, largest: int = LARGEST) -> Any:
    """Read a table as a pandas frame: all columns, those named in ``"a,b"``, or all but those named in ``"-a,-b"``.

    CSV files are separated by commas, semicolons or tabs. Without a header, their columns are "0", "1", and so on.
    """
    size = check_regular_file(path)
    pandas = require("pandas", f"reading {path.name}", "tables")
    parquet = require("pyarrow.parquet", f"reading {path.name}", "tables") if path.suffix == ".parquet" else None
    with reading(path):
        if parquet is not None:  # compressed: its header says how large it is
            head = parquet.read_metadata(path)
            largest = min(largest, ALLOWANCE + BEST_COMPRESSION * size)
            size = head.num_rows * head.num_columns * 8
        elif path.suffix == ".gz":
            size = 0
            with gzip.open(path) as file:
                while size <= largest and (block := file.read(2**20)):
                    size += len(block)
        if size > largest:
            raise InputError(f"{path} has {size:,} bytes, more than the limit of {largest:,}")
        if parquet is not None:
            check_pages(path, largest)
            # Threads of its own would reserve much memory, and a process that has them cannot fork safely.
            frame = parquet.read_table(path, use_threads=False, pre_buffer=False).to_pandas(use_threads=False)
        else:
            separator, header, n_columns = _dialect(path)
            Budget(path).spend(_BYTES_PER_COLUMN * n_columns, f"{path}: a table of {n_columns:,} columns")
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", pandas.errors.ParserWarning)
                    # The first column is never an index, which pandas would make of it where rows end with a separator.
                    frame = pandas.read_csv(path, sep=separator, header=0 if header else None, index_col=False)
            except pandas.errors.ParserWarning as error:
                raise InputError(
                    f"{path} has rows with more fields than its first line, which has {n_columns}"
                ) from error
    frame.columns = frame.columns.astype(str)
    if not frame.size:
        raise InputError(f"{path} has no entries: {len(frame)} rows of {len(frame.columns)} columns")
    if columns is None:
        return frame
    names = columns.split(",")
    leave_out = all(name.startswith("-") for name in names)
    names = [name[1:] for name in names] if leave_out else names
    if unknown := [name for name in names if name not in frame.columns]:
        raise InputError(f"{path} has no column '{unknown[0]}', only {some_of(frame.columns)}")
    return frame.drop(columns=names) if leave_out else frame[names]


def _dialect(path: Path) -> tuple[str, bool, int]:
    """Return the separator of a CSV file, whether its first line is a header, and the number of columns.

    It is, if some field of it is no number, or if they are 0, 1, 2, ..., as pandas numbers columns without names.
    """
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
        line = file.readline(2**20)
    separator = max(",;\t", key=line.count)
    fields = next(csv.reader([line], delimiter=separator), [])
    numbered = len(fields) > 2 and fields == [str(number) for number in range(len(fields))]
    return separator, numbered or not all(_is_number(field) for field in fields), len(fields)


def _is_number(field: str) -> bool:
    try:
        float(field or 0)
    except ValueError:
        return False
    return True


def table_samples(frame: Any, path: Path) -> Array:
    """Return a frame of numbers as rows; missing ones are NaN. Whole numbers from 0 to 255 are bytes, if 255 occurs."""
    text = [name for name, dtype in frame.dtypes.items() if dtype.kind not in "biuf"]
    if text:
        raise InputError(
            f"{path}: column '{text[0]}' holds {frame[text[0]].dtype}, not numbers: choose columns as "
            f"{path.name}:a,b, or leave some out as {path.name}:-{text[0]}"
        )
    if all(dtype.kind in "iu" for dtype in frame.dtypes) and not frame.isna().any(axis=None):
        values: Array = frame.to_numpy()
        if values.min() >= 0 and values.max() == 255:
            return values.astype(np.uint8)
    rows: Array = frame.to_numpy(dtype=np.float64, na_value=np.nan)
    return rows


def table_labels(frame: Any, path: Path) -> Array:
    """Return the labels in a frame: its only column, or one-hot rows."""
    if len(frame.columns) > 1:
        rows = table_samples(frame, path)
        if not (np.isin(rows, (0, 1)).all() and (rows.sum(1) == 1).all()):
            raise InputError(f"{path} has {len(frame.columns)} columns: name that of the labels, as {path.name}:COLUMN")
        return rows
    column = frame.iloc[:, 0]
    if column.isna().any():
        raise InputError(f"{path}: {int(column.isna().sum()):,} labels are missing in column '{column.name}'")
    values: Array = column.to_numpy()
    return values if values.dtype.kind in "biuf" else values.astype(str)


def open_stored(path: Path, key: str | None) -> Any:
    """Open the array `key` of an HDF5 file or a zarr store; without a key, its only one. Rows are read when indexed."""
    arrays = dict(_zarr_arrays(path) if path.suffix == ".zarr" else _hdf5_arrays(path))
    if key is not None and key not in arrays:
        raise InputError(f"{path} holds no array '{key}', only {some_of(arrays)}")
    if key is None and len(arrays) != 1:
        raise InputError(f"{path} holds {len(arrays)} arrays, {some_of(arrays)}: name one as {path.name}:KEY")
    name, array = (key, arrays[key]) if key is not None else next(iter(arrays.items()))
    if array.dtype.kind not in "biuf" or not array.shape or math.prod(array.shape) == 0:
        raise InputError(
            f"{path}:{name} has entries of type {array.dtype} and shape {array.shape}: numbers are required"
        )
    return array


def _hdf5_arrays(path: Path) -> Iterator[tuple[str, Any]]:
    check_regular_file(path)
    h5py = require("h5py", f"reading {path.name}", "hdf5")
    names: list[str] = []
    with reading(path):
        file = h5py.File(path, "r")
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        yield from ((name, file[name]) for name in names)


def _zarr_arrays(path: Path) -> Iterator[tuple[str, Any]]:
    zarr = require("zarr", f"reading {path.name}", "zarr")
    try:
        found = zarr.open(os.fspath(path), mode="r")
        members = [(path.stem, found)] if isinstance(found, zarr.Array) else list(found.members(max_depth=None))
    except Exception as error:  # a folder of files, of which anything can be damaged
        raise InputError(f"{path} is no zarr store that can be read: {first_line(error)}") from error
    yield from ((name, item) for name, item in members if isinstance(item, zarr.Array))
