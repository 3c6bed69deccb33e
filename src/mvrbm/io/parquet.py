"""Sizes that the pages of a Parquet file claim, which pyarrow reserves memory for without a check."""

import mmap
from pathlib import Path
from typing import Any

from mvrbm.errors import InputError

__all__ = ["check_pages"]

_NUMBERS, _BYTES, _STRUCTURE = (4, 5, 6), 8, 12  # kinds of fields in Thrift's compact protocol; 1 and 2 are booleans
_DEPTH = 4  # structures in each other; the header of a page has three
_UNCOMPRESSED, _COMPRESSED, _N_VALUES = 2, 3, 1  # fields of the header, and of the structure that a kind of page has
_KINDS_OF_PAGES = (5, 7, 8)  # data, dictionary, data of version 2


def check_pages(path: Path, metadata: Any, largest: int) -> None:
    """Raise InputError if a page has more bytes, or more values of 8 bytes, than `largest` bytes."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                at = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
                end = at + chunk.total_compressed_size
                while at < end:
                    header, at = _structure(data, at)
                    pages = (header[kind] for kind in _KINDS_OF_PAGES if kind in header)
                    size = max(header[_UNCOMPRESSED], *(8 * page[_N_VALUES] for page in pages))
                    if size > largest:
                        raise InputError(f"{path} has a page of {size:,} bytes, more than the limit of {largest:,}")
                    if header[_COMPRESSED] < 0:
                        raise InputError(f"{path} has a page of {header[_COMPRESSED]} bytes")
                    at += header[_COMPRESSED]


def _structure(data: mmap.mmap, at: int, depth: int = _DEPTH) -> tuple[dict[int, Any], int]:
    """Return the numbers and structures in a structure of Thrift's compact protocol, by field, and its end."""
    if at < 0 or depth == 0:
        raise ValueError("it is not the header of a page")
    found: dict[int, Any] = {}
    field = 0
    while head := data[at]:
        field, kind, at = field + (head >> 4), head & 15, at + 1
        if head < 16:
            field, at = _number(data, at)
        if kind in _NUMBERS:
            found[field], at = _number(data, at)
        elif kind == _BYTES:
            length, at = _number(data, at, signed=False)
            at += length
        elif kind == _STRUCTURE:
            found[field], at = _structure(data, at, depth - 1)
        elif kind > 2:
            raise ValueError(f"the header of a page has a field of kind {kind}")
    return found, at + 1


def _number(data: mmap.mmap, at: int, signed: bool = True) -> tuple[int, int]:
    """Return a number of variable length, and its end."""
    number = shift = 0
    while shift < 64:
        number |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return (number >> 1 ^ -(number & 1) if signed else number), at
    raise ValueError("the header of a page has a number of more than 64 bits")
