"""The plan and the results of the study: one run per draw, the summary over draws, the label map and the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm import __version__
from mvrbm.errors import StorageError
from studies.arguments import Command, Options, add_study_options, count
from studies.indian_pines.run import CLASSES, Settings, Split, divide, explain, one_draw, scene
from studies.report import read_results
from studies.runner import run_plan
from studies.runs import Place, Run, Store, write_json

__all__ = ["COMMANDS", "draw_map", "run_study", "summary"]

Array = NDArray[Any]

_COLORS = (
    "#7f5539", "#e6a817", "#f4d35e", "#b5651d", "#9bd770", "#3f9b45", "#c9f29b", "#d8b4f8",
    "#5e3c99", "#1f78b4", "#6db7ec", "#17becf", "#ff9da7", "#14532d", "#d7263d", "#8d99ae",
)  # fmt: skip


# -- the plan ------------------------------------------------------------------------------------------


def plan(draws: int, settings: Settings) -> list[Run]:
    """Return one run per draw. Draws are numbered from 1."""
    plain = asdict(settings)
    return [Run(f"draw-{draw}", "draws", one_draw, {"draw": draw, "comparison": plain}) for draw in range(1, draws + 1)]


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
        Folder for stored runs.
    draws : int
        Number of draws of blocks. The label map shows the first draw.
    settings : Settings, optional
        Settings of the comparison.
    data_dir : str, optional
        Folder with the data sets.
    jobs, budget
        As for :func:`studies.runner.run_plan`.

    Returns
    -------
    dict
        The content of ``results.json``.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    settings = settings or Settings()
    store = Store.within(work)
    runs = plan(draws, settings)
    done = run_plan(runs, Place(store, "cpu", data_dir, work), jobs=jobs, budget=budget)
    done.raise_failures()
    stored = [run for run in runs if store.has(run)]
    if not stored:
        raise StorageError("no draw is computed yet: use a larger budget")
    found = []
    for run in stored:
        record = store.record(run) or {}
        found.append({**record["numbers"], "seconds": round(record["seconds"], 1)})
    report = {"mvrbm": __version__, "settings": asdict(settings), "summary": summary(found), "draws": found}
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "results.json", report)
    if stored[0] is runs[0]:
        _, labels = scene(data_dir)
        predicted = {name: store.arrays(runs[0])[name].numpy() for name in ("TVRBM", "PCA")}
        draw_map(labels, divide(labels, 1, settings), predicted, out / "label-map.png")
    return report


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean and standard deviation of every score over draws, by classifier and method."""
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
    """Draw the labels and the predictions side by side, with training pixels in black.

    Parameters
    ----------
    labels : array (rows, columns)
        The true labels.
    split : Split
        The pixels of the draw.
    predicted : mapping of str to array (n_test,)
        Predicted labels of the test pixels, by the title of the panel.
    path : Path
        PNG file to write.
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
    parser.add_argument(
        "--explain", action="store_true", help="Measure likely reasons for the results instead, and write explain.json."
    )
    add_study_options(parser, "indian-pines", "--jobs", "--budget", "--data-dir")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    path = options.out / ("explain.json" if options.explain else "results.json")
    if options.explain and not options.report_only:
        cube, labels = scene(options.data_dir)
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(path, explain(cube, labels, draws=options.draws))
    elif not options.report_only:
        some = {"draws": options.draws, "data_dir": options.data_dir, "jobs": options.jobs, "budget": options.budget}
        run_study(options.out, options.work, **some)
    found = read_results(path)
    return found, json.dumps(found, indent=1) if options.explain else table(found["summary"])


def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return a summary as text, with one line per classifier and method."""
    lines = []
    for classifier, methods in found.items():
        for method, values in methods.items():
            numbers = "  ".join(f"{name} {v['mean']:.3f} ± {v['deviation']:.3f}" for name, v in values.items())
            lines.append(f"{classifier:<6}{method:<20}{numbers}")
    return "\n".join(lines)


COMMANDS = {
    "indian-pines": Command(
        "Order 3: features of hyperspectral patches of the scene Indian Pines.", _add, _run, "--draws 5"
    )
}
