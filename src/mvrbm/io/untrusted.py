"""Files that others wrote: only regular files are opened, and a budget limits what reading them may take.

A file of a few bytes can describe gigabytes, and a named pipe or a device never ends. Readers therefore call
:func:`check_regular_file` before they open anything, and :meth:`Budget.spend` before they allocate or compute.
"""

import os
import stat
import time
from pathlib import Path

from mvrbm.errors import InputError

__all__ = ["ALLOWANCE", "Budget", "check_regular_file"]

#: Bytes that reading may allocate however small a file is, and how many times its size in addition.
ALLOWANCE, _TIMES = 64 * 2**20, 4
# Seconds of processor time that reading may take however small a file is, and bytes per second in addition.
_SECONDS, _BYTES_PER_SECOND = 5.0, 10 * 2**20


def check_regular_file(path: str | os.PathLike[str], error: type[Exception] = InputError) -> int:
    """Return the size of a regular file, or raise `error` if something else is there: a pipe, a device, a folder.

    Nothing is opened: to open a named pipe would wait for another process, and to open a device can have effects.
    """
    path = Path(path)
    try:
        found = path.stat()
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror or problem}") from problem
    except ValueError:  # a null character
        raise error(f"{str(path)!r} is not the name of a file") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise error(f"{path} is {kind}: name a regular file")
    return found.st_size


class Budget:
    """Memory and time that reading some files may take: 64 MiB and four times their size, and 5 s or, if large, more.

    Parameters
    ----------
    *paths : path
        The files. Missing files count nothing.
    error : type of Exception
        What :meth:`spend` raises.
    """

    def __init__(self, *paths: Path, error: type[Exception] = InputError) -> None:
        size = sum(check_regular_file(path, error) for path in paths if path.exists())
        self.n_bytes, self.seconds = ALLOWANCE + _TIMES * size, _SECONDS + size / _BYTES_PER_SECOND
        self._paths, self._error = paths, error
        self._left, self._began = self.n_bytes, time.thread_time()  # without the time that a slow disk takes

    def spend(self, n_bytes: int, what: str) -> None:
        """Subtract bytes that are about to be allocated for something; raise `error` if the budget is exceeded."""
        self._left -= n_bytes
        if self._left < 0:
            limit = f"{self.n_bytes / 2**20:,.0f} MiB that files of this size may take"
            raise self._error(f"{what} takes {n_bytes:,} bytes, beyond the limit of {limit}")
        if time.thread_time() - self._began > self.seconds:
            raise self._error(f"reading {self._paths[0]} takes more than {self.seconds:.0f} s: it is not plausible")
