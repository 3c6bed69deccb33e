"""Source of random numbers, which is passed as an argument to every function that draws random numbers.

The package never uses the global generators of PyTorch or NumPy. Results depend only on the arguments and the seed.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvrbm.compiled import random as compiled
from mvrbm.extras import triton_runs_on
from mvrbm.random import philox
from mvrbm.validation import whole_number

__all__ = ["RandomSource"]

_MAX_SEED = 2**63
# Path components that mark a named stream and the step at which a source was derived. They are larger than the index
# of any child that `split` returns.
_NAMED = 2**32 - 1
_AT_STEP = 2**32 - 2
# Number of bits in a sort key. The higher bits store the index of the permutation, so that one sort computes several
# permutations.
_KEY_BITS = 40


class Position(NamedTuple):
    """Position of a source in its random sequence. C code and kernels use it to compute the same numbers."""

    key: int
    step: philox.Step
    draw: int  # index of the next draw
    first_row: int


class RandomSource:
    """Source of uniform random numbers, normal random numbers and random permutations.

    Each number is a function of the seed, step, draw, row and entry. A source counts its draws, so successive calls
    return different numbers. The value of an entry does not depend on the device, the dtype, the number of rows, or the
    sizes of earlier draws.

    Parameters
    ----------
    seed : int
        Seed between 0 and 2**63 - 1.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import RandomSource
    >>> like = torch.empty(0)
    >>> few = RandomSource(7).uniform((3, 2), like)
    >>> many = RandomSource(7).uniform((9, 2), like)
    >>> torch.equal(few, many[:3])
    True
    """

    def __init__(self, seed: int = 0) -> None:
        self._entropy = whole_number(seed, "seed", 0, _MAX_SEED - 1)
        self._path: tuple[int, ...] = ()
        self._children = 0
        self._first_row = 0
        self._step: philox.Step = 0
        self._draw = 0

    @functools.cached_property
    def key(self) -> int:
        """The 63-bit key of this source, derived from the seed and the `split` and `stream` calls that created it."""
        # SeedSequence maps related seeds and paths to unrelated keys.
        sequence = np.random.SeedSequence(self._entropy, spawn_key=self._path)
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)

    @property
    def position(self) -> Position:
        """The key of this source and the counters for its next draw."""
        return Position(self.key, self._step, self._draw, self._first_row)

    # -- position -------------------------------------------------------------------------------------

    def at_step(self, step: philox.Step, *, draw: int = 0, first_row: int = 0) -> RandomSource:
        """Return a source positioned at a given step. Equal arguments always yield the same numbers.

        Parameters
        ----------
        step : int or Tensor
            Index of the step, such as an update or an epoch. A scalar tensor on a GPU is read when numbers are drawn.
        draw : int
            Index of the first draw.
        first_row : int
            Index of the first row in every draw. For example, a process with rows 100 to 199 of a batch passes 100 to
            draw the same numbers that a single process would draw for these rows.
        """
        found = self._at(self._path, first_row)
        found.__dict__["key"] = self.key
        found._step = step
        found._draw = draw
        return found

    def from_row(self, first_row: int) -> RandomSource:
        """Return a source at the same step and draw, with `first_row` as the index of the first row in every draw."""
        return self.at_step(self._step, draw=self._draw, first_row=first_row)

    def next_step(self) -> None:
        """Advance to the first draw of the next step. If the step is a tensor, it is incremented in place."""
        if isinstance(self._step, Tensor):
            self._step.add_(1)
        else:
            self._step += 1
        self._draw = 0

    def go_to(self, step: int) -> None:
        """Move to the first draw of a given step. If the current step is a tensor, it is updated in place."""
        if isinstance(self._step, Tensor):
            self._step.fill_(step)
        else:
            self._step = step
        self._draw = 0

    def step_on(self, device: torch.device) -> None:
        """Store the step index in a tensor on the given device so that CUDA graphs can increment it."""
        self._step = torch.as_tensor(self._step, dtype=torch.int64, device=device).clone()

    def split(self, count: int) -> list[RandomSource]:
        """Return `count` independent sources. Every call returns different sources.

        The returned sources depend on the current step, and start at the same row as this source.
        """
        first = self._children
        self._children += whole_number(count, "count")
        return [self._derived(child) for child in range(first, self._children)]

    def stream(self, *name: int) -> RandomSource:
        """Return the source with the given name, which is independent of all sources returned by `split`.

        Calls with the same name at the same step return equal sources, which start at the same row as this source.
        """
        return self._derived(_NAMED, *name)

    def _derived(self, *branch: int) -> RandomSource:
        """Return the source whose path extends this source's path by the current step and the given branch."""
        if isinstance(self._step, Tensor):
            raise ValueError("the step of this source is a tensor, from which no other source can be derived")
        at_step = (_AT_STEP, self._step) if self._step else ()
        return self._at((*self._path, *at_step, *branch), self._first_row)

    def _at(self, path: tuple[int, ...], first_row: int) -> RandomSource:
        """Return a source with the same type and seed but a different path, positioned at its first draw."""
        found = copy.copy(self)
        found.__dict__.pop("key", None)  # remove the cached key, which depends on the path
        found._path = path
        found._children = 0
        found._first_row = first_row
        found._step = 0
        found._draw = 0
        return found

    # -- draws ----------------------------------------------------------------------------------------

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return uniform random numbers in the open interval (0, 1), with the dtype and device of `like`.

        The first axis of `shape` is the row axis.
        """
        found = self._uniform(tuple(shape), like, self._draw)
        self._draw += 1
        return found

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return standard normal random numbers with the dtype and device of `like`.

        The numbers are computed with the Box-Muller transform.
        """
        radius = self._uniform(tuple(shape), like, self._draw).log_().mul_(-2).sqrt_()
        angle = self._uniform(tuple(shape), like, self._draw + philox.ANGLES).mul_(2 * math.pi)
        self._draw += 1
        return radius.mul_(angle.cos_())

    def _uniform(self, shape: tuple[int, ...], like: Tensor, draw: int) -> Tensor:
        """Return the uniform random numbers for a given draw index without advancing the source."""
        device = like.device
        if device.type == "cpu" and isinstance(self._step, int):
            found = compiled.uniform(self.key, philox.layout(shape), self._step, draw, self._first_row)
            if found is not None:
                return found.view(shape).to(like.dtype)
        kernels = _triton(device)
        if kernels is not None:
            drawn: Tensor = kernels.uniform(
                self.key, shape, philox.layout(shape), self._step, draw, self._first_row, like.dtype, device
            )
            return drawn
        return philox.uniform(self.key, shape, self._step, draw, self._first_row, like.dtype, device)

    def permutation(self, n: int, device: str | torch.device = "cpu") -> Tensor:
        """Return a random permutation of the integers from 0 to n - 1."""
        steps = torch.as_tensor(self._step, device=device).reshape(1)
        found = _permutations(self.key, n, steps, self._draw)[0]
        self._draw += 1
        return found

    def permutations(self, n: int, first_step: int, count: int, device: str | torch.device = "cpu") -> Tensor:
        """Return the permutations of 0, ..., n - 1 for `count` consecutive steps, as a tensor of shape (count, n).

        Each permutation is the first draw of its step. All permutations are computed with a single sort. On a GPU, this
        takes barely longer than computing one permutation.
        """
        return _permutations(self.key, n, torch.arange(first_step, first_step + count, device=device), 0)

    def __repr__(self) -> str:
        path = "".join(f".{part}" for part in self._path)
        return f"RandomSource({self._entropy}{path})"


def _permutations(key: int, n: int, steps: Tensor, draw: int) -> Tensor:
    kernels = _triton(steps.device)
    keys: Tensor = (philox if kernels is None else kernels).sort_keys(key, n, steps, draw)  # (steps, n)
    number = torch.arange(len(steps), device=steps.device)[:, None]
    order = (keys + (number << _KEY_BITS)).flatten().argsort(stable=True)
    return order.view(len(steps), n) - number * n


def _triton(device: torch.device) -> ModuleType | None:
    """Return the module with the Triton kernels if they can run on the device, or None otherwise."""
    if not triton_runs_on(device):
        return None
    from mvrbm.random import kernels

    return kernels
