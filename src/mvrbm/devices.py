"""Devices and threads: which device a model is on, and how many threads PyTorch uses for small products."""

import contextlib
import functools
import os
from collections.abc import Iterator

import torch

from mvrbm.machine import BoltzmannMachine

# Number of multiplications per product below which threads spend more time waiting for each other than working. On a
# machine that other programs use too, the break-even point is ten times as high.
_WORTH_THREADS = 4 * 10**7

# Number of multiprocessors of a large GPU, for tests that run GPU code on a CPU.
_LARGE_GPU = 132


@functools.cache
def _protect_forks() -> None:
    """Make PyTorch use one thread in processes that are forked from this one, from the first call on.

    A forked process inherits none of the OpenMP threads of its parent, and would wait for them forever. The functions
    of this module that surround computations call this one: a process that only imports the package, and has not
    started any threads through it, forks as it would without the package.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device for a name. Raises ValueError for unknown names, and if the GPU does not exist.

    ``"auto"`` is the GPU of this process if there is one, otherwise the CPU. ``"cuda"`` is the GPU of this process:
    processes started by ``torchrun`` have one GPU each (``LOCAL_RANK``), and other processes use PyTorch's current GPU.
    PyTorch interprets any other name, such as ``"cpu"`` or ``"cuda:1"``.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or another device of PyTorch, got {device!r}") from None
    if resolved.type != "cuda":
        try:
            torch.empty(1, device=resolved).item()
        except (RuntimeError, NotImplementedError, AssertionError) as error:  # not in this build, or without values
            raise ValueError(f"device is '{device}', which this installation of PyTorch cannot use") from error
        return resolved
    if not torch.cuda.is_available():
        raise ValueError(f"device is '{device}', but PyTorch finds no GPU: use 'cpu' or 'auto'")
    if resolved.index is not None:
        return resolved
    rank = os.environ.get("LOCAL_RANK")
    own = torch.cuda.current_device() if rank is None else int(rank) % torch.cuda.device_count()
    return torch.device("cuda", own)


@contextlib.contextmanager
def sensible_threads(machine: BoltzmannMachine, batch_size: int, *, needed: bool = True) -> Iterator[int]:
    """Let PyTorch use one thread inside the block if the products of a machine with a batch are small. Only on the CPU.

    Parameters
    ----------
    machine : BoltzmannMachine
        The machine that is computed with.
    batch_size : int
        Number of samples per product.
    needed : bool
        Whether PyTorch computes the products. If False, it uses one thread for products of any size: its idle threads
        keep polling for work, and would compete for processors with the threads of the C code.

    Yields
    ------
    int
        Number of threads that PyTorch would use otherwise, which the C code may use.
    """
    _protect_forks()
    former = torch.get_num_threads()
    multiplications = batch_size * max(link.operations for link in machine.links.values())
    on_cpu = machine.like.device.type == "cpu"
    if not on_cpu or (needed and multiplications >= _WORTH_THREADS):
        yield former
        return
    with one_thread():
        yield former


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread inside the block: the last bits of its sums depend on the number of threads."""
    _protect_forks()
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def n_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU. On a CPU, where only tests call this, that of a large GPU."""
    if device.type != "cuda":
        return _LARGE_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count
