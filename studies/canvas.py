"""What the figures of all experiments have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["OURS", "PAPERS", "RAW", "Drawing", "bare", "blank", "legend_below"]

#: Colours.
OURS, PAPERS, RAW = "#2a78c2", "#d1672a", "#777777"


@dataclass(frozen=True)
class Drawing:
    """A figure, and what it shows for readers who do not see it and for those who do."""

    canvas: Canvas
    alt: str
    caption: str


def blank(width: float, height: float) -> Canvas:
    """Return an empty figure, of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def bare(ax: Axes) -> None:
    """Take away ticks and frame."""
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ax.spines.values():
        side.set_visible(False)


def legend_below(canvas: Canvas, axes: Sequence[Axes], columns: int) -> None:
    """Draw one legend for several axes below them."""
    found = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    canvas.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)
