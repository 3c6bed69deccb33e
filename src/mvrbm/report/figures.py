"""Figures as strings that go straight into a page: PNG for pictures, SVG for curves."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Drawn in this colour, which no one would choose, and then told to follow the page's text colour.
_INK = "#010203"
_COLOURS = ("#2a78c2", "#d1672a", "#3a9460", "#a0508c")


@dataclass(frozen=True)
class Figure:
    """A picture with what it shows, for readers who see it and for readers who do not."""

    html: str
    caption: str


def image_grid(images: NDArray[Any], alt: str, caption: str, *, columns: int, symmetric: bool = False) -> Figure:
    """Lay small images out on a grid.

    Parameters
    ----------
    images : array (n, height, width)
        Values from 0 (black) to 1 (white).
    alt, caption : str
        What it shows, without and with seeing it.
    columns : int
        Images a row.
    symmetric : bool
        Scale each image by itself, zero to middle grey: for filters.
    """
    from PIL import Image

    values = np.asarray(images, dtype=np.float64)
    if symmetric:
        peak = np.abs(values).max(axis=(1, 2), keepdims=True)
        values = 0.5 + 0.5 * values / np.where(peak > 0, peak, 1)
    n, height, width = values.shape
    rows = -(-n // columns)
    gap = max(1, height // 14)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 2), 0.0)  # grey and alpha
    for i, image in enumerate(values):
        top, left = (i // columns) * (height + gap), (i % columns) * (width + gap)
        sheet[top : top + height, left : left + width, 0] = np.clip(image, 0, 1)
        sheet[top : top + height, left : left + width, 1] = 1
    picture = Image.fromarray(np.round(sheet * 255).astype(np.uint8))
    target = io.BytesIO()
    picture.save(target, "PNG", optimize=True)
    data = base64.b64encode(target.getvalue()).decode()
    html = (
        f'<img class="pixels" src="data:image/png;base64,{data}" alt="{_escape(alt)}" '
        f'width="{2 * picture.width}" height="{2 * picture.height}">'
    )
    return Figure(html, caption)


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    alt: str,
    caption: str,
    *,
    x_label: str,
    y_label: str,
) -> Figure:
    """Draw lines, each from its name to its x and y values, as an SVG that follows the page's colours."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "mvrbm",
        "font.size": 12,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(style):
        canvas = Canvas(figsize=(5.0, 3.2), layout="constrained")
        axes = canvas.subplots()
        for (name, (x, y)), colour, dash in zip(series.items(), _COLOURS, ("-", "--", ":", "-."), strict=False):
            axes.plot(x, y, dash, label=name, color=colour, linewidth=2)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.25)
        if len(series) > 1:
            axes.legend(frameon=False)
        target = io.StringIO()
        canvas.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = target.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{_escape(alt)}"', 1)
    return Figure(svg, caption)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
