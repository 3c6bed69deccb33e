"""Figures as HTML for a page: PNG for pictures and for matplotlib figures, SVG for simple curves."""

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

_INK = "#010203"  # an otherwise unused color, which is replaced by the text color of the page
_COLORS = ("#2a78c2", "#d1672a", "#3a9460", "#a0508c")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mvrbm",  # the same identifiers, and so the same bytes, every time
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class Figure:
    """A picture as HTML, which includes a description for readers who cannot see it, and its caption."""

    html: str
    caption: str


def image_grid(images: NDArray[Any], alt: str, caption: str, *, columns: int, symmetric: bool = False) -> Figure:
    """Arrange images (n, height, width), with values from 0 (black) to 1 (white), in a grid of some columns.

    `alt` describes the picture for readers who cannot see it. With `symmetric`, each image is scaled by itself, with
    zero at middle gray: for filters.
    """
    from PIL import Image

    values = np.asarray(images, dtype=np.float64)
    if symmetric:
        peak = np.abs(values).max(axis=(1, 2), keepdims=True)
        values = 0.5 + 0.5 * values / np.where(peak > 0, peak, 1)
    n, height, width = values.shape
    gap = max(1, height // 14)
    sheet = np.zeros((-(-n // columns) * (height + gap) - gap, columns * (width + gap) - gap, 2))  # gray and alpha
    for i, image in enumerate(values):
        top, left = (i // columns) * (height + gap), (i % columns) * (width + gap)
        sheet[top : top + height, left : left + width] = np.stack([np.clip(image, 0, 1), np.ones_like(image)], -1)
    picture, target = Image.fromarray(np.round(sheet * 255).astype(np.uint8)), io.BytesIO()
    picture.save(target, "PNG", optimize=True)
    size = f'class="pixels" width="{2 * picture.width}" height="{2 * picture.height}"'
    return Figure(_img(target, alt, size), caption)


def curves(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]], alt: str, caption: str, *, x_label: str, y_label: str
) -> Figure:
    """Draw lines, given as x and y values by name, as an SVG in the colors of the page."""
    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with styled({"font.size": 12, **dict.fromkeys(names, _INK)}):
        canvas = require("matplotlib.figure", "a plot", "demo").Figure(figsize=(5.0, 3.2), layout="constrained")
        axes = canvas.subplots()
        for (name, (x, y)), color, dash in zip(series.items(), _COLORS, ("-", "--", ":", "-."), strict=False):
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
    """Return a context in which matplotlib draws in the style of the reports, with changes."""
    context = require("matplotlib", "a plot", "demo").rc_context({**_STYLE, **(changes or {})})
    return cast("contextlib.AbstractContextManager[None]", context)


def _img(png: io.BytesIO, alt: str, attributes: str) -> str:
    data = base64.b64encode(png.getvalue()).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{html.escape(alt)}" {attributes}>'
