"""Distances to the nearest training samples."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors

Array = NDArray[Any]

# Maximum difference between equal entries that were filled in, which have rounding errors. Entries vary by about 1.
_EQUAL = 1e-9
# Number of scores of a sample.
N_DISTANCES = 2
# Number of neighbors.
_N_NEIGHBORS = 5
# Constant that is added to distances, as a fraction of their median, so that distances of zero have finite logarithms.
_LEAST_DISTANCE = 0.1


class Neighbors:
    """Mean distances to the five nearest training samples, both absolute and relative to those of the neighbors.

    Parameters
    ----------
    samples : array of shape (n, D)
        Training samples, at least 2.
    """

    def __init__(self, samples: Array) -> None:
        self.samples = samples
        self._n_neighbors = min(_N_NEIGHBORS, len(samples) - 1)
        # Coordinate trees would be slower in many dimensions, and distances of zero must be exact.
        self._index = NearestNeighbors(n_neighbors=self._n_neighbors, algorithm="brute").fit(samples)

    @cached_property
    def _own(self) -> tuple[Array, Array]:
        """Mean distance of each training sample to its neighbors among the others, and the indices of the neighbors."""
        distances, neighbors = self._index.kneighbors()
        return distances.mean(1), neighbors

    def _logs(self, distances: Array, neighbors: Array) -> Array:
        own, _ = self._own
        least = _LEAST_DISTANCE * float(np.median(own)) or 1.0
        return np.stack(
            [np.log(distances + least), np.log(distances + least) - np.log(own[neighbors].mean(1) + least)], axis=1
        )

    def own_scores(self) -> Array:
        """Return both scores of each training sample relative to the other samples, as an array of shape (n, 2)."""
        return self._logs(*self._own)

    def scores(self, x: Array) -> Array:
        """Return the logarithms of both distances of new samples: (m, D) -> (m, 2)."""
        distances, neighbors = self._index.kneighbors(x)
        return self._logs(distances.mean(1), neighbors)

    def find(self, x: Array, observed: Array) -> Array:
        """Return the index of the training sample that equals each sample, or -1 if there is none: (m, D) -> (m,).

        `observed` is False for entries that were filled in. All other entries must be exactly equal.
        """
        nearest = self._index.kneighbors(x, 1, return_distance=False)[:, 0]
        equal = np.abs(self.samples[nearest] - x) <= np.where(observed, 0, _EQUAL)
        return np.where(equal.all(1), nearest, -1)
