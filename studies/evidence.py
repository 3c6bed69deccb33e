"""What the stored cells of any experiment say: means and their spread, beside a paper's numbers and claims.

Nothing here computes anew. Each experiment has an `Evidence` of its own, which finds its numbers among the stored
cells, and `results`, which puts them into one plain object: `results.json` and the report are made of that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from studies.cells import Cell, Store

__all__ = ["Claim", "Measured", "Numbers", "StoredCells", "Target", "by_key", "measured", "plain", "summary"]

Numbers = Mapping[str, Any]


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
        """Standard deviation over subsets, None of one alone."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    @property
    def interval(self) -> float | None:
        """Half the width of the mean's 95 % interval (Student's t), None of one subset alone."""
        if self.std is None:
            return None
        from scipy.stats import t

        return float(t.ppf(0.975, len(self.values) - 1) * self.std / math.sqrt(len(self.values)))

    def plain(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "mean": self.mean,
            "std": self.std,
            "interval95": self.interval,
            "seeds": len(self.values),
            "values": list(self.values),
        }


def measured(values: Iterable[float | None]) -> Measured | None:
    """Return the mean of those numbers that are there, None if none is."""
    there = tuple(float(value) for value in values if value is not None)
    return Measured(there) if there else None


class StoredCells:
    """The stored cells of a plan.

    Parameters
    ----------
    store : Store
        Where they are.
    cells : sequence of Cell
        The plan's.
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
        """Of all stored cells together."""
        return float(sum(record["seconds"] for record in self.records.values()))

    @property
    def machines(self) -> list[str]:
        """What the cells were computed on, the most common first."""
        on = (record["on"] for record in self.records.values())
        counts = Counter(f"{one['device']}, torch {one['torch']}, {one['jobs']} at a time" for one in on)
        return [f"{machine} ({count} cells)" for machine, count in counts.most_common()]

    def where(self, cells: Iterable[Cell]) -> str:
        """What most of some stored cells were computed on, and how many at a time."""
        on = (self.records[cell.name]["on"] for cell in cells)
        counts = Counter(f"{one['device']}, {one['jobs']} at a time" for one in on)
        return counts.most_common(1)[0][0] if counts else ""

    @property
    def diverged(self) -> dict[str, str]:
        """Cells whose training left the finite numbers, and when."""
        return {
            name: record["numbers"]["diverged"].split(". ")[0]  # without the advice that follows
            for name, record in self.records.items()
            if "diverged" in record["numbers"]
        }


def by_key(cells: Sequence[Numbers]) -> dict[str, Measured]:
    """Mean of every number, those in nested mappings under a name with dots."""
    flat = [dict(_flat(numbers)) for numbers in cells]
    keys = [key for key in (flat[0] if flat else {}) if all(key in numbers for numbers in flat)]
    return {key: Measured(tuple(numbers[key] for numbers in flat)) for key in keys}


def _flat(numbers: Numbers, prefix: str = "") -> Iterable[tuple[str, float]]:
    for key, value in numbers.items():
        if hasattr(value, "items"):
            yield from _flat(value, f"{prefix}{key}.")
        elif type(value) in (int, float):
            yield f"{prefix}{key}", float(value)


# -- beside a paper ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A number of the paper, or one that we want, and where ours is found.

    Parameters
    ----------
    key, title : str
        What it is called in `results.json`, and in the report.
    paper : float or None
        What the paper reports.
    wanted : float or None
        What ours is to reach.
    lower : bool
        Whether less is better.
    unit : str
        Unit.
    digits : int
        Decimals to show.
    ours, raw, seconds : Measured or None
        Measured, raw pixels on the same subsets, and how long training took.
    reason : str
        What is likely behind it if ours does not reach what is wanted.
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
        """Return it as plain values; without a verdict if ours was not made with the paper's N and T."""
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
    """A sentence of the paper, a test of it, and what is likely behind it if it does not hold."""

    key: str
    says: str
    test: Callable[[Any], tuple[bool, str] | None]  # holds, and by which numbers; None: not measured yet
    reason: str


def plain(points: Mapping[Any, Measured]) -> dict[str, Any]:
    """Return means as plain values, by what they are of."""
    return {str(key): one.plain() for key, one in points.items()}


def summary(
    evidence: StoredCells, targets: Iterable[Target], claims: Iterable[Claim], *, comparable: bool
) -> dict[str, Any]:
    """Return what `results.json` begins with, whatever the experiment.

    Parameters
    ----------
    evidence : StoredCells
        What is there.
    targets : iterable of Target
        Numbers beside the paper's.
    claims : iterable of Claim
        Sentences to be tested.
    comparable : bool
        Whether the numbers were made with the paper's settings.
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
