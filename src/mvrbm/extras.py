"""Import optional packages, which are extras of the installation, on demand."""

import importlib
from types import ModuleType

from mvrbm.errors import MissingPackageError


def require(module: str, purpose: str, extra: str) -> ModuleType:
    """Import a module of an optional package, or raise `MissingPackageError`.

    Parameters
    ----------
    module : str
        Name of the module.
    purpose : str
        Beginning of the error message: ``"ONNX export"`` gives ``"ONNX export needs the package onnx, ..."``.
    extra : str
        The extra that installs the package, which the error message names.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        command = f"pip install 'mvrbm[{extra}]'"
        message = f"{purpose} needs the package {package}, which is not installed: {command}"
        raise MissingPackageError(message, name=package) from error
