"""Devices and threads: which device a model lives on, and how many threads small products deserve."""

import contextlib
import os
from collections.abc import Iterator

import torch

from mvrbm.machine import BoltzmannMachine

# Below this many multiplications per product, threads wait for each other longer than they work. On a machine that
# is shared with other programs the limit is ten times as high.
_WORTH_THREADS = 4 * 10**7


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device that a name stands for. Raises ValueError for unknown names, and if there is no such GPU.

    ``"auto"`` is the GPU of this process if there is one, otherwise the CPU; ``"cuda"`` is the GPU of this process.
    Processes started by ``torchrun`` have one GPU each (``LOCAL_RANK``); other processes use PyTorch's current GPU. Any
    other name is PyTorch's own, such as ``"cpu"`` or ``"cuda:1"``.
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
        except (RuntimeError, NotImplementedError, AssertionError) as error:  # not in this build, or without numbers
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
    """Let PyTorch use one thread inside the block if the products of a machine with a batch are small. Only on the CPU.

    Without `needed`, other threads than PyTorch's do the work, and PyTorch's would compete with them for processors,
    because they keep polling for work for some time. Yields the number of threads that such code may use.
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
    """Let PyTorch use one thread inside the block: its sums depend on the number of threads in their last bits."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(former)


def n_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; on a CPU, where only tests ask for it, that of a large GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
