"""Base class for all units, and the registry that builds a unit by name."""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mvrbm.extras import check_not_taken, import_plugins
from mvrbm.memory import check_memory
from mvrbm.random import RandomSource
from mvrbm.validation import as_shape, choice

#: Registry of units: maps each name, as used on the command line and in files, to a function that builds the unit.
UNITS: dict[str, Callable[..., Unit]] = {}


#: Upper bound on biases (in standard deviations), standard deviations, inverse standard deviations and coupling norms.
#: The square of this bound is far below the largest single-precision number.
LARGEST_PARAMETER = 1e15


class Alternatives(NamedTuple):
    """Possible values of one site for each of n samples, as returned by :meth:`mvrbm.Unit.alternatives`.

    The probability of the site given all other sites is normalized by a sum over these values. `shares` contains the
    coefficients that express the given value as a weighted average of these values. A value between two states, such as
    a gray pixel, is thus treated as a mixture of both.
    """

    values: Tensor  # (a, n, *entry_shape)
    log_weights: Tensor  # (a, n): log-weights for the sum (or quadrature) over all values
    shares: Tensor  # (a, n): coefficients that express the given value as a weighted average of `values`

    @classmethod
    def and_itself(cls, values: Tensor, log_weights: Tensor, value: Tensor) -> Alternatives:
        """Build alternatives from `values`, of shape (a, n), and append `value`, of shape (n,), with weight zero."""
        never = torch.full_like(value, -math.inf)[None]
        shares = torch.cat([torch.zeros_like(values), torch.ones_like(value)[None]])
        return cls(torch.cat([values, value[None]]), torch.cat([log_weights, never]), shares)


class Unit(nn.Module, ABC):
    r"""Base class for a layer: an array of sites that are independent given an external field.

    For a unit energy :math:`\varepsilon(x)` and a sufficient statistic :math:`T(x)`, the distribution of a layer in the
    field :math:`f` is

    .. math:: p(x \mid f) = \exp\{-\varepsilon(x) + \langle T(x), f\rangle - A(f)\},

    where :math:`A(f)` is :meth:`log_normalizer`. A *site* is one random variable: a single entry, one row of a
    categorical layer, or a whole array. A *mode* is an axis of the layer.

    Parameters
    ----------
    shape : int or sequence of int
        Shape of the layer.
    bias_shape : sequence of int, optional
        Shape of the bias, which must broadcast to `shape`. Along modes of size 1, the bias is shared. Default: `shape`.
    """

    #: Name on the command line and in files. Every class that defines a name is registered under that name. Defining a
    #: class with the name of another class raises ValueError.
    name: ClassVar[str]
    #: Names under which to register the class, mapped to their constructor arguments. If not set, only `name` is used.
    variants: ClassVar[dict[str, dict[str, Any]]]
    bias: nn.Parameter
    #: Smallest and largest values allowed in data for this layer.
    data_range: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    #: Standard deviation of the fields on this layer that keeps the scale of activations constant from layer to layer
    #: in a network with random weights.
    field_spread: ClassVar[float] = 1.0
    #: Name of the unit that models this hidden layer when it is the visible layer of the next machine in a stack. If
    #: None, only the last hidden layer of a stack can have these units.
    stacked_as: ClassVar[str | None] = None
    #: Sampler that fast backends use for this layer: "bernoulli", "gaussian" or "categorical". These samplers require
    #: one bias per entry and no other learned parameters. None if the fast backends do not support the unit.
    sampled_as: str | None = None
    #: Whether entries are independent real numbers with a quadratic energy.
    gaussian: ClassVar[bool] = False
    #: Whether the zero point of the data is arbitrary, as for temperatures in degrees Celsius.
    arbitrary_zero: ClassVar[bool] = False
    #: Scale factor that :meth:`from_data` applies to uint8 data. Estimators set it to 1 if the training data
    #: contains only 0 and 1.
    byte_scale: float = 1.0
    #: Whether samples follow an energy function. If False, free energies and likelihoods are undefined.
    has_energy: ClassVar[bool] = True
    #: Number of trailing modes that form one site: 0 if each entry is a site, 1 if each row is, and all modes if the
    #: whole array is.
    entry_modes: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            variants = cls.__dict__.get("variants", {cls.name: {}})
            for name in variants:
                check_not_taken(cls, UNITS.get(name))
            for name, options in variants.items():
                UNITS[name] = functools.partial(cls, **options) if options else cls

    def __init__(self, shape: int | Sequence[int], *, bias_shape: Sequence[int] | None = None) -> None:
        super().__init__()
        self.shape = as_shape(shape, f"{type(self).__name__} shape")
        self.bias_shape = self.shape if bias_shape is None else as_shape(bias_shape, "bias_shape")
        pairs = zip(self.bias_shape, self.shape, strict=False)
        if len(self.bias_shape) != len(self.shape) or any(tied not in (1, size) for tied, size in pairs):
            raise ValueError(
                f"bias_shape {self.bias_shape} does not broadcast to the layer's shape {self.shape}; "
                "each mode must have the layer's size, or size 1 to share the bias along that mode"
            )
        check_memory(math.prod(self.bias_shape), f"a layer of shape {self.shape}")
        self.bias = nn.Parameter(torch.zeros(self.bias_shape))

    # -- geometry ---------------------------------------------------------------------------------

    @property
    def site_shape(self) -> tuple[int, ...]:
        """Shape of the array of sites, which is `shape` without the last `entry_modes` modes."""
        return self.shape[: len(self.shape) - self.entry_modes]

    @property
    def entry_shape(self) -> tuple[int, ...]:
        """Shape of a single site, which consists of the last `entry_modes` modes of `shape`."""
        return self.shape[len(self.shape) - self.entry_modes :]

    @property
    def n_sites(self) -> int:
        """Total number of sites in the layer."""
        return math.prod(self.site_shape)

    @property
    def own_lengths(self) -> bool:
        """Whether samples may differ in length.

        If so, log Z depends on the length, and :meth:`redraw` and :meth:`mean_like` preserve lengths.
        """
        return False

    @property
    def one_hot(self) -> bool:
        """Whether each site is a row with exactly one 1 in every state."""
        return False

    @property
    @abstractmethod
    def levels(self) -> float:
        """Number of possible values per site, which is infinite for real values and counts."""

    # -- the distribution -------------------------------------------------------------------------

    @abstractmethod
    def site_energy(self, x: Tensor) -> Tensor:
        r"""Compute the energy :math:`\varepsilon` of each site: (n, \*shape) -> (n, \*site_shape)."""

    @abstractmethod
    def site_log_normalizer(self, field: Tensor) -> Tensor:
        r"""Compute the log-normalizer of each site: (n, \*shape) -> (n, \*site_shape)."""

    @abstractmethod
    def mean(self, field: Tensor) -> Tensor:
        r"""Compute the mean of each entry given the field: (n, \*shape) -> (n, \*shape)."""

    @abstractmethod
    def sample(self, field: Tensor, rng: RandomSource) -> Tensor:
        r"""Sample the layer given the field: (n, \*shape) -> (n, \*shape)."""

    def redraw(self, x: Tensor, field: Tensor, rng: RandomSource) -> Tensor:
        r"""Sample the layer given the field. Units with variable lengths preserve the length of each sample in `x`.

        Both `x` and `field` have shape (n, \*shape).
        """
        return self.sample(field, rng)

    def mean_like(self, x: Tensor, field: Tensor) -> Tensor:
        r"""Compute the mean given the field. Units with variable lengths use the length of each sample in `x`.

        Both `x` and `field` have shape (n, \*shape).
        """
        return self.mean(field)

    def statistic_variance(self, field: Tensor) -> Tensor:
        r"""Compute the variance of each entry of :math:`T(x)` given the field: (n, \*shape) -> (n, \*shape)."""
        raise ValueError(f"{type(self).__name__} units have no closed-form variance")

    def statistic(self, x: Tensor) -> Tensor:
        """Compute the statistic `T(x)` that couplings act on. `T` is linear, so it maps means to means."""
        return x

    @property
    def inverse_scale(self) -> Tensor:
        r"""Inverse scale :math:`1 / s` of each entry, where :math:`T(x) = x / s`. The tensor has shape (\*shape)."""
        return torch.ones_like(self.bias).detach().expand(self.shape)

    def activation(self, field: Tensor) -> Tensor:
        r"""Compute the layer's output from its field, as in a deterministic network: (n, \*shape) -> (n, \*shape)."""
        return self.mean(field)

    def energy(self, x: Tensor) -> Tensor:
        r"""Compute the unit energy :math:`\varepsilon(x)`: (n, \*shape) -> (n,)."""
        return sum_sites(self.site_energy(x))

    def log_normalizer(self, field: Tensor) -> Tensor:
        r"""Compute the log-normalizer :math:`A(f)`: (n, \*shape) -> (n,)."""
        return sum_sites(self.site_log_normalizer(field))

    # -- learning ---------------------------------------------------------------------------------

    # The next two methods are correct for units with energy -<b, x> and T(x) = x. Other units override them.

    def energy_gradient(self, x: Tensor, field: Tensor | None, weights: Tensor | None = None) -> dict[str, Tensor]:
        r"""Compute the gradient of :math:`\varepsilon(x) - \langle T(x), f\rangle` with respect to each parameter.

        The gradient is averaged over the batch, or is a weighted sum if `weights`, of shape (n,), is given. `field` may
        be None for units whose statistic has no learned parameters.
        """
        return {"bias": self._tie(-average(x, weights))}

    def normalizer_gradient(
        self, field: Tensor, weights: Tensor | None = None, mean: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the gradient of :math:`A(f)` with respect to each learned parameter.

        The gradient is averaged over the batch, or is a weighted sum if `weights`, of shape (n,), is given. If the
        mean given the field is already available, pass it as `mean` to avoid recomputing it.
        """
        return {"bias": self._tie(average(self.mean(field) if mean is None else mean, weights))}

    @abstractmethod
    def initialize_from(self, mean: Tensor, variance: Tensor, count: int) -> None:
        r"""Fit the parameters to the moments of `count` samples, treating all sites as independent.

        `mean` and `variance` have shape (\*shape).
        """

    @torch.no_grad()
    def absorb(self, field: Tensor) -> None:
        r"""Absorb a constant field of shape (\*shape) into the bias."""
        self.bias.add_(self._pool(field))

    @property
    def largest_spread(self) -> float:
        """Upper bound on the standard deviation of `T(x)` along any direction in any field, for quadratic energies.

        The log-normalizer of such units grows quadratically with the field. If both layers of a coupling do, the energy
        can be unbounded. For all other units, this is 0.
        """
        return 1.0 if self.gaussian else 0.0

    def gains(self) -> dict[str, Tensor]:
        """Return the squared effect of a unit step in each parameter, measured in standard deviations of the entries.

        A step in a shared bias moves all entries that share it. Parameters that are not in the dictionary have a gain
        of 1. See also :meth:`mvrbm.couplings.Coupling.gains`.
        """
        return {"bias": self.bias.new_full((), self.n_sharing)} if self.n_sharing > 1 else {}

    @property
    def n_sharing(self) -> int:
        """Number of entries that share each bias parameter."""
        return math.prod(self.shape) // math.prod(self.bias_shape)

    @property
    @abstractmethod
    def fluctuation(self) -> float:
        """Typical largest variance of an entry of `T(x)` given the field, from which learning rates are computed.

        For bounded units, this is an upper bound.
        """

    @property
    def learns_statistic(self) -> bool:
        """Whether `T` has learned parameters, whose gradients depend on the field."""
        return False

    @property
    def log_variances(self) -> dict[str, Tensor]:
        """Learned log-variances by parameter name. Their sum, with broadcasting, has one value per entry."""
        return {}

    def statistic_gradient(self, x: Tensor, field: Tensor) -> dict[str, Tensor]:
        r"""Compute the gradient of :math:`-\langle T(x), f\rangle` with respect to each learned parameter of `T`.

        The gradient is summed over the batch.
        """
        return {}

    def _tie(self, batch_mean: Tensor) -> Tensor:
        """Reduce a gradient from the layer shape to the bias shape by summing over entries that share a parameter."""
        return batch_mean.sum_to_size(self.bias_shape)

    def _pool(self, moment: Tensor) -> Tensor:
        """Reduce a moment from the layer shape to the bias shape by averaging over entries that share a parameter."""
        return self._tie(moment) / self.n_sharing

    # -- data and checks --------------------------------------------------------------------------

    def check(self, x: Tensor, layer: str) -> None:
        """Raise ValueError if `x`, of shape (n, *shape), contains invalid values for these units."""
        if not x.numel():
            return
        low, high = (float(end) for end in x.detach().aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            bad, what, advice = int(x.isinf().sum()), "infinite values", "replace them with finite values"
            if not bad:
                bad, what = int(x.isnan().sum()), "NaN"
                advice = "fill in missing entries first, for example with MVRBMImputer"
            raise ValueError(f"layer '{layer}' contains {what} ({bad} of {x.numel()} entries); {advice}")
        if max(-low, high) > LARGEST_PARAMETER:
            raise ValueError(
                f"data for layer '{layer}' contains the value {low if -low > high else high:.3g}, but the largest "
                f"supported magnitude is {LARGEST_PARAMETER:g}; rescale the data"
            )

    def check_parameters(self, layer: str) -> None:
        """Raise ValueError if any parameter is not finite or is too large for stable computation."""
        self._check_size(self.bias, layer, "bias")

    @staticmethod
    def _check_size(values: Tensor, layer: str, what: str) -> None:
        largest = float(values.detach().abs().max())
        if not largest <= LARGEST_PARAMETER:
            raise ValueError(f"the {what} of layer '{layer}' is too large, with a magnitude of up to {largest:.3g}")

    def from_data(self, raw: Tensor) -> Tensor:
        """Convert data of shape (n, *shape) to the layer's dtype and device, and scale uint8 data."""
        scale = self.byte_scale if raw.dtype == torch.uint8 else 1.0
        values = raw.to(device=self.bias.device).to(self.bias.dtype)
        return values * scale if scale != 1.0 else values

    def example(self, n: int, rng: RandomSource) -> Tensor:
        r"""Return valid example data of shape (n, \*shape), for tests and tracing."""
        return self.sample(self.bias.new_zeros((n, *self.shape)), rng).detach()

    @property
    def some_state(self) -> Tensor:
        r"""Valid state of shape (\*shape), used as a placeholder for entries that have not been sampled yet."""
        return torch.zeros(self.shape, dtype=self.bias.dtype, device=self.bias.device)

    @property
    def middle(self) -> Tensor:
        r"""Mean of each entry if all of its possible values were equally likely.

        For units with infinitely many values, this is the mean at zero field. The tensor has shape (\*shape).
        """
        zero = torch.zeros(self.shape, dtype=self.bias.dtype, device=self.bias.device)
        return self.mean(zero[None])[0].detach() if math.isinf(self.levels) else zero + 1 / self.levels

    def unsupported_reason(self, other: Unit) -> str | None:
        """Return the reason why this layer cannot be coupled with `other`, or None if the two are compatible."""
        return None

    def absent(self, x: Tensor) -> Tensor | None:
        r"""Return a mask of shape (n, \*shape) that is True for padding, or None for units without padding."""
        return None

    # -- enumeration and conditional distributions of individual sites ----------------------------

    def decode(self, digits: Tensor) -> Tensor:
        """Convert state indices from 0 to `levels` - 1 to values: (m, sites) -> (m, sites, *entry_shape)."""
        raise ValueError(f"{type(self).__name__} units have infinitely many states and cannot be enumerated")

    @abstractmethod
    def alternatives(self, value: Tensor, site: int, reach: tuple[Tensor, Tensor]) -> Alternatives:
        """Return the possible values of one site.

        The distribution of the site given all other sites is normalized by a sum over these values.

        `value`, of shape (n, *entry_shape), is the current value of the site, and `site` is its index in row-major
        order. `reach` contains lower and upper limits on the likely field at the site, each of shape (n,). Both limits
        are zero if the site has finitely many possible values.
        """

    @property
    def statistic_bounds(self) -> tuple[float, float]:
        """Lowest and highest possible values of an entry of `T(x)`."""
        return self.data_range

    # -- description ------------------------------------------------------------------------------

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments of this unit as a dictionary that can be saved as JSON."""
        found = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def extra_repr(self) -> str:
        """Return the shape, the bias shape if the bias is shared, and any other nonzero arguments."""
        tied = [] if self.bias_shape == self.shape else [f"bias_shape={self.bias_shape}"]
        others = [f"{key}={value}" for key, value in self.config().items() if value and not key.endswith("shape")]
        return ", ".join([str(self.shape), *tied, *others])


def make_unit(name: str, shape: int | Sequence[int], **options: Any) -> Unit:
    """Build a unit by name, passing `options` to its class. :func:`unit_names` returns the available names."""
    return unit_class(name, "unit")(shape, **options)


def unit_class(name: str, parameter: str) -> Callable[..., Unit]:
    """Return the unit class registered under the given name, or a function that builds such a unit.

    Raises ValueError if the name is unknown. The error message calls the argument `parameter`.
    """
    if name not in list(UNITS):  # not `in UNITS`, because the name may not be hashable
        choice(name, parameter, unit_names())
    return UNITS[name]


def unit_names() -> list[str]:
    """Return the sorted names of all units, including units from installed plugins."""
    import_plugins()
    return sorted(UNITS)


def average(values: Tensor, weights: Tensor | None) -> Tensor:
    r"""Average over samples, or compute a weighted sum if `weights` is given: (n, \*shape) -> (\*shape).

    `weights` has shape (n,).
    """
    return values.mean(0) if weights is None else torch.tensordot(weights, values, dims=1)


def sum_sites(values: Tensor) -> Tensor:
    r"""Sum over the sites of each sample: (n, \*site_shape) -> (n,)."""
    return values.reshape(values.shape[0], -1).sum(1)  # `len` would become a constant in exported ONNX files


def pick(probabilities: Tensor, number: Tensor) -> Tensor:
    """Sample from each row of probabilities by inverse transform sampling: (..., m), (..., 1) -> (..., 1)."""
    state = (number >= probabilities.cumsum(-1)).sum(-1, keepdim=True)
    # Rounding can leave the last cumulative sum slightly below 1.
    return state.clamp_(max=probabilities.shape[-1] - 1)
