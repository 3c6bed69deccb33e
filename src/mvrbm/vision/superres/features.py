r"""The features of a high-resolution patch, as linear maps of a window of the low-resolution image.

A patch of p x p pixels begins at a multiple of the stride. Its features, the derivatives of the bicubic image along
x, y, xx and yy, depend on a small window of the low-resolution image, and linearly: with E the bicubic rows of the
patch, E' and E'' their first and second differences and N the window,

.. math:: Z_1 = E N E'^\top, \quad Z_2 = E' N E^\top, \quad Z_3 = E N E''^\top, \quad Z_4 = E'' N E^\top.

So nothing large is ever computed patch by patch. Beyond its edges an image continues with its edge pixels, for patches
as for bicubic interpolation, so that borders need no special case.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvrbm.vision.resampling import enlarging_taps, taps_matrix

#: The visible layers: the true patch minus the bicubic one, and the derivatives of the bicubic one.
HIGH = "X"
DERIVATIVES = ("Z1", "Z2", "Z3", "Z4")

MARGIN = 2  # pixels beyond a patch that its second differences depend on


class Geometry(NamedTuple):
    """How an image is cut into patches."""

    scale: int
    patch: int
    stride: int
    floor: float  # added to the scale of each patch

    @property
    def phases(self) -> list[int]:
        """Offsets, modulo the scale, at which patches begin along one side."""
        return list(range(0, self.scale, math.gcd(self.scale, self.stride)))

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """All pairs of phases, of rows and columns."""
        return [(row, column) for row in self.phases for column in self.phases]


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
    """Return the phase of patches of this size that begin `offset` pixels after a multiple of the scale."""
    matrix, first = taps_matrix(enlarging_taps(np.arange(offset - MARGIN, offset + patch + MARGIN), scale))
    rows = torch.from_numpy(matrix)
    plain = rows[MARGIN : MARGIN + patch]
    slope = rows[MARGIN + 1 : MARGIN + 1 + patch] - rows[MARGIN - 1 : MARGIN - 1 + patch]
    return Phase(offset, first, plain, slope, rows[MARGIN + 2 :] - 2 * plain + rows[:patch])


def features(windows: Tensor, rows: Phase, columns: Phase) -> dict[str, Tensor]:
    """Return the derivatives of the bicubic patches of windows: (n, w, w) -> (n, p, p) for each layer."""
    left = (rows.plain, rows.slope, rows.plain, rows.bend)
    right = (columns.slope, columns.plain, columns.bend, columns.plain)
    return {z: a.to(windows) @ windows @ b.to(windows).mT for z, a, b in zip(DERIVATIVES, left, right, strict=True)}


@functools.lru_cache(maxsize=64)
def feature_matrix(scale: int, patch: int, row_offset: int, column_offset: int) -> Tensor:
    """Return :func:`features` as one matrix (4 p p, w w) in double precision."""
    rows, columns = phase_of(scale, patch, row_offset), phase_of(scale, patch, column_offset)
    units = torch.eye(rows.size * columns.size, dtype=torch.float64).reshape(-1, rows.size, columns.size)
    return torch.cat([z.flatten(1) for z in features(units, rows, columns).values()], 1).T.contiguous()


def centered(windows: Tensor) -> Tensor:
    """Subtract from each window (..., w, w) its middle pixel, which does not change any derivative."""
    middle = windows.shape[-2] // 2, windows.shape[-1] // 2
    return windows - windows[..., middle[0], middle[1], None, None]
