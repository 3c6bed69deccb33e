"""Rectified units: noisy rectified linear entries, which can be sampled but have no energy function."""

import math
from typing import NoReturn

import torch
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit


class Rectified(Unit):
    r"""Noisy rectified linear entries, :math:`x = \max(0, t + \sqrt{\sigma(t)}\,\varepsilon)` with :math:`t = b + f`.

    Here :math:`\varepsilon` is standard normal. These units were introduced by Nair and Hinton, "Rectified linear units
    improve restricted Boltzmann machines", ICML (2010). Each entry approximates the number of active units among
    infinitely many binary copies with the same weights and with biases :math:`b - \tfrac12, b - \tfrac32, \dots`

    :meth:`~mvrbm.Unit.mean` is the exact mean of :meth:`~mvrbm.Unit.sample`. With :math:`s^2 = \sigma(t)`, the mean is

    .. math:: \mathrm{E}[x \mid f] = t\, \Phi(t / s) + s\, \varphi(t / s),

    which is close to :math:`\max(0, t)` except near zero. Sampling, Gibbs steps, means and contrastive divergence work
    in the same way as for other units.

    The samples do not follow an exponential family, so no joint energy function is consistent with both conditional
    distributions. The stationary distribution of Gibbs chains is therefore unknown, and contrastive divergence does not
    follow the gradient of any function. Free energies, likelihoods, :math:`\log Z`, annealing and tempering raise
    ValueError, as does ``backend="autograd"``, which differentiates free energies. Entries have no upper bound, so
    training can diverge if these units are coupled with Gaussian units. The trainer reports divergence.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer.
    bias_shape : sequence of int, optional
        Shape of the bias, which must broadcast to `shape`. Default: `shape`.

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
    fluctuation = 1.0  # variance of an entry far above zero

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
        """Return the mean of max(0, u), where u is normal with mean t = b + f and variance sigma(t)."""
        total = self.bias + field
        scale = self._scale(total)
        ratio = total / scale
        density = torch.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
        below: Tensor = torch.special.ndtr(ratio)
        # Far below zero, the two terms cancel and rounding can make their sum slightly negative.
        return (total * below + scale * density).clamp(min=0)

    def activation(self, field: Tensor) -> Tensor:
        """Return max(0, b + f), the standard rectified linear activation."""
        return torch.relu(self.bias + field)

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Return max(0, t + sqrt(sigma(t)) z), where t = b + f and z is a standard normal random number."""
        total = self.bias + field
        return (total + self._scale(total) * rng.normal(total.shape, total)).clamp(min=0)

    @staticmethod
    def _scale(total: Tensor) -> Tensor:
        return torch.sigmoid(total).clamp(min=torch.finfo(total.dtype).tiny).sqrt()

    @torch.no_grad()
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Set the bias to the mean of the data, a good approximation for entries far above zero."""
        self.bias.copy_(self._pool(mean))

    def check(self, x: Tensor, layer: str) -> None:
        """Raise ValueError if any value is negative."""
        super().check(x, layer)
        low = float(x.detach().min())
        if low < 0:
            raise ValueError(f"layer '{layer}' has Rectified units, which require nonnegative values, got {low:g}")

    def _no_distribution(self) -> NoReturn:
        raise ValueError(
            "Rectified units have no exact distribution, so energies, free energies, likelihoods, log Z, annealing "
            "and tempering are not available; use Bernoulli or Gaussian units instead"
        )
