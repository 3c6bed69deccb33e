"""Epochs that a GPU backend computes as a whole, for one machine or for several at once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mvrbm.backends.base import EpochBackend
from mvrbm.data.sources import Source
from mvrbm.random import RandomSource
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import balance

# Limits of the orders that one sort computes: a number of epochs, and a number of entries.
_EPOCHS_PER_SORT = 16
_ENTRIES_PER_SORT = 2**17


class EpochOrders:
    """The order of the samples in every epoch. One sort computes the orders of several short epochs.

    Parameters
    ----------
    rng : RandomSource
        Source of random numbers. Epoch `e` uses the numbers of step `e`.
    n : int
        Number of samples.
    device : torch.device
        Device of the orders.
    """

    def __init__(self, rng: RandomSource, n: int, device: torch.device) -> None:
        self._rng = rng
        self._n = n
        self._device = device
        self._count = max(1, min(_EPOCHS_PER_SORT, _ENTRIES_PER_SORT // n))
        self._first = 0
        self._orders = torch.empty(0, n, dtype=torch.int64, device=device)

    def of_epoch(self, epoch: int) -> Tensor:
        """Return the order of the samples in an epoch, (n,)."""
        if not self._first <= epoch < self._first + len(self._orders):
            self._first = epoch
            self._orders = self._rng.permutations(self._n, epoch, self._count, self._device)
        return self._orders[epoch - self._first]


class EpochLoop:
    """Runs whole epochs of one training run, or of several with machines of the same shapes.

    Parameters
    ----------
    backend : EpochBackend
        Computes the epochs.
    states : sequence of TrainState
        State of each training run.
    sources : sequence of Source
        Data of each training run.
    order_rngs : sequence of RandomSource
        Source of each training run's orders of samples.
    """

    def __init__(
        self,
        backend: EpochBackend,
        states: Sequence[TrainState],
        sources: Sequence[Source],
        order_rngs: Sequence[RandomSource],
    ) -> None:
        self.backend = backend
        self.states = states
        #: Whether the states hold the parameters that the backend has computed.
        self.stored = True
        self._sources = sources
        device = states[0].machine.like.device
        self._orders = [EpochOrders(rng, backend.n_samples, device) for rng in order_rngs]

    def run(self, stopped: Callable[[], bool]) -> None:
        """Compute the rest of the current epoch. The backend may stop early if `stopped` returns True."""
        for source in self._sources:
            source.check_all()
        epoch = self.states[0].epoch
        orders = torch.stack([orders.of_epoch(epoch) for orders in self._orders])
        made = self.backend.epoch(self.states, orders, stopped)
        for state in self.states:
            state.batch += made
        self.stored = False

    def store(self) -> list[bool]:
        """Write parameters, momenta and chains to the states, and return which training runs diverged."""
        self.stored = True
        return self.backend.store(self.states)

    def load(self) -> None:
        """Continue from the states if they were stored, because a callback may have changed them."""
        if self.stored:
            self.backend.load(self.states)

    def balance(self, recipe: Recipe) -> None:
        """Rescale the factors of each coupling to equal norms, if the recipe asks for it."""
        if self.stored:
            for state in self.states:
                balance(state.machine, recipe)
        elif recipe.balance:
            self.backend.balance(self.states)
