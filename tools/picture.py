"""Draw the figure of the README and the documentation: samples, samples of given digits, and completed digits.

    python -m tools.picture     # writes docs/_static/digits.png in half a minute

The models ship with the package. The completed digits are test digits of MNIST, which `mvrbm data fetch mnist`
downloads. The figure shows the first samples and the first test digit of each class, without any selection.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import mvrbm
from mvrbm.io.datasets import load

OUT = Path(__file__).resolve().parent.parent / "docs" / "_static" / "digits.png"
# Number of pictures per row of a panel.
COLUMNS = 10
# Number of Gibbs steps per sample.
STEPS = 1000
# Color of pixels that the model has filled in.
FILLED = np.array([1.0, 0.72, 0.3])


def main() -> None:
    """Draw three panels side by side."""
    model = mvrbm.load("digits", device="cpu")
    labeled = mvrbm.load("labeled-digits", device="cpu")
    samples = model.sample(5 * COLUMNS, steps=STEPS, mean=True)
    asked, _ = labeled.sample(label=np.tile(np.arange(10), 5), steps=STEPS, mean=True)

    test = load("mnist", split="test")
    first = [int(np.flatnonzero(np.asarray(test.labels) == digit)[0]) for digit in range(10)]
    true = np.round(np.asarray(test.arrays)[first] / 255.0)
    known = np.tile(np.arange(28) < 14, (28, 1))
    start = np.tile(np.where(known, true, 0.0), (3, 1, 1))
    drawn = model.sample(len(start), steps=STEPS, init=start, mask=known, mean=True)
    half = np.where(known, true, 0.25)
    rows = np.concatenate([_gray(half), _colored(drawn, known), _gray(true)])

    figure = Figure(figsize=(12, 2.55), layout="constrained")
    panels = figure.subplots(1, 3)
    titles = ("samples", "samples of 0, 1, ..., 9", "left halves, three completions each, and the truth")
    for panel, title, pictures in zip(panels, titles, (_gray(samples), _gray(asked), rows), strict=True):
        panel.imshow(_sheet(pictures))
        panel.set_title(title, fontsize=11)
        panel.axis("off")
    figure.savefig(OUT, dpi=110)
    print(OUT)


def _gray(pictures: np.ndarray) -> np.ndarray:
    return np.repeat(np.asarray(pictures)[..., None], 3, -1)


def _colored(pictures: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Color the pixels that the model has filled in."""
    return np.where(known[..., None], _gray(pictures), _gray(pictures) * FILLED)


def _sheet(pictures: np.ndarray) -> np.ndarray:
    """Arrange pictures (n, 28, 28, 3) in rows of ten, separated by gray lines."""
    padded = np.pad(pictures, ((0, 0), (0, 2), (0, 2), (0, 0)), constant_values=0.35)
    grid = padded.reshape(-1, COLUMNS, 30, 30, 3).transpose(0, 2, 1, 3, 4)
    return np.asarray(grid.reshape(-1, COLUMNS * 30, 3)[:-2, :-2])


if __name__ == "__main__":
    main()
