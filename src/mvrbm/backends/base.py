"""The interface of a backend: the settings of the updates that it computes, and the methods that a trainer calls.

**Divergence.** All backends follow one rule if an update makes a parameter infinite or NaN. They raise
:class:`~mvrbm.errors.DivergenceError` and leave the state with

- the parameters from before the failed update. Backends that check for divergence only every few thousand updates
  return to the parameters of their last check.
- momenta of zero, because the momenta of the failed update may not be finite either. Optimizers forget their moments.
- `state.update`, the number of updates that led to these parameters.

The message names the first parameter, in the order of `named_parameters`, that is not finite after the failed update.
Backends that see the gradient of every update name the first parameter whose gradient is not finite, if there is one.
Backends that train several machines together do not raise: `store` returns which of them diverged.
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
    """The settings of the updates of a training run.

    Parameters
    ----------
    recipe : Recipe
        The recipe, with a learning rate.
    negative : NegativePhase
        The negative phase, with the chains of this process.
    reference : bool
        Whether gradients are computed by autograd.
    optimizer : Optimizer, optional
        An optimizer that makes the steps. By default, steps follow the recipe.
    all_reduce : callable
        Replaces a tensor by its sum over all processes.
    n_processes : int
        Number of processes that share every update.
    gather : callable
        Returns a tensor of every process, in the order of their ranks.
    every_batch : bool
        Whether a callback needs the state after every batch.
    missing_steps : int
        Number of Gibbs steps that draw missing entries.
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
        """Replace tensors by their sums over all processes, in one message."""
        if self.n_processes == 1:
            return
        message = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.all_reduce(message)
        for tensor, total in zip(tensors, message.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view(tensor.shape))

    def whole_epochs_unsupported_reason(self, source: Source, *, masked: bool = False) -> str | None:
        """Return why no backend can compute whole epochs of this run, or None if one can.

        `masked` says whether the backend in question can draw missing entries.
        """
        if not (source.with_masks[0] if masked else source.whole):
            return "its data is not a plain array" + ("" if masked else " without missing entries")
        if self.every_batch:
            return "a callback needs every batch"
        if self.n_processes > 1:
            return "several processes share it"
        return None


def start_chains(settings: UpdateSettings, state: TrainState, batch: Layers, share: Share = WHOLE) -> bool:
    """Start the persistent chains if the run needs some and has none, and return whether they were started.

    They start at the samples of all processes, so that the number of processes makes no difference. `batch` has the
    samples of this process, without missing entries.
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
    """Computes updates one by one: takes a state and a batch, and returns the state after the update.

    Between updates, a backend may keep parameters, momenta and chains in another form. `store` writes them to the
    state, and `load` reads them from the state.
    """

    def __init__(self, settings: UpdateSettings) -> None:
        self.settings = settings

    @torch.no_grad()
    def update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> TrainState:
        """Make one update, which changes the state in place, and return the state.

        Parameters
        ----------
        state : TrainState
            The state before the update.
        batch : mapping of str to Tensor
            Samples of every visible layer, each (n, *layer shape), without missing entries.
        weight : float
            Factor of the gradient, below 1 for a batch that is shorter than the others.
        share : Share
            The part of the update that this process computes.
        """
        if start_chains(self.settings, state, batch, share):
            self.load(state)
        return self._update(state, batch, weight, share)

    @abstractmethod
    def _update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> TrainState:
        """Make one update, as `update` does, from a state whose persistent chains have started."""

    def draw_missing(self, state: TrainState, batch: Batch, steps: int, share: Share = WHOLE) -> Layers:
        """Return a batch whose missing entries are drawn from the model in `steps` Gibbs steps."""
        return draw_missing(self.store(state).machine, batch, state.missing_numbers(share), steps)

    def store(self, state: TrainState) -> TrainState:
        """Write parameters, momenta and chains to the state, and return it."""
        return state

    def exact(self) -> dict[str, Tensor]:
        """Return copies of all arrays that `store` rounds, by name. `load` continues from them without rounding."""
        return {}

    def load(self, state: TrainState) -> None:  # noqa: B027  (optional to override)
        """Continue from a state, which a callback may have changed."""


class EpochBackend(ABC):
    """Computes whole epochs over data that it keeps on the device, for one state or several states at once."""

    #: Number of samples per epoch.
    n_samples: int

    @abstractmethod
    def epoch(self, states: Sequence[TrainState], orders: Tensor, stopped: Callable[[], bool]) -> int:
        """Make the updates of the rest of an epoch, which change the states in place, and return their number.

        Parameters
        ----------
        states : sequence of TrainState
            The states. Each continues at its own batch of the epoch.
        orders : Tensor (states, n_samples)
            Order of the samples for each state.
        stopped : callable
            Returns whether to stop. A backend that makes many updates at once may ask only once per epoch.
        """

    def continues_with(
        self, settings: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> bool:
        """Continue from other states with other data and return True, or return False if that needs a new backend.

        A backend that continues reuses its compiled kernels and captured graphs.
        """
        return False

    @abstractmethod
    def store(self, states: Sequence[TrainState]) -> list[bool]:
        """Write parameters, momenta and chains to the states, and return for each state whether it diverged."""

    @abstractmethod
    def load(self, states: Sequence[TrainState]) -> None:
        """Continue from states, which a callback may have changed."""

    def balance(self, states: Sequence[TrainState]) -> None:
        """Rescale the factors of each coupling to equal norms where the backend keeps them, without storing them."""
        for state in states:
            for link in state.machine.links.values():
                link.balance()
