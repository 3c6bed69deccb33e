r"""Back-projection: a high-resolution image made consistent with the low-resolution one.

Each round adds the enlarged error of the reduced image, :math:`H \leftarrow H + E (L - D H)`, D reducing and E
enlarging. All that is ever added is an enlarged image, so H stays :math:`H_0 + E C` with

.. math:: C \leftarrow C + (L - D H_0) - D E C,

and the rounds take place at low resolution.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvrbm.vision.resampling import enlarging_taps, reducing_taps, taps_matrix

__all__ = ["back_project"]

_BLOCK = 128  # entries of a line that are made by one product


class _Block(NamedTuple):
    """Some entries of a resampled line, as a product with some entries of the line."""

    outputs: slice
    inputs: slice
    matrix: Tensor


@torch.no_grad()
def back_project(low: Tensor, high: Tensor, scale: int, rounds: int) -> Tensor:
    """Make a high-resolution image consistent with the low-resolution one it came from.

    Parameters
    ----------
    low : Tensor (h, w)
        The low-resolution image.
    high : Tensor (h * scale, w * scale)
        The high-resolution image, which is changed in place.
    scale, rounds : int
        How many low-resolution pixels a side of a pixel is, and how many rounds to go.

    Returns
    -------
    Tensor (h * scale, w * scale)
        The same tensor.
    """
    if rounds == 0:
        return high
    reducing, enlarging = ([_blocks(kind, size, scale, low) for size in low.shape] for kind in ("reduce", "enlarge"))
    both = [_blocks("both", size, scale, low) for size in low.shape]
    error = torch.empty_like(low)
    for rows in reducing[0]:
        error[rows.outputs] = low[rows.outputs] - _across(rows.matrix @ high[rows.inputs], reducing[1])
    correction = error.clone()
    for _ in range(rounds - 1):
        correction += error - _across(_down(correction, both[0]), both[1])
    for rows in enlarging[0]:
        high[rows.outputs] += rows.matrix @ _across(correction[rows.inputs], enlarging[1])
    return high


def _blocks(kind: str, size: int, scale: int, like: Tensor) -> list[_Block]:
    """Reducing to a line of `size` pixels, enlarging from one, or the first after the second."""
    length = size * scale if kind == "enlarge" else size
    blocks = []
    for start in range(0, length, _BLOCK):
        outputs = np.arange(start, min(start + _BLOCK, length))
        if kind == "enlarge":
            matrix, first = taps_matrix(enlarging_taps(outputs, scale), size)
        else:
            matrix, first = taps_matrix(reducing_taps(outputs, scale), size * scale)
        if kind == "both":
            between = np.arange(first, first + matrix.shape[1])
            inner, first = taps_matrix(enlarging_taps(between, scale), size)
            matrix = matrix @ inner
        inputs = slice(first, first + matrix.shape[1])
        blocks.append(_Block(slice(start, start + len(outputs)), inputs, torch.from_numpy(matrix).to(like)))
    return blocks


def _down(image: Tensor, blocks: list[_Block]) -> Tensor:
    return torch.cat([block.matrix @ image[block.inputs] for block in blocks])


def _across(image: Tensor, blocks: list[_Block]) -> Tensor:
    return torch.cat([image[:, block.inputs] @ block.matrix.mT for block in blocks], 1)
