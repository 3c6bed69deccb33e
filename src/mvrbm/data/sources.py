"""Sources of batches: arrays in memory or on disk, shards, PyTorch datasets and loaders.

Bytes become floats batch by batch; the data is never copied as a whole. File formats are in :mod:`mvrbm.io`.
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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mvrbm.data.moments import Moments, merge_moments, moments_of
from mvrbm.distributed import World
from mvrbm.io.formats import check_mapped, open_npy
from mvrbm.io.shards import Rows, Shards, is_folder_of_shards
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource

# Samples that the initial moments are computed from; more would change them by less than a percent.
_MOMENT_SAMPLES = 2**15
# Entries whose digest is computed within a second.
_DIGEST_ENTRIES = 2**27
# Entries, and samples, that are checked together before training: a few copies of them are in memory at once.
_ENTRIES_AT_ONCE, _SAMPLES_AT_ONCE = 2**19, 1024
_AHEAD = 3  # batches that are read before they are needed
_EMPTY = "the data is empty: at least one sample is needed"

# Arrays of any kind by layer.
Arrays = Mapping[str, Any]
# Numbers of samples, (n,).
_Rows = np.ndarray[Any, np.dtype[np.int64]]


class Batch(NamedTuple):
    """Samples of every visible layer, and which of their entries are known."""

    visible: dict[str, Tensor]  # each (n, *layer shape)
    known: dict[str, Tensor]  # boolean, for the layers that have missing entries
    total: int = 0  # samples of this update on all processes

    def __len__(self) -> int:
        """Return the number of samples on this process."""
        return len(next(iter(self.visible.values())))


class Source(ABC):
    """Data for a machine that can be iterated any number of times. NaN marks a missing entry, or is an error."""

    #: Number of samples, None if it is not known before an epoch ends.
    n_samples: int | None
    #: Whether an epoch can be resumed in the middle, with the same batches.
    resumable = True
    #: Whether every process reads all of the data, and takes its part of each batch.
    common = True
    #: Whether reading takes long enough to be done in a thread of its own.
    slow = False

    def __init__(self, machine: BoltzmannMachine, *, nan_is_missing: bool = False) -> None:
        self.machine, self.nan_is_missing = machine, nan_is_missing
        self.world = World()
        #: Whether batches are checked. The trainer turns this off after the first complete epoch.
        self.check = True

    @abstractmethod
    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, in a new order drawn from `rng`, without the first `start` of them."""

    @abstractmethod
    def head(self, count: int) -> Iterator[Batch]:
        """Yield up to about `count` samples, evenly spaced where possible, the same ones every time."""

    def first_look(self) -> None:
        """Read the first samples, so that data that cannot be read is reported before training begins."""
        next(self.head(1), None)

    @property
    def digest(self) -> str | None:
        """A digest of the data in its order; None where the data may be another one every time."""
        return None

    @property
    def whole(self) -> Arrays:
        """The arrays themselves by layer, if there are any and no entry is missing; otherwise empty."""
        arrays, known = self.with_masks
        return {} if known or self.nan_is_missing else arrays

    @property
    def with_masks(self) -> tuple[Arrays, Arrays]:
        """The arrays by layer, if there are any, and where they are known, for layers with a mask."""
        return {}, {}

    def check_all(self) -> None:
        """Check every sample now, if that has not been done: for paths that read the arrays themselves."""
        if self.check:
            for _ in self.head(2**62):
                pass
            self.check = False

    def n_batches(self, batch_size: int) -> int | None:
        """Return the number of batches per epoch, None if it is not known."""
        return None if self.n_samples is None else -(-self.n_samples // batch_size)

    def full_batch(self, batch_size: int) -> int:
        """Return the size of a full batch."""
        return batch_size if self.n_samples is None else min(batch_size, self.n_samples)

    def moments(self) -> dict[str, Moments]:
        """Return mean and variance of every entry, over a bounded number of samples."""
        sums: dict[str, list[Tensor]] = {}
        origins: dict[str, Tensor] = {}  # sums are of deviations from here, so that large values do not cancel
        for batch in self.head(_MOMENT_SAMPLES):
            for name, array in batch.visible.items():
                x, known = array.double().cpu(), batch.known.get(name)
                if known is None:
                    count = torch.full(x.shape[1:], float(len(x)), dtype=x.dtype)
                    x = x - origins.setdefault(name, x.sum(0) / count.clamp(min=1))
                else:
                    known = known.cpu()
                    count, x = known.sum(0, dtype=x.dtype), torch.where(known, x, 0.0)
                    x = torch.where(known, x - origins.setdefault(name, x.sum(0) / count.clamp(min=1)), 0.0)
                piece = [x.sum(0), (x**2).sum(0), count]
                sums[name] = [a + b for a, b in zip(sums[name], piece, strict=True)] if name in sums else piece
        if not sums and (self.common or self.world.size == 1):
            raise ValueError(_EMPTY)
        own = {name: moments_of(*parts, origin=origins[name]) for name, parts in sums.items()}
        if self.common:
            return own
        for name, unit in self.machine.layers.items():  # other processes may have all samples
            zero = torch.zeros(unit.shape, dtype=torch.float64)
            own.setdefault(name, Moments(zero, zero, 0))
        return merge_moments(own, self.world)

    def _batch(self, raw: Arrays, known: Arrays, total: int | None = None) -> Batch:
        """Return raw data as checked tensors of the machine's dtype and device."""
        masks = {name: torch.as_tensor(mask, device=self.machine.like.device) for name, mask in known.items()}
        if any(mask.dtype != torch.bool for mask in masks.values()):
            raise ValueError("masks must be boolean, True where the value is known")
        visible = {}
        for name, unit in self.machine.layers.items():
            array = unit.from_data(torch.as_tensor(raw[name]))
            if self.nan_is_missing:
                _leave_out_nan(masks, name, array)
            if name in masks:
                array = torch.where(masks[name], array, unit.some_state())  # the trainer draws these entries later
            visible[name] = array
        n = len(next(iter(visible.values())))
        # Shapes are always checked: a loader may deliver others later. Another process may have the whole batch.
        layers = self.machine.as_layers(visible, check=n > 0, values=self.check)
        return Batch(layers, masks, n if total is None else total)

    def empty_batch(self, total: int) -> Batch:
        """Return an empty batch, for an update whose samples other processes have."""
        layers = self.machine.layers.items()
        return Batch({name: self.machine.like.new_zeros(0, *unit.shape) for name, unit in layers}, {}, total)


class RowSource(Source):
    """Samples that can be read in any order, by their row numbers."""

    def __init__(self, machine: BoltzmannMachine, n_samples: int, *, nan_is_missing: bool = False) -> None:
        super().__init__(machine, nan_is_missing=nan_is_missing)
        self.n_samples: int = n_samples
        if n_samples == 0:
            raise ValueError(_EMPTY)

    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        return self._load(self._parts(batch_size, rng, start))

    def head(self, count: int) -> Iterator[Batch]:
        own = range(self.n_samples) if self.common else range(self.n_samples)[self.world.part_of(self.n_samples)]
        rows = np.unique(np.linspace(own.start, own.stop - 1, min(count, len(own))).astype(np.int64))
        entries = sum(math.prod(unit.shape) for unit in self.machine.layers.values())
        size = max(1, min(_SAMPLES_AT_ONCE, _ENTRIES_AT_ONCE // entries))
        pieces = (rows[first : first + size] for first in range(0, len(rows), size))
        return self._load((piece, len(piece)) for piece in pieces)

    def _parts(self, batch_size: int, rng: RandomSource, start: int) -> Iterator[tuple[_Rows, int]]:
        """Yield the rows of this process in each batch of an epoch, and the number of rows of all processes."""
        order = rng.permutation(self.n_samples).numpy()
        for first in range(start * batch_size, self.n_samples, batch_size):
            rows = order[first : first + batch_size]
            yield rows[self.world.part_of(len(rows))], len(rows)

    @abstractmethod
    def _load(self, parts: Iterable[tuple[_Rows, int]]) -> Iterator[Batch]:
        """Yield a batch for each of some rows, with its number of samples on all processes."""


class ArraySource(RowSource):
    """Arrays or tensors by layer, in memory or memory-mapped: anything with `len`, `shape` and indexing."""

    def __init__(
        self, machine: BoltzmannMachine, arrays: Arrays, known: Arrays, *, nan_is_missing: bool = False
    ) -> None:
        self.arrays, self.known = dict(arrays), dict(known)
        self.slow = any(not isinstance(array, Tensor) and type(array) is not np.ndarray for array in arrays.values())
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"all layers need the same number of samples, got {lengths}")
        super().__init__(machine, next(iter(lengths.values())), nan_is_missing=nan_is_missing)
        for name, mask in self.known.items():
            expected, shape = tuple(self.arrays[name].shape), tuple(mask.shape)
            if shape != expected:
                raise ValueError(f"the mask of layer '{name}' must have the data's shape {expected}, got {shape}")
        if set(self.known) == set(self.arrays) and not any(bool(mask.any()) for mask in self.known.values()):
            raise ValueError("no entry is known: the mask is False everywhere")

    @property
    def with_masks(self) -> tuple[Arrays, Arrays]:
        return (self.arrays, self.known) if self.common else ({}, {})

    @functools.cached_property
    def digest(self) -> str | None:
        """A digest of all samples, or of many evenly spaced ones where reading all would take long."""
        if any(getattr(array, "may_change", False) for array in self.arrays.values()):
            return None
        found = hashlib.sha256()
        entries = sum(math.prod(unit.shape) for unit in self.machine.layers.values())
        for batch in self.head(max(_MOMENT_SAMPLES, _DIGEST_ENTRIES // entries)):
            for tensor in (*batch.visible.values(), *batch.known.values()):
                found.update(tensor.cpu().contiguous().numpy().data)
        return found.hexdigest()

    def _load(self, parts: Iterable[tuple[_Rows, int]]) -> Iterator[Batch]:
        for rows, total in parts:
            visible = {name: _take(array, rows) for name, array in self.arrays.items()}
            yield self._batch(visible, {name: _take(mask, rows) for name, mask in self.known.items()}, total)


class ShardSource(ArraySource):
    """A folder of shards. Each process reads its own contiguous range of rows, and no others."""

    common = False

    def _parts(self, batch_size: int, rng: RandomSource, start: int) -> Iterator[tuple[_Rows, int]]:
        """Yield batches of this process's rows, as many as the other processes have."""
        world, ranges = self.world, self._ranges(batch_size)
        part, first, count = ranges[world.rank]
        order = first + rng.stream(world.size, world.rank).permutation(count).numpy()
        for number in range(start, self.n_batches(batch_size) or 0):
            here = [max(0, min(size, count - number * size)) for size, _, count in ranges]
            yield order[number * part : number * part + here[world.rank]], sum(here)

    def _ranges(self, batch_size: int) -> list[tuple[int, int, int]]:
        """Return, for each process, its part of a batch, its first row, and its number of rows in proportion."""
        found = []
        for rank in range(self.world.size):
            part = range(batch_size)[World(rank, self.world.size).part_of(batch_size)]
            first, end = (self.n_samples * edge // batch_size for edge in (part.start, part.stop))
            found.append((len(part), first, end - first))
        return found

    def n_batches(self, batch_size: int) -> int | None:
        """Return the number of batches of the process that has the most."""
        return max(-(-count // size) for size, _, count in self._ranges(batch_size))


class DatasetSource(RowSource):
    """A map-style PyTorch dataset whose items are arrays, mappings by layer, or tuples that begin with the array."""

    slow = True

    def __init__(self, machine: BoltzmannMachine, dataset: Dataset[Any], *, nan_is_missing: bool = False) -> None:
        super().__init__(machine, len(dataset), nan_is_missing=nan_is_missing)  # type: ignore[arg-type]
        self.dataset = dataset

    def _load(self, parts: Iterable[tuple[_Rows, int]]) -> Iterator[Batch]:
        parts = list(parts)
        # A loader draws a seed even without workers: not from the global generator.
        sampler = [rows.tolist() for rows, _ in parts if len(rows)]
        items = iter(DataLoader(self.dataset, batch_sampler=sampler, generator=torch.Generator()))
        for rows, total in parts:
            yield self._batch(layers_of(next(items), self.machine), {}, total) if len(rows) else self.empty_batch(total)


class LoaderSource(Source):
    """A loader, or any other iterable of batches that can be iterated more than once, in its own order."""

    resumable = common = False
    slow = True
    n_samples = None

    def __init__(self, machine: BoltzmannMachine, loader: Iterable[Any], *, nan_is_missing: bool = False) -> None:
        super().__init__(machine, nan_is_missing=nan_is_missing)
        self.loader = loader

    def first_look(self) -> None:
        """Do nothing: a loader may deliver its first batch only once."""

    def n_batches(self, batch_size: int) -> int | None:
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def full_batch(self, batch_size: int) -> int:
        """Return 1: the size of the loader's batches is not known before they come."""
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
    """Return a source for data of any kind.

    Parameters
    ----------
    data, mask, nan_is_missing
        See :meth:`mvrbm.training.Trainer.fit`. A mask goes with arrays only.
    machine : BoltzmannMachine
        The machine that the data is for.
    batch_size : int
        Batch size of iterable datasets, which are divided into batches here.
    """
    if isinstance(data, Source):
        return data
    if mask is not None and isinstance(data, DataLoader | Dataset):
        raise ValueError("a mask goes with arrays: let the dataset mark missing entries as NaN instead")
    if isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=batch_size)
    if isinstance(data, DataLoader):
        return LoaderSource(machine, data, nan_is_missing=nan_is_missing)
    if isinstance(data, Dataset):
        return DatasetSource(machine, data, nan_is_missing=nan_is_missing)
    arrays = {name: _as_array(part) for name, part in layers_of(data, machine).items()}
    if any(isinstance(array, Rows) for array in arrays.values()):
        if mask is not None:
            raise ValueError("a mask goes with arrays: mark missing entries of shards as NaN instead")
        return ShardSource(machine, arrays, {}, nan_is_missing=nan_is_missing)
    masks = {}
    if isinstance(mask, Mapping):
        masks = dict(mask)
        if foreign := set(masks) - set(machine.layers):
            raise ValueError(f"mask names layers {sorted(foreign)}, but there are only {sorted(machine.layers)}")
    elif mask is not None:
        masks = layers_of(mask, machine)
    known = {name: _as_array(part) for name, part in masks.items()}
    return ArraySource(machine, arrays, known, nan_is_missing=nan_is_missing)


def masks_of(source: Source) -> dict[str, Tensor]:
    """Return which entries of a source's arrays are known, (n, *layer shape), for layers that may have missing ones."""
    arrays, given = source.with_masks
    data = {name: torch.as_tensor(array) for name, array in arrays.items()}
    known = {name: torch.as_tensor(mask) for name, mask in given.items()}
    for name, array in data.items() if source.nan_is_missing else ():
        _leave_out_nan(known, name, array)
    checked = source.machine.as_masks(known, data)
    return {name: mask for name, mask in checked.items() if mask is not None and name in known}


def _leave_out_nan(known: dict[str, Tensor], name: str, array: Tensor) -> None:
    """Let a layer's mask leave out the entries of its data that are NaN, if there are any."""
    there = ~torch.isnan(array)
    if not bool(there.all()):
        known[name] = known[name].to(there.device) & there if name in known else there


def layers_of(item: Any, machine: BoltzmannMachine) -> dict[str, Any]:
    """Return an item or batch by layer name: a mapping as it is, a tuple's first element, or the array itself."""
    names = list(machine.layers)
    if isinstance(item, Mapping):
        if missing := set(names) - set(item):
            raise ValueError(f"the data lacks layers {sorted(missing)}, it has {sorted(item)}")
        return {name: item[name] for name in names}
    if isinstance(item, tuple | list) and len(names) == 1 and len(item) and hasattr(item[0], "shape"):
        item = item[0]  # the rest is a label
    if len(names) > 1:
        raise ValueError(f"this machine has visible layers {names}: give data as a mapping from these names")
    return {names[0]: item}


def _as_array(part: Any) -> Any:
    if isinstance(part, str | os.PathLike):
        return Shards(part) if is_folder_of_shards(part) else open_npy(part)
    return part if hasattr(part, "shape") else np.asarray(part)


def _take(array: Any, rows: _Rows) -> Tensor:
    if isinstance(array, Tensor):
        # Five times as fast as indexing, which copies entry by entry.
        return array.index_select(0, torch.as_tensor(rows, device=array.device))
    check_mapped(array)
    return torch.from_numpy(np.ascontiguousarray(array[rows]))


def read_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yield the same batches, reading the next ones in a thread of its own."""
    with ThreadPoolExecutor(1, "mvrbm-reader") as reader:
        ahead = deque(reader.submit(next, batches, None) for _ in range(_AHEAD))
        try:
            while (batch := ahead.popleft().result()) is not None:
                ahead.append(reader.submit(next, batches, None))
                yield batch
        finally:
            reader.shutdown(cancel_futures=True)
