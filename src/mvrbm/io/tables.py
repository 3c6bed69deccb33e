"""Read tables (CSV, Parquet) and stored arrays (HDF5, zarr).

The packages that read these formats are optional and imported on demand. `arrays` selects the reader for a file and
converts the result for an estimator.
"""

import csv
import gzip
import math
import os
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import InputError
from mvrbm.extras import require
from mvrbm.io.dates import date_formats
from mvrbm.io.formats import BEST_COMPRESSION, LARGEST, first_line, reading, some_of
from mvrbm.io.untrusted import ALLOWANCE, Budget, check_regular_file

__all__ = [
    "STORES",
    "TABLES",
    "open_stored",
    "read_fields",
    "read_table",
    "table_labels",
    "table_samples",
    "text_columns",
]

Array = NDArray[Any]
#: File name suffixes for tables.
TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
#: Suffixes for files and folders that contain arrays.
STORES = (".h5", ".hdf5", ".zarr")
_MARKERS = "|#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null"
#: Fields that mark missing entries in columns of numbers or dates, as in pandas.
MISSING = frozenset(_MARKERS.split("|"))
# Memory in bytes that pandas uses per column of a CSV file, even if the file has a single row.
_BYTES_PER_COLUMN = 1000
# Number of bytes to decompress at once when measuring the decompressed size of a gzip file.
_GZIP_BLOCK = 2**20


class _Dialect(NamedTuple):
    """How to read a CSV file."""

    separator: str
    has_header: bool  # whether the first line contains column names
    n_columns: int
    repeats: bool  # whether the first line has text and numbers in the same columns as the second line


def read_table(path: Path, columns: str | None = None, *, text: Collection[str] = (), largest: int = LARGEST) -> Any:
    """Read a table into a pandas DataFrame.

    Parameters
    ----------
    path : Path
        Parquet or CSV file. The fields of a CSV file can be separated by commas, semicolons or tabs, and the file can
        be compressed with gzip. The first line of a CSV file contains the column names, unless all of its fields are
        numbers or markers of missing entries. The columns are then named "0", "1", and so on. Empty fields are missing.
        In columns of numbers or dates, other markers such as "NA" are missing too. In text columns, they are text.
    columns : str, optional
        Columns to keep, as in ``"a,b"``, or columns to drop, as in ``"-a,-b"``. If None, all columns are kept.
    text : collection of str
        Names of columns to read as text, even if all of their values are numbers. Other names are ignored.
    largest : int
        Maximum size of the table, in bytes.
    """
    check_regular_file(path)
    pandas = require("pandas", f"reading {path.name}", "tables")
    frame = _read_parquet(path, largest) if path.suffix == ".parquet" else _read_csv(path, largest, pandas, text)
    frame.columns = frame.columns.astype(str)
    for name in frame.columns.intersection(list(text)):
        if frame[name].dtype.kind in "biuf":  # only in Parquet files
            frame[name] = frame[name].convert_dtypes().astype("string")
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


def _read_csv(path: Path, largest: int, pandas: Any, text: Collection[str]) -> Any:
    with reading(path):
        _check_size(path, _text_size(path, largest), largest)
        dialect = _dialect(path)
        n_columns = dialect.n_columns
        Budget(path).spend(_BYTES_PER_COLUMN * n_columns, f"{path}: a table of {n_columns:,} columns")
        frame = _parse_csv(path, dialect, pandas, keep_default_na=False, na_values=sorted(MISSING))
        if dialect.repeats:
            warnings.warn(
                f"the first line of {path.name} was read as column names, but looks like the other lines; if it is a "
                "row of data, insert a line with column names",
                stacklevel=4,
            )
        found = [place for place in range(n_columns) if _is_text(frame.iloc[:, place])]
        given = {place for place in range(n_columns) if str(frame.columns[place]) in text} - set(found)
        doubtful = [place for place in found if frame.iloc[:, place].isna().any()]
        if doubtful or given:
            fields = _parse_csv(path, dialect, pandas, keep_default_na=False, na_filter=False, dtype=str)
            for place in given:
                frame.isetitem(place, fields.iloc[:, place].where(fields.iloc[:, place] != ""))
            for place in doubtful:
                frame.isetitem(place, _with_markers(frame.iloc[:, place], fields.iloc[:, place]))
        return frame


def _is_text(column: Any) -> bool:
    known = column.dropna()
    return column.dtype.kind not in "biuf" and all(isinstance(value, str) for value in known)


def _with_markers(column: Any, fields: Any) -> Any:
    """Return a text column in which only empty fields are missing, unless it is a column of dates.

    In text, a marker such as "NA" can be a value: the country code of Namibia, or the absence of an item.
    """
    is_marker = column.isna() & (fields != "")
    return column if not is_marker.any() or date_formats(column) else column.where(~is_marker, fields)


def _parse_csv(path: Path, dialect: _Dialect, pandas: Any, **options: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            # Without index_col=False, pandas uses the first column as an index if rows end with a separator.
            # With low_memory=True, pandas chooses a type for each part of a column, so that columns can be mixed.
            options |= {"header": 0 if dialect.has_header else None, "low_memory": False}
            return pandas.read_csv(path, sep=dialect.separator, index_col=False, **options)
    except pandas.errors.ParserWarning as error:
        raise InputError(
            f"{path} has rows with more than {dialect.n_columns} fields, the number of fields in its first line"
        ) from error


def read_fields(path: Path, columns: str | None = None) -> Any:
    """Read the fields of a table as text, exactly as they are in the file, into a DataFrame of strings.

    See :func:`read_table` for the parameters. A Parquet file has no text: its values are converted, and whole numbers
    have no decimal point.
    """
    pandas = require("pandas", f"reading {path.name}", "tables")
    if path.suffix == ".parquet":
        frame = _read_parquet(path, LARGEST).convert_dtypes().astype(str)
    else:
        with reading(path):
            frame = _parse_csv(path, _dialect(path), pandas, keep_default_na=False, na_filter=False, dtype=str)
    frame.columns = frame.columns.astype(str)
    return frame if columns is None else _select_columns(frame, columns, path)


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


def _dialect(path: Path) -> _Dialect:
    """Find out how to read a CSV file from its first two lines.

    The first line is a header if one of its fields is neither a number nor a marker of a missing entry. It is also a
    header if the fields are 0, 1, 2, ..., because pandas gives these names to unnamed columns.
    """
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
        lines = [file.readline(2**20) for _ in range(2)]
    separator = max(",;\t", key=lines[0].count)
    first, second = (_fields(line, separator) for line in lines)
    numbered = len(first) > 2 and first == [str(number) for number in range(len(first))]
    has_header = numbered or not all(map(_may_be_number, first))
    repeats = (
        has_header
        and not numbered
        and len(first) == len(second)
        and any(_may_be_number(field) for field in first if field)
        and not any(_may_be_number(field) != _may_be_number(below) for field, below in zip(first, second, strict=True))
    )
    return _Dialect(separator, has_header, len(first), repeats)


def _fields(line: str, separator: str) -> list[str]:
    """Return the fields of a line, or an empty list if a field exceeds the limit of the csv module."""
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:
        return []


def _may_be_number(field: str) -> bool:
    """Return whether a field is a number or a marker of a missing entry."""
    try:
        float(field)
    except ValueError:
        return field in MISSING
    return True


def text_columns(frame: Any) -> list[str]:
    """Return the names of the non-numeric columns of a DataFrame."""
    return [name for name, dtype in frame.dtypes.items() if dtype.kind not in "biuf"]


def table_samples(frame: Any, path: Path) -> Array:
    """Convert a numeric DataFrame to an array with one row per sample.

    The dtype is float64. Missing values become NaN.
    """
    text = text_columns(frame)
    if text:
        raise InputError(
            f"{path}: column '{text[0]}' has type {frame[text[0]].dtype}, which is not numeric: select columns with "
            f"{path.name}:a,b, or drop columns with {path.name}:-{text[0]}"
        )
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
