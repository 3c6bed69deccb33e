"""Dense couplings: a full weight matrix."""

import math

import torch
from torch import Tensor, nn

from mvrbm.couplings.base import Coupling, center


class Dense(Coupling):
    r"""Full weight matrix, as in the classic RBM.

    .. math:: \langle y, W x\rangle = \mathrm{vec}(y)^\top W \mathrm{vec}(x)

    Examples
    --------
    >>> from mvrbm import Bernoulli, BoltzmannMachine, Dense
    >>> machine = BoltzmannMachine(
    ...     Bernoulli((28, 28)), Bernoulli((25, 25)), Dense()
    ... )
    >>> sum(p.numel() for p in machine.links["visible"].parameters())
    490000

    References
    ----------
    Qi, Sun, Gao, Hu and Li, "Matrix Variate RBM and Its Applications", 2016, equation (1).
    """

    name = "dense"
    is_full = True
    weight: nn.Parameter  # (prod K, prod I)

    def _allocate(self, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> None:
        self.weight = nn.Parameter(torch.zeros(math.prod(hidden_shape), math.prod(visible_shape)))

    def _factor_std(self, std: float) -> float:
        return std

    def to_hidden(self, x: Tensor) -> Tensor:
        return (x.flatten(1) @ self.weight.T).reshape(-1, *self.hidden_shape)

    def to_visible(self, y: Tensor) -> Tensor:
        return (y.flatten(1) @ self.weight).reshape(-1, *self.visible_shape)

    def statistics(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        r"""Compute the gradient with respect to the weights, which is the negative batch mean of :math:`y x^\top`."""
        return {"weight": (y.flatten(1) / -len(x)).T @ x.flatten(1)}

    @property
    def operations(self) -> int:
        """Number of multiplications per sample, one per weight."""
        return self.weight.numel()

    def gains(self) -> dict[str, Tensor]:
        """Return a gain of 1, because the parameter is `W` itself."""
        return {"weight": self.weight.new_ones(())}

    @torch.no_grad()
    def center_categories(self) -> None:
        center(self.weight.view(len(self.weight), *self.visible_shape), -1)

    def mode_factors(self) -> list[Tensor] | None:
        return [self.weight[None]] if self.weight.requires_grad else None

    def dense(self) -> Tensor:
        return self.weight.reshape(*self.hidden_shape, *self.visible_shape)
