"""Sums of Kronecker products: the paper's bilinear map, its tensor form, and all between it and the full matrix."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mvrbm.couplings.base import Chain, at_least_one, equalise_norms, same_order, squared_norms


class Kronecker(Chain):
    r"""Sum of :math:`R` Kronecker products, :math:`W = \sum_r U_1^r \otimes \dots \otimes U_D^r`.

    Rank 1 and order 2 is the paper's bilinear map, :math:`W X = U X V^\top`; rank 1 and any order its
    tensor form, :math:`W X = X \times_1 U_1 \times_2 \dots \times_D U_D`. At full rank it is the full matrix.

    Parameters
    ----------
    rank : int
        Number of products.
    summed_modes : sequence of int
        Modes that are summed over, not weighted: their factor is frozen to ones.

    Attributes
    ----------
    factors : ParameterList
        One factor a mode, `factors[d]` of shape (R, K_d, I_d). For a matrix these are `U` and `V`.
    """

    name = "kronecker"
    _subscripts = "rki"
    _bonds = ("r", "r")

    def __init__(self, rank: int = 1, *, summed_modes: Sequence[int] = ()) -> None:
        super().__init__()
        self.rank = at_least_one(rank, "Kronecker rank")
        self.summed_modes = tuple(summed_modes)

    def _allocate(self, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> None:
        order = same_order("Kronecker", visible_shape, hidden_shape)
        if any(not 0 <= mode < order for mode in self.summed_modes) or len(self.summed_modes) == order:
            raise ValueError(
                f"summed_modes must leave a mode out and lie in 0..{order - 1}, got {list(self.summed_modes)}"
            )
        self.factors = nn.ParameterList(
            nn.Parameter(
                torch.ones(self.rank, hidden_shape[mode], visible_shape[mode]),
                requires_grad=mode not in self.summed_modes,
            )
            for mode in range(order)
        )
        # Mode a goes before mode b exactly if that costs less for the pair, 1/I_a - 1/K_a < 1/I_b - 1/K_b,
        # so sorting gives the cheapest order, and its reverse is the cheapest way back.
        self._order = sorted(range(order), key=lambda d: 1 / visible_shape[d] - 1 / hidden_shape[d])

    def _factor_std(self, std: float) -> float:
        free = len(self.factors) - len(self.summed_modes)
        return float((std / math.sqrt(self.rank)) ** (1 / free))

    def gains(self) -> dict[str, Tensor]:
        """Sum over the products of the other factors' squared norms."""
        norms = torch.stack([squared_norms(factor) for factor in self.factors])  # (D, R)
        gains = {}
        for mode, factor in enumerate(self.factors):
            if factor.requires_grad:
                others = torch.cat([norms[:mode], norms[mode + 1 :]])
                gains[f"factors.{mode}"] = others.prod(0).sum()
        return gains

    def dense(self) -> Tensor:
        r"""Return the full :math:`W`, of shape (\*hidden_shape, \*visible_shape)."""
        terms = [functools.reduce(torch.kron, [factor[r] for factor in self.factors]) for r in range(self.rank)]
        return torch.stack(terms).sum(0).reshape(*self.hidden_shape, *self.visible_shape)

    def matrix_factors(self) -> tuple[Tensor, Tensor] | None:
        """Return the two factors of an order-2 coupling."""
        factors = list(self.factors)
        if len(factors) != 2 or not all(factor.requires_grad for factor in factors):
            return None
        return factors[0], factors[1]

    def balance(self) -> None:
        """Give the factors of each product equal norms: the map depends on their product alone."""
        equalise_norms([factor for factor in self.factors if factor.requires_grad], keep=0)

    def config(self) -> dict[str, Any]:
        """Return the arguments that build this coupling again."""
        return {"rank": self.rank, "summed_modes": list(self.summed_modes)}
