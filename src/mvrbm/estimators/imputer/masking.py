"""Masks that hide known entries, for model selection and for training the correction.

If the data has missing entries, the entries that are missing in one sample are hidden in another sample, and random
entries are hidden in columns of tables in which few entries are missing. If the data is complete, the masks are random.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.random import RandomSource

# Minimum number of samples with held-out entries (or half of the samples, if there are fewer than 100).
_FEWEST_HELD = 50
# Maximum number of samples with held-out entries.
_MOST_HELD = 400
#: Arrays with fewer samples are cut into rows along the last axis, in which entries are held out.
FEW_SAMPLES = 10
# Share of the entries to hide in these rows, and in columns of tables, if the masks of other rows hide fewer.
_LEAST_HIDDEN = 0.1
# Maximum number of masks to combine.
_MOST_COPIES = 20
# Number of consecutive samples that share a random mask, because each mask requires solving a linear system.
_SAMPLES_PER_MASK = 20


@dataclass(frozen=True)
class Samples:
    """Samples in which some of the known entries are held out for model selection.

    Parameters
    ----------
    x : Tensor of shape (n, D)
        Values, with 0 for unknown entries.
    shown : Tensor of shape (n, D)
        Mask of the known entries that are not held out.
    held : Tensor of shape (n, D)
        Mask of the known entries that are held out.
    """

    x: Tensor
    shown: Tensor
    held: Tensor

    @property
    def known(self) -> Tensor:
        """Mask of shape (n, D) that is True for all known entries."""
        return self.shown | self.held

    def reshape(self, size: int) -> Samples:
        """Regroup the entries into samples of `size` entries."""
        return Samples(*(part.reshape(-1, size) for part in (self.x, self.shown, self.held)))

    def with_held_entries(self) -> Samples:
        """Return the samples that have held-out entries."""
        rows = self.held.any(1)
        return Samples(self.x[rows], self.shown[rows], self.held[rows])

    def first(self, n: int) -> Samples:
        """Return the first `n` samples."""
        return Samples(self.x[:n], self.shown[:n], self.held[:n])

    def every_second(self, start: int) -> Samples:
        """Return every second sample, starting with the sample at index `start`."""
        return Samples(self.x[start::2], self.shown[start::2], self.held[start::2])

    def to(self, device: torch.device) -> Samples:
        """Return a copy of the samples on the given device."""
        return Samples(*(part.to(device) for part in (self.x, self.shown, self.held)))


def hold_out(x: Tensor, known: Tensor, shape: tuple[int, ...], rng: RandomSource) -> Samples:
    """Hold out known entries in one fifth of the samples and return a :class:`Samples` object.

    At least 50 samples (or half of the samples, if there are fewer than 100) and at most 400 samples have held-out
    entries. If there are fewer than 10 arrays, their rows along the last axis are treated as samples, and masks of
    other rows are shifted along this axis. `x` and `known` have shape (n, D), and `shape` is the shape of a sample.
    """
    few = len(known) < FEW_SAMPLES and len(shape) > 1
    rows = known.reshape(-1, shape[-1]) if few else known
    shape = (1, shape[-1]) if few else shape  # a row is a picture of one line, in which boxes are hidden too
    n = len(rows)
    count = n if few and n < FEW_SAMPLES else min(max(n // 5, min(n // 2, _FEWEST_HELD), 1), _MOST_HELD)
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[rng.permutation(n)[:count]] = True
    patterns = missing_patterns(rows)
    others = rng.permutation(n)
    others = torch.where(others == torch.arange(n), (others + 1) % n, others)  # another sample, if there is one
    if few and patterns is not None:
        shown = _shifted(patterns[others], rng)
    else:
        shown = masks_like_missing(patterns, others, shape, rng)
    if patterns is not None and len(shape) == 1:
        shown &= _enough_per_column(patterns, rng)
    if n > 1 and not bool((rows & chosen[:, None] & ~shown).any()):
        # All samples lack the same entries.
        shown = random_masks(n, shape, rng, torch.empty(0)).flatten(1)
    if n == 1 and not few:
        shown = rows  # nothing predicts the entries of the only row of a table
    held = (rows & chosen[:, None] & ~shown).reshape(known.shape)
    return Samples(x, known & ~held, held)


def _shifted(masks: Tensor, rng: RandomSource) -> Tensor:
    """Shift each row of the masks cyclically by a random number of entries.

    If masks hide few entries, several shifted copies are combined.
    """
    size = masks.shape[1]
    hidden = float((~masks).double().mean())
    shown = torch.ones_like(masks)
    for _ in range(min(math.ceil(_LEAST_HIDDEN / hidden), _MOST_COPIES)):
        shift = torch.floor(size * rng.uniform((len(masks), 1), torch.empty(0))).long()
        shown &= masks.gather(1, (torch.arange(size) + shift) % size)
    return shown


def _enough_per_column(known: Tensor, rng: RandomSource) -> Tensor:
    """Return masks that hide random entries of table columns in which few entries are missing.

    Otherwise, models would be chosen by their errors in the columns in which most entries are missing. On average, the
    masks hide at most one entry per row.
    """
    missing = (~known).double().mean(0)
    lacking = missing > 0
    share = torch.where(lacking, (min(_LEAST_HIDDEN, 1 / int(lacking.sum())) - missing).clamp(min=0), 0.0)
    return rng.uniform(tuple(known.shape), share) >= share


def missing_patterns(known: Tensor) -> Tensor | None:
    """Return `known`, whose rows can be used as masks for other samples, or None if all entries are known."""
    return None if bool(known.all()) else known


def masks_like_missing(known: Tensor | None, others: Tensor, shape: tuple[int, ...], rng: RandomSource) -> Tensor:
    """Return masks of shape (n, D) that are True for the entries to show.

    The masks are taken from other samples or drawn at random.

    Parameters
    ----------
    known : Tensor of shape (n_samples, D), optional
        Masks of the known entries in all samples. If None, the masks are random.
    others : Tensor of shape (n,)
        Indices of the samples from which to take the masks.
    shape : tuple of int
        Shape of a sample.
    rng : RandomSource
        Random source for the masks.

    Notes
    -----
    When a mask from another sample is applied, only entries that are known in both samples can be shown, so a model
    would see fewer known entries than during imputation. To compensate, about half of these masks also show a random
    fraction of the other entries.
    """
    n = len(others)
    like = torch.empty(0)
    if known is not None:
        share = rng.uniform((n, 1), like) * (rng.uniform((n, 1), like) < 0.5)
        return known[others] | (rng.uniform((n, known.shape[1]), like) < share)
    n_masks = -(-n // _SAMPLES_PER_MASK)
    masks = random_masks(n_masks, shape, rng, like).flatten(1)
    return masks.repeat_interleave(_SAMPLES_PER_MASK, 0)[:n]


def random_masks(n: int, shape: tuple[int, ...], rng: RandomSource, like: Tensor) -> Tensor:
    """Draw random masks of shape (n, *shape) that are True for the entries to show.

    About half of the masks show each entry independently, with a probability that is drawn at random for each mask. The
    other masks show only the entries inside a random box, or only the entries outside the box. For vectors, all masks
    show each entry independently, because the order of the entries in a vector has no meaning.
    """
    one_per_sample = (n, *[1] * len(shape))
    shown = rng.uniform((n, *shape), like) < rng.uniform(one_per_sample, like)
    if len(shape) == 1:
        return shown
    box = torch.ones((n, *shape), dtype=torch.bool, device=like.device)
    for axis, size in enumerate(shape, 1):
        # A box covers between a quarter and five quarters of the axis. It may extend beyond the edges.
        start = 1.5 * rng.uniform((n, 1), like) - 0.5
        length = 0.25 + rng.uniform((n, 1), like)
        middle = (torch.arange(size, device=like.device) + 0.5) / size
        inside = (middle >= start) & (middle < start + length)
        box &= inside.reshape(n, *[size if other == axis else 1 for other in range(1, len(shape) + 1)])
    inverted = rng.uniform(one_per_sample, like) < 0.5
    is_box = rng.uniform(one_per_sample, like) < 0.5
    return torch.where(is_box, box ^ inverted, shown)
