"""Sizes that the pages of a Parquet file claim, which pyarrow reserves memory for without a check.

Metadata and headers are structures of Thrift's compact protocol. They are not read by pyarrow here, which ends the
process where the metadata of a column is damaged.
"""

import mmap
from pathlib import Path
from typing import Any

from mvrbm.errors import InputError

__all__ = ["check_pages"]

_TRUE, _FALSE, _BYTE, _NUMBERS, _DOUBLE, _BYTES, _LIST, _STRUCTURE = 1, 2, 3, (4, 5, 6), 7, 8, 9, 12  # kinds of values
_DEPTH = 12  # structures in each other; metadata has seven
# Fields of metadata, groups of rows, columns, their metadata, headers of pages, and what a kind of page has.
_GROUPS, _COLUMNS, _COLUMN_METADATA, _COLUMN_SIZE, _DATA_AT, _DICTIONARY_AT = 4, 1, 3, 7, 9, 11
_UNCOMPRESSED, _COMPRESSED, _KINDS_OF_PAGES, _N_VALUES = 2, 3, (5, 7, 8), 1


def check_pages(path: Path, largest: int) -> None:
    """Raise an error if a page of a file has more bytes, or more values of 8 bytes, than `largest` bytes."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        metadata, _ = _structure(data, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
        for column in (column[_COLUMN_METADATA] for group in metadata[_GROUPS] for column in group[_COLUMNS]):
            at = min(column[_DATA_AT], column.get(_DICTIONARY_AT) or column[_DATA_AT])  # 0: no dictionary
            end = at + column[_COLUMN_SIZE]
            while at < end:
                header, at = _structure(data, at)
                pages = (header[kind] for kind in _KINDS_OF_PAGES if kind in header)
                size = max(header[_UNCOMPRESSED], *(8 * page[_N_VALUES] for page in pages))
                if size > largest:
                    raise InputError(f"{path} has a page of {size:,} bytes, more than the limit of {largest:,}")
                at += max(0, header[_COMPRESSED])


def _structure(data: mmap.mmap, at: int, depth: int = _DEPTH) -> tuple[dict[int, Any], int]:
    """Return the values in a structure by field, and its end."""
    if at < 0 or depth == 0:
        raise ValueError("its metadata cannot be read")
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        field, kind, at = field + (head >> 4), head & 15, at + 1
        if head < 16:
            field, at = _number(data, at)
        found[field], at = (kind, at) if kind in (_TRUE, _FALSE) else _value(data, at, kind, depth)
    return found, at + 1


def _value(data: mmap.mmap, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """Return a number, a structure or a list of values, or None for another value, and its end."""
    if kind in _NUMBERS:
        return _number(data, at)
    if kind == _STRUCTURE:
        return _structure(data, at, depth - 1)
    if kind == _BYTES:
        length, at = _number(data, at, signed=False)
        return None, at + length
    if kind == _LIST:
        count, kind, at = data[at] >> 4, data[at] & 15, at + 1
        if count == 15:
            count, at = _number(data, at, signed=False)
        values = []
        for _ in range(count):
            value, at = _value(data, at, kind, depth)
            values.append(value)
        return values, at
    if kind in (_TRUE, _FALSE, _BYTE, _DOUBLE):
        return None, at + (8 if kind == _DOUBLE else 1)
    raise ValueError(f"its metadata has a value of kind {kind}")


def _number(data: mmap.mmap, at: int, signed: bool = True) -> tuple[int, int]:
    """Return a number of variable length, and its end."""
    number = shift = 0
    while shift < 64:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return (number >> 1 ^ -(number & 1) if signed else number), at
    raise ValueError("its metadata has a number of more than 64 bits")
