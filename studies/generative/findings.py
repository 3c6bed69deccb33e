"""What the stored cells say: rows of tables, and which of the wanted lines are reached."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from studies.cells import Cell, Store
from studies.generative import work
from studies.generative.plan import GROUPS, Model, Scale, plan
from studies.generative.training import train, train_rbms, train_shared
from studies.report import StoredCells

__all__ = ["LINES", "PUBLISHED", "Evidence", "claims", "describe", "results"]

#: Published test log-likelihoods of binarized MNIST, with the number of parameters where a model has a fixed one.
PUBLISHED: dict[str, tuple[float, int | None]] = {
    "RBM, 500 hidden units, CD-25": (-86.34, 393_284),
    "RBM, 500 hidden units, centered PCD-1": (-84.86, 393_284),
    "RBM, centered PCD-1, by reverse AIS": (-96.61, 393_284),
    "sparse RBM (SET)": (-86.41, 50_000),
    "two-layer DBM": (-84.62, None),
    "mixture of 500 Bernoullis": (-137.64, 392_499),
    "RBM, 16 hidden units": (-142.56, 13_344),
}

#: What the study must show: the best machine of at most so many parameters has at least so many nats.
LINES: tuple[tuple[str, int, float], ...] = (
    ("at most 2,600 parameters", 2600, -96.0),
    ("at most 13,000 parameters", 13_000, -87.5),
    ("at most 16,000 parameters", 16_000, -86.3),
    ("at most 60,000 parameters", 60_000, -84.6),
    ("Dense, 500 hidden units", 393_284, -86.3),
)
_WIDEST = 1.0  # nats, of an interval
_TRAININGS = (train, train_rbms, train_shared)
_KINDS = {"kronecker": "Kronecker", "cp": "CP", "mpo": "MPO", "dense": "Dense", "rbms": "rbms"}


class Evidence(StoredCells):
    """The stored cells of a scale."""

    def __init__(self, store: Store, scale: Scale) -> None:
        super().__init__(store, plan(scale, list(GROUPS)))
        self.scale = scale
        self._trained = {cell.name: cell for cell in self.cells if cell.work in _TRAININGS}

    def trained(self, evaluated: Cell) -> tuple[Cell, Mapping[str, Any]]:
        """Return the training cell that another cell reads, with its numbers."""
        cell = self._trained[evaluated.settings["model"]]
        return cell, self.records[cell.name]["numbers"]

    def evaluated(self, *groups: str) -> list[dict[str, Any]]:
        """Return one row per evaluated model of some groups, with its training."""
        rows = []
        for cell, numbers in self.found(work.evaluate):
            trained, about = self.trained(cell)
            if cell.group in groups and "diverged" not in about:
                rows.append({**describe(trained), **about, **numbers, "cell": cell.name, "model": trained.name})
        return rows


def describe(trained: Cell) -> dict[str, Any]:
    """Return what a training cell trains, in words."""
    settings = trained.settings
    if trained.work is train_rbms:
        steps, rate = settings["gibbs_steps"], settings["learning_rate"]
        return {
            "kind": "rbms",
            "title": f"rbms, {settings['hidden']}, PCD-{steps}, batch {settings['batch_size']}, rate {rate:g}",
            "data": settings["data"],
            "seed": settings["seed"],
            "device": settings["device"],
        }
    hidden = "x".join(str(size) for size in settings["hidden"])
    title = Model(settings["coupling"], hidden, settings["updates"]).title
    return {
        "kind": _KINDS[settings["coupling"].partition(":")[0]],
        "title": title + (f", {settings['processes']} processes" if "processes" in settings else ""),
        "data": settings["data"],
        "seed": settings["seed"],
        "device": settings["device"],
    }


# -- tables -----------------------------------------------------------------------------------------


def _table(evidence: Evidence) -> list[dict[str, Any]]:
    """One row per machine and data set, over seeds."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in evidence.evaluated("likelihood"):
        groups.setdefault((row["title"], row["parameters"], row["updates"], row["data"]), []).append(row)
    rows = []
    for (title, parameters, updates, data), each in groups.items():
        intervals = [one["interval"] for one in each if one["interval"] is not None]
        rows.append(
            {
                "title": title,
                "kind": each[0]["kind"],
                "parameters": parameters,
                "updates": updates,
                "data": data,
                "seeds": [one["seed"] for one in each],
                "test": [one["test"] for one in each],
                "train": [one["train"] for one in each],
                "standard_error": [one["standard_error"] for one in each],
                "effective_samples": [one["effective_samples"] for one in each],
                "interval": intervals,
                "median": statistics.median(one["test"] for one in each),
                "median_train": statistics.median(one["train"] for one in each),
                "training_seconds": statistics.median(one["training_seconds"] for one in each),
            }
        )
    return sorted(rows, key=lambda row: (row["data"], row["parameters"]))


def _lines(table: list[dict[str, Any]], data: str) -> list[dict[str, Any]]:
    """Compare the best machine of each size with its line."""
    found = []
    for title, most, wanted in LINES:
        dense = title.startswith("Dense")
        fitting = [
            row
            for row in table
            if row["data"] == data and (row["parameters"] == most if dense else row["parameters"] <= most)
        ]
        if fitting:
            best = max(fitting, key=lambda row: row["median"])
            widths = [high - low for low, high in best["interval"]]
            found.append(
                {
                    "line": title,
                    "wanted": wanted,
                    "machine": best["title"],
                    "parameters": best["parameters"],
                    "median": best["median"],
                    "seeds": len(best["seeds"]),
                    "widest_interval": max(widths) if widths else None,
                    "reached": best["median"] >= wanted and len(best["seeds"]) >= 3,
                    "interval_narrow": max(widths) <= _WIDEST if widths else None,
                }
            )
    return found


def _seconds(evidence: Evidence) -> list[dict[str, Any]]:
    keys = ("title", "kind", "parameters", "updates", "training_seconds", "test", "train", "standard_error", "interval")
    rows = []
    for row in evidence.evaluated("seconds"):
        on = f"CPU, {row['cores']} cores" if row["device"] == "cpu" else evidence.records[row["model"]]["on"]["device"]
        rows.append({**{key: row[key] for key in keys}, "on": on, "device": row["device"]})
    return rows


def _samples(evidence: Evidence) -> list[dict[str, Any]]:
    rows = []
    for cell, numbers in evidence.found(work.samples):
        trained, about = evidence.trained(cell)
        where = {"start": cell.settings["start"], "steps": cell.settings["steps"], "parameters": about["parameters"]}
        rows.append({**describe(trained), **where, **numbers, "cell": cell.name})
    return rows


def _conditional(evidence: Evidence) -> list[dict[str, Any]]:
    rows = []
    for cell, numbers in evidence.found(work.conditional):
        trained, about = evidence.trained(cell)
        for steps, found in numbers["by_steps"].items():
            rows.append(
                {"title": describe(trained)["title"], "parameters": about["parameters"], "steps": int(steps), **found}
            )
    return rows


def _real(evidence: Evidence) -> dict[str, list[dict[str, Any]]]:
    """By data set, all models with their held-out nats, the best first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell, numbers in evidence.found(work.baselines):
        for name, model in numbers["models"].items():
            count = f", {model['components']} components" if "components" in model else ""
            row = {"title": name + count, **{key: model[key] for key in ("parameters", "test", "train")}}
            found.setdefault(cell.settings["data"], []).append(row)
    for one in evidence.evaluated("real"):
        keys = ("title", "parameters", "test", "train", "standard_error", "effective_samples", "interval", "updates")
        found.setdefault(one["data"], []).append({key: one[key] for key in keys})
    low = float("-inf")
    return {
        data: sorted(rows, key=lambda row: low if row["test"] is None else row["test"], reverse=True)
        for data, rows in found.items()
    }


def claims(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what the study must show besides :data:`LINES`, as far as it was measured."""
    rows = []

    def add(claim: str, value: float, wanted: str, reached: bool) -> None:
        rows.append({"claim": claim, "found": value, "wanted": wanted, "reached": reached})

    if found["judge"] is not None:
        right = found["judge"]["gray"]["agreement"]
        add("accuracy of the judge on test digits", right, "at least 0.992", right >= 0.992)
    given = [row for row in found["conditional"] if row["parameters"] <= 30_000]
    if given:
        agreement = max(given, key=lambda row: row["steps"])["means"]["agreement"]
        add("agreement with the requested class, means", agreement, "at least 0.95", agreement >= 0.95)
    for row in found["samples"]:
        means, low, high = row["means"], min(row["means"]["classes"]), max(row["means"]["classes"])
        if row["start"] == "chains":
            add(f"confident means of {row['title']}", means["confident"], "at least 0.85", means["confident"] >= 0.85)
            add(f"rarest class, {row['title']}", low, "at least 0.04", low >= 0.04)
            add(f"most frequent class, {row['title']}", high, "at most 0.2", high <= 0.2)
    for minutes, wanted in ((3, -95.0), (10, -91.0)):
        quick = [
            row["test"]
            for row in found["seconds_table"]
            if row["device"] == "cpu" and row["kind"] == "Kronecker" and row["training_seconds"] <= 60 * minutes
        ]
        if quick:
            add(
                f"nats after at most {minutes} minutes on the CPU",
                max(quick),
                f"at least {wanted:g}",
                max(quick) >= wanted,
            )
    if len(found["processes"]) == 2:
        one, two = found["processes"]
        difference = two["test"] - one["test"]
        error = 2 * math.hypot(one["standard_error"], two["standard_error"])
        add("nats of two processes minus those of one", difference, f"within {error:.2f}", abs(difference) <= error)
    return rows


def results(evidence: Evidence, name: str) -> dict[str, Any]:
    """Return all findings as plain values; `name` is that of the scale. Only scale `paper` has verdicts."""
    table = _table(evidence)
    judges = evidence.found(work.judge)
    keys = ("title", "updates", "training_seconds", "test", "standard_error", "interval")
    found = {
        "scale": name,
        "cells": {"stored": len(evidence.stored), "planned": len(evidence.cells)},
        "seconds": round(evidence.seconds, 1),
        "machines": evidence.machines,
        "diverged": evidence.diverged,
        "annealing": dict(evidence.scale.annealing),
        "table": table,
        "lines": _lines(table, evidence.scale.data[0]) if name == "paper" else [],
        "choose": [{**{key: row[key] for key in keys}, "cell": row["cell"]} for row in evidence.evaluated("choose")],
        "seconds_table": _seconds(evidence),
        "judge": judges[0][1] if judges else None,
        "samples": _samples(evidence),
        "conditional": _conditional(evidence),
        "real": _real(evidence),
        "processes": [{key: row[key] for key in keys} for row in evidence.evaluated("processes")],
    }
    return {**found, "claims": claims(found) if name == "paper" else []}
