"""Networks of structured layers: the upward pass of a stack of machines with a softmax on top, for backpropagation."""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, normalize

from mvrbm.couplings import Coupling
from mvrbm.estimators.inputs import VISIBLE
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource

_ROWS_OF_A_START = 4096  # samples from which the spread of the fields of a random start is computed
_ROWS_OF_DISTANCES = 1024  # samples between which distances are computed

#: Applied to data (number -1) and activations (0, 1, ...).
Drop = Callable[[Tensor, int], Tensor]


class StructuredNetwork(nn.Module):
    r"""Fully connected network whose weights are couplings: the upward pass of a stack, and a softmax.

    :math:`z_0 = T(x - o)`, :math:`z_l = a(W_l z_{l-1} + c_l)`, logits :math:`A z_L + d`. Gaussian data is centered at
    :math:`o`, its mean; :math:`o` is zero otherwise. :math:`a` is the activation of the units: the sigmoid for
    Bernoulli layers, :math:`\max(0, \cdot)` for rectified ones.

    Parameters
    ----------
    machines : sequence of BoltzmannMachine
        The stack. Couplings and hidden biases are learned; the visible units stay as they are.
    n_classes : int
        Number of logits.
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
        """The machines."""
        return [cast(BoltzmannMachine, machine) for machine in self.machines]

    @property
    def links(self) -> list[Coupling]:
        """The couplings of the machines."""
        return [machine.links[VISIBLE] for machine in self.stack]

    @property
    def n_parameters(self) -> int:
        """Number of learned parameters."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def inputs(self, x: Tensor, number: int = 0) -> Tensor:
        """Return the input of the coupling of machine `number`: the statistic, around the mean for Gaussian data."""
        unit = self.stack[number].layers[VISIBLE]
        return unit.statistic(x - unit.bias if unit.arbitrary_zero else x)

    def features(self, x: Tensor, drop: Drop | None = None) -> Tensor:
        """Activations of the top layer, (n, *hidden shape). `drop` is applied to the data and to every layer."""
        z = x
        for number, machine in enumerate(self.stack):
            z = self.inputs(z, number)
            if number == 0 and drop is not None:
                z = drop(z, -1)
            z = machine.hidden.activation(field_of(machine.links[VISIBLE], z))
            z = z if drop is None else drop(z, number)
        return z

    def forward(self, x: Tensor, drop: Drop | None = None) -> Tensor:
        """Logits, (n, n_classes)."""
        return self.features(x, drop).flatten(1) @ self.weight.T + self.bias

    @torch.no_grad()
    def center(self) -> None:
        """Adapt the hidden biases of machines that were trained without it to the centering of Gaussian layers."""
        for number, machine in enumerate(self.stack):
            zero = machine.like.new_zeros((1, *machine.layers[VISIBLE].shape))
            machine.hidden.absorb(-machine.links[VISIBLE].to_hidden(self.inputs(zero, number))[0])

    @torch.no_grad()
    def initialize(self, x: Tensor, weights: Tensor, rng: RandomSource) -> None:
        """Set random weights whose fields have a spread that neither saturates nor vanishes from layer to layer.

        The spread is that of samples `x` (n, *visible shape) with their `weights` (n,).
        """
        share = weights / weights.sum()
        for number, machine in enumerate(self.stack):
            link, hidden = machine.links[VISIBLE], machine.hidden
            if number == 0:  # higher layers keep location 0 and scale 1
                mean = torch.tensordot(share, x, 1)
                variance = torch.tensordot(share, (x - mean) ** 2, 1)
                count = max(1, round(float(weights.sum())))
                machine.layers[VISIBLE].initialize_from(mean, variance, count)
                every = -(-len(x) // _ROWS_OF_A_START)
                x, share = x[::every], share[::every] / share[::every].sum().clamp_min(1e-12)
            z = self.inputs(x, number)
            power = float((share * z.flatten(1).square().sum(1)).sum())
            link.initialize(rng, hidden.field_spread / math.sqrt(max(power, 1e-6)))
            hidden.bias.zero_()
            x = hidden.activation(field_of(link, z))


def field_of(link: Coupling, x: Tensor) -> Tensor:
    """Return the coupling's `to_hidden`, for matrices laid out so that every product is one plain matrix product.

    Intermediate arrays are stored as (I, n, J): the batch is part of one side of each product. With autograd this is a
    third faster than `to_hidden`, and a test checks that both are equal.
    """
    factors = link.matrix_factors()
    if factors is None:
        return link.to_hidden(x)
    U, V = factors  # (R, K, I), (R, L, J)
    n, rows, columns = x.shape
    halfway = torch.matmul(x.transpose(0, 1).reshape(rows * n, columns), V.mT)  # X V_r': (R, I n, L)
    flat = U.transpose(0, 1).reshape(U.shape[1], -1) @ halfway.reshape(len(U) * rows, n * V.shape[1])
    return flat.reshape(U.shape[1], n, V.shape[1]).transpose(0, 1)


def class_distance(inputs: Tensor, codes: Tensor) -> float:
    """Return the median distance from a sample (n, *shape) to the nearest one of another class (n,)."""
    every = -(-len(inputs) // _ROWS_OF_DISTANCES)
    x, codes = inputs[::every].flatten(1), codes[::every]
    distances = torch.cdist(x, x).masked_fill(codes[:, None] == codes, math.inf).amin(1)
    return float(distances[distances.isfinite()].median()) if bool(distances.isfinite().any()) else 0.0


def virtual_adversarial_loss(
    network: StructuredNetwork, x: Tensor, distance: float, rng: RandomSource, certainty: float = 0.0
) -> Tensor:
    r"""Change of the predictions when each sample moves in the direction in which they change most, (n,).

    :math:`\mathrm{KL}(p(\cdot \mid x) \,\|\, p(\cdot \mid x + r))`, with the first taken as fixed and :math:`T(r)`, in
    which the scales of Gaussian entries do not matter, of length `distance` along the gradient of the divergence at a
    random point of the sphere: one step of power iteration. After Miyato, Maeda, Koyama and Ishii, "Virtual adversarial
    training", IEEE TPAMI 41 (2019).
    `certainty` times the entropy of the predictions there is added.
    """
    scale = 1 / network.stack[0].layers[VISIBLE].inverse_scale()
    with torch.no_grad():
        here = log_softmax(network(x), 1)

    def moved(direction: Tensor) -> tuple[Tensor, Tensor]:
        there = log_softmax(network(x + distance * scale * normalize(direction.flatten(1)).reshape(x.shape)), 1)
        return kl_div(there, here, reduction="none", log_target=True).sum(1), there

    probe = rng.normal(x.shape, x).requires_grad_()
    (gradient,) = torch.autograd.grad(moved(probe)[0].sum(), probe)
    divergence, there = moved(gradient)
    return divergence - certainty * (there.exp() * there).sum(1) if certainty else divergence
