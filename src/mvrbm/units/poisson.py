"""Poisson units: nonnegative integer counts."""

import math

import torch
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit

# Upper bounds on the rate and on its logarithm b + f.
_LARGEST_RATE = 1e6
_LARGEST_TOTAL = math.log(_LARGEST_RATE)
# Number of counts to sum over in the conditional distribution of one entry. The sum over larger counts is replaced with
# an integral over the square root of the count, whose standard deviation is about 1/2.
_MOST_VALUES = 4096
# Distance of the quadrature nodes, and their distance beyond the likely values.
_NODE_SPACING = 0.25
_NODE_MARGIN = 6.0
# Center and width of the smooth transition from the sum to the integral, which is complete at sqrt(4096) = 64.
_TRANSITION = (48.0, 3.0)
# Largest rate that is integrated over. It can exceed the maximum rate if the hidden units change the rate.
_LARGEST_INTEGRAL = 16 * _LARGEST_RATE
# Number of Newton iterations in the quantile function.
_NEWTON_STEPS = 6


class Poisson(Unit):
    r"""Counts that follow a Poisson distribution with rate :math:`e^{b + f}`.

    The energy is :math:`-\langle b, x\rangle + \sum \log x!`. The log-normalizer of an entry is :math:`e^{b + f}`,
    which is also the mean and the variance of the entry.

    Rates are limited to :math:`10^6`. Where :math:`b + f` exceeds :math:`\log 10^6`, the rate stays at this limit and
    the log-normalizer is extended linearly, so that its derivative is still the mean. Below the limit, all formulas are
    exact.

    Scores of counts above about 100,000 require float64 data, because log-probabilities are differences of numbers as
    large as :math:`\log x!`.

    Poisson units cannot be coupled with Gaussian units or other Poisson units, because both layers would be unbounded.
    The sum over all states would then diverge for any positive weight, because :math:`x!` grows more slowly than
    :math:`e^{x^2}`. Building such a machine raises ValueError.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer.
    bias_shape : sequence of int, optional
        Shape of the bias, which must broadcast to `shape`. Default: `shape`.

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
        """Return the energy of each entry, -b x + log x!."""
        return torch.lgamma(x + 1) - self.bias * x

    def site_log_normalizer(self, field: Tensor) -> Tensor:
        """Return the log-normalizer exp(b + f) of each entry, extended linearly beyond the maximum rate."""
        total = self.bias + field
        bounded = total.clamp(max=_LARGEST_TOTAL)
        return torch.exp(bounded) * (1 + total - bounded)

    def mean(self, field: Tensor) -> Tensor:
        """Return the rate of each entry, exp(b + f), limited to the maximum rate."""
        return torch.exp((self.bias + field).clamp(max=_LARGEST_TOTAL))

    def statistic_variance(self, field: Tensor) -> Tensor:
        """Return the rate of each entry, which is also its variance."""
        return self.mean(field)

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Sample by inverting the cumulative distribution function at one uniform random number per entry."""
        rate = self.mean(field)
        return _quantile(rate.double(), rng.uniform(rate.shape, rate).double()).to(rate.dtype)

    @property
    def fluctuation(self) -> float:
        """Return the largest variance at zero field, because over all fields it has no useful upper bound."""
        return float(self.middle.max())

    def gains(self) -> dict[str, Tensor]:
        """Return the rate at zero field (at least 1) times the number of entries that share each bias.

        A step in the bias changes the mean by the rate times the step, and the standard deviation of an entry is the
        square root of the rate.
        """
        return {"bias": self.n_sharing * torch.exp(self.bias.clamp(max=_LARGEST_TOTAL)).clamp(min=1)}

    @torch.no_grad()
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Set the bias to the logarithm of the mean of the data. One pseudo-count keeps the bias finite."""
        self.bias.copy_(torch.log(self._pool(mean) + 1 / (count * self.n_sharing)))

    def check(self, x: Tensor, layer: str) -> None:
        """Raise ValueError if any value is not a nonnegative integer."""
        super().check(x, layer)
        bad = (x < 0) | (x != x.round())
        if bool(bad.any()):
            raise ValueError(
                f"layer '{layer}' has Poisson units, which require nonnegative integers, got "
                f"{float(x.detach()[bad][0]):g}; use Gaussian units for other real values"
            )
        if x.numel() and (largest := float(x.detach().max())) > _LARGEST_RATE:
            raise ValueError(
                f"layer '{layer}' has Poisson units, which require counts of at most {_LARGEST_RATE:,.0f}, got "
                f"{largest:.3g}: divide the counts, or use Gaussian units"
            )

    def unsupported_reason(self, other: Unit) -> str | None:
        """Return the reason why this layer cannot be coupled with `other`, or None if `other` has bounded values."""
        if not other.has_energy or all(math.isfinite(bound) for bound in other.statistic_bounds):
            return None
        return (
            f"the energy of Poisson units coupled with {type(other).__name__} units is unbounded: "
            f"use Bernoulli or Categorical units instead of {type(other).__name__} units"
        )

    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        """Return all counts up to a bound and quadrature nodes for larger counts, followed by the given value.

        The probability of a count above the bound is less than exp(-40).
        """
        # Given the other sites, the entry is a mixture of Poisson variables with rates between `slow` and `rate`. By
        # Bernstein's inequality, a count of at least rate + t has probability below exp(-t^2 / (2 rate + 2 t / 3)).
        bias = float(self.bias.expand(self.shape).reshape(-1)[site])
        slow, rate = (math.exp(min(bias + float(end), 700.0)) for end in (reach[0].min(), reach[1].max()))
        if rate > _LARGEST_INTEGRAL:
            raise ValueError(
                f"the weights or the data are too large because a Poisson entry may have a rate of {rate:.3g}, but the "
                f"limit is {_LARGEST_INTEGRAL:,.0f}"
            )
        wanted = math.ceil(rate + math.sqrt(80 * rate) + 27)
        counts = torch.arange(min(wanted, _MOST_VALUES), dtype=value.dtype, device=value.device)
        if wanted <= _MOST_VALUES:
            values = counts[:, None].expand(-1, len(value))
            return Alternatives.and_itself(values, torch.zeros_like(values), value)
        center, width = _TRANSITION
        first = max(center - _NODE_MARGIN * width, math.sqrt(slow) - _NODE_MARGIN)
        n_nodes = math.ceil((math.sqrt(rate) + _NODE_MARGIN - first) / _NODE_SPACING)
        roots = first + _NODE_SPACING * torch.arange(n_nodes, dtype=torch.float64, device=value.device)
        past = (roots - center) / width
        # dx = 2 sqrt(x) d sqrt(x)
        parts = [(roots**2, torch.log(2 * roots * _NODE_SPACING) + torch.special.log_ndtr(math.sqrt(2) * past))]
        if math.sqrt(slow) - _NODE_MARGIN < math.sqrt(_MOST_VALUES):
            past = (torch.sqrt(counts.double()) - center) / width
            parts.insert(0, (counts.double(), torch.special.log_ndtr(-math.sqrt(2) * past)))
        values, log_weights = (torch.cat(part).to(value)[:, None] for part in zip(*parts, strict=True))
        n = len(value)
        return Alternatives.and_itself(values.expand(-1, n), log_weights.expand(-1, n), value)


def _quantile(rate: Tensor, level: Tensor) -> Tensor:
    r"""Return, for each element, the smallest count at which the distribution function exceeds `level`, in float64.

    Let :math:`H(x) = \lambda - x + x \log(x / \lambda)` and :math:`G(x) = \Phi(\pm\sqrt{2 H(x)})`, with the sign of
    :math:`x - \lambda`. The distribution function at :math:`k` lies between :math:`G(k)` and :math:`G(k + 1)` (Short,
    "Improved inequalities for the Poisson and binomial distribution", 2013). Solving :math:`G(x)` = `level` for real
    :math:`x` therefore leaves two candidate counts. Evaluating the distribution function selects one of them.
    """
    rate = rate.clamp(min=1e-30)
    z = torch.special.ndtri(level).clamp(min=-40)
    # H is convex and at least t^2 / (2 rate + 2 t / 3) at rate + t, so this starting point lies beyond the solution and
    # Newton's method converges monotonically from it. Near the rate, where H suffers from cancellation, the starting
    # point is already accurate to third order.
    x = (rate + z * (z / 6 + torch.sqrt(z**2 / 36 + rate))).clamp(min=1e-4 * rate)
    for _ in range(_NEWTON_STEPS):
        slope = torch.log(x / rate)
        step = (rate - x + x * slope - z**2 / 2) / slope
        x = torch.where((z.abs() > 0.01) & (slope != 0), x - step, x).clamp(min=1e-4 * rate)
    count = torch.ceil(x).clamp(min=1)
    below: Tensor = torch.special.gammaincc(count, rate)  # the probability of a value less than `count`
    return torch.where(below > level, count - 1, count)
