"""Validate the shape and dtype of the data passed to estimators and return one array per layer.

Each public method uses this module exactly once to validate its input. :mod:`mvrbm.estimators.batches` validates the
values when it splits the arrays into batches.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, validate_data
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler, default_collate

from mvrbm.estimators.batches import Array, check_values, has_nan, model_dtype, sample_weights, unit_for
from mvrbm.estimators.labels import Labeled, label_vector
from mvrbm.estimators.parameters import is_named
from mvrbm.estimators.persistence import forget_names, restore_names, saved_names
from mvrbm.io.shards import DatasetRows, Rows
from mvrbm.units import Unit
from mvrbm.validation import as_shape, usual_dtype

#: Name of the visible layer in estimators with one visible layer.
VISIBLE = "visible"
#: Name of the class label layer.
LABEL = "label"

# Dtypes to choose from if the dtype of the data is unknown, as for lists of objects and data frames.
_DTYPES = [np.float64, np.float32]
# Types that NumPy converts to arrays without an error, but not to samples.
_NO_ARRAYS = (str, bytes, os.PathLike, Mapping, Set, Iterator)


class ArrayInput:
    """Mixin for estimators with one visible layer. Samples are arrays or rows of features."""

    #: Maximum number of axes in a sample, or None for no limit.
    largest_order: ClassVar[int | None] = None

    visible: Any
    visible_shape: Any
    visible_shape_: tuple[int, ...]
    n_features_in_: int
    classes_: Array
    _takes_arrays: bool

    @property
    def takes_arrays(self) -> bool:
        """Whether the training data had shape (n, *visible_shape) rather than (n, n_features)."""
        return self._takes_arrays

    def _read(self, X: Any, *, reset: bool) -> Array:
        r"""Validate the shape and dtype of samples and return them as an array of shape (n, \*visible_shape).

        If `reset` is True, the sample shape is learned from the data. Otherwise, the data must have the learned shape.
        """
        samples: Array = self._read_with(X, "no_validation", reset=reset)[0]
        return samples

    def _read_labeled(self, X: Any, y: Any, sample_weight: Any, device: torch.device) -> Labeled:
        """Validate training data, labels and weights, and set `visible_shape_` and `classes_`."""
        samples, labels = self._read_with(X, label_vector(y), reset=True)
        samples = np.asarray(samples)  # loads samples from disk
        if has_nan(samples):
            raise ValueError(
                "X contains NaN; fill in the missing entries first, or use MMVRBM with the labels as a modality"
            )
        check_classification_targets(labels)
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y must have at least two classes, got only one class: {classes.tolist()}")
        weights = sample_weights(sample_weight, len(samples))
        dtype = model_dtype({VISIBLE: samples})
        check_values({VISIBLE: samples}, {VISIBLE: unit_for(self.visible, samples).to(dtype)})
        self.classes_ = classes
        return Labeled(
            torch.from_numpy(np.array(samples)).to(device),
            torch.from_numpy(codes.astype(np.int64)).to(device),
            torch.from_numpy(weights).to(dtype=dtype, device=device),
        )

    def _read_with(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        """Validate and return samples and labels. If ``y="no_validation"``, the returned labels are None."""
        X = without_wrapper(X)
        given = as_array(X)
        array_shape = tuple(given.shape[1:]) if given.ndim > 2 else None
        if array_shape is not None and len(given) == 0:
            raise ValueError("the data is empty, but at least one sample is required")
        if array_shape is not None and not reset and array_shape != self.visible_shape_:
            raise ValueError(f"samples must have shape {self.visible_shape_}, got {array_shape}")
        if isinstance(X, Rows):
            rows, labels = self._check_stored_rows(X, y, reset=reset)
        else:
            X = X if array_shape is None else np.asarray(given).reshape(len(given), -1)
            checked = validate_data(self, X, y, reset=reset, dtype=dtype_for(given), ensure_all_finite=False)
            rows, labels = checked if isinstance(checked, tuple) else (checked, None)
        if reset:
            self.visible_shape_ = self._sample_shape(self.n_features_in_, array_shape)
            self._takes_arrays = array_shape is not None
        return rows.reshape(len(rows), *self.visible_shape_), labels

    def _check_stored_rows(self, X: Rows, y: Any, *, reset: bool) -> tuple[Rows, Any]:
        """Validate the shape and the labels of samples on disk, which scikit-learn cannot validate."""
        labels = None if isinstance(y, str) else validate_data(self, "no_validation", y)
        if labels is not None:
            check_consistent_length(X, labels)
        n_features = math.prod(X.shape[1:])
        if not reset and n_features != self.n_features_in_:
            raise ValueError(f"samples must have shape {self.visible_shape_}, got {X.shape[1:]}")
        if reset:
            forget_names(self)
            self.n_features_in_ = n_features
        return X, labels

    def _sample_shape(self, n_features: int, array_shape: tuple[int, ...] | None) -> tuple[int, ...]:
        asked = None if self.visible_shape is None else as_shape(self.visible_shape, "visible_shape")
        if array_shape is not None and asked is not None and array_shape != asked:
            raise ValueError(f"visible_shape is {asked}, but samples have shape {array_shape}")
        shape = array_shape or asked or (n_features,)
        if math.prod(shape) != n_features:
            raise ValueError(
                f"visible_shape {shape} has {math.prod(shape)} entries, but samples have {n_features} features"
            )
        if self.largest_order is not None and len(shape) > self.largest_order:
            raise ValueError(f"{type(self).__name__} expects matrices, got samples of shape {shape}; use TVRBM instead")
        return shape

    def _outward(self, samples: Tensor, like: Any = None) -> Array:
        """Convert samples to the format of `like`: arrays or flattened rows.

        If `like` is None, use the format of the training data.
        """
        array: Array = samples.detach().cpu().numpy()
        as_arrays = self._takes_arrays if like is None else np.ndim(like) > 2
        return array if as_arrays else array.reshape(len(array), -1)

    def _describe_input(self) -> dict[str, Any]:
        return {"as_arrays": self._takes_arrays, "feature_names": saved_names(self)}

    def _restore_input(self, unit: Unit, described: Mapping[str, Any]) -> None:
        """Restore the attributes set by `_read`, using a saved description."""
        if not is_named(unit, self.visible):
            raise ValueError(f"visible is {self.visible!r:.100}, but the saved model has {unit.name} units")
        self.visible_shape_ = unit.shape
        self.n_features_in_ = math.prod(unit.shape)
        self._takes_arrays = bool(described["as_arrays"])
        restore_names(self, described["feature_names"])


def without_wrapper(X: Any) -> Any:
    """Convert tensors to arrays and wrap PyTorch datasets so that samples load on demand. Return other data unchanged.

    A data loader is replaced with its dataset, because estimators choose their own batch order and batch size.
    """
    if isinstance(X, DataLoader):
        plain = isinstance(X.sampler, SequentialSampler | RandomSampler) and X.collate_fn is default_collate
        if not plain or isinstance(X.dataset, IterableDataset):
            raise ValueError(
                "X must not be a DataLoader with a custom sampler, a custom collate_fn or an iterable dataset; pass a "
                "map-style dataset, or train with mvrbm.training.Trainer, which accepts any loader"
            )
        X = X.dataset
    if isinstance(X, IterableDataset):
        raise ValueError("X must be a map-style dataset (with len() and indexing), got an IterableDataset")
    if X is None or (isinstance(X, _NO_ARRAYS) and not hasattr(X, "ndim")):  # some sparse matrices are mappings
        kind = "None" if X is None else f"a {type(X).__name__}"
        hint = "; use MMVRBM for several arrays per sample" if isinstance(X, Mapping) else ""
        hint = "; read the file first, for example with numpy.load" if isinstance(X, str | os.PathLike) else hint
        raise ValueError(f"X must be an array of samples, got {kind}{hint}")
    if isinstance(X, Tensor):
        return (X.float() if X.dtype == torch.bfloat16 else X).detach().cpu().numpy()
    return DatasetRows(X) if isinstance(X, Dataset) else X


def as_array(X: Any) -> Any:
    """Convert `X` to an array unless it has an `ndim` attribute. Raise ValueError for non-numeric values."""
    if not hasattr(X, "ndim"):
        try:
            X = np.asarray(X)
        except ValueError as error:
            raise ValueError(f"all samples in X must have the same shape: {error}") from error
    dtype = getattr(X, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind in "USMmV":
        raise ValueError(f"X must contain numbers, got an array of dtype {dtype}")
    # Selecting a column of a data frame is slow, so select only columns of other types.
    for name, dtype in zip(getattr(X, "columns", ()), getattr(X, "dtypes", ()), strict=False):
        if not is_number_type(dtype) and X[name].ndim == 1 and _not_numeric(X[name]):
            raise ValueError(f"column {name!r} of X is not numeric; drop it or replace it with numbers")
    return X


def is_number_type(dtype: Any) -> bool:
    """Return whether a data frame column of the given dtype contains numbers.

    Booleans are not numbers: tables treat them as categories. Where numbers are required, they convert to 0 and 1.
    """
    return getattr(dtype, "kind", "O") in "iuf"


def _not_numeric(column: Any) -> bool:
    try:
        np.asarray(column, dtype=np.float64)
    except (TypeError, ValueError):
        return True
    return False


def dtype_for(given: Any) -> Any:
    """Return the `dtype` argument for validating `given` with scikit-learn, or None to keep the dtype of `given`."""
    dtype = getattr(given, "dtype", None)
    if dtype == np.uint8:
        return None
    return usual_dtype(dtype) if isinstance(dtype, np.dtype) and dtype.kind in "biuf" else _DTYPES


def by_modality(X: Any) -> dict[str, Any]:
    """Return the data as a dict keyed by modality name. The modalities in a tuple are named "0", "1", and so on."""
    if isinstance(X, Mapping):
        return {name: _array_or_labels(part, name) for name, part in X.items()}
    if isinstance(X, tuple):
        return {str(number): _array_or_labels(part, str(number)) for number, part in enumerate(X)}
    raise ValueError(f"X must be a dict or tuple with one array per modality, got {type(X).__name__}")


def _array_or_labels(part: Any, name: str) -> Any:
    """Convert a modality to an array of numbers or labels. Return None for a modality to predict."""
    if isinstance(part, Tensor | Dataset | DataLoader):
        part = without_wrapper(part)
    try:
        array = None if part is None else np.asarray(part)
        # NumPy converts an unknown label in a list of strings, such as NaN, to a string.
        from_strings = array is not None and array.dtype.kind == "U" and not isinstance(part, np.ndarray)
        return np.asarray(part, dtype=object) if from_strings else array
    except ValueError as error:
        raise ValueError(f"all samples of modality {name!r} must have the same shape: {error}") from error


def check_modalities(parts: Mapping[str, Any], expected: Sequence[str]) -> None:
    """Raise ValueError if `parts` contains a modality that the model does not have."""
    if unknown := [name for name in parts if name not in expected]:
        raise ValueError(f"{unknown[0]!r} is not one of the modalities of the model, which are {list(expected)}")


def _as_numbers(array: Array, name: str) -> Array:
    """Convert an array of objects to floats."""
    try:
        if array.dtype.kind == "O":
            return array.astype(np.float64)
    except (TypeError, ValueError):
        pass
    raise ValueError(f"modality {name!r} must contain numbers, got an array of dtype {array.dtype}")


def read_modalities(X: Any, shapes: Mapping[str, tuple[int, ...]] | None) -> dict[str, Array]:
    """Validate the dtypes and shapes of the modalities and return one array per modality.

    `shapes` contains the expected sample shape of each modality. If `shapes` is None, samples can have any shape.
    """
    parts = by_modality(X)
    if shapes is not None:
        check_modalities(parts, list(shapes))
        if missing := [name for name in shapes if name not in parts]:
            raise ValueError(f"X must contain the modalities {list(shapes)}, but {missing[0]!r} is missing")
    layers = {}
    for name in shapes or parts:
        array = np.asarray(parts[name])
        if array.dtype.kind not in "biuf":
            array = _as_numbers(array, name)
        if array.ndim < 2:
            raise ValueError(
                f"modality '{name}' must have at least 2 axes (the first indexes the samples), got shape {array.shape}"
            )
        if 0 in array.shape[1:]:
            raise ValueError(f"samples of modality '{name}' must not be empty, got shape {array.shape[1:]}")
        if shapes is not None and array.shape[1:] != shapes[name]:
            raise ValueError(f"samples of modality '{name}' must have shape {shapes[name]}, got {array.shape[1:]}")
        layers[name] = array.astype(usual_dtype(array.dtype), copy=False)
    lengths = {name: len(array) for name, array in layers.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"all modalities must have the same nonzero number of samples, got {lengths}")
    return layers
