"""The trainer: one loop for every machine."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from mvrbm.devices import sensible_threads
from mvrbm.errors import DivergenceError
from mvrbm.learning import checkpoint
from mvrbm.learning.data import Batch, Source, as_source, read_ahead
from mvrbm.learning.distributed import World
from mvrbm.learning.gradients import Centring, Gradient, contrast, contrast_by_autograd, normalise
from mvrbm.learning.initialisation import initialise, offsets, safe_rate
from mvrbm.learning.recipe import Recipe, as_recipe
from mvrbm.learning.samplers import Chains
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import gibbs_step, keep_known
from mvrbm.saving import StorageError
from mvrbm.validation import all_finite

if TYPE_CHECKING:
    from os import PathLike

    from mvrbm.learning.callbacks import Callback
    from mvrbm.learning.paths import graphs
    from mvrbm.learning.paths import triton as fused
    from mvrbm.learning.paths.updates import FlatUpdates

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class Trainer:
    """Trains a machine on data.

    Parameters
    ----------
    machine : BoltzmannMachine
        What learns. It is changed in place.
    recipe : str or Recipe
        ``"default"``, ``"paper"``, or settings of your own.
    optimizer : callable, optional
        Makes any `torch.optim` optimiser from parameter groups: factors first, biases second. If not
        given, SGD with the recipe's rates, momentum and weight decay.
    scheduler : callable, optional
        Makes any `torch.optim` scheduler from the optimiser. It steps after every pass;
        `ReduceLROnPlateau` is given the metric named `plateau_metric`.
    plateau_metric : str
        Which of a :class:`Monitor`'s metrics that is.
    gradient : {"analytic", "autograd"}
        Where the gradient comes from. Both give the same; the first is faster.
    callbacks : sequence of Callback
        What watches.
    seed : int
        Of everything random: the start, the order of the data, the chains.
    initialise : bool
        Whether the first `fit` sets the machine to the recipe's start. Otherwise it goes on from the
        machine as it is.
    missing_steps : int
        Gibbs steps in which unknown entries are drawn before they count as data.
    world : World, optional
        The processes that share the work; if not given, those that ``torchrun`` started. `World()` is this one alone.

    Attributes
    ----------
    epoch, update : int
        Passes finished, and updates made.
    history : list of dict
        What was logged.
    interrupted : bool
        Whether the last `fit` was ended by Ctrl-C.
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
        gradient: str = "analytic",
        callbacks: Sequence[Callback] = (),
        seed: int = 0,
        initialise: bool = True,
        missing_steps: int = 5,
        world: World | None = None,
    ) -> None:
        if gradient not in ("analytic", "autograd"):
            raise ValueError(f"gradient must be 'analytic' or 'autograd', got '{gradient}'")
        if missing_steps < 1:
            raise ValueError(f"missing_steps must be at least 1, got {missing_steps}")
        self.machine, self.recipe = machine, as_recipe(recipe)
        self.recipe_asked = self.recipe  # before a rate was chosen for it
        # Checkpoints last: they are to hold what the other callbacks made of the same update.
        self.callbacks = sorted(callbacks, key=lambda callback: callback.comes_last)
        self.gradient, self.missing_steps = gradient, missing_steps
        self.plateau_metric = plateau_metric
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self._initialise = initialise
        self.world = World.here() if world is None else world
        seed = self.world.from_main(seed)
        self.start_rng, self.order_rng, self.rng = RandomSource(seed, device=machine.like.device).split(3)
        self._common_rng = self.rng
        if self.world.size > 1:
            self.rng = self.rng_of(0)
        self.negative, self._chain_share = self.recipe.negative.share(self.world)
        self.optimizer: Optimizer | None = None
        self.scheduler: LRScheduler | None = None
        self.centring: Centring | None = None
        self.chains: Chains = {}
        self.epoch = self.batch = self.update = 0
        self.history: list[dict[str, float]] = []
        self.stop = self.interrupted = self.broken = False
        self._ending = False  # what all processes have agreed on; `stop` is what this one wants
        self.scheduled = 0  # passes that the scheduler knows of
        self.batches_per_epoch: int | None = None
        self.n_epochs = self.recipe.n_epochs
        self._order_at_start = self.order_rng.state_dict()
        self._resumed: dict[str, Any] | None = None
        self._kept: dict[str, Tensor] = {}  # parameters before the last step, in the same memory every time
        self._passes: fused.FusedPasses | graphs.GraphedPasses | None = None
        self._updates: FlatUpdates | None = None

    def rng_of(self, update: int) -> RandomSource:
        """Return this process's stream of random numbers from an update on, where so many share the work."""
        return self._common_rng.stream(self.world.size, self.world.rank, update)

    @property
    def own_optimizer(self) -> bool:
        """Whether the steps are the recipe's, and not those of an optimiser or scheduler that was given."""
        return self._make_optimizer is None and self._make_scheduler is None

    # -- the loop ---------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        n_epochs: int | None = None,
        *,
        mask: Any = None,
        nan_is_missing: bool = False,
    ) -> Trainer:
        """Train until `n_epochs` passes over the data are done, those of earlier calls included.

        Parameters
        ----------
        data : array, path of a .npy file, mapping of these by layer, Dataset or DataLoader
            The data. Arrays hold one sample a row of their first axis. Bytes are scaled to [0, 1] for
            Bernoulli layers, batch by batch.
        n_epochs : int, optional
            Passes over the data in all; the recipe's if not given.
        mask : array or mapping of arrays, optional
            True where an entry is known. The others are drawn from the model, given those.
        nan_is_missing : bool
            Whether NaN marks an unknown entry. Otherwise it is an error.

        Returns
        -------
        Trainer
            Itself.
        """
        recipe = self.recipe
        with self.world.together(ValueError, OSError, TypeError):
            if recipe.batch_size < self.world.size:
                raise ValueError(
                    f"batch_size must be at least the number of processes, {self.world.size}, got {recipe.batch_size}"
                )
            source = as_source(
                data,
                self.machine,
                mask=mask,
                nan_is_missing=nan_is_missing,
                batch_size=len(range(recipe.batch_size)[self.world.part_of(recipe.batch_size)]),
            )
            source.world = self.world
            source.first_look()
        self.n_epochs = recipe.n_epochs if n_epochs is None else n_epochs
        self.batches_per_epoch = self._longest(source.n_batches(recipe.batch_size))
        self._prepare(source)
        self.stop = self.interrupted = self.broken = self._ending = False
        from mvrbm.learning.paths import native  # which looks at trainers itself

        by_torch = native.refuses(self) is not None
        with (
            self._interruptible(),
            sensible_threads(self.machine, self.recipe.batch_size, needed=by_torch) as threads,
        ):
            self._notify("on_train_begin")
            self._choose_path(source, threads)
            self._agree()
            try:
                # A checkpoint of the last update of a pass has that pass still to be ended.
                while self.epoch < self.n_epochs and (not self._ending or self.batch == self.batches_per_epoch):
                    self._one_pass(source)
            except BaseException:
                self.broken = True
                raise
            finally:
                self._passes = self._updates = None
                self._notify("on_train_end")
        return self

    def _longest(self, n_batches: int | None) -> int | None:
        """Batches of a pass: those of the process that has the most; None if one does not know."""
        if self.world.size == 1:
            return n_batches
        numbers = torch.cat(self.world.gather(torch.tensor([-1 if n_batches is None else n_batches])))
        return None if int(numbers.min()) < 0 else int(numbers.max())

    def _agree(self) -> None:
        """End together, if one of the processes wants to."""
        if self.world.size > 1:
            wishes = torch.tensor([float(self.stop), float(self.interrupted)], dtype=torch.float64)
            self.world.add_up(wishes)
            self._take(wishes)
        else:
            self._ending = self.stop

    def _take(self, wishes: Tensor) -> None:
        self._ending = bool(wishes[0] > 0)
        # A wish that came meanwhile is for the next time.
        self.stop, self.interrupted = self.stop or self._ending, self.interrupted or bool(wishes[1] > 0)

    def _choose_path(self, source: Source, threads: int) -> None:
        """Take the fastest path that can do this training."""
        from mvrbm.learning.paths import gemm, graphs, native
        from mvrbm.learning.paths import triton as fused  # which look at trainers themselves

        if fused.refuses(self, source) is None:
            self._passes = fused.FusedPasses([self], [source])
        elif graphs.refuses(self, source) is None:
            self._passes = graphs.GraphedPasses(self, source)
        elif native.refuses(self) is None:
            self._updates = native.NativeUpdates(self, threads)
        elif gemm.refuses(self) is None:
            self._updates = gemm.GemmUpdates(self)

    def _prepare(self, source: Source) -> None:
        """Set up, once, what needs a look at the data."""
        self.machine.check_bounded()
        if self.optimizer is None:
            self._start(source)
        if self._resumed is not None:
            same_world, pass_done = checkpoint.restore(self, self._resumed)
            self._resumed = None
            if pass_done and self.batches_per_epoch is not None:
                self.batch = self.batches_per_epoch
            elif not (source.resumable and (source.common or same_world)):
                self.batch = 0
        self.world.copy_from_main([p.data for p in self.machine.parameters()])

    def _start(self, source: Source) -> None:
        moments = source.moments()
        if self._initialise:
            initialise(self.machine, self.recipe, moments, self.start_rng)
            self.machine.check_bounded()
        if self.recipe.learning_rate is None:
            rate = safe_rate(self.machine, self.recipe, moments)
            self.recipe = dataclasses.replace(self.recipe, learning_rate=rate)
        self._build_optimizer()
        centre = offsets(self.machine, self.recipe, moments)
        everything = self.recipe.centring == "full"
        if everything or any(bool(offset.any()) for offset in centre.values()):
            self.centring = Centring(self.machine, centre, follow_hidden=everything)

    def _build_optimizer(self) -> None:
        recipe = self.recipe
        learned = [(name, p) for name, p in self.machine.named_parameters() if p.requires_grad]
        factors = [p for name, p in learned if name.startswith("couplings.")]
        others = [p for name, p in learned if not name.startswith("couplings.")]
        rate = recipe.learning_rate
        groups = [
            {"params": factors, "lr": rate, "weight_decay": recipe.weight_decay},
            {"params": others, "lr": recipe.bias_learning_rate or rate, "weight_decay": 0.0},
        ]
        if self._make_optimizer is None:
            self.optimizer = SGD(groups, momentum=recipe.momentum)
        else:
            self.optimizer = self._make_optimizer(_without_rate(groups))
        self.scheduler = None if self._make_scheduler is None else self._make_scheduler(self.optimizer)

    def _let_rates_fall(self) -> None:
        """Set the rates of this update, unless an optimiser or a scheduler was given to do that."""
        recipe = self.recipe
        if (
            not self.own_optimizer
            or recipe.rate_decay is None
            or self.optimizer is None
            or recipe.learning_rate is None
        ):
            return
        falling = 1 / math.sqrt(1 + self.update / recipe.rate_decay)
        rates = recipe.learning_rate, recipe.bias_learning_rate or recipe.learning_rate
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * falling

    def _one_pass(self, source: Source) -> None:
        self._order_at_start = self.order_rng.state_dict()
        if self.scheduled < self.epoch:
            self._reschedule()
            self.scheduled = self.epoch
        self._notify("on_epoch_begin")
        if self._passes is not None:
            self._one_fast_pass(source, self._passes)
            return
        began = self.update
        full = source.full_batch(self.recipe.batch_size)
        watched = any(callback.wants_batches for callback in self.callbacks)
        for batch in self._in_step(source):
            self._notify("on_batch_begin", batch=batch)
            full = max(full, batch.total)
            self.train_on(batch, weight=batch.total / full)
            if watched:
                self._settle()
            self.batch += 1
            self._notify("on_batch_end", batch=batch)
            if self.world.size == 1:
                self._ending = self.stop
            if self._ending:
                break
        else:
            if self.update == began and self.batch == 0:
                raise ValueError("a pass over the data gave no batch: can it be gone through more than once?")
            self._settle()
            self.epoch, self.batch = self.epoch + 1, 0
            source.check = False  # every sample has been seen
            self._end_pass()
            return
        self._break_off(source)

    def _in_step(self, source: Source) -> Iterator[Batch]:
        """Batches of a pass, read ahead; where their number is not known, until no process has any more."""
        batches = read_ahead(source.batches(self.recipe.batch_size, self.order_rng, start=self.batch), source.slow)
        if self.world.size == 1 or source.n_samples is not None:
            yield from batches
            return
        while True:
            batch = next(batches, None)
            total = int(self.world.total(0 if batch is None else len(batch)))
            if total == 0:
                return
            yield source.nothing(total) if batch is None else batch.out_of(total)

    def _one_fast_pass(self, source: Source, passes: fused.FusedPasses | graphs.GraphedPasses) -> None:
        source.check_all()
        order = self.order_rng.permutation(source.n_samples or 0)
        made = passes.one_pass([order], start=self.batch)
        self.update += made
        self.batch += made
        last = self.stop or self.epoch + 1 >= self.n_epochs
        # To give the parameters back takes as long as some updates do: only for those who look at them.
        looked_at = last or self.callbacks or self.machine.hidden.gaussian
        if looked_at:
            passes.push()
        elif self.recipe.balance:
            passes.balance()
        self._ending = self.stop
        self._break_off(source)
        if looked_at and not last:
            passes.pull()

    def _settle(self) -> None:
        """Bring the machine up to date, and go on from what it holds, as a training that is resumed would."""
        if self._updates is not None:
            self._updates.push()
            self._updates.pull()

    def _break_off(self, source: Source) -> None:
        """End a pass, whole or not."""
        self._settle()
        if self.batches_per_epoch is not None and self.batch >= self.batches_per_epoch:
            self.epoch, self.batch = self.epoch + 1, 0
            self._end_pass()
        else:
            # The order is drawn again when the pass is taken up.
            self.order_rng.load_state_dict(self._order_at_start)
            if not source.resumable:
                self.batch = 0

    def _end_pass(self) -> None:
        self._order_at_start = self.order_rng.state_dict()
        if self.recipe.balance:
            for link in self.machine.links.values():
                link.balance()
            if self._updates is not None:
                self._updates.pull()
        try:
            self.machine.check_bounded()
        except ValueError as error:
            raise DivergenceError(f"update {self.update}: {error}") from error
        self._notify("on_epoch_end")
        self._agree()

    def _reschedule(self) -> None:
        # At the beginning of a pass, not at the end of the last: a checkpoint between them has the old rate.
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(self._latest(self.plateau_metric))
        elif self.scheduler is not None:
            self.scheduler.step()

    # -- one update -------------------------------------------------------------------------------

    @torch.no_grad()
    def train_on(self, batch: Batch, weight: float = 1.0) -> None:
        """Make one update.

        Parameters
        ----------
        batch : Batch
            Some samples.
        weight : float
            What the gradient counts: less than 1 for a batch shorter than the others, so that every
            sample counts the same.
        """
        if batch.known:
            self._settle()  # what is unknown is drawn from the machine
        data = self._complete(batch)
        share = len(batch) / max(1, batch.total)
        shares = share, share if self._chain_share is None else self._chain_share
        if self._updates is not None:
            self._updates.update(data, weight, shares)
            self.update += 1
            return
        self._step(self.slopes(data, shares), weight)

    def slopes(self, data: dict[str, Tensor], shares: tuple[float, float] = (1.0, 1.0)) -> Gradient:
        """Let the chains go on, and return the gradient of one update for every learned parameter.

        Parameters
        ----------
        data : mapping of str to Tensor
            Samples of every layer, each (n, *layer shape), whole.
        shares : tuple of float
            How much of all data and of all chains is here.
        """
        machine = self.machine
        padding = machine.as_masks(None, data)
        field = machine.hidden_field(data)
        chain = self.negative.draw(machine, data, padding, field, self.rng, self.chains)
        chain_field = machine.hidden_field(chain)
        if self.gradient == "autograd":
            gradient = contrast_by_autograd(machine, data, chain, shares)
        else:
            gradient = contrast(machine, data, chain, field, chain_field, shares)
        if self.centring is not None:
            self.centring.apply(gradient, data, chain, field, chain_field, shares, self.world)
        if self.world.size > 1:
            gradient = self._sum_of(gradient)
        if self.recipe.normalised:
            normalise(machine, gradient)
        return gradient

    def add_up(self, flat: Tensor) -> None:
        """Replace a gradient by the sum over all processes, and stop if one of them wants to."""
        if self.world.size == 1:
            return
        wishes = flat.new_tensor([float(self.stop), float(self.interrupted)])
        message = torch.cat([flat, wishes])
        self.world.add_up(message)
        flat.copy_(message[:-2])
        self._take(message[-2:])

    def _sum_of(self, gradient: Gradient) -> Gradient:
        flat = torch.cat([slope.reshape(-1) for slope in gradient.values()])
        self.add_up(flat)
        pieces = flat.split([slope.numel() for slope in gradient.values()])
        return {name: piece.view(gradient[name].shape) for name, piece in zip(gradient, pieces, strict=True)}

    def _step(self, gradient: Gradient, weight: float) -> None:
        assert self.optimizer is not None
        learned: dict[str, Tensor] = {name: p for name, p in self.machine.named_parameters() if p.requires_grad}
        for name, parameter in learned.items():
            self._kept.setdefault(name, torch.empty_like(parameter)).copy_(parameter)
            parameter.grad = gradient[name] * weight if weight != 1 else gradient[name].contiguous()
        before = None if self.centring is None else self.centring.fields()
        self._let_rates_fall()
        self.optimizer.step()
        if self.centring is not None and before is not None:
            self.centring.follow(before)
        # A gradient that is not finite makes parameters that are not: one look is enough.
        if not all_finite(learned.values()):
            what, guilty = ("parameter", learned) if all_finite(gradient.values()) else ("gradient", gradient)
            name = next(name for name, tensor in guilty.items() if not bool(torch.isfinite(tensor).all()))
            for key, parameter in learned.items():
                parameter.copy_(self._kept[key])
            self.fail(self.update + 1, f"the {what} of '{name}'")
        self.update += 1

    def _complete(self, batch: Batch) -> dict[str, Tensor]:
        """Draw what is unknown from the model, given what is known."""
        if not batch.known:
            return batch.visible
        machine, data = self.machine, batch.visible
        masks = machine.as_masks(batch.known, data)
        for name in set(data) - set(batch.known):  # a layer without a mask is known throughout
            masks[name] = torch.ones_like(data[name], dtype=torch.bool)
        drawn = {name: unit.sample(torch.zeros_like(data[name]), self.rng) for name, unit in machine.layers.items()}
        data = keep_known(data, drawn, masks)
        for _ in range(self.missing_steps):
            data = gibbs_step(machine, data, self.rng, masks).visible
        return data

    def fail(self, update: int, what: str = "a parameter") -> NoReturn:
        """Raise the error of a training that has left the finite numbers at, or soon after, an update."""
        rate = self.optimizer.param_groups[0]["lr"] if self.optimizer else self.recipe.learning_rate
        raise DivergenceError(
            f"update {update}: {what} is not finite. Lower the learning rate (now {rate:g}), "
            "raise weight_decay, or use the default recipe; checkpoints written so far are good"
        )

    # -- watching ---------------------------------------------------------------------------------

    def log(self, row: dict[str, float]) -> None:
        """Add a row of metrics to the history and hand it to the callbacks.

        Several processes log together, and it is their mean that counts.
        """
        row = {"epoch": self.epoch, "update": self.update, **row}
        if self.world.size > 1:  # of samples that may differ from process to process
            values = torch.tensor(list(row.values()), dtype=torch.float64)
            self.world.add_up(values)
            means = dict(zip(row, (values / self.world.size).tolist(), strict=True))
            row = {**means, "epoch": self.epoch, "update": self.update}
        self.history.append(row)
        self._notify("on_log", row=row)

    def _latest(self, metric: str) -> float:
        for row in reversed(self.history):
            if metric in row:
                return row[metric]
        raise ValueError(f"nothing logs '{metric}': add a Monitor callback for ReduceLROnPlateau to follow")

    def _notify(self, hook: str, **details: Any) -> None:
        for callback in self.callbacks:
            if self.world.is_main or not callback.main_process_only:
                getattr(callback, hook)(self, **details)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C end training after the batch; a second one interrupts at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def finish(number: int, frame: Any) -> None:
            self.stop = self.interrupted = True
            signal.signal(signal.SIGINT, former)

        former = signal.signal(signal.SIGINT, finish)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)

    # -- remembering ------------------------------------------------------------------------------

    def save(self, folder: str | PathLike[str], keep: int = 2) -> Path:
        """Write a checkpoint under `folder` and return where; all but the last `keep` are removed."""
        return checkpoint.save(self, folder, keep)

    def resume(self, folder: str | PathLike[str]) -> bool:
        """Go on, at the next `fit`, from the newest checkpoint under `folder`.

        Returns
        -------
        bool
            Whether there was one.
        """
        with self.world.together(StorageError):
            found = checkpoint.newest(folder) if self.world.is_main else None
        chosen = self.world.text_from_main("" if found is None else found.name)
        if not chosen:
            return False
        with self.world.together(StorageError):
            self._resumed = checkpoint.load(self, Path(folder) / chosen)
        return True


def _without_rate(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave the rate, and a decay that the recipe does not ask for, to the optimiser's maker. Biases never decay."""
    factors, others = ({key: value for key, value in group.items() if key != "lr"} for group in groups)
    if not factors["weight_decay"]:
        del factors["weight_decay"]
    return [factors, others]
