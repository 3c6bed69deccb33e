"""Capture of CUDA graphs: work of many small launches is recorded once and replayed with one."""

import warnings
from collections.abc import Callable, Sequence

import torch

from mvrbm.random import RandomSource


def capture(
    work: Callable[[], None], sources: Sequence[RandomSource] = (), *, what: str = "this model"
) -> torch.cuda.CUDAGraph | None:
    """Record work as a CUDA graph, without running it. It must have run before, and must not read results back.

    The work draws from `sources`, whose streams every replay continues. If the work cannot be captured, they are left
    as they were, and None is returned, with a warning that calls the work `what`.
    """
    graph = torch.cuda.CUDAGraph()
    before = [source.state_dict() for source in sources]
    for source in sources:
        source.register_with(graph)
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        for source, state in zip(sources, before, strict=True):
            source.part_from_graphs(state)
        reason = str(error).splitlines()[0]
        warnings.warn(f"{what} runs without CUDA graphs: {reason}", RuntimeWarning, stacklevel=3)
        return None
    return graph
