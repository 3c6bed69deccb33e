"""Optional C extensions. If no C compiler is available, the package is installed without them and runs more slowly.

`_native.c` generates random numbers and computes training updates on the CPU. `_pseudo.c` computes
pseudo-likelihoods, and `_identity.c` compares sequences.
This subpackage does not depend on any other part of mvrbm.
"""

import functools
import importlib
from types import ModuleType

# Version of the interface between Python and _native.c. It must match `INTERFACE` in the C file.
_NATIVE_INTERFACE = 9


@functools.cache
def library(name: str = "_native") -> ModuleType | None:
    """Return a compiled module, or None if it was not built or has the wrong interface version."""
    try:
        module = importlib.import_module(f"mvrbm.compiled.{name}")
    except ImportError:
        return None
    if name == "_native" and module.INTERFACE != _NATIVE_INTERFACE:
        return None
    return module
