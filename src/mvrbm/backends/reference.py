"""Reference backend, which supports every machine on every device and defines the updates for all other backends.

Gradients are computed from layer statistics, or with autograd if `UpdateSettings.reference` is True.
"""

from typing import NoReturn

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateBackend, UpdateSettings
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import WHOLE, Gradient, Share, contrast, contrast_by_autograd
from mvrbm.updates.state import TrainState, is_factor
from mvrbm.updates.step import Move, fail, first_not_finite, gains_of, learning_rates, normalize, step
from mvrbm.validation import all_finite


class ReferenceBackend(UpdateBackend):
    """Backend that updates the machine's parameters directly."""

    def __init__(self, settings: UpdateSettings) -> None:
        super().__init__(settings)
        # Copies of the parameters from before the last step, allocated once.
        self._before: dict[str, Tensor] = {}

    def _update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> TrainState:
        return self.apply(state, gradient_of(state, self.settings, batch, share), weight)

    def apply(self, state: TrainState, gradient: Gradient, weight: float) -> TrainState:
        """Update the parameters with a gradient, or raise DivergenceError and leave them unchanged."""
        learned = state.learned
        optimizer = self.settings.optimizer
        for name, parameter in learned.items():
            self._before.setdefault(name, torch.empty_like(parameter)).copy_(parameter)
        fields_before = None if state.centering is None else state.centering.fields()
        if optimizer is None:
            own_step(state, gradient, self.settings, weight, state.update)
        else:
            for name, parameter in learned.items():
                parameter.grad = gradient[name] * weight if weight != 1 else gradient[name].contiguous()
            optimizer.step()
        if state.centering is not None and fields_before is not None:
            state.centering.follow(fields_before)
        # A non-finite gradient leads to non-finite parameters, so checking the parameters is sufficient.
        if not all_finite(learned.values()):
            self._fail(state, gradient)
        state.update += 1
        return state

    def _fail(self, state: TrainState, gradient: Gradient) -> NoReturn:
        """Restore the parameters from before the step, reset the momenta, and raise DivergenceError."""
        optimizer = self.settings.optimizer
        culprit = first_not_finite(state, gradient)
        for name, parameter in state.learned.items():
            parameter.copy_(self._before[name])
        state.reset_momenta()
        rate = None if optimizer is None else float(optimizer.param_groups[0]["lr"])
        fail(self.settings.recipe, state.update + 1, culprit, rate)


def gradient_of(state: TrainState, settings: UpdateSettings, batch: Layers, share: Share = WHOLE) -> Gradient:
    """Advance the chains and the hidden offset, and return the gradient for each learned parameter."""
    gradient = own_gradient(state, settings, batch, share)
    powers = powers_of(state, batch, share.data)
    gradient = {name: gradient[name] for name in state.learned}  # same order in all processes
    settings.sum_over_processes([*gradient.values(), *powers.values()])
    if settings.recipe.normalized:
        normalize(gains_of(state.machine, gradient, powers))
    return gradient


def powers_of(state: TrainState, batch: Layers, share: float = 1.0) -> dict[str, Tensor]:
    """Return this process's contribution to the mean squared deviation, for each layer with a learned variance."""
    found = {}
    for name, unit in state.machine.layers.items():
        if unit.learns_statistic:
            states = unit.statistic(batch[name])
            if state.centering is not None:
                states = states - unit.statistic(state.centering.center[name])
            found[name] = share * states.square().sum() / max(1, states.numel())
    return found


def own_gradient(state: TrainState, settings: UpdateSettings, batch: Layers, share: Share = WHOLE) -> Gradient:
    """Advance the chains and the hidden offset, and return this process's gradient before normalization."""
    machine = state.machine
    field = machine.hidden_field(batch)
    rng = state.chain_numbers(share)
    chain = settings.negative.draw(machine, batch, machine.as_masks(None, batch), field, rng, state.chains)
    chain_field = machine.hidden_field(chain)
    if settings.reference:
        gradient = contrast_by_autograd(machine, batch, chain, share)
    else:
        gradient = contrast(machine, batch, chain, field, chain_field, share)
    if state.centering is not None:
        state.centering.apply(gradient, batch, chain, field, chain_field, share)
    return gradient


def own_step(
    state: TrainState, gradient: Gradient, settings: UpdateSettings, weight: float, update: int | Tensor
) -> None:
    """Apply the recipe's update rule to the machine's parameters. In a CUDA graph, `update` is a tensor."""
    rate, bias_rate = learning_rates(settings.recipe, update)
    learned = state.learned
    parts = [gradient[name] * weight if weight != 1 else gradient[name] for name in learned]
    momenta = [state.momentum_of(name, parameter) for name, parameter in learned.items()]
    factors = list[tuple[Tensor, Tensor]]()
    moves = list[Move]()
    for name, part, momentum in zip(learned, parts, momenta, strict=True):
        moves.append((learned[name], momentum, rate if is_factor(name) else bias_rate))
        if is_factor(name):
            factors.append((learned[name], part))
    step(parts, momenta, factors, moves, settings.recipe)
