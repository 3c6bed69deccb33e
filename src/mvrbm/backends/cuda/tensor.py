"""The path for arrays of order 3 and more on a GPU: two launches per update, an epoch in a CUDA graph.

As :class:`PerSampleBackend`, with the kernel of `tensor_kernel`: one program per sample, one product per group of modes.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from mvrbm.backends import layout as flat
from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cuda import epochs as kernels
from mvrbm.backends.cuda.full_layout import power_of_two
from mvrbm.backends.cuda.per_sample import PerSampleBackend
from mvrbm.backends.layout import Layout
from mvrbm.data.sources import Source
from mvrbm.updates.state import TrainState

# Smallest side of a product.
_LEAST = 16
# Entries of a padded state that a warp's registers have room for, and those of the largest state, for which a few
# numbers go to memory.
_ENTRIES_PER_WARP, _LARGEST = 512, 8192
_WIDEST_FACTOR = 64

#: A group of modes, as `tensor_kernel` describes it.
Group = tuple[int, ...]
_NOTHING: Group = (1,) * 8 + (-1, -1)


class TensorBackend(PerSampleBackend):
    """Computes epochs of machines with a single visible layer of order 3 or more, and a Kronecker coupling."""

    def _choose(self) -> None:
        from mvrbm.backends.cuda import tensor_kernel

        self._tensor_kernel = tensor_kernel
        plan, layer = self.plan, self.plan.layers[0]
        groups = best_groups(plan)
        assert groups is not None
        self._groups = groups
        self._stacked = power_of_two(layer.rank)
        self._rows = max(self.batch_size, self._n_chains if self._persistent else 0)
        self._warps = 8 if _volume(groups) > 4 * _ENTRIES_PER_WARP else 4
        self._options = {"launch_pdl": True} if self._overlapping else {}
        at, factors = 0, list[int]()
        for shape in layer.factors:
            factors += [*shape[1:], at]
            at += math.prod(shape)
        self._factors, self._bias_at = tuple(factors), at
        self._edge = max(_LEAST, power_of_two(max(max(shape[1:]) for shape in layer.factors)))

    def _launch_all(self, first: int, count: int) -> None:
        for batch in range(first, first + count):
            self._launch_gradient(batch, min(self.batch_size, self.n_samples - batch * self.batch_size))
            self._launch_apply(0, batch)

    def _launch_gradient(self, batch: int, n_valid: int) -> None:
        plan, layer = self.plan, self.plan.layers[0]
        exact = "ieee" if self._precision == "ieee" else "tf32x3"
        programs = self._rows + (len(layer.factors) * layer.rank if self._normalized else 0)
        shapes: dict[str, Any] = dict(zip("ABC", self._groups, strict=True))
        self._tensor_kernel.tensor_step[(programs, self._models)](
            self._data[0], self._order, self._params, self._gradients, self._all_gains[0], self._clock, self._seeds,
            self._chains, self._recorded, self._load_scale, self._load_shift, batch, n_valid, self.n_samples,
            0 if self._shared else self.n_samples * layer.area, N=self.batch_size, CHAINS=self._n_chains,
            RANK=layer.rank, STRIDE=self._stride, FACTORS=self._factors, AT_B=self._bias_at, VISIBLE=layer.area,
            HIDDEN=plan.hidden_area, STEPS=self._steps, PERSISTENT=self._persistent, VISIBLE_GAUSSIAN=layer.gaussian,
            HIDDEN_GAUSSIAN=plan.hidden_gaussian, BYTE_SCALE=self._byte_scales[0], NORMALIZED=self._normalized,
            TERMS=self._stacked, RECORDED=self._recorded_size, PRECISION=self._precision, EXACT=exact,
            HALVES=self._halves, EDGE=self._edge, PDL=bool(self._options), num_warps=self._warps, num_stages=1,
            **shapes, **self._options,
        )  # fmt: skip


def best_groups(plan: Layout) -> tuple[Group, Group, Group] | None:
    """Return the groups of modes with which a field takes the fewest operations, None if none of them fits.

    The second group may be empty.
    """

    def operations(groups: tuple[Group, Group, Group]) -> int:
        a, b, c = ((group[4] * group[6], group[5] * group[7]) for group in groups)  # (hidden, visible), padded
        middle = 0 if groups[1] is _NOTHING else a[1] * b[0] * b[1] * c[0]
        return a[1] * b[1] * c[0] * c[1] + middle + a[0] * a[1] * b[0] * c[0]

    fitting = [groups for groups in _all_groups(plan) if _volume(groups) <= _LARGEST]
    return min(fitting, key=operations, default=None)


def _all_groups(plan: Layout) -> Iterator[tuple[Group, Group, Group]]:
    """Yield all ways to put the modes into two or three groups of one or two neighbors."""
    factors = plan.layers[0].factors
    order = len(factors)
    for first in (1, 2):
        for last in (1, 2):
            middle = order - first - last
            if 0 <= middle <= 2:
                ends = 0, first, first + middle, order
                a, b, c = (_group(factors, start, end) for start, end in itertools.pairwise(ends))
                yield a, b, c


def _group(factors: tuple[tuple[int, int, int], ...], start: int, end: int) -> Group:
    """Return the group of modes `start` to `end`."""
    if start == end:
        return _NOTHING
    positions = [sum(map(math.prod, factors[:mode])) for mode in range(start, end)]
    (_, K1, I1), *further = factors[start:end]
    _, K2, I2 = further[0] if further else (1, 1, 1)
    BK2, BI2 = power_of_two(K2), power_of_two(I2)
    BK1, BI1 = (max(power_of_two(size), _LEAST // second) for size, second in ((K1, BK2), (I1, BI2)))
    return K1, I1, K2, I2, BK1, BI1, BK2, BI2, positions[0], positions[1] if further else -1


def _volume(groups: tuple[Group, Group, Group]) -> int:
    """Return the largest number of entries of a padded state before, between and after the products."""
    (l, a), (m, b), (n, c) = ((group[4] * group[6], group[5] * group[7]) for group in groups)  # noqa: E741
    return max(a * b * c, a * b * n, a * m * n, l * m * n)


def unsupported_reason(task: UpdateSettings, state: TrainState, source: Source) -> str | None:
    """Return why the kernel cannot compute a training run's updates, None if it can."""
    reason = kernels.unsupported_reason(task, state, source) or flat.unsupported_reason(task, state)
    if reason is not None:
        return reason
    plan = Layout.of(state.machine)
    layer = plan.layers[0]
    if len(plan.layers) > 1 or not 3 <= len(layer.factors) <= 6:
        return "it does not have a single layer of order 3 to 6"
    if layer.kind == "categorical" or layer.learns_variance:
        return "its visible units are neither Bernoulli nor Gaussian ones of fixed variances"
    if state.centering is not None and state.centering.follow_hidden:
        return "the hidden layer is centered"
    if max(max(shape[1:]) for shape in layer.factors) > _WIDEST_FACTOR or best_groups(plan) is None:
        return f"a sample has more than {_LARGEST} entries"
    return None
