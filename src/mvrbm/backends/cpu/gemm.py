"""The gradient on the CPU by matrix products of PyTorch; see `mode_products`.

It computes the same contrast as :func:`mvrbm.updates.gradient.contrast`, but reuses the products of the hidden fields
for the gradient and allocates no memory.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mvrbm.backends import layout as flat_layout
from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cpu.flat import FlatBackend
from mvrbm.backends.cpu.flat_arrays import FlatLayer
from mvrbm.backends.cpu.gemm_buffers import BothSides, Side, all_dense
from mvrbm.backends.cpu.products import compute, in_blocks, matmul_in_blocks
from mvrbm.devices import one_thread
from mvrbm.random import RandomSource
from mvrbm.updates.state import TrainState

# Number of batch sizes whose buffers are kept. An epoch usually has batches of one size and a shorter one, but a data
# loader may return batches of any size.
_MOST_SIZES = 3


class GemmBackend(FlatBackend):
    """Computes gradients by matrix products of PyTorch."""

    def __init__(self, settings: UpdateSettings, state: TrainState) -> None:
        super().__init__(settings, state)
        # Between products of dense couplings, the C code computes binary units, including the addition of the bias.
        self._fuses_binary = self._code is not None and all_dense(self.layout)
        self._sides_by_size: dict[int, BothSides] = {}
        self._sides = self._sides_for(0)
        self.load(state)

    def _sides_for(self, n: int) -> BothSides:
        """Return the buffers for batches of `n` samples."""
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
        if self._persistent is None:
            self._compute_field(data)
        elif self._sides.joined is not None:
            self._compute_field(self._sides.joined)
        else:
            self._compute_field(data)
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
        """Change the buffers to those of another batch size, and copy the persistent chains."""
        before = self._sides
        self._sides = self._sides_for(n)
        if self._persistent is not None and self._sides is not before:
            for states, old in zip(self._sides.chain.visible, before.chain.visible, strict=True):
                states.copy_(old)

    # -- chains ---------------------------------------------------------------------------------------

    def _compute_field(self, side: Side) -> None:
        """Compute the hidden field C + sum W X, without C where the C code adds it later."""
        compute(side.up)
        if self.layout.hidden_gaussian or not self._fuses_binary:
            side.hidden_field.add_(self.arrays.hidden_bias.view(-1, 1))

    def _hidden_means(self, side: Side, weight: float) -> None:
        """Write the hidden means times a weight to `side.hidden`."""
        field = side.hidden_field
        if self.layout.hidden_gaussian:
            torch.mul(field, weight, out=side.hidden)
        elif self._fuses_binary:
            self._fused_binary(field, self.arrays.hidden_bias, None, side.hidden, weight)
        else:
            in_blocks(lambda field, mean: torch.sigmoid(field, out=mean).mul_(weight), field, side.hidden)

    def _gibbs_step(self, chain: Side, field: Tensor, rng: RandomSource) -> None:
        """Draw the hidden layer from its field, then the visible layers, and compute their hidden field."""
        layout = self.layout
        draw = rng.normal if layout.hidden_gaussian else rng.uniform
        numbers = draw((chain.n, *layout.hidden_shape), field).flatten(1).t()
        if chain.hidden.is_contiguous():
            numbers = numbers.contiguous()  # a copy takes less time than elementwise functions of two memory orders
        kind = "gaussian" if layout.hidden_gaussian else "bernoulli"
        self._draw(kind, self.arrays.hidden_bias, field, numbers, chain.hidden)
        for layer, states, down in zip(self.arrays.layers, chain.visible, chain.down, strict=True):
            compute(down)
            self._draw_visible(layer, states, rng)
        self._compute_field(chain)

    def _draw_visible(self, layer: FlatLayer, states: Tensor, rng: RandomSource) -> None:
        """Draw a visible layer from its fields (n, area), which exclude the bias and are overwritten."""
        own = layer.layout
        states = states.view(-1, *own.shape)
        draw = rng.normal if own.gaussian else rng.uniform
        numbers = draw((len(states), *own.numbers_shape), states)
        if own.kind != "bernoulli" or not self._fuses_binary:
            states.add_(layer.bias)
        self._draw(own.kind, layer.bias, states, numbers, states)
        if layer.converts and not own.gaussian:
            states.sub_(layer.shift)

    def _draw(self, kind: str, bias: Tensor, field: Tensor, numbers: Tensor, into: Tensor) -> None:
        """Draw units. The C code, which draws binary units where it is used, adds the bias to the field itself."""
        if kind == "bernoulli" and self._fuses_binary:
            self._fused_binary(field, bias, numbers, into, 1.0)
        else:
            in_blocks(_DRAWS[kind], field, numbers, into)

    def _fused_binary(self, field: Tensor, bias: Tensor, numbers: Tensor | None, into: Tensor, scale: float) -> None:
        """Let the C code draw binary units with random numbers, or write their means times a scale without them."""
        assert self._code is not None
        numbers_address = 0 if numbers is None else numbers.data_ptr()
        columns = bias.numel()
        rows = field.numel() // columns
        self._code.binary(
            field.data_ptr(),
            bias.data_ptr(),
            numbers_address,
            into.data_ptr(),
            rows,
            columns,
            scale,
            torch.get_num_threads(),
        )

    # -- the gradient ---------------------------------------------------------------------------------

    def _gradients(self, data_weight: float, chain_weight: float) -> None:
        """Compute the gradient of the weighted sum of -F over both sides. The hidden means include the weights."""
        data = self._sides.data
        chain = self._sides.chain
        weights = (data_weight, chain_weight)
        self._sum(data.hidden, chain.hidden, (1.0, 1.0), self.arrays.hidden_bias_gradient, self._data_mean)
        compute(self._sides.gradients)
        for m, layer in enumerate(self.arrays.layers):
            x = data.visible[m]
            y = chain.visible[m]
            self._sum(x.t(), y.t(), weights, layer.bias_gradient)
            if len(layer.factors) == 1:
                gradient = layer.factor_gradients[0]
                if self._sides.joined is None:
                    # As large as W: one product for both sides writes it once.
                    matmul_in_blocks(torch.cat([data.hidden, chain.hidden], 1), torch.cat([x, y]), gradient[0])
                gradient[1:] = gradient[0]
            if layer.log_variance_gradient is not None:
                for side, states, weight in ((data, x, data_weight), (chain, y, chain_weight)):
                    side.fields[m].sub_(states, alpha=weight).mul_(states)
                self._sum(data.fields[m].t(), chain.fields[m].t(), (1.0, 1.0), layer.log_variance_gradient)

    def _sum(
        self,
        of_data: Tensor,
        of_chain: Tensor,
        weights: tuple[float, float],
        into: Tensor,
        minus_data: Tensor | None = None,
    ) -> None:
        """Write the weighted sum over the samples of both sides, (area, n) each, to `into`.

        If given, `minus_data` receives minus the part of the data.
        """
        if self._sides.joined is not None and self._code is not None:
            # Both sides are neighbors in memory. Without samples, the side of the data has no address.
            start = of_data if of_data.numel() else of_chain
            self._code.sums(
                start.data_ptr(),
                into.data_ptr(),
                0 if minus_data is None else minus_data.data_ptr(),
                of_data.shape[1],
                of_chain.shape[1],
                len(of_data),
                *weights,
                torch.get_num_threads(),
            )
            return
        with one_thread():
            data_sum = of_data.sum(1).mul_(weights[0])
            chain_sum = of_chain.sum(1)
        torch.add(data_sum, chain_sum, alpha=weights[1], out=into.view(-1))
        if minus_data is not None:
            torch.neg(data_sum, out=minus_data.view(-1))


def _draw_bernoulli(field: Tensor, numbers: Tensor, into: Tensor) -> None:
    torch.sigmoid(field, out=into)
    torch.lt(numbers, into, out=into)


def _draw_gaussian(field: Tensor, numbers: Tensor, into: Tensor) -> None:
    torch.add(field, numbers, out=into)


def _draw_categorical(field: Tensor, numbers: Tensor, into: Tensor) -> None:
    category = (numbers[..., None] >= torch.softmax(field, -1).cumsum(-1)).sum(-1, keepdim=True)
    into.zero_().scatter_(-1, category.clamp_(max=field.shape[-1] - 1), 1.0)


# Functions that draw units from fields, which include the bias, and random numbers. They may overwrite the fields.
_DRAWS = {"bernoulli": _draw_bernoulli, "gaussian": _draw_gaussian, "categorical": _draw_categorical}


def unsupported_reason(settings: UpdateSettings, state: TrainState) -> str | None:
    """Return why this backend cannot compute a training run's updates, or None if it can."""
    device = state.machine.like.device
    if device.type != "cpu":
        return f"the machine is on {device}"
    return flat_layout.unsupported_reason(settings, state)
