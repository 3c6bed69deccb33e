"""Capture of CUDA graphs: work of many small launches is recorded once and replayed with one launch."""

import warnings
from collections.abc import Callable

import torch

from mvrbm.progress import report
from mvrbm.random import RandomSource

# Steps per graph. An even number, because tempering alternates between two kinds of steps.
_STEPS_PER_GRAPH = 20
#: Number of steps from which a graph is worth its capture.
WORTH_A_GRAPH = 2 * _STEPS_PER_GRAPH


def capture(work: Callable[[], None], *, what: str = "this model") -> torch.cuda.CUDAGraph | None:
    """Record work as a CUDA graph without running it, or return None with a warning if it cannot be captured.

    The work must have run before, and must not read results back to the CPU. Random numbers in it must come from a
    source whose step is on the GPU, and the work has to advance that step: otherwise all replays draw the same numbers.

    Parameters
    ----------
    work : callable
        The work.
    what : str
        Name of the work in the warning.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        warnings.warn(f"{what} runs without CUDA graphs: {reason}", RuntimeWarning, stacklevel=3)
        return None
    return graph


def repeat(step: Callable[[RandomSource], object], count: int, rng: RandomSource, device: torch.device) -> None:
    """Take a step `count` times. On a GPU, a graph of several steps is recorded once and replayed.

    Parameters
    ----------
    step : callable
        Changes tensors in place, drawing from the source that it is given. It must not read a number back to the CPU,
        and all its even calls, and all its odd ones, must do the same work.
    count : int
        Number of steps.
    rng : RandomSource
        Source of the draws.
    device : torch.device
        Where the tensors are.
    """
    if count < WORTH_A_GRAPH:
        for _ in range(count):
            step(rng)
            report("Gibbs steps")
        return
    # Every step of a long chain has its own numbers, wherever the chain runs.
    own = rng.split(1)[0]
    replays = 0
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        own.step_on(device)
        replays = (count - 2) // _STEPS_PER_GRAPH

    def steps(number: int) -> None:
        for _ in range(number):
            step(own)
            own.next_step()
            report("Gibbs steps")

    steps(count - replays * _STEPS_PER_GRAPH)  # at least one even and one odd step run before they are recorded
    if not replays:
        return
    graph = capture(lambda: steps(_STEPS_PER_GRAPH), what="this sampler")
    for _ in range(replays):
        if graph is None:
            steps(_STEPS_PER_GRAPH)
        else:
            graph.replay()
            report("Gibbs steps", _STEPS_PER_GRAPH)
    torch.cuda.current_stream(device).synchronize()  # the memory of the graph is freed here
