"""Convert class labels, some of which can be unknown, to class indices and one-hot rows, and save classes."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from mvrbm.errors import StorageError
from mvrbm.estimators.batches import Array
from mvrbm.io.untrusted import ALLOWANCE
from mvrbm.random import RandomSource


class Labeled(NamedTuple):
    """Samples with class indices and weights."""

    samples: Tensor  # (n, *shape), bytes or floats
    codes: Tensor  # (n,), class index of each sample
    weights: Tensor  # (n,)


class PartialLabels(NamedTuple):
    """Labels of n samples, some of which can be unknown."""

    values: Array  # (number of known labels,)
    known: Array  # (n,), bool

    @classmethod
    def of(cls, y: Array) -> Self | None:
        """Return the labels in a vector of integers, booleans, strings or objects. Return None for other arrays.

        None, NaN and ``pandas.NA`` are unknown labels. Floats are labels if all known values are whole numbers.
        """
        if y.ndim != 1 or y.dtype.kind not in "biuUOf":
            return None
        if y.dtype.kind in "biuU":
            return cls(y, np.ones(len(y), dtype=bool))
        known = np.array([is_known(value) for value in y], dtype=bool)
        values = np.array(y[known].tolist())
        if values.dtype.kind == "f":
            if not (np.isfinite(values) & (values == np.round(values))).all():
                return None
            values = values.astype(np.int64)
        return cls(values, known)

    def one_hot(self, classes: Array) -> Array:
        """Return uint8 one-hot rows of shape (n, n_classes). If labels are unknown, return floats with NaN rows."""
        rows: Array = np.eye(len(classes), dtype=np.uint8)[label_codes(self.values, classes, None).long().numpy()]
        if self.known.all():
            return rows
        all_rows = np.full((len(self.known), len(classes)), np.nan, np.float32)
        all_rows[self.known] = rows
        return all_rows


def is_known(value: Any) -> bool:
    """Return False for missing values (None, NaN or ``pandas.NA``) and True otherwise."""
    # NaN is not equal to itself, and comparing pandas' NA does not return a bool.
    equal = value == value
    return value is not None and isinstance(equal, bool | np.bool_) and bool(equal)


def label_vector(y: Any) -> Any:
    """Convert one-hot rows of shape (n, n_classes) to class indices of shape (n,). Return other labels unchanged."""
    array = np.asarray(y)
    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind not in "biuf":
        return y
    one_hot = np.isin(array, (0, 1)).all() and (array.sum(1) == 1).all()
    return array.argmax(1) if one_hot else y


def label_codes(labels: Any, classes: Any, n: int | None) -> Tensor:
    """Return the index of each label in `classes`, as a tensor of shape (n,).

    `labels` is a single label for all `n` samples, or a sequence with one label per sample. A string also matches a
    class of another type with the same string representation. For example, ``"7"`` matches 7.
    """
    given = np.asarray(labels)
    known = list(np.asarray(classes).tolist())
    code_of = {str(value): code for code, value in enumerate(known)}
    code_of |= {value: code for code, value in enumerate(known)}
    wanted = given.reshape(-1).tolist()
    unknown = [value for value in wanted if value not in code_of]
    if unknown:
        raise ValueError(f"label must be one of {known}, got {unknown[0]!r}")
    codes = torch.tensor([code_of[value] for value in wanted])
    if given.ndim == 0:
        return codes.expand(1 if n is None else n)
    if given.ndim != 1 or n not in (None, len(given)):
        raise ValueError(f"label must be a single label or n = {n} labels, got an array of shape {given.shape}")
    return codes


def draw_codes(counts: Array, n: int, rng: RandomSource) -> Tensor:
    """Draw `n` class indices with probabilities proportional to `counts`, an array of shape (n_classes,)."""
    ends = torch.from_numpy(np.cumsum(counts, dtype=np.float64))
    drawn = rng.uniform((n,), ends) * ends[-1]
    return torch.searchsorted(ends, drawn, right=True).clamp(max=int(np.flatnonzero(counts)[-1]))


def describe_classes(classes: Array) -> dict[str, Any]:
    """Convert classes to a JSON-serializable description. Use :func:`classes_from` to restore the classes."""
    values = classes.tolist()
    kinds = {type(value) for value in values}
    if not kinds <= {bool, int, float, str}:
        names = sorted(kind.__name__ for kind in kinds)
        raise StorageError(f"only labels that are numbers or strings can be saved, got types {names}")
    return {"dtype": classes.dtype.str, "values": values}


def classes_from(described: Mapping[str, Any]) -> Array:
    """Restore classes from their saved description."""
    dtype = np.dtype(str(described["dtype"]))
    values = list(described["values"])
    if dtype.kind not in "biufUO":
        raise StorageError(f"labels cannot have dtype {dtype}")
    if dtype.itemsize * len(values) > ALLOWANCE:
        raise StorageError(f"{len(values):,} labels of dtype {dtype} exceed the limit of {ALLOWANCE:,} bytes")
    labels = np.asarray(values, dtype=dtype)
    if labels.ndim != 1:
        raise StorageError(f"labels must be a list of values, got an array of shape {labels.shape}")
    return labels


def class_counts_from(described: Any, n_classes: int) -> Array | None:
    """Restore the class counts from their saved description, or return None if there is none."""
    if described is None:
        return None
    counts = np.asarray(described, dtype=np.float64)
    if counts.shape != (n_classes,) or not (np.isfinite(counts).all() and counts.min() >= 0 and counts.sum() > 0):
        raise StorageError(f"class_count must contain {n_classes} nonnegative numbers, got {described!r:.100}")
    return counts
