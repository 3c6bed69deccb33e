r"""Haar-likeness, a number from 0 to 1 that measures how close the filters of an MVRBM are to Haar functions.

Filter (k, l) of an MVRBM is the outer product :math:`u_k v_l^\top` of a row of U and a row of V. The paper calls such
filters "quite close to the Haar filters". Here a vector is compared with the Haar functions of all positions and
widths, not only the dyadic ones, so that a filter does not have to lie on a grid. For integers :math:`a` and
:math:`w \ge 1` they are

.. math::

    \phi_{a,w} = 1_{[a, a + w)}, \qquad \psi_{a,w} = 1_{[a, a + w)} - 1_{[a + w, a + 2w)} .

The Haar-likeness of a vector is the share of its energy that the best Haar function explains,

.. math::

    s(u) = \max_{h} \cos^2(u, h) = \max_h \frac{\langle u, h\rangle^2}{\|u\|^2 \|h\|^2} .

It is 1 for a Haar function and does not depend on sign or scale. In two dimensions Haar functions are products of these
(a box, a vertical or a horizontal edge, a checker), so that
:math:`\cos^2(u v^\top, g h^\top) = \cos^2(u, g) \cos^2(v, h)`: the likeness of a filter is :math:`s(u)\, s(v)`, and
the mean over all filters is the product of the means over U and over V.

There are so many Haar functions that a smooth vector is close to one by chance. Three references show how close:

- ``scrambled``: the same vectors with random signs of the coefficients of their cosine transform. They have the same
  power at every frequency, so they are equally smooth, but have no aligned edges.
- ``white``: white noise.
- ``dct``: the cosine basis, the usual alternative to Haar functions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from mvrbm import BoltzmannMachine

__all__ = ["cosine_basis", "haar_functions", "haar_likeness", "likeness"]

Array = NDArray[np.float64]


def haar_functions(length: int) -> Array:
    """Return all Haar functions on a line of points, normalized: boxes first, then steps.

    Parameters
    ----------
    length : int
        Number of points.

    Returns
    -------
    array (n_functions, length)
        28 points have 406 boxes and 196 steps.
    """
    if length < 1:
        raise ValueError(f"length must be a whole number of at least 1, got {length}")
    point = np.arange(length)

    def box(first: int, width: int) -> Array:
        return ((point >= first) & (point < first + width)).astype(np.float64)

    boxes = [box(a, w) for w in range(1, length + 1) for a in range(length - w + 1)]
    steps = [box(a, w) - box(a + w, w) for w in range(1, length // 2 + 1) for a in range(length - 2 * w + 1)]
    functions = np.stack(boxes + steps)
    unit: Array = functions / np.linalg.norm(functions, axis=1, keepdims=True)
    return unit


def likeness(vectors: ArrayLike) -> Array:
    """Return the Haar-likeness of vectors.

    Parameters
    ----------
    vectors : array (..., length)
        Nonzero vectors along the last axis.

    Returns
    -------
    array (...)
        Numbers from 0 to 1.
    """
    given = np.asarray(vectors, dtype=np.float64)
    largest = np.abs(given).max(axis=-1, keepdims=True, initial=0)
    if not np.isfinite(largest).all() or not largest.all():
        raise ValueError("vectors must be finite and not zero")
    given = given / largest  # squares of very small or large numbers would underflow or overflow
    cosines = given @ haar_functions(given.shape[-1]).T / np.linalg.norm(given, axis=-1, keepdims=True)
    best: Array = (cosines**2).max(axis=-1)
    return np.minimum(best, 1.0)


def haar_likeness(machine: BoltzmannMachine, *, draws: int = 200, seed: int = 0) -> dict[str, Any]:
    r"""Return the Haar-likeness of the filters :math:`u_k v_l^\top` of an MVRBM, and of the references.

    Parameters
    ----------
    machine : BoltzmannMachine
        A machine with one visible layer of two axes, coupled by one Kronecker product.
    draws : int
        Number of draws of the references.
    seed : int
        Random seed of these draws.

    Returns
    -------
    dict
        ``"rows"`` for U, ``"columns"`` for V, and ``"filters"`` for all filters. Each is a dict with the mean likeness
        ``"mean"``, the mean likeness of the references ``"scrambled"``, ``"white"`` and ``"dct"``, and
        ``"scrambled_std"``, the standard deviation of the scrambled mean over draws. ``"filters"`` also has ``"each"``,
        an array (K, L) with the likeness of each filter.

    Examples
    --------
    >>> from mvrbm import models
    >>> found = haar_likeness(models.mvrbm((28, 28), (25, 25)))
    >>> found["filters"]["mean"] < 0.3
    True
    """
    U, V = _factors(machine)
    chance = np.random.default_rng(seed)
    each = likeness(U), likeness(V)
    scrambled = [_scrambled(factor, draws, chance) for factor in (U, V)]  # (draws,)
    white = [float(likeness(chance.standard_normal((draws, factor.shape[1]))).mean()) for factor in (U, V)]
    cosine = [float(likeness(cosine_basis(factor.shape[1])).mean()) for factor in (U, V)]

    def summary(mean: float, by_chance: Array, of_white: float, of_cosine: float) -> dict[str, Any]:
        spread = float(by_chance.std(ddof=1)) if draws > 1 else math.nan
        return {
            "mean": mean,
            "scrambled": float(by_chance.mean()),
            "scrambled_std": spread,
            "white": of_white,
            "dct": of_cosine,
        }

    sides = [float(part.mean()) for part in each]
    filters = summary(math.prod(sides), scrambled[0] * scrambled[1], math.prod(white), math.prod(cosine))
    return {
        "rows": summary(sides[0], scrambled[0], white[0], cosine[0]),
        "columns": summary(sides[1], scrambled[1], white[1], cosine[1]),
        "filters": {**filters, "each": np.outer(*each)},
    }


def cosine_basis(length: int) -> Array:
    r"""Return the orthonormal DCT-II basis, one vector per row: :math:`\cos(\pi k (2 i + 1) / 2 n)`, scaled."""
    k = np.arange(length)[:, None]
    i = np.arange(length)
    basis = np.cos(np.pi * k * (2 * i + 1) / (2 * length)) * math.sqrt(2 / length)
    basis[0] /= math.sqrt(2)
    return np.asarray(basis, dtype=np.float64)


def _factors(machine: BoltzmannMachine) -> tuple[Array, Array]:
    """Return U (K, I) and V (L, J)."""
    links = list(machine.links.values())
    factors = links[0].matrix_factors() if len(links) == 1 else None
    if factors is None or len(factors[0]) != 1:
        raise ValueError(
            "machine must have one visible layer of two axes and one Kronecker product: filters of other machines "
            f"are not outer products, got {machine!r:.200}"
        )
    with torch.no_grad():
        U, V = (factor[0].detach().cpu().double().numpy() for factor in factors)
    return U, V


def _scrambled(vectors: Array, draws: int, chance: np.random.Generator) -> Array:
    """Return the mean likeness of vectors whose cosine coefficients have random signs, (draws,)."""
    basis = cosine_basis(vectors.shape[1])
    coefficients = vectors @ basis.T
    return np.array(
        [likeness((coefficients * chance.choice([-1, 1], coefficients.shape)) @ basis).mean() for _ in range(draws)]
    )
