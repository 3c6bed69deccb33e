"""Terminal progress line for long-running commands."""

import contextlib
import sys
import time
from collections.abc import Iterator

# Seconds before the line first appears.
_DELAY = 2.0
# Seconds between updates of the line.
_INTERVAL = 0.5


@contextlib.contextmanager
def progress_line() -> Iterator[None]:
    """Context manager that shows the number of completed samples, Gibbs steps or epochs if stderr is a terminal."""
    from mvrbm.progress import listening

    line = _Line()
    try:
        with listening(line.add) if sys.stderr.isatty() else contextlib.nullcontext():
            yield
    finally:
        line.erase()


class _Line:
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.shown = self.began
        self.counts: dict[str, int] = {}
        self.width = 0

    def add(self, unit: str, count: int) -> None:
        """Add `count` to the total for `unit` (epochs, for example), and redraw the line if an update is due."""
        self.counts[unit] = self.counts.get(unit, 0) + count
        now = time.monotonic()
        if now - self.shown > (_INTERVAL if self.width else _DELAY):
            counts = ", ".join(f"{number:,} {name}" for name, number in self.counts.items())
            text = f"{counts} in {now - self.began:.0f} s"
            self.shown = now
            self.width = max(self.width, len(text))
            print(f"\r{text:<{self.width}}", end="", file=sys.stderr, flush=True)

    def erase(self) -> None:
        """Remove the line from the terminal."""
        if self.width:
            print(f"\r{'':<{self.width}}\r", end="", file=sys.stderr, flush=True)
