"""Functions that build named models. Each model is a choice of units and couplings."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mvrbm.couplings import CP, Dense, Kronecker
from mvrbm.machine import BoltzmannMachine
from mvrbm.random import RandomSource
from mvrbm.units import Bernoulli, Categorical, Unit

__all__ = ["cp_rbm", "documents", "multimodal_mvrbm", "mvrbm", "rbm", "replicated_softmax"]


def rbm(n_visible: int, n_hidden: int, *, seed: int | RandomSource = 0) -> BoltzmannMachine:
    r"""Build a classic binary RBM with energy :math:`E = -y^\top W x - b^\top x - c^\top y`."""
    return BoltzmannMachine(Bernoulli(n_visible), Bernoulli(n_hidden), Dense(), seed=seed)


def mvrbm(
    visible_shape: Sequence[int], hidden_shape: Sequence[int], rank: int = 1, *, seed: int | RandomSource = 0
) -> BoltzmannMachine:
    r"""Build a binary MVRBM.

    At rank 1, the energy is :math:`E = -\langle Y, U X V^\top\rangle - \langle B, X\rangle - \langle C, Y\rangle`. For
    arrays that are not matrices, the model is the TV-RBM, with energy
    :math:`E = -\langle Y, X \times_1 U_1 \cdots \times_D U_D\rangle - \langle B, X\rangle - \langle C, Y\rangle`. At
    higher ranks, the first term becomes a sum of `rank` such terms.
    """
    return BoltzmannMachine(Bernoulli(visible_shape), Bernoulli(hidden_shape), Kronecker(rank), seed=seed)


def multimodal_mvrbm(
    visible: Mapping[str, Unit], hidden_shape: Sequence[int], rank: int = 1, *, seed: int | RandomSource = 0
) -> BoltzmannMachine:
    r"""Build a multimodal MVRBM, in which all modalities share one hidden layer.

    At rank 1, the energy is

    .. math:: E = \sum_m [\varepsilon_m(X_m) - \langle Y, U_m T_m(X_m) V_m^\top\rangle] - \langle C, Y\rangle.
    """
    couplings = {name: Kronecker(rank) for name in visible}
    return BoltzmannMachine(visible, Bernoulli(hidden_shape), couplings, seed=seed)


def cp_rbm(
    visible_shape: Sequence[int], n_hidden: int, rank: int = 1, *, seed: int | RandomSource = 0
) -> BoltzmannMachine:
    r"""Build the TvRBM of Nguyen et al. (2015), with a visible array, a hidden vector and weights of CP rank `rank`.

    .. math::

        E = -\sum_r \langle y, a_r\rangle \langle X, b^1_r \circ \cdots \circ b^D_r\rangle
            - \langle B, X\rangle - \langle c, y\rangle
    """
    return BoltzmannMachine(Bernoulli(visible_shape), Bernoulli(n_hidden), CP(rank), seed=seed)


def replicated_softmax(n_rows: int, n_words: int, n_topics: int, *, seed: int | RandomSource = 0) -> BoltzmannMachine:
    r"""Build a replicated softmax RBM for documents of up to `n_rows` words, with `n_topics` binary hidden units.

    The energy is :math:`E = -\sum_{d} (V x_d + b)^\top [y, 1] - \langle c, y\rangle`. The rows :math:`x_d` are one-hot,
    and all rows share the same weights and bias.

    Shorter documents are padded with rows of zeros, which the model ignores. Salakhutdinov and Hinton multiply the
    hidden bias by the length D of the document. This requires no separate parameter here, because adding a constant to
    every column of V adds D times that constant to the field.
    """
    words = Categorical((n_rows, n_words), bias_shape=(1, n_words), padded=True)
    coupling = Kronecker(summed_modes=(0,))
    return BoltzmannMachine({"words": words}, Bernoulli((1, n_topics)), {"words": coupling}, seed=seed)


def documents(counts: Tensor, n_rows: int | None = None) -> Tensor:
    """Convert word counts to padded one-hot rows.

    Parameters
    ----------
    counts : Tensor (n, n_words)
        Number of occurrences of each word in each document.
    n_rows : int, optional
        Number of rows per document. Default: the number of words in the longest document.

    Returns
    -------
    Tensor (n, n_rows, n_words)
        One row per word, followed by rows of zeros. The order of the words does not affect the model.
    """
    counts = torch.as_tensor(counts)
    if counts.ndim != 2 or bool((counts < 0).any()) or bool((counts != counts.round()).any()):
        raise ValueError(
            f"counts must be nonnegative integers of shape (n, n_words), got an array of shape {tuple(counts.shape)}"
        )
    whole = counts.long()
    longest = int(whole.sum(1).max())
    n_rows = max(longest, 1) if n_rows is None else n_rows
    if longest > n_rows:
        raise ValueError(f"the longest document has {longest} words, which is more than n_rows = {n_rows}")
    ends = whole.cumsum(1)  # row d contains the first word whose cumulative count exceeds d
    rows = torch.arange(n_rows)[None, :, None]
    starts = (ends - whole)[:, None, :]
    return ((starts <= rows) & (rows < ends[:, None, :])).to(torch.get_default_dtype())
