"""GPU backend for arrays of order 3 to 6, with one program per sample and two launches per update.

It supports a single visible layer with a Kronecker coupling. The kernel, in `tensor_kernel`, groups neighboring modes
and computes one product per group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cuda import kernel_backend
from mvrbm.backends.cuda.kernel_backend import power_of_two
from mvrbm.backends.cuda.program_per_sample import FlatBuffers, PerProgramBackend, tile_of
from mvrbm.backends.layout import Layout, not_flat_reason
from mvrbm.data.sources import Source
from mvrbm.updates.state import TrainState

# Minimum size of each dimension of a product.
_LEAST = 16
# Number of entries in a padded state that fit into the registers of a warp.
_ENTRIES_PER_WARP = 512
# Maximum number of entries in a padded state. At this size, a few registers spill to memory.
_LARGEST = 8192
_WIDEST_FACTOR = 64

#: A group of modes, as described in `tensor_kernel`.
Group = tuple[int, ...]
_NOTHING: Group = (1,) * 8 + (-1, -1)


@dataclass(frozen=True)
class TensorLaunch:
    """Launch settings for the kernel."""

    #: The groups of modes. The second group may be empty.
    groups: tuple[Group, Group, Group]
    #: Sizes K and I and the position of each factor, concatenated.
    factors: tuple[int, ...]
    bias_at: int
    #: Width of a tile that is large enough for any factor.
    edge: int
    warps: int

    @classmethod
    def of(cls, layout: Layout) -> TensorLaunch:
        """Return the launch settings for a layout."""
        layer = layout.layers[0]
        groups = best_groups(layout)
        if groups is None:
            raise ValueError(f"samples must not have more than {_LARGEST} entries")
        position = 0
        factors: list[int] = []
        for shape in layer.factors:
            factors += [*shape[1:], position]
            position += math.prod(shape)
        edge = max(tile_of(max(shape[1:])) for shape in layer.factors)
        return cls(groups, tuple(factors), position, edge, 8 if _volume(groups) > 4 * _ENTRIES_PER_WARP else 4)


class TensorBackend(PerProgramBackend):
    """Backend for machines with a single visible layer of order 3 to 6 and a Kronecker coupling."""

    _launch: TensorLaunch

    def allocate(self) -> FlatBuffers:
        self._launch = TensorLaunch.of(self.layout)
        terms = power_of_two(self.layout.layers[0].rank)
        return FlatBuffers.allocate(
            self.signature, self.rates(), terms=terms, by_blocks=False, chain_dtype=torch.float32
        )

    def launch_series(self, first: int, count: int) -> None:
        for batch in range(first, first + count):
            self._launch_gradient(batch)
            self.launch_step(0, batch)

    def _launch_gradient(self, batch: int) -> None:
        from mvrbm.backends.cuda.tensor_kernel import tensor_step

        launch = self._launch
        layout = self.layout
        buffers = self._buffers
        data = self._data
        layer = layout.layers[0]
        a, b, c = launch.groups
        precision = self.signature.dot_precision
        programs = self.run.rows + (len(layer.factors) * layer.rank if self.run.normalized else 0)
        tensor_step[(programs, self.run.models)](
            data.arrays[0], self._order, self.params, buffers.gradients[0], buffers.gains[0], buffers.clock, self._keys,
            buffers.chains, data.scale, data.shift, batch, self.run.n_valid(batch), self.n_samples,
            self.data_stride(layer), N=self.run.batch_size, CHAINS=self.run.n_chains, RANK=layer.rank,
            STRIDE=buffers.stride, A=a, B=b, C=c, FACTORS=launch.factors, AT_B=launch.bias_at, VISIBLE=layer.area,
            STEPS=self.run.steps, PERSISTENT=self.run.persistent,
            VISIBLE_GAUSSIAN=layer.gaussian, HIDDEN_GAUSSIAN=layout.hidden_gaussian,
            BYTE_SCALE=self.signature.formats[0][1], NORMALIZED=self.run.normalized, TERMS=buffers.gains.shape[3],
            PRECISION=precision, EXACT="ieee" if precision == "ieee" else "tf32x3", HALVES=self.signature.halves,
            EDGE=launch.edge, PDL=self._overlapping, num_warps=launch.warps, num_stages=1, **self.launch_options(),
        )  # fmt: skip


def best_groups(layout: Layout) -> tuple[Group, Group, Group] | None:
    """Return the grouping of modes that needs the fewest operations to compute a field, or None if no grouping fits.

    The second group may be empty.
    """

    def operations(groups: tuple[Group, Group, Group]) -> int:
        a, b, c = ((group[4] * group[6], group[5] * group[7]) for group in groups)  # (hidden, visible), padded
        middle = 0 if groups[1] is _NOTHING else a[1] * b[0] * b[1] * c[0]
        return a[1] * b[1] * c[0] * c[1] + middle + a[0] * a[1] * b[0] * c[0]

    fitting = [groups for groups in _all_groups(layout) if _volume(groups) <= _LARGEST]
    return min(fitting, key=operations, default=None)


def _all_groups(layout: Layout) -> Iterator[tuple[Group, Group, Group]]:
    """Yield all ways to divide the modes into two or three groups of one or two neighboring modes each."""
    factors = layout.layers[0].factors
    order = len(factors)
    for first in (1, 2):
        for last in (1, 2):
            middle = order - first - last
            if 0 <= middle <= 2:
                ends = 0, first, first + middle, order
                a, b, c = (_group(factors, start, end) for start, end in itertools.pairwise(ends))
                yield a, b, c


def _group(factors: tuple[tuple[int, int, int], ...], start: int, end: int) -> Group:
    """Return the group that contains modes `start` to `end`."""
    if start == end:
        return _NOTHING
    positions = [sum(map(math.prod, factors[:mode])) for mode in range(start, end)]
    (_, K1, I1), *further = factors[start:end]
    _, K2, I2 = further[0] if further else (1, 1, 1)
    BK2, BI2 = power_of_two(K2), power_of_two(I2)
    BK1, BI1 = (max(power_of_two(size), _LEAST // second) for size, second in ((K1, BK2), (I1, BI2)))
    return K1, I1, K2, I2, BK1, BI1, BK2, BI2, positions[0], positions[1] if further else -1


def _volume(groups: tuple[Group, Group, Group]) -> int:
    """Return the maximum number of entries in a padded state at any stage of the products."""
    (l, a), (m, b), (n, c) = ((group[4] * group[6], group[5] * group[7]) for group in groups)  # noqa: E741
    return max(a * b * c, a * b * n, a * m * n, l * m * n)


def unsupported_reason(settings: UpdateSettings, state: TrainState, source: Source) -> str | None:
    """Return the reason why the kernel does not support a training run, or None if it does."""
    reason = kernel_backend.unsupported_reason(settings, state, source) or not_flat_reason(settings, state)
    if reason is not None:
        return reason
    layout = Layout.of(state.machine)
    layer = layout.layers[0]
    if len(layout.layers) > 1 or not 3 <= len(layer.factors) <= 6:
        return "it does not have a single layer of order 3 to 6"
    if layer.kind == "categorical" or layer.learns_variance:
        return "its visible units are neither Bernoulli units nor Gaussian units with fixed variances"
    if state.centering is not None and state.centering.follow_hidden:
        return "the hidden layer is centered"
    if max(max(shape[1:]) for shape in layer.factors) > _WIDEST_FACTOR or best_groups(layout) is None:
        return f"a sample has more than {_LARGEST} entries"
    return None
