"""Log-likelihood of data, given log Z or a function that computes it."""

from collections.abc import Callable

import torch
from torch import Tensor

from mvrbm.likelihood.annealing import AnnealedEstimate
from mvrbm.likelihood.exact import log_partition
from mvrbm.machine import BoltzmannMachine, Visible
from mvrbm.sampling import Layers


@torch.no_grad()
def log_likelihood(
    machine: BoltzmannMachine,
    visible: Visible,
    log_z: float | Tensor | Callable[..., Tensor | AnnealedEstimate] = log_partition,
) -> Tensor:
    """Compute the log-likelihood of each sample, -F(x) - log Z.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    visible : Tensor or mapping of str to Tensor
        Data, each layer (n, *layer shape).
    log_z : float, or function
        log Z itself, or a function that computes it: :func:`log_partition`, or for instance
        ``functools.partial(annealed_importance_sampling, rng=RandomSource(0))``. It is called once, or once for each
        pattern of padding, because each has its own log Z.

    Returns
    -------
    Tensor (n,)
    """
    layers = machine.as_layers(visible)
    score = -machine.free_energy(layers, check=False)
    absent = [unit.absent(layers[name]) for name, unit in machine.layers.items()]
    padding = [mask.flatten(1) for mask in absent if mask is not None]
    if not callable(log_z):
        if any(bool((mask != mask[:1]).any()) for mask in padding):
            raise ValueError("samples of unequal length have no common log_z: pass a function that computes it")
        return score - log_z

    def constant(**clamp: Layers) -> Tensor:
        found = log_z(machine, **clamp)
        return score.new_tensor(found.log_z) if isinstance(found, AnnealedEstimate) else found.to(score)

    if not padding:
        return score - constant()
    patterns, which = torch.unique(torch.cat(padding, 1), dim=0, return_inverse=True)
    examples = [{name: x[which == pattern][:1] for name, x in layers.items()} for pattern in range(len(patterns))]
    return score - torch.stack([constant(clamp=example) for example in examples])[which]
