"""Training data for super-resolution: pairs of images, and patches and crops that are cut out of them at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvrbm.vision.color import luminance
from mvrbm.vision.images import Array, check_image, turned, white
from mvrbm.vision.resampling import crop_to_multiple, reduce_image
from mvrbm.vision.superres.features import DERIVATIVES, HIGH, MARGIN, Geometry, Phase, centered, features, phase_of

#: Side of the middle of a crop, in low-resolution pixels.
CROP_SIDE = 24


def image_pair(image: Any, scale: int) -> tuple[Array, Array]:
    """Return the low- and high-resolution luminance of an image, float32 (h, w) and (h * scale, w * scale).

    The image (H, W) or (H, W, 3) has bytes, 16-bit numbers or floats from 0 to 1; white is 1 in the results. The
    low-resolution image is rounded to the type of the image.
    """
    high = crop_to_multiple(luminance(check_image(image, unit_range=True)), scale)
    top = white(high.dtype)
    return (reduce_image(high, scale) / top).astype(np.float32), (high / top).astype(np.float32)


def _all_pairs(images: Sequence[Any], scale: int) -> list[tuple[Array, Array]]:
    """Return the pairs of all images but those too small for one low-resolution pixel."""
    return [image_pair(image, scale) for image in images if min(np.shape(image)[:2], default=0) >= scale]


class TrainingPatches(NamedTuple):
    """Pairs of a low-resolution window and the high-resolution patch in its middle, all of one phase."""

    rows: Phase
    columns: Phase
    windows: Tensor  # (n, w, w) minus their middle pixel, divided by the scale of the patch
    targets: Tensor  # (n, p, p): the true patch minus the bicubic one, divided by the scale of the patch
    scales: Tensor  # (n,)

    def layers(self, which: Tensor | slice = slice(None)) -> dict[str, Tensor]:
        """Return the five visible layers, each (n, p, p)."""
        return {HIGH: self.targets[which], **features(self.windows[which], self.rows, self.columns)}

    def first(self, n: int) -> TrainingPatches:
        """Return the first n patches."""
        return TrainingPatches(self.rows, self.columns, *(part[:n] for part in self[2:]))


def cut_patches(
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
) -> TrainingPatches:
    """Cut up to `n` random patches of one phase, and their low-resolution windows, out of high-resolution images.

    Patches have `patch` x `patch` pixels and begin `offsets` (rows, columns) after a multiple of the scale. `floor` is
    added to the scale of each patch; patches whose derivatives have a root mean square below `flat` are left out.
    With `augment`, flipped and turned images are used too.
    """
    rows, columns = (phase_of(scale, patch, offset) for offset in offsets)

    def window(start: Tensor, phase: Phase, size: int) -> Tensor:
        return (start[:, None] // scale + phase.first + torch.arange(phase.size)).clamp(0, size - 1)

    def cut(low: Tensor, high: Tensor, top: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return windows, targets and scales of the patches of one image at these places, flat ones left out."""
        y, x = window(top, rows, low.shape[0]), window(left, columns, low.shape[1])
        windows = centered(low[y[:, :, None], x[:, None, :]])
        middle = low[y[:, rows.size // 2], x[:, columns.size // 2]]
        squares = sum(z.square().flatten(1).sum(1) for z in features(windows, rows, columns).values())
        scales = torch.sqrt(torch.as_tensor(squares) / (len(DERIVATIVES) * patch**2)) + floor
        busy = scales - floor >= flat
        windows, scales, top, left, middle = (part[busy] for part in (windows, scales, top, left, middle))
        down, across = top[:, None] + torch.arange(patch), left[:, None] + torch.arange(patch)
        truth = high[down[:, :, None], across[:, None, :]] - middle[:, None, None]
        missing = truth - rows.plain.to(windows) @ windows @ columns.plain.to(windows).mT
        return windows / scales[:, None, None], missing / scales[:, None, None], scales

    random = np.random.default_rng(seed)
    pairs = _all_pairs(images, scale)
    sources = [(pair, turn) for pair in pairs for turn in (range(8) if augment else range(1))]
    shapes = [turned(pair[1], turn).shape for pair, turn in sources]
    places = [[np.arange(o, n - patch + 1, scale) for n, o in zip(shape, offsets, strict=True)] for shape in shapes]
    room = np.array([len(tops) * len(lefts) for tops, lefts in places])
    if room.sum() == 0:
        raise ValueError(f"images must be larger than a patch of {patch} x {patch} pixels, none of {len(pairs)} is")
    # Numbers of up to 2 n places without repetition, over all images: some of them may be flat.
    ends, total = np.cumsum(room), int(room.sum())
    numbers = np.arange(total) if 2 * n >= total else random.choice(total, 2 * n, replace=False)
    owner = np.searchsorted(ends, numbers, side="right")
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for which, ((pair, turn), (tops, lefts)) in enumerate(zip(sources, places, strict=True)):
        mine = np.sort(numbers[owner == which] - (ends - room)[which])
        if len(mine):
            low, high = (torch.from_numpy(np.ascontiguousarray(turned(part, turn))) for part in pair)
            down, across = np.divmod(mine, len(lefts))
            found.append(cut(low, high, torch.from_numpy(tops[down]), torch.from_numpy(lefts[across])))
    windows, targets, scales = (torch.cat(parts) for parts in zip(*found, strict=True))
    if len(scales) == 0:
        raise ValueError("images must not be flat throughout: no patch is left to learn from")
    order = torch.from_numpy(random.permutation(len(scales))[:n])
    return TrainingPatches(rows, columns, windows[order], targets[order], scales[order])


class Crops(NamedTuple):
    """Pieces of low-resolution images, and the truth in their middle."""

    low: Tensor  # (n, c, c)
    truth: Tensor  # (n, s, s)
    start: int  # where the middle begins, in pixels of the enlarged crop


def cut_crops(
    images: Sequence[Any], geometry: Geometry, n: int, *, size: int = CROP_SIDE, augment: bool = True, seed: int = 0
) -> Crops:
    """Cut random crops out of high-resolution images, which hold all that the patches in their middle depend on.

    `size` is the side of the middle in low-resolution pixels; `augment` flips and turns the crops at random.
    """
    scale = geometry.scale
    margin = -(-(geometry.patch - 1 + MARGIN) // scale) + 3
    random = np.random.default_rng(seed)
    pairs = _all_pairs(images, scale)
    room = np.array([max(0, low.shape[0] - size + 1) * max(0, low.shape[1] - size + 1) for low, _ in pairs])
    if room.sum() == 0:
        raise ValueError(f"images must have at least {size * scale} pixels per side, none of {len(pairs)} has")
    numbers = random.choice(len(pairs), n, p=room / room.sum())
    low = np.empty((n, size + 2 * margin, size + 2 * margin), np.float32)
    truth = np.empty((n, size * scale, size * scale), np.float32)
    for index, number in enumerate(numbers):
        turn = int(random.integers(8)) if augment else 0
        small, large = (turned(part, turn) for part in pairs[number])
        top, left = (int(random.integers(side - size + 1)) for side in small.shape)
        y = np.arange(top - margin, top + size + margin).clip(0, small.shape[0] - 1)
        x = np.arange(left - margin, left + size + margin).clip(0, small.shape[1] - 1)
        low[index] = small[np.ix_(y, x)]
        truth[index] = large[top * scale : (top + size) * scale, left * scale : (left + size) * scale]
    return Crops(torch.from_numpy(low), torch.from_numpy(truth), margin * scale)
