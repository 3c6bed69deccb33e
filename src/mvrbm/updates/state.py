"""The state of a training run: everything that changes while it trains.

The settings that stay the same are in :mod:`mvrbm.updates.recipe`. Backends (:mod:`mvrbm.backends`) update the state,
callbacks read it, and checkpoints (:mod:`mvrbm.training.checkpoints`) save and restore it.
"""

from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.updates.gradient import WHOLE, Centering, Share
from mvrbm.updates.negative import Chains

# Numbers of the first draws of an update that do not advance the chains. Each purpose has a separate range of draws.
DRAWS_OF_MISSING = 1 << 24
_DRAWS_OF_STARTS = 2 << 24


@dataclass(eq=False)
class TrainState:
    """State of a training run between two updates.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine. Its parameters are part of the state.
    rng : RandomSource
        Source of random numbers. Update number `t` draws the numbers of step `t`, so the source itself never changes.
    momenta : dict of str to Tensor
        Momentum of each learned parameter, under the parameter's name. Empty before the first update.
    chains : dict of str to Tensor
        Persistent chains. Empty before the first update, and always for chains that start at the data.
    centering : Centering, optional
        Offsets of the centered layers.
    epoch : int
        Number of finished epochs.
    batch : int
        Number of finished batches of the current epoch.
    update : int
        Number of finished updates.
    exact : dict of str to Tensor
        Parameters, momenta and chains in the representation of a backend that stores them in rounded form. The backend
        resumes from these tensors without rounding, unless the state has changed since.
    history : list of dict
        Metrics that callbacks have logged.
    scheduled_epochs : int
        Number of epochs after which the scheduler has stepped.
    learning_rate : float, optional
        Initial learning rate: the recipe's, or the computed one. None before the first `fit`.
    optimizer, scheduler : Optimizer, LRScheduler, optional
        Built by the user's factories. Without them, steps follow the recipe.
    """

    machine: BoltzmannMachine
    rng: RandomSource
    momenta: dict[str, Tensor] = field(default_factory=dict)
    chains: Chains = field(default_factory=dict)
    centering: Centering | None = None
    epoch: int = 0
    batch: int = 0
    update: int = 0
    exact: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    scheduled_epochs: int = 0
    learning_rate: float | None = None
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None

    @property
    def learned(self) -> dict[str, Tensor]:
        """The parameters that learn, by name."""
        return {name: p for name, p in self.machine.named_parameters() if p.requires_grad}

    def chain_numbers(self, share: Share = WHOLE) -> RandomSource:
        """Return the random numbers that advance the chains at the next update."""
        return self.rng.at_step(self.update, first_row=share.first_chain)

    def start_numbers(self, share: Share = WHOLE) -> RandomSource:
        """Return the random numbers that start chains at the next update."""
        return self.rng.at_step(self.update, draw=_DRAWS_OF_STARTS, first_row=share.first_chain)

    def missing_numbers(self, share: Share = WHOLE) -> RandomSource:
        """Return the random numbers that draw missing entries of the data at the next update."""
        return self.rng.at_step(self.update, draw=DRAWS_OF_MISSING, first_row=share.first_sample)

    def momentum_of(self, name: str, parameter: Tensor) -> Tensor:
        """Return the momentum of a parameter, which starts at zero."""
        if name not in self.momenta:
            self.momenta[name] = parameter.detach().new_zeros(parameter.shape)
        return self.momenta[name]

    def reset_momenta(self) -> None:
        """Set all momenta to zero, in place, and forget the moments that an optimizer keeps."""
        for momentum in self.momenta.values():
            momentum.zero_()
        if self.optimizer is not None:
            self.optimizer.state.clear()


def is_factor(name: str) -> bool:
    """Return whether a parameter belongs to a coupling. Weight decay and the factors' learning rate apply to these."""
    return name.startswith("couplings.")
