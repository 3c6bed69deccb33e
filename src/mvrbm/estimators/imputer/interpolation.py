r"""Linear interpolation of residuals along one axis of a sample.

It is the limit of correlated residuals that change slowly and have no noise, without an estimated covariance. A few
long series, whose covariance cannot be estimated well, are filled in best by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.random import RandomSource

# Minimum and maximum of the mean squared difference between neighbors, as a fraction of the variance.
_LEAST_STEP = 1e-6
_LARGEST_STEP = 1.0


@dataclass(frozen=True)
class Interpolation:
    r"""Residuals with variance :math:`s^2` and correlation :math:`(1 - \delta / 2)^d` at a distance d along one axis.

    Parameters
    ----------
    shape : tuple of int
        Shape of a sample.
    axis : int
        The axis, counted from 0.
    step : float
        Mean squared difference between neighbors :math:`\delta`, as a fraction of the variance.
    scale : Tensor of shape (D,)
        Standard deviations :math:`s` of the residuals.
    """

    shape: tuple[int, ...]
    axis: int
    step: float
    scale: Tensor

    @classmethod
    def fit(cls, factors: Factors, x: Tensor, known: Tensor, shape: Sequence[int], axis: int) -> Interpolation:
        """Estimate the mean squared difference between neighbors from the residuals of the known entries."""
        scale = torch.sqrt(factors.noise)
        found = cls(tuple(shape), axis, 1.0, scale)
        residuals, mask = found._rows((x - factors.mean) / scale), found._rows(known)
        both = mask[:, 1:] & mask[:, :-1]
        squares = torch.where(both, residuals.diff(dim=1) ** 2, 0.0)
        step = float(squares.sum() / both.sum().clamp(min=1))
        return cls(tuple(shape), axis, min(max(step, _LEAST_STEP), _LARGEST_STEP), scale)

    def to(self, device: torch.device) -> Interpolation:
        """Return a copy on the given device."""
        return Interpolation(self.shape, self.axis, self.step, self.scale.to(device))

    def conditional_mean(self, residuals: Tensor, known: Tensor) -> Tensor:
        """Return interpolated residuals, and the nearest ones outside the known entries, of shape (n, D).

        Rows without known entries are 0. Known entries do not change.
        """
        values = self._rows(residuals / self.scale)
        before, after, left, right = self._neighbors(known)
        first = torch.where(before.isinf(), values.gather(1, right), values.gather(1, left))
        last = torch.where(after.isinf(), first, values.gather(1, right))
        share = torch.where(after.isinf() | before.isinf(), 0.0, before / (before + after).clamp(min=1))
        found = torch.where(before.isinf() & after.isinf(), 0.0, first + share * (last - first))
        return self.scale * self._flat(found)

    def unexplained(self, known: Tensor) -> Tensor:
        """Return the fraction of the variance of each residual that its neighbors do not explain, of shape (n, D)."""
        before, after, _, _ = self._neighbors(known)
        distance = 1 / (1 / before + 1 / after)  # infinite without known entries
        return self._flat((self.step * distance).clamp(min=_LEAST_STEP, max=1))

    def draw(self, n: int, rng: RandomSource) -> Tensor:
        """Draw residuals of `n` samples, of shape (n, D)."""
        noise = self._rows(rng.normal((n, len(self.scale)), self.scale))
        correlation = 1 - self.step / 2
        series = [noise[:, 0]]
        for value in noise[:, 1:].unbind(1):
            series.append(correlation * series[-1] + (1 - correlation**2) ** 0.5 * value)
        return self.scale * self._flat(torch.stack(series, 1))

    def _neighbors(self, known: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return distances to the previous and next known entry, which may be infinite, and their positions."""
        mask = self._rows(known)
        size = mask.shape[1]
        positions = torch.arange(size, device=known.device).expand(mask.shape)
        left = torch.where(mask, positions, -1).cummax(1).values
        right = torch.where(mask, positions, size).flip(1).cummin(1).values.flip(1)
        like = self.scale
        before = torch.where(left < 0, torch.inf, (positions - left).to(like))
        after = torch.where(right == size, torch.inf, (right - positions).to(like))
        return before, after, left.clamp(min=0), right.clamp(max=size - 1)

    def _rows(self, x: Tensor) -> Tensor:
        """Rearrange samples of shape (n, D) to rows along the axis."""
        return x.reshape(-1, *self.shape).movedim(self.axis + 1, -1).reshape(-1, self.shape[self.axis])

    def _flat(self, rows: Tensor) -> Tensor:
        """Rearrange rows along the axis to samples of shape (n, D)."""
        others = [size for axis, size in enumerate(self.shape) if axis != self.axis]
        arrays = rows.reshape(-1, *others, self.shape[self.axis])
        return arrays.movedim(-1, self.axis + 1).reshape(len(arrays), -1)
