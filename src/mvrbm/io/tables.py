"""Read tables (CSV, Parquet) and stored arrays (HDF5, zarr).

The packages that read these formats are optional and imported on demand. `arrays` selects the reader for a file and
converts the result for an estimator.
"""

import gzip
import math
import os
import warnings
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import InputError
from mvrbm.extras import require
from mvrbm.io.csv_text import MISSING, Dialect, TableText, check_records, is_number, read_text, records
from mvrbm.io.dates import date_formats
from mvrbm.io.formats import BEST_COMPRESSION, LARGEST, first_line, reading, some_of
from mvrbm.io.untrusted import ALLOWANCE, Budget, check_regular_file

__all__ = [
    "MISSING",
    "STORES",
    "TABLES",
    "open_stored",
    "read_table",
    "read_table_text",
    "table_labels",
    "table_samples",
    "text_columns",
]

Array = NDArray[Any]
#: File name suffixes for tables.
TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
#: Suffixes for files and folders that contain arrays.
STORES = (".h5", ".hdf5", ".zarr")
# Memory in bytes that pandas uses per column of a CSV file, even if the file has a single row.
_BYTES_PER_COLUMN = 1000
# Number of bytes to decompress at once when measuring the decompressed size of a gzip file.
_GZIP_BLOCK = 2**20


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
    frame = frame if columns is None else _select_columns(frame, columns, path)
    _check_finite(frame, path)
    return frame


def _check_finite(frame: Any, path: Path) -> None:
    """Raise InputError if a table contains infinity."""
    numeric = frame.select_dtypes("number")
    infinite = np.isinf(numeric.to_numpy(dtype=np.float64, na_value=np.nan))
    if infinite.any():
        row, column = np.argwhere(infinite)[0].tolist()
        place = f"row {row + 1}"
        if path.suffix != ".parquet":
            _, text = read_text(path)
            dialect = Dialect.of(text)
            rows = (record for record in records(text, dialect.separator) if not record.is_blank)
            place = f"line {next(islice(rows, row + dialect.has_header, None)).line}"
        raise InputError(
            f"{path}, {place}: column '{numeric.columns[column]}' is infinite; leave the field empty if its value is "
            "missing"
        )


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
        _, content = read_text(path)
        dialect = Dialect.of(content)
        n_columns = dialect.n_columns
        Budget(path).spend(_BYTES_PER_COLUMN * n_columns, f"{path}: a table of {n_columns:,} columns")
        check_records(content, dialect, path)
        del content
        frame = _parse_csv(path, dialect, pandas, keep_default_na=False, na_values=sorted(MISSING))
        if dialect.repeats:
            warnings.warn(
                f"the first line of {path.name} was read as column names, but looks like the other lines; if it is a "
                "row of data, insert a line with column names",
                stacklevel=4,
            )
        found = [place for place in range(n_columns) if _is_text(frame.iloc[:, place])]
        given = {place for place in range(n_columns) if str(frame.columns[place]) in text} - set(found)
        for place in found:
            if str(frame.columns[place]) not in text and _has_decimal_commas(frame.iloc[:, place], dialect.separator):
                frame.isetitem(place, frame.iloc[:, place].str.replace(",", ".").astype(float))
        doubtful = [place for place in found if _is_text(frame.iloc[:, place]) and frame.iloc[:, place].isna().any()]
        if doubtful or given:
            fields = _parse_csv(path, dialect, pandas, keep_default_na=False, na_filter=False, dtype=str)
            for place in given:
                frame.isetitem(place, fields.iloc[:, place].where(fields.iloc[:, place] != ""))
            for place in doubtful:
                frame.isetitem(place, _with_markers(frame.iloc[:, place], fields.iloc[:, place]))
        return frame


def _has_decimal_commas(column: Any, separator: str) -> bool:
    """Return whether all values in a text column are numbers, and some of them have decimal commas."""
    known = column.dropna()
    return all(is_number(value, separator) and "." not in value for value in known) and any("," in v for v in known)


def _is_text(column: Any) -> bool:
    known = column.dropna()
    return column.dtype.kind not in "biuf" and all(isinstance(value, str) for value in known)


def _with_markers(column: Any, fields: Any) -> Any:
    """Return a text column in which only empty fields are missing, unless it is a column of dates.

    In text, a marker such as "NA" can be a value: the country code of Namibia, or the absence of an item.
    """
    is_marker = column.isna() & (fields != "")
    return column if not is_marker.any() or date_formats(column) else column.where(~is_marker, fields)


def _parse_csv(path: Path, dialect: Dialect, pandas: Any, **options: Any) -> Any:
    # Without index_col=False, pandas uses the first column as an index if rows end with a separator.
    # With low_memory=True, pandas chooses a type for each part of a column, so that columns can be mixed.
    options |= {"header": 0 if dialect.has_header else None, "low_memory": False}
    columns = range(dialect.n_columns)
    return pandas.read_csv(path, sep=dialect.separator, index_col=False, usecols=columns, **options)


def read_table_text(path: Path, columns: str | None = None) -> TableText:
    """Read the text of a table, in which fields can be replaced.

    See :func:`read_table` for the parameters. A Parquet file has no text: its values are converted, and whole numbers
    have no decimal point.
    """
    if path.suffix == ".parquet":
        frame = _read_parquet(path, LARGEST).convert_dtypes().astype("string").fillna("")
        frame.columns = frame.columns.astype(str)
        return TableText.of_frame(frame if columns is None else _select_columns(frame, columns, path))
    pandas = require("pandas", f"reading {path.name}", "tables")
    with reading(path):
        names = _parse_csv(path, Dialect.of(read_text(path)[1]), pandas, nrows=0).columns.astype(str)
        places = pandas.DataFrame([range(len(names))], columns=names)
        chosen = places if columns is None else _select_columns(places, columns, path)
        return TableText.of_file(path, chosen.iloc[0].tolist())


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
