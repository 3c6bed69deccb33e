"""The figures of experiments 1 and 2, drawn from stored cells alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from studies.digits import work
from studies.digits.evidence import TUNED, Evidence
from studies.digits.plan import BATCH, capped, own_epochs
from studies.report import OURS, PAPERS, RAW, Drawing, Measured, bare, blank, legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["FIGURES"]

Array = NDArray[Any]
_COLUMNS = 10
_BLACK = "#111111"
_COLORS = ("#3a9460", "#a0508c", "#b8860b", "#5b5bd6", "#c23b4a", "#2f8f9d")
_MARKS = "sD^vP*X"
_STABLE_AFTER, _LATE = 70, 300
_BARS = "Bars: from the best to the worst random subset."


# -- pictures ---------------------------------------------------------------------------------------


def _rows_of_images(rows: Mapping[str, Array]) -> Canvas:
    """Draw one row of small images per label."""
    count = min(_COLUMNS, *(len(images) for images in rows.values()))
    from matplotlib.figure import Figure

    # In inches, and by hand: automatic layouts ignore the width of the strips.
    left, side, gap = 1.6, 0.75, 0.08
    width, height = left + count * side + gap, len(rows) * (side + gap) + gap
    canvas = Figure(figsize=(width, height))
    for number, (label, images) in enumerate(rows.items()):
        bottom = height - (number + 1) * (side + gap)
        ax = canvas.add_axes((left / width, bottom / height, count * side / width, side / height))
        ax.imshow(_strip(images[:count], 1.0), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        bare(ax)
        ax.set_ylabel(label, rotation=0, ha="right", va="center", labelpad=8)
    return canvas


def _strip(images: Array, gap_value: float) -> Array:
    padded = np.pad(images, ((0, 0), (0, 0), (0, 2)), constant_values=gap_value)
    return np.concatenate(list(padded), axis=1)[:, :-2]


def denoising(evidence: Evidence) -> Drawing | None:
    """Originals, noisy ones, the paper's pass, ours, and the median filter."""
    hidden = evidence.scale.nines_hidden[0]
    cells = [
        cell
        for cell, _ in evidence.found(work.denoise)
        if cell.after[0].settings["recipe"] == "paper" and tuple(cell.after[0].settings["hidden"]) == hidden
    ]
    if not cells:
        return None
    images = {name: array.numpy() for name, array in evidence.store.arrays(cells[0]).items()}
    numbers = evidence.denoising("paper", hidden)
    titles = {
        "clean": "original",
        "noisy": "noisy",
        "one-pass": "paper's pass",
        "mean-field": "our denoiser",
        "median": "3x3 median",
    }
    rows = {}
    for key, title in titles.items():
        psnr = numbers.get(f"psnr.{key}.psnr")
        rows[title if psnr is None else f"{title}\n{psnr.mean:.1f} dB"] = images[key]
    return Drawing(
        _rows_of_images(rows),
        "Nines: original, with black and white speckles, and denoised by three methods",
        f"Test nines with 10 % salt and pepper, hidden {hidden[0]}x{hidden[1]}, the paper's recipe. The numbers are "
        "means over all test nines and subsets. The counterpart of the paper's Figure 1.",
    )


def filters(evidence: Evidence) -> Drawing | None:
    """The strongest filters of the paper's recipe and of ours."""
    panels = {}
    for recipe, title in (("paper", "paper's recipe"), ("default", "our recipe")):
        cells = evidence.found(work.reconstruct, model="mvrbm", recipe=recipe)
        if cells and "diverged" not in cells[0][1]:
            panels[title, recipe] = evidence.store.machine(cells[0][0])
    if not panels:
        return None
    canvas = blank(4.3 * len(panels), 4.6)
    for ax, ((title, recipe), machine) in zip(
        canvas.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        (link,) = machine.links.values()
        rows, columns = link.visible_shape
        each = link.dense().detach().numpy().reshape(-1, rows, columns)
        strongest = np.argsort(-np.linalg.norm(each, axis=(1, 2)), kind="stable")[: _COLUMNS**2]
        chosen = each[np.sort(strongest)]
        chosen = chosen / np.abs(chosen).max((1, 2), keepdims=True)
        sheet = np.concatenate(
            [_strip(np.pad(row, ((0, 0), (0, 2), (0, 0)), constant_values=np.nan), np.nan) for row in _rows(chosen)]
        )
        ax.imshow(np.ma.masked_invalid(sheet[:-2]), cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
        bare(ax)
        likeness = evidence.filters(recipe).get("filters.mean")
        ax.set_title(title if likeness is None else f"{title}: Haar-likeness {likeness.mean:.2f}")
    return Drawing(
        canvas,
        "Learned filters: stripes, edges and chequers of black and white",
        "The 100 strongest filters, outer products of rows of U and V, each scaled by itself; gray is zero. The "
        "counterpart of the paper's Figure 2 (a). Haar-likeness is the share of a filter's energy that the best Haar "
        "function explains.",
    )


def _rows(images: Array) -> list[Array]:
    images = images[: len(images) // _COLUMNS * _COLUMNS] if len(images) > _COLUMNS else images
    return [images[first : first + _COLUMNS] for first in range(0, len(images), _COLUMNS)]


def reconstructions(evidence: Evidence) -> Drawing | None:
    """Test digits and their reconstructions by the models."""
    rows: dict[str, Array] = {}
    for model, recipe, title in (
        ("mvrbm", "paper", "MVRBM, paper's"),
        ("mvrbm", "default", "MVRBM, ours"),
        ("rbm", "default", "classic RBM"),
        ("rbm-equal", "default", "RBM, as few\nparameters"),
    ):
        found = evidence.found(work.reconstruct, model=model, recipe=recipe)
        error = evidence.reconstruction(model, recipe, "test_error")
        if not found or error is None:
            continue
        arrays = evidence.store.arrays(found[0][0])
        rows.setdefault("original", arrays["originals"].numpy())
        rows[f"{title}\n{error.mean:.1f}"] = arrays["reconstructions"].numpy()
    if not rows:
        return None
    return Drawing(
        _rows_of_images(rows),
        "Test digits and their reconstructions by four models; those of the small classic RBM are blurred",
        "Test digits and their reconstructions from the hidden layer; the numbers are squared errors per test digit. "
        "The counterpart of the paper's Figure 2 (b) and (c).",
    )


# -- curves -----------------------------------------------------------------------------------------


def _line(ax: Axes, points: Mapping[int, Measured], label: str, color: str, mark: str, **style: Any) -> None:
    y = [one.mean for one in points.values()]
    # Not standard deviations: where some training runs fail, these would extend beyond all measured errors.
    bars = [(one.mean - min(one.values), max(one.values) - one.mean) for one in points.values()]
    options = {"color": color, "marker": mark, "markersize": 4.5, "linewidth": 1.5, "capsize": 2.5, **style}
    ax.errorbar(list(points), y, yerr=np.array(bars).T, label=label, **options)


def _log_error(ax: Axes, x_label: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    for mantissas in ((1, 2, 3, 5, 7), tuple(range(1, 10)), tuple(m / 4 for m in range(4, 40))):
        steps = [s * 10.0**d for d in (-3, -2, -1) for s in mantissas] + [1.0]
        ticks = [step for step in steps if low <= step <= high]
        if len(ticks) >= 4:
            break
    ax.yaxis.set_major_locator(FixedLocator(ticks))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_minor_locator(FixedLocator([]))
    if ax.get_xlim()[1] < 30 * ax.get_xlim()[0]:
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_ylim(low, high)
    ax.set_xlabel(x_label)
    ax.set_ylabel("test error")
    ax.grid(alpha=0.25)


def against_n(evidence: Evidence) -> Drawing | None:
    """Error against the number of training samples."""
    scale, stop = evidence.scale, min(evidence.scale.stops)
    lines = {
        "MVRBM, paper's recipe": lambda n: evidence.by_paper(n, stop),
        "MVRBM, our recipe": lambda n: evidence.error("mvrbm", "default", n),
        "raw pixels": evidence.raw,
    }
    found = {label: {n: one for n in scale.all_sizes if (one := get(n)) is not None} for label, get in lines.items()}
    if not any(found.values()):
        return None
    canvas = blank(6.4, 4.6)
    ax = canvas.subplots()
    for (label, points), color, mark in zip(found.items(), (PAPERS, OURS, RAW), "os^", strict=True):
        if points:
            _line(ax, points, label, color, mark)
    if scale.data == "mnist":
        ax.plot([600, 50_000], [0.1387, 0.0359], "*", color="black", markersize=10, label="the paper's numbers")
    _log_error(ax, "training samples N")
    legend_below(canvas, [ax], 2)
    limited = "" if scale.most_updates is None else f" (at most {scale.most_updates:,} updates)"
    return Drawing(
        canvas,
        "Error against the number of training samples, falling for all three; the MVRBM's is about that of raw pixels",
        f"1-NN on hidden probabilities and on raw pixels, T = {stop:,}{limited}; our recipe has "
        f"{scale.own_epochs} epochs, or {scale.own_updates:,} updates where that is more. {_BARS} "
        "The counterpart of the paper's Figure 3 (a).",
    )


def against_t(evidence: Evidence) -> Drawing | None:
    """Error against the number of epochs."""
    scale, n = evidence.scale, evidence.scale.curve_n
    points = {capped(scale, n, t): one for t in scale.curve_stops if (one := evidence.by_paper(n, t)) is not None}
    if not points:
        return None
    subsets = [numbers["errors"] for _, numbers in evidence.found(work.classify, model="mvrbm", recipe="paper", n=n)]
    late = {t: one for t, one in points.items() if t >= _LATE}
    panels = [points, late] if len(late) > 1 else [points]
    canvas = blank(5.0 * len(panels), 4.6)
    axes = canvas.subplots(1, len(panels), squeeze=False)[0]
    own, raw = evidence.error("mvrbm", "default", n), evidence.raw(n)
    for ax, shown in zip(axes, panels, strict=True):
        for errors in subsets:
            curve = {t: errors[str(t)] for t in shown if str(t) in errors}
            ax.plot(list(curve), list(curve.values()), color=PAPERS, linewidth=0.8, alpha=0.45, label="each subset")
        y = [one.mean for one in shown.values()]
        ax.plot(list(shown), y, "o-", color=PAPERS, label="MVRBM, paper's recipe, mean")
        if own is not None and own_epochs(scale, n) >= min(shown):
            _line(ax, {own_epochs(scale, n): own}, "MVRBM, our recipe", OURS, "s", linestyle="none", markersize=6)
        if raw is not None:
            ax.axhline(raw.mean, color=RAW, linestyle="--", linewidth=1.2, label="raw pixels")
        if scale.data == "mnist":
            ax.plot([300, 3000], [0.0571, 0.0520], "*", color="black", markersize=10, label="the paper's numbers")
    axes[0].axvline(
        _STABLE_AFTER, color="black", linestyle=":", linewidth=1, label="T = 70: stable according to the paper"
    )
    for ax in axes:
        _log_error(ax, "epochs T")
    if len(axes) > 1:
        axes[1].set_ylabel("")
        axes[0].set_title("all T")
        axes[1].set_title(f"from T = {_LATE} on")
    legend_below(canvas, axes, 3)
    return Drawing(
        canvas,
        "Error against the number of epochs: high at first, then near that of raw pixels",
        f"N = {n:,}, the mean of {len(subsets)} random subsets and each of them. Some overshoot at first, and recover "
        "at different times. The counterpart of the paper's Figure 3 (b).",
    )


def comparison(evidence: Evidence) -> Drawing | None:
    """Error against N of all methods that are compared, in three panels."""
    curves = evidence.curves()
    base = {label: curves[label] for label in _COMMON if label in curves}
    tuned = {TUNED: curves.pop(TUNED)} if TUNED in curves else {}
    others = {title: points for title, points in curves.items() if title not in _COMMON}
    toolbox = {title: points for title, points in others.items() if title.endswith("(toolbox)")}
    family = {title: points for title, points in others.items() if title.endswith(("them", "units")) or "RBM" in title}
    modern = {title: points for title, points in others.items() if title not in toolbox and title not in family}
    panels = {
        "networks of the paper's toolbox": toolbox,
        "networks with today's settings": {**tuned, **modern},
        "other Boltzmann machines": family,
    }
    panels = {title: lines for title, lines in panels.items() if lines}
    if not panels:
        return None
    canvas = blank(3.7 * len(panels), 6.2)
    axes = canvas.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for ax, (title, lines) in zip(axes, panels.items(), strict=True):
        for label, points in base.items():
            color, mark = _COMMON[label]
            _line(ax, points, label, color, mark)
        if TUNED in lines:
            _line(ax, lines.pop(TUNED), TUNED, _BLACK, "*", markersize=8, zorder=4)
        for (label, points), color, mark in zip(lines.items(), _COLORS, _MARKS, strict=False):
            _line(ax, points, label.replace(" (toolbox)", ""), color, mark, linestyle="--")
        ax.set_title(title)
    for ax in axes:
        _log_error(ax, "training samples N")
        ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.13), ncols=1, fontsize=9)
    for ax in axes[1:]:
        ax.set_ylabel("")
    return Drawing(
        canvas,
        "Error against the number of samples for the MVRBM, raw pixels, networks and other Boltzmann machines",
        f"The lines with 1-NN of the MVRBM and of raw pixels are the same in all panels; by the paper's recipe "
        f"T = {max(evidence.scale.stops):,}. TvRBM has no more parameters than the MVRBM. {_BARS} Means are over fewer "
        "subsets where training is long. The counterpart of the paper's Figure 4.",
    )


_COMMON = {
    "MVRBM + 1-NN, paper's recipe": (PAPERS, "o"),
    "MVRBM + 1-NN, our recipe": (OURS, "s"),
    "raw pixels + 1-NN": (RAW, "^"),
}


def growth(evidence: Evidence) -> Drawing | None:
    """Parameters, time and error of the MVRBM and the classic RBM for growing images."""
    panels = (
        ("parameters", "parameters", 1.0),
        ("seconds_per_update", "ms per update", 1e3),
        ("error", "squared error per pixel", 1.0),
    )
    if not evidence.growth("mvrbm", "parameters"):
        return None
    from matplotlib.ticker import FixedLocator, FuncFormatter

    canvas = blank(11.0, 4.2)
    axes = canvas.subplots(1, len(panels))
    for ax, (key, label, factor) in zip(axes, panels, strict=True):
        for model, title, color, mark in (("mvrbm", "MVRBM", OURS, "o"), ("rbm", "classic RBM", PAPERS, "s")):
            values = evidence.growth(model, key)
            ax.plot(list(values), [factor * v for v in values.values()], mark + "-", color=color, label=title)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.xaxis.set_major_locator(FixedLocator(list(evidence.scale.sides)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.xaxis.set_minor_locator(FixedLocator([]))
        ax.set_xlabel("side of the image, pixels")
        ax.set_ylabel(label)
        ax.grid(alpha=0.25)
    axes[1].yaxis.set_major_locator(FixedLocator([s * 10.0**d for d in range(-3, 5) for s in (1, 2, 5)]))
    axes[1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[1].yaxis.set_minor_locator(FixedLocator([]))
    baseline = evidence.growth("mvrbm", "error_of_the_mean")
    axes[2].plot(list(baseline), list(baseline.values()), ":", color="black", label="the mean image, for comparison")
    axes[2].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[2].yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes[2].tick_params(axis="y", which="minor", labelsize=8)
    legend_below(canvas, axes, 3)
    return Drawing(
        canvas,
        "Parameters and time grow far faster with the image's side for the classic RBM than for the MVRBM",
        "Patches of photographs, errors on patches of other photographs. Hidden layers have three quarters of the "
        f"side; batches of {BATCH}, our recipe for both, {evidence.scale.photograph_epochs} epochs of "
        f"{evidence.scale.photographs:,} patches. An epoch has {-(-evidence.scale.photographs // BATCH)} updates: for "
        "small images its fixed cost dominates, even more so on a GPU.",
    )


#: All figures by name.
FIGURES: dict[str, Callable[[Evidence], Drawing | None]] = {
    "denoising": denoising,
    "filters": filters,
    "reconstructions": reconstructions,
    "error-against-n": against_n,
    "error-against-t": against_t,
    "comparison": comparison,
    "growth": growth,
}
