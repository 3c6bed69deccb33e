"""Communication between the processes of a distributed training run.

``torchrun`` starts the processes and assigns their ranks. The processes exchange tensors through `torch.distributed`,
using gloo on CPUs and NCCL on GPUs. A single process is a world of size one and does not communicate.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, rendezvous  # type: ignore[attr-defined]

from mvrbm.errors import DistributedError
from mvrbm.io.formats import first_line

__all__ = ["DistributedError", "World"]

# Default communication timeout in seconds.
_TIMEOUT = 600.0
# Environment variable that overrides the default timeout.
_TIMEOUT_VARIABLE = "MVRBM_TIMEOUT"
# Maximum length of a text message in bytes. Longer messages are truncated.
_LONGEST_MESSAGE = 4096
# Environment variable that stores the ID of the process that joined the process group. Child processes do not join.
_JOINED = "MVRBM_JOINED"
# Time in seconds to wait for gloo's threads after leaving the process group.
_FAREWELL = 0.2

_SINGLE: ContextVar[bool] = ContextVar("mvrbm_single_process", default=False)


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Context manager in which this process is treated as a world of size one."""
    token = _SINGLE.set(True)
    try:
        yield
    finally:
        _SINGLE.reset(token)


@dataclass(frozen=True)
class World:
    """Group of processes in a training run, described by the rank of this process and the number of processes."""

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> World:
        """Return the world of this process. If ``torchrun`` started the process, join the process group first."""
        if not dist.is_available() or _SINGLE.get():
            return cls()
        if not dist.is_initialized():
            if not _launched():
                return cls()
            _join()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and messages on behalf of all processes."""
        return self.rank == 0

    def part_of(self, n: int) -> slice:
        """Return the slice of `n` items assigned to this process. Slice lengths differ by at most one."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor in place with its sum over all processes. All processes get bitwise identical results."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return whether each flag is set on any process."""
        if self.size == 1:
            return list(flags)
        counts = torch.tensor([int(flag) for flag in flags], device=_message_device())
        dist.all_reduce(counts)
        return [count > 0 for count in counts.tolist()]

    def sum(self, number: float) -> float:
        """Return the sum of a number over all processes."""
        return float(torch.cat(self.gather(torch.tensor([number], dtype=torch.float64))).sum())

    def means(self, numbers: Sequence[float]) -> list[float]:
        """Return the mean of each number over all processes."""
        if self.size == 1:
            return list(numbers)
        totals = torch.tensor(numbers, dtype=torch.float64, device=_message_device())
        dist.all_reduce(totals)
        return [total / self.size for total in totals.tolist()]

    def broadcast_int(self, number: int) -> int:
        """Return the value of `number` on the main process."""
        return number if self.size == 1 else int(self.gather(torch.tensor([number]))[0])

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors in place with their values on the main process."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors from all processes, ordered by rank. The tensors may differ in length along axis 0."""
        if self.size == 1:
            return [tensor]
        where = _message_device()
        length = torch.tensor([len(tensor)], dtype=torch.int64, device=where)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        longest = max(int(one) for one in lengths)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]), device=where)
        padded[: len(tensor)] = tensor
        gathered = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        return [part[: int(one)].to(tensor.device) for part, one in zip(gathered, lengths, strict=True)]

    def broadcast_text(self, text: str) -> str:
        """Return the value of `text` on the main process."""
        return _decoded(self.gather(_encoded(text))[0])

    @contextlib.contextmanager
    def raise_together(self, *errors: type[Exception]) -> Iterator[None]:
        """Context manager that raises an error on all processes if any process raises one of the `errors`.

        Without this context manager, the other processes would wait for the failed process until they time out.
        """
        problem: Exception | None = None
        try:
            yield
        except errors as error:
            problem = error
        messages = [_decoded(part) for part in self.gather(_encoded("" if problem is None else str(problem) or "?"))]
        first = next((rank for rank, message in enumerate(messages) if message), None)
        if first is not None:
            if problem is None or first != self.rank:
                problem = DistributedError(f"process {first} of {self.size}: {messages[first]}")
            problem.said_by_main = not self.is_main  # type: ignore[attr-defined]  # Only the main process prints the message.
            raise problem


def _launched() -> bool:
    """Return whether ``torchrun`` started this process directly.

    For child processes of the process that ``torchrun`` started (joblib workers, for example), return False.
    """
    me = str(os.getpid())
    child = multiprocessing.parent_process() is not None or os.environ.get(_JOINED, me) != me
    named = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and named and not child


def _join() -> None:
    seconds = os.environ.get(_TIMEOUT_VARIABLE, str(_TIMEOUT))
    try:
        timeout = datetime.timedelta(seconds=float(seconds))
    except ValueError:
        raise ValueError(f"{_TIMEOUT_VARIABLE} must be a number of seconds, got {seconds!r}") from None
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    except (RuntimeError, ValueError) as error:
        # The port is in use, the address does not answer, or an environment variable is missing.
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise DistributedError(f"the processes cannot connect to {where}: {first_line(error)}") from error
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # After a restart, torchrun provides the same store, which still contains the addresses of terminated processes.
        # A prefix with the restart count avoids them, because all processes on one machine have the same count. On
        # several machines, users can set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 instead.
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    os.environ[_JOINED] = str(os.getpid())
    atexit.register(leave)  # Otherwise, the communication threads crash the process on exit.


def _message_device() -> str:
    """Return the device for small messages: the CPU if gloo is available, and the GPU otherwise."""
    return "cpu" if "gloo" in str(dist.get_backend_config()) else "cuda"


def _encoded(text: str) -> Tensor:
    return torch.tensor(list(text.encode()[:_LONGEST_MESSAGE]), dtype=torch.uint8)


def _decoded(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).decode(errors="replace")


def leave() -> None:
    """Leave the process group so that the program can exit cleanly."""
    failed = hasattr(sys, "last_value")  # After a failure, other processes may still be communicating.
    if dist.is_available() and dist.is_initialized() and not failed:
        dist.destroy_process_group()
        # Gloo's threads release the last tensors a moment later, which requires a running interpreter. If the
        # interpreter has already shut down, they abort the process (pytorch/pytorch#179291). There is no event to wait
        # for.
        time.sleep(_FAREWELL)
