"""Products of a batch with the factors of a coupling, one mode after another, as plain matrix products (GEMM).

A visible batch is (n, I_1, .., I_D), a hidden one (K_1, .., K_D, n). Upwards, the last mode goes first: a product with
a factor takes the last mode away and puts the new one in front, so that (n, I, J) becomes (L, n, I) and then (K, L, n).
Downwards is the way back. So no array is ever permuted, and the batch is part of the long side of every product.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from mvrbm.backends.cpu.products import Job, Times, compute, times
from mvrbm.backends.layout import Layout
from mvrbm.machine import BoltzmannMachine
from mvrbm.sampling import Layers


class ModeProducts:
    """Products of `n` samples with factors of given shapes (R, K_d, I_d); buffers are allocated once.

    The methods return jobs, which can be done any number of times: next to small products, views of tensors take long.
    The arrays between the modes, which the gradients need, are those of the last calls.
    """

    def __init__(self, shapes: Sequence[tuple[int, int, int]], n: int, like: Tensor, times: Times = times) -> None:
        self._times = times
        last = len(shapes) - 1
        visible, hidden = [shape[2] for shape in shapes], [shape[1] for shape in shapes]
        self._ups, self._downs = list[Tensor](), list[Tensor]()
        for mode, (rank, _, _) in enumerate(shapes):
            around = n * math.prod(visible[:mode]) * math.prod(hidden[mode + 1 :])
            up = (rank, hidden[mode], around) if mode > 0 else (0,)
            down = (rank, around, visible[mode]) if mode < last else (0,)
            self._ups.append(like.new_empty(up))
            self._downs.append(like.new_empty(down))
        # What a factor is multiplied with upwards, (R or 1, .., I_d), and downwards, (R or 1, K_d, ..).
        self._before, self._after = [like] * len(shapes), [like] * len(shapes)

    def up(self, factors: Sequence[Tensor], x: Tensor, out: Tensor, *, add: bool) -> Iterator[Job]:
        """Write W x of a batch (n, area) to `out` (hidden area, n), or add it."""
        state, times = x, self._times
        for mode in reversed(range(len(factors))):
            factor = factors[mode]
            rank, K, I = factor.shape  # noqa: E741
            state = self._before[mode] = state.view(1 if state is x else rank, -1, I)
            if mode == 0:
                for r in range(rank):
                    yield partial(times, factor[r], state[r % len(state)].t(), out.view(K, -1), add=add or r > 0)
            elif len(state) == 1:
                yield partial(times, factor.view(rank * K, I), state[0].t(), self._ups[mode].view(rank * K, -1))
            else:
                for r in range(rank):
                    yield partial(times, factor[r], state[r].t(), self._ups[mode][r])
            state = self._ups[mode]

    def down(self, factors: Sequence[Tensor], y: Tensor, out: Tensor | None) -> Iterator[Job]:
        """Write W' y of a batch (hidden area, n) to `out` (n, area). None: only what the gradients need."""
        state, times, last = y, self._times, len(factors) - 1
        for mode, factor in enumerate(factors):
            rank, K, I = factor.shape  # noqa: E741
            state = self._after[mode] = state.view(1 if state is y else rank, K, -1)
            if mode < last:
                for r in range(rank):
                    yield partial(times, state[r % len(state)].t(), factor[r], self._downs[mode][r])
                state = self._downs[mode]
            elif out is not None and len(state) == rank:
                yield partial(times, state.view(rank * K, -1).t(), factor.view(rank * K, I), out.view(-1, I))
            elif out is not None:  # a single mode: all terms have the same hidden states
                yield partial(lambda y, terms, out: times(y, terms.sum(0), out), state[0].t(), factor, out)

    def gradients(self, into: Sequence[Tensor], *, add: bool) -> Iterator[Job]:
        """Write the sum over the batch of the gradients of <y, W x>, x and y as in the last calls, or add it."""
        for mode, target in enumerate(into):
            before, after, (rank, K, I) = self._before[mode], self._after[mode], target.shape  # noqa: E741
            if len(before) == 1 and len(after) == rank:
                yield partial(self._times, after.view(rank * K, -1), before[0], target.view(rank * K, I), add=add)
            else:
                for r in range(rank):
                    yield partial(self._times, after[r % len(after)], before[r % len(before)], target[r], add=add)


class ModeFields:
    """The fields of a machine, as `gibbs_step` needs them, by mode products."""

    def __init__(self, machine: BoltzmannMachine, plan: Layout, n: int) -> None:
        self.layers, self.hidden, self._plan = machine.layers, machine.hidden, plan
        self._factors = [
            [factor.detach() for factor in machine.links[p.name].mode_factors() or ()] for p in plan.layers
        ]
        self._products = [ModeProducts(p.factors, n, machine.like) for p in plan.layers]

    def hidden_field(self, visible: Layers) -> Tensor:
        """Field on the hidden layer, (n, *hidden shape)."""
        states = [self.layers[p.name].statistic(visible[p.name]).flatten(1) for p in self._plan.layers]
        field = states[0].new_empty(self._plan.hidden_area, len(states[0]))
        for m, x in enumerate(states):
            compute(self._products[m].up(self._factors[m], x, field, add=m > 0))
        return field.t().contiguous().view(-1, *self._plan.hidden_shape)

    def visible_fields(self, hidden: Tensor) -> dict[str, Tensor]:
        """Field on each visible layer, (n, *layer shape)."""
        y = self.hidden.statistic(hidden).flatten(1).t().contiguous()
        fields = {p.name: hidden.new_empty(len(hidden), *p.shape) for p in self._plan.layers}
        for p, products, factors in zip(self._plan.layers, self._products, self._factors, strict=True):
            compute(products.down(factors, y, fields[p.name]))
        return fields
