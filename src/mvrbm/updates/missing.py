"""Missing entries of training data, which the model draws given the known entries."""

import torch
from torch import Tensor

from mvrbm.data.sources import Batch
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.sampling import Fields, Layers, Masks, gibbs_step, keep_known


def draw_missing(
    machine: BoltzmannMachine, batch: Batch, rng: RandomSource, steps: int, fields: Fields | None = None
) -> dict[str, Tensor]:
    """Return a batch whose missing entries are drawn from the model, given the known entries.

    Parameters
    ----------
    machine : BoltzmannMachine
        The model.
    batch : Batch
        The data.
    rng : RandomSource
        Source of random numbers.
    steps : int
        Number of Gibbs steps.
    fields : Fields, optional
        Computes the fields of the machine faster.
    """
    if not batch.known:
        return batch.visible
    masks = machine.as_masks(batch.known, batch.visible)
    for name in set(batch.visible) - set(batch.known):
        # All entries of a layer without a mask are known.
        masks[name] = torch.ones_like(batch.visible[name], dtype=torch.bool)
    return draw_unknown(fields or machine, batch.visible, masks, rng, steps)


def draw_unknown(machine: Fields, data: Layers, masks: Masks, rng: RandomSource, steps: int) -> dict[str, Tensor]:
    """Return data whose entries outside the masks, which may be NaN, are drawn from the model. Without checks."""
    drawn = {name: unit.sample(torch.zeros_like(data[name]), rng) for name, unit in machine.layers.items()}
    state = keep_known(data, drawn, masks)
    for _ in range(steps):
        state = gibbs_step(machine, state, rng, masks).visible
    return state
