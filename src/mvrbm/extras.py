"""Import optional packages and plugins on demand, and check whether Triton is available."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mvrbm.errors import MissingPackageError, PluginError

if TYPE_CHECKING:
    import torch


def require(module: str, purpose: str, extra: str) -> ModuleType:
    """Import and return a module, or raise `MissingPackageError` if its package is not installed.

    Parameters
    ----------
    module : str
        Name of the module.
    purpose : str
        Beginning of the error message. For example, ``"ONNX export"`` gives ``"ONNX export requires the package onnx,
        ..."``.
    extra : str
        Name of the extra that installs the package. The error message contains the corresponding ``pip`` command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        command = f"pip install 'mvrbm[{extra}]'"
        message = f"{purpose} requires the package {package}, which is not installed: {command}"
        raise MissingPackageError(message, name=package) from error


def check_not_taken(cls: type, registered: Any) -> None:
    """Raise ValueError if a name is registered for another class, which `cls` would replace.

    `registered` is the registered class or a `functools.partial` of it, or None. A class with the same module and
    qualified name is not another class: it was defined again, for example because a cell of a notebook was run again.
    """
    other = getattr(registered, "func", registered)
    if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(
            f"the name of {cls.__module__}.{cls.__qualname__} belongs to {other.__module__}.{other.__qualname__}; "
            "choose another name"
        )


@functools.cache
def import_plugins() -> None:
    """Import plugins, which are modules of installed packages that define additional units and couplings.

    A package lists its plugins in the entry-point group ``mvrbm.plugins``. Plugins are imported once per process, when
    a requested unit or coupling is not defined in this package.
    """
    import torch

    for entry in importlib.metadata.entry_points(group="mvrbm.plugins"):
        try:
            with torch.device("cpu"):  # saved models are built on the meta device
                entry.load()
        except Exception as error:
            raise PluginError(f"the plugin '{entry.value}' cannot be imported: {error}") from error


def triton_runs_on(device: torch.device) -> bool:
    """Return whether Triton is installed and can run on a device. The Triton interpreter can run on any device."""
    usable = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return usable and _triton_is_installed()


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
