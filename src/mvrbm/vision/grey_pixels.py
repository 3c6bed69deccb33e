r"""The distribution of grey pixels given their mean, and its maximum-likelihood fit.

Bernoulli units that were trained on grey data predict the mean :math:`\mu` of a pixel, but not how it is distributed
around this mean. :class:`GreyPixels` supplies that: how often pixels are exactly black or white, and how the others
spread. :func:`fit_grey_pixels` estimates it, together with the level of the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["BIN_MEANS", "GREYS", "LOGITS", "GreyPixels", "count_by_mean", "fit_grey_pixels"]

#: Means are counted in bins that are equally spaced in their log-odds, from -LOGITS to LOGITS.
LOGITS = 12.0
_BINS = 129
BIN_MEANS = torch.sigmoid(torch.linspace(-LOGITS, LOGITS, _BINS, dtype=torch.float64))  # (bins,)

#: The grey levels of which probabilities are tabulated.
GREYS = torch.linspace(0, 1, 65, dtype=torch.float64)  # (levels,)


class GreyPixels:
    r"""Distribution of pixels of mean :math:`\mu`: black, white, or grey with a beta distribution.

    .. math:: p(0 \mid \mu) = a_0 (1 - \mu)^{k_0}, \qquad p(1 \mid \mu) = a_1 \mu^{k_1},
              \qquad 0 < a \le 1,\ k \ge 1.

    This leaves room for grey pixels, whose mean makes :math:`E[x \mid \mu] = \mu`. With :math:`a = k = 1` pixels are
    binary. With :math:`a = 1` and whole :math:`k` a grey value is like the mean of :math:`k` binary draws.

    Parameters
    ----------
    parameters : (a_0, k_0, a_1, k_1)
        Numbers, or tensors of one number while they are being fitted.
    concentration : float, optional
        Concentration of the beta distribution. Only :meth:`levels` needs it.
    """

    # Centre of the weak prior of the fit; in images of digits few pixels are exactly 255.
    usual = (0.95, 3.0, 0.3, 2.0)
    usual_concentration = 1.5

    def __init__(self, parameters: Sequence[Any] = usual, concentration: Any = None) -> None:
        self.parameters = tuple(parameters)
        self.concentration = concentration

    def ends(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities of black and of white, each of the shape of the means."""
        black, black_power, white, white_power = self.parameters
        return black * (1 - mean) ** black_power, white * mean**white_power

    def levels(self, mean: Tensor) -> Tensor:
        """Return the probability of each of the grey levels: (bins,) -> (bins, levels)."""
        black, white = self.ends(mean)
        rest = (1 - black - white).clamp(min=1e-12)
        centre = ((mean - white) / rest).clamp(1e-6, 1 - 1e-6)[:, None]
        inner = GREYS[1:-1]
        up, down = centre * self.concentration - 1, (1 - centre) * self.concentration - 1
        beta = torch.softmax(up * inner.log() + down * torch.log1p(-inner), 1)
        return torch.cat([black[:, None], rest[:, None] * beta, white[:, None]], 1)


def count_by_mean(mean: Tensor, column: Tensor, n_columns: int) -> Tensor:
    """Count pixels by the bin of their mean and by a column number: two tensors of one shape -> (bins, n_columns)."""
    logit = torch.logit(mean, eps=1e-7)
    row = ((logit + LOGITS) / (2 * LOGITS) * (_BINS - 1)).round().long().clamp(0, _BINS - 1)
    counts = torch.bincount((row * n_columns + column).reshape(-1), minlength=_BINS * n_columns)
    return counts.cpu().double().reshape(_BINS, n_columns)


def fit_grey_pixels(
    log_likelihood: Callable[[GreyPixels, Any], Tensor],
    level: float,
    known: bool,
    bounds: tuple[float, float],
    *,
    spread: bool = False,
    usual_level: float | None = None,
) -> tuple[GreyPixels, float]:
    """Return the most probable distribution and, unless it is known, level of the noise.

    Parameters
    ----------
    log_likelihood : callable
        From a distribution and a level to a scalar.
    level : float
        Level of the noise, or where its estimate starts.
    known : bool
        Whether the level is known.
    bounds : (float, float)
        Bounds of the level.
    spread : bool
        Whether to fit the concentration too.
    usual_level : float, optional
        Centre of the prior of the level; default: no prior. The other centres are those of :class:`GreyPixels`; in
        their logarithms, which are fitted, all priors are normal with standard deviation 1, as weak as a few pixels.
    """
    from scipy.optimize import minimize

    usual = [*GreyPixels.usual, *([GreyPixels.usual_concentration] if spread else [])]
    # Not from the last result: that of a first round may lie at a bound, from which convergence is slow.
    start = [*usual, *([] if known else [level])]
    limits = [(1e-3, 1), (1, 30), (1e-4, 1), (1, 30), *([(0.2, 50)] if spread else []), *([] if known else [bounds])]
    usual += [] if known or usual_level is None else [usual_level]
    centre = torch.tensor(usual, dtype=torch.float64).log()

    def parts(values: Sequence[Any]) -> tuple[GreyPixels, Any]:
        return GreyPixels(values[:4], values[4] if spread else None), level if known else values[-1]

    def cost(logs: NDArray[Any]) -> tuple[float, NDArray[Any]]:
        with torch.enable_grad():
            free = torch.tensor(logs, dtype=torch.float64, requires_grad=True)
            prior = 0.5 * ((free[: len(centre)] - centre) ** 2).sum()
            total = -log_likelihood(*parts(free.exp().unbind())) + prior
            total.backward()
        assert free.grad is not None
        return float(total.detach()), free.grad.numpy()

    low, high = np.log(np.array(limits)).T
    first = np.clip(np.log(start), low, high)
    found = minimize(cost, first, jac=True, bounds=list(zip(low, high, strict=True)), method="L-BFGS-B")
    return parts([float(value) for value in np.exp(found.x)])
