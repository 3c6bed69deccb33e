"""Convert tables with categorical columns to numeric rows, with one column per category, and back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mvrbm.errors import StorageError
from mvrbm.estimators.batches import Array
from mvrbm.estimators.inputs import as_array, is_number_type
from mvrbm.estimators.labels import classes_from, describe_classes, is_known
from mvrbm.io.dates import date_formats, days_of, fill_dates

# A text column with more categories than this, and with more categories than half of its known entries, is copied.
_MANY_CATEGORIES = 20


@dataclass
class TableEncoding:
    """Numeric encoding of a table with categorical columns.

    Arrays with more than two axes are flattened to rows. Such arrays have no categorical columns, and all of their
    entries are kept.

    Parameters
    ----------
    categories : dict of int to array
        Sorted categories of each categorical column, keyed by column index.
    dates : dict of int to str
        Format of each date column, keyed by column index. See :mod:`mvrbm.io.dates`.
    copied : list of int
        Indices of the columns that are not part of the model and are copied unchanged.
    kept : boolean array
        Mask of the columns to encode: either the columns with known entries or all columns, excluding the copied
        columns.
    """

    categories: dict[int, Array] = field(default_factory=dict)
    dates: dict[int, str] = field(default_factory=dict)
    copied: list[int] = field(default_factory=list)
    kept: Array = field(default_factory=lambda: np.ones(0, dtype=bool))

    @classmethod
    def of(cls, X: Any, categorical: Any, dayfirst: bool | None = None) -> TableEncoding:
        """Create an encoding for a table by finding its categorical columns and their categories.

        `categorical` and `dayfirst` are the values of the imputer's parameters `categorical_features` and `dayfirst`.
        """
        if dayfirst not in (None, True, False):
            raise ValueError(f"dayfirst must be True, False or None, got {dayfirst!r}")
        if _is_frame(X) and not X.columns.is_unique:
            name = X.columns[X.columns.duplicated()][0]
            raise ValueError(f"X has several columns named {name!r}; rename them")
        found = cls()
        ambiguous = []
        for column in _categorical_columns(X, categorical).tolist():
            # Only columns that were found by their dtype can turn out not to be categorical.
            automatic = isinstance(categorical, str) and getattr(X.dtypes.iloc[column], "name", "") != "category"
            if automatic and (formats := date_formats(X.iloc[:, column])):
                found.dates[column] = formats[-1 if dayfirst else 0]
                if len(formats) > 1 and dayfirst is None:
                    ambiguous.append(str(X.columns[column]))
                continue
            values, known = _known_values(X, column)
            categories = np.unique(values)
            if automatic and len(categories) > max(_MANY_CATEGORIES, known.sum() / 2):
                found.copied.append(column)
            else:
                found.categories[column] = categories
        if ambiguous:
            warnings.warn(
                f"dates in columns {ambiguous} are read month first, but could also be read day first; pass "
                "dayfirst=True or dayfirst=False",
                stacklevel=4,
            )
        if found.copied:
            names = [str(X.columns[column]) for column in found.copied]
            warnings.warn(
                f"columns {names} are excluded from the model because more than half of their values are distinct. "
                "To use them as categories, convert them to dtype 'category'",
                stacklevel=4,
            )
        return found

    @property
    def is_mixed(self) -> bool:
        """Whether any column is not numeric."""
        return bool(self.categories or self.dates or self.copied)

    @property
    def returned(self) -> Array:
        """Mask of the columns in the result, which are the kept and the copied columns."""
        mask = self.kept.copy()
        mask[self.copied] = True
        return mask

    def learn_kept(self, rows: Array, *, keep_all: bool) -> None:
        """Set `kept` to the columns with known entries, or to all columns if `keep_all` is True.

        `rows` is the output of :meth:`to_numbers` for the training data.
        """
        self.kept = keep_all | np.asarray(~np.isnan(rows).all(axis=0))
        self.kept[self.copied] = False

    @property
    def widths(self) -> list[int]:
        """Number of encoded columns for each column that is kept."""
        return [len(self.categories[i]) if i in self.categories else 1 for i in np.flatnonzero(self.kept).tolist()]

    def to_numbers(self, X: Any, *, allow_new: bool = False) -> tuple[Any, tuple[int, ...]]:
        """Replace categories with their indices. Return the numeric rows and the shape of a sample.

        If `allow_new` is True, categories that were not in the training data are assigned an index that :meth:`encode`
        converts to zeros. Otherwise, such categories raise ValueError.
        """
        if self.is_mixed:
            columns = range(np.shape(X)[1])
            numbers = np.column_stack([self._column_of_numbers(X, column, allow_new) for column in columns])
            if _is_frame(X):
                return type(X)(numbers, columns=X.columns, index=X.index), numbers.shape[1:]
            return numbers, numbers.shape[1:]
        X = as_array(X)
        if X.ndim <= 2:
            return X, tuple(X.shape[1:])
        if 0 in X.shape:
            raise ValueError(f"the data must not be empty, got shape {tuple(X.shape)}")
        array = np.asarray(X)
        return array.reshape(len(array), -1), array.shape[1:]

    def _column_of_numbers(self, X: Any, column: int, allow_new: bool) -> Array:
        if column in self.copied:
            return np.full(len(X), np.nan)
        if column in self.dates:
            return days_of(X.iloc[:, column], self.dates[column])
        values, known = _known_values(X, column)
        numbers = np.full(len(known), np.nan)
        is_categorical = column in self.categories
        numbers[known] = self._codes(X, column, values, allow_new) if is_categorical else _floats(X, column, values)
        return numbers

    def _codes(self, X: Any, column: int, values: Array, allow_new: bool) -> Array:
        """Convert the values in a categorical column to category indices."""
        categories = self.categories[column]
        places = np.searchsorted(categories, values).clip(max=max(len(categories) - 1, 0))
        is_new = categories[places] != values if len(categories) else np.ones(len(values), dtype=bool)
        unknown = values[is_new]
        if allow_new:
            return np.where(is_new, len(categories), places)
        if len(unknown):
            name = _name(X, column)
            raise ValueError(
                f"column {name!r} has categories that were not in the training data, such as {str(unknown[0])!r}; "
                "replace them with missing values, or train on data that contains them"
            )
        return places

    def encode(self, rows: Array) -> Array:
        """Drop columns that are not kept, and replace categorical columns with one-hot columns.

        A missing category becomes NaN in all of its one-hot columns.
        """
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
        """Convert encoded rows to the format of `like`. Categorical columns contain the most probable categories."""
        if not self.is_mixed:
            return rows.reshape(len(rows), *shape) if math.prod(shape) == rows.shape[1] else rows
        columns: list[Any] = []
        end = 0
        for column in np.flatnonzero(self.returned).tolist():
            if column in self.copied:
                columns.append(like.iloc[:, column])
                continue
            width = len(self.categories[column]) if column in self.categories else 1
            part = rows[:, end : end + width]
            end += width
            if column in self.dates:
                columns.append(fill_dates(like.iloc[:, column], self.dates[column], part[:, 0]))
            else:
                columns.append(self.categories[column][part.argmax(1)] if column in self.categories else part[:, 0])
        if _is_frame(like):
            names = list(like.columns[self.returned])
            return type(like)(dict(zip(names, columns, strict=True)), index=like.index)
        table = np.empty((len(rows), len(columns)), dtype=object)
        for place, values in enumerate(columns):
            table[:, place] = values
        return table

    def with_copied(self, rows: Array, like: Any) -> Array:
        """Insert a column for each copied column into encoded rows: 0 for known entries and NaN for missing ones."""
        if not self.copied:
            return rows
        starts = np.cumsum([0, *self.widths])
        places = [int(starts[self.kept[:column].sum()]) for column in self.copied]
        columns = [np.where(_known_values(like, column)[1], 0.0, np.nan) for column in self.copied]
        return np.insert(rows, places, np.column_stack(columns), axis=1)

    def describe(self) -> dict[str, Any]:
        """Return a JSON-serializable description of the encoding."""
        categories = {str(column): describe_classes(values) for column, values in self.categories.items()}
        described: dict[str, Any] = {"categories": categories, "kept": self.kept.tolist()}
        if self.dates:
            described["dates"] = {str(column): date for column, date in self.dates.items()}
        if self.copied:
            described["copied"] = self.copied
        return described

    @classmethod
    def from_description(cls, described: Any, shape: Sequence[int]) -> TableEncoding:
        """Restore an encoding for samples of the given shape from the output of :meth:`describe`."""
        n_columns = math.prod(shape)
        categories = {int(column): classes_from(entry) for column, entry in described["categories"].items()}
        dates = {int(column): str(date) for column, date in described.get("dates", {}).items()}
        copied = [int(column) for column in described.get("copied", [])]
        kept = np.asarray(described["kept"], dtype=bool)
        if kept.shape != (n_columns,) or not {*categories, *dates, *copied} <= set(range(n_columns)):
            raise StorageError(
                f"expected {n_columns} columns, got {kept.size} (categorical columns: {sorted(categories)})"
            )
        if kept[copied].any():
            raise StorageError(f"columns {copied} cannot be both copied and encoded")
        if len(shape) > 1 and (categories or dates or copied or not kept.all()):
            raise StorageError(f"samples of shape {tuple(shape)} cannot have categorical or dropped columns")
        return cls(categories, dates, copied, kept)


def _is_frame(X: Any) -> bool:
    return hasattr(X, "iloc")


def _name(X: Any, column: int) -> Any:
    """Return the name of a data frame column, or the index of an array column."""
    return X.columns[column] if _is_frame(X) else column


def _categorical_columns(X: Any, categorical: Any) -> Array:
    """Return the indices of the categorical columns, as an array of int."""
    none = np.zeros(0, dtype=int)
    if categorical is None:
        return none
    if isinstance(categorical, str):
        if categorical != "from_dtype":
            raise ValueError(
                f"categorical_features must be 'from_dtype', a list of columns or None, got {categorical!r}"
            )
        if not _is_frame(X):
            return none
        return np.flatnonzero([not is_number_type(dtype) for dtype in X.dtypes])
    given = np.asarray(categorical)
    if given.dtype.kind in "OU":
        return _columns_by_name(X, given)
    return np.flatnonzero(given) if given.dtype.kind == "b" else given.astype(int)


def _columns_by_name(X: Any, names: Array) -> Array:
    if not _is_frame(X):
        raise ValueError("categorical_features contains column names, but the data is not a data frame")
    missing = sorted(set(names.tolist()) - set(X.columns))
    if missing:
        raise ValueError(f"categorical_features contains columns that are not in the data: {missing}")
    return np.array([list(X.columns).index(name) for name in names], dtype=int)


def _floats(X: Any, column: int, values: Array) -> Array:
    try:
        return values.astype(float)
    except (TypeError, ValueError):
        raise ValueError(
            f"column {_name(X, column)!r} has non-numeric values such as {values[:3].tolist()!r}. If the column is "
            "categorical, add it to categorical_features"
        ) from None


def _known_values(X: Any, column: int) -> tuple[Array, Array]:
    """Return the known values in a column and a mask of its known entries."""
    values = np.asarray(X.iloc[:, column] if _is_frame(X) else np.asarray(X)[:, column], dtype=object)
    known = np.array([is_known(value) for value in values], dtype=bool)
    found = values[known]
    has_text = any(isinstance(value, str) for value in found)
    return (found.astype(str) if has_text else np.array(found.tolist())), known
