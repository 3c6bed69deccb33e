"""The page kit of the studies and benchmarks, on top of `mvrbm.pages`.

It turns stored runs into numbers (means and their spread, next to a paper's numbers and claims), numbers into figures
and tables, and these into a page. Nothing here computes a result. Each experiment has a subclass of
:class:`StoredRuns`, which finds its numbers among the stored runs, and a function `results`, which collects them as
plain values. `results.json` and the page are made from these.
"""

from __future__ import annotations

import base64
import html
import json
import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mvrbm.errors import StorageError
from mvrbm.io.atomic import replace_file
from studies.runs import Run, Store

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
    "StoredRuns",
    "Target",
    "as_text",
    "bare",
    "blank",
    "by_key",
    "claims",
    "draw_all",
    "incomplete",
    "legend_below",
    "markdown_table",
    "mean",
    "measured",
    "plain",
    "read_results",
    "section",
    "summary",
    "verdict",
    "worse",
    "wrapped",
    "write_text",
]

Numbers = Mapping[str, Any]
#: Placeholder for a missing number.
DASH = "–"
#: Colors of our results, of the paper's, and of raw pixels.
OURS = "#2a78c2"
PAPERS = "#d1672a"
RAW = "#777777"
_DOTS_PER_INCH = 150


# -- numbers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A number measured on several random subsets."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over subsets."""
        return float(np.mean(self.values))

    @property
    def std(self) -> float | None:
        """Standard deviation over subsets, or None if there is only one."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    @property
    def interval(self) -> float | None:
        """Half the width of the 95% confidence interval of the mean (Student's t), or None for a single subset."""
        if self.std is None:
            return None
        from scipy.stats import t

        return float(t.ppf(0.975, len(self.values) - 1) * self.std / math.sqrt(len(self.values)))

    def plain(self) -> dict[str, Any]:
        """Return the statistics as plain values."""
        return {
            "mean": self.mean,
            "std": self.std,
            "interval95": self.interval,
            "seeds": len(self.values),
            "values": list(self.values),
        }


def measured(values: Iterable[float | None]) -> Measured | None:
    """Collect the numbers that are not None; return None if there are none."""
    there = tuple(float(value) for value in values if value is not None)
    return Measured(there) if there else None


class StoredRuns:
    """The stored runs of a plan.

    Parameters
    ----------
    store : Store
        Where the runs are stored.
    runs : sequence of Run
        The runs of the plan.
    """

    def __init__(self, store: Store, runs: Sequence[Run]) -> None:
        self.store = store
        self.runs = list(runs)
        records = ((run, store.record(run)) for run in self.runs)
        self.records = {run.name: record for run, record in records if record is not None}
        self.stored = [run for run in self.runs if run.name in self.records]

    def found(self, compute: Callable[..., Any], **settings: Any) -> list[tuple[Run, Numbers]]:
        """Return the stored runs of a function that have these settings, with their numbers."""
        return [
            (run, self.records[run.name]["numbers"])
            for run in self.stored
            if run.compute is compute and all(run.settings.get(key) == value for key, value in settings.items())
        ]

    @property
    def seconds(self) -> float:
        """Total seconds of all stored runs."""
        return float(sum(record["seconds"] for record in self.records.values()))

    @property
    def machines(self) -> list[str]:
        """The computers that the runs were computed on, the most common first."""
        on = (record["on"] for record in self.records.values())
        counts = Counter(f"{one['device']}, torch {one['torch']}, {one['jobs']} at a time" for one in on)
        return [f"{machine} ({count} runs)" for machine, count in counts.most_common()]

    def where(self, runs: Iterable[Run]) -> str:
        """Return the computer that most of the given runs were computed on, and how many ran at a time."""
        on = (self.records[run.name]["on"] for run in runs)
        counts = Counter(f"{one['device']}, {one['jobs']} at a time" for one in on)
        return counts.most_common(1)[0][0] if counts else ""

    @property
    def diverged(self) -> dict[str, str]:
        """When training diverged, by the name of the run."""
        return {
            name: record["numbers"]["diverged"].split(". ")[0]  # without the advice that follows
            for name, record in self.records.items()
            if "diverged" in record["numbers"]
        }


def by_key(runs: Sequence[Numbers]) -> dict[str, Measured]:
    """Collect each number over several runs, by name. Names of numbers in nested mappings are joined by dots."""
    flat = [dict(_flat(numbers)) for numbers in runs]
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
    """One of our numbers, next to the paper's and to the one that we want to reach.

    Parameters
    ----------
    key, title : str
        Names in `results.json` and on the page.
    paper : float or None
        The paper's number.
    wanted : float or None
        The number to reach.
    ours : Measured or None
        Our number.
    raw : Measured or None
        The number for raw pixels on the same subsets.
    seconds : Measured or None
        Seconds of training.
    lower : bool
        Whether lower is better.
    unit : str
        Unit.
    digits : int
        Decimals to show.
    reason : str
        Likely reason if our number does not reach the wanted one.
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
        """Return the target as plain values, with verdicts if ours was measured with the paper's settings."""
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
    """A claim of the paper, and a test of it.

    Parameters
    ----------
    key : str
        Name in `results.json`.
    says : str
        The claim.
    test : callable
        Takes the stored runs, and returns whether the claim holds and the numbers that show it, or None if they are
        not measured yet.
    reason : str
        Likely reason if the claim does not hold.
    """

    key: str
    says: str
    test: Callable[[Any], tuple[bool, str] | None]
    reason: str


def plain(points: Mapping[Any, Measured]) -> dict[str, Any]:
    """Return measured numbers as plain values, under the same keys."""
    return {str(key): one.plain() for key, one in points.items()}


def summary(
    evidence: StoredRuns, targets: Iterable[Target], claims: Iterable[Claim], *, comparable: bool
) -> dict[str, Any]:
    """Return the part of `results.json` that all of the paper's experiments share.

    Parameters
    ----------
    evidence : StoredRuns
        The stored runs.
    targets : iterable of Target
        Numbers next to the paper's.
    claims : iterable of Claim
        Claims to test.
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
        "runs": {"stored": len(evidence.stored), "planned": len(evidence.runs)},
        "seconds": round(evidence.seconds, 1),
        "machines": evidence.machines,
        "diverged": evidence.diverged,
        "numbers": [target.plain(comparable) for target in targets],
        "claims": rows,
    }


# -- figures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawing:
    """A figure with its alternative text and its caption."""

    canvas: Canvas
    alt: str
    caption: str


def blank(width: float, height: float) -> Canvas:
    """Return an empty figure of a width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def bare(ax: Axes) -> None:
    """Remove the ticks and the frame of axes."""
    ax.set_xticks([])
    ax.set_yticks([])
    for side in ax.spines.values():
        side.set_visible(False)


def legend_below(canvas: Canvas, axes: Sequence[Axes], columns: int) -> None:
    """Draw one legend for several axes, below them."""
    found = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    canvas.legend(list(found.values()), list(found), loc="outside lower center", ncols=columns)


def draw_all(folder: Path, figures: Mapping[str, Any], evidence: Any) -> dict[str, Figure]:
    """Draw the figures that have data, save them in the subfolder `figures`, and return them for a page."""
    from mvrbm.pages import styled

    found = {}
    with styled():
        for name, draw in figures.items():
            drawing = draw(evidence)
            if drawing is not None:
                found[name] = _saved(drawing, folder / "figures", name)
    return found


def _saved(drawing: Drawing, folder: Path, name: str) -> Figure:
    """Write a figure to `name.png` and `name.svg` reproducibly, and return it for a page."""
    from mvrbm.pages import Figure

    folder.mkdir(parents=True, exist_ok=True)
    png = folder / f"{name}.png"
    drawing.canvas.savefig(png, dpi=_DOTS_PER_INCH, metadata={"Software": None})
    drawing.canvas.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
    data = base64.b64encode(png.read_bytes()).decode()
    width = round(drawing.canvas.get_figwidth() * 96)
    picture = f'<img src="data:image/png;base64,{data}" alt="{html.escape(drawing.alt)}" width="{width}">'
    return Figure(picture, drawing.caption)


# -- pages ------------------------------------------------------------------------------------------


def read_results(path: Path) -> Any:
    """Return the stored results of a study; raise `StorageError` if there are none."""
    if not path.is_file():
        raise StorageError(f"{path.parent} has no {path.name}: run the command without --report-only first")
    return json.loads(path.read_text(encoding="utf-8"))


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replace_file(path) as file:
        file.write(text.encode())


def wrapped(text: str, indent: str = "") -> str:
    """Break a paragraph of Markdown into lines of at most 120 characters; `indent` starts all lines but the first."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, or an empty string if it has no rows."""
    if not rows:
        return ""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def section(title: str, figures: Mapping[str, Figure], names: Iterable[str], tables: Iterable[Table]) -> Section | None:
    """Return a section with the figures and tables that exist, or None if there are none."""
    from mvrbm.pages import Section

    shown = [figures[name] for name in names if name in figures]
    rows = list(tables)
    return Section(title, (), rows, shown) if shown or rows else None


def mean(one: Mapping[str, Any] | None, decimals: int) -> str:
    """Format a mean, half the width of its confidence interval, and the number of values."""
    if one is None:
        return DASH
    spread = "" if one["interval95"] is None else f" ± {one['interval95']:.{decimals}f}"
    return f"{one['mean']:.{decimals}f}{spread} ({one['seeds']})"


def verdict(row: Mapping[str, Any]) -> str:
    """Return in words how a number compares with the paper's and with the wanted one."""
    words = []
    if "better_than_the_paper" in row:
        words.append("✓ no worse" if row["better_than_the_paper"] else "✗ worse than the paper")
    if "reached" in row:
        words.append("✓ reached" if row["reached"] else "✗ not reached")
    return ", ".join(words) or DASH


def worse(found: Mapping[str, Any]) -> list[str]:
    """Return sentences on numbers that are worse than the paper's or not reached, and on runs that diverged."""
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
    """Return one sentence per claim of the paper that was tested."""
    lines = []
    for claim in found["claims"]:
        if claim["holds"] is None:
            continue
        mark = "✓ Holds." if claim["holds"] else "✗ Does not hold."
        reason = f" Likely reason: {claim['likely_reason']}" if "likely_reason" in claim else ""
        lines.append(f"{mark} {claim['paper_says']} Found: {claim['by']}.{reason}")
    return lines or ["Nothing measured yet."]


def incomplete(found: Mapping[str, Any]) -> str:
    """Return a sentence on the runs that are missing, or an empty string if there are none."""
    missing = found["runs"]["planned"] - found["runs"]["stored"]
    return f" {missing} of {found['runs']['planned']} runs are not computed yet." if missing else ""


def as_text(found: Mapping[str, Any]) -> str:
    """Return the numbers and claims of an experiment as text."""
    lines = []
    for row in found["numbers"]:
        paper = DASH if row["paper"] is None else f"{row['paper']:g}"
        lines.append(
            f"{row['title']}: {mean(row['ours'], row['decimals'])} {row['unit']}; paper {paper}; {verdict(row)}"
        )
    return "\n".join([*lines, *claims(found)])
