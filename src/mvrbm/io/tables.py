"""Read tables (CSV, Parquet) and stored arrays (HDF5, zarr).

The packages that read these formats are optional and imported on demand. `arrays` selects the reader for a file and
converts the result for an estimator.
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
from mvrbm.io.untrusted import ALLOWANCE, Budget, check_regular_file

__all__ = ["STORES", "TABLES", "open_stored", "read_table", "table_labels", "table_samples", "text_columns"]

Array = NDArray[Any]
#: File name suffixes for tables.
TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
#: Suffixes for files and folders that contain arrays.
STORES = (".h5", ".hdf5", ".zarr")
# Memory in bytes that pandas uses per column of a CSV file, even if the file has a single row.
_BYTES_PER_COLUMN = 1000
# Number of bytes to decompress at once when measuring the decompressed size of a gzip file.
_GZIP_BLOCK = 2**20


def read_table(path: Path, columns: str | None = None, *, largest: int = LARGEST) -> Any:
    """Read a table into a pandas DataFrame.

    Parameters
    ----------
    path : Path
        Parquet or CSV file. The fields of a CSV file can be separated by commas, semicolons or tabs, and the file can
        be compressed with gzip. If a CSV file has no header, its columns are named "0", "1", and so on.
    columns : str, optional
        Columns to keep, as in ``"a,b"``, or columns to drop, as in ``"-a,-b"``. If None, all columns are kept.
    largest : int
        Maximum size of the table, in bytes.
    """
    check_regular_file(path)
    pandas = require("pandas", f"reading {path.name}", "tables")
    frame = _read_parquet(path, largest) if path.suffix == ".parquet" else _read_csv(path, largest, pandas)
    frame.columns = frame.columns.astype(str)
    if not frame.size:
        raise InputError(f"{path} has no entries: {len(frame)} rows and {len(frame.columns)} columns")
    return frame if columns is None else _select_columns(frame, columns, path)


def _read_parquet(path: Path, largest: int) -> Any:
    parquet = require("pyarrow.parquet", f"reading {path.name}", "tables")
    # Limit the size by the maximum compression ratio as well, because damaged metadata can declare any size.
    largest = min(largest, ALLOWANCE + BEST_COMPRESSION * check_regular_file(path))
    with reading(path):
        metadata = parquet.read_metadata(path)
        encoded = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        _check_size(path, max(encoded, metadata.num_rows * metadata.num_columns * 8), largest)
        # Disable pyarrow's thread pool, which reserves a lot of memory and makes forking unsafe.
        return parquet.read_table(path, use_threads=False, pre_buffer=False).to_pandas(use_threads=False)


def _read_csv(path: Path, largest: int, pandas: Any) -> Any:
    with reading(path):
        _check_size(path, _text_size(path, largest), largest)
        separator, header, n_columns = _dialect(path)
        Budget(path).spend(_BYTES_PER_COLUMN * n_columns, f"{path}: a table of {n_columns:,} columns")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pandas.errors.ParserWarning)
                # Without index_col=False, pandas uses the first column as an index if rows end with a separator.
                return pandas.read_csv(path, sep=separator, header=0 if header else None, index_col=False)
        except pandas.errors.ParserWarning as error:
            raise InputError(
                f"{path} has rows with more than {n_columns} fields, the number of fields in its first line"
            ) from error


def _text_size(path: Path, largest: int) -> int:
    """Return the decompressed size of a file in bytes. Decompression stops once the size exceeds `largest`."""
    if path.suffix != ".gz":
        return check_regular_file(path)
    size = 0
    with gzip.open(path) as file:
        while size <= largest and (block := file.read(_GZIP_BLOCK)):
            size += len(block)
    return size


def _check_size(path: Path, size: int, largest: int) -> None:
    if size > largest:
        raise InputError(f"{path} has {size:,} bytes, more than the limit of {largest:,}")


def _select_columns(frame: Any, columns: str, path: Path) -> Any:
    names = columns.split(",")
    drop = all(name.startswith("-") for name in names)
    if drop:
        names = [name[1:] for name in names]
    if unknown := [name for name in names if name not in frame.columns]:
        raise InputError(f"{path} has no column '{unknown[0]}', only {some_of(frame.columns)}")
    return frame.drop(columns=names) if drop else frame[names]


def _dialect(path: Path) -> tuple[str, bool, int]:
    """Return the separator of a CSV file, whether its first line is a header, and the number of columns.

    The first line is a header if one of its fields is not a number. It is also a header if the fields are 0, 1, 2, ...,
    because pandas gives these names to unnamed columns.
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


def text_columns(frame: Any) -> list[str]:
    """Return the names of the non-numeric columns of a DataFrame."""
    return [name for name, dtype in frame.dtypes.items() if dtype.kind not in "biuf"]


def table_samples(frame: Any, path: Path) -> Array:
    """Convert a numeric DataFrame to an array with one row per sample.

    The dtype is uint8 if all values are nonnegative integers and the largest value is 255. Otherwise, the dtype is
    float64, and missing values become NaN.
    """
    text = text_columns(frame)
    if text:
        raise InputError(
            f"{path}: column '{text[0]}' has type {frame[text[0]].dtype}, which is not numeric: select columns with "
            f"{path.name}:a,b, or drop columns with {path.name}:-{text[0]}"
        )
    if all(dtype.kind in "iu" for dtype in frame.dtypes) and not frame.isna().any(axis=None):
        values: Array = frame.to_numpy()
        if values.min() >= 0 and values.max() == 255:
            return values.astype(np.uint8)
    rows: Array = frame.to_numpy(dtype=np.float64, na_value=np.nan)
    return rows


def table_labels(frame: Any, path: Path) -> Array:
    """Return the labels in a DataFrame, which must contain either a single column or one-hot rows."""
    if len(frame.columns) > 1:
        rows = table_samples(frame, path)
        if not (np.isin(rows, (0, 1)).all() and (rows.sum(1) == 1).all()):
            raise InputError(
                f"{path} has {len(frame.columns)} columns: select the label column with {path.name}:COLUMN"
            )
        return rows
    column = frame.iloc[:, 0]
    if column.isna().any():
        raise InputError(f"{path}: {int(column.isna().sum()):,} labels are missing in column '{column.name}'")
    values: Array = column.to_numpy()
    return values if values.dtype.kind in "biuf" else values.astype(str)


def open_stored(path: Path, key: str | None) -> Any:
    """Open an array in an HDF5 file or a zarr store. Rows are read when they are indexed.

    `key` is the name of the array. It can be None if there is only one array.
    """
    arrays = dict(_zarr_arrays(path) if path.suffix == ".zarr" else _hdf5_arrays(path))
    if key is not None and key not in arrays:
        raise InputError(f"{path} contains no array '{key}', only {some_of(arrays)}")
    if key is None and len(arrays) != 1:
        raise InputError(f"{path} contains {len(arrays)} arrays ({some_of(arrays)}): select one with {path.name}:KEY")
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
    except Exception as error:  # zarr raises many exception types for damaged files.
        raise InputError(f"{path} is not a readable zarr store: {first_line(error)}") from error
    yield from ((name, item) for name, item in members if isinstance(item, zarr.Array))
