"""Sources of training data: arrays in memory or on disk, shards, PyTorch datasets and data loaders.

A source converts the data to floats one batch at a time, so it never copies the full dataset. :mod:`mvrbm.io`
implements the file formats.
"""

import functools
import hashlib
import itertools
import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mvrbm.data.moments import MOMENT_SAMPLES, Moments, MomentSums, merge_moments
from mvrbm.data.sample_weights import SampleWeights
from mvrbm.distributed import World
from mvrbm.io.formats import check_mapped, open_npy
from mvrbm.io.shards import Rows, Shards, is_folder_of_shards
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource

# Minimum number of samples to hash.
_DIGEST_SAMPLES = 2**15
# Maximum number of entries to hash, which takes about one second.
_DIGEST_ENTRIES = 2**27
# Maximum number of entries in a batch that `head` yields, because several copies of a batch are in memory at a time.
_ENTRIES_AT_ONCE = 2**19
# Maximum number of samples in a batch that `head` yields.
_SAMPLES_AT_ONCE = 1024
# Number of batches that the reader thread prefetches.
_AHEAD = 3
_EMPTY = "the data is empty, but at least one sample is required"

# Mapping from layer name to an array of any type.
Arrays = Mapping[str, Any]
# Sample indices, of shape (n,).
_Rows = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Batch:
    """Samples that one process contributes to an update, with masks of their known entries.

    Parameters
    ----------
    visible : dict of str to Tensor
        Samples for each visible layer, as tensors of shape (n, *layer shape).
    known : dict of str to Tensor
        Boolean masks of shape (n, *layer shape) that are True for known entries. Layers without a mask have no missing
        entries.
    total : int
        Total number of samples in the update, over all processes.
    first : int
        Index of this process's first sample among all samples in the update.
    """

    visible: dict[str, Tensor]
    known: dict[str, Tensor]
    total: int = 0
    first: int = 0

    def __len__(self) -> int:
        """Return the number of samples that this process contributes."""
        return len(next(iter(self.visible.values())))


class Source(ABC):
    """Training data for a machine. A source can be iterated over any number of times.

    If `nan_is_missing` is True, NaN values are treated as missing entries. Otherwise, they raise an error.
    """

    #: Number of samples, or None if it is unknown until an epoch ends.
    n_samples: int | None
    #: Whether training can resume in the middle of an epoch with the same batches.
    resumable = True
    #: Whether every process can read all samples, so that each batch is divided among the processes.
    common = True
    #: Whether reading is slow enough to warrant a separate thread.
    slow = False
    #: Sample weights, or None if all samples have the same weight.
    weights: SampleWeights | None = None

    def __init__(self, machine: BoltzmannMachine, *, nan_is_missing: bool = False) -> None:
        self.machine, self.nan_is_missing = machine, nan_is_missing
        self.world = World()
        #: Whether to validate the values in each batch. Only sources of samples that never change set this to False,
        #: after they have read every sample.
        self.check = True

    @abstractmethod
    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, shuffled with `rng`, skipping the first `start` batches."""

    @abstractmethod
    def head(self, count: int) -> Iterator[Batch]:
        """Yield about `count` samples in batches.

        Every call yields the same samples, which are evenly spaced if possible. Samples with zero weight are excluded.
        """

    def head_weights(self, count: int) -> Iterator[Tensor | None]:
        """Yield the weights of the samples in the batches of `head`, or None if all samples have the same weight."""
        return itertools.repeat(None)

    def weigh(self, sample_weight: Any) -> None:
        """Set the weights of the samples, or give all samples the same weight if `sample_weight` is None."""
        if sample_weight is not None:
            raise ValueError("sample_weight is not supported for data loaders; pass an array or a map-style dataset")

    @property
    def n_effective(self) -> float:
        """Number of samples, or, with weights, of equally weighted samples whose mean has the same variance.

        The result is infinity if the number of samples is unknown.
        """
        if self.weights is not None:
            return self.weights.n_effective
        return math.inf if self.n_samples is None else self.n_samples

    def first_look(self) -> None:
        """Read one sample so that unreadable data raises an error before training starts."""
        next(self.head(1), None)

    @property
    def digest(self) -> str | None:
        """Hash of all samples in order, or None if the samples may differ between epochs."""
        return None

    @property
    def whole(self) -> Arrays:
        """Dictionary of arrays, keyed by layer name.

        It is empty if the data is not stored in arrays or may have missing entries.
        """
        arrays, known = self.with_masks
        return {} if known or self.nan_is_missing else arrays

    @property
    def with_masks(self) -> tuple[Arrays, Arrays]:
        """Arrays and masks of known entries, as two dictionaries keyed by layer name. Some layers may have no mask.

        Both dictionaries are empty if the data is not stored in arrays.
        """
        return {}, {}

    def check_all(self) -> None:
        """Validate every sample, unless all samples have already been validated.

        Backends that read the arrays directly call this method first.
        """
        if self.check:
            for _ in self.head(2**62):
                pass

    def n_batches(self, batch_size: int) -> int | None:
        """Return the number of batches per epoch, or None if the number is unknown."""
        return None if self.n_samples is None else -(-self.n_samples // batch_size)

    def full_batch(self, batch_size: int) -> int:
        """Return the number of samples in a full batch: `batch_size`, or the number of samples if that is smaller."""
        return batch_size if self.n_samples is None else min(batch_size, self.n_samples)

    def moments(self) -> dict[str, Moments]:
        """Compute the mean and variance of each entry from a limited number of samples, keyed by layer name."""
        sums: dict[str, MomentSums] = {}
        for batch, weight in zip(self.head(MOMENT_SAMPLES), self.head_weights(MOMENT_SAMPLES), strict=False):
            for name, array in batch.visible.items():
                sums.setdefault(name, MomentSums()).add(array, batch.known.get(name), weight)
        if not sums and (self.common or self.world.size == 1):
            raise ValueError(_EMPTY)
        own = {name: part.moments() for name, part in sums.items()}
        if self.common:
            return own
        # A process without samples must still take part in the merge. It contributes a count of zero.
        for name, unit in self.machine.layers.items():
            zero = torch.zeros(unit.shape, dtype=torch.float64)
            own.setdefault(name, Moments(zero, zero, 0))
        return merge_moments(own, self.world)

    def _batch(self, raw: Arrays, known: Arrays, total: int | None = None, first: int = 0) -> Batch:
        """Convert raw data and masks to a batch of validated tensors with the machine's dtype and device."""
        masks = {name: torch.as_tensor(mask, device=self.machine.like.device) for name, mask in known.items()}
        if any(mask.dtype != torch.bool for mask in masks.values()):
            raise ValueError("masks must be boolean arrays that are True where the value is known")
        visible = {}
        for name, unit in self.machine.layers.items():
            array = unit.from_data(torch.as_tensor(raw[name]))
            if self.nan_is_missing:
                _leave_out_nan(masks, name, array)
            if name in masks:
                # Fill missing entries with a valid placeholder. The trainer samples them later.
                array = torch.where(masks[name], array, unit.some_state)
            visible[name] = array
        n = len(next(iter(visible.values())))
        # Validate the shapes in every batch, because a loader may change them. The batch is empty if all of its samples
        # are on other processes.
        layers = self.machine.as_layers(visible, check=n > 0, values=self.check)
        return Batch(layers, masks, n if total is None else total, first)

    def empty_batch(self, total: int) -> Batch:
        """Return an empty batch for an update whose `total` samples are all on other processes."""
        layers = self.machine.layers.items()
        return Batch({name: self.machine.like.new_zeros(0, *unit.shape) for name, unit in layers}, {}, total)


class BatchRows(NamedTuple):
    """Indices of the rows that one process reads for one update. `total` and `first` are as in :class:`Batch`."""

    rows: _Rows
    total: int
    first: int


class RowSource(Source):
    """Source with random access to samples by index."""

    def __init__(self, machine: BoltzmannMachine, n_samples: int, *, nan_is_missing: bool = False) -> None:
        super().__init__(machine, nan_is_missing=nan_is_missing)
        self.n_samples: int = n_samples
        if n_samples == 0:
            raise ValueError(_EMPTY)

    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        return self._load(self._parts(batch_size, rng, start))

    def head(self, count: int) -> Iterator[Batch]:
        return self._load(BatchRows(piece, len(piece), 0) for piece in self._head_rows(count))

    def head_weights(self, count: int) -> Iterator[Tensor | None]:
        if self.weights is None:
            return super().head_weights(count)
        values = self.weights.values
        return (torch.from_numpy(values[piece]) for piece in self._head_rows(count))

    def weigh(self, sample_weight: Any) -> None:
        weights = None if sample_weight is None else SampleWeights(sample_weight)
        if weights is not None and len(weights) != self.n_samples:
            raise ValueError(
                f"sample_weight must have one weight for each of the {self.n_samples:,} samples, got {len(weights):,}"
            )
        self.weights = None if weights is None or weights.equal else weights
        self.check = True  # samples whose weight was zero have not been validated

    def _head_rows(self, count: int) -> Iterator[_Rows]:
        """Yield the indices of the rows in each batch of `head`."""
        rows = np.arange(self.n_samples)
        if not self.common:
            rows = rows[self.world.part_of(self.n_samples)]
        if self.weights is not None:
            rows = rows[self.weights.values[rows] > 0]
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.int64))]
        entries = sum(math.prod(unit.shape) for unit in self.machine.layers.values())
        size = max(1, min(_SAMPLES_AT_ONCE, _ENTRIES_AT_ONCE // entries))
        return (rows[first : first + size] for first in range(0, len(rows), size))

    def _parts(self, batch_size: int, rng: RandomSource, start: int) -> Iterator[BatchRows]:
        """Yield the rows that this process reads for each batch of an epoch."""
        order = self._order(rng, self.n_samples)
        for begin in range(start * batch_size, self.n_samples, batch_size):
            rows = order[begin : begin + batch_size]
            own = self.world.part_of(len(rows))
            yield BatchRows(rows[own], len(rows), own.start)

    def _order(self, rng: RandomSource, n: int) -> _Rows:
        """Return a random order of `n` rows, in which each row occurs in proportion to its weight."""
        order = rng.permutation(n)
        if self.weights is not None:
            order = self.weights.draw(order[None], [rng])[0]
        return order.numpy()

    @abstractmethod
    def _load(self, parts: Iterable[BatchRows]) -> Iterator[Batch]:
        """Load the given rows and yield them as batches."""


class ArraySource(RowSource):
    """Source of samples stored in one array or tensor per layer, either in memory or memory-mapped.

    Arrays can be of any type that supports `len`, `shape` and indexing. `known` contains masks that are True for known
    entries.
    """

    def __init__(
        self, machine: BoltzmannMachine, arrays: Arrays, known: Arrays, *, nan_is_missing: bool = False
    ) -> None:
        self.arrays, self.known = dict(arrays), dict(known)
        self.slow = any(not isinstance(array, Tensor) and type(array) is not np.ndarray for array in arrays.values())
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"all layers must have the same number of samples, got {lengths}")
        super().__init__(machine, next(iter(lengths.values())), nan_is_missing=nan_is_missing)
        for name, mask in self.known.items():
            expected, shape = tuple(self.arrays[name].shape), tuple(mask.shape)
            if shape != expected:
                raise ValueError(f"the mask for layer '{name}' must have the data's shape {expected}, got {shape}")
        if set(self.known) == set(self.arrays) and not any(bool(mask.any()) for mask in self.known.values()):
            raise ValueError("no entries are known because the mask is False everywhere")

    @property
    def with_masks(self) -> tuple[Arrays, Arrays]:
        return (self.arrays, self.known) if self.common else ({}, {})

    @property
    def _is_fixed(self) -> bool:
        """Whether samples are always the same when they are read again."""
        return not any(getattr(array, "may_change", False) for array in self.arrays.values())

    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        yield from super().batches(batch_size, rng, start)
        # An epoch with weights may leave out samples.
        if start == 0 and self.weights is None and self._is_fixed:
            self.check = False

    def check_all(self) -> None:
        super().check_all()
        self.check = self.check and not self._is_fixed

    @functools.cached_property
    def digest(self) -> str | None:
        """Hash of all samples, or of evenly spaced samples if reading all samples would take too long."""
        if not self._is_fixed:
            return None
        found = hashlib.sha256()
        entries = sum(math.prod(unit.shape) for unit in self.machine.layers.values())
        for batch in self.head(max(_DIGEST_SAMPLES, _DIGEST_ENTRIES // entries)):
            for tensor in (*batch.visible.values(), *batch.known.values()):
                found.update(tensor.cpu().contiguous().numpy().data)
        return found.hexdigest()

    def moments(self) -> dict[str, Moments]:
        found = super().moments()
        if self.common and self.n_samples <= MOMENT_SAMPLES and self._is_fixed:
            self.check = False  # Every sample has been read and validated.
        return found

    def _load(self, parts: Iterable[BatchRows]) -> Iterator[Batch]:
        for rows, total, first in parts:
            visible = {name: _take(array, rows) for name, array in self.arrays.items()}
            known = {name: _take(mask, rows) for name, mask in self.known.items()}
            yield self._batch(visible, known, total, first)


class ShardSource(ArraySource):
    """Source of samples stored in a folder of shards. Each process reads only its own contiguous range of rows."""

    common = False

    def weigh(self, sample_weight: Any) -> None:
        super().weigh(sample_weight)
        if self.weights is not None and self.world.size > 1:
            raise ValueError("sample_weight is not supported when training on shards with multiple processes")

    def _parts(self, batch_size: int, rng: RandomSource, start: int) -> Iterator[BatchRows]:
        """Yield batches of this process's rows. All processes have the same number of batches."""
        world = self.world
        ranges = self._ranges(batch_size)
        size, rows = ranges[world.rank]
        order = rows.start + self._order(rng.stream(world.size, world.rank), len(rows))
        for number in range(start, self.n_batches(batch_size)):
            counts = [max(0, min(part, len(own) - number * part)) for part, own in ranges]
            begin = number * size
            own_rows = order[begin : begin + counts[world.rank]]
            yield BatchRows(own_rows, sum(counts), sum(counts[: world.rank]))

    def _ranges(self, batch_size: int) -> list[tuple[int, range]]:
        """Return each process's number of samples per batch and its range of rows.

        The lengths of the ranges are proportional to the numbers of samples per batch.
        """
        found = []
        for rank in range(self.world.size):
            part = range(batch_size)[World(rank, self.world.size).part_of(batch_size)]
            rows = range(self.n_samples * part.start // batch_size, self.n_samples * part.stop // batch_size)
            found.append((len(part), rows))
        return found

    def n_batches(self, batch_size: int) -> int:
        """Return the number of batches per epoch: the maximum over all processes."""
        return max(-(-len(rows) // size) for size, rows in self._ranges(batch_size))


class DatasetSource(RowSource):
    """Source of samples from a map-style PyTorch dataset.

    The items of the dataset are arrays, mappings from layer names to arrays, or tuples whose first element is an array.
    """

    slow = True

    def __init__(self, machine: BoltzmannMachine, dataset: Dataset[Any], *, nan_is_missing: bool = False) -> None:
        super().__init__(machine, len(dataset), nan_is_missing=nan_is_missing)  # type: ignore[arg-type]
        self.dataset = dataset

    def _load(self, parts: Iterable[BatchRows]) -> Iterator[Batch]:
        parts = list(parts)
        sampler = [part.rows.tolist() for part in parts if len(part.rows)]
        # Even without workers, a loader draws a seed. A separate generator leaves PyTorch's global generator unchanged.
        items = iter(DataLoader(self.dataset, batch_sampler=sampler, generator=torch.Generator()))
        for rows, total, first in parts:
            if len(rows):
                yield self._batch(layers_of(next(items), self.machine), {}, total, first)
            else:
                yield self.empty_batch(total)


class LoaderSource(Source):
    """Source of batches from a PyTorch data loader or any other iterable that can be iterated over more than once.

    The loader determines the order and the size of the batches.
    """

    resumable = False
    common = False
    slow = True
    n_samples = None

    def __init__(self, machine: BoltzmannMachine, loader: Iterable[Any], *, nan_is_missing: bool = False) -> None:
        super().__init__(machine, nan_is_missing=nan_is_missing)
        self.loader = loader

    def first_look(self) -> None:
        """Do nothing, because some loaders yield their first batch only once."""

    def n_batches(self, batch_size: int) -> int | None:
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def full_batch(self, batch_size: int) -> int:
        """Return 1, because a loader's batch size is unknown until it yields a batch."""
        return 1

    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        for item in itertools.islice(iter(self.loader), start, None):
            yield self._batch(layers_of(item, self.machine), {})

    def head(self, count: int) -> Iterator[Batch]:
        seen = 0
        for item in self.loader:
            yield (batch := self._batch(layers_of(item, self.machine), {}))
            seen += len(batch)
            if seen >= count:
                return


def as_source(
    data: Any, machine: BoltzmannMachine, *, mask: Any = None, nan_is_missing: bool = False, batch_size: int = 100
) -> Source:
    """Create a source from data of any supported type.

    Parameters
    ----------
    data, mask, nan_is_missing
        See :meth:`mvrbm.training.Trainer.fit`. Masks are supported only for arrays.
    machine : BoltzmannMachine
        The machine to train.
    batch_size : int
        Batch size for iterable datasets.
    """
    if isinstance(data, Source):
        _check_source(data, machine, mask=mask, nan_is_missing=nan_is_missing)
        return data
    if mask is not None and isinstance(data, DataLoader | Dataset):
        raise ValueError("mask is supported only for arrays; use NaN for missing entries in the dataset instead")
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=batch_size)
    if isinstance(data, DataLoader):
        return LoaderSource(machine, data, nan_is_missing=nan_is_missing)
    if isinstance(data, Dataset):
        return DatasetSource(machine, data, nan_is_missing=nan_is_missing)
    arrays = _arrays_of(data, machine, "the data")
    if any(isinstance(array, Rows) for array in arrays.values()):
        if mask is not None:
            raise ValueError("mask is supported only for arrays; use NaN for missing entries in the shards instead")
        return ShardSource(machine, arrays, {}, nan_is_missing=nan_is_missing)
    return ArraySource(machine, arrays, _known_of(mask, machine), nan_is_missing=nan_is_missing)


def _check_source(source: Source, machine: BoltzmannMachine, *, mask: Any, nan_is_missing: bool) -> None:
    """Raise ValueError if arguments would have no effect, or if a source converts data for other layers."""
    made_for, needed = (_format_of(one) for one in (source.machine, machine))
    if made_for != needed:
        raise ValueError(
            f"the source was created for another machine: it yields {made_for}, but this machine needs {needed}; pass "
            "the data of the source instead"
        )
    if mask is not None or (nan_is_missing and not source.nan_is_missing):
        raise ValueError("mask and nan_is_missing have no effect on a source; pass them to as_source")


def _format_of(machine: BoltzmannMachine) -> str:
    """Describe everything that the conversion of data depends on: the visible units, the dtype and the device."""
    like = machine.like
    return ", ".join([*(f"{name}: {unit}" for name, unit in machine.layers.items()), f"{like.dtype} on {like.device}"])


def _known_of(mask: Any, machine: BoltzmannMachine) -> Arrays:
    """Return the masks of known entries as arrays, keyed by layer name. Some layers may have no mask."""
    if mask is None:
        return {}
    if isinstance(mask, Mapping):
        if foreign := set(mask) - set(machine.layers):
            raise ValueError(
                f"the mask contains layers {sorted(foreign)}, but the machine has only {sorted(machine.layers)}"
            )
        return {name: _as_array(part) for name, part in mask.items()}
    return _arrays_of(mask, machine, "the mask")


def _arrays_of(data: Any, machine: BoltzmannMachine, what: str) -> Arrays:
    """Convert a whole dataset to arrays, keyed by layer name. `what` describes the dataset in error messages."""
    if isinstance(data, tuple | list) and any(hasattr(part, "shape") for part in data):
        raise ValueError(
            f"{what} is a {type(data).__name__} of {len(data)} arrays, but one array with samples along the first axis "
            "is required; combine samples with numpy.stack or parts with numpy.concatenate, and leave out labels"
        )
    return {name: _as_array(part) for name, part in _by_layer(data, machine).items()}


def masks_of(source: Source) -> dict[str, Tensor]:
    """Return boolean masks of the known entries for all layers that may have missing entries.

    Each mask has shape (n, *layer shape) and is True for known entries.
    """
    arrays, given = source.with_masks
    data = {name: torch.as_tensor(array) for name, array in arrays.items()}
    known = {name: torch.as_tensor(mask) for name, mask in given.items()}
    for name, array in data.items() if source.nan_is_missing else ():
        _leave_out_nan(known, name, array)
    checked = source.machine.as_masks(known, data)
    return {name: mask for name, mask in checked.items() if mask is not None and name in known}


def _leave_out_nan(known: dict[str, Tensor], name: str, array: Tensor) -> None:
    """Mark NaN entries as unknown in a layer's mask. A layer without a mask gets one only if it contains NaN."""
    there = ~torch.isnan(array)
    if not bool(there.all()):
        known[name] = known[name].to(there.device) & there if name in known else there


def layers_of(batch: Any, machine: BoltzmannMachine) -> dict[str, Any]:
    """Convert a batch of a dataset or a loader to a mapping from layer names to arrays.

    If the batch is a tuple or a list, only its first element is used. The other elements are labels.
    """
    pair = isinstance(batch, tuple | list) and len(machine.layers) == 1 and len(batch) and hasattr(batch[0], "shape")
    return _by_layer(batch[0] if pair else batch, machine)


def _by_layer(data: Any, machine: BoltzmannMachine) -> dict[str, Any]:
    """Select the machine's layers from a mapping. Other data belongs to the only layer."""
    names = list(machine.layers)
    if isinstance(data, Mapping):
        if missing := set(names) - set(data):
            raise ValueError(f"the data contains layers {sorted(data)} but lacks layers {sorted(missing)}")
        return {name: data[name] for name in names}
    if len(names) > 1:
        raise ValueError(f"this machine has several visible layers; pass a mapping from {names} to arrays")
    return {names[0]: data}


def _as_array(part: Any) -> Any:
    if isinstance(part, str | os.PathLike):
        return Shards(part) if is_folder_of_shards(part) else open_npy(part)
    return part if hasattr(part, "shape") else np.asarray(part)


def _take(array: Any, rows: _Rows) -> Tensor:
    if isinstance(array, Tensor):
        # This is five times as fast as indexing, which copies one entry at a time.
        return array.index_select(0, torch.as_tensor(rows, device=array.device))
    if type(array) is not np.ndarray or array.base is not None:
        check_mapped(array)
    return torch.from_numpy(np.ascontiguousarray(array[rows]))


def read_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Prefetch batches in a separate thread and yield them in their original order."""
    with ThreadPoolExecutor(1, "mvrbm-reader") as reader:
        ahead = deque(reader.submit(next, batches, None) for _ in range(_AHEAD))
        try:
            while (batch := ahead.popleft().result()) is not None:
                ahead.append(reader.submit(next, batches, None))
                yield batch
        finally:
            reader.shutdown(cancel_futures=True)
