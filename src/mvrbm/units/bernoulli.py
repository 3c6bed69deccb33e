"""Bernoulli units: binary entries."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit


class Bernoulli(Unit):
    r"""Binary entries with energy :math:`-\langle b, x\rangle`, so that :math:`p(x = 1 \mid f) = \sigma(b + f)`.

    Data can contain any values in [0, 1]. A value is interpreted as the probability that the entry is 1. Likelihoods
    are still defined over binary data.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer.
    bias_shape : sequence of int, optional
        Shape of the bias, which must broadcast to `shape`. Default: `shape`.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import Bernoulli
    >>> unit = Bernoulli(2)
    >>> unit.mean(torch.zeros(1, *unit.shape)).tolist()
    [[0.5, 0.5]]

    References
    ----------
    Qi, Sun, Gao, Hu and Li, "Matrix Variate RBM and Its Applications", 2016, equations (8) and (9).
    """

    name = "bernoulli"
    byte_scale = 1 / 255
    data_range = (0.0, 1.0)
    stacked_as = "bernoulli"
    sampled_as = "bernoulli"
    levels = 2.0
    fluctuation = 0.25

    def site_energy(self, x: Tensor) -> Tensor:
        """Return the energy -b x of each entry."""
        return -self.bias * x

    def site_log_normalizer(self, field: Tensor) -> Tensor:
        """Return the log-normalizer of each entry, log(1 + exp(b + f))."""
        return softplus(self.bias + field)

    def mean(self, field: Tensor) -> Tensor:
        """Return the probability that each entry is 1."""
        return torch.sigmoid(self.bias + field)

    def statistic_variance(self, field: Tensor) -> Tensor:
        """Return the variance p (1 - p) of each entry, where p is its mean."""
        mean = self.mean(field)
        return mean * (1 - mean)

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Return 1 where a uniform random number is below the mean, and 0 elsewhere."""
        mean = self.mean(field)
        return rng.uniform(mean.shape, mean).lt_(mean.detach())  # in place, which preserves the dtype

    @torch.no_grad()
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Set the bias to the log-odds of the data mean. One pseudo-count per value keeps the log-odds finite."""
        count *= self.n_sharing
        self.bias.copy_(torch.logit((self._pool(mean) * count + 1) / (count + 2)))

    def check(self, x: Tensor, layer: str) -> None:
        """Raise ValueError if any value is outside [0, 1]."""
        if not x.numel():
            return
        low, high = (float(end) for end in x.detach().aminmax())
        if not (low >= 0 and high <= 1):  # also true for NaN, which the next line reports
            super().check(x, layer)
            raise ValueError(
                f"layer '{layer}' has Bernoulli units, which require values from 0 to 1, got {low:g} to {high:g}; "
                "rescale the data (divide uint8 values by 255) or use Gaussian units"
            )

    def example(self, n: int, rng: RandomSource) -> Tensor:
        r"""Return random data of shape (n, \*shape), uniformly distributed in [0, 1]."""
        return rng.uniform((n, *self.shape), self.bias)

    def decode(self, digits: Tensor) -> Tensor:
        """Convert state indices to the layer's dtype. The indices 0 and 1 are also the values."""
        return digits.to(self.bias.dtype)

    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        """Return the possible values 0 and 1. A value between 0 and 1 is treated as a weighted average of both."""
        shares = torch.stack([1 - value, value])
        values = torch.stack([torch.zeros_like(value), torch.ones_like(value)])
        return Alternatives(values, torch.zeros_like(shares), shares)
