"""Functions that validate individual arguments, such as integers, numbers, choices and shapes.

:mod:`mvrbm.estimators.inputs` validates data arrays. Each unit validates the values in its layer.
"""

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Choice = TypeVar("Choice")


# Maximum size or count, well below the largest signed 64-bit integer.
_LARGEST_COUNT = 2**62


def whole_number(value: Any, name: str, least: int = 1, most: int = _LARGEST_COUNT) -> int:
    """Return `value` as an int, or raise ValueError if it is not an integer from `least` to `most`."""
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or whole != value or not least <= whole <= most:
        unlimited = most == _LARGEST_COUNT and (whole is None or whole <= most)
        wanted = f"of at least {least}" if unlimited else f"from {least} to {most:,}"
        raise ValueError(f"{name} must be a whole number {wanted}, got {value!r}")
    return whole


def number(
    value: Any,
    name: str,
    low: float = 0.0,
    high: float = math.inf,
    *,
    exclude_low: bool = False,
    exclude_high: bool = True,
) -> float:
    """Return `value` as a float, or raise ValueError if it is not a finite number between `low` and `high`.

    `exclude_low` and `exclude_high` specify whether the bounds themselves are excluded.
    """
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    above = found > low if exclude_low else found >= low
    below = found < high if exclude_high else found <= high
    if above and below and math.isfinite(found):
        return found
    lower = "positive" if exclude_low and low == 0 else f"{'above' if exclude_low else 'at least'} {low:g}"
    upper = "" if math.isinf(high) else f" and {'below' if exclude_high else 'at most'} {high:g}"
    raise ValueError(f"{name} must be {lower}{upper}, got {value!r}")


def truth_value(value: Any, name: str) -> bool:
    """Return `value` as a bool, or raise ValueError if it is neither True nor False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def choice(value: Choice, name: str, options: Iterable[Choice]) -> Choice:
    """Return `value`, or raise ValueError if it is not in `options`."""
    options = list(options)
    if value not in options:
        given = str(value) if isinstance(value, str) else value  # The repr of a NumPy string includes its type.
        raise ValueError(f"{name} must be one of {options}, got {given!r}")
    return value


def as_shape(shape: int | Sequence[int], name: str) -> tuple[int, ...]:
    """Return `shape` as a tuple, or raise ValueError if it is empty or if any size is not a positive integer."""
    try:
        sizes = tuple(operator.index(size) for size in (shape if isinstance(shape, Sequence) else np.atleast_1d(shape)))
    except TypeError:
        raise ValueError(f"{name} must contain only integers, such as (4, 4), got {shape!r}") from None
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{name} must contain one or more sizes, each at least 1, got {sizes}")
    return sizes


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all entries of all tensors are finite.

    If the sum of all entries is finite, so is every entry. Otherwise, either some entry is not finite or the sum has
    overflowed, so every entry is checked.
    """
    tensors = [tensor.detach() for tensor in tensors]
    total = functools.reduce(operator.add, (tensor.sum() for tensor in tensors))
    return math.isfinite(float(total)) or all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def usual_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype to which arrays of a given dtype are converted: uint8, float32 or float64.

    Arrays of dtype uint8 are not converted. Other types whose values float32 can represent exactly (bool, float16,
    16-bit integers, etc.) are converted to float32, and all remaining types to float64.
    """
    if dtype == np.uint8:
        return np.dtype(np.uint8)
    return np.dtype(np.float32 if np.promote_types(dtype, np.float32) == np.float32 else np.float64)
