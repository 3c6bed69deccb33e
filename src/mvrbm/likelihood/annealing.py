"""Annealed importance sampling: an unbiased estimate of Z, with its error."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mvrbm.cuda_graphs import repeat
from mvrbm.likelihood.exact import as_clamp, clamped_log_normaliser
from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers, TemperedPath, draw_visible, keep_known, multiplied_out
from mvrbm.validation import whole_number


@dataclass(frozen=True)
class AnnealedEstimate:
    """An estimate of log Z.

    Attributes
    ----------
    log_z : float
        The estimate: the logarithm of the mean importance weight, whose expectation is exactly Z.
    standard_error : float
        Standard error, from the variance of the weights.
    effective_samples : float
        Effective number of equal weights; if it is near 1, the standard error itself is unreliable.
    log_weights : Tensor (n_chains,)
        Logarithms of the weights.
    """

    log_z: float
    standard_error: float
    effective_samples: float
    log_weights: Tensor = field(repr=False)


@torch.no_grad()
def annealed_importance_sampling(
    machine: BoltzmannMachine,
    rng: RandomSource,
    *,
    n_chains: int = 100,
    n_steps: int = 1000,
    centre: Layers | None = None,
    clamp: Visible | None = None,
    mask: Visible | None = None,
) -> AnnealedEstimate:
    """Estimate log Z by annealing chains from independent units to the machine.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    rng : RandomSource
        Source of the draws.
    n_chains : int
        Number of chains; the standard error is inversely proportional to its square root.
    n_steps : int
        Number of temperatures; more of them reduce the variance of the weights.
    centre : mapping of str to Tensor, optional
        See :class:`~mvrbm.sampling.TemperedPath`. With a centre in one of several modes, chains that end in another
        mode are rare and have large weights, and the standard error is too small.
    clamp, mask : optional
        See :func:`~mvrbm.likelihood.log_partition`.

    Returns
    -------
    AnnealedEstimate
    """
    whole_number(n_chains, "n_chains", 2)
    whole_number(n_steps, "n_steps")
    machine.check_bounded()
    fixed, known = as_clamp(machine, clamp, mask)
    path = TemperedPath(multiplied_out(machine), centre)
    # At beta = 0 the layers are independent, so log Z is a sum over layers.
    log_z_base = clamped_log_normaliser(machine, path.visible_base, fixed, known)
    log_z_base = log_z_base + machine.hidden.log_normaliser(path.hidden_base)
    masks = {name: None if held is None else held.expand(n_chains, *held.shape[1:]) for name, held in known.items()}
    start = {name: array.expand(n_chains, *array.shape[1:]) for name, array in fixed.items()}
    layers = keep_known(start, path.base_sample(n_chains, rng), masks)
    log_weights = log_z_base.double().expand(n_chains).clone()
    betas = torch.linspace(0, 1, n_steps + 1, dtype=torch.float64).to(machine.like)
    ladder = torch.stack([betas[:-1], betas[1:]], 1)  # (n_steps, 2): before and after each step
    position = torch.zeros(1, dtype=torch.int64, device=betas.device)

    def weigh() -> tuple[Tensor, Tensor]:
        """Multiply the weights by the ratio of the next two temperatures; return the field and the second of these."""
        pair = ladder.index_select(0, position).T  # (2, 1)
        field = path.machine.hidden_field(layers)
        here, there = path.energies(pair, field, path.pull(layers))
        log_weights.add_(here - there)
        return field, pair[1]

    def step() -> None:
        field, beta = weigh()
        tempered = path.at(beta)
        hidden = tempered.hidden.sample(field, rng)
        drawn = draw_visible(tempered, tempered.visible_fields(hidden), layers, rng, masks)
        for name, array in layers.items():
            array.copy_(drawn[name])
        position.add_(1)

    repeat(step, n_steps - 1, rng, betas.device)
    weigh()
    log_z = torch.logsumexp(log_weights, 0) - math.log(n_chains)
    weights = torch.exp(log_weights - log_z)  # mean 1
    error, effective = weights.std() / math.sqrt(n_chains), weights.sum() ** 2 / (weights**2).sum()
    return AnnealedEstimate(float(log_z), float(error), float(effective), log_weights.cpu())
