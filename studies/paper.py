"""The paper's experiments from end to end: compute the missing cells, then write results, figures and the report.

Computing needs PyTorch, NumPy and scikit-learn only, so that it can be done on a machine without the packages that the
report needs. The experiments themselves are in `studies.digits` and `studies.superres`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mvrbm.devices import resolve_device
from mvrbm.errors import StorageError
from studies.arguments import Command, Options, UsageError, add_options, count, names, not_negative, say
from studies.cells import Cell, Place, Store, write_json
from studies.digits import plan as digits
from studies.report import as_text
from studies.runner import run
from studies.superres import plan as superres

__all__ = ["COMMANDS", "EXPERIMENTS", "ReproduceError", "reproduce", "write_report"]

#: Groups of cells by the name of the experiment.
EXPERIMENTS = {
    **digits.EXPERIMENTS,
    **superres.EXPERIMENTS,
    "all": (*digits.EXPERIMENTS["digits"], *superres.EXPERIMENTS["superres"]),
}
SCALES = digits.SCALES  # super-resolution has scales of the same names

_RUN = "run.json"
_DRAWS_WITH = ("matplotlib", "jinja2", "PIL", "scipy")


class ReproduceError(ValueError):
    """A run that cannot be started."""


@dataclass(frozen=True)
class _Run:
    """The settings that all cells of a folder share."""

    scale: str
    seeds: int
    first_seed: int


def reproduce(
    experiment: str,
    out: str | os.PathLike[str],
    *,
    scale: str | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    device: str = "auto",
    seeds: int | None = None,
    first_seed: int = 0,
    only: Sequence[str] | None = None,
    jobs: int = 1,
    budget: float | None = None,
    report: bool = True,
    report_only: bool = False,
) -> dict[str, Any]:
    """Compute the missing cells of an experiment, and write its report.

    Parameters
    ----------
    experiment : {"all", "digits", "denoise", "filters", "reconstruction", "classification", "superres"}
        ``"digits"`` is experiments 1 and 2 of the paper, the next four are parts of it, ``"superres"`` is experiment 3.
    out : path
        Folder for cells, results, figures and the report. A folder that has cells already is continued.
    scale : {"quick", "paper", "tiny"}, optional
        Size of the experiment. Default: the folder's scale, ``"quick"`` for a new folder.
    data_dir : path, optional
        Folder with MNIST and the photographs. Default: the folder that ``MVRBM_DATA`` names.
    device : str
        Device to compute on.
    seeds : int, optional
        Number of random subsets per point. Default: the folder's number, the scale's for a new folder.
    first_seed : int
        Number of the first subset.
    only : sequence of str, optional
        Groups of cells to compute, out of those of the experiment.
    jobs : int
        Number of processes.
    budget : float, optional
        Seconds after which no further cell is started.
    report : bool
        Whether to write the report after computing.
    report_only : bool
        Whether to write the report without computing anything.

    Returns
    -------
    dict
        Numbers of cells (``stored``, ``computed``, ``failed``, ``left``, ``lacking``), and the paths of ``results`` and
        ``report``.

    Raises
    ------
    ReproduceError
        If an argument is wrong.
    CellError
        If cells failed. The others are stored, and the report is written.
    """
    groups = _groups(experiment, only)
    folder = Path(out)
    where = str(resolve_device(device))
    now, former = _taken_up(folder, scale, seeds, first_seed, report_only)
    store = Store(folder / "cells")
    data = None if data_dir is None else str(Path(data_dir).resolve())
    cells = _cells(groups, now, seeds)
    result: dict[str, Any] = {"out": str(folder), "scale": now.scale, "seeds": now.seeds, "cells": len(cells)}
    summary = None
    if not report_only:
        _check_data(groups, now.scale, data)  # once and at the start, not in every cell
        if now != former:
            _write_down(folder, now)
        summary = run(cells, Place(store, where, data), jobs=jobs, budget=budget)
        result |= summary.counts()
    if report or report_only:
        result |= _report(folder, now, store)
    if summary is not None:
        summary.raise_failures()
    return result


def _groups(experiment: str, only: Sequence[str] | None) -> list[str]:
    if experiment not in EXPERIMENTS:
        raise ReproduceError(f"unknown experiment '{experiment}': choose one of {', '.join(EXPERIMENTS)}")
    own = EXPERIMENTS[experiment]
    for group in only or ():
        if group not in own:
            raise ReproduceError(f"only: unknown group '{group}', '{experiment}' has {', '.join(own)}")
    return [group for group in (*digits.GROUPS, *superres.GROUPS) if group in (only or own)]


def _cells(groups: Sequence[str], now: _Run, seeds: int | None = None) -> list[Cell]:
    some = {"seeds": seeds or now.seeds, "first_seed": now.first_seed}
    return [
        *digits.plan(digits.SCALES[now.scale], groups, **some),
        *superres.plan(superres.SCALES[now.scale], groups, **some),
    ]


def _check_data(groups: Sequence[str], scale: str, data_dir: str | None) -> None:
    from mvrbm.io.datasets import load, where

    if any(group in superres.GROUPS for group in groups):
        superres.check_data(superres.SCALES[scale], data_dir)
    name = digits.SCALES[scale].data
    if any(group in digits.GROUPS for group in groups) and where(name, data_dir) is None:
        load(name, data_dir=data_dir)  # raises, with advice


def _taken_up(
    folder: Path, scale: str | None, seeds: int | None, first_seed: int, report_only: bool
) -> tuple[_Run, _Run | None]:
    """Return the settings of the folder's cells after this run, and those before it."""
    if scale is not None and scale not in SCALES:
        raise ReproduceError(f"unknown scale '{scale}': choose one of {', '.join(SCALES)}")
    if seeds is not None and seeds < 1:
        raise ReproduceError(f"seeds must be at least 1, got {seeds}")
    former = _stored_run(folder / _RUN)
    if former is None:
        if report_only:
            raise ReproduceError(
                f"{folder} has no {_RUN}: there is nothing to report on, run without --report-only first"
            )
        chosen = scale or "quick"
        return _Run(chosen, seeds or SCALES[chosen].seeds, first_seed), None
    if scale not in (None, former.scale):
        raise ReproduceError(f"{folder} holds cells of scale {former.scale}, not {scale}: choose another folder")
    if first_seed != former.first_seed:
        raise ReproduceError(f"{folder} begins with subset {former.first_seed}, not {first_seed}")
    return _Run(former.scale, max(seeds or 1, former.seeds), first_seed), former


def _stored_run(path: Path) -> _Run | None:
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = _Run(str(stored["scale"]), int(stored["seeds"]), int(stored["first_seed"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ReproduceError(f"{path} is damaged: scale, seeds and first_seed are expected") from error
    if found.scale not in SCALES:
        raise ReproduceError(f"{path} has the unknown scale '{found.scale}'")
    return found


def _write_down(folder: Path, now: _Run) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
    write_json(folder / _RUN, vars(now))


# -- the report -------------------------------------------------------------------------------------


def _report(folder: Path, now: _Run, store: Store) -> dict[str, str]:
    missing = [package for package in _DRAWS_WITH if importlib.util.find_spec(package) is None]
    if missing:
        say(f"the report needs {', '.join(missing)}: write it with --report-only where they are installed")
        return {}
    return write_report(folder, now.scale, store, seeds=now.seeds, first_seed=now.first_seed)


def write_report(folder: Path, scale: str, store: Store, *, seeds: int, first_seed: int = 0) -> dict[str, str]:
    """Write `results.json`, `figures/` and `report.html`, of the experiments that have stored cells.

    Parameters
    ----------
    folder : Path
        Folder to write to.
    scale : str
        Name of the scale.
    store : Store
        The cells.
    seeds, first_seed : int
        Number of random subsets, and the first of them.

    Returns
    -------
    dict
        Paths of ``results`` and ``report``.
    """
    from mvrbm.pages import Page, Section
    from studies.digits.evidence import Evidence as DigitsEvidence
    from studies.digits.findings import results as digits_results
    from studies.digits.page import page_of as digits_page
    from studies.superres import findings as superres_findings
    from studies.superres.page import page_of as superres_page

    seeded = {"seeds": seeds, "first_seed": first_seed}
    found: dict[str, Any] = {"scale": scale}
    pages: dict[str, Page] = {}
    digits_evidence = DigitsEvidence(store, digits.SCALES[scale], **seeded)
    if digits_evidence.stored:
        found = {**digits_results(digits_evidence, scale), **seeded}
        pages["Digits"] = digits_page(found, digits_evidence, folder)
    superres_evidence = superres_findings.Evidence(store, superres.SCALES[scale], **seeded)
    if superres_evidence.stored:
        ours = {**superres_findings.results(superres_evidence), **seeded}
        pages["Super-resolution"] = superres_page(ours, superres_evidence, folder, scale)
        found["superres"] = ours
    if not pages:
        raise ValueError(f"{folder} holds no finished cells: there is nothing to report on")
    page = next(iter(pages.values()))
    if len(pages) > 1:
        page = Page(
            title="Experiments 1, 2 and 3: the paper's numbers and ours",
            lead=" ".join(each.lead for each in pages.values()),
            sections=[
                Section(f"{name}: {section.title}", section.text, section.tables, section.figures)
                for name, each in pages.items()
                for section in each.sections
            ],
            footer=page.footer,
        )
    write_json(folder / "results.json", found)
    return {"results": str(folder / "results.json"), "report": str(page.write(folder / "report.html"))}


# -- the commands -----------------------------------------------------------------------------------


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", choices=SCALES, help="Size. Default: the folder's scale, quick for a new one.")
    parser.add_argument("--seeds", type=count, metavar="N", help="Random subsets per point. Default: 5 at scale paper.")
    parser.add_argument(
        "--seed", type=not_negative, default=0, metavar="N", help="Number of the first random subset. Default: 0."
    )
    only = {"type": names, "metavar": "GROUP[,GROUP]", "help": "Compute only these groups of cells."}
    common = ("--out", "--only", "--jobs", "--budget", "--report-only")
    add_options(parser, *common, out={"required": True, "help": "Folder for cells, results and report."}, only=only)
    parser.add_argument("--no-report", action="store_true", help="Compute, and write no report.")
    add_options(parser, "--device", "--data-dir", "--json")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    if options.report_only and options.no_report:
        raise UsageError("pass one of --report-only and --no-report, not both")
    stored = options.out / "results.json"
    if options.report_only and stored.is_file() and not (options.out / _RUN).is_file():
        # The numbers of a run whose cells are elsewhere, such as those in the repository.
        found = json.loads(stored.read_text(encoding="utf-8"))
        return found, "\n".join(as_text(part) for part in (found, found.get("superres", {})) if "numbers" in part)
    result = reproduce(
        options.command,
        options.out,
        scale=options.scale,
        data_dir=options.data_dir,
        device=options.device,
        seeds=options.seeds,
        first_seed=options.seed,
        only=options.only,
        jobs=options.jobs,
        budget=options.budget,
        report=not options.no_report,
        report_only=options.report_only,
    )
    return result, str(result.get("report", options.out))


_HELP = {
    "digits": "Experiments 1 and 2 of the paper: denoise, filters, reconstruction and classification of digits.",
    "denoise": "Part of digits: denoising of nines.",
    "filters": "Part of digits: how Haar-like the learned filters are.",
    "reconstruction": "Part of digits: reconstruction error.",
    "classification": "Part of digits: error of the nearest neighbor, and of other methods.",
    "superres": "Experiment 3 of the paper: super-resolution of photographs.",
    "all": "Experiments 1, 2 and 3 of the paper.",
}


def _write_patches(options: Options) -> tuple[Mapping[str, Any], str]:
    from studies.digits.data import write_patches

    paths = [str(path) for path in write_patches(options.out)]
    return {"files": paths}, "\n".join(paths)


#: The experiments, and a command that prepares data for machines without scikit-image.
COMMANDS = {
    **{name: Command(_HELP[name], _add, _run, "--scale quick --out runs/quick") for name in EXPERIMENTS},
    "patches": Command(
        "Write the patches of photographs to files, to take them to a machine without scikit-image.",
        lambda parser: add_options(parser, "--out", "--json", out={"required": True}),
        _write_patches,
        "--out data",
    ),
}
