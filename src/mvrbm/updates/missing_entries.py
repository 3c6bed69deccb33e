"""Imputation of missing entries in training data by sampling from the model, given the known entries."""

import torch
from torch import Tensor

from mvrbm.data.sources import Batch
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import Fields, Layers, Masks, gibbs_step, keep_known


def draw_missing(
    machine: BoltzmannMachine, batch: Batch, rng: RandomSource, steps: int, fields: Fields | None = None
) -> dict[str, Tensor]:
    """Return the batch with its missing entries replaced by samples from the model, given the known entries.

    Parameters
    ----------
    machine : BoltzmannMachine
        Model to sample from.
    batch : Batch
        Batch with masks that are True for known entries. If the batch has no masks, it is returned unchanged.
    rng : RandomSource
        Random source for sampling.
    steps : int
        Number of Gibbs steps.
    fields : Fields, optional
        Faster implementation of the machine's fields. If None, the machine computes its fields itself.
    """
    if not batch.known:
        return batch.visible
    masks = machine.as_masks(batch.known, batch.visible)
    for name in set(batch.visible) - set(batch.known):
        # In a layer without a mask, all entries are known.
        masks[name] = torch.ones_like(batch.visible[name], dtype=torch.bool)
    return draw_unknown(fields or machine, batch.visible, masks, rng, steps)


def draw_unknown(machine: Fields, data: Layers, masks: Masks, rng: RandomSource, steps: int) -> dict[str, Tensor]:
    """Return the data with unknown entries replaced by samples from the model. Arguments are not validated.

    Masks are True for known entries. Unknown entries may be NaN.
    """
    drawn = {name: unit.sample(torch.zeros_like(data[name]), rng) for name, unit in machine.layers.items()}
    state = keep_known(data, drawn, masks)
    for _ in range(steps):
        state = gibbs_step(machine, state, rng, masks).visible
    return state
