"""Standardize the scores of several detectors on samples that they were not fitted to, and combine them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import KFold

from mvrbm.estimators.outliers.linear_prediction import Blocks, LinearPrediction
from mvrbm.estimators.outliers.neighbors import Neighbors

Array = NDArray[Any]

# Minimum standard deviations of the logarithms of errors and of the scores of a part.
_LEAST_BLOCK_SPREAD = 0.3
_LEAST_SPREAD = 0.01
# Fraction of the blocks whose errors count: those with the largest errors.
_TOP = 0.1
# Scores that are more than this number of standard deviations below the mean are too good, and count as unusual.
_TOLERANCE = 1.5
# Number of folds for cross-fitting the linear model.
_N_FOLDS = 5
# Number of samples below which whole ensembles are cross-fitted, and the number of folds. With few samples, the ranges
# of the entries and the standard deviations of the errors fit the training samples better than they fit new samples.
_FEW_SAMPLES = 300
_OUTER_FOLDS = 10
# Values are extreme if they are farther from the median of a column than this multiple of a large deviation, which is
# the given quantile of the deviations. For a normal distribution, this is 11 standard deviations. Up to 3% of the
# values can be wrong. With a lower quantile, rare but correct values, such as strokes in some pixels, would be extreme.
_EXTREME = 5
_LARGE_DEVIATION = 0.97
# Number of rounds that fill in missing entries of the training data and fit the linear model again.
_FILL_ROUNDS = 2


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of each column."""

    center: Array
    scale: Array

    @classmethod
    def of(cls, values: Array, least: float) -> Self:
        """Compute the moments of the columns, ignoring NaN and extreme values.

        The standard deviations are at least `least`.
        """
        values = _without_extremes(values)
        known = ~np.isnan(values)
        counts = known.sum(0).clip(1)
        center = np.where(known, values, 0).sum(0) / counts
        variance = np.where(known, (values - center) ** 2, 0).sum(0) / counts
        return cls(center, np.sqrt(variance).clip(least))

    def standardize(self, values: Array) -> Array:
        """Return the values in standard deviations from the mean, and 0 for NaN."""
        return np.nan_to_num((values - self.center) / self.scale, nan=0.0)


@dataclass(frozen=True)
class Range:
    """Lowest value and unit of each entry.

    The entries of an array often have the same unit, or at least the entries with the same index along one axis do,
    such as those of a channel. The unit of a slab is its largest range, and the unit of an entry is the smallest unit
    of the slabs through it. In a table, this is the range of a column. Constant entries have the median unit.
    """

    low: Array
    width: Array

    @classmethod
    def of(cls, values: Array, slabs: Sequence[Blocks]) -> Self:
        """Return the ranges of the columns, ignoring NaN, given the slabs of each axis."""
        known = ~np.isnan(values)
        low = np.where(known, values, np.inf).min(0)
        ranges = np.where(known, values, -np.inf).max(0) - low  # minus infinity for columns without values
        width = np.min([_largest(ranges, blocks) for blocks in slabs], axis=0)
        varying = width > 0
        typical = np.median(width[varying]) if varying.any() else 1.0
        return cls(np.where(np.isfinite(low), low, 0.0), np.where(varying, width, typical))

    def scale(self, values: Array) -> Array:
        """Return the values in units of the range."""
        scaled: Array = (values - self.low) / self.width
        return scaled


@dataclass(frozen=True)
class Ensemble:
    """Combination of prediction errors of hidden blocks, distances to neighbors and further scores.

    Samples are rows of entries. NaN marks missing entries. Scores are higher for more unusual samples.
    """

    range: Range
    linear: LinearPrediction
    partitions: Sequence[Blocks]
    neighbors: Neighbors
    errors: Sequence[Spread]  # of the logarithms of the errors, for each partition
    parts: Spread  # of the scores of the parts

    @classmethod
    def fit(cls, values: Array, slabs: Sequence[Blocks], more: Sequence[Blocks], others: Array) -> tuple[Self, Array]:
        """Fit all parts, and return the ensemble and an out-of-sample score for each training sample.

        Parameters
        ----------
        values : array of shape (n, D)
            Training samples.
        slabs, more : sequence of blocks
            Partitions of the entries into blocks, which are hidden one at a time: the slabs of each axis, and further
            partitions. Each partition is one part of the ensemble.
        others : array of shape (n, m)
            Out-of-sample scores by `m` other detectors. Each detector is one more part of the ensemble.
        """
        ensemble, scores = cls._fit(values, slabs, more, others)
        if _OUTER_FOLDS <= len(values) < _FEW_SAMPLES:
            for rest, held in _folds(len(values), _OUTER_FOLDS):
                fold, _ = cls._fit(values[rest], slabs, more, others[rest])
                scores[held] = fold.scores(values[held], others[held])
        return ensemble, scores

    @classmethod
    def _fit(cls, values: Array, slabs: Sequence[Blocks], more: Sequence[Blocks], others: Array) -> tuple[Self, Array]:
        """Fit all parts to samples, and return scores in which only the linear model is cross-fitted."""
        partitions = [*slabs, *more]
        usual = _without_extremes(values, slabs)
        scaling = Range.of(usual, slabs)
        usual = scaling.scale(usual)
        linear = _fitted(usual)
        x, observed = scaling.scale(values), ~np.isnan(values)
        neighbors = Neighbors(linear.fill(x, observed))
        logs = [np.zeros((len(x), len(blocks))) for blocks in partitions]
        for rest, held in _folds(len(x), _N_FOLDS):
            fold = _fitted(usual[rest])
            new = fold.fill(x[held], observed[held])
            for found, blocks in zip(logs, partitions, strict=True):
                found[held] = _log_errors(fold, new, observed[held], blocks)
        errors = [Spread.of(found, _LEAST_BLOCK_SPREAD) for found in logs]
        tops = [_top(spread.standardize(found)) for spread, found in zip(errors, logs, strict=True)]
        raw = np.column_stack([*tops, neighbors.own_scores(), others])
        parts = Spread.of(raw, _LEAST_SPREAD)
        return cls(scaling, linear, partitions, neighbors, errors, parts), combine(parts.standardize(raw))

    def scores(self, values: Array, others: Array) -> Array:
        """Return the score of each sample: (n, D), (n, m) -> (n,)."""
        x, observed = self.read(values)
        tops = [
            _top(spread.standardize(_log_errors(self.linear, x, observed, blocks)))
            for spread, blocks in zip(self.errors, self.partitions, strict=True)
        ]
        return combine(self.parts.standardize(np.column_stack([*tops, self.neighbors.scores(x), others])))

    def read(self, values: Array) -> tuple[Array, Array]:
        """Return scaled samples with missing entries filled in, and a mask of the entries that are not missing."""
        observed = ~np.isnan(values)
        return self.linear.fill(self.range.scale(values), observed), observed


def combine(z: Array) -> Array:
    """Return the root mean square of the deviations of the parts, given standardized scores: (n, n_parts) -> (n,).

    Scores above the mean count. A sample that is far easier to predict than the training samples is unusual, too.
    Scores more than 1.5 standard deviations below the mean therefore also count, by their distance from this limit.
    """
    deviations: Array = np.maximum(z, 0) + np.maximum(-z - _TOLERANCE, 0)
    means: Array = np.sqrt((deviations**2).mean(1))
    return means


def _folds(n: int, count: int) -> Iterator[tuple[Array, Array]]:
    """Yield the indices of the samples to fit and of the samples that are held out, for each fold."""
    yield from KFold(min(count, n), shuffle=True, random_state=0).split(np.zeros(n))


def _without_extremes(values: Array, slabs: Sequence[Blocks] = ()) -> Array:
    """Replace extreme values with NaN, so that a few wrong values have no influence.

    Most values of a sparse column equal its median, so the large deviation is a quantile of the deviations of all other
    values. In an array, an entry has the largest of the large deviations of the slabs through it, because rare values
    of some entries, such as strokes near the margin of a picture, are common values of others.
    """
    deviations = np.abs(values - _quantile(values, 0.5))
    large = _quantile(np.where(deviations > 0, deviations, np.nan), _LARGE_DEVIATION)
    large = np.nan_to_num(large, nan=0.0)  # columns without deviations
    large = np.max([large, *(_largest(large, blocks) for blocks in slabs)], axis=0)
    return np.where(deviations <= _EXTREME * large, values, np.nan)


def _quantile(values: Array, level: float) -> Array:
    """Return a quantile of each column that is one of its values, ignoring NaN. It is NaN for columns of NaN."""
    last = (~np.isnan(values)).sum(0).clip(1) - 1
    ranked = np.sort(values, axis=0)  # NaN is last
    found: Array = ranked[(level * last).astype(int), np.arange(values.shape[1])]
    return found


def _largest(of_entries: Array, blocks: Blocks) -> Array:
    """Return, for each entry, the largest value in its block."""
    entries, starts, sizes = _flattened(blocks)
    largest = np.empty(len(of_entries))
    largest[entries] = np.maximum.reduceat(of_entries[entries], starts).repeat(sizes)
    return largest


def _fitted(x: Array) -> LinearPrediction:
    """Fit the linear model to rows in which missing entries (NaN) are replaced with their conditional means."""
    observed = ~np.isnan(x)
    if observed.all():
        return LinearPrediction.fit(x)
    known = np.where(observed, x, 0).sum(0) / observed.sum(0).clip(1)
    filled = np.where(observed, x, known)
    for _ in range(_FILL_ROUNDS):
        filled = LinearPrediction.fit(filled).fill(x, observed)
    return LinearPrediction.fit(filled)


def _log_errors(linear: LinearPrediction, x: Array, observed: Array, blocks: Blocks) -> Array:
    """Return the logarithm of 1 + the mean squared error of each block, or NaN if no entry is observed.

    Normal errors are about 1. Blocks that hardly vary have much smaller errors, whose exact size does not matter.
    """
    entries, starts, _ = _flattened(blocks)
    counts = np.add.reduceat(observed[:, entries], starts, axis=1, dtype=int)
    errors = linear.block_errors(x, blocks) / counts.clip(1)
    return np.where(counts > 0, np.log1p(errors), np.nan)


def _flattened(blocks: Blocks) -> tuple[Array, Array, Array]:
    """Return the entries of all blocks, the position at which each block starts, and its number of entries."""
    sizes = np.array([len(block) for block in blocks])
    return np.concatenate(blocks), np.cumsum(sizes) - sizes, sizes


def _top(z: Array) -> Array:
    """Return the mean of the largest tenth of each row."""
    count = math.ceil(_TOP * z.shape[1])
    top: Array = np.partition(z, z.shape[1] - count, axis=1)[:, -count:].mean(1)
    return top
