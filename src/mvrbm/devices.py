"""Choose the device of a model, and the number of threads for small products."""

import contextlib
import os
from collections.abc import Iterator

import torch

from mvrbm.machine import BoltzmannMachine

# Number of multiplications per product below which several threads are slower than one, because they wait for each
# other. On a machine that other programs use too, the limit is ten times as high.
_WORTH_THREADS = 4 * 10**7
# Number of multiprocessors of a large GPU (NVIDIA H200).
_LARGE_GPU = 132


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device with a given name, or raise ValueError if there is no such device.

    ``"cuda"`` is the GPU of this process: ``torchrun`` assigns one to each process (``LOCAL_RANK``), and other
    processes use PyTorch's current GPU. ``"auto"`` is that GPU if there is one, otherwise the CPU. PyTorch defines all
    other names, such as ``"cpu"`` or ``"cuda:1"``.
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
        except (RuntimeError, NotImplementedError, AssertionError) as error:  # not in this build, or the meta device
            raise ValueError(f"device is '{device}', which PyTorch cannot compute on here") from error
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
    """Let PyTorch use one thread within the context if the products of a machine with a batch are small.

    Has no effect on a GPU. Pass ``needed=False`` if compiled code with its own threads does the work: PyTorch's
    threads, which keep polling for work, would slow it down. Yields the number of threads that such code may use.
    """
    work = batch_size * max(link.operations for link in machine.links.values())
    former = torch.get_num_threads()
    if machine.like.device.type != "cpu" or (needed and work >= _WORTH_THREADS) or former == 1:
        yield former
        return
    with one_thread():
        yield former


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let PyTorch use one thread within the context. The last bits of its sums depend on the number of threads."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def n_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU. On a CPU, which only tests pass, it is that of a large GPU."""
    if device.type != "cuda":
        return _LARGE_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count


if hasattr(os, "register_at_fork"):
    # A forked process does not have the OpenMP threads of its parent, and would wait for them forever.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
