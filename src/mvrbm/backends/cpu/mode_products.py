"""Products of a batch with the factors of a coupling, computed axis by axis as plain matrix products (GEMM).

A visible batch has shape (n, I_1, ..., I_D), and a hidden batch has shape (K_1, ..., K_D, n). From visible to hidden,
the last axis is processed first. Each product with a factor removes the last axis and inserts the new axis at the
front, so that (n, I, J) becomes (L, n, I) and then (K, L, n). From hidden to visible, the order is reversed. No array
has to be permuted, and the batch axis is part of the longer dimension in every product.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from mvrbm.backends.cpu.parallel_products import Call, compute, matmul_in_blocks
from mvrbm.backends.layout import Layout
from mvrbm.machine import BoltzmannMachine
from mvrbm.sampling import Layers


class ModeProducts:
    """Products of `n` samples with factors of shape (R, K_d, I_d), using preallocated buffers.

    `up`, `down` and `gradients` yield calls. A backend collects these calls once and repeats them in every update,
    because creating tensor views takes longer than computing small products. `gradients` uses the intermediate results
    that the last `up` and `down` calls left in the buffers.
    """

    def __init__(self, shapes: Sequence[tuple[int, int, int]], n: int, like: Tensor) -> None:
        last = len(shapes) - 1
        visible = [shape[2] for shape in shapes]
        hidden = [shape[1] for shape in shapes]
        # Intermediate results of the products with each factor, except for the last factor in each direction.
        self._ups = list[Tensor]()
        self._downs = list[Tensor]()
        for mode, (rank, _, _) in enumerate(shapes):
            others = n * math.prod(visible[:mode]) * math.prod(hidden[mode + 1 :])
            self._ups.append(like.new_empty((rank, hidden[mode], others) if mode > 0 else (0,)))
            self._downs.append(like.new_empty((rank, others, visible[mode]) if mode < last else (0,)))
        # Operands for each factor, of shape (R or 1, .., I_d) upward and (R or 1, K_d, ..) downward.
        self._up_operands = [like] * len(shapes)
        self._down_operands = [like] * len(shapes)

    def up(self, factors: Sequence[Tensor], x: Tensor, out: Tensor, *, add: bool) -> Iterator[Call]:
        """Yield calls that compute W x and write the result to `out`, or add it to `out` if `add` is True.

        The batch x has shape (n, area), and `out` has shape (hidden area, n).
        """
        operand = x
        for mode in reversed(range(len(factors))):
            factor = factors[mode]
            rank, K, I = factor.shape  # noqa: E741
            operand = operand.view(1 if operand is x else rank, -1, I)
            self._up_operands[mode] = operand
            if mode == 0:
                for r in range(rank):
                    yield partial(
                        matmul_in_blocks, factor[r], operand[r % len(operand)].t(), out.view(K, -1), add=add or r > 0
                    )
            elif len(operand) == 1:
                yield partial(
                    matmul_in_blocks, factor.view(rank * K, I), operand[0].t(), self._ups[mode].view(rank * K, -1)
                )
            else:
                for r in range(rank):
                    yield partial(matmul_in_blocks, factor[r], operand[r].t(), self._ups[mode][r])
            operand = self._ups[mode]

    def down(self, factors: Sequence[Tensor], y: Tensor, out: Tensor | None) -> Iterator[Call]:
        """Yield calls that compute W' y, where W' is the transpose of W, and write the result to `out`.

        The batch y has shape (hidden area, n). If `out` is None, the last product is omitted.
        """
        last = len(factors) - 1
        operand = y
        for mode, factor in enumerate(factors):
            rank, K, I = factor.shape  # noqa: E741
            operand = operand.view(1 if operand is y else rank, K, -1)
            self._down_operands[mode] = operand
            if mode < last:
                for r in range(rank):
                    yield partial(matmul_in_blocks, operand[r % len(operand)].t(), factor[r], self._downs[mode][r])
                operand = self._downs[mode]
            elif out is not None and len(operand) == rank:
                yield partial(
                    matmul_in_blocks, operand.view(rank * K, -1).t(), factor.view(rank * K, I), out.view(-1, I)
                )
            elif out is not None:  # with a single mode, all terms have the same operand
                yield partial(_times_sum, operand[0].t(), factor, out)

    def gradients(self, into: Sequence[Tensor], *, add: bool) -> Iterator[Call]:
        """Yield calls that compute the gradients for the factors and write them to `into`.

        If `add` is True, the gradients are added to `into` instead. The differentiated function is the sum of <y, W x>
        over the batch, where x and y are the batches from the last calls to `up` and `down`.
        """
        for mode, target in enumerate(into):
            x = self._up_operands[mode]
            y = self._down_operands[mode]
            rank, K, I = target.shape  # noqa: E741
            if len(x) == 1 and len(y) == rank:
                yield partial(matmul_in_blocks, y.view(rank * K, -1), x[0], target.view(rank * K, I), add=add)
            else:
                for r in range(rank):
                    yield partial(matmul_in_blocks, y[r % len(y)], x[r % len(x)], target[r], add=add)


def _times_sum(y: Tensor, terms: Tensor, out: Tensor) -> None:
    """Write the product of `y` and the sum of several matrices to `out`."""
    matmul_in_blocks(y, terms.sum(0), out)


class ModeFields:
    """Hidden and visible fields of a machine, computed with mode products for :func:`mvrbm.sampling.gibbs_step`."""

    def __init__(self, machine: BoltzmannMachine, layout: Layout, n: int) -> None:
        self.layers = machine.layers
        self.hidden = machine.hidden
        self._layout = layout
        self._factors = [
            [factor.detach() for factor in machine.links[layer.name].mode_factors() or ()] for layer in layout.layers
        ]
        self._products = [ModeProducts(layer.factors, n, machine.like) for layer in layout.layers]

    def hidden_field(self, visible: Layers) -> Tensor:
        """Return the field on the hidden layer as a tensor of shape (n, *hidden shape)."""
        states = [self.layers[layer.name].statistic(visible[layer.name]).flatten(1) for layer in self._layout.layers]
        field = states[0].new_empty(self._layout.hidden_area, len(states[0]))
        for m, x in enumerate(states):
            compute(self._products[m].up(self._factors[m], x, field, add=m > 0))
        return field.t().contiguous().view(-1, *self._layout.hidden_shape)

    def visible_fields(self, hidden: Tensor) -> dict[str, Tensor]:
        """Return the field on each visible layer as a tensor of shape (n, *layer shape)."""
        y = self.hidden.statistic(hidden).flatten(1).t().contiguous()
        fields = {layer.name: hidden.new_empty(len(hidden), *layer.shape) for layer in self._layout.layers}
        for layer, products, factors in zip(self._layout.layers, self._products, self._factors, strict=True):
            compute(products.down(factors, y, fields[layer.name]))
        return fields
