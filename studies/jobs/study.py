"""The command of the jobs: what people do with a model, each compared with other tools, in one table per job."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.io.atomic import replace_file
from studies.arguments import Command, Options, add_options, add_parts
from studies.cells import Place, Rows, read_object
from studies.jobs.figure import draw
from studies.report import draw_all
from studies.runner import run

__all__ = ["COMMANDS", "JOBS", "page"]

#: What the numbers of a job are, and which is the best. The module of its name has `cells()` and `table(store, cells)`.
JOBS = {
    "imputation": ("Root mean squared error of missing entries; less is better.", min),
    "filling": ("Mean squared error of missing pixels of test images; less is better.", min),
    "outliers": ("Area under the curve, mean over classes; more is better.", max),
    "topics": ("Perplexity of unseen halves of documents; less is better.", min),
}


def page(tables: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> str:
    """Return the report as Markdown: one table per job, one row per task, one column per tool."""
    sections = ["# Jobs", "Means over seeds. A dash: the tool takes too long, or was not run.", "![](figures/jobs.png)"]
    for job, tasks in tables.items():
        tools = list(dict.fromkeys(tool for values in tasks.values() for tool in values))
        lines = [["task", *tools], ["---"] * (len(tools) + 1)]
        meaning, best = JOBS[job]
        for task, values in tasks.items():
            first = best((value for value in values.values() if value is not None), default=None)
            lines.append([task, *(_number(values.get(tool), values.get(tool) == first) for tool in tools)])
        rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        sections += [f"## {job.capitalize()}", f"{meaning} The best is bold.", rows, f"`python -m studies jobs {job}`"]
    return "\n\n".join(sections) + "\n"


def _number(value: float | None, bold: bool) -> str:
    return "-" if value is None else f"**{value:.4g}**" if bold else f"{value:.4g}"


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, list(JOBS))
    add_options(parser, "--work", "--out", "--data-dir", "--device", "--jobs", "--budget", "--only", "--report-only")
    add_options(parser, "--json")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    folder, out = options.work or Path("runs/jobs"), options.out or Path("results/jobs")
    place = Place(Rows(out, folder), str(resolve_device(options.device)), options.data_dir, folder)
    summary = None
    modules = {job: importlib.import_module(f"studies.jobs.{job}") for job in options.parts or JOBS}
    planned = {job: module.cells() for job, module in modules.items()}
    if not options.report_only:
        out.mkdir(parents=True, exist_ok=True)
        chosen = [cell for cells in planned.values() for cell in cells if (options.only or "") in cell.name]
        summary = run(chosen, place, jobs=options.jobs, budget=options.budget)
    tables = {job: module.table(place.store, planned[job]) for job, module in modules.items()}
    former = read_object(out / "results.json") or {}  # a run may be of one job or task
    tables = {job: {**former.get(job, {}), **tables.get(job, {})} for job in JOBS if job in former or tables.get(job)}
    if not tables:
        raise StorageError(f"{out} holds no finished cells: there is nothing to report on")
    draw_all(out, {"jobs": draw}, tables)
    for name, text in (("README.md", page(tables)), ("results.json", json.dumps(tables, indent=1) + "\n")):
        with replace_file(out / name) as file:
            file.write(text.encode())
    if summary is not None:
        summary.raise_failures()
    return {**tables, "out": str(out)}, str(out / "README.md")


COMMANDS = {
    "jobs": Command(
        "Filling in, imputation, outliers and topics, compared with the tools that people use.",
        _add,
        _run,
        "imputation --only digits",
    )
}
