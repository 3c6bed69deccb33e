"""Python wrapper for `_pseudo.c`, which computes log-odds of binary sites coupled to binary hidden units."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from mvrbm.compiled import library

# Logarithm of the largest product that float32 can represent safely. Fields are clipped to this magnitude.
_RANGE = 80.0
# Largest weight for which clipping the fields has no noticeable effect.
_LARGEST_WEIGHT = 60.0
# Minimum number of log-odds per thread. Computing fewer takes less time than starting a thread.
_WORTH_A_THREAD = 2**15
# Maximum number of factors multiplied before the exponent of their product is split off.
_LONGEST_GROUP = 16


def log_odds(field: Tensor, bias: Tensor, weights: Tensor, x: Tensor) -> Tensor | None:
    r"""Compute the contribution of a binary hidden layer to the log-odds of binary sites.

    Return a tensor of shape (n, sites). The result is None if the C code was not built, if a tensor is not a float32
    tensor on the CPU, or if a weight has an absolute value greater than 60.

    Parameters
    ----------
    field : Tensor of shape (n, hidden)
        Input fields of the hidden units.
    bias : Tensor of shape (hidden,)
        Biases of the hidden units.
    weights : Tensor of shape (sites, hidden)
        Weights between sites and hidden units.
    x : Tensor of shape (n, sites)
        Values of the sites, between 0 and 1.
    """
    code = library("_pseudo")
    given = (field, bias, weights, x)
    if code is None or any(t.dtype != torch.float32 or t.device.type != "cpu" for t in given):
        return None
    largest = max(-float(weights.min()), float(weights.max()))
    # The sum is not finite if any field or bias is not finite.
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
        """Compute the log-odds for samples `start` to `stop` - 1."""
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
    # Compute the last part in the current thread, because starting a thread takes as long as computing many sites.
    with ThreadPoolExecutor(threads) as pool:
        others = [pool.submit(compute, *ends) for ends in itertools.pairwise(edges[:-1])]
        compute(*edges[-2:])
        for other in others:
            other.result()
    return out
