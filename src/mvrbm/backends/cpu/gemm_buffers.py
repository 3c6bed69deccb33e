"""Preallocated buffers for the `gemm` backend: states, fields and products for the data and for the chains."""

from mvrbm.backends.cpu.flat_arrays import FlatArrays
from mvrbm.backends.cpu.mode_products import ModeProducts
from mvrbm.backends.cpu.parallel_products import Call


class Side:
    """One side of the contrast (data or chains): its sample states and their products with all factors.

    Attributes
    ----------
    n : int
        Number of samples.
    visible : list of Tensor (n, area)
        States for each visible layer.
    fields : dict of int to Tensor (n, area)
        Fields that the hidden means induce on the layers with learned variances, keyed by layer index.
    hidden_field, hidden : Tensor (hidden area, n)
        Field on the hidden layer, and the hidden states or weighted hidden means.
    products : list of ModeProducts
        Products with the factors of each layer.
    up : list of Call
        Calls that compute `hidden_field`, without the bias.
    down : list of list of Call
        Calls that overwrite each layer's states with the field induced by `hidden`, without the bias.
    """

    def __init__(self, arrays: FlatArrays, n: int) -> None:
        layout = arrays.layout
        like = arrays.params
        self.n = n
        self.visible = [like.new_zeros(n, layer.area) for layer in layout.layers]
        self.fields = {
            m: like.new_zeros(n, layer.area) for m, layer in enumerate(layout.layers) if layer.learns_variance
        }
        self.hidden_field = like.new_zeros(layout.hidden_area, n)
        self.hidden = like.new_zeros(layout.hidden_area, n)
        self.products = [ModeProducts(layer.factors, n, like) for layer in layout.layers]
        self.up = list[Call]()
        self.down = list[list[Call]]()
        for m, (layer, products, x) in enumerate(zip(arrays.layers, self.products, self.visible, strict=True)):
            self.up += products.up(layer.factors, x, self.hidden_field, add=m > 0)
            self.down.append(list(products.down(layer.factors, self.hidden, x)))


class BothSides:
    """Buffers for the two sides of the contrast, the data and the chains.

    Attributes
    ----------
    data, chain : Side
        The two sides.
    gradients : list of Call
        Calls that compute the fields on layers with learned variances and the gradients for all couplings with several
        factors. They use the weighted hidden means of both sides.
    """

    def __init__(self, arrays: FlatArrays, n: int, n_chains: int) -> None:
        self.data = Side(arrays, n)
        self.chain = Side(arrays, n_chains)
        self.gradients = list[Call]()
        for side in (self.chain, self.data):
            for m, (layer, products) in enumerate(zip(arrays.layers, side.products, strict=True)):
                self.gradients += products.down(layer.factors, side.hidden, side.fields.get(m))
                if len(layer.factors) > 1:
                    self.gradients += products.gradients(layer.factor_gradients, add=side is self.data)
