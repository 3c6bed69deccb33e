"""The page of the applications: one table per application, one figure, and the command."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from studies.applications.imputation import OURS
from studies.arguments import Command, Options, add_parts, add_study_options
from studies.report import OURS as OUR_COLOR
from studies.report import Drawing, blank, draw_all, legend_below, markdown_table, write_text
from studies.runner import run_plan
from studies.runs import Place, Rows, read_object, write_json

__all__ = ["APPLICATIONS", "COMMANDS", "draw", "multiples", "page"]

#: Results of one application, by task and then by tool.
Tasks = Mapping[str, Mapping[str, float | None]]


def _nearest_to_wanted(shares: Iterable[float], default: float | None) -> float | None:
    return min(shares, key=lambda share: abs(share - 0.02), default=default)


#: What the numbers of an application are, and how to choose the best. The module of the same name has `plan()`, which
#: returns the runs, and `table(store, plan)`, which returns their results.
APPLICATIONS: dict[str, tuple[str, Callable[..., float | None]]] = {
    "imputation": ("Root mean squared error of missing entries; lower is better.", min),
    "subsets": ("Root mean squared error of missing entries of small parts of data sets; lower is better.", min),
    "filling": ("Mean squared error of missing pixels of test images; lower is better.", min),
    "outliers": ("Area under the ROC curve, mean over tasks; higher is better.", max),
    "unseen": (
        "Area under the ROC curve on data that took no part in the design of the detector; higher is better. Shares "
        "of false alarms: 0.02 is wanted.",
        max,
    ),
    "alarms": ("Share of new normal samples that are reported as outliers; 0.02 is wanted.", _nearest_to_wanted),
    "topics": ("Perplexity of the unseen halves of documents; lower is better.", min),
}


# -- the figure -------------------------------------------------------------------------------------

# Larger multiples are drawn at the edge of the figure.
_LARGEST = 8.0
_MARKERS = "sD^v<>pPX*"


def multiples(application: str, tasks: Tasks) -> dict[str, dict[str, float]]:
    """Divide the errors of each task by the smallest one. The error of outliers is one minus the area under the curve.

    Tasks with a single result, such as shares of defects, are left out.
    """
    found: dict[str, dict[str, float]] = {}
    if application in ("alarms", "unseen"):  # these are not errors
        return found
    for task, values in tasks.items():
        errors = {tool: value for tool, value in values.items() if value is not None}
        if len(errors) > 1:
            if application == "outliers":
                errors = {tool: 1 - value for tool, value in errors.items()}
            smallest = max(min(errors.values()), 1e-12)
            found[task] = {tool: error / smallest for tool, error in errors.items()}
    return found


def draw(tables: Mapping[str, Tasks]) -> Drawing | None:
    """Draw one panel per application with one line per task; return None if there is nothing to compare."""
    panels = {name: multiples(name, tasks) for name, tasks in tables.items()}
    panels = {name: tasks for name, tasks in panels.items() if tasks}
    if not panels:
        return None
    tools = dict.fromkeys(tool for tasks in panels.values() for values in tasks.values() for tool in values)
    others = [tool for tool in tools if tool != OURS]
    heights = [len(tasks) + 1.5 for tasks in panels.values()]
    canvas = blank(9.0, 1.2 + 0.26 * sum(heights))
    axes = canvas.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for ax, (name, tasks) in zip(axes, panels.items(), strict=True):
        for line, values in enumerate(tasks.values()):
            for tool, multiple in values.items():
                ours = tool == OURS
                number = 0 if ours else others.index(tool)
                ax.plot(
                    min(multiple, _LARGEST),
                    line,
                    "o" if ours else _MARKERS[number % len(_MARKERS)],
                    color=OUR_COLOR if ours else f"C{1 + number % 9}",
                    markersize=8 if ours else 5,
                    zorder=3 if ours else 2,
                    label=tool,
                )
        ax.axvspan(1, 1.05, color=OUR_COLOR, alpha=0.12, linewidth=0)
        ax.set(yticks=range(len(tasks)), yticklabels=list(tasks), xscale="log", xlim=(0.95, 1.1 * _LARGEST), title=name)
        ax.set_ylim(len(tasks) - 0.4, -0.6)
        ax.grid(axis="y", alpha=0.3)
    ticks = [1, 1.5, 2, 3, 5, _LARGEST]
    axes[-1].set(xticks=ticks, xticklabels=[*map(str, ticks[:-1]), "8 and more"])
    axes[-1].minorticks_off()
    axes[-1].set_xlabel("error, as a multiple of the smallest one")
    legend_below(canvas, list(axes), 5)
    return Drawing(
        canvas,
        "Errors of all tools on all tasks, as multiples of the smallest one",
        "Every tool on every task: its error as a multiple of the smallest one (outliers: one minus the area under the "
        "curve). The shaded range is within 5 % of the best.",
    )


# -- the page ---------------------------------------------------------------------------------------


def page(tables: Mapping[str, Tasks]) -> str:
    """Return the page in Markdown: one table per application, one row per task, one column per tool."""
    sections = [
        "# Applications",
        "Means over seeds. A dash means that the tool takes too long, or was not run.",
        "![](figures/applications.png)",
    ]
    for name, tasks in tables.items():
        tools = list(dict.fromkeys(tool for values in tasks.values() for tool in values))
        meaning, choose = APPLICATIONS[name]
        rows = []
        for task, values in tasks.items():
            best = choose((value for value in values.values() if value is not None), default=None)
            rows.append([task, *(_number(values.get(tool), values.get(tool) == best) for tool in tools)])
        sections += [
            f"## {name.capitalize()}",
            f"{meaning} The best result is bold.",
            markdown_table(["task", *tools], rows),
            f"`python -m studies applications {name}`",
        ]
    return "\n\n".join(sections) + "\n"


def _number(value: float | None, bold: bool) -> str:
    if value is None:
        return "-"
    return f"**{value:.4g}**" if bold else f"{value:.4g}"


# -- the command ------------------------------------------------------------------------------------


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, list(APPLICATIONS))
    add_study_options(parser, "applications", "--only", "--jobs", "--budget", "--device", "--data-dir")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    out = options.out
    store = Rows(out, options.work)
    place = Place(store, str(resolve_device(options.device)), options.data_dir, options.work)
    modules = {name: importlib.import_module(f"studies.applications.{name}") for name in options.parts or APPLICATIONS}
    plans = {name: module.plan() for name, module in modules.items()}
    summary = None
    if not options.report_only:
        out.mkdir(parents=True, exist_ok=True)
        chosen = [run for plan in plans.values() for run in plan if (options.only or "") in run.name]
        summary = run_plan(chosen, place, jobs=options.jobs, budget=options.budget)
    # Keep the results of other applications and tasks: a command may compute only some of them.
    former = read_object(out / "results.json") or {}
    tables = {}
    for name in APPLICATIONS:
        found = modules[name].table(store, plans[name]) if name in modules else {}
        if name in former or found:
            tables[name] = {**former.get(name, {}), **found}
    if not tables:
        raise StorageError(f"{out} holds no finished runs: there is nothing to report on")
    draw_all(out, {"applications": draw}, tables)
    write_json(out / "results.json", tables)
    write_text(out / "README.md", page(tables))
    if summary is not None:
        summary.raise_failures()
    return {**tables, "out": str(out)}, str(out / "README.md")


COMMANDS = {
    "applications": Command(
        "Imputation, filling in, outliers, false alarms and topics, each compared with other tools.",
        _add,
        _run,
        "imputation --only digits",
    )
}
