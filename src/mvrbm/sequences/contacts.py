"""Predict contacts between sites from the pair couplings that a model implies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvrbm.sequences.site_model import Array, SiteModel

__all__ = ["contact_map", "contact_precision", "effective_couplings", "ranked_pairs"]


def effective_couplings(model: Any, sequences: Any = None) -> Array:
    r"""Compute the couplings between pairs of sites that a model implies, in the zero-sum gauge.

    The log-likelihood of a sequence, as a function of its letters, has second derivatives

    .. math:: J_{i j}(a, b) = \sum_k \mathrm{Var}(y_k \mid x)\, W_{k, i a} W_{k, j b},

    where :math:`W` is in the zero-sum gauge. This function averages them over the sequences. For Gaussian hidden units,
    the variance is constant, and the result contains the exact couplings of the equivalent Potts model.

    Parameters
    ----------
    model : SequenceRBM or BoltzmannMachine
        Fitted model.
    sequences : path, sequence of str or array, optional
        Sequences to average over, such as the training sequences. Default: 1,000 sequences drawn from the model.

    Returns
    -------
    array of shape (sites, sites, letters, letters)
        Couplings. The couplings between a site and itself are zero.
    """
    weights, variance = _weights_and_variance(SiteModel.of(model), sequences)
    couplings = torch.einsum("kia,k,kjb->ijab", weights, variance, weights)
    couplings.diagonal().zero_()
    found: Array = couplings.cpu().numpy()
    return found


def contact_map(model: Any, sequences: Any = None) -> Array:
    """Compute a contact score for each pair of sites.

    The score is the Frobenius norm of the :func:`effective_couplings` over all letters except the gap, minus the
    average product correction. The correction is the product of the mean scores of both sites, divided by the mean of
    all scores.

    Parameters
    ----------
    model : SequenceRBM or BoltzmannMachine
        Fitted model.
    sequences : path, sequence of str or array, optional
        Sequences to average over, such as the training sequences. Default: 1,000 sequences drawn from the model.

    Returns
    -------
    array of shape (sites, sites)
        Symmetric scores with zeros on the diagonal. A higher score means that a contact is more likely.

    References
    ----------
    Ekeberg, Lövkvist, Lan, Weigt and Aurell, "Improved contact prediction in proteins: using pseudolikelihoods to infer
    Potts models", Physical Review E (2013).

    Dunn, Wahl and Gloor, "Mutual information without the influence of phylogeny or entropy dramatically improves
    residue contact prediction", Bioinformatics (2008).
    """
    view = SiteModel.of(model)
    weights, variance = _weights_and_variance(view, sequences)
    solid = weights[:, :, view.solid]
    scaled = solid * variance[:, None, None]
    norms = torch.stack(
        [
            torch.linalg.vector_norm(torch.einsum("ka,kjb->jab", scaled[:, site], solid), dim=(1, 2))
            for site in range(view.sites)
        ]
    )
    norms.fill_diagonal_(0)
    return _average_product_correction(norms.cpu().numpy())


@torch.no_grad()
def _weights_and_variance(view: SiteModel, sequences: Any) -> tuple[Tensor, Tensor]:
    """Return the weights (hidden entries, sites, letters) and the mean variance of each hidden entry."""
    hidden = view.machine.hidden
    if hidden.entry_modes:
        raise ValueError(
            f"effective couplings require hidden units with independent entries, got {type(hidden).__name__}"
        )
    codes = view.draw() if sequences is None else view.encode(sequences)
    total = torch.zeros(hidden.shape, dtype=torch.float64, device=view.machine.like.device)
    for chunk in view.chunks(codes):
        total += hidden.statistic_variance(view.machine.hidden_field({view.name: view.one_hot(chunk)})).double().sum(0)
    return view.weights().reshape(-1, view.sites, view.letters), total.flatten() / len(codes)


def _average_product_correction(scores: Array) -> Array:
    """Subtract the product of the mean scores of both sites, divided by the mean of all scores off the diagonal."""
    means = scores.sum(0) / max(len(scores) - 1, 1)
    corrected: Array = scores - np.outer(means, means) / (means.mean() if means.any() else 1)
    np.fill_diagonal(corrected, 0)
    return corrected


def ranked_pairs(scores: Array, *, separation: int = 4) -> tuple[Array, Array]:
    """Return pairs of sites in order of decreasing score.

    Parameters
    ----------
    scores : array of shape (sites, sites)
        Result of :func:`contact_map`.
    separation : int
        Pairs of sites that are at most this far apart along the sequence are excluded.

    Returns
    -------
    tuple of arrays of shape (pairs,)
        Indices of the first and the second site of each pair.
    """
    first, second = np.triu_indices(len(scores), separation + 1)
    order = np.argsort(-scores[first, second], kind="stable")
    return first[order], second[order]


def contact_precision(scores: Array, distances: Array, *, threshold: float = 8.0, separation: int = 4) -> Array:
    """Compute the fraction of true contacts among the pairs of sites with the highest scores.

    Parameters
    ----------
    scores : array of shape (sites, sites)
        Result of :func:`contact_map`.
    distances : array of shape (sites, sites)
        Distances in a known structure. Pairs with distance NaN are excluded.
    threshold : float
        Distance below which two sites are in contact. Default: 8 angstroms.
    separation : int
        Pairs of sites that are at most this far apart along the sequence are excluded.

    Returns
    -------
    array of shape (pairs,)
        Precision of the top 1, 2, 3, ... pairs. For L sites, entry ``L - 1`` is the precision at L.
    """
    distances = np.asarray(distances, dtype=float)
    if distances.shape != scores.shape:
        raise ValueError(f"distances must have shape {scores.shape} like scores, got {distances.shape}")
    found = distances[ranked_pairs(scores, separation=separation)]
    found = found[~np.isnan(found)]
    precision: Array = np.cumsum(found < threshold) / np.arange(1, len(found) + 1)
    return precision
