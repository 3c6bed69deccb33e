"""The source of random numbers: seeded, saveable, splittable, and replaceable by recorded draws.

The package never uses the global generators of PyTorch and NumPy. Every function that draws random numbers takes a
:class:`RandomSource`, so that its result depends only on its arguments and a seed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mvrbm import compiled
from mvrbm.validation import whole_number

__all__ = ["Permutations", "RandomSource", "Recorder", "Replay"]

_MAX_SEED = 2**63
_NAMED = 2**32 - 1  # more than the number of streams that `split` can return
_KEY_BITS = 40  # of the random numbers whose order is a permutation; the bits above count permutations
# Random numbers that are sorted at once, or those of one draw if they are more, and draws.
_SORTED, _MOST_AHEAD = 2**17, 16
_WORDS: dict[torch.dtype, tuple[np.dtype[Any], int]] = {
    torch.float32: (np.dtype(np.int32), 24),
    torch.float64: (np.dtype(np.int64), 53),
}


class RandomSource:
    """A seeded stream of uniform and normal numbers.

    Parameters
    ----------
    seed : int
        Seed, from 0 to 2**63 - 1.
    device : str or torch.device
        Device on which numbers are drawn. Draws are moved to the device of the model, so a CPU stream gives a model on
        the GPU the same numbers as a model on the CPU.

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
        # PyTorch's seeding is not meant for related seeds; SeedSequence turns them into unrelated ones.
        sequence = np.random.SeedSequence(self._entropy, spawn_key=self._key)
        self._generator.manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))
        # More than twice as fast on the CPU as PyTorch, which draws uniform numbers one at a time.
        self._bits = np.random.SFC64(sequence.spawn(1)[0])

    @property
    def device(self) -> torch.device:
        """Device on which numbers are drawn."""
        return self._generator.device

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return uniform numbers in [0, 1), of the dtype and on the device of `like`."""
        if self.device.type == "cpu" and like.dtype in _WORDS:
            return self._from_bits(tuple(shape), like.dtype).to(like.device)
        draw = torch.rand(tuple(shape), generator=self._generator, dtype=like.dtype, device=self.device)
        return draw.to(like.device)

    def _from_bits(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uniform numbers made of the upper bits of raw words that the dtype can represent, 24 or 53."""
        if dtype == torch.float32:
            out = torch.empty(shape, dtype=dtype, device="cpu")  # whatever PyTorch's default device is
            if compiled.uniform(self._bits, out):
                return out
        word, digits = _WORDS[dtype]
        count = math.prod(shape)
        raw = np.atleast_1d(self._bits.random_raw(-(-count * word.itemsize // 8))).view(word)[:count]
        signed = torch.from_numpy(raw).bitwise_right_shift_(8 * word.itemsize - digits)
        return signed.to(dtype).mul_(2.0**-digits).add_(0.5).reshape(shape)

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return standard normal numbers, of the dtype and on the device of `like`."""
        draw = torch.randn(tuple(shape), generator=self._generator, dtype=like.dtype, device=self.device)
        return draw.to(like.device)

    def permutation(self, n: int) -> Tensor:
        """Return the integers 0..n-1 in random order, on the device of this source."""
        if self.device.type == "cuda":
            return _sorted(_keys([self._generator], n, 1)[1])[0, 0]
        return torch.randperm(n, generator=self._generator, device=self.device)

    @property
    def capturable(self) -> bool:
        """Whether CUDA graphs can draw from this stream."""
        return self.device.type == "cuda"

    def register_with(self, graph: torch.cuda.CUDAGraph) -> None:
        """Let a CUDA graph draw from this stream, from its current position at every replay."""
        graph.register_generator_state(self._generator)

    def part_from_graphs(self, state: dict[str, Tensor]) -> None:
        """Continue from a state with a new generator: one whose graph capture has failed cannot be used again."""
        self._generator = torch.Generator(self.device)
        self.load_state_dict(state)

    @property
    def key(self) -> int:
        """Key of 63 bits for a counter-based generator that is independent of this stream."""
        sequence = np.random.SeedSequence(self._entropy, spawn_key=self._key)
        return int(sequence.generate_state(2, np.uint64)[1] >> 1)

    def split(self, count: int) -> list[RandomSource]:
        """Return new independent streams, others at every call, without drawing numbers from this one."""
        first = self._children
        self._children += whole_number(count, "count")
        return [self._at((*self._key, child)) for child in range(first, self._children)]

    def stream(self, *key: int) -> RandomSource:
        """Return the stream with a key, the same at every call, independent of all streams that `split` returns."""
        return self._at((*self._key, _NAMED, *key))

    def _at(self, key: tuple[int, ...]) -> RandomSource:
        child = RandomSource(self._entropy, device=self.device)
        child._key = key
        child._restart()
        return child

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as a dict of tensors."""
        return {
            "entropy": torch.tensor(self._entropy, dtype=torch.int64),
            "key": torch.tensor(self._key, dtype=torch.int64),
            "children": torch.tensor(self._children, dtype=torch.int64),
            "generator": self._generator.get_state(),
            "bits": torch.from_numpy(self._bits.state["state"]["state"].view(np.int64).copy()),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from a state that `state_dict` returned."""
        missing = {"entropy", "key", "children", "generator", "bits"} - set(state)
        if missing:
            raise ValueError(f"random state lacks {sorted(missing)}")
        try:
            self._generator.set_state(state["generator"].cpu())
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"random state does not fit a generator on {self.device}: {error}") from error
        if min([int(state["entropy"]), int(state["children"]), *state["key"].tolist()]) < 0:
            raise ValueError("random state has negative numbers")
        bits = self._bits.state
        if state["bits"].shape != bits["state"]["state"].shape:
            raise ValueError(f"random state has {state['bits'].numel()} words, expected {len(bits['state']['state'])}")
        bits["state"]["state"] = state["bits"].cpu().numpy().view(np.uint64)
        self._bits.state = bits
        self._entropy = int(state["entropy"])
        self._key = tuple(int(k) for k in state["key"])
        self._children = int(state["children"])

    def __repr__(self) -> str:
        key = "".join(f".{k}" for k in self._key)
        return f"RandomSource({self._entropy}{key}, device='{self.device}')"


class Permutations:
    """The next permutations of several sources, one of each per draw, for use on one stream of a GPU.

    On a GPU those of several draws are found by one sort, which takes hardly longer than the sort for one; the sources
    are as after as many calls of :meth:`RandomSource.permutation`.
    """

    def __init__(self) -> None:
        self._orders = torch.empty(0, 0, 0, dtype=torch.int64)  # (draws, sources, n)
        self._states: list[list[Tensor]] = []  # of all generators before every draw, and after the last
        self._next = 0

    def draw(self, sources: Sequence[RandomSource], n: int, most: int) -> Tensor:
        """Return a permutation of 0..n-1 of each source, (len(sources), n); at most `most` draws are needed."""
        if not all(source.capturable for source in sources):
            return torch.stack([source.permutation(n) for source in sources])
        generators = [source._generator for source in sources]
        if not self._continues(generators, n):
            side = _side_stream(sources[0].device)
            with torch.cuda.stream(side):
                count = min(most, _MOST_AHEAD, _SORTED // max(1, n * len(sources)))
                self._states, keys = _keys(generators, n, max(1, count))
                self._orders, self._next = _sorted(keys), 0
            if side is not None:
                torch.cuda.current_stream(side.device).wait_stream(side)
                self._orders.record_stream(torch.cuda.current_stream(side.device))
        self._next += 1
        for generator, state in zip(generators, self._states[self._next], strict=True):
            generator.set_state(state)
        return self._orders[self._next - 1]

    def _continues(self, generators: Sequence[torch.Generator], n: int) -> bool:
        """Return whether the next orders have been drawn, from generators as they are now."""
        if self._next == len(self._orders) or self._orders.shape[1:] != (len(generators), n):
            return False
        pairs = zip(generators, self._states[self._next], strict=True)
        return all(torch.equal(generator.get_state(), state) for generator, state in pairs)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream whose work need not wait for what was launched before; None where there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _keys(generators: Sequence[torch.Generator], n: int, count: int) -> tuple[list[list[Tensor]], Tensor]:
    """Return random numbers (count, len(generators), n), and the generators' states before each draw and at the end."""
    keys = torch.empty(count, len(generators), n, dtype=torch.int64, device=generators[0].device)
    states = [[generator.get_state() for generator in generators]]
    for draw in keys:
        for own, generator in zip(draw, generators, strict=True):
            own.random_(0, 1 << _KEY_BITS, generator=generator)
        states.append([generator.get_state() for generator in generators])
    return states, keys


def _sorted(keys: Tensor) -> Tensor:
    """Return the orders that sort the last axis, (..., n), by one sort of all; the keys are changed."""
    number = torch.arange(math.prod(keys.shape[:-1]), device=keys.device).view(*keys.shape[:-1], 1)
    order = keys.add_(number << _KEY_BITS).flatten().argsort(stable=True)
    return order.view_as(keys) - number * keys.shape[-1]


class Recorder(RandomSource):
    """Draws from another stream and keeps a copy of every draw in `draws`. It cannot be split.

    Parameters
    ----------
    source : RandomSource
        The stream to draw from.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import RandomSource, Recorder, Replay
    >>> recorder = Recorder(RandomSource(0))
    >>> drawn = recorder.uniform((3,), torch.empty(0))
    >>> torch.equal(Replay(recorder.draws).uniform((3,), torch.empty(0)), drawn)
    True
    """

    def __init__(self, source: RandomSource) -> None:
        super().__init__(device=source.device)
        self._source = source
        self.draws: list[Tensor] = []

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._keep(self._source.uniform(shape, like))

    def normal(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._keep(self._source.normal(shape, like))

    def permutation(self, n: int) -> Tensor:
        return self._keep(self._source.permutation(n))

    @property
    def capturable(self) -> bool:
        return False  # a graph would not record the draws of its replays

    def split(self, count: int) -> list[RandomSource]:
        raise ValueError("a Recorder cannot be split: record each stream by itself")

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the recorded stream."""
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue the recorded stream from a state; earlier draws are kept."""
        self._source.load_state_dict(state)

    def _keep(self, draw: Tensor) -> Tensor:
        self.draws.append(draw.clone())
        return draw


class Replay(RandomSource):
    """Returns recorded draws, one after another, instead of random numbers. It cannot be split.

    A draw of another shape than the recorded one, or one draw too many, raises ValueError: two programs that should
    be equal differ there.

    Parameters
    ----------
    draws : sequence of Tensor
        The draws of a :class:`Recorder`.

    Examples
    --------
    >>> import torch
    >>> from mvrbm import Replay
    >>> Replay([torch.tensor([0.25, 0.5])]).uniform((2,), torch.empty(0)).tolist()
    [0.25, 0.5]
    """

    def __init__(self, draws: Iterable[Tensor]) -> None:
        super().__init__()
        self._draws = [torch.as_tensor(draw) for draw in draws]
        self._position = 0

    def uniform(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._next(tuple(shape)).to(dtype=like.dtype, device=like.device)

    normal = uniform

    def permutation(self, n: int) -> Tensor:
        return self._next((n,))

    def split(self, count: int) -> list[RandomSource]:
        raise ValueError("a Replay cannot be split: a recording is one stream")

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of draws returned so far."""
        return {"position": torch.tensor(self._position)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue at the draw at which `state` was taken."""
        self._position = int(state["position"])

    def _next(self, shape: tuple[int, ...]) -> Tensor:
        if self._position == len(self._draws):
            raise ValueError(f"the recording has no more than {self._position} draws")
        draw = self._draws[self._position]
        if tuple(draw.shape) != shape:
            raise ValueError(f"recorded draw {self._position} has shape {tuple(draw.shape)}, expected {shape}")
        self._position += 1
        return draw.clone()
