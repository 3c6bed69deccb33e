"""Larger figures, drawn with matplotlib: saved as PNG and SVG, and put into a page."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvrbm.report.figures import Figure, _escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["as_picture", "save", "styled"]

_DOTS = 150  # an inch


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Draw within in our style."""
    import matplotlib

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "mvrbm",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "figure.facecolor": "white",
    }
    with matplotlib.rc_context(style):
        yield


def save(canvas: Canvas, folder: Path, name: str) -> list[Path]:
    """Write a figure as `name.png` and `name.svg`, the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png", folder / f"{name}.svg"]
    with styled():
        canvas.savefig(paths[0], dpi=_DOTS, metadata={"Software": None})
        canvas.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths


def as_picture(canvas: Canvas, alt: str, caption: str) -> Figure:
    """Put a figure into a page, as a PNG on white."""
    target = io.BytesIO()
    with styled():
        canvas.savefig(target, format="png", dpi=_DOTS, metadata={"Software": None})
    data = base64.b64encode(target.getvalue()).decode()
    width = round(canvas.get_figwidth() * 96)
    html = f'<img src="data:image/png;base64,{data}" alt="{_escape(alt)}" width="{width}">'
    return Figure(html, caption)
