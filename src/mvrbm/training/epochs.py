"""Training loop for GPU backends that compute whole epochs, for one machine or several machines together.

The loop for the other backends, which compute single updates, is in :class:`mvrbm.training.Trainer`.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mvrbm.backends.base import EpochBackend
from mvrbm.data.sample_weights import SampleWeights
from mvrbm.data.sources import Source
from mvrbm.errors import DivergenceError
from mvrbm.random import RandomSource
from mvrbm.training.callbacks import Callback
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import balance

# Maximum number of epochs whose sample orders are computed with one sort.
_EPOCHS_PER_SORT = 16
# Maximum number of entries in one sort.
_ENTRIES_PER_SORT = 2**17


class EpochOrders:
    """Order of the samples in each epoch. If epochs are short, a single sort yields the orders for several epochs.

    Parameters
    ----------
    rng : RandomSource
        Random source for the orders. The order for epoch `e` is drawn at step `e` of the source.
    n : int
        Number of samples.
    device : torch.device
        Device to store the orders on.
    weights : SampleWeights, optional
        Sample weights, which determine how often an order contains each sample. Default: once.
    """

    def __init__(self, rng: RandomSource, n: int, device: torch.device, weights: SampleWeights | None = None) -> None:
        self._rng = rng
        self._n = n
        self._weights = weights
        self._device = device
        self._count = max(1, min(_EPOCHS_PER_SORT, _ENTRIES_PER_SORT // n))
        self._first = 0
        self._orders = torch.empty(0, n, dtype=torch.int64, device=device)

    def of_epoch(self, epoch: int) -> Tensor:
        """Return the order of the samples in an epoch as a tensor of shape (n,)."""
        if not self._first <= epoch < self._first + len(self._orders):
            self._first = epoch
            self._orders = self._rng.permutations(self._n, epoch, self._count, self._device)
            if self._weights is not None:
                after = [self._rng.at_step(step, draw=1) for step in range(epoch, epoch + self._count)]
                self._orders = self._weights.draw(self._orders, after)
        return self._orders[epoch - self._first]


class EpochRun(Protocol):
    """Attributes and methods of :class:`~mvrbm.training.Trainer` that :class:`EpochLoop` uses."""

    state: TrainState
    recipe: Recipe
    n_epochs: int
    batches_per_epoch: int | None
    stop: bool

    @property
    def callbacks(self) -> Sequence[Callback]:
        """Callbacks, which may read and change the state after each epoch."""

    @property
    def order_rng(self) -> RandomSource:
        """Random source for the order of the samples."""

    def goes_on(self, stopping: bool) -> bool:
        """Return whether to continue with the current or the next epoch."""

    def begin_epoch(self) -> None:
        """Called before an epoch."""

    def end_epoch(self) -> None:
        """Called after the last update of an epoch. Raises DivergenceError if the energy is unbounded."""


class EpochLoop:
    """Loop over epochs for one training run, or for several runs whose machines have the same shapes.

    Parameters
    ----------
    backend : EpochBackend
        Backend that computes the epochs.
    runs : sequence of EpochRun
        Training runs. They have the same number of epochs and are at the same position.
    sources : sequence of Source
        Data source for each run.
    """

    def __init__(self, backend: EpochBackend, runs: Sequence[EpochRun], sources: Sequence[Source]) -> None:
        self.backend = backend
        self.runs = runs
        self.states = [run.state for run in runs]
        #: Whether the states contain the latest parameters computed by the backend.
        self.stored = True
        #: Whether each run has diverged. If there is only one run, divergence raises `DivergenceError` instead.
        self.diverged = [False] * len(runs)
        self._sources = sources
        device = self.states[0].machine.like.device
        self._orders = [
            EpochOrders(run.order_rng, backend.n_samples, device, source.weights)
            for run, source in zip(runs, sources, strict=True)
        ]

    def fit(self) -> None:
        """Train until all epochs are complete or a run requests a stop."""
        first = self.runs[0]
        read_by_callbacks = any(run.callbacks for run in self.runs)
        while first.goes_on(self._stopping()):
            for run in self.runs:
                run.begin_epoch()
            self.run_epoch()
            last = self._stopping() or first.state.epoch + 1 >= first.n_epochs
            # Writing the parameters back takes as long as several updates, so skip it unless the parameters are read,
            # by callbacks or to limit the norm of coupled Gaussian layers.
            if last or read_by_callbacks or first.state.machine.may_be_unbounded:
                self.store()
            if first.batches_per_epoch is None or first.state.batch < first.batches_per_epoch:
                break
            self.balance()
            self._end_epoch()
            if first.state.epoch < first.n_epochs:
                self.load()
        if not self.stored:
            self.store()

    def _stopping(self) -> bool:
        return any(run.stop for run in self.runs)

    def _end_epoch(self) -> None:
        for number, run in enumerate(self.runs):
            try:
                run.end_epoch()
            except DivergenceError:
                if len(self.runs) == 1:
                    raise
                self.diverged[number] = True

    def run_epoch(self) -> None:
        """Compute the remaining updates in the current epoch. The backend may stop early if a run requests a stop."""
        for source in self._sources:
            source.check_all()
        epoch = self.states[0].epoch
        orders = torch.stack([orders.of_epoch(epoch) for orders in self._orders])
        made = self.backend.epoch(self.states, orders, self._stopping)
        for state in self.states:
            state.batch += made
        self.stored = False

    def store(self) -> None:
        """Copy parameters, momenta and chains from the backend to the states, and record which runs diverged."""
        self.stored = True
        found = self.backend.store(self.states)
        self.diverged = [before or now for before, now in zip(self.diverged, found, strict=True)]

    def load(self) -> None:
        """After :meth:`store`, load the states into the backend again, because callbacks may have changed them."""
        if self.stored:
            self.backend.load(self.states)

    def balance(self) -> None:
        """If the recipe enables it, rescale the factors of each coupling so that their norms are equal."""
        if self.stored:
            for run in self.runs:
                balance(run.state.machine, run.recipe)
        elif self.runs[0].recipe.balance:
            self.backend.balance(self.states)
