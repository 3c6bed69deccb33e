"""The figure of the jobs: every tool on every task, as a multiple of the best result."""

from __future__ import annotations

from collections.abc import Mapping

from studies.jobs.imputation import OURS
from studies.report import OURS as OUR_COLOR
from studies.report import Drawing, blank, legend_below

__all__ = ["draw", "multiples"]

Tasks = Mapping[str, Mapping[str, float | None]]
_LARGEST = 8.0  # multiples beyond are drawn at the edge
_MARKS = "sD^v<>pPX*"


def multiples(job: str, tasks: Tasks) -> dict[str, dict[str, float]]:
    """Return results divided by the best one of their task. Areas under the curve become areas above it."""
    found = {}
    for task, values in tasks.items():
        losses = {tool: value for tool, value in values.items() if value is not None}
        if len(losses) > 1:  # shares of defects, and training runs that ended early, are not compared
            losses = {tool: 1 - value for tool, value in losses.items()} if job == "outliers" else losses
            found[task] = {tool: loss / max(min(losses.values()), 1e-12) for tool, loss in losses.items()}
    return found


def draw(tables: Mapping[str, Tasks]) -> Drawing | None:
    """Draw one panel per job, one line per task; None if nothing is compared."""
    panels = {job: multiples(job, tasks) for job, tasks in tables.items()}
    panels = {job: tasks for job, tasks in panels.items() if tasks}
    if not panels:
        return None
    tools = dict.fromkeys(tool for tasks in panels.values() for values in tasks.values() for tool in values)
    others = [tool for tool in tools if tool != OURS]
    heights = [len(tasks) + 1.5 for tasks in panels.values()]
    canvas = blank(9.0, 1.2 + 0.26 * sum(heights))
    axes = canvas.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for ax, (job, tasks) in zip(axes, panels.items(), strict=True):
        for place, values in enumerate(tasks.values()):
            for tool, multiple in values.items():
                number = others.index(tool) if tool in others else -1
                ours = number < 0
                ax.plot(
                    min(multiple, _LARGEST),
                    place,
                    "o" if ours else _MARKS[number % len(_MARKS)],
                    color=OUR_COLOR if ours else f"C{1 + number % 9}",
                    markersize=8 if ours else 5,
                    zorder=3 if ours else 2,
                    label=tool,
                )
        ax.axvspan(1, 1.05, color=OUR_COLOR, alpha=0.12, linewidth=0)
        ax.set(yticks=range(len(tasks)), yticklabels=list(tasks), xscale="log", xlim=(0.95, 1.1 * _LARGEST), title=job)
        ax.set_ylim(len(tasks) - 0.4, -0.6)
        ax.grid(axis="y", alpha=0.3)
    axes[-1].set(xticks=(ticks := [1, 1.5, 2, 3, 5, _LARGEST]), xticklabels=[*map(str, ticks[:-1]), "8 and more"])
    axes[-1].minorticks_off()
    axes[-1].set_xlabel("error, as a multiple of the smallest one")
    legend_below(canvas, list(axes), 5)
    return Drawing(
        canvas,
        "Errors of all tools on all tasks, as multiples of the smallest one",
        "Every tool on every task: its error as a multiple of the smallest one (outliers: one minus the area under the "
        "curve). The shaded range is within 5 % of the best.",
    )
