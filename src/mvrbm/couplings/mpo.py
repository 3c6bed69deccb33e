"""MPO couplings: weights represented as a matrix-product operator."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mvrbm.couplings.base import Chain, center, equalize_norms, one_or_each, same_order, squared_norms


class MPO(Chain):
    r"""Matrix-product operator: :math:`W_{k_1 \dots k_D, i_1 \dots i_D} = G_1[k_1, i_1] \cdots G_D[k_D, i_D]`.

    Each :math:`G_d[k, i]` is a matrix of shape (bond d-1, bond d). The outer bonds have size 1. With two modes, an MPO
    is a sum of Kronecker products, and the number of products is the bond size.

    Parameters
    ----------
    bond : int or sequence of int
        Sizes of the bonds between neighboring modes: either one integer for all bonds or one integer per bond.

    Attributes
    ----------
    factors : ParameterList
        One core per mode. `factors[d]` has shape (bond d-1, K_d, I_d, bond d).

    Examples
    --------
    >>> from mvrbm import Bernoulli, BoltzmannMachine, MPO
    >>> machine = BoltzmannMachine(
    ...     Bernoulli((8, 8, 3)), Bernoulli((5, 5, 2)), MPO(bond=2)
    ... )
    >>> sum(p.numel() for p in machine.links["visible"].parameters())
    252
    """

    name = "mpo"
    _subscripts = "bkic"

    def __init__(self, bond: int | Sequence[int] = 2) -> None:
        super().__init__()
        self.bond = one_or_each(bond, "MPO bond")

    def _allocate(self, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> None:
        order = same_order("MPO", visible_shape, hidden_shape)
        inner = (self.bond,) * (order - 1) if isinstance(self.bond, int) else self.bond
        if len(inner) != order - 1:
            raise ValueError(
                f"an MPO coupling of order {order} requires {order - 1} bond sizes, got bond={list(inner)}"
            )
        widths = (1, *inner, 1)
        self.factors = nn.ParameterList(
            nn.Parameter(torch.zeros(widths[d], hidden_shape[d], visible_shape[d], widths[d + 1])) for d in range(order)
        )
        ways = [(list(range(order)), ("b", "c")), (list(range(order))[::-1], ("c", "b"))]
        self._order, self._bonds = min(ways, key=lambda way: self._count(way[0], visible_shape, hidden_shape))

    def _factor_std(self, std: float) -> float:
        paths = math.prod(factor.shape[0] for factor in self.factors)
        return float((std / math.sqrt(paths)) ** (1 / len(self.factors)))

    def gains(self) -> dict[str, Tensor]:
        """Return the gain of each core, computed from the norms of the cores to its left and right."""
        # Norms multiply along a path of bonds and add where paths meet. The sum is then squared.
        norms = [squared_norms(core.permute(0, 3, 1, 2)).sqrt() for core in self.factors]  # (bond, bond) each
        gains = {}
        for mode in range(len(norms)):
            left = functools.reduce(torch.matmul, norms[:mode], norms[0].new_ones(1, 1))
            right = functools.reduce(lambda after, norm: norm @ after, norms[:mode:-1], norms[0].new_ones(1, 1))
            gains[f"factors.{mode}"] = (left**2).sum() * (right**2).sum()
        return gains

    def dense(self) -> Tensor:
        order = len(self.factors)
        product: Tensor = self.factors[0][0]  # (k_1, i_1, bond)
        for core in list(self.factors)[1:]:
            product = torch.tensordot(product, core, dims=1)  # (.., k_d, i_d, bond)
        product = product.squeeze(-1)
        return product.permute(*range(0, 2 * order, 2), *range(1, 2 * order, 2))

    @torch.no_grad()
    def center_categories(self) -> None:
        center(self.factors[-1], 2)

    def balance(self) -> None:
        """Rescale all learned cores to equal norms."""
        equalize_norms(self._learned, keep=None)
