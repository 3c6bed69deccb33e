"""Report the progress of long loops to listeners, which display it. Without listeners, reports cost nothing."""

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["listening", "report"]

#: Called with a unit, such as "samples", and the number of units that have been completed.
Listener = Callable[[str, int], None]

_listeners: list[Listener] = []


def report(unit: str, count: int = 1) -> None:
    """Tell all listeners that `count` samples, Gibbs steps or epochs have been completed."""
    for listener in _listeners:
        listener(unit, count)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call a listener for every report within the context."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
