"""Validate checkpoints and compare the stored training run with the current one."""

import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvrbm.errors import StorageError
from mvrbm.validation import whole_number

#: Exceptions that may occur when a checkpoint contains corrupted or unexpected values.
VALUE_ERRORS = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError, OverflowError)

# Groups of types that are interchangeable, because JSON does not distinguish them or because a setting may have any of
# them.
_INTERCHANGEABLE: tuple[tuple[type, ...], ...] = ((int, float, Tensor, type(None)), (list, tuple))
# Names used in error messages for the two entries that describe the optimizer and the scheduler.
_OPTIMIZATION = ("the optimizer", "the scheduler")


def counter(value: Any, name: str, least: int = 0) -> int:
    """Return `value`, or raise ValueError if it is not of type int or is less than `least`."""
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, got {value!r:.50}")
    return whole_number(value, name, least)


def instance(value: Any, types: type | tuple[type, ...], name: str) -> Any:
    """Return `value`, or raise ValueError if it is not an instance of any of the given types."""
    if not isinstance(value, types):
        names = [one.__name__ for one in (types if isinstance(types, tuple) else (types,))]
        raise ValueError(f"{name} must be {' or '.join(names)}, got {value!r:.50}")
    return value


def instances(values: Any, types: type | tuple[type, ...], name: str) -> list[Any]:
    """Return `values`, or raise ValueError if it is not a list of instances of the given types."""
    return [instance(value, types, f"an entry in {name}") for value in instance(values, list, name)]


def check_settings(stored: Mapping[str, Any], current: Mapping[str, Any], what: str) -> None:
    """Raise ValueError unless the stored settings have the same names and types as the current settings."""
    if set(stored) != set(current):
        raise ValueError(f"{what} has settings {sorted(stored)}, but expected {sorted(current)}")
    for name, value in current.items():
        types = next((types for types in _INTERCHANGEABLE if isinstance(value, types)), (type(value),))
        found = instance(stored[name], types, f"{name} of {what}")
        if isinstance(found, float) and math.isnan(found):
            raise ValueError(f"{name} of {what} must be a number, got NaN")


def check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, Iterable[int] | None], what: str, *, complete: bool = True
) -> dict[str, Tensor]:
    """Return the tensors, or raise ValueError if a tensor has non-finite values or an unexpected name or shape.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        Tensors to validate, keyed by name.
    shapes : mapping of str to shape or None
        Expected shape for each name. None matches any shape.
    what : str
        Description of the tensors in error messages.
    complete : bool
        Whether all names in `shapes` must be present.
    """
    if set(tensors) - set(shapes) or (complete and set(shapes) - set(tensors)):
        raise ValueError(f"{what} are stored for {sorted(tensors)}, but expected {sorted(shapes)}")
    for name, tensor in tensors.items():
        shape = shapes[name]
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{what} for '{name}' have shape {tuple(tensor.shape)}, but expected {tuple(shape)}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{what} for '{name}' are not finite")
    return dict(tensors)


def tensors_under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with the prefix and a dot, keyed by the rest of their names."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a description of each setting that differs between two training runs. None matches any value."""
    found = []
    for key in sorted({*stored, *current}):
        before = stored.get(key)
        now = current.get(key)
        if before is None or now is None or before == now:
            continue
        if key == "data":
            found.append("the data has different values")
        elif key == "sample_weight":
            found.append("sample_weight has different values")
        elif key == "steps":
            parts = zip(_OPTIMIZATION, before, now, strict=False)
            found += [f"{part} is {new}, was {old}" for part, old, new in parts if old != new]
        else:
            found.append(f"{key} is {now}, was {before}")
    return found


def require_same_run(found: list[str], path: Path, *, ignore_mismatch: bool) -> None:
    """Raise StorageError if `found` contains differences between the stored and the current training run.

    If `ignore_mismatch` is True, issue a warning instead.
    """
    if not found:
        return
    message = f"{path} is a checkpoint from another training run: {'; '.join(found)}"
    if not ignore_mismatch:
        raise StorageError(f"{message} (use --ignore-mismatch or ignore_mismatch=True to resume anyway)")
    warnings.warn(f"{message}. Training resumes anyway", UserWarning, stacklevel=2)
