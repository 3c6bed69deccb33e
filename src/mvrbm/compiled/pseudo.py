"""Log-odds of binary sites next to binary hidden units by the C code in `_pseudo.c`, where it was built."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mvrbm.compiled import library

# Logarithm of the largest product that a float holds safely. Fields are clipped to this size.
_RANGE = 80.0
# Largest weight for which clipping the fields has no visible effect.
_LARGEST_WEIGHT = 60.0
# Number of log-odds per thread: computing fewer takes less time than starting a thread.
_WORTH_A_THREAD = 2**15
# Maximum number of factors that are multiplied before the exponent of their product is split off.
_LONGEST_GROUP = 16


def log_odds(field: Tensor, bias: Tensor, weights: Tensor, x: Tensor) -> Tensor | None:
    r"""Return the contribution of a binary hidden layer to the log-odds of binary sites, (n, sites).

    Returns None without the C code, for tensors other than float32 on the CPU, and for weights beyond 60.

    Parameters
    ----------
    field : Tensor (n, hidden)
        Fields of the hidden units.
    bias : Tensor (hidden,)
        Biases of the hidden units.
    weights : Tensor (sites, hidden)
        Weights between sites and hidden units.
    x : Tensor (n, sites)
        Values of the sites, from 0 to 1.
    """
    code = library("_pseudo")
    given = (field, bias, weights, x)
    if code is None or any(t.dtype != torch.float32 or t.device.type != "cpu" for t in given):
        return None
    largest = max(-float(weights.min()), float(weights.max()))
    # The sum of fields is not finite if a field is not finite.
    if not (largest <= _LARGEST_WEIGHT and math.isfinite(float(field.sum() + bias.sum()))):
        return None
    n, hidden = field.shape
    sites = len(weights)
    group = int(min(_LONGEST_GROUP, _RANGE / max(largest, 1.0)))
    rows = torch.nn.functional.pad(weights, (0, -hidden % int(code.PAD)))
    field = field.contiguous()
    bias = bias.contiguous()
    x = x.contiguous()
    shared = (bias, rows, torch.exp(rows), torch.exp(-rows))
    out = torch.empty(n, sites, dtype=torch.float32, device="cpu")

    def compute(start: int, stop: int) -> None:
        """Compute the log-odds of some of the samples."""
        code.log_odds(
            field[start:].data_ptr(),
            *(t.data_ptr() for t in shared),
            x[start:].data_ptr(),
            out[start:].data_ptr(),
            stop - start,
            sites,
            hidden,
            group,
        )

    threads = max(1, min(torch.get_num_threads(), n * sites // _WORTH_A_THREAD))
    edges = [n * i // threads for i in range(threads + 1)]
    # This thread computes the last part: starting another one takes as long as many sites.
    with ThreadPoolExecutor(threads) as pool:
        others = [pool.submit(compute, *ends) for ends in itertools.pairwise(edges[:-1])]
        compute(*edges[-2:])
        for other in others:
            other.result()
    return out
