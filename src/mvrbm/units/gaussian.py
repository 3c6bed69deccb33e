"""Gaussian units: real entries with a fixed or learned variance."""

import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mvrbm.random import RandomSource
from mvrbm.units.base import Alternatives, Unit, average
from mvrbm.validation import choice

# Minimum variance, relative to the median variance of the layer. It avoids division by nearly zero for constant and
# nearly constant entries.
_SMALLEST_RELATIVE_VARIANCE = 1e-2
# Variance to use if all entries are constant, relative to the largest squared mean.
_CONSTANT_RELATIVE_VARIANCE = 1e-6

# Minimum standard deviation, relative to the mean.
_SMALLEST_RELATIVE_SCALE = 1e-12

# With nodes half a standard deviation apart, the trapezoidal rule has a relative error of about
# exp(-2 (2 pi)^2) = 5e-35 for mixtures of Gaussians of that width. The density at both ends is below exp(-50).
_NODE_SPACING = 0.5
_NODE_MARGIN = 10.0
_MOST_NODES = 4096


class Gaussian(Unit):
    r"""Real entries with energy :math:`\sum (x - b)^2 / (2 s^2)`, so that :math:`x \mid f \sim N(b + s f, s^2)`.

    Couplings act on :math:`T(x) = x / s`, so the weights are dimensionless. Rescaling the data changes only `b` and
    `s`.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer.
    bias_shape : sequence of int, optional
        Shape of the bias and the variance, which must broadcast to `shape`. Default: `shape`.
    learn_variance : bool, "axes" or "one"
        Whether to learn the log-variances. If True, each entry has its own log-variance. If ``"axes"``, each
        log-variance is a sum of one parameter per axis, such as one for the row and one for the column of the entry. If
        ``"one"``, all entries share one log-variance. If False, each entry has a fixed log-variance, which is 0 unless
        :meth:`~mvrbm.Unit.initialize_from` sets it from the data.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import Gaussian
    >>> unit = Gaussian(2)
    >>> unit.mean(torch.zeros(1, *unit.shape)).tolist()
    [[0.0, 0.0]]
    """

    name = "gaussian"
    gaussian = True
    arbitrary_zero = True
    variants: ClassVar[dict[str, dict[str, Any]]] = {
        "gaussian": {},
        "gaussian-learned": {"learn_variance": True},
        "gaussian-axes": {"learn_variance": "axes"},
        "gaussian-one": {"learn_variance": "one"},
    }
    stacked_as = "gaussian"
    sampled_as = "gaussian"
    levels = math.inf
    fluctuation = 1.0  # because the statistic is measured in standard deviations

    def __init__(
        self, shape: int | Sequence[int], *, bias_shape: Sequence[int] | None = None, learn_variance: bool | str = False
    ) -> None:
        super().__init__(shape, bias_shape=bias_shape)
        if isinstance(learn_variance, str):
            choice(learn_variance, "learn_variance", ("axes", "one"))
        self.learn_variance = learn_variance
        sizes, order = self.bias_shape, len(self.bias_shape)
        shapes = {"log_variance": (1,) * order if learn_variance == "one" else sizes}
        if learn_variance == "axes":
            shapes = {f"log_variance_{d}": tuple(sizes[d] if d == e else 1 for e in range(order)) for d in range(order)}
        for name, own in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(own), requires_grad=bool(learn_variance)))
        self._variance_names = tuple(shapes)

    def _log_variance(self) -> Tensor:
        """Return the sum of the log-variance parameters. Its shape broadcasts to the bias shape."""
        parts: list[Tensor] = [self.get_parameter(name) for name in self._variance_names]
        return functools.reduce(torch.add, parts)

    def _to_variances(self, gradient: Tensor) -> dict[str, Tensor]:
        """Convert a gradient with respect to each entry's log-variance to one gradient per log-variance parameter."""
        tied = self._tie(gradient)
        return {name: tied.sum_to_size(self.get_parameter(name).shape) for name in self._variance_names}

    @property
    def scale(self) -> Tensor:
        """Standard deviations of the entries. Their shape broadcasts to the bias shape."""
        return torch.exp(0.5 * self._log_variance())

    def statistic(self, x: Tensor) -> Tensor:
        """Return the statistic x / s."""
        return x / self.scale

    @property
    def inverse_scale(self) -> Tensor:
        """Inverse standard deviation 1 / s of each entry. The tensor has the shape of the layer."""
        return torch.exp(-0.5 * self._log_variance().detach()).expand(self.shape)

    def site_energy(self, x: Tensor) -> Tensor:
        """Return the energy of each entry, (x - b)^2 / (2 s^2)."""
        return 0.5 * ((x - self.bias) / self.scale) ** 2

    def site_log_normalizer(self, field: Tensor) -> Tensor:
        """Return the log-normalizer of each entry, log(2 pi s^2) / 2 + b f / s + f^2 / 2."""
        log_width = 0.5 * (math.log(2 * math.pi) + self._log_variance())
        return log_width + field * (self.bias / self.scale + 0.5 * field)

    def mean(self, field: Tensor) -> Tensor:
        """Return the mean of each entry, b + s f."""
        return self.bias + self.scale * field

    def statistic_variance(self, field: Tensor) -> Tensor:
        """Return ones, because the statistic x / s has unit variance."""
        return torch.ones_like(field)

    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        """Return the mean plus s times a standard normal random number."""
        mean = self.mean(field)
        return mean + self.scale * rng.normal(mean.shape, mean)

    def energy_gradient(self, x: Tensor, field: Tensor | None, weights: Tensor | None = None) -> dict[str, Tensor]:
        scale = self.scale
        deviation = (x - self.bias) / scale
        gradient = {"bias": self._tie(-average(deviation, weights) / scale)}
        if self.learn_variance and field is not None:
            each = x / scale * field - deviation**2
            gradient |= self._to_variances(0.5 * average(each, weights))
        return gradient

    def normalizer_gradient(
        self, field: Tensor, weights: Tensor | None = None, mean: Tensor | None = None
    ) -> dict[str, Tensor]:
        mean_field, scale = average(field, weights), self.scale
        gradient = {"bias": self._tie(mean_field / scale)}
        if self.learn_variance:
            total = 1 if weights is None else weights.sum()
            gradient |= self._to_variances(0.5 * (total - self.bias / scale * mean_field))
        return gradient

    def statistic_gradient(self, x: Tensor, field: Tensor) -> dict[str, Tensor]:
        return self._to_variances((0.5 * self.statistic(x) * field).sum(0)) if self.learn_variance else {}

    def gains(self) -> dict[str, Tensor]:
        """Return the gain of each parameter. Gains for biases measure steps in standard deviations of the entries."""
        gains = {"bias": self.n_sharing / self.scale**2}
        for name in self._variance_names if self.learn_variance else ():
            if (sharing := math.prod(self.shape) // self.get_parameter(name).numel()) > 1:
                gains[name] = self.bias.new_full((), sharing)
        return gains

    @property
    def learns_statistic(self) -> bool:
        return bool(self.learn_variance)

    @property
    def log_variances(self) -> dict[str, Tensor]:
        return {name: self.get_parameter(name) for name in self._variance_names} if self.learn_variance else {}

    def check_parameters(self, layer: str) -> None:
        scale = self.scale.detach()
        for values, what in ((scale, "standard deviation"), (1 / scale, "inverse standard deviation")):
            self._check_size(values, layer, what)
        self._check_size(self.bias.detach() / scale, layer, "bias in standard deviations")

    @torch.no_grad()
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Set the bias and variances to the mean and variances of the data, with a lower bound on the variances."""
        center = self._pool(mean)
        spread = self._pool(variance + (mean - center) ** 2)
        varying = spread[spread > 0]
        if len(varying):
            floor = _SMALLEST_RELATIVE_VARIANCE * varying.median()
        else:
            floor = _CONSTANT_RELATIVE_VARIANCE * ((mean**2).max() or spread.new_tensor(1.0))
        self.bias.copy_(center)
        # Rounding errors in large means must not count as variation.
        spread = torch.maximum(torch.maximum(spread, floor), (_SMALLEST_RELATIVE_SCALE * center) ** 2)
        for name in self._variance_names:  # each parameter accounts for the variance that earlier ones did not
            own = self.get_parameter(name)
            mean_spread = spread.sum_to_size(own.shape) * (own.numel() / spread.numel())
            own.copy_(torch.log(mean_spread))  # `copy_`, because the moments may be on another device
            spread = spread / mean_spread

    @torch.no_grad()
    def absorb(self, field: Tensor) -> None:
        """Absorb a constant field into the bias by adding s times the field."""
        self.bias.add_(self._pool(self.scale * field))

    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        """Return quadrature nodes (trapezoidal rule) that cover all likely values, followed by the given value."""
        bias = self.bias.expand(self.shape).reshape(-1)[site]
        scale = self.scale.expand(self.shape).reshape(-1)[site]
        low, high = reach[0] - _NODE_MARGIN, reach[1] + _NODE_MARGIN  # in standard deviations
        wanted = int(torch.ceil(((high - low) / _NODE_SPACING).max()))
        if wanted > _MOST_NODES:
            raise ValueError(
                "the weights are too large for numerical integration because the likely values of a Gaussian entry "
                f"span {float((high - low).max()):.0f} standard deviations, too many for {_MOST_NODES} quadrature nodes"
            )
        steps = torch.linspace(0, 1, wanted + 1, dtype=value.dtype, device=value.device)[:, None]
        nodes = bias + scale * (low + (high - low) * steps)  # (a, n)
        log_spacing = torch.log(scale * (high - low) / wanted).expand(nodes.shape)
        return Alternatives.and_itself(nodes, log_spacing, value)
