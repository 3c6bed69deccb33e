"""Select the device for a model, and limit the number of threads that PyTorch uses for small matrix products."""

import contextlib
import functools
import os
import threading
from collections.abc import Iterator

import torch

from mvrbm.machine import BoltzmannMachine

# Number of multiplications per matrix product below which synchronizing threads takes longer than the work itself. On
# a machine shared with other programs, the break-even point is ten times as high.
_WORTH_THREADS = 4 * 10**7

# Number of multiprocessors on a large GPU, for tests that run GPU code on a CPU.
_LARGE_GPU = 132


@functools.cache
def _protect_forks() -> None:
    """Make PyTorch use a single thread in processes that are later forked from this one.

    A forked process does not inherit its parent's OpenMP threads, and would wait for them forever. The context managers
    in this module call this function before a computation starts threads. Importing the package alone does not affect
    forked processes.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_limit_child)


class _Limit:
    """Record of which threads of this process are in :func:`one_thread`.

    PyTorch stores the number of threads separately for each thread. A new thread starts with the number that was set
    last in any thread, which is 1 while another thread is in :func:`one_thread`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        # Number of threads before the first of the current contexts was entered.
        self._outside = 1
        self._here = threading.local()

    def enter(self) -> tuple[int, bool]:
        """Limit this thread. Return its number of threads outside the context, and whether it was already limited."""
        with self._lock:
            found = torch.get_num_threads()
            nested = getattr(self._here, "limited", False)
            if self._count == 0:
                self._outside = found
            elif not nested and found == 1:
                found = self._outside
            self._count += 1
            self._here.limited = True
            torch.set_num_threads(1)
            return found, nested

    def leave(self, n_threads: int, nested: bool) -> None:
        """Leave a context, given the result of :meth:`enter`."""
        with self._lock:
            self._count -= 1
            self._here.limited = nested
            torch.set_num_threads(n_threads)


_limit = _Limit()


def _limit_child() -> None:
    """Limit a forked process to one thread. Its copies of contexts that its parent entered have no effect on exit."""
    global _limit
    _limit = _Limit()
    torch.set_num_threads(1)


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device with a given name. Raise ValueError if the name is unknown or the device is not available.

    ``"cuda"`` is the GPU assigned to this process. Each process started by ``torchrun`` uses the GPU given by
    ``LOCAL_RANK``. Other processes use PyTorch's current GPU. ``"auto"`` is the same as ``"cuda"`` if a GPU is
    available, and ``"cpu"`` otherwise. PyTorch interprets any other name, such as ``"cpu"`` or ``"cuda:1"``.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or another PyTorch device, got {device!r}") from None
    if resolved.type != "cuda":
        try:
            torch.empty(1, device=resolved).item()
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            # PyTorch was built without support for the device, or the device stores no values ("meta").
            raise ValueError(f"device '{device}' is not supported by this PyTorch installation") from error
        return resolved
    if not torch.cuda.is_available():
        raise ValueError(f"device is '{device}', but PyTorch found no GPU; use 'cpu' or 'auto'")
    if resolved.index is not None:
        return resolved
    rank = os.environ.get("LOCAL_RANK")
    own = torch.cuda.current_device() if rank is None else int(rank) % torch.cuda.device_count()
    return torch.device("cuda", own)


@contextlib.contextmanager
def sensible_threads(machine: BoltzmannMachine, batch_size: int, *, needed: bool = True) -> Iterator[int]:
    """Context manager that limits PyTorch to one thread if the machine's matrix products are small.

    This has no effect if the machine is on a GPU.

    Parameters
    ----------
    machine : BoltzmannMachine
        Machine whose matrix products are computed.
    batch_size : int
        Number of samples per product.
    needed : bool
        Whether PyTorch computes the products. If False, PyTorch always uses one thread, because idle PyTorch threads
        would keep polling for work and compete with the threads used by the C code.

    Yields
    ------
    int
        Number of threads that PyTorch would otherwise use. The C code may use this many threads.
    """
    multiplications = batch_size * max(link.operations for link in machine.links.values()) if needed else 0
    with threads_worth(multiplications, machine.like.device) as former:
        yield former


@contextlib.contextmanager
def threads_worth(multiplications: int, device: torch.device) -> Iterator[int]:
    """Context manager that limits PyTorch to one thread on the CPU if matrix products have few multiplications.

    It yields the number of threads that PyTorch would otherwise use.
    """
    _protect_forks()
    if device.type != "cpu" or multiplications >= _WORTH_THREADS:
        yield torch.get_num_threads()
        return
    with one_thread() as former:
        yield former


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Context manager that limits PyTorch to one thread so that rounding does not depend on the thread count.

    Several threads can be in this context at the same time.

    Yields
    ------
    int
        Number of threads outside the context.
    """
    _protect_forks()
    limit = _limit
    former, nested = limit.enter()
    try:
        yield former
    finally:
        if limit is _limit:  # otherwise, this is a forked process
            limit.leave(former, nested)


def n_processors(device: torch.device) -> int:
    """Return the number of multiprocessors on a GPU.

    For a CPU, which is used only in tests, return the count of a typical large GPU.
    """
    if device.type != "cuda":
        return _LARGE_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count
