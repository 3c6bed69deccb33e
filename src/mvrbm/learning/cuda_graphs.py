"""Capture of CUDA graphs: work of many small launches is recorded once and replayed with one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from mvrbm.random import RandomSource


def capture(
    work: Callable[[], None], sources: Sequence[RandomSource] = (), *, what: str = "this model"
) -> torch.cuda.CUDAGraph | None:
    """Record work as a CUDA graph, without running it. It must have run before, and must not read results back.

    Parameters
    ----------
    work : callable
        What to record.
    sources : sequence of RandomSource
        Sources that the work draws from; every replay continues their streams.
    what : str
        What to call the work in a warning.

    Returns
    -------
    CUDAGraph or None
        None, with a warning, if the work cannot be captured. The sources are then as they were before.
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
