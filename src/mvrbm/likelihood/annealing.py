"""Annealed importance sampling: forward and reverse estimates of log Z with standard errors."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mvrbm.cuda_graphs import repeat
from mvrbm.likelihood.exact import as_clamp, clamped_log_normalizer
from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource
from mvrbm.sampling import (
    Layers,
    ParallelTempering,
    TemperedPath,
    copies,
    draw_visible,
    gibbs_step,
    keep_known,
    multiplied_out,
    write,
)
from mvrbm.validation import whole_number


@dataclass(frozen=True)
class AnnealedEstimate:
    r"""Estimate of log Z from chains annealed in one direction.

    Attributes
    ----------
    log_z : float
        Estimate of log Z. For forward runs, this is the logarithm of the mean weight, because the expected weight is
        exactly Z. For reverse runs, it is the negative logarithm of the mean inverse weight, because the expected
        inverse weight is exactly 1 / Z.
    standard_error : float
        Standard error of the estimate, computed from the variance of the weights (or of the inverse weights for
        reverse runs).
    effective_samples : float
        Effective sample size of the weights. If it is close to 1, the standard error itself is unreliable.
    log_weights : Tensor (n_chains,)
        Logarithms of the weights.
    """

    log_z: float
    standard_error: float
    effective_samples: float
    log_weights: Tensor = field(repr=False)

    @property
    def bound(self) -> float:
        """Mean log-weight, a stochastic bound on log Z.

        In expectation, it is a lower bound on log Z for forward runs and an upper bound for reverse runs.
        """
        return float(self.log_weights.mean())

    @property
    def bound_error(self) -> float:
        """Standard error of the bound. Unlike `standard_error`, it is not dominated by a few large weights."""
        return float(self.log_weights.std()) / math.sqrt(len(self.log_weights))


@torch.no_grad()
def annealed_importance_sampling(
    machine: BoltzmannMachine,
    rng: RandomSource,
    *,
    n_chains: int = 100,
    n_steps: int = 1000,
    center: Layers | None = None,
    clamp: Visible | None = None,
    mask: Visible | None = None,
) -> AnnealedEstimate:
    """Estimate log Z by annealing chains from independent units to the machine.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model whose log Z is estimated.
    rng : RandomSource
        Random source for the chains.
    n_chains : int
        Number of chains. The standard error is inversely proportional to the square root of this number.
    n_steps : int
        Number of temperatures. More temperatures reduce the variance of the weights.
    center : mapping of str to Tensor, optional
        Visible state at the center of the path. See :class:`~mvrbm.sampling.TemperedPath`. If the center lies in one of
        several modes, chains that end in another mode are rare and have large weights, and the standard error is too
        small. See :func:`log_partition_interval`.
    clamp, mask : optional
        See :func:`~mvrbm.likelihood.log_partition`.

    Returns
    -------
    AnnealedEstimate
    """
    annealing = _Annealing(machine, n_steps, center, clamp, mask)
    return annealing.forward(whole_number(n_chains, "n_chains", 2), rng)


@torch.no_grad()
def reverse_annealed_importance_sampling(
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
) -> AnnealedEstimate:
    """Estimate log Z by annealing chains from samples of the machine back to independent units.

    The estimate and the bound are valid only if the initial samples are in equilibrium.

    Parameters
    ----------
    machine, rng, n_steps, center, clamp, mask
        See :func:`annealed_importance_sampling`.
    n_chains : int
        Number of chains. Ignored if `init` is given.
    init : Tensor or mapping of str to Tensor, optional
        States close to equilibrium, one per chain. Use the persistent chains from training, samples from
        :class:`~mvrbm.sampling.ParallelTempering`, or training data, for example. If None, the states are sampled by
        parallel tempering, starting from independent samples.
    burn_in : int, optional
        Number of burn-in steps before annealing: Gibbs steps from `init`, or parallel tempering steps if `init` is
        None. Default: `n_steps`.
    n_temperatures : int
        Number of temperatures for parallel tempering. If `init` is None, each burn-in step costs about as much as
        `n_temperatures` annealing steps.

    Returns
    -------
    AnnealedEstimate
    """
    annealing = _Annealing(machine, n_steps, center, clamp, mask)
    burn_in = n_steps if burn_in is None else whole_number(burn_in, "burn_in", 0)
    if init is None:
        start = annealing.tempered(whole_number(n_chains, "n_chains", 2), burn_in, n_temperatures, rng)
    else:
        states = machine.as_layers(init)
        whole_number(len(next(iter(states.values()))), "the number of states in init", 2)
        start = annealing.burnt_in(states, burn_in, rng)
    return annealing.reverse(start, rng)


class _Annealing:
    """Forward and reverse annealing runs with the same temperatures, log Z at beta = 0, and clamped entries."""

    def __init__(
        self,
        machine: BoltzmannMachine,
        n_steps: int,
        center: Layers | None,
        clamp: Visible | None,
        mask: Visible | None,
    ) -> None:
        whole_number(n_steps, "n_steps")
        machine.check_bounded()
        self.machine, self.center = machine, center
        self.fixed, self.known = as_clamp(machine, clamp, mask)
        self.path = TemperedPath(multiplied_out(machine), center)
        # At beta = 0, the layers are independent, so log Z is a sum over layers.
        log_z_base = clamped_log_normalizer(machine, self.path.visible_base, self.fixed, self.known)
        self.log_z_base = (log_z_base + machine.hidden.log_normalizer(self.path.hidden_base)).double()
        self.betas = torch.linspace(0, 1, n_steps + 1, dtype=torch.float64).to(machine.like)

    def forward(self, n_chains: int, rng: RandomSource) -> AnnealedEstimate:
        return self._estimate(self._log_ratios(self.base_states(n_chains, rng), self.betas, rng), 1)

    def reverse(self, start: Layers, rng: RandomSource) -> AnnealedEstimate:
        # The chains run from the machine to beta = 0, so the inverse weights have a known expectation.
        return self._estimate(self._log_ratios(start, self.betas.flip(0), rng), -1)

    def _estimate(self, log_ratios: Tensor, sign: int) -> AnnealedEstimate:
        n_chains = len(log_ratios)
        log_mean = torch.logsumexp(log_ratios, 0) - math.log(n_chains)
        ratios = torch.exp(log_ratios - log_mean)  # normalized to mean 1
        error, effective = ratios.std() / math.sqrt(n_chains), ratios.sum() ** 2 / (ratios**2).sum()
        log_weights = self.log_z_base + sign * log_ratios
        log_z = self.log_z_base + sign * log_mean
        return AnnealedEstimate(float(log_z), float(error), float(effective), log_weights.cpu())

    def base_states(self, n_chains: int, rng: RandomSource) -> dict[str, Tensor]:
        """Sample visible states at beta = 0, with the known entries clamped."""
        return self._hold(self.path.base_sample(n_chains, rng))

    def tempered(self, n_chains: int, steps: int, n_temperatures: int, rng: RandomSource) -> dict[str, Tensor]:
        """Sample states of the machine by parallel tempering, starting from samples at beta = 0."""
        masks = {name: held for name, held in self._masks(n_chains).items() if held is not None}
        chains = ParallelTempering(
            self.machine, n_chains, n_temperatures, rng=rng, init=self.base_states(n_chains, rng),
            mask=masks or None, center=self.center, check=False,
        )  # fmt: skip
        return chains.step(steps)

    def burnt_in(self, start: Layers, steps: int, rng: RandomSource) -> dict[str, Tensor]:
        """Run Gibbs steps from the given states and return the final states."""
        states = copies(self._hold(start))
        masks = self._masks(len(next(iter(states.values()))))

        def step(rng: RandomSource) -> None:
            write(gibbs_step(self.path.machine, states, rng, masks).visible, states)

        repeat(step, steps, rng, self.betas.device)
        return states

    def _masks(self, n_chains: int) -> dict[str, Tensor | None]:
        return {
            name: None if held is None else held.expand(n_chains, *held.shape[1:]) for name, held in self.known.items()
        }

    def _hold(self, states: Layers) -> dict[str, Tensor]:
        """Set the known entries of the states to their clamped values."""
        n_chains = len(next(iter(states.values())))
        fixed = {name: array.expand(n_chains, *array.shape[1:]) for name, array in self.fixed.items()}
        return keep_known(fixed, states, self._masks(n_chains))

    def _log_ratios(self, start: Layers, betas: Tensor, rng: RandomSource) -> Tensor:
        """Anneal chains through `betas` and return the log-ratio of each chain. The result has shape (n_chains,).

        The mean of the ratios is an estimate of Z at the last temperature divided by Z at the first temperature. Gibbs
        steps on the visible layers are reversible, so both directions use the same steps.
        """
        path, layers = self.path, copies(start)
        n_chains = len(next(iter(layers.values())))
        masks = self._masks(n_chains)
        log_ratios = torch.zeros(n_chains, dtype=torch.float64, device=betas.device)
        ladder = torch.stack([betas[:-1], betas[1:]], 1)  # (n_steps, 2): betas before and after each step
        position = torch.zeros(1, dtype=torch.int64, device=betas.device)

        def weigh() -> tuple[Tensor, Tensor]:
            """Update the log-ratios for the next pair of temperatures.

            Return the hidden field and the second inverse temperature of the pair.
            """
            pair = ladder.index_select(0, position).T  # (2, 1)
            field = path.machine.hidden_field(layers)
            here, there = path.energies(pair, field, path.pull(layers))
            log_ratios.add_(here - there)
            return field, pair[1]

        def step(rng: RandomSource) -> None:
            field, beta = weigh()
            tempered = path.at(beta)
            hidden = tempered.hidden.sample(field, rng)
            write(draw_visible(tempered, tempered.visible_fields(hidden), layers, rng, masks), layers)
            position.add_(1)

        repeat(step, len(ladder) - 1, rng, betas.device)
        weigh()
        return log_ratios
