"""The compiled code, if it was built; it is independent of the rest of the package."""

import functools
import importlib
from types import ModuleType

import numpy as np
from torch import Tensor


@functools.cache
def library(name: str = "_native") -> ModuleType | None:
    """Return the compiled code of a C file, None where there is none."""
    try:
        return importlib.import_module(f"mvrbm.compiled.{name}")
    except ImportError:
        return None


def uniform(bits: np.random.SFC64, out: Tensor) -> bool:
    """Fill a contiguous float32 tensor on the CPU with the numbers of `RandomSource`, if there is compiled code.

    Returns whether the tensor has been filled.
    """
    code = library()
    if code is None:
        return False
    with bits.lock:  # as NumPy does, so that two threads never draw the same numbers
        code.uniform(bits.ctypes.state_address, out.data_ptr(), out.numel())  # the state begins with its four words
    return True
