"""Training loop over epochs and batches. The backends in :mod:`mvrbm.backends` compute the updates."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvrbm.backends.base import EpochBackend, UpdateBackend
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
from mvrbm.updates.step import balance, check_size, check_training_memory, limit_overshoot
from mvrbm.updates.update import UpdateSettings
from mvrbm.validation import whole_number

#: For each training state, the GPU backend from the most recent `fit`. The next `fit` can reuse the backend's data and
#: CUDA graphs on the GPU. An entry is removed when its training state is deleted.
_kept_backend: WeakKeyDictionary[TrainState, EpochBackend] = WeakKeyDictionary()


class _Numbers(NamedTuple):
    """Random sources for a training run, with a separate source for each purpose."""

    start: RandomSource
    order: RandomSource
    chains: RandomSource


@dataclass
class _Prepared:
    """What `prepare` and `fit` have set up."""

    #: Training data, or None before the first call.
    source: Source | None = None
    #: Effective number of training samples, or infinity if it is unknown.
    n_effective: float = math.inf
    #: Backend for the current `fit` if that backend computes one update at a time, otherwise None.
    update_backend: UpdateBackend | None = None


@dataclass
class _Checkpoints:
    """Checkpoints that belong to a training run."""

    #: Checkpoint that the next `fit` resumes from.
    to_restore: checkpoints.StoredRun | None = None
    #: Checkpoint folders that the run resumed from or saved to.
    own_folders: set[Path] = field(default_factory=set)


class Trainer:
    """Training loop for a machine.

    Parameters
    ----------
    machine : BoltzmannMachine
        Machine to train. Its parameters are updated in place.
    recipe : str or Recipe
        Training settings: ``"default"`` (for feature extraction), ``"generative"`` (for sampling and for filling in
        missing entries), ``"paper"`` (Algorithm 1 in the paper), or a :class:`Recipe`.
    optimizer : callable, optional
        Function that takes a list of two parameter groups, the factors and the biases, and returns a `torch.optim`
        optimizer. If None, gradient descent with the recipe's learning rates, momentum and weight decay is used.
    scheduler : callable, optional
        Function that takes the optimizer and returns a `torch.optim` scheduler, which steps after every epoch.
    plateau_metric : str
        Name of the logged metric that a `ReduceLROnPlateau` scheduler monitors. See :class:`Monitor`.
    backend : str
        Backend that computes the updates. ``"auto"`` selects the fastest backend, ``"reference"`` performs PyTorch
        operations one by one, and ``"autograd"`` does the same with gradients by autograd. The other names are listed
        in `mvrbm.backends.choose.BACKENDS`. All backends compute the same updates up to rounding. On GPUs, matrix
        products round their operands to 11 significant bits (TF32 or fp16), except in ``"reference"`` and
        ``"autograd"``. If the backend does not support the training run, `fit` raises ValueError.
    callbacks : sequence of Callback
        Callbacks to run during training.
    seed : int
        Random seed for the initial parameters, the order of the samples, and the chains.
    missing_steps : int
        Number of Gibbs steps used to sample missing entries in each update.
    world : World, optional
        Processes that share the work. If None, all processes started by ``torchrun`` are used. Pass ``World()`` to use
        only the current process.

    Attributes
    ----------
    state : TrainState
        Everything that changes during training: the machine, momenta, chains, counters and the history.
    recipe : Recipe
        Recipe used for training. After `fit`, it contains the learning rate, including one computed from the data.
    requested_recipe : Recipe
        Recipe as passed by the user.
    n_epochs : int
        Number of epochs after which `fit` returns, including epochs from earlier calls.
    batches_per_epoch : int or None
        Number of updates per epoch, or None if unknown.
    planned_epochs : int or None
        Number of epochs over which the learning rate decays linearly. If None, `n_epochs` is used. If 0, linear decay
        is disabled.
    seed : int or None
        Random seed, or None if the user did not specify a seed. If None, training can resume from checkpoints with any
        seed.
    same_data : bool
        Whether every call to `fit` uses the same data. If False, the data is not compared when training resumes from a
        checkpoint.
    sample_weight : array of shape (n,) or None
        Weight of each sample. An epoch draws as many samples as the data has, each in proportion to its weight. If
        None, an epoch contains each sample once. Set it before `fit`.
    stop : bool
        Set to True in a callback to stop training after the current batch.
    failed : bool
        Whether the most recent `fit` ended with an error.
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
        self.sample_weight: Any = None
        self.planned_epochs: int | None = None
        self.n_epochs = self.recipe.n_epochs
        self.batches_per_epoch: int | None = None
        self.stop = False
        self.failed = False
        self._numbers = _Numbers(*RandomSource(seed).split(3))
        self.state = TrainState(machine, self._numbers.chains)
        # If None, updates follow the recipe.
        self._optimizer_settings: OptimizerSettings | None = None
        if optimizer is not None or scheduler is not None:
            self._optimizer_settings = OptimizerSettings(optimizer, scheduler, plateau_metric)
        self._prepared = _Prepared()
        #: Effective number of samples in each data set of an open-ended run, keyed by the size and the digest of the
        #: data. The prior depends on their sum.
        self.seen: dict[tuple[int | None, str | None], float] = {}
        # Exception that `raise_if_interrupted` raises if a signal interrupted `fit`.
        self._interrupt: type[BaseException] | None = None
        self._checkpoints = _Checkpoints()

    # -- interface for callbacks ------------------------------------------------------------------

    @property
    def machine(self) -> BoltzmannMachine:
        """The machine being trained."""
        return self.state.machine

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.state.epoch

    @property
    def update(self) -> int:
        """Number of completed updates."""
        return self.state.update

    @property
    def history(self) -> list[dict[str, float]]:
        """Metrics logged by callbacks."""
        return self.state.history

    @property
    def optimizer(self) -> Optimizer | None:
        """Optimizer, or None if updates follow the recipe."""
        return self.state.optimizer

    @property
    def scheduler(self) -> LRScheduler | None:
        """Learning rate scheduler, or None if no scheduler was passed."""
        return self.state.scheduler

    @property
    def order_rng(self) -> RandomSource:
        """Random source for the order of the samples. The order for epoch `e` is drawn at step `e` of the source."""
        return self._numbers.order

    @property
    def kept_backend(self) -> EpochBackend | None:
        """GPU backend that the next call to `fit` can reuse, or None if there is none."""
        return _kept_backend.get(self.state)

    @property
    def interrupt(self) -> type[BaseException] | None:
        """Exception that :meth:`raise_if_interrupted` raises, or None if the most recent `fit` was not interrupted."""
        return self._interrupt

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or SIGTERM stopped the most recent `fit`. See :meth:`raise_if_interrupted`."""
        return self._interrupt is not None

    @property
    def callbacks(self) -> list[Callback]:
        """Callbacks in the order in which they are called.

        Checkpoint callbacks are called last so that checkpoints include changes made by other callbacks.
        """
        return self._callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = sorted(callbacks, key=lambda callback: callback.call_order)

    def log(self, row: dict[str, float]) -> None:
        """Add metrics to the history and pass them to the callbacks. Values are averaged over all processes."""
        means = self.world.means(list(row.values()))
        row = {"epoch": self.epoch, "update": self.update, **dict(zip(row, means, strict=True))}
        self.history.append(row)
        self._notify("on_log", row=row)

    # -- training loop ----------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        n_epochs: int | None = None,
        *,
        mask: Any = None,
        nan_is_missing: bool = False,
        initialize: bool | None = None,
    ) -> Trainer:
        """Train until `n_epochs` epochs are complete, including epochs from earlier calls.

        Parameters
        ----------
        data : array, path to a .npy file, mapping of str to array or path, Dataset or DataLoader
            Training data. The first axis of an array indexes the samples. For Bernoulli layers, uint8 data is scaled to
            [0, 1] one batch at a time.
        n_epochs : int, optional
            Total number of epochs. If None, the value in the recipe is used.
        mask : array or mapping of arrays, optional
            Mask that is True for known entries. Missing entries are sampled from the model, given the known entries.
        nan_is_missing : bool
            Whether NaN marks a missing entry. If False, NaN raises ValueError.
        initialize : bool, optional
            Whether the first call to `fit` initializes the machine's parameters from the data and the recipe. If None,
            the parameters are initialized only if the machine is new (:attr:`mvrbm.BoltzmannMachine.is_new`), that is,
            if it was not trained or loaded, its parameters were not set, and its couplings are not from another
            machine.

        Returns
        -------
        Trainer
            This trainer.
        """
        source = self.prepare(data, mask=mask, nan_is_missing=nan_is_missing, initialize=initialize)
        self.start_fit(n_epochs)
        settings = self.update_settings()
        with (
            finish_on_interrupt(self.request_stop),
            self._callbacks_running(),
            contextlib.ExitStack() as while_training,
        ):
            backend = self._backend_for(settings, source, while_training)
            if isinstance(backend, EpochBackend):
                EpochLoop(backend, [self], [source]).fit()
                _kept_backend[self.state] = backend
            else:
                while_training.callback(setattr, self._prepared, "update_backend", None)
                self._fit_by_batches(backend, source)
            if not self.interrupted:
                check_size(self.machine, self.recipe, self.update)
        return self

    def start_fit(self, n_epochs: int | None = None) -> None:
        """Set the number of epochs and reset the flags of the previous `fit`."""
        self.n_epochs = self.recipe.n_epochs if n_epochs is None else n_epochs
        self.stop = False
        self.failed = False
        self._interrupt = None

    @contextlib.contextmanager
    def _callbacks_running(self) -> Iterator[None]:
        """Context manager that calls `on_train_begin`, and `on_train_end` on exit.

        `on_train_end` is called for every callback whose `on_train_begin` raised no error, even if other callbacks or
        the training loop raise errors. The first of these errors is raised in the end.
        """
        begun = list[Callback]()
        errors = list[BaseException]()
        try:
            for callback in self._active_callbacks():
                callback.on_train_begin(self)
                begun.append(callback)
            yield
        except BaseException as error:
            self.failed = True
            errors.append(error)
        for callback in begun:
            try:
                callback.on_train_end(self)
            except BaseException as error:
                errors.append(error)
        if errors:
            self.failed = True
            raise errors[0]

    def _backend_for(
        self, settings: UpdateSettings, source: Source, while_training: contextlib.ExitStack
    ) -> UpdateBackend | EpochBackend:
        """Return the backend from the previous `fit` if it supports the new data, or a new backend otherwise.

        For a new backend, the number of PyTorch threads is limited until the context `while_training` exits.
        """
        kept = _kept_backend.pop(self.state, None)
        if kept is not None and kept.continues_with([settings], [self.state], [source]):
            return kept
        del kept
        chosen = choose_entry([settings], [self.state], [source], name=self.backend)
        limited = sensible_threads(self.machine, self.recipe.batch_size, needed=chosen.uses_torch_threads)
        threads = while_training.enter_context(limited)
        return chosen.build([settings], [self.state], [source], threads)

    def _fit_by_batches(self, backend: UpdateBackend, source: Source) -> None:
        """Train with a backend that computes one update at a time."""
        self._prepared.update_backend = backend
        stopping = self._any_process_stops()
        while self.goes_on(stopping):
            self.begin_epoch()
            stopping = self._run_batches(backend, source)
            complete = self.batches_per_epoch is not None and self.state.batch >= self.batches_per_epoch
            if stopping and not complete:
                self._synchronize(backend)
                if not source.resumable:
                    self.restart_epoch()
                return
            backend.store(self.state)
            balance(self.machine, self.recipe)
            self.end_epoch()
            stopping = self._any_process_stops()
            if self.epoch < self.n_epochs:
                backend.load(self.state)  # a callback may have changed the state

    def _run_batches(self, backend: UpdateBackend, source: Source) -> bool:
        """Compute the remaining updates in the current epoch and return whether training should stop."""
        state = self.state
        full = source.full_batch(self.recipe.batch_size)
        before = self.update
        for batch in self._batches(source):
            self._notify("on_batch_begin", batch=batch)
            full = max(full, batch.total)
            self.train_on(batch, weight=batch.total / full)
            if backend.settings.every_batch:
                self._synchronize(backend)
            state.batch += 1
            self._notify("on_batch_end", batch=batch)
            if self._any_process_stops():
                return True
        if self.update == before and state.batch == 0:
            raise ValueError("the data produced no batches in this epoch; check that it can be iterated more than once")
        return False

    def goes_on(self, stopping: bool) -> bool:
        """Return whether to continue with the current or the next epoch.

        `stopping` indicates whether a stop was requested. If training resumes from a checkpoint saved after the last
        update of an epoch, that epoch is completed even so.
        """
        return self.epoch < self.n_epochs and (not stopping or self.state.batch == self.batches_per_epoch)

    def begin_epoch(self) -> None:
        """Step the scheduler and notify the callbacks."""
        if self._optimizer_settings is not None and self.state.scheduled_epochs < self.epoch:
            # The scheduler steps here because the checkpoint for the previous epoch must store the old learning rate.
            self._optimizer_settings.step_scheduler(self.state)
        self.state.scheduled_epochs = self.epoch
        self._notify("on_epoch_begin")

    def end_epoch(self) -> None:
        """Finish the current epoch after its last update, and notify the callbacks."""
        self.state.epoch += 1
        self.state.batch = 0
        # Epochs start from the rounded parameters, so checkpoints saved between epochs can be smaller.
        self.state.exact = {}
        limit_overshoot(self.machine)
        try:
            self.machine.check_bounded()
        except ValueError as error:
            raise DivergenceError(f"update {self.update}: {error}") from error
        self._notify("on_epoch_end")

    def _batches(self, source: Source) -> Iterator[Batch]:
        """Yield the remaining batches in the current epoch.

        If the number of batches is unknown, processes that run out of data yield empty batches until all processes have
        run out of data.
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
        """Compute one update. Call `fit` or `prepare` first.

        Parameters
        ----------
        batch : Batch
            Samples for this process.
        weight : float
            Weight of the gradient. Use a weight below 1 for a smaller batch so that all samples count equally.
        """
        if not self.state.started:
            raise ValueError("this training run has not started; call fit or prepare before train_on")
        backend = self._prepared.update_backend or ReferenceBackend(self.update_settings())
        share = self._share_of(batch)
        data: Layers = batch.visible
        if batch.known:
            data = backend.draw_missing(self.state, batch, self.missing_steps, share)
        backend.update(self.state, data, weight, share)

    def _share_of(self, batch: Batch) -> Share:
        """Return the share of an update that this process computes."""
        if self.world.size == 1:
            return WHOLE
        samples = len(batch) / max(1, batch.total)
        n_chains = self.recipe.negative.n_chains
        if n_chains == 0:
            return Share(samples, samples, batch.first, batch.first)
        own = self.world.part_of(n_chains)
        return Share(samples, (own.stop - own.start) / n_chains, batch.first, own.start)

    def _synchronize(self, backend: UpdateBackend) -> None:
        """Copy the backend's data to the state and back. This has the same effect as resuming from a checkpoint."""
        backend.store(self.state)
        # With several processes, the exact tensors would contain the chains for only one process.
        self.state.exact = backend.exact() if self.world.size == 1 else {}
        backend.load(self.state)

    def update_settings(self) -> UpdateSettings:
        """Return the settings that a backend needs to compute updates."""
        recipe = self._with_prior(self.recipe)
        if recipe.linear_decay and recipe.planned_updates is None and self.batches_per_epoch is not None:
            epochs = self.n_epochs if self.planned_epochs is None else self.planned_epochs
            recipe = dataclasses.replace(recipe, planned_updates=epochs * self.batches_per_epoch or None)
        return UpdateSettings(
            recipe=recipe,
            negative=recipe.negative.share(self.world),
            by_autograd=self.backend == "autograd",
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
        """Prepare for training without starting it, and return the data source. `fit` calls this method first.

        See :meth:`fit` for the parameters.
        """
        world = self.world
        size = self.recipe.batch_size
        for other in [state for state in _kept_backend if state is not self.state]:
            _kept_backend.pop(other, None)  # frees GPU memory used by other training runs
        with world.raise_together(ValueError, OSError, TypeError, MemoryError):
            if size < world.size:
                raise ValueError(f"batch_size must be at least the number of processes ({world.size}), got {size}")
            own = len(range(size)[world.part_of(size)])
            source = as_source(data, self.machine, mask=mask, nan_is_missing=nan_is_missing, batch_size=own)
            source.world = world
            source.weigh(self.sample_weight)
            kept = self.kept_backend
            if kept is not None and kept.n_samples != source.n_samples:
                del kept, _kept_backend[self.state]  # cannot be reused, and its data occupies GPU memory
            check_training_memory(self.machine, source.full_batch(own))
            source.first_look()
        n_batches = source.n_batches(size)
        counts = [int(count) for count in world.gather(torch.tensor([-1 if n_batches is None else n_batches]))]
        self.batches_per_epoch = None if min(counts) < 0 else max(counts)
        self._prepared.source = source
        self._prepared.n_effective = self._count(source)
        if self.state.optimizer is not None and self.recipe.prior_precision:
            self.state.optimizer.param_groups[0]["weight_decay"] = self._with_prior(self.recipe).weight_decay
        self.machine.check_bounded()
        if not self.state.started:
            self._begin_run(source, self.machine.is_new if initialize is None else initialize)
        if self._checkpoints.to_restore is not None:
            self._checkpoints.to_restore.restore(self.state, self._description())
            self._checkpoints.to_restore = None
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
            self._optimizer_settings.build(self.state, self._with_prior(recipe))

    def _with_prior(self, recipe: Recipe) -> Recipe:
        """Return a recipe whose weight decay includes the prior."""
        if not recipe.prior_precision:
            return recipe
        decay = recipe.weight_decay + recipe.prior_precision / self._prepared.n_effective
        return dataclasses.replace(recipe, weight_decay=decay, prior_precision=0.0)

    def _count(self, source: Source) -> float:
        """Return the effective number of samples of all processes, or infinity if it is unknown.

        If each call of `fit` receives a part of the data, count all parts so far. Otherwise, the prior would be too
        strong by the number of parts.
        """
        own = source.n_effective
        if self.recipe.prior_precision:
            if self.planned_epochs != 0:
                self.seen.clear()
            self.seen[source.n_samples, source.digest] = own
            own = sum(self.seen.values())
        if source.common:
            return own
        counts = self.world.gather(torch.tensor([own], dtype=torch.float64))
        return sum(map(float, counts))

    def restart_epoch(self) -> None:
        """Make the next `fit` start at the beginning of an epoch, for example after the data has changed."""
        self.state.batch = 0

    # -- stopping ---------------------------------------------------------------------------------

    def request_stop(self, interrupt: type[BaseException]) -> None:
        """Request that training stop after the current batch. Called when a signal arrives."""
        self.stop = True
        self._interrupt = interrupt

    def _any_process_stops(self) -> bool:
        """Return whether any process requested a stop. All processes must call this method together."""
        terminated = self.interrupted and self._interrupt is Terminated
        stop, interrupted, terminated = self.world.any([self.stop, self.interrupted, terminated])
        # A signal may have arrived in this process since the flags were read. Keep its flags for the next call.
        self.stop = self.stop or stop
        if interrupted and self._interrupt is None:
            self._interrupt = Terminated if terminated else KeyboardInterrupt
        return stop

    def raise_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C stopped the most recent `fit`, or SystemExit (code 143) if SIGTERM did."""
        if self._interrupt is not None:
            raise self._interrupt

    def _notify(self, hook: str, **details: Any) -> None:
        """Call a hook on all callbacks of this process."""
        for callback in self._active_callbacks():
            getattr(callback, hook)(self, **details)

    def _active_callbacks(self) -> list[Callback]:
        """Return the callbacks that this process calls."""
        return [callback for callback in self.callbacks if self.world.is_main or not callback.main_process_only]

    # -- checkpoints ------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """Number of completed epochs at the start of the next `fit`, which may resume from a checkpoint."""
        return self.epoch if self._checkpoints.to_restore is None else self._checkpoints.to_restore.epoch

    def save(self, folder: str | PathLike[str], keep: int = 2) -> Path:
        """Write a checkpoint to `folder` and return its path. Delete all but the `keep` most recent checkpoints.

        A checkpoint of this training run after the same update is replaced. Raises
        :class:`~mvrbm.errors.StorageError` if the folder contains checkpoints from another training run.
        """
        if self._checkpoints.to_restore is not None:
            raise StorageError("the checkpoint to resume from has not been restored yet; call fit before save")
        with self.world.raise_together(StorageError):
            if self.world.is_main:
                self.check_owns(folder)
        path = checkpoints.save(self.state, self._description(), folder, keep)
        self._checkpoints.own_folders.add(Path(folder).resolve())
        return path

    def check_owns(self, folder: str | PathLike[str]) -> None:
        """Raise StorageError if a folder contains checkpoints, and this run neither resumed from it nor saved to it."""
        if Path(folder).resolve() not in self._checkpoints.own_folders and checkpoints.newest(folder) is not None:
            raise StorageError(
                f"{folder} contains checkpoints from an earlier training run; resume that run or choose another folder"
            )

    def resume(self, folder: str | PathLike[str], *, ignore_mismatch: bool = False) -> bool:
        """Make the next `fit` resume from the most recent checkpoint in `folder`. Return whether there is one.

        The number of epochs can differ from the number in the checkpoint. If the recipe, seed, optimizer or data
        differs from the one used for the checkpoint, this method or `fit` raises :class:`~mvrbm.errors.StorageError`,
        or issues a warning if `ignore_mismatch` is True.
        """
        with self.world.raise_together(StorageError):
            found = checkpoints.newest(folder) if self.world.is_main else None
        chosen = self.world.broadcast_text("" if found is None else found.name)
        if chosen:
            self.resume_from(Path(folder) / chosen, ignore_mismatch=ignore_mismatch)
        return bool(chosen)

    def resume_from(self, path: Path, *, ignore_mismatch: bool = False) -> None:
        """Make the next `fit` resume from the checkpoint at `path`. See :meth:`resume`."""
        with self.world.raise_together(StorageError):
            recipe = self.requested_recipe
            self._checkpoints.to_restore = checkpoints.read(path, self.machine, recipe, ignore_mismatch=ignore_mismatch)
        self._checkpoints.own_folders.add(path.resolve().parent)

    def _description(self) -> checkpoints.RunDescription:
        """Return a description of this training run for checkpoints."""
        return checkpoints.RunDescription(
            recipe=self.requested_recipe,
            seed=self.seed,
            missing_steps=self.missing_steps,
            optimization=None if self._optimizer_settings is None else self._optimizer_settings.description,
            source=self._prepared.source,
            same_data=self.same_data,
            batches_per_epoch=self.batches_per_epoch,
            callbacks=self.callbacks,
            world=self.world,
        )


@register(CHECKPOINT)
def load_checkpoint(folder: Path, config: dict[str, Any], device: str | torch.device) -> Trainer:
    """Create a trainer that resumes from a checkpoint, without its callbacks. Used by :func:`mvrbm.load`.

    `folder` contains a single checkpoint, or several checkpoints, the most recent of which is used.
    """
    path = folder if (folder / "trainer.json").is_file() else checkpoints.newest(folder)
    if path is None:
        raise StorageError(f"{folder} contains no checkpoints")
    plain = checkpoints.read_settings(path)
    if plain["settings"].get("steps") is not None or plain.get("scheduler") is not None:
        raise StorageError(
            f"{path} was saved with an optimizer or a scheduler; create the same Trainer and call its resume method"
        )
    known = {name: plain["settings"][name] for name in ("seed", "missing_steps") if plain["settings"].get(name)}
    trainer = Trainer(read_machine(path).to(resolve_device(device)), plain["recipe_asked"], **known)
    trainer.resume_from(path)
    return trainer
