"""Draw the figures of the README and the documentation: four jobs, and digits.

    python -m tools.picture     # writes docs/_static/jobs.png and docs/_static/digits.png in two minutes

`jobs.png` shows digits on request, completed digits, patches of a wall with a planted fault and the maps of the outlier
detector, and an enlarged photograph. `digits.png` shows samples, digits on request and completed digits. Apart from the
detector, the models ship with the package. The digits are test digits of MNIST, which `mvrbm data fetch mnist`
downloads. The figures show the first samples, patches and test digits of each class, without any selection.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from skimage.data import brick, rocket

import mvrbm
from mvrbm.io.datasets import load
from mvrbm.vision import SuperResolver, enlarge_image, reduce_image

OUT = Path(__file__).resolve().parent.parent / "docs" / "_static"
# The number of patches of a wall with a fault, the size of a patch, and the number of training patches.
N_FAULTS, PATCH, N_PATCHES = 5, 24, 1000
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
        "draw: digits on request": _sheet(_gray(asked[: 4 * COLUMNS])),
        "fill in: left halves, two completions, truth": _sheet(np.delete(rows, np.s_[COLUMNS : 2 * COLUMNS], 0)),
        "find faults: a wall, and maps": _faults(),
        "enlarge: bicubic and mvrbm": _enlarged(),
    }
    _draw(jobs, "jobs.png", (12, 5.2), rows=2)


def _draw(panels: dict[str, np.ndarray], name: str, size: tuple[float, float], rows: int = 1) -> None:
    figure = Figure(figsize=size, layout="constrained")
    for axis, (title, picture) in zip(figure.subplots(rows, len(panels) // rows).flat, panels.items(), strict=True):
        axis.imshow(picture)
        axis.set_title(title, fontsize=11 + 3 * (rows - 1))
        axis.axis("off")
    figure.savefig(OUT / name, dpi=110)
    print(OUT / name)


def _faults() -> np.ndarray:
    """Return patches of a wall with a scratch above the maps of a detector that has learned the wall without faults."""
    rng = np.random.default_rng(0)
    wall = brick().astype(float)
    half = len(wall) // 2
    train = _patches(wall[:half], N_PATCHES, rng)
    pictures = _patches(wall[half:], N_FAULTS, rng)
    detector = mvrbm.MVRBMOutlierDetector().fit(train)
    y, x = np.mgrid[:PATCH, :PATCH]
    for picture in pictures:
        row, column = rng.uniform(8, PATCH - 8, 2)
        angle = rng.uniform(0, np.pi)
        distance = (y - row) * np.cos(angle) - (x - column) * np.sin(angle)
        picture[(abs(distance) < 0.6) & ((y - row) ** 2 + (x - column) ** 2 < 50)] += train.std()
    maps = np.sqrt(detector.explain(pictures).clip(0))
    maps /= maps.max((1, 2), keepdims=True)
    shown = np.concatenate([_gray((pictures / 255).clip(0, 1)), colormaps["inferno"](maps)[..., :3]])
    return _sheet(shown, N_FAULTS)


def _patches(picture: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Cut random patches (n, PATCH, PATCH)."""
    rows, columns = (rng.integers(0, side - PATCH, n) for side in picture.shape)
    return np.stack([picture[i : i + PATCH, j : j + PATCH] for i, j in zip(rows, columns, strict=True)])


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
    """Arrange square pictures (n, side, side, 3) in rows, separated by gray lines."""
    padded = np.pad(pictures, ((0, 0), (0, 2), (0, 2), (0, 0)), constant_values=0.35)
    side = padded.shape[1]
    grid = padded.reshape(-1, columns, side, side, 3).transpose(0, 2, 1, 3, 4)
    return np.asarray(grid.reshape(-1, columns * side, 3)[:-2, :-2])


if __name__ == "__main__":
    main()
