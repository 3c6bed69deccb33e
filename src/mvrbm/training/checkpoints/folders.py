"""Find and replace the checkpoints of an earlier training run, including checkpoints in subfolders."""

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from mvrbm.errors import StorageError
from mvrbm.io.atomic import lock, recover_folder
from mvrbm.training.checkpoints.descents import is_descent
from mvrbm.training.checkpoints.runs import all_in
from mvrbm.training.part_folders import is_part

# Name of a folder that was being replaced when its process was killed. See mvrbm.io.atomic.
_FORMER = re.compile(r"\.(.+)\.former")
# Subfolder for the checkpoints of an earlier run, until the run that replaces them has saved a checkpoint.
_EARLIER = ".earlier"
# Name of that subfolder while checkpoints are moved into it or out of it.
_MOVING = ".earlier-moving"


def stored_checkpoints(folder: Path) -> list[Path]:
    """Return the paths to all checkpoints of the training run in a checkpoint folder."""
    _finish_replacement(folder)
    return _all_checkpoints(folder)


def _all_checkpoints(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = all_in(folder)
    if is_descent(folder):
        found.append(folder)
    names = {_FORMER.sub(r"\1", entry.name) for entry in folder.iterdir() if entry.is_dir()}
    for name in sorted(filter(is_part, names)):  # other subfolders may belong to other training runs
        found += _all_checkpoints(recover_folder(folder / name))
    return found


@contextlib.contextmanager
def replace_checkpoints(folder: Path, others: Sequence[str] = ()) -> Iterator[None]:
    """Set the checkpoints of an earlier training run aside while a new run trains in the context.

    When the context exits, the earlier checkpoints are removed if the new run has saved a checkpoint, and put back
    otherwise. If the process is killed, :func:`stored_checkpoints` does this later. Raises StorageError if another
    process is writing checkpoints to the folder.

    Parameters
    ----------
    folder : Path
        Checkpoint folder.
    others : sequence of str
        Names of other files in the folder that belong to the earlier run.
    """
    found = stored_checkpoints(folder)
    if not found:
        yield
        return
    for home in {path.parent for path in found}:
        _check_unused(home)
    try:
        paths = [entry for path in found for entry in (path.iterdir() if path == folder else [path])]
        _move([*paths, *filter(Path.exists, (folder / name for name in others))], folder, folder / _MOVING)
        earlier = (folder / _MOVING).rename(folder / _EARLIER)
    except OSError as error:
        raise StorageError(f"the checkpoints in {folder} cannot be replaced: {error.strerror or error}") from error
    try:
        with lock(earlier):
            yield
    finally:
        _finish_replacement(folder)


def _finish_replacement(folder: Path) -> None:
    """Remove the checkpoints of an earlier run if the new run has saved a checkpoint, and put them back otherwise.

    Does nothing while another process runs :func:`replace_checkpoints` on this folder.
    """
    moving, earlier = folder / _MOVING, folder / _EARLIER
    with contextlib.suppress(BlockingIOError):
        if earlier.is_dir():
            with lock(earlier):
                if _all_checkpoints(folder):
                    shutil.rmtree(earlier)
                else:
                    earlier.rename(moving)
        if moving.is_dir():
            with lock(moving):
                _move([*_all_checkpoints(moving), *filter(Path.is_file, moving.iterdir())], moving, folder)
                shutil.rmtree(moving)


def _move(paths: Sequence[Path], source: Path, target: Path) -> None:
    """Move files and folders in `source` to the same places in `target`."""
    for path in paths:
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)


def _check_unused(home: Path) -> None:
    """Raise StorageError if another process is writing checkpoints to a folder."""
    try:
        with lock(home):
            pass
    except BlockingIOError:
        raise StorageError(f"another process is writing checkpoints to {home}; wait for it to finish") from None
