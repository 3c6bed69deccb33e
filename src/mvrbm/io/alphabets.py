"""Alphabets of protein, RNA and DNA sequences, and their conversion between letters and codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.errors import InputError

__all__ = ["ALPHABETS", "UNKNOWN", "Alphabet", "as_alphabet", "detect_alphabet"]

Array = NDArray[Any]

#: Letter that stands for a gap.
GAP = "-"
#: Letter and code of a site whose letter is unknown.
UNKNOWN_LETTER, UNKNOWN = "?", 255
#: Code of a character that is not in the alphabet.
INVALID = 254

# Letters that stand for several letters or for rare ones. They are read as gaps.
_AMBIGUOUS = {"protein": "XBZJUO", "rna": "NRYSWKMBDHVX", "dna": "NRYSWKMBDHVX"}
# T in RNA is read as U, and U in DNA as T: both stand for the same base, and databases mix the two.
_SAME_BASE = {"rna": ("T", "U"), "dna": ("U", "T")}
# Minimum fraction of A, C, G, T and U among the letters other than N in sequences of nucleotides. All 16 letters for
# nucleotides and sets of them, except U, also stand for amino acids, but proteins consist of more than these.
_NUCLEOTIDES = 0.9
# Maximum number of letters. The codes above are reserved.
_MOST_LETTERS = 250


@dataclass(frozen=True)
class Alphabet:
    """Letters of sequences. The code of a letter is its position in `letters`.

    Parameters
    ----------
    letters : str
        Distinct ASCII characters.
    name : str
        Name of the alphabet.

    Examples
    --------
    >>> from mvrbm.io.alphabets import Alphabet
    >>> alphabet = Alphabet("-ACGU")
    >>> alphabet.decode(alphabet.encode(["GA-U"]))
    ['GA-U']
    """

    letters: str
    name: str = "custom"

    def __post_init__(self) -> None:
        letters = self.letters
        if not isinstance(letters, str) or not 2 <= len(letters) <= _MOST_LETTERS or len(set(letters)) < len(letters):
            raise InputError(
                f"the letters of an alphabet must be a string of 2 to {_MOST_LETTERS} distinct characters, "
                f"got {letters!r:.60}"
            )
        if bad := [
            one for one in letters if not one.isascii() or not one.isprintable() or one in " >" + UNKNOWN_LETTER
        ]:
            raise InputError(f"{bad[0]!r} cannot be a letter of an alphabet")

    def __len__(self) -> int:
        return len(self.letters)

    @property
    def has_gap(self) -> bool:
        """Whether the gap is one of the letters."""
        return GAP in self.letters

    @property
    def ambiguous(self) -> str:
        """Letters that are read as gaps, such as X in proteins and N in RNA."""
        return _AMBIGUOUS.get(self.name, "") if self.has_gap else ""

    @property
    def other_base(self) -> tuple[str, str] | None:
        """A letter that is not in the alphabet, and the letter that it is read as: T as U in RNA, and U as T in DNA."""
        found = _SAME_BASE.get(self.name)
        return found if found and found[1] in self.letters and found[0] not in self.letters else None

    def without_gap(self) -> Alphabet:
        """Return the alphabet without the gap."""
        return Alphabet(self.letters.replace(GAP, ""), self.name)

    def table(self) -> Array:
        """Return an array of 256 codes, one per byte. Characters that are not in the alphabet have code `INVALID`."""
        table = np.full(256, INVALID, np.uint8)
        table[ord(UNKNOWN_LETTER)] = UNKNOWN
        if self.has_gap:
            for letter in self.ambiguous + ".":
                table[ord(letter)] = self.letters.index(GAP)
        if self.other_base is not None:
            other, base = self.other_base
            table[ord(other)] = self.letters.index(base)
        for code, letter in enumerate(self.letters):
            table[ord(letter)] = code
        return table

    def encode(self, sequences: Sequence[str]) -> Array:
        """Return the codes of sequences of equal length as a uint8 array of shape (n, sites)."""
        codes = self.table()[np.frombuffer("".join(sequences).encode("ascii", "replace"), np.uint8)]
        return codes.reshape(len(sequences), -1)

    def decode(self, codes: Array) -> list[str]:
        """Convert codes of shape (n, sites) to strings. Unknown sites become question marks."""
        characters = np.full(256, ord(UNKNOWN_LETTER), np.uint8)
        characters[: len(self)] = np.frombuffer(self.letters.encode(), np.uint8)
        rows = characters[np.asarray(codes)]
        return [row.tobytes().decode() for row in rows]


#: The named alphabets. Codes are in the order that adabmDCA uses.
ALPHABETS = {
    "protein": Alphabet("-ACDEFGHIKLMNPQRSTVWY", "protein"),
    "rna": Alphabet("-ACGU", "rna"),
    "dna": Alphabet("-ACGT", "dna"),
}


def as_alphabet(alphabet: str | Alphabet) -> Alphabet:
    """Return the alphabet with the given name, or an alphabet of the given letters."""
    if isinstance(alphabet, Alphabet):
        return alphabet
    if alphabet in ALPHABETS:
        return ALPHABETS[alphabet]
    if not isinstance(alphabet, str) or len(alphabet) < 2 or len(set(alphabet)) < len(alphabet):
        raise InputError(
            f"alphabet must be one of {', '.join(map(repr, ALPHABETS))} or a string of distinct letters such as "
            f"'-ACGU', got {alphabet!r:.60}"
        )
    return Alphabet(alphabet)


def detect_alphabet(counts: Array) -> Alphabet:
    """Return the named alphabet of the sequences, given the number of occurrences of each byte.

    Sequences are DNA or RNA if at least 90% of their letters are A, C, G, T or U, and all others are ambiguous letters
    of nucleotides, such as R. They are RNA if U is more frequent than T. All other sequences are proteins. If the
    sequences have no gaps and no ambiguous letters, the alphabet has no gap.
    """
    present = {chr(byte) for byte in np.flatnonzero(counts)} - {UNKNOWN_LETTER}
    letters = present - {GAP, "."}
    count = {letter: int(counts[ord(letter)]) for letter in letters}
    bases = sum(count.get(letter, 0) for letter in "ACGTU")
    others = sum(count.values()) - bases - count.get("N", 0)  # stretches of N are common
    alphabet = ALPHABETS["protein"]
    if letters <= set("ACGTU" + _AMBIGUOUS["dna"]):
        if bases >= _NUCLEOTIDES * (bases + others):
            alphabet = ALPHABETS["rna" if count.get("U", 0) > count.get("T", 0) else "dna"]
        elif "U" in letters:
            raise InputError(
                f"only {bases / (bases + others):.0%} of the letters are A, C, G, T or U, so the sequences can be RNA "
                "or proteins; pass alphabet='rna' or alphabet='protein'"
            )
    read = set(alphabet.letters.replace(GAP, "")) | set(alphabet.other_base or ())
    return alphabet if present - read else alphabet.without_gap()
