"""The compiled code, `_native.c`, where it was built; nothing here depends on the rest of the package."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import numpy as np
from torch import Tensor


@functools.cache
def library() -> ModuleType | None:
    """Return the compiled code, None where there is none."""
    try:
        return importlib.import_module("mvrbm.compiled._native")
    except ImportError:
        return None


def uniform(bits: np.random.SFC64, out: Tensor) -> bool:
    """Fill a contiguous float32 tensor on the CPU with the numbers that `RandomSource` makes of such words.

    Returns
    -------
    bool
        Whether that was done: not where there is no compiled code.
    """
    code = library()
    if code is None:
        return False
    with bits.lock:  # as NumPy's own draws do: two threads never get the same numbers
        state = bits.state
        code.uniform(state["state"]["state"].ctypes.data, out.data_ptr(), out.numel())
        bits.state = state
    return True
