"""Range, units, location and scale of the entries in the training data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# The unit of an index of an axis is a power mean of deviations with this exponent. It is so large that the rows and
# columns of a picture, which have similar ranges but different variances, have similar units.
_POWER = 8
# The indices of an axis of an array have different units if those of some neighbors differ by more than this factor, or
# if there are at least this many known entries per index. Otherwise, dividing by units that are estimated from few
# entries would make smooth series rough.
_DIFFERENT = 10.0
_ENOUGH = 400
# Minimum number of known entries per index. Deviations of fewer entries differ by chance.
_FEWEST = 8
# Deviations up to this fraction of the mean are rounding errors of constant entries.
_ROUNDING = 1e-12
# Maximum numbers of iterations for geometric means and power means, and the relative change at which they stop.
_MEAN_ITERATIONS = 100
_POWER_ITERATIONS = 20
_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Scaling:
    """Range, units, location and scale of the entries.

    Parameters
    ----------
    low, high : Tensor
        Smallest and largest known values, per column for 2-D data, or over all entries for data with more axes. If
        there are no known values, `low` is 1 and `high` is 0.
    center, scale : Tensor of shape (D,)
        Mean and scale of each entry in a sample, in its unit, used to standardize the input to the correction.
    units : Tensor of shape (K * D,)
        Units of all entries with the same index along the first axis, which are K samples. See :func:`axis_units`.
    """

    low: Tensor
    high: Tensor
    center: Tensor
    scale: Tensor
    units: Tensor

    def own_range(self) -> tuple[Tensor, Tensor]:
        """Return the range of each entry in a sample, in its unit, as tensors of shape (D,)."""
        shape = (-1, len(self.center))
        return (self.low / self.units).reshape(shape).amin(0), (self.high / self.units).reshape(shape).amax(0)

    def clamp(self, rows: Tensor) -> Tensor:
        """Clamp values to the range of the training data, where this range is known."""
        return torch.where(self.low <= self.high, torch.clamp(rows, self.low, self.high), rows)


def data_range(x: Tensor, known: Tensor, *, per_column: bool) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest known values, either per column or over all entries. See :class:`Scaling`."""
    axes = 0 if per_column else (0, 1)
    some = known.any(axes)
    low = torch.where(some, torch.where(known, x, math.inf).amin(axes), 1.0)
    high = torch.where(some, torch.where(known, x, -math.inf).amax(axes), 0.0)
    return low, high


def axis_units(x: Tensor, known: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a positive unit for each entry, of shape (D,), a product of one factor per index of each axis of a sample.

    In these units, the deviations from the mean are alike for all indices of an axis. If the data is multiplied by
    other factors along the axis, the units are multiplied by the same factors. A column of a table thus has its own
    unit, as does a channel of a time series. All indices of an axis have the same unit if there are few entries per
    index, unless the units of neighbors are obviously different. `x` and `known` have shape (n, D).
    """
    x = x.double()
    count = known.sum(0)
    center = (x * known).sum(0) / count.clamp(min=1)
    if len(x) == 1:  # the deviations of a single sample are those along its last axis
        of_rows, counts = (part.reshape(-1, shape[-1]).sum(1, keepdim=True) for part in (x * known, known))
        center = (of_rows / counts.clamp(min=1)).expand(-1, shape[-1]).flatten()
    sizes = torch.where(known, (x - center).abs(), 0.0)
    sizes = torch.where(sizes > _ROUNDING * center.abs(), sizes, 0.0)
    largest = sizes.amax(0)
    # Divide by the largest deviations first, because their powers might overflow or be too small.
    means = ((sizes / largest.clamp(min=torch.finfo(x.dtype).tiny)) ** _POWER).sum(0) / count.clamp(min=1)
    logs = torch.where(largest > 0, torch.log(means) / _POWER + torch.log(largest), -math.inf)
    logs = logs.reshape(*shape, 1)
    varying = logs > -math.inf
    everything = torch.zeros_like(logs)
    # Mean logarithms follow the units of the data as power means do, and converge faster. They are the initial units.
    rough = _balanced(logs, everything, varying, range(len(shape)), power=0)
    axes = [len(shape)]  # the additional axis of length 1, for the scale of all entries
    for axis in range(len(shape)):
        others = tuple(other for other in range(logs.ndim) if other != axis)
        steps = rough.mean(others).diff().abs()
        per_index = float(count.reshape(logs.shape).sum(others).double().median())
        different = per_index >= _FEWEST and bool((steps > math.log(_DIFFERENT)).any())
        if len(shape) == 1 or per_index >= _ENOUGH or different:
            axes.append(axis)
    rough = _balanced(logs, everything, varying, axes, power=0)
    return torch.exp(_balanced(logs, rough, varying, axes, power=_POWER)).flatten()


def _balanced(logs: Tensor, log_units: Tensor, varying: Tensor, axes: Sequence[int], power: int) -> Tensor:
    """Rescale along one axis after the other, so that the power mean of all sizes with the same index is 1.

    With power 0, the mean is the geometric mean. Only entries in the mask `varying` count.
    """
    for _ in range(_POWER_ITERATIONS if power else _MEAN_ITERATIONS):
        change = 0.0
        for axis in axes:
            others = tuple(other for other in range(logs.ndim) if other != axis)
            rest = logs - log_units
            count = varying.sum(others, keepdim=True)
            if power:
                factor = (torch.logsumexp(power * rest, others, keepdim=True) - torch.log(count)) / power
            else:
                factor = torch.where(varying, rest, 0.0).sum(others, keepdim=True) / count
            factor = torch.where(count > 0, factor, 0.0)
            log_units = log_units + factor
            change = max(change, float(factor.abs().max()))
        if change < _TOLERANCE:
            break
    return log_units
