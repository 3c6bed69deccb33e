"""Triton kernel that computes the norms of small matrices in a single launch."""

# mypy: ignore-errors
import os

import triton
import triton.language as tl
from torch import Tensor

#: Maximum side length of a Gram matrix. For larger matrices, PyTorch is faster than one Triton program per matrix.
LARGEST_SIDE = 128
# Side length of a tile in the matrix products.
_TILE = 64


@triton.jit
def _squared_norms(
    matrices, gram, norms, matrix_stride, row_stride, column_stride, SIDE: tl.constexpr, LENGTH: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the squared Schatten 8-norms of matrices of shape (SIDE, LENGTH), with one program per matrix.

    The Gram matrices are stored in global memory.
    """
    number = tl.program_id(0)
    matrices += number.to(tl.int64) * matrix_stride
    gram += number.to(tl.int64) * (SIDE * SIDE)
    within = tl.arange(0, TILE)
    for i in range(0, SIDE, TILE):
        rows = i + within
        for j in range(0, i + 1, TILE):
            others = j + within
            tile = tl.zeros([TILE, TILE], tl.float32)
            for k in range(0, LENGTH, TILE):
                columns = k + within
                left = tl.load(
                    matrices + rows[:, None] * row_stride + columns[None, :] * column_stride,
                    mask=(rows < SIDE)[:, None] & (columns < LENGTH)[None, :], other=0.0,
                )  # fmt: skip
                right = tl.load(
                    matrices + columns[:, None] * column_stride + others[None, :] * row_stride,
                    mask=(columns < LENGTH)[:, None] & (others < SIDE)[None, :], other=0.0,
                )  # fmt: skip
                tile = tl.dot(left, right, acc=tile, input_precision=PRECISION)
            inside = (rows < SIDE)[:, None] & (others < SIDE)[None, :]
            tl.store(gram + rows[:, None] * SIDE + others[None, :], tile, mask=inside)
            tl.store(gram + others[None, :] * SIDE + rows[:, None], tile, mask=inside)
    tl.debug_barrier()
    total = 0.0
    for i in range(0, SIDE, TILE):
        rows = i + within
        for j in range(0, i + 1, TILE):
            others = j + within
            tile = tl.zeros([TILE, TILE], tl.float32)
            for k in range(0, SIDE, TILE):
                columns = k + within
                left = tl.load(
                    gram + rows[:, None] * SIDE + columns[None, :],
                    mask=(rows < SIDE)[:, None] & (columns < SIDE)[None, :], other=0.0,
                )  # fmt: skip
                right = tl.load(
                    gram + columns[:, None] * SIDE + others[None, :],
                    mask=(columns < SIDE)[:, None] & (others < SIDE)[None, :], other=0.0,
                )  # fmt: skip
                tile = tl.dot(left, right, acc=tile, input_precision=PRECISION)
            # By symmetry, each tile below the diagonal counts twice.
            total += tl.sum(tile * tile) * tl.where(i == j, 1.0, 2.0)
    tl.store(norms + number, tl.sqrt(tl.sqrt(total)))


def squared_norms(matrices: Tensor) -> Tensor:
    """Compute the squared Schatten 8-norms of float32 matrices: (n, k, i) -> (n,)."""
    count, height, width = matrices.shape
    matrix_stride, row_stride, column_stride = matrices.stride()
    side, length = height, width
    if height > width:
        side, length = width, height
        row_stride, column_stride = column_stride, row_stride
    gram = matrices.new_empty(count, side, side)
    norms = matrices.new_empty(count)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    _squared_norms[(count,)](
        matrices, gram, norms, matrix_stride, row_stride, column_stride, SIDE=side, LENGTH=length,
        TILE=min(_TILE, max(16, triton.next_power_of_2(side))), PRECISION="ieee" if interpreted else "tf32x3",
        num_warps=8,
    )  # fmt: skip
    return norms
