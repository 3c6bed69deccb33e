"""The results of the study of generative models: tables, figures, the page in Markdown, and the command."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import mvrbm
from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from studies.arguments import Command, Options, UsageError, add_options, add_parts, count, not_negative, say
from studies.baselines.judge import CONFIDENT
from studies.data import DIGITS
from studies.generative.plan import GROUPS, SCALES, Model, Scale, chosen_model, chosen_runs, plan
from studies.generative.run import (
    baselines,
    conditional,
    evaluate,
    judge,
    sample_quality,
    samples,
    train,
    train_rbms,
    train_shared,
)
from studies.report import (
    DASH,
    OURS,
    PAPERS,
    Drawing,
    StoredRuns,
    bare,
    blank,
    draw_all,
    legend_below,
    markdown_table,
    wrapped,
    write_text,
)
from studies.runner import run_plan
from studies.runs import Place, Run, Store, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "CAPTIONS",
    "COMMANDS",
    "FIGURES",
    "LINES",
    "PUBLISHED",
    "Evidence",
    "caption",
    "claims",
    "describe",
    "page",
    "results",
]


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

#: Goals of the study: a limit on the number of parameters, and the nats that the best machine within it must reach.
LINES: tuple[tuple[str, int, float], ...] = (
    ("at most 2,600 parameters", 2600, -96.0),
    ("at most 13,000 parameters", 13_000, -87.5),
    ("at most 16,000 parameters", 16_000, -86.3),
    ("at most 60,000 parameters", 60_000, -84.6),
    ("Dense, 500 hidden units", 393_284, -86.3),
)
# Largest width of an interval of the log-likelihood, in nats.
_WIDEST = 1.0
_TRAININGS = (train, train_rbms, train_shared)
_KINDS = {"kronecker": "Kronecker", "cp": "CP", "mpo": "MPO", "dense": "Dense", "rbms": "rbms"}


class Evidence(StoredRuns):
    """The stored runs of a scale."""

    def __init__(self, store: Store, scale: Scale) -> None:
        super().__init__(store, plan(scale, list(GROUPS)))
        self.scale = scale
        self._trained = {run.name: run for run in self.runs if run.compute in _TRAININGS}

    def trained(self, evaluated: Run) -> tuple[Run, Mapping[str, Any]]:
        """Return the training run that a run reads, with its numbers."""
        run = self._trained[evaluated.settings["model"]]
        return run, self.records[run.name]["numbers"]

    def evaluated(self, *groups: str) -> list[dict[str, Any]]:
        """Return one row per evaluated machine of some groups, with the numbers of its training."""
        rows = []
        for run, numbers in self.found(evaluate):
            trained, about = self.trained(run)
            if run.group in groups and "diverged" not in about:
                rows.append({**describe(trained), **about, **numbers, "run": run.name, "model": trained.name})
        return rows


def describe(trained: Run) -> dict[str, Any]:
    """Describe the machine of a training run."""
    settings = trained.settings
    if trained.compute is train_rbms:
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


def _likelihood_results(evidence: Evidence) -> list[dict[str, Any]]:
    """Return one row per machine and data set, over seeds."""
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


def _line_results(table: list[dict[str, Any]], data: str) -> list[dict[str, Any]]:
    """Compare the best machine of each size with its goal."""
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


def _seconds_results(evidence: Evidence) -> list[dict[str, Any]]:
    keys = ("title", "kind", "parameters", "updates", "training_seconds", "test", "train", "standard_error", "interval")
    rows = []
    for row in evidence.evaluated("seconds"):
        on = f"CPU, {row['cores']} cores" if row["device"] == "cpu" else evidence.records[row["model"]]["on"]["device"]
        rows.append({**{key: row[key] for key in keys}, "on": on, "device": row["device"]})
    return rows


def _sample_results(evidence: Evidence) -> list[dict[str, Any]]:
    rows = []
    for run, numbers in evidence.found(samples):
        trained, about = evidence.trained(run)
        where = {"start": run.settings["start"], "steps": run.settings["steps"], "parameters": about["parameters"]}
        rows.append({**describe(trained), **where, **numbers, "run": run.name})
    return rows


def _conditional_results(evidence: Evidence) -> list[dict[str, Any]]:
    rows = []
    for run, numbers in evidence.found(conditional):
        trained, about = evidence.trained(run)
        for steps, found in numbers["by_steps"].items():
            rows.append(
                {"title": describe(trained)["title"], "parameters": about["parameters"], "steps": int(steps), **found}
            )
    return rows


def _real_results(evidence: Evidence) -> dict[str, list[dict[str, Any]]]:
    """Return all models by data set, those with the highest held-out log-likelihood first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run, numbers in evidence.found(baselines):
        for name, model in numbers["models"].items():
            count = f", {model['components']} components" if "components" in model else ""
            row = {"title": name + count, **{key: model[key] for key in ("parameters", "test", "train")}}
            found.setdefault(run.settings["data"], []).append(row)
    for one in evidence.evaluated("real"):
        keys = ("title", "parameters", "test", "train", "standard_error", "effective_samples", "interval", "updates")
        found.setdefault(one["data"], []).append({key: one[key] for key in keys})
    low = float("-inf")
    return {
        data: sorted(rows, key=lambda row: low if row["test"] is None else row["test"], reverse=True)
        for data, rows in found.items()
    }


def claims(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the goals of the study besides :data:`LINES`, as far as they were measured."""
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
        means = row["means"]
        low = min(row["means"]["classes"])
        high = max(row["means"]["classes"])
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
    """Return all results as plain values. `name` is the name of the scale; only scale `paper` has verdicts."""
    table = _likelihood_results(evidence)
    judges = evidence.found(judge)
    keys = ("title", "updates", "training_seconds", "test", "standard_error", "interval")
    found = {
        "scale": name,
        "runs": {"stored": len(evidence.stored), "planned": len(evidence.runs)},
        "seconds": round(evidence.seconds, 1),
        "machines": evidence.machines,
        "diverged": evidence.diverged,
        "annealing": dict(evidence.scale.annealing),
        "table": table,
        "lines": _line_results(table, evidence.scale.data[0]) if name == "paper" else [],
        "choose": [{**{key: row[key] for key in keys}, "run": row["run"]} for row in evidence.evaluated("choose")],
        "seconds_table": _seconds_results(evidence),
        "judge": judges[0][1] if judges else None,
        "samples": _sample_results(evidence),
        "conditional": _conditional_results(evidence),
        "real": _real_results(evidence),
        "processes": [{key: row[key] for key in keys} for row in evidence.evaluated("processes")],
    }
    return {**found, "claims": claims(found) if name == "paper" else []}


Array = NDArray[Any]

_COLORS = {"Kronecker": OURS, "CP": "#3a9460", "MPO": "#a0508c", "Dense": "#444444", "rbms": PAPERS}
_MARKS = {"Kronecker": "o", "CP": "^", "MPO": "s", "Dense": "D", "rbms": "v"}
_LINE_STYLES = ("-", "--", ":", "-.")
_LINE_COLORS = ("#999999", "#c9a227")
# Machines above this log-likelihood, in nats, are also drawn in a second panel.
_GOOD = -100.0
# Samples per row of a figure.
_COLUMNS = 16

#: Captions of the figures by name; `{data}` is the first data set, and `{steps}` the number of Gibbs steps.
CAPTIONS = {
    "nats-parameters": "The figure shows the median and the range of the test log-likelihood over training seeds for "
    "the `{data}` data set, estimated by annealed importance sampling. The lines are published values for binarized "
    "MNIST.",
    "nats-seconds": "Each point is a separate training run with one seed. The learning-rate schedule of a run depends "
    "on its number of updates.",
    "samples": "The figure shows test digits, and the first samples of every model without selection: first the "
    "means, and then the draws.",
    "conditional": "Each row of the figure shows means for one requested digit, after {steps} Gibbs steps from noise "
    "with the label fixed. The samples were not selected.",
}


def caption(name: str, scale: Scale) -> str:
    """Return the caption of a figure."""
    return CAPTIONS[name].format(data=scale.data[0], steps=f"{max(scale.conditional_samples['steps']):,}")


def nats_against_parameters(evidence: Evidence) -> Drawing | None:
    """Draw test nats against the number of parameters, with published values as lines.

    A second panel shows the best machines.
    """
    data = evidence.scale.data[0]
    rows = [row for row in results(evidence, "")["table"] if row["data"] == data]
    if not rows:
        return None
    good = [row for row in rows if row["median"] > _GOOD]
    canvas = blank(12.0 if good else 8.5, 5.4)
    axes = canvas.subplots(1, 2 if good else 1, squeeze=False)[0]
    for ax, shown, lowest in zip(axes, (rows, good), (-math.inf, _GOOD), strict=False):
        _against_parameters(ax, shown, {name: nats for name, (nats, _) in PUBLISHED.items() if nats > lowest})
    if good:
        axes[0].axhspan(_GOOD, axes[0].get_ylim()[1], color=OURS, alpha=0.05, linewidth=0)
        axes[1].set_title("the upper part")
    axes[0].set_ylabel("test log-likelihood, nats per digit")
    legend_below(canvas, axes, 3 if good else 2)
    return Drawing(
        canvas,
        "Test log-likelihood against the number of parameters for several couplings, with published values as lines",
        caption("nats-parameters", evidence.scale),
    )


def _against_parameters(ax: Axes, rows: Sequence[Mapping[str, Any]], published: Mapping[str, float]) -> None:
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["parameters"])
        ends = np.array([[row["median"] - min(row["test"]), max(row["test"]) - row["median"]] for row in own]).T
        options: dict[str, Any] = {"color": _COLORS[kind], "marker": _MARKS[kind], "linewidth": 1.2, "capsize": 2.5}
        x, y = [row["parameters"] for row in own], [row["median"] for row in own]
        ax.errorbar(x, y, yerr=ends, label=kind, zorder=3, **options)
    for name, nats in published.items():
        number = list(PUBLISHED).index(name)  # the same line in both panels
        look: dict[str, Any] = {
            "color": _LINE_COLORS[number % 2],
            "linestyle": _LINE_STYLES[number // 2],
            "linewidth": 1,
        }
        ax.axhline(nats, label=f"{name}: {nats:g}", zorder=1, **look)
    _logarithmic(ax)
    ax.set_xlabel("parameters")
    ax.grid(alpha=0.25)


def _logarithmic(ax: Axes) -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1 else f"{value:,.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(axis="x", labelsize="small")


def nats_against_seconds(evidence: Evidence) -> Drawing | None:
    """Draw test nats against seconds of training."""
    rows = results(evidence, "")["seconds_table"]
    if not rows:
        return None
    canvas = blank(11.0, 5.0)
    ax = canvas.subplots()
    for title, on in dict.fromkeys((row["title"], row["on"]) for row in rows):
        own = [row for row in rows if (row["title"], row["on"]) == (title, on)]
        own.sort(key=lambda row: row["training_seconds"])
        x, y = [row["training_seconds"] for row in own], [row["test"] for row in own]
        kind = own[0]["kind"]
        cpu = own[0]["device"] == "cpu"
        options: dict[str, Any] = {"color": _COLORS[kind], "marker": _MARKS[kind]}
        options |= {"linestyle": "--" if cpu else "-", "fillstyle": "none" if cpu else "full"}
        ax.plot(x, y, label=f"{title}; {on}", **options)
    _logarithmic(ax)
    ax.set_xlabel("seconds of training")
    ax.set_ylabel("test log-likelihood, nats per digit")
    ax.grid(alpha=0.25)
    legend_below(canvas, [ax], 2)
    return Drawing(
        canvas,
        "Test log-likelihood against seconds of training, on a GPU and on the CPU, with the package rbms",
        caption("nats-seconds", evidence.scale),
    )


def _strip(images: Array, rows: int = 1) -> Array:
    """Arrange images (n, h, w) in rows, with transparent gaps."""
    each = len(images) // rows
    padded = np.pad(images.astype(float), ((0, 0), (0, 2), (0, 2)), constant_values=np.nan)
    return np.concatenate([np.concatenate(list(padded[r * each : (r + 1) * each]), 1) for r in range(rows)])[:-2, :-2]


def _show(axes: Iterable[Any], strips: Sequence[tuple[str, Array]]) -> None:
    for ax, (title, strip) in zip(axes, strips, strict=True):
        ax.imshow(strip, cmap="gray_r", vmin=0, vmax=255, interpolation="nearest")
        ax.set_title(title, fontsize=9, loc="left")
        bare(ax)


def draw_samples(evidence: Evidence) -> Drawing | None:
    """Draw samples of several machines next to test digits."""
    runs = [run for run, _ in evidence.found(samples)]
    if not runs:
        return None
    first = evidence.store.arrays(runs[0])
    strips = [("test digits", _strip(first["data"].numpy()[: 2 * _COLUMNS], 2))]
    for run in runs:
        arrays = evidence.store.arrays(run)
        settings = run.settings
        trained, about = evidence.trained(run)
        source = "noise" if settings["start"] == "noise" else "the chains of training"
        title = f"{describe(trained)['title']}, {about['parameters']:,} parameters: {settings['steps']:,} steps from "
        both = np.concatenate([arrays["means"].numpy()[:_COLUMNS], arrays["draws"].numpy()[:_COLUMNS]])
        strips.append((f"{title}{source}; means, then draws", _strip(both, 2)))
    canvas = blank(9.0, 1.45 * len(strips))
    _show(np.atleast_1d(canvas.subplots(len(strips), 1)), strips)
    return Drawing(canvas, "Rows of test digits and of samples of several models", caption("samples", evidence.scale))


def draw_conditional(evidence: Evidence) -> Drawing | None:
    """Draw samples given the label."""
    found = evidence.found(conditional)
    if not found:
        return None
    run = found[0][0]
    means = evidence.store.arrays(run)["means"].numpy()  # (digits, samples, 28, 28)
    trained, about = evidence.trained(run)
    canvas = blank(6.0, 6.3)
    ax = canvas.subplots()
    title = f"{describe(trained)['title']}, {about['parameters']:,} parameters"
    _show([ax], [(title, _strip(means.reshape(-1, *means.shape[2:]), len(means)))])
    return Drawing(
        canvas, "A grid of samples given their label, one digit per row", caption("conditional", evidence.scale)
    )


#: All figures by name.
FIGURES: dict[str, Callable[[Evidence], Drawing | None]] = {
    "nats-parameters": nats_against_parameters,
    "nats-seconds": nats_against_seconds,
    "samples": draw_samples,
    "conditional": draw_conditional,
}

Found = Mapping[str, Any]
_COMMAND = "python -m studies generative"
# Entries of `StoredRuns.machines`.
_MACHINE = re.compile(r"(.*), (\d+) at a time \((\d+) runs\)")


# -- the page ---------------------------------------------------------------------------------------


def page(found: Found, figures: Mapping[str, str]) -> str:
    """Return the page in Markdown; `figures` are captions by name."""
    sections = [
        _lead(found),
        _section(
            "Goals",
            "",
            found,
            *_explained(_GOALS, _lines_table(found)),
            *_explained(_OTHER_GOALS, _claims_table(found)),
        ),
        _section(
            "Nats against parameters",
            "likelihood",
            found,
            *_explained(_data_text(found), _likelihood_table(found)),
            _figure("nats-parameters", figures),
        ),
        _section("Nats against seconds", "seconds", found, _seconds_table(found), _figure("nats-seconds", figures)),
        _section(
            "Samples",
            "samples",
            found,
            _judge_text(found),
            *_explained(_samples_text(found), _samples_table(found)),
            *_explained(_AATS, _aats_table(found)),
            _figure("samples", figures),
        ),
        _section(
            "Samples of a class",
            "conditional",
            found,
            *_explained(_CLASSES, _conditional_table(found)),
            _figure("conditional", figures),
        ),
        _section("Real-valued data", "real", found, _real_text(found), *_real_tables(found)),
        _section("Two processes", "processes", found, *_explained(_PROCESSES, _processes_table(found))),
        _section("Settings on validation digits", "choose", found, _choose_table(found)),
        _diverged(found),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


_MACHINES = (
    "`Kronecker(R), KxL` is a machine with a hidden layer of shape KxL whose weights are a sum of R Kronecker "
    "products. `CP` and `MPO` are machines whose weights are a CP tensor or a matrix-product operator, and `Dense, "
    "500` is a classic RBM with 500 hidden units. Names that start with `rbms` are RBMs trained by the `rbms` package."
)
_GOALS = (
    "For each limit on the number of parameters, the first table compares the best machine with the goal for its "
    'log-likelihood. The "median" column is the median test log-likelihood over training seeds.'
)
_OTHER_GOALS = (
    "The second table lists the other goals. The section [Samples](#samples) explains the judge and what "
    '"confident" and "means" are.'
)
_AATS = (
    'The next table shows how well nearest neighbors tell draws from test data, and from training data. "Truth" is the '
    'fraction of images in the data whose nearest other image in the data is closer than the nearest draw, "samples" '
    'is the same with the roles of data and draws exchanged, and "mean" is the mean of both. This measure is called '
    "adversarial accuracy. A value of 0.5 means that draws and data cannot be told apart, 1 means that they are unlike "
    'each other, and a "truth" near 0 means that the draws are copies of the data. For comparison, the last column '
    "uses training data instead of draws."
)
_CLASSES = (
    "A machine with a label layer draws samples while the label is fixed to the requested class. Agreement is the "
    "fraction of samples that the judge assigns to this class."
)
_PROCESSES = "The table compares training by one process with training by two processes that share each batch."
# Descriptions of data sets by name, as parts of a sentence.
_DIGITS = {
    "random": "consists of MNIST digits that were binarized at random",
    "fixed": "is the fixed binarization that is used in the literature",
    "small": "consists of 5,000 MNIST digits that were binarized at random",
}
_REAL = {
    "faces": "frames of one face",
    "patches": "patches of photographs",
    "white": "patches of photographs, whitened by their covariance",
}


def _lead(found: Found) -> str:
    lines = ["# Generative models"]
    if found["scale"] != "paper":
        lines.append(f"Scale `{found['scale']}` shows that everything works. Its numbers mean nothing.")
    lines += [_runs_text(found), wrapped(_MACHINES)]
    annealing = found["annealing"]
    lines.append(
        wrapped(
            "Log-likelihoods are in nats per sample. They are estimated by forward annealed importance sampling with "
            f"{annealing['chains']} chains and {annealing['steps']:,} steps, starting from the mean of the data. "
            "Intervals are computed by forward and reverse annealing."
        )
    )
    return "\n\n".join(lines)


def _runs_text(found: Found) -> str:
    """Return how many runs are stored, how long they took, and on which machines they were computed."""
    stored, planned = found["runs"]["stored"], found["runs"]["planned"]
    missing = ""
    if stored < planned:
        missing = f"The other {planned - stored} runs have not been computed yet; to compute them, repeat the command. "
    text = f"These are the results of {stored} of the {planned} runs of the study. {missing}"
    text += f"The {stored} runs took {found['seconds']:,.0f} s in total"
    lines = _machine_lines(found["machines"])
    if not lines:
        return wrapped(f"{text}.")
    return "\n\n".join([wrapped(f"{text}, on the following machines:"), "\n".join(lines)])


def _machine_lines(machines: Iterable[str]) -> list[str]:
    """Return one line per machine, with the numbers of runs by how many ran at a time."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for text in machines:
        machine, together, count = _MACHINE.fullmatch(text).groups()  # type: ignore[union-attr]
        groups.setdefault(machine, []).append(("1 run" if count == "1" else f"{count} runs", together))
    lines = []
    for machine, counts in groups.items():
        if len(counts) == 1:
            about = "{}, {} at a time".format(*counts[0])
        else:
            each = [f"{runs} with {together} at a time" for runs, together in counts]
            about = ", ".join(each[:-1]) + ("," if len(each) > 2 else "") + f" and {each[-1]}"
        lines.append(wrapped(f"- {machine}: {about}", "  "))
    return lines


def _explained(text: str, table: str) -> tuple[str, ...]:
    """Return a paragraph followed by its table, or nothing if there is no table."""
    return (wrapped(text), table) if table else ()


def _section(title: str, part: str, found: Found, *blocks: str) -> str:
    body = [block for block in blocks if block]
    if not body:
        return ""
    command = " ".join([_COMMAND, *([part] if part else []), "--scale", found["scale"]])
    return "\n\n".join([f"## {title}", *body, f"Produced by `{command}`."])


def _figure(name: str, captions: Mapping[str, str]) -> str:
    return f"![{name}](figures/{name}.png)\n\n{wrapped(captions[name])}" if name in captions else ""


def _nats(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _interval(pair: Sequence[float] | None) -> str:
    return DASH if pair is None else f"{pair[0]:.2f} to {pair[1]:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _lines_table(found: Found) -> str:
    header = ["", "machine", "parameters", "median", "seeds", "wanted", "widest interval", ""]
    rows = []
    for row in found["lines"]:
        narrow = {True: "", False: ", interval too wide", None: ", no interval"}[row["interval_narrow"]]
        mark = "✓ reached" if row["reached"] else "✗ not reached"
        numbers = [f"{row['parameters']:,}", _nats(row["median"]), str(row["seeds"]), f"{row['wanted']:g}"]
        rows.append([row["line"], row["machine"], *numbers, _nats(row["widest_interval"]), mark + narrow])
    return markdown_table(header, rows)


def _claims_table(found: Found) -> str:
    rows = [
        [row["claim"], f"{row['found']:.4g}", row["wanted"], "✓ reached" if row["reached"] else "✗ not reached"]
        for row in found["claims"]
    ]
    return markdown_table(["", "found", "wanted", ""], rows)


def _data_text(found: Found) -> str:
    names = dict.fromkeys(row["data"] for row in found["table"])
    given = [name for name in _DIGITS if name in names]
    parts = [f"`{name}`{' data set' if name == given[0] else ''} {_DIGITS[name]}" for name in given]
    return f"The {', and '.join(parts)}. The table ends with published values."


def _likelihood_table(found: Found) -> str:
    rows = []
    for row in found["table"]:
        intervals = "; ".join(_interval(pair) for pair in row["interval"]) or DASH
        sizes = [f"{row['parameters']:,}", f"{row['updates']:,}", f"`{row['data']}`"]
        each = ", ".join(_nats(value) for value in row["test"])
        numbers = [f"**{_nats(row['median'])}**", each, intervals, _nats(row["median_train"])]
        rows.append(
            [row["title"], *sizes, *numbers, f"{max(row['standard_error']):.2f}", f"{row['training_seconds']:.1f}"]
        )
    if rows:
        rows += [
            [f"{name} (published)", DASH if size is None else f"{size:,}", DASH, DASH, f"{nats:g}", *[DASH] * 5]
            for name, (nats, size) in PUBLISHED.items()
        ]
    header = [
        "machine",
        "parameters",
        "updates",
        "data",
        "median, test",
        "each seed",
        "intervals",
        "median, training data",
    ]
    return markdown_table([*header, "largest standard error", "seconds of training"], rows)


def _seconds_table(found: Found) -> str:
    rows = [
        [
            *(
                row["title"],
                row["on"],
                f"{row['parameters']:,}",
                f"{row['updates']:,}",
                f"{row['training_seconds']:.1f}",
            ),
            *(_nats(row["test"]), _interval(row["interval"]), _nats(row["train"])),
        ]
        for row in found["seconds_table"]
    ]
    header = ["machine", "on", "parameters", "updates", "seconds of training", "test", "interval", "training data"]
    return markdown_table(header, rows)


def _judge_text(found: Found) -> str:
    if found["judge"] is None:
        return ""
    gray, binary = found["judge"]["gray"], found["judge"]["binary"]
    return wrapped(
        f"A convolutional network with {found['judge']['parameters']:,} parameters, called the judge, classifies the "
        f"samples. It classifies {100 * gray['agreement']:.2f}% of the {gray['n']:,} test digits correctly, and "
        f"{100 * binary['agreement']:.2f}% of the binarized test digits. The judge is confident about an image if the "
        f"most probable class has a probability above {CONFIDENT:g}. This holds for {_percent(gray['confident'])} of "
        f"the test digits, and for {_percent(binary['confident'])} of the binarized ones."
    )


def _samples_text(found: Found) -> str:
    steps = " or ".join(f"{steps:,}" for steps in dict.fromkeys(row["steps"] for row in found["samples"]))
    return (
        f"A sample is the state of a Gibbs chain after {steps} steps, starting from the chains of training or from "
        "noise. Its *draw* is the binary image, and its *mean* is the image of the probabilities given the hidden "
        "units. The table shows the fractions of means and draws about which the judge is confident, and the smallest "
        "and largest fraction of means that it assigns to a class."
    )


def _from(row: Found) -> str:
    return f"{row['steps']:,} steps from {'noise' if row['start'] == 'noise' else 'the chains of training'}"


def _samples_table(found: Found) -> str:
    rows = []
    for row in found["samples"]:
        means, draws = row["means"], row["draws"]
        classes = f"{_percent(min(means['classes']))} to {_percent(max(means['classes']))}"
        shares = [_percent(means["confident"]), _percent(draws["confident"]), classes]
        rows.append([row["title"], f"{row['parameters']:,}", _from(row), *shares])
    header = ["machine", "parameters", "samples", "means: confident", "draws: confident", "share of a class, means"]
    return markdown_table(header, rows)


def _aats_table(found: Found) -> str:
    rows = []
    for row in found["samples"]:
        each = [row["aats_test"], row["aats_train"]]
        numbers = [f"{one[key]:.3f}" for one in each for key in ("truth", "samples", "mean")]
        rows.append([row["title"], _from(row), *numbers, f"{row['aats_real']['mean']:.3f}"])
    header = ["adversarial accuracy", "samples", "test: truth", "samples", "mean", "training: truth", "samples", "mean"]
    return markdown_table([*header, "training against test data: mean"], rows)


def _conditional_table(found: Found) -> str:
    rows = []
    for row in found["conditional"]:
        means, draws = row["means"], row["draws"]
        worst = min(means["agreement_by_class"].values())
        shares = [_percent(means["agreement"]), _percent(worst), _percent(draws["agreement"])]
        rows.append([row["title"], f"{row['parameters']:,}", f"{row['steps']:,}", f"{means['n']:,}", *shares])
    header = [
        "machine",
        "parameters",
        "steps from noise",
        "samples",
        "means: agreement",
        "worst class",
        "draws: agreement",
    ]
    return markdown_table(header, rows)


def _real_text(found: Found) -> str:
    if not found["real"]:
        return ""
    parts = [f"`{name}` ({_REAL[name]})" for name in found["real"]]
    names = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
    return wrapped(
        f'The following tables show the mean log-likelihood of held-out and training samples of {names}. "Shrunk" '
        "means that the covariance is shrunk by the method of Ledoit and Wolf."
    )


def _real_tables(found: Found) -> Iterator[str]:
    for data, models in found["real"].items():
        rows = []
        for row in models:
            error, updates = row.get("standard_error"), row.get("updates")
            numbers = [
                f"{row['parameters']:,}",
                _nats(row["test"]),
                _interval(row.get("interval")),
                _nats(row["train"]),
            ]
            about = [DASH if error is None else f"{error:.2f}", DASH if updates is None else f"{updates:,}"]
            rows.append([row["title"], *numbers, *about])
        header = [f"{data}: model", "parameters", "held-out", "interval", "training data", "standard error", "updates"]
        yield markdown_table(header, rows)


def _processes_table(found: Found) -> str:
    rows = [
        [
            row["title"],
            f"{row['updates']:,}",
            f"{row['training_seconds']:.1f}",
            _nats(row["test"]),
            _nats(row["standard_error"]),
        ]
        for row in found["processes"]
    ]
    return markdown_table(["machine", "updates", "seconds of training", "test", "standard error"], rows)


def _choose_table(found: Found) -> str:
    rows = [
        [f"`{row['run'].removeprefix('nats-')}`", f"{row['training_seconds']:.1f}", _nats(row["test"])]
        for row in found["choose"]
    ]
    return markdown_table(["model", "seconds of training", "validation"], rows)


def _diverged(found: Found) -> str:
    lines = [f"- {name}: {reason}" for name, reason in found["diverged"].items()]
    return "\n".join(["## Training runs that diverged", "", *lines]) if lines else ""


def write_report(evidence: Evidence, scale: str, out: Path) -> dict[str, Any]:
    """Write `results.json`, `README.md` and `figures/`, and return the results."""
    found = results(evidence, scale)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "results.json", found)
    figures: dict[str, str] = {}
    if importlib.util.find_spec("matplotlib") is None:
        say("no figures drawn, they need matplotlib: install it and repeat the command with --report-only")
    else:
        figures = {name: figure.caption for name, figure in draw_all(out, FIGURES, evidence).items()}
    write_text(out / "README.md", page(found, figures))
    return found


# -- the command ------------------------------------------------------------------------------------


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, list(GROUPS))
    parser.add_argument(
        "--scale",
        choices=SCALES,
        default="paper",
        help="Size of the study. Default: paper. The scale tiny is for tests.",
    )
    add_options(
        parser,
        *("--out", "--work", "--only", "--jobs", "--budget", "--report-only", "--device", "--data-dir", "--json"),
        out={"help": "Folder for results and page. Default: results/generative, or WORK/report for tiny."},
        work={"help": "Folder for stored runs, models and checkpoints. Default: runs/generative-SCALE."},
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="COUPLING@HIDDEN",
        help="Train and evaluate this machine, such as kronecker:8@25x25, instead of those of the plan. Repeatable.",
    )
    parser.add_argument(
        "--judge", type=Path, metavar="FOLDER", help="Judge samples of the saved model of digits in FOLDER instead."
    )
    parser.add_argument(
        "--chains", type=count, metavar="N", help="Number of annealing chains. Default: that of the scale."
    )
    parser.add_argument(
        "--steps", type=count, metavar="N", help="Number of annealing steps. Default: that of the scale."
    )
    parser.add_argument(
        "--updates", type=count, default=24_000, metavar="N", help="Number of updates for --model. Default: 24000."
    )
    parser.add_argument(
        "--seed", type=not_negative, default=0, metavar="N", help="Random seed for --model. Default: 0."
    )
    parser.add_argument(
        "--data", choices=DIGITS, help="Data for --model. Default: choose, which has validation digits."
    )
    parser.add_argument(
        "--recipe", default="{}", metavar="JSON", help="Changes to the `generative` recipe for --model."
    )


def _changes(text: str) -> dict[str, Any]:
    try:
        changes = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--recipe must be JSON, got {text!r}: {error}") from error
    if not isinstance(changes, dict):
        raise UsageError(f"--recipe must be a JSON object, got {text!r}")
    return changes


def _judged(folder: Path, scale: Scale, place: Place) -> tuple[Mapping[str, Any], str]:
    """Judge samples that a saved machine or estimator draws from noise. Train the judge first if necessary."""
    (training,) = (run for run in plan(scale, ["samples"]) if run.compute is judge)
    run_plan([training], place).raise_failures()
    model = mvrbm.load(folder, place.device)
    machine = getattr(model, "machine_", model)
    settings = {"judge": training.name, "data": scale.data[0], "start": "noise", **scale.samples}
    found = sample_quality(machine, {}, settings, place).numbers
    return found, "\n".join(f"{key}: {json.dumps(value)}" for key, value in found.items())


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    scale = SCALES[options.scale]
    parts = options.parts or list(GROUPS)
    annealing = {key: getattr(options, key) or value for key, value in scale.annealing.items() if key != "seed"}
    scale = replace(scale, annealing={**scale.annealing, **annealing})
    folder = options.work or Path(f"runs/generative-{options.scale}")
    out = options.out or (Path("results/generative") if options.scale == "paper" else folder / "report")
    store = Store.within(folder)
    place = Place(store, str(resolve_device(options.device)), options.data_dir, folder)
    if options.judge is not None:
        return _judged(options.judge, scale, place)
    if options.model:
        models = [chosen_model(text, options.updates, _changes(options.recipe)) for text in options.model]
        runs = chosen_runs(scale, models, options.data or scale.choose, options.seed)
        run_plan(runs, place, budget=options.budget).raise_failures()
        rows = {run.name: store.numbers(run) for run in runs if store.has(run)}
        return rows, "\n".join(f"{name}: {json.dumps(numbers)}" for name, numbers in rows.items())
    summary = None
    if not options.report_only:
        runs = [run for run in plan(scale, parts) if (options.only or "") in run.name]
        if not place.device.startswith("cpu"):  # times on the CPU are measured by a separate command
            runs = [run for run in runs if run.settings.get("device") != "cpu"]
        summary = run_plan(runs, place, jobs=options.jobs, budget=options.budget)
    evidence = Evidence(store, scale)
    if not evidence.stored:
        raise StorageError(f"{folder} holds no finished runs: there is nothing to report on")
    found = write_report(evidence, options.scale, out)
    if summary is not None:
        summary.raise_failures()
    return {**found, "out": str(out)}, str(out / "README.md")


COMMANDS = {
    "generative": Command(
        "Machines as generative models: likelihood, samples and real-valued data.",
        _add,
        _run,
        "likelihood --scale paper --device cuda",
    )
}
