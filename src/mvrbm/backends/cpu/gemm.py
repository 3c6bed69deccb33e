"""CPU backend that computes gradients with PyTorch matrix products (see `mode_products`).

This backend computes the same gradient as :func:`mvrbm.updates.gradient.contrast`, but reuses products computed for the
hidden fields and allocates little memory. It is meant for training runs that the C code does not support, or for which
the C code is slower. On two CPU cores, CD-1 updates for arrays of order 3 (16x16x16 -> 10x10x10) are faster than with
the reference backend by a factor of 1.3 (rank 1), 2.3 (rank 4) or 1.9 (rank 8). For narrow matrices (200x4 -> 20x3),
the factor is 2.4. To measure these speedups, run `python -m benchmarks backends --device cpu`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cpu.draws import DRAWS
from mvrbm.backends.cpu.flat_arrays import FlatLayer
from mvrbm.backends.cpu.flat_backend import FlatCpuBackend
from mvrbm.backends.cpu.gemm_buffers import BothSides, Side
from mvrbm.backends.cpu.parallel_products import compute, in_blocks, matmul_in_blocks
from mvrbm.backends.layout import Layout
from mvrbm.devices import one_thread
from mvrbm.random import RandomSource
from mvrbm.updates.state import TrainState

# Number of batch sizes for which buffers are cached. An epoch usually has equally sized batches and one smaller batch,
# but a data loader may return batches of any size.
_MOST_SIZES = 3


class GemmBackend(FlatCpuBackend):
    """Backend that computes gradients with PyTorch matrix products."""

    def __init__(self, settings: UpdateSettings, state: TrainState) -> None:
        super().__init__(settings, state)
        self._sides_by_size: dict[int, BothSides] = {}
        self._sides = self._sides_for(0)
        self.load(state)

    def _sides_for(self, n: int) -> BothSides:
        """Return the buffers for a batch size of `n`."""
        if n not in self._sides_by_size:
            if len(self._sides_by_size) >= _MOST_SIZES:
                self._sides_by_size.clear()
            n_chains = n if self._persistent is None else self._n_chains
            self._sides_by_size[n] = BothSides(self.arrays, n, n_chains)
        return self._sides_by_size[n]

    def _chain_states(self) -> list[Tensor]:
        states = self._sides.chain.visible
        return [own.view(-1, *layer.shape) for layer, own in zip(self.layout.layers, states, strict=True)]

    def _contrast(self, batch: Mapping[str, Tensor], rng: RandomSource, of_data: float, of_chain: float) -> None:
        self._resize(len(next(iter(batch.values()))))
        data = self._sides.data
        chain = self._sides.chain
        for layer, states in zip(self.arrays.layers, data.visible, strict=True):
            layer.write_states(batch[layer.layout.name], states.view(-1, *layer.layout.shape))
        self._compute_field(data)
        if self._persistent is not None:
            self._compute_field(chain)
        data_weight = -of_data / max(1, data.n)
        chain_weight = of_chain / max(1, chain.n)
        self._hidden_means(data, data_weight)
        field = data.hidden_field if self._persistent is None else chain.hidden_field
        for _ in range(self._gibbs_steps):
            self._gibbs_step(chain, field, rng)
            field = chain.hidden_field
        self._hidden_means(chain, chain_weight)
        self._gradients(data_weight, chain_weight)

    def _resize(self, n: int) -> None:
        """Switch to the buffers for another batch size and copy the persistent chains."""
        before = self._sides
        self._sides = self._sides_for(n)
        if self._persistent is not None and self._sides is not before:
            for states, old in zip(self._sides.chain.visible, before.chain.visible, strict=True):
                states.copy_(old)

    # -- chains ---------------------------------------------------------------------------------------

    def _compute_field(self, side: Side) -> None:
        """Compute the hidden field, which is the bias plus the sum of W X over all visible layers."""
        compute(side.up)
        side.hidden_field.add_(self.arrays.hidden_bias.view(-1, 1))

    def _hidden_means(self, side: Side, weight: float) -> None:
        """Compute the hidden means, multiply them by a weight, and write them to `side.hidden`."""
        if self.layout.hidden_gaussian:
            torch.mul(side.hidden_field, weight, out=side.hidden)
        else:
            in_blocks(lambda field, mean: torch.sigmoid(field, out=mean).mul_(weight), side.hidden_field, side.hidden)

    def _gibbs_step(self, chain: Side, field: Tensor, rng: RandomSource) -> None:
        """Sample the hidden layer given its field, sample the visible layers, and compute the new hidden field."""
        layout = self.layout
        draw = rng.normal if layout.hidden_gaussian else rng.uniform
        numbers = draw((chain.n, *layout.hidden_shape), field).flatten(1).t()
        # Copying is faster than an elementwise function on arrays with different memory layouts.
        numbers = numbers.contiguous()
        in_blocks(DRAWS["gaussian" if layout.hidden_gaussian else "bernoulli"], field, numbers, chain.hidden)
        for layer, states, down in zip(self.arrays.layers, chain.visible, chain.down, strict=True):
            compute(down)
            self._draw_visible(layer, states, rng)
        self._compute_field(chain)

    def _draw_visible(self, layer: FlatLayer, states: Tensor, rng: RandomSource) -> None:
        """Replace the fields on a visible layer with samples of the layer.

        The fields have shape (n, area) and do not include the bias.
        """
        own = layer.layout
        states = states.view(-1, *own.shape)
        draw = rng.normal if own.gaussian else rng.uniform
        numbers = draw((len(states), *own.numbers_shape), states)
        states.add_(layer.bias)
        in_blocks(DRAWS[own.kind], states, numbers, states)
        if layer.converts and not own.gaussian:
            states.sub_(layer.shift)

    # -- the gradient ---------------------------------------------------------------------------------

    def _gradients(self, data_weight: float, chain_weight: float) -> None:
        """Compute the gradient of the weighted sum of negative free energies over the data and the chains.

        The hidden means must already be multiplied by the weights in this sum.
        """
        data = self._sides.data
        chain = self._sides.chain
        weights = (data_weight, chain_weight)
        data_sum = self._sum(data.hidden, chain.hidden, (1.0, 1.0), self.arrays.hidden_bias_gradient)
        torch.neg(data_sum, out=self._data_mean.view(-1))
        compute(self._sides.gradients)
        for m, layer in enumerate(self.arrays.layers):
            x = data.visible[m]
            y = chain.visible[m]
            self._sum(x.t(), y.t(), weights, layer.bias_gradient)
            if len(layer.factors) == 1:
                gradient = layer.factor_gradients[0]
                # The gradient is as large as W, so use a single product for data and chains to write it only once.
                matmul_in_blocks(torch.cat([data.hidden, chain.hidden], 1), torch.cat([x, y]), gradient[0])
                gradient[1:] = gradient[0]
            if layer.log_variance_gradient is not None:
                for side, states, weight in ((data, x, data_weight), (chain, y, chain_weight)):
                    side.fields[m].sub_(states, alpha=weight).mul_(states)
                self._sum(data.fields[m].t(), chain.fields[m].t(), (1.0, 1.0), layer.log_variance_gradient)

    @one_thread()
    def _sum(self, of_data: Tensor, of_chain: Tensor, weights: tuple[float, float], into: Tensor) -> Tensor:
        """Sum `of_data` and `of_chain` over samples, and write the weighted sum of the results to `into`.

        Both arrays have shape (area, n), where n may differ between them. The return value is the weighted sum over the
        data.
        """
        data_sum = of_data.sum(1).mul_(weights[0])
        torch.add(data_sum, of_chain.sum(1), alpha=weights[1], out=into.view(-1))
        return data_sum


def slower_reason(state: TrainState) -> str | None:
    """Return the reason why this backend is not much faster than the reference backend, or None if it is."""
    if all(len(layer.factors) == 1 for layer in Layout.of(state.machine).layers):
        return "all of its couplings are dense, so that nearly all time is spent in the same few products"
    return None
