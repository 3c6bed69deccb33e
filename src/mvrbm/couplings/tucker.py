"""Tucker couplings: one factor per visible mode, followed by a dense core."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mvrbm.couplings.base import Coupling, equalize_norms, one_or_each, squared_norms
from mvrbm.couplings.dense import Dense
from mvrbm.couplings.kronecker import Kronecker


class Tucker(Coupling):
    r"""Weights in Tucker form: a core tensor and one factor per visible mode.

    .. math:: W_{k, i_1 .. i_D} = \sum_{r_1 .. r_D} G_{k, r_1 .. r_D} B^1_{r_1 i_1} \cdots B^D_{r_D i_D}

    The factors :math:`B^d` (:math:`R_d \times I_d`) compress each mode of the visible array. The core :math:`G` is a
    full matrix from the compressed array to the hidden layer, which can have any shape. At full rank, :math:`W` can be
    any matrix. :class:`CP` is the special case in which :math:`G_{k, r_1 .. r_D}` is zero unless all :math:`r_d` are
    equal.

    Parameters
    ----------
    rank : int or sequence of int
        Sizes :math:`R_d` of the compressed modes: either one integer for all modes or one integer per visible mode.
        Visible modes that are smaller than their rank keep their size.

    Attributes
    ----------
    compression : Kronecker
        Coupling that applies the factors. `compression.factors[d]` has shape (1, R_d, I_d).
    core : Dense
        Coupling that applies the core. `core.weight` has shape (hidden size, R_1 * ... * R_D).

    Examples
    --------
    >>> from mvrbm import Bernoulli, BoltzmannMachine, Tucker
    >>> machine = BoltzmannMachine(
    ...     Bernoulli((8, 8)), Bernoulli(10), Tucker(rank=2)
    ... )
    >>> sum(p.numel() for p in machine.links["visible"].parameters())
    72
    """

    name = "tucker"

    def __init__(self, rank: int | Sequence[int] = 2) -> None:
        super().__init__()
        self.rank = one_or_each(rank, "Tucker rank")

    def _allocate(self, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> None:
        ranks = (self.rank,) * len(visible_shape) if isinstance(self.rank, int) else self.rank
        if len(ranks) != len(visible_shape):
            raise ValueError(
                f"Tucker couplings require one rank per visible mode, got rank={list(ranks)} for shape {visible_shape}"
            )
        compressed = tuple(min(pair) for pair in zip(ranks, visible_shape, strict=True))
        self.compression, self.core = Kronecker(), Dense()
        self.compression.allocate(visible_shape, compressed)
        self.core.allocate(compressed, hidden_shape)

    def _factor_std(self, std: float) -> float:
        terms = math.prod(self.core.visible_shape)
        return float((std / math.sqrt(terms)) ** (1 / (1 + len(self.visible_shape))))

    def to_hidden(self, x: Tensor) -> Tensor:
        return self.core.to_hidden(self.compression.to_hidden(x))

    def to_visible(self, y: Tensor) -> Tensor:
        return self.compression.to_visible(self.core.to_visible(y))

    def statistics(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        factors = self.compression.statistics(x, self.core.to_visible(y))
        core = self.core.statistics(self.compression.to_hidden(x), y)
        return {f"compression.{key}": value for key, value in factors.items()} | {"core.weight": core["weight"]}

    @property
    def operations(self) -> int:
        """Number of multiplications per sample: those of the compression, plus one per entry of the core."""
        return self.compression.operations + self.core.operations

    def gains(self) -> dict[str, Tensor]:
        """Return the gain of each tensor (core or factor): the product of the other tensors' squared norms."""
        core = squared_norms(self.core.weight)
        gains = {f"compression.{key}": core * gain for key, gain in self.compression.gains().items()}
        factors = [squared_norms(factor[0]) for factor in self.compression.factors]
        return gains | {"core.weight": torch.stack(factors).prod()}

    def dense(self) -> Tensor:
        compression = self.compression.dense().reshape(self.core.weight.shape[1], -1)
        return (self.core.weight @ compression).reshape(*self.hidden_shape, *self.visible_shape)

    def contractions(self) -> list[tuple[str, Tensor]]:
        return [*self.compression.contractions(), *self.core.contractions()]

    def center_categories(self) -> None:
        self.compression.center_categories()

    def balance(self) -> None:
        """Rescale the core and all factors to equal norms, except frozen ones."""
        equalize_norms(self._learned, keep=None)
