"""The gradient of one update, and what recipes do to it.

Contrastive divergence is the gradient of ``mean F(data) - mean F(chain)``, the chain held constant.
:func:`contrast_by_autograd` is that line; :func:`contrast` is the same from sums, and faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mvrbm.machine import BoltzmannMachine
from mvrbm.sampling import Layers

if TYPE_CHECKING:
    from mvrbm.learning.distributed import World

Gradient = dict[str, Tensor]


Shares = tuple[float, float]


def contrast_by_autograd(
    machine: BoltzmannMachine, data: Layers, chain: Layers, shares: Shares = (1.0, 1.0)
) -> Gradient:
    """Gradient of mean F(data) - mean F(chain) for every learned parameter: the reference.

    With `shares`, of the data and of the chains that are here out of all, it is this process's part of it.
    """
    with torch.enable_grad():
        of_data, of_chain = machine.free_energy(data, check=False), machine.free_energy(chain, check=False)
        difference = shares[0] * _mean(of_data) - shares[1] * _mean(of_chain)
        learned = {name: p for name, p in machine.named_parameters() if p.requires_grad}
        slopes = torch.autograd.grad(difference, list(learned.values()))
    return dict(zip(learned, slopes, strict=True))


def _mean(values: Tensor) -> Tensor:
    return values.sum(0) / max(1, len(values))  # of nothing: nothing


def contrast(
    machine: BoltzmannMachine,
    data: Layers,
    chain: Layers,
    data_field: Tensor,
    chain_field: Tensor,
    shares: Shares = (1.0, 1.0),
) -> Gradient:
    """Gradient of mean F(data) - mean F(chain) for every learned parameter, from the layers' statistics."""
    gradient: Gradient = {}
    hidden = machine.hidden
    sides = [
        (states, field, share, hidden.statistic(hidden.mean(field)))
        for states, field, share in ((data, data_field, shares[0]), (chain, chain_field, -shares[1]))
        if len(field)
    ]
    for states, field, share, mean in sides:
        for key, slope in machine.unit_gradient(states, field, mean).items():
            _add(gradient, key, share * slope)
    if not sides:
        return {name: torch.zeros_like(p) for name, p in machine.named_parameters() if p.requires_grad}
    # Statistics are bilinear and means over a batch: both sides go into one product, the chain's with its sign.
    total = sum(len(field) for _, field, _, _ in sides)
    weighed = torch.cat([mean * (share * total / len(mean)) for _, _, share, mean in sides])
    for name, unit in machine.layers.items():
        seen = torch.cat([unit.statistic(states[name]) for states, _, _, _ in sides])
        for key, slope in machine.links[name].statistics(seen, weighed).items():
            gradient[f"couplings.{name}.{key}"] = slope.contiguous()  # it may be one array for every rank
    return gradient


def _add(gradient: Gradient, key: str, slope: Tensor) -> None:
    gradient[key] = slope if key not in gradient else gradient[key] + slope


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

    def apply(
        self,
        gradient: Gradient,
        data: Layers,
        chain: Layers,
        data_field: Tensor,
        chain_field: Tensor,
        shares: Shares = (1.0, 1.0),
        world: World | None = None,
    ) -> None:
        """Turn the couplings' gradients into those of the centred form, in place."""
        hidden = self.machine.hidden
        on_data = shares[0] * _mean(hidden.statistic(hidden.mean(data_field)))[None]
        on_chain = shares[1] * _mean(hidden.statistic(hidden.mean(chain_field)))[None]
        if self.follow_hidden:
            everywhere = on_data.clone()
            if world is not None:
                world.add_up(everywhere)
            before = everywhere if self.hidden is None else self.hidden
            self.hidden = self._FADING * before + (1 - self._FADING) * everywhere
        for name, unit in self.machine.layers.items():
            offset = unit.statistic(self.centre[name])
            shift = shares[0] * _mean(unit.statistic(data[name])) - shares[1] * _mean(unit.statistic(chain[name]))
            link = self.machine.links[name]
            # <t h> - mu <h> - <t> lambda: two products of single arrays instead of whole batches of deviations.
            by_hidden = link.statistics(offset, on_data - on_chain)
            by_visible = link.statistics(shift[None], self._offset())
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
