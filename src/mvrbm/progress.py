"""Report the progress of long loops to listeners such as progress bars. Without listeners, reports have no effect."""

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["listening", "report"]

#: Callback that receives a unit of work, such as "samples", and the number of units just completed.
Listener = Callable[[str, int], None]

_listeners: list[Listener] = []


def report(unit: str, count: int = 1) -> None:
    """Notify all listeners that `count` units of work (samples, Gibbs steps or epochs) have been completed."""
    for listener in _listeners:
        listener(unit, count)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Context manager that calls `listener` for every report made inside it."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
