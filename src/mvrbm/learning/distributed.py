"""The processes that train one machine together, and what they say to each other.

They are started by ``torchrun``, which tells each its number, and talk through `torch.distributed`: gloo on
CPUs, NCCL on GPUs. A process by itself is a world of one, in which nothing is said. Only tensors travel.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, rendezvous  # type: ignore[attr-defined]

from mvrbm.errors import DistributedError
from mvrbm.learning.initialisation import Moments

__all__ = ["World", "DistributedError"]

#: Seconds that a process waits for the others before it gives up, unless the variable says otherwise.
_PATIENCE = 600.0
_PATIENCE_VARIABLE = "MVRBM_TIMEOUT"
_LONGEST_MESSAGE = 4096
_JOINED = "MVRBM_JOINED"  # by which process
_FAREWELL = 0.2  # seconds


_BY_ITSELF: ContextVar[bool] = ContextVar("mvrbm_by_itself", default=False)


@contextlib.contextmanager
def by_itself() -> Iterator[None]:
    """Within, this process is a world of one, and trains what it trains alone."""
    token = _BY_ITSELF.set(True)
    try:
        yield
    finally:
        _BY_ITSELF.reset(token)


@dataclass(frozen=True)
class World:
    """Who takes part in a training.

    Parameters
    ----------
    rank : int
        Number of this process.
    size : int
        How many there are.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def here(cls) -> World:
        """Return the world that this process is part of, joining it if ``torchrun`` started us."""
        if not dist.is_available() or _BY_ITSELF.get():
            return cls()
        if not dist.is_initialized():
            if not _launched():
                return cls()
            _join()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def part_of(self, n: int) -> slice:
        """Return which of n things are this process's: as many as the others', or one more."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    # -- what is said -----------------------------------------------------------------------------

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum of everybody's, the same to the bit for all."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def total(self, number: float) -> float:
        """Return the sum of everybody's number."""
        if self.size == 1:
            return number
        tensor = torch.tensor([number], dtype=torch.float64, device=_talking_device())
        self.add_up(tensor)
        return float(tensor)

    def from_main(self, number: int) -> int:
        """Return the main process's number."""
        if self.size == 1:
            return number
        tensor = torch.tensor([number], dtype=torch.int64, device=_talking_device())
        self.copy_from_main([tensor])
        return int(tensor)

    def copy_from_main(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by the main process's."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return everybody's tensor, in the order of ranks. Their first axes may differ in length."""
        if self.size == 1:
            return [tensor]
        where = _talking_device()
        length = torch.tensor([len(tensor)], dtype=torch.int64, device=where)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length)
        longest = max(int(one) for one in lengths)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]), device=where)
        padded[: len(tensor)] = tensor
        everybody = [torch.zeros_like(padded) for _ in range(self.size)]
        dist.all_gather(everybody, padded)
        return [part[: int(one)].to(tensor.device) for part, one in zip(everybody, lengths, strict=True)]

    def text_from_main(self, text: str) -> str:
        """Return the main process's text."""
        if self.size == 1:
            return text
        return _decoded(self.gather(_encoded(text))[0])

    @contextlib.contextmanager
    def together(self, *errors: type[Exception]) -> Iterator[None]:
        """If what is done within fails anywhere with one of these errors, fail everywhere with the same message.

        Without this the others would wait for the one that failed until their patience is at its end.
        """
        problem: Exception | None = None
        try:
            yield
        except errors as error:
            problem = error
        if self.size == 1:
            if problem is not None:
                raise problem
            return
        messages = [_decoded(part) for part in self.gather(_encoded("" if problem is None else str(problem) or "?"))]
        first = next((rank for rank, message in enumerate(messages) if message), None)
        if first is None:
            return
        if problem is None or first != self.rank:
            problem = DistributedError(f"process {first} of {self.size}: {messages[first]}")
        # What one process says is enough.
        problem.said_by_main = not self.is_main  # type: ignore[attr-defined]
        raise problem

    def merged(self, moments: Mapping[str, Moments]) -> dict[str, Moments]:
        """Return the moments of everybody's samples together."""
        if self.size == 1:
            return dict(moments)
        merged = {}
        for name, own in moments.items():
            packed = torch.stack([own.mean.double(), own.variance.double()])[None].cpu()
            parts = torch.cat(self.gather(packed))  # (size, 2, *shape)
            counts = torch.cat(self.gather(torch.tensor([float(own.count)], dtype=torch.float64)))
            if not float(counts.sum()):
                raise ValueError("the data is empty: at least one sample is needed")
            share = (counts / counts.sum()).reshape(-1, *[1] * own.mean.ndim)
            mean = (share * parts[:, 0]).sum(0)
            variance = (share * (parts[:, 1] + (parts[:, 0] - mean) ** 2)).sum(0)
            merged[name] = Moments(mean, variance, int(counts.sum()))
        return merged


def _launched() -> bool:
    """Whether torchrun started this very process, and not one that started us to work for it (joblib does)."""
    me = str(os.getpid())
    child = multiprocessing.parent_process() is not None or os.environ.get(_JOINED, me) != me
    named = "RANK" in os.environ and "MASTER_ADDR" in os.environ
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and named and not child


def _join() -> None:
    os.environ[_JOINED] = str(os.getpid())
    patience = os.environ.get(_PATIENCE_VARIABLE, str(_PATIENCE))
    try:
        timeout = datetime.timedelta(seconds=float(patience))
    except ValueError:
        raise ValueError(f"{_PATIENCE_VARIABLE} must be a number of seconds, got {patience!r}") from None
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # After a restart torchrun hands out the same store, with the addresses of processes that are no more. On one
        # machine all have been restarted equally often; on several, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 helps.
        store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    atexit.register(leave)  # or the threads that talk end the process with a complaint


def _talking_device() -> str:
    """Where small messages lie: on the CPU, which every backend that we start can send from."""
    return "cpu" if "gloo" in str(dist.get_backend_config()) else "cuda"


def _encoded(text: str) -> Tensor:
    return torch.tensor(list(text.encode()[:_LONGEST_MESSAGE]), dtype=torch.uint8)


def _decoded(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).decode(errors="replace")


def leave() -> None:
    """End talking, so that no process complains about those that have gone."""
    failed = hasattr(sys, "last_value")  # with an error of its own: the others may be in the middle of a message
    if dist.is_available() and dist.is_initialized() and not failed:
        dist.destroy_process_group()
        # Gloo's threads let go of the last tensors a moment later, for which they need the interpreter; if it has
        # ended by then they abort the process (pytorch/pytorch#179291). Nothing can be waited for but time.
        time.sleep(_FAREWELL)
