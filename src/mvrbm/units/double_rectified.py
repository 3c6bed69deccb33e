"""Double rectified linear units (dReLU): real entries with one half of a Gaussian on each side of zero."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit, average

_LOG_SQRT_HALF_PI = 0.5 * math.log(math.pi / 2)
_LOG_SQRT_TWO_PI = 0.5 * math.log(2 * math.pi)
# Where the peak is below this value, samples are computed from the logarithm of the tail probability.
_FAR_BELOW_ZERO = -2.0
# Newton steps of this solution. At the limit, the fourth one is exact up to rounding.
_NEWTON_STEPS = 5
# Each side is integrated by Gauss-Legendre quadrature, with this many nodes in each panel and one panel per this many
# widths.
_PANEL, _PANEL_NODES = 1.0, 16
# Widths beyond the highest likely peak, where the density is below exp(-50).
_NODE_MARGIN = 10.0
_MOST_PANELS = 1000


class _Side(NamedTuple):
    """Half of the distribution of each entry, on one side of zero. All tensors broadcast to the shape of the field."""

    width: Tensor  # standard deviation of the Gaussian, s
    peak: Tensor  # location of its maximum in units of s, positive if it is on this side of zero
    log_mass: Tensor  # logarithm of the integral of the unnormalized density over this side


class DoubleRectified(Unit):
    r"""Real entries with a Gaussian of a separate location and width on each side of zero, also called dReLU.

    The energy of an entry is

    .. math:: \frac{x^2}{2 s_\pm^2} - b x + g |x|, \qquad s_\pm = e^{\pm \tanh a},

    where :math:`s_+` applies to positive and :math:`s_-` to negative values. The `bias` is :math:`b`, the `gap` is
    :math:`g`, and the `skew` is :math:`a`. With :math:`g = a = 0`, an entry is Gaussian with unit variance. A positive
    gap makes values near zero more likely, as in a soft threshold. A negative gap makes the distribution bimodal, as in
    a binary unit. The skew makes one side wider than the other, by a factor of at most :math:`e^2`. The overall width
    is fixed, because it can be absorbed into the weights.

    These units were introduced as hidden units for protein sequences by Tubiana, Cocco and Monasson, "Learning protein
    constitutive motifs from sequence data", eLife (2019).

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer.
    bias_shape : sequence of int, optional
        Shape of the bias, the gap and the skew, which must broadcast to `shape`. Default: `shape`.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import DoubleRectified
    >>> unit = DoubleRectified(2)
    >>> unit.mean(torch.tensor([[0.0, 3.0]])).round(decimals=3).tolist()
    [[0.0, 3.0]]
    """

    name = "drelu"
    levels = math.inf
    stacked_as = "gaussian"
    fluctuation = 1.0  # variance of an entry far from zero, apart from the skew

    def __init__(self, shape: int | Sequence[int], *, bias_shape: Sequence[int] | None = None) -> None:
        super().__init__(shape, bias_shape=bias_shape)
        self.gap = nn.Parameter(torch.zeros(self.bias_shape))
        self.skew = nn.Parameter(torch.zeros(self.bias_shape))

    @property
    def largest_spread(self) -> float:
        if self.skew.is_meta:  # meta tensors have no values
            return 1.0
        return float(self._log_width.detach().abs().max().exp())

    @property
    def _log_width(self) -> Tensor:
        """Logarithm of the width of the positive side. For the negative side, it has the opposite sign."""
        return torch.tanh(self.skew)

    def _width_at(self, x: Tensor) -> Tensor:
        """Return the width of the side on which each value is."""
        log_width = self._log_width
        return torch.exp(torch.where(x > 0, log_width, -log_width))

    def _sides(self, field: Tensor) -> tuple[_Side, _Side]:
        """Return the positive and the negative side of the distribution of each entry in a field."""
        total, log_width = self.bias + field, self._log_width
        return self._side(total, log_width), self._side(-total, -log_width)

    def _side(self, total: Tensor, log_width: Tensor) -> _Side:
        width = torch.exp(log_width)
        peak = (total - self.gap) * width
        return _Side(width, peak, log_width + _log_half_mass(peak))

    def _shares(self, field: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return, for each side, its probability, and the mean magnitude and the mean square of the values on it."""
        plus, minus = self._sides(field)
        difference = plus.log_mass - minus.log_mass
        found = []
        for side, log_odds in ((plus, difference), (minus, -difference)):
            # The mean of a normal distribution with mean `peak` and unit variance that is cut off at zero. Far below
            # zero, the two terms nearly cancel.
            mean = (side.peak + torch.exp(torch.log(side.width) - side.log_mass)).clamp(min=0)
            square = (1 + side.peak * mean).clamp(min=0)
            found.append((torch.sigmoid(log_odds), side.width * mean, side.width**2 * square))
        return found

    def site_energy(self, x: Tensor) -> Tensor:
        return 0.5 * (x / self._width_at(x)) ** 2 - self.bias * x + self.gap * x.abs()

    def site_log_normalizer(self, field: Tensor) -> Tensor:
        """Return the logarithm of the sum of the masses on both sides."""
        plus, minus = self._sides(field)
        return torch.logaddexp(plus.log_mass, minus.log_mass)

    def mean(self, field: Tensor) -> Tensor:
        (p_plus, plus, _), (p_minus, minus, _) = self._shares(field)
        return p_plus * plus - p_minus * minus

    def statistic_variance(self, field: Tensor) -> Tensor:
        (p_plus, plus, square_plus), (p_minus, minus, square_minus) = self._shares(field)
        return p_plus * square_plus + p_minus * square_minus - (p_plus * plus - p_minus * minus) ** 2

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Choose a side, and then a value on it, by one uniform random number each."""
        plus, minus = self._sides(field)
        positive = rng.uniform(field.shape, field) < torch.sigmoid(plus.log_mass - minus.log_mass)
        peak = torch.where(positive, plus.peak, minus.peak)
        value = _half_normal_quantile(peak, rng.uniform(field.shape, field))
        return torch.where(positive, plus.width * value, -minus.width * value)

    def energy_gradient(self, x: Tensor, field: Tensor | None, weights: Tensor | None = None) -> dict[str, Tensor]:
        by_log_width = torch.where(x > 0, -1.0, 1.0) * (x / self._width_at(x)) ** 2
        gradient = {"bias": -x, "gap": x.abs(), "skew": by_log_width * (1 - self._log_width**2)}
        return {name: self._tie(average(each, weights)) for name, each in gradient.items()}

    def normalizer_gradient(
        self, field: Tensor, weights: Tensor | None = None, mean: Tensor | None = None
    ) -> dict[str, Tensor]:
        (p_plus, plus, square_plus), (p_minus, minus, square_minus) = self._shares(field)
        log_width = self._log_width
        # Mean squares in widths, whose difference is the gradient with respect to the logarithm of the width.
        wide, narrow = square_plus * torch.exp(-2 * log_width), square_minus * torch.exp(2 * log_width)
        gradient = {
            "bias": p_plus * plus - p_minus * minus,
            "gap": -p_plus * plus - p_minus * minus,
            "skew": (p_plus * wide - p_minus * narrow) * (1 - log_width**2),
        }
        return {name: self._tie(average(each, weights)) for name, each in gradient.items()}

    def gains(self) -> dict[str, Tensor]:
        return {name: self.bias.new_full((), self.n_sharing) for name in ("bias", "gap", "skew") if self.n_sharing > 1}

    def check_parameters(self, layer: str) -> None:
        super().check_parameters(layer)
        self._check_size(self.gap, layer, "gap")
        self._check_size(self.skew, layer, "skew")

    @torch.no_grad()
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Set the bias to the mean of the data, and the gap and the skew to zero, so that the variance is 1."""
        self.bias.copy_(self._pool(mean))
        self.gap.zero_()
        self.skew.zero_()

    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        """Return the nodes of Gauss-Legendre quadrature on both sides of zero, followed by the given value."""
        bias, gap, log_width = (
            parameter.expand(self.shape).reshape(-1)[site] for parameter in (self.bias, self.gap, self._log_width)
        )
        nodes, log_weights = [], []
        for sign, field in ((1, reach[1]), (-1, -reach[0])):
            width = torch.exp(sign * log_width)
            ends = ((sign * bias - gap + field) * width).clamp(min=0) + _NODE_MARGIN
            panels = math.ceil(float(ends.detach().max()) / _PANEL)
            if panels > _MOST_PANELS:
                raise ValueError(
                    "the weights are too large for numerical integration because the likely values of a dReLU entry "
                    f"span {float(ends.detach().max()):.0f} standard deviations, more than {_MOST_PANELS * _PANEL:.0f}"
                )
            points, weights = (value.new_tensor(array)[:, None] for array in _composite_rule(panels))
            nodes.append(sign * width * ends * points)
            log_weights.append(torch.log(width * ends * weights).expand(len(points), len(value)))
        return Alternatives.and_itself(torch.cat(nodes), torch.cat(log_weights), value)


def _composite_rule(panels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return nodes and weights of Gauss-Legendre quadrature from 0 to 1, with an equal number of nodes in each panel.

    The panels are narrower near zero, because densities that are cut off at zero can fall steeply there.
    """
    nodes, weights = np.polynomial.legendre.leggauss(_PANEL_NODES)
    roots = (np.arange(panels)[:, None] + (nodes + 1) / 2).ravel() / panels
    return roots**2, 2 * roots * np.tile(weights / 2, panels) / panels


def _log_half_mass(peak: Tensor) -> Tensor:
    """Return the logarithm of the integral of exp(peak x - x^2 / 2) over positive x."""
    below, above = peak.clamp(max=0), peak.clamp(min=0)
    # The complementary error function does not underflow far below zero if it is scaled, but overflows above zero.
    scaled = _LOG_SQRT_HALF_PI + torch.log(torch.special.erfcx(below / -math.sqrt(2)))
    return torch.where(peak < 0, scaled, _LOG_SQRT_TWO_PI + 0.5 * above**2 + torch.special.log_ndtr(above))


def _half_normal_quantile(peak: Tensor, tail: Tensor) -> Tensor:
    """Return the value that is exceeded with probability `tail` by a positive normal variable of unit variance.

    The mean of the normal variable is `peak`, and negative values are excluded. All tensors have the same shape.
    """
    below = peak.clamp(max=_FAR_BELOW_ZERO)
    value = peak - torch.special.ndtri(tail * torch.special.ndtr(peak))
    return torch.where(peak < _FAR_BELOW_ZERO, _quantile_far_below(below, torch.log(tail)), value).clamp(min=0)


def _quantile_far_below(peak: Tensor, log_tail: Tensor) -> Tensor:
    """Do the same as `_half_normal_quantile` for negative peaks, where probabilities underflow.

    The equation log P(X > x) = log_tail is solved for x by Newton's method. Without the correction by `erfcx`, it is
    quadratic, which gives the initial value.
    """

    def scaled(x: Tensor) -> Tensor:
        found: Tensor = torch.special.erfcx(x / math.sqrt(2))
        return found

    x: Tensor = -2 * log_tail / (torch.sqrt(peak**2 - 2 * log_tail) - peak)
    for _ in range(_NEWTON_STEPS):
        at_x = scaled(x - peak)
        excess = peak * x - 0.5 * x**2 + torch.log(at_x / scaled(-peak)) - log_tail
        x = (x + excess * math.sqrt(math.pi / 2) * at_x).clamp(min=0)
    return x
