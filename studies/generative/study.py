"""The report on generative models, as a page of Markdown with figures, and the command that computes it."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mvrbm
from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from mvrbm.io.atomic import replace_file
from studies.arguments import Command, Options, UsageError, add_options, add_parts, count, not_negative, say
from studies.cells import Place, Store, write_json
from studies.generative import work
from studies.generative.data import DIGITS
from studies.generative.findings import PUBLISHED, Evidence, results
from studies.generative.plan import GROUPS, SCALES, Scale, chosen_cells, chosen_model, plan
from studies.report import DASH, draw_all
from studies.runner import run

__all__ = ["COMMANDS", "page"]

Found = Mapping[str, Any]
_COMMAND = "python -m studies generative"


# -- the page ---------------------------------------------------------------------------------------


def page(found: Found, figures: Mapping[str, str]) -> str:
    """Return the report as Markdown; figures are captions by name."""
    sections = [
        _lead(found),
        _section("What was wanted", "", found, _lines(found), _claims(found)),
        _section(
            "Nats against parameters", "likelihood", found, _likelihood(found), _figure("nats-parameters", figures)
        ),
        _section("Nats against seconds", "seconds", found, _seconds(found), _figure("nats-seconds", figures)),
        _section(
            "Samples", "samples", found, _judge(found), _samples(found), _aats(found), _figure("samples", figures)
        ),
        _section("Samples of a class", "conditional", found, _conditional(found), _figure("conditional", figures)),
        _section("Real-valued data", "real", found, *_real(found)),
        _section("Two processes", "processes", found, _processes(found)),
        _section("Settings on validation digits", "choose", found, _choose(found)),
        _diverged(found),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _lead(found: Found) -> str:
    missing = found["cells"]["planned"] - found["cells"]["stored"]
    lines = ["# Generative models"]
    if found["scale"] != "paper":
        lines.append(f"Scale `{found['scale']}`: it shows that everything works, and its numbers mean nothing.")
    lines.append(
        f"{found['cells']['stored']} of {found['cells']['planned']} cells, {found['seconds']:,.0f} s in all; "
        f"on {'; '.join(found['machines']) or 'no machine'}."
        + (f" {missing} cells are not computed yet: repeat the command." if missing else "")
    )
    annealing = found["annealing"]
    lines.append(
        f"Likelihoods are by forward annealed importance sampling with {annealing['chains']} chains and "
        f"{annealing['steps']:,} steps from the mean of the data, in nats per sample. The interval is two-sided."
    )
    return "\n\n".join(lines)


def _section(title: str, part: str, found: Found, *blocks: str) -> str:
    body = [block for block in blocks if block]
    if not body:
        return ""
    command = " ".join([_COMMAND, *([part] if part else []), "--scale", found["scale"]])
    return "\n\n".join([f"## {title}", *body, f"`{command}`"])


def _figure(name: str, captions: Mapping[str, str]) -> str:
    return f"![{name}](figures/{name}.png)\n\n{captions[name]}" if name in captions else ""


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def _nats(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _interval(pair: Sequence[float] | None) -> str:
    return DASH if pair is None else f"{pair[0]:.2f} to {pair[1]:.2f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _lines(found: Found) -> str:
    header = ["", "machine", "parameters", "median", "seeds", "wanted", "widest interval", ""]
    rows = []
    for row in found["lines"]:
        narrow = {True: "", False: ", interval too wide", None: ", no interval"}[row["interval_narrow"]]
        mark = "✓ reached" if row["reached"] else "✗ not reached"
        numbers = [f"{row['parameters']:,}", _nats(row["median"]), str(row["seeds"]), f"{row['wanted']:g}"]
        rows.append([row["line"], row["machine"], *numbers, _nats(row["widest_interval"]), mark + narrow])
    return _markdown(header, rows)


def _claims(found: Found) -> str:
    rows = [
        [row["claim"], f"{row['found']:.4g}", row["wanted"], "✓ reached" if row["reached"] else "✗ not reached"]
        for row in found["claims"]
    ]
    return _markdown(["", "found", "wanted", ""], rows)


def _likelihood(found: Found) -> str:
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
    return _markdown([*header, "largest standard error", "seconds of training"], rows)


def _seconds(found: Found) -> str:
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
    return _markdown(header, rows)


def _judge(found: Found) -> str:
    if found["judge"] is None:
        return ""
    gray, binary = found["judge"]["gray"], found["judge"]["binary"]
    return (
        f"The judge, a convolutional network of {found['judge']['parameters']:,} parameters, is right on "
        f"{100 * gray['agreement']:.2f} % of {gray['n']:,} test digits ({100 * binary['agreement']:.2f} % of the "
        f"binarized ones), and its confidence is above 0.9 for {_percent(gray['confident'])} of them "
        f"({_percent(binary['confident'])})."
    )


def _from(row: Found) -> str:
    return f"{row['steps']:,} steps from {'noise' if row['start'] == 'noise' else 'the chains of training'}"


def _samples(found: Found) -> str:
    rows = []
    for row in found["samples"]:
        means, draws = row["means"], row["draws"]
        classes = f"{_percent(min(means['classes']))} to {_percent(max(means['classes']))}"
        shares = [_percent(means["confident"]), _percent(draws["confident"]), classes]
        rows.append([row["title"], f"{row['parameters']:,}", _from(row), *shares])
    header = ["machine", "parameters", "samples", "means: confident", "draws: confident", "share of a class, means"]
    return _markdown(header, rows)


def _aats(found: Found) -> str:
    rows = []
    for row in found["samples"]:
        each = [row["aats_test"], row["aats_train"]]
        numbers = [f"{one[key]:.3f}" for one in each for key in ("truth", "samples", "mean")]
        rows.append([row["title"], _from(row), *numbers, f"{row['aats_real']['mean']:.3f}"])
    header = ["adversarial accuracy", "samples", "test: truth", "samples", "mean", "training: truth", "samples", "mean"]
    return _markdown([*header, "training against test data: mean"], rows)


def _conditional(found: Found) -> str:
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
    return _markdown(header, rows)


def _real(found: Found) -> Iterator[str]:
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
        yield _markdown(header, rows)


def _processes(found: Found) -> str:
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
    return _markdown(["machine", "updates", "seconds of training", "test", "standard error"], rows)


def _choose(found: Found) -> str:
    rows = [
        [f"`{row['cell'].removeprefix('nats-')}`", f"{row['training_seconds']:.1f}", _nats(row["test"])]
        for row in found["choose"]
    ]
    return _markdown(["model", "seconds of training", "validation"], rows)


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
        say("figures need matplotlib: draw them with --report-only where it is installed")
    else:
        from studies.generative.figures import FIGURES

        figures = {name: figure.caption for name, figure in draw_all(out, FIGURES, evidence).items()}
    with replace_file(out / "README.md") as file:
        file.write(page(found, figures).encode())
    return found


# -- the command ------------------------------------------------------------------------------------


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, list(GROUPS))
    parser.add_argument("--scale", choices=SCALES, default="paper", help="Size. Default: paper; tiny is for tests.")
    add_options(
        parser,
        *("--out", "--work", "--only", "--jobs", "--budget", "--report-only", "--device", "--data-dir", "--json"),
        out={"help": "Folder for results and report. Default: results/generative, for tiny WORK/report."},
        work={"help": "Folder for cells, models and checkpoints. Default: runs/generative-SCALE."},
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="COUPLING@HIDDEN",
        help="Train and evaluate this machine instead of those of the plan, such as kronecker:8@25x25. Repeatable.",
    )
    parser.add_argument(
        "--judge", type=Path, metavar="FOLDER", help="Judge samples of a saved model of digits instead."
    )
    parser.add_argument("--chains", type=count, metavar="N", help="Chains of annealing. Default: the scale's.")
    parser.add_argument("--steps", type=count, metavar="N", help="Steps of annealing. Default: the scale's.")
    parser.add_argument("--updates", type=count, default=24_000, metavar="N", help="For --model. Default: 24000.")
    parser.add_argument("--seed", type=not_negative, default=0, metavar="N", help="For --model. Default: 0.")
    parser.add_argument("--data", choices=DIGITS, help="For --model. Default: choose, which has validation digits.")
    parser.add_argument("--recipe", default="{}", metavar="JSON", help="For --model: changes to recipe `generative`.")


def _changes(text: str) -> dict[str, Any]:
    try:
        changes = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--recipe must be JSON, got {text!r}: {error}") from error
    if not isinstance(changes, dict):
        raise UsageError(f"--recipe must be a JSON object, got {text!r}")
    return changes


def _judged(folder: Path, scale: Scale, place: Place) -> tuple[Mapping[str, Any], str]:
    """Judge samples of a saved machine or estimator, from noise, after training the judge if need be."""
    (judge,) = (cell for cell in plan(scale, ["samples"]) if cell.work is work.judge)
    run([judge], place).raise_failures()
    model = mvrbm.load(folder, place.device)
    machine = getattr(model, "machine_", model)
    settings = {"judge": judge.name, "data": scale.data[0], "start": "noise", **scale.samples}
    found = work.sample_quality(machine, {}, settings, place).numbers
    return found, "\n".join(f"{key}: {json.dumps(value)}" for key, value in found.items())


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    scale, parts = SCALES[options.scale], options.parts or list(GROUPS)
    annealing = {key: getattr(options, key) or value for key, value in scale.annealing.items() if key != "seed"}
    scale = replace(scale, annealing={**scale.annealing, **annealing})
    folder = options.work or Path(f"runs/generative-{options.scale}")
    out = options.out or (Path("results/generative") if options.scale == "paper" else folder / "report")
    store = Store(folder / "cells")
    place = Place(store, str(resolve_device(options.device)), options.data_dir, folder)
    if options.judge is not None:
        return _judged(options.judge, scale, place)
    if options.model:
        models = [chosen_model(text, options.updates, _changes(options.recipe)) for text in options.model]
        cells = chosen_cells(scale, models, options.data or scale.choose, options.seed)
        run(cells, place, budget=options.budget).raise_failures()
        rows = {cell.name: store.numbers(cell) for cell in cells if store.has(cell)}
        return rows, "\n".join(f"{name}: {json.dumps(numbers)}" for name, numbers in rows.items())
    summary = None
    if not options.report_only:
        cells = [cell for cell in plan(scale, parts) if (options.only or "") in cell.name]
        if not place.device.startswith("cpu"):  # seconds on the CPU are for a machine that is lent for that
            cells = [cell for cell in cells if cell.settings.get("device") != "cpu"]
        summary = run(cells, place, jobs=options.jobs, budget=options.budget)
    evidence = Evidence(store, scale)
    if not evidence.stored:
        raise StorageError(f"{folder} holds no finished cells: there is nothing to report on")
    found = write_report(evidence, options.scale, out)
    if summary is not None:
        summary.raise_failures()
    return {**found, "out": str(out)}, str(out / "README.md")


COMMANDS = {
    "generative": Command(
        "Machines as generative models: likelihood, samples, and real-valued data.",
        _add,
        _run,
        "likelihood --scale paper --device cuda",
    )
}
