"""Import optional dependencies on demand."""

import importlib
from types import ModuleType

from mvrbm.errors import MissingPackageError


def require(module: str, purpose: str, extra: str) -> ModuleType:
    """Import a module from an optional package, or raise `MissingPackageError` if the package is not installed.

    Parameters
    ----------
    module : str
        Name of the module.
    purpose : str
        Start of the error message. For example, ``"ONNX export"`` gives ``"ONNX export requires the package onnx,
        ..."``.
    extra : str
        Name of the extra that installs the package, for the command in the error message.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        command = f"pip install 'mvrbm[{extra}]'"
        message = f"{purpose} requires the package {package}, which is not installed: {command}"
        raise MissingPackageError(message, name=package) from error
