"""Example alignment of lattice proteins, whose structure is known exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mvrbm.io.alignments import Alignment, read_alignment
from mvrbm.sequences.site_model import Array

__all__ = ["load_lattice_proteins"]

_FILE = Path(__file__).parent / "data" / "lattice_proteins.fasta"
# Site at each point of the 3 x 3 x 3 cube that the chain fills, counted from 1.
_CUBE = [
    [[1, 2, 3], [20, 23, 4], [21, 22, 5]],
    [[18, 25, 26], [19, 24, 7], [12, 11, 6]],
    [[17, 16, 27], [14, 15, 8], [13, 10, 9]],
]


def load_lattice_proteins() -> tuple[Alignment, Array]:
    """Load 2,000 sequences of lattice proteins, and the distances between their sites.

    A lattice protein is a chain of 27 amino acids that fills a cube of 3 x 3 x 3 points. All of these sequences fold
    into the same structure. They are a subset of the sequences in J. Tubiana's package PGM (BSD 3-clause license).

    Returns
    -------
    Alignment
        The sequences.
    array of shape (27, 27)
        Distances between the sites in the cube, in units of the lattice spacing. Sites at distance 1 are in contact, so
        pass ``threshold=1.1`` to :func:`contact_precision`, whose default is in angstroms.

    References
    ----------
    Tubiana, Cocco and Monasson, "Learning compositional representations of interacting systems with restricted
    Boltzmann machines: comparative study of lattice proteins", Neural Computation (2019).

    Examples
    --------
    >>> from mvrbm.sequences import contact_precision, load_lattice_proteins
    >>> alignment, distances = load_lattice_proteins()
    >>> alignment.codes.shape
    (2000, 27)
    >>> precision = contact_precision(-distances, distances, threshold=1.1)  # the best scores
    >>> float(precision[0]), float(precision[-1].round(2))  # the last value is the precision of random pairs
    (1.0, 0.09)
    """
    order = np.argsort(np.ravel(_CUBE))
    points = np.argwhere(np.ones((3, 3, 3)))[order]
    distances: Array = np.linalg.norm(points[:, None] - points, axis=-1)
    return read_alignment(_FILE), distances
