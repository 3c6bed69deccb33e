"""Matrix products and functions of entries on the CPU, whose bits do not depend on the number of threads.

BLAS divides a product among its threads in ways that change sums in their last bits, and PyTorch computes the last
entries of each thread's part by other instructions. Here work is cut into blocks by its size alone, a product along the
longer side of its result or, where that is much longer, along its inner side. Threads take blocks, and PyTorch and BLAS
compute each of them with one thread. Machines that have full matrices alone spend nearly all of their time in a few
products, which BLAS divides better: they take plain products.
"""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from mvrbm.devices import one_thread

# Multiplications and entries of a block, below which handing it to a thread takes longer than it helps.
_MULTIPLICATIONS, _ENTRIES, _MOST_BLOCKS = 2**23, 2**17, 16
_MUCH_LONGER = 8
_MOST_THREADS = 64  # of the pool, which starts no more than are used

Job = Callable[[], object]


class Times(Protocol):
    """Writes a matrix product (m, k) (k, n) to `into` (m, n), or adds it."""

    def __call__(self, a: Tensor, b: Tensor, into: Tensor, *, add: bool = False) -> None: ...


def times(a: Tensor, b: Tensor, into: Tensor, *, add: bool = False) -> None:
    """Write a matrix product (m, k) (k, n) to `into` (m, n), or add it."""
    (m, k), n, threads = a.shape, b.shape[1], torch.get_num_threads()
    n_blocks = min(_MOST_BLOCKS, m * k * n // _MULTIPLICATIONS)
    if n_blocks < 2 and threads == 1:
        plain_times(a, b, into, add=add)
        return
    # Parts of a sum take memory of their own: the inner side is cut only if it is by far the longest.
    longest = k if k > _MUCH_LONGER * max(m, n) else max(m, n)
    cuts = [slice(longest * i // n_blocks, longest * (i + 1) // n_blocks) for i in range(n_blocks)]
    with one_thread():
        if n_blocks < 2:
            plain_times(a, b, into, add=add)
        elif longest > max(m, n):
            parts = into.new_empty(n_blocks, m, n)
            each = zip(cuts, parts, strict=True)
            _share([partial(plain_times, a[:, cut], b[cut], part) for cut, part in each], threads)
            into.add_(parts.sum(0)) if add else torch.sum(parts, 0, out=into)
        elif longest == m:
            _share([partial(plain_times, a[cut], b, into[cut], add=add) for cut in cuts], threads)
        else:
            _share([partial(plain_times, a, b[:, cut], into[:, cut], add=add) for cut in cuts], threads)


def plain_times(a: Tensor, b: Tensor, into: Tensor, *, add: bool = False) -> None:
    """Write a matrix product to `into`, or add it, as BLAS divides it among its threads."""
    into.addmm_(a, b) if add else torch.mm(a, b, out=into)


def compute(jobs: Iterable[Job]) -> None:
    """Do jobs one after another."""
    for job in jobs:
        job()


def by_blocks(function: Callable[..., object], *tensors: Tensor) -> None:
    """Call a function, which computes each entry or sample by itself, on parts of tensors that have the same samples.

    The samples are along the first axis or, of transposed matrices, along the last.
    """
    threads = torch.get_num_threads()
    n_blocks = min(_MOST_BLOCKS, tensors[0].numel() // _ENTRIES)
    if n_blocks < 2 and threads == 1:
        function(*tensors)
        return
    axis = 0 if tensors[0].is_contiguous() else -1
    parts = zip(*(tensor.tensor_split(max(1, n_blocks), axis) for tensor in tensors), strict=True)
    with one_thread():
        _share([partial(function, *part) for part in parts], threads)


def _share(jobs: Sequence[Job], threads: int) -> None:
    """Let this thread and up to `threads` - 1 others take jobs until none is left."""
    waiting = iter(jobs)

    def work() -> None:
        for job in waiting:
            job()

    others = [_pool(os.getpid()).submit(work) for _ in range(min(threads, len(jobs)) - 1)]
    work()
    for other in others:
        if not other.cancel():  # a thread that has not woken up is not waited for
            other.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process; one that was forked has none of its parent's."""
    return ThreadPoolExecutor(_MOST_THREADS, "mvrbm-products", torch.set_num_threads, (1,))
