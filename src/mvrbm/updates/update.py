"""Definition of one update, from a batch to new parameters. All backends compute this update.

An update performs these steps:

1. Sample the missing entries of the batch, given the known entries
   (:func:`~mvrbm.updates.missing_entries.draw_missing`).
2. In the first update with persistent chains, initialize the chains from the batch (:func:`start_chains`).
3. Advance the chains, and compute the gradient of mean F(data) - mean F(chain) (:func:`own_gradient`). If layers are
   centered, convert the gradient to the centered form.
4. Sum the gradient over all processes, divide it by the gains, and multiply it by the relative learning rates of the
   layers (:func:`gradient_of`).
5. Apply weight decay, update the momenta, and update the parameters (:func:`take_step`). If layers are centered, adjust
   the biases to cancel the change in the fields that the offsets induce.
6. Check that all parameters are finite, and increment `state.update`. Each backend performs this step itself, because
   backends differ in how often they check (see :mod:`mvrbm.backends.base`).

**Random numbers.** All random numbers in update `t` belong to step `t` of the source `state.rng`. Within a step, the
draws are numbered, and each call to a random function increments the draw number by one. The draws that advance the
chains start at 0. In each Gibbs step, they sample the hidden layer first and then the visible layers, in the order of
`machine.layers`. With tempered chains, one more draw after each Gibbs step decides which states are exchanged, unless
the step has no pair to exchange. The draws that sample missing entries start at
:data:`~mvrbm.updates.state.DRAWS_OF_MISSING`. First, each visible layer is sampled from its bias alone. The Gibbs steps
follow, in the same order as above. The draws that initialize persistent chains have a separate range too, and are
needed only if the first batch is empty. A row in a draw is a chain or a sample, numbered across all processes. Backends
that use the same draws and rows therefore sample the same states. :mod:`mvrbm.random.philox` defines the random
numbers.

**Flat form.** The C code and the GPU kernels compute the same update with different variables, in which Gaussian units
have variance 1 and states are relative to their offsets. :mod:`mvrbm.backends.layout` derives this form.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from mvrbm.data.sources import Source
from mvrbm.distributed import World
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import WHOLE, Gradient, Reduce, Share, contrast, contrast_by_autograd
from mvrbm.updates.learning_rate import learning_rates
from mvrbm.updates.negative import NegativePhase
from mvrbm.updates.recipe import Recipe
from mvrbm.updates.state import TrainState, is_factor
from mvrbm.updates.step import Move, gains_of, normalize, step


@dataclass(frozen=True)
class UpdateSettings:
    """Settings that define the updates in a training run.

    Parameters
    ----------
    recipe : Recipe
        The training recipe, including a learning rate.
    negative : NegativePhase
        The negative phase for the chains of this process.
    by_autograd : bool
        Whether to compute gradients with autograd.
    optimizer : Optimizer, optional
        The optimizer that updates the parameters. If None, the recipe's update rule is used.
    all_reduce : callable
        Function that replaces a tensor in place with its sum over all processes.
    n_processes : int
        Number of processes that share each update.
    every_batch : bool
        Whether a callback requires the state after every batch.
    missing_steps : int
        Number of Gibbs steps used to sample missing entries. Default: 5.
    gather : callable
        Function that gathers a tensor from all processes and returns a list of tensors ordered by rank.
    """

    recipe: Recipe
    negative: NegativePhase
    by_autograd: bool
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
        """Return the reason why this training run cannot be computed in whole epochs, or None if it can.

        `masked` indicates whether the backend can sample missing entries.
        """
        if not (source.with_masks[0] if masked else source.whole):
            return "its data is not a plain array" + ("" if masked else " without missing entries")
        if self.every_batch:
            return "a callback needs every batch"
        if self.n_processes > 1:
            return "several processes share each update"
        return None


def start_chains(settings: UpdateSettings, state: TrainState, batch: Layers, share: Share = WHOLE) -> bool:
    """Initialize the persistent chains if they are required but do not exist yet.

    Return whether the chains were initialized. They are initialized from the samples of all processes, so the result
    does not depend on the number of processes. `batch` contains the samples of this process, without missing entries.
    """
    negative = settings.recipe.negative
    if state.chains or not negative.chain_shape:
        return False
    samples = {name: torch.cat(settings.gather(array)) for name, array in batch.items()}
    chains = negative.start(state.machine, samples, state.start_numbers())
    own = slice(share.first_chain, share.first_chain + settings.negative.n_chains)
    state.chains.update(negative.share_of_chains(chains, own))
    return True


def gradient_of(state: TrainState, settings: UpdateSettings, batch: Layers, share: Share = WHOLE) -> Gradient:
    """Advance the chains and the hidden offset, and return the gradient for each learned parameter."""
    gradient = own_gradient(state, settings, batch, share)
    powers = powers_of(state, batch, share.data)
    gradient = {name: gradient[name] for name in state.learned}  # same order in all processes
    settings.sum_over_processes([*gradient.values(), *powers.values()])
    if settings.recipe.normalized:
        normalize(gains_of(state.machine, gradient, powers))
    apply_relative_rates(state, gradient)
    return gradient


def apply_relative_rates(state: TrainState, gradient: Gradient) -> None:
    """Multiply the gradients of couplings by the relative learning rates of their layers, in place."""
    for layer, rate in state.relative_rates.items():
        for name, part in gradient.items():
            if name.startswith(f"couplings.{layer}."):
                part *= rate


def own_gradient(state: TrainState, settings: UpdateSettings, batch: Layers, share: Share = WHOLE) -> Gradient:
    """Advance the chains and the hidden offset, and return this process's gradient before normalization."""
    machine = state.machine
    field = machine.hidden_field(batch)
    rng = state.chain_numbers(share)
    chain = settings.negative.draw(machine, batch, machine.as_masks(None, batch), field, rng, state.chains)
    chain_field = machine.hidden_field(chain)
    if settings.by_autograd:
        gradient = contrast_by_autograd(machine, batch, chain, share)
    else:
        gradient = contrast(machine, batch, chain, field, chain_field, share)
    if state.centering is not None:
        state.centering.apply(gradient, batch, chain, field, chain_field, share)
    return gradient


def powers_of(state: TrainState, batch: Layers, share: float = 1.0) -> dict[str, Tensor]:
    """Return this process's contribution to the powers that are passed to :func:`mvrbm.updates.step.gains_of`."""
    found = {}
    for name, unit in state.machine.layers.items():
        if unit.learns_statistic:
            states = unit.statistic(batch[name])
            if state.centering is not None:
                states = states - unit.statistic(state.centering.center[name])
            found[name] = share * states.square().sum() / max(1, states.numel())
    return found


def take_step(state: TrainState, gradient: Gradient, settings: UpdateSettings, weight: float) -> None:
    """Update the parameters with the optimizer or the recipe's update rule, and adjust the biases for the offsets.

    The gradient is multiplied by `weight`, which is less than 1 for a batch that is smaller than the others.
    """
    fields_before = None if state.centering is None else state.centering.fields()
    if settings.optimizer is None:
        recipe_step(state, gradient, settings.recipe, weight, state.update)
    else:
        for name, parameter in state.learned.items():
            parameter.grad = gradient[name] * weight if weight != 1 else gradient[name].contiguous()
        settings.optimizer.step()
    if state.centering is not None and fields_before is not None:
        state.centering.follow(fields_before)


def recipe_step(state: TrainState, gradient: Gradient, recipe: Recipe, weight: float, update: int | Tensor) -> None:
    """Apply the recipe's update rule to the machine's parameters. In a CUDA graph, `update` must be a tensor."""
    rate, bias_rate = learning_rates(recipe, update)
    learned = state.learned
    parts = [gradient[name] * weight if weight != 1 else gradient[name] for name in learned]
    momenta = [state.momentum_of(name, parameter) for name, parameter in learned.items()]
    factors = list[tuple[Tensor, Tensor]]()
    moves = list[Move]()
    for name, part, momentum in zip(learned, parts, momenta, strict=True):
        moves.append((learned[name], momentum, rate if is_factor(name) else bias_rate))
        if is_factor(name):
            factors.append((learned[name], part))
    step(parts, momenta, factors, moves, recipe)
