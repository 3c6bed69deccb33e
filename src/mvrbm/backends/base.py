"""The backend interface: update settings and the methods that a trainer calls.

**Divergence.** All backends behave the same way if an update makes a parameter infinite or NaN. They raise
:class:`~mvrbm.errors.DivergenceError` and leave the state as follows:

- The parameters are restored to their values before the failed update. Backends that check for divergence only every
  few thousand updates restore the parameters from their last check.
- The momenta are set to zero, because they may not be finite after the failed update. Optimizers discard their moments.
- `state.update` is the number of updates that led to the restored parameters.

The message names the first parameter, in the order of `named_parameters`, that is not finite after the failed update.
Backends that see the gradient of every update name the first parameter with a non-finite gradient, if there is one.
Backends that train several machines together do not raise an error. Instead, `store` reports which machines diverged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from mvrbm.data.sources import Batch, Source
from mvrbm.distributed import World
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import WHOLE, Reduce, Share
from mvrbm.updates.missing import draw_missing
from mvrbm.updates.negative import NegativePhase
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState


@dataclass(frozen=True)
class UpdateSettings:
    """Update settings for a training run.

    Parameters
    ----------
    recipe : Recipe
        The training recipe, including a learning rate.
    negative : NegativePhase
        The negative phase for the chains of this process.
    reference : bool
        Whether to compute gradients with autograd.
    optimizer : Optimizer, optional
        The optimizer that updates the parameters. If None, the recipe's update rule is used.
    all_reduce : callable
        Function that replaces a tensor with its sum over all processes.
    n_processes : int
        Number of processes that share each update.
    gather : callable
        Function that gathers a tensor from all processes and returns a list ordered by rank.
    every_batch : bool
        Whether a callback requires the state after every batch.
    missing_steps : int
        Number of Gibbs steps used to sample missing entries. Default: 5.
    """

    recipe: Recipe
    negative: NegativePhase
    reference: bool
    optimizer: Optimizer | None
    all_reduce: Reduce
    n_processes: int
    every_batch: bool
    missing_steps: int = 5
    gather: Callable[[Tensor], list[Tensor]] = World().gather

    def sum_over_processes(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor with its sum over all processes, using a single all-reduce."""
        if self.n_processes == 1:
            return
        message = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.all_reduce(message)
        for tensor, total in zip(tensors, message.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view(tensor.shape))

    def whole_epochs_unsupported_reason(self, source: Source, *, masked: bool = False) -> str | None:
        """Return why this training run cannot be computed in whole epochs, or None if it can.

        `masked` indicates whether the backend in question can sample missing entries.
        """
        if not (source.with_masks[0] if masked else source.whole):
            return "its data is not a plain array" + ("" if masked else " without missing entries")
        if self.every_batch:
            return "a callback needs every batch"
        if self.n_processes > 1:
            return "several processes share each update"
        return None


def start_chains(settings: UpdateSettings, state: TrainState, batch: Layers, share: Share = WHOLE) -> bool:
    """Initialize the persistent chains if they are required but do not exist yet, and return whether this was done.

    The chains are initialized from the samples of all processes, so the result does not depend on the number of
    processes. `batch` contains the samples of this process, without missing entries.
    """
    negative = settings.recipe.negative
    if state.chains or not negative.chain_shape:
        return False
    samples = {name: torch.cat(settings.gather(array)) for name, array in batch.items()}
    chains = negative.start(state.machine, samples, state.start_numbers())
    own = slice(share.first_chain, share.first_chain + settings.negative.n_chains)
    state.chains.update(negative.share_of_chains(chains, own))
    return True


class UpdateBackend(ABC):
    """Base class for backends that compute one update at a time.

    Between updates, a backend may keep parameters, momenta and chains in its own format. `store` writes them to the
    state, and `load` reads them from the state.
    """

    def __init__(self, settings: UpdateSettings) -> None:
        self.settings = settings

    @torch.no_grad()
    def update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> TrainState:
        """Perform one update in place and return the state.

        Parameters
        ----------
        state : TrainState
            The state before the update.
        batch : mapping of str to Tensor
            Samples for each visible layer, of shape (n, *layer shape), without missing entries.
        weight : float
            Factor by which the gradient is multiplied. It is less than 1 for a batch that is smaller than the others.
        share : Share
            The part of the update that this process computes.
        """
        if start_chains(self.settings, state, batch, share):
            self.load(state)
        return self._update(state, batch, weight, share)

    @abstractmethod
    def _update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> TrainState:
        """Perform one update, like `update`, on a state whose persistent chains are already initialized."""

    def draw_missing(self, state: TrainState, batch: Batch, steps: int, share: Share = WHOLE) -> Layers:
        """Fill in the missing entries of a batch by sampling from the model with `steps` Gibbs steps."""
        return draw_missing(self.store(state).machine, batch, state.missing_numbers(share), steps)

    def store(self, state: TrainState) -> TrainState:
        """Write parameters, momenta and chains to the state, and return the state."""
        return state

    def exact(self) -> dict[str, Tensor]:
        """Return copies of all arrays that `store` rounds, by name, so that `load` can resume without rounding."""
        return {}

    def load(self, state: TrainState) -> None:  # noqa: B027  (optional to override)
        """Load a state, for example after a callback has modified it."""


class EpochBackend(ABC):
    """Base class for backends that compute whole epochs on data stored on the device, for one or more states."""

    #: Number of samples per epoch.
    n_samples: int

    @abstractmethod
    def epoch(self, states: Sequence[TrainState], orders: Tensor, stopped: Callable[[], bool]) -> int:
        """Perform the remaining updates of an epoch in place and return the number of updates.

        Parameters
        ----------
        states : sequence of TrainState
            The states. Each state resumes the epoch at its own `batch`.
        orders : Tensor (states, n_samples)
            Order of the samples for each state.
        stopped : callable
            Function that returns whether to stop. A backend that performs many updates at once may call it only once
            per epoch.
        """

    def continues_with(
        self, settings: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> bool:
        """Switch to other states and data if possible, and return whether this succeeded.

        A backend that can be reused keeps its compiled kernels and captured graphs. If this method returns False, a new
        backend is required.
        """
        return False

    @abstractmethod
    def store(self, states: Sequence[TrainState]) -> list[bool]:
        """Write parameters, momenta and chains to the states, and return whether each state diverged."""

    @abstractmethod
    def load(self, states: Sequence[TrainState]) -> None:
        """Load states, for example after a callback has modified them."""

    def balance(self, states: Sequence[TrainState]) -> None:
        """Rescale the factors of each coupling to equal norms, in the backend's own copy of the parameters."""
        for state in states:
            for link in state.machine.links.values():
                link.balance()
