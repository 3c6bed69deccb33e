"""Arrays of the matrix-product backend: states, fields and products of both sides of the contrast, allocated once."""

from functools import partial

from torch import Tensor

from mvrbm.backends.cpu.flat_arrays import FlatArrays
from mvrbm.backends.cpu.mode_products import ModeProducts
from mvrbm.backends.cpu.products import Call, Matmul, matmul_by_blas, matmul_in_blocks
from mvrbm.backends.layout import Layout


def all_dense(layout: Layout) -> bool:
    """Return whether all couplings are full matrices."""
    return all(len(layer.factors) == 1 for layer in layout.layers)


class Side:
    """One side of the contrast, the data or the chains: states of its samples, and products with all factors.

    Attributes
    ----------
    n : int
        Number of samples.
    visible : list of Tensor (n, area)
        States of each visible layer.
    fields : dict of int to Tensor (n, area)
        Fields of the hidden means on the layers that learn their variances, by the number of the layer.
    hidden_field, hidden : Tensor (hidden area, n)
        Field on the hidden layer, and its states or weighted means.
    products : list of ModeProducts
        Products with the factors of each layer.
    up : list of Call
        Computes `hidden_field`, without bias.
    down : list of list of Call
        Computes the field of `hidden` on each layer, without bias, in the place of its states.
    """

    def __init__(
        self,
        arrays: FlatArrays,
        visible: list[Tensor],
        fields: dict[int, Tensor],
        hidden_field: Tensor,
        hidden: Tensor,
        matmul: Matmul,
    ) -> None:
        self.n = hidden.shape[1]
        self.visible = visible
        self.fields = fields
        self.hidden_field = hidden_field
        self.hidden = hidden
        self.products = [ModeProducts(layer.layout.factors, self.n, hidden, matmul) for layer in arrays.layers]
        self.up = list[Call]()
        self.down = list[list[Call]]()
        for m, (layer, products, x) in enumerate(zip(arrays.layers, self.products, visible, strict=True)):
            self.up += products.up(layer.factors, x, hidden_field, add=m > 0)
            self.down.append(list(products.down(layer.factors, hidden, x)))


class BothSides:
    """The data and the chains.

    Products with full matrices take samples in any memory order. Machines that have only dense couplings therefore
    store the samples of both sides one after another, and the hidden states of a sample contiguously. `joined` is both
    sides as one: products with it read the weights once instead of twice.

    Attributes
    ----------
    data, chain : Side
        The two sides.
    joined : Side, optional
        Both sides as one, for machines that have only dense couplings.
    gradients : list of Call
        Computes the gradients of the factors from the weighted hidden means of both sides, except those of single
        factors where there is no `joined`.
    """

    def __init__(self, arrays: FlatArrays, n: int, n_chains: int) -> None:
        layout = arrays.layout
        like = arrays.params
        rows = {"data": slice(0, n), "chain": slice(n, n + n_chains), "joined": slice(None)}
        visible = [like.new_zeros(n + n_chains, layer.area) for layer in layout.layers]
        fields = {m: like.new_empty(x.shape) for m, x in enumerate(visible) if layout.layers[m].learns_variance}

        def side(name: str, hidden_field: Tensor, hidden: Tensor, matmul: Matmul) -> Side:
            part = rows[name]
            own_fields = {m: field[part] for m, field in fields.items()}
            return Side(arrays, [x[part] for x in visible], own_fields, hidden_field, hidden, matmul)

        self.joined: Side | None = None
        self.gradients = list[Call]()
        if all_dense(layout):
            hidden_field = like.new_zeros(n + n_chains, layout.hidden_area).t()
            hidden = like.new_zeros(n + n_chains, layout.hidden_area).t()
            self.data, self.chain, self.joined = (
                side(name, hidden_field[:, part], hidden[:, part], matmul_by_blas) for name, part in rows.items()
            )
            for layer, x in zip(arrays.layers, visible, strict=True):
                self.gradients.append(partial(matmul_by_blas, hidden, x, layer.factor_gradients[0][0]))
        else:
            self.data, self.chain = (
                side(
                    name,
                    like.new_zeros(layout.hidden_area, count),
                    like.new_zeros(layout.hidden_area, count),
                    matmul_in_blocks,
                )
                for name, count in (("data", n), ("chain", n_chains))
            )
        for own in (self.chain, self.data):
            for m, (layer, products) in enumerate(zip(arrays.layers, own.products, strict=True)):
                self.gradients += products.down(layer.factors, own.hidden, own.fields.get(m))
                if len(layer.factors) > 1:
                    self.gradients += products.gradients(layer.factor_gradients, add=own is self.data)
