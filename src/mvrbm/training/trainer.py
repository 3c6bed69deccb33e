"""The trainer: the loop over epochs and batches. Backends (:mod:`mvrbm.backends`) compute the updates."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvrbm.backends.base import EpochBackend, UpdateBackend, UpdateSettings
from mvrbm.backends.choose import check_name, choose_entry
from mvrbm.backends.reference import ReferenceBackend
from mvrbm.data.sources import Batch, Source, as_source, read_ahead
from mvrbm.devices import resolve_device, sensible_threads
from mvrbm.distributed import World
from mvrbm.errors import DivergenceError, StorageError
from mvrbm.interrupt import Terminated, finish_on_interrupt
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers
from mvrbm.saving import CHECKPOINT, read_machine, register
from mvrbm.training import checkpoints
from mvrbm.training.callbacks import Callback
from mvrbm.training.epochs import EpochLoop
from mvrbm.training.optimizers import OptimizerFactory, OptimizerSettings, SchedulerFactory
from mvrbm.updates.gradient import WHOLE, Share
from mvrbm.updates.initialization import prepare_state
from mvrbm.updates.recipe import Recipe, as_recipe
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import balance, check_size, check_training_memory
from mvrbm.validation import whole_number

#: The GPU backend of the last `fit`, as long as the state of its training run exists. Its data and its CUDA graphs stay
#: on the GPU for the next `fit`.
_kept_backend: WeakKeyDictionary[TrainState, EpochBackend] = WeakKeyDictionary()


class _Numbers(NamedTuple):
    """Random numbers of a training run, by purpose."""

    start: RandomSource
    order: RandomSource
    chains: RandomSource


class Trainer:
    """Trains a machine on data.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine to train, in place.
    recipe : str or Recipe
        ``"default"``, ``"generative"``, ``"paper"``, or your own settings.
    optimizer : callable, optional
        Builds any `torch.optim` optimizer from two parameter groups: factors, and biases. Default: gradient descent
        with the learning rates, momentum and weight decay of the recipe.
    scheduler : callable, optional
        Builds any `torch.optim` scheduler from the optimizer. It steps after every epoch. `ReduceLROnPlateau` follows
        the metric named `plateau_metric`.
    plateau_metric : str
        Name of one of the metrics of a :class:`Monitor`.
    backend : str
        ``"auto"`` chooses the fastest backend. ``"reference"`` computes gradients by autograd. The results are equal up
        to rounding. Other names of `mvrbm.backends.choose.BACKENDS` request that backend: `fit` raises ValueError
        if it cannot compute the training run.
    callbacks : sequence of Callback
        Callbacks.
    seed : int
        Random seed of the initial parameters, the order of the data, and the chains.
    missing_steps : int
        Number of Gibbs steps that draw missing entries at each update.
    world : World, optional
        The processes that share the work. Default: the processes that ``torchrun`` started. Pass `World()` to train in
        this process alone.

    Attributes
    ----------
    state : TrainState
        Everything that changes during training: the machine, momenta, chains, counters and the history.
    recipe : Recipe
        The recipe, with the learning rate that was computed from the data if the given recipe had none.
    requested_recipe : Recipe
        The recipe as it was given.
    n_epochs : int
        Number of epochs after which `fit` returns, including the epochs of earlier calls.
    batches_per_epoch : int or None
        Number of updates per epoch, None if it is unknown.
    planned_epochs : int or None
        Number of epochs after which a linear decay of the learning rate ends. None stands for `n_epochs`, and 0 for no
        linear decay.
    seed : int or None
        The seed. Set it to None if nobody chose it: then checkpoints with any seed can be resumed.
    same_data : bool
        Whether every `fit` gets the same data. If it is False, checkpoints do not compare the data.
    stop : bool
        Set it to True in a callback to end training after the current batch.
    failed : bool
        Whether an error ended the last `fit`.
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
        self.backend = check_name(backend)
        self.missing_steps = whole_number(missing_steps, "missing_steps")
        self.requested_recipe = as_recipe(recipe)
        self.recipe = self.requested_recipe
        self.callbacks = callbacks
        self.world = World.here() if world is None else world
        seed = self.world.broadcast_int(seed)
        self.seed: int | None = seed
        self.same_data = True
        self.planned_epochs: int | None = None
        self.n_epochs = self.recipe.n_epochs
        self.batches_per_epoch: int | None = None
        self.stop = False
        self.failed = False
        self._numbers = _Numbers(*RandomSource(seed).split(3))
        self.state = TrainState(machine, self._numbers.chains)
        # None if updates follow the recipe.
        self._optimizer_settings: OptimizerSettings | None = None
        if optimizer is not None or scheduler is not None:
            self._optimizer_settings = OptimizerSettings(optimizer, scheduler, plateau_metric)
        self._source: Source | None = None
        # The backend of the current `fit`, if it computes one update at a time.
        self._update_backend: UpdateBackend | None = None
        # What to raise after `fit`, if a signal has interrupted it.
        self._interrupt: type[BaseException] | None = None
        # A checkpoint that the next `fit` restores.
        self._to_restore: checkpoints.StoredRun | None = None

    # -- what callbacks read ----------------------------------------------------------------------

    @property
    def machine(self) -> BoltzmannMachine:
        """The machine."""
        return self.state.machine

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self.state.epoch

    @property
    def update(self) -> int:
        """Number of finished updates."""
        return self.state.update

    @property
    def history(self) -> list[dict[str, float]]:
        """Metrics that callbacks have logged."""
        return self.state.history

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer, None if updates follow the recipe."""
        return self.state.optimizer

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler, None if the user gave none."""
        return self.state.scheduler

    @property
    def order_rng(self) -> RandomSource:
        """Random numbers of the order of the samples. Epoch `e` uses the numbers of step `e`."""
        return self._numbers.order

    @property
    def kept_backend(self) -> EpochBackend | None:
        """The GPU backend that the next `fit` can use again, None if there is none."""
        return _kept_backend.get(self.state)

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or SIGTERM ended the last `fit`; see :meth:`raise_if_interrupted`."""
        return self._interrupt is not None

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks, checkpoints last, because they save what the other callbacks did at the same update."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = sorted(callbacks, key=lambda callback: callback.comes_last)

    def log(self, row: dict[str, float]) -> None:
        """Add metrics to the history, and pass them to the callbacks. Several processes log their mean values."""
        if self.world.size > 1:
            values = torch.tensor(list(row.values()), dtype=torch.float64)
            self.world.all_reduce(values)
            row = dict(zip(row, (values / self.world.size).tolist(), strict=True))
        row = {"epoch": self.epoch, "update": self.update, **row}
        self.history.append(row)
        self._notify("on_log", row=row)

    # -- the loop ---------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        n_epochs: int | None = None,
        *,
        mask: Any = None,
        nan_is_missing: bool = False,
        initialize: bool | None = None,
    ) -> Trainer:
        """Train until `n_epochs` epochs are done, including the epochs of earlier calls.

        Parameters
        ----------
        data : array, path of a .npy file, mapping of these by layer, Dataset or DataLoader
            The data. The first axis of an array counts samples. Bytes are scaled to [0, 1] for Bernoulli layers, batch
            by batch.
        n_epochs : int, optional
            Total number of epochs. Default: the recipe's.
        mask : array or mapping of arrays, optional
            True where an entry is known. The model draws the other entries, given the known ones.
        nan_is_missing : bool
            Whether NaN marks a missing entry. Otherwise NaN raises ValueError.
        initialize : bool, optional
            Whether the first call of `fit` sets the machine's parameters from the data and the recipe. By default, it
            does so if the machine is new (:attr:`mvrbm.BoltzmannMachine.is_new`). A machine that was trained or loaded,
            or whose parameters you have set, keeps its parameters.

        Returns
        -------
        Trainer
            The trainer itself.
        """
        source = self.prepare(data, mask=mask, nan_is_missing=nan_is_missing, initialize=initialize)
        self.n_epochs = self.recipe.n_epochs if n_epochs is None else n_epochs
        self.stop = False
        self.failed = False
        self._interrupt = None
        settings = self.update_settings()
        with finish_on_interrupt(self._request_stop), contextlib.ExitStack() as while_training:
            self._notify("on_train_begin")
            try:
                backend = self._backend_for(settings, source, while_training)
                if isinstance(backend, EpochBackend):
                    self._fit_by_epochs(EpochLoop(backend, [self.state], [source], [self.order_rng]))
                    _kept_backend[self.state] = backend
                else:
                    self._fit_by_batches(backend, source)
                if not self.interrupted:
                    check_size(self.machine, self.recipe, self.update)
            except BaseException:
                self.failed = True
                raise
            finally:
                self._update_backend = None
                self._notify("on_train_end")
        return self

    def _backend_for(
        self, settings: UpdateSettings, source: Source, while_training: contextlib.ExitStack
    ) -> UpdateBackend | EpochBackend:
        """Return the backend of the previous `fit` if it can continue with this data, otherwise a new one.

        A new backend sets the number of PyTorch's threads until `while_training` ends.
        """
        kept = _kept_backend.pop(self.state, None)
        _kept_backend.clear()  # frees the GPU memory of other training runs
        if kept is not None and kept.continues_with([settings], [self.state], [source]):
            return kept
        del kept
        chosen = choose_entry([settings], [self.state], [source], name=self.backend)
        limited = sensible_threads(self.machine, self.recipe.batch_size, needed=chosen.uses_torch_threads)
        threads = while_training.enter_context(limited)
        return chosen.build([settings], [self.state], [source], threads)

    def _fit_by_batches(self, backend: UpdateBackend, source: Source) -> None:
        """Train with a backend that computes one update at a time."""
        self._update_backend = backend
        stopping = self._any_process_stops()
        while self._goes_on(stopping):
            self._begin_epoch()
            stopping = self._run_batches(backend, source)
            complete = self.batches_per_epoch is not None and self.state.batch >= self.batches_per_epoch
            if stopping and not complete:
                self._synchronize(backend)
                if not source.resumable:
                    self.restart_epoch()
                return
            backend.store(self.state)
            balance(self.machine, self.recipe)
            stopping = self._end_epoch()
            backend.load(self.state)

    def _run_batches(self, backend: UpdateBackend, source: Source) -> bool:
        """Compute the updates of the current epoch, and return whether training was stopped."""
        state = self.state
        every_batch = any(callback.every_batch for callback in self.callbacks)
        full = source.full_batch(self.recipe.batch_size)
        before = self.update
        for batch in self._batches(source):
            self._notify("on_batch_begin", batch=batch)
            full = max(full, batch.total)
            self.train_on(batch, weight=batch.total / full)
            if every_batch:
                self._synchronize(backend)
            state.batch += 1
            self._notify("on_batch_end", batch=batch)
            if self._any_process_stops():
                return True
        if self.update == before and state.batch == 0:
            raise ValueError("an epoch over the data gave no batch: can the data be iterated more than once?")
        source.check = False  # every sample has been checked
        return False

    def _fit_by_epochs(self, loop: EpochLoop) -> None:
        """Train with a backend that computes whole epochs."""
        stopping = self.stop
        while self._goes_on(stopping):
            self._begin_epoch()
            loop.run(lambda: self.stop)
            stopping = self.stop
            last = stopping or self.epoch + 1 >= self.n_epochs
            # Writing the parameters back takes as long as several updates, so only do it if something reads them.
            if last or self.callbacks or self.machine.hidden.gaussian:
                loop.store()
            if self.batches_per_epoch is None or self.state.batch < self.batches_per_epoch:
                return
            loop.balance(self.recipe)
            stopping = self._end_epoch()
            if self.epoch < self.n_epochs:
                loop.load()
        if not loop.stored:
            loop.store()

    def _goes_on(self, stopping: bool) -> bool:
        """Return whether another epoch follows.

        A checkpoint of the last update of an epoch is resumed with the end of that epoch, even after a request to stop.
        """
        return self.epoch < self.n_epochs and (not stopping or self.state.batch == self.batches_per_epoch)

    def _begin_epoch(self) -> None:
        if self._optimizer_settings is not None and self.state.scheduled_epochs < self.epoch:
            # Not at the end of the previous epoch: its checkpoint has the former learning rate.
            self._optimizer_settings.step_scheduler(self.state)
        self.state.scheduled_epochs = self.epoch
        self._notify("on_epoch_begin")

    def _end_epoch(self) -> bool:
        """Finish a complete epoch, and return whether training stops here."""
        self.state.epoch += 1
        self.state.batch = 0
        self.state.exact = {}  # an epoch begins from the parameters themselves, which keeps its checkpoint small
        try:
            self.machine.check_bounded()
        except ValueError as error:
            raise DivergenceError(f"update {self.update}: {error}") from error
        self._notify("on_epoch_end")
        return self._any_process_stops()

    def _batches(self, source: Source) -> Iterator[Batch]:
        """Yield the remaining batches of the current epoch.

        If their number is unknown, processes without data get empty batches until no process has data.
        """
        order = self.order_rng.at_step(self.epoch)
        batches = source.batches(self.recipe.batch_size, order, start=self.state.batch)
        if source.slow:
            batches = read_ahead(batches)
        if self.world.size == 1 or source.n_samples is not None:
            yield from batches
            return
        while True:
            batch = next(batches, None)
            own = torch.tensor([0 if batch is None else len(batch)])
            counts = torch.cat(self.world.gather(own)).tolist()
            total = sum(counts)
            if total == 0:
                return
            first = sum(counts[: self.world.rank])
            yield source.empty_batch(total) if batch is None else dataclasses.replace(batch, total=total, first=first)

    @torch.no_grad()
    def train_on(self, batch: Batch, weight: float = 1.0) -> None:
        """Compute one update.

        Parameters
        ----------
        batch : Batch
            This process's samples.
        weight : float
            Weight of the gradient. A batch shorter than the others has a weight below 1, so that all samples count
            equally.
        """
        backend = self._update_backend or ReferenceBackend(self.update_settings())
        share = self._share_of(batch)
        data: Layers = batch.visible
        if batch.known:
            data = backend.draw_missing(self.state, batch, self.missing_steps, share)
        self.state = backend.update(self.state, data, weight, share)

    def _share_of(self, batch: Batch) -> Share:
        """Return this process's part of an update."""
        if self.world.size == 1:
            return WHOLE
        samples = len(batch) / max(1, batch.total)
        n_chains = self.recipe.negative.n_chains
        if n_chains == 0:
            return Share(samples, samples, batch.first, batch.first)
        own = self.world.part_of(n_chains)
        return Share(samples, (own.stop - own.start) / n_chains, batch.first, own.start)

    def _synchronize(self, backend: UpdateBackend) -> None:
        """Write everything that the backend keeps to the state, and continue as a resumed training run would."""
        backend.store(self.state)
        # With several processes, the exact form would have the chains of one process only.
        self.state.exact = backend.exact() if self.world.size == 1 else {}
        backend.load(self.state)

    def update_settings(self) -> UpdateSettings:
        """Return everything that a backend needs to compute updates, apart from the state."""
        recipe = self.recipe
        if recipe.linear_decay and recipe.planned_updates is None and self.batches_per_epoch is not None:
            epochs = self.n_epochs if self.planned_epochs is None else self.planned_epochs
            recipe = dataclasses.replace(recipe, planned_updates=epochs * self.batches_per_epoch or None)
        return UpdateSettings(
            recipe=recipe,
            negative=recipe.negative.share(self.world),
            reference=self.backend == "reference",
            optimizer=self.state.optimizer,
            all_reduce=self.world.all_reduce,
            n_processes=self.world.size,
            every_batch=any(callback.every_batch for callback in self.callbacks),
            missing_steps=self.missing_steps,
            gather=self.world.gather,
        )

    # -- preparation ------------------------------------------------------------------------------

    def prepare(
        self, data: Any, *, mask: Any = None, nan_is_missing: bool = False, initialize: bool | None = None
    ) -> Source:
        """Prepare training on some data without training, and return the source of batches. `fit` does this first.

        The parameters are those of :meth:`fit`.
        """
        world = self.world
        size = self.recipe.batch_size
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
        self._source = source
        self.machine.check_bounded()
        if self.state.learning_rate is None:
            self._begin_run(source, self.machine.is_new if initialize is None else initialize)
        if self._to_restore is not None:
            self._to_restore.restore(self.state, self._description())
            self._to_restore = None
        if self.recipe.learning_rate != self.state.learning_rate:
            self.recipe = dataclasses.replace(self.recipe, learning_rate=self.state.learning_rate)
        world.broadcast([parameter.data for parameter in self.machine.parameters()])
        return source

    def _begin_run(self, source: Source, initialize: bool) -> None:
        moments = source.moments()
        start = self._numbers.start
        prepare_state(self.state, self.recipe, moments, start, self.world, initialize_machine=initialize)
        if self._optimizer_settings is not None:
            recipe = dataclasses.replace(self.recipe, learning_rate=self.state.learning_rate)
            self._optimizer_settings.build(self.state, recipe)

    def restart_epoch(self) -> None:
        """Let the next `fit` start at the beginning of an epoch, for instance because the data is new."""
        self.state.batch = 0

    # -- stopping ---------------------------------------------------------------------------------

    def _request_stop(self, interrupt: type[BaseException]) -> None:
        """Stop after the current batch because of a signal."""
        self.stop = True
        self._interrupt = interrupt

    def _any_process_stops(self) -> bool:
        """Return whether training stops on any process. All processes must call this together."""
        terminated = self.interrupted and self._interrupt is Terminated
        stop, interrupted, terminated = self.world.any([self.stop, self.interrupted, terminated])
        # A signal may have arrived on this process since the flags were read: keep its flags for the next call.
        self.stop = self.stop or stop
        if interrupted and self._interrupt is None:
            self._interrupt = Terminated if terminated else KeyboardInterrupt
        return stop

    def raise_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt, or SystemExit with code 143, if Ctrl-C or SIGTERM has ended the last `fit`."""
        if self._interrupt is not None:
            raise self._interrupt

    def _notify(self, hook: str, **details: Any) -> None:
        """Call a hook of all callbacks."""
        for callback in self.callbacks:
            if self.world.is_main or not callback.main_process_only:
                getattr(callback, hook)(self, **details)

    # -- checkpoints ------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """Number of finished epochs when the next `fit` begins, which may resume a checkpoint."""
        return self.epoch if self._to_restore is None else self._to_restore.epoch

    def save(self, folder: str | PathLike[str], keep: int = 2) -> Path:
        """Write a checkpoint into `folder`, remove all checkpoints except the last `keep`, and return its path."""
        if self._to_restore is not None:
            raise StorageError("this trainer resumes a checkpoint at its next fit: call fit before saving")
        return checkpoints.save(self.state, self._description(), folder, keep)

    def resume(self, folder: str | PathLike[str], *, force: bool = False) -> bool:
        """Let the next `fit` resume the newest checkpoint in `folder`, and return whether there is one.

        The number of epochs may differ from that of the checkpoint. If the recipe, the seed, the optimizer or the data
        differ, this method or `fit` raises :class:`~mvrbm.errors.StorageError`, or warns with `force`.
        """
        with self.world.raise_together(StorageError):
            found = checkpoints.newest(folder) if self.world.is_main else None
        chosen = self.world.broadcast_text("" if found is None else found.name)
        if chosen:
            self.resume_from(Path(folder) / chosen, force=force)
        return bool(chosen)

    def resume_from(self, path: Path, *, force: bool = False) -> None:
        """Let the next `fit` resume one checkpoint; see :meth:`resume`."""
        with self.world.raise_together(StorageError):
            self._to_restore = checkpoints.read(path, self.machine, self.requested_recipe, force=force)

    def _description(self) -> checkpoints.RunDescription:
        """Return what checkpoints need to know about this training run."""
        return checkpoints.RunDescription(
            recipe=self.requested_recipe,
            seed=self.seed,
            missing_steps=self.missing_steps,
            optimization=None if self._optimizer_settings is None else self._optimizer_settings.description,
            source=self._source,
            same_data=self.same_data,
            batches_per_epoch=self.batches_per_epoch,
            callbacks=self.callbacks,
            world=self.world,
        )


@register(CHECKPOINT)
def load_checkpoint(folder: Path, config: dict[str, Any], device: str | torch.device) -> Trainer:
    """Return a trainer that resumes a checkpoint, or the newest checkpoint in a folder, for :func:`mvrbm.load`."""
    path = folder if (folder / "trainer.json").is_file() else checkpoints.newest(folder)
    if path is None:
        raise StorageError(f"{folder} holds no checkpoint")
    plain = checkpoints.read_settings(path)
    known = {name: plain["settings"][name] for name in ("seed", "missing_steps") if plain["settings"].get(name)}
    trainer = Trainer(read_machine(path).to(resolve_device(device)), plain["recipe_asked"], **known)
    if plain.get("scheduler") is not None:
        raise StorageError(f"{path} was made with a scheduler: build the same Trainer and call its resume method")
    trainer.resume_from(path)
    return trainer
