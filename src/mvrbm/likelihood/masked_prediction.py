"""Masked prediction: predict masked entries from the other entries, and compute errors and predicted variances.

Free energies and likelihoods are often dominated by a single property of the data. For example, images with few dark
pixels are likely under any image model. Predicting masked blocks of entries from the rest of the sample avoids this
problem.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import keep_known, multiplied_out


def block_masks(
    shape: Sequence[int], block: Sequence[int], rng: RandomSource, *, parts: int = 2, rounds: int = 5
) -> Tensor:
    r"""Generate masks that hide blocks of entries. Every entry is hidden by the same number of masks.

    Parameters
    ----------
    shape, block : sequence of int
        Shape of the masks and shape of one block.
    rng : RandomSource
        Random source for the positions of the blocks and their assignment to masks.
    parts : int
        Number of parts into which the blocks are divided. Each mask hides one part.
    rounds : int
        Number of masks that hide each entry.

    Returns
    -------
    Tensor
        Boolean masks of shape (rounds * parts, \*shape), True where an entry is known.
    """
    found = []
    for _ in range(rounds):
        counts = [size // step + 2 for size, step in zip(shape, block, strict=True)]
        # A permutation gives all parts the same number of blocks, unlike independent random assignments.
        part = (rng.permutation(math.prod(counts)) % parts).reshape(counts).cpu()
        for axis, (size, step) in enumerate(zip(shape, block, strict=True)):
            first = int(rng.permutation(step)[0])
            part = part.repeat_interleave(step, axis).narrow(axis, first, size)
        found += [part != number for number in range(parts)]
    return torch.stack(found)


@torch.no_grad()
def masked_errors(
    machine: BoltzmannMachine, visible: Tensor, masks: Tensor, *, observed: Tensor | None = None, steps: int = 10
) -> tuple[Tensor, Tensor]:
    r"""Predict the masked entries for each mask and return the squared errors and the model's predicted variances.

    Masked entries are predicted by mean-field iteration, starting from the means at zero field. The error of an entry
    is the squared difference between its sufficient statistic and the predicted mean of that statistic.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model with one visible layer.
    visible : Tensor
        Data of shape (n, \*layer shape).
    masks : Tensor
        Boolean masks of shape (m, \*site shape), True where an entry is known.
    observed : Tensor, optional
        Boolean mask of shape (n, \*layer shape), False where the data is missing. Both results are zero there.
    steps : int
        Number of mean-field steps.

    Returns
    -------
    errors, variances : Tensor
        Squared errors and predicted variances, averaged over all masks that hide an entry. Both have shape
        (n, \*layer shape).
    """
    ((name, unit),) = machine.layers.items()
    fast = multiplied_out(machine)
    start = unit.mean(torch.zeros_like(visible))
    present = torch.ones_like(visible, dtype=torch.bool) if observed is None else observed
    error, variance, count = (torch.zeros_like(visible) for _ in range(3))
    for mask in masks.to(visible.device):
        known = mask.reshape(*mask.shape, *[1] * unit.entry_modes) & present
        state, field = torch.where(known, visible, start), start
        for _ in range(steps):
            field = fast.visible_fields(fast.hidden_mean({name: state}, check=False))[name]
            state = keep_known({name: visible}, {name: unit.mean(field)}, {name: known})[name]
        deviation = unit.statistic(visible) - unit.statistic(unit.mean(field))
        scored = present & ~known
        error += scored * deviation**2
        variance += scored * unit.statistic_variance(field)
        count += scored
    return error / count.clamp(min=1), variance / count.clamp(min=1)
