"""CP couplings for vector-shaped hidden layers, with weights in canonical polyadic form."""

import functools
import math
import string

import torch
from torch import Tensor, nn

from mvrbm.couplings.base import Coupling, center, equalize_norms
from mvrbm.validation import whole_number


class CP(Coupling):
    r"""Weights in canonical polyadic (CP) form with rank :math:`R`, for a hidden vector.

    .. math:: W_{k, i_1 \dots i_D} = \sum_{r=1}^R A_{kr} B^1_{i_1 r} \cdots B^D_{i_D r}

    This is the weight tensor of the TvRBM (Nguyen et al. 2015).

    Parameters
    ----------
    rank : int
        Number of terms :math:`R`.

    Attributes
    ----------
    hidden_factor : Parameter
        Factor :math:`A` for the hidden layer. It has shape (K, R).
    visible_factors : ParameterList
        Factors :math:`B^d`, one per visible mode, each of shape (I_d, R).

    Examples
    --------
    >>> from mvrbm import Bernoulli, BoltzmannMachine, CP
    >>> machine = BoltzmannMachine(Bernoulli((8, 8, 3)), Bernoulli(20), CP(rank=4))
    >>> sum(p.numel() for p in machine.links["visible"].parameters())
    156
    """

    name = "cp"
    hidden_factor: nn.Parameter
    visible_factors: nn.ParameterList

    def __init__(self, rank: int = 1) -> None:
        super().__init__()
        self.rank = whole_number(rank, "CP rank")

    def _allocate(self, visible_shape: tuple[int, ...], hidden_shape: tuple[int, ...]) -> None:
        if len(hidden_shape) != 1:
            raise ValueError(
                f"CP couplings require a hidden vector, got hidden shape {hidden_shape}; "
                f"use hidden shape ({math.prod(hidden_shape)},) or a Kronecker coupling"
            )
        self.hidden_factor = nn.Parameter(torch.zeros(hidden_shape[0], self.rank))
        self.visible_factors = nn.ParameterList(nn.Parameter(torch.zeros(size, self.rank)) for size in visible_shape)

    def _factor_std(self, std: float) -> float:
        return float((std / math.sqrt(self.rank)) ** (1 / (1 + len(self.visible_factors))))

    def to_hidden(self, x: Tensor) -> Tensor:
        r"""Compute :math:`W x`: (n, \*visible_shape) -> (n, K)."""
        return self._project(x, skip=None) @ self.hidden_factor.T

    def to_visible(self, y: Tensor) -> Tensor:
        r"""Compute :math:`W^\top y`: (n, K) -> (n, \*visible_shape)."""
        modes = self._letters
        terms = ",".join(f"{mode}r" for mode in modes)
        return torch.einsum(f"nr,{terms}->n{modes}", y @ self.hidden_factor, *self.visible_factors)

    def statistics(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        weights = y @ self.hidden_factor / -len(x)  # (n, r)
        gradients = {"hidden_factor": y.T @ self._project(x, skip=None) / -len(x)}
        for mode in range(len(self.visible_factors)):
            rest = self._project(x, skip=mode)  # (n, i, r)
            gradients[f"visible_factors.{mode}"] = torch.einsum("nir,nr->ir", rest, weights)
        return gradients

    def _project(self, x: Tensor, skip: int | None) -> Tensor:
        """Contract `x` with the factors of all modes except `skip`.

        The result has shape (n, r) if `skip` is None, and (n, i, r) otherwise.
        """
        state, modes, has_rank = x, self._letters, ""
        for letter, factor in zip(self._letters, self.visible_factors, strict=True):
            if skip is None or letter != self._letters[skip]:
                left = modes.replace(letter, "")
                state = torch.einsum(f"n{modes}{has_rank},{letter}r->n{left}r", state, factor)
                modes, has_rank = left, "r"
        return state if has_rank else state.unsqueeze(-1).expand(*state.shape, self.rank)

    def contractions(self) -> list[tuple[str, Tensor]]:
        modes = self._letters
        steps = [
            (f"{modes[number:]}{'r' if number else ''},{mode}r->{modes[number + 1 :]}r", factor)
            for number, (mode, factor) in enumerate(zip(modes, self.visible_factors, strict=True))
        ]
        return [*steps, ("r,kr->k", self.hidden_factor)]

    @property
    def _letters(self) -> str:
        return string.ascii_uppercase[: len(self.visible_factors)]

    @property
    def operations(self) -> int:
        """Number of multiplications per sample.

        Each term takes one multiplication per remaining entry for each visible mode, plus one per hidden unit.
        """
        total = sum(math.prod(self.visible_shape[mode:]) for mode in range(len(self.visible_shape)))
        return self.rank * (total + self.hidden_shape[0])

    def gains(self) -> dict[str, Tensor]:
        """Return the gain of each factor: the product of the other factors' squared norms, summed over terms."""
        norms = {name: (factor**2).sum(0) for name, factor in self.named_parameters()}
        others = {name: [norms[other] for other in norms if other != name] for name in norms}
        return {name: functools.reduce(torch.mul, parts).sum() for name, parts in others.items()}

    def dense(self) -> Tensor:
        r"""Compute the full :math:`W`, of shape (K, \*visible_shape)."""
        like = self.hidden_factor  # `eye` must be created on the same device, because CUDA graphs cannot copy from CPU
        return self.to_visible(torch.eye(len(like), dtype=like.dtype, device=like.device))

    @torch.no_grad()
    def center_categories(self) -> None:
        center(self.visible_factors[-1], 0)

    def balance(self) -> None:
        """Rescale the learned factors of each term to equal norms."""
        equalize_norms(self._learned, keep=1)
