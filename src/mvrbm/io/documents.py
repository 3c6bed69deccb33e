"""Documents from files, as word counts: texts in a folder, a file or a table, and counts in svmlight or npz files."""

import csv
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from mvrbm.errors import InputError
from mvrbm.io.formats import read_npz, reading
from mvrbm.io.untrusted import Budget

COUNT_SUFFIXES = (".svm", ".svmlight", ".libsvm", ".feat", ".npz")
# Memory that the name of a word takes where words have numbers only.
_BYTES_PER_WORD = 64
# Words of three letters and more, of any alphabet: no numbers, no underscores.
_WORD = r"(?u)\b[^\W\d_]{3,}\b"


def read_documents(
    path: Path, *, column: str | None = None, vocabulary: Path | None = None, max_words: int = 2000
) -> tuple[Any, list[str]]:
    """Return word counts, a sparse matrix (n, n_words), and the words.

    Parameters
    ----------
    path : Path
        A folder of .txt files, one document each; a .txt file with one document per line; a .csv file with a column of
        texts; or counts: lines ``label word:count word:count ...`` with numbers of words (.svm, .svmlight, .libsvm,
        .feat), or a sparse matrix of SciPy (.npz).
    column : str, optional
        Name of the column of texts of a .csv file. Default: its only column, or the one named ``text``.
    vocabulary : Path, optional
        The words of a file of counts, one per line, of which the first column counts. Default: the words' numbers.
    max_words : int
        Size of the vocabulary of texts: the most frequent words without English function words.
    """
    if path.suffix.lower() in COUNT_SUFFIXES and path.is_file():
        with np.errstate(over="ignore"):  # counts beyond single precision become infinite
            counts, first = (_npz(path), 0) if path.suffix.lower() == ".npz" else _svmlight(path)
        if not np.isfinite(counts.data).all():
            raise InputError(f"{path} has counts that are not finite")
        if vocabulary is None:
            return counts, [str(number) for number in range(first, first + counts.shape[1])]
        words = [line.split()[0] for line in _lines(vocabulary) if line.strip()]
        if len(words) < counts.shape[1]:
            raise InputError(f"{vocabulary} has {len(words):,} words, but {path} has counts of {counts.shape[1]:,}")
        counts.resize(counts.shape[0], len(words))
        return counts, words
    if vocabulary is not None:
        raise InputError(f"a vocabulary goes with counts ({', '.join(COUNT_SUFFIXES)}), but {path} has texts")
    texts = [text for text in _texts(path, column) if text.strip()]
    if not texts:
        raise InputError(f"{path} has no documents: a folder of .txt files, or a file with one document per line")
    from sklearn.feature_extraction.text import CountVectorizer

    # A word of a single document tells nothing about any other document.
    vectorizer = CountVectorizer(
        stop_words="english", token_pattern=_WORD, max_features=max_words, min_df=min(2, len(texts))
    )
    try:
        counts = vectorizer.fit_transform(texts)
    except ValueError as error:
        raise InputError(
            f"{path} has no word of three letters or more that occurs in two of its {len(texts):,} documents"
        ) from error
    return counts, vectorizer.get_feature_names_out().tolist()


def _lines(path: Path) -> Iterator[str]:
    with reading(path), path.open(encoding="utf-8") as file:
        try:
            yield from file
        except UnicodeDecodeError:
            raise InputError(f"{path} is not a text file in UTF-8") from None


def _texts(path: Path, column: str | None) -> Iterator[str]:
    if path.is_dir():
        for file in sorted(path.rglob("*.txt")):
            yield "".join(_lines(file))
    elif path.suffix.lower() == ".csv":
        yield from _column(path, column)
    elif path.suffix.lower() == ".txt":
        yield from _lines(path)
    else:
        path.stat()  # a file that does not exist is an error of its own
        raise InputError(
            f"{path} is neither a folder nor a file of a known kind: .txt, .csv, {', '.join(COUNT_SUFFIXES)}"
        )


def _column(path: Path, column: str | None) -> Iterator[str]:
    csv.field_size_limit(sys.maxsize)
    table = csv.DictReader(_lines(path))
    names = list(table.fieldnames or [])
    wanted = column or (names[0] if len(names) == 1 else "text")
    if wanted not in names:
        hint = "" if column else ": name the column of texts with --column"
        raise InputError(f"{path} has no column '{wanted}', it has {names}{hint}")
    for row in table:
        yield row[wanted] or ""


def _svmlight(path: Path) -> tuple[Any, int]:
    """Return counts and the smallest possible number of a word: 0 if it occurs, otherwise 1."""
    # scikit-learn's reader requires sorted numbers, which many files of counts do not have.
    ends, words, counts = [0], [], []
    for number, line in enumerate(_lines(path), start=1):
        for pair in line.partition("#")[0].split()[1:]:
            word, _, count = pair.partition(":")
            try:
                words.append(int(word))
                counts.append(float(count))
            except ValueError:
                raise InputError(f"{path}, line {number}: {pair!r:.40} is not word:count") from None
        ends.append(len(words))
    if not words:
        raise InputError(f"{path} has no counts: lines must be 'label word:count word:count ...'")
    first = 0 if min(words) == 0 else 1
    if min(words) < first:
        raise InputError(f"{path} has the word number {min(words)}: numbers start at 0 or 1")
    _check_words(path, max(words))
    columns = np.array(words) - first
    matrix = sparse.csr_matrix((counts, columns, ends), shape=(len(ends) - 1, int(columns.max()) + 1), dtype=np.float32)
    matrix.sum_duplicates()
    return matrix, first


def _npz(path: Path) -> Any:
    """Read a sparse matrix of scipy.sparse.save_npz, whose own reader allocates whatever a file claims to hold."""
    data, indices, indptr, shape = (read_npz(path, key) for key in ("data", "indices", "indptr", "shape"))
    with reading(path):
        with zipfile.ZipFile(path) as archive, archive.open("format.npy") as file:
            kind = file.read(1000)[-3:]
        if kind != b"csr":
            raise InputError(f"{path} is stored as {kind!r}: convert it with tocsr() before it is saved")
        n_documents, n_words = (int(size) for size in shape)
        _check_words(path, n_words)
        matrix = sparse.csr_matrix((data.astype(np.float32), indices, indptr), shape=(n_documents, n_words))
        matrix.check_format(full_check=True)
    return matrix


def _check_words(path: Path, n_words: int) -> None:
    """Raise InputError if so many words are not plausible for a file: each of them gets a name."""
    Budget(path).spend(_BYTES_PER_WORD * n_words, f"{path}: a vocabulary of {n_words:,} words")
