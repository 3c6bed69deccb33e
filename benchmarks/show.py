"""Tables and plots of a run, from its results alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contestants import CONTESTANTS
from studies.report import blank, legend_below
from studies.runs import write_json

_PHASES = {"cd": "CD-1", "pcd": "PCD-1"}
_BASELINES = {"sklearn": "BernoulliRBM", "rbms": "rbms"}
_COLORS = {
    "mvrbm": "#2a78c2",
    "rbm": "#3a9460",
    "sklearn": "#d1672a",
    "rbms": "#a0508c",
    "learnergy": "#8a6d3b",
    "torch": "#5f6b76",
}
_MARKS = {"mvrbm": "o", "rbm": "s", "sklearn": "^", "rbms": "v", "learnergy": "D", "torch": "P"}


def write(result: Mapping[str, Any], folder: str | os.PathLike[str], *, report_only: bool = False) -> list[str]:
    """Write bench.json (unless `report_only`), bench.md, bench.png and bench.svg. Return messages on missing files."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    if not report_only:
        write_json(place / "bench.json", result)
    (place / "bench.md").write_text(tables(result) + "\n", encoding="utf-8")
    try:
        plot(result, place / "bench.png", place / "bench.svg")
    except ImportError as error:
        return [f"no plot: it needs {error.name}, pip install 'mvrbm[bench]'"]
    return []


# -- tables -----------------------------------------------------------------------------------------


def tables(result: Mapping[str, Any]) -> str:
    """Return a run as text, in Markdown: one table per problem, then floors, exponents and inference."""
    parts = [_heading(result)]
    rows = result["rows"]
    for problem in dict.fromkeys(row["problem"] for row in rows):
        parts.append(_one_problem(problem, [row for row in rows if row["problem"] == problem]))
    parts += [_floors(result), _exponents(result["exponents"]), _inference(result["inference"]), _notes(rows)]
    return "\n\n".join(part for part in parts if part)


def _heading(result: Mapping[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    where = f"{machine['gpu']}, next to " if "gpu" in machine else ""
    recipe = settings.get("recipe") or settings["preset"]  # its name in version 0.1.0
    versions = ", ".join(f"{name} {machine[name]}" for name in ("mvrbm", "torch", "numpy", "scikit-learn"))
    versions += "; no compiled code" if machine["compiled"] is None else f"; compiled code for {machine['compiled']}"
    return (
        f"{where}{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads; {versions}.\n"
        f"Recipe '{recipe}', batch size {settings['batch_size']}, float32. Times are medians of "
        f"{settings['repetitions']} interleaved turns, with the middle half in brackets;\n"
        "'x' columns are ratios of medians of this run: updates per update of the other."
        + (f"\n{machine['warning']}." if machine.get("warning") else "")
    )


def _one_problem(problem: str, rows: Sequence[dict[str, Any]]) -> str:
    ran = [row for row in rows if not row["skipped"]]
    baselines = {key: name for key, name in _BASELINES.items() if any(row["contestant"] == key for row in ran)}
    times = [f"x {name}" for name in baselines.values()]
    body = [
        [
            row["title"],
            _PHASES[row["phase"]],
            _spread(row["update"]),
            *(_times(row["times_faster_than"].get(other)) for other in baselines),
            _seconds(row["pass"]["median"]),
            _times(row["floor"] and row["floor"]["times"]),
            f"{row['parameters']:,}",
            _bytes(row["peak_bytes"]),
        ]
        for row in ran
    ]
    lines = [f"{problem}   ({rows[0]['n_samples']:,} samples per epoch: {rows[0]['data']})"]
    if body:
        lines += ["", grid(["", "", "update", *times, "epoch", "x floor", "parameters", "memory"], body), ""]
    reasons = dict.fromkeys(row["skipped"] for row in rows if row["skipped"])
    for reason in reasons:
        titles = dict.fromkeys(row["title"] for row in rows if row["skipped"] == reason)
        lines.append(f"skipped: {', '.join(titles)}: {reason}")
    return "\n".join(lines).rstrip()


def _floors(result: Mapping[str, Any]) -> str:
    rows = [row for row in result["rows"] if row.get("floor")]
    if not rows:
        return ""
    rates = result["rates"]
    if rates:
        head = ["floors", "", "operations", "bytes", "fp32", "tf32", "memory", "random", "node", "update", "x floor"]
        body = [
            [
                row["problem"],
                f"{row['title']} {_PHASES[row['phase']]}",
                f"{row['floor']['flops'] / 1e6:,.1f} M",
                _bytes(sum(row["floor"]["bytes"].values())),
                *(_seconds(seconds) for seconds in row["floor"]["parts"].values()),
                _seconds(row["update"]["median"]),
                _times(row["floor"]["times"]),
            ]
            for row in rows
        ]
        device = (
            f"Measured rates: {rates['flops_fp32'] / 1e12:.1f} TFLOP/s in fp32, {rates['flops_tf32'] / 1e12:.0f} in "
            f"tf32, {rates['bytes'] / 1e12:.2f} TB/s, {rates['random'] / 1e9:.0f} G random numbers/s, "
            f"{rates['node'] * 1e6:.2f} us from one graph node to the next.\n"
            "The floor is the longest of fp32 arithmetic, memory, random numbers and one node."
        )
        return f"{grid(head, body)}\n\n{device}"
    head = ["floors", "", "operations", "products", "at", "random numbers", "floor", "update", "x floor"]
    body = [
        [
            row["problem"],
            f"{row['title']} {_PHASES[row['phase']]}",
            f"{row['floor']['flops'] / 1e6:,.1f} M",
            _seconds(row["floor"]["parts"]["products"]["seconds"]),
            f"{row['floor']['flops_per_second'] / 1e9:,.0f} GFLOP/s",
            _seconds(row["floor"]["parts"]["random numbers"]["seconds"]),
            _seconds(row["floor"]["seconds"]),
            _seconds(row["update"]["median"]),
            _times(row["floor"]["times"]),
        ]
        for row in rows
    ]
    how = (
        "The floor is the bare matrix products of an update plus its random numbers, timed in the same turns: each "
        "product as one\nplain GEMM into a buffer, on one thread or all, and NumPy's SFC64 or torch.rand, whichever is "
        "faster."
    )
    return f"{grid(head, body)}\n\n{how}"


def _exponents(found: Sequence[dict[str, Any]]) -> str:
    if not found:
        return ""
    head = ["growth with the number of pixels", "", "time", "operations", "over"]
    body = [
        [
            part["title"],
            _PHASES[part["phase"]],
            f"pixels^{part['exponent']:.2f}",
            f"pixels^{part['operations']:.2f}",
            "; ".join(part["sizes"]),
        ]
        for part in found
    ]
    return grid(head, body)


def _inference(found: dict[str, Any]) -> str:
    if not found.get("rows"):
        return ""
    tasks = list(dict.fromkeys(row["task"] for row in found["rows"]))
    head = [f"{found['n']:,} digits", *(cell for task in tasks for cell in (task, "x BernoulliRBM"))]
    body = []
    for key in dict.fromkeys(row["contestant"] for row in found["rows"]):
        cells = [CONTESTANTS[key].title]
        for task in tasks:
            (row,) = (row for row in found["rows"] if (row["contestant"], row["task"]) == (key, task))
            cells += [_spread(row["time"]), _times(row["times_faster_than_sklearn"])]
        body.append(cells)
    return grid(head, body)


def _notes(rows: Sequence[dict[str, Any]]) -> str:
    notes = dict.fromkeys(f"{row['title']}: {row['note']}." for row in rows if row["note"] and not row["skipped"])
    memory = "Memory is the largest growth while a model is built and trained for one epoch, with the data in place."
    return "\n".join([*notes, memory])


def grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, columns of numbers aligned to the right."""
    widths = [max(len(row[column]) for row in (head, *body)) for column in range(len(head))]
    words = [column == 0 or all(not row[column][:1].isdigit() for row in body) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(cells, widths, words, strict=True)
        )
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (width + 1)}{'-' if left else ':'}" for width, left in zip(widths, words, strict=True)]
    return "\n".join([line(head), f"|{'|'.join(rule)}|", *(line(row) for row in body)])


def _spread(spread: dict[str, float]) -> str:
    unit, name = _unit(spread["median"])
    low, median, high = (three_digits(spread[part] / unit) for part in ("low", "median", "high"))
    return f"{median} {name} [{low}, {high}]"


def _seconds(seconds: float) -> str:
    unit, name = _unit(seconds)
    return f"{three_digits(seconds / unit)} {name}"


def three_digits(number: float) -> str:
    """Return a number in three digits, or as a whole number."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def _unit(seconds: float) -> tuple[float, str]:
    # 999.6 us are 1 ms in three digits, so the next unit starts a little earlier.
    return next(
        ((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if seconds >= 0.9995 * unit),
        (1e-9, "ns"),
    )


def _times(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"


def _bytes(count: float | None) -> str:
    if count is None:
        return "-"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


# -- plots ------------------------------------------------------------------------------------------


def plot(result: Mapping[str, Any], *paths: str | os.PathLike[str]) -> None:
    """Draw time against pixels and against rank, and save it under every path, in the format of its ending.

    Parameters
    ----------
    result : dict
        Result of :func:`~benchmarks.run`.
    *paths : path
        Files ending in ``.png`` or ``.svg``.
    """
    from mvrbm.pages import styled

    rows = [row for row in result["rows"] if not row["skipped"] and len(row["visible"]) == 2]
    by_rank = len({row["rank"] for row in rows}) > 1
    with styled():
        canvas = blank(13 if by_rank else 9, 4.6)
        axes = canvas.subplots(1, 3 if by_rank else 2, squeeze=False)[0]
        plain = [row for row in rows if row["rank"] == 1]
        for axis, (phase, name) in zip(axes, _PHASES.items(), strict=False):
            _lines(axis, [row for row in plain if row["phase"] == phase], "pixels")
            axis.set(title=f"{name}, rank 1", xlabel="pixels per sample", ylabel="milliseconds per update")
        _share_limits(axes[:2])
        if by_rank:
            first = rows[0]["visible"]
            shown = [row for row in rows if row["visible"] == first and row["phase"] == "cd"]
            _lines(axes[2], [row for row in shown if row["contestant"] in ("mvrbm", "torch")], "rank")
            size = "x".join(map(str, first))
            axes[2].set(title=f"CD-1, {size}", xlabel="rank", ylabel="milliseconds per update")
        legend_below(canvas, list(axes), 4)
        for path in paths:
            metadata = {"Date": None, "Creator": None} if Path(path).suffix == ".svg" else None
            canvas.savefig(path, dpi=150, metadata=metadata)


def _lines(axis: Any, rows: Sequence[dict[str, Any]], against: str) -> None:
    """Draw one line per contestant, with the middle half as bars, and the floors of mvrbm's machines as dots."""
    from matplotlib.ticker import LogLocator

    for key, kind in CONTESTANTS.items():
        mine = [row for row in rows if row["contestant"] == key]
        mine.sort(key=lambda row: (math.prod(row["visible"]), row["rank"]))
        if not mine:
            continue
        x = [math.prod(row["visible"]) if against == "pixels" else row["rank"] for row in mine]
        median = [1e3 * row["update"]["median"] for row in mine]
        bars = [[1e3 * abs(row["update"][end] - row["update"]["median"]) for row in mine] for end in ("low", "high")]
        axis.errorbar(x, median, bars, label=kind.title, color=_COLORS[key], marker=_MARKS[key], capsize=2)
        floor = [1e3 * row["floor"]["seconds"] for row in mine if row["floor"]]
        if len(floor) == len(mine):
            axis.plot(x, floor, ":", color=_COLORS[key], label=f"floor of {kind.title}")
    ticks = sorted({math.prod(row["visible"]) if against == "pixels" else row["rank"] for row in rows})
    names = {math.prod(row["visible"]): "x".join(map(str, row["visible"])) for row in rows}
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(ticks, [names[tick] if against == "pixels" else str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # numbers on the axis even within one decade
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(alpha=0.25)


def _share_limits(axes: Any) -> None:
    limits = [axis.get_ylim() for axis in axes if axis.lines]
    for axis in axes:
        if limits:
            axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
