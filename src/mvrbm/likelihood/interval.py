"""Interval estimates of log Z that combine forward and reverse annealed importance sampling."""

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

# Half-width of the interval, in standard errors.
_ERRORS = 2.0
# Maximum difference between consistent estimates, in standard errors.
_MOST_ERRORS = 3.0


@dataclass(frozen=True)
class LogPartitionInterval:
    """Forward and reverse estimates of log Z.

    If the chains of a forward run miss a mode, the estimate of log Z is too small and likelihoods are too high. Reverse
    runs start in the modes and tend to overestimate log Z. If the two estimates agree, both are likely to be accurate.

    Attributes
    ----------
    forward, reverse : AnnealedEstimate
        Estimates with their standard errors and weights.
    """

    forward: AnnealedEstimate
    reverse: AnnealedEstimate

    @property
    def log_z(self) -> float:
        """Minimum-variance estimate from the forward and reverse weights, using Bennett's acceptance ratio."""
        forward, reverse = self.forward.log_weights, self.reverse.log_weights
        shift = math.log(len(forward) / len(reverse))  # subtracted from the root found below
        low, high = (float(limit) for limit in torch.cat([forward, reverse]).aminmax())
        low, high = low - abs(shift), high + abs(shift)
        for _ in range(64):  # bisection
            middle = (low + high) / 2
            excess = torch.sigmoid(forward - middle).sum() - torch.sigmoid(middle - reverse).sum()
            low, high = (middle, high) if excess > 0 else (low, middle)
        return middle - shift

    @property
    def lower(self) -> float:
        """Lower end of the interval: the minimum of estimate - 2 * standard error over the forward and reverse runs."""
        return min(run.log_z - _ERRORS * run.standard_error for run in (self.forward, self.reverse))

    @property
    def upper(self) -> float:
        """Upper end of the interval: the maximum of estimate + 2 * standard error over the forward and reverse runs."""
        return max(run.log_z + _ERRORS * run.standard_error for run in (self.forward, self.reverse))

    @property
    def width(self) -> float:
        """Width of the interval, in nats."""
        return self.upper - self.lower

    @property
    def bounds(self) -> tuple[float, float]:
        """Lower and upper bounds from Jensen's inequality, each widened by two standard errors.

        The bounds are the mean log-weights of the forward and reverse runs. They are farther apart than the ends of the
        interval, but do not rely on standard errors that a few large weights can dominate.
        """
        forward, reverse = self.forward, self.reverse
        return forward.bound - _ERRORS * forward.bound_error, reverse.bound + _ERRORS * reverse.bound_error

    @property
    def consistent(self) -> bool:
        """Whether the forward and reverse estimates differ by at most three standard errors of their difference."""
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
    """Estimate an interval for log Z by forward and reverse annealed importance sampling.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model whose log Z is estimated.
    rng : RandomSource
        Random source for the chains.
    n_chains, n_steps : int
        Number of chains and number of temperatures in each direction. More chains reduce the standard errors. More
        temperatures reduce both the standard errors and the gap between the bounds.
    init, burn_in, n_temperatures : optional
        Initial states, burn-in steps and temperatures for the reverse run. See
        :func:`reverse_annealed_importance_sampling`. The initial states must be in equilibrium. The persistent chains
        from training are the best choice. If `init` is None, parallel tempering may miss the same modes as the forward
        run, and both estimates of log Z are then too small.
    center : mapping of str to Tensor, optional
        Visible state at the center of the path. See :class:`~mvrbm.sampling.TemperedPath`. The mean of the data is a
        good choice.
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
