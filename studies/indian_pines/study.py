"""The study from end to end: one cell per draw, then the summary over draws, the label map and the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mvrbm import __version__
from mvrbm.errors import StorageError
from mvrbm.io.datasets import load
from studies.arguments import Command, Options, add_options, count, say
from studies.cells import Cell, Outcome, Place, Store, write_json
from studies.indian_pines.blocks import Split, divide
from studies.indian_pines.comparison import explain, run_draw
from studies.indian_pines.settings import CLASSES, Candidate, Settings
from studies.runner import run

__all__ = ["COMMANDS", "draw_map", "run_study", "summary"]

Array = NDArray[Any]

_COLORS = (
    "#7f5539", "#e6a817", "#f4d35e", "#b5651d", "#9bd770", "#3f9b45", "#c9f29b", "#d8b4f8",
    "#5e3c99", "#1f78b4", "#6db7ec", "#17becf", "#ff9da7", "#14532d", "#d7263d", "#8d99ae",
)  # fmt: skip


# -- cells ------------------------------------------------------------------------------------------


def scene(data_dir: str | None) -> tuple[Array, Array]:
    """Return the cube (rows, columns, bands) and the labels (rows, columns) of Indian Pines."""
    loaded = load("indian-pines", data_dir=data_dir)
    return loaded.arrays, loaded.labels


def _settings(plain: Mapping[str, Any]) -> Settings:
    """Return settings from plain values."""
    candidates = [{**one, "hidden_shape": tuple(one["hidden_shape"])} for one in plain["candidates"]]
    some = tuple(Candidate(**one) for one in candidates)
    return Settings(**{**plain, "candidates": some, "passes": tuple(plain["passes"])})


def one_draw(settings: Mapping[str, Any], place: Place) -> Outcome:
    """Scores of all methods on one draw, and the labels that the support vector machine predicted."""
    cube, labels = scene(place.data_dir)
    result, _, predicted = run_draw(cube, labels, settings["draw"], _settings(settings["comparison"]), say)
    return Outcome(result, {name: torch.from_numpy(np.asarray(values)) for name, values in predicted.items()})


def cells(draws: int, settings: Settings) -> list[Cell]:
    """Return one cell per draw; the draws are numbered from 1."""
    plain = asdict(settings)
    return [
        Cell(f"draw-{draw}", "draws", one_draw, {"draw": draw, "comparison": plain}) for draw in range(1, draws + 1)
    ]


# -- results ----------------------------------------------------------------------------------------


def run_study(
    out: Path,
    work: Path,
    *,
    draws: int = 5,
    settings: Settings | None = None,
    data_dir: str | None = None,
    jobs: int = 1,
    budget: float | None = None,
) -> dict[str, Any]:
    """Compute the missing draws, and write ``results.json`` and ``label-map.png`` of all stored draws.

    Parameters
    ----------
    out : Path
        Folder for both files.
    work : Path
        Folder for the cells.
    draws : int
        Number of draws of blocks. The picture shows the first.
    settings : Settings, optional
        Settings of the comparison.
    data_dir : str, optional
        Folder with the data sets.
    jobs, budget
        As for :func:`studies.runner.run`.

    Returns
    -------
    dict
        The content of ``results.json``.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    settings = settings or Settings()
    store, planned = Store(work / "cells"), cells(draws, settings)
    done = run(planned, Place(store, "cpu", data_dir, work), jobs=jobs, budget=budget)
    done.raise_failures()
    stored = [cell for cell in planned if store.has(cell)]
    if not stored:
        raise StorageError("no draw is computed yet: allow a larger budget")
    found = []
    for cell in stored:
        record = store.record(cell) or {}
        found.append({**record["numbers"], "seconds": round(record["seconds"], 1)})
    report = {"mvrbm": __version__, "settings": asdict(settings), "summary": summary(found), "draws": found}
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "results.json", report)
    if stored[0] is planned[0]:
        _, labels = scene(data_dir)
        predicted = {name: store.arrays(planned[0])[name].numpy() for name in ("TVRBM", "PCA")}
        draw_map(labels, divide(labels, 1, settings), predicted, out / "label-map.png")
    return report


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean and standard deviation over draws of every score, by classifier and method."""
    table: dict[str, Any] = {}
    for classifier, methods in results[0]["scores"].items():
        table[classifier] = {}
        for method in methods:
            table[classifier][method] = {}
            for score in ("overall", "average", "kappa"):
                values = [result["scores"][classifier][method][score] for result in results]
                spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
                table[classifier][method][score] = {"mean": float(np.mean(values)), "deviation": spread}
    return table


def draw_map(labels: Array, split: Split, predicted: Mapping[str, Array], path: Path) -> None:
    """Draw the labels and the predictions side by side, training pixels in black.

    Parameters
    ----------
    labels : array (rows, columns)
        The true labels.
    split : Split
        The pixels of the draw.
    predicted : mapping of str to array (n_test,)
        Labels of the test pixels, by the title of their panel.
    path : Path
        A PNG file.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from mvrbm.pages import styled

    light, black = "#e4e4e4", "#000000"
    colors = [light, *_COLORS, black]
    training = len(colors) - 1
    truth = np.where(np.isin(labels, split.classes), labels, 0).astype(int)
    panels = {"labels": truth}
    target = labels[tuple(split.test.T)]
    for name, values in predicted.items():
        panel = np.zeros_like(truth)
        panel[tuple(split.test.T)] = values
        panels[f"{name}: {np.mean(values == target):.3f} right"] = panel
    with styled():
        figure = Figure(figsize=(3.1 * len(panels), 3.9))
        for number, (title, panel) in enumerate(panels.items(), start=1):
            axes = figure.add_axes(((number - 1) / len(panels) + 0.01, 0.18, 1 / len(panels) - 0.02, 0.75))
            panel[tuple(split.train.T)] = training
            axes.imshow(panel, ListedColormap(colors), vmin=0, vmax=training, interpolation="nearest")
            axes.set_title(title)
            axes.set_axis_off()
        keys = [(colors[number], CLASSES[number] if number < len(CLASSES) else f"{number}") for number in split.classes]
        keys += [(black, "training"), (light, "no label, or not tested")]
        handles = [Patch(facecolor=color, label=name) for color, name in keys]
        figure.legend(handles=handles, loc="lower center", ncols=5, fontsize=8.5, handlelength=1.2, columnspacing=1.2)
        figure.savefig(path, dpi=110, metadata={"Software": None})


# -- the command ------------------------------------------------------------------------------------


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draws", type=count, default=5, metavar="N", help="Number of draws of blocks. Default: 5.")
    parser.add_argument("--explain", action="store_true", help="Measure likely reasons instead: explain.json.")
    add_options(
        parser,
        *("--out", "--work", "--jobs", "--budget", "--report-only", "--data-dir", "--json"),
        out={"default": Path("results/indian-pines"), "help": "Output folder. Default: results/indian-pines."},
        work={"default": Path("runs/indian-pines"), "help": "Folder for cells. Default: runs/indian-pines."},
    )


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    path = options.out / ("explain.json" if options.explain else "results.json")
    if options.report_only:
        if not path.is_file():
            raise StorageError(f"{options.out} has no {path.name}: run without --report-only first")
    elif options.explain:
        cube, labels = scene(options.data_dir)
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(path, explain(cube, labels, draws=options.draws))
    else:
        some = {"draws": options.draws, "data_dir": options.data_dir, "jobs": options.jobs, "budget": options.budget}
        run_study(options.out, options.work, **some)
    found = json.loads(path.read_text())
    return found, json.dumps(found, indent=1) if options.explain else table(found["summary"])


def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return a summary as text, one line per classifier and method."""
    lines = []
    for classifier, methods in found.items():
        for method, values in methods.items():
            numbers = "  ".join(f"{name} {v['mean']:.3f} ± {v['deviation']:.3f}" for name, v in values.items())
            lines.append(f"{classifier:<6}{method:<20}{numbers}")
    return "\n".join(lines)


COMMANDS = {"indian-pines": Command("Order 3: features of hyperspectral patches.", _add, _run, "--draws 5")}
