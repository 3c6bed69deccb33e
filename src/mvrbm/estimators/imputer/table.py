"""Tables with categorical columns as rows of numbers, with one column per category, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mvrbm.errors import StorageError
from mvrbm.estimators.batches import Array
from mvrbm.estimators.labels import classes_from, describe_classes


@dataclass
class TableEncoding:
    """Encoding of the columns of a table as numbers.

    Arrays with more than two axes are encoded as rows. They have no categorical columns, and all columns are kept.

    Parameters
    ----------
    categories : dict of int to array
        Sorted categories, by the index of their column.
    kept : boolean array
        True for the columns of the encoding: columns with known entries, or all columns.
    """

    categories: dict[int, Array] = field(default_factory=dict)
    kept: Array = field(default_factory=lambda: np.ones(0, dtype=bool))

    @classmethod
    def of(cls, X: Any, categorical: Any) -> TableEncoding:
        """Find the categorical columns of a table and their categories.

        `categorical` is the parameter `categorical_features` of the imputer.
        """
        columns = _categorical_columns(X, categorical)
        return cls({int(column): np.unique(_known_values(X, int(column))[0]) for column in columns})

    def learn_kept(self, rows: Array, *, keep_all: bool) -> None:
        """Drop columns without any known entry, unless all columns are kept. `rows` come from :meth:`to_numbers`."""
        self.kept = keep_all | np.asarray(~np.isnan(rows).all(axis=0))

    @property
    def widths(self) -> list[int]:
        """Number of columns in the encoding of each column that is kept."""
        return [len(self.categories[i]) if i in self.categories else 1 for i in np.flatnonzero(self.kept).tolist()]

    def to_numbers(self, X: Any) -> tuple[Any, tuple[int, ...]]:
        """Return data as rows, with categories replaced by their indices, and the shape of a sample."""
        if self.categories:
            numbers = np.column_stack([self._column_of_numbers(X, column) for column in range(np.shape(X)[1])])
            if _is_frame(X):
                return type(X)(numbers, columns=X.columns, index=X.index), numbers.shape[1:]
            return numbers, numbers.shape[1:]
        if not hasattr(X, "ndim"):
            X = np.asarray(X)
        if X.ndim <= 2:
            return X, tuple(X.shape[1:])
        if 0 in X.shape:
            raise ValueError(f"the data is empty: it has shape {tuple(X.shape)}")
        array = np.asarray(X)
        return array.reshape(len(array), -1), array.shape[1:]

    def _column_of_numbers(self, X: Any, column: int) -> Array:
        values, known = _known_values(X, column)
        numbers = np.full(len(known), np.nan)
        numbers[known] = self._codes(X, column, values) if column in self.categories else _floats(X, column, values)
        return numbers

    def _codes(self, X: Any, column: int, values: Array) -> Array:
        """Return the indices of categories."""
        categories = self.categories[column]
        places = np.searchsorted(categories, values).clip(max=max(len(categories) - 1, 0))
        unknown = values[categories[places] != values] if len(categories) else values
        if len(unknown):
            name = _name(X, column)
            raise ValueError(f"column {name!r} has categories that fit has not seen, such as {str(unknown[0])!r}")
        return places

    def encode(self, rows: Array) -> Array:
        """Return rows with one-hot columns in place of categorical columns. NaN marks missing entries."""
        if not self.categories:
            return rows if bool(self.kept.all()) else rows[:, self.kept]
        parts: list[Array] = []
        for column in np.flatnonzero(self.kept).tolist():
            numbers = rows[:, column : column + 1]
            if column in self.categories:
                one_hot = (numbers == np.arange(len(self.categories[column]))).astype(rows.dtype)
                numbers = np.where(np.isnan(numbers), np.nan, one_hot)
            parts.append(numbers)
        return np.concatenate(parts, axis=1) if parts else rows[:, self.kept]

    def decode(self, rows: Array, like: Any, shape: Sequence[int]) -> Any:
        """Return encoded rows in the form of the data `like`, with the most probable categories."""
        if not self.categories:
            return rows.reshape(len(rows), *shape) if math.prod(shape) == rows.shape[1] else rows
        columns = []
        end = 0
        for column, width in zip(np.flatnonzero(self.kept).tolist(), self.widths, strict=True):
            part = rows[:, end : end + width]
            end += width
            columns.append(self.categories[column][part.argmax(1)] if column in self.categories else part[:, 0])
        if _is_frame(like):
            names = list(like.columns[self.kept])
            return type(like)(dict(zip(names, columns, strict=True)), index=like.index)
        table = np.empty((len(rows), len(columns)), dtype=object)
        for place, values in enumerate(columns):
            table[:, place] = values
        return table

    def describe(self) -> dict[str, Any]:
        """Return the encoding in a form that JSON can hold."""
        categories = {str(column): describe_classes(values) for column, values in self.categories.items()}
        return {"categories": categories, "kept": self.kept.tolist()}

    @classmethod
    def from_description(cls, described: Any, shape: Sequence[int]) -> TableEncoding:
        """Return the encoding of samples of a shape from its saved description."""
        n_columns = math.prod(shape)
        categories = {int(column): classes_from(entry) for column, entry in described["categories"].items()}
        kept = np.asarray(described["kept"], dtype=bool)
        if kept.shape != (n_columns,) or not set(categories) <= set(range(n_columns)):
            raise StorageError(
                f"categorical columns {sorted(categories)} or {kept.size} saved columns do not fit {n_columns} columns"
            )
        if len(shape) > 1 and (categories or not kept.all()):
            raise StorageError(
                f"samples of shape {tuple(shape)} cannot have categorical columns or columns that are dropped"
            )
        return cls(categories, kept)


def _is_frame(X: Any) -> bool:
    return hasattr(X, "iloc")


def _name(X: Any, column: int) -> Any:
    """Return the name of a column of a data frame, or its index in an array."""
    return X.columns[column] if _is_frame(X) else column


def _categorical_columns(X: Any, categorical: Any) -> Array:
    """Return the indices of the categorical columns."""
    none = np.zeros(0, dtype=int)
    if categorical is None:
        return none
    if isinstance(categorical, str):
        if categorical != "from_dtype":
            raise ValueError(f"categorical_features must be 'from_dtype', columns or None, got {categorical!r}")
        if not _is_frame(X):
            return none
        return np.flatnonzero([getattr(dtype, "kind", "O") not in "iuf" for dtype in X.dtypes])
    given = np.asarray(categorical)
    if given.dtype.kind in "OU":
        return _columns_by_name(X, given)
    return np.flatnonzero(given) if given.dtype.kind == "b" else given.astype(int)


def _columns_by_name(X: Any, names: Array) -> Array:
    if not _is_frame(X):
        raise ValueError("categorical_features names columns, but the data is not a data frame")
    missing = sorted(set(names.tolist()) - set(X.columns))
    if missing:
        raise ValueError(f"categorical_features names columns that the data does not have: {missing}")
    return np.array([list(X.columns).index(name) for name in names], dtype=int)


def _floats(X: Any, column: int, values: Array) -> Array:
    try:
        return values.astype(float)
    except (TypeError, ValueError):
        raise ValueError(
            f"column {_name(X, column)!r} has values that are not numbers: {values[:3].tolist()!r}; name it in "
            "categorical_features"
        ) from None


def _known_values(X: Any, column: int) -> tuple[Array, Array]:
    """Return the known values of a column, and a mask of its known entries."""
    values = np.asarray(X.iloc[:, column] if _is_frame(X) else np.asarray(X)[:, column], dtype=object)
    known = np.array([_is_known(value) for value in values], dtype=bool)
    found = values[known]
    has_text = any(isinstance(value, str) for value in found)
    return (found.astype(str) if has_text else np.array(found.tolist())), known


def _is_known(value: Any) -> bool:
    """Return False for None, for NaN (not equal to itself) and for pandas' NA (whose comparison is not a bool)."""
    equal = value == value
    return value is not None and isinstance(equal, bool | np.bool_) and bool(equal)
