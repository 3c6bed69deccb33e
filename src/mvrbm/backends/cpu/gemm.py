"""The gradient on the CPU by PyTorch, every mode product being one plain matrix product; see `modes`.

The arrays between the modes are shared between the field and the gradient, and all arrays are allocated once.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from mvrbm.backends import layout as flat
from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cpu.modes import ModeProducts
from mvrbm.backends.cpu.products import Job, Times, by_blocks, compute, plain_times, times
from mvrbm.backends.cpu.updates import FlatBackend
from mvrbm.backends.layout import Layout
from mvrbm.devices import one_thread
from mvrbm.updates.state import TrainState

# Buffers are kept for so many sizes of batches: a loader may deliver batches of any size.
_MOST_SIDES = 3

_Factors = Sequence[Sequence[Tensor]]  # of each layer
_Units = tuple[str, Tensor]  # their kind and bias
_Weights = tuple[float, float]  # of a sample of the data, and of a chain


class _Phase:
    """States of some of the samples, and their products with the factors of each layer."""

    def __init__(self, sides: "_Sides", factors: _Factors, part: slice, hidden: list[Tensor], times: Times) -> None:
        self.visible, (self.field, self.mean) = [x[part] for x in sides.visible], hidden
        self.fields = {m: field[part] for m, field in sides.fields.items()}
        self.n = self.field.shape[1]
        self.products = [ModeProducts(p.factors, self.n, self.field, times) for p in sides.plan.layers]
        each = list(zip(self.products, factors, self.visible, strict=True))
        self.up = [job for m, (own, U, x) in enumerate(each) for job in own.up(U, x, self.field, add=m > 0)]
        self.down = [list(own.down(U, self.mean, x)) for own, U, x in each]  # of states in the place of means


class _Sides:
    """Both sides of the contrast: the data and the chains.

    Full weights take samples in any order in memory. So machines that have no other couplings have the samples of both
    sides one after another, `both`, and the hidden states of a sample together: the weights are then read less often.
    """

    def __init__(self, plan: Layout, factors: _Factors, gradients: _Factors, n: int, n_chains: int) -> None:
        self.plan, like, parts = plan, factors[0][0], (slice(0, n), slice(n, n + n_chains))
        self.visible = [like.new_zeros(n + n_chains, p.area) for p in plan.layers]
        # Fields of the hidden means, for the gradients of variances.
        self.fields = {m: torch.empty_like(x) for m, x in enumerate(self.visible) if plan.layers[m].learns_variance}
        self.both, self.gradients, multiply = None, list[Job](), times
        if _all_full(plan):
            hidden = [like.new_zeros(n + n_chains, plan.hidden_area).t() for _ in range(2)]
            pairs, multiply = [[array[:, part] for array in hidden] for part in parts], plain_times
            self.both = _Phase(self, factors, slice(None), hidden, multiply)
            each = zip(self.visible, gradients, strict=True)
            self.gradients += [partial(multiply, hidden[1], x, to_weights[0]) for x, (to_weights, *_) in each]
        else:
            pairs = [[like.new_zeros(plan.hidden_area, m) for _ in range(2)] for m in (n, n_chains)]
        self.data, self.chain = (_Phase(self, factors, *own, multiply) for own in zip(parts, pairs, strict=True))
        for phase in (self.chain, self.data):
            for m, products in enumerate(phase.products):
                self.gradients += products.down(factors[m], phase.mean, phase.fields.get(m))
                if len(factors[m]) > 1:
                    self.gradients += products.gradients(gradients[m][:-1], add=phase is self.data)


class GemmBackend(FlatBackend):
    """Computes gradients by the matrix products of PyTorch."""

    def __init__(self, task: UpdateSettings, state: TrainState) -> None:
        super().__init__(task, state)
        self._hidden: _Units = "gaussian" if self.plan.hidden_gaussian else "bernoulli", self._split_params[1]
        self._fused = {"bernoulli"} if self._code is not None and _all_full(self.plan) else set[str]()  # kinds of units
        self._sides: dict[int, _Sides] = {}
        self._current = self._sides_of(0)
        self.load(state)

    def _sides_of(self, n: int) -> _Sides:
        """Return the buffers for `n` samples, which are kept: an epoch has batches of one size, and one shorter."""
        if n not in self._sides:
            if len(self._sides) >= _MOST_SIDES:
                self._sides.clear()
            n_chains = self._n_chains if self._persistent else n
            self._sides[n] = _Sides(self.plan, self._factors, self._split_gradient[0], n, n_chains)
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
        weights = -of_data / max(1, data.n), of_chain / max(1, chain.n)
        self._units(self._hidden, data.field, None, data.mean, weights[0])
        field = starts[-1].field
        for _ in range(self._steps):
            self._gibbs(chain, field)
            field = chain.field
        self._units(self._hidden, chain.field, None, chain.mean, weights[1])
        self._gradients(data, chain, weights)

    def _upwards(self, phase: _Phase) -> None:
        """Compute the hidden field with bias, C + sum W X; without bias where it is added later."""
        compute(phase.up)
        if self._hidden[0] not in self._fused:
            phase.field.add_(self._hidden[1].view(-1, 1))

    def _gibbs(self, chain: _Phase, field: Tensor) -> None:
        """Draw the hidden layer from its field, then the visible layers, and compute their hidden field."""
        y = chain.mean  # overwritten here: the mean is needed only after the last step
        numbers = self._numbers(chain.n, None).flatten(1).t()
        if y.is_contiguous():  # numbers that lie across the states' memory are read more slowly than they are copied
            numbers = numbers.contiguous()
        self._units(self._hidden, field, numbers, y)
        for m, p in enumerate(self.plan.layers):
            states, pair, bias = chain.visible[m], self._affine[m], self._split_params[0][m][-1]
            compute(chain.down[m])
            if p.kind not in self._fused:
                states.add_(bias.view(-1))
            shaped = states.view(chain.n, *p.shape)
            self._units((p.kind, bias), shaped, self._numbers(chain.n, p), shaped)
            if pair is not None and not p.gaussian:
                states.sub_(pair[1])
        self._upwards(chain)

    def _units(self, of: _Units, field: Tensor, numbers: Tensor | None, into: Tensor, scale: float = 1.0) -> None:
        """Draw units with numbers, or write their means times `scale`. Fields have the bias, unless it is fused."""
        kind, bias = of
        if kind in self._fused:
            places = (0 if array is None else array.data_ptr() for array in (field, bias, numbers, into))
            shape = field.numel() // bias.numel(), bias.numel()
            self._code.binary(*places, *shape, scale, torch.get_num_threads())  # type: ignore[union-attr]
        elif numbers is not None:
            by_blocks(partial(_draw, kind), field, numbers, into)
        elif kind == "gaussian":
            torch.mul(field, scale, out=into)
        else:
            by_blocks(lambda field, mean: torch.sigmoid(field, out=mean).mul_(scale), field, into)

    def _gradients(self, data: _Phase, chain: _Phase, weights: _Weights) -> None:
        """Compute the gradient of the weighted sum of -F over both sides; the hidden means have these weights."""
        layers, to_c = self._split_gradient
        self._sum(data.mean, chain.mean, (1.0, 1.0), to_c, self._data_mean)
        compute(self._current.gradients)
        for m, (to_weights, *to_others, to_b) in enumerate(layers):
            x, y = data.visible[m], chain.visible[m]
            self._sum(x.t(), y.t(), weights, to_b)
            if not to_others:  # as large as W: written once, for both sides
                if self._current.both is None:
                    times(torch.cat([data.mean, chain.mean], 1), torch.cat([x, y]), to_weights[0])
                to_weights[1:] = to_weights[0]
            if m in self._variances:
                for field, own, weight in zip((data.fields[m], chain.fields[m]), (x, y), weights, strict=True):
                    field.sub_(own, alpha=weight).mul_(own)
                to_variance = self.plan.log_variance(self._gradient, self.plan.layers[m])
                self._sum(data.fields[m].t(), chain.fields[m].t(), (1.0, 1.0), to_variance)

    def _sum(self, x: Tensor, y: Tensor, weights: _Weights, into: Tensor, minus: Tensor | None = None) -> None:
        """Write the weighted sum of both sides, (area, n) each, to `into`, and minus that of the data to `minus`."""
        if self._current.both is not None and self._code is not None:  # y follows x, unless there are no samples
            places = (0 if array is None else array.data_ptr() for array in (x if x.numel() else y, into, minus))
            self._code.sums(*places, x.shape[1], y.shape[1], len(x), *weights, torch.get_num_threads())
            return
        with one_thread():
            of_x, of_y = x.sum(1).mul_(weights[0]), y.sum(1)
        torch.add(of_x, of_y, alpha=weights[1], out=into.view(-1))
        if minus is not None:
            torch.neg(of_x, out=minus.view(-1))


def _all_full(plan: Layout) -> bool:
    """Return whether all couplings are full matrices."""
    return all(len(p.factors) == 1 for p in plan.layers)


def _draw(kind: str, field: Tensor, numbers: Tensor, into: Tensor) -> None:
    """Draw a layer from its fields, which include its bias, and random numbers; `into` may be `field` itself."""
    if kind == "gaussian":
        torch.add(field, numbers, out=into)
    elif kind == "bernoulli":
        torch.sigmoid(field, out=into)
        torch.lt(numbers, into, out=into)
    else:
        category = (numbers[..., None] >= torch.softmax(field, -1).cumsum(-1)).sum(-1, keepdim=True)
        into.zero_().scatter_(-1, category.clamp_(max=field.shape[-1] - 1), 1.0)


def unsupported_reason(task: UpdateSettings, state: TrainState) -> str | None:
    """Return why this path cannot compute a training run's updates, None if it can."""
    device = state.machine.like.device
    if device.type != "cpu":
        return f"the machine is on {device}"
    return flat.unsupported_reason(task, state)
