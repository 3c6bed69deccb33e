"""Create figures for HTML pages: image grids (PNG) and line plots (SVG) in the colors of the page."""

import base64
import contextlib
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mvrbm.extras import require

__all__ = ["Figure", "curves", "image_grid", "styled"]

# Placeholder for the text color of the page. Plots do not use this color for anything else.
_INK = "#010203"
_COLORS = ("#2a78c2", "#d1672a", "#3a9460", "#a0508c")
_DASHES = ("-", "--", ":", "-.")
_TEXT_COLORS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mvrbm",  # makes the SVG reproducible
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class Figure:
    """HTML code of a figure (including alternative text) and its caption."""

    html: str
    caption: str


def image_grid(
    images: NDArray[Any], alt: str, caption: str, *, columns: int, symmetric: bool = False, zoom: int = 2
) -> Figure:
    """Arrange images in a grid.

    Parameters
    ----------
    images : array of shape (n, height, width) or (n, height, width, 3)
        Grayscale or RGB images with values between 0 (black) and 1 (white).
    alt : str
        Alternative text for readers who cannot see the images.
    caption : str
        Caption of the figure.
    columns : int
        Number of columns in the grid.
    symmetric : bool
        Whether to scale each image separately so that zero is displayed as middle gray. Use this option for filters,
        which have positive and negative values.
    zoom : int
        Number of screen pixels per pixel, along each axis.

    Returns
    -------
    Figure
        The grid.
    """
    from PIL import Image

    values = np.asarray(images, dtype=np.float64)
    if symmetric:
        peak = np.abs(values).max(axis=tuple(range(1, values.ndim)), keepdims=True)
        values = 0.5 + 0.5 * values / np.where(peak > 0, peak, 1)
    picture = Image.fromarray(np.round(_arrange(np.clip(values, 0, 1), columns) * 255).astype(np.uint8))
    png = io.BytesIO()
    picture.save(png, "PNG", optimize=True)
    size = f'class="pixels" width="{zoom * picture.width}" height="{zoom * picture.height}"'
    return Figure(_img(png, alt, size), caption)


def _arrange(images: NDArray[Any], columns: int) -> NDArray[Any]:
    """Arrange images in a grid with transparent gaps.

    Returns a three-dimensional array whose last axis contains the gray or color values of a pixel, and alpha.
    """
    values = images.reshape(*images.shape[:3], -1)
    n, height, width, channels = values.shape
    rows = -(-n // columns)
    gap = max(1, height // 14)
    sheet = np.zeros((rows * (height + gap) - gap, columns * (width + gap) - gap, channels + 1))
    for i, image in enumerate(values):
        top = (i // columns) * (height + gap)
        left = (i % columns) * (width + gap)
        sheet[top : top + height, left : left + width, :-1] = image
        sheet[top : top + height, left : left + width, -1] = 1
    return sheet


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], alt: str, caption: str, *, x_label: str, y_label: str
) -> Figure:
    """Plot lines as an SVG figure in the colors of the page.

    Parameters
    ----------
    series : mapping from str to (sequence, sequence)
        Mapping from the name of each line to its x and y values.
    alt : str
        Alternative text for readers who cannot see the plot.
    caption : str
        Caption of the figure.
    x_label, y_label : str
        Axis labels.

    Returns
    -------
    Figure
        The plot.
    """
    with styled({"font.size": 12, **dict.fromkeys(_TEXT_COLORS, _INK)}):
        canvas = require("matplotlib.figure", "a plot", "demo").Figure(figsize=(5.0, 3.2), layout="constrained")
        axes = canvas.subplots()
        for (name, (x, y)), color, dash in zip(series.items(), _COLORS, _DASHES, strict=False):
            axes.plot(x, y, dash, label=name, color=color, linewidth=2)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(alpha=0.25)
        if len(series) > 1:
            axes.legend()
        target = io.StringIO()
        canvas.savefig(target, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = target.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    return Figure(svg.replace("<svg", f'<svg role="img" aria-label="{html.escape(alt)}"', 1), caption)


def styled(changes: Mapping[Any, Any] | None = None) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which matplotlib uses the report style, updated with the settings in `changes`."""
    context = require("matplotlib", "a plot", "demo").rc_context({**_STYLE, **(changes or {})})
    return cast("contextlib.AbstractContextManager[None]", context)


def _img(png: io.BytesIO, alt: str, attributes: str) -> str:
    data = base64.b64encode(png.getvalue()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}" {attributes}>'
