"""Reference backend, which performs the update defined in :mod:`mvrbm.updates.update` for any machine on any device.

Gradients are computed from layer statistics, or with autograd if `UpdateSettings.by_autograd` is True.
"""

from typing import NoReturn

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateBackend, UpdateSettings
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import Gradient, Share
from mvrbm.updates.state import TrainState
from mvrbm.updates.step import fail, first_not_finite
from mvrbm.updates.update import gradient_of, take_step
from mvrbm.validation import all_finite


class ReferenceBackend(UpdateBackend):
    """Backend that updates the machine's parameters directly."""

    def __init__(self, settings: UpdateSettings) -> None:
        super().__init__(settings)
        # Copies of the parameters from before the last step, allocated once.
        self._before: dict[str, Tensor] = {}

    def _update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> None:
        self.apply(state, gradient_of(state, self.settings, batch, share), weight)

    def apply(self, state: TrainState, gradient: Gradient, weight: float) -> None:
        """Update the parameters with a gradient. If they become non-finite, restore them and raise DivergenceError."""
        learned = state.learned
        for name, parameter in learned.items():
            self._before.setdefault(name, torch.empty_like(parameter)).copy_(parameter)
        take_step(state, gradient, self.settings, weight)
        # A non-finite gradient leads to non-finite parameters, so checking the parameters is sufficient.
        if not all_finite(learned.values()):
            self._fail(state, gradient)
        state.update += 1

    def _fail(self, state: TrainState, gradient: Gradient) -> NoReturn:
        """Restore the previous parameters, reset the rest of the state, and raise DivergenceError."""
        optimizer = self.settings.optimizer
        culprit = first_not_finite(state, gradient)
        for name, parameter in state.learned.items():
            parameter.copy_(self._before[name])
        state.reset_after_divergence()
        rate = None if optimizer is None else float(optimizer.param_groups[0]["lr"])
        fail(self.settings.recipe, state.update + 1, culprit, rate)
