"""The program `python -m studies`, with one command per experiment or study."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from studies import arguments

__all__ = ["commands", "main"]

#: Modules by the command that they define. `studies.paper` defines the commands of all of the paper's experiments.
_MODULES = {
    "paper": "studies.paper",
    "photographs": "studies.photographs.study",
    "indian-pines": "studies.indian_pines.page",
    "deep": "studies.deep",
    "learning": "studies.learning",
    "distributed": "studies.distributed",
    "hyperparameters": "studies.hyperparameters",
    "densities": "studies.densities",
    "defaults": "studies.defaults",
    "natural-patches": "studies.natural_patches",
    "sequences": "studies.sequences",
    "generative": "studies.generative.page",
    "applications": "studies.applications.page",
}


def commands(name: str | None = None) -> dict[str, arguments.Command]:
    """Return the commands by name.

    If `name` is a command, modules that do not define it are not imported: they may need packages that are not
    installed.
    """
    if name in _MODULES:
        modules = [_MODULES[name]]
    elif name in importlib.import_module("studies.paper").COMMANDS:
        modules = ["studies.paper"]
    else:
        modules = list(_MODULES.values())
    return {key: value for module in modules for key, value in importlib.import_module(module).COMMANDS.items()}


def main(args: Sequence[str]) -> int:
    """Run a command, and return the exit code."""
    about = "The paper's experiments and our own studies. Finished runs are stored: repeat a command to resume it."
    return arguments.main("python -m studies", about, commands(args[0] if args else None), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
