"""The compiled code, if it was built; it is independent of the rest of the package."""

import functools
import importlib
from types import ModuleType


@functools.cache
def library(name: str = "_native") -> ModuleType | None:
    """Return the compiled code of a C file, None where there is none."""
    try:
        return importlib.import_module(f"mvrbm.compiled.{name}")
    except ImportError:
        return None
