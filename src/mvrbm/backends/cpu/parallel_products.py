"""CPU matrix products and elementwise functions whose results do not depend on the number of threads.

BLAS divides a product among its threads in ways that change the last bits of sums, and PyTorch computes the last
entries in each thread's part with different instructions. `matmul_in_blocks` and `in_blocks` therefore divide the work
into blocks that depend only on the sizes of the arrays. Each thread takes the next block when it is idle, and PyTorch
and BLAS compute each block with a single thread.
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from mvrbm.devices import one_thread

# Number of multiplications per block of a matrix product. Smaller blocks are not worth passing to another thread.
_BLOCK_MULTIPLICATIONS = 2**23
# Number of entries per block of an elementwise function. Smaller blocks are not worth passing to another thread.
_BLOCK_ENTRIES = 2**17
# Maximum number of blocks.
_MOST_BLOCKS = 16
# A product is divided along its inner axis only if that axis is at least this many times longer than the axes of the
# result, because the partial sums require additional memory.
_MUCH_LONGER = 8
# Maximum pool size. Threads start on demand.
_MOST_THREADS = 64

#: A function with its arguments already bound, which can be called repeatedly.
Call = Callable[[], object]


def matmul_in_blocks(a: Tensor, b: Tensor, into: Tensor, *, add: bool = False) -> None:
    """Write the product of matrices of shape (m, k) and (k, n) to `into`, or add it to `into` if `add` is True."""
    m, k = a.shape
    n = b.shape[1]
    threads = torch.get_num_threads()
    n_blocks = min(_MOST_BLOCKS, m * k * n // _BLOCK_MULTIPLICATIONS)
    if n_blocks < 2 and threads == 1:
        _matmul(a, b, into, add=add)
        return
    with one_thread():
        if n_blocks < 2:
            _matmul(a, b, into, add=add)
        elif k > _MUCH_LONGER * max(m, n):
            sums = into.new_empty(n_blocks, m, n)
            cuts = _cuts(k, n_blocks)
            _share([partial(_matmul, a[:, cut], b[cut], sums[i]) for i, cut in enumerate(cuts)], threads)
            if add:
                into.add_(sums.sum(0))
            else:
                torch.sum(sums, 0, out=into)
        elif m >= n:
            cuts = _cuts(m, n_blocks)
            _share([partial(_matmul, a[cut], b, into[cut], add=add) for cut in cuts], threads)
        else:
            cuts = _cuts(n, n_blocks)
            _share([partial(_matmul, a, b[:, cut], into[:, cut], add=add) for cut in cuts], threads)


def in_blocks(function: Callable[..., object], *tensors: Tensor) -> None:
    """Apply a function to blocks of samples in the given tensors. The function must process samples independently.

    Samples are indexed by the first axis, or by the last axis if the first tensor is a transposed matrix.
    """
    threads = torch.get_num_threads()
    n_blocks = min(_MOST_BLOCKS, tensors[0].numel() // _BLOCK_ENTRIES)
    if n_blocks < 2 and threads == 1:
        function(*tensors)
        return
    axis = 0 if tensors[0].is_contiguous() else -1
    blocks = zip(*(tensor.tensor_split(max(1, n_blocks), axis) for tensor in tensors), strict=True)
    with one_thread():
        _share([partial(function, *block) for block in blocks], threads)


def compute(calls: Iterable[Call]) -> None:
    """Execute the calls in order."""
    for call in calls:
        call()


def _matmul(a: Tensor, b: Tensor, into: Tensor, *, add: bool = False) -> None:
    """Write a matrix product to `into`, or add it if `add` is True, with a single BLAS call."""
    if add:
        into.addmm_(a, b)
    else:
        torch.mm(a, b, out=into)


def _cuts(length: int, n_blocks: int) -> list[slice]:
    """Divide an axis into blocks of nearly equal length."""
    return [slice(length * i // n_blocks, length * (i + 1) // n_blocks) for i in range(n_blocks)]


def _share(calls: Sequence[Call], threads: int) -> None:
    """Execute calls in the current thread and up to `threads` - 1 other threads, which take calls on demand."""
    waiting = iter(calls)

    def work() -> None:
        for call in waiting:
            call()

    others = [_pool(os.getpid()).submit(work) for _ in range(min(threads, len(calls)) - 1)]
    work()
    for other in others:
        if not other.cancel():  # all calls are done, so threads that have not started yet are not needed
            other.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return a process's thread pool. A forked process needs its own pool because it does not inherit threads."""
    return ThreadPoolExecutor(_MOST_THREADS, "mvrbm-products", torch.set_num_threads, (1,))
