r"""Noise models that define the distribution of a clean pixel given the observed noisy pixel.

A machine defines the distribution :math:`p(x \mid f)` of each clean pixel, given the field :math:`f` from the hidden
layer. The noise defines the distribution :math:`p(y \mid x)` of the observed pixel. An :class:`Observation` computes
the mean of :math:`p(x \mid y, f) \propto p(y \mid x)\, p(x \mid f)` and draws samples from it, separately for each
pixel. :mod:`mvrbm.vision.denoising` infers the hidden layer.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.units import Gaussian, Unit
from mvrbm.vision.images import Array

# Bounds for the estimated standard deviation of Gaussian noise.
_SIGMA_BOUNDS = (1e-3, 10.0)
# Number of observed values for which posteriors are tabulated.
_OBSERVED = 193
# Pixels are binned by their mean, with equally spaced log-odds from -_LOGITS to _LOGITS.
_LOGITS = 12.0
# Number of bins.
_BINS = 129
# Mean that each bin represents.
_BIN_MEANS = torch.sigmoid(torch.linspace(-_LOGITS, _LOGITS, _BINS, dtype=torch.float64))  # (bins,)

# Gray levels for which probabilities are tabulated.
_GRAYS = torch.linspace(0, 1, 65, dtype=torch.float64)  # (levels,)


class Observation(ABC):
    r"""Distribution of clean pixels given the observed pixels and the field from the hidden layer.

    `unit` is the visible layer of the machine, which defines :math:`p(x \mid f)`. `level` is the noise level. If
    `level` is None, :meth:`fit` estimates the noise level, starting from `start`. Black pixels have the value 0, and
    white pixels have the value `white`.
    """

    #: Whether :meth:`fit` estimates parameters. If None, it does so only if the noise level is unknown.
    fits: ClassVar[bool | None] = None

    def __init__(self, unit: Unit, level: float | None, white: float, start: float) -> None:
        self.unit = unit
        self.white = white
        self.start = start
        self.known = level is not None
        self.level = start if level is None else level
        self.needs_fit = not self.known if self.fits is None else self.fits

    def first_guess(self, y: Tensor) -> Tensor:
        """Return an initial estimate of the clean images. The result has shape (n, I, J)."""
        return y

    @abstractmethod
    def mean(self, field: Tensor, y: Tensor) -> Tensor:
        r"""Return the posterior mean of the clean pixels. `field`, `y` and the result have shape (n, I, J)."""

    @abstractmethod
    def sample(self, field: Tensor, y: Tensor, rng: RandomSource) -> Tensor:
        r"""Sample clean pixels from the posterior. `field`, `y` and the result have shape (n, I, J)."""

    def fit(self, field: Tensor, y: Tensor) -> None:  # noqa: B027  (some subclasses estimate nothing)
        """Estimate the unknown parameters of the noise and the pixel distribution from fields and observed pixels."""


class GrayPixels:
    r"""Distribution of a gray pixel with mean :math:`\mu`: a mixture of black, white and a beta distribution.

    Bernoulli units trained on grayscale data predict the mean of a pixel, but not its distribution around the mean.
    This class models the distribution with

    .. math:: p(0 \mid \mu) = a_0 (1 - \mu)^{k_0}, \qquad p(1 \mid \mu) = a_1 \mu^{k_1},
              \qquad 0 < a \le 1,\ k \ge 1.

    The mean of the beta distribution is chosen such that :math:`E[x \mid \mu] = \mu`. With :math:`a = k = 1`, pixels
    are binary. With :math:`a = 1` and integer :math:`k`, the probabilities of black and white are the probabilities
    that the mean of :math:`k` binary draws is 0 or 1. The parameters a_0, k_0, a_1 and k_1 are floats, or scalar
    tensors during fitting. Only :meth:`levels` uses the concentration of the beta distribution.
    """

    # Center of the weak prior used for fitting. In images of digits, few pixels are exactly 255.
    usual = (0.95, 3.0, 0.3, 2.0)
    usual_concentration = 1.5

    def __init__(self, parameters: Sequence[Any] = usual, concentration: Any = None) -> None:
        self.parameters = tuple(parameters)
        self.concentration = concentration

    def ends(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities of black and white for each mean."""
        black, black_power, white, white_power = self.parameters
        return black * (1 - mean) ** black_power, white * mean**white_power

    def levels(self, mean: Tensor) -> Tensor:
        """Return the probability of each gray level for each mean: (bins,) -> (bins, levels)."""
        black, white = self.ends(mean)
        rest = (1 - black - white).clamp(min=1e-12)
        center = ((mean - white) / rest).clamp(1e-6, 1 - 1e-6)[:, None]
        inner = _GRAYS[1:-1]
        up = center * self.concentration - 1
        down = (1 - center) * self.concentration - 1
        beta = torch.softmax(up * inner.log() + down * torch.log1p(-inner), 1)
        return torch.cat([black[:, None], rest[:, None] * beta, white[:, None]], 1)


def _count_by_mean(mean: Tensor, column: Tensor, n_columns: int) -> Tensor:
    """Count pixels by mean and column, and return a table of shape (bins, n_columns).

    The row of a pixel is the bin of its mean, and its column is given by `column`, which has the same shape as `mean`.
    """
    logit = torch.logit(mean, eps=1e-7)
    row = ((logit + _LOGITS) / (2 * _LOGITS) * (_BINS - 1)).round().long().clamp(0, _BINS - 1)
    counts = torch.bincount((row * n_columns + column).reshape(-1), minlength=_BINS * n_columns)
    return counts.cpu().double().reshape(_BINS, n_columns)


def _fit_gray_pixels(
    log_likelihood: Callable[[GrayPixels, Any], Tensor],
    level: float,
    known: bool,
    bounds: tuple[float, float],
    *,
    spread: bool = False,
    usual_level: float | None = None,
) -> tuple[GrayPixels, float]:
    """Fit the distribution of gray pixels and, if `known` is False, the noise level.

    `log_likelihood` maps a distribution and a noise level to a scalar. `level` is the known level, or the initial value
    of an estimate within `bounds`. If `spread` is True, the concentration is also fitted. All parameters are fitted on
    a logarithmic scale with normal priors of standard deviation 1, which carry about as much weight as a few pixels.
    The priors are centered at the default values of :class:`GrayPixels` and at `usual_level`. If `usual_level` is None,
    the level has no prior.
    """
    from scipy.optimize import minimize

    usual = [*GrayPixels.usual, *([GrayPixels.usual_concentration] if spread else [])]
    # Do not start from the previous result: it may lie at a bound, from which convergence is slow.
    start = [*usual, *([] if known else [level])]
    limits = [(1e-3, 1), (1, 30), (1e-4, 1), (1, 30), *([(0.2, 50)] if spread else []), *([] if known else [bounds])]
    usual += [] if known or usual_level is None else [usual_level]
    center = torch.tensor(usual, dtype=torch.float64).log()

    def parts(values: Sequence[Any]) -> tuple[GrayPixels, Any]:
        return GrayPixels(values[:4], values[4] if spread else None), level if known else values[-1]

    def cost(logs: Array) -> tuple[float, Array]:
        with torch.enable_grad():
            free = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
            prior = 0.5 * ((free[: len(center)] - center) ** 2).sum()
            total = -log_likelihood(*parts(free.exp().unbind())) + prior
            total.backward()
        assert free.grad is not None
        return float(total.detach()), free.grad.numpy()

    low, high = np.log(np.array(limits)).T
    first = np.clip(np.log(start), low, high)
    found = minimize(cost, first, jac=True, bounds=list(zip(low, high, strict=True)), method="L-BFGS-B")
    return parts([float(value) for value in np.exp(found.x)])


class SaltAndPepper(Observation):
    r"""Salt-and-pepper noise with rate :math:`\rho` on binary pixels.

    The noise turns a pixel black with probability :math:`\rho / 2` and white with probability :math:`\rho / 2`. A pixel
    that is observed as black or white, with value :math:`v`, is unchanged with probability

    .. math:: w = \frac{(1 - \rho)\, p(x = v \mid f)}{(1 - \rho)\, p(x = v \mid f) + \rho / 2},

    and otherwise carries no information about the clean pixel. Therefore, the posterior mean is
    :math:`w v + (1 - w)\, E[x \mid f]`. For observed gray pixels, :math:`w = 1`. In this class, clean pixels are binary
    with :math:`p(x = 1 \mid f) = \sigma(b + f)`, and the posterior is exact. Subclasses define other probabilities of
    black and white. Expectation maximization estimates :math:`\rho` as the mean of :math:`1 - w`.
    """

    def ends(self, field: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors with the probabilities that each clean pixel is exactly black and exactly white."""
        mean = self.unit.mean(field)
        return 1 - mean, mean

    def _unchanged(self, field: Tensor, y: Tensor) -> Tensor:
        """Return the probability that the noise has left each pixel unchanged."""
        black, white = self.ends(field)
        unchanged = (1 - self.level) * torch.where(y <= 0, black, white)
        extreme = (y <= 0) | (y >= self.white)
        return torch.where(extreme, unchanged / (unchanged + self.level / 2), torch.ones_like(y))

    def mean(self, field: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(self.unit.mean(field), y, self._unchanged(field, y))

    def sample(self, field: Tensor, y: Tensor, rng: RandomSource) -> Tensor:
        kept = rng.uniform(y.shape, y) < self._unchanged(field, y)
        return torch.where(kept, y, self.unit.sample(field, rng))

    def fit(self, field: Tensor, y: Tensor) -> None:
        if self.known:
            return
        black, white = self.ends(field)
        extreme = (y <= 0) | (y >= self.white)
        ends = torch.where(y <= 0, black, white)[extreme]
        for _ in range(30):
            replaced = self.level / 2 / ((1 - self.level) * ends + self.level / 2)
            # Half a pseudo-count for each outcome keeps the rate between 0 and 1.
            self.level = (float(replaced.double().sum()) + 0.5) / (y.numel() + 1)


class SaltAndPepperOnReal(SaltAndPepper):
    r"""Salt-and-pepper noise on Gaussian units, with clean pixels clipped to the range from black to white.

    With :math:`x \mid f \sim N(m, s^2)`, a clean pixel is black if it rounds to the uint8 value 0. Therefore,
    :math:`p(0 \mid f) = \Phi((\delta - m) / s)` with :math:`\delta` = white / 510, and similarly for white.
    """

    def ends(self, field: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.unit.mean(field)
        scale = cast(Gaussian, self.unit).scale
        below = self.white / 510 - mean
        above = mean - self.white + self.white / 510
        return torch.special.ndtr(below / scale), torch.special.ndtr(above / scale)


class SaltAndPepperOnGray(SaltAndPepper):
    r"""Salt-and-pepper noise on Bernoulli units whose means represent gray values.

    The machine predicts the expected gray value :math:`\mu = \sigma(b + f)`, and :class:`GrayPixels` defines the
    probability that a pixel is *exactly* black or white. The parameters of this distribution, and the rate if it is
    unknown, maximize the likelihood

    .. math:: p(\text{black}) = (1 - \rho)\, p(0 \mid \mu) + \rho / 2, \quad
              p(\text{white}) = (1 - \rho)\, p(1 \mid \mu) + \rho / 2, \quad
              p(\text{gray}) = (1 - \rho) (1 - p(0 \mid \mu) - p(1 \mid \mu)).
    """

    fits = True
    pixels = GrayPixels()

    def ends(self, field: Tensor) -> tuple[Tensor, Tensor]:
        return self.pixels.ends(self.unit.mean(field))

    def fit(self, field: Tensor, y: Tensor) -> None:
        kind = torch.where(y <= 0, 0, torch.where(y >= self.white, 2, 1))
        counts = _count_by_mean(self.unit.mean(field), kind, 3)

        def log_likelihood(pixels: GrayPixels, level: Any) -> Tensor:
            black, white = pixels.ends(_BIN_MEANS)
            replaced = level / 2
            rest = 1 - level
            kinds = torch.stack([rest * black + replaced, rest * (1 - black - white), rest * white + replaced], 1)
            return (counts * kinds.clamp(min=1e-12).log()).sum()

        self.pixels, self.level = _fit_gray_pixels(log_likelihood, self.level, self.known, (1e-5, 0.95))


class GaussianNoiseOnBinary(Observation):
    r"""Gaussian noise on binary pixels.

    The posterior is :math:`p(x = 1 \mid y, f) = \operatorname{sigmoid}\big(b + f + (2 y - 1) / (2 \sigma^2)\big)`.

    Expectation maximization estimates the variance as :math:`\sigma^2 = \operatorname{mean} E[(y - x)^2]`.
    """

    def _field(self, field: Tensor, y: Tensor) -> Tensor:
        return field + (2 * y - 1) / (2 * self.level**2)

    def first_guess(self, y: Tensor) -> Tensor:
        return y.clamp(0, 1)

    def mean(self, field: Tensor, y: Tensor) -> Tensor:
        return self.unit.mean(self._field(field, y))

    def sample(self, field: Tensor, y: Tensor, rng: RandomSource) -> Tensor:
        return self.unit.sample(self._field(field, y), rng)

    def fit(self, field: Tensor, y: Tensor) -> None:
        if self.known:
            return
        for _ in range(10):
            mean = self.mean(field, y)
            variance = float((y**2 - 2 * y * mean + mean).double().mean())
            self.level = max(math.sqrt(max(variance, 0.0)), _SIGMA_BOUNDS[0])


class GaussianNoiseOnReal(Observation):
    r"""Gaussian noise on Gaussian units.

    With :math:`x \mid f \sim N(m, s^2)`, the posterior is

    .. math:: x \mid y, f \sim N\Big(\frac{m / s^2 + y / \sigma^2}{1 / s^2 + 1 / \sigma^2},\
              \frac{1}{1 / s^2 + 1 / \sigma^2}\Big).

    If the level is unknown, it is estimated by :func:`~mvrbm.vision.denoising.robust_sigma`.
    """

    fits = False

    def _weight(self) -> Tensor:
        """Return the weight of the observed pixels in the posterior mean."""
        variance = cast(Gaussian, self.unit).scale ** 2
        return variance / (variance + (self.level * self.white) ** 2)

    def mean(self, field: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(self.unit.mean(field), y, self._weight().expand(y.shape))

    def sample(self, field: Tensor, y: Tensor, rng: RandomSource) -> Tensor:
        spread = cast(Gaussian, self.unit).scale * torch.sqrt(1 - self._weight())
        return self.mean(field, y) + spread * rng.normal(y.shape, y)


class GaussianNoiseOnGray(Observation):
    r"""Gaussian noise on Bernoulli units whose means represent gray values.

    Clean pixels have the distribution defined by :class:`GrayPixels`, with concentration :math:`\varphi`,

    .. math:: p(x \mid \mu) = p_0 \delta_0(x) + p_1 \delta_1(x)
              + (1 - p_0 - p_1)\, \mathrm{Beta}\big(x; g \varphi, (1 - g) \varphi\big),
              \qquad g = \frac{\mu - p_1}{1 - p_0 - p_1}.

    The likelihood is :math:`N(y; x, \sigma^2)`. If the observed images are clipped, the likelihood of a pixel that is
    exactly black or white is the tail probability. Unknown parameters maximize the likelihood. The mean and the
    standard deviation of :math:`p(x \mid y, \mu)` are tabulated for a grid of :math:`\mu` and y, and interpolated
    linearly. Samples are drawn from a normal distribution with this mean and standard deviation, and clipped to [0, 1].
    """

    fits = True

    def __init__(self, unit: Unit, level: float | None, white: float, start: float) -> None:
        super().__init__(unit, level, white, start)
        self.pixels = GrayPixels(concentration=GrayPixels.usual_concentration)
        self.margin = max(1.0, 4 * self.level)  # range of the tables below black and above white
        self.clipped: bool | None = None
        self._tables: Tensor | None = None

    def first_guess(self, y: Tensor) -> Tensor:
        if self.clipped is None:
            inside = float(y.min()) >= 0 and float(y.max()) <= 1
            self.clipped = inside and bool(((y == 0) | (y == 1)).any())
        return y.clamp(0, 1)

    def mean(self, field: Tensor, y: Tensor) -> Tensor:
        return self._look_up(field, y)[0]

    def sample(self, field: Tensor, y: Tensor, rng: RandomSource) -> Tensor:
        mean, spread = self._look_up(field, y)
        return (mean + spread * rng.normal(y.shape, y)).clamp(0, 1)

    def fit(self, field: Tensor, y: Tensor) -> None:
        counts = _count_by_mean(self.unit.mean(field), self._column(y).round().long(), _OBSERVED + 2)

        def log_likelihood(pixels: GrayPixels, level: Any) -> Tensor:
            density = pixels.levels(_BIN_MEANS) @ self._likelihood(level)
            return (counts * density.clamp(min=1e-12).log()).sum()

        self.pixels, self.level = _fit_gray_pixels(
            log_likelihood, self.level, self.known, _SIGMA_BOUNDS, spread=True, usual_level=self.start
        )
        self._tables = None

    # The tables have `_OBSERVED` columns for values from below black to above white, and two more columns for values
    # that are clipped to black and to white.

    def _column(self, y: Tensor) -> Tensor:
        """Return the fractional index of the table column for each observed value."""
        place = ((y + self.margin) / (1 + 2 * self.margin) * (_OBSERVED - 1)).clamp(0, _OBSERVED - 1)
        ends = torch.where(y <= 0, _OBSERVED, torch.where(y >= 1, _OBSERVED + 1, place))
        return ends if self.clipped else place

    def _likelihood(self, level: Any) -> Tensor:
        """Return the likelihood p(y | x) for each gray level x and table column y.

        The result has shape (levels, columns).
        """
        # Widen the density slightly, so that a narrow peak does not fall between two gray levels.
        sigma = (torch.as_tensor(level, dtype=torch.float64) ** 2 + (0.5 / (len(_GRAYS) - 1)) ** 2).sqrt()
        observed = torch.linspace(-self.margin, 1 + self.margin, _OBSERVED, dtype=torch.float64)
        density = torch.exp(-0.5 * ((observed - _GRAYS[:, None]) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        beyond = [torch.special.ndtr(-_GRAYS / sigma), torch.special.ndtr((_GRAYS - 1) / sigma)]
        return torch.cat([density, torch.stack(beyond, 1)], 1)

    def _look_up(self, field: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Look up the mean and standard deviation of p(x | y, mu) with linear interpolation.

        Both results have shape (n, I, J).
        """
        if self._tables is None:
            self._tables = self._make_tables(y)
        row = ((self.unit.bias + field) / _LOGITS).clamp(-1, 1)  # grid_sample expects coordinates from -1 to 1
        column = self._column(y) * (2 / (_OBSERVED + 1)) - 1
        grid = torch.stack([column, row], -1).reshape(1, -1, y.shape[-1], 2)
        found = torch.nn.functional.grid_sample(self._tables, grid, align_corners=True)[0]
        return found[0].reshape(y.shape), found[1].reshape(y.shape)

    def _make_tables(self, like: Tensor) -> Tensor:
        """Tabulate the mean and standard deviation of p(x | y, mu). The result has shape (1, 2, bins, columns)."""
        prior = self.pixels.levels(_BIN_MEANS)  # (bins, levels)
        likelihood = self._likelihood(self.level)  # (levels, columns)
        likelihood = likelihood / likelihood.amax(0)  # avoids underflow in the tails; only ratios matter
        total = prior @ likelihood
        mean = prior @ (likelihood * _GRAYS[:, None]) / total
        square = prior @ (likelihood * _GRAYS[:, None] ** 2) / total
        return torch.stack([mean, (square - mean**2).clamp(min=0).sqrt()])[None].to(like)


#: Observation classes by type of noise and type of pixel values.
OBSERVATIONS: dict[str, dict[str, type[Observation]]] = {
    "salt-and-pepper": {"binary": SaltAndPepper, "gray": SaltAndPepperOnGray, "real": SaltAndPepperOnReal},
    "gaussian": {"binary": GaussianNoiseOnBinary, "gray": GaussianNoiseOnGray, "real": GaussianNoiseOnReal},
}
