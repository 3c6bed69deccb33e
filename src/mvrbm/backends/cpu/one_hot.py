"""CPU backend for categorical data, such as sequences of letters, in which most entries of a sample are zero.

A product of `W` with a one-hot sample is a sum of one row of the transposed `W` per site. These sums are faster than
the products with small factors that they replace, so this backend expands all couplings to full matrices in every
update, and converts the gradient for `W` to the gradient for the factors. On one core of an AMD EPYC, PCD updates take
1.7 ms instead of 4.3 ms for 27x20 -> 25x12 at rank 16, 8.6 ms instead of 39 ms for 112x21 -> 40x10 at rank 20, and 4.3
ms instead of 8.4 ms for a dense coupling from 112x21 to 200 hidden units (CPU time, 100 samples and 100 chains).
"""

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cpu import flat_backend
from mvrbm.backends.cpu.draws import DRAWS
from mvrbm.backends.cpu.flat_arrays import FlatLayer
from mvrbm.backends.cpu.flat_backend import FlatCpuBackend
from mvrbm.backends.cpu.parallel_products import in_blocks, matmul_in_blocks
from mvrbm.backends.layout import Layout
from mvrbm.devices import one_thread
from mvrbm.random import RandomSource
from mvrbm.updates.state import TrainState

# Maximum number of entries in the full matrix of a coupling that is expanded, relative to the number of multiplications
# in a product of one sample with its factors.
_MOST_WASTE = 1.5


class OneHotBackend(FlatCpuBackend):
    """Backend that replaces products with one-hot samples by sums of rows."""

    def __init__(self, settings: UpdateSettings, state: TrainState) -> None:
        super().__init__(settings, state)
        self._tables = [Table(layer, self.layout.hidden_shape) for layer in self.arrays.layers]
        self._chains_of = [table.new_states(self._n_chains) for table in self._tables]
        self.load(state)

    def _chain_states(self) -> list[Tensor]:
        return self._chains_of

    def _contrast(self, batch: Mapping[str, Tensor], rng: RandomSource, of_data: float, of_chain: float) -> None:
        for table in self._tables:
            table.expand()
        data = [table.rows_of(batch[table.layout.name]) for table in self._tables]
        data_field = field = self._field(data)
        states = self._chains_of
        if self._persistent is None:
            states = [table.new_states(len(field)) for table in self._tables]
        else:
            pairs = zip(self._tables, states, strict=True)
            field = self._field([table.rows_of(table.layer.data_of(own)) for table, own in pairs])
        for _ in range(self._gibbs_steps):
            numbers = rng.uniform((len(field), *self.layout.hidden_shape), field).flatten(1)
            hidden = torch.empty_like(field)
            in_blocks(DRAWS["bernoulli"], field, numbers, hidden)
            chain = [table.draw(hidden, rng, own) for table, own in zip(self._tables, states, strict=True)]
            field = self._field(chain)
        weights = -of_data / max(1, len(data_field)), of_chain / max(1, len(field))
        for own, weight in zip((data_field, field), weights, strict=True):
            in_blocks(lambda field, mean, weight=weight: torch.sigmoid(field, out=mean).mul_(weight), own, own)
        total = self._hidden_gradient(data_field, field)
        for table, *rows in zip(self._tables, data, chain, strict=True):
            table.write_gradients(rows, (data_field, field), weights, total)

    @one_thread()
    def _field(self, rows: list[Tensor]) -> Tensor:
        """Return the hidden field, including the bias: (n, sites) per layer -> (n, hidden)."""
        fields = [table.to_hidden(own) for table, own in zip(self._tables, rows, strict=True)]
        return functools.reduce(torch.add, fields).add_(self.arrays.hidden_bias.view(-1))

    @one_thread()
    def _hidden_gradient(self, data_mean: Tensor, chain_mean: Tensor) -> Tensor:
        """Write the gradient for the hidden bias, given weighted means of the hidden layer, and return it."""
        of_data = data_mean.sum(0)
        torch.neg(of_data, out=self._data_mean.view(-1))
        return torch.add(of_data, chain_mean.sum(0), out=self.arrays.hidden_bias_gradient.view(-1))


class Table:
    """Full coupling matrix of one layer, with one row per visible entry: (visible, hidden).

    A state of the layer is given by the indices of its rows, one per site.
    """

    def __init__(self, layer: FlatLayer, hidden_shape: tuple[int, ...]) -> None:
        like = layer.bias
        letters = layer.layout.shape[-1]
        self.layer, self.layout = layer, layer.layout
        self._shape = self.layout.area // letters, letters
        self._hidden_shape = hidden_shape
        self._weights = like.new_empty(self.layout.area, math.prod(hidden_shape))
        self._letters = torch.arange(letters, dtype=like.dtype)
        self._first_rows = letters * torch.arange(self._shape[0])

    def new_states(self, n: int) -> Tensor:
        """Return an array for `n` one-hot states."""
        return self.layer.bias.new_zeros(n, *self.layout.shape)

    def expand(self) -> None:
        """Compute the full matrix from the factors."""
        factors = self.layer.factors
        if len(factors) == 1:
            self._weights.copy_(factors[0][0].t() if len(factors[0]) == 1 else factors[0].sum(0).t())
            return
        left, right = self._flat_factors()
        product = left.new_empty(left.shape[1], right.shape[1])
        matmul_in_blocks(left.t(), right, product)
        (I, J), (K, L) = self._shape, self._hidden_shape  # noqa: E741
        self._weights.view(I, J, K, L).copy_(product.view(I, K, J, L).transpose(1, 2))

    def rows_of(self, x: Tensor) -> Tensor:
        """Return the indices of the rows of one-hot data: (n, *shape) -> (n, sites)."""
        letters = x.reshape(len(x), *self._shape).to(self._letters) @ self._letters
        return letters.long() + self._first_rows

    def to_hidden(self, rows: Tensor) -> Tensor:
        """Compute W x for the states x: (n, sites) -> (n, hidden)."""
        field = embedding_bag(rows, self._weights, mode="sum")
        return field.sub_(self.layer.shift.view(-1) @ self._weights) if self.layer.converts else field

    def draw(self, hidden: Tensor, rng: RandomSource, into: Tensor) -> Tensor:
        """Sample states given the hidden layer, write them to `into`, and return their rows of shape (n, sites)."""
        matmul_in_blocks(hidden, self._weights.t(), into.view(-1, self.layout.area))
        into.add_(self.layer.bias)
        in_blocks(DRAWS["categorical"], into, rng.uniform((len(into), *self.layout.numbers_shape), into), into)
        rows = self.rows_of(into)
        if self.layer.converts:
            into.sub_(self.layer.shift)
        return rows

    def write_gradients(
        self, rows: Sequence[Tensor], means: Sequence[Tensor], weights: Sequence[float], total: Tensor
    ) -> None:
        """Write the gradients for the bias and the factors.

        `rows`, `means` and `weights` contain the states, the hidden means multiplied by their weights, and the weights
        for the data and for the chains. `total` is the sum of all means.
        """
        layer = self.layer
        with one_thread():
            of_data, of_chain = (torch.bincount(own.flatten(), minlength=self.layout.area) for own in rows)
            # Sorting the samples by category, separately for each site, makes the samples of each row consecutive.
            samples = torch.cat(list(rows)).t().argsort(1).flatten()
            starts = (of_data + of_chain).cumsum(0).sub_(of_data + of_chain)
            gradient = embedding_bag(samples, torch.cat(list(means)), starts, mode="sum")
            bias = layer.bias_gradient.view(-1).copy_(of_data).mul_(weights[0]).add_(of_chain, alpha=weights[1])
            if layer.converts:
                shift = layer.shift.view(-1)
                gradient.addr_(shift, total, alpha=-1)
                bias.sub_(shift, alpha=sum(weight * len(own) for weight, own in zip(weights, rows, strict=True)))
        if len(layer.factors) == 1:
            layer.factor_gradients[0].copy_(gradient.t())
            return
        (I, J), (K, L) = self._shape, self._hidden_shape  # noqa: E741
        pairs = gradient.view(I, J, K, L).transpose(1, 2).reshape(I * K, J * L)
        left, right = self._flat_factors()
        for target, other, operand in zip(layer.factor_gradients, (right, left), (pairs.t(), pairs), strict=True):
            product = target.mT.new_empty(target.mT.shape)
            matmul_in_blocks(other, operand, product.view(len(product), -1))
            target.copy_(product.mT)

    def _flat_factors(self) -> tuple[Tensor, Tensor]:
        """Return both factors of a matrix layer, with one row per term: (R, I K) and (R, J L)."""
        left, right = (factor.mT.flatten(1) for factor in self.layer.factors)
        return left, right


def unsupported_reason(settings: UpdateSettings, state: TrainState) -> str | None:
    """Return the reason why this backend does not support a training run, or None if it does."""
    if (reason := flat_backend.unsupported_reason(settings, state)) is not None:
        return reason
    layout = Layout.of(state.machine)
    if layout.hidden_gaussian:
        return "its hidden layer is Gaussian"
    if any(layer.kind != "categorical" for layer in layout.layers):
        return "it has layers other than categorical layers"
    if any(len(layer.factors) > 2 for layer in layout.layers):
        return "it has a coupling with more than two factors"
    return None


def slower_reason(state: TrainState) -> str | None:
    """Return the reason why products with the factors are faster than sums of rows, or None if they are not."""
    for link in state.machine.links.values():
        if math.prod((*link.visible_shape, *link.hidden_shape)) > _MOST_WASTE * link.operations:
            return "the full matrices of its couplings are much larger than their factors"
    return None
