"""Validate output paths before a computation starts, and write files and folders atomically.

Files and folders are written under a temporary name in the same folder and then renamed, so no other process sees a
partially written result. `arrays`, `pictures` and :mod:`mvrbm.saving` produce the contents.

A file is replaced in one step. Replacing an existing folder takes two steps, because no portable call swaps two
folders:

1. rename ``model`` to ``.model.former``,
2. rename the temporary folder to ``model``, and remove ``.model.former``.

Ctrl-C and SIGTERM are deferred until both steps are complete, and an error in the second step undoes the first. If the
process is killed between the steps, ``.model.former`` still contains the complete old folder, and
:func:`recover_folder` renames it back. Every function that loads or saves a folder calls :func:`recover_folder` first.
"""

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from mvrbm.errors import InputError, StorageError
from mvrbm.interrupt import hold_signals

if sys.platform != "win32":
    import fcntl

__all__ = [
    "check_folder",
    "check_output",
    "finish_folder",
    "lock",
    "recover_folder",
    "remove_leftovers",
    "replace_file",
    "replace_folder",
    "usual_mode",
]

# Prefix for the names of temporary files, and part of the names of temporary folders.
_STAGING = ".mvrbm-"
# Age in seconds after which a temporary folder is considered abandoned if the file system does not support locks.
_ABANDONED = 3600.0
# Maximum time in seconds to wait for another process to finish replacing a folder, which usually takes microseconds.
_REPLACING = 1.0
# Polling interval in seconds while another process replaces a folder.
_POLL = 0.01


def check_output(path: str | os.PathLike[str], force: bool = False, suffixes: Sequence[str] = ()) -> Path:
    """Return `path`, or raise InputError if a file cannot be written to this path.

    Parameters
    ----------
    path : path
        Path of the output file.
    force : bool
        Whether an existing file may be replaced.
    suffixes : sequence of str
        Accepted file name suffixes. An empty sequence accepts any suffix.
    """
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        *others, last = suffixes
        raise InputError(f"{path} must end in {', '.join(others)}{' or ' if others else ''}{last}")
    if _exists(path) and path.is_dir():
        raise InputError(f"{path} is a folder; specify a file instead")
    if _exists(path) and not force:
        raise InputError(f"{path} already exists; use force=True to replace it")
    if not path.parent.is_dir():
        what = "is a file" if _exists(path.parent) else "does not exist"
        raise InputError(f"{path} cannot be written because {path.parent} {what}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written because {path.parent} is not writable")
    return path


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Return `folder`, or raise InputError if it cannot be created or written to."""
    folder = Path(folder)
    nearest = next(place for place in (folder, *folder.absolute().parents) if _exists(place))
    if not nearest.is_dir():
        raise InputError(f"{folder} cannot be used as a folder because {nearest} is a file")
    if not os.access(nearest, os.W_OK):
        raise InputError(f"{folder} cannot be written because {nearest} is not writable")
    return folder


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error
    return True


def usual_mode(mode: int) -> int:
    """Return the permission bits of a new file, which are `mode` without the bits set in the umask."""
    mask = os.umask(0)
    os.umask(mask)
    return mode & ~mask


@contextlib.contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary binary file that replaces `path` if the context exits without an error.

    If `path` is a symbolic link, the file that it points to is replaced.
    """
    path = Path(path)
    target = _follow_link(path)
    try:
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            raise InputError(f"{path} cannot be written because it is not a regular file")
        staging = ""
        try:
            with hold_signals():  # An interrupt after the file was created must not skip its removal.
                handle, staging = tempfile.mkstemp(prefix=_STAGING, dir=target.parent)
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(staging, usual_mode(0o666))
            os.replace(staging, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staging)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


def _follow_link(path: Path) -> Path:
    """Return the target of a symbolic link, even if the target does not exist. Return other paths unchanged."""
    return path.resolve() if path.is_symlink() else path


@contextlib.contextmanager
def replace_folder(folder: str | os.PathLike[str], replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """Create a temporary folder that replaces `folder` if the context exits without an error.

    If `folder` is a symbolic link, the folder that it points to is replaced. Raises StorageError if `folder` cannot be
    written to, or if it is not empty and `replaceable` returns False for it.
    """
    if "\0" in os.fspath(folder):
        raise StorageError(f"{os.fspath(folder)!r} is not a valid folder name")
    target = _follow_link(recover_folder(Path(folder)))
    if target.exists() and not target.is_dir():
        raise StorageError(f"{target} is a file; specify a folder instead")
    if target.is_dir() and any(target.iterdir()) and not replaceable(target):
        raise StorageError(f"{target} contains files that are not part of a model; choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(_former(target), ignore_errors=True)
        remove_leftovers(target.parent, f".{target.name}{_STAGING}")
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error
    staging = None
    try:
        with hold_signals():  # An interrupt after the folder was created must not skip its removal.
            staging = Path(tempfile.mkdtemp(prefix=f".{target.name}{_STAGING}", dir=target.parent))
        with lock(staging):
            yield staging
            finish_folder(staging)
            with hold_signals():
                _move_into_place(staging, target)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{target} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)


def _move_into_place(staging: Path, target: Path) -> None:
    """Rename a finished folder to `target`. If `target` exists, this takes two steps (see the module docstring)."""
    former = _former(target)
    replaces = target.exists()
    if replaces:
        target.rename(former)
    try:
        staging.rename(target)
    except BaseException:
        if replaces and not target.exists():
            former.rename(target)
        raise
    _flush(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def _former(target: Path) -> Path:
    """Return the temporary path of the old folder while `target` is being replaced."""
    return target.parent / f".{target.name}.former"


def recover_folder(folder: Path) -> Path:
    """Restore `folder` if a process was killed while replacing it, and return `folder`.

    Before restoring the folder, wait for a short time in case another process is still replacing it.
    """
    with contextlib.suppress(OSError, ValueError):
        target = _follow_link(folder)
        deadline = time.monotonic() + _REPLACING
        while not target.exists() and _former(target).exists():
            if time.monotonic() > deadline:
                _former(target).rename(target)
            time.sleep(_POLL)
    return folder


def remove_leftovers(home: Path, prefix: str) -> None:
    """Remove temporary folders that killed processes left in `home`. Their names start with `prefix`."""
    for folder in home.iterdir():
        if folder.name.startswith(prefix):
            with contextlib.suppress(OSError), lock(folder) as locked:
                if locked or time.time() - folder.stat().st_mtime > _ABANDONED:
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Context manager that locks a folder, or raises BlockingIOError if another process has locked it.

    Yields True if the folder is locked, or False if the platform or the file system does not support locks. The
    operating system releases the lock when the process ends, even if the process is killed.
    """
    if sys.platform == "win32":
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    locked = True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # The file system does not support locks.
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def finish_folder(folder: Path) -> None:
    """Set default permissions on a folder and its files, and flush the folder and the files to disk."""
    folder.chmod(usual_mode(0o777))
    for file in folder.iterdir():
        file.chmod(usual_mode(0o666))
    for file in [*folder.iterdir(), folder]:
        _flush(file)


def _flush(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot flush folders.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
