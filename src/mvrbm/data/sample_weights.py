"""Sample weights, which determine how often each sample is drawn in an epoch."""

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm.random import RandomSource


class SampleWeights:
    """Draw samples in proportion to their weights by systematic resampling.

    An epoch of `n` samples draws `n` rows. Row `i` is drawn `n * weight[i] / sum(weight)` times on average, and in each
    epoch this number is rounded down or up. If all weights are equal, every row is drawn once.

    Parameters
    ----------
    weights : array of shape (n,)
        Nonnegative weights. Only their ratios matter.
    """

    def __init__(self, weights: Any) -> None:
        given = np.asarray(weights, dtype=np.float64)
        if given.ndim != 1 or not np.isfinite(given).all() or bool((given < 0).any()) or not given.sum() > 0:
            raise ValueError(
                "sample_weight must contain one finite, nonnegative number per sample, and at least one positive number"
            )
        ends = np.cumsum(given)
        self._ends = torch.from_numpy(ends * len(ends) / ends[-1])
        #: Weights with a mean of 1.
        self.values: NDArray[np.float64] = given * (len(given) / ends[-1])
        self._last = int(np.flatnonzero(given)[-1])

    def __len__(self) -> int:
        return len(self.values)

    @property
    def equal(self) -> bool:
        """Whether all samples have the same weight."""
        return bool((self.values == self.values[0]).all())

    @property
    def n_effective(self) -> float:
        """Number of equally weighted samples whose mean has the same variance."""
        return float(len(self) ** 2 / (self.values**2).sum())

    @functools.cached_property
    def digest(self) -> str:
        """Hash of the weights."""
        return hashlib.sha256(self.values.tobytes()).hexdigest()

    def draw(self, orders: Tensor, rngs: Sequence[RandomSource]) -> Tensor:
        """Replace permutations of 0, ..., n - 1 with rows drawn in proportion to the weights, in the permuted order.

        Parameters
        ----------
        orders : Tensor (epochs, n)
            One permutation per epoch.
        rngs : sequence of RandomSource
            Random source for each epoch, which shifts the positions at which the rows are drawn.
        """
        device = orders.device
        shifts = [float(rng.uniform((1,), torch.empty(0))) for rng in rngs]
        places = torch.arange(len(self), dtype=torch.float64, device=device)
        places = places + torch.tensor(shifts, dtype=torch.float64, device=device)[:, None]
        self._ends = self._ends.to(device)
        # Rounding can leave the last end slightly below n.
        rows = torch.searchsorted(self._ends, places, right=True).clamp_(max=self._last)
        return rows.gather(1, orders)
