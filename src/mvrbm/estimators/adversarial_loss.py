"""Virtual adversarial loss, which makes predictions insensitive to small changes of the input."""

import math

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, normalize

from mvrbm.estimators.inputs import VISIBLE
from mvrbm.estimators.network import StructuredNetwork
from mvrbm.random import RandomSource

# Maximum number of samples that `class_distance` compares.
_DISTANCE_ROWS = 1024


def class_distance(inputs: Tensor, codes: Tensor) -> float:
    """Return the median distance from a sample to the nearest sample in another class.

    `inputs` has shape (n, *shape), and `codes` contains class indices of shape (n,). Large datasets are subsampled. If
    there is only one class, the result is 0.
    """
    every = -(-len(inputs) // _DISTANCE_ROWS)
    x = inputs[::every].flatten(1)
    codes = codes[::every]
    distances = torch.cdist(x, x).masked_fill(codes[:, None] == codes, math.inf).amin(1)
    finite = distances[distances.isfinite()]
    return float(finite.median()) if len(finite) else 0.0


def virtual_adversarial_loss(
    network: StructuredNetwork, x: Tensor, distance: float, rng: RandomSource, certainty: float = 0.0
) -> Tensor:
    r"""Return the virtual adversarial loss of each sample, as a tensor of shape (n,).

    The loss is the divergence :math:`\mathrm{KL}(p(\cdot \mid x) \,\|\, p(\cdot \mid x + r))`, where :math:`r` points
    in the direction in which the predictions change most. The first distribution is treated as a constant. The norm of
    :math:`T(r)`, in which Gaussian entries are measured in standard deviations, is `distance`. The direction is found
    by one step of power iteration, as the gradient of the divergence for a random :math:`r` of this norm. The loss also
    includes the entropy of the predictions at :math:`x + r`, multiplied by `certainty`.

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
