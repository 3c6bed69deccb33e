"""Split the text of a CSV file into fields, and replace single fields without changing any other character.

`tables` converts CSV files to data frames.
"""

import gzip
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from mvrbm.errors import InputError

__all__ = ["MISSING", "Dialect", "Record", "TableText", "check_records", "is_number", "read_text", "records"]

_MARKERS = "|#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null"
#: Fields that mark missing entries in columns of numbers or dates, as in pandas.
MISSING = frozenset(_MARKERS.split("|"))
_SEPARATORS = ",;\t"
_QUOTED = re.compile(r'"(?:[^"]|"")*+"')
# Maximum number of characters in which to look for separators.
_LONGEST_HEADER = 2**20
_BYTE_ORDER_MARK = "\ufeff"


class Record(NamedTuple):
    """A row of a CSV file, which can extend over several lines if fields are quoted."""

    line: int  # number of the first line, starting at 1
    fields: list[str]  # fields as they are in the file, including quotation marks
    ending: str  # end of the line, or an empty string at the end of the file

    @property
    def is_blank(self) -> bool:
        """Whether the record is a blank line, which is not a row."""
        return len(self.fields) == 1 and not self.fields[0].strip(" \t")


class Dialect(NamedTuple):
    """How to read a CSV file."""

    separator: str
    has_header: bool  # whether the first line contains column names
    n_columns: int
    repeats: bool  # whether the first line has text and numbers in the same columns as the second line

    @classmethod
    def of(cls, text: str) -> "Dialect":
        """Find out how to read a CSV file from its first two rows.

        The first row is a header if one of its fields is neither a number nor a marker of a missing entry. It is also a
        header if the fields are 0, 1, 2, ..., because pandas gives these names to unnamed columns.
        """
        separator = _separator(text)
        rows = (record for record in records(text, separator) if not record.is_blank)
        first, second = ([value_of(field) for field in next(rows, Record(1, [], "")).fields] for _ in range(2))

        def may_be_number(field: str) -> bool:
            return is_number(field, separator) or field in MISSING

        numbered = len(first) > 2 and first == [str(number) for number in range(len(first))]
        has_header = numbered or not all(map(may_be_number, first))
        repeats = (
            has_header
            and not numbered
            and len(first) == len(second)
            and any(may_be_number(field) for field in first if field)
            and not any(
                may_be_number(field) != may_be_number(below) for field, below in zip(first, second, strict=True)
            )
        )
        return cls(separator, has_header, len(first), repeats)


def _separator(text: str) -> str:
    """Return the most frequent separator in the first line, ignoring decimal commas and quoted fields."""
    line = _QUOTED.sub("", text[:_LONGEST_HEADER].strip()).partition("\n")[0]
    for separator in _SEPARATORS[1:]:
        if separator in line and all(is_number(field, separator) for field in line.split(separator)):
            return separator
    return max(_SEPARATORS, key=line.count)


def read_text(path: Path) -> tuple[str, str]:
    """Return the byte order mark (often an empty string) and the text of a file, which can be compressed with gzip."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        content = file.read()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a UTF-8 file; convert it to UTF-8") from error
    if not text.strip(_BYTE_ORDER_MARK + " \t\r\n"):
        raise InputError(f"{path} is empty")
    mark = _BYTE_ORDER_MARK if text.startswith(_BYTE_ORDER_MARK) else ""
    return mark, text[len(mark) :]


def records(text: str, separator: str) -> Iterator[Record]:
    """Yield the rows and the blank lines of a CSV file."""
    field = rf"(?:{_QUOTED.pattern})?+[^{separator}\r\n]*"
    fields_in = re.compile(rf"({field})(?:{separator}|\Z)").findall
    line = 1
    for match in re.finditer(rf"((?:{field}{separator})*+{field})(\r\n|\n|\r|\Z)", text):
        body, ending = match.groups()
        if not body and not ending:
            return
        if '"' not in body:
            yield Record(line, body.split(separator), ending)
        else:
            # The pattern also matches the empty string after the last field.
            found = fields_in(body)
            yield Record(line, found if body.endswith(separator) else found[:-1], ending)
            line += len(re.findall(r"\r\n|\n|\r", body))
        line += 1


def check_records(text: str, dialect: Dialect, path: Path) -> None:
    """Raise InputError unless all rows of a CSV file have as many fields as the first row.

    Rows can end with an additional separator.
    """
    n_columns = dialect.n_columns
    for record in records(text, dialect.separator):
        n_fields = len(record.fields)
        ends_with_separator = n_fields == n_columns + 1 and not record.fields[-1]
        if n_fields != n_columns and not ends_with_separator and not record.is_blank:
            first = "header" if dialect.has_header else "first line"
            found = f"{n_fields:,} field{'s' if n_fields > 1 else ''}"
            raise InputError(f"{path}, line {record.line}: {found}, but the {first} has {n_columns:,}")


def value_of(field: str) -> str:
    """Return a field without its quotation marks."""
    match = _QUOTED.match(field)
    return field if match is None else match[0][1:-1].replace('""', '"') + field[match.end() :]


def quoted(value: str, separator: str) -> str:
    """Return a value as a field, with quotation marks if required."""
    if any(mark in value for mark in (separator, '"', "\r", "\n")):
        value = value.replace('"', '""')
        return f'"{value}"'
    return value


def is_number(value: str, separator: str) -> bool:
    """Return whether a value is a number. If commas do not separate fields, the number can have a decimal comma."""
    try:
        float(value if separator == "," else value.replace(",", "."))
    except ValueError:
        return False
    return "_" not in value  # Python allows underscores in numbers.


class TableText:
    """Text of a table, in which fields can be replaced.

    Parameters
    ----------
    head : sequence of Record
        Header and blank lines before the first row.
    body : sequence of Record
        Rows and blank lines.
    separator : str
        Separator of the fields.
    mark : str
        Byte order mark of the file, or an empty string.
    """

    def __init__(self, head: Sequence[Record], body: Sequence[Record], separator: str, mark: str = "") -> None:
        self.separator = separator
        self._head = head
        self._body = body
        self._rows = [record for record in body if not record.is_blank]
        self._mark = mark

    @classmethod
    def of_file(cls, path: Path, columns: Sequence[int]) -> "TableText":
        """Read the columns with the given indices from a CSV file."""
        mark, text = read_text(path)
        dialect = Dialect.of(text)
        found = list(records(text, dialect.separator))
        if list(columns) != list(range(dialect.n_columns)):
            rows = (record for record in found if not record.is_blank)
            found = [row._replace(fields=[row.fields[column] for column in columns]) for row in rows]
        first = next(place for place, record in enumerate(found) if not record.is_blank) + dialect.has_header
        return cls(found[:first], found[first:], dialect.separator, mark)

    @classmethod
    def of_frame(cls, frame: Any) -> "TableText":
        """Convert a data frame of strings."""
        rows = [list(frame.columns), *frame.to_numpy().tolist()]
        head, *body = (Record(line, [quoted(field, ",") for field in row], "\n") for line, row in enumerate(rows, 1))
        return cls([head], body, ",")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, rows: slice) -> "TableText":
        return TableText(self._head, self._rows[rows], self.separator, self._mark)

    def column(self, column: int) -> list[str]:
        """Return the values in a column."""
        return [value_of(record.fields[column]) for record in self._rows]

    def line(self, row: int) -> int:
        """Return the line number of a row."""
        return self._rows[row].line

    def field(self, row: int, column: int) -> str:
        """Return a field as it is in the file."""
        return self._rows[row].fields[column]

    def replace(self, row: int, column: int, field: str) -> None:
        """Replace a field."""
        self._rows[row].fields[column] = field

    def write(self, file: IO[bytes], separator: str | None = None) -> None:
        """Write the text to a binary file. If `separator` is not None, replace the separator of the fields."""
        written = self.separator if separator is None else separator
        file.write(self._mark.encode())
        for fields, ending in ((record.fields, record.ending) for record in (*self._head, *self._body)):
            if written != self.separator:
                fields = [field if field.startswith('"') else quoted(field, written) for field in fields]
            file.write((written.join(fields) + ending).encode())
