"""Mean and variance of each data entry, computed from sums and merged across processes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.distributed import World


@dataclass(frozen=True)
class Moments:
    """Mean and variance of each entry in a layer over `count` samples."""

    mean: Tensor  # (*shape)
    variance: Tensor  # (*shape)
    count: int


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
