"""Known entries that are hidden: to compare models on them, and to train the correction.

If entries are missing in the data, the entries that are missing in one sample are hidden in another. If the data is
complete, masks are random.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mvrbm.random import RandomSource

# Smallest and largest number of samples in which entries are held out to compare models.
_FEWEST_HELD = 50
_MOST_HELD = 400
# Number of consecutive samples that share a random mask. Every mask costs the solution of a linear system.
_SAMPLES_PER_MASK = 20


@dataclass(frozen=True)
class Samples:
    """Samples with known entries, some of which are held out to compare models.

    Parameters
    ----------
    x : Tensor (n, D)
        Values, 0 where they are unknown.
    shown : Tensor (n, D)
        True for known entries that are not held out.
    held : Tensor (n, D)
        True for known entries that are held out.
    """

    x: Tensor
    shown: Tensor
    held: Tensor

    @property
    def known(self) -> Tensor:
        """True for all known entries, (n, D)."""
        return self.shown | self.held

    def reshape(self, size: int) -> Samples:
        """Return the same entries as samples of `size` entries."""
        return Samples(*(part.reshape(-1, size) for part in (self.x, self.shown, self.held)))

    def with_held_entries(self) -> Samples:
        """Return the samples that have held-out entries."""
        rows = self.held.any(1)
        return Samples(self.x[rows], self.shown[rows], self.held[rows])

    def to(self, device: torch.device) -> Samples:
        """Return the samples on a device."""
        return Samples(*(part.to(device) for part in (self.x, self.shown, self.held)))


def hold_out(x: Tensor, known: Tensor, shape: tuple[int, ...], rng: RandomSource) -> Samples:
    """Hold out known entries of a fifth of the samples, of at least 50 and at most 400 samples.

    `x` and `known` are (n, D), and `shape` is the shape of a sample.
    """
    n = len(known)
    count = min(max(n // 5, min(n // 2, _FEWEST_HELD), 1), _MOST_HELD)
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[rng.permutation(n)[:count]] = True
    shown = masks_like_missing(missing_patterns(known), rng.permutation(n), shape, rng)
    held = known & chosen[:, None] & ~shown
    return Samples(x, known & ~held, held)


def missing_patterns(known: Tensor) -> Tensor | None:
    """Return the masks of known entries, from which masks of other samples are taken. None if all are known."""
    return None if bool(known.all()) else known


def masks_like_missing(known: Tensor | None, others: Tensor, shape: tuple[int, ...], rng: RandomSource) -> Tensor:
    """Return masks of the entries to show, (n, D): the masks of other samples, or random masks.

    Parameters
    ----------
    known : Tensor (n_samples, D), optional
        Masks of the known entries of all samples. None: the masks are random.
    others : Tensor (n,)
        Index of the sample whose mask is taken.
    shape : tuple of int
        Shape of a sample.
    rng : RandomSource
        Source of random numbers.

    Notes
    -----
    Only entries that are known in both samples can be shown, which are fewer entries than a model sees later.
    Therefore about half of the masks show a random share of the other entries too.
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
    """Return masks of the entries of n samples to show, (n, *shape).

    About half of the masks show random entries, with a random probability. The others show only the entries inside a
    random box, or only the entries outside. The entries of a vector have no neighbors, so all masks of vectors show
    random entries.
    """
    one_per_sample = (n, *[1] * len(shape))
    shown = rng.uniform((n, *shape), like) < rng.uniform(one_per_sample, like)
    if len(shape) == 1:
        return shown
    box = torch.ones((n, *shape), dtype=torch.bool, device=like.device)
    for axis, size in enumerate(shape, 1):
        # A box covers a quarter to five quarters of the axis and may extend beyond the edge, so it can be a half.
        start = 1.5 * rng.uniform((n, 1), like) - 0.5
        length = 0.25 + rng.uniform((n, 1), like)
        middle = (torch.arange(size, device=like.device) + 0.5) / size
        inside = (middle >= start) & (middle < start + length)
        box &= inside.reshape(n, *[size if other == axis else 1 for other in range(1, len(shape) + 1)])
    inverted = rng.uniform(one_per_sample, like) < 0.5
    is_box = rng.uniform(one_per_sample, like) < 0.5
    return torch.where(is_box, box ^ inverted, shown)
