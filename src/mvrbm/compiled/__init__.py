"""The C code, which is optional: without a C compiler the package installs without it and is slower.

`_native.c` computes updates on the CPU and random numbers, and `_pseudo.c` pseudo-likelihoods. This package depends on
no other part of mvrbm.
"""

import functools
import importlib
from types import ModuleType

# Version of the interface between Python and _native.c. The C file defines the same number.
_NATIVE_INTERFACE = 9


@functools.cache
def library(name: str = "_native") -> ModuleType | None:
    """Return the compiled module of a C file, or None if it was not built, or was built for another version."""
    try:
        module = importlib.import_module(f"mvrbm.compiled.{name}")
    except ImportError:
        return None
    if name == "_native" and module.INTERFACE != _NATIVE_INTERFACE:
        return None
    return module
