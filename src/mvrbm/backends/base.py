"""What every path needs to know about a training run, and what every path offers to the trainer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from mvrbm.data.sources import Batch, Source
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import WHOLE, Reduce, Share
from mvrbm.updates.missing import draw_missing
from mvrbm.updates.negative import NegativePhase
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState


@dataclass(frozen=True)
class UpdateSettings:
    """How the updates of a training run are to be made, apart from its state."""

    recipe: Recipe  # with a learning rate
    negative: NegativePhase  # what the chains of this process do
    reference: bool  # whether gradients are computed by autograd
    optimizer: Optimizer | None  # one that was given to the trainer; without it steps follow the recipe
    all_reduce: Reduce
    n_processes: int
    every_batch: bool  # whether a callback needs to see every batch
    missing_steps: int = 5  # Gibbs steps that draw missing entries

    def whole_epochs_unsupported_reason(self, source: Source, *, masked: bool = False) -> str | None:
        """Return why a path cannot be given a whole epoch at once, None if it can; `masked` if it draws entries."""
        if not (source.with_masks[0] if masked else source.whole):
            return "its data is not a plain array" + ("" if masked else " without missing entries")
        if self.every_batch:
            return "a callback needs every batch"
        return "several processes share it" if self.n_processes > 1 else None


class UpdateBackend(ABC):
    """Computes one update after another: a state and a batch in, the state after the update out.

    A path may keep parameters, momenta and chains in a form of its own between updates: `store` writes them to the
    state, and `load` takes them over again.
    """

    @abstractmethod
    def update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> TrainState:
        """Make one update, which changes the state in place.

        A batch has samples of every layer, each (n, *layer shape), without missing entries. The gradient's weight is
        less than 1 for a batch shorter than the others; the share is this process's part of the update.
        """

    def draw_missing(self, state: TrainState, batch: Batch, steps: int, share: Share = WHOLE) -> Layers:
        """Return a batch with its missing entries drawn from the model in `steps` Gibbs steps."""
        return draw_missing(self.store(state).machine, batch, state.missing_numbers(share), steps)

    def store(self, state: TrainState) -> TrainState:
        """Write everything that the path keeps to the state."""
        return state

    def exact(self) -> dict[str, Tensor]:
        """Return copies of everything that `store` may round, by name: `load` continues from them without rounding."""
        return {}

    def load(self, state: TrainState) -> None:  # noqa: B027  (a path that keeps nothing has nothing to load)
        """Continue from the state, which a callback may have changed."""


class EpochBackend(ABC):
    """Computes whole epochs over data that it keeps on the device, for one state or for several at once."""

    #: Number of samples per epoch.
    n_samples: int

    @abstractmethod
    def epoch(self, states: Sequence[TrainState], orders: Tensor, stopped: Callable[[], bool]) -> int:
        """Go through the data once from each state's batch on, and return the number of updates.

        The states are changed in place. `orders` has each one's order of the samples, (states, n_samples). `stopped`
        returns whether to stop after the present update, where the path can.
        """

    def continues_with(
        self, tasks: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source]
    ) -> bool:
        """Continue from the states with other data, and return True; or return False if that takes a new path.

        Work that has been compiled and captured is used again.
        """
        return False

    @abstractmethod
    def store(self, states: Sequence[TrainState]) -> list[bool]:
        """Write everything that the path keeps to the states, and return which of them diverged."""

    @abstractmethod
    def load(self, states: Sequence[TrainState]) -> None:
        """Continue from the states, which a callback may have changed."""

    def balance(self, states: Sequence[TrainState]) -> None:
        """Rescale the factors of each product to equal norms, without storing parameters that the path keeps itself."""
        for state in states:
            for link in state.machine.links.values():
                link.balance()
