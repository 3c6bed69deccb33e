r"""Make high-resolution images consistent with low-resolution images by iterative back-projection.

Each round downscales the high-resolution image H, computes the error with respect to the low-resolution image L, and
adds the enlarged error to H: :math:`H \leftarrow H + E (L - D H)`, where D downscales and E enlarges an image. Because
every round adds an enlarged image, H always has the form :math:`H_0 + E C` with

.. math:: C \leftarrow C + (L - D H_0) - D E C,

and all rounds can be computed at low resolution.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mvrbm.vision.resampling import enlarging_taps, reducing_taps, taps_matrix

# Number of output pixels per block. Each block of a row or column is computed by one matrix product. The matrices of
# larger blocks would be mostly zero.
_BLOCK = 64

# Block of a resampled row or column: output pixels, input pixels, and the matrix that maps input to output.
_Block = tuple[slice, slice, Tensor]


@torch.no_grad()
def back_project(low: Tensor, high: Tensor, scale: int, rounds: int) -> Tensor:
    """Modify a high-resolution image in place to make it consistent with a low-resolution image.

    `low` has shape (h, w), and `high` has shape (h * scale, w * scale). Returns `high`.
    """
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
    """Return the matrix blocks that resample a row or column. `size` is its length at low resolution.

    `kind` is ``"reduce"``, ``"enlarge"`` or ``"both"`` (enlarge and then reduce).
    """
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
    """Return a differentiable function that maps errors before back-projection to errors after it.

    Errors have shape (n, size * scale, size * scale). The true image is consistent with the low-resolution image except
    for rounding, so the effect of back-projection depends only on the error. All rounds are combined into one matrix of
    shape (size ** 2, size ** 2), which is efficient for batches of small images.
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
