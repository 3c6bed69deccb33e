"""Log-likelihood of data, given log Z or a function that computes it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mvrbm.likelihood.annealing import AnnealedEstimate
from mvrbm.likelihood.exact import log_partition
from mvrbm.likelihood.interval import LogPartitionInterval, log_partition_interval
from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource

# Number of samples per batch.
_ROWS = 4096


@torch.no_grad()
def log_likelihood(
    machine: BoltzmannMachine,
    visible: Visible,
    log_z: float | Tensor | Callable[..., Tensor | AnnealedEstimate | LogPartitionInterval] = log_partition,
) -> Tensor:
    """Compute the log-likelihood of each sample, -F(x) - log Z.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model to evaluate.
    visible : Tensor or mapping of str to Tensor
        Data. Each layer has shape (n, *layer shape).
    log_z : float or callable
        Value of log Z, or a function that computes it, such as :func:`log_partition` or
        ``functools.partial(annealed_importance_sampling, rng=RandomSource(0))``. The function is called once or, for
        padded data, once per padding pattern, because each pattern has its own log Z.

    Returns
    -------
    Tensor (n,)
    """
    if callable(log_z):
        return _log_likelihoods(machine, visible, lambda **clamp: _value(log_z(machine, **clamp)))
    layers = machine.as_layers(visible)
    for name, unit in machine.layers.items():
        absent = unit.absent(layers[name])
        if absent is not None and bool((absent != absent[:1]).any()):
            raise ValueError("samples of unequal length have no common log_z; pass a function that computes log_z")
    return -machine.free_energy(layers, check=False) - log_z


@dataclass(frozen=True)
class LikelihoodInterval:
    """Interval estimate of the mean log-likelihood of data, in nats per sample.

    The interval reflects the uncertainty in log Z, which is the same for all samples. It does not include the sampling
    error of the mean over a finite number of samples.

    Attributes
    ----------
    mean : float
        Mean log-likelihood based on the estimate of log Z that combines both annealing directions.
    forward, reverse : float
        Mean log-likelihoods based on the forward and reverse estimates of log Z. Published results usually report the
        forward estimate.
    lower, upper : float
        Ends of the interval. See :class:`LogPartitionInterval`.
    bounds : tuple of float
        Ends of the wider interval based on mean log-weights.
    values : Tensor (n,)
        Log-likelihood of each sample. The mean of these values is `mean`.
    """

    mean: float
    forward: float
    reverse: float
    lower: float
    upper: float
    bounds: tuple[float, float]
    values: Tensor = field(repr=False)

    def __str__(self) -> str:
        low, high = self.bounds
        return (
            f"{self.mean:.2f} nats, interval {self.lower:.2f} to {self.upper:.2f} "
            f"(forward {self.forward:.2f}, reverse {self.reverse:.2f}, bounds {low:.2f} to {high:.2f})"
        )


@torch.no_grad()
def log_likelihood_interval(
    machine: BoltzmannMachine, visible: Visible, rng: RandomSource, **options: Any
) -> LikelihoodInterval:
    """Estimate an interval for the mean log-likelihood of data.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model to evaluate.
    visible : Tensor or mapping of str to Tensor
        Data. Each layer has shape (n, *layer shape).
    rng : RandomSource
        Random source for the chains.
    **options
        See :func:`log_partition_interval`. By default, `center` is the mean of the data.

    Returns
    -------
    LikelihoodInterval
    """
    layers = machine.as_layers(visible)
    options.setdefault("center", {name: array.mean(0, keepdim=True) for name, array in layers.items()})

    def both(**clamp: Any) -> Tensor:
        found = log_partition_interval(machine, rng, **options, **clamp)
        ends = found.upper, found.lower, *reversed(found.bounds)
        return torch.tensor(
            [found.log_z, *(run.log_z for run in (found.forward, found.reverse)), *ends], dtype=torch.float64
        )

    values = _log_likelihoods(machine, layers, both)  # (n, 7)
    mean, forward, reverse, lower, upper, *bounds = values.double().mean(0).tolist()
    return LikelihoodInterval(mean, forward, reverse, lower, upper, (bounds[0], bounds[1]), values[:, 0])


def _value(found: Tensor | AnnealedEstimate | LogPartitionInterval) -> Tensor:
    return found if isinstance(found, Tensor) else torch.tensor(found.log_z, dtype=torch.float64)


def _log_likelihoods(machine: BoltzmannMachine, visible: Visible, log_z: Callable[..., Tensor]) -> Tensor:
    """Compute -F(x) - log Z, using a separate log Z for each padding pattern.

    The result has shape (n,), or (n, k) if `log_z` returns k estimates.
    """
    layers = machine.as_layers(visible)
    count = len(next(iter(layers.values())))
    pieces = [{name: x[first : first + _ROWS] for name, x in layers.items()} for first in range(0, count, _ROWS)]
    score = -torch.cat([machine.free_energy(piece, check=False) for piece in pieces])
    absent = [unit.absent(layers[name]) for name, unit in machine.layers.items()]
    padding = [mask.flatten(1) for mask in absent if mask is not None]
    if padding:
        patterns, which = torch.unique(torch.cat(padding, 1), dim=0, return_inverse=True)
        firsts = [torch.nonzero(which == pattern)[0] for pattern in range(len(patterns))]
        found = [log_z(clamp={name: x[first] for name, x in layers.items()}) for first in firsts]
    else:
        which, found = torch.zeros(len(score), dtype=torch.int64, device=score.device), [log_z()]
    constants = torch.stack(found).to(score)[which]  # (n,) or (n, k)
    return score.reshape(-1, *([1] * (constants.ndim - 1))) - constants
