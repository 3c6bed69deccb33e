"""Names of the subfolders for the parts of a training run: machines of a stack, candidates of a sweep, and so on."""

import os
import re
from pathlib import Path

# Parts of training runs, and the form of the details that follow in the names of their subfolders.
_PARTS = {"layer": r"-\d+", "candidate": r"-\d+", "step": r"-\d+-\w+", "fit": "", "pretraining": "", "tuning": ""}
_NAME = re.compile("|".join(f"{part}{details}" for part, details in _PARTS.items()))


def part_folder(folder: str | os.PathLike[str], part: str, *details: object) -> Path:
    """Return the subfolder of a checkpoint folder for a part of a training run, such as `layer-0`."""
    name = "-".join([part, *map(str, details)])
    if not is_part(name):
        raise ValueError(f"{name!r} is not the name of a part of a training run; the parts are {', '.join(_PARTS)}")
    return Path(folder) / name


def is_part(name: str) -> bool:
    """Return whether a folder name can be the result of :func:`part_folder`."""
    return _NAME.fullmatch(name) is not None
