"""Progress of long loops: they report every step, and listeners show it. Without a listener this costs nothing."""

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["listening", "report"]

#: Gets a unit, such as "samples", and how many of them were done.
Listener = Callable[[str, int], None]

_listeners: list[Listener] = []


def report(unit: str, count: int = 1) -> None:
    """Tell all listeners that a number of samples, Gibbs steps or epochs is done."""
    for listener in _listeners:
        listener(unit, count)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener for everything that is reported within the context."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
