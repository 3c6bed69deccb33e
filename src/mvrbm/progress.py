"""Report the progress of long loops to listeners such as progress bars. Without listeners, reports have no effect."""

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["listening", "remaining_time", "report"]

#: Callback that receives a unit of work, such as "samples", and the number of units just completed.
Listener = Callable[[str, int], None]

_listeners: list[Listener] = []
# Remaining time in seconds below which it is not worth mentioning.
_SHORT = 10.0


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


def remaining_time(seconds: float) -> str:
    """Return a phrase such as ", about 5 min left", or an empty string for less than 10 seconds."""
    if seconds < _SHORT:
        return ""
    if seconds < 120:
        return f", about {seconds:.0f} s left"
    return f", about {seconds / 60:.0f} min left" if seconds < 7200 else f", about {seconds / 3600:.0f} h left"
