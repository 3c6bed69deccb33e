"""Noisy rectified linear entries."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit


class Rectified(Unit):
    r"""Noisy rectified linear entries: :math:`x = \max(0, t + \sqrt{\sigma(t)}\,\varepsilon)`, :math:`t = b + f`.

    After Nair and Hinton, "Rectified linear units improve restricted Boltzmann machines", ICML (2010);
    :math:`\varepsilon` is standard normal. Such an entry stands for how many of infinitely many binary copies are
    on, which share their weights and have the biases :math:`b - \tfrac12, b - \tfrac32, \dots`

    What holds: :meth:`mean` is the mean of :meth:`sample`, in closed form, with :math:`s^2 = \sigma(t)`

    .. math:: \mathrm{E}[x \mid f] = t\, \Phi(t / s) + s\, \varphi(t / s),

    which is :math:`\max(0, t)` but for fields near zero; draws, Gibbs steps, means up and down, and contrastive
    divergence work as for every other unit.

    What does not: the draw only approximates the copies' sum, and it is no exponential family. There is no
    energy that both layers' draws would follow, so chains have no known distribution that they stay at, and
    contrastive divergence is not the gradient of anything. Free energies, likelihoods, :math:`\log Z`,
    annealing and tempering are refused; so is ``gradient="autograd"``, which differentiates free energies.
    Entries have no upper bound: facing Gaussian units, learning may run away, which the trainer reports.
    """

    name = "rectified"
    data_range = (0.0, math.inf)
    field_spread = math.sqrt(2)
    stacked_as = "gaussian"

    @property
    def levels(self) -> float:
        """Refuse: what counts states wants an exact distribution."""
        self._refuse()

    def site_energy(self, x: Tensor) -> Tensor:
        """Refuse: there is none."""
        self._refuse()

    def site_log_normaliser(self, field: Tensor) -> Tensor:
        """Refuse: there is none."""
        self._refuse()

    def mean(self, field: Tensor) -> Tensor:
        """Return the mean of a normal number of mean t and variance sigma(t) that is cut off at zero."""
        total = self.bias + field
        scale = self._scale(total)
        ratio = total / scale
        density = torch.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
        below: Tensor = torch.special.ndtr(ratio)
        # Far below zero the two terms cancel but for rounding.
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

    @property
    def fluctuation(self) -> float:
        """One: the variance before the cut at zero, in a large field."""
        return 1.0

    @torch.no_grad()
    def initialise_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Set the bias to the data's mean, which is the mean of the units far from zero."""
        self.bias.copy_(self._pool(mean))

    def check(self, x: Tensor, layer: str) -> None:
        """Refuse values below zero."""
        super().check(x, layer)
        low = float(x.detach().min())
        if low < 0:
            raise ValueError(f"layer '{layer}' has Rectified units and takes values from 0 upwards, got {low:g}")

    def middle(self) -> Tensor:
        """Zero: there is no upper end to be in the middle of."""
        return self.some_state()

    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        """Refuse: they have no weights."""
        self._refuse()

    def statistic_bounds(self) -> tuple[float, float]:
        """Zero, and no upper bound."""
        return (0.0, math.inf)

    def _refuse(self) -> NoReturn:
        raise ValueError(
            "Rectified units have no exact distribution, hence no energy, free energy, likelihood, log Z, annealing "
            "or tempering: use Bernoulli or Gaussian units where these are needed"
        )
