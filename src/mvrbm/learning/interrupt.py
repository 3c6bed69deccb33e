"""Ctrl-C during training: the first one lets the present batch finish, a second one interrupts immediately."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def finish_on_interrupt(notify: Callable[[], None]) -> Iterator[None]:
    """Call `notify` at the first Ctrl-C instead of raising KeyboardInterrupt. Only the main thread gets signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def finish(number: int, frame: Any) -> None:
        notify()
        signal.signal(signal.SIGINT, former)

    former = signal.signal(signal.SIGINT, finish)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
