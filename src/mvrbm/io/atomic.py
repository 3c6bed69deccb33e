"""Output files and folders: checks before the work, atomic writes after it.

A file or folder is written next to its place and then renamed, so that it is there whole or not at all.
The contents are the business of `arrays`, `pictures` and :mod:`mvrbm.saving`.
"""

import contextlib
import ctypes
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from mvrbm.errors import InputError, StorageError
from mvrbm.interrupt import hold_signals

if sys.platform != "win32":
    import fcntl

__all__ = [
    "bring_back", "check_folder", "check_output", "finish_folder", "lock", "remove_leftovers", "replace_file",
    "replace_folder", "usual_mode",
]  # fmt: skip

_STAGING = ".mvrbm-"
_HERE = -100  # paths are relative to the working folder (AT_FDCWD)
# Seconds after which a folder that cannot be locked counts as left over.
_ABANDONED = 3600.0


def check_output(path: str | os.PathLike[str], force: bool = False, suffixes: Sequence[str] = ()) -> Path:
    """Raise InputError if a file cannot be written: it exists and not `force`, or has none of the `suffixes`."""
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise InputError(f"{path} should end in one of {' '.join(suffixes)}")
    if _exists(path) and path.is_dir():
        raise InputError(f"{path} is a folder: name a file to write to")
    if _exists(path) and not force:
        raise InputError(f"{path} exists: use --force to replace it")
    if not path.parent.is_dir():
        what = "is a file" if _exists(path.parent) else "does not exist"
        raise InputError(f"{path} cannot be written: {path.parent} {what}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written: no permission to write in {path.parent}")
    return path


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Raise InputError if a folder does not exist and cannot be created."""
    folder = Path(folder)
    place = next(place for place in (folder, *folder.absolute().parents) if _exists(place))
    if not place.is_dir():
        raise InputError(f"{folder} cannot be a folder: {place} is a file")
    if not os.access(place, os.W_OK):
        raise InputError(f"{folder} cannot be written: no permission to write in {place}")
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
    """Return the permissions that this process gives to a new file: `mode` without the bits of the umask."""
    mask = os.umask(0)
    os.umask(mask)
    return mode & ~mask


@contextlib.contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a binary file for writing, which replaces `path` when the context ends without an error.

    A symbolic link stays: the file that it points to is replaced.
    """
    path = Path(path)
    target = _behind_link(path)
    try:
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            raise InputError(f"{path} cannot be written: it is not a regular file")
        handle, staging = tempfile.mkstemp(prefix=_STAGING, dir=target.parent)
        try:
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


def _behind_link(path: Path) -> Path:
    """Return what a symbolic link points to, whether it exists or not; other paths as they are."""
    return path.resolve() if path.is_symlink() else path


@contextlib.contextmanager
def replace_folder(folder: str | os.PathLike[str], replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """Create a folder to write into, which replaces `folder` when the context ends without an error.

    A symbolic link stays: the folder that it points to is replaced. Raises StorageError if `folder` holds files and is
    not `replaceable`, or cannot be written.
    """
    if "\0" in os.fspath(folder):
        raise StorageError(f"{os.fspath(folder)!r} is not the name of a folder")
    target = _behind_link(bring_back(Path(folder)))
    if target.exists() and not target.is_dir():
        raise StorageError(f"{target} is a file: a folder is needed")
    if target.is_dir() and any(target.iterdir()) and not replaceable(target):
        raise StorageError(f"{target} holds other files than a model: choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(_former(target), ignore_errors=True)
        remove_leftovers(target.parent, f".{target.name}{_STAGING}")
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}{_STAGING}", dir=target.parent))
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        with lock(staging):
            yield staging
            finish_folder(staging)
            with hold_signals():
                _move_into_place(staging, target)
                _flush(target.parent)
                shutil.rmtree(staging, ignore_errors=True)  # it may hold the former folder now
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move_into_place(staging: Path, target: Path) -> None:
    """Give the contents of one folder to another name, at which there is a whole folder at any time if possible."""
    if not target.exists():
        staging.rename(target)
    elif not _exchange(staging, target):
        former = _former(target)
        target.rename(former)
        try:
            staging.rename(target)
        except BaseException:
            former.rename(target)
            raise
        shutil.rmtree(former, ignore_errors=True)


def _exchange(left: Path, right: Path) -> bool:
    """Exchange two names in one step, and return False where the file system or the system cannot."""
    library: Any = ctypes.CDLL(None) if os.name == "posix" else None
    names, swap = (os.fsencode(left), os.fsencode(right)), 2  # the flag's value, here and there
    if hasattr(library, "renameat2"):  # Linux
        return bool(library.renameat2(_HERE, names[0], _HERE, names[1], swap) == 0)
    if hasattr(library, "renamex_np"):  # macOS
        return bool(library.renamex_np(*names, swap) == 0)
    return False


def _former(target: Path) -> Path:
    """Return where a folder is while another one takes its place in two steps."""
    return target.parent / f".{target.name}.former"


def bring_back(folder: Path) -> Path:
    """Give a folder its name again, if a process was killed between the two steps of replacing it."""
    if not folder.exists():
        target = _behind_link(folder)
        with contextlib.suppress(OSError, ValueError):
            _former(target).rename(target)
    return folder


def remove_leftovers(home: Path, prefix: str) -> None:
    """Remove folders whose names begin with `prefix`, and that processes which were killed have left in `home`."""
    for folder in home.iterdir():
        if folder.name.startswith(prefix):
            with contextlib.suppress(OSError), lock(folder) as locked:
                if locked or time.time() - folder.stat().st_mtime > _ABANDONED:
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Keep other processes out of a folder: raise BlockingIOError if one has locked it.

    The system removes the lock when the process ends, however it ends. Yields False where there are no such locks.
    """
    if sys.platform == "win32":
        yield False
        return
    descriptor, locked = os.open(folder, os.O_RDONLY), True
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:  # a file system without locks
            locked = False
        yield locked
    finally:
        os.close(descriptor)


def finish_folder(folder: Path) -> None:
    """Flush everything in a folder to the disk, and give it the usual permissions."""
    folder.chmod(usual_mode(0o777))
    for file in folder.iterdir():
        file.chmod(usual_mode(0o666))
    for file in [*folder.iterdir(), folder]:
        _flush(file)


def _flush(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # folders cannot be flushed there
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
