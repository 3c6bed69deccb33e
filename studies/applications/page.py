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
from studies.report import Drawing, blank, draw_all, legend_below, markdown_table, wrapped, write_text
from studies.runner import run_plan
from studies.runs import Place, Rows, read_object, write_json

__all__ = ["APPLICATIONS", "COMMANDS", "best", "draw", "multiples", "page"]

#: Results of one application, by task and then by tool.
Tasks = Mapping[str, Mapping[str, float | None]]


def _nearest_to_wanted(shares: Iterable[float], default: float | None) -> float | None:
    return min(shares, key=lambda share: abs(share - 0.02), default=default)


#: What the table of an application shows, and how to choose the best number of a row. The module of the same name has
#: `plan()`, which returns the runs, and `table(store, plan)`, which returns their results.
APPLICATIONS: dict[str, tuple[str, Callable[..., float | None]]] = {
    "imputation": (
        "The table shows the root mean squared error of missing entries; lower is better. The best result is bold. In "
        'the names of tasks, 20 and 50 are percentages of missing entries, and "block" means that a block of each '
        "sample is missing.",
        min,
    ),
    "subsets": (
        "The table shows the root mean squared error of missing entries in small parts of data sets; lower is better. "
        'The best result is bold. In the names of tasks, "gap" means that a fifth of the last axis of each sample is '
        'missing, and "channel" that an entire channel is missing. The other names are explained above. `mvrbm-linear` '
        "is the imputer without its trained correction.",
        min,
    ),
    "filling": (
        "The table shows the mean squared error of missing pixels of test images; lower is better. The best result is "
        "bold. Rows that end in a number of epochs show the error of `mvrbm` after it was trained for that many "
        "epochs.",
        min,
    ),
    "outliers": (
        "The table shows the area under the ROC curve, averaged over the tasks of each family of data; higher is "
        "better. The best result is bold. The row on defects shows the fraction of artificial defects that the "
        "detector's maps locate: a defect is located if most of its pixels are among the most unusual 5% of the map.",
        max,
    ),
    "unseen": (
        "The table shows the area under the ROC curve on families of data that were not used to design the detector; "
        "higher is better. The rows for false alarms show the fraction of normal samples that are reported as "
        "outliers, which should be 0.02. The best result is bold.",
        max,
    ),
    "alarms": (
        "The table shows the fraction of new normal samples that are reported as outliers, which should be 0.02. The "
        "best result is bold.",
        _nearest_to_wanted,
    ),
    "topics": (
        "Each tool reads half of the words of test documents and predicts the other half. The table shows the "
        "perplexity of the predicted words; lower is better. The best result is bold. `unigram` predicts the word "
        "frequencies of the training documents, and `nmf-kl` is NMF with the Kullback-Leibler divergence.",
        min,
    ),
}


def best(application: str, task: str, values: Iterable[float | None]) -> float | None:
    """Return the best result of a task. Shares of false alarms are best near 0.02, whatever the application."""
    choose = _nearest_to_wanted if task.startswith("false alarms") else APPLICATIONS[application][1]
    return choose((value for value in values if value is not None), default=None)


# -- the figure -------------------------------------------------------------------------------------

# Larger multiples are drawn at the edge of the figure.
_LARGEST = 8.0
_MARKERS = "sD^v<>pPX*"
_FIGURE = "The error of every tool on every task"
_CAPTION = (
    "The figure shows the error of every tool on every task, as a multiple of the smallest error on that task. For "
    "outliers, the error is one minus the area under the ROC curve. The shaded range is within 5% of the best tool."
)


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
    return Drawing(canvas, _FIGURE, _CAPTION)


# -- the page ---------------------------------------------------------------------------------------


_LEAD = (
    "This page compares `mvrbm` with other tools on imputation, outlier detection and topic models. Numbers are means "
    "over two random seeds in the section Outliers, ten in Alarms and three in Topics. The other sections use one "
    "seed. A dash means that the tool takes too long or was not run. `5-nearest` uses the five nearest neighbors, "
    "`ppca` is probabilistic PCA, and `lof` is the local outlier factor."
)


def page(tables: Mapping[str, Tasks]) -> str:
    """Return the page in Markdown: one table per application, one row per task, one column per tool."""
    sections = ["# Applications", wrapped(_LEAD), f"![{_FIGURE}](figures/applications.png)", wrapped(_CAPTION)]
    for name, tasks in tables.items():
        tools = list(dict.fromkeys(tool for values in tasks.values() for tool in values))
        rows = []
        for task, values in tasks.items():
            bold = best(name, task, values.values())
            rows.append([task, *(_number(values.get(tool), values.get(tool) == bold) for tool in tools)])
        sections += [
            f"## {name.capitalize()}",
            wrapped(APPLICATIONS[name][0]),
            markdown_table(["task", *tools], rows),
            f"Produced by `python -m studies applications {name}`.",
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
