"""Extract overlapping patches from images and average them back into images."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mvrbm.vision.images import Array


@dataclass(frozen=True)
class PatchGrid:
    """Grid of overlapping patches over n images of equal size. Patches are numbered by image, then row, then column."""

    n: int  # number of images
    size: tuple[int, int]  # number of rows and columns of an image
    patch: tuple[int, int]  # number of rows and columns of a patch, at most `size`
    stride: int  # distance between patches in pixels; the last patch ends at the image border

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= min(self.patch):
            side = min(self.patch)
            raise ValueError(f"stride must be between 1 and {side} (the shorter side of a patch), got {self.stride}")
        if any(size < patch for size, patch in zip(self.size, self.patch, strict=True)):
            raise ValueError(f"images must be at least as large as a patch {self.patch}, got {self.size}")

    def _starts(self) -> list[Array]:
        """Return the start positions of patches along each axis: one every `stride` pixels, and one at the end."""
        return [
            np.unique(np.append(np.arange(0, size - patch + 1, self.stride), size - patch))
            for size, patch in zip(self.size, self.patch, strict=True)
        ]

    @property
    def corners(self) -> Array:
        """Top-left corners of all patches in an image, as an array of shape (patches per image, 2)."""
        return np.stack(np.meshgrid(*self._starts(), indexing="ij"), -1).reshape(-1, 2)

    def __len__(self) -> int:
        return self.n * math.prod(len(starts) for starts in self._starts())

    def cut(self, images: Array, which: Array) -> Array:
        """Extract the m patches with the given numbers from images of shape ``(n, *size)``.

        Returns an array of shape ``(m, *patch)``.
        """
        corners = self.corners
        number, corner = np.divmod(which, len(corners))
        top, left = corners[corner].T
        rows = top[:, None, None] + np.arange(self.patch[0])[:, None]
        columns = left[:, None, None] + np.arange(self.patch[1])
        return np.asarray(images[number[:, None, None], rows, columns])

    def average(self, pieces: Iterable[Array]) -> Array:
        """Average overlapping patches into images of shape ``(n, *size)`` and dtype float64.

        Each pixel is the mean over all patches that cover it. `pieces` yields all patches in order, as arrays of shape
        ``(m, *patch)``, where m may vary.
        """
        # In double precision, summing equal single-precision values is exact, so their average is exact too.
        total = np.zeros((self.n, *self.size))
        count = np.zeros(self.size)
        corners = self.corners
        number = 0
        rows, columns = self.patch
        for top, left in corners:
            count[top : top + rows, left : left + columns] += 1
        for patch in (patch for piece in pieces for patch in piece):
            image, corner = divmod(number, len(corners))
            top, left = corners[corner]
            total[image, top : top + rows, left : left + columns] += patch
            number += 1
        if number != len(self):
            raise ValueError(f"pieces must contain all {len(self)} patches, got {number}")
        return np.asarray(total / count)
