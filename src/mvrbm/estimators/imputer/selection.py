"""Select the number of factors, the sample axes and the noise level of the imputer's linear model.

The selected model has the smallest error on held-out entries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mvrbm.estimators.imputer import separable_covariance, shrunk_covariance
from mvrbm.estimators.imputer.conditional_normal import Normal
from mvrbm.estimators.imputer.factor_analysis import Factors, fit_factors
from mvrbm.estimators.imputer.interpolation import Interpolation
from mvrbm.estimators.imputer.linear_model import Linear
from mvrbm.estimators.imputer.masking import FEW_SAMPLES, Samples
from mvrbm.estimators.imputer.residual_covariance import NOISE, Residuals, structures_of_axis
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
_NOISES = (1.0, 4.0, 16.0)
# With correlated residuals, the multiple is increased by this factor for as long as this reduces the error, up to the
# maximum. The noise then stands for everything that is not common to all samples.
_NOISE_STEP = 8.0
_MOST_NOISE = 512.0
# Variances of the noise of correlated residuals to try.
_RESIDUAL_NOISES = (0.01, 0.03, 0.3)
#: A model is accepted only if it reduces the error by more than this multiple of the standard error of the difference.
SURE = 1.0
# Maximum number of samples with held-out entries used to choose the structure of residuals.
_FEW_TESTED = 100
# Number of parts of a few arrays whose errors are compared, because there are too few arrays to compare theirs.
_PARTS = 50
# Maximum number of EM steps for a shrunk covariance. Each must reduce the error to this multiple of the former error.
_SHRUNK_STEPS = 8
_BETTER_STEP = 0.998
# Maximum number of samples used to fit factors to data with missing entries.
_MOST_FITTED = 10_000
# If at least this fraction of the samples is complete, factors are fitted only to complete samples, which is faster.
_MOSTLY_COMPLETE = 0.8

#: Function that is called with a description and the error of each model that is tried.
Report = Callable[[str, float], None]


@dataclass(frozen=True)
class LinearChoice:
    """Linear model with the smallest error on held-out entries, fitted to the entries that are not held out."""

    linear: Linear
    noise: float  # multiple of the learned noise variances
    sample_axes: int  # number of leading axes that index the samples
    shape: tuple[int, ...]  # shape of a sample
    structures: tuple[str, ...]  # structure of the residual covariance of each axis of a sample
    errors: Tensor  # sums of weighted squared errors on held-out entries, per sample or part of the samples
    error: float
    has_one_mean: bool = False  # whether the factors are `Factors.of_one_mean`
    is_separable: bool = False  # whether the model was fitted by `fit_separable`
    prior: shrunk_covariance.Prior | None = None  # prior of the covariance, if the model was fitted by `fit_shrunk`

    def refit(self, x: Tensor, known: Tensor) -> Linear:
        """Return the same model, fitted to the known entries of samples of shape (n, D)."""
        if self.is_separable:
            return Linear(separable_covariance.fit_separable(x, known, self.shape))
        if self.prior is not None:
            return Linear(shrunk_covariance.fit_shrunk(x, known, self.shape, self.prior))
        start, residuals = self.linear.factors.with_noise(1 / self.noise), self.linear.residuals
        if self.has_one_mean:
            factors = Factors.of_one_mean(x, known)
        else:
            factors = fit_to_shown(x, known, start.loadings.shape[1], start).with_noise(self.noise)
        if isinstance(residuals, Interpolation):
            residuals = Interpolation.fit(factors, x, known, self.shape, residuals.axis)
        elif residuals is not None:
            residuals = Residuals.fit(factors, x, known, self.shape, self.structures, residuals.noise)
        return Linear(factors, residuals)


def choose_linear(
    samples: Samples,
    weights: Tensor,
    shape: tuple[int, ...],
    sample_axes: int | str,
    n_factors: int | None,
    report: Report,
) -> LinearChoice:
    """Return the linear model that predicts held-out entries best.

    Correlated residuals and a separable covariance are used only if they reduce the error by more than chance.

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
    tried = []
    for axes in _sample_axes_to_try(sample_axes, shape, len(samples.x)):
        trials = Trials(samples, weights, shape, axes, n_factors, report)
        tried.append((trials, *trials.run()))
    simple = functools.reduce(_smaller, (found for _, found, _ in tried))
    others = [found for _, _, found in tried if found is not None]
    if n_factors is None:
        smooth = [found for trials, *_ in tried if (found := trials.try_one_mean()) is not None]
        # Larger models are tried with the best choice of axes only.
        trials, *_ = min(tried, key=lambda each: min(choice.error for choice in each[1:] if choice is not None))
        others += [found for found in (trials.try_separable(), trials.try_shrunk()) if found is not None]
        if smooth:
            # A model without factors has few parameters, so it is preferred.
            simple = _surely_best([min(smooth, key=_error)], default=simple)
    return _surely_best(others, default=simple)


def _surely_best(choices: Sequence[LinearChoice], default: LinearChoice) -> LinearChoice:
    """Return the choice with the smallest error that is smaller than that of the default by more than chance."""
    better = (found for found in choices if surely_smaller(found.errors, default.errors))
    return min(better, key=_error, default=default)


def _smaller(best: LinearChoice, found: LinearChoice) -> LinearChoice:
    """Return the choice with the smaller error, but the first one if the difference is small."""
    return found if found.error < _BETTER * best.error else best


def surely_smaller(errors: Tensor, others: Tensor, *, both: bool = False, sure: float = SURE) -> bool:
    """Return whether the mean of `errors` is smaller than the mean of `others` by more than chance.

    Both contain one error per sample.

    The mean difference, or the mean relative difference, must exceed `sure` times its standard error. The relative
    difference has less noise if some samples have much larger errors than other samples. If `both` is True, both
    differences must do so, so that a gain in a few samples is not sufficient.
    """
    differences = (others - errors).double()
    relative = differences / (others + errors).double().clamp(min=torch.finfo(others.dtype).tiny)
    n = len(differences)
    if n < 2 or not float(differences.mean()) > 0:
        return False
    enough = (float(each.mean()) > sure * float(each.std()) / math.sqrt(n) for each in (differences, relative))
    return all(enough) if both else any(enough)


class Trials:
    """Comparison of linear models for one choice of the axes that index samples."""

    def __init__(
        self,
        samples: Samples,
        weights: Tensor,
        shape: tuple[int, ...],
        axes: int,
        n_factors: int | None,
        report: Report,
    ) -> None:
        self.axes = axes
        self.shape = shape[axes - 1 :]
        size = math.prod(self.shape)
        self.samples = samples.reshape(size)
        self.weights = weights
        held = samples.with_held_entries()
        self.n_tested = len(held.x)
        self.n_cuts = math.prod(shape[: axes - 1])  # samples per entry of the first axis
        self.tested = held.reshape(size)
        self.is_table = len(shape) == 1  # the order of columns has no meaning
        self.in_parts = not self.is_table and len(samples.x) < FEW_SAMPLES
        self.n_factors = n_factors
        self.report = report
        self.independent = ("independent",) * len(self.shape)
        # Structure of the covariances of the axes, which `run` selects.
        self.structures = self.independent

    def run(self) -> tuple[LinearChoice, LinearChoice | None]:
        """Return the best model with independent residuals, and the best model with correlated residuals."""
        factors: Factors | None = None
        multiple = 1.0
        simple, correlated = _Sequence(), _Sequence()
        complete = bool(self.samples.known.all())
        for count in _factor_counts_to_try(self.n_factors, *self.samples.x.shape, complete=complete):
            factors = fit_to_shown(self.samples.x, self.samples.shown, count, factors)
            description = f"sample_axes={self.axes}, n_factors={count}"
            if simple.improves:
                found = self.with_best_noise(factors)
                self.report(description, found.error)
                simple.add(found)
            if simple.count == 1:
                self.structures = self._structures(factors)
            if correlated.improves and self.structures != self.independent:
                found = self._correlated(factors, self.structures, multiple)
                multiple = found.noise
                self.report(f"{description}, correlated residuals", found.error)
                correlated.add(found)
            if not simple.improves and not (correlated.improves and correlated.best):
                break
        assert simple.best is not None
        if correlated.best is not None:
            best = correlated.best
            assert isinstance(best.linear.residuals, Residuals)
            residuals = best.linear.residuals
            others = (replace(best.linear, residuals=residuals.with_noise(noise)) for noise in _RESIDUAL_NOISES)
            correlated.best = min(
                [best, *(self._choice(linear, self.structures, best.noise) for linear in others)], key=_error
            )
        return simple.best, correlated.best

    def try_one_mean(self) -> LinearChoice | None:
        """Return the best model with interpolated or correlated residuals and without factors.

        All entries have the same mean, because means that are estimated from few samples are not smooth.
        """
        axes = [axis for axis, size in enumerate(self.shape) if structures_of_axis(size)]
        if self.is_table or not len(self.tested.x) or not axes:
            return None
        factors = Factors.of_one_mean(self.samples.x, self.samples.shown)
        interpolated = [
            self._choice(
                Linear(factors, Interpolation.fit(factors, self.samples.x, self.samples.shown, self.shape, axis)),
                self.independent,
            )
            for axis in axes
        ]
        correlated = []
        structures = self._structures(factors)
        if structures != self.independent:
            residuals = self._residuals(factors, structures, NOISE)
            correlated = [
                self._choice(Linear(factors, residuals.with_noise(noise)), structures)
                for noise in (NOISE, *_RESIDUAL_NOISES)
            ]
        found = _surely_best(correlated, default=min(interpolated, key=_error))
        what = "interpolation" if isinstance(found.linear.residuals, Interpolation) else "correlated residuals"
        self.report(f"sample_axes={self.axes}, no factors, {what}", found.error)
        return replace(found, has_one_mean=True)

    def try_separable(self) -> LinearChoice | None:
        """Return the model with a covariance that is diagonal in a separable basis, if it is applicable."""
        if not separable_covariance.is_applicable(len(self.samples.x), self.shape):
            return None
        factors = separable_covariance.fit_separable(self.samples.x, self.samples.shown, self.shape)
        found = replace(self._choice(Linear(factors), self.independent), is_separable=True)
        self.report(f"sample_axes={self.axes}, separable covariance", found.error)
        return found

    def try_shrunk(self) -> LinearChoice | None:
        """Return the model with a covariance that is shrunk to a separable one, if it is fast enough.

        EM ends when the error on held-out entries does not decrease any more. The weight of the prior is chosen again
        after each step, among the neighbors of the former weight.
        """
        shown = self.samples.shown
        if not len(self.tested.x) or not shrunk_covariance.is_applicable(shown):
            return None
        noises = shrunk_covariance.NOISES if self.structures != self.independent else shrunk_covariance.NOISES[:1]
        best: tuple[float, shrunk_covariance.ShrunkCovariance, shrunk_covariance.Prior] | None = None
        for noise in noises:
            prior = shrunk_covariance.Prior(self.structures, noise, 1.0, 0)
            fitted = shrunk_covariance.ShrunkCovariance(self.samples.x, shown, self.shape, prior)
            error, weight = self._best_weight(fitted, shrunk_covariance.WEIGHTS)
            if best is None or error < best[0]:
                best = error, fitted, replace(prior, weight=weight)
        assert best is not None
        error, fitted, prior = best
        for _ in range(0 if bool(shown.all()) else _SHRUNK_STEPS):
            before = error
            fitted.step(prior.weight)
            place = shrunk_covariance.WEIGHTS.index(prior.weight)
            error, weight = self._best_weight(fitted, shrunk_covariance.WEIGHTS[max(place - 1, 0) : place + 2])
            prior = replace(prior, weight=weight, n_steps=prior.n_steps + 1)
            if error > _BETTER_STEP * before:
                break
        found = replace(self._choice(Linear(fitted.factors(prior.weight)), self.structures), prior=prior)
        self.report(f"sample_axes={self.axes}, shrunk covariance", found.error)
        return found

    def _best_weight(self, fitted: shrunk_covariance.ShrunkCovariance, weights: Sequence[float]) -> tuple[float, float]:
        """Return the smallest error, and the weight of the prior with this error."""
        return min((self._errors(fitted.normal(weight))[1], weight) for weight in weights)

    def with_best_noise(self, factors: Factors) -> LinearChoice:
        """Return the factor model with the multiple of its noise variances that predicts held-out entries best."""
        noises = _NOISES if len(self.tested.x) else _NOISES[:1]
        trials = [self._choice(Linear(factors.with_noise(noise)), self.independent, noise) for noise in noises]
        return min(trials, key=_error)

    def _correlated(self, factors: Factors, structures: tuple[str, ...], multiple: float) -> LinearChoice:
        """Return a model with correlated residuals, with at least the given multiple of the noise variances."""
        best: LinearChoice | None = None
        while multiple <= _MOST_NOISE:
            noisy = factors.with_noise(multiple)
            found = self._choice(Linear(noisy, self._residuals(noisy, structures, NOISE)), structures, multiple)
            if best is not None and found.error >= best.error:
                break
            best = found
            multiple *= _NOISE_STEP
        assert best is not None
        return best

    def _choice(self, linear: Linear, structures: tuple[str, ...], noise: float = 1.0) -> LinearChoice:
        squares, error = self._errors(linear)
        return LinearChoice(linear, noise, self.axes, self.shape, structures, squares, error)

    def _errors(self, model: Linear | Normal) -> tuple[Tensor, float]:
        """Return sums of weighted squared errors on held-out entries, and the root of their mean.

        There is one sum per sample along the first axis, or per part of all samples if there are few samples.
        """
        tested = self.tested
        predicted = model.conditional_mean(tested.x, tested.shown) if len(tested.x) else tested.x
        squares = squared_errors(predicted, tested, self.weights)
        if self.in_parts:
            parts = zip(squares.flatten().tensor_split(_PARTS), tested.held.flatten().tensor_split(_PARTS), strict=True)
            squares = torch.stack([part.sum() for part, held in parts if bool(held.any())] or [squares.sum()])
        else:
            squares = squares.sum(1).reshape(self.n_tested, self.n_cuts).sum(1)
        return squares, math.sqrt(float(squares.sum() / tested.held.sum().clamp(min=1)))

    def _residuals(self, factors: Factors, structures: Sequence[str], noise: float) -> Residuals:
        return Residuals.fit(factors, self.samples.x, self.samples.shown, self.shape, structures, noise)

    def _structures(self, factors: Factors) -> tuple[str, ...]:
        """Return structures of the axes that reduce the error. Axes are added for as long as the error decreases."""
        few = copy(self)
        few.n_tested = min(self.n_tested, _FEW_TESTED)
        few.tested = self.tested.first(few.n_tested * self.n_cuts)
        chosen = self.independent
        best = few._choice(Linear(factors), chosen)
        while True:
            options = [
                (*chosen[:axis], structure, *chosen[axis + 1 :])
                for axis, size in enumerate(self.shape)
                if chosen[axis] == "independent"
                for structure in structures_of_axis(size)
            ]
            trials = [few._choice(Linear(factors, self._residuals(factors, each, NOISE)), each) for each in options]
            found = min(trials, key=_error, default=best)
            if not surely_smaller(found.errors, best.errors):
                return chosen
            best, chosen = found, found.structures


class _Sequence:
    """Models with increasing numbers of factors. The sequence ends when two successive doublings do not help."""

    def __init__(self) -> None:
        self.best: LinearChoice | None = None
        self.errors = [math.inf, math.inf]
        self.improves = True
        self.count = 0

    def add(self, found: LinearChoice) -> None:
        self.best = found if self.best is None else _smaller(self.best, found)
        self.count += 1
        self.improves = found.error <= _BETTER * self.errors[-2]
        if self.improves:
            self.errors.append(found.error)


def _error(choice: LinearChoice) -> float:
    return choice.error


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


def entry_weights(x: Tensor, known: Tensor, *, per_entry: bool) -> Tensor:
    """Return weights for squared errors.

    If `per_entry` is True, the weights are the inverse variances of the entries. Otherwise, the single weight is the
    inverse of the mean variance, or of the variance around the mean of all entries if there are few samples.
    """
    if not per_entry and len(x) < FEW_SAMPLES:
        x, known = x.reshape(-1, 1), known.reshape(-1, 1)
    count = known.sum(0).clamp(min=1)
    mean = (x * known).sum(0) / count
    variance = ((x - mean) ** 2 * known).sum(0) / count
    if not per_entry:
        variance = variance.mean()
    return torch.where(variance > 0, 1 / variance, 0.0)


def squared_errors(predicted: Tensor, samples: Samples, weights: Tensor) -> Tensor:
    """Return weighted squared errors of shape (n, D) of predictions for held-out entries, and 0 for other entries."""
    return (predicted - samples.x) ** 2 * weights * samples.held
