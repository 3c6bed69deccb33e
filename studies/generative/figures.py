"""The figures: nats against parameters and against seconds, and samples next to data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from studies.generative import work
from studies.generative.findings import PUBLISHED, Evidence, describe, results
from studies.report import OURS, PAPERS, Drawing, bare, blank, legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FIGURES"]

Array = NDArray[Any]

_COLORS = {"Kronecker": OURS, "CP": "#3a9460", "MPO": "#a0508c", "Dense": "#444444", "rbms": PAPERS}
_MARKS = {"Kronecker": "o", "CP": "^", "MPO": "s", "Dense": "D", "rbms": "v"}
_LINES, _LINE_COLORS = ("-", "--", ":", "-."), ("#999999", "#c9a227")
_GOOD = -100.0  # nats: above this, machines are drawn in a panel of their own
_COLUMNS = 16


def parameters(evidence: Evidence) -> Drawing | None:
    """Test nats against the number of parameters, with the published figures as lines."""
    data = evidence.scale.data[0]
    rows = [row for row in results(evidence, "")["table"] if row["data"] == data]
    return draw_parameters(rows, data) if rows else None


def draw_parameters(rows: Sequence[Mapping[str, Any]], data: str) -> Drawing:
    """Draw all machines and published figures, and next to them the best ones alone."""
    good = [row for row in rows if row["median"] > _GOOD]
    canvas = blank(12.0 if good else 8.5, 5.4)
    axes = canvas.subplots(1, 2 if good else 1, squeeze=False)[0]
    for ax, shown, lowest in zip(axes, (rows, good), (-math.inf, _GOOD), strict=False):
        _against_parameters(ax, shown, {name: nats for name, (nats, _) in PUBLISHED.items() if nats > lowest})
    if good:
        axes[0].axhspan(_GOOD, axes[0].get_ylim()[1], color=OURS, alpha=0.05, linewidth=0)
        axes[1].set_title("the upper part")
    axes[0].set_ylabel("test log-likelihood, nats per digit")
    legend_below(canvas, axes, 3 if good else 2)
    return Drawing(
        canvas,
        "Test log-likelihood against the number of parameters for several couplings, with published values as lines",
        f"Test log-likelihood by annealed importance sampling, data `{data}`: median and range over seeds of training. "
        "Lines: published values for binarized MNIST.",
    )


def _against_parameters(ax: Axes, rows: Sequence[Mapping[str, Any]], published: Mapping[str, float]) -> None:
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["parameters"])
        ends = np.array([[row["median"] - min(row["test"]), max(row["test"]) - row["median"]] for row in own]).T
        options: dict[str, Any] = {"color": _COLORS[kind], "marker": _MARKS[kind], "linewidth": 1.2, "capsize": 2.5}
        x, y = [row["parameters"] for row in own], [row["median"] for row in own]
        ax.errorbar(x, y, yerr=ends, label=kind, zorder=3, **options)
    for name, nats in published.items():
        number = list(PUBLISHED).index(name)  # the same line in both panels
        look: dict[str, Any] = {"color": _LINE_COLORS[number % 2], "linestyle": _LINES[number // 2], "linewidth": 1}
        ax.axhline(nats, label=f"{name}: {nats:g}", zorder=1, **look)
    _logarithmic(ax)
    ax.set_xlabel("parameters")
    ax.grid(alpha=0.25)


def _logarithmic(ax: Axes) -> None:
    """Set a logarithmic axis with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1 else f"{value:,.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(axis="x", labelsize="small")


def seconds(evidence: Evidence) -> Drawing | None:
    """Test nats against seconds of training."""
    rows = results(evidence, "")["seconds_table"]
    if not rows:
        return None
    canvas = blank(11.0, 5.0)
    ax = canvas.subplots()
    for title, on in dict.fromkeys((row["title"], row["on"]) for row in rows):
        own = [row for row in rows if (row["title"], row["on"]) == (title, on)]
        own.sort(key=lambda row: row["training_seconds"])
        x, y = [row["training_seconds"] for row in own], [row["test"] for row in own]
        kind, cpu = own[0]["kind"], own[0]["device"] == "cpu"
        options: dict[str, Any] = {"color": _COLORS[kind], "marker": _MARKS[kind]}
        options |= {"linestyle": "--" if cpu else "-", "fillstyle": "none" if cpu else "full"}
        ax.plot(x, y, label=f"{title}; {on}", **options)
    _logarithmic(ax)
    ax.set_xlabel("seconds of training")
    ax.set_ylabel("test log-likelihood, nats per digit")
    ax.grid(alpha=0.25)
    legend_below(canvas, [ax], 2)
    return Drawing(
        canvas,
        "Test log-likelihood against seconds of training, on a GPU and on the CPU, with the package rbms",
        "Each point is a training run of its own, whose schedule follows its number of updates. One seed.",
    )


def _strip(images: Array, rows: int = 1) -> Array:
    """Arrange images (n, h, w) in rows, with gaps that are not drawn."""
    each = len(images) // rows
    padded = np.pad(images.astype(float), ((0, 0), (0, 2), (0, 2)), constant_values=np.nan)
    return np.concatenate([np.concatenate(list(padded[r * each : (r + 1) * each]), 1) for r in range(rows)])[:-2, :-2]


def _show(axes: Iterable[Any], strips: Sequence[tuple[str, Array]]) -> None:
    for ax, (title, strip) in zip(axes, strips, strict=True):
        ax.imshow(strip, cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
        ax.set_title(title, fontsize=9, loc="left")
        bare(ax)


def samples(evidence: Evidence) -> Drawing | None:
    """Samples of every sampled model next to test digits."""
    cells = [cell for cell, _ in evidence.found(work.samples)]
    if not cells:
        return None
    first = evidence.store.arrays(cells[0])
    strips = [("test digits", _strip(first["data"].numpy()[: 2 * _COLUMNS], 2))]
    for cell in cells:
        arrays, settings = evidence.store.arrays(cell), cell.settings
        trained, about = evidence.trained(cell)
        source = "noise" if settings["start"] == "noise" else "the chains of training"
        title = f"{describe(trained)['title']}, {about['parameters']:,} parameters: {settings['steps']:,} steps from "
        both = np.concatenate([arrays["means"].numpy()[:_COLUMNS], arrays["draws"].numpy()[:_COLUMNS]])
        strips.append((f"{title}{source}; means, then draws", _strip(both, 2)))
    canvas = blank(9.0, 1.45 * len(strips))
    _show(np.atleast_1d(canvas.subplots(len(strips), 1)), strips)
    return Drawing(
        canvas,
        "Rows of test digits and of samples of several models",
        "Test digits, and the first samples of every model, none selected: probabilities given the hidden units, and "
        "binary draws.",
    )


def conditional(evidence: Evidence) -> Drawing | None:
    """Samples given the label."""
    found = evidence.found(work.conditional)
    if not found:
        return None
    cell = found[0][0]
    means = evidence.store.arrays(cell)["means"].numpy()  # (digits, samples, 28, 28)
    trained, about = evidence.trained(cell)
    canvas = blank(6.0, 6.3)
    ax = canvas.subplots()
    title = f"{describe(trained)['title']}, {about['parameters']:,} parameters"
    _show([ax], [(title, _strip(means.reshape(-1, *means.shape[2:]), len(means)))])
    steps = max(cell.settings["steps"])
    return Drawing(
        canvas,
        "A grid of samples given their label, one digit per row",
        f"One requested digit per row, {steps:,} Gibbs steps from noise with the label clamped: probabilities, none "
        "selected.",
    )


#: All figures by name.
FIGURES: dict[str, Callable[[Evidence], Drawing | None]] = {
    "nats-parameters": parameters,
    "nats-seconds": seconds,
    "samples": samples,
    "conditional": conditional,
}
