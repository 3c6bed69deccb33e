"""The state of a training run: everything that an update reads and changes, and nothing that decides how.

How an update is made is in :mod:`mvrbm.updates.recipe` (settings), :mod:`mvrbm.updates.step` (the update rule) and
:mod:`mvrbm.backends` (ways to compute it).
"""

from dataclasses import dataclass, field

from torch import Tensor

from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.updates.gradient import WHOLE, Centering, Share
from mvrbm.updates.negative import Chains

# Numbers of the first draws of an update that do not advance the chains: each purpose has its own range of draws.
DRAWS_OF_MISSING = 1 << 24
_DRAWS_OF_STARTS = 2 << 24


@dataclass
class TrainState:
    """State of a training run between two updates.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine; its parameters are the parameters of the state.
    rng : RandomSource
        Source of random numbers. An update draws those of the step with its number.
    momenta : dict of str to Tensor
        Momentum of each learned parameter, by the parameter's name. Empty before the first update.
    chains : dict of str to Tensor
        Persistent chains. Empty before the first update, and for chains that start at the data.
    centering : Centering, optional
        Offsets of the layers that are centered.
    epoch, batch, update : int
        Finished epochs, batches of the epoch in progress, and updates.
    exact : dict of str to Tensor
        Parameters, momenta and chains in the form that a path keeps them in, if it is another one: the path continues
        from it without rounding, unless something else has changed the state.
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
        """Return the momentum of a parameter, zeros if there is none yet."""
        if name not in self.momenta:
            self.momenta[name] = parameter.detach().new_zeros(parameter.shape)
        return self.momenta[name]


def is_factor(name: str) -> bool:
    """Return whether a parameter of this name belongs to a coupling: weight decay and the factors' rate apply to it."""
    return name.startswith("couplings.")
