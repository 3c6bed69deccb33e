"""Masked prediction: the error of predicting each entry from the others, and the error that the model expects.

Free energies and likelihoods mostly measure one dominant property: pictures with little ink are likely under any
model of pictures. Hiding blocks of entries and predicting them from the rest compares a sample with itself.
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
    r"""Return masks that hide blocks of entries, each entry in equally many of them.

    Parameters
    ----------
    shape, block : sequence of int
        Shape of the masks and of one block.
    rng : RandomSource
        Source of the positions of the blocks and of their assignment to masks.
    parts : int
        Each mask hides one of so many parts of all blocks.
    rounds : int
        Number of times that each entry is hidden.

    Returns
    -------
    Tensor
        Boolean, (rounds * parts, \*shape), True where an entry is known.
    """
    found = []
    for _ in range(rounds):
        counts = [size // step + 2 for size, step in zip(shape, block, strict=True)]
        # A permutation, not independent draws: all parts have the same number of blocks.
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
    r"""Predict the hidden entries of each mask, and return the squared errors and the variances that the model expects.

    Hidden entries are predicted by a mean-field fixed point that starts at the means without a field. The error of an
    entry is the squared deviation of its statistic from the prediction. Errors and variances are averaged over the
    masks that hide the entry, each (n, \*layer shape).

    Parameters
    ----------
    machine : BoltzmannMachine
        The model, with one visible layer.
    visible : Tensor
        Data (n, \*layer shape).
    masks : Tensor
        Boolean, (m, \*site shape), True where an entry is known.
    observed : Tensor, optional
        Boolean, (n, \*layer shape), False where the data has no value; both results are zero there.
    steps : int
        Number of mean-field steps.
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
