"""The path for every machine: gradients from the layers' statistics, or by autograd, which is the reference."""

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateBackend, UpdateSettings
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import WHOLE, Gradient, Share, contrast, contrast_by_autograd
from mvrbm.updates.state import TrainState, is_factor
from mvrbm.updates.step import Move, fail, first_not_finite, gains_of, learning_rates, normalize, step
from mvrbm.validation import all_finite


class ReferenceBackend(UpdateBackend):
    """Computes updates on the machine's own parameters."""

    def __init__(self, task: UpdateSettings) -> None:
        self._task = task
        self._kept: dict[str, Tensor] = {}  # parameters before the last step, in the same memory every time

    @torch.no_grad()
    def update(self, state: TrainState, batch: Layers, weight: float, share: Share) -> TrainState:
        return self.apply(state, gradient_of(state, self._task, batch, share), weight)

    def apply(self, state: TrainState, gradient: Gradient, weight: float) -> TrainState:
        """Make the step of a gradient, or raise DivergenceError and leave the parameters as they were."""
        learned, optimizer = state.learned, self._task.optimizer
        for name, parameter in learned.items():
            self._kept.setdefault(name, torch.empty_like(parameter)).copy_(parameter)
        before = None if state.centering is None else state.centering.fields()
        if optimizer is None:
            own_step(state, gradient, self._task, weight, state.update)
        else:
            for name, parameter in learned.items():
                parameter.grad = gradient[name] * weight if weight != 1 else gradient[name].contiguous()
            optimizer.step()
        if state.centering is not None and before is not None:
            state.centering.follow(before)
        # A gradient that is not finite makes parameters that are not: one check is enough.
        if not all_finite(learned.values()):
            what, guilty = ("parameter", learned) if all_finite(gradient.values()) else ("gradient", gradient)
            name = first_not_finite(guilty)
            for key, parameter in learned.items():
                parameter.copy_(self._kept[key])
            rate = None if optimizer is None else float(optimizer.param_groups[0]["lr"])
            fail(self._task.recipe, state.update + 1, f"the {what} of '{name}'", rate)
        state.update += 1
        return state


def gradient_of(state: TrainState, task: UpdateSettings, batch: Layers, share: Share = WHOLE) -> Gradient:
    """Advance the chains and the offset, and return the gradient of one update for every learned parameter."""
    gradient, powers = own_gradient(state, task, batch, share), powers_of(state, batch, share.data)
    if task.n_processes > 1:
        gradient = {name: gradient[name] for name in state.learned}  # in the same order everywhere
        parts = [*gradient.values(), *powers.values()]
        flat = torch.cat([part.reshape(-1) for part in parts])
        task.all_reduce(flat)
        pieces = flat.split([part.numel() for part in parts])
        summed = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
        powers = dict(zip(powers, summed[len(gradient) :], strict=True))
        gradient = dict(zip(gradient, summed, strict=False))
    if task.recipe.normalized:
        normalize(gains_of(state.machine, gradient, powers))
    return gradient


def powers_of(state: TrainState, batch: Layers, share: float = 1.0) -> dict[str, Tensor]:
    """Return this process's share of the mean squares of deviations, for layers that learn their variance."""
    found = {}
    for name, unit in state.machine.layers.items():
        if unit.learns_statistic:
            states = unit.statistic(batch[name])
            if state.centering is not None:
                states = states - unit.statistic(state.centering.center[name])
            found[name] = share * states.square().sum() / max(1, states.numel())
    return found


def own_gradient(state: TrainState, task: UpdateSettings, batch: Layers, share: Share = WHOLE) -> Gradient:
    """Advance the chains and the offset, and return this process's gradient, before it is normalized."""
    machine = state.machine
    field = machine.hidden_field(batch)
    if not state.chains:
        state.chains.update(task.negative.start(machine, batch, state.start_numbers(share)))
    rng = state.chain_numbers(share)
    chain = task.negative.draw(machine, batch, machine.as_masks(None, batch), field, rng, state.chains)
    chain_field = machine.hidden_field(chain)
    if task.reference:
        gradient = contrast_by_autograd(machine, batch, chain, share)
    else:
        gradient = contrast(machine, batch, chain, field, chain_field, share)
    if state.centering is not None:
        state.centering.apply(gradient, batch, chain, field, chain_field, share)
    return gradient


def own_step(state: TrainState, gradient: Gradient, task: UpdateSettings, weight: float, update: int | Tensor) -> None:
    """Make the recipe's step on the machine's parameters. A tensor as the number of the update suits CUDA graphs."""
    rate, bias_rate = learning_rates(task.recipe, update)
    learned = state.learned
    parts = [gradient[name] * weight if weight != 1 else gradient[name] for name in learned]
    momenta = [state.momentum_of(name, parameter) for name, parameter in learned.items()]
    factors, moves = [], list[Move]()
    for name, part, momentum in zip(learned, parts, momenta, strict=True):
        moves.append((learned[name], momentum, rate if is_factor(name) else bias_rate))
        if is_factor(name):
            factors.append((learned[name], part))
    step(parts, momenta, factors, moves, task.recipe)
