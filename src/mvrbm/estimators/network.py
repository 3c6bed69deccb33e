"""Feedforward networks that combine the upward pass through a stack of machines with a linear layer."""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mvrbm.couplings import Coupling
from mvrbm.estimators.inputs import VISIBLE
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource

# Maximum number of samples that `initialize` uses to scale the weights.
_INITIALIZATION_ROWS = 4096

#: Dropout function, called with activations and their layer index. The index of the data is -1.
Drop = Callable[[Tensor, int], Tensor]


class StructuredNetwork(nn.Module):
    r"""Feedforward network with the couplings of a stack of machines as weights, followed by a linear layer.

    .. math:: z_0 = T(x - o), \qquad z_l = a(W_l z_{l-1} + c_l), \qquad \text{logits} = A z_L + d

    Here, :math:`T` is the sufficient statistic of the visible units, :math:`o` is the mean for Gaussian data and zero
    for other data, and :math:`a` is the activation function of the units: the sigmoid for Bernoulli layers and
    :math:`\max(0, \cdot)` for rectified layers.

    Parameters
    ----------
    machines : sequence of BoltzmannMachine
        The machines in the stack. Couplings and hidden biases are trained, but visible units are not.
    n_classes : int
        Number of classes.
    """

    def __init__(self, machines: Sequence[BoltzmannMachine], n_classes: int) -> None:
        super().__init__()
        self.machines = nn.ModuleList(machines)
        like = machines[-1].like
        size = math.prod(machines[-1].hidden.shape)
        self.weight = nn.Parameter(like.new_zeros(n_classes, size))
        self.bias = nn.Parameter(like.new_zeros(n_classes))
        for machine in machines:
            for unit in machine.layers.values():
                unit.requires_grad_(False)

    @property
    def stack(self) -> list[BoltzmannMachine]:
        """List of the machines in the stack, from the lowest to the highest."""
        return [cast(BoltzmannMachine, machine) for machine in self.machines]

    @property
    def links(self) -> list[Coupling]:
        """List of the couplings, one per machine."""
        return [machine.links[VISIBLE] for machine in self.stack]

    @property
    def n_parameters(self) -> int:
        """Number of learned parameters."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def inputs(self, x: Tensor, number: int = 0) -> Tensor:
        """Return the input to the coupling of machine `number`, with the same shape as `x`.

        The input is the sufficient statistic of `x`, the values of the visible layer. Gaussian values are centered
        first.
        """
        unit = self.stack[number].layers[VISIBLE]
        return unit.statistic(x - unit.bias if unit.arbitrary_zero else x)

    def features(self, x: Tensor, drop: Drop | None = None) -> Tensor:
        """Return the activations of the top layer as a tensor of shape (n, *hidden shape).

        If given, `drop` is applied to the data and to the activations of each layer.
        """
        z = x
        for number, machine in enumerate(self.stack):
            z = self.inputs(z, number)
            if number == 0 and drop is not None:
                z = drop(z, -1)
            z = machine.hidden.activation(field_of(machine.links[VISIBLE], z))
            z = z if drop is None else drop(z, number)
        return z

    def forward(self, x: Tensor, drop: Drop | None = None) -> Tensor:
        """Return logits of shape (n, n_classes)."""
        return self.features(x, drop).flatten(1) @ self.weight.T + self.bias

    @torch.no_grad()
    def center(self) -> None:
        """Adjust the hidden biases of pretrained machines to account for the centered inputs of this network."""
        for number, machine in enumerate(self.stack):
            zero = machine.like.new_zeros((1, *machine.layers[VISIBLE].shape))
            machine.hidden.absorb(-machine.links[VISIBLE].to_hidden(self.inputs(zero, number))[0])

    @torch.no_grad()
    def initialize(self, x: Tensor, weights: Tensor, rng: RandomSource) -> None:
        """Initialize the weights randomly, with a scale that keeps activations from saturating or vanishing.

        The scale is computed from the samples `x` of shape (n, *visible shape). `weights` contains the sample weights
        and has shape (n,).
        """
        share = weights / weights.sum()
        for number, machine in enumerate(self.stack):
            link = machine.links[VISIBLE]
            hidden = machine.hidden
            if number == 0:  # the visible layers of higher machines keep location 0 and scale 1
                mean = torch.tensordot(share, x, 1)
                variance = torch.tensordot(share, (x - mean) ** 2, 1)
                count = max(1, round(float(weights.sum())))
                machine.layers[VISIBLE].initialize_from(mean, variance, count)
                every = -(-len(x) // _INITIALIZATION_ROWS)
                x = x[::every]
                share = share[::every] / share[::every].sum().clamp_min(1e-12)
            z = self.inputs(x, number)
            power = float((share * z.flatten(1).square().sum(1)).sum())
            link.initialize(rng, hidden.field_spread / math.sqrt(max(power, 1e-6)))
            hidden.bias.zero_()
            x = hidden.activation(field_of(link, z))


def field_of(link: Coupling, x: Tensor) -> Tensor:
    """Compute `link.to_hidden(x)`, using plain matrix products for Kronecker couplings between matrices.

    Intermediate arrays have the layout (I, n, J), so that each step is a single matrix product over the whole batch.
    With autograd, this is about one third faster than calling `to_hidden`.
    """
    factors = link.matrix_factors()
    if factors is None:
        return link.to_hidden(x)
    U, V = factors  # (R, K, I), (R, L, J)
    n, rows, columns = x.shape
    halfway = torch.matmul(x.transpose(0, 1).reshape(rows * n, columns), V.mT)  # X V_r': (R, I n, L)
    flat = U.transpose(0, 1).reshape(U.shape[1], -1) @ halfway.reshape(len(U) * rows, n * V.shape[1])
    return flat.reshape(U.shape[1], n, V.shape[1]).transpose(0, 1)
