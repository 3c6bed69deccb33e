"""Counts: whole numbers from 0 upwards that follow a Poisson distribution."""

import math

import torch
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit

# Upper bound of the rate, and of b + f.
_LARGEST_RATE = 1e6
_LARGEST_TOTAL = math.log(_LARGEST_RATE)
# Largest number of counts that the conditional distribution of one entry sums over.
_MOST_VALUES = 4096
# Iterations of Newton's method in the quantile function.
_NEWTON_STEPS = 6


class Poisson(Unit):
    r"""Counts: energy :math:`-\langle b, x\rangle + \sum \log x!`, so :math:`x \mid f` has rate :math:`e^{b + f}`.

    The log-normalizer of an entry is :math:`e^{b + f}`, which is also its mean and its variance.

    Rates are bounded by :math:`10^6`: where :math:`b + f` exceeds :math:`\log 10^6`, the rate stays at this bound and
    the log-normalizer continues linearly, so that its derivative is still the mean. All formulas are exact below.

    Next to Gaussian or Poisson units, whose values are unbounded as well, the sum over all states diverges for any
    positive weight, since :math:`x!` grows more slowly than :math:`e^{x^2}`: machines of such layers raise ValueError.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer.
    bias_shape : sequence of int, optional
        Shape of the bias, which is broadcast to `shape`. Default: `shape`.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import Poisson
    >>> unit = Poisson(2)
    >>> unit.mean(torch.zeros(1, *unit.shape)).tolist()
    [[1.0, 1.0]]
    """

    name = "poisson"
    data_range = (0.0, math.inf)
    stacked_as = "gaussian"
    levels = math.inf

    def site_energy(self, x: Tensor) -> Tensor:
        """Return -b x + log x!."""
        return torch.lgamma(x + 1) - self.bias * x

    def site_log_normalizer(self, field: Tensor) -> Tensor:
        """Return exp(b + f), continued linearly beyond the largest rate."""
        total = self.bias + field
        bounded = total.clamp(max=_LARGEST_TOTAL)
        return torch.exp(bounded) * (1 + total - bounded)

    def mean(self, field: Tensor) -> Tensor:
        """Return the rate, exp(b + f) or the largest."""
        return torch.exp((self.bias + field).clamp(max=_LARGEST_TOTAL))

    def statistic_variance(self, field: Tensor) -> Tensor:
        """Return the rate."""
        return self.mean(field)

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Invert the distribution function at one uniform number per entry."""
        rate = self.mean(field)
        return _quantile(rate.double(), rng.uniform(rate.shape, rate).double()).to(rate.dtype)

    @property
    def fluctuation(self) -> float:
        """The largest rate without a field: no bound holds in all fields."""
        return float(self.middle.max())

    def gains(self) -> dict[str, Tensor]:
        """A step of the bias moves the mean by rate times that, and the entries' spread is the root of the rate."""
        return {"bias": self.n_sharing * torch.exp(self.bias.clamp(max=_LARGEST_TOTAL)).clamp(min=1)}

    @torch.no_grad()
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Set the bias to the logarithm of the data's mean; one pseudo-count keeps it finite."""
        self.bias.copy_(torch.log(self._pool(mean) + 1 / (count * self.n_sharing)))

    def check(self, x: Tensor, layer: str) -> None:
        """Raise ValueError for values that are not whole numbers from 0 upwards."""
        super().check(x, layer)
        bad = (x < 0) | (x != x.round())
        if bool(bad.any()):
            raise ValueError(
                f"layer '{layer}' has Poisson units and takes whole numbers from 0 upwards, got "
                f"{float(x.detach()[bad][0]):g}: use Gaussian units for other real values"
            )

    def unsupported_reason(self, other: Unit) -> str | None:
        """Return that the energy is unbounded next to an unbounded layer."""
        if not other.has_energy or all(math.isfinite(bound) for bound in other.statistic_bounds):
            return None
        return (
            f"the energy of Poisson units is unbounded next to {type(other).__name__} units: "
            "use Bernoulli or categorical units there"
        )

    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        """Return all counts up to one that is exceeded with probability below exp(-40), and the value itself."""
        # Given the other sites, the entry is a mixture of Poisson variables whose rates are at most this one. By
        # Bernstein's bound, a count of rate + t or more has probability below exp(-t^2 / (2 rate + 2 t / 3)).
        total = self.bias.expand(self.shape).reshape(-1)[site] + reach[1].max()
        rate = float(torch.exp(total.clamp(max=_LARGEST_TOTAL)))
        wanted = math.ceil(rate + math.sqrt(80 * rate) + 27)
        if wanted > _MOST_VALUES:
            raise ValueError(
                f"a Poisson entry may have a rate of {rate:.0f}, and sums over more than {_MOST_VALUES} counts are "
                "not supported: the weights or the data are too large"
            )
        counts = torch.arange(wanted, dtype=value.dtype, device=value.device)[:, None].expand(-1, len(value))
        return Alternatives.and_itself(counts, torch.zeros_like(counts), value)


def _quantile(rate: Tensor, level: Tensor) -> Tensor:
    r"""Return the smallest count whose distribution function exceeds `level`, elementwise, in float64.

    With :math:`H(x) = \lambda - x + x \log(x / \lambda)`, :math:`G(x) = \Phi(\pm\sqrt{2 H(x)})` and the sign of
    :math:`x - \lambda`, the distribution function at :math:`k` lies between :math:`G(k)` and :math:`G(k + 1)` (Short,
    "Improved inequalities for the Poisson and binomial distribution", 2013). The real :math:`x` at which :math:`G`
    equals the level leaves two counts, between which the distribution function itself decides.
    """
    rate = rate.clamp(min=1e-30)
    z = torch.special.ndtri(level).clamp(min=-40)
    # H is convex, and at least t^2 / (2 rate + 2 t / 3) at rate + t: this start lies beyond the solution, from where
    # Newton's method converges monotonically. Near the rate it is exact to third order, and H loses its digits.
    x = (rate + z * (z / 6 + torch.sqrt(z**2 / 36 + rate))).clamp(min=1e-4 * rate)
    for _ in range(_NEWTON_STEPS):
        slope = torch.log(x / rate)
        step = (rate - x + x * slope - z**2 / 2) / slope
        x = torch.where((z.abs() > 0.01) & (slope != 0), x - step, x).clamp(min=1e-4 * rate)
    count = torch.ceil(x).clamp(min=1)
    below: Tensor = torch.special.gammaincc(count, rate)  # the probability of fewer than `count`
    return torch.where(below > level, count - 1, count)
