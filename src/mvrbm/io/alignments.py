"""Read aligned sequences from FASTA and Stockholm files, strings and arrays, and write FASTA files.

A file may be compressed with gzip. Inserts in the A2M and A3M formats (lower-case letters and dots) are removed, and
ambiguous letters such as X become gaps. Both raise an `AlignmentWarning`.
"""

from __future__ import annotations

import codecs
import gzip
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from mvrbm.errors import AlignmentWarning, InputError, MemoryLimitError
from mvrbm.io.alphabets import ALPHABETS, INVALID, UNKNOWN, UNKNOWN_LETTER, Alphabet, as_alphabet, detect_alphabet
from mvrbm.io.atomic import check_output, replace_file
from mvrbm.io.formats import reading, some_of
from mvrbm.memory import check_memory

__all__ = ["Alignment", "as_alignment", "read_alignment", "write_fasta"]

Array = NDArray[Any]

# Maximum length of a line in bytes, and the number of leading bytes that are checked to detect a binary file.
_LONGEST_LINE = 2**24
_HEAD = 2**12
# Number of letters read between two checks of the available memory.
_LETTERS_PER_CHECK = 2**28
_LOWER = bytes(range(ord("a"), ord("z") + 1))
_GZIP = b"\x1f\x8b"


@dataclass(frozen=True)
class Alignment:
    """Aligned sequences as codes, with their alphabet and names.

    Attributes
    ----------
    codes : array of shape (n, sites)
        Position of each letter in the alphabet, as uint8. Unknown sites have code 255.
    alphabet : Alphabet
        The letters.
    names : list of str or None
        Names of the sequences, or None if they have no names.
    """

    codes: Array
    alphabet: Alphabet
    names: list[str] | None = None

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Alignment:
        """Return an alignment of the selected sequences."""
        chosen = np.atleast_1d(np.arange(len(self))[rows])
        names = None if self.names is None else [self.names[row] for row in chosen]
        return Alignment(self.codes[chosen], self.alphabet, names)

    @property
    def n_sites(self) -> int:
        """Number of sites per sequence."""
        return int(self.codes.shape[1])

    @property
    def sequences(self) -> list[str]:
        """The sequences as strings. Unknown sites are question marks."""
        return self.alphabet.decode(self.codes)

    @property
    def complete(self) -> bool:
        """Whether all letters are known."""
        return not bool((self.codes == UNKNOWN).any())

    def one_hot(self) -> Array:
        """Return the letters in one-hot encoding, as an array of shape (n, sites, letters).

        The array has dtype uint8, or float32 with NaN at unknown sites if there are any.
        """
        n, sites = self.codes.shape
        dtype = torch.uint8 if self.complete else torch.float32
        size = n * sites * len(self.alphabet)
        _check_memory(size, f"the one-hot encoding of {n:,} sequences of {sites:,} sites", dtype)
        rows = np.zeros((256, len(self.alphabet)), np.uint8 if self.complete else np.float32)
        np.fill_diagonal(rows, 1)
        if not self.complete:
            rows[UNKNOWN] = np.nan
        encoded: Array = rows[self.codes]
        return encoded


def read_alignment(
    path: str | os.PathLike[str], alphabet: str | Alphabet | None = None, *, unknown: bool = False
) -> Alignment:
    """Read an alignment from a FASTA, A2M, A3M or Stockholm file, which may be compressed with gzip.

    Parameters
    ----------
    path : path
        The file. Its content determines the format.
    alphabet : str or Alphabet, optional
        ``"protein"``, ``"rna"``, ``"dna"``, or the letters themselves. Default: detected from the sequences.
    unknown : bool
        Whether to accept question marks, which stand for unknown letters.

    Returns
    -------
    Alignment
        The aligned sequences and their names.
    """
    path = Path(path)
    with reading(path), path.open("rb") as raw:
        compressed = raw.read(2) == _GZIP
        raw.seek(0)
        file = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if compressed else raw
        names, rows, lines = _parse(file, path)
        has_more = bool(file.read(_HEAD).strip())
    if has_more:
        _note(f"{path} contains several alignments; only the first one was read")
    _note_duplicates(names, path)

    def place(row: int) -> str:
        return f"{path}, line {lines[row]}, sequence {names[row]!r:.80}"

    return _aligned(rows, names, place, str(path), alphabet, unknown=unknown)


def as_alignment(data: Any, alphabet: str | Alphabet | None = None, *, unknown: bool = False) -> Alignment:
    """Convert sequences in any supported form to an alignment.

    Parameters
    ----------
    data : Alignment, path, sequence of str, pandas Series, Biopython alignment, or array
        Arrays contain letters or integer codes of shape (n, sites), or one-hot rows of shape (n, sites, letters).
    alphabet, unknown
        See :func:`read_alignment`. Arrays of numbers require the alphabet. In one-hot encoding, NaN marks an unknown
        letter.

    Returns
    -------
    Alignment
        The aligned sequences.
    """
    if isinstance(data, Alignment):
        if (unknown or data.complete) and (alphabet is None or data.alphabet == as_alphabet(alphabet)):
            return data
        alphabet = data.alphabet if alphabet is None else alphabet
        return as_alignment(data.sequences, alphabet, unknown=unknown)
    if isinstance(data, str | os.PathLike):
        return read_alignment(data, alphabet, unknown=unknown)
    if getattr(getattr(data, "dtype", None), "kind", None) in ("b", "i", "u", "f"):
        return _from_numbers(np.asarray(data), alphabet, unknown=unknown)
    if isinstance(data, Mapping) or hasattr(data, "columns"):
        # The items of a mapping are its keys, and those of a data frame are the names of its columns.
        advice = "its values" if isinstance(data, Mapping) else "one column, such as df['sequence']"
        raise InputError(f"sequences must be a file, strings or an array, got {type(data).__name__}; pass {advice}")
    try:
        items = list(data)
    except TypeError:
        raise InputError(f"sequences must be a file, strings or an array, got {type(data).__name__}") from None
    rows, names = _rows_of(data, items)

    def place(row: int) -> str:
        return f"sequence {row}" if names is None else f"sequence {names[row]!r:.80}"

    return _aligned(rows, names, place, "the data", alphabet, unknown=unknown)


def write_fasta(
    path: str | os.PathLike[str], sequences: Sequence[str], names: Sequence[str] | None = None, *, force: bool = False
) -> Path:
    """Write sequences to a FASTA file and return its path.

    Parameters
    ----------
    path : path
        The file. If the name ends in ``.gz``, the file is compressed.
    sequences : sequence of str
        The sequences.
    names : sequence of str, optional
        Name of each sequence. Default: 1, 2, and so on.
    force : bool
        Whether to replace an existing file.
    """
    path = check_output(path, force)
    names = [str(number) for number in range(1, len(sequences) + 1)] if names is None else names
    text = "".join(f">{name}\n{sequence}\n" for name, sequence in zip(names, sequences, strict=True)).encode()
    with replace_file(path) as file:
        file.write(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path


# -- files --------------------------------------------------------------------------------------------


def _parse(file: IO[bytes], path: Path) -> tuple[list[str], list[bytes], list[int]]:
    """Return the names, the letters and the line numbers of the sequences in a file."""
    head = file.read(_HEAD)
    mark = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
    head = head[mark:]
    file.seek(mark)
    if not head.strip():
        raise InputError(f"{path} is empty")
    if b"\0" in head:
        raise InputError(f"{path} is a binary file; specify a FASTA or Stockholm file")
    if head.lstrip().startswith(b"# STOCKHOLM"):
        return _stockholm(_lines(file, path), path)
    if head.lstrip().startswith(b">"):
        return _fasta(_lines(file, path), path)
    first = head.split(b"\n", 1)[0][:40].decode("ascii", "replace")
    raise InputError(
        f"{path} is neither a FASTA nor a Stockholm file: it begins with {first!r}; convert it, for example with "
        "Biopython"
    )


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the content of each nonempty line. Raise `MemoryLimitError` if memory runs short."""
    number, total, checked = 0, 0, 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE:
            raise InputError(f"{path}, line {number}: the line is longer than {_LONGEST_LINE:,} characters")
        total += len(line)
        if total > checked + _LETTERS_PER_CHECK:
            checked = total
            _check_memory(total, f"reading {path}")
        if stripped := line.strip():
            yield number, stripped


def _check_memory(count: int, what: str, dtype: torch.dtype = torch.uint8) -> None:
    """Raise `MemoryLimitError` if an array of `count` entries requires more memory than is available."""
    try:
        check_memory(count, what, torch.empty(0, dtype=dtype))
    except MemoryLimitError as error:
        raise MemoryLimitError(f"{error}; pass fewer sequences, for example by removing similar ones") from None


def _fasta(lines: Iterator[tuple[int, bytes]], path: Path) -> tuple[list[str], list[bytes], list[int]]:
    names: list[str] = []
    places: list[int] = []
    rows: list[bytes] = []
    parts: list[bytes] = []
    for number, line in lines:
        if line.startswith(b">"):
            if names:
                rows.append(b"".join(parts))
            parts = []
            words = line.lstrip(b">").split(maxsplit=1)  # some files have '>>name'
            names.append(words[0].decode("utf-8", "replace") if words else "")
            places.append(number)
        else:
            parts.append(line.replace(b" ", b""))
    rows.append(b"".join(parts))
    return names, rows, places


def _stockholm(lines: Iterator[tuple[int, bytes]], path: Path) -> tuple[list[str], list[bytes], list[int]]:
    """Parse the first alignment of a Stockholm file, in which a sequence may be split into several blocks."""
    parts: dict[bytes, list[bytes]] = {}
    places: dict[bytes, int] = {}
    for number, line in lines:
        if line == b"//":
            break
        if line.startswith(b"#"):
            continue
        name, *rest = line.split(maxsplit=1)
        if not rest:
            raise InputError(f"{path}, line {number}: expected a name and a sequence, got {line[:40]!r}")
        places.setdefault(name, number)
        parts.setdefault(name, []).append(rest[0].replace(b" ", b""))
    names = [name.decode("utf-8", "replace") for name in parts]
    return names, [b"".join(pieces) for pieces in parts.values()], list(places.values())


def _note_duplicates(names: list[str], path: Path) -> None:
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    again = list(dict.fromkeys(name for name in names if name in seen or seen.add(name)))  # type: ignore[func-returns-value]
    _note(f"{path}: {len(again):,} names occur more than once ({some_of(again, 3)}); all sequences are kept")


def _note(text: str) -> None:
    warnings.warn(text, AlignmentWarning, stacklevel=4)


# -- letters ------------------------------------------------------------------------------------------


def _rows_of(data: Any, items: list[Any]) -> tuple[list[bytes], list[str] | None]:
    """Return the letters and the names of strings, of rows of letters, or of the records of a Biopython alignment."""
    # Biopython has two classes of alignments: one contains records, the other contains strings and has an attribute
    # with the records.
    records = items if items and hasattr(items[0], "seq") else list(getattr(data, "sequences", ()))
    names = [str(record.id) for record in records] if len(records) == len(items) else None
    if records is items:
        items = [str(item.seq) for item in items]
    rows = []
    for number, item in enumerate(items):
        text = item.decode("ascii", "replace") if isinstance(item, bytes) else item
        if not isinstance(text, str):
            try:
                text = "".join(one.decode("ascii", "replace") if isinstance(one, bytes) else one for one in text)
            except TypeError:
                raise InputError(
                    f"sequence {number} must be a string or a row of letters, got {type(item).__name__}; pass numbers "
                    "as a NumPy array"
                ) from None
        rows.append(text.encode("ascii", "replace").replace(b" ", b""))
    return rows, names


def _aligned(
    rows: list[bytes],
    names: list[str] | None,
    place: Callable[[int], str],
    source: str,
    alphabet: str | Alphabet | None,
    *,
    unknown: bool,
) -> Alignment:
    """Remove inserts, detect the alphabet and encode the letters. `place` describes a sequence in messages."""
    if not rows:
        raise InputError(f"{source} contains no sequences")
    known = None if alphabet is None else as_alphabet(alphabet)
    counts = sum((_count(row) for row in rows), np.zeros(256, np.int64))
    if known is None or not any(letter.islower() for letter in known.letters):
        rows, counts = _without_inserts(rows, counts, source)
    _check_lengths(rows, place)
    used = detect_alphabet(counts) if known is None else known
    codes = used.table()[np.frombuffer(b"".join(rows), np.uint8)].reshape(len(rows), -1)
    _check_letters(codes, rows, place, used, unknown=unknown)
    replaced = {letter: int(counts[ord(letter)]) for letter in used.ambiguous if counts[ord(letter)]}
    if replaced:
        which = ", ".join(f"{count:,} {letter}" for letter, count in replaced.items())
        _note(f"{source}: ambiguous letters were replaced with gaps ({which})")
    if used.other_base is not None and counts[ord(used.other_base[0])]:
        other, base = used.other_base
        _note(f"{source}: {int(counts[ord(other)]):,} letters {other} were read as {base}")
    return Alignment(codes, used, names)


def _count(row: bytes) -> Array:
    return np.bincount(np.frombuffer(row, np.uint8), minlength=256)


def _without_inserts(rows: list[bytes], counts: Array, source: str) -> tuple[list[bytes], Array]:
    """Remove inserts (lower-case letters and dots), or change the letters to upper case if there are no inserts.

    Lower-case letters are inserts if upper-case letters occur too, unless the sequences have equal lengths only if the
    lower-case letters are kept.
    """
    is_lower = np.isin(np.arange(256), list(_LOWER))
    if not counts[is_lower].any():
        return rows, counts
    is_upper = np.isin(np.arange(256), list(_LOWER.upper()))
    shorter = [row.translate(None, _LOWER + b".") for row in rows]
    whole = len({len(row) for row in rows}) == 1
    if counts[is_upper].any() and not (whole and len({len(row) for row in shorter}) > 1):
        removed = int(counts[is_lower].sum())
        _note(f"{source}: inserts were removed ({removed:,} lower-case letters)")
        return shorter, np.where(is_lower | (np.arange(256) == ord(".")), 0, counts)
    upper = np.where(is_lower, 0, counts)
    upper[is_upper] += counts[is_lower]
    return [row.upper() for row in rows], upper


def _check_lengths(rows: list[bytes], place: Callable[[int], str]) -> None:
    first = len(rows[0])
    for number, row in enumerate(rows):
        if not row:
            raise InputError(f"{place(number)} is empty")
        if len(row) != first:
            raise InputError(
                f"{place(number)} has {len(row):,} sites, but the first sequence has {first:,}; align the sequences "
                "first"
            )


def _check_letters(
    codes: Array, rows: list[bytes], place: Callable[[int], str], alphabet: Alphabet, *, unknown: bool
) -> None:
    bad = codes == INVALID if unknown else codes >= INVALID
    if not bad.any():
        return
    row, site = (int(index) for index in np.argwhere(bad)[0])
    letter = chr(rows[row][site])
    advice = "remove the sequence, or pass another alphabet"
    if letter == UNKNOWN_LETTER:
        advice = "unknown letters are not supported here"
    elif not alphabet.has_gap and (letter in "-." or letter in ALPHABETS.get(alphabet.name, alphabet).ambiguous):
        advice = f"remove the sequence, or train with alphabet={alphabet.name!r}, which has a gap"
    raise InputError(
        f"{place(row)}: {letter!r} at site {site} is not a letter of the {alphabet.name} alphabet "
        f"{alphabet.letters}; {advice}"
    )


# -- numbers ------------------------------------------------------------------------------------------


def _from_numbers(array: Array, alphabet: str | Alphabet | None, *, unknown: bool) -> Alignment:
    """Convert codes of shape (n, sites) or one-hot rows of shape (n, sites, letters) to an alignment."""
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise InputError(
            f"arrays must have shape (n, sites) or (n, sites, letters) without empty axes, got {array.shape}"
        )
    if alphabet is None:
        raise InputError("alphabet is required for an array of numbers, for example alphabet='protein'")
    used = as_alphabet(alphabet)
    if array.ndim == 2:
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= len(used):
            raise InputError(
                f"codes must be integers from 0 to {len(used) - 1} for the letters {used.letters}, got dtype "
                f"{array.dtype} and values from {array.min()} to {array.max()}"
            )
        return Alignment(array.astype(np.uint8), used)
    if array.shape[2] != len(used):
        raise InputError(
            f"one-hot rows must have {len(used)} entries for the letters {used.letters}, got {array.shape[2]}"
        )
    hidden = np.isnan(array).all(2) if unknown and array.dtype.kind == "f" else np.zeros(array.shape[:2], bool)
    valid = hidden | (((array == 0) | (array == 1)).all(2) & (array.sum(2) == 1))
    if not valid.all():
        row, site = (int(index) for index in np.argwhere(~valid)[0])
        raise InputError(f"site {site} of sequence {row} is not one-hot; exactly one entry must be 1")
    return Alignment(np.where(hidden, UNKNOWN, array.argmax(2)).astype(np.uint8), used)
