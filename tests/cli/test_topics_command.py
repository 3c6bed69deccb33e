"""mvrbm topics: every kind of input gives the same counts, and bad input gives one line."""

import csv
import json
import os

import numpy as np
import pytest
from scipy import sparse

import mvrbm
from mvrbm.cli import main
from mvrbm.errors import InputError
from mvrbm.io.documents import read_documents

PETS = ["dog barks loudly", "dog chases dog", "barks chases loudly 99", ""]
COUNTS = [[1, 0, 1, 1], [0, 1, 2, 0], [1, 1, 0, 1]]
WORDS = ["barks", "chases", "dog", "loudly"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets" / "more").mkdir(parents=True)
    for number, (folder, text) in enumerate(zip(["pets", "pets", "pets/more", "pets"], PETS, strict=True)):
        (tmp_path / folder / f"{number}.txt").write_text(text)
    (tmp_path / "pets.txt").write_text("\n".join(PETS))
    (tmp_path / "pets.csv").write_text("id,text\n" + "\n".join(f'{n},"{text}"' for n, text in enumerate(PETS)))
    (tmp_path / "pets.feat").write_text("1 4:1 3:1 1:1\n1 2:1 3:2 # comment\n1 1:1 2:1 4:1\n")
    (tmp_path / "words").write_text("".join(f"{word} 0\n" for word in WORDS))
    sparse.save_npz(tmp_path / "pets.npz", sparse.csr_matrix(COUNTS))
    return tmp_path


@pytest.mark.parametrize("name", ["pets", "pets.txt", "pets.csv", "pets.feat", "pets.npz"])
def test_every_kind_of_file_gives_the_same_counts(place, name):
    has_counts = name in ("pets.feat", "pets.npz")
    counts, words = read_documents(place / name, vocabulary=place / "words" if has_counts else None)
    assert sorted(map(tuple, counts.toarray())) == sorted(map(tuple, COUNTS))  # folders are read in their own order
    assert words == WORDS
    if has_counts:
        first = int(name == "pets.feat")
        assert read_documents(place / name)[1] == [str(number) for number in range(first, first + 4)]


def test_byte_order_marks_are_no_letters(place):
    (place / "marked.txt").write_text("dog\ncat\ndog dog\n", encoding="utf-8-sig")
    (place / "marked.csv").write_text("text\ndog\ncat\ndog dog\n", encoding="utf-8-sig")
    (place / "marked").write_text("\n".join(WORDS), encoding="utf-8-sig")
    for name in ("marked.txt", "marked.csv"):
        counts, words = read_documents(place / name)
        assert (words, counts.toarray().tolist()) == (["dog"], [[1], [0], [2]])
    assert read_documents(place / "pets.npz", vocabulary=place / "marked")[1] == WORDS


def test_csv_files_are_read_like_tables(place):
    limit = csv.field_size_limit()
    texts = ["dog, barks", "cat; barks", "dog\r\nbarks " + "cat " * 40_000]
    rows = "".join(f'{number};"{text}"\r\n' for number, text in enumerate(texts))
    (place / "export.csv").write_bytes(("id;text\r\n" + rows + "\r\n").encode("utf-8-sig"))
    counts, words = read_documents(place / "export.csv")
    assert words == ["barks", "cat", "dog"]
    assert counts.toarray().tolist() == [[1, 0, 1], [1, 1, 0], [1, 40_000, 1]]
    assert csv.field_size_limit() == limit
    (place / "export.csv").write_text("id,text\n1,dog\n2,dog, barks\n")
    with pytest.raises(InputError, match=r"export\.csv, line 3: 3 fields, but the header has 2"):
        read_documents(place / "export.csv")


def test_words_of_a_single_document_and_stop_words_are_left_out(place):
    (place / "few.txt").write_text("red red and blue\nblue and green\ngreen and blue yes\n")
    counts, words = read_documents(place / "few.txt")
    assert words == ["blue", "green"]
    assert counts.toarray().tolist() == [[1, 0], [1, 1], [1, 1]]
    assert read_documents(place / "few.txt", max_words=1)[1] == ["blue"]


def test_shows_and_saves_topics(place, capsys):
    assert (
        main(["topics", "pets.txt", "--topics", "2", "--words", "3", "--epochs", "2", "--save", "model", "--json"]) == 0
    )
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert np.shape(result["topics"]) == (2, 3)
    assert (result["documents"], result["vocabulary"]) == (3, 4)
    assert "3 documents, 4 words" in printed.err
    assert mvrbm.load("model").top_words(n=3) == result["topics"]
    assert main(["topics", "pets.csv", "--topics", "2", "--epochs", "1", "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_options_are_those_of_the_topic_model(place):
    options = "--topics 2 --max-words 3 --epochs 2 --seed 5 --device cpu --save model --quiet"
    assert main(["topics", "pets.txt", *options.split()]) == 0
    model = mvrbm.ReplicatedSoftmax(2, n_epochs=2, random_state=5, device="cpu")
    model.fit(read_documents(place / "pets.txt", max_words=3)[0])
    assert model.components_.shape == (2, 3)
    np.testing.assert_array_equal(mvrbm.load("model", "cpu").components_, model.components_)


ERRORS = [
    ("missing.txt", [], "missing.txt: no such file"),
    ("words", [], "words must be a folder or end in one of .txt, .csv, .svm"),
    ("pets.csv", ["--column", "body"], "pets.csv has no column 'body', only ['id', 'text']"),
    ("other.csv", [], "other.csv has no column 'text', only ['a', 'b']; use --column NAME to specify the text column"),
    ("pets.txt", ["--vocabulary", "words"], "a vocabulary can only be used with word counts"),
    ("pets.feat", ["--vocabulary", "few"], "few has 1 words, but pets.feat has counts for 4"),
    ("bad.feat", [], "bad.feat, line 2: expected word:count, got 'x:1'"),
    ("empty.feat", [], "empty.feat contains no counts"),
    ("bad.npz", [], "bad.npz is corrupted or truncated: File is not a zip file"),
    (
        "columns.npz",
        [],
        "expected a CSR matrix in columns.npz, but got b'csc'; convert the matrix with tocsr() before saving it",
    ),
    ("far.feat", [], "far.feat: a vocabulary of 1,000,000,000,000 words requires"),
    ("infinite.feat", [], "infinite.feat contains counts that are not finite"),
    ("pipe.txt", [], "pipe.txt is a pipe, a socket or a device; specify a regular file"),
    ("pets.feat", ["--vocabulary", "pipe.txt"], "pipe.txt is a pipe, a socket or a device"),
    ("binary.txt", [], "binary.txt is not a UTF-8 text file"),
    ("empty", [], "empty contains no documents"),
    ("short.txt", [], "short.txt has no word of three or more letters"),
    ("negative.feat", [], "Negative values in data"),
    ("pets.txt", ["--save", "pets"], "pets contains files that are not part of a model; choose another folder"),
]


@pytest.mark.parametrize(("source", "options", "message"), ERRORS)
def test_bad_input_gives_one_line(place, capsys, source, options, message):
    (place / "other.csv").write_text("a,b\n1,2\n")
    (place / "few").write_text("dog\n")
    (place / "bad.feat").write_text("1 1:1\n1 x:1\n")
    (place / "negative.feat").write_text("1 1:-1\n")
    (place / "empty.feat").touch()
    (place / "bad.npz").write_text("no archive")
    sparse.save_npz(place / "columns.npz", sparse.csc_matrix(COUNTS))
    (place / "far.feat").write_text("1 1000000000000:1\n")
    (place / "infinite.feat").write_text("1 1:1e300\n")
    os.mkfifo(place / "pipe.txt")
    (place / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (place / "empty").mkdir()
    (place / "short.txt").write_text("a b\nc d\n")
    assert main(["topics", source, *options, "--quiet"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}"), error
    assert error.count("\n") == 1
