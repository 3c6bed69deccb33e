"""The gradient on the CPU by the compiled code of :mod:`mvrbm.compiled`, where it was built.

The matrices of one sample are too small for a general matrix product to be efficient. The compiled code finishes one
sample while it is in the first-level cache, and distributes samples over threads dynamically.
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from mvrbm.backends.base import UpdateSettings
from mvrbm.backends.cpu import gemm
from mvrbm.backends.cpu.updates import FlatBackend, compiled_code
from mvrbm.backends.layout import LayerLayout, Layout
from mvrbm.data.sources import Batch
from mvrbm.random import RandomSource, philox
from mvrbm.sampling import Layers
from mvrbm.updates.gradient import WHOLE, Share
from mvrbm.updates.state import TrainState

# Bytes kept of samples for the gradient of U: they have to fit in the second-level cache.
_GROUP_BYTES = 350_000
_LARGEST_GROUP = 64
_MOST_TASKS = 16
# Multiplications per product with the coupling over a batch, below which waking a thread takes longer than it helps.
_WORTH_THREADS = 10**6

# Multiplications below which calling a general matrix product takes longer than the product.
_LITTLE = 10**6
# With fewer rows than this V is read too often; and padding, or U X where X V' is smaller, may cost this factor.
_FEW_ROWS, _WASTE = 8, 2.5
_LARGEST = 2**26  # entries of a matrix: the compiled code counts in 32 bits
# Full weights, which are read from the second-level cache for every sample, or their share of all multiplications.
_MOST_WEIGHTS, _WEIGHTS_SHARE = 2**14, 0.2

_FLOATS = ctypes.c_void_p
_KINDS = ("bernoulli", "gaussian", "categorical")  # as _native.c counts them


class _Layer(ctypes.Structure):
    """`Layer` of _native.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("I", "J", "rank", "kind", "categories", "lines", "columns")),
        *((name, _FLOATS) for name in ("U", "V", "B", "data", "known", "scale", "shift")),
        *((name, ctypes.c_int64) for name in ("states_at", "products_at", "v_at", "vt_at", "b_at")),
        *((name, ctypes.c_int64) for name in ("to_u_at", "to_v_at", "to_b_at", "to_s_at")),
        *((name, _FLOATS) for name in ("to_U", "to_V", "to_B", "to_S")),
    )


class _Job(ctypes.Structure):
    """`Job` of _native.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("filling", "K", "L", "gaussian", "n_layers")),
        *((name, ctypes.c_int32) for name in ("n_data", "n_chains", "steps", "tasks", "group", "threads")),
        *((name, ctypes.c_int32) for name in ("lines", "columns")),
        *((name, ctypes.c_uint32) for name in ("first_row", "update", "first_draw")),
        ("key", ctypes.c_uint64),
        *((name, ctypes.c_float) for name in ("data_weight", "chain_weight")),
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _FLOATS) for name in ("C", "chains")),
        ("normal", ctypes.POINTER(ctypes.c_void_p)),
        *((name, _FLOATS) for name in ("packed", "gradients", "scratch", "to_C", "data_mean")),
        *((name, ctypes.c_int64) for name in ("states", "products", "c_at", "to_c_at", "to_mean_at")),
        *((name, ctypes.c_int64) for name in ("gradient_size", "scratch_size")),
    )


class NativeBackend(FlatBackend):
    """Computes gradients by compiled code, with at most `threads` threads, on which the result does not depend."""

    def __init__(self, task: UpdateSettings, state: TrainState, threads: int) -> None:
        super().__init__(task, state)
        code = compiled_code()
        assert code is not None
        self._kernels, self._pad = code, int(code.PAD)
        self._padded = partial(_padded, pad=self._pad)
        work = task.recipe.batch_size * sum(link.operations for link in state.machine.links.values())
        self._threads = min(threads, _MOST_TASKS) if work >= _WORTH_THREADS else 1
        self._layers, self._job = self._laid_out()
        self._padded_chains = self._params.new_zeros(self._n_chains if self._persistent else 0, self._job.states)
        self.load(state)

    def _laid_out(self) -> tuple[ctypes.Array[_Layer], _Job]:
        """Describe to the compiled code everything that stays the same from update to update."""
        plan, job = self.plan, _Job()
        K, L = plan.hidden_rows, plan.hidden_columns
        Lp = self._padded(L)
        layers = (_Layer * len(plan.layers))()
        packed = gradient = 0
        for layer, p, own, gradients, pair in zip(
            layers, plan.layers, self._split_params[0], self._split_gradient[0], self._affine, strict=True
        ):
            R, (I, J) = p.rank, _matrix(p)  # noqa: E741
            Jp = self._padded(J)
            layer.I, layer.J, layer.rank, layer.kind = I, J, R, _KINDS.index(p.kind)
            layer.categories = p.shape[-1] if p.kind == "categorical" else 1
            _, layer.lines, layer.columns = philox.layout((1, *p.numbers_shape))
            *U, layer.V, layer.B = (part.data_ptr() for part in own)
            *to_U, layer.to_V, layer.to_B = (part.data_ptr() for part in gradients)
            layer.U, layer.to_U = (*U, None)[0], (*to_U, None)[0]
            layer.to_S = plan.log_variance(self._gradient, p).data_ptr() if p.learns_variance else None
            if pair is not None:
                layer.scale, layer.shift = (part.data_ptr() for part in pair)
            layer.states_at, layer.products_at = job.states, job.products
            rows, transposed = (R * L * Jp, R * J * Lp) if p.is_matrix else (0, J * K * Lp)
            job.states, job.products = job.states + I * Jp, job.products + (R * K * Jp if p.is_matrix else 0)
            layer.v_at, layer.vt_at, layer.b_at = packed, packed + rows, packed + rows + transposed
            packed = layer.b_at + I * Jp
            layer.to_v_at, layer.to_b_at = gradient, gradient + (rows or transposed)
            layer.to_s_at = layer.to_b_at + I * Jp
            layer.to_u_at = layer.to_s_at + I * Jp * p.learns_variance
            gradient = layer.to_u_at + (self._padded(R * K * I) if p.is_matrix else 0)
        job.K, job.L, job.gaussian, job.n_layers = K, L, plan.hidden_gaussian, len(layers)
        _, job.lines, job.columns = philox.layout((1, *plan.hidden_shape))
        job.layers = layers
        job.c_at = packed
        job.to_c_at, job.to_mean_at, job.gradient_size = gradient, gradient + K * Lp, gradient + 2 * K * Lp
        job.C, job.to_C = self._split_params[1].data_ptr(), self._split_gradient[1].data_ptr()
        job.data_mean = self._data_mean.data_ptr()
        job.threads = self._threads
        job.group = max(2, min(_LARGEST_GROUP, _GROUP_BYTES // (4 * (job.states + job.products))))
        spare = max(K * Lp, job.states) + self._pad
        job.scratch_size = self._padded(job.group * (job.states + job.products) + 2 * (job.products + K * Lp) + spare)
        new = self._params.new_zeros
        self._buffers = new(packed + K * Lp), new(_MOST_TASKS * job.gradient_size), new(job.threads * job.scratch_size)
        job.packed, job.gradients, job.scratch = (buffer.data_ptr() for buffer in self._buffers)
        return layers, job

    def _chain_states(self) -> list[Tensor]:
        states = []
        for layer, p in zip(self._layers, self.plan.layers, strict=True):
            (rows, columns), width = _matrix(p), self._padded(_matrix(p)[1])
            own = self._padded_chains[:, layer.states_at : layer.states_at + rows * width]
            states.append(own.view(-1, rows, width)[..., :columns].view(-1, *p.shape))
        return states

    def _contrast(self, batch: Mapping[str, Tensor], of_data: float, of_chain: float) -> None:
        job = self._job
        samples = self._give(batch)
        job.n_chains, job.steps = self._n_chains if self._persistent else job.n_data, self._steps
        job.data_weight, job.chain_weight = of_data / max(1, job.n_data), of_chain / max(1, job.n_chains)
        self._run(self._rng, [part for _ in range(self._steps) for part in (None, *self.plan.layers)])
        del samples  # not before they have been read

    def draw_missing(self, state: TrainState, batch: Batch, steps: int, share: Share = WHOLE) -> Layers:
        job, plan = self._job, self.plan
        masks = state.machine.as_masks(batch.known, batch.visible)
        samples = self._give({name: array.clone() for name, array in batch.visible.items()})
        # A layer that has no mask is known completely.
        known = [masks[p.name] if p.name in batch.known else None for p in plan.layers]
        known = [None if mask is None else mask.contiguous() for mask in known]
        for layer, mask in zip(self._layers, known, strict=True):
            layer.known = None if mask is None else mask.data_ptr()
        job.filling, job.n_chains, job.steps = True, job.n_data, steps
        each_step = [part for _ in range(steps) for part in (None, *plan.layers)]
        self._run(state.missing_numbers(share), [*plan.layers, *each_step])
        job.filling = False
        return dict(zip((p.name for p in plan.layers), samples, strict=True))

    def _give(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """Tell the compiled code where a batch is, and return its arrays, to be kept as long as they are used."""
        plan = self.plan
        samples = [batch[p.name].to(self._params).contiguous() for p in plan.layers]
        for layer, p, some in zip(self._layers, plan.layers, samples, strict=True):
            if some.shape != (len(samples[0]), *p.shape):
                raise ValueError(
                    f"layer '{p.name}' needs samples of shape {p.shape}, as many as every other layer, "
                    f"got an array {tuple(some.shape)} where the first has {len(samples[0])}"
                )
            layer.data = some.data_ptr()
        self._job.n_data = len(samples[0])
        return samples

    def _run(self, rng: RandomSource, drawn: Sequence[LayerLayout | None]) -> None:
        """Let the compiled code do a job. `drawn` are the layers that it draws, in order, None for the hidden one."""
        job = self._job
        job.key, job.update, job.first_draw, job.first_row = rng.position
        normal = [self._normal_numbers(rng, number, p) for number, p in enumerate(drawn)]
        if job.filling:
            normal.insert(0, None)  # the compiled code counts a hidden layer in the first step, which draws none
        job.chains = self._padded_chains.data_ptr() if self._persistent and not job.filling else None
        job.tasks = max(1, min(_MOST_TASKS, -(-(job.n_data + job.n_chains) // job.group)))
        addresses = (None if numbers is None else numbers.data_ptr() for numbers in normal)
        job.normal = (ctypes.c_void_p * len(normal))(*addresses)
        self._kernels.contrast(ctypes.addressof(job))

    def _normal_numbers(self, rng: RandomSource, number: int, p: LayerLayout | None) -> Tensor | None:
        """Return the normal numbers of a draw of a Gaussian layer, or None: the compiled code draws other layers."""
        gaussian = self.plan.hidden_gaussian if p is None else p.gaussian
        if not gaussian:
            return None
        shape = self.plan.hidden_shape if p is None else p.numbers_shape
        start = rng.position
        own = rng.at_step(start.step, draw=start.draw + number, first_row=start.first_row)
        return own.normal((self._job.n_chains, *shape), self._params)


def unsupported_reason(task: UpdateSettings, state: TrainState) -> str | None:
    """Return why this path cannot compute a training run's updates, None if it can."""
    code, dtype = compiled_code(), state.machine.like.dtype
    if code is None:
        return "there is no compiled code of this version"
    if (code.job_size, code.layer_size) != (ctypes.sizeof(_Job), ctypes.sizeof(_Layer)):
        return "the compiled code is of another version: install the package again"
    if dtype != torch.float32:
        return f"its numbers are {dtype}, not torch.float32"
    return gemm.unsupported_reason(task, state) or _slower_reason(task, state, int(code.PAD))


def _matrix(p: LayerLayout) -> tuple[int, int]:
    """Return rows and columns of a layer for the compiled code; one with full weights is a row."""
    return (p.rows, p.columns) if p.is_matrix else (1, p.area)


def _padded(columns: int, pad: int) -> int:
    return -(-columns // pad) * pad


def _slower_reason(task: UpdateSettings, state: TrainState, pad: int) -> str | None:
    """Return why general matrix products are faster for a training run, None if they are not."""
    plan, negative = Layout.of(state.machine), task.negative
    matrices, others = [p for p in plan.layers if p.is_matrix], [p for p in plan.layers if not p.is_matrix]
    if not matrices or any(len(p.factors) > 1 or p.rank > 1 for p in others):
        return "not all of its layers are matrices, or next to matrices and with full weights"
    K = plan.hidden_rows
    L = plan.hidden_columns
    n = max(task.recipe.batch_size, int(getattr(negative, "n_chains", 0)))
    if max(max(K * p.rows, L * p.columns, K * p.columns, plan.hidden_area, p.area) for p in matrices) > _LARGEST:
        return "its layers are too large"
    ours = sum(p.rank * K * (p.rows * _padded(p.columns, pad) + p.columns * _padded(L, pad)) for p in matrices)
    theirs = sum(p.rank * p.rows * L * (p.columns + K) for p in matrices)
    few_rows = min(K, *(p.rows for p in matrices)) < _FEW_ROWS
    if n * ours > _LITTLE and (few_rows or ours > _WASTE * theirs):
        return "its matrices are too narrow"
    if sum(p.area for p in others) * plan.hidden_area > max(_MOST_WEIGHTS, _WEIGHTS_SHARE * ours):
        return "it has too many full weights, which are read for every sample"
    return None
