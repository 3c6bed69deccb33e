"""The program `python -m studies`: one command per experiment or study."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from studies import arguments

__all__ = ["commands", "main"]

#: Modules with commands, each with the commands that it has; None: the rest.
_MODULES = {
    "studies.paper": None,
    "studies.photographs.study": "photographs",
    "studies.indian_pines.page": "indian-pines",
    "studies.deep": "deep",
    "studies.learning": "learning",
    "studies.distributed": "distributed",
    "studies.hyperparameters": "hyperparameters",
    "studies.generative.page": "generative",
    "studies.applications.page": "applications",
}


def commands(name: str | None = None) -> dict[str, arguments.Command]:
    """Return all commands; given the name of one of our own studies, this one without importing the others.

    The experiments of the paper run on machines that lack some of the packages of the other studies.
    """
    own = [module for module, command in _MODULES.items() if command == name] if name is not None else []
    paper = importlib.import_module("studies.paper").COMMANDS
    modules = own or (["studies.paper"] if name in paper else list(_MODULES))
    return {key: value for module in modules for key, value in importlib.import_module(module).COMMANDS.items()}


def main(args: Sequence[str]) -> int:
    """Run a command, and return the exit code."""
    about = "The paper's experiments and our own studies. Finished runs are stored: repeat a command to resume it."
    return arguments.main("python -m studies", about, commands(args[0] if args else None), args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
