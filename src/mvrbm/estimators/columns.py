"""Columns of tables: which of them are categories, and the same table as numbers, with one column per category."""

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
class Columns:
    """The columns of a table, or of the entries of larger arrays, none of which are categories.

    Parameters
    ----------
    categories : dict of int to array
        Sorted categories by the number of their column.
    kept : boolean array
        Columns that have known entries, or all of them.
    """

    categories: dict[int, Array] = field(default_factory=dict)
    kept: Array = field(default_factory=lambda: np.ones(0, dtype=bool))

    @classmethod
    def of(cls, X: Any, categorical: Any) -> Columns:
        """Return the columns of a table; see the parameter `categorical_features` of the imputer."""
        is_frame, found = hasattr(X, "iloc"), np.zeros(0, dtype=int)
        if isinstance(categorical, str):
            if categorical != "from_dtype":
                raise ValueError(f"categorical_features must be 'from_dtype', columns or None, got {categorical!r}")
            if is_frame:
                found = np.flatnonzero([getattr(dtype, "kind", "O") not in "iuf" for dtype in X.dtypes])
        elif categorical is not None:
            given = np.asarray(categorical)
            if given.dtype.kind in "OU":
                if not is_frame:
                    raise ValueError("categorical_features has names of columns, but the data is not a data frame")
                missing = sorted(set(given.tolist()) - set(X.columns))
                if missing:
                    raise ValueError(f"categorical_features names columns that the data does not have: {missing}")
                given = np.array([list(X.columns).index(name) for name in given], dtype=int)
            found = np.flatnonzero(given) if given.dtype.kind == "b" else given.astype(int)
        return cls({int(i): np.unique(_values(X, int(i))[0]) for i in found})

    def to_numbers(self, X: Any) -> tuple[Any, tuple[int, ...]]:
        """Return data with categories as their numbers, as rows, and the shape of a sample."""
        if self.categories:
            columns = range(np.shape(X)[1])
            numbers = np.column_stack([self._numbers(X, i) for i in columns])
            if hasattr(X, "iloc"):
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

    def _numbers(self, X: Any, column: int) -> Array:
        values, known = _values(X, column)
        if column not in self.categories:
            numbers = np.full(len(known), np.nan)
            try:
                numbers[known] = values.astype(float)
            except (TypeError, ValueError):
                what = f"column {_name(X, column)!r} has values that are not numbers: {values[:3].tolist()!r}"
                raise ValueError(f"{what}; name it in categorical_features") from None
            return numbers
        known_ones = self.categories[column]
        places = np.searchsorted(known_ones, values).clip(max=max(len(known_ones) - 1, 0))
        unknown = values[known_ones[places] != values] if len(known_ones) else values
        if len(unknown):
            name = _name(X, column)
            raise ValueError(f"column {name!r} has categories that were not there in fit, such as {str(unknown[0])!r}")
        numbers = np.full(len(known), np.nan)
        numbers[known] = places
        return numbers

    def learn(self, rows: Array, keep_all: bool) -> None:
        """Take note of the columns without any known entry, from rows of numbers."""
        self.kept = keep_all | np.asarray(~np.isnan(rows).all(axis=0))

    @property
    def widths(self) -> list[int]:
        """Number of columns of numbers of each column that is kept."""
        return [len(self.categories.get(int(i), "1")) for i in np.flatnonzero(self.kept)]

    def expand(self, rows: Array) -> Array:
        """Return rows with one column per category, NaN where the category is missing."""
        parts: list[Array] = []
        for i in np.flatnonzero(self.kept).tolist() if self.categories else []:
            numbers = rows[:, i : i + 1]
            if i in self.categories:
                one_hot = (numbers == np.arange(len(self.categories[i]))).astype(rows.dtype)
                numbers = np.where(np.isnan(numbers), np.nan, one_hot)
            parts.append(numbers)
        if parts:
            return np.concatenate(parts, axis=1)
        return rows if bool(self.kept.all()) else rows[:, self.kept]

    def restore(self, rows: Array, like: Any, shape: Sequence[int]) -> Any:
        """Return rows that :meth:`expand` made in the form of the data, with the most probable categories."""
        if not self.categories:
            return rows.reshape(len(rows), *shape) if math.prod(shape) == rows.shape[1] else rows
        ends, found = np.cumsum(self.widths), []
        for end, width, i in zip(ends, self.widths, np.flatnonzero(self.kept).tolist(), strict=True):
            part = rows[:, end - width : end]
            found.append(self.categories[i][part.argmax(1)] if i in self.categories else part[:, 0])
        if hasattr(like, "iloc"):
            names = list(like.columns[self.kept])
            return type(like)(dict(zip(names, found, strict=True)), index=like.index)
        table = np.empty((len(rows), len(found)), dtype=object)
        for place, values in enumerate(found):
            table[:, place] = values
        return table

    def describe(self) -> dict[str, Any]:
        """Return the columns as plain values."""
        categories = {str(i): describe_classes(values) for i, values in self.categories.items()}
        return {"categories": categories, "kept": self.kept.tolist()}

    @classmethod
    def from_description(cls, described: Any, shape: Sequence[int]) -> Columns:
        """Return the columns of samples of a shape from plain values."""
        n_columns = math.prod(shape)
        categories = {int(i): classes_from(entry) for i, entry in described["categories"].items()}
        kept = np.asarray(described["kept"], dtype=bool)
        if kept.shape != (n_columns,) or not set(categories) <= set(range(n_columns)):
            raise StorageError(
                f"columns of categories, {sorted(categories)}, or kept ones are not those of {n_columns}"
            )
        if len(shape) > 1 and (categories or not kept.all()):
            raise StorageError(
                f"samples of shape {tuple(shape)} have no columns of categories, and all entries are kept"
            )
        return cls(categories, kept)


def _name(X: Any, column: int) -> Any:
    """Return the name of a data frame's column, or its number in an array."""
    return X.columns[column] if hasattr(X, "iloc") else column


def _values(X: Any, column: int) -> tuple[Array, Array]:
    """Return the known values of a column, and which of its entries are known."""
    values = np.asarray(X.iloc[:, column] if hasattr(X, "iloc") else np.asarray(X)[:, column], dtype=object)
    known = np.array([_is_known(value) for value in values], dtype=bool)
    found = values[known]
    return (found.astype(str) if any(isinstance(value, str) for value in found) else np.array(found.tolist())), known


def _is_known(value: Any) -> bool:
    """Return False for None, for NaN, which is not equal to itself, and for pandas' NA, which compares as neither."""
    equal = value == value
    return value is not None and isinstance(equal, bool | np.bool_) and bool(equal)
