"""CPU backend that computes gradients with the optional C code from :mod:`mvrbm.compiled`.

The matrices in a sample are too small for general matrix products to be efficient. The C code processes each sample
completely while it is in the L1 cache, and distributes samples over threads dynamically.
"""

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mvrbm import compiled
from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cpu import flat_backend
from mvrbm.backends.cpu.native_job import MOST_CHUNKS, JobMemory, has_fields_of, matrix_shape, padded
from mvrbm.backends.layout import LayerLayout, Layout
from mvrbm.data.sources import Batch
from mvrbm.random import RandomSource
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import WHOLE, Share
from mvrbm.updates.state import TrainState

# Minimum number of multiplications per product of a batch with the couplings for which using threads is worthwhile.
_WORTH_THREADS = 10**6

# Number of multiplications per batch below which the call overhead of general matrix products dominates.
_SMALL_WORK = 10**6
# Number of rows below which the C code reads V too often.
_FEW_ROWS = 8
# The C code also multiplies padding, and always computes U X first, even if X V' is smaller. It is still faster than
# general matrix products if it performs at most this many times as many multiplications.
_MOST_WASTE = 2.5
# Maximum number of entries in a matrix. The C code uses 32-bit indices.
_LARGEST_MATRIX = 2**26
# The C code reads dense weights from the L2 cache for every sample. It is slower than general matrix products if there
# are more dense weights than the first limit and their fraction of all multiplications exceeds the second limit.
_MOST_DENSE_WEIGHTS = 2**14
_MOST_DENSE_PART = 0.2


class NativeBackend(flat_backend.FlatCpuBackend):
    """Backend that runs the C code with at most `threads` threads. Results do not depend on the number of threads."""

    def __init__(self, settings: UpdateSettings, state: TrainState, threads: int) -> None:
        super().__init__(settings, state)
        code = compiled.library()
        assert code is not None
        self._code = code
        multiplications = settings.recipe.batch_size * sum(link.operations for link in state.machine.links.values())
        used_threads = min(threads, MOST_CHUNKS) if multiplications >= _WORTH_THREADS else 1
        self._memory = JobMemory(self.arrays, self._data_mean, used_threads, int(code.PAD))
        self._padded_chains = self.arrays.params.new_zeros(self._n_chains, self._memory.job.states)
        self.load(state)

    def _chain_states(self) -> list[Tensor]:
        states = []
        for layer, layout in zip(self._memory.layers, self.layout.layers, strict=True):
            rows, columns = matrix_shape(layout)
            width = self._memory.padded(columns)
            own = self._padded_chains[:, layer.states_at : layer.states_at + rows * width]
            states.append(own.view(-1, rows, width)[..., :columns].view(-1, *layout.shape))
        return states

    def _contrast(self, batch: Mapping[str, Tensor], rng: RandomSource, of_data: float, of_chain: float) -> None:
        job = self._memory.job
        samples = self._set_data(batch)
        job.filling = False
        job.steps = self._gibbs_steps
        if self._persistent is None:
            job.n_chains = job.n_data
            job.chains = None
        else:
            job.n_chains = self._n_chains
            job.chains = self._padded_chains.data_ptr()
        job.data_weight = of_data / max(1, job.n_data)
        job.chain_weight = of_chain / max(1, job.n_chains)
        self._run(rng, [None, *self.layout.layers] * self._gibbs_steps)
        del samples  # keep the samples alive until the C code has finished

    def draw_missing(self, state: TrainState, batch: Batch, steps: int, share: Share = WHOLE) -> Layers:
        job = self._memory.job
        layers = self.layout.layers
        masks = state.machine.as_masks(batch.known, batch.visible)
        samples = self._set_data({name: array.clone() for name, array in batch.visible.items()})
        known = list[Tensor | None]()  # keeps the masks alive while the C code reads them
        for layer, layout in zip(self._memory.layers, layers, strict=True):
            mask = masks[layout.name] if layout.name in batch.known else None  # without a mask, all entries are known
            known.append(None if mask is None else mask.contiguous())
            layer.known = None if known[-1] is None else known[-1].data_ptr()
        job.filling = True
        job.n_chains = job.n_data
        job.chains = None
        job.steps = steps
        self._run(state.missing_numbers(share), [*layers, *([None, *layers] * steps)])
        return {layout.name: array for layout, array in zip(layers, samples, strict=True)}

    def _set_data(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Pass a batch to the C code and return the batch's arrays, which must stay alive until the C code finishes."""
        samples = [batch[layout.name].to(self.arrays.params).contiguous() for layout in self.layout.layers]
        n = len(samples[0])
        for layer, layout, array in zip(self._memory.layers, self.layout.layers, samples, strict=True):
            if array.shape != (n, *layout.shape):
                raise ValueError(
                    f"layer '{layout.name}' expects {n} samples of shape {layout.shape}, "
                    f"but got an array of shape {tuple(array.shape)}"
                )
            layer.data = array.data_ptr()
        self._memory.job.n_data = n
        return samples

    def _run(self, rng: RandomSource, drawn: Sequence[LayerLayout | None]) -> None:
        """Run the C code.

        Parameters
        ----------
        rng : RandomSource
            Random source positioned at the first draw.
        drawn : sequence of LayerLayout or None
            The layer sampled in each draw, in order. None denotes the hidden layer.
        """
        job = self._memory.job
        job.key, job.update, job.first_draw, job.first_row = rng.position
        normal = [self._normal_numbers(rng, number, layout) for number, layout in enumerate(drawn)]
        if job.filling:
            # `normal` has an entry for the hidden layer in every step, although the first step does not sample it.
            normal.insert(0, None)
        addresses = (None if numbers is None else numbers.data_ptr() for numbers in normal)
        job.normal = (ctypes.c_void_p * len(normal))(*addresses)
        n_groups = -(-(job.n_data + job.n_chains) // job.group)
        job.chunks = max(1, min(MOST_CHUNKS, n_groups))
        self._code.contrast(ctypes.addressof(job))

    def _normal_numbers(self, rng: RandomSource, number: int, layout: LayerLayout | None) -> Tensor | None:
        """Return the normal random numbers used to sample a Gaussian layer, or None for any other layer.

        The C code generates the uniform random numbers for other layers itself.
        """
        gaussian = self.layout.hidden_gaussian if layout is None else layout.gaussian
        if not gaussian:
            return None
        shape = self.layout.hidden_shape if layout is None else layout.numbers_shape
        position = rng.position
        draw = rng.at_step(position.step, draw=position.draw + number, first_row=position.first_row)
        return draw.normal((self._memory.job.n_chains, *shape), self.arrays.params)


def unsupported_reason(settings: UpdateSettings, state: TrainState) -> str | None:
    """Return the reason why this backend does not support a training run, or None if it does."""
    code = compiled.library()
    if code is None:
        return "the compiled code is missing"
    if not has_fields_of(code):
        return "the compiled code belongs to another version; reinstall the package"
    dtype = state.machine.like.dtype
    if dtype != torch.float32:
        return f"its parameters are {dtype}, not torch.float32"
    if (reason := flat_backend.unsupported_reason(settings, state)) is not None:
        return reason
    layout = Layout.of(state.machine)
    matrices, dense = _matrices_and_dense(layout)
    if not matrices or any(len(layer.factors) > 1 or layer.rank > 1 for layer in dense):
        return "it needs at least one matrix layer, and its other layers must have dense couplings"
    K = layout.hidden_rows
    L = layout.hidden_columns
    for layer in matrices:
        sizes = (K * layer.rows, L * layer.columns, K * layer.columns, layout.hidden_area, layer.area)
        if max(sizes) > _LARGEST_MATRIX:
            return f"a layer or a product has more than {_LARGEST_MATRIX} entries"
    return None


def slower_reason(settings: UpdateSettings, state: TrainState) -> str | None:
    """Return the reason why general matrix products are faster than the C code, or None if they are not.

    Each term of a coupling maps a matrix X to U X V', where U has shape (K, I) and V has shape (L, J).
    """
    code = compiled.library()
    assert code is not None
    pad = int(code.PAD)
    layout = Layout.of(state.machine)
    matrices, dense = _matrices_and_dense(layout)
    K = layout.hidden_rows
    L = layout.hidden_columns
    n = max(settings.recipe.batch_size, settings.negative.n_chains)
    own_multiplications = 0
    gemm_multiplications = 0
    for layer in matrices:
        I = layer.rows  # noqa: E741
        J = layer.columns
        own_multiplications += layer.rank * K * (I * padded(J, pad) + J * padded(L, pad))
        gemm_multiplications += layer.rank * I * L * (J + K)
    few_rows = min(K, *(layer.rows for layer in matrices)) < _FEW_ROWS
    wasteful = own_multiplications > _MOST_WASTE * gemm_multiplications
    if n * own_multiplications > _SMALL_WORK and (few_rows or wasteful):
        return "its matrices are too narrow"
    dense_weights = sum(layer.area for layer in dense) * layout.hidden_area
    if dense_weights > max(_MOST_DENSE_WEIGHTS, _MOST_DENSE_PART * own_multiplications):
        return "it has too many dense weights, which the C code reads for every sample"
    return None


def _matrices_and_dense(layout: Layout) -> tuple[list[LayerLayout], list[LayerLayout]]:
    """Split the layers into two groups: matrices with one factor per axis, and all other layers."""
    matrices = [layer for layer in layout.layers if layer.is_matrix]
    return matrices, [layer for layer in layout.layers if not layer.is_matrix]
