"""Sources of batches: arrays in memory or on disk, shards, PyTorch datasets and loaders.

Bytes become floats batch by batch; the data is never copied as a whole. File formats are in :mod:`mvrbm.io`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mvrbm.io.shards import Shards, is_folder_of_shards
from mvrbm.learning.distributed import World
from mvrbm.learning.moments import Moments, merge_moments, moments_of
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource

# Samples that the initial moments are computed from; more would change them by less than a percent.
_MOMENT_SAMPLES = 2**15
# Entries, and samples, that are checked together before training: a few copies of them are in memory at once.
_ENTRIES_AT_ONCE, _SAMPLES_AT_ONCE = 2**19, 1024


class Batch(NamedTuple):
    """Samples of every visible layer, and which of their entries are known."""

    visible: dict[str, Tensor]  # each (n, *layer shape)
    known: dict[str, Tensor]  # boolean, for the layers that have missing entries
    total: int = 0  # samples of this update on all processes

    def __len__(self) -> int:
        """Return the number of samples on this process."""
        return len(next(iter(self.visible.values())))

    def with_total(self, total: int) -> Batch:
        """Return the same samples as part of a batch of `total` samples on all processes."""
        return Batch(self.visible, self.known, total)


class Source(ABC):
    """Data that can be iterated any number of times.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine, whose layers, dtype and device the batches must match.
    nan_is_missing : bool
        Whether NaN marks a missing entry. Otherwise it is an error.
    """

    #: Number of samples, None if it is not known before an epoch ends.
    n_samples: int | None
    #: Whether an epoch can be resumed in the middle, with the same batches.
    resumable = True
    #: Whether every process reads all of the data, and takes its part of each batch.
    common = True

    def __init__(self, machine: BoltzmannMachine, *, nan_is_missing: bool = False) -> None:
        self.machine = machine
        self.nan_is_missing = nan_is_missing
        self.world = World()
        #: Whether batches are checked. The trainer turns this off after the first complete epoch.
        self.check = True

    @abstractmethod
    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, in a new order drawn from `rng`, without the first `start` of them."""

    #: Whether reading takes long enough to be done in a thread of its own.
    slow = False

    def first_look(self) -> None:
        """Read the first samples, so that data that cannot be read is reported before training begins."""
        for _ in self.head(1):
            return

    @property
    def whole(self) -> Mapping[str, Any]:
        """The arrays themselves by layer, if there are any and no entry is missing; otherwise empty."""
        return {}

    def check_all(self) -> None:
        """Check every sample now, if that has not been done: for paths that read the arrays themselves."""
        if self.check:
            for _ in self.head(2**62):
                pass
            self.check = False

    @abstractmethod
    def head(self, count: int) -> Iterator[Batch]:
        """Yield up to about `count` samples, evenly spaced where possible, the same ones every time."""

    def _pieces(self, count: int) -> list[slice]:
        """Return slices of `count` samples that are small enough to be checked together."""
        entries = sum(math.prod(unit.shape) for unit in self.machine.layers.values())
        size = max(1, min(_SAMPLES_AT_ONCE, _ENTRIES_AT_ONCE // entries))
        return [slice(first, first + size) for first in range(0, count, size)]

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
            raise ValueError("the data is empty: at least one sample is needed")
        own = {name: moments_of(*parts, origin=origins[name]) for name, parts in sums.items()}
        if self.common:
            return own
        if not own:  # other processes have all samples
            shapes = {name: torch.zeros(unit.shape, dtype=torch.float64) for name, unit in self.machine.layers.items()}
            own = {name: Moments(zero, zero, 0) for name, zero in shapes.items()}
        return merge_moments(own, self.world)

    def _batch(self, raw: Mapping[str, Any], known: Mapping[str, Any], total: int | None = None) -> Batch:
        """Return raw data as checked tensors of the machine's dtype and device."""
        masks = {name: torch.as_tensor(mask, device=self.machine.like.device) for name, mask in known.items()}
        if any(mask.dtype != torch.bool for mask in masks.values()):
            raise ValueError("masks must be boolean, True where the value is known")
        visible = {}
        for name, unit in self.machine.layers.items():
            array = unit.from_data(torch.as_tensor(raw[name]))
            if self.nan_is_missing:
                missing = torch.isnan(array)
                if bool(missing.any()):
                    masks[name] = masks[name] & ~missing if name in masks else ~missing
            if name in masks:
                array = torch.where(masks[name], array, unit.some_state())  # the trainer draws these entries later
            visible[name] = array
        n = len(next(iter(visible.values())))
        # Shapes are always checked: a loader may deliver others later. Another process may have the whole batch.
        layers = self.machine.as_layers(visible, check=n > 0, values=self.check)
        return Batch(layers, masks, n if total is None else total)

    def empty_batch(self, total: int) -> Batch:
        """Return an empty batch, for an update whose samples other processes have."""
        like = self.machine.like
        return Batch({name: like.new_zeros(0, *unit.shape) for name, unit in self.machine.layers.items()}, {}, total)


class ArraySource(Source):
    """Arrays or tensors by layer, in memory or memory-mapped: anything with `len`, `shape` and indexing."""

    def __init__(
        self,
        machine: BoltzmannMachine,
        arrays: Mapping[str, Any],
        known: Mapping[str, Any],
        *,
        nan_is_missing: bool = False,
    ) -> None:
        super().__init__(machine, nan_is_missing=nan_is_missing)
        self.arrays, self.known = dict(arrays), dict(known)
        self.slow = any(not isinstance(array, Tensor) and type(array) is not np.ndarray for array in arrays.values())
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"all layers need the same number of samples, got {lengths}")
        self.n_samples = next(iter(lengths.values()))
        if self.n_samples == 0:
            raise ValueError("the data is empty: at least one sample is needed")
        for name, mask in self.known.items():
            if tuple(mask.shape) != tuple(self.arrays[name].shape):
                raise ValueError(
                    f"the mask of layer '{name}' must have the data's shape {tuple(self.arrays[name].shape)}, "
                    f"got {tuple(mask.shape)}"
                )

    @property
    def whole(self) -> Mapping[str, Any]:
        """The arrays, if no entry is missing."""
        return {} if self.known or self.nan_is_missing or not self.common else self.arrays

    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch in a new order."""
        order = rng.permutation(len(self)).cpu().numpy()
        for first in range(start * batch_size, len(self), batch_size):
            rows = order[first : first + batch_size]
            yield self._rows(rows[self.world.part_of(len(rows))], len(rows))

    def head(self, count: int) -> Iterator[Batch]:
        """Yield evenly spaced samples."""
        rows = np.unique(np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64))
        yield from (self._rows(rows[piece]) for piece in self._pieces(len(rows)))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.n_samples or 0

    def _rows(self, rows: np.ndarray[Any, np.dtype[np.int64]], total: int | None = None) -> Batch:
        visible = {name: _take(array, rows) for name, array in self.arrays.items()}
        return self._batch(visible, {name: _take(mask, rows) for name, mask in self.known.items()}, total)


class ShardSource(ArraySource):
    """A folder of shards. Each process reads its own contiguous range of rows, and no others."""

    common = False

    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of this process's rows in a new order, as many as the other processes have."""
        world, ranges = self.world, self._ranges(batch_size)
        # Ranges differ in length: a common random stream would get out of step.
        own = rng.split(1)[0].stream(world.size, world.rank)
        first, count = ranges[world.rank][1:]
        order = first + own.permutation(count).cpu().numpy()
        for number in range(start, self.n_batches(batch_size) or 0):
            here = [max(0, min(size, count - number * size)) for size, _, count in ranges]
            begin = number * ranges[world.rank][0]
            yield self._rows(order[begin : begin + here[world.rank]], sum(here))

    def _ranges(self, batch_size: int) -> list[tuple[int, int, int]]:
        """Return, for each process, its part of a batch, its first row, and its number of rows in proportion."""
        found = []
        for rank in range(self.world.size):
            part = World(rank, self.world.size).part_of(batch_size)
            first, end = (len(self) * edge // batch_size for edge in (part.start, part.stop))
            found.append((_length(part), first, end - first))
        return found

    def head(self, count: int) -> Iterator[Batch]:
        """Yield evenly spaced samples of this process."""
        own = self.world.part_of(len(self))
        rows = np.unique(np.linspace(own.start, own.stop - 1, min(count, _length(own))).astype(np.int64))
        yield from (self._rows(rows[piece]) for piece in self._pieces(len(rows)))

    def n_batches(self, batch_size: int) -> int | None:
        """Return the number of batches of the process that has the most."""
        return max(-(-count // size) for size, _, count in self._ranges(batch_size))


def _length(part: slice) -> int:
    return int(part.stop - part.start)


class DatasetSource(Source):
    """A map-style PyTorch dataset whose items are arrays, mappings by layer, or tuples that begin with the array."""

    slow = True

    def __init__(self, machine: BoltzmannMachine, dataset: Dataset[Any], *, nan_is_missing: bool = False) -> None:
        super().__init__(machine, nan_is_missing=nan_is_missing)
        self.dataset = dataset
        self.n_samples = len(dataset)  # type: ignore[arg-type]
        if self.n_samples == 0:
            raise ValueError("the data is empty: at least one sample is needed")

    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch in a new order."""
        order = rng.permutation(self.n_samples or 0).tolist()
        rows = [order[i : i + batch_size] for i in range(start * batch_size, len(order), batch_size)]
        mine = [some[self.world.part_of(len(some))] for some in rows]
        loaded = self._load([some for some in mine if some])
        for some, own in zip(rows, mine, strict=True):
            yield next(loaded).with_total(len(some)) if own else self.empty_batch(len(some))

    def head(self, count: int) -> Iterator[Batch]:
        """Yield evenly spaced samples."""
        n = self.n_samples or 0
        rows = np.unique(np.linspace(0, n - 1, min(count, n)).astype(np.int64)).tolist()
        yield from self._load([rows[piece] for piece in self._pieces(len(rows))])

    def _load(self, rows: list[list[int]]) -> Iterator[Batch]:
        # A loader draws a seed even without workers: not from the global generator.
        for item in DataLoader(self.dataset, batch_sampler=rows, generator=torch.Generator()):
            yield self._batch(layers_of(item, self.machine), {})


class LoaderSource(Source):
    """A loader, or any other iterable of batches that can be iterated more than once, in its own order."""

    resumable = False
    common = False
    slow = True
    n_samples = None

    def first_look(self) -> None:
        """Do nothing: a loader may deliver its first batch only once."""

    def __init__(self, machine: BoltzmannMachine, loader: Iterable[Any], *, nan_is_missing: bool = False) -> None:
        super().__init__(machine, nan_is_missing=nan_is_missing)
        self.loader = loader

    def n_batches(self, batch_size: int) -> int | None:
        """Return the length of the loader, None if it has none."""
        try:
            return len(self.loader)  # type: ignore[arg-type]
        except TypeError:
            return None

    def full_batch(self, batch_size: int) -> int:
        """Return 1: the size of the loader's batches is not known before they come."""
        return 1

    def batches(self, batch_size: int, rng: RandomSource, start: int = 0) -> Iterator[Batch]:
        """Yield the loader's batches; `batch_size` and `rng` are not used."""
        for item in itertools.islice(iter(self.loader), start, None):
            yield self._batch(layers_of(item, self.machine), {})

    def head(self, count: int) -> Iterator[Batch]:
        """Yield the first batches."""
        seen = 0
        for item in self.loader:
            batch = self._batch(layers_of(item, self.machine), {})
            yield batch
            seen += len(batch)
            if seen >= count:
                return


def as_source(
    data: Any, machine: BoltzmannMachine, *, mask: Any = None, nan_is_missing: bool = False, batch_size: int = 100
) -> Source:
    """Return a source for data of any kind.

    Parameters
    ----------
    data : array, path, mapping, Dataset, DataLoader or Source
        Arrays, tensors and ``.npy`` files hold all samples along their first axis; a mapping names layers.
    machine : BoltzmannMachine
        The model that the data is for.
    mask : array or mapping, optional
        True where an entry is known. For arrays only.
    nan_is_missing : bool
        Whether NaN marks a missing entry.
    batch_size : int
        Batch size of iterable datasets, which are divided into batches here.
    """
    if isinstance(data, Source):
        return data
    foreign = isinstance(data, DataLoader | Dataset)
    if mask is not None and foreign:
        raise ValueError("a mask goes with arrays: let the dataset mark missing entries as NaN instead")
    if isinstance(data, DataLoader):
        return LoaderSource(machine, data, nan_is_missing=nan_is_missing)
    if isinstance(data, IterableDataset):
        return LoaderSource(machine, DataLoader(data, batch_size=batch_size), nan_is_missing=nan_is_missing)
    if isinstance(data, Dataset):
        return DatasetSource(machine, data, nan_is_missing=nan_is_missing)
    arrays = {name: _as_array(part) for name, part in layers_of(data, machine).items()}
    if any(isinstance(array, Shards) for array in arrays.values()):
        if mask is not None:
            raise ValueError("a mask goes with arrays: mark missing entries of shards as NaN instead")
        return ShardSource(machine, arrays, {}, nan_is_missing=nan_is_missing)
    known = {} if mask is None else {name: _as_array(part) for name, part in _masks_of(mask, machine).items()}
    return ArraySource(machine, arrays, known, nan_is_missing=nan_is_missing)


def layers_of(item: Any, machine: BoltzmannMachine) -> dict[str, Any]:
    """Return an item or batch by layer name: a mapping as it is, a tuple's first element, or the array itself."""
    names = list(machine.layers)
    if isinstance(item, Mapping):
        missing = set(names) - set(item)
        if missing:
            raise ValueError(f"the data lacks layers {sorted(missing)}, it has {sorted(item)}")
        return {name: item[name] for name in names}
    if isinstance(item, tuple | list) and len(names) == 1 and len(item) and hasattr(item[0], "shape"):
        item = item[0]  # the rest is a label
    if len(names) > 1:
        raise ValueError(f"this machine has visible layers {names}: give data as a mapping from these names")
    return {names[0]: item}


def _masks_of(mask: Any, machine: BoltzmannMachine) -> dict[str, Any]:
    if isinstance(mask, Mapping):
        foreign = set(mask) - set(machine.layers)
        if foreign:
            raise ValueError(f"mask names layers {sorted(foreign)}, but there are only {sorted(machine.layers)}")
        return dict(mask)
    return layers_of(mask, machine)


def _as_array(part: Any) -> Any:
    if isinstance(part, str | os.PathLike) and is_folder_of_shards(part):
        return Shards(part)
    if isinstance(part, str | os.PathLike):
        return np.load(part, mmap_mode="r", allow_pickle=False)
    return part if hasattr(part, "shape") else np.asarray(part)


def _take(array: Any, rows: Sequence[int] | np.ndarray[Any, Any]) -> Tensor:
    if isinstance(array, Tensor):
        # Five times as fast as indexing, which copies entry by entry.
        return array.index_select(0, torch.as_tensor(rows, device=array.device))
    return torch.from_numpy(np.ascontiguousarray(array[rows]))


_AHEAD = 2  # batches


def read_ahead(batches: Iterator[Batch], slow: bool = True) -> Iterator[Batch]:
    """Yield the same batches, reading the next ones in a thread of its own."""
    if not slow:
        yield from batches
        return
    ready: queue.Queue[tuple[Batch | None, BaseException | None]] = queue.Queue(_AHEAD)
    over = threading.Event()

    def put(item: tuple[Batch | None, BaseException | None]) -> bool:
        while not over.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return True
        return False

    def read() -> None:
        try:
            for batch in batches:
                if not put((batch, None)):
                    return
            put((None, None))
        except BaseException as error:
            put((None, error))

    reader = threading.Thread(target=read, name="mvrbm-reader", daemon=True)
    reader.start()
    try:
        while True:
            batch, error = ready.get()
            if error is not None:
                raise error
            if batch is None:
                return
            yield batch
    finally:
        over.set()
        reader.join()
