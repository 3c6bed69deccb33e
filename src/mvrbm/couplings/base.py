"""Base classes for couplings, the registry that builds a coupling by name, and helpers for factors."""

from __future__ import annotations

import functools
import inspect
import math
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mvrbm.extras import check_not_taken, import_plugins, triton_runs_on
from mvrbm.memory import check_memory
from mvrbm.random import RandomSource
from mvrbm.validation import choice, whole_number

#: Default standard deviation of the initial entries of `W`.
DEFAULT_STD = 0.01

#: Coupling classes, keyed by their names on the command line and in files.
COUPLINGS: dict[str, type[Coupling]] = {}


class Coupling(nn.Module, ABC):
    r"""Base class for a linear map :math:`W` from a visible layer to the hidden layer.

    A coupling is constructed without shapes, as in ``Kronecker(rank=2)``. The machine then connects the coupling to its
    layers, which creates and initializes the parameters. A coupling that is already connected keeps its parameters.

    Only :meth:`dense` computes the full :math:`W`.
    """

    #: Name on the command line and in files. Every class that defines a name is registered under that name. Defining a
    #: class with the name of another class raises ValueError.
    name: ClassVar[str]
    visible_shape: tuple[int, ...]
    hidden_shape: tuple[int, ...]
    #: Whether the only parameter is the full matrix, stored with shape (hidden entries, visible entries).
    is_full: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            check_not_taken(cls, COUPLINGS.get(cls.name))
            COUPLINGS[cls.name] = cls

    def __init__(self) -> None:  # defined because `config` reads the signature, and nn.Module takes any arguments
        super().__init__()

    @property
    def connected(self) -> bool:
        """Whether the coupling is connected to its layers, and thus has shapes and parameters."""
        return hasattr(self, "visible_shape")

    def connect(
        self,
        visible_shape: Sequence[int],
        hidden_shape: Sequence[int],
        rng: RandomSource | None = None,
        std: float = DEFAULT_STD,
    ) -> Coupling:
        """Create and randomly initialize the parameters for the given shapes, and return the coupling.

        If `rng` is None, a random source with seed 0 is used.
        """
        self.allocate(visible_shape, hidden_shape)
        self.initialize(rng or RandomSource(0), std)
        return self

    def allocate(self, visible_shape: Sequence[int], hidden_shape: Sequence[int]) -> None:
        """Validate the shapes and create the parameters without initializing them."""
        if self.connected:
            raise ValueError(f"the {self.name} coupling is already connected ({self._arrow()})")
        visible_shape, hidden_shape = tuple(visible_shape), tuple(hidden_shape)
        with torch.device("meta"):  # count the parameters without allocating memory
            self._allocate(visible_shape, hidden_shape)
        numbers = sum(parameter.numel() for parameter in self.parameters())
        check_memory(numbers, f"a {self.name} coupling from {visible_shape} to {hidden_shape}")
        self._allocate(visible_shape, hidden_shape)
        self.visible_shape, self.hidden_shape = visible_shape, hidden_shape

    @abstractmethod
    def _allocate(self, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> None:
        """Validate the shapes and create the parameters."""

    @abstractmethod
    def _factor_std(self, std: float) -> float:
        """Return the parameter standard deviation for which the entries of `W` have standard deviation `std`."""

    @torch.no_grad()
    def initialize(self, rng: RandomSource, std: float = DEFAULT_STD, *, factor_std: float | None = None) -> None:
        """Initialize the parameters randomly so that the entries of `W` have standard deviation `std`.

        All factors start at the same scale, because the gradient of each factor is proportional to the other factors.
        Zero is a saddle point, which training would leave only slowly if the factors themselves had standard deviation
        `std`. If `factor_std` is given, it sets the standard deviation of the parameters, and `std` is ignored.
        """
        factor_std = self._factor_std(std) if factor_std is None else factor_std
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.copy_(factor_std * rng.normal(parameter.shape, parameter))

    @abstractmethod
    def to_hidden(self, x: Tensor) -> Tensor:
        r"""Compute :math:`W x`: (n, \*visible_shape) -> (n, \*hidden_shape)."""

    @abstractmethod
    def to_visible(self, y: Tensor) -> Tensor:
        r"""Compute :math:`W^\top y`: (n, \*hidden_shape) -> (n, \*visible_shape)."""

    @abstractmethod
    def statistics(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        r"""Compute the gradient of :math:`-\langle y, W x\rangle` with respect to each learned parameter.

        The gradient is averaged over the batch. `x` has shape (n, \*visible_shape) and `y` has shape
        (n, \*hidden_shape).
        """

    @property
    @abstractmethod
    def operations(self) -> int:
        """Number of multiplications per sample, which is the same for `to_hidden` and `to_visible`."""

    @abstractmethod
    def dense(self) -> Tensor:
        r"""Compute the full :math:`W`, of shape (\*hidden_shape, \*visible_shape)."""

    def from_dense_gradient(self, gradient: Tensor) -> dict[str, Tensor]:
        r"""Convert the gradient with respect to :math:`W` to gradients with respect to the learned parameters.

        `gradient` has shape (\*hidden_shape, \*visible_shape). The conversion is a vector-Jacobian product of
        :meth:`dense`.
        """
        learned = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        if not learned:
            return {}
        with torch.enable_grad():
            parts = torch.autograd.grad(self.dense(), list(learned.values()), gradient)
        return dict(zip(learned, parts, strict=True))

    @abstractmethod
    def gains(self) -> dict[str, Tensor]:
        """Return an upper bound on the squared spectral norm of the change in `W` per unit step in each parameter.

        The effect of a step in one factor on `W` is proportional to the other factors of the product. Dividing each
        gradient by its gain compensates for this, so that training neither stalls when those factors are small nor
        diverges when they are large.
        """

    def balance(self) -> None:
        """Rescale the learned factors in place to equal norms, without changing `W`. By default, this does nothing."""

    def center_categories(self) -> None:
        """Subtract the mean over the last visible mode from `W`, in place.

        See :meth:`mvrbm.BoltzmannMachine.zero_sum_gauge`, which compensates for the change.
        """
        raise ValueError(f"the {self.name} coupling has no zero-sum gauge, because it lacks center_categories")

    @property
    def n_parameters(self) -> int:
        """Number of learned parameters."""
        return sum(p.numel() for p in self._learned)

    @property
    def _learned(self) -> list[nn.Parameter]:
        """Parameters that are not frozen."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments of this coupling as a dictionary that can be saved as JSON."""
        found = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def copy_without_shapes(self) -> Coupling:
        """Return a new, unconnected coupling with the same constructor arguments."""
        return type(self)(**self.config())

    def mode_factors(self) -> list[Tensor] | None:
        """Return one factor of shape (R, K_d, I_d) per mode if `W` is a sum of R learned Kronecker products.

        A full matrix counts as a single factor between the flattened layers. For all other couplings, return None.
        """
        return None

    def matrix_factors(self) -> tuple[Tensor, Tensor] | None:
        r"""Return the learned factors `U` and `V` if :math:`W X = \sum_r U_r X V_r^\top`, and None otherwise.

        `U` has shape (R, K, I), and `V` has shape (R, L, J).
        """
        factors = self.mode_factors() or []
        return (factors[0], factors[1]) if len(factors) == 2 else None

    def contractions(self) -> list[tuple[str, Tensor]]:
        """Return :meth:`to_hidden` for a single sample as a sequence of `einsum` steps, for export to other languages.

        Each step consists of an `einsum` equation and a factor. The operands of the equation are the current array,
        which has no sample axis, and the factor. To obtain :meth:`to_visible`, reverse the order of the steps and swap
        the input and output of each equation. The default implementation returns one step with the full `W`.
        """
        visible = string.ascii_uppercase[: len(self.visible_shape)]
        hidden = string.ascii_lowercase[: len(self.hidden_shape)]
        return [(f"{visible},{hidden}{visible}->{hidden}", self.dense())]

    def _arrow(self) -> str:
        return " -> ".join("x".join(map(str, shape)) for shape in (self.visible_shape, self.hidden_shape))

    def extra_repr(self) -> str:
        """Return the constructor arguments and, if connected, the shapes and the number of parameters."""
        parts = [f"{key}={value}" for key, value in self.config().items() if value != []]
        if self.connected:
            parts.append(f"{self._arrow()}, {self.n_parameters:,} parameters")
        return ", ".join(parts)


def make_coupling(description: str | Mapping[str, Any]) -> Coupling:
    """Build an unconnected coupling from a description.

    Parameters
    ----------
    description : str or mapping
        Name, optionally followed by the first argument of the class (for example, ``"kronecker:8"``, ``"mpo:2,3"`` or
        ``"dense"``), or mapping in the format of saved models (for example,
        ``{"coupling": "kronecker", "rank": 8}``).

    Examples
    --------
    >>> make_coupling("kronecker:8").rank
    8
    """
    if isinstance(description, str):
        name, _, text = description.partition(":")
        options: dict[str, Any] = {}
        numbers = re.split("[,x]", text) if text else []
        if not all(number.isdecimal() for number in numbers):
            raise ValueError(
                f"coupling must be a name, optionally followed by integers (as in kronecker:8), got {description!r}"
            )
        sizes = [int(number) for number in numbers]
        arguments = [sizes[0] if len(sizes) == 1 else sizes] if sizes else []
    else:
        options = dict(description)
        name, arguments = options.pop("coupling", None), []
    if name not in list(COUPLINGS):
        import_plugins()
    kind = COUPLINGS[choice(name, "coupling", sorted(COUPLINGS))]
    try:
        return kind(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"coupling {description!r} has an argument that {kind.__name__} does not accept") from error


def same_order(kind: str, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> int:
    """Return the number of modes, or raise ValueError if it differs between the visible and the hidden shape."""
    if len(visible_shape) != len(hidden_shape):
        raise ValueError(
            f"{kind} couplings require the same number of hidden and visible modes, got visible shape {visible_shape} "
            f"and hidden shape {hidden_shape}; add modes of size 1 to the shorter shape or use a Dense coupling"
        )
    return len(visible_shape)


def one_or_each(value: int | Sequence[int], name: str) -> int | tuple[int, ...]:
    """Validate a rank or bond size, which is either one integer or a sequence of integers, and return it."""
    if isinstance(value, Sequence):
        return tuple(whole_number(each, name) for each in value)
    return whole_number(value, name)


def squared_norms(matrices: Tensor) -> Tensor:
    """Compute a tight upper bound on the squared spectral norm of each matrix: (..., k, i) -> (...).

    The bound is the squared Schatten 8-norm, which requires only two small matrix products and no iteration or state.
    The Schatten 8-norm is typically about ten percent larger than the spectral norm, whereas the Frobenius norm can be
    larger by a factor of the square root of the rank.
    """
    if (kernels := _norm_kernels(matrices)) is not None:
        found: Tensor = kernels.squared_norms(matrices.detach())
        return found
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    gram = wide @ wide.mT
    norms: Tensor = torch.linalg.vector_norm(gram @ gram, dim=(-2, -1))
    return norms.sqrt()


def product_gains(norms: Sequence[Tensor]) -> list[Tensor]:
    """Return the gain of each factor of a sum of products: the product of the other norms, summed over the terms.

    `norms` contains the squared norms of each factor, of shape (R,).
    """
    others = [[*norms[:mode], *norms[mode + 1 :]] or [torch.ones_like(norms[mode])] for mode in range(len(norms))]
    return [functools.reduce(torch.mul, each).sum() for each in others]


def _norm_kernels(matrices: Tensor) -> ModuleType | None:
    """Return the Triton kernels if they support the given stack of small matrices, or None otherwise."""
    if matrices.dtype != torch.float32 or matrices.ndim != 3 or torch.is_grad_enabled():
        return None
    if not triton_runs_on(matrices.device):
        return None
    from mvrbm.couplings import norm_kernels

    return norm_kernels if min(matrices.shape[1:]) <= norm_kernels.LARGEST_SIDE else None


@torch.no_grad()
def equalize_norms(factors: Sequence[Tensor], keep: int | None) -> None:
    """Rescale factors in place so that their norms are equal, without changing their product.

    If `keep` is not None, each slice along the mode `keep` is rescaled separately.
    """
    others = [[mode for mode in range(factor.ndim) if mode != keep] for factor in factors]
    if len(factors) < 2:
        return
    logs = [torch.linalg.vector_norm(factor, dim=dim).log() for factor, dim in zip(factors, others, strict=True)]
    target = torch.stack(logs).mean(0)
    for factor, log in zip(factors, logs, strict=True):
        # If a slice is zero, the product is zero for any scale.
        scale = torch.where(torch.isfinite(target), torch.exp(target - log), torch.ones_like(log))
        factor.mul_(scale.reshape([-1 if mode == keep else 1 for mode in range(factor.ndim)]))


def center(factor: Tensor, mode: int) -> None:
    """Subtract the mean over a mode from a factor, in place."""
    factor.sub_(factor.mean(mode, keepdim=True))


class Chain(Coupling):
    r"""Base class for couplings that apply one small factor per mode, one mode at a time.

    The intermediate states have shape (n, bond, m_1, ..., m_D). Each mode has its visible size before its factor is
    applied and its hidden size afterwards. Gradients reuse the intermediate states of both directions, so all gradients
    together take 2 (D - 1) products instead of D (D - 1).
    """

    factors: nn.ParameterList
    #: Subscripts of a factor: k is the hidden mode and i the visible mode. The other subscripts are bonds.
    _subscripts: ClassVar[str]
    #: Order in which `to_hidden` applies the factors, chosen by `allocate`. `to_visible` uses the reverse order.
    _order: list[int]
    #: Subscripts of the bonds before and after a factor in `_order`.
    _bonds: tuple[str, str]

    def to_hidden(self, x: Tensor) -> Tensor:
        return self._walk(x, self._order, "ik", self._bonds)[-1].squeeze(1)

    def to_visible(self, y: Tensor) -> Tensor:
        return self._walk(y, self._order[::-1], "ki", self._bonds[::-1])[-1].squeeze(1)

    def statistics(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        before = self._walk(x, self._order[:-1], "ik", self._bonds, whole=False)
        after = self._walk(y, self._order[:0:-1], "ki", self._bonds[::-1], whole=False)[::-1]
        left, right = self._bonds
        gradients = {}
        for mode, x_side, y_side in zip(self._order, before, after, strict=True):
            factor = self.factors[mode]
            if factor.requires_grad:
                equation = f"n{left}{self._modes(mode, 'i')},n{right}{self._modes(mode, 'k')}->{self._subscripts}"
                product = self._pair(equation, x_side, y_side, mode)
                gradients[f"factors.{mode}"] = (product / -len(x)).expand_as(factor)
        return gradients

    def _pair(self, equation: str, x: Tensor, y: Tensor, mode: int) -> Tensor:
        """Contract the states before and after a factor over all indices except the indices of the factor."""
        return torch.einsum(equation, x, y)

    def _apply_factor(self, equation: str, state: Tensor, mode: int, *, to_hidden: bool) -> Tensor:
        """Apply the factor of one mode to the state."""
        return torch.einsum(equation, state, self.factors[mode])

    def _walk(
        self, array: Tensor, modes: Sequence[int], change: str, bonds: tuple[str, str], whole: bool = True
    ) -> list[Tensor]:
        """Apply the factors of `modes` in order, and return the initial state and the state after each factor.

        If `whole` is True, the bond axis of the last state is summed out.
        """
        old, new = change[0], change[1]
        states = [array.unsqueeze(1)]
        for step, mode in enumerate(modes, start=1):
            bond = "" if whole and step == len(modes) else bonds[1]
            equation = f"n{bonds[0]}{self._modes(mode, old)},{self._subscripts}->n{bond}{self._modes(mode, new)}"
            state = self._apply_factor(equation, states[-1], mode, to_hidden=old == "i")
            states.append(state if state.ndim == states[0].ndim else state.unsqueeze(1))
        return states

    def contractions(self) -> list[tuple[str, Tensor]]:
        steps = []
        for number, mode in enumerate(self._order, start=1):
            before = self._bonds[0] if number > 1 else ""
            after = self._bonds[1] if number < len(self._order) else ""
            equation = f"{before}{self._modes(mode, 'i')},{self._subscripts}->{after}{self._modes(mode, 'k')}"
            steps.append((equation, self.factors[mode]))
        return steps

    @property
    def operations(self) -> int:
        """Number of multiplications per sample, summed over all modes."""
        return self._count(self._order, self.visible_shape, self.hidden_shape)

    def _count(self, order: Sequence[int], visible_shape: Sequence[int], hidden_shape: Sequence[int]) -> int:
        """Return the number of multiplications in `to_hidden` if the factors are applied in the given order."""
        sizes, total = list(visible_shape), 0
        for mode in order:
            total += math.prod(sizes) * self.factors[mode].numel() // visible_shape[mode]
            sizes[mode] = hidden_shape[mode]
        return total

    def _modes(self, mode: int, subscript: str) -> str:
        letters = string.ascii_uppercase[: len(self.visible_shape)]
        return letters[:mode] + subscript + letters[mode + 1 :]
