"""Effects of mutations: the change in the log-likelihood when one letter of a sequence changes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from mvrbm.sequences.site_model import Array, SiteModel

__all__ = ["mutation_scan"]


@torch.no_grad()
def mutation_scan(model: Any, reference: Any) -> Array:
    r"""Compute the change in the log-likelihood for each single mutation of a sequence.

    The change is a difference between free energies, :math:`F(x) - F(x')`, so :math:`\log Z` cancels. One mutation
    changes the hidden field by the difference of two columns of :math:`W`, so a scan takes about as long as computing
    the free energies of a few sequences.

    Parameters
    ----------
    model : SequenceRBM or BoltzmannMachine
        Fitted model.
    reference : str or array of int
        Reference sequence, as letters or as codes of shape (sites,).

    Returns
    -------
    array of shape (sites, letters)
        Change in the log-likelihood in nats. It is negative if the mutation makes the sequence less likely, and zero
        for the letters of the reference. Letters are in the order of the alphabet.
    """
    view = SiteModel.of(model)
    codes = view.encode([reference] if isinstance(reference, str) else np.asarray(reference)[None])
    unit, hidden = view.machine.layers[view.name], view.machine.hidden
    weights = copy.deepcopy(view.machine.links[view.name]).double().dense()  # (*hidden shape, sites, letters)
    letters = torch.from_numpy(codes[0].astype(np.int64)).to(weights.device)
    field = weights[..., torch.arange(view.sites), letters].sum(-1)
    states = torch.eye(view.letters, dtype=torch.float64, device=field.device)[:, None].expand(-1, view.sites, -1)
    own = -unit.site_energy(states)  # (letters, sites)
    found = []
    for site, letter in enumerate(letters):
        change = (weights[..., site, :] - weights[..., site, letter, None]).movedim(-1, 0)  # (letters, *hidden shape)
        log_sums = hidden.log_normalizer(field + change)
        found.append(own[:, site] - own[letter, site] + log_sums - log_sums[letter])
    scan: Array = torch.stack(found).cpu().numpy()
    return scan
