"""The results of experiment 3: numbers next to the paper's, its claims, figures and the page.

Everything here is made from the stored runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from mvrbm import __version__
from mvrbm.pages import Page, Section, Table
from mvrbm.vision import luminance
from mvrbm.vision.stages import DERIVATIVES, HIGH
from studies.data import PACKAGED
from studies.report import (
    DASH,
    OURS,
    PAPERS,
    RAW,
    Claim,
    Drawing,
    Measured,
    StoredRuns,
    Target,
    bare,
    blank,
    by_key,
    claims,
    draw_all,
    incomplete,
    legend_below,
    mean,
    plain,
    section,
    summary,
    verdict,
    worse,
)
from studies.runs import Store
from studies.superres.plan import GROUPS, Scale, plan
from studies.superres.run import compare, fine_tune, learn, published_protocol

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["CLAIMS", "FIGURES", "METHODS", "PAPER", "PUBLISHED", "TABLE1", "Evidence", "page_of", "results"]

Array = NDArray[Any]


#: The paper's Table 1: PSNR by the side of a patch.
TABLE1 = {10: 35.1621, 15: 35.3227, 20: 35.3555, 30: 35.3606, 35: 35.3564}
#: The paper's two comparisons, by image and method.
PAPER: dict[str, dict[str, dict[str, float]]] = {
    "lena": {
        "bicubic": {"rmse": 5.0134, "psnr": 34.1282},
        "sparse": {"rmse": 4.0900, "psnr": 35.8963, "seconds": 679.529},
        "cd": {"rmse": 4.3804, "psnr": 35.3006, "seconds": 36.116},
    },
    "bird": {
        "bicubic": {"rmse": 4.7932, "psnr": 34.5184},
        "sparse": {"rmse": 3.7975, "psnr": 36.5409, "seconds": 748.225},
        "cd": {"rmse": 3.9459, "psnr": 36.2514, "seconds": 35.196},
    },
}
#: Mean PSNR on Set5 at scale 2, as published.
PUBLISHED = {"bicubic": 33.66, "A+": 36.54, "SRCNN": 36.66}

#: Titles of the methods, in the order of the tables.
METHODS = {
    "bicubic": "bicubic",
    "sparse": "sparse representation",
    "cd-plain": "MMVRBM, CD-1, without back-projection",
    "cd": "MMVRBM, CD-1",
    "tuned": "MMVRBM, fine-tuned",
    "tuned-ensemble": "the same, self-ensemble",
    "shipped": "MMVRBM, shipped weights",
    "shipped-ensemble": "the same, self-ensemble",
}


class Evidence(StoredRuns):
    """The numbers of the stored runs."""

    def __init__(self, store: Store, scale: Scale, *, seeds: int, first_seed: int = 0) -> None:
        super().__init__(store, plan(scale, list(GROUPS), seeds=seeds, first_seed=first_seed))
        self.scale = scale

    def learned(self, patch: int, hidden: int) -> dict[str, Measured]:
        """Return the numbers of the machines of one size trained by CD-1, with names joined by dots."""
        size = {"patch": patch, "hidden_shape": (hidden, hidden)}
        runs = [
            numbers
            for run, numbers in self.found(learn)
            if all(run.settings["model"][key] == value for key, value in size.items())
        ]
        return by_key(runs)

    def compared(self, image: str) -> dict[str, Measured]:
        """Return the numbers of all methods on one image."""
        return by_key([numbers["methods"] for _, numbers in self.found(compare, image=image)])

    def published(self) -> dict[str, Measured]:
        """Return the numbers of all methods in the literature's protocol."""
        return by_key([numbers["methods"] for _, numbers in self.found(published_protocol)])

    def tuned(self) -> dict[str, Measured]:
        """Return the numbers of the fine-tuned machines, ``before.*`` and ``after.*`` fine-tuning."""
        return by_key([numbers for _, numbers in self.found(fine_tune)])

    def times_faster(self, method: str) -> Measured | None:
        """Return how many times faster a method is than sparse representation on the first image."""
        numbers = self.compared(self.scale.compared[0])
        ours = numbers.get(f"{method}.seconds")
        theirs = numbers.get("sparse.seconds")
        if ours is None or theirs is None:
            return None
        return Measured(tuple(slow / fast for slow, fast in zip(theirs.values, ours.values, strict=True)))

    @property
    def is_set5(self) -> bool:
        """Whether the test images are those of Set5."""
        return len(self.scale.published) == 5

    @property
    def by_patch(self) -> dict[int, dict[str, Measured]]:
        """Numbers by patch size."""
        return _there({patch: self.learned(patch, self.scale.hidden) for patch in self.scale.patches})

    @property
    def by_hidden(self) -> dict[int, dict[str, Measured]]:
        """Numbers by hidden size."""
        return _there({hidden: self.learned(self.scale.patch, hidden) for hidden in self.scale.hiddens})


def _there(found: dict[int, dict[str, Measured]]) -> dict[int, dict[str, Measured]]:
    return {size: numbers for size, numbers in found.items() if "with.psnr" in numbers}


# -- next to the paper ------------------------------------------------------------------------------


def targets(evidence: Evidence) -> list[Target]:
    """Return our numbers next to the paper's numbers and to our goals."""
    name = evidence.scale.compared[0]
    first = evidence.compared(name)
    many = evidence.published()
    paper = PAPER["lena"]
    title = name.capitalize()
    decibels: dict[str, Any] = {"lower": False, "unit": "dB", "digits": 3}
    found = []
    for key, ours, wanted in (
        ("bicubic", paper["bicubic"]["psnr"], 34.127),
        ("cd", paper["cd"]["psnr"], 35.30),
        ("cd-plain", paper["cd"]["psnr"], None),
        ("sparse", paper["sparse"]["psnr"], 35.6),
        ("tuned", None, 36.0),
        ("tuned-ensemble", None, None),
        ("shipped", None, None),
    ):
        method = METHODS[key] if key != "tuned-ensemble" else "MMVRBM, fine-tuned, self-ensemble"
        found.append(Target(f"{name}-{key}", f"{title}, {method}", ours, wanted, first.get(f"{key}.psnr"), **decibels))
    for key, wanted in (("bicubic", 33.62), ("cd", None), ("tuned", 36.5), ("tuned-ensemble", None), ("shipped", 36.3)):
        method = METHODS[key] if key != "tuned-ensemble" else "MMVRBM, fine-tuned, self-ensemble"
        what = f"{'Set5' if evidence.is_set5 else 'test images'}, literature's protocol, {method}"
        found.append(Target(f"set5-{key}", what, None, wanted, many.get(f"{key}.psnr"), **decibels))
    faster = paper["sparse"]["seconds"] / paper["cd"]["seconds"]
    for key in ("cd", "tuned", "shipped"):
        what = f"{title}: times faster than sparse representation, {METHODS[key]}"
        given = faster if key == "cd" else None
        found.append(Target(f"faster-{key}", what, given, 40.0, evidence.times_faster(key), lower=False, digits=0))
    what = f"{title}: seconds, {METHODS['shipped']}"
    seconds = first.get("shipped.seconds")
    found.append(Target("seconds-shipped", what, None, 1.0, seconds, unit="s", digits=2))
    return found


# -- claims of the paper ----------------------------------------------------------------------------


def _against(method: str, holds: Callable[[float], bool]) -> Callable[[Evidence], tuple[bool, str] | None]:
    """Return a test of the gain of CD-1 over another method, in dB, on every compared image."""

    def test(evidence: Evidence) -> tuple[bool, str] | None:
        lines, gains = [], []
        for image in evidence.scale.compared:
            numbers = evidence.compared(image)
            if numbers:
                ours = numbers["cd.psnr"].mean
                theirs = numbers[f"{method}.psnr"].mean
                gains.append(ours - theirs)
                lines.append(f"{image}: {ours:.2f} against {theirs:.2f} dB")
        return (all(map(holds, gains)), "; ".join(lines)) if lines else None

    return test


def _faster(evidence: Evidence) -> tuple[bool, str] | None:
    times = evidence.times_faster("cd")
    return None if times is None else (times.mean >= 19, f"{times.mean:.0f} times as fast")


def _best(found: Mapping[int, Mapping[str, Measured]], size: int, what: str) -> tuple[bool, str] | None:
    curve = {each: numbers["with.psnr"].mean for each, numbers in found.items()}
    if size not in curve or len(curve) < 3:
        return None
    text = ", ".join(f"{psnr:.2f} dB at {each}" for each, psnr in curve.items())
    return max(curve, key=lambda each: curve[each]) == size, f"{what}: {text}"


def _claim(key: str, says: str, test: Callable[[Evidence], tuple[bool, str] | None], reason: str = "") -> Claim:
    return Claim(key, says, cast("Any", test), reason)


CLAIMS: tuple[Claim, ...] = (
    _claim(
        "superres-bicubic",
        "The MMVRBM is much better than bicubic interpolation (4.3).",
        _against("bicubic", lambda gain: gain > 0),
    ),
    _claim(
        "superres-sparse",
        "It is slightly inferior to sparse representation (4.3). Tested: by less than 1 dB.",
        _against("sparse", lambda gain: -1 < gain < 0),
        "The two are so close that the number of atoms and the training images decide.",
    ),
    _claim(
        "superres-faster",
        "It is much faster than sparse representation (4.3): 19 times.",
        _faster,
        "With few atoms, small images or little overlap of patches, the lasso has little to do.",
    ),
    _claim(
        "superres-patch",
        "Patches of 30 x 30 are best (Table 1).",
        lambda evidence: _best(evidence.by_patch, 30, "with back-projection"),
        "The paper does not say how patches overlap, nor how they are scaled. A bilinear map of a large patch has as "
        "few filters as one of a small patch, and they have to explain more.",
    ),
    _claim(
        "superres-hidden",
        "A hidden layer of 20 x 20 gives better results than other sizes (4.3).",
        lambda evidence: _best(evidence.by_hidden, 20, f"patches of {evidence.scale.patch}"),
        "Beyond some size the curve is flat, and the best size depends on the random patches.",
    ),
)


# -- results.json -----------------------------------------------------------------------------------


def results(evidence: Evidence) -> dict[str, Any]:
    """Return all results as plain values."""
    comparable = evidence.scale.compared[0] == "lena"
    return {
        **summary(evidence, targets(evidence), CLAIMS, comparable=comparable),
        "patch_size": {
            str(size): {"paper": TABLE1.get(size), **plain(numbers)} for size, numbers in evidence.by_patch.items()
        },
        "hidden_size": {str(size): plain(numbers) for size, numbers in evidence.by_hidden.items()},
        "comparison": {image: plain(evidence.compared(image)) for image in evidence.scale.compared},
        "set5": plain(evidence.published()),
        "fine_tuning": plain(evidence.tuned()),
    }


# -- figures ----------------------------------------------------------------------------------------

_WITHOUT = "#3a9460"
# Small images per row and column of a figure.
_SIDE = 6
_SHOWN_METHODS = ("bicubic", "sparse", "cd", "tuned", "shipped")
# Ratio of the side of an image to the side of its magnified part.
_ZOOM = 6


def _sheet(images: Array) -> Array:
    """Arrange small images (n, h, w) in a square with transparent gaps."""
    padded = np.pad(images[: _SIDE**2].astype(np.float64), ((0, 0), (0, 2), (0, 2)), constant_values=np.nan)
    rows = [np.concatenate(list(padded[first : first + _SIDE]), 1) for first in range(0, len(padded), _SIDE)]
    width = max(row.shape[1] for row in rows)
    full = [np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=np.nan) for row in rows]
    return np.concatenate(full)[:-2, :-2]


def draw_patches_and_filters(evidence: Evidence) -> Drawing | None:
    """Draw training patches, and the strongest learned filters of X and of the derivatives."""
    size = evidence.scale.patch
    runs = [
        run
        for run, numbers in evidence.found(learn)
        if run.settings["model"]["patch"] == size
        and run.settings["model"]["hidden_shape"][0] == evidence.scale.hidden
        and "diverged" not in numbers
    ]
    if not runs:
        return None
    machine = evidence.store.machine(runs[0])
    patches = evidence.store.arrays(runs[0])["patches"].numpy()
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


def draw_sizes(evidence: Evidence) -> Drawing | None:
    """Draw the PSNR against the size of patches and against the size of the hidden layer."""
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
    """Return top, left and side of the square where bicubic interpolation has the largest error."""
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
    runs = evidence.found(compare, image=image)
    if not runs:
        return None
    arrays = {name: array.numpy() for name, array in evidence.store.arrays(runs[0][0]).items()}
    numbers = evidence.compared(image)
    shown = [name for name in _SHOWN_METHODS if name in arrays]
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


def draw_first_image(evidence: Evidence) -> Drawing | None:
    """Draw Lena, or the image in its place."""
    return _side_by_side(evidence, evidence.scale.compared[0], "The counterpart of the paper's Figure 6.")


def draw_second_image(evidence: Evidence) -> Drawing | None:
    """Draw the bird, or the image in its place."""
    about = "In the place of the paper's Bird (Figure 7), which is another image, so numbers are not comparable."
    return _side_by_side(evidence, evidence.scale.compared[1], about)


#: All figures by name.
FIGURES: dict[str, Callable[[Evidence], Drawing | None]] = {
    "superres-patches": draw_patches_and_filters,
    "superres-sizes": draw_sizes,
    "superres-lena": draw_first_image,
    "superres-bird": draw_second_image,
}


# -- the page ---------------------------------------------------------------------------------------


def page_of(found: Mapping[str, Any], evidence: Evidence, folder: Path, scale_name: str) -> Page:
    """Return the page of experiment 3, and save its figures in a folder."""
    scale = evidence.scale
    figures = draw_all(folder, FIGURES, evidence)
    first, second = (name.capitalize() for name in scale.compared)
    lead = "Super-resolution of photographs by a factor of two (section 4.3 of the paper): its numbers and ours."
    if not found["comparable_with_the_paper"]:
        lead += (
            f" This is a quick run on crops of other photographs ({first}, {second}): it shows that everything works,"
            " but its numbers are not to be compared with the paper's."
        )
    sections = [
        Section("Numbers", worse(found), [_numbers_table(found)]),
        Section("Claims of the paper", claims(found)),
        section("Patches and filters", figures, ["superres-patches"], []),
        section("Sizes", figures, ["superres-sizes"], [*_by_patch_tables(evidence), *_by_hidden_tables(evidence)]),
        section(first, figures, ["superres-lena"], _compared_tables(evidence, 0)),
        section(second, figures, ["superres-bird"], _compared_tables(evidence, 1)),
        section("In the literature's protocol", figures, [], _published_tables(evidence)),
        section("Effect of fine-tuning on the model of patches", figures, [], _tuning_tables(evidence)),
        Section("How this was made", _about(found, scale_name)),
    ]
    return Page(
        title="Experiment 3: the paper's numbers and ours",
        lead=lead + incomplete(found),
        sections=[section for section in sections if section is not None],
        footer=f"mvrbm {__version__}.",
    )


def _numbers_table(found: Mapping[str, Any]) -> Table:
    rows = []
    for row in found["numbers"]:
        decimals = row["decimals"]
        unit = f" {row['unit']}" if row["unit"] else ""
        sign = "at most" if row["lower_is_better"] else "at least"
        rows.append(
            [
                row["title"],
                DASH if row["paper"] is None else f"{row['paper']:.{min(4, decimals + 1)}f}",
                mean(row["ours"], decimals) + (unit if row["ours"] else ""),
                f"{row['difference']:+.{decimals}f}" if "difference" in row else DASH,
                DASH if row["wanted"] is None else f"{sign} {row['wanted']:g}{unit}",
                verdict(row),
            ]
        )
    caption = (
        "Means over random choices of patches ± half the width of their 95% interval (number of choices). In the "
        "paper's protocol RGB is reduced and enlarged, and luminance compared up to the border; in the "
        "literature's luminance alone is reduced and enlarged, and the border shaved."
    )
    return Table(["", "paper", "ours", "difference", "wanted", "verdict"], rows, caption)


def _sizes_tables(found: Mapping[int, Mapping[str, Any]], header: str, paper: Mapping[int, float]) -> list[Table]:
    rows = [
        [
            f"{size} x {size}",
            *([f"{paper[size]:.4f}" if size in paper else DASH] if paper else []),
            *(mean(numbers[f"{key}.psnr"].plain(), 3) for key in ("with", "without")),
            f"{numbers['parameters'].mean:,.0f}",
            f"{numbers['training_seconds'].mean:.1f} s",
            f"{numbers['seconds'].mean:.2f} s",
        ]
        for size, numbers in found.items()
    ]
    columns = [header, *(["paper"] if paper else []), "with back-projection", "without"]
    columns += ["parameters", "training", "enlarging"]
    return [Table(columns, rows, "PSNR in dB, the paper's protocol, CD-1 alone.")] if rows else []


def _by_patch_tables(evidence: Evidence) -> list[Table]:
    return _sizes_tables(evidence.by_patch, "patch", TABLE1)


def _by_hidden_tables(evidence: Evidence) -> list[Table]:
    return _sizes_tables(evidence.by_hidden, "hidden layer", {})


def _compared_tables(evidence: Evidence, which: int) -> list[Table]:
    """Return the error and seconds of every method on one image, next to the paper's."""
    image = evidence.scale.compared[which]
    role = ("lena", "bird")[which]
    numbers = evidence.compared(image)
    paper = PAPER[role]
    rows = []
    for key, title in METHODS.items():
        if f"{key}.psnr" not in numbers:
            continue
        theirs = paper.get(key, {})
        rows.append(
            [
                title,
                *(_number(theirs.get(name), 4) for name in ("rmse", "psnr")),
                _number(theirs.get("seconds"), 1),
                *(f"{numbers[f'{key}.{name}'].mean:.{digits}f}" for name, digits in _SHOWN_MEASURES.items()),
            ]
        )
    header = ["", "paper: RMSE", "PSNR", "seconds", "ours: RMSE", "PSNR", "SSIM", "seconds"]
    caption = "The paper's protocol. All methods ran on one computer, with the same number of threads or processes."
    if image != "lena":
        caption += f" {image.capitalize()} is not the paper's image: its numbers are not comparable with the paper's."
    if evidence.scale.train == PACKAGED:
        caption += " The shipped weights were trained on this photograph, among others."
    return [Table(header, rows, caption)] if rows else []


_SHOWN_MEASURES = {"rmse": 4, "psnr": 4, "ssim": 4, "seconds": 2}


def _number(value: float | None, decimals: int) -> str:
    return DASH if value is None else f"{value:.{decimals}f}"


def _published_tables(evidence: Evidence) -> list[Table]:
    numbers = evidence.published()
    images = evidence.scale.published
    rows = [
        [
            title,
            *(f"{numbers[f'{key}.images.{image}.psnr'].mean:.2f}" for image in images),
            f"{numbers[f'{key}.psnr'].mean:.3f}",
            f"{numbers[f'{key}.ssim'].mean:.4f}",
        ]
        for key, title in METHODS.items()
        if f"{key}.psnr" in numbers
    ]
    if rows and evidence.is_set5:
        rows += [[f"{name}, as published", *[DASH] * 5, f"{psnr:.2f}", DASH] for name, psnr in PUBLISHED.items()]
    header = ["PSNR, dB", *images, "mean", "mean SSIM"]
    which = "Set5" if evidence.is_set5 else "The same photographs"
    return [Table(header, rows, f"{which}; luminance alone, border of two pixels shaved.")] if rows else []


def _tuning_tables(evidence: Evidence) -> list[Table]:
    """Compare the machine as a generative model before and after fine-tuning."""
    numbers = evidence.tuned()
    if not numbers:
        return []
    rows = [
        [title, *(f"{numbers[f'{when}.{key}'].mean:.{digits}f}" for when in ("before", "after"))]
        for key, (title, digits) in _GENERATIVE.items()
    ]
    caption = (
        "Patches of photographs that were not used for training; chains of 200 Gibbs steps start at them. In these "
        f"patches X has a standard deviation of {numbers['after.layers.X.data.std'].mean:.3f}, Z1 of "
        f"{numbers['after.layers.Z1.data.std'].mean:.3f}."
    )
    return [Table(["", "CD-1 alone", "fine-tuned"], rows, caption)]


_GENERATIVE = {
    "free_energy_gap": ("free energy of unseen patches minus that of seen ones, nats", 2),
    "mismatch_gap": ("increase of the free energy if X is taken from another patch, nats", 2),
    "matched": ("share of patches for which it increases", 3),
    "inferred_correlation": ("correlation of X with its mean given Z", 3),
    "layers.X.chains.std": ("standard deviation of X in the chains", 3),
    "layers.Z1.chains.std": ("standard deviation of Z1 in the chains", 3),
    "layers.X.chains.neighbors": ("correlation of neighbors of X in the chains", 3),
}


def _about(found: Mapping[str, Any], scale_name: str) -> list[str]:
    return [
        f"Scale {scale_name}: {found['runs']['stored']} runs, {found['seconds']:,.0f} s of work in total.",
        f"Machines: {'; '.join(found['machines'])}.",
        f"Command: python -m studies superres --scale {scale_name} --seeds {found['seeds']} --out DIR. All numbers are "
        "in results.json, every figure as PNG and SVG in figures/, every run in runs/.",
    ]
