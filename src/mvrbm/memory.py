"""Memory: how much there is, and a check of what something needs before it is allocated."""

import contextlib
import os
from pathlib import Path

import torch
from torch import Tensor

from mvrbm.errors import MemoryLimitError

__all__ = ["available_memory", "check_memory"]

# Below this many bytes nothing is checked.
_NEGLIGIBLE = 2**28


def available_memory(device: str | torch.device = "cpu") -> int | None:
    """Return the bytes that can be allocated on a device; None where the system does not tell."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [_linux_memory(), _limit_of_container()]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows has none of these
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min((number for number in found if number is not None), default=None)


def _linux_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def _limit_of_container() -> int | None:
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "current"))
        return int(limit) - int(used)
    except (OSError, ValueError):  # ValueError: no limit
        return None


def check_memory(count: int, what: str, like: Tensor | None = None) -> None:
    """Raise MemoryLimitError if so many numbers need more memory than there is.

    `like` has their dtype and device. Default: PyTorch's present ones.
    """
    like = torch.empty(0) if like is None else like
    n_bytes = count * like.dtype.itemsize
    if n_bytes < _NEGLIGIBLE or like.device.type == "meta":  # there, numbers need no memory
        return
    there = available_memory(like.device)
    if there is not None and n_bytes > there:
        raise MemoryLimitError(f"{what} needs {_readable(n_bytes)} of memory, but there are {_readable(there)}")


def _readable(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:,.1f} GiB"
