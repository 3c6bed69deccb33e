"""Standard plots for sequence models. Each function draws on one matplotlib `Axes`."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvrbm.extras import require
from mvrbm.io.alignments import as_alignment
from mvrbm.io.alphabets import ALPHABETS
from mvrbm.sequences.contacts import ranked_pairs
from mvrbm.sequences.site_model import Array

__all__ = ["plot_contact_map", "plot_correlations", "plot_logo", "plot_mutations", "plot_projection"]

# Colors of letters by chemical property, and the color of all other letters.
_AMINO_ACIDS = {"AVLIMFWP": "#333333", "GSTYCQN": "#2e8b57", "KRH": "#2a5fc2", "DE": "#c2342a", "-": "#b0b0b0"}
_NUCLEOTIDES = {"A": "#2e8b57", "C": "#2a5fc2", "G": "#d99a1c", "TU": "#c2342a", "-": "#b0b0b0"}
_OTHER = "#6a4a8c"
_HIT, _MISS = "#2a78c2", "#d1672a"
# Width of a letter in a logo, in sites.
_LETTER_WIDTH = 0.9


def _axes(ax: Any, width: float, height: float) -> Any:
    """Return `ax`, or the axes of a new figure with the given size in inches."""
    if ax is not None:
        return ax
    pyplot = require("matplotlib.pyplot", "a plot", "demo")
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def plot_logo(weights: Array, letters: str, *, ax: Any = None) -> Any:
    """Draw the weights of a hidden unit as a sequence logo.

    The height of a letter is its weight. Letters with negative weights are below the axis.

    Parameters
    ----------
    weights : array of shape (sites, letters)
        Weights, such as one entry of :func:`hidden_weights`, or frequencies of letters.
    letters : str
        The letters, such as ``model.alphabet_.letters``.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on. Default: the axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The plot.
    """
    weights = np.asarray(weights)
    if weights.ndim != 2 or weights.shape[1] != len(letters):
        raise ValueError(f"weights must have shape (sites, {len(letters)}), got {weights.shape}")
    ax = _axes(ax, max(4.0, 0.22 * len(weights)), 2.2)
    shapes = {letter: _glyph(letter) for letter in set(letters)}
    colors = _colors(letters)
    lowest = highest = 0.0
    for site, row in enumerate(weights, start=1):
        up = down = 0.0
        for code in np.argsort(np.abs(row)):
            height = float(row[code])
            bottom = up if height > 0 else down + height
            if height > 0:
                up += height
            else:
                down += height
            if height:
                ax.add_patch(_letter(shapes[letters[code]], site, bottom, abs(height), colors[letters[code]]))
        lowest, highest = min(lowest, down), max(highest, up)
    ax.axhline(0, color="black", linewidth=0.6)
    ax.set_xlim(0.4, len(weights) + 0.6)
    margin = 0.03 * max(highest - lowest, 1e-12)
    ax.set_ylim(lowest - margin, highest + margin)
    ax.set_xlabel("site")
    ax.set_ylabel("weight")
    return ax


def _colors(letters: str) -> dict[str, str]:
    groups = _NUCLEOTIDES if set(letters) <= set("-ACGTU") else _AMINO_ACIDS
    return {letter: next((color for group, color in groups.items() if letter in group), _OTHER) for letter in letters}


def _glyph(letter: str) -> Any:
    """Return the outline of a letter in a box of height 1 and of width 1, or less for narrow letters."""
    path = require("matplotlib.textpath", "a plot", "demo").TextPath
    font = require("matplotlib.font_manager", "a plot", "demo").FontProperties(family="DejaVu Sans", weight="bold")
    transforms = require("matplotlib.transforms", "a plot", "demo")
    outline = path((0, 0), letter, size=1, prop=font)
    box, usual = outline.get_extents(), path((0, 0), "E", size=1, prop=font).get_extents()
    width = min(1.0, box.width / usual.width)
    move = transforms.Affine2D().translate(-box.x0 - box.width / 2, -box.y0).scale(width / box.width, 1 / box.height)
    return move.transform_path(outline)


def _letter(outline: Any, site: float, bottom: float, height: float, color: str) -> Any:
    transforms = require("matplotlib.transforms", "a plot", "demo")
    patches = require("matplotlib.patches", "a plot", "demo")
    place = transforms.Affine2D().scale(_LETTER_WIDTH, height).translate(site, bottom)
    return patches.PathPatch(place.transform_path(outline), facecolor=color, linewidth=0)


def plot_contact_map(
    scores: Array,
    distances: Array | None = None,
    *,
    n_pairs: int | None = None,
    threshold: float = 8.0,
    separation: int = 4,
    ax: Any = None,
) -> Any:
    """Draw a contact map: all scores below the diagonal, and the pairs with the highest scores above it.

    Parameters
    ----------
    scores : array of shape (sites, sites)
        Result of :func:`contact_map`.
    distances : array of shape (sites, sites), optional
        Distances in a known structure. Contacts in the structure are gray, and predicted contacts are colored by
        whether they are true. Pairs with distance NaN are excluded from the predictions.
    n_pairs : int, optional
        Number of predicted contacts. Default: the number of sites.
    threshold, separation
        See :func:`contact_precision`.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on. Default: the axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The plot.
    """
    ax = _axes(ax, 5.0, 5.0)
    sites = len(scores)
    first, second = ranked_pairs(scores, separation=separation)
    below = np.ma.masked_where(np.tri(sites, k=-1) == 0, np.clip(scores, 0, None))
    ax.imshow(below, cmap="Greys", extent=(0.5, sites + 0.5, sites + 0.5, 0.5), interpolation="nearest")
    true = np.zeros(len(first), dtype=bool)
    if distances is not None:
        known = np.asarray(distances, dtype=float)
        rows, columns = np.nonzero(np.triu(known < threshold, 1))
        ax.scatter(columns + 1, rows + 1, s=30, marker="s", color="#cccccc", linewidths=0, label="structure")
        kept = ~np.isnan(known[first, second])
        first, second = first[kept], second[kept]
        true = known[first, second] < threshold
    top = slice(sites if n_pairs is None else n_pairs)
    groups = [("predicted", ~true, _MISS)] if distances is None else [("true", true, _HIT), ("false", ~true, _MISS)]
    for label, chosen, color in groups:
        ax.scatter(second[top][chosen[top]] + 1, first[top][chosen[top]] + 1, s=12, color=color, label=label)
    ax.set_xlabel("site")
    ax.set_ylabel("site")
    ax.set_aspect("equal")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    return ax


def plot_mutations(scan: Array, reference: str, letters: str, *, ax: Any = None) -> Any:
    """Draw a heat map of the effects of all single mutations of a sequence. Dots mark the letters of the sequence.

    Parameters
    ----------
    scan : array of shape (sites, letters)
        Result of :func:`mutation_scan`.
    reference : str
        The sequence.
    letters : str
        The letters, such as ``model.alphabet_.letters``.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on. Default: the axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The plot.
    """
    sites = len(scan)
    if scan.shape[1] != len(letters) or len(reference) != sites:
        raise ValueError(
            f"scan must have shape ({len(reference)}, {len(letters)}) for this reference and these letters, "
            f"got {scan.shape}"
        )
    alphabet = next((named for named in ALPHABETS.values() if named.letters == letters), letters)
    codes = as_alignment([reference], alphabet).codes[0]
    ax = _axes(ax, max(4.0, 0.16 * sites), 0.2 * len(letters) + 0.8)
    limit = max(float(np.abs(scan).max()), 1e-12)
    image = ax.imshow(scan.T, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    ax.scatter(range(sites), codes, s=5, color="black")
    ax.set_yticks(range(len(letters)), list(letters), fontsize=7)
    step = max(1, sites // 10)
    ax.set_xticks(range(0, sites, step), [str(site + 1) for site in range(0, sites, step)])
    ax.set_xlabel("site")
    ax.figure.colorbar(image, ax=ax, label="change of log-likelihood (nats)")
    return ax


def plot_projection(natural: Array, generated: Array, *, ax: Any = None) -> Any:
    """Plot natural and generated sequences along the first two principal components of the natural ones.

    Parameters
    ----------
    natural, generated : array of shape (n, 2)
        Coordinates, as returned by :func:`project`.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on. Default: the axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The plot.
    """
    ax = _axes(ax, 4.5, 4.0)
    for label, points, color in (("natural", natural, "#999999"), ("generated", generated, _HIT)):
        ax.scatter(points[:, 0], points[:, 1], s=6, alpha=0.5, linewidths=0, color=color, label=label)
    ax.set_xlabel("first principal component")
    ax.set_ylabel("second principal component")
    ax.legend()
    return ax


def plot_correlations(natural: Array, generated: Array, *, ax: Any = None) -> Any:
    """Plot correlations of generated against natural sequences, with Pearson's coefficient in the title.

    Parameters
    ----------
    natural, generated : array
        Result of :func:`correlations`.
    ax : matplotlib.axes.Axes, optional
        Axes to draw on. Default: the axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        The plot.
    """
    ax = _axes(ax, 4.0, 4.0)
    ends = [float(min(natural.min(), generated.min())), float(max(natural.max(), generated.max()))]
    ax.hexbin(natural, generated, bins="log", gridsize=70, extent=(*ends, *ends), cmap="viridis", linewidths=0.1)
    ax.plot(ends, ends, color="black", linewidth=0.8)
    ax.set_xlabel("natural")
    ax.set_ylabel("generated")
    ax.set_title(f"Pearson {np.corrcoef(natural, generated)[0, 1]:.3f}")
    return ax
