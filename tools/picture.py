"""Draw the figures of the README and the documentation: four jobs, and digits.

    python -m tools.picture     # writes docs/_static/jobs.png and docs/_static/digits.png in two minutes

`jobs.png` shows digits on request, completed digits, threes with a planted defect and the maps of the outlier detector,
and an enlarged photograph. `digits.png` shows samples, digits on request and completed digits. Apart from the detector,
the models ship with the package. The digits are test digits of MNIST, which `mvrbm data fetch mnist` downloads. The
figures show the first samples and the first test digits of each class, without any selection.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from skimage.data import rocket

import mvrbm
from mvrbm.io.datasets import Dataset, load
from mvrbm.vision import SuperResolver, enlarge_image, reduce_image

OUT = Path(__file__).resolve().parent.parent / "docs" / "_static"
# The digit that the outlier detector learns, the number of pictures with a defect, and its size.
NORMAL, N_DEFECTS, DEFECT = 3, 5, 6
# Rows and columns of the photograph to enlarge.
CROP = np.s_[230:302, :96]
# Number of pictures per row of a panel.
COLUMNS = 10
# Number of Gibbs steps per sample.
STEPS = 1000
# Color of pixels that the model has filled in.
FILLED = np.array([1.0, 0.72, 0.3])


def main() -> None:
    """Draw both figures."""
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

    completed = "left halves, three completions each, and the truth"
    panels = {"samples": _gray(samples), "samples of 0, 1, ..., 9": _gray(asked), completed: rows}
    _draw({title: _sheet(pictures) for title, pictures in panels.items()}, "digits.png", (12, 2.55))
    jobs = {
        "draw: digits on request": _sheet(_gray(asked)),
        "fill in: left halves, three completions, truth": _sheet(rows),
        "find defects: pictures and maps": _defects(test),
        "enlarge: bicubic and mvrbm": _enlarged(),
    }
    _draw(jobs, "jobs.png", (12, 4.6), rows=2)


def _draw(panels: dict[str, np.ndarray], name: str, size: tuple[float, float], rows: int = 1) -> None:
    figure = Figure(figsize=size, layout="constrained")
    for axis, (title, picture) in zip(figure.subplots(rows, len(panels) // rows).flat, panels.items(), strict=True):
        axis.imshow(picture)
        axis.set_title(title, fontsize=11)
        axis.axis("off")
    figure.savefig(OUT / name, dpi=110)
    print(OUT / name)


def _defects(test: Dataset) -> np.ndarray:
    """Return pictures in which a square is inverted above the maps of a detector that has learned such pictures."""
    train = load("mnist")
    detector = mvrbm.MVRBMOutlierDetector(random_state=0).fit(train.arrays[train.labels == NORMAL])
    pictures = test.arrays[test.labels == NORMAL][:N_DEFECTS].copy()
    places = np.random.default_rng(0).integers(4, 24 - DEFECT, (N_DEFECTS, 2))
    for picture, (row, column) in zip(pictures, places, strict=True):
        part = picture[row : row + DEFECT, column : column + DEFECT]
        part[:] = 255 - part
    maps = colormaps["inferno"](Normalize(0)(detector.explain(pictures)))[..., :3]
    return _sheet(np.concatenate([_gray(pictures / 255), maps]), N_DEFECTS)


def _enlarged() -> np.ndarray:
    """Return a crop of a photograph that was reduced by 2, enlarged by bicubic interpolation and by the package."""
    small = reduce_image(rocket()[:420, :636], 2)
    both = [enlarge_image(small, 2), SuperResolver.pretrained(scale=2).upscale(small)]
    return np.concatenate([np.pad(picture[CROP], ((0, 0), (0, 2), (0, 0)), constant_values=90) for picture in both], 1)


def _gray(pictures: np.ndarray) -> np.ndarray:
    return np.repeat(np.asarray(pictures)[..., None], 3, -1)


def _colored(pictures: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Color the pixels that the model has filled in."""
    return np.where(known[..., None], _gray(pictures), _gray(pictures) * FILLED)


def _sheet(pictures: np.ndarray, columns: int = COLUMNS) -> np.ndarray:
    """Arrange pictures (n, 28, 28, 3) in rows, separated by gray lines."""
    padded = np.pad(pictures, ((0, 0), (0, 2), (0, 2), (0, 0)), constant_values=0.35)
    grid = padded.reshape(-1, columns, 30, 30, 3).transpose(0, 2, 1, 3, 4)
    return np.asarray(grid.reshape(-1, columns * 30, 3)[:-2, :-2])


if __name__ == "__main__":
    main()
