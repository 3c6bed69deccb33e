"""The one source of randomness: seeded, saveable, splittable, and replaceable by recorded draws.

Nothing in the package touches PyTorch's or NumPy's global generators. Whatever draws a random number
takes a :class:`RandomSource`, so that a run is a function of its inputs and a seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvrbm import compiled

__all__ = ["RandomSource", "Recorder", "Replay"]

_MAX_SEED = 2**63
_NAMED = 2**32 - 1  # no stream is split so often
_WORDS: dict[torch.dtype, tuple[np.dtype[Any], int]] = {
    torch.float32: (np.dtype(np.int32), 24),
    torch.float64: (np.dtype(np.int64), 53),
}


class RandomSource:
    """A seeded stream of uniform and normal numbers.

    Parameters
    ----------
    seed : int
        Same seed, same numbers.
    device : str or torch.device
        Where the numbers are drawn. Draws are moved to where they are needed, so a CPU stream gives a
        GPU machine the very numbers it would give the same machine on the CPU.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import RandomSource
    >>> like = torch.empty(0)
    >>> bool(torch.equal(RandomSource(7).uniform((3,), like), RandomSource(7).uniform((3,), like)))
    True
    """

    def __init__(self, seed: int = 0, *, device: str | torch.device = "cpu") -> None:
        if not 0 <= int(seed) < _MAX_SEED:
            raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, got {seed}")
        self._entropy = int(seed)
        self._key: tuple[int, ...] = ()
        self._children = 0
        self._generator = torch.Generator(device)
        self._restart()

    def _restart(self) -> None:
        # Torch's own seeding is not meant for related seeds; SeedSequence mixes them into unrelated ones.
        sequence = np.random.SeedSequence(self._entropy, spawn_key=self._key)
        self._generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))
        # On the CPU, where torch draws one uniform number at a time, this is more than twice as fast.
        self._bits = np.random.SFC64(sequence.spawn(1)[0])

    @property
    def device(self) -> torch.device:
        """Where the numbers are drawn."""
        return self._generator.device

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Uniform numbers in [0, 1), of the dtype and on the device of `like`."""
        if self.device.type == "cpu" and like.dtype in _WORDS:
            return self._from_bits(tuple(shape), like.dtype).to(like.device)
        draw = torch.rand(tuple(shape), generator=self._generator, dtype=like.dtype, device=self.device)
        return draw.to(like.device)

    def _from_bits(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uniform numbers from raw words: the upper bits that the dtype can hold, 24 or 53."""
        if dtype == torch.float32:
            made = torch.empty(shape, dtype=dtype, device="cpu")  # whatever PyTorch's defaults are
            if compiled.uniform(self._bits, made):
                return made
        word, digits = _WORDS[dtype]
        count = math.prod(shape)
        raw = np.atleast_1d(self._bits.random_raw(-(-count * word.itemsize // 8))).view(word)[:count]
        signed = torch.from_numpy(raw).bitwise_right_shift_(8 * word.itemsize - digits)
        return signed.to(dtype).mul_(2.0**-digits).add_(0.5).reshape(shape)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Standard normal numbers, of the dtype and on the device of `like`."""
        draw = torch.randn(tuple(shape), generator=self._generator, dtype=like.dtype, device=self.device)
        return draw.to(like.device)

    def permutation(self, n: int) -> Tensor:
        """Return the integers 0..n-1 in random order, where the numbers are drawn."""
        return torch.randperm(n, generator=self._generator, device=self.device)

    def register_with(self, graph: torch.cuda.CUDAGraph) -> None:
        """Let a CUDA graph draw from this stream: every replay goes on where the stream stands."""
        graph.register_generator_state(self._generator)

    def part_from_graphs(self, state: dict[str, Tensor]) -> None:
        """Go on from a state with a generator that no graph knows: one whose capture failed draws no more."""
        self._generator = torch.Generator(self.device)
        self.load_state_dict(state)

    @property
    def key(self) -> int:
        """A number for counter-based generators, which draw apart from this stream: 63 bits, same for the same seed."""
        sequence = np.random.SeedSequence(self._entropy, spawn_key=self._key)
        return int(sequence.generate_state(2, np.uint64)[1] >> 1)

    def split(self, count: int) -> list[RandomSource]:
        """Return `count` new streams, independent of this one and of each other.

        Splitting draws no number from this stream. A second call gives other streams.
        """
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        return [self._child() for _ in range(count)]

    def _child(self) -> RandomSource:
        self._children += 1
        return self._at((*self._key, self._children - 1))

    def stream(self, *key: int) -> RandomSource:
        """Return the stream of some numbers, always the same one, independent of those that `split` returns."""
        return self._at((*self._key, _NAMED, *key))

    def _at(self, key: tuple[int, ...]) -> RandomSource:
        child = RandomSource(self._entropy, device=self.device)
        child._key = key
        child._restart()
        return child

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors, ready for safetensors."""
        return {
            "entropy": torch.tensor(self._entropy, dtype=torch.int64),
            "key": torch.tensor(self._key, dtype=torch.int64),
            "children": torch.tensor(self._children, dtype=torch.int64),
            "generator": self._generator.get_state(),
            "bits": torch.from_numpy(self._bits.state["state"]["state"].view(np.int64).copy()),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue where the stream that made `state` stood."""
        missing = {"entropy", "key", "children", "generator", "bits"} - set(state)
        if missing:
            raise ValueError(f"noise state lacks {sorted(missing)}")
        try:
            self._generator.set_state(state["generator"].cpu())
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"noise state does not fit a generator on {self.device}: {error}") from error
        bits = self._bits.state
        bits["state"]["state"] = state["bits"].cpu().numpy().view(np.uint64)
        self._bits.state = bits
        self._entropy = int(state["entropy"])
        self._key = tuple(int(k) for k in state["key"])
        self._children = int(state["children"])

    def __repr__(self) -> str:
        key = "".join(f".{k}" for k in self._key)
        return f"RandomSource({self._entropy}{key}, device='{self.device}')"


class Recorder(RandomSource):
    """Draw from another stream and keep a copy of every draw in `draws`."""

    def __init__(self, source: RandomSource) -> None:
        super().__init__(device=source.device)
        self._source = source
        self.draws: list[Tensor] = []

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Draw from the source and keep the draw."""
        return self._keep(self._source.uniform(shape, like))

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Draw from the source and keep the draw."""
        return self._keep(self._source.normal(shape, like))

    def permutation(self, n: int) -> Tensor:
        """Draw from the source and keep the draw."""
        return self._keep(self._source.permutation(n))

    def split(self, count: int) -> list[RandomSource]:
        """Refuse: the order of draws across streams would be lost."""
        raise ValueError("a Recorder cannot be split: record each stream by itself")

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the stream that is recorded."""
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue the recorded stream; what was recorded stays."""
        self._source.load_state_dict(state)

    def _keep(self, draw: Tensor) -> Tensor:
        self.draws.append(draw.clone())
        return draw


class Replay(RandomSource):
    """Hand out recorded draws, one after another, instead of random numbers.

    A draw of another shape than recorded, or one too many, is an error: two programs that are meant to
    be equal have come apart there.
    """

    def __init__(self, draws: Iterable[Tensor]) -> None:
        super().__init__()
        self._draws = [torch.as_tensor(draw) for draw in draws]
        self._position = 0

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return the next recorded draw."""
        return self._next(tuple(shape)).to(dtype=like.dtype, device=like.device)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return the next recorded draw."""
        return self._next(tuple(shape)).to(dtype=like.dtype, device=like.device)

    def permutation(self, n: int) -> Tensor:
        """Return the next recorded draw."""
        return self._next((n,))

    def split(self, count: int) -> list[RandomSource]:
        """Refuse: a recording is one stream."""
        raise ValueError("a Replay cannot be split: a recording is one stream")

    def state_dict(self) -> dict[str, Tensor]:
        """Return how many draws were handed out."""
        return {"position": torch.tensor(self._position)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go to the draw at which `state` was taken."""
        self._position = int(state["position"])

    def _next(self, shape: tuple[int, ...]) -> Tensor:
        if self._position == len(self._draws):
            raise ValueError(f"recorded noise is used up after {self._position} draws")
        draw = self._draws[self._position]
        if tuple(draw.shape) != shape:
            raise ValueError(f"recorded draw {self._position} has shape {tuple(draw.shape)}, but {shape} was asked for")
        self._position += 1
        return draw.clone()
