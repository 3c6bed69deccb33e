"""The figures of experiment 3, drawn from stored cells alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.vision import luminance
from mvrbm.vision.stages import DERIVATIVES, HIGH
from studies.report import OURS, PAPERS, RAW, Drawing, Measured, bare, blank, legend_below
from studies.superres import work
from studies.superres.findings import METHODS, TABLE1, Evidence

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["FIGURES"]

Array = NDArray[Any]

_WITHOUT = "#3a9460"
_SIDE = 6  # small images per row and column
_SHOWN = ("bicubic", "sparse", "cd", "tuned", "shipped")
_ZOOM = 6  # side of the image over side of the crop


def _sheet(images: Array) -> Array:
    """Arrange small images (n, h, w) on a square, with gaps that are not drawn."""
    padded = np.pad(images[: _SIDE**2].astype(np.float64), ((0, 0), (0, 2), (0, 2)), constant_values=np.nan)
    rows = [np.concatenate(list(padded[first : first + _SIDE]), 1) for first in range(0, len(padded), _SIDE)]
    width = max(row.shape[1] for row in rows)
    full = [np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=np.nan) for row in rows]
    return np.concatenate(full)[:-2, :-2]


def patches_and_filters(evidence: Evidence) -> Drawing | None:
    """Training patches, and the strongest learned filters of X and of the derivatives."""
    size = evidence.scale.patch
    cells = [
        cell
        for cell, numbers in evidence.found(work.learn)
        if cell.settings["model"]["patch"] == size
        and cell.settings["model"]["hidden_shape"][0] == evidence.scale.hidden
        and "diverged" not in numbers
    ]
    if not cells:
        return None
    machine = evidence.store.machine(cells[0])
    patches = evidence.store.arrays(cells[0])["patches"].numpy()
    names = dict(zip((HIGH, *DERIVATIVES[:2]), ("filters of X", "filters of Z1 (x)", "filters of Z2 (y)"), strict=True))
    canvas = blank(12.8, 3.4)
    canvas.set_layout_engine("constrained", wspace=0.04)
    axes = canvas.subplots(1, 4)
    axes[0].imshow(_sheet(patches), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes[0].set_title("patches")
    filters = {name: machine.links[name].dense().detach().numpy().reshape(-1, size, size) for name in names}
    strongest = np.argsort(-np.linalg.norm(filters[HIGH], axis=(1, 2)), kind="stable")[: _SIDE**2]
    for ax, (name, title) in zip(axes[1:], names.items(), strict=True):
        each = filters[name][strongest]
        each = each / np.abs(each).max((1, 2), keepdims=True)
        ax.imshow(_sheet(each), cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
        ax.set_title(title)
    for ax in axes:
        bare(ax)
    return Drawing(
        canvas,
        "Patches of photographs, and learned filters: products of stripes along the two axes",
        f"Luminance of training patches of {size} x {size} pixels, and learned filters, outer products of rows of U "
        "and V: the strongest of X, and those of two of its derivatives for the same hidden units, each scaled by "
        "itself. The counterpart of the paper's Figure 5.",
    )


# -- curves -----------------------------------------------------------------------------------------


def _curve(ax: Axes, found: Mapping[int, Mapping[str, Measured]], key: str, label: str, color: str, mark: str) -> None:
    points = [numbers[key] for numbers in found.values()]
    spread = [one.std or 0.0 for one in points]
    options: dict[str, Any] = {"color": color, "marker": mark, "markersize": 5, "linewidth": 1.5, "capsize": 2.5}
    ax.errorbar(list(found), [one.mean for one in points], yerr=spread, label=label, **options)


def sizes(evidence: Evidence) -> Drawing | None:
    """PSNR against the size of patches, and against that of the hidden layer."""
    scale = evidence.scale
    panels = {"side of a patch": evidence.by_patch, "side of the hidden layer": evidence.by_hidden}
    panels = {title: found for title, found in panels.items() if found}
    if not panels:
        return None
    canvas = blank(5.4 * len(panels), 4.2)
    axes = canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (title, found) in zip(axes, panels.items(), strict=True):
        _curve(ax, found, "with.psnr", "ours, with back-projection", OURS, "o")
        _curve(ax, found, "without.psnr", "ours, without", _WITHOUT, "s")
        ax.axhline(next(iter(found.values()))["bicubic.psnr"].mean, color=RAW, linestyle="--", label="bicubic")
        if found is panels.get("side of a patch") and scale.compared[0] == "lena":
            ax.plot(list(TABLE1), list(TABLE1.values()), "*", color=PAPERS, markersize=9, label="the paper's Table 1")
        ax.set_xlabel(title)
        ax.set_xticks(list(found))
        ax.grid(alpha=0.25)
    axes[0].set_ylabel(f"PSNR of {scale.compared[0].capitalize()}, dB")
    legend_below(canvas, axes, 4)
    return Drawing(
        canvas,
        "PSNR against the side of a patch and against the side of the hidden layer, with and without back-projection",
        f"CD-1 alone, {scale.n_patches:,} patches; hidden {scale.hidden} x {scale.hidden} on the left, patches of "
        f"{scale.patch} x {scale.patch} on the right. Bars: standard deviation over random choices of patches.",
    )


# -- pictures ---------------------------------------------------------------------------------------


def _busiest(truth: Array, bicubic: Array) -> tuple[int, int, int]:
    """Return top, left and side of the square in which bicubic interpolation has the largest error."""
    error = (luminance(truth).astype(np.float64) - luminance(bicubic)) ** 2
    side = min(error.shape) // _ZOOM
    sums = np.pad(error.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    boxes = sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]
    top, left = np.unravel_index(int(boxes.argmax()), boxes.shape)
    return int(top), int(left), side


def _show(ax: Axes, image: Array, **options: Any) -> None:
    ax.imshow(image, cmap="gray" if image.ndim == 2 else None, vmin=0, vmax=255, interpolation="nearest", **options)
    bare(ax)


def _side_by_side(evidence: Evidence, image: str, about: str) -> Drawing | None:
    cells = evidence.found(work.compare, image=image)
    if not cells:
        return None
    arrays = {name: array.numpy() for name, array in evidence.store.arrays(cells[0][0]).items()}
    numbers = evidence.compared(image)
    shown = [name for name in _SHOWN if name in arrays]
    top, left, side = _busiest(arrays["truth"], arrays["bicubic"])
    canvas: Canvas = blank(2.3 * (len(shown) + 1), 5.5)
    axes = canvas.subplots(2, len(shown) + 1)
    for column, name in enumerate(["truth", *shown]):
        _show(axes[0, column], arrays[name])
        _show(axes[1, column], arrays[name][top : top + side, left : left + side])
        axes[0, column].plot(
            [left, left + side, left + side, left, left], [top, top, top + side, top + side, top], color="red"
        )
        psnr = numbers.get(f"{name}.psnr")
        title = METHODS.get(name, "original").replace(", ", ",\n")
        axes[0, column].set_title(title if psnr is None else f"{title}\n{psnr.mean:.2f} dB", fontsize=9)
    rows, columns = arrays["low"].shape[:2]
    return Drawing(
        canvas,
        f"{image}: the original, and enlargements from half the size by {len(shown)} methods, with magnified parts",
        f"{image.capitalize()}, from {columns} x {rows} pixels; below, the part (red) where bicubic interpolation has "
        f"the largest error. {about}",
    )


def first_image(evidence: Evidence) -> Drawing | None:
    """Lena, or the image in its place."""
    return _side_by_side(evidence, evidence.scale.compared[0], "The counterpart of the paper's Figure 6.")


def second_image(evidence: Evidence) -> Drawing | None:
    """The bird, or the image in its place."""
    about = "In the place of the paper's Bird (Figure 7), which is another image: numbers are not comparable."
    return _side_by_side(evidence, evidence.scale.compared[1], about)


#: All figures by name.
FIGURES: dict[str, Callable[[Evidence], Drawing | None]] = {
    "superres-patches": patches_and_filters,
    "superres-sizes": sizes,
    "superres-lena": first_image,
    "superres-bird": second_image,
}
