"""State of a training run: everything that changes during training.

The training settings, which do not change, are in :mod:`mvrbm.updates.recipe`. Backends (:mod:`mvrbm.backends`) update
the state, callbacks read it, and checkpoints (:mod:`mvrbm.training.checkpoints`) save and restore it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.updates.gradient import WHOLE, Centering, Share
from mvrbm.updates.negative import Chains

# First draw indices for random numbers that do not advance the chains. Each purpose uses a separate range of draws.
DRAWS_OF_MISSING = 1 << 24
_DRAWS_OF_STARTS = 2 << 24


@dataclass(eq=False)
class TrainState:
    """State of a training run between two updates.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine being trained. Its parameters are part of the state.
    rng : RandomSource
        Random source for sampling. Update `t` uses the random numbers of step `t`, so the source itself never changes.
    momenta : dict of str to Tensor
        Momenta of the learned parameters, keyed by parameter name. Empty before the first update.
    chains : dict of str to Tensor
        Persistent chains. Empty before the first update, and always empty if the chains are not persistent.
    centering : Centering, optional
        Centering offsets. If None, no layer is centered.
    epoch : int
        Number of completed epochs.
    batch : int
        Number of completed batches in the current epoch.
    update : int
        Number of completed updates.
    exact : dict of str to Tensor
        Parameters, momenta and chains in a backend's internal format. They are stored only if conversion to the format
        of the state would round them. The backend resumes from these tensors without rounding errors unless the state
        has changed in the meantime.
    best : dict of str to Tensor
        Copy of the parameters with the best metric so far. Empty unless a callback calls :meth:`keep_best`.
    history : list of dict
        Metrics logged by callbacks.
    scheduled_epochs : int
        Number of completed epochs for which the scheduler has stepped.
    learning_rate : float, optional
        Initial learning rate, either set in the recipe or computed from the data. None before the first `fit`.
    relative_rates : dict of str to float
        Learning rates of couplings that learn more slowly than the others, as fractions of `learning_rate`, keyed by
        layer name. See :func:`mvrbm.updates.learning_rate.safe_rates`.
    optimizer : Optimizer, optional
        Optimizer that replaces the recipe's update rule. If None, updates follow the recipe.
    scheduler : LRScheduler, optional
        Learning rate scheduler for `optimizer`.
    device_update : Tensor, optional
        Number of completed updates as a scalar tensor on the device, which CUDA graphs advance. If it is set, random
        numbers depend on it instead of `update`.
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
    best: dict[str, Tensor] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)
    scheduled_epochs: int = 0
    learning_rate: float | None = None
    relative_rates: dict[str, float] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None
    device_update: Tensor | None = None

    @property
    def started(self) -> bool:
        """Whether the training run has started: `mvrbm.updates.initialization.prepare_state` was called."""
        return self.learning_rate is not None

    @property
    def learned(self) -> dict[str, Tensor]:
        """Learned parameters, keyed by name."""
        return {name: p for name, p in self.machine.named_parameters() if p.requires_grad}

    def keep_best(self) -> None:
        """Keep a copy of the current parameters as the best parameters."""
        self.best = {name: p.detach().clone() for name, p in self.machine.named_parameters()}

    @torch.no_grad()
    def restore_best(self) -> None:
        """Restore the best parameters, if any have been kept."""
        for name, value in self.best.items():
            self.machine.get_parameter(name).copy_(value)
        self.exact = {}

    @property
    def _step(self) -> int | Tensor:
        """Step of the random source whose numbers the next update uses."""
        return self.update if self.device_update is None else self.device_update

    def chain_numbers(self, share: Share = WHOLE) -> RandomSource:
        """Return the random source used to advance the chains in the next update."""
        return self.rng.at_step(self._step, first_row=share.first_chain)

    def start_numbers(self, share: Share = WHOLE) -> RandomSource:
        """Return the random source used to initialize the chains in the next update."""
        return self.rng.at_step(self._step, draw=_DRAWS_OF_STARTS, first_row=share.first_chain)

    def missing_numbers(self, share: Share = WHOLE) -> RandomSource:
        """Return the random source used to sample missing entries in the next update."""
        return self.rng.at_step(self._step, draw=DRAWS_OF_MISSING, first_row=share.first_sample)

    def momentum_of(self, name: str, parameter: Tensor) -> Tensor:
        """Return the momentum of a parameter. If it does not exist yet, initialize it to zero."""
        if name not in self.momenta:
            self.momenta[name] = parameter.detach().new_zeros(parameter.shape)
        return self.momenta[name]

    def reset_after_divergence(self) -> None:
        """Reset everything that a failed update may have made non-finite or very large, except the parameters.

        Momenta are set to zero in place. The optimizer state, the chains and the hidden offset are cleared, so the next
        update initializes them again.
        """
        for momentum in self.momenta.values():
            momentum.zero_()
        if self.optimizer is not None:
            self.optimizer.state.clear()
        self.chains.clear()
        self.exact.clear()
        if self.centering is not None:
            self.centering.hidden = None


def is_factor(name: str) -> bool:
    """Return whether a parameter belongs to a coupling.

    Weight decay and the learning rate for factors apply only to such parameters.
    """
    return name.startswith("couplings.")
