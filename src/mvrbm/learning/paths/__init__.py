"""Execution paths: ways to compute the same updates, and the rule that chooses among them.

`reference` is for every machine, `graphs` for every machine on a GPU (CUDA graphs), `gemm` on the CPU for sums of
Kronecker products and full matrices, `native` for those of matrices, `triton` for matrices on a GPU. The special paths
are tested equal to the reference. None of them depends on the trainer: each takes a state and data, and returns the
state.
"""

from mvrbm.learning.data import Source
from mvrbm.learning.paths import gemm, graphs, native, triton
from mvrbm.learning.paths.base import EpochPath, Task, UpdatePath
from mvrbm.learning.paths.reference import ReferencePath
from mvrbm.learning.state import TrainState

__all__ = ["EpochPath", "Task", "UpdatePath", "choose_path"]


def choose_path(task: Task, state: TrainState, source: Source, threads: int) -> UpdatePath | EpochPath:
    """Return the fastest path that can compute a training run's updates."""
    if triton.unsupported_reason(task, state, source) is None:
        return triton.TritonPath([task], [state], [source])
    if graphs.unsupported_reason(task, state, source) is None:
        return graphs.GraphPath(task, state, source)
    if native.unsupported_reason(task, state) is None:
        return native.NativeUpdates(task, state, threads)
    if gemm.unsupported_reason(task, state) is None:
        return gemm.GemmUpdates(task, state)
    return ReferencePath(task)
