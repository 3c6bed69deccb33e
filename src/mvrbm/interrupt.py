"""Handle two termination signals: SIGINT (sent by Ctrl-C) and SIGTERM (sent by job schedulers).

After either signal, training finishes the current batch, saves its results, and raises KeyboardInterrupt (for SIGINT)
or :class:`Terminated` (for SIGTERM).
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

__all__ = [
    "INTERRUPTS",
    "Terminated",
    "exit_code",
    "finish_on_interrupt",
    "hold_signals",
    "replaced",
    "terminate_in_order",
]


class Terminated(SystemExit):
    """Raised after SIGTERM, as KeyboardInterrupt is after Ctrl-C. If it is not caught, the exit code is 143."""

    def __init__(self, code: int = 128 + signal.SIGTERM) -> None:
        super().__init__(code)


#: Exceptions raised after a termination signal.
INTERRUPTS = (KeyboardInterrupt, Terminated)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_code(error: BaseException) -> int:
    """Return the exit code of a program that ends with an exception in `INTERRUPTS`.

    The exit code is 130 after Ctrl-C and 143 after SIGTERM.
    """
    return int(getattr(error, "code", 128 + signal.SIGINT))


def _terminate(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A scheduler and a launcher may both send the signal.
    raise Terminated


def _replaceable() -> dict[signal.Signals, Any]:
    """Return the current signal handlers that can be replaced temporarily, keyed by signal.

    Handlers can be replaced only in the main thread. Handlers that ignore a signal are not replaced, and neither are
    SIGTERM handlers installed by the calling program.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in _SIGNALS}
    return {number: handler for number, handler in found.items() if _may_replace(number, handler)}


def _may_replace(number: int, handler: Any) -> bool:
    ours = handler is signal.SIG_DFL or getattr(handler, "__module__", None) == __name__
    return ours or (number == signal.SIGINT and callable(handler))


@contextlib.contextmanager
def replaced(former: Mapping[signal.Signals, Any], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Install `handler` for all signals in `former`, and restore the former handlers when the context exits."""
    try:
        for number in former:
            signal.signal(number, handler)
        yield
    finally:
        for number, own in former.items():
            signal.signal(number, own)


def terminate_in_order() -> AbstractContextManager[None]:
    """Return a context manager that raises :class:`Terminated` on SIGTERM so that the program can clean up.

    This function is intended for command-line programs. Libraries should not change how a program responds to SIGTERM.
    """
    former = _replaceable()
    former.pop(signal.SIGINT, None)
    return replaced(former, _terminate)


def finish_on_interrupt(notify: Callable[[type[BaseException]], None]) -> AbstractContextManager[None]:
    """Return a context manager that calls `notify` on the first Ctrl-C or SIGTERM instead of ending the program.

    `notify` receives the exception type to raise later. A second Ctrl-C interrupts immediately. A second SIGTERM is
    ignored.
    """
    former = _replaceable()

    def finish(number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            signal.signal(number, former[signal.SIGINT])
            notify(KeyboardInterrupt)
        else:
            if former[signal.SIGTERM] is _terminate:
                former[signal.SIGTERM] = signal.SIG_IGN  # Ignore another SIGTERM while the program saves.
            notify(Terminated)

    return replaced(former, finish)


@contextlib.contextmanager
def hold_signals() -> Iterator[None]:
    """Context manager that defers Ctrl-C and SIGTERM until it exits."""
    received: list[int] = []
    try:
        with replaced(_replaceable(), lambda number, frame: received.append(number)):
            yield
    finally:
        for number in received:
            signal.raise_signal(number)
