"""Split arrays into batches of tensors, apply masks, and fill in missing entries.

:mod:`mvrbm.estimators.inputs` has already validated the shapes and dtypes of the arrays. This module checks that the
units accept the values. For samples on disk, the trainer checks the values batch by batch.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.validation import _check_sample_weight
from torch import Tensor

from mvrbm.estimators.parameters import unit_named
from mvrbm.io.shards import Rows
from mvrbm.progress import report
from mvrbm.units import Unit

Array = NDArray[Any]
#: Masks of known entries, keyed by layer name, each of shape (n, *layer shape).
Known = Mapping[str, Tensor]

# Number of samples on disk to inspect for values other than 0 and 1.
_ROWS_TO_INSPECT = 100
#: Number of samples per batch in methods that process data in batches.
ROWS_AT_ONCE = 1024


def model_dtype(layers: Mapping[str, Any]) -> torch.dtype:
    """Return the model dtype for the given data: float64 if any array is float64, otherwise float32."""
    return torch.float64 if any(array.dtype == np.float64 for array in layers.values()) else torch.float32


def unit_for(kind: Any, data: Any) -> Unit:
    """Create units of type `kind` for data of shape (n, ...), and set how they scale bytes. See :func:`match_bytes`."""
    unit = unit_named(kind, tuple(data.shape[1:]))
    if unit.byte_scale != 1 and is_binary(data):
        unit.byte_scale = 1.0
    return unit


def is_binary(data: Any) -> bool:
    """Return whether data contains only 0, 1 and NaN. For samples on disk, check only evenly spaced samples."""
    data = _to_inspect(data)
    blocks = (data[first : first + ROWS_AT_ONCE] for first in range(0, len(data), ROWS_AT_ONCE))
    return all(bool(((block == 0) | (block == 1) | (block != block)).all()) for block in blocks)


def _to_inspect(data: Any) -> Any:
    if isinstance(data, Rows):
        return data[np.unique(np.linspace(0, len(data) - 1, _ROWS_TO_INSPECT).astype(int))]
    return data


def scaled_as_in_training(data: Any, unit: Unit) -> Any:
    """Return the data of a layer as its units expect it. See :func:`match_bytes`."""
    if type(unit).byte_scale == 1:
        return data
    dtype = np.float64 if unit.bias.dtype == torch.float64 else np.float32
    return match_bytes(data, dtype, trained_on_binary=unit.byte_scale == 1)


def match_bytes(data: Any, dtype: Any, *, trained_on_binary: bool) -> Any:
    """Return uint8 data as it was in training, for models of values from 0 to 1. Return other data unchanged.

    Bytes are divided by 255, except for bytes of only 0 and 1 if the training data contained only 0 and 1 too. Units
    whose training data had other values divide all bytes.
    """
    if data.dtype != np.uint8:
        return data
    binary = is_binary(data)
    if trained_on_binary and not binary:
        if isinstance(data, Rows):
            raise ValueError(
                "samples on disk are bytes above 1, but the training data contained only 0 and 1; divide them by 255"
            )
        return data / np.asarray(255, dtype)
    if binary and not trained_on_binary and _to_inspect(data).any():
        warnings.warn(
            "the uint8 data contains only 0 and 1, and is divided by 255 because the training data had other values; "
            "pass binary data as bool or float",
            stacklevel=2,
        )
    return data


def n_samples(layers: Mapping[str, Any]) -> int:
    """Return the number of samples in the data, which is the same for all layers."""
    return len(next(iter(layers.values())))


def sample_weights(given: Any, n: int) -> Array:
    """Validate the weights of `n` samples. If `given` is None, return equal weights."""
    rows = np.broadcast_to(np.float64(0), (n, 1))
    weights: Array = _check_sample_weight(given, rows, dtype=np.float64, ensure_non_negative=True)
    if not weights.sum() > 0:
        raise ValueError("sample_weight must be positive for at least one sample, but all weights are zero")
    return weights


def joined(batches: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate batches along the first axis and return one tensor per layer."""
    pieces = list(batches)
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def batches(
    layers: Mapping[str, Any],
    units: Mapping[str, Unit],
    known: Known | None = None,
    *,
    copy: bool = False,
    check: bool = True,
) -> Iterator[dict[str, Tensor]]:
    r"""Split arrays of shape (n, \*layer shape) into batches of tensors with the dtype and device of the units.

    Parameters
    ----------
    layers : mapping of str to array
        Data to split. Layers without units are omitted.
    units : mapping of str to Unit
        Units of each layer. They convert the data and validate its values.
    known : mapping of str to Tensor, optional
        Masks of known entries. All other entries are replaced with placeholder values that the units accept.
    copy : bool
        Whether to copy the data. If False, the tensors may share memory with the arrays.
    check : bool
        Whether to validate the values. Pass False for data that has already been validated.
    """
    for first in range(0, n_samples(layers), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        batch = {}
        for name, unit in units.items():
            tensor = unit.from_data(_as_tensor(layers[name][rows], copy=copy))
            if known is not None and name in known:
                mask = known[name][rows].to(tensor.device)
                of_sites = mask.flatten(-unit.entry_modes) if unit.entry_modes else mask[..., None]
                if not bool((of_sites == of_sites[..., :1]).all()):
                    site = "one-hot row" if unit.entry_modes == 1 else "sample"
                    raise ValueError(
                        f"the mask of layer '{name}' must mark each {site} as entirely known or entirely unknown"
                    )
                tensor = torch.where(mask, tensor, unit.some_state)
            if check:
                unit.check(tensor, name)
            batch[name] = tensor
        yield batch


def check_values(layers: Mapping[str, Any], units: Mapping[str, Unit], known: Known | None = None) -> None:
    """Raise ValueError if a unit does not accept the value of a known entry. Samples on disk are not checked."""
    for name, unit in units.items():
        if isinstance(layers[name], Rows) or (layers[name].dtype == np.uint8 and _accepts_every_byte(unit)):
            continue
        for _ in batches(layers, {name: unit}, known):
            pass


def _accepts_every_byte(unit: Unit) -> bool:
    low, high = unit.data_range
    return not unit.entry_modes and low <= 0 and 255 * unit.byte_scale <= high


def _as_tensor(array: Array, *, copy: bool) -> Tensor:
    # PyTorch does not support read-only memory, negative strides, or strides that are not multiples of the item size.
    shareable = array.flags.writeable and all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    return torch.from_numpy(np.array(array) if copy or not shareable else array)


def filled_batches(
    layers: Mapping[str, Any],
    units: Mapping[str, Unit],
    known: Known | None,
    fill: Callable[[dict[str, Tensor], dict[str, Tensor]], Mapping[str, Tensor]],
) -> Iterator[dict[str, Tensor]]:
    """Yield the same batches as :func:`batches`, with unknown entries (including NaN) filled in by `fill`.

    `fill` takes incomplete samples and their masks, both keyed by layer name, and returns complete samples.
    """
    for first in range(0, n_samples(layers), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = {name: array[rows] for name, array in layers.items()}
        part_known = None if known is None else {name: mask[rows] for name, mask in known.items()}
        here = known_entries(part_known, part, every_layer=None)
        (batch,) = batches(part, units, here, copy=here is not None)
        if here is not None:
            _fill_incomplete(batch, here, fill)
        yield batch
        report("samples", n_samples(batch))


def _fill_incomplete(
    batch: dict[str, Tensor], known: Known, fill: Callable[[dict[str, Tensor], dict[str, Tensor]], Mapping[str, Tensor]]
) -> None:
    """Fill in the unknown entries of a batch in place."""
    known = {name: mask.to(batch[name].device) for name, mask in known.items()}
    incomplete = torch.stack([~mask.flatten(1).all(1) for mask in known.values()]).any(0)
    if not bool(incomplete.any()):
        return
    samples = {name: array[incomplete] for name, array in batch.items()}
    masks_of_samples = {name: mask[incomplete] for name, mask in known.items()}
    for name, array in fill(samples, masks_of_samples).items():
        batch[name][incomplete] = array


def masks(mask: Mapping[str, Any], layers: Mapping[str, Any], *, every_layer: bool | None = False) -> dict[str, Tensor]:
    r"""Return one mask of shape (n, \*layer shape) per layer, which is True for known entries. NaN entries are unknown.

    Parameters
    ----------
    mask : mapping of str to boolean array
        Masks with the shape of the data or of one sample. The axes of a sample can be flattened. In layers without a
        mask, all entries except NaN are known.
    layers : mapping of str to array
        Data that the masks apply to.
    every_layer : bool, optional
        Whether every layer must have at least one known entry. If False, a single layer with a known entry is
        sufficient. If None, all entries can be unknown.
    """
    if not set(mask) <= set(layers):
        raise ValueError(f"mask has modalities {sorted(mask)}, but the data has {sorted(layers)}")
    known = {name: _mask_of_layer(mask.get(name, np.True_), layer) for name, layer in layers.items()}
    found = [bool(part.any()) for part in known.values()]
    if every_layer is not None and not (all(found) if every_layer else any(found)):
        raise ValueError("no entries are known because every entry is NaN or masked out")
    return known


def _mask_of_layer(mask: Any, layer: Any) -> Tensor:
    shape = tuple(layer.shape)
    array = np.asarray(mask)
    if array.dtype != bool:
        raise ValueError(f"mask must be boolean (True for known entries), got dtype {array.dtype}")
    features = math.prod(shape[1:])
    if array.shape not in ((), shape, shape[1:], (shape[0], features), (features,)):
        raise ValueError(
            f"mask must have the shape of the data {shape} or of one sample {shape[1:]}, got {array.shape}"
        )
    arranged = array if array.ndim == 0 else array.reshape(-1, *shape[1:])
    known = np.broadcast_to(arranged, shape)
    return torch.from_numpy(known & ~np.isnan(layer) if has_nan(layer) else known.copy())


def known_entries(
    mask: Mapping[str, Any] | None, layers: Mapping[str, Any], *, every_layer: bool | None = False
) -> dict[str, Tensor] | None:
    """Return the result of :func:`masks`, or None if no mask is given and no array contains NaN.

    Samples on disk are not checked for NaN.
    """
    if mask is None and not any(map(has_nan, layers.values())):
        return None
    return masks(mask or {}, layers, every_layer=every_layer)


def has_nan(array: Any) -> bool:
    """Return whether an array contains NaN. For samples on disk, return False without reading them."""
    # The minimum is NaN if any entry is NaN, and computing it allocates no temporary array.
    return isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.size > 0 and bool(np.isnan(array.min()))
