"""Read documents as word counts from text, CSV, svmlight or npz files."""

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from mvrbm.errors import InputError
from mvrbm.io.csv_text import Dialect, check_records, read_text, records, value_of
from mvrbm.io.formats import read_npz, reading
from mvrbm.io.untrusted import Budget

#: File name suffixes for word counts.
COUNT_SUFFIXES = (".svm", ".svmlight", ".libsvm", ".feat", ".npz")
# Approximate memory in bytes per word of the vocabulary if the words are named by their indices.
_BYTES_PER_WORD = 64
# Regular expression for words with at least three letters in any alphabet, without digits and underscores.
_WORD = r"(?u)\b[^\W\d_]{3,}\b"


def read_documents(
    path: Path, *, column: str | None = None, vocabulary: Path | None = None, max_words: int = 2000
) -> tuple[Any, list[str]]:
    """Read documents and count the words in each document.

    Parameters
    ----------
    path : Path
        One of

        - a folder of .txt files with one document each,
        - a .txt file with one document per line,
        - a .csv file with a text column,
        - a file of counts (.svm, .svmlight, .libsvm, .feat) with one line ``label word:count word:count ...`` per
          document, where words are given by their indices,
        - a sparse matrix of counts saved by SciPy (.npz).
    column : str, optional
        Name of the text column in a .csv file. Default: the only column, or the column named ``text``.
    vocabulary : Path, optional
        Vocabulary file for a file of counts. The first field on each line is a word. If None, word indices are used as
        words.
    max_words : int
        Maximum size of the vocabulary when reading text. The most frequent words are kept, excluding English stop
        words.

    Returns
    -------
    counts : sparse matrix of shape (n, n_words)
        Number of occurrences of each word in each document.
    words : list of str
        Vocabulary.
    """
    if path.suffix.lower() in COUNT_SUFFIXES and path.is_file():
        with np.errstate(over="ignore"):  # Counts too large for float32 become infinite and raise an error below.
            counts, first = (_npz(path), 0) if path.suffix.lower() == ".npz" else _svmlight(path)
        if not np.isfinite(counts.data).all():
            raise InputError(f"{path} contains counts that are not finite")
        if vocabulary is None:
            return counts, [str(number) for number in range(first, first + counts.shape[1])]
        words = [line.split()[0] for line in _lines(vocabulary) if line.strip()]
        if len(words) < counts.shape[1]:
            raise InputError(f"{vocabulary} has {len(words):,} words, but {path} has counts for {counts.shape[1]:,}")
        counts.resize(counts.shape[0], len(words))
        return counts, words
    if vocabulary is not None:
        suffixes = ", ".join(COUNT_SUFFIXES)
        raise InputError(f"a vocabulary can only be used with word counts ({suffixes}), but {path} contains text")
    texts = [text for text in _texts(path, column) if text.strip()]
    if not texts:
        raise InputError(
            f"{path} contains no documents; specify a folder of .txt files or a file with one document per line"
        )
    from sklearn.feature_extraction.text import CountVectorizer

    # Ignore words that occur in a single document, which carry no information about other documents.
    vectorizer = CountVectorizer(
        stop_words="english", token_pattern=_WORD, max_features=max_words, min_df=min(2, len(texts))
    )
    try:
        counts = vectorizer.fit_transform(texts)
    except ValueError as error:
        raise InputError(
            f"{path} has no word of three or more letters that occurs in at least two of its {len(texts):,} documents"
        ) from error
    return counts, vectorizer.get_feature_names_out().tolist()


def _lines(path: Path) -> Iterator[str]:
    with reading(path), path.open(encoding="utf-8-sig") as file:
        try:
            yield from file
        except UnicodeDecodeError:
            raise InputError(f"{path} is not a UTF-8 text file") from None


def _texts(path: Path, column: str | None) -> Iterator[str]:
    if path.is_dir():
        for file in sorted(path.rglob("*.txt")):
            yield "".join(_lines(file))
    elif path.suffix.lower() == ".csv":
        yield from _column(path, column)
    elif path.suffix.lower() == ".txt":
        yield from _lines(path)
    else:
        path.stat()  # Raises an error if the file does not exist.
        raise InputError(f"{path} must be a folder or end in one of .txt, .csv, {', '.join(COUNT_SUFFIXES)}")


def _column(path: Path, column: str | None) -> Iterator[str]:
    with reading(path):
        text = read_text(path)[1]
    dialect = Dialect.of(text)
    check_records(text, dialect, path)
    rows = ([value_of(field) for field in row.fields] for row in records(text, dialect.separator) if not row.is_blank)
    names = next(rows)
    wanted = column or (names[0] if len(names) == 1 else "text")
    if wanted not in names:
        hint = "" if column else "; use column=NAME to specify the text column"
        raise InputError(f"{path} has no column '{wanted}', only {names}{hint}")
    place = names.index(wanted)
    for row in rows:
        yield row[place]


def _svmlight(path: Path) -> tuple[Any, int]:
    """Return the counts and the index of the first word, which is 0 if the file contains index 0, or 1 otherwise."""
    # scikit-learn's reader requires sorted indices, but many files are not sorted.
    ends = [0]
    words = []
    counts = []
    for number, line in enumerate(_lines(path), start=1):
        for pair in line.partition("#")[0].split()[1:]:
            word, _, count = pair.partition(":")
            try:
                words.append(int(word))
                counts.append(float(count))
            except ValueError:
                raise InputError(f"{path}, line {number}: expected word:count, got {pair!r:.40}") from None
        ends.append(len(words))
    if not words:
        raise InputError(f"{path} contains no counts; lines must have the form 'label word:count word:count ...'")
    first = 0 if min(words) == 0 else 1
    if min(words) < first:
        raise InputError(f"word indices must start at 0 or 1, but {path} contains index {min(words)}")
    _check_words(path, max(words))
    columns = np.array(words) - first
    matrix = sparse.csr_matrix((counts, columns, ends), shape=(len(ends) - 1, int(columns.max()) + 1), dtype=np.float32)
    matrix.sum_duplicates()
    return matrix, first


def _npz(path: Path) -> Any:
    """Read a sparse matrix written by `scipy.sparse.save_npz`.

    SciPy's own reader is not used because it allocates arrays of any size that the file declares.
    """
    data, indices, indptr, shape = (read_npz(path, key) for key in ("data", "indices", "indptr", "shape"))
    with reading(path):
        with zipfile.ZipFile(path) as archive, archive.open("format.npy") as file:
            kind = file.read(1000)[-3:]
        if kind != b"csr":
            raise InputError(
                f"expected a CSR matrix in {path}, but got {kind!r}; convert the matrix with tocsr() before saving it"
            )
        n_documents, n_words = (int(size) for size in shape)
        _check_words(path, n_words)
        matrix = sparse.csr_matrix((data.astype(np.float32), indices, indptr), shape=(n_documents, n_words))
        matrix.check_format(full_check=True)
    return matrix


def _check_words(path: Path, n_words: int) -> None:
    """Raise InputError if a vocabulary of `n_words` words would exceed the memory limit for the file at `path`."""
    Budget(path).spend(_BYTES_PER_WORD * n_words, f"{path}: a vocabulary of {n_words:,} words")
