r"""RandomSource on images: how it is made, and what an observed pixel tells about the clean one.

A machine gives each clean pixel a distribution :math:`p(x \mid f)` in the field :math:`f` of the hidden
layer; noise gives :math:`p(y \mid x)` of the observed pixel. An :class:`Observation` puts the two together:
mean and draws of :math:`p(x \mid y, f) \propto p(y \mid x)\, p(x \mid f)`, pixel by pixel. How the hidden layer
is inferred is not its business; see :mod:`mvrbm.vision.denoising`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm.random import RandomSource
from mvrbm.units import Gaussian, Unit

__all__ = ["KINDS", "NOISES", "Observation", "add_noise", "as_images", "check_noise", "robust_sigma"]

Array = NDArray[Any]

#: The kinds of noise. The level of salt and pepper is the share of pixels that it hits, half of them black
#: and half white; the level of Gaussian noise is its standard deviation, from black to white being 1.
NOISES = ("salt-and-pepper", "gaussian")

_LARGEST_SIGMA = 10.0
_SMALLEST_SIGMA = 1e-3


# -- making noise -----------------------------------------------------------------------------------


def add_noise(images: Any, noise: str = "salt-and-pepper", level: float = 0.1, seed: int = 0) -> Array:
    r"""Return images with noise.

    Parameters
    ----------
    images : array (n, rows, columns) or (rows, columns)
        Grey images: bytes, or floats from 0 (black) to 1 (white).
    noise : {"salt-and-pepper", "gaussian"}
        Salt and pepper replaces a pixel, with probability `level`, by black or white, each as likely.
        Gaussian noise is added: :math:`y = x + \text{level} \cdot \varepsilon`, :math:`\varepsilon \sim N(0, 1)`.
    level : float
        How much, from 0 to 1 for salt and pepper. For bytes too the standard deviation of Gaussian noise is
        measured in the way from black to white: 0.1 is 25.5.
    seed : int
        Same seed, same noise.

    Returns
    -------
    array like `images`
        Of the same shape and type. Bytes are rounded and cut off at 0 and 255; floats are not cut off.
    """
    array = as_images(images, "images")
    check_noise(noise)
    random = np.random.default_rng(seed)
    white = 255 if array.dtype == np.uint8 else 1
    if noise == "gaussian":
        if not 0 <= level < math.inf:
            raise ValueError(f"level must be at least 0 and finite for Gaussian noise, got {level}")
        noisy = array + level * white * random.standard_normal(array.shape)
        return (np.clip(np.rint(noisy), 0, 255) if white == 255 else noisy).astype(array.dtype)
    if not 0 <= level <= 1:
        raise ValueError(f"level must be from 0 to 1 for salt-and-pepper noise, got {level}")
    lot = random.random(array.shape)
    return np.where(lot < level / 2, 0, np.where(lot < level, white, array)).astype(array.dtype)


def as_images(images: Any, name: str) -> Array:
    """Return an array of grey images, (rows, columns) or (n, rows, columns), refusing what is none."""
    array = np.asarray(images)
    if array.dtype != np.uint8 and array.dtype.kind != "f":
        raise ValueError(f"{name} must be bytes (uint8) or floats, got {array.dtype}")
    if array.ndim not in (2, 3) or array.size == 0:
        raise ValueError(f"{name} must be grey, (rows, columns) or (n, rows, columns), got shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} must be finite, got {int((~np.isfinite(array)).sum())} entries that are not")
    return array


def check_noise(noise: str) -> None:
    """Refuse an unknown kind of noise."""
    if noise not in NOISES:
        raise ValueError(f"noise must be one of {', '.join(map(repr, NOISES))}, got {noise!r}")


def robust_sigma(images: Array) -> float:
    r"""Standard deviation of Gaussian noise on images (n, rows, columns), from their finest details.

    For each block of 2x2 pixels :math:`d = (a - b - c + e) / 2` has the noise's standard deviation and hardly
    anything of a smooth image; :math:`\operatorname{median} |d| / 0.6745` is what the few edges do not spoil
    (Donoho and Johnstone, 1994). 0 if images have no 2x2 blocks.
    """
    rows, columns = images.shape[1] // 2 * 2, images.shape[2] // 2 * 2
    if not rows * columns:
        return 0.0
    even = np.asarray(images[:, :rows, :columns], np.float64)
    detail = (even[:, ::2, ::2] - even[:, 1::2, ::2] - even[:, ::2, 1::2] + even[:, 1::2, 1::2]) / 2
    return float(np.median(np.abs(detail)) / 0.67448975)


# -- what an observed pixel tells -------------------------------------------------------------------


class Observation(ABC):
    r"""Clean pixels given observed ones and the hidden layer's field, :math:`p(x \mid y, f)`.

    Parameters
    ----------
    unit : Unit
        The machine's visible layer, which gives :math:`p(x \mid f)`.
    level : float, optional
        How much noise; `fit` estimates it if it is not given.
    white : float
        The value of white; black is 0.
    start : float
        Where the estimate of the level starts.

    Attributes
    ----------
    level : float
        The level given, or the latest estimate.
    """

    def __init__(self, unit: Unit, level: float | None, white: float, start: float) -> None:
        self.unit = unit
        self.known = level is not None
        self.start = start
        self.level = start if level is None else level
        self.white = white

    @property
    def settled(self) -> bool:
        """Whether there is nothing to fit."""
        return self.known

    def first_guess(self, y: Tensor) -> Tensor:
        """Return the clean images to start from: (n, I, J) -> (n, I, J)."""
        return y

    @abstractmethod
    def mean(self, field: Tensor, y: Tensor) -> Tensor:
        r"""Mean of the clean pixels: fields and observed pixels (n, I, J) -> (n, I, J)."""

    @abstractmethod
    def sample(self, field: Tensor, y: Tensor, noise: RandomSource) -> Tensor:
        r"""Draw the clean pixels: fields and observed pixels (n, I, J) -> (n, I, J)."""

    @abstractmethod
    def fit(self, field: Tensor, y: Tensor) -> None:
        """Estimate what is not known of the noise, and of the pixels, from fields and observed pixels."""


class SaltAndPepper(Observation):
    r"""Salt and pepper of rate :math:`\rho` on pixels that are black or white with probabilities of their own.

    RandomSource leaves a pixel as it is with probability :math:`1 - \rho` and makes it black or white with
    :math:`\rho / 2` each. A grey pixel was not hit. One observed as :math:`v`, black or white, was
    left alone with probability

    .. math:: w = \frac{(1 - \rho)\, p(x = v \mid f)}{(1 - \rho)\, p(x = v \mid f) + \rho / 2},

    and else says nothing about the clean one: its mean is :math:`w v + (1 - w)\, E[x \mid f]`. Here the pixels
    are binary, :math:`p(x = 1 \mid f) = \sigma(b + f)`, and all of this is exact.

    The rate is estimated by expectation maximisation: :math:`\rho` becomes the mean of :math:`1 - w`, grey
    pixels counting as :math:`w = 1`.
    """

    rounds_of_em = 30

    def ends(self, field: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities that clean pixels are exactly black, and exactly white."""
        mean = self.unit.mean(field)
        return 1 - mean, mean

    def _trust(self, field: Tensor, y: Tensor) -> Tensor:
        """Return the probability that noise has left each pixel alone."""
        black, white = self.ends(field)
        alone = (1 - self.level) * torch.where(y <= 0, black, white)
        extreme = (y <= 0) | (y >= self.white)
        return torch.where(extreme, alone / (alone + self.level / 2), torch.ones_like(y))

    def mean(self, field: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(self.unit.mean(field), y, self._trust(field, y))

    def sample(self, field: Tensor, y: Tensor, noise: RandomSource) -> Tensor:
        trust = self._trust(field, y)
        kept = noise.uniform(y.shape, y) < trust
        return torch.where(kept, y, self.unit.sample(field, noise))

    def fit(self, field: Tensor, y: Tensor) -> None:
        if self.known:
            return
        black, white = self.ends(field)
        extreme = (y <= 0) | (y >= self.white)
        ends = torch.where(y <= 0, black, white)[extreme]
        for _ in range(self.rounds_of_em):
            hit = self.level / 2 / ((1 - self.level) * ends + self.level / 2)
            # Half a pixel more of each kind keeps the rate between 0 and 1.
            self.level = (float(hit.double().sum()) + 0.5) / (y.numel() + 1)


class SaltAndPepperOnReal(SaltAndPepper):
    r"""Salt and pepper on Gaussian units, whose pixels are cut off at black and white.

    With :math:`x \mid f \sim N(m, s^2)` a clean pixel is shown as black if it is below half a step of 255, so
    :math:`p(0 \mid f) = \Phi((\delta - m) / s)` with :math:`\delta` = white / 510, and likewise for white.
    """

    def ends(self, field: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = self.unit.mean(field), cast(Gaussian, self.unit).scale
        half_step = self.white / 510
        return (
            torch.special.ndtr((half_step - mean) / scale),
            torch.special.ndtr((mean - self.white + half_step) / scale),
        )


class SaltAndPepperOnGrey(SaltAndPepper):
    r"""Salt and pepper on Bernoulli units whose means stand for grey values.

    Grey data is read as means, so :math:`\mu = \sigma(b + f)` is the expected grey value, and how often a
    pixel is *exactly* black or white is not the machine's to say: few of a digit's bright pixels are 255.
    They are taken as

    .. math:: p(0 \mid \mu) = a_0 (1 - \mu)^{k_0}, \qquad p(1 \mid \mu) = a_1 \mu^{k_1},
              \qquad 0 < a \le 1,\ k \ge 1,

    which leaves room for a grey rest whose mean makes :math:`E[x \mid \mu] = \mu`. :math:`a = k = 1` are
    binary pixels. With :math:`a = 1` and whole :math:`k` the grey value is like the mean of :math:`k` binary draws.

    The four numbers, and the rate if it is not known, maximise the likelihood of seeing black, grey and white,

    .. math:: p(\text{black}) = (1 - \rho)\, p(0 \mid \mu) + \rho / 2, \quad
              p(\text{white}) = (1 - \rho)\, p(1 \mid \mu) + \rho / 2, \quad
              p(\text{grey}) = (1 - \rho) (1 - p(0 \mid \mu) - p(1 \mid \mu)),

    with a prior as weak as a few pixels. Pixels are counted in bins of :math:`\mu`.
    """

    def __init__(self, unit: Unit, level: float | None, white: float, start: float) -> None:
        super().__init__(unit, level, white, start)
        self.shape = _Shape()

    @property
    def settled(self) -> bool:
        return False

    def ends(self, field: Tensor) -> tuple[Tensor, Tensor]:
        return self.shape.ends(self.unit.mean(field))

    def fit(self, field: Tensor, y: Tensor) -> None:
        bins, means = _bins_of(self.unit.mean(field))
        seen = torch.where(y <= 0, 0, torch.where(y >= self.white, 2, 1))
        counts = _count(bins * 3 + seen, len(means) * 3).reshape(-1, 3)

        def minus_log_likelihood(shape: _Shape, level: Any) -> Tensor:
            black, white = shape.ends(means)
            hit, left = level / 2, 1 - level
            seen = torch.stack([left * black + hit, left * (1 - black - white), left * white + hit], 1)
            return -(counts * seen.clamp(min=1e-12).log()).sum()

        self.shape, self.level = _maximise(minus_log_likelihood, self.shape, self.level, self.known, (1e-5, 0.95))


class GaussianNoiseOnBinary(Observation):
    r"""Gaussian noise on binary pixels: :math:`p(x = 1 \mid y, f) = \sigma\big(b + f + (2 y - 1) / 2\sigma^2\big)`.

    The variance is estimated by expectation maximisation, :math:`\sigma^2 = \operatorname{mean} E[(y - x)^2]`.
    """

    def _field(self, field: Tensor, y: Tensor) -> Tensor:
        return field + (2 * y - 1) / (2 * self.level**2)

    def first_guess(self, y: Tensor) -> Tensor:
        return y.clamp(0, 1)

    def mean(self, field: Tensor, y: Tensor) -> Tensor:
        return self.unit.mean(self._field(field, y))

    def sample(self, field: Tensor, y: Tensor, noise: RandomSource) -> Tensor:
        return self.unit.sample(self._field(field, y), noise)

    def fit(self, field: Tensor, y: Tensor) -> None:
        if self.known:
            return
        for _ in range(10):
            mean = self.mean(field, y)
            variance = float((y**2 - 2 * y * mean + mean).double().mean())
            self.level = max(math.sqrt(max(variance, 0.0)), _SMALLEST_SIGMA)


class GaussianNoiseOnReal(Observation):
    r"""Gaussian noise on Gaussian units: with :math:`x \mid f \sim N(m, s^2)`,

    .. math:: x \mid y, f \sim N\Big(\frac{m / s^2 + y / \sigma^2}{1 / s^2 + 1 / \sigma^2},\
              \frac{1}{1 / s^2 + 1 / \sigma^2}\Big).

    A level that is not given stays where it starts, at :func:`robust_sigma`.
    """

    @property
    def settled(self) -> bool:
        return True

    def _share(self) -> Tensor:
        """Weight of the observed pixel."""
        variance = cast(Gaussian, self.unit).scale ** 2
        return variance / (variance + (self.level * self.white) ** 2)

    def mean(self, field: Tensor, y: Tensor) -> Tensor:
        return torch.lerp(self.unit.mean(field), y, self._share().expand(y.shape))

    def sample(self, field: Tensor, y: Tensor, noise: RandomSource) -> Tensor:
        spread = cast(Gaussian, self.unit).scale * torch.sqrt(1 - self._share())
        return self.mean(field, y) + spread * noise.normal(y.shape, y)

    def fit(self, field: Tensor, y: Tensor) -> None:
        pass


class GaussianNoiseOnGrey(Observation):
    r"""Gaussian noise on Bernoulli units whose means stand for grey values.

    A clean pixel is black, white or grey with the probabilities of :class:`SaltAndPepperOnGrey`; the grey
    rest is a beta distribution of the mean that is left and of a concentration :math:`\varphi`,

    .. math:: p(x \mid \mu) = p_0 \delta_0(x) + p_1 \delta_1(x)
              + (1 - p_0 - p_1)\, \mathrm{Beta}\big(x; g \varphi, (1 - g) \varphi\big),
              \qquad g = \frac{\mu - p_1}{1 - p_0 - p_1}.

    The likelihood is :math:`N(y; x, \sigma^2)`; where images are cut off at black and white, pixels that are
    exactly black or white have the probability of lying beyond. Shape, concentration and :math:`\sigma` (if it is
    not known) maximise the likelihood, as there. The mean and the standard deviation of
    :math:`p(x \mid y, \mu)` are two tables over :math:`\mu` and y, looked up by linear interpolation. Draws are
    normal with these, cut off at 0 and 1.
    """

    def __init__(self, unit: Unit, level: float | None, white: float, start: float) -> None:
        super().__init__(unit, level, white, start)
        self.shape = _Shape(concentration=_Shape.usual_concentration)
        self.margin = max(1.0, 4 * self.level)  # of the tables, beyond black and beyond white
        self.cut_off: bool | None = None
        self._tables: Tensor | None = None

    @property
    def settled(self) -> bool:
        return False

    def first_guess(self, y: Tensor) -> Tensor:
        if self.cut_off is None:
            inside = float(y.min()) >= 0 and float(y.max()) <= 1
            self.cut_off = inside and bool(((y == 0) | (y == 1)).any())
        return y.clamp(0, 1)

    def mean(self, field: Tensor, y: Tensor) -> Tensor:
        return self._look_up(field, y)[0]

    def sample(self, field: Tensor, y: Tensor, noise: RandomSource) -> Tensor:
        mean, spread = self._look_up(field, y)
        return (mean + spread * noise.normal(y.shape, y)).clamp(0, 1)

    def fit(self, field: Tensor, y: Tensor) -> None:
        bins, means = _bins_of(self.unit.mean(field))
        columns = _OBSERVED + 2
        counts = _count(bins * columns + self._column(y).round().long(), len(means) * columns).reshape(-1, columns)

        def minus_log_likelihood(shape: _Shape, level: Any) -> Tensor:
            density = shape.levels(means) @ self._likelihood(level)
            return -(counts * density.clamp(min=1e-12).log()).sum()

        bounds = (_SMALLEST_SIGMA, _LARGEST_SIGMA)
        self.shape, self.level = _maximise(
            minus_log_likelihood, self.shape, self.level, self.known, bounds, usual_level=self.start
        )
        self._tables = None

    # y runs over `_OBSERVED` values from below black to above white, then "cut off at black" and "at white".

    def _column(self, y: Tensor) -> Tensor:
        """Return where observed values stand in the tables: a number of a column, and a fraction."""
        place = ((y + self.margin) / (1 + 2 * self.margin) * (_OBSERVED - 1)).clamp(0, _OBSERVED - 1)
        if not self.cut_off:
            return place
        return torch.where(y <= 0, _OBSERVED, torch.where(y >= 1, _OBSERVED + 1, place))

    def _likelihood(self, level: Any) -> Tensor:
        """Return p(y | x) for each grey level and observed value, (levels, observed)."""
        # The table's own steps blur what it holds: a narrower bell would fall between them.
        sigma = (torch.as_tensor(level, dtype=torch.float64) ** 2 + (0.5 / (_LEVELS - 1)) ** 2).sqrt()
        observed = torch.linspace(-self.margin, 1 + self.margin, _OBSERVED, dtype=torch.float64)
        density = torch.exp(-0.5 * ((observed - _GREYS[:, None]) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        beyond = [torch.special.ndtr(-_GREYS / sigma), torch.special.ndtr((_GREYS - 1) / sigma)]
        return torch.cat([density, torch.stack(beyond, 1)], 1)

    def _look_up(self, field: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self._tables is None:
            self._tables = self._make_tables(y)
        row = ((self.unit.bias + field) / _LOGITS).clamp(-1, 1)  # from -1 to 1, as grid_sample counts
        column = self._column(y) * (2 / (_OBSERVED + 1)) - 1
        grid = torch.stack([column, row], -1).reshape(1, -1, y.shape[-1], 2)
        found = torch.nn.functional.grid_sample(self._tables, grid, align_corners=True)[0]
        return found[0].reshape(y.shape), found[1].reshape(y.shape)

    def _make_tables(self, like: Tensor) -> Tensor:
        """Return mean and standard deviation of p(x | y, mu), (1, 2, bins, observed)."""
        prior = self.shape.levels(_MEANS)  # (bins, levels)
        likelihood = self._likelihood(self.level)  # (levels, observed)
        likelihood = likelihood / likelihood.amax(0)  # far out all are tiny, and only their ratios matter
        total = prior @ likelihood
        mean = prior @ (likelihood * _GREYS[:, None]) / total
        square = prior @ (likelihood * _GREYS[:, None] ** 2) / total
        return torch.stack([mean, (square - mean**2).clamp(min=0).sqrt()])[None].to(like)


#: Observations by kind of noise and by what pixels are.
KINDS: dict[str, dict[str, Callable[[Unit, float | None, float, float], Observation]]] = {
    "salt-and-pepper": {"binary": SaltAndPepper, "grey": SaltAndPepperOnGrey, "real": SaltAndPepperOnReal},
    "gaussian": {"binary": GaussianNoiseOnBinary, "grey": GaussianNoiseOnGrey, "real": GaussianNoiseOnReal},
}


# -- grey values given their mean -------------------------------------------------------------------

_LOGITS = 12.0
_BINS = 129
_MEANS = torch.sigmoid(torch.linspace(-_LOGITS, _LOGITS, _BINS, dtype=torch.float64))  # (bins,)
_LEVELS = 65
_GREYS = torch.linspace(0, 1, _LEVELS, dtype=torch.float64)
_OBSERVED = 193


class _Shape:
    """How often grey pixels of a given mean are exactly black or white, and how the others spread."""

    # Black and white: a and k of each. The centre of a weak prior; digits have few pixels of exactly 255.
    usual = (0.95, 3.0, 0.3, 2.0)
    usual_concentration = 1.5

    # Numbers, or tensors of one number while they are being fitted.
    def __init__(self, parameters: Sequence[Any] = usual, concentration: Any = None) -> None:
        self.parameters = tuple(parameters)
        self.concentration = concentration

    def ends(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities of black and of white, each of the shape of the means."""
        black, black_power, white, white_power = self.parameters
        return black * (1 - mean) ** black_power, white * mean**white_power

    def levels(self, mean: Tensor) -> Tensor:
        """Return the probability of each of the grey levels: (bins,) -> (bins, levels)."""
        black, white = self.ends(mean)
        rest = (1 - black - white).clamp(min=1e-12)
        centre = ((mean - white) / rest).clamp(1e-6, 1 - 1e-6)[:, None]
        inner = _GREYS[1:-1]
        up, down = centre * self.concentration - 1, (1 - centre) * self.concentration - 1
        beta = torch.softmax(up * inner.log() + down * torch.log1p(-inner), 1)
        return torch.cat([black[:, None], rest[:, None] * beta, white[:, None]], 1)


def _bins_of(mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bin of each mean, and the bins' means."""
    logit = torch.logit(mean, eps=1e-7)
    place = ((logit + _LOGITS) / (2 * _LOGITS) * (_BINS - 1)).round().long()
    return place.clamp(0, _BINS - 1), _MEANS


def _count(places: Tensor, size: int) -> Tensor:
    return torch.bincount(places.reshape(-1), minlength=size).cpu().double()


def _maximise(
    minus_log_likelihood: Callable[[_Shape, Any], Tensor],
    shape: _Shape,
    level: float,
    known: bool,
    bounds: tuple[float, float],
    usual_level: float | None = None,
) -> tuple[_Shape, float]:
    """Return the most probable shape and, if it is not known, level; all on a logarithmic scale.

    The prior's centre is the usual shape and, if given, the usual level; its spread is a factor of e.
    """
    from scipy.optimize import minimize

    spread = shape.concentration is not None
    usual = [*_Shape.usual, *([_Shape.usual_concentration] if spread else [])]
    # Not from the last shape: a first round's may lie at a bound, from which the way back is slow.
    start = [*usual, *([] if known else [level])]
    limits = [(1e-3, 1), (1, 30), (1e-4, 1), (1, 30), *([(0.2, 50)] if spread else []), *([] if known else [bounds])]
    usual += [] if known or usual_level is None else [usual_level]
    centre = torch.tensor(usual, dtype=torch.float64).log()

    def parts(values: Sequence[Any]) -> tuple[_Shape, Any]:
        return _Shape(values[:4], values[4] if spread else None), level if known else values[-1]

    def cost(logs: Array) -> tuple[float, Array]:
        with torch.enable_grad():
            free = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
            prior = 0.5 * ((free[: len(centre)] - centre) ** 2).sum()
            total = minus_log_likelihood(*parts(free.exp().unbind())) + prior
            total.backward()
        assert free.grad is not None
        return float(total.detach()), free.grad.numpy()

    low, high = np.log(np.array(limits)).T
    first = np.clip(np.log(start), low, high)
    found = minimize(cost, first, jac=True, bounds=list(zip(low, high, strict=True)), method="L-BFGS-B")
    return parts([float(value) for value in np.exp(found.x)])
