"""The contrastive divergence gradient and its centered form.

Contrastive divergence follows the gradient of ``mean F(data) - mean F(chain)``, where F is the free energy and the
chain is held constant. :func:`contrast_by_autograd` differentiates this expression and is the reference.
:func:`contrast` computes the same gradient from the layers' statistics, which is faster. The update rule is in
:mod:`mvrbm.updates.step`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.machine import BoltzmannMachine
from mvrbm.sampling import Layers

#: Gradients, keyed by parameter name as in `named_parameters`.
Gradient = dict[str, Tensor]
#: Function that replaces a tensor in place with its sum over all processes.
Reduce = Callable[[Tensor], None]


@dataclass(frozen=True)
class Share:
    """Part of an update that one process computes. The default is the whole update.

    Parameters
    ----------
    data, chains : float
        Fractions of the batch and of the chains that this process handles.
    first_sample, first_chain : int
        Index of this process's first sample in the batch, and index of its first chain among all chains. These indices
        determine the random numbers, so results do not depend on the number of processes.
    """

    data: float = 1.0
    chains: float = 1.0
    first_sample: int = 0
    first_chain: int = 0


#: Share of a process that computes the whole update.
WHOLE = Share()


def contrast_by_autograd(machine: BoltzmannMachine, data: Layers, chain: Layers, share: Share = WHOLE) -> Gradient:
    """Use autograd to compute the gradient of mean F(data) - mean F(chain), where F is the free energy.

    The result is this process's share of the gradient.
    """
    with torch.enable_grad():
        of_data, of_chain = machine.free_energy(data, check=False), machine.free_energy(chain, check=False)
        difference = _share(of_data, share.data) - _share(of_chain, share.chains)
        learned = {name: p for name, p in machine.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(difference, list(learned.values()))
    return dict(zip(learned, gradients, strict=True))


def _share(values: Tensor, share: float) -> Tensor:
    """Return the mean of `values` over samples, multiplied by `share`, or 0 if there are no samples."""
    mean = values.mean(0) if len(values) else values.sum(0)
    return mean if share == 1 else share * mean


def contrast(
    machine: BoltzmannMachine,
    data: Layers,
    chain: Layers,
    data_field: Tensor,
    chain_field: Tensor,
    share: Share = WHOLE,
) -> Gradient:
    """Use the layers' statistics to compute the gradient of mean F(data) - mean F(chain), where F is the free energy.

    The result contains this process's share of the gradient for each learned parameter.
    """
    sides = [
        (states, field, weight / len(field))
        for states, field, weight in ((data, data_field, share.data), (chain, chain_field, -share.chains))
        if len(field)
    ]
    if not sides:
        return {name: torch.zeros_like(p) for name, p in machine.named_parameters() if p.requires_grad}
    # The gradient is a weighted sum over samples. Chain samples have negative weights, so one sum covers both terms.
    weights = torch.cat([field.new_full((len(field),), weight) for _, field, weight in sides])
    field = torch.cat([field for _, field, _ in sides])
    seen = {name: torch.cat([states[name] for states, _, _ in sides]) for name in machine.layers}
    mean = machine.hidden.mean(field)
    gradient = machine.unit_gradient(seen, field, mean, weights)
    hidden = machine.hidden.statistic(mean)
    # Couplings average their statistics over samples, so the weights are multiplied by the number of samples.
    weighted = hidden * (len(hidden) * weights).reshape(-1, *[1] * (hidden.ndim - 1))
    for name, unit in machine.layers.items():
        for key, part in machine.links[name].statistics(unit.statistic(seen[name]), weighted).items():
            gradient[f"couplings.{name}.{key}"] = part.contiguous()  # gradients for different ranks may share memory
    return gradient


class Centering:
    r"""Centered learning, in which the interaction is :math:`\langle T_h - \lambda, W (T - \mu)\rangle`.

    Here, :math:`T_h` and :math:`T` are the statistics of the hidden layer and a visible layer, and :math:`\lambda` and
    :math:`\mu` are their offsets. The centered interaction describes the same models as :math:`\langle T_h, W
    T\rangle`, with different biases. The centered gradient is better conditioned, because a change in `W` no longer
    shifts every mean.

    Parameters
    ----------
    machine : BoltzmannMachine
        Machine to train.
    center : mapping of str to Tensor
        Offset for each visible layer, as a tensor of shape (1, *layer shape). The offset is the mean of the data, or
        zero if the layer is not centered.
    follow_hidden : bool
        Whether to use a running mean over the data as the offset for the hidden layer. If False, the offset is zero.
    all_reduce : callable, optional
        Function that replaces a tensor in place with its sum over all processes.
    """

    # Decay rate, per update, for the running mean of the hidden layer.
    _DECAY = 0.99

    def __init__(
        self, machine: BoltzmannMachine, center: Layers, *, follow_hidden: bool = True, all_reduce: Reduce | None = None
    ) -> None:
        self.machine = machine
        self.follow_hidden = follow_hidden
        self._all_reduce = all_reduce
        self.center = {name: array.to(machine.like) for name, array in center.items()}
        #: Running mean of T_h over the data, of shape (1, *hidden shape), or None before the first update.
        self.hidden: Tensor | None = None

    def apply(
        self,
        gradient: Gradient,
        data: Layers,
        chain: Layers,
        data_field: Tensor,
        chain_field: Tensor,
        share: Share = WHOLE,
    ) -> None:
        """Convert the gradients to the centered form in place.

        Only the gradients for couplings and for parameters of the statistics change.
        """
        hidden = self.machine.hidden
        on_data = _share(hidden.statistic(hidden.mean(data_field)), share.data)[None]
        on_chain = _share(hidden.statistic(hidden.mean(chain_field)), share.chains)[None]
        if self.follow_hidden:
            self.advance(on_data)
        for name, unit in self.machine.layers.items():
            offset = unit.statistic(self.center[name])
            seen, drawn = unit.statistic(data[name]), unit.statistic(chain[name])
            shift = _share(seen, share.data) - _share(drawn, share.chains)
            link = self.machine.links[name]
            # Expanding the product into <t h> - mu <h> - <t> lambda avoids computing deviations for the whole batch.
            by_hidden = link.statistics(offset, on_data - on_chain)
            by_visible = link.statistics(shift[None], self._offset())
            for key in by_hidden:
                if f"couplings.{name}.{key}" in gradient:  # not frozen
                    gradient[f"couplings.{name}.{key}"] -= by_hidden[key] + by_visible[key]
            if unit.learns_statistic:
                # The hidden bias also compensates for changes in T.
                towards = link.to_visible(on_data - on_chain)
                for key, part in unit.statistic_gradient(self.center[name], towards).items():
                    if f"visible.{name}.{key}" in gradient:
                        gradient[f"visible.{name}.{key}"] -= part

    def advance(self, on_data: Tensor) -> Tensor:
        """Update and return the running mean of the hidden layer.

        `on_data` is a tensor of shape (1, *hidden shape) with this process's share of the hidden layer's mean over the
        data.
        """
        everywhere = on_data.clone()
        if self._all_reduce is not None:
            self._all_reduce(everywhere)
        before = everywhere if self.hidden is None else self.hidden
        self.hidden = torch.lerp(before, everywhere, 1 - self._DECAY)
        return self.hidden

    def fields(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the fields that the offsets and the current `W` induce on the hidden layer and each visible layer."""
        towards = {name: link.to_visible(self._offset()) for name, link in self.machine.links.items()}
        return self.machine.hidden_field(self.center), towards

    def follow(self, before: tuple[Tensor, dict[str, Tensor]]) -> None:
        """Adjust the biases to cancel the change in the fields that the offsets induce.

        `before` is the result of calling `fields` before the parameters changed.
        """
        hidden_after, visible_after = self.fields()
        self.machine.hidden.absorb((before[0] - hidden_after)[0])
        for name, unit in self.machine.layers.items():
            unit.absorb((before[1][name] - visible_after[name])[0])

    def _offset(self) -> Tensor:
        return self.machine.like.new_zeros((1, *self.machine.hidden.shape)) if self.hidden is None else self.hidden
