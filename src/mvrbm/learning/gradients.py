"""The gradient of one update, and what recipes do to it.

Contrastive divergence is the gradient of ``mean F(data) - mean F(chain)``, the chain held constant.
:func:`contrast_by_autograd` is that line; :func:`contrast` is the same from sums, and faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mvrbm.machine import BoltzmannMachine
from mvrbm.sampling import Layers

Gradient = dict[str, Tensor]


def contrast_by_autograd(machine: BoltzmannMachine, data: Layers, chain: Layers) -> Gradient:
    """Gradient of mean F(data) - mean F(chain) for every learned parameter: the reference."""
    with torch.enable_grad():
        difference = machine.free_energy(data, check=False).mean() - machine.free_energy(chain, check=False).mean()
        learned = {name: p for name, p in machine.named_parameters() if p.requires_grad}
        slopes = torch.autograd.grad(difference, list(learned.values()))
    return dict(zip(learned, slopes, strict=True))


def contrast(
    machine: BoltzmannMachine, data: Layers, chain: Layers, data_field: Tensor, chain_field: Tensor
) -> Gradient:
    """Gradient of mean F(data) - mean F(chain) for every learned parameter, from the layers' statistics."""
    positive = machine.free_energy_gradient(data, data_field)
    negative = machine.free_energy_gradient(chain, chain_field)
    return {name: positive[name] - negative[name] for name in positive}


class Centring:
    r"""Learning from deviations: :math:`\langle T_h - \lambda, W (T - \mu)\rangle` not :math:`\langle T_h, W T\rangle`.

    The model is the same, with other biases; its gradient is better conditioned, since a change of `W`
    no longer changes every mean. The offsets are the data's mean, or zero for a layer that is not centred,
    and a running mean of the hidden layer, or zero.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    centre : mapping of str to Tensor
        Offset of each visible layer, (1, *layer shape).
    follow_hidden : bool
        Whether the hidden layer has an offset.
    """

    _FADING = 0.99

    def __init__(self, machine: BoltzmannMachine, centre: Layers, *, follow_hidden: bool = True) -> None:
        self.machine, self.follow_hidden = machine, follow_hidden
        self.centre = {name: array.to(machine.like) for name, array in centre.items()}
        self.hidden: Tensor | None = None  # running mean of T_h over the data, (1, *hidden shape)

    def apply(self, gradient: Gradient, data: Layers, chain: Layers, data_field: Tensor, chain_field: Tensor) -> None:
        """Turn the couplings' gradients into those of the centred form, in place."""
        hidden = self.machine.hidden
        on_data = hidden.statistic(hidden.mean(data_field)).mean(0, keepdim=True)
        on_chain = hidden.statistic(hidden.mean(chain_field)).mean(0, keepdim=True)
        if self.follow_hidden:
            before = on_data if self.hidden is None else self.hidden
            self.hidden = self._FADING * before + (1 - self._FADING) * on_data
        for name, unit in self.machine.layers.items():
            offset = unit.statistic(self.centre[name])
            shift = unit.statistic(data[name]).mean(0, keepdim=True) - unit.statistic(chain[name]).mean(0, keepdim=True)
            link = self.machine.links[name]
            # <t h> - mu <h> - <t> lambda: two products of single arrays instead of whole batches of deviations.
            by_hidden = link.statistics(offset, on_data - on_chain)
            by_visible = link.statistics(shift, self._offset())
            for key in by_hidden:
                gradient[f"couplings.{name}.{key}"] -= by_hidden[key] + by_visible[key]

    def fields(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Fields that the offsets send to either side, with `W` as it is now."""
        towards = {name: link.to_visible(self._offset()) for name, link in self.machine.links.items()}
        return self.machine.hidden_field(self.centre), towards

    def follow(self, before: tuple[Tensor, dict[str, Tensor]]) -> None:
        """Let the biases make up for what a change of `W` since `before` did to the offsets' fields."""
        hidden_after, visible_after = self.fields()
        self.machine.hidden.absorb((before[0] - hidden_after)[0])
        for name, unit in self.machine.layers.items():
            unit.absorb((before[1][name] - visible_after[name])[0])

    def _offset(self) -> Tensor:
        return self.machine.like.new_zeros((1, *self.machine.hidden.shape)) if self.hidden is None else self.hidden


def normalise(machine: BoltzmannMachine, gradient: Gradient) -> None:
    """Divide every gradient by its parameter's gain, in place."""
    for name, link in machine.links.items():
        for key, gain in link.gains().items():
            # A factor whose companions are all zero moves nothing: any finite step will do.
            gradient[f"couplings.{name}.{key}"] /= gain.clamp(min=1e-12)
    for prefix, unit in [("hidden", machine.hidden), *((f"visible.{n}", u) for n, u in machine.layers.items())]:
        for key, gain in unit.gains().items():
            gradient[f"{prefix}.{key}"] /= gain
