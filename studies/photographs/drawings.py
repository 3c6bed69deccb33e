"""Drawings to train with next to photographs: lines of text and line art, sharp and without noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

__all__ = ["drawing"]

Array = NDArray[Any]
Colour = tuple[int, ...]

_LARGER = 4  # drawings are made so many times larger, and reduced
_LETTERS = np.array(list("eeeeettttaaaooiiinnnssshhhrrrddlluucmfwygpbvkxqjz"))


def drawing(rng: np.random.Generator, side: int = 192) -> Array:
    """Return a drawing in colour (side, side, 3)."""
    n = side * _LARGER
    light, dark = _colour(rng, 180, 256), _colour(rng, 0, 90)
    back, front = (light, dark) if rng.random() < 0.75 else (dark, light)
    if rng.random() < 0.25:
        back, front = _colour(rng), _colour(rng)
    image = Image.new("RGB", (n, n), back)
    (_write if rng.random() < 0.65 else _draw)(ImageDraw.Draw(image), n, front, rng)
    if rng.random() < 0.5:
        image = image.rotate(float(rng.uniform(-12, 12)), Image.Resampling.BICUBIC, fillcolor=back)
    how = Image.Resampling.BOX if rng.random() < 0.4 else Image.Resampling.BICUBIC
    return np.asarray(image.resize((side, side), how))


def _colour(rng: np.random.Generator, low: int = 0, high: int = 256) -> Colour:
    return tuple(int(value) for value in rng.integers(low, high, 3))


def _write(canvas: ImageDraw.ImageDraw, n: int, front: Colour, rng: np.random.Generator) -> None:
    """Fill a canvas with lines of text, in fonts that come with Matplotlib."""
    files = sorted((Path(mpl.get_data_path()) / "fonts" / "ttf").glob("DejaVuS*.ttf"))
    top, size = int(rng.integers(-20, 20)), 0
    while top < n:
        if size == 0 or rng.random() < 0.15:
            size = int(np.exp(rng.uniform(np.log(9), np.log(42)))) * _LARGER
            font = ImageFont.truetype(str(files[int(rng.integers(len(files)))]), size)
        words = ["".join(rng.choice(_LETTERS, int(rng.integers(1, 9)))) for _ in range(30)]
        line = " ".join(word if rng.random() < 0.85 else str(int(rng.integers(10000))) for word in words)
        canvas.text((-int(rng.integers(0, size)), top), line.title() if rng.random() < 0.3 else line, front, font)
        top += int(size * rng.uniform(1.05, 1.5))


def _draw(canvas: ImageDraw.ImageDraw, n: int, front: Colour, rng: np.random.Generator) -> None:
    """Draw lines, polygons and ellipses."""
    for _ in range(int(rng.integers(8, 30))):
        points = [(int(x), int(y)) for x, y in rng.integers(-n // 8, n + n // 8, (int(rng.integers(2, 6)), 2))]
        width, kind = int(rng.integers(1, 9)) * _LARGER // 2, rng.random()
        if kind < 0.4:
            canvas.line(points, front if rng.random() < 0.5 else _colour(rng), width)
        elif kind < 0.7:
            canvas.polygon(points, _colour(rng), front, width)
        else:
            (left, right), (top, bottom) = (sorted(pair) for pair in zip(*points[:2], strict=True))
            inside = _colour(rng) if rng.random() < 0.5 else None
            canvas.ellipse((left, top, right + 1, bottom + 1), inside, front, width)
