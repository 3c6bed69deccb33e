"""Select the number of factors, the sample axes and the noise level of the imputer's linear model.

The selected model has the smallest error on held-out entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mvrbm.estimators.imputer.factors import Factors, fit_factors
from mvrbm.estimators.imputer.masking import Samples
from mvrbm.validation import whole_number

# Maximum number of factors for data with missing entries, which requires solving a linear system for each sample.
_MOST_FACTORS = 128
# Maximum number of factors for complete data.
_MOST_FACTORS_COMPLETE = 256
# Maximum number of EM steps for each number of factors. EM starts from the factors of the previous, smaller model.
_STEPS = 15
# A model with more factors or larger samples is selected only if its error is below this multiple of the smallest error
# so far.
_BETTER = 0.995
# Multiples of the learned noise variances to try. With few samples, the factors overfit.
_NOISES = (1.0, 2.0, 4.0)
# Maximum number of samples used to fit factors to data with missing entries.
_MOST_FITTED = 10_000
# If at least this fraction of the samples is complete, factors are fitted only to complete samples, which is faster.
_MOSTLY_COMPLETE = 0.8

#: Function that is called with a description and the error of each model that is tried.
Report = Callable[[str, float], None]


class LinearChoice(NamedTuple):
    """Linear model with the smallest error on held-out entries."""

    error: float
    factors: Factors  # fitted to the entries that are not held out
    sample_axes: int  # number of leading axes that index the samples
    noise: float  # multiple of the learned noise variances


def choose_factors(
    samples: Samples,
    weights: Tensor,
    shape: tuple[int, ...],
    sample_axes: int | str,
    n_factors: int | None,
    report: Report,
) -> LinearChoice:
    """Return the linear model that predicts held-out entries best.

    Parameters
    ----------
    samples : Samples
        Data. The first axis indexes the samples.
    weights : Tensor
        Weights of the squared errors, either a scalar or one weight per entry.
    shape : tuple of int
        Shape of the data along all axes except the first.
    sample_axes : int or "auto"
        Number of leading axes that index the samples. ``"auto"`` uses 1, or selects the number with the smallest error
        if there are fewer samples than entries per sample.
    n_factors : int, optional
        Number of factors. If None, the number is selected from the powers of two.
    report : callable
        Function that is called with a description and the error of each model that is tried.
    """
    complete = bool(samples.known.all())
    best: LinearChoice | None = None
    for axes in _sample_axes_to_try(sample_axes, shape, len(samples.x)):
        cut = samples.reshape(math.prod(shape[axes - 1 :]))
        tested = cut.with_held_entries()
        factors = None
        errors = [math.inf, math.inf]
        for count in _factor_counts_to_try(n_factors, *cut.x.shape, complete=complete):
            factors = fit_to_shown(cut.x, cut.shown, count, factors)
            error, noise = best_noise(factors, tested, weights)
            report(f"sample_axes={axes}, n_factors={count}", error)
            if best is None or error < _BETTER * best.error:
                best = LinearChoice(error, factors, axes, noise)
            # Stop when doubling the number of factors twice has not reduced the error.
            if error > _BETTER * errors[-2]:
                break
            errors.append(error)
    assert best is not None
    return best


def _sample_axes_to_try(sample_axes: int | str, shape: tuple[int, ...], n: int) -> list[int]:
    order = len(shape)
    if sample_axes != "auto":
        axes = whole_number(sample_axes, "sample_axes")
        if axes > order:
            raise ValueError(f"sample_axes must be at most {order} for data with {order + 1} axes, got {axes}")
        return [axes]
    if order > 1 and n < math.prod(shape):
        return list(range(order, 0, -1))  # start with the smallest and most numerous samples
    return [1]


def _factor_counts_to_try(n_factors: int | None, n: int, size: int, *, complete: bool) -> list[int]:
    if n_factors is not None:
        return [n_factors]
    most = max(1, min(n - 1, size - 1, _MOST_FACTORS_COMPLETE if complete else _MOST_FACTORS))
    return [2**power for power in range(most.bit_length())]


def fit_to_shown(x: Tensor, shown: Tensor, n_factors: int, start: Factors | None) -> Factors:
    """Fit a factor model to the shown entries and return the model.

    If at least 80% of the samples, or at least 10,000 samples, are complete, incomplete samples are ignored. Otherwise,
    at most 10,000 evenly spaced samples are used.
    """
    complete = shown.all(1)
    n_complete = int(complete.sum())
    if len(x) > n_complete >= min(_MOST_FITTED, _MOSTLY_COMPLETE * len(x)):
        x = x[complete]
        shown = shown[complete]
    elif len(x) > _MOST_FITTED and n_complete < len(x):
        rows = torch.linspace(0, len(x) - 1, _MOST_FITTED).long()
        x = x[rows]
        shown = shown[rows]
    return fit_factors(x, shown, n_factors, _STEPS, start)


def best_noise(factors: Factors, tested: Samples, weights: Tensor) -> tuple[float, float]:
    """Return the smallest error on held-out entries and the multiple of the noise variances that achieves it."""
    if not len(tested.x):
        return 0.0, 1.0
    results = []
    for multiple in _NOISES:
        mean = factors.with_noise(multiple).conditional_mean(tested.x, tested.shown)
        results.append((weighted_error(mean, tested, weights), multiple))
    return min(results)


def entry_weights(x: Tensor, known: Tensor, *, per_entry: bool) -> Tensor:
    """Return weights for squared errors.

    If `per_entry` is True, the weights are the inverse variances of the entries. Otherwise, the single weight is the
    inverse of the mean variance.
    """
    count = known.sum(0).clamp(min=1)
    mean = (x * known).sum(0) / count
    variance = ((x - mean) ** 2 * known).sum(0) / count
    if not per_entry:
        variance = variance.mean()
    return torch.where(variance > 0, 1 / variance, 0.0)


def weighted_error(predicted: Tensor, samples: Samples, weights: Tensor) -> float:
    """Return the weighted root mean squared error of predictions for held-out entries."""
    squares = (predicted - samples.x) ** 2 * weights * samples.held
    return math.sqrt(float(squares.sum() / samples.held.sum().clamp(min=1)))
