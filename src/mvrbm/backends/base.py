"""Base classes that define the backend interface. The update itself is defined in :mod:`mvrbm.updates.update`.

**Divergence.** All backends behave the same way if an update makes a parameter infinite or NaN. They raise
:class:`~mvrbm.errors.DivergenceError` and leave the state as follows:

- The parameters are restored to their values before the failed update. Backends that check for divergence only every
  few thousand updates restore the values from the last check.
- The momenta are set to zero, because they may not be finite after the failed update. If there is an optimizer, its
  state is discarded.
- The chains and the hidden offset are cleared, because they may have diverged too. The next update initializes them
  again (see :meth:`~mvrbm.updates.state.TrainState.reset_after_divergence`).
- `state.update` is the number of updates that led to the restored parameters. `state.epoch` is not restored.

The error message names the first parameter, in the order of `named_parameters`, that is not finite after the failed
update. Backends that see the gradient of every update name the first parameter with a non-finite gradient, if there is
one. Backends that train several machines together do not raise an error. Instead, `store` reports which machines
diverged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mvrbm.data.sources import Batch, Source
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import WHOLE, Share
from mvrbm.updates.missing_entries import draw_missing
from mvrbm.updates.state import TrainState
from mvrbm.updates.update import UpdateSettings, start_chains

__all__ = ["EpochBackend", "UpdateBackend", "UpdateSettings"]


class UpdateBackend(ABC):
    """Base class for backends that compute one update at a time.

    Between updates, a backend may keep parameters, momenta and chains in an internal format. `store` writes these
    values to the state, and `load` reads them from the state.
    """

    def __init__(self, settings: UpdateSettings) -> None:
        self.settings = settings

    @torch.no_grad()
    def update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> None:
        """Perform one update of the state in place.

        Parameters
        ----------
        state : TrainState
            The state to update.
        batch : mapping of str to Tensor
            Samples for each visible layer, as tensors of shape (n, *layer shape) without missing entries.
        weight : float
            Factor by which the gradient is multiplied. Less than 1 for a batch that is smaller than the others.
        share : Share
            The part of the update that this process computes.
        """
        if start_chains(self.settings, state, batch, share):
            self.load(state)
        self._update(state, batch, weight, share)

    @abstractmethod
    def _update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> None:
        """Perform one update of a state whose persistent chains are already initialized. See :meth:`update`."""

    def draw_missing(self, state: TrainState, batch: Batch, steps: int, share: Share = WHOLE) -> Layers:
        """Fill in the missing entries of a batch by sampling from the model with `steps` Gibbs steps."""
        return draw_missing(self.store(state).machine, batch, state.missing_numbers(share), steps)

    def store(self, state: TrainState) -> TrainState:
        """Write the parameters, momenta and chains to the state and return the state."""
        return state

    def exact(self) -> dict[str, Tensor]:
        """Return copies of all arrays that `store` rounds, which `load` uses to restore the exact values.

        The result is a dictionary keyed by array name.
        """
        return {}

    def load(self, state: TrainState) -> None:  # noqa: B027  (optional to override)
        """Load a state, for example after a callback has modified it."""


class EpochBackend(ABC):
    """Base class for backends that train one or more states for whole epochs on data stored on the device."""

    #: Number of samples per epoch.
    n_samples: int

    @abstractmethod
    def epoch(self, states: Sequence[TrainState], orders: Tensor, stopped: Callable[[], bool]) -> int:
        """Perform the remaining updates of an epoch in place and return the number of updates performed.

        Parameters
        ----------
        states : sequence of TrainState
            The states to update. Each state resumes the epoch at the batch with index `state.batch`.
        orders : Tensor (states, n_samples)
            Order of the samples for each state.
        stopped : callable
            Function that returns True if training should stop. A backend that launches several updates at once calls
            this function between launches.
        """

    def continues_with(
        self, settings: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> bool:
        """Try to switch to other states and data, and return whether this succeeded.

        A backend that can be reused keeps its compiled kernels and captured graphs. If this method returns False, a new
        backend is required.
        """
        return False

    @abstractmethod
    def store(self, states: Sequence[TrainState]) -> list[bool]:
        """Write the parameters, momenta and chains to the states, and return whether each state diverged."""

    @abstractmethod
    def load(self, states: Sequence[TrainState]) -> None:
        """Load states, for example after a callback has modified them."""

    def balance(self, states: Sequence[TrainState]) -> None:
        """Rescale the factors of each coupling to equal norms in the backend's copy of the parameters."""
        for state in states:
            for link in state.machine.links.values():
                link.balance()
