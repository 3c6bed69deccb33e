"""The gradient on the CPU by PyTorch, every mode product being one plain matrix product; see `modes`.

The arrays between the modes are shared between the field and the gradient, and all arrays are allocated once.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from mvrbm.devices import one_thread
from mvrbm.learning.paths import flat
from mvrbm.learning.paths.base import Task
from mvrbm.learning.paths.flat import Plan
from mvrbm.learning.paths.flat_updates import FlatUpdates
from mvrbm.learning.paths.modes import ModeProducts
from mvrbm.learning.paths.products import Times, by_blocks, plain_times, times
from mvrbm.learning.state import TrainState

# Buffers are kept for so many sizes of batches: a loader may deliver batches of any size.
_MOST_SIDES = 3


class _Phase:
    """States of some samples, and the products that their gradient uses again."""

    def __init__(self, plan: Plan, visible: list[Tensor], field: Tensor, mean: Tensor, times: Times) -> None:
        self.n = field.shape[1]
        self.visible, self.field, self.mean = visible, field, mean  # (n, area) of each layer, (hidden area, n)
        self.products = [ModeProducts(p.factors, self.n, field, times) for p in plan.layers]


class _Sides:
    """Both sides of the contrast: the data and the chains.

    Full weights take samples in any order in memory. So machines that have no other couplings have the samples of both
    sides one after another, `both`, and the hidden states of a sample together: the weights are then read less often.
    """

    def __init__(self, plan: Plan, n: int, n_chains: int, like: Tensor, times: Times) -> None:
        visible = [like.new_zeros(n + n_chains, p.area) for p in plan.layers]
        parts = slice(0, n), slice(n, n + n_chains)
        if _all_full(plan):
            field, mean = (like.new_zeros(n + n_chains, plan.hidden_area).t() for _ in range(2))
            self.both: _Phase | None = _Phase(plan, visible, field, mean, times)
            hidden = [(field[:, part], mean[:, part]) for part in parts]
        else:
            self.both = None
            hidden = [(like.new_zeros(plan.hidden_area, m), like.new_zeros(plan.hidden_area, m)) for m in (n, n_chains)]
        self.data, self.chain = (
            _Phase(plan, [states[part] for states in visible], field, mean, times)
            for part, (field, mean) in zip(parts, hidden, strict=True)
        )


class GemmUpdates(FlatUpdates):
    """Computes gradients by the matrix products of PyTorch."""

    def __init__(self, task: Task, state: TrainState) -> None:
        super().__init__(task, state)
        self._times, self._by_blocks = (plain_times, _at_once) if _all_full(self.plan) else (times, by_blocks)
        self._sides: dict[int, _Sides] = {}
        self._current = self._sides_of(0)
        self.load(state)

    def _sides_of(self, n: int) -> _Sides:
        """Return the buffers for `n` samples, which are kept: an epoch has batches of one size, and one shorter."""
        if n not in self._sides:
            if len(self._sides) >= _MOST_SIDES:
                self._sides.clear()
            n_chains = self._n_chains if self._persistent else n
            self._sides[n] = _Sides(self.plan, n, n_chains, self._params, self._times)
        return self._sides[n]

    def _chain_states(self) -> list[Tensor]:
        states = self._current.chain.visible
        return [own.view(-1, *p.shape) for p, own in zip(self.plan.layers, states, strict=True)]

    def _contrast(self, batch: Mapping[str, Tensor], of_data: float, of_chain: float) -> None:
        n = len(next(iter(batch.values())))
        before, self._current = self._current, self._sides_of(n)
        data, chain, both = self._current.data, self._current.chain, self._current.both
        if self._persistent and self._current is not before:
            for states, old in zip(chain.visible, before.chain.visible, strict=True):
                states.copy_(old)
        for p, states, pair in zip(self.plan.layers, data.visible, self._affine, strict=True):
            states.copy_(batch[p.name].reshape(n, p.area))
            if pair is not None:
                states.mul_(pair[0]).sub_(pair[1])
        starts = [data, chain] if self._persistent else [data]
        for phase in [both] if both is not None and self._persistent else starts:
            self._upwards(phase)
        self._means(data)
        field = starts[-1].field
        for _ in range(self._steps):
            self._gibbs(chain, field)
            field = chain.field
        self._means(chain)
        self._gradients(data, chain, of_data, of_chain)

    def _upwards(self, phase: _Phase) -> None:
        """Compute the hidden field with bias, C + sum W X."""
        for m, own in enumerate(self._factors):
            phase.products[m].up(own, phase.visible[m], phase.field, add=m > 0)
        phase.field.add_(self._split_params[1].view(-1, 1))

    def _means(self, phase: _Phase) -> None:
        if self.plan.hidden_gaussian:
            phase.mean.copy_(phase.field)
        else:
            self._by_blocks(lambda field, mean: torch.sigmoid(field, out=mean), phase.field, phase.mean)

    def _gibbs(self, chain: _Phase, field: Tensor) -> None:
        """Draw the hidden layer from its field, then the visible layers, and compute their hidden field."""
        y = chain.mean  # overwritten here: the mean is needed only after the last step
        numbers = self._numbers(chain.n, None).flatten(1).t()
        if y.is_contiguous():  # numbers that lie across the states' memory are read more slowly than they are copied
            numbers = numbers.contiguous()
        self._by_blocks(partial(_draw, "gaussian" if self.plan.hidden_gaussian else "bernoulli"), field, numbers, y)
        for m, p in enumerate(self.plan.layers):
            states, pair = chain.visible[m], self._affine[m]
            chain.products[m].down(self._factors[m], y, states)
            states.add_(self._split_params[0][m][-1].view(-1))
            shaped = states.view(chain.n, *p.shape)
            self._by_blocks(partial(_draw, p.kind), shaped, self._numbers(chain.n, p), shaped)
            if pair is not None and not p.gaussian:
                states.sub_(pair[1])
        self._upwards(chain)

    def _gradients(self, data: _Phase, chain: _Phase, of_data: float, of_chain: float) -> None:
        """Compute the gradient of of_data * mean F(data) - of_chain * mean F(chain)."""
        layers, to_c = self._split_gradient
        self._data_mean = torch.empty_like(to_c).view(-1)
        _total(data.mean, 1, self._data_mean, of_data / max(1, data.n), add=False)
        _total(chain.mean, 1, to_c, of_chain / max(1, chain.n), add=False)
        to_c.view(-1).sub_(self._data_mean)
        sides = [(chain, of_chain / max(1, chain.n)), (data, -of_data / max(1, data.n))]
        for number, (phase, sign) in enumerate(sides):
            add = number > 0
            phase.mean.mul_(sign)
            for m, (p, (*to_factors, to_b)) in enumerate(zip(self.plan.layers, layers, strict=True)):
                products, x = phase.products[m], phase.visible[m]
                _total(x, 0, to_b, sign, add=add)
                field = torch.empty_like(x) if p.learns_variance else None
                products.down(self._factors[m], phase.mean, field)
                if field is not None:
                    to_variance = self.plan.log_variance(self._gradient, p)
                    _total(field.sub_(x, alpha=sign).mul_(x), 0, to_variance, 1.0, add=add)
                if len(to_factors) > 1:
                    products.gradients(to_factors, add=add)
        for m, (*to_factors, _) in enumerate(layers):
            if len(to_factors) == 1:  # as large as W: written once, for both sides
                both = self._current.both
                means = torch.cat([data.mean, chain.mean], 1) if both is None else both.mean
                states = torch.cat([data.visible[m], chain.visible[m]]) if both is None else both.visible[m]
                self._times(means, states, to_factors[0][0])
                to_factors[0][1:] = to_factors[0][0]


def _all_full(plan: Plan) -> bool:
    """Return whether all couplings are full matrices."""
    return all(len(p.factors) == 1 for p in plan.layers)


@one_thread()
def _at_once(function: Callable[..., object], *tensors: Tensor) -> None:
    """Compute entries by one thread: next to the products they are few, and threads would wait for each other."""
    function(*tensors)


def _total(x: Tensor, dim: int, into: Tensor, scale: float, *, add: bool) -> None:
    """Write the sum along the samples, times `scale`, to `into`, or add it."""
    with one_thread():
        total = x.sum(dim).view(into.shape)
    into.add_(total, alpha=scale) if add else torch.mul(total, scale, out=into)


def _draw(kind: str, field: Tensor, numbers: Tensor, into: Tensor) -> None:
    """Draw a layer from its fields, which include its bias, and random numbers; `into` may be `field` itself."""
    if kind == "gaussian":
        torch.add(field, numbers, out=into)
    elif kind == "bernoulli":
        torch.sigmoid(field, out=into)
        torch.lt(numbers, into, out=into)
    else:
        category = (numbers >= torch.softmax(field, -1).cumsum(-1)).sum(-1, keepdim=True)
        into.zero_().scatter_(-1, category.clamp_(max=field.shape[-1] - 1), 1.0)


def unsupported_reason(task: Task, state: TrainState) -> str | None:
    """Return why this path cannot compute a training run's updates, None if it can."""
    device = state.machine.like.device
    if device.type != "cpu":
        return f"the machine is on {device}"
    return flat.unsupported_reason(task, state)
