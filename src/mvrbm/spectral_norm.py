"""The spectral norm of a linear map, from its Gram matrix or by Lanczos iteration."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mvrbm.random import RandomSource

# Maximum number of Lanczos iterations, and the relative change at which the iteration stops.
_STEPS = 200
_TOLERANCE = 1e-7


def spectral_norm(gram: Callable[[Tensor], Tensor], size: int, like: Tensor, *, at_once: bool) -> float:
    """Compute the spectral norm of a linear map `W`.

    Parameters
    ----------
    gram : callable
        Function that multiplies the rows of an array of shape (n, size) by the Gram matrix `W W'`.
    size : int
        Number of rows of `W`.
    like : Tensor
        Tensor whose dtype and device are used.
    at_once : bool
        Whether to compute the whole Gram matrix, which has size ** 2 entries. If False, Lanczos iteration multiplies
        one vector at a time.
    """
    if at_once:
        identity = torch.eye(size, dtype=like.dtype, device=like.device)
        largest = float(torch.linalg.eigvalsh(gram(identity))[-1])
    else:
        # Start from a random vector. A vector of ones would be orthogonal to the leading eigenvector if the columns
        # of the factors have mean zero.
        largest = _largest_eigenvalue(gram, RandomSource(0).normal((1, size), like))
    return math.sqrt(max(largest, 0.0))


def _largest_eigenvalue(product: Callable[[Tensor], Tensor], start: Tensor) -> float:
    """Compute the largest eigenvalue of a symmetric linear map on arrays of shape (1, n) by Lanczos iteration.

    Only three vectors are stored. Without reorthogonalization, the iteration finds some eigenvalues several times,
    which does not affect the largest one.
    """
    from scipy.linalg import eigvalsh_tridiagonal  # Most machines do not need it, and importing it takes long.

    before, now = start, start / torch.linalg.vector_norm(start)
    diagonal, beside, found = list[float](), list[float](), [0.0]
    for _ in range(_STEPS):
        after = product(now)
        if beside:
            after.sub_(before, alpha=beside[-1])
        diagonal.append(float((after * now).sum()))
        after.sub_(now, alpha=diagonal[-1])
        if not math.isfinite(diagonal[-1]):
            return math.inf
        found.append(float(eigvalsh_tridiagonal(diagonal, beside)[-1]))
        length, tolerance = float(torch.linalg.vector_norm(after)), _TOLERANCE * abs(found[-1])
        if length <= tolerance or abs(found[-1] - found[max(-4, -len(found))]) <= tolerance:
            break
        beside.append(length)
        before, now = now, after.div_(length)
    return found[-1]
