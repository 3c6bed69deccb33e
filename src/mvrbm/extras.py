"""Packages that only some functions need, the extras of the installation. They are imported where they are used."""

import importlib
from types import ModuleType

from mvrbm.errors import MissingPackageError


def require(module: str, purpose: str, extra: str) -> ModuleType:
    """Import a module of an extra, or raise `MissingPackageError`, whose message has the command that installs it.

    `purpose` begins the message: ``"ONNX export"`` gives ``"ONNX export needs the package onnx, ..."``.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        command = f"pip install 'mvrbm[{extra}]'"
        message = f"{purpose} needs the package {package}, which is not installed: {command}"
        raise MissingPackageError(message, name=package) from error
