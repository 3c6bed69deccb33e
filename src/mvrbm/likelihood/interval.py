"""Interval estimates of log Z: forward and reverse annealed importance sampling combined."""

import math
from dataclasses import dataclass

import torch

from mvrbm.likelihood.annealing import (
    AnnealedEstimate,
    annealed_importance_sampling,
    reverse_annealed_importance_sampling,
)
from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers

_ERRORS = 2.0  # standard errors on either side
_MOST_ERRORS = 3.0  # by which estimates of the same number may differ


@dataclass(frozen=True)
class LogPartitionInterval:
    """Estimates of log Z from both directions.

    Forward runs miss modes that their chains do not find, which makes log Z too small and likelihoods too good; reverse
    runs start in these modes and make it too large. Estimates that agree are evidence for both.

    Attributes
    ----------
    forward, reverse : AnnealedEstimate
        The estimates, with their errors and weights.
    """

    forward: AnnealedEstimate
    reverse: AnnealedEstimate

    @property
    def log_z(self) -> float:
        """Minimum-variance estimate from the weights of both directions, by Bennett's acceptance ratio."""
        forward, reverse = self.forward.log_weights, self.reverse.log_weights
        shift = math.log(len(forward) / len(reverse))  # the estimate is the root of an equation, minus this
        low, high = (float(limit) for limit in torch.cat([forward, reverse]).aminmax())
        low, high = low - abs(shift), high + abs(shift)
        for _ in range(64):  # bisection
            middle = (low + high) / 2
            excess = torch.sigmoid(forward - middle).sum() - torch.sigmoid(middle - reverse).sum()
            low, high = (middle, high) if excess > 0 else (low, middle)
        return middle - shift

    @property
    def lower(self) -> float:
        """Lower end of the interval: the smaller estimate minus two standard errors."""
        return min(run.log_z - _ERRORS * run.standard_error for run in (self.forward, self.reverse))

    @property
    def upper(self) -> float:
        """Upper end of the interval: the larger estimate plus two standard errors."""
        return max(run.log_z + _ERRORS * run.standard_error for run in (self.forward, self.reverse))

    @property
    def width(self) -> float:
        """Width of the interval, in nats."""
        return self.upper - self.lower

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds by Jensen's inequality: mean log-weights of both directions, with two standard errors of the means.

        They are wider than the interval, and do not depend on errors of estimates that few weights dominate.
        """
        forward, reverse = self.forward, self.reverse
        return forward.bound - _ERRORS * forward.bound_error, reverse.bound + _ERRORS * reverse.bound_error

    @property
    def consistent(self) -> bool:
        """Whether the estimates differ by at most three standard errors of their difference."""
        error = math.hypot(self.forward.standard_error, self.reverse.standard_error)
        return abs(self.forward.log_z - self.reverse.log_z) <= _MOST_ERRORS * error


def log_partition_interval(
    machine: BoltzmannMachine,
    rng: RandomSource,
    *,
    n_chains: int = 100,
    n_steps: int = 1000,
    init: Visible | None = None,
    burn_in: int | None = None,
    n_temperatures: int = 20,
    center: Layers | None = None,
    clamp: Visible | None = None,
    mask: Visible | None = None,
) -> LogPartitionInterval:
    """Estimate log Z from both sides, by forward and by reverse annealed importance sampling.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    rng : RandomSource
        Source of the draws.
    n_chains, n_steps : int
        Number of chains and of temperatures of each direction. More chains shrink the errors, more steps shrink these
        and the distance of the bounds.
    init, burn_in, n_temperatures : optional
        Start of the reverse run, which must be in equilibrium, see :func:`reverse_annealed_importance_sampling`. The
        best are the persistent chains of training: tempering from independent draws may miss the same modes as the
        forward run, and both then agree on a log Z that is too small.
    center : mapping of str to Tensor, optional
        See :class:`~mvrbm.sampling.TemperedPath`; the mean of the data is a good one.
    clamp, mask : optional
        See :func:`log_partition`.

    Returns
    -------
    LogPartitionInterval
    """
    forward = annealed_importance_sampling(
        machine, rng, n_chains=n_chains, n_steps=n_steps, center=center, clamp=clamp, mask=mask
    )
    reverse = reverse_annealed_importance_sampling(
        machine, rng, n_chains=n_chains, n_steps=n_steps, init=init, burn_in=burn_in, n_temperatures=n_temperatures,
        center=center, clamp=clamp, mask=mask,
    )  # fmt: skip
    return LogPartitionInterval(forward, reverse)
