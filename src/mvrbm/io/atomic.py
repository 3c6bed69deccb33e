"""Output files and folders: checks before the work, atomic writes after it.

A file or folder is written next to its place and then renamed, so that it is there whole or not at all.
The contents are the business of `arrays`, `pictures` and :mod:`mvrbm.saving`.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from mvrbm.errors import InputError, StorageError

__all__ = ["check_folder", "check_output", "finish_folder", "replace_file", "replace_folder", "usual_mode"]


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
    """Open a binary file for writing, which replaces `path` when the context ends without an error."""
    path = Path(path)
    try:
        handle, staging = tempfile.mkstemp(prefix=".mvrbm-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(staging, usual_mode(0o666))
            os.replace(staging, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staging)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def replace_folder(folder: str | os.PathLike[str], replaceable: Callable[[Path], bool]) -> Iterator[Path]:
    """Create a folder to write into, which replaces `folder` when the context ends without an error.

    Raises StorageError if `folder` holds files and is not `replaceable`, or cannot be written.
    """
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise StorageError(f"{target} is a file: a folder is needed")
    if target.is_dir() and any(target.iterdir()) and not replaceable(target):
        raise StorageError(f"{target} holds other files than a model: choose another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        yield staging
        finish_folder(staging)
        if target.exists():
            former = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
            try:
                target.rename(former / target.name)
                staging.rename(target)
            except OSError:
                if (former / target.name).exists():
                    (former / target.name).rename(target)
                raise
            finally:
                shutil.rmtree(former, ignore_errors=True)
        else:
            staging.rename(target)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def finish_folder(folder: Path) -> None:
    """Flush everything in a folder to the disk, and give it the usual permissions."""
    folder.chmod(usual_mode(0o777))
    for file in folder.iterdir():
        file.chmod(usual_mode(0o666))
    for file in [*folder.iterdir(), folder]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
