"""Execution paths: ways to compute the same updates, and the rule that chooses among them.

`reference` is for every machine, `graphs` for every machine on a GPU (CUDA graphs), `gemm` on the CPU for sums of
Kronecker products and full matrices, `native` for those of matrices. `triton`, `tensor` and `full` have kernels for a
GPU: one program per sample for small matrices, with or without a label, and for arrays of order 3 and more, and
products of whole batches with full matrices for couplings of higher rank, dense ones, and data with missing entries;
`tempered` adds chains at several temperatures to these.
The special paths are tested equal to the reference. None of them depends on the trainer: each takes a state and data,
and returns the state.
"""

from collections.abc import Sequence

from mvrbm.backends import graph as graphs
from mvrbm.backends.base import EpochBackend, UpdateBackend, UpdateSettings
from mvrbm.backends.cpu import gemm, native
from mvrbm.backends.cuda import full_matrix as full
from mvrbm.backends.cuda import per_sample as triton
from mvrbm.backends.cuda import tempered, tensor
from mvrbm.backends.cuda.epochs import KernelBackend
from mvrbm.backends.layout import Layout
from mvrbm.backends.reference import ReferenceBackend
from mvrbm.data.sources import Source
from mvrbm.devices import n_processors
from mvrbm.updates.state import TrainState

__all__ = ["EpochBackend", "UpdateBackend", "UpdateSettings", "choose_backend", "kernel_backend"]


def choose_backend(
    tasks: Sequence[UpdateSettings], states: Sequence[TrainState], sources: Sequence[Source], threads: int
) -> UpdateBackend | EpochBackend:
    """Return the fastest path that can compute a training run's updates, or those of several at once.

    Several need :func:`kernel_backend`.
    """
    task, state, source = tasks[0], states[0], sources[0]
    if (kernels := kernel_backend(task, state, source, len(tasks))) is not None:
        return kernels(tasks, states, sources)
    if len(tasks) > 1:
        raise ValueError("no kernels can train these machines together: train each by itself")
    if graphs.unsupported_reason(task, state, source) is None:
        return graphs.GraphBackend(task, state, source)
    if native.unsupported_reason(task, state) is None:
        return native.NativeBackend(task, state, threads)
    if gemm.unsupported_reason(task, state) is None:
        return gemm.GemmBackend(task, state)
    return ReferenceBackend(task)


def kernel_backend(task: UpdateSettings, state: TrainState, source: Source, models: int) -> type[KernelBackend] | None:
    """Return the path with the fastest kernels for some machines of the same shapes, None if there are none."""
    by_sample = triton.unsupported_reason(task, state, source) is None
    by_batch = full.unsupported_reason(task, state, source) is None
    if tensor.unsupported_reason(task, state, source) is None:
        return tensor.TensorBackend
    if tempered.unsupported_reason(task, state, source) is None:
        return tempered.TemperedBackend
    if by_sample and by_batch:
        rows = max(task.recipe.batch_size, int(getattr(task.negative, "n_chains", 0)))
        processors = n_processors(state.machine.like.device)
        by_sample = triton.slower_reason(Layout.of(state.machine), rows, models, processors) is None
    return triton.PerSampleBackend if by_sample else full.FullMatrixBackend if by_batch else None
