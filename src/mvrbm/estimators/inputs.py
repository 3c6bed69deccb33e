"""Input checks: arrays, rows or shards in, one checked array per layer out; masks; labels and sample weights.

Every estimator and classifier reads its data here, once. Shapes and dtypes are checked when data is read, values when
batches of it are made (the units say which values they accept); for shards, the trainer checks values batch by batch.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, validate_data
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from mvrbm.errors import StorageError
from mvrbm.io.shards import DatasetRows, Rows
from mvrbm.io.untrusted import ALLOWANCE
from mvrbm.progress import report
from mvrbm.units import Unit, make_unit, unit_names
from mvrbm.validation import as_shape, choice

Array = NDArray[Any]
Known = Mapping[str, Tensor]

#: Name of the layer of estimators with one visible layer.
VISIBLE = "visible"
#: Name of the layer of class labels.
LABEL = "label"
#: Number of samples per batch, wherever data is processed batch by batch.
ROWS_AT_ONCE = 1024

_DTYPES = [np.float64, np.float32]


def unit_named(kind: Any, shape: tuple[int, ...], parameter: str = "visible") -> Unit:
    """Return a new unit by its name, which is the value of a parameter."""
    return make_unit(choice(kind, parameter, unit_names()), shape)


def is_named(unit: Unit, kind: Any) -> bool:
    """Return whether a unit is of the kind that a name stands for."""
    other = unit_named(kind, unit.shape)
    return (unit.name, unit.config()) == (other.name, other.config() | {"bias_shape": list(unit.bias_shape)})


def model_dtype(layers: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a model of these arrays: float64 if one of them is float64, otherwise float32."""
    return torch.float64 if any(array.dtype == np.float64 for array in layers.values()) else torch.float32


def batches(
    layers: Mapping[str, Any], units: Mapping[str, Unit], known: Known | None = None, *, copy: bool = False
) -> Iterator[dict[str, Tensor]]:
    r"""Cut arrays (n, \*layer shape) into batches of tensors in the dtype and on the device of the units, checked.

    Entries that are not `known` are replaced by values that the units accept. Without `copy`, the tensors may share the
    memory of the arrays.
    """
    n = len(next(iter(layers.values())))
    for first in range(0, n, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        batch = {}
        for name, unit in units.items():
            tensor = unit.from_data(_as_tensor(layers[name][rows], copy=copy))
            if known is not None and name in known:
                mask = known[name][rows].to(tensor.device)
                if unit.entry_modes and not bool((mask == mask[..., :1]).all()):
                    raise ValueError(f"the mask of layer '{name}' must mark one-hot rows as known wholly or not at all")
                tensor = torch.where(mask, tensor, unit.some_state())
            unit.check(tensor, name)
            batch[name] = tensor
        yield batch


def check_values(layers: Mapping[str, Any], units: Mapping[str, Unit], known: Known | None = None) -> None:
    """Raise ValueError if an array holds values that its units cannot have, unknown entries aside."""
    for name, unit in units.items():
        low, high = unit.data_range
        every_byte_is_valid = not unit.entry_modes and low <= 0 and 255 * unit.byte_scale <= high
        if not (isinstance(layers[name], Rows) or (layers[name].dtype == np.uint8 and every_byte_is_valid)):
            for _ in batches(layers, {name: unit}, known):
                pass


def _as_tensor(array: Array, *, copy: bool) -> Tensor:
    # PyTorch has no read-only tensors, no negative strides, and no strides that are not multiples of an entry.
    plain = array.flags.writeable and all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    return torch.from_numpy(np.array(array) if copy or not plain else array)


def filled_batches(
    layers: Mapping[str, Any],
    units: Mapping[str, Unit],
    known: Known | None,
    fill: Callable[[dict[str, Tensor], dict[str, Tensor]], Mapping[str, Tensor]],
) -> Iterator[dict[str, Tensor]]:
    """Yield :func:`batches` whose unknown entries, NaN included, `fill` has replaced.

    `fill` gets samples with unknown entries and their masks, by layer, and returns complete samples.
    """
    for first in range(0, len(next(iter(layers.values()))), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = {name: array[rows] for name, array in layers.items()}
        here = known_entries(known and {name: mask[rows] for name, mask in known.items()}, part, every_layer=None)
        (batch,) = batches(part, units, here, copy=here is not None)
        if here is not None:
            here = {name: mask.to(batch[name].device) for name, mask in here.items()}
            partly = torch.stack([~mask.flatten(1).all(1) for mask in here.values()]).any(0)
            chosen = ({name: array[partly] for name, array in part.items()} for part in (batch, here))
            for name, array in fill(*chosen).items() if bool(partly.any()) else ():
                batch[name][partly] = array
        yield batch
        report("samples", len(next(iter(batch.values()))))


def masks(mask: Mapping[str, Any], layers: Mapping[str, Any], *, every_layer: bool | None = False) -> dict[str, Tensor]:
    r"""Return which entries are known, by layer, each (n, \*layer shape). A layer without a mask is known.

    A mask has the shape of the data or of one sample, as arrays or as rows. An entry that is NaN is unknown. Some entry
    must be known, with `every_layer` of every layer; with None, none need be.
    """
    if not set(mask) <= set(layers):
        raise ValueError(f"mask names {sorted(mask)}, but the data has {sorted(layers)}")
    known = {}
    for name, layer in layers.items():
        shape = tuple(layer.shape)
        array = np.asarray(mask.get(name, np.True_))
        if array.dtype != bool:
            raise ValueError(f"mask must be boolean, True where the value is known, got {array.dtype}")
        features = math.prod(shape[1:])
        if array.shape not in ((), shape, shape[1:], (shape[0], features), (features,)):
            raise ValueError(f"mask must have the data's shape {shape} or one sample's, got {array.shape}")
        arranged = array if array.ndim == 0 else array.reshape(-1, *shape[1:])
        here = np.broadcast_to(arranged, shape)
        known[name] = torch.from_numpy(here & ~np.isnan(layer) if _has_nan(layer) else here.copy())
    found = [bool(part.any()) for part in known.values()]
    if every_layer is not None and not (all(found) if every_layer else any(found)):
        raise ValueError("no entry is known: the mask is False, or the data NaN, everywhere")
    return known


def known_entries(
    mask: Mapping[str, Any] | None, layers: Mapping[str, Any], *, every_layer: bool | None = False
) -> dict[str, Tensor] | None:
    """Return :func:`masks`, or None if there is no mask and no entry of an array is NaN. Rows on disk are not read."""
    if mask is None and not any(map(_has_nan, layers.values())):
        return None
    return masks(mask or {}, layers, every_layer=every_layer)


def _has_nan(array: Any) -> bool:
    # The smallest entry is NaN if any entry is, and takes no memory.
    return isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.size > 0 and bool(np.isnan(array.min()))


def by_modality(X: Any) -> dict[str, Any]:
    """Return a dict of arrays as it is, and a tuple of arrays as a dict with the names "0", "1", ..."""
    if isinstance(X, Mapping):
        return dict(X)
    if isinstance(X, tuple):
        return {str(number): part for number, part in enumerate(X)}
    raise ValueError(f"several modalities are given as a dict or a tuple of arrays, got {type(X).__name__}")


def read_modalities(X: Any, shapes: Mapping[str, tuple[int, ...]] | None) -> dict[str, Array]:
    """Check dtypes and shapes of modalities, and return them in the order of `shapes`. None: any shapes."""
    parts = by_modality(X)
    if shapes is not None and set(parts) != set(shapes):
        raise ValueError(f"expected modalities {list(shapes)}, got {list(parts)}")
    layers = {}
    for name in shapes or parts:
        array = np.asarray(parts[name])
        if array.ndim < 2:
            raise ValueError(f"modality '{name}' must have one sample along its first axis, got {array.shape}")
        if shapes is not None and array.shape[1:] != shapes[name]:
            raise ValueError(f"samples of modality '{name}' must have shape {shapes[name]}, got {array.shape[1:]}")
        layers[name] = array if array.dtype in (np.uint8, *_DTYPES) else array.astype(np.float64)
    lengths = {name: len(array) for name, array in layers.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise ValueError(f"modalities need the same number of samples, at least one, got {lengths}")
    return layers


def label_vector(y: Any) -> Any:
    """Return the numbers of the classes (n,) for one-hot rows (n, k), and anything else as it is."""
    array = np.asarray(y)
    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind not in "biuf":
        return y
    one_hot = np.isin(array, (0, 1)).all() and (array.sum(1) == 1).all()
    return array.argmax(1) if one_hot else y


def describe_classes(classes: Array) -> dict[str, Any]:
    """Return labels as values that JSON can hold, which :func:`classes_from` takes."""
    plain = classes.tolist()
    kinds = {type(value) for value in plain}
    if not kinds <= {bool, int, float, str}:
        names = sorted(kind.__name__ for kind in kinds)
        raise StorageError(f"labels must be numbers or texts to be saved, got {names}")
    return {"dtype": classes.dtype.str, "values": plain}


def classes_from(described: Mapping[str, Any]) -> Array:
    """Return labels from their saved description."""
    dtype, values = np.dtype(str(described["dtype"])), list(described["values"])
    if dtype.kind not in "biufUO":
        raise StorageError(f"labels cannot be of dtype {dtype}")
    if dtype.itemsize * len(values) > ALLOWANCE:
        raise StorageError(f"{len(values):,} labels of dtype {dtype} take more than {ALLOWANCE:,} bytes")
    labels = np.asarray(values, dtype=dtype)
    if labels.ndim != 1:
        raise StorageError(f"labels must be a list of values, got an array of shape {labels.shape}")
    return labels


def saved_names(estimator: Any) -> list[str] | None:
    """Return the names of the columns of the training data as texts; None if it had none."""
    names = getattr(estimator, "feature_names_in_", None)
    return None if names is None else list(map(str, names))


def restore_names(estimator: Any, names: Any) -> None:
    """Set the names of columns that :func:`saved_names` returned."""
    if names is not None:
        if len(names) != estimator.n_features_in_ or not all(isinstance(name, str) for name in names):
            raise StorageError(f"feature_names must be {estimator.n_features_in_} texts, got {names!r:.100}")
        estimator.feature_names_in_ = np.asarray(names, dtype=object)


class Labeled(NamedTuple):
    """Samples with their classes and weights."""

    samples: Tensor  # (n, *shape), bytes or floats
    codes: Tensor  # (n,): the number of the class of each sample
    weights: Tensor  # (n,)


class ArrayInput:
    """Mixin of estimators with one visible layer, whose samples are given as arrays or as rows of features."""

    #: Largest number of axes of a sample. None: no limit.
    largest_order: ClassVar[int | None] = None

    visible: Any
    visible_shape: Any
    visible_shape_: tuple[int, ...]
    n_features_in_: int
    classes_: Array
    _takes_arrays: bool

    @property
    def takes_arrays(self) -> bool:
        """Whether the training data was given as arrays (n, *visible_shape), not as rows (n, n_features)."""
        return self._takes_arrays

    def _read(self, X: Any, *, reset: bool) -> Array:
        r"""Check shape and dtype of samples, and return them as (n, \*visible_shape). `reset` learns the shape."""
        samples: Array = self._read_with(X, "no_validation", reset=reset)[0]
        return samples

    def _read_labeled(self, X: Any, y: Any, sample_weight: Any, device: torch.device) -> Labeled:
        """Check training data with labels and weights, values included, and learn the shape and the classes."""
        samples, labels = self._read_with(X, label_vector(y), reset=True)
        samples = np.asarray(samples)  # rows on disk are read
        if _has_nan(samples):
            raise ValueError("X contains NaN: fill it in first, or use MMVRBM with the labels as one of its modalities")
        check_classification_targets(labels)
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y must have at least two classes, got one class: {classes.tolist()}")
        weights = _check_sample_weight(sample_weight, samples, dtype=np.float64, ensure_non_negative=True)
        if not weights.sum() > 0:
            raise ValueError("sample_weight must be positive for some sample, got zeros only")
        dtype = model_dtype({VISIBLE: samples})
        check_values({VISIBLE: samples}, {VISIBLE: unit_named(self.visible, samples.shape[1:]).to(dtype)})
        self.classes_ = classes
        return Labeled(
            torch.from_numpy(np.array(samples)).to(device),
            torch.from_numpy(codes.astype(np.int64)).to(device),
            torch.from_numpy(weights).to(dtype=dtype, device=device),
        )

    def _read_with(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        if isinstance(X, IterableDataset):
            raise ValueError("X must be a map-style dataset, with len and items by number, got an IterableDataset")
        X = X.detach().cpu().numpy() if isinstance(X, Tensor) else DatasetRows(X) if isinstance(X, Dataset) else X
        given = X if hasattr(X, "ndim") else np.asarray(X)
        array_shape = tuple(given.shape[1:]) if given.ndim > 2 else None
        if array_shape is not None and len(given) == 0:
            raise ValueError("the data is empty: at least one sample is needed")
        if array_shape is not None and not reset and array_shape != self.visible_shape_:
            raise ValueError(f"samples must have shape {self.visible_shape_}, got {array_shape}")
        if isinstance(X, Rows):
            rows, labels = X, None if isinstance(y, str) else validate_data(self, "no_validation", y)
            if labels is not None:
                check_consistent_length(X, labels)
            if not reset and math.prod(X.shape[1:]) != self.n_features_in_:
                raise ValueError(f"samples must have shape {self.visible_shape_}, got {X.shape[1:]}")
            self.n_features_in_ = math.prod(X.shape[1:])
        else:
            X = X if array_shape is None else np.asarray(given).reshape(len(given), -1)
            dtype = None if getattr(given, "dtype", None) == np.uint8 else _DTYPES
            checked = validate_data(self, X, y, reset=reset, dtype=dtype, ensure_all_finite=False)
            rows, labels = checked if isinstance(checked, tuple) else (checked, None)
        if reset:
            self.visible_shape_ = self._sample_shape(self.n_features_in_, array_shape)
            self._takes_arrays = array_shape is not None
            if rows.dtype == np.uint8 and isinstance(rows, np.ndarray) and rows.max() <= 1:
                scale = unit_named(self.visible, self.visible_shape_).byte_scale
                if scale != 1:
                    message = f"bytes are divided by {1 / scale:g}, but these are all 0 or 1: give them as floats"
                    warnings.warn(message, stacklevel=4)
        return rows.reshape(len(rows), *self.visible_shape_), labels

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
            raise ValueError(f"{type(self).__name__} takes matrices, got samples of shape {shape}: use TVRBM")
        return shape

    def _outward(self, samples: Tensor, like: Any = None) -> Array:
        """Return samples in the form of `like`, default: of the training data."""
        array: Array = samples.detach().cpu().numpy()
        as_arrays = self._takes_arrays if like is None else np.ndim(like) > 2
        return array if as_arrays else array.reshape(len(array), -1)

    def _describe_input(self) -> dict[str, Any]:
        return {"as_arrays": self._takes_arrays, "feature_names": saved_names(self)}

    def _restore_input(self, unit: Unit, described: Mapping[str, Any]) -> None:
        """Set what `_read` would have learned, from a saved description."""
        if not is_named(unit, self.visible):
            raise ValueError(f"visible is {self.visible!r:.100}, but its units are {unit.name}")
        self.visible_shape_, self.n_features_in_ = unit.shape, math.prod(unit.shape)
        self._takes_arrays = bool(described["as_arrays"])
        restore_names(self, described["feature_names"])
