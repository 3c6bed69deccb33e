"""Every form of an alignment gives the same codes, and bad input gives one line that says what to do."""

import gzip
import importlib
import os
import types

import numpy as np
import pandas as pd
import pytest

from mvrbm.errors import AlignmentWarning, InputError, MemoryLimitError
from mvrbm.io import alignments
from mvrbm.io.alignments import Alignment, as_alignment, read_alignment, write_fasta
from mvrbm.io.alphabets import ALPHABETS, UNKNOWN

SEQUENCES = ["MK-AC", "MKWAC", "-KWDE"]
NAMES = ["one", "two/3-7", "three"]
CODES = np.array([[ALPHABETS["protein"].letters.index(letter) for letter in row] for row in SEQUENCES])
FASTA = ">one first\nMK-\nAC\n\n>two/3-7\r\nMKWAC\r\n>three\n-KWDE"
STOCKHOLM = """# STOCKHOLM 1.0
#=GF ID family
one      MK-
two/3-7  MKW
#=GC RF  xxx
three    -KW

one      AC
two/3-7  AC
three    DE
//
"""


def record(name, text):
    return types.SimpleNamespace(id=name, seq=text)


FORMS = {
    "strings": SEQUENCES,
    "tuple": tuple(SEQUENCES),
    "bytes": [row.encode() for row in SEQUENCES],
    "array of strings": np.array(SEQUENCES),
    "array of objects": np.array(SEQUENCES, dtype=object),
    "series of objects": pd.Series(SEQUENCES, index=[7, 1, 2], dtype=object),
    "series of strings": pd.Series(SEQUENCES, dtype="string"),
    "array of letters": np.array([list(row) for row in SEQUENCES]),
    "array of bytes": np.array([list(row) for row in SEQUENCES], dtype="S1"),
    "lists of letters": [list(row) for row in SEQUENCES],
    "records": [record(*pair) for pair in zip(NAMES, SEQUENCES, strict=True)],
    "codes": CODES,
    "bytes of codes": CODES.astype(np.uint8),
    "one-hot": np.eye(21)[CODES],
    "one-hot booleans": np.eye(21, dtype=bool)[CODES],
    "alignment": Alignment(CODES.astype(np.uint8), ALPHABETS["protein"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_codes(name):
    alignment = as_alignment(FORMS[name], "protein")
    assert alignment.codes.dtype == np.uint8
    np.testing.assert_array_equal(alignment.codes, CODES)
    assert alignment.sequences == SEQUENCES
    assert alignment.names == (NAMES if name == "records" else None)
    np.testing.assert_array_equal(alignment.one_hot(), np.eye(21)[CODES])


MARK = "\ufeff"  # the byte order mark that Windows puts in front of UTF-8
FILES = {
    "family.fasta": FASTA,
    "family.a3m": FASTA,
    "family.sto": STOCKHOLM,
    "no-suffix": "\n" + FASTA,
    "mark.fasta": MARK + FASTA,
    "mark.sto": MARK + STOCKHOLM,
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_every_file_gives_the_same_alignment(tmp_path, name, compressed):
    content = FILES[name].encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if compressed else content)
    for given in (path, str(path)):
        alignment = as_alignment(given)
        np.testing.assert_array_equal(alignment.codes, CODES)
        assert alignment.names == NAMES
        assert alignment.alphabet == ALPHABETS["protein"]


def test_a_biopython_alignment():
    try:
        biopython = importlib.import_module("Bio.Align")
    except ImportError:
        pytest.skip("Biopython is not installed")
    records = importlib.import_module("Bio.SeqRecord")
    sequences = importlib.import_module("Bio.Seq")
    rows = [records.SeqRecord(sequences.Seq(row), id=name) for name, row in zip(NAMES, SEQUENCES, strict=True)]
    for family in (biopython.MultipleSeqAlignment(rows), biopython.MultipleSeqAlignment(rows).alignment):
        alignment = as_alignment(family)
        assert (alignment.sequences, alignment.names) == (SEQUENCES, NAMES)


def test_inserts_are_removed_with_a_note(tmp_path):
    (tmp_path / "family.a3m").write_text(">one\nMK-AC\n>two\nMKklmWAC\n>three\n.-KWDE\n")
    with pytest.warns(AlignmentWarning, match=r"family\.a3m: inserts were removed \(3 lower-case letters\)"):
        assert read_alignment(tmp_path / "family.a3m").sequences == SEQUENCES
    with pytest.warns(AlignmentWarning, match="inserts"):
        assert as_alignment(["MK.-AC", "MKaWAC", "-K.WDE"]).sequences == SEQUENCES


def test_lower_case_letters_without_inserts_are_letters():
    assert as_alignment([row.lower() for row in SEQUENCES]).sequences == SEQUENCES
    assert as_alignment(["mkWAC", "MKWAC"]).sequences == ["MKWAC", "MKWAC"]  # masked, not inserted
    assert as_alignment(["aB", "bA"], "abAB").sequences == ["aB", "bA"]
    assert as_alignment(["MK.AC", "MKWAC"]).sequences == ["MK-AC", "MKWAC"]


def test_ambiguous_letters_become_gaps_with_a_note():
    with pytest.warns(AlignmentWarning, match=r"ambiguous letters were replaced with gaps \(2 X, 1 B\)"):
        assert as_alignment(["MXBAC", "MKXAC"]).sequences == ["M--AC", "MK-AC"]
    with pytest.warns(AlignmentWarning, match=r"1 N"):
        assert as_alignment(["ACGN", "ACGU"]).alphabet == ALPHABETS["rna"]


def test_one_ambiguous_letter_does_not_turn_rna_into_protein():
    with pytest.warns(AlignmentWarning, match=r"ambiguous letters were replaced with gaps \(1 R\)"):
        alignment = as_alignment(["GGCUAACGUU"] * 50 + ["GGCURACG-U"])
    assert alignment.alphabet == ALPHABETS["rna"]
    assert alignment.sequences[-1] == "GGCU-ACG-U"


def test_t_in_rna_and_u_in_dna_stand_for_the_same_base():
    with pytest.warns(AlignmentWarning, match="the data: 2 letters T were read as U"):
        assert as_alignment(["GGCUU", "GGCTT", "GACUU"]).sequences == ["GGCUU", "GGCUU", "GACUU"]
    with pytest.warns(AlignmentWarning, match="1 letters U were read as T"):
        assert as_alignment(["GU"], "dna").sequences == ["GT"]
    with pytest.raises(InputError, match="'T' at site 1 is not a letter"):
        as_alignment(["GT"], "-ACGU")  # the letters that the user gave


def test_an_alignment_with_unknown_letters_is_rejected_where_they_are_not_supported():
    alignment = as_alignment(["MK?", "?KW"], unknown=True)
    assert as_alignment(alignment, unknown=True) is alignment
    with pytest.raises(InputError, match=r"sequence 0: '\?' at site 2 .*unknown letters are not supported here"):
        as_alignment(alignment)


def test_further_alignments_in_a_stockholm_file_are_noted(tmp_path):
    one = "# STOCKHOLM 1.0\na MK\nb MW\n//\n"
    path = tmp_path / "families.sto"
    path.write_text(one * 2)
    with pytest.warns(AlignmentWarning, match=r"families\.sto contains several alignments; only the first one was"):
        assert read_alignment(path).names == ["a", "b"]


def test_names_may_follow_two_marks(tmp_path):
    (tmp_path / "family.fasta").write_text(">>S1 domain\nACDE\n>S2\nACDF\n")
    alignment = read_alignment(tmp_path / "family.fasta")
    assert alignment.names == ["S1", "S2"]
    assert alignment.sequences == ["ACDE", "ACDF"]


def test_repeated_names_are_noted(tmp_path):
    (tmp_path / "family.fasta").write_text(">a\nMK\n>b\nMK\n>a\nMW\n")
    with pytest.warns(AlignmentWarning, match=r"1 names occur more than once \(a\); all sequences are kept"):
        assert read_alignment(tmp_path / "family.fasta").names == ["a", "b", "a"]


def test_unknown_letters():
    alignment = as_alignment(["MK?", "?KW"], unknown=True)
    assert alignment.sequences == ["MK?", "?KW"]
    assert not alignment.complete
    one_hot = alignment.one_hot()
    assert one_hot.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(one_hot).all(2), alignment.codes == UNKNOWN)
    np.testing.assert_array_equal(as_alignment(one_hot, alignment.alphabet, unknown=True).codes, alignment.codes)
    with pytest.raises(InputError, match=r"sequence 0: '\?' at site 2 .* unknown letters are not supported here"):
        as_alignment(["MK?"])


def test_rows_of_an_alignment():
    alignment = Alignment(CODES.astype(np.uint8), ALPHABETS["protein"], NAMES)
    for rows in ([2, 0], slice(0, 3, 2), np.array([True, False, True])):
        part = alignment[rows]
        assert part.sequences == np.array(SEQUENCES)[rows].tolist()
        assert part.names == np.array(NAMES)[rows].tolist()
    assert [one.sequences for one in alignment] == [[row] for row in SEQUENCES]


def test_other_letters_are_encoded_again():
    alignment = as_alignment(["ACG", "A-G"])
    assert alignment.alphabet == ALPHABETS["dna"]
    assert as_alignment(alignment) is alignment
    assert as_alignment(alignment, "rna").codes.tolist() == [[1, 2, 3], [1, 0, 3]]


@pytest.mark.parametrize("name", ["new.fasta", "new.fasta.gz"])
def test_written_files_are_read_back(tmp_path, name):
    write_fasta(tmp_path / name, SEQUENCES, NAMES)
    alignment = read_alignment(tmp_path / name)
    assert (alignment.sequences, alignment.names) == (SEQUENCES, NAMES)
    with pytest.raises(InputError, match="already exists"):
        write_fasta(tmp_path / name, SEQUENCES)
    write_fasta(tmp_path / name, SEQUENCES, force=True)
    assert read_alignment(tmp_path / name).names == ["1", "2", "3"]
    assert os.listdir(tmp_path) == [name]


BAD_FILES = [
    (b"", "is empty"),
    (b" \n\n", "is empty"),
    (b"\0" * 100, "is a binary file; specify a FASTA or Stockholm file"),
    (b"CLUSTAL W\n\none ACD", "neither a FASTA nor a Stockholm file: it begins with 'CLUSTAL W'"),
    (b">one\nACD\n>two\nACDE\n", "line 3, sequence 'two' has 4 sites, but the first sequence has 3; align"),
    (b">one\nACD\n>two\n>three\nACD\n", "line 3, sequence 'two' is empty"),
    (b">one\n", "line 1, sequence 'one' is empty"),
    (b">one\nACD\n>two\nA*D\n", r"line 3, sequence 'two': '\*' at site 1 is not a letter of the protein alphabet"),
    (b">one\nA\xffD\n", "line 1, sequence 'one': '\xff' at site 1 is not a letter"),
    (b"# STOCKHOLM 1.0\n//\n", "contains no sequences"),
    (b"# STOCKHOLM 1.0\none\n//\n", "line 2: expected a name and a sequence"),
    (gzip.compress(b">one\nACD\n" * 50, mtime=0)[:-9], "corrupted or truncated"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES)
def test_bad_files_are_named(tmp_path, content, message):
    path = tmp_path / "family.fasta"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"family.fasta.*{message}") as error:
        read_alignment(path)
    assert "\n" not in str(error.value)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(InputError, match=r"missing\.fasta: no such file"):
        as_alignment(str(tmp_path / "missing.fasta"))
    with pytest.raises(InputError, match="is a folder"):
        as_alignment(tmp_path)


BAD_DATA = [
    ([], {}, "contains no sequences"),
    (["ACD", "AC"], {}, "sequence 1 has 2 sites, but the first sequence has 3"),
    (["AC1"], {}, "'1' at site 2 is not a letter of the protein alphabet"),
    (["AC-"], {"alphabet": "ACGT"}, "'-' at site 2 is not a letter of the custom alphabet ACGT"),
    (["ACX"], {"alphabet": ALPHABETS["protein"].without_gap()}, "train with alphabet='protein', which has a gap"),
    (5, {}, "sequences must be a file, strings or an array, got int"),
    (pd.DataFrame({"text": SEQUENCES}), {}, r"got DataFrame; pass one column, such as df\['sequence'\]"),
    (dict(zip(NAMES, SEQUENCES, strict=True)), {}, "got dict; pass its values"),
    ([1, 2], {}, "sequence 0 must be a string or a row of letters, got int"),
    (CODES, {}, "alphabet is required for an array of numbers"),
    (CODES, {"alphabet": "dna"}, "codes must be integers from 0 to 4"),
    (CODES.astype(float), {"alphabet": "protein"}, "got dtype float64"),
    (CODES - 1, {"alphabet": "protein"}, "values from -1"),
    (CODES[0], {"alphabet": "protein"}, r"arrays must have shape \(n, sites\)"),
    (np.eye(20)[[[1, 2]]], {"alphabet": "protein"}, "one-hot rows must have 21 entries"),
    (np.zeros((2, 3, 21)), {"alphabet": "protein"}, "site 0 of sequence 0 is not one-hot"),
    (np.full((2, 3, 21), np.nan), {"alphabet": "protein"}, "site 0 of sequence 0 is not one-hot"),
]


@pytest.mark.parametrize(("data", "settings", "message"), BAD_DATA)
def test_bad_data_is_named(data, settings, message):
    with pytest.raises(InputError, match=message):
        as_alignment(data, **settings)


def test_memory_is_limited(monkeypatch, tmp_path):
    """An endless line, a file larger than the memory, and an encoding larger than the memory give one line."""
    path = tmp_path / "family.fasta"
    path.write_text(">one\n" + "ACDE" * 100 + "\n")
    monkeypatch.setattr(alignments, "_LONGEST_LINE", 300)
    with pytest.raises(InputError, match="line 2: the line is longer than 300 characters"):
        read_alignment(path)
    monkeypatch.undo()
    monkeypatch.setattr(alignments, "_LETTERS_PER_CHECK", 100)
    monkeypatch.setattr("mvrbm.memory._NEGLIGIBLE", 1)
    monkeypatch.setattr("mvrbm.memory.available_memory", lambda device: 200)
    with pytest.raises(MemoryLimitError, match=r"reading .*family.fasta requires"):
        read_alignment(path)
    with pytest.raises(MemoryLimitError, match=r"encoding of 3 sequences of 5 sites requires .* pass fewer"):
        as_alignment(SEQUENCES).one_hot()
