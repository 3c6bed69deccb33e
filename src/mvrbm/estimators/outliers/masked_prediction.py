"""Masked prediction by a trained machine: errors of hidden blocks and the variances that the machine predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mvrbm.estimators.base import as_rows
from mvrbm.estimators.batches import ROWS_AT_ONCE, batches
from mvrbm.estimators.inputs import VISIBLE
from mvrbm.likelihood.masked_prediction import block_masks, masked_errors
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource

Array = NDArray[Any]

# Number of parts into which a map divides the blocks. It masks one part at a time, so that most of the entries around
# a defect remain visible.
_MAP_PARTS = 8
# Number of random partitions of the blocks that a map averages over.
_MAP_ROUNDS = 4


@dataclass(frozen=True)
class MaskedPrediction:
    r"""Prediction of masked blocks from the rest of the sample by a machine with one visible layer.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine. Samples are arrays of shape (n, \*visible shape). NaN entries are missing.
    block : tuple of int
        Shape of the blocks to mask.
    n_masks : int
        Number of masks for a score.
    widths : sequence of int, optional
        Numbers of adjacent columns that are masked together. Default: each site of the visible layer.
    """

    machine: BoltzmannMachine
    block: tuple[int, ...]
    n_masks: int
    widths: Sequence[int] | None = None

    def means(self, data: Any, *, check: bool = True) -> Array:
        """Return the mean squared error and the mean predicted variance of each sample, as an array of shape (2, n).

        The means are taken over the observed entries.
        """
        means = []
        for errors, variances, observed in self._errors(data, parts=2, rounds=self.n_masks // 2, check=check):
            counts = as_rows(observed).sum(1).clip(1)
            means.append([as_rows(values).sum(1) / counts for values in (errors, variances)])
        return np.concatenate(means, 1)

    def excess(self, data: Any, dispersion: float) -> Array:
        """Return the squared error of each entry minus `dispersion` times the predicted variance.

        An eighth of the blocks is masked at a time. The result has the shape of `data`.
        """
        parts = self._errors(data, parts=_MAP_PARTS, rounds=_MAP_ROUNDS)
        return np.concatenate([errors - dispersion * variances for errors, variances, _ in parts])

    def _errors(
        self, data: Any, *, parts: int, rounds: int, check: bool = True
    ) -> Iterator[tuple[Array, Array, Array]]:
        """For each batch, yield the squared errors, the predicted variances and a mask of the observed entries.

        The blocks are partitioned at random into `parts` groups, and one group is masked at a time. The results are
        averaged over `rounds` partitions.
        """
        unit = self.machine.layers[VISIBLE]
        shape = unit.site_shape if self.widths is None else (len(self.widths),)
        masks = block_masks(shape, self.block, RandomSource(0), parts=parts, rounds=rounds)
        if self.widths is not None:
            masks = masks.repeat_interleave(torch.tensor(self.widths), 1)
        for first in range(0, len(data), ROWS_AT_ONCE):
            values = np.asarray(data[first : first + ROWS_AT_ONCE]).reshape(-1, *unit.shape)
            observed = torch.from_numpy(~np.isnan(values)).to(self.machine.like.device)
            if values.dtype.kind == "f":  # The machine scores values outside its range as the nearest value inside.
                values = values.clip(*unit.data_range)
            (batch,) = batches({VISIBLE: values}, {VISIBLE: unit}, {VISIBLE: observed}, check=check)
            errors, variances = masked_errors(self.machine, batch[VISIBLE], masks, observed=observed)
            yield errors.cpu().numpy(), variances.cpu().numpy(), observed.cpu().numpy()
