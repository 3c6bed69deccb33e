r"""Back-projection: make a high-resolution image consistent with the low-resolution one.

Each round adds the enlarged error of the reduced image, :math:`H \leftarrow H + E (L - D H)`, where D reduces and E
enlarges. Every round adds an enlarged image, so H always has the form :math:`H_0 + E C` with

.. math:: C \leftarrow C + (L - D H_0) - D E C,

and all rounds can be computed at low resolution.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mvrbm.vision.resampling import enlarging_taps, reducing_taps, taps_matrix

# Entries of a line computed by one matrix product. Longer blocks have matrices of mostly zeros.
_BLOCK = 64

# Part of a resampled line as a matrix product: output entries, input entries, matrix.
_Block = tuple[slice, slice, Tensor]


@torch.no_grad()
def back_project(low: Tensor, high: Tensor, scale: int, rounds: int) -> Tensor:
    """Make a high-resolution image (h * scale, w * scale) consistent with a low-resolution one (h, w), in place."""
    if rounds == 0:
        return high
    reducing, enlarging, both = (
        [_blocks(kind, size, scale, low) for size in low.shape] for kind in ("reduce", "enlarge", "both")
    )
    error = torch.empty_like(low)
    for outputs, inputs, matrix in reducing[0]:
        error[outputs] = low[outputs] - _across(matrix @ high[inputs], reducing[1])
    correction = error.clone()
    for _ in range(rounds - 1):
        down = torch.cat([matrix @ correction[inputs] for _, inputs, matrix in both[0]])
        correction += error - _across(down, both[1])
    for outputs, inputs, matrix in enlarging[0]:
        high[outputs] += matrix @ _across(correction[inputs], enlarging[1])
    return high


def _blocks(kind: str, size: int, scale: int, like: Tensor) -> list[_Block]:
    """Return the blocks that reduce to a line of `size` pixels, enlarge one, or enlarge and then reduce it."""
    length = size * scale if kind == "enlarge" else size
    blocks = []
    for start in range(0, length, _BLOCK):
        outputs = np.arange(start, min(start + _BLOCK, length))
        enlarging = enlarging_taps(outputs, scale, size)
        reducing = reducing_taps(outputs, scale, size * scale)
        matrix, first = taps_matrix(enlarging if kind == "enlarge" else reducing)
        if kind == "both":
            between = np.arange(first, first + matrix.shape[1])
            inner, first = taps_matrix(enlarging_taps(between, scale, size))
            matrix = matrix @ inner
        inputs = slice(first, first + matrix.shape[1])
        blocks.append((slice(start, start + len(outputs)), inputs, torch.from_numpy(matrix).to(like)))
    return blocks


def _across(image: Tensor, blocks: list[_Block]) -> Tensor:
    return torch.cat([image[:, inputs] @ matrix.mT for _, inputs, matrix in blocks], 1)


def error_projection(size: int, scale: int, rounds: int, like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a differentiable map from errors (n, size * scale, size * scale) to errors after back-projection.

    The truth is consistent with the low-resolution image except for rounding, so back-projection depends only on the
    error. All rounds together are one matrix (size^2, size^2), which suits batches of small images.
    """
    if rounds == 0:
        return lambda error: error
    down = torch.from_numpy(taps_matrix(reducing_taps(np.arange(size), scale, size * scale))[0])
    up = torch.from_numpy(taps_matrix(enlarging_taps(np.arange(size * scale), scale, size))[0])
    both = down @ up
    units = torch.eye(size * size, dtype=torch.float64).reshape(-1, size, size)
    total = units
    for _ in range(rounds - 1):
        total = total + units - both @ total @ both.mT
    sums = total.flatten(1).to(like)  # row i: contribution of entry i of the reduced error to the correction
    down = down.to(like)
    up = up.to(like)

    def project(error: Tensor) -> Tensor:
        reduced = (down @ error @ down.mT).flatten(1)
        return error - up @ (reduced @ sums).reshape(-1, size, size) @ up.mT

    return project
