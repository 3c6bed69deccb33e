"""Mean and variance of each data entry, computed from sums and merged across processes.

A training run computes them once, from at most `MOMENT_SAMPLES` samples, to initialize the machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.distributed import World

#: Number of samples used to estimate the moments. More samples would change the moments by less than 1%.
MOMENT_SAMPLES = 2**15


@dataclass(frozen=True)
class Moments:
    """Mean and variance of each entry in a layer over `count` samples."""

    mean: Tensor  # (*shape)
    variance: Tensor  # (*shape)
    count: int


class MomentSums:
    """Weighted sums over the samples of one layer, from which its moments are computed.

    The first batch determines a reference value for each entry. Summing deviations from it avoids cancellation for
    large values.
    """

    def __init__(self) -> None:
        self._origin: Tensor | None = None
        self._sums: list[Tensor] = []

    def add(self, x: Tensor, known: Tensor | None, weight: Tensor | None) -> None:
        """Add samples.

        Parameters
        ----------
        x : Tensor of shape (n, *layer shape)
            Samples.
        known : Tensor of shape (n, *layer shape), optional
            Boolean mask that is True for known entries.
        weight : Tensor of shape (n,), optional
            Weights of the samples.
        """
        x = x.double().cpu()
        share = torch.ones(len(x), dtype=x.dtype) if weight is None else weight
        share = share.reshape(-1, *[1] * (x.ndim - 1)).expand(x.shape)
        if known is not None:
            share = share * known.cpu()
        count = share.sum(0)
        if self._origin is None:
            self._origin = (share * x).sum(0) / torch.where(count > 0, count, 1.0)
        x = x - self._origin
        piece = [(share * x).sum(0), (share * x**2).sum(0), count]
        self._sums = [a + b for a, b in zip(self._sums, piece, strict=True)] if self._sums else piece

    def moments(self) -> Moments:
        """Return the moments of all samples. At least one batch must have been added."""
        assert self._origin is not None
        return moments_of(*self._sums, origin=self._origin)


def moments_of(total: Tensor, squares: Tensor, counts: Tensor, *, origin: Tensor) -> Moments:
    """Compute the mean and variance of each entry from sums over its known values.

    `total` and `squares` are the weighted sums of the deviations from `origin` and of their squares, and `counts`
    contains the total weight of the known values of each entry. All arrays have the shape of the layer. Entries without
    known values are assigned the average mean and variance of the other entries.
    """
    known = torch.where(counts > 0, counts, 1.0)
    shift = total / known
    variance = (squares / known - shift**2).clamp(min=0)
    mean = origin + shift
    never = counts == 0
    if bool(never.any()):
        fill_mean, fill_variance = mean.new_tensor(0.5), mean.new_tensor(1.0)
        if not bool(never.all()):
            fill_mean, fill_variance = mean[~never].mean(), variance[~never].mean()
        mean, variance = torch.where(never, fill_mean, mean), torch.where(never, fill_variance, variance)
    return Moments(mean, variance, round(float(counts.max())))


def merge_moments(moments: Mapping[str, Moments], world: World) -> dict[str, Moments]:
    """Combine the means and variances from all processes into the mean and variance over all samples."""
    if world.size == 1:
        return dict(moments)
    merged = {}
    for name, own in moments.items():
        packed = torch.stack([own.mean.double(), own.variance.double()])[None].cpu()
        parts = torch.cat(world.gather(packed))  # (size, 2, *shape)
        counts = torch.cat(world.gather(torch.tensor([float(own.count)], dtype=torch.float64)))
        if not float(counts.sum()):
            raise ValueError("the data is empty, but at least one sample is required")
        share = (counts / counts.sum()).reshape(-1, *[1] * own.mean.ndim)
        mean = (share * parts[:, 0]).sum(0)
        variance = (share * (parts[:, 1] + (parts[:, 0] - mean) ** 2)).sum(0)
        merged[name] = Moments(mean, variance, int(counts.sum()))
    return merged
