"""Kronecker couplings: sums of Kronecker products, from a single bilinear map to a full matrix."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mvrbm.couplings.base import (
    DEFAULT_STD,
    Chain,
    Coupling,
    center,
    equalize_norms,
    product_gains,
    same_order,
    squared_norms,
)
from mvrbm.random import RandomSource
from mvrbm.validation import whole_number

# Largest rank, relative to the full rank. Redundant ranks are useless, but the default ranks of estimators must not
# raise errors for small arrays.
_LARGEST_REDUNDANCY = 10


class Kronecker(Chain):
    r"""Sum of :math:`R` Kronecker products, :math:`W = \sum_r U_1^r \otimes \dots \otimes U_D^r`.

    With rank 1 and two modes, this is the bilinear map of the MVRBM, :math:`W X = U X V^\top`. With rank 1 and any
    number of modes, it is the tensor form of that map, :math:`W X = X \times_1 U_1 \times_2 \dots \times_D U_D`. At
    full rank, :math:`W` can be any matrix.

    Parameters
    ----------
    rank : int
        Number of Kronecker products. With the full rank, `W` can be any matrix. For matrices of shape (I, J) and a
        hidden layer of shape (K, L), the full rank is min(I K, J L). Larger ranks are redundant, and the rank must not
        exceed ten times the full rank.
    summed_modes : sequence of int
        Modes to sum over without weights. The factors of these modes are fixed at ones.

    Attributes
    ----------
    factors : ParameterList
        One factor per mode. `factors[d]` has shape (R, K_d, I_d). For matrices, the factors are `U` and `V`.

    Examples
    --------
    >>> from mvrbm import Bernoulli, BoltzmannMachine, Kronecker
    >>> machine = BoltzmannMachine(
    ...     Bernoulli((28, 28)), Bernoulli((25, 25)), Kronecker(rank=2)
    ... )
    >>> sum(p.numel() for p in machine.links["visible"].parameters())
    2800

    References
    ----------
    Qi, Sun, Gao, Hu and Li, "Matrix Variate RBM and Its Applications", 2016, equation (3).
    """

    name = "kronecker"
    _subscripts = "rki"
    _bonds = ("r", "r")

    def __init__(self, rank: int = 1, *, summed_modes: Sequence[int] = ()) -> None:
        super().__init__()
        self.rank = whole_number(rank, "rank")
        self.summed_modes = tuple(summed_modes)

    def connect(
        self,
        visible_shape: Sequence[int],
        hidden_shape: Sequence[int],
        rng: RandomSource | None = None,
        std: float = DEFAULT_STD,
    ) -> Coupling:
        # Not checked by `allocate`, so that models with a larger rank still load.
        same_order("Kronecker", tuple(visible_shape), tuple(hidden_shape))
        sizes = [i * k for i, k in zip(visible_shape, hidden_shape, strict=True)]
        full = math.prod(sizes) // max(sizes)
        if self.rank > _LARGEST_REDUNDANCY * full:
            raise ValueError(
                f"rank must be at most {_LARGEST_REDUNDANCY * full:,} for a Kronecker coupling from "
                f"{tuple(visible_shape)} to {tuple(hidden_shape)}, got {self.rank:,}; with rank {full:,}, the weights "
                "can already be any matrix"
            )
        return super().connect(visible_shape, hidden_shape, rng, std)

    def _allocate(self, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> None:
        order = same_order("Kronecker", visible_shape, hidden_shape)
        if any(not 0 <= mode < order for mode in self.summed_modes) or len(self.summed_modes) == order:
            raise ValueError(
                f"summed_modes must be between 0 and {order - 1} and must not include all modes, "
                f"got {list(self.summed_modes)}"
            )
        self.factors = nn.ParameterList(
            nn.Parameter(
                torch.ones(self.rank, hidden_shape[mode], visible_shape[mode]),
                requires_grad=mode not in self.summed_modes,
            )
            for mode in range(order)
        )
        # Applying mode a before mode b is cheaper if and only if 1/I_a - 1/K_a < 1/I_b - 1/K_b, so sorting gives the
        # cheapest order. The adjoint is cheapest in the reverse order.
        self._order = sorted(range(order), key=lambda d: 1 / visible_shape[d] - 1 / hidden_shape[d])

    def _factor_std(self, std: float) -> float:
        free = len(self.factors) - len(self.summed_modes)
        return float((std / math.sqrt(self.rank)) ** (1 / free))

    # For a single term, plain matrix products avoid the copies that `einsum` makes to permute modes.

    def _apply_factor(self, equation: str, state: Tensor, mode: int, *, to_hidden: bool) -> Tensor:
        if self.rank > 1:
            return super()._apply_factor(equation, state, mode, to_hidden=to_hidden)
        matrix = self.factors[mode][0] if to_hidden else self.factors[mode][0].T  # (new, old)
        new = list(state.shape)
        new[mode + 2] = len(matrix)
        before, old, after = _around(state, mode)
        if after == 1:
            product: Tensor = state.reshape(before, old) @ matrix.T
        else:
            product = torch.bmm(matrix.expand(before, *matrix.shape), state.reshape(before, old, after))
        return product.reshape(new)

    def _pair(self, equation: str, x: Tensor, y: Tensor, mode: int) -> Tensor:
        (before, i, after), k = _around(x, mode), y.shape[mode + 2]
        # Use `einsum` if permuting the mode to the end moves less memory than one product per sample and a sum.
        if self.rank > 1 or 1 < after < k * i / (k + i):
            return super()._pair(equation, x, y, mode)
        x, y = x.reshape(before, i, after), y.reshape(before, k, after)
        product: Tensor = y[..., 0].T @ x[..., 0] if after == 1 else torch.bmm(y, x.mT).sum(0)
        return product[None]

    def gains(self) -> dict[str, Tensor]:
        """Return the gain of each factor: the product of the other factors' squared norms, summed over terms."""
        gains = product_gains([squared_norms(factor) for factor in self.factors])
        return {f"factors.{mode}": gains[mode] for mode, factor in enumerate(self.factors) if factor.requires_grad}

    def dense(self) -> Tensor:
        # With the modes ordered k_1, i_1, .., k_D, i_D, W is a sum of outer products, computed as one matrix product.
        *others, last = [factor.flatten(1) for factor in self.factors]  # (R, K_d I_d) each
        others = others or [last.new_ones(self.rank, 1)]
        first = functools.reduce(lambda left, right: (left[:, :, None] * right[:, None]).flatten(1), others)
        pairs = zip(self.hidden_shape, self.visible_shape, strict=True)
        order = len(self.factors)
        product: Tensor = (first.T @ last).reshape([size for pair in pairs for size in pair])
        return product.permute(*range(0, 2 * order, 2), *range(1, 2 * order, 2))

    def mode_factors(self) -> list[Tensor] | None:
        """Return all factors, or None if any modes are in `summed_modes`."""
        return list(self.factors) if all(factor.requires_grad for factor in self.factors) else None

    @torch.no_grad()
    def center_categories(self) -> None:
        if not self.factors[-1].requires_grad:
            raise ValueError("the Kronecker coupling sums over the last mode, so W does not depend on the category")
        center(self.factors[-1], 2)

    def balance(self) -> None:
        """Rescale the learned factors of each term to equal norms."""
        equalize_norms(self._learned, keep=0)


def _around(state: Tensor, mode: int) -> tuple[int, int, int]:
    """Return the total size of the axes before a mode, the size of the mode, and the total size of the axes after it.

    `state` has shape (n, 1, m_1, ..., m_D).
    """
    return math.prod(state.shape[: mode + 2]), state.shape[mode + 2], math.prod(state.shape[mode + 3 :])
