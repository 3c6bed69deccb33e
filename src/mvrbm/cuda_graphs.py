"""Capture of CUDA graphs: work of many small launches is recorded once and replayed with one."""

import warnings
from collections.abc import Callable, Sequence

import torch

from mvrbm.progress import report
from mvrbm.random import RandomSource

_STEPS_PER_GRAPH = 20  # an even number: tempering alternates between two kinds of steps


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


def repeat(step: Callable[[], object], count: int, rng: RandomSource, device: torch.device) -> None:
    """Take a step `count` times. On a GPU, a graph of several steps is recorded once and replayed.

    Parameters
    ----------
    step : callable
        Changes tensors in place, draws from `rng`, reads no number back and does the same at every even or odd call.
    count : int
        Number of steps.
    rng : RandomSource
        Source of the draws. Only one that draws on the GPU itself can be part of a graph.
    device : torch.device
        Where the tensors are.
    """
    replays = 0
    if device.type == "cuda" and rng.capturable and count >= 2 * _STEPS_PER_GRAPH:
        # Steps that are part of another graph already need none of their own.
        replays = 0 if torch.cuda.is_current_stream_capturing() else (count - 2) // _STEPS_PER_GRAPH

    def steps(number: int) -> None:
        for _ in range(number):
            step()
            report("Gibbs steps")

    steps(count - replays * _STEPS_PER_GRAPH)  # at least two, an even and an odd one, before they are recorded
    if not replays:
        return
    graph = capture(lambda: steps(_STEPS_PER_GRAPH), [rng], what="this sampler")
    for _ in range(replays):
        if graph is None:
            steps(_STEPS_PER_GRAPH)
        else:
            graph.replay()
            report("Gibbs steps", _STEPS_PER_GRAPH)
    torch.cuda.current_stream(device).synchronize()  # the memory of the graph is freed here
