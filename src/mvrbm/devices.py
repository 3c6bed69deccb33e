"""How many threads a loop of small products deserves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mvrbm.machine import BoltzmannMachine

# Below this many multiplications a product, threads wait for each other longer than they work; where the
# machine is shared, ten times as long.
_WORTH_THREADS = 4 * 10**7


@contextlib.contextmanager
def sensible_threads(machine: BoltzmannMachine, batch_size: int, *, needed: bool = True) -> Iterator[int]:
    """Use one thread within, if the machine's products over such a batch are small; on the CPU only.

    Parameters
    ----------
    machine : BoltzmannMachine
        What is computed with.
    batch_size : int
        Samples at a time.
    needed : bool
        Whether PyTorch's threads are what the work is done by. Where it has threads of its own they would only
        be in the way: they go on looking for work for some time.

    Yields
    ------
    int
        How many there may be, for those who share work out otherwise.
    """
    work = batch_size * max(link.operations for link in machine.links.values())
    former = torch.get_num_threads()
    if machine.like.device.type != "cpu" or (needed and work >= _WORTH_THREADS) or former == 1:
        yield former
        return
    torch.set_num_threads(1)
    try:
        yield former
    finally:
        torch.set_num_threads(former)
