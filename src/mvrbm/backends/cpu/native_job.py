"""Description of a training run for the C code: C structures and the positions of all arrays in the buffers."""

import ctypes
import functools
from types import ModuleType

from torch import Tensor

from mvrbm.backends.cpu.flat_arrays import FlatArrays, FlatLayer
from mvrbm.backends.layout import LayerLayout
from mvrbm.random import philox

# Maximum size in bytes of the samples kept for the gradient of U, which must fit into the L2 cache.
_GROUP_BYTES = 350_000
# Maximum number of samples kept for the gradient of U.
_LARGEST_GROUP = 64
# Minimum number of samples kept. Sampling missing entries requires two versions of a sample.
_SMALLEST_GROUP = 2
# Maximum number of sample chunks. Each chunk has a separate gradient.
MOST_CHUNKS = 16

# Unit kinds, in the order of the enum in _native.c. The C code cannot call unit methods, so it implements sampling for
# each kind. Units whose `sampled_as` is None are not supported by this backend.
_KINDS = ("bernoulli", "gaussian", "categorical")

_FLOATS = ctypes.c_void_p


class Layer(ctypes.Structure):
    """The C structure `Layer`. Its fields are documented in _native.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("I", "J", "rank", "kind", "categories", "lines", "columns")),
        *((name, _FLOATS) for name in ("U", "V", "B", "data", "known", "scale", "shift")),
        *((name, ctypes.c_int64) for name in ("states_at", "products_at", "v_at", "vt_at", "b_at")),
        *((name, ctypes.c_int64) for name in ("to_u_at", "to_v_at", "to_b_at", "to_s_at")),
        *((name, _FLOATS) for name in ("to_U", "to_V", "to_B", "to_S")),
    )


class Job(ctypes.Structure):
    """The C structure `Job`. Its fields are documented in _native.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("filling", "K", "L", "gaussian", "n_layers")),
        *((name, ctypes.c_int32) for name in ("n_data", "n_chains", "steps", "chunks", "group", "threads")),
        *((name, ctypes.c_int32) for name in ("lines", "columns")),
        *((name, ctypes.c_uint32) for name in ("first_row", "update", "first_draw")),
        ("key", ctypes.c_uint64),
        *((name, ctypes.c_float) for name in ("data_weight", "chain_weight")),
        ("layers", ctypes.POINTER(Layer)),
        *((name, _FLOATS) for name in ("C", "chains")),
        ("normal", ctypes.POINTER(ctypes.c_void_p)),
        *((name, _FLOATS) for name in ("packed", "gradients", "scratch", "to_C", "data_mean")),
        *((name, ctypes.c_int64) for name in ("states", "products", "c_at", "to_c_at", "to_mean_at")),
        *((name, ctypes.c_int64) for name in ("gradient_size", "scratch_size")),
    )


@functools.cache
def has_fields_of(code: ModuleType) -> bool:
    """Return whether the structures in the compiled code have the sizes and field offsets defined here."""
    for structure, size, fields in ((Layer, code.layer_size, code.layer_fields), (Job, code.job_size, code.job_fields)):
        offsets = tuple((field[0], getattr(structure, field[0]).offset) for field in structure._fields_)
        if ctypes.sizeof(structure) != size or offsets != fields:
            return False
    return True


class JobMemory:
    """A job initialized with all values that are constant across updates, and the buffers used by the C code.

    Parameters
    ----------
    arrays : FlatArrays
        Parameters and gradient.
    data_mean : Tensor (*hidden shape)
        Output array for the weighted mean of the hidden states over the data.
    threads : int
        Maximum number of threads.
    pad : int
        Padding unit: the length of each row, in floats, is rounded up to a multiple of this number.

    Attributes
    ----------
    job : Job
        The job.
    layers : array of Layer
        The layers of the job.
    """

    def __init__(self, arrays: FlatArrays, data_mean: Tensor, threads: int, pad: int) -> None:
        self._pad = pad
        self.job = Job()
        self.layers = (Layer * len(arrays.layers))()
        layout = arrays.layout
        job = self.job
        job.K = layout.hidden_rows
        job.L = layout.hidden_columns
        job.gaussian = layout.hidden_gaussian
        _, job.lines, job.columns = philox.layout((1, *layout.hidden_shape))
        job.n_layers = len(self.layers)
        job.layers = self.layers
        job.threads = threads
        # Current lengths of the buffers for the padded parameters and for the gradient of one chunk.
        packed = 0
        gradient = 0
        for layer, own in zip(self.layers, arrays.layers, strict=True):
            self._describe(layer, own)
            packed, gradient = self._place(layer, own.layout, packed, gradient)
        hidden_area = job.K * self.padded(job.L)
        job.C = arrays.hidden_bias.data_ptr()
        job.to_C = arrays.hidden_bias_gradient.data_ptr()
        job.data_mean = data_mean.data_ptr()
        job.c_at = packed
        job.to_c_at = gradient
        job.to_mean_at = gradient + hidden_area
        job.gradient_size = gradient + 2 * hidden_area
        sample = job.states + job.products
        job.group = max(_SMALLEST_GROUP, min(_LARGEST_GROUP, _GROUP_BYTES // (4 * sample)))
        spare = max(hidden_area, job.states) + pad
        job.scratch_size = self.padded(job.group * sample + 2 * (job.products + hidden_area) + spare)
        like = arrays.params
        self._packed = like.new_zeros(packed + hidden_area)
        self._gradients = like.new_zeros(MOST_CHUNKS * job.gradient_size)
        self._scratch = like.new_zeros(threads * job.scratch_size)
        job.packed = self._packed.data_ptr()
        job.gradients = self._gradients.data_ptr()
        job.scratch = self._scratch.data_ptr()

    def padded(self, columns: int) -> int:
        """Return the number of columns in a padded row."""
        return padded(columns, self._pad)

    def _describe(self, layer: Layer, own: FlatLayer) -> None:
        """Set a layer's sizes and the addresses of its parameters and gradients."""
        layout = own.layout
        layer.I, layer.J = matrix_shape(layout)
        layer.rank = layout.rank
        layer.kind = _KINDS.index(layout.kind)
        layer.categories = layout.shape[-1] if layout.kind == "categorical" else 1
        _, layer.lines, layer.columns = philox.layout((1, *layout.numbers_shape))
        if layout.is_matrix:
            layer.U = own.factors[0].data_ptr()
            layer.to_U = own.factor_gradients[0].data_ptr()
        layer.V = own.factors[-1].data_ptr()
        layer.to_V = own.factor_gradients[-1].data_ptr()
        layer.B = own.bias.data_ptr()
        layer.to_B = own.bias_gradient.data_ptr()
        if own.log_variance_gradient is not None:
            layer.to_S = own.log_variance_gradient.data_ptr()
        if own.converts:
            layer.scale = own.scale.data_ptr()
            layer.shift = own.shift.data_ptr()

    def _place(self, layer: Layer, layout: LayerLayout, packed: int, gradient: int) -> tuple[int, int]:
        """Set the positions of a layer's arrays in the buffers and return the new buffer lengths."""
        job = self.job
        K = job.K
        columns = self.padded(layer.J)
        hidden_columns = self.padded(job.L)
        area = layer.I * columns
        if layout.is_matrix:
            products = layer.rank * K * columns
            v_rows = layer.rank * job.L * columns
            v_transposed = layer.rank * layer.J * hidden_columns
            to_v = v_rows
            to_u = self.padded(layer.rank * K * layer.I)
        else:
            products = 0
            v_rows = 0
            v_transposed = layer.J * K * hidden_columns
            to_v = v_transposed
            to_u = 0
        layer.states_at = job.states
        layer.products_at = job.products
        job.states += area
        job.products += products
        layer.v_at = packed
        layer.vt_at = layer.v_at + v_rows
        layer.b_at = layer.vt_at + v_transposed
        layer.to_v_at = gradient
        layer.to_b_at = layer.to_v_at + to_v
        layer.to_s_at = layer.to_b_at + area
        layer.to_u_at = layer.to_s_at + area * layout.learns_variance
        return layer.b_at + area, layer.to_u_at + to_u


def matrix_shape(layout: LayerLayout) -> tuple[int, int]:
    """Return the numbers of rows and columns that the C code uses for a layer. Dense layers have a single row."""
    return (layout.rows, layout.columns) if layout.is_matrix else (1, layout.area)


def padded(columns: int, pad: int) -> int:
    """Return the smallest multiple of `pad` that is at least `columns`."""
    return -(-columns // pad) * pad
