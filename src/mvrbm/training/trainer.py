"""The trainer: the loop over epochs and batches. Updates are computed by :mod:`mvrbm.backends`."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvrbm.backends.choose import EpochBackend, UpdateBackend, UpdateSettings, choose_backend
from mvrbm.backends.cpu import native
from mvrbm.backends.reference import ReferenceBackend
from mvrbm.data.sources import Batch, Source, as_source, read_ahead
from mvrbm.devices import one_thread, sensible_threads
from mvrbm.distributed import World
from mvrbm.errors import DivergenceError, StorageError
from mvrbm.interrupt import Terminated, finish_on_interrupt
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.training import checkpoint, optimizers
from mvrbm.training.callbacks import Callback
from mvrbm.training.optimizers import Factories, OptimizerFactory, SchedulerFactory
from mvrbm.training.restoring import Stored, fingerprint
from mvrbm.updates import initialization
from mvrbm.updates.gradient import Centering, Share
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import balance, check_size, check_training_memory
from mvrbm.validation import choice, whole_number

#: Returns the trainer that keeps the path of its last `fit`, None if there is none.
_keeper: Callable[[], Trainer | None] = lambda: None  # noqa: E731


class Trainer:
    """Trains a machine on data.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine to train, changed in place.
    recipe : str or Recipe
        ``"default"``, ``"paper"``, or your own settings.
    optimizer : callable, optional
        Makes any `torch.optim` optimizer from parameter groups: factors first, biases second. Default: gradient descent
        with the recipe's learning rates, momentum and weight decay.
    scheduler : callable, optional
        Makes any `torch.optim` scheduler from the optimizer. It steps after every epoch; `ReduceLROnPlateau` follows
        the metric named `plateau_metric`.
    plateau_metric : str
        Name of one of the metrics of a :class:`Monitor`.
    backend : {"auto", "reference"}
        ``"auto"`` chooses the fastest path; ``"reference"`` computes gradients by autograd. Both give the same results
        up to rounding.
    callbacks : sequence of Callback
        Callbacks.
    seed : int
        Random seed of the initial parameters, the order of the data and the chains.
    missing_steps : int
        Gibbs steps that draw missing entries before they count as data.
    world : World, optional
        The processes that share the work. Default: the processes started by ``torchrun``. `World()` is this process
        alone.

    Attributes
    ----------
    state : TrainState
        Machine, momenta, chains and counters.
    history : list of dict
        Metrics that callbacks logged.
    interrupted : bool
        Whether the last `fit` was ended by Ctrl-C or SIGTERM; see :meth:`raise_if_interrupted`.
    broken : bool
        Whether the last `fit` was ended by an error.
    """

    def __init__(
        self,
        machine: BoltzmannMachine,
        recipe: str | Recipe = "default",
        *,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        plateau_metric: str = "reconstruction_error",
        backend: str = "auto",
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
        missing_steps: int = 5,
        world: World | None = None,
    ) -> None:
        self.backend = choice(backend, "backend", ("auto", "reference"))
        self.missing_steps = whole_number(missing_steps, "missing_steps")
        self.recipe = as_recipe(recipe)
        self.requested_recipe = self.recipe  # before a learning rate was chosen for it
        self.callbacks, self.plateau_metric = callbacks, plateau_metric
        self._factories: Factories = optimizer, scheduler
        self.world = World.here() if world is None else world
        seed = self.world.broadcast_int(seed)
        #: None if it was drawn and not chosen; then checkpoints of any seed can be resumed.
        self.seed: int | None = seed
        self.same_data = True  #: Whether data is the same in every epoch. Otherwise checkpoints have no digest of it.
        self.steps_config: list[str] | None = None  # the optimizer and the scheduler, if they were given
        self._start_rng, self.order_rng, self._common_rng = RandomSource(seed).split(3)
        self.state = TrainState(machine, self._common_rng)
        self.negative, self._chain_share = self.recipe.negative.share(self.world)
        self.optimizer: Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        self.history: list[dict[str, float]] = []
        self.stop = self.interrupted = self.broken = self._terminated = False  # the last: by SIGTERM
        self._ending = False  # what all processes have agreed on; `stop` is what this one asks for
        self.scheduled_epochs = 0  # epochs that the scheduler has stepped after
        self.batches_per_epoch: int | None = None
        #: Number of epochs after which a linear decay of the rate ends; 0 for none. Default: those of `fit`.
        self.planned_epochs: int | None = None
        self.n_epochs = self.recipe.n_epochs
        #: Trainers whose epochs are made together with this one's, itself first; see :func:`fit_together`.
        self.group: list[Trainer] = [self]
        self.diverged = self._prepared = False
        self.source: Source | None = None
        self._current = True  # whether the state holds what the path has computed
        self._resumed: Stored | None = None
        self._path: UpdateBackend | EpochBackend | None = None
        self._last_path: EpochBackend | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return everything but what the last `fit` has left on a device: graphs cannot be copied."""
        return {**self.__dict__, "_last_path": None}

    @property
    def machine(self) -> BoltzmannMachine:
        """The machine that is trained."""
        return self.state.machine

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self.state.epoch

    @property
    def next_epoch(self) -> int:
        """Number of epochs that are finished when the next `fit` begins, those of a checkpoint to resume included."""
        return self.epoch if self._resumed is None else int(self._resumed.plain["epoch"])

    @property
    def update(self) -> int:
        """Number of updates."""
        return self.state.update

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks, checkpoints last: they have to save what the other callbacks did at the same update."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = sorted(callbacks, key=lambda callback: callback.comes_last)

    def restart_epoch(self) -> None:
        """Start the next `fit` at the beginning of an epoch, for instance because the data is new."""
        self.state.batch = 0

    # -- the loop ---------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        n_epochs: int | None = None,
        *,
        mask: Any = None,
        nan_is_missing: bool = False,
        initialize: bool = False,
    ) -> Trainer:
        """Train until `n_epochs` epochs are done, those of earlier calls included.

        Parameters
        ----------
        data : array, path of a .npy file, mapping of these by layer, Dataset or DataLoader
            The data. Arrays have one sample per row of their first axis. Bytes are scaled to [0, 1] for Bernoulli
            layers, batch by batch.
        n_epochs : int, optional
            Total number of epochs. Default: the recipe's.
        mask : array or mapping of arrays, optional
            True where an entry is known. The model draws the others, given the known ones.
        nan_is_missing : bool
            Whether NaN marks a missing entry. Otherwise it is an error.
        initialize : bool
            Whether the first call sets the machine's parameters from the data and the recipe. By default training
            continues from the machine as it is.

        Returns
        -------
        Trainer
            The trainer itself.
        """
        source = self.prepare(data, mask=mask, nan_is_missing=nan_is_missing, initialize=initialize)
        self.n_epochs = self.recipe.n_epochs if n_epochs is None else n_epochs
        self.stop = self.interrupted = self.broken = self._ending = self._terminated = False
        tasks = [member.task() for member in self.group]
        by_torch = native.unsupported_reason(tasks[0], self.state) is not None
        with (
            finish_on_interrupt(self._interrupt),
            sensible_threads(self.machine, self.recipe.batch_size, needed=by_torch) as threads,
        ):
            self._notify("on_train_begin")
            try:
                self._path = self._path_for(tasks, source, threads)
                self._current = True
                self._agree()
                # A checkpoint of the last update of an epoch has the end of that epoch still to come.
                while self.epoch < self.n_epochs and (not self._ending or self.state.batch == self.batches_per_epoch):
                    self._one_epoch(source)
                if not self._current and isinstance(self._path, EpochBackend):  # stopped between two epochs
                    self._path.store([self.state])
                if len(self.group) == 1 and not self.interrupted:
                    check_size(self.machine, self.recipe, self.update)
            except BaseException:
                self.broken = True
                raise
            finally:
                self._keep_path()
                self._notify("on_train_end")
        return self

    def prepare(self, data: Any, *, mask: Any = None, nan_is_missing: bool = False, initialize: bool = False) -> Source:
        """Set up everything that depends on the data, and return the data's source. `fit` does this first."""
        size, world = self.recipe.batch_size, self.world
        with world.raise_together(ValueError, OSError, TypeError, MemoryError):
            if size < world.size:
                raise ValueError(f"batch_size must be at least the number of processes, {world.size}, got {size}")
            own = len(range(size)[world.part_of(size)])
            source = as_source(data, self.machine, mask=mask, nan_is_missing=nan_is_missing, batch_size=own)
            source.world = world
            check_training_memory(self.machine, source.full_batch(own))
            source.first_look()
        n_batches = source.n_batches(size)
        counts = [int(count) for count in world.gather(torch.tensor([-1 if n_batches is None else n_batches]))]
        self.batches_per_epoch = None if min(counts) < 0 else max(counts)
        self.machine.check_bounded()
        if not self._prepared:
            self._begin(source, initialize)
        if self._resumed is not None:
            settings = fingerprint(self, source)
            with world.raise_together(StorageError):
                same_world, epoch_done = self._resumed.restore(self, settings, source.common)
            self._resumed = None
            if epoch_done and self.batches_per_epoch is not None:
                self.state.batch = self.batches_per_epoch
            elif not (source.resumable and (source.common or same_world)):
                self.restart_epoch()
        world.broadcast([p.data for p in self.machine.parameters()])
        self.source = source
        return source

    @one_thread()
    def _begin(self, source: Source, initialize: bool) -> None:
        machine, moments = self.machine, source.moments()
        if initialize:
            if self.world.is_main:
                initialization.warn_of_constants(machine, moments)
            initialization.initialize(machine, self.recipe, moments, self._start_rng)
            machine.check_bounded()
        if self.recipe.learning_rate is None:
            rate = initialization.safe_rate(machine, self.recipe, moments)
            self.recipe = dataclasses.replace(self.recipe, learning_rate=rate)
        self.optimizer, self.scheduler = optimizers.build_optimizer(self.state, self.recipe, self._factories)
        self.steps_config = optimizers.describe_steps(self.optimizer, self.scheduler)
        center, full = initialization.offsets(machine, self.recipe, moments), self.recipe.centering == "full"
        if full or any(bool(offset.any()) for offset in center.values()):
            self.state.centering = Centering(machine, center, follow_hidden=full, all_reduce=self.world.all_reduce)
        self._prepared = True

    def task(self) -> UpdateSettings:
        """Return how updates are to be made."""
        planned = self.recipe.planned_updates
        if planned is None and self.batches_per_epoch is not None:
            epochs = self.n_epochs if self.planned_epochs is None else self.planned_epochs
            planned = epochs * self.batches_per_epoch or None
        return UpdateSettings(
            recipe=dataclasses.replace(self.recipe, planned_updates=planned)
            if self.recipe.linear_decay
            else self.recipe,
            negative=self.negative,
            reference=self.backend == "reference",
            optimizer=self.optimizer,
            all_reduce=self._all_reduce,
            n_processes=self.world.size,
            every_batch=any(callback.every_batch for callback in self.callbacks),
            missing_steps=self.missing_steps,
        )

    def _path_for(self, tasks: Sequence[UpdateSettings], source: Source, threads: int) -> UpdateBackend | EpochBackend:
        """Return the path of the last `fit` where it can continue with this data, otherwise the fastest one."""
        states, sources = [member.state for member in self.group], [member.source or source for member in self.group]
        last, self._last_path = self._last_path, None
        if last is not None and last.continues_with(tasks, states, sources):
            return last
        del last
        if (former := _keeper()) is not None:
            former._last_path = None  # its data leaves the GPU before other data comes
        return self._choose_path(tasks, states, sources, threads)

    def _keep_path(self) -> None:
        """Keep data and graphs on the GPU for another `fit`; those of one trainer at a time, to limit the memory."""
        global _keeper
        path, self._path = self._path, None
        if isinstance(path, EpochBackend) and not self.broken:
            self._last_path, _keeper = path, weakref.ref(self)

    def _choose_path(
        self, tasks: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source], threads: int
    ) -> UpdateBackend | EpochBackend:
        return choose_backend(tasks, states, sources, threads)

    def _one_epoch(self, source: Source) -> None:
        if self.scheduled_epochs < self.epoch:
            # Not at the end of the last epoch: a checkpoint between them has the old rate.
            optimizers.step_scheduler(self.scheduler, self.history, self.plateau_metric)
            self.scheduled_epochs = self.epoch
        self._notify("on_epoch_begin")
        path = self._path
        complete = self._whole_epoch(source, path) if isinstance(path, EpochBackend) else self._batch_by_batch(source)
        if complete:
            for member in self.group:
                member.state.epoch, member.state.batch = member.epoch + 1, 0
            self._end_epoch()
        else:
            if not source.resumable:
                self.restart_epoch()

    def _batch_by_batch(self, source: Source) -> bool:
        """Make the updates of an epoch one by one, and return whether the epoch is complete."""
        began, state, complete = self.update, self.state, True
        full, every_batch = source.full_batch(self.recipe.batch_size), any(call.every_batch for call in self.callbacks)
        for batch in self._batches(source):
            self._notify("on_batch_begin", batch=batch)
            full = max(full, batch.total)
            self.train_on(batch, weight=batch.total / full)
            if every_batch:
                self._synchronize()
            state.batch += 1
            self._notify("on_batch_end", batch=batch)
            if self.world.size == 1:
                self._ending = self.stop
            if self._ending:
                complete = self.batches_per_epoch is not None and state.batch >= self.batches_per_epoch
                break
        else:
            if self.update == began and state.batch == 0:
                raise ValueError("an epoch over the data gave no batch: can the data be iterated more than once?")
            source.check = False  # every sample has been checked
        self._synchronize(resume=not complete)
        return complete

    def _whole_epoch(self, source: Source, path: EpochBackend) -> bool:
        """Let a path make all updates of an epoch, and return whether the epoch is complete."""
        states = [member.state for member in self.group]
        for member in self.group:
            (member.source or source).check_all()
        orders = torch.stack(
            [
                member.order_rng.at_step(member.epoch).permutation(path.n_samples, self.machine.like.device)
                for member in self.group
            ]
        )
        made = path.epoch(states, orders, lambda: self.stop)
        for state in states:
            state.batch += made
        self._ending = self.stop
        # Writing the parameters back takes as long as several updates: only where somebody reads them.
        last = self._ending or self.epoch + 1 >= self.n_epochs
        self._current = bool(last or self.callbacks or self.machine.hidden.gaussian)
        if self._current:
            for member, diverged in zip(self.group, path.store(states), strict=True):
                member.diverged = diverged
        elif self.recipe.balance:
            path.balance(states)
        return self.batches_per_epoch is not None and self.state.batch >= self.batches_per_epoch

    def _batches(self, source: Source) -> Iterator[Batch]:
        """Yield the batches of an epoch, read ahead; where their number is unknown, until no process has any left."""
        batches = source.batches(self.recipe.batch_size, self.order_rng.at_step(self.epoch), start=self.state.batch)
        batches = read_ahead(batches) if source.slow else batches
        if self.world.size == 1 or source.n_samples is not None:
            yield from batches
            return
        while True:
            batch = next(batches, None)
            total = int(self.world.sum(0 if batch is None else len(batch)))
            if total == 0:
                return
            yield source.empty_batch(total) if batch is None else Batch(batch.visible, batch.known, total)

    def _synchronize(self, *, resume: bool = True) -> None:
        """Bring the state up to date, and continue from it as a resumed training run would, unless its epoch ends."""
        if isinstance(self._path, UpdateBackend):
            self._path.store(self.state)
            if resume:
                self.state.exact = self._path.exact() if self.world.size == 1 else {}  # holds the chains of one process
                self._path.load(self.state)

    def _end_epoch(self) -> None:
        for member in self.group if self._current else []:
            balance(member.machine, member.recipe)
        self.state.exact = {}  # an epoch begins from the parameters themselves, and its checkpoint is small
        try:
            self.machine.check_bounded()
        except ValueError as error:
            raise DivergenceError(f"update {self.update}: {error}") from error
        self._notify("on_epoch_end")
        self._agree()
        if isinstance(self._path, UpdateBackend):
            self._path.load(self.state)
        elif isinstance(self._path, EpochBackend) and self._current and self.epoch < self.n_epochs:
            self._path.load([member.state for member in self.group])

    @torch.no_grad()
    def train_on(self, batch: Batch, weight: float = 1.0) -> None:
        """Make one update. A batch shorter than others has a weight below 1, so that every sample counts equally."""
        path = self._path if isinstance(self._path, UpdateBackend) else ReferenceBackend(self.task())
        part = len(batch) / max(1, batch.total)
        first_sample = self.world.part_of(batch.total).start
        share = Share(part, part, first_sample, first_sample)
        if self._chain_share is not None:
            first_chain = self.world.part_of(self.recipe.negative.chain_shape[-1]).start
            share = Share(part, self._chain_share, first_sample, first_chain)
        data = path.draw_missing(self.state, batch, self.missing_steps, share) if batch.known else batch.visible
        self.state = path.update(self.state, data, weight, share)

    def _agree(self) -> None:
        """Stop on all processes if one of them asks for it."""
        self._ending = self.stop
        self._all_reduce(torch.zeros(0, dtype=torch.float64))

    def _all_reduce(self, flat: Tensor) -> None:
        """Replace a gradient by its sum over all processes, and stop if one of them asks for it."""
        if self.world.size == 1:
            return
        flags = [float(flag) for flag in (self.stop, self.interrupted, self._terminated)]
        message = torch.cat([flat, flat.new_tensor(flags)])
        self.world.all_reduce(message)
        flat.copy_(message[:-3])
        self._ending, interrupted, terminated = (message[-3:] > 0).tolist()
        # A flag that was set in the meantime counts the next time.
        self.stop, self.interrupted = self.stop or self._ending, self.interrupted or interrupted
        self._terminated = self._terminated or terminated

    def log(self, row: dict[str, float]) -> None:
        """Add metrics to the history and pass them to the callbacks. Several processes log their mean together."""
        if self.world.size > 1:  # their samples may differ
            values = torch.tensor(list(row.values()), dtype=torch.float64)
            self.world.all_reduce(values)
            row = dict(zip(row, (values / self.world.size).tolist(), strict=True))
        row = {"epoch": self.epoch, "update": self.update, **row}
        self.history.append(row)
        self._notify("on_log", row=row)

    def _notify(self, hook: str, **details: Any) -> None:
        for callback in self.callbacks:
            if self.world.is_main or not callback.main_process_only:
                getattr(callback, hook)(self, **details)

    def _interrupt(self, reason: type[BaseException]) -> None:
        self.stop, self.interrupted, self._terminated = True, True, issubclass(reason, Terminated)

    def raise_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt, or SystemExit with code 143, if Ctrl-C or SIGTERM has ended the last `fit`."""
        if self.interrupted:
            raise Terminated if self._terminated else KeyboardInterrupt

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, folder: str | PathLike[str], keep: int = 2) -> Path:
        """Write a checkpoint under `folder` and return its path; all but the last `keep` are removed."""
        if self._resumed is not None:
            raise StorageError("this trainer resumes a checkpoint at its next fit: call fit before saving")
        return checkpoint.save(self, folder, keep)

    def resume(self, folder: str | PathLike[str], *, force: bool = False) -> bool:
        """Continue, at the next `fit`, from the newest checkpoint under `folder`, and return whether there was one.

        A checkpoint of another recipe, seed or optimizer, or of data with other values, raises
        :class:`~mvrbm.errors.StorageError`, here or in `fit`; `force` resumes it with a warning. The number of epochs
        may be another one.
        """
        with self.world.raise_together(StorageError):
            found = checkpoint.newest(folder) if self.world.is_main else None
        chosen = self.world.broadcast_text("" if found is None else found.name)
        if chosen:
            self.resume_from(Path(folder) / chosen, force=force)
        return bool(chosen)

    def resume_from(self, path: Path, *, force: bool = False) -> None:
        """Continue, at the next `fit`, from one checkpoint; see :meth:`resume`."""
        with self.world.raise_together(StorageError):
            self._resumed = checkpoint.read(self, path, force)
