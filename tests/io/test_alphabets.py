"""Alphabets are detected from the letters, and codes and letters convert to each other."""

import numpy as np
import pytest

from mvrbm.errors import InputError
from mvrbm.io.alphabets import ALPHABETS, UNKNOWN, Alphabet, as_alphabet, detect_alphabet


def counts_of(text):
    return np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256)


DETECTED = [
    ("ACGT", "dna", "ACGT"),
    ("ACGT-", "dna", "-ACGT"),
    ("ACG.", "dna", "-ACGT"),
    ("ACGTN", "dna", "-ACGT"),
    ("ACGU", "rna", "ACGU"),
    ("UUN-", "rna", "-ACGU"),
    ("ACDE", "protein", "ACDEFGHIKLMNPQRSTVWY"),
    ("ACDEX", "protein", "-ACDEFGHIKLMNPQRSTVWY"),
    ("AACCGGTTU", "dna", "ACGT"),
    ("AACCGGUUT", "rna", "ACGU"),
    ("GGCUAACGUU" * 5 + "RN", "rna", "-ACGU"),
    ("GGCTAACGTT" * 5 + "RYKM", "dna", "-ACGT"),
    ("N" * 50 + "ACGT", "dna", "-ACGT"),
    ("ACDGHKMNRSTVWY", "protein", "ACDEFGHIKLMNPQRSTVWY"),
    ("MACEGTU", "protein", "-ACDEFGHIKLMNPQRSTVWY"),
    ("ACD?", "protein", "ACDEFGHIKLMNPQRSTVWY"),
]


@pytest.mark.parametrize(("text", "name", "letters"), DETECTED)
def test_the_smallest_alphabet_is_detected(text, name, letters):
    found = detect_alphabet(counts_of(text))
    assert (found.name, found.letters) == (name, letters)


def test_an_alphabet_in_which_a_base_becomes_a_gap_is_not_detected():
    with pytest.raises(InputError, match="only 67% of the letters are A, C, G, T or U"):
        detect_alphabet(counts_of("GGCUACGU-RYKM"))


@pytest.mark.parametrize("alphabet", [*ALPHABETS.values(), Alphabet("01")])
def test_letters_and_codes_convert_to_each_other(alphabet):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, len(alphabet), (20, 7)).astype(np.uint8)
    text = ["".join(alphabet.letters[code] for code in row) for row in codes]
    assert alphabet.decode(codes) == text
    np.testing.assert_array_equal(alphabet.encode(text), codes)


def test_unknown_letters_are_question_marks():
    codes = ALPHABETS["rna"].encode(["A?-"])
    assert codes.tolist() == [[1, UNKNOWN, 0]]
    assert ALPHABETS["rna"].decode(codes) == ["A?-"]


def test_named_alphabets_and_letters():
    assert as_alphabet("rna") is ALPHABETS["rna"]
    assert as_alphabet("HP") == Alphabet("HP")
    assert as_alphabet(Alphabet("HP", "lattice")).name == "lattice"
    for given in ("A", "AA", 3, None):
        with pytest.raises(InputError, match="alphabet must be one of 'protein', 'rna', 'dna' or a string"):
            as_alphabet(given)
    for letters in ("A?", "A>", "A ", "Aé", "A\n"):
        with pytest.raises(InputError, match="cannot be a letter"):
            Alphabet(letters)
