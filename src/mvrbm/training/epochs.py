"""Training loop for GPU backends that compute whole epochs. It trains one machine, or several machines together."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mvrbm.backends.base import EpochBackend
from mvrbm.data.sources import Source
from mvrbm.data.weights import SampleWeights
from mvrbm.random import RandomSource
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


class EpochLoop:
    """Loop that computes whole epochs for one training run, or for several runs whose machines have the same shapes.

    Parameters
    ----------
    backend : EpochBackend
        Backend that computes the epochs.
    states : sequence of TrainState
        Training state for each run.
    sources : sequence of Source
        Data source for each run.
    order_rngs : sequence of RandomSource
        Random source for the order of the samples in each run.
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
        #: Whether the states contain the latest parameters computed by the backend.
        self.stored = True
        self._sources = sources
        device = states[0].machine.like.device
        self._orders = [
            EpochOrders(rng, backend.n_samples, device, source.weights)
            for rng, source in zip(order_rngs, sources, strict=True)
        ]

    def run(self, stopped: Callable[[], bool]) -> None:
        """Compute the remaining updates in the current epoch. The backend may stop early if `stopped` returns True."""
        for source in self._sources:
            source.check_all()
        epoch = self.states[0].epoch
        orders = torch.stack([orders.of_epoch(epoch) for orders in self._orders])
        made = self.backend.epoch(self.states, orders, stopped)
        for state in self.states:
            state.batch += made
        self.stored = False

    def store(self) -> list[bool]:
        """Copy parameters, momenta and chains from the backend to the states. Return whether each run diverged."""
        self.stored = True
        return self.backend.store(self.states)

    def load(self) -> None:
        """After :meth:`store`, load the states into the backend again, because callbacks may have changed them."""
        if self.stored:
            self.backend.load(self.states)

    def balance(self, recipe: Recipe) -> None:
        """If `recipe.balance` is True, rescale the factors of each coupling so that their norms are equal."""
        if self.stored:
            for state in self.states:
                balance(state.machine, recipe)
        elif recipe.balance:
            self.backend.balance(self.states)
