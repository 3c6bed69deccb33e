r"""What a patch of a high-resolution image sees of the low-resolution one.

A patch of p x p pixels begins at a multiple of the stride. Its features, the derivatives of the bicubic image along
x, y, xx and yy, depend on a small window of the low-resolution image, and linearly: with E the bicubic rows of the
patch, E' and E'' their first and second differences and N the window,

.. math:: Z_1 = E N E'^\top, \quad Z_2 = E' N E^\top, \quad Z_3 = E N E''^\top, \quad Z_4 = E'' N E^\top.

So nothing large is ever computed patch by patch. Beyond its edges an image goes on with its edge pixels, for
patches as for bicubic interpolation, so that there are no borders here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm.vision.colour import luminance, white
from mvrbm.vision.resampling import crop_to_multiple, enlarging_taps, reduce_image, taps_matrix

__all__ = ["DERIVATIVES", "HIGH", "MARGIN", "Phase", "Windows", "cut_windows", "features", "image_pair", "phases_of"]

Array = NDArray[Any]

#: The visible layers: what is missing from the bicubic patch, and its derivatives along x, y, xx and yy.
HIGH = "X"
DERIVATIVES = ("Z1", "Z2", "Z3", "Z4")

MARGIN = 2  # pixels beyond a patch that its second differences reach


class Phase(NamedTuple):
    """Patches that begin `offset` pixels after a multiple of the scale, along one side."""

    offset: int
    first: int  # where the window begins, in low-resolution pixels from that multiple on
    plain: Tensor  # (p, w), float64: bicubic pixels from a window
    slope: Tensor  # (p, w): their first differences, x[i+1] - x[i-1]
    bend: Tensor  # (p, w): their second differences, x[i+2] - 2 x[i] + x[i-2]

    @property
    def size(self) -> int:
        """Pixels of a window."""
        return self.plain.shape[1]


@functools.lru_cache(maxsize=64)
def phase_of(scale: int, patch: int, offset: int) -> Phase:
    """Return what patches of this size see that begin `offset` pixels after a multiple of the scale."""
    outputs = np.arange(offset - MARGIN, offset + patch + MARGIN)
    matrix, first = taps_matrix(enlarging_taps(outputs, scale))
    enlarging, p = torch.from_numpy(matrix), patch
    plain = enlarging[MARGIN : MARGIN + p]
    slope = enlarging[MARGIN + 1 : MARGIN + 1 + p] - enlarging[MARGIN - 1 : MARGIN - 1 + p]
    bend = enlarging[MARGIN + 2 :] - 2 * plain + enlarging[:p]
    return Phase(offset, first, plain, slope, bend)


def phases_of(scale: int, stride: int) -> list[int]:
    """Return the offsets, modulo the scale, at which patches begin that are `stride` pixels apart."""
    return list(range(0, scale, math.gcd(scale, stride)))


def features(windows: Tensor, rows: Phase, columns: Phase) -> dict[str, Tensor]:
    """Derivatives of the bicubic patches of windows: (n, w, w) -> (n, p, p) by layer."""
    left = {"Z1": rows.plain, "Z2": rows.slope, "Z3": rows.plain, "Z4": rows.bend}
    right = {"Z1": columns.slope, "Z2": columns.plain, "Z3": columns.bend, "Z4": columns.plain}
    return {name: left[name].to(windows) @ windows @ right[name].to(windows).mT for name in DERIVATIVES}


@functools.lru_cache(maxsize=64)
def feature_matrix(scale: int, patch: int, row_offset: int, column_offset: int) -> Tensor:
    """All of `features` as one matrix (4 p p, w w) in double precision."""
    rows, columns = phase_of(scale, patch, row_offset), phase_of(scale, patch, column_offset)
    units = torch.eye(rows.size * columns.size, dtype=torch.float64).reshape(-1, rows.size, columns.size)
    return torch.cat([z.flatten(1) for z in features(units, rows, columns).values()], 1).T.contiguous()


# -- what there is to learn from --------------------------------------------------------------------


class Windows(NamedTuple):
    """Pairs of a low-resolution window and the high-resolution patch in its middle, all of one phase."""

    rows: Phase
    columns: Phase
    windows: Tensor  # (n, w, w) without their middle pixel, divided by the patch's scale
    targets: Tensor  # (n, p, p): the true patch less the bicubic one, divided by the patch's scale
    scales: Tensor  # (n,)

    def layers(self, which: Tensor | slice = slice(None)) -> dict[str, Tensor]:
        """The five visible layers, each (n, p, p)."""
        return {HIGH: self.targets[which], **features(self.windows[which], self.rows, self.columns)}


def image_pair(image: Any, scale: int) -> tuple[Array, Array]:
    """Make a low-resolution image from a high-resolution one.

    Parameters
    ----------
    image : array (H, W) or (H, W, 3)
        Bytes, 16-bit numbers or floats from 0 to 1.
    scale : {2, 3, 4}
        How many pixels become one.

    Returns
    -------
    low, high : float32 arrays (h, w) and (h * scale, w * scale)
        Luminance, white being 1. The low-resolution image is rounded as its type is.
    """
    pixels = np.asarray(image)
    if pixels.dtype.kind == "f" and not (pixels.min(initial=0.0) >= 0 and pixels.max(initial=0.0) <= 1):
        raise ValueError(f"images of floats must be from 0 to 1, got {pixels.min():.4g} to {pixels.max():.4g}")
    high = crop_to_multiple(luminance(image), scale)
    low = reduce_image(high, scale)
    top = white(high.dtype)
    return (low / top).astype(np.float32), (high / top).astype(np.float32)


def all_pairs(images: Sequence[Any], scale: int) -> list[tuple[Array, Array]]:
    """Pairs of all images; those too small for one low-resolution pixel are left out."""
    return [image_pair(image, scale) for image in images if min(np.shape(image)[:2], default=0) >= scale]


def centred(windows: Tensor) -> Tensor:
    """Subtract from each window (..., w, w) its middle pixel, which no derivative sees."""
    middle = windows.shape[-2] // 2, windows.shape[-1] // 2
    return windows - windows[..., middle[0], middle[1], None, None]


def patch_scales(windows: Tensor, rows: Phase, columns: Phase, floor: float) -> Tensor:
    """Root mean square of each window's derivatives, plus the floor: (n, w, w) -> (n,)."""
    squares = sum(z.square().flatten(1).sum(1) for z in features(windows, rows, columns).values())
    entries = len(DERIVATIVES) * len(rows.plain) * len(columns.plain)
    return torch.sqrt(torch.as_tensor(squares) / entries) + floor


def cut_windows(
    images: Sequence[Any],
    scale: int,
    patch: int,
    n: int,
    *,
    offsets: tuple[int, int] = (0, 0),
    floor: float = 0.005,
    flat: float = 0.01,
    augment: bool = False,
    seed: int = 0,
) -> Windows:
    """Cut random patches of one phase out of high-resolution images, and the windows that go with them.

    Parameters
    ----------
    images : sequence of arrays (H, W) or (H, W, 3)
        High-resolution images.
    scale, patch : int
        How many low-resolution pixels a patch has a side, and how many pixels.
    n : int
        How many; fewer are returned where there are fewer.
    offsets : (int, int)
        Where patches begin, rows and columns, after a multiple of the scale.
    floor : float
        Added to the scale of each patch.
    flat : float
        Patches whose derivatives have a smaller root mean square are left out.
    augment : bool
        Whether to take flipped and turned images too.
    seed : int
        Of the places.
    """
    rows, columns = (phase_of(scale, patch, offset) for offset in offsets)
    random = np.random.default_rng(seed)
    pairs = all_pairs(images, scale)
    turns = range(8) if augment else range(1)
    sources = [(number, turn) for number in range(len(pairs)) for turn in turns]
    places = []
    for number, turn in sources:
        sides = turned(pairs[number][1], turn).shape
        places.append([np.arange(o, size - patch + 1, scale) for size, o in zip(sides, offsets, strict=True)])
    room = np.array([len(tops) * len(lefts) for tops, lefts in places])
    if room.sum() == 0:
        raise ValueError(f"images must be larger than a patch of {patch} x {patch} pixels, none of {len(pairs)} is")
    chosen = _choose(random, room, 2 * n)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for (number, turn), (tops, lefts), mine in zip(sources, places, chosen, strict=True):
        if len(mine):
            low, high = (torch.from_numpy(np.ascontiguousarray(turned(part, turn))) for part in pairs[number])
            top, left = torch.from_numpy(tops[mine // len(lefts)]), torch.from_numpy(lefts[mine % len(lefts)])
            found.append(_cut(low, high, top, left, rows, columns, scale, floor, flat))
    windows, targets, scales = (torch.cat(parts) for parts in zip(*found, strict=True))
    if len(scales) == 0:
        raise ValueError("images must not be flat throughout: no patch is left to learn from")
    order = torch.from_numpy(random.permutation(len(scales))[:n])
    return Windows(rows, columns, windows[order], targets[order], scales[order])


def turned(image: Array, turn: int) -> Array:
    """One of the eight flips and turns of an image (rows, columns)."""
    image = np.rot90(image, turn % 4)
    return image[:, ::-1] if turn >= 4 else image


def _choose(random: np.random.Generator, room: Array, n: int) -> list[Array]:
    """Numbers of up to n places without repetition, by image."""
    total = int(room.sum())
    numbers = np.arange(total) if n >= total else random.choice(total, n, replace=False)
    ends = np.cumsum(room)
    image = np.searchsorted(ends, numbers, side="right")
    starts = ends - room
    return [np.sort(numbers[image == which] - starts[which]) for which in range(len(room))]


def _cut(
    low: Tensor,
    high: Tensor,
    top: Tensor,
    left: Tensor,
    rows: Phase,
    columns: Phase,
    scale: int,
    floor: float,
    flat: float,
) -> tuple[Tensor, Tensor, Tensor]:
    def window(start: Tensor, phase: Phase, size: int) -> Tensor:
        return (start[:, None] // scale + phase.first + torch.arange(phase.size)).clamp(0, size - 1)

    y, x = window(top, rows, low.shape[0]), window(left, columns, low.shape[1])
    windows = centred(low[y[:, :, None], x[:, None, :]])
    middle = low[y[:, rows.size // 2], x[:, columns.size // 2]]
    scales = patch_scales(windows, rows, columns, floor)
    busy = scales - floor >= flat
    windows, scales, top, left, middle = (part[busy] for part in (windows, scales, top, left, middle))
    patch = torch.arange(len(rows.plain))
    truth = high[(top[:, None] + patch)[:, :, None], (left[:, None] + patch)[:, None, :]] - middle[:, None, None]
    missing = truth - rows.plain.to(windows) @ windows @ columns.plain.to(windows).mT
    return windows / scales[:, None, None], missing / scales[:, None, None], scales
