"""Python wrapper for `_identity.c`, which counts similar sequences."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mvrbm.compiled import library

# Number of pairs of letters that one call compares, which takes less than a second. Ctrl-C acts between calls.
_PAIRS_AT_ONCE = 2**33


def count_similar(
    codes: NDArray[np.uint8], need: int, done: Callable[[int], Any] = lambda count: None
) -> NDArray[np.int32] | None:
    """For each sequence, count the sequences that agree with it at `need` or more sites, including itself.

    Parameters
    ----------
    codes : array of shape (n, sites)
        Letters of the sequences.
    need : int
        Number of sites.
    done : callable
        Function that is called with the number of sequences that have been counted since its last call.

    Returns
    -------
    array of shape (n,), or None if the C code was not built
    """
    code = library("_identity")
    if code is None:
        return None
    codes = np.ascontiguousarray(codes, np.uint8)
    n, sites = codes.shape
    lanes = int(code.LANES)
    found = np.zeros(-(-n // lanes) * lanes, np.int32)
    step = max(lanes, _PAIRS_AT_ONCE // (n * sites) // lanes * lanes)

    def count(first: int) -> int:
        """Count for one part of the sequences, which is transposed so that a site of a group is contiguous."""
        some = codes[first : first + step]
        groups = -(-len(some) // lanes)
        padded = np.zeros((groups * lanes, sites), np.uint8)
        padded[: len(some)] = some
        padded = np.ascontiguousarray(padded.reshape(groups, lanes, sites).transpose(0, 2, 1))
        code.count_similar(padded.ctypes.data, codes.ctypes.data, found[first:].ctypes.data, groups, n, sites, need)
        return len(some)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        try:
            for size in pool.map(count, range(0, n, step)):
                done(size)
        finally:
            pool.shutdown(cancel_futures=True)
    return found[:n]
