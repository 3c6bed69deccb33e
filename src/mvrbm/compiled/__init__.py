"""Optional C extensions. Without a C compiler, the package installs without them and is slower.

`_native.c` computes training updates on the CPU and random numbers. `_pseudo.c` computes pseudo-likelihoods. This
subpackage does not depend on any other part of mvrbm.
"""

import functools
import importlib
from types import ModuleType

# Version of the interface between Python and _native.c. Must match `INTERFACE` in the C file.
_NATIVE_INTERFACE = 9


@functools.cache
def library(name: str = "_native") -> ModuleType | None:
    """Return the compiled module for a C file, or None if it was not built or was built for another version."""
    try:
        module = importlib.import_module(f"mvrbm.compiled.{name}")
    except ImportError:
        return None
    if name == "_native" and module.INTERFACE != _NATIVE_INTERFACE:
        return None
    return module
