"""Rectified units: noisy rectified linear entries, which can be sampled but have no exact distribution."""

import math
from typing import NoReturn

import torch
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit


class Rectified(Unit):
    r"""Noisy rectified linear entries: :math:`x = \max(0, t + \sqrt{\sigma(t)}\,\varepsilon)`, :math:`t = b + f`.

    After Nair and Hinton, "Rectified linear units improve restricted Boltzmann machines", ICML (2010);
    :math:`\varepsilon` is standard normal. Such an entry approximates the number of active units among infinitely
    many binary copies with the same weights and the biases :math:`b - \tfrac12, b - \tfrac32, \dots`

    :meth:`mean` is the exact mean of :meth:`sample`, with :math:`s^2 = \sigma(t)`

    .. math:: \mathrm{E}[x \mid f] = t\, \Phi(t / s) + s\, \varphi(t / s),

    which is close to :math:`\max(0, t)` except near zero. Samples, Gibbs steps, means and contrastive divergence work
    as for all other units.

    The samples follow no exponential family, so there is no energy that both conditional distributions would belong
    to: the stationary distribution of Gibbs chains is unknown, and contrastive divergence is not the gradient of a
    function. Free energies, likelihoods, :math:`\log Z`, annealing, tempering and ``backend="reference"``, which
    differentiates free energies, raise ValueError. Entries have no upper bound: next to Gaussian units training can
    diverge, which the trainer reports.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer.
    bias_shape : sequence of int, optional
        Shape of the bias, which is broadcast to `shape`. Default: `shape`.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import Rectified
    >>> Rectified(2).mean(torch.tensor([[-20.0, 20.0]])).round().abs().tolist()
    [[0.0, 20.0]]
    """

    name = "rectified"
    data_range = (0.0, math.inf)
    field_spread = math.sqrt(2)
    stacked_as = "gaussian"
    has_energy = False
    fluctuation = 1.0  # the variance of an entry far above zero

    @property
    def levels(self) -> float:
        self._no_distribution()

    def site_energy(self, x: Tensor) -> Tensor:
        self._no_distribution()

    def site_log_normalizer(self, field: Tensor) -> Tensor:
        self._no_distribution()

    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        self._no_distribution()

    def mean(self, field: Tensor) -> Tensor:
        """Return the mean of max(0, u) for normal u with mean t and variance sigma(t)."""
        total = self.bias + field
        scale = self._scale(total)
        ratio = total / scale
        density = torch.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
        below: Tensor = torch.special.ndtr(ratio)
        # Far below zero the two terms cancel except for rounding.
        return (total * below + scale * density).clamp(min=0)

    def activation(self, field: Tensor) -> Tensor:
        """Return max(0, b + f), the rectified linear unit of neural networks."""
        return torch.relu(self.bias + field)

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Return max(0, t + sqrt(sigma(t)) times a normal number)."""
        total = self.bias + field
        return (total + self._scale(total) * rng.normal(total.shape, total)).clamp(min=0)

    @staticmethod
    def _scale(total: Tensor) -> Tensor:
        return torch.sigmoid(total).clamp(min=torch.finfo(total.dtype).tiny).sqrt()

    @torch.no_grad()
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Set the bias to the mean of the data, which is the mean of the units far above zero."""
        self.bias.copy_(self._pool(mean))

    def check(self, x: Tensor, layer: str) -> None:
        """Raise ValueError for values below zero."""
        super().check(x, layer)
        low = float(x.detach().min())
        if low < 0:
            raise ValueError(f"layer '{layer}' has Rectified units and takes values from 0 upwards, got {low:g}")

    def _no_distribution(self) -> NoReturn:
        raise ValueError(
            "Rectified units have no exact distribution, hence no energy, free energy, likelihood, log Z, annealing "
            "or tempering: use Bernoulli or Gaussian units for these"
        )
