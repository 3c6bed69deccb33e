"""The compiled code of `_pseudo.c`, if it was built: log-odds of binary sites next to binary hidden units."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mvrbm.compiled import library

_RANGE = 80.0  # logarithm of the largest product that a float holds safely; fields are cut off there
_LARGEST_WEIGHT = 60.0  # next to which what is cut off is nothing
_WORTH_A_THREAD = 2**15  # log-odds that take longer than starting a thread, next to threads of PyTorch that wait
_LONGEST_GROUP = 16  # factors that are multiplied before the exponent of their product is taken out


def log_odds(field: Tensor, bias: Tensor, weights: Tensor, x: Tensor) -> Tensor | None:
    r"""Return how a binary hidden layer changes the log-odds of binary sites, (n, sites), or None if it cannot.

    Without compiled code, for other numbers than float32 on the CPU, and for weights beyond 60, it returns None.

    Parameters
    ----------
    field : Tensor (n, hidden)
        Field of the hidden units.
    bias : Tensor (hidden,)
        Their bias.
    weights : Tensor (sites, hidden)
        Weights of the sites.
    x : Tensor (n, sites)
        Values of the sites, from 0 to 1.
    """
    code = library("_pseudo")
    given = (field, bias, weights, x)
    if code is None or any(t.dtype != torch.float32 or t.device.type != "cpu" for t in given):
        return None
    largest = max(-float(weights.min()), float(weights.max()))
    # A field that is not finite has no finite sum, nor need its parts be.
    if not (largest <= _LARGEST_WEIGHT and math.isfinite(float(field.sum() + bias.sum()))):
        return None
    (n, hidden), sites = field.shape, len(weights)
    group = int(min(_LONGEST_GROUP, _RANGE / max(largest, 1.0)))
    rows = torch.nn.functional.pad(weights, (0, -hidden % int(code.PAD)))
    field, bias, x = (t.contiguous() for t in (field, bias, x))
    shared = (bias, rows, torch.exp(rows), torch.exp(-rows))
    out = torch.empty(n, sites, dtype=torch.float32, device="cpu")

    def part(start: int, stop: int) -> None:
        ends = [t[start:].data_ptr() for t in (x, out)]
        code.log_odds(
            field[start:].data_ptr(), *(t.data_ptr() for t in shared), *ends, stop - start, sites, hidden, group
        )

    threads = max(1, min(torch.get_num_threads(), n * sites // _WORTH_A_THREAD))
    edges = [n * i // threads for i in range(threads + 1)]
    # The last part is computed here: starting a thread takes as long as many sites.
    with ThreadPoolExecutor(threads) as pool:
        others = [pool.submit(part, *ends) for ends in itertools.pairwise(edges[:-1])]
        part(*edges[-2:])
        for other in others:
            other.result()
    return out
