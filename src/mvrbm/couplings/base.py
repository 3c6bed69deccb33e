"""The base classes of all couplings, the registry that builds one by its name, and helpers for factors."""

from __future__ import annotations

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

from mvrbm.extras import triton_runs_on
from mvrbm.memory import check_memory
from mvrbm.random import RandomSource
from mvrbm.validation import choice, whole_number

#: Default standard deviation of the initial entries of `W`.
DEFAULT_STD = 0.01

#: Classes of couplings by their names on the command line and in files.
COUPLINGS: dict[str, type[Coupling]] = {}


class Coupling(nn.Module, ABC):
    r"""A linear map :math:`W` from the shape of a visible layer to that of the hidden layer.

    A coupling is built without shapes, ``Kronecker(rank=2)``. The machine connects it to its layers, which creates and
    draws its parameters. A coupling that is already connected keeps its parameters.

    Only :meth:`dense` forms the full :math:`W`.
    """

    #: Name on the command line and in files. A class that defines a name is registered under it.
    name: ClassVar[str]
    visible_shape: tuple[int, ...]
    hidden_shape: tuple[int, ...]
    #: Whether the only parameter is the full matrix, (hidden entries, visible entries).
    is_full: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            COUPLINGS[cls.name] = cls

    def __init__(self) -> None:  # unlike nn.Module, no arbitrary arguments: `config` reads this signature
        super().__init__()

    @property
    def connected(self) -> bool:
        """Whether the coupling has shapes and parameters."""
        return hasattr(self, "visible_shape")

    def connect(
        self,
        visible_shape: Sequence[int],
        hidden_shape: Sequence[int],
        rng: RandomSource | None = None,
        std: float = DEFAULT_STD,
    ) -> Coupling:
        """Create the parameters for these shapes and draw them, from `rng` or the stream of seed 0."""
        self.allocate(visible_shape, hidden_shape)
        self.initialize(rng or RandomSource(0), std)
        return self

    def allocate(self, visible_shape: Sequence[int], hidden_shape: Sequence[int]) -> None:
        """Check that the shapes fit this kind of coupling and create its parameters, without drawing them."""
        if self.connected:
            raise ValueError(f"{self.name} coupling is already connected, {self._arrow()}")
        visible_shape, hidden_shape = tuple(visible_shape), tuple(hidden_shape)
        with torch.device("meta"):  # shapes without memory
            self._allocate(visible_shape, hidden_shape)
        numbers = sum(parameter.numel() for parameter in self.parameters())
        check_memory(numbers, f"a {self.name} coupling of {visible_shape} to {hidden_shape}")
        self._allocate(visible_shape, hidden_shape)
        self.visible_shape, self.hidden_shape = visible_shape, hidden_shape

    @abstractmethod
    def _allocate(self, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> None:
        """Check the shapes and create the parameters."""

    @abstractmethod
    def _factor_std(self, std: float) -> float:
        """Return the standard deviation of the parameters that gives the entries of `W` standard deviation `std`."""

    @torch.no_grad()
    def initialize(self, rng: RandomSource, std: float = DEFAULT_STD, *, factor_std: float | None = None) -> None:
        """Draw the parameters so that the entries of `W` have standard deviation `std`.

        The gradient of each factor is proportional to the other factors, so all factors start at the same scale: zero
        is a saddle point, which factors with standard deviation `std` themselves would leave only slowly. `factor_std`
        sets the standard deviation of the parameters themselves instead.
        """
        factor_std = self._factor_std(std) if factor_std is None else factor_std
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.copy_(factor_std * rng.normal(parameter.shape, parameter))

    @abstractmethod
    def to_hidden(self, x: Tensor) -> Tensor:
        r"""Return :math:`W x`: (n, \*visible_shape) -> (n, \*hidden_shape)."""

    @abstractmethod
    def to_visible(self, y: Tensor) -> Tensor:
        r"""Return :math:`W^\top y`: (n, \*hidden_shape) -> (n, \*visible_shape)."""

    @abstractmethod
    def statistics(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        r"""Return the gradient of :math:`-\langle y, W x\rangle`, averaged over the batch, for each learned parameter.

        The arrays are x (n, \*visible_shape) and y (n, \*hidden_shape).
        """

    @property
    @abstractmethod
    def operations(self) -> int:
        """Number of multiplications of `to_hidden`, and of `to_visible`, per sample."""

    @abstractmethod
    def dense(self) -> Tensor:
        r"""Return the full :math:`W`, of shape (\*hidden_shape, \*visible_shape)."""

    def from_dense_gradient(self, gradient: Tensor) -> dict[str, Tensor]:
        r"""Return the gradient for each learned parameter from that for :math:`W`, (\*hidden_shape, \*visible_shape).

        It is the adjoint of the derivative of :meth:`dense`.
        """
        learned = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        with torch.enable_grad():
            parts = torch.autograd.grad(self.dense(), list(learned.values()), gradient)
        return dict(zip(learned, parts, strict=True))

    @abstractmethod
    def gains(self) -> dict[str, Tensor]:
        """Return an upper bound of the squared amplification of a step of each parameter in `W`, in spectral norm.

        Dividing each gradient by its gain gives steps of equal effect on `W`, however large the other factors are:
        training neither stalls where they are small nor diverges where they have grown.
        """

    def balance(self) -> None:
        """Rescale the factors to equal norms without changing `W`."""

    @property
    def n_parameters(self) -> int:
        """Number of parameters that are learned."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build this coupling again, which are attributes of the same names."""
        found = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    def copy_without_shapes(self) -> Coupling:
        """Return a new coupling with the same arguments, which is not connected yet."""
        return type(self)(**self.config())

    def mode_factors(self) -> list[Tensor] | None:
        """Return factors (R, K_d, I_d) if `W` is a sum of R Kronecker products of learned matrices, else None.

        There is one factor per mode. A full matrix is a single factor, of layers with all modes in one.
        """
        return None

    def matrix_factors(self) -> tuple[Tensor, Tensor] | None:
        r"""Return U (R, K, I), V (R, L, J) if :math:`W X = \sum_r U_r X V_r^\top` and both are learned, else None."""
        factors = self.mode_factors() or []
        return (factors[0], factors[1]) if len(factors) == 2 else None

    def contractions(self) -> list[tuple[str, Tensor]]:
        """Return :meth:`to_hidden` as steps of an array without the axis of samples and a factor, for other languages.

        A step is an equation of `einsum`, of the array and the factor, and the factor. The steps in reverse order, each
        with its input and its output exchanged, are :meth:`to_visible`. Default: one step, by the full `W`.
        """
        visible = string.ascii_uppercase[: len(self.visible_shape)]
        hidden = string.ascii_lowercase[: len(self.hidden_shape)]
        return [(f"{visible},{hidden}{visible}->{hidden}", self.dense())]

    def _arrow(self) -> str:
        return " -> ".join("x".join(map(str, shape)) for shape in (self.visible_shape, self.hidden_shape))

    def extra_repr(self) -> str:
        """Arguments and, once connected, shapes and number of parameters."""
        parts = [f"{key}={value}" for key, value in self.config().items() if value != []]
        if self.connected:
            parts.append(f"{self._arrow()}, {self.n_parameters:,} parameters")
        return ", ".join(parts)


def make_coupling(description: str | Mapping[str, Any]) -> Coupling:
    """Build a coupling, not yet connected, from its description.

    Parameters
    ----------
    description : str or mapping
        A name with the first argument of the class, such as ``"kronecker:8"``, ``"mpo:2,3"`` or ``"dense"``; or
        what saved models contain, ``{"coupling": "kronecker", "rank": 8}``.

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
            raise ValueError(f"coupling must be a name and whole numbers, such as kronecker:8, got {description!r}")
        sizes = [int(number) for number in numbers]
        arguments = [sizes[0] if len(sizes) == 1 else sizes] if sizes else []
    else:
        options = dict(description)
        name, arguments = options.pop("coupling", None), []
    kind = COUPLINGS[choice(name, "coupling", sorted(COUPLINGS))]
    try:
        return kind(*arguments, **options)
    except TypeError as error:
        raise ValueError(f"coupling {description!r} has an argument that {kind.__name__} does not take") from error


def same_order(kind: str, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> int:
    """Return the number of modes of both shapes, or raise ValueError if they differ."""
    if len(visible_shape) != len(hidden_shape):
        raise ValueError(
            f"{kind} coupling needs as many hidden as visible modes, got visible {visible_shape} and "
            f"hidden {hidden_shape}: add modes of size 1 to the shorter one, or use a Dense coupling"
        )
    return len(visible_shape)


def one_or_each(value: int | Sequence[int], name: str) -> int | tuple[int, ...]:
    """Return a rank that is one whole number for all modes, or one per mode."""
    if isinstance(value, Sequence):
        return tuple(whole_number(each, name) for each in value)
    return whole_number(value, name)


def squared_norms(matrices: Tensor) -> Tensor:
    """Return a close upper bound of the squared spectral norm of matrices (..., k, i): (...).

    It is the Schatten 8-norm, which takes two small products, without iteration or state. It exceeds the spectral norm
    by some ten percent, where the Frobenius norm can exceed it by a factor of the root of the rank.
    """
    if (kernels := _norm_kernels(matrices)) is not None:
        found: Tensor = kernels.squared_norms(matrices.detach())
        return found
    wide = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    gram = wide @ wide.mT
    norms: Tensor = torch.linalg.vector_norm(gram @ gram, dim=(-2, -1))
    return norms.sqrt()


def _norm_kernels(matrices: Tensor) -> ModuleType | None:
    """Return the Triton kernel of `squared_norms` for a stack of small matrices on a GPU, None for others."""
    if matrices.dtype != torch.float32 or matrices.ndim != 3 or torch.is_grad_enabled():
        return None
    if not triton_runs_on(matrices.device):
        return None
    from mvrbm.couplings import norm_kernels

    return norm_kernels if min(matrices.shape[1:]) <= norm_kernels.LARGEST_SIDE else None


@torch.no_grad()
def equalize_norms(factors: Sequence[Tensor], keep: int | None) -> None:
    """Scale factors in place to equal norms, slice by slice along the mode `keep`, without changing their product."""
    others = [[mode for mode in range(factor.ndim) if mode != keep] for factor in factors]
    logs = [torch.linalg.vector_norm(factor, dim=dim).log() for factor, dim in zip(factors, others, strict=True)]
    target = torch.stack(logs).mean(0)
    for factor, log in zip(factors, logs, strict=True):
        # The product of a slice of zeros is zero whatever the scales.
        scale = torch.where(torch.isfinite(target), torch.exp(target - log), torch.ones_like(log))
        factor.mul_(scale.reshape([-1 if mode == keep else 1 for mode in range(factor.ndim)]))


class Chain(Coupling):
    r"""A map that applies one small factor per mode, one mode after another.

    The intermediate states have shape (n, bond, m_1 .. m_D), where a mode has its visible size before its factor is
    applied and its hidden size afterwards. The states on the way from either end also give all gradients, with
    2 (D - 1) products instead of D (D - 1).
    """

    factors: nn.ParameterList
    #: Subscripts of a factor: k is its hidden and i its visible mode, the first and the last are its bonds.
    _subscripts: ClassVar[str]
    #: The order in which `to_hidden` applies the factors, chosen when connected; `to_visible` reverses it.
    _order: list[int]
    #: The subscripts of the bond before and after a factor in that order.
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
        """Return the sum of products of states on both sides of a factor, over everything but its own indices."""
        return torch.einsum(equation, x, y)

    def _apply_factor(self, equation: str, state: Tensor, mode: int, *, to_hidden: bool) -> Tensor:
        """Return the state after a factor."""
        return torch.einsum(equation, state, self.factors[mode])

    def _walk(
        self, array: Tensor, modes: Sequence[int], change: str, bonds: tuple[str, str], whole: bool = True
    ) -> list[Tensor]:
        """Return the states before and after each factor; the last state of a whole walk has no bond."""
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
        """One per entry of the state and matching entry of the factor, at each mode."""
        return self._count(self._order, self.visible_shape, self.hidden_shape)

    def _count(self, order: Sequence[int], visible_shape: Sequence[int], hidden_shape: Sequence[int]) -> int:
        """Return the number of multiplications of `to_hidden` if it applied the factors in some order."""
        sizes, total = list(visible_shape), 0
        for mode in order:
            total += math.prod(sizes) * self.factors[mode].numel() // visible_shape[mode]
            sizes[mode] = hidden_shape[mode]
        return total

    def _modes(self, mode: int, subscript: str) -> str:
        letters = string.ascii_uppercase[: len(self.visible_shape)]
        return letters[:mode] + subscript + letters[mode + 1 :]
