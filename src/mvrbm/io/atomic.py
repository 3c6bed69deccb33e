"""Atomic writes: a file or folder is written next to its place and then renamed, so that it is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from mvrbm.errors import InputError, StorageError

__all__ = ["finish_folder", "replace_file", "replace_folder", "usual_mode"]


def usual_mode(mode: int) -> int:
    """Return the permissions that a new file gets from this process, given those asked for: `mode` less the umask."""
    mask = os.umask(0)
    os.umask(mask)
    return mode & ~mask


@contextlib.contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give a binary file to write to, which takes the place of `path` if nothing failed.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
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
    """Give a new folder to write into, which takes the place of `folder` if nothing failed.

    Parameters
    ----------
    folder : path
        The folder to write. It may be missing or empty.
    replaceable : callable
        Tells whether a folder that is not empty may be replaced.

    Raises
    ------
    StorageError
        If the folder cannot be written, or holds files that must not be replaced.
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
