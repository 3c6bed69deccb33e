"""Compare generated with natural sequences: correlations, principal components, and nearest neighbors."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from mvrbm.errors import InputError
from mvrbm.io.alignments import Alignment, as_alignment
from mvrbm.io.alphabets import Alphabet
from mvrbm.sequences.site_model import Array
from mvrbm.validation import whole_number

__all__ = ["Accuracy", "adversarial_accuracy", "correlations", "nearest_distances", "project"]

# Number of comparisons per block. A block fits into the CPU cache.
_BLOCK = 2**20


def _together(natural: Any, others: tuple[Any, ...], alphabet: str | Alphabet | None) -> list[Alignment]:
    """Read several alignments with the same alphabet and the same number of sites."""
    first = as_alignment(natural, alphabet)
    found = [first, *(as_alignment(other, first.alphabet) for other in others)]
    sites = [alignment.codes.shape[1] for alignment in found]
    if len(set(sites)) > 1:
        raise InputError(f"all sequences must have the same number of sites, got {sites}")
    return found


def _shares(n: int, weights: Any) -> Array:
    """Return the weights of n sequences, normalized to a sum of 1."""
    if weights is None:
        return np.full(n, 1 / n)
    given = np.asarray(weights, dtype=np.float64)
    if given.shape != (n,) or not (np.isfinite(given).all() and (given >= 0).all() and given.sum() > 0):
        raise ValueError(f"weights must be {n} nonnegative numbers with a positive sum, got shape {given.shape}")
    shares: Array = given / given.sum()
    return shares


# -- correlations -------------------------------------------------------------------------------------


def correlations(
    natural: Any,
    generated: Any,
    order: int = 2,
    *,
    alphabet: str | Alphabet | None = None,
    weights: Any = None,
    n_subsets: int = 1000,
) -> tuple[Array, Array]:
    r"""Compute the connected correlations of natural and generated sequences. Both results have the same order.

    With the frequencies :math:`f` of letters at one, two or three sites, the connected correlations are

    .. math::

        C_{ij}(a, b) &= f_{ij}(a, b) - f_i(a) f_j(b) \\
        C_{ijk}(a, b, c) &= f_{ijk} - f_{ij} f_k - f_{ik} f_j - f_{jk} f_i + 2 f_i f_j f_k .

    Parameters
    ----------
    natural, generated : path, sequence of str or array
        Aligned sequences.
    order : {1, 2, 3}
        1 for frequencies, 2 for pairs of sites, and 3 for triplets of sites.
    alphabet : str or Alphabet, optional
        Letters of the sequences. Default: detected from the natural sequences.
    weights : array of shape (n,), optional
        Weights of the natural sequences.
    n_subsets : int
        Maximum number of pairs or triplets of sites. If there are more, a random selection with a fixed seed is used.

    Returns
    -------
    tuple of arrays
        Correlations of the natural and of the generated sequences, one entry per subset of sites and combination of
        letters.
    """
    if order not in (1, 2, 3):
        raise ValueError(f"order must be 1, 2 or 3, got {order!r}")
    whole_number(n_subsets, "n_subsets")
    alignments = _together(natural, (generated,), alphabet)
    subsets = _subsets(alignments[0].codes.shape[1], order, n_subsets)
    shares = [_shares(len(alignments[0]), weights), _shares(len(alignments[1]), None)]
    found = [
        np.concatenate([_connected(alignment, list(subset), share).ravel() for subset in subsets])
        for alignment, share in zip(alignments, shares, strict=True)
    ]
    return found[0], found[1]


def _subsets(sites: int, order: int, most: int) -> list[tuple[int, ...]]:
    """Return all subsets of a given number of sites in increasing order, or a random selection of these subsets."""
    if math.comb(sites, order) <= most:
        return list(itertools.combinations(range(sites), order))
    random = np.random.default_rng(0)
    found: set[tuple[int, ...]] = set()
    while len(found) < most:
        found.add(tuple(sorted(random.choice(sites, order, replace=False).tolist())))
    return sorted(found)


def _connected(alignment: Alignment, subset: list[int], shares: Array) -> Array:
    """Compute the connected correlations of some sites, with one axis of letters per site."""
    letters = len(alignment.alphabet)
    digits = alignment.codes[:, subset].astype(np.intp)
    places = digits @ letters ** np.arange(len(subset))[::-1]
    joint = np.bincount(places, shares, letters ** len(subset)).reshape((letters,) * len(subset))
    if len(subset) == 1:
        return joint
    if len(subset) == 2:
        return joint - np.outer(joint.sum(1), joint.sum(0))
    first, second, third = joint.sum((1, 2)), joint.sum((0, 2)), joint.sum((0, 1))
    found: Array = (
        joint
        - np.einsum("ab,c->abc", joint.sum(2), third)
        - np.einsum("ac,b->abc", joint.sum(1), second)
        - np.einsum("bc,a->abc", joint.sum(0), first)
        + 2 * np.einsum("a,b,c->abc", first, second, third)
    )
    return found


# -- principal components -----------------------------------------------------------------------------


def project(
    natural: Any, *others: Any, alphabet: str | Alphabet | None = None, weights: Any = None, n_components: int = 2
) -> list[Array]:
    """Project sequences onto the principal components of the one-hot encoded natural sequences.

    Parameters
    ----------
    natural : path, sequence of str or array
        Aligned sequences that define the components.
    *others : path, sequence of str or array
        More sequences, such as generated ones.
    alphabet : str or Alphabet, optional
        Letters of the sequences. Default: detected from the natural sequences.
    weights : array of shape (n,), optional
        Weights of the natural sequences.
    n_components : int
        Number of components.

    Returns
    -------
    list of arrays of shape (n, n_components)
        Coordinates of the natural sequences and of each other set. The first component has the largest variance.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.linalg import LinearOperator, eigsh

    alignments = _together(natural, others, alphabet)
    shares = _shares(len(alignments[0]), weights)
    sites, letters = alignments[0].codes.shape[1], len(alignments[0].alphabet)
    size = sites * letters
    whole_number(n_components, "n_components")
    if n_components >= size:
        raise ValueError(f"n_components must be less than {size}, the number of sites times letters")

    def one_hot(alignment: Alignment) -> Any:
        columns = alignment.codes + letters * np.arange(sites)
        ends = np.arange(len(alignment) + 1) * sites
        return csr_array((np.ones(columns.size), columns.ravel(), ends), shape=(len(alignment), size))

    X = one_hot(alignments[0])
    mean = X.T @ shares

    def covariance(vector: Array) -> Array:
        product: Array = X.T @ (shares * (X @ vector)) - mean * (mean @ vector)
        return product

    start = np.random.default_rng(0).standard_normal(size)
    _, axes = eigsh(
        LinearOperator((size, size), matvec=covariance, dtype=np.float64), n_components, which="LA", v0=start
    )
    axes = axes[:, ::-1]
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), np.arange(n_components)])  # the sign is arbitrary
    return [one_hot(alignment) @ axes - mean @ axes for alignment in alignments]


# -- nearest neighbors --------------------------------------------------------------------------------


class Accuracy(NamedTuple):
    """Result of :func:`adversarial_accuracy`.

    If both sets have the same distribution, all values are 0.5 on average.
    """

    score: float  # mean of the other two
    natural: float  # fraction of natural sequences that are closer to another natural than to a generated sequence
    generated: float  # fraction of generated sequences that are closer to another generated than to a natural one


def adversarial_accuracy(natural: Any, generated: Any, *, alphabet: str | Alphabet | None = None) -> Accuracy:
    """Measure how well nearest neighbors distinguish generated from natural sequences (AATS).

    A sequence is recognized if its nearest neighbor, by the number of sites that differ, is in its own set. If the
    nearest neighbors in both sets are equally far away, the sequence counts as one half.

    Parameters
    ----------
    natural, generated : path, sequence of str or array
        Aligned sequences. If one set is larger, only an evenly spaced subset of it is used, as large as the other set.
    alphabet : str or Alphabet, optional
        Letters of the sequences. Default: detected from the natural sequences.

    Returns
    -------
    Accuracy
        The score is 0.5 if the sets cannot be distinguished, 1 if the generated sequences are unlike the natural ones,
        and 0 if they are copies. `natural` is close to 1 if the generated sequences miss most of the natural ones, and
        `generated` is close to 1 if the generated sequences are unlike the natural ones.

    References
    ----------
    Yale, Dash, Dutta, Guyon, Pavao and Bennett, "Generation and evaluation of privacy preserving synthetic health
    data", Neurocomputing (2020).
    """
    both = _together(natural, (generated,), alphabet)
    size = min(len(alignment) for alignment in both)
    if size < 2:
        raise InputError("adversarial_accuracy requires at least 2 natural and 2 generated sequences")
    first, second = (one.codes[np.linspace(0, len(one) - 1, size).round().astype(int)] for one in both)
    shares = []
    for own, other in ((first, second), (second, first)):
        inside, outside = _nearest(own, own, skip_self=True), _nearest(own, other, skip_self=False)
        shares.append(float(np.mean(outside > inside) + 0.5 * np.mean(outside == inside)))
    return Accuracy(sum(shares) / 2, *shares)


def nearest_distances(sequences: Any, natural: Any, *, alphabet: str | Alphabet | None = None) -> Array:
    """Compute the number of sites at which each sequence differs from the nearest natural sequence.

    Parameters
    ----------
    sequences, natural : path, sequence of str or array
        Aligned sequences.
    alphabet : str or Alphabet, optional
        Letters of the sequences. Default: detected from the natural sequences.

    Returns
    -------
    array of int of shape (n,)
        Hamming distances, which are zero for copies of natural sequences.
    """
    known, new = _together(natural, (sequences,), alphabet)
    return _nearest(new.codes, known.codes, skip_self=False)


def _nearest(sequences: Array, others: Array, *, skip_self: bool) -> Array:
    """Return the Hamming distance of each sequence to the nearest of the others, in bounded memory.

    If `skip_self` is True, both arrays are the same, and a sequence is not compared with itself.
    """
    sites = sequences.shape[1]
    columns = np.ascontiguousarray(others.T)  # (sites, others), so that sites are compared one at a time
    counter = np.uint8 if sites < 256 else np.uint16 if sites < 2**16 else np.uint32
    found = np.full(len(sequences), sites, dtype=np.int64)
    width = max(1, _BLOCK // 32)
    for start in range(0, len(others), width):
        block = columns[:, start : start + width]
        for row, sequence in enumerate(sequences):
            same = np.zeros(block.shape[1], counter)
            for column, letter in zip(block, sequence, strict=True):
                np.add(same, column == letter, out=same)
            if skip_self and start <= row < start + width:
                same[row - start] = 0
            found[row] = min(found[row], sites - int(same.max()))
    return found
