"""Protect readers from untrusted files. Only regular files are opened, and memory and CPU time are limited.

A file of a few bytes can describe gigabytes of data, and a named pipe or a device may never end. Readers therefore call
:func:`check_regular_file` before opening a file, and :meth:`Budget.spend` before large allocations.
"""

import os
import stat
import time
from pathlib import Path

from mvrbm.errors import InputError

__all__ = ["ALLOWANCE", "Budget", "check_regular_file"]

#: Number of bytes that may be allocated to read a file of any size.
ALLOWANCE = 64 * 2**20
# Additional memory in bytes that reading may allocate per byte of file size.
_BYTES_PER_BYTE = 4
# CPU time in seconds that reading a file of any size may take.
_SECONDS = 5.0
# Number of bytes of file size for which reading may take one additional second of CPU time.
_BYTES_PER_SECOND = 10 * 2**20


def check_regular_file(path: str | os.PathLike[str], error: type[Exception] = InputError) -> int:
    """Return the size of a regular file in bytes. Raise `error` for any other path (pipe, device, folder, etc.).

    This function does not open the file, because opening a named pipe waits for another process and opening a device
    can have side effects.
    """
    path = Path(path)
    try:
        found = path.stat()
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except ValueError:  # The name contains a null character.
        raise error(f"{str(path)!r} is not a valid file name") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise error(f"{path} is {kind}; specify a regular file instead")
    return found.st_size


class Budget:
    """Memory and CPU time limits for reading files.

    The memory limit is 64 MiB plus four times the total size of the files. The time limit is 5 seconds plus one second
    per 10 MiB of file size.

    Parameters
    ----------
    *paths : path
        Files to read. Files that do not exist count as empty.
    error : type of Exception
        Exception raised by :meth:`spend`.
    """

    def __init__(self, *paths: Path, error: type[Exception] = InputError) -> None:
        size = sum(check_regular_file(path, error) for path in paths if path.exists())
        self.n_bytes = ALLOWANCE + _BYTES_PER_BYTE * size
        self.seconds = _SECONDS + size / _BYTES_PER_SECOND
        self._paths = paths
        self._error = error
        self._left = self.n_bytes
        self._began = time.thread_time()  # CPU time does not include waiting for a slow disk.

    def spend(self, n_bytes: int, what: str) -> None:
        """Count `n_bytes` bytes toward the memory limit. Raise `error` if the memory or time limit is exceeded.

        `what` describes the data in the error message.
        """
        self._left -= n_bytes
        if self._left < 0:
            limit = f"{self.n_bytes / 2**20:,.0f} MiB for files of this size"
            raise self._error(f"{what} requires {n_bytes:,} bytes, which exceeds the limit of {limit}")
        if time.thread_time() - self._began > self.seconds:
            raise self._error(
                f"reading {self._paths[0]} takes more than {self.seconds:.0f} s, which is too long for a file of this "
                "size"
            )
