"""Choose the score above which a sample is an outlier."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Expected number of normal samples in the training data that `threshold` mistakes for outliers.
_N_REMOVED = 0.05


def threshold(scores: NDArray[Any], share: float) -> float:
    """Return the score that the given fraction of new samples exceeds on average.

    `scores` must be out-of-sample scores. If there are `m` of them and they are independent, a new score exceeds the
    `k`-th largest of them with probability `k / (m + 1)`. The threshold is interpolated between the scores. Above them,
    the tail is assumed to be exponential, with the median and the 90th percentile of the scores. Outliers in the
    training data are ignored. They are the scores that are too large for an exponential tail with the median and the
    75th percentile, which outliers change little.
    """
    limit = np.median(scores) + _tail_scale(scores, 0.75) * math.log(0.5 * len(scores) / _N_REMOVED)
    ranked = np.sort(scores[scores <= limit])[::-1]
    rank = share * (len(ranked) + 1)
    if rank < 1:
        return float(ranked[0] - _tail_scale(ranked, 0.9) * math.log(rank))
    return float(np.interp(rank, np.arange(1, len(ranked) + 1), ranked))


def _tail_scale(scores: NDArray[Any], level: float) -> float:
    """Return the scale of an exponential tail with the median and the given quantile of the scores."""
    median, high = np.quantile(scores, (0.5, level))
    return float(high - median) / math.log(0.5 / (1 - level))
