"""What the reports of all experiments have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mvrbm.report import Figure, Section, Table, as_picture, save, styled

__all__ = ["DASH", "claims", "drawn", "mean", "section", "verdict", "worse"]

#: Stands where there is no number.
DASH = "–"


def drawn(folder: Path, figures: Mapping[str, Any], evidence: Any) -> dict[str, Figure]:
    """Draw figures from what is there, save them under a folder, and return them for a page."""
    found = {}
    with styled():
        for name, draw in figures.items():
            drawing = draw(evidence)
            if drawing is not None:
                save(drawing.canvas, folder / "figures", name)
                found[name] = as_picture(drawing.canvas, drawing.alt, drawing.caption)
    return found


def section(title: str, figures: Mapping[str, Figure], names: Iterable[str], tables: Iterable[Table]) -> Section | None:
    """Return a section of those figures and tables that are there, None if none is."""
    shown, rows = [figures[name] for name in names if name in figures], list(tables)
    return Section(title, (), rows, shown) if shown or rows else None


def mean(one: Mapping[str, Any] | None, decimals: int) -> str:
    """Return a mean with half the width of its interval and the number of values."""
    if one is None:
        return DASH
    spread = "" if one["interval95"] is None else f" ± {one['interval95']:.{decimals}f}"
    return f"{one['mean']:.{decimals}f}{spread} ({one['seeds']})"


def verdict(row: Mapping[str, Any]) -> str:
    """In words, for tables that have room for them."""
    words = []
    if "better_than_the_paper" in row:
        words.append("✓ no worse" if row["better_than_the_paper"] else "✗ worse than the paper")
    if "reached" in row:
        words.append("✓ reached" if row["reached"] else "✗ not reached")
    return ", ".join(words) or DASH


def worse(found: Mapping[str, Any]) -> list[str]:
    """Say first what is worse than the paper, not reached, or diverged."""
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
            f"{name} diverged, at or soon after {reason}. It has no results: the means that it belongs to are over the "
            "other subsets."
        )
    return lines


def _missed(row: Mapping[str, Any]) -> str:
    return f"{row['title']} ({row['ours']['mean']:.{row['decimals']}f}, wanted {row['wanted']:.{row['decimals']}f})"


def claims(found: Mapping[str, Any]) -> list[str]:
    """Say which sentences of the paper hold."""
    lines = []
    for claim in found["claims"]:
        if claim["holds"] is None:
            continue
        mark = "✓ Holds." if claim["holds"] else "✗ Does not come out."
        reason = f" Likely reason: {claim['likely_reason']}" if "likely_reason" in claim else ""
        lines.append(f"{mark} {claim['paper_says']} Found: {claim['by']}.{reason}")
    return lines or ["Nothing measured yet."]
