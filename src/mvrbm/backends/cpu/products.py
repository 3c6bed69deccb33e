"""Matrix products and elementwise functions on the CPU whose bits do not depend on the number of threads.

BLAS divides a product among its threads in ways that change the last bits of sums, and PyTorch computes the last
entries of each thread's part with different instructions. `matmul_in_blocks` and `in_blocks` cut the work into blocks
according to its size alone. Threads take blocks on demand, and PyTorch and BLAS compute each block with one thread.
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from mvrbm.devices import one_thread

# Multiplications of a block of a product. Handing a smaller block to a thread takes longer than it helps.
_BLOCK_MULTIPLICATIONS = 2**23
# Entries of a block of an elementwise function, for the same reason.
_BLOCK_ENTRIES = 2**17
# Maximum number of blocks.
_MOST_BLOCKS = 16
# A product is cut along its inner axis only if that is this many times longer than the axes of the result: the partial
# sums need additional memory.
_MUCH_LONGER = 8
# Maximum pool size. Threads start on demand.
_MOST_THREADS = 64

#: A function with its arguments, which can be called any number of times.
Call = Callable[[], object]


def matmul_in_blocks(a: Tensor, b: Tensor, into: Tensor, *, add: bool = False) -> None:
    """Write a matrix product (m, k) (k, n) to `into` (m, n), or add it to `into`."""
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
    """Call a function on blocks of samples of the given tensors. It must treat every sample independently.

    Samples are along the first axis or, if the first tensor is a transposed matrix, along the last axis.
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
    """Make calls one after another."""
    for call in calls:
        call()


def _matmul(a: Tensor, b: Tensor, into: Tensor, *, add: bool = False) -> None:
    """Write a matrix product to `into`, or add it, by one call of BLAS."""
    if add:
        into.addmm_(a, b)
    else:
        torch.mm(a, b, out=into)


def _cuts(length: int, n_blocks: int) -> list[slice]:
    """Cut an axis into blocks of nearly equal lengths."""
    return [slice(length * i // n_blocks, length * (i + 1) // n_blocks) for i in range(n_blocks)]


def _share(calls: Sequence[Call], threads: int) -> None:
    """Distribute calls over this thread and up to `threads` - 1 others, which take them on demand."""
    waiting = iter(calls)

    def work() -> None:
        for call in waiting:
            call()

    others = [_pool(os.getpid()).submit(work) for _ in range(min(threads, len(calls)) - 1)]
    work()
    for other in others:
        if not other.cancel():  # a thread that has not started yet has nothing left to do
            other.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the thread pool of a process. A forked process inherits no threads, and gets a new pool."""
    return ThreadPoolExecutor(_MOST_THREADS, "mvrbm-products", torch.set_num_threads, (1,))
