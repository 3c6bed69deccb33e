"""Query the available memory, and check that an allocation fits before making it."""

import contextlib
import os
from pathlib import Path

import torch
from torch import Tensor

from mvrbm.errors import MemoryLimitError

__all__ = ["available_memory", "check_memory"]

# Size in bytes below which allocations are not checked.
_NEGLIGIBLE = 2**28


def available_memory(device: str | torch.device = "cpu") -> int | None:
    """Return the available memory of a device in bytes, or None if the system does not report it.

    On a GPU, this includes memory that PyTorch has reserved but does not use.
    """
    device = torch.device(device)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    found = [_linux_memory(), _limit_of_container()]
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows does not have os.sysconf.
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
    except (OSError, ValueError):  # Without a memory limit, the file contains the text "max".
        return None


def check_memory(count: int, what: str, like: Tensor | None = None) -> None:
    """Raise `MemoryLimitError` if an array with `count` entries requires more memory than is available.

    `what` describes the array in the error message. The array has the dtype and device of `like`, or PyTorch's default
    dtype and device if `like` is None.
    """
    like = torch.empty(0) if like is None else like
    n_bytes = count * like.dtype.itemsize
    if n_bytes < _NEGLIGIBLE or like.device.type == "meta":  # Tensors on the meta device use no memory.
        return
    available = available_memory(like.device)
    if available is not None and n_bytes > available:
        raise MemoryLimitError(
            f"{what} requires {_readable(n_bytes)} of memory, but only {_readable(available)} is available"
        )


def _readable(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:,.1f} GiB"
