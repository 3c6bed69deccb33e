"""Find and remove the checkpoints of an earlier training run, including checkpoints in subfolders."""

import re
import shutil
from pathlib import Path

from mvrbm.errors import StorageError
from mvrbm.io.atomic import lock, recover_folder
from mvrbm.training.checkpoints.descents import is_descent
from mvrbm.training.checkpoints.runs import all_in

# Subfolders for the parts of a training run: machines of a stack, candidates of a sweep, and training steps. Other
# subfolders may belong to other training runs.
_PART = re.compile(r"layer-\d+|candidate-\d+|step-\d+-\w+|fit|pretraining|tuning")
# Name of a folder that was being replaced when its process was killed. See mvrbm.io.atomic.
_FORMER = re.compile(r"\.(.+)\.former")


def stored_checkpoints(folder: Path) -> list[Path]:
    """Return the paths to all checkpoints of the training run in a checkpoint folder."""
    if not folder.is_dir():
        return []
    found = all_in(folder)
    if is_descent(folder):
        found.append(folder)
    names = {_FORMER.sub(r"\1", entry.name) for entry in folder.iterdir() if entry.is_dir()}
    for name in sorted(filter(_PART.fullmatch, names)):
        found += stored_checkpoints(recover_folder(folder / name))
    return found


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of the training run in a checkpoint folder.

    Raises StorageError if another process is writing checkpoints to the folder.
    """
    for path in stored_checkpoints(folder):
        home = path.parent
        try:
            with lock(home):
                shutil.rmtree(path)
        except BlockingIOError:
            raise StorageError(f"another process is writing checkpoints to {home}; wait for it to finish") from None
        except OSError as error:
            raise StorageError(f"{path} cannot be removed: {error.strerror or error}") from error
