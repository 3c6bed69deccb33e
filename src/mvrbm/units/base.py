"""The base class of all units, and the registry that builds a unit by its name."""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mvrbm.memory import check_memory
from mvrbm.random import RandomSource
from mvrbm.validation import all_finite, as_shape, choice

#: Functions that build a unit of a given shape, by the name of the unit on the command line and in files.
UNITS: dict[str, Callable[..., Unit]] = {}


#: Upper bound of biases in standard deviations, of standard deviations and their inverses, and of norms of couplings.
#: Their squares stay far below the largest number in single precision.
LARGEST_PARAMETER = 1e15


class Alternatives(NamedTuple):
    """The values that one site can have; see :meth:`mvrbm.Unit.alternatives`."""

    values: Tensor  # (a, n, *entry_shape)
    log_weights: Tensor  # (a, n): logarithms of the weights in the sum, or quadrature, over all values
    shares: Tensor  # (a, n): the given value as an average of these values

    @classmethod
    def and_itself(cls, values: Tensor, log_weights: Tensor, value: Tensor) -> Alternatives:
        """Return values (a, n) that need not include the given value (n,), which is appended with weight zero."""
        never = torch.full_like(value, -math.inf)[None]
        shares = torch.cat([torch.zeros_like(values), torch.ones_like(value)[None]])
        return cls(torch.cat([values, value[None]]), torch.cat([log_weights, never]), shares)


class Unit(nn.Module, ABC):
    r"""One layer: an array of sites that are independent in an external field.

    With own energy :math:`\varepsilon(x)` and statistic :math:`T(x)`, a layer in the field :math:`f` has

    .. math:: p(x \mid f) = \exp\{-\varepsilon(x) + \langle T(x), f\rangle - A(f)\},

    where :math:`A(f)` is :meth:`log_normalizer`. A *site* is one random variable: an entry, or a row of a
    categorical layer.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer.
    bias_shape : sequence of int, optional
        Shape of the bias, which is broadcast to `shape`: a 1 ties the bias along that mode. Default: `shape`.
    """

    #: Name on the command line and in files. A class that defines a name is registered under it.
    name: ClassVar[str]
    #: Names to register instead of `name` alone, each with the arguments it stands for.
    variants: ClassVar[dict[str, dict[str, Any]]]
    bias: nn.Parameter
    #: Smallest and largest value that data of this layer can have.
    data_range: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    #: Standard deviation of the fields of this layer that keeps activations of equal size from layer to layer
    #: in a network with random weights.
    field_spread: ClassVar[float] = 1.0
    #: Name of the unit that represents this hidden layer as the visible layer of the next machine in a stack. None if
    #: there is none: only the last hidden layer of a stack can then have such units.
    stacked_as: ClassVar[str | None] = None
    #: The kind of unit, "bernoulli", "gaussian" or "categorical", that fast backends draw this layer as. They need one
    #: bias per entry and no other learned parameter. None if they cannot draw it.
    sampled_as: str | None = None
    #: Whether the entries are real with quadratic energy, so that the energy of two such layers can be unbounded.
    gaussian: ClassVar[bool] = False
    #: Whether the zero of the data is arbitrary, as for temperatures, rather than the absence of something.
    arbitrary_zero: ClassVar[bool] = False
    #: Factor by which data of type uint8 is multiplied.
    byte_scale: ClassVar[float] = 1.0
    #: Whether samples follow an energy. Otherwise free energies and likelihoods do not exist.
    has_energy: ClassVar[bool] = True
    #: Number of trailing modes that make up one site.
    entry_modes: ClassVar[int] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            for name, options in cls.__dict__.get("variants", {cls.name: {}}).items():
                UNITS[name] = functools.partial(cls, **options) if options else cls

    def __init__(self, shape: int | Sequence[int], *, bias_shape: Sequence[int] | None = None) -> None:
        super().__init__()
        self.shape = as_shape(shape, f"{type(self).__name__} shape")
        self.bias_shape = self.shape if bias_shape is None else as_shape(bias_shape, "bias_shape")
        pairs = zip(self.bias_shape, self.shape, strict=False)
        if len(self.bias_shape) != len(self.shape) or any(tied not in (1, size) for tied, size in pairs):
            raise ValueError(
                f"bias_shape {self.bias_shape} does not broadcast to the layer's shape {self.shape}: "
                "each mode must have its own size, or 1 to tie the bias along it"
            )
        check_memory(math.prod(self.bias_shape), f"a layer of shape {self.shape}")
        self.bias = nn.Parameter(torch.zeros(self.bias_shape))

    # -- geometry ---------------------------------------------------------------------------------

    @property
    def site_shape(self) -> tuple[int, ...]:
        """Shape of the array of sites."""
        return self.shape[: len(self.shape) - self.entry_modes]

    @property
    def entry_shape(self) -> tuple[int, ...]:
        """Shape of one site."""
        return self.shape[len(self.shape) - self.entry_modes :]

    @property
    def n_sites(self) -> int:
        """Number of sites."""
        return math.prod(self.site_shape)

    @property
    def own_lengths(self) -> bool:
        """Whether samples have different lengths. :meth:`redraw` keeps them, and each length has its own log Z."""
        return False

    @property
    @abstractmethod
    def levels(self) -> float:
        """Number of values that one site can have; infinite for real entries and counts."""

    # -- the distribution -------------------------------------------------------------------------

    @abstractmethod
    def site_energy(self, x: Tensor) -> Tensor:
        r"""Own energy :math:`\varepsilon` of each site: (n, \*shape) -> (n, \*site_shape)."""

    @abstractmethod
    def site_log_normalizer(self, field: Tensor) -> Tensor:
        r"""Log-normalizer of each site: (n, \*shape) -> (n, \*site_shape)."""

    @abstractmethod
    def mean(self, field: Tensor) -> Tensor:
        r"""Mean in the field: (n, \*shape) -> (n, \*shape)."""

    @abstractmethod
    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        r"""Sample in the field: (n, \*shape) -> (n, \*shape)."""

    def redraw(self, x: Tensor, field: Tensor, rng: RandomSource) -> Tensor:
        r"""Sample in the field and keep the lengths of the samples `x`, for units with lengths: both (n, \*shape)."""
        return self.sample(field, rng)

    def statistic_variance(self, field: Tensor) -> Tensor:
        r"""Variance of each entry of :math:`T(x)` in the field: (n, \*shape) -> (n, \*shape)."""
        raise ValueError(f"{type(self).__name__} units have no variance in closed form")

    def statistic(self, x: Tensor) -> Tensor:
        """Return the statistic `T(x)` that enters couplings. It is linear, so `T` of a mean is the mean of `T`."""
        return x

    @property
    def inverse_scale(self) -> Tensor:
        r"""Return :math:`1 / s` of every entry, where :math:`T(x) = x / s`: (\*shape)."""
        return torch.ones_like(self.bias).detach().expand(self.shape)

    def activation(self, field: Tensor) -> Tensor:
        r"""Return the output of this layer in a deterministic network: (n, \*shape) -> (n, \*shape)."""
        return self.mean(field)

    def energy(self, x: Tensor) -> Tensor:
        r"""Own energy :math:`\varepsilon(x)`: (n, \*shape) -> (n,)."""
        return sum_sites(self.site_energy(x))

    def log_normalizer(self, field: Tensor) -> Tensor:
        r"""Log-normalizer :math:`A(f)`: (n, \*shape) -> (n,)."""
        return sum_sites(self.site_log_normalizer(field))

    # -- learning ---------------------------------------------------------------------------------

    # These two hold for units with energy -<b, x> and T(x) = x; other units override them.

    def energy_gradient(self, x: Tensor, field: Tensor | None, weights: Tensor | None = None) -> dict[str, Tensor]:
        r"""Gradient of :math:`\varepsilon(x) - \langle T(x), f\rangle` for each learned parameter, batch mean.

        `field` may be None for units whose statistic has no learned parameter. With weights (n,) it is the weighted sum
        over the batch instead of the mean.
        """
        return {"bias": self._tie(-average(x, weights))}

    def normalizer_gradient(
        self, field: Tensor, weights: Tensor | None = None, mean: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Gradient of :math:`A(f)` for each learned parameter, averaged over the batch, or summed with weights (n,).

        `mean` is the mean in the field, if it has been computed already.
        """
        return {"bias": self._tie(average(self.mean(field) if mean is None else mean, weights))}

    @abstractmethod
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        r"""Set the parameters to those of independent sites with the moments (\*shape) of `count` samples."""

    @torch.no_grad()
    def absorb(self, field: Tensor) -> None:
        r"""Add a constant field (\*shape) to the bias, which then has the effect of the field."""
        self.bias.add_(self._pool(field))

    def gains(self) -> dict[str, Tensor]:
        """Return the squared amplification of a step of each parameter, in standard deviations of the entries.

        A step of a shared bias moves all entries that share it. Parameters that are not listed have gain 1. See
        :meth:`mvrbm.couplings.Coupling.gains`.
        """
        return {"bias": self.bias.new_full((), self.n_sharing)} if self.n_sharing > 1 else {}

    @property
    def n_sharing(self) -> int:
        """Number of entries that share one bias."""
        return math.prod(self.shape) // math.prod(self.bias_shape)

    @property
    @abstractmethod
    def fluctuation(self) -> float:
        """Largest variance that one entry of `T(x)` can have in a fixed field."""

    @property
    def learns_statistic(self) -> bool:
        """Whether `T` has learned parameters, whose gradient depends on the field."""
        return False

    def statistic_gradient(self, x: Tensor, field: Tensor) -> dict[str, Tensor]:
        r"""Gradient of :math:`-\langle T(x), f\rangle` for each learned parameter of `T`, summed over the batch."""
        return {}

    def _tie(self, batch_mean: Tensor) -> Tensor:
        """Sum a gradient of the layer's shape over the entries that share a parameter."""
        return batch_mean.sum_to_size(self.bias_shape)

    def _pool(self, moment: Tensor) -> Tensor:
        """Average a moment of the layer's shape over the entries that share a parameter."""
        return self._tie(moment) / self.n_sharing

    # -- data and checks --------------------------------------------------------------------------

    def check(self, x: Tensor, layer: str) -> None:
        """Raise ValueError if `x` (n, *shape) contains values that such entries cannot have."""
        if not all_finite([x]):
            bad = int((~torch.isfinite(x)).sum())
            raise ValueError(
                f"layer '{layer}' contains NaN or infinite values ({bad} of {x.numel()}): "
                "replace them, or mark them as unknown with a mask"
            )

    def check_parameters(self, layer: str) -> None:
        """Raise ValueError if parameters are finite, but too large to compute with."""
        self._check_size(self.bias, layer, "bias")

    @staticmethod
    def _check_size(values: Tensor, layer: str, what: str) -> None:
        largest = float(values.detach().abs().max())
        if not largest <= LARGEST_PARAMETER:
            raise ValueError(f"the {what} of layer '{layer}' is too large: up to {largest:.3g}")

    def from_data(self, raw: Tensor) -> Tensor:
        """Return data (n, *shape) in the dtype and on the device of the layer, with bytes scaled."""
        scale = self.byte_scale if raw.dtype == torch.uint8 else 1.0
        values = raw.to(device=self.bias.device).to(self.bias.dtype)
        return values * scale if scale != 1.0 else values

    def example(self, n: int, rng: RandomSource) -> Tensor:
        r"""Return n samples of valid data (n, \*shape), for tests and for tracing."""
        return self.sample(self.bias.new_zeros((n, *self.shape)), rng).detach()

    @property
    def some_state(self) -> Tensor:
        r"""Return a valid state (\*shape), as a placeholder for entries that have not been drawn yet."""
        return torch.zeros(self.shape, dtype=self.bias.dtype, device=self.bias.device)

    @property
    def middle(self) -> Tensor:
        r"""Return the midpoint of the values of every entry, or its mean if they are infinitely many: (\*shape)."""
        zero = torch.zeros(self.shape, dtype=self.bias.dtype, device=self.bias.device)
        return self.mean(zero).detach() if math.isinf(self.levels) else zero + 1 / self.levels

    def unsupported_reason(self, other: Unit) -> str | None:
        """Return the reason why this layer cannot be coupled with `other`, or None if it can."""
        return None

    def absent(self, x: Tensor) -> Tensor | None:
        r"""Return True for entries that are padding, (n, \*shape); None for units that have no padding."""
        return None

    # -- enumeration and conditionals of single sites ---------------------------------------------

    def decode(self, digits: Tensor) -> Tensor:
        """Return the values that digits from 0 to `levels` - 1 stand for: (m, sites) -> (m, sites, *entry_shape)."""
        raise ValueError(f"{type(self).__name__} units have infinitely many states and cannot be enumerated")

    @abstractmethod
    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        """Return the values that one site can have, to normalize its distribution given all other sites.

        The site has values (n, *entry_shape) and its number in row-major order. `reach` is the lowest and the highest
        field that can act on it, (n,) each; zeros if a site has finitely many values.
        """

    @property
    def statistic_bounds(self) -> tuple[float, float]:
        """Lowest and highest value of `T(x)`."""
        return self.data_range

    # -- description ------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the arguments that build this unit again, which are attributes of the same names."""
        found = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def extra_repr(self) -> str:
        """Shape, the shape of a tied bias, and further arguments that are set."""
        tied = [] if self.bias_shape == self.shape else [f"bias_shape={self.bias_shape}"]
        others = [f"{key}={value}" for key, value in self.config().items() if value and not key.endswith("shape")]
        return ", ".join([str(self.shape), *tied, *others])


def make_unit(name: str, shape: int | Sequence[int], **options: Any) -> Unit:
    """Build a unit by its name, one of :func:`unit_names`, with further arguments of its class."""
    return UNITS[choice(name, "unit", unit_names())](shape, **options)


def unit_names() -> list[str]:
    """Return the names of all units, sorted."""
    return sorted(UNITS)


def average(values: Tensor, weights: Tensor | None) -> Tensor:
    r"""Return the mean over samples, or their sum with weights (n,): (n, \*shape) -> (\*shape)."""
    return values.mean(0) if weights is None else torch.tensordot(weights, values, dims=1)


def sum_sites(values: Tensor) -> Tensor:
    r"""Sum over the sites of each sample: (n, \*site_shape) -> (n,)."""
    return values.reshape(values.shape[0], -1).sum(1)  # `len` would make n constant in ONNX files
