"""Capture sequences of many small kernel launches as CUDA graphs, which can be replayed with a single launch."""

import warnings
from collections.abc import Callable

import torch

from mvrbm.progress import report
from mvrbm.random import RandomSource

# Number of steps per graph. Must be even, because tempering alternates between two kinds of steps.
_STEPS_PER_GRAPH = 20
#: Minimum number of steps for which capturing a graph pays off.
WORTH_A_GRAPH = 2 * _STEPS_PER_GRAPH


def capture(work: Callable[[], None], *, what: str = "this model") -> torch.cuda.CUDAGraph | None:
    """Capture the GPU operations of a function as a CUDA graph without running them, and return the graph.

    If the operations cannot be captured, issue a warning and return None.

    Parameters
    ----------
    work : callable
        Function to capture. It must have been called at least once, and it must not copy values to the CPU. If it draws
        random numbers, it must use a random source whose step counter is on the GPU and advance that counter.
        Otherwise, every replay would draw the same numbers.
    what : str
        Description of the function in the warning.
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
    """Call `step` repeatedly. On a GPU, capture several steps as a CUDA graph and replay the graph.

    Parameters
    ----------
    step : callable
        Function that updates tensors in place and draws random numbers from the random source passed to it. It must not
        copy values to the CPU. All even-numbered calls must perform the same operations, as must all odd-numbered
        calls.
    count : int
        Number of times to call `step`.
    rng : RandomSource
        Random source for the steps.
    device : torch.device
        Device that stores the tensors.
    """
    if count < WORTH_A_GRAPH:
        for _ in range(count):
            step(rng)
            report("Gibbs steps")
        return
    # Use one step of the source per step of the chain on every device, so that results do not depend on the device.
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

    steps(count - replays * _STEPS_PER_GRAPH)  # Runs at least one even and one odd step before the capture.
    if not replays:
        return
    graph = capture(lambda: steps(_STEPS_PER_GRAPH), what="this sampler")
    for _ in range(replays):
        if graph is None:
            steps(_STEPS_PER_GRAPH)
        else:
            graph.replay()
            report("Gibbs steps", _STEPS_PER_GRAPH)
    torch.cuda.current_stream(device).synchronize()  # The graph's memory is freed on return.
