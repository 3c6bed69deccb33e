"""Networks with structured layers for backpropagation: the upward pass of a stack of machines, and a softmax."""

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

# Number of samples from which `initialize` computes the scale of the fields.
_INITIALIZATION_ROWS = 4096
# Number of samples between which `class_distance` computes distances.
_DISTANCE_ROWS = 1024

#: Dropout: a function of activations and the index of their layer. The data has the index -1.
Drop = Callable[[Tensor, int], Tensor]


class StructuredNetwork(nn.Module):
    r"""Network whose weights are the couplings of a stack of machines, with logits on top.

    .. math:: z_0 = T(x - o), \qquad z_l = a(W_l z_{l-1} + c_l), \qquad \text{logits} = A z_L + d

    :math:`o` is the mean of Gaussian data, and zero for other data. :math:`a` is the activation of the units: the
    sigmoid for Bernoulli layers, :math:`\max(0, \cdot)` for rectified layers.

    Parameters
    ----------
    machines : sequence of BoltzmannMachine
        The stack. Couplings and hidden biases are trained. Visible units are not.
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
        """Return the input of the coupling of machine `number`: the statistic, which is centered for Gaussian data."""
        unit = self.stack[number].layers[VISIBLE]
        return unit.statistic(x - unit.bias if unit.arbitrary_zero else x)

    def features(self, x: Tensor, drop: Drop | None = None) -> Tensor:
        """Return the activations of the top layer, (n, *hidden shape), with dropout of the data and of every layer."""
        z = x
        for number, machine in enumerate(self.stack):
            z = self.inputs(z, number)
            if number == 0 and drop is not None:
                z = drop(z, -1)
            z = machine.hidden.activation(field_of(machine.links[VISIBLE], z))
            z = z if drop is None else drop(z, number)
        return z

    def forward(self, x: Tensor, drop: Drop | None = None) -> Tensor:
        """Return the logits, (n, n_classes)."""
        return self.features(x, drop).flatten(1) @ self.weight.T + self.bias

    @torch.no_grad()
    def center(self) -> None:
        """Adjust the hidden biases of machines that were trained on Gaussian data without centering."""
        for number, machine in enumerate(self.stack):
            zero = machine.like.new_zeros((1, *machine.layers[VISIBLE].shape))
            machine.hidden.absorb(-machine.links[VISIBLE].to_hidden(self.inputs(zero, number))[0])

    @torch.no_grad()
    def initialize(self, x: Tensor, weights: Tensor, rng: RandomSource) -> None:
        """Set random weights such that the fields of every layer have a spread that neither saturates nor vanishes.

        The spread is computed for samples `x` (n, *visible shape) with `weights` (n,).
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
    """Return `link.to_hidden(x)`. For Kronecker couplings of matrices, compute it with plain matrix products.

    Intermediate arrays have the layout (I, n, J), so that the batch is part of one side of each product. With autograd,
    this is a third faster than `to_hidden`.
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
    """Return the median distance from a sample (n, *shape) to the nearest sample of another class (n,)."""
    every = -(-len(inputs) // _DISTANCE_ROWS)
    x = inputs[::every].flatten(1)
    codes = codes[::every]
    distances = torch.cdist(x, x).masked_fill(codes[:, None] == codes, math.inf).amin(1)
    finite = distances[distances.isfinite()]
    return float(finite.median()) if len(finite) else 0.0


def virtual_adversarial_loss(
    network: StructuredNetwork, x: Tensor, distance: float, rng: RandomSource, certainty: float = 0.0
) -> Tensor:
    r"""Return the change of the predictions when each sample moves in the direction in which they change most, (n,).

    The change is :math:`\mathrm{KL}(p(\cdot \mid x) \,\|\, p(\cdot \mid x + r))`, where the first distribution is held
    constant. :math:`T(r)`, which measures Gaussian entries in standard deviations, has length `distance` and the
    direction of the gradient of the divergence at a random point of the sphere: one step of power iteration.
    `certainty` times the entropy of the predictions at :math:`x + r` is added.

    References
    ----------
    Miyato, Maeda, Koyama and Ishii, "Virtual adversarial training", IEEE TPAMI 41 (2019).
    """
    scale = 1 / network.stack[0].layers[VISIBLE].inverse_scale
    with torch.no_grad():
        here = log_softmax(network(x), 1)

    def moved(direction: Tensor) -> tuple[Tensor, Tensor]:
        there = log_softmax(network(x + distance * scale * normalize(direction.flatten(1)).reshape(x.shape)), 1)
        return kl_div(there, here, reduction="none", log_target=True).sum(1), there

    probe = rng.normal(x.shape, x).requires_grad_()
    (gradient,) = torch.autograd.grad(moved(probe)[0].sum(), probe)
    divergence, there = moved(gradient)
    return divergence - certainty * (there.exp() * there).sum(1) if certainty else divergence
