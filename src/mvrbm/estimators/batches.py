"""Cut checked arrays into batches of tensors: values, masks of known entries, and missing entries filled in.

The shapes and dtypes of the arrays were checked when :mod:`mvrbm.estimators.inputs` read them. Their values are checked
here, once: the units know which values they accept. The trainer checks the values of samples on disk batch by batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm.io.shards import Rows
from mvrbm.progress import report
from mvrbm.units import Unit

Array = NDArray[Any]
#: Masks by layer, each (n, *layer shape): True where an entry is known.
Known = Mapping[str, Tensor]

#: Number of samples per batch in all methods that process data batch by batch.
ROWS_AT_ONCE = 1024


def model_dtype(layers: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype of a model of these arrays: float64 if one of them is float64, otherwise float32."""
    return torch.float64 if any(array.dtype == np.float64 for array in layers.values()) else torch.float32


def n_samples(layers: Mapping[str, Any]) -> int:
    """Return the number of samples of data by layer."""
    return len(next(iter(layers.values())))


def joined(batches: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate batches along the first axis."""
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
    r"""Yield batches of arrays (n, \*layer shape) as tensors with the dtype and the device of the units.

    Parameters
    ----------
    layers : mapping of str to array
        The data. Layers without units are left out.
    units : mapping of str to Unit
        Units of the layers, which convert the data and check its values.
    known : mapping of str to Tensor, optional
        Masks of the known entries. All other entries are replaced by values that the units accept.
    copy : bool
        Whether the tensors must not share memory with the arrays.
    check : bool
        Whether to check the values. False for data that has been checked before.
    """
    for first in range(0, n_samples(layers), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        batch = {}
        for name, unit in units.items():
            tensor = unit.from_data(_as_tensor(layers[name][rows], copy=copy))
            if known is not None and name in known:
                mask = known[name][rows].to(tensor.device)
                if unit.entry_modes and not bool((mask == mask[..., :1]).all()):
                    raise ValueError(f"the mask of layer '{name}' must show one-hot rows entirely or not at all")
                tensor = torch.where(mask, tensor, unit.some_state)
            if check:
                unit.check(tensor, name)
            batch[name] = tensor
        yield batch


def check_values(layers: Mapping[str, Any], units: Mapping[str, Unit], known: Known | None = None) -> None:
    """Raise ValueError if a known entry has a value that its units do not accept. Does not read samples on disk."""
    for name, unit in units.items():
        if isinstance(layers[name], Rows) or (layers[name].dtype == np.uint8 and _accepts_every_byte(unit)):
            continue
        for _ in batches(layers, {name: unit}, known):
            pass


def _accepts_every_byte(unit: Unit) -> bool:
    low, high = unit.data_range
    return not unit.entry_modes and low <= 0 and 255 * unit.byte_scale <= high


def _as_tensor(array: Array, *, copy: bool) -> Tensor:
    # PyTorch supports neither read-only tensors, nor negative strides, nor strides that are not multiples of an entry.
    shareable = array.flags.writeable and all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    return torch.from_numpy(np.array(array) if copy or not shareable else array)


def filled_batches(
    layers: Mapping[str, Any],
    units: Mapping[str, Unit],
    known: Known | None,
    fill: Callable[[dict[str, Tensor], dict[str, Tensor]], Mapping[str, Tensor]],
) -> Iterator[dict[str, Tensor]]:
    """Yield :func:`batches` in which `fill` has replaced all unknown entries, NaN included.

    `fill` receives the samples with unknown entries and their masks, by layer, and returns complete samples.
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
    """Replace the samples of a batch that have unknown entries, in place."""
    known = {name: mask.to(batch[name].device) for name, mask in known.items()}
    incomplete = torch.stack([~mask.flatten(1).all(1) for mask in known.values()]).any(0)
    if not bool(incomplete.any()):
        return
    samples = {name: array[incomplete] for name, array in batch.items()}
    masks_of_samples = {name: mask[incomplete] for name, mask in known.items()}
    for name, array in fill(samples, masks_of_samples).items():
        batch[name][incomplete] = array


def masks(mask: Mapping[str, Any], layers: Mapping[str, Any], *, every_layer: bool | None = False) -> dict[str, Tensor]:
    r"""Return masks of the known entries by layer, each (n, \*layer shape). NaN entries are unknown.

    Parameters
    ----------
    mask : mapping of str to boolean array
        Masks with the shape of the data or of one sample, as arrays or as rows. Layers without a mask are known.
    layers : mapping of str to array
        The data.
    every_layer : bool, optional
        Which layers must have a known entry: True for every layer, False for at least one layer, None for no layer.
    """
    if not set(mask) <= set(layers):
        raise ValueError(f"mask names {sorted(mask)}, but the data has {sorted(layers)}")
    known = {name: _mask_of_layer(mask.get(name, np.True_), layer) for name, layer in layers.items()}
    found = [bool(part.any()) for part in known.values()]
    if every_layer is not None and not (all(found) if every_layer else any(found)):
        raise ValueError("no entry is known: the mask is False, or the data is NaN, everywhere")
    return known


def _mask_of_layer(mask: Any, layer: Any) -> Tensor:
    shape = tuple(layer.shape)
    array = np.asarray(mask)
    if array.dtype != bool:
        raise ValueError(f"mask must be boolean, True where the value is known, got {array.dtype}")
    features = math.prod(shape[1:])
    if array.shape not in ((), shape, shape[1:], (shape[0], features), (features,)):
        raise ValueError(f"mask must have the shape of the data, {shape}, or of one sample, got {array.shape}")
    arranged = array if array.ndim == 0 else array.reshape(-1, *shape[1:])
    known = np.broadcast_to(arranged, shape)
    return torch.from_numpy(known & ~np.isnan(layer) if has_nan(layer) else known.copy())


def known_entries(
    mask: Mapping[str, Any] | None, layers: Mapping[str, Any], *, every_layer: bool | None = False
) -> dict[str, Tensor] | None:
    """Return :func:`masks`, or None if no mask is given and no array has NaN. Does not read samples on disk."""
    if mask is None and not any(map(has_nan, layers.values())):
        return None
    return masks(mask or {}, layers, every_layer=every_layer)


def has_nan(array: Any) -> bool:
    """Return whether an array in memory has NaN."""
    # The minimum is NaN if any entry is, and needs no temporary array.
    return isinstance(array, np.ndarray) and array.dtype.kind == "f" and array.size > 0 and bool(np.isnan(array.min()))
