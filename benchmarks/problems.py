"""The problems of the benchmark: shapes of layers, and digits enlarged to these shapes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mvrbm.errors import DatasetError
from mvrbm.io import datasets

# Limits of the default number of samples, so that slow contestants finish.
_USUAL_BYTES = 32 * 2**20
_USUAL_SAMPLES = 5000


@dataclass(frozen=True)
class Problem:
    """Shapes of the layers, rank of the coupling, number of samples and batch size.

    Parameters
    ----------
    visible, hidden : tuple of int
        Shapes of the two layers, of the same order, at least 2. Dense contestants flatten them.
    rank : int
        Number of Kronecker products, for contestants that have a rank.
    batch_size : int
        Samples per update.
    n_samples : int
        Samples per epoch, rounded to a multiple of the batch size. 0: up to 5,000 within 32 MiB.
    """

    visible: tuple[int, ...]
    hidden: tuple[int, ...]
    rank: int = 1
    batch_size: int = 100
    n_samples: int = 0

    def __post_init__(self) -> None:
        if len(self.visible) != len(self.hidden) or len(self.visible) < 2:
            raise ValueError(
                f"a problem needs visible and hidden shapes of the same order, at least 2, got {_times(self.visible)} "
                f"and {_times(self.hidden)}"
            )
        if self.rank < 1 or self.batch_size < 1 or self.n_samples < 0:
            raise ValueError(
                f"rank and batch_size must be at least 1, and n_samples not negative, got {self.rank}, "
                f"{self.batch_size} and {self.n_samples}"
            )
        most = self.n_samples or min(_USUAL_SAMPLES, _USUAL_BYTES // (4 * self.n_visible))
        batches = max(1 if self.n_samples else 2, most // self.batch_size)
        object.__setattr__(self, "n_samples", batches * self.batch_size)

    @property
    def n_visible(self) -> int:
        """Number of pixels."""
        return math.prod(self.visible)

    @property
    def n_hidden(self) -> int:
        """Number of hidden units."""
        return math.prod(self.hidden)

    @property
    def order(self) -> int:
        """Number of axes."""
        return len(self.visible)

    @property
    def updates(self) -> int:
        """Updates per epoch."""
        return self.n_samples // self.batch_size

    @property
    def name(self) -> str:
        """Such as ``28x28 -> 25x25, rank 4``."""
        return f"{_times(self.visible)} -> {_times(self.hidden)}" + (f", rank {self.rank}" if self.rank > 1 else "")


def parse(text: str, *, batch_size: int = 100, n_samples: int = 0) -> Problem:
    """Read a problem such as ``28x28:25x25``, or ``28x28:25x25:4`` for rank 4."""
    try:
        shapes = text.split(":")
        visible, hidden = (tuple(int(size) for size in shape.split("x")) for shape in shapes[:2])
        (rank,) = [int(rank) for rank in shapes[2:]] or [1]
        if min(*visible, *hidden) < 1:
            raise ValueError
    except (ValueError, TypeError):
        raise ValueError(f"expected a size such as 28x28:25x25, or 28x28:25x25:4 for rank 4, got {text!r}") from None
    return Problem(visible, hidden, rank, batch_size, n_samples)


def as_problem(about: Mapping[str, Any]) -> Problem:
    """Return the problem of plain values: those of `dataclasses.asdict`, or those of a row of results."""
    visible, hidden = tuple(about["visible"]), tuple(about["hidden"])
    return Problem(visible, hidden, about["rank"], about["batch_size"], about["n_samples"])


# -- data -------------------------------------------------------------------------------------------


def digits(shape: tuple[int, ...], n: int) -> tuple[NDArray[np.float32], str]:
    """Return n digits of a shape, values from 0 to 1, and a description.

    Digits are enlarged by linear interpolation; beyond two axes, neighboring pixels of a larger digit go into the
    further axes. If there are fewer than n, they are repeated.
    """
    images, what = _source()
    chosen = images[np.random.default_rng(0).permutation(len(images))[: min(n, len(images))]]
    rows, columns = shape[:2]
    further = math.prod(shape[2:])
    down = max(step for step in range(1, math.isqrt(further) + 1) if further % step == 0)
    across = further // down
    if chosen.shape[1:] != (rows * down, columns * across):
        enlarged = torch.nn.functional.interpolate(
            torch.from_numpy(chosen)[:, None], (rows * down, columns * across), mode="bilinear", antialias=True
        )
        chosen = enlarged[:, 0].clamp(0, 1).numpy()
        what += f", resized to {rows * down}x{columns * across}"
    tiles = chosen.reshape(-1, rows, down, columns, across).transpose(0, 1, 3, 2, 4)
    if further > 1:
        what += f", blocks of {down}x{across} pixels as further axes"
    if n > len(images):
        what += f", repeated to {n:,}"
    samples = np.ascontiguousarray(tiles).reshape(-1, *shape)
    return samples if n <= len(images) else np.resize(samples, (n, *shape)), what


@functools.cache
def _source() -> tuple[NDArray[np.float32], str]:
    """Return the largest set of digits on this machine, or noise: times hardly depend on the values.

    Cached: reading takes longer than some measurements.
    """
    sets = {
        "mnist": "MNIST",
        "mnist-5k": "5,000 MNIST digits (mnist-5k)",
        "digits": "1,797 digits of 8x8 (scikit-learn)",
    }
    for name, what in sets.items():
        with contextlib.suppress(DatasetError, ImportError):
            found = np.asarray(datasets.load(name).arrays, np.float32)
            return found / (np.float32(255) if name != "digits" else max(np.float32(1), found.max())), what
    return np.random.default_rng(0).random((5000, 28, 28), np.float32), "noise: there are no digits here"


def on_device(data: NDArray[np.float32], device: str) -> Tensor:
    """Return data on the device, before any clock runs."""
    return torch.from_numpy(data).to(device)


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
