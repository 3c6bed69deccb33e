"""The report kit that all studies and the benchmark share, on top of `mvrbm.pages`.

From stored cells to numbers (means and their spread, next to a paper's numbers and claims), from numbers to figures
and tables, and from these to a page. Nothing here computes a result. Each experiment has an `Evidence` of its own,
which finds its numbers among the stored cells, and a function `results`, which collects them in one plain object:
`results.json` and the report are made from that.
"""

from __future__ import annotations

import base64
import html
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from studies.cells import Cell, Store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    from mvrbm.pages import Figure, Section, Table

__all__ = [
    "DASH",
    "OURS",
    "PAPERS",
    "RAW",
    "Claim",
    "Drawing",
    "Measured",
    "Numbers",
    "StoredCells",
    "Target",
    "as_text",
    "bare",
    "blank",
    "by_key",
    "claims",
    "draw_all",
    "incomplete",
    "legend_below",
    "mean",
    "measured",
    "plain",
    "section",
    "summary",
    "verdict",
    "worse",
]

Numbers = Mapping[str, Any]
#: Stands where there is no number.
DASH = "–"
#: Colors.
OURS, PAPERS, RAW = "#2a78c2", "#d1672a", "#777777"
_DOTS_PER_INCH = 150


# -- numbers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A mean over random subsets."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return float(np.mean(self.values))

    @property
    def std(self) -> float | None:
        """Standard deviation over subsets, None for a single one."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    @property
    def interval(self) -> float | None:
        """Half the width of the mean's 95 % interval (Student's t), None for a single one."""
        if self.std is None:
            return None
        from scipy.stats import t

        return float(t.ppf(0.975, len(self.values) - 1) * self.std / math.sqrt(len(self.values)))

    def plain(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "mean": self.mean,
            "std": self.std,
            "interval95": self.interval,
            "seeds": len(self.values),
            "values": list(self.values),
        }


def measured(values: Iterable[float | None]) -> Measured | None:
    """Return the mean of the numbers that are not None, None if there are none."""
    there = tuple(float(value) for value in values if value is not None)
    return Measured(there) if there else None


class StoredCells:
    """The stored cells of a plan.

    Parameters
    ----------
    store : Store
        The store.
    cells : sequence of Cell
        The cells of the plan.
    """

    def __init__(self, store: Store, cells: Sequence[Cell]) -> None:
        self.store, self.cells = store, list(cells)
        records = ((cell, store.record(cell)) for cell in self.cells)
        self.records = {cell.name: record for cell, record in records if record is not None}
        self.stored = [cell for cell in self.cells if cell.name in self.records]

    def found(self, kind: Callable[..., Any], **settings: Any) -> list[tuple[Cell, Numbers]]:
        """Return the stored cells of a kind of work that have these settings, with their numbers."""
        return [
            (cell, self.records[cell.name]["numbers"])
            for cell in self.stored
            if cell.work is kind and all(cell.settings.get(key) == value for key, value in settings.items())
        ]

    # -- about the run ----------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds of all stored cells together."""
        return float(sum(record["seconds"] for record in self.records.values()))

    @property
    def machines(self) -> list[str]:
        """The machines that the cells were computed on, the most common first."""
        on = (record["on"] for record in self.records.values())
        counts = Counter(f"{one['device']}, torch {one['torch']}, {one['jobs']} at a time" for one in on)
        return [f"{machine} ({count} cells)" for machine, count in counts.most_common()]

    def where(self, cells: Iterable[Cell]) -> str:
        """Return the machine that most of some stored cells were computed on, and how many ran at a time."""
        on = (self.records[cell.name]["on"] for cell in cells)
        counts = Counter(f"{one['device']}, {one['jobs']} at a time" for one in on)
        return counts.most_common(1)[0][0] if counts else ""

    @property
    def diverged(self) -> dict[str, str]:
        """Cells whose training diverged, and when."""
        return {
            name: record["numbers"]["diverged"].split(". ")[0]  # without the advice that follows
            for name, record in self.records.items()
            if "diverged" in record["numbers"]
        }


def by_key(cells: Sequence[Numbers]) -> dict[str, Measured]:
    """Return the mean of every number, by name; numbers in nested mappings have names with dots."""
    flat = [dict(_flat(numbers)) for numbers in cells]
    keys = [key for key in (flat[0] if flat else {}) if all(key in numbers for numbers in flat)]
    return {key: Measured(tuple(numbers[key] for numbers in flat)) for key in keys}


def _flat(numbers: Numbers, prefix: str = "") -> Iterable[tuple[str, float]]:
    for key, value in numbers.items():
        if hasattr(value, "items"):
            yield from _flat(value, f"{prefix}{key}.")
        elif type(value) in (int, float):
            yield f"{prefix}{key}", float(value)


# -- next to a paper --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A number of the paper, or one that we want to reach, and our own.

    Parameters
    ----------
    key, title : str
        Its names in `results.json` and in the report.
    paper : float or None
        The paper's number.
    wanted : float or None
        The number to reach.
    lower : bool
        Whether lower is better.
    unit : str
        Unit.
    digits : int
        Decimals to show.
    ours, raw, seconds : Measured or None
        Our number, that of raw pixels on the same subsets, and the seconds of training.
    reason : str
        Likely reason if ours does not reach the wanted number.
    """

    key: str
    title: str
    paper: float | None
    wanted: float | None
    ours: Measured | None
    raw: Measured | None = None
    seconds: Measured | None = None
    lower: bool = True
    unit: str = ""
    digits: int = 4
    reason: str = ""

    def plain(self, comparable: bool) -> dict[str, Any]:
        """Return all of it as plain values; without a verdict if ours was not measured with the paper's N and T."""
        row: dict[str, Any] = {"key": self.key, "title": self.title, "unit": self.unit, "decimals": self.digits}
        row |= {"paper": self.paper, "wanted": self.wanted, "lower_is_better": self.lower}
        row |= {"ours": None if self.ours is None else self.ours.plain()}
        row |= {"raw_pixels": None if self.raw is None else self.raw.plain()}
        row |= {"training_seconds": None if self.seconds is None else self.seconds.mean}
        if self.ours is not None and comparable:
            sign = 1 if self.lower else -1
            if self.paper is not None:
                row["difference"] = self.ours.mean - self.paper
                row["better_than_the_paper"] = sign * (self.ours.mean - self.paper) <= 0
            if self.wanted is not None:
                row["reached"] = sign * (self.ours.mean - self.wanted) <= 0
                if not row["reached"] and self.reason:
                    row["likely_reason"] = self.reason
        return row


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, a test of it, and the likely reason if it does not hold."""

    key: str
    says: str
    test: Callable[[Any], tuple[bool, str] | None]  # holds, and by which numbers; None: not measured yet
    reason: str


def plain(points: Mapping[Any, Measured]) -> dict[str, Any]:
    """Return means as plain values, under the same keys."""
    return {str(key): one.plain() for key, one in points.items()}


def summary(
    evidence: StoredCells, targets: Iterable[Target], claims: Iterable[Claim], *, comparable: bool
) -> dict[str, Any]:
    """Return the part of `results.json` that all experiments have in common.

    Parameters
    ----------
    evidence : StoredCells
        The stored cells.
    targets : iterable of Target
        Numbers next to the paper's.
    claims : iterable of Claim
        Sentences to be tested.
    comparable : bool
        Whether the numbers were measured with the paper's settings.
    """
    rows = []
    for claim in claims:
        outcome = claim.test(evidence)
        holds, by = (None, None) if outcome is None else outcome
        row: dict[str, Any] = {"key": claim.key, "paper_says": claim.says, "holds": holds, "by": by}
        if holds is False and claim.reason:
            row["likely_reason"] = claim.reason
        rows.append(row)
    return {
        "comparable_with_the_paper": comparable,
        "cells": {"stored": len(evidence.stored), "planned": len(evidence.cells)},
        "seconds": round(evidence.seconds, 1),
        "machines": evidence.machines,
        "diverged": evidence.diverged,
        "numbers": [target.plain(comparable) for target in targets],
        "claims": rows,
    }


# -- figures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawing:
    """A figure, its description for readers who cannot see it, and its caption."""

    canvas: Canvas
    alt: str
    caption: str


def blank(width: float, height: float) -> Canvas:
    """Return an empty figure; width and height are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def bare(ax: Axes) -> None:
    """Remove ticks and frame."""
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ax.spines.values():
        side.set_visible(False)


def legend_below(canvas: Canvas, axes: Sequence[Axes], columns: int) -> None:
    """Draw one legend for several axes below them."""
    found = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    canvas.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)


def draw_all(folder: Path, figures: Mapping[str, Any], evidence: Any) -> dict[str, Figure]:
    """Draw the figures for which there is evidence, save them under a folder, and return them for a page."""
    from mvrbm.pages import styled

    found = {}
    with styled():
        for name, draw in figures.items():
            drawing = draw(evidence)
            if drawing is not None:
                found[name] = _saved(drawing, folder / "figures", name)
    return found


def _saved(drawing: Drawing, folder: Path, name: str) -> Figure:
    """Write a figure to `name.png` and `name.svg`, the same bytes every time, and return it for a page."""
    from mvrbm.pages import Figure

    folder.mkdir(parents=True, exist_ok=True)
    png = folder / f"{name}.png"
    drawing.canvas.savefig(png, dpi=_DOTS_PER_INCH, metadata={"Software": None})
    drawing.canvas.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
    data, width = base64.b64encode(png.read_bytes()).decode(), round(drawing.canvas.get_figwidth() * 96)
    picture = f'<img src="data:image/png;base64,{data}" alt="{html.escape(drawing.alt)}" width="{width}">'
    return Figure(picture, drawing.caption)


# -- pages ------------------------------------------------------------------------------------------


def section(title: str, figures: Mapping[str, Figure], names: Iterable[str], tables: Iterable[Table]) -> Section | None:
    """Return a section of the existing figures and tables, None if there are none."""
    from mvrbm.pages import Section

    shown, rows = [figures[name] for name in names if name in figures], list(tables)
    return Section(title, (), rows, shown) if shown or rows else None


def mean(one: Mapping[str, Any] | None, decimals: int) -> str:
    """Format a mean with half the width of its interval and the number of values."""
    if one is None:
        return DASH
    spread = "" if one["interval95"] is None else f" ± {one['interval95']:.{decimals}f}"
    return f"{one['mean']:.{decimals}f}{spread} ({one['seeds']})"


def verdict(row: Mapping[str, Any]) -> str:
    """Return the verdicts on a row in words."""
    words = []
    if "better_than_the_paper" in row:
        words.append("✓ no worse" if row["better_than_the_paper"] else "✗ worse than the paper")
    if "reached" in row:
        words.append("✓ reached" if row["reached"] else "✗ not reached")
    return ", ".join(words) or DASH


def worse(found: Mapping[str, Any]) -> list[str]:
    """Return sentences on numbers that are worse than the paper or not reached, and on training runs that diverged."""
    short = [row["title"] for row in found["numbers"] if row.get("better_than_the_paper") is False]
    missed = [row for row in found["numbers"] if row.get("reached") is False]
    lines = []
    if short:
        lines.append(f"Worse than the paper: {'; '.join(short)}.")
    if missed:
        lines.append(f"Not reached: {'; '.join(_missed(row) for row in missed)}.")
    for reason in dict.fromkeys(row["likely_reason"] for row in missed if "likely_reason" in row):
        titles = "; ".join(row["title"] for row in missed if row.get("likely_reason") == reason)
        lines.append(f"Likely reason ({titles}): {reason}")
    for name, reason in found["diverged"].items():
        lines.append(
            f"{name} diverged, at or soon after {reason}. It has no results: its means are over the other subsets."
        )
    return lines


def _missed(row: Mapping[str, Any]) -> str:
    return f"{row['title']} ({row['ours']['mean']:.{row['decimals']}f}, wanted {row['wanted']:.{row['decimals']}f})"


def claims(found: Mapping[str, Any]) -> list[str]:
    """Return sentences on which claims of the paper hold."""
    lines = []
    for claim in found["claims"]:
        if claim["holds"] is None:
            continue
        mark = "✓ Holds." if claim["holds"] else "✗ Does not hold."
        reason = f" Likely reason: {claim['likely_reason']}" if "likely_reason" in claim else ""
        lines.append(f"{mark} {claim['paper_says']} Found: {claim['by']}.{reason}")
    return lines or ["Nothing measured yet."]


def incomplete(found: Mapping[str, Any]) -> str:
    """Return a sentence on the cells that are missing, empty if there are none."""
    missing = found["cells"]["planned"] - found["cells"]["stored"]
    return f" {missing} of {found['cells']['planned']} cells are not computed yet." if missing else ""


def as_text(found: Mapping[str, Any]) -> str:
    """Return the numbers and claims of some results as lines of text."""
    lines = []
    for row in found["numbers"]:
        paper = DASH if row["paper"] is None else f"{row['paper']:g}"
        lines.append(
            f"{row['title']}: {mean(row['ours'], row['decimals'])} {row['unit']}; paper {paper}; {verdict(row)}"
        )
    return "\n".join([*lines, *claims(found)])
