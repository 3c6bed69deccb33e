"""The commands of the paper's experiments: compute the missing runs, then write results, figures and the page.

Computing needs only PyTorch, NumPy and scikit-learn. The page, which needs further packages, can be written elsewhere.
The experiments are in `studies.digits` and `studies.superres`.
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
from studies.digits import plan as digits
from studies.report import as_text
from studies.runner import run_plan
from studies.runs import Place, Run, Store, write_json
from studies.superres import plan as superres

__all__ = ["COMMANDS", "EXPERIMENTS", "ReproduceError", "reproduce", "write_report"]

#: Groups of runs by experiment.
EXPERIMENTS = {
    **digits.EXPERIMENTS,
    **superres.EXPERIMENTS,
    "all": (*digits.EXPERIMENTS["digits"], *superres.EXPERIMENTS["superres"]),
}
# The scales of super-resolution have the same names.
SCALES = digits.SCALES

# File with the settings that all runs in a folder share.
_SETTINGS_FILE = "run.json"
# Packages that the page needs.
_PAGE_NEEDS = ("matplotlib", "jinja2", "PIL", "scipy")


class ReproduceError(ValueError):
    """An experiment that cannot be started."""


@dataclass(frozen=True)
class _Shared:
    """The settings that all runs in a folder share."""

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
    """Compute the missing runs of an experiment, and write its page.

    Parameters
    ----------
    experiment : {"all", "digits", "denoise", "filters", "reconstruction", "classification", "superres"}
        ``"digits"`` is experiments 1 and 2 of the paper, the next four are parts of it, ``"superres"`` is experiment 3.
    out : path
        Folder for runs, results, figures and the page. Runs that are already there are not computed again.
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
        Groups of the experiment to compute. Default: all.
    jobs : int
        Number of processes.
    budget : float, optional
        Seconds after which no further run is started.
    report : bool
        Whether to write the page after computing.
    report_only : bool
        Whether to write the page without computing anything.

    Returns
    -------
    dict
        Numbers of runs (``stored``, ``computed``, ``failed``, ``left``, ``lacking``), and the paths of ``results`` and
        ``report``.

    Raises
    ------
    ReproduceError
        If an argument is wrong.
    RunError
        If runs failed. The others are stored, and the page is written.
    """
    groups = _groups(experiment, only)
    folder = Path(out)
    where = str(resolve_device(device))
    now, former = _resume(folder, scale, seeds, first_seed, report_only)
    store = Store.within(folder)
    data = None if data_dir is None else str(Path(data_dir).resolve())
    runs = _plan(groups, now, seeds)
    result: dict[str, Any] = {"out": str(folder), "scale": now.scale, "seeds": now.seeds, "runs": len(runs)}
    summary = None
    if not report_only:
        _check_data(groups, now.scale, data)  # fail now rather than in every run
        if now != former:
            _store_settings(folder, now)
        summary = run_plan(runs, Place(store, where, data), jobs=jobs, budget=budget)
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


def _plan(groups: Sequence[str], now: _Shared, seeds: int | None = None) -> list[Run]:
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


def _resume(
    folder: Path, scale: str | None, seeds: int | None, first_seed: int, report_only: bool
) -> tuple[_Shared, _Shared | None]:
    """Return the settings of a folder after this command and before it."""
    if scale is not None and scale not in SCALES:
        raise ReproduceError(f"unknown scale '{scale}': choose one of {', '.join(SCALES)}")
    if seeds is not None and seeds < 1:
        raise ReproduceError(f"seeds must be at least 1, got {seeds}")
    former = _stored_settings(folder / _SETTINGS_FILE)
    if former is None:
        if report_only:
            raise ReproduceError(
                f"{folder} has no {_SETTINGS_FILE}: there is nothing to report on, "
                "run the command without --report-only first"
            )
        chosen = scale or "quick"
        return _Shared(chosen, seeds or SCALES[chosen].seeds, first_seed), None
    if scale not in (None, former.scale):
        raise ReproduceError(f"{folder} holds runs of scale {former.scale}, not {scale}: choose another folder")
    if first_seed != former.first_seed:
        raise ReproduceError(f"{folder} begins with subset {former.first_seed}, not {first_seed}")
    return _Shared(former.scale, max(seeds or 1, former.seeds), first_seed), former


def _stored_settings(path: Path) -> _Shared | None:
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        found = _Shared(str(stored["scale"]), int(stored["seeds"]), int(stored["first_seed"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ReproduceError(f"{path} is damaged: it must have scale, seeds and first_seed") from error
    if found.scale not in SCALES:
        raise ReproduceError(f"{path} has the unknown scale '{found.scale}'")
    return found


def _store_settings(folder: Path, now: _Shared) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
    write_json(folder / _SETTINGS_FILE, vars(now))


# -- the page ---------------------------------------------------------------------------------------


def _report(folder: Path, now: _Shared, store: Store) -> dict[str, str]:
    missing = [package for package in _PAGE_NEEDS if importlib.util.find_spec(package) is None]
    if missing:
        say(f"no page written, it needs {', '.join(missing)}: install them and repeat the command with --report-only")
        return {}
    return write_report(folder, now.scale, store, seeds=now.seeds, first_seed=now.first_seed)


def write_report(folder: Path, scale: str, store: Store, *, seeds: int, first_seed: int = 0) -> dict[str, str]:
    """Write `results.json`, `figures/` and `report.html` for the experiments that have stored runs.

    Parameters
    ----------
    folder : Path
        Folder to write to.
    scale : str
        Name of the scale.
    store : Store
        The runs.
    seeds, first_seed : int
        Number of random subsets, and number of the first subset.

    Returns
    -------
    dict
        Paths of ``results`` and ``report``.
    """
    from mvrbm.pages import Page, Section
    from studies.digits import page as digits_page
    from studies.superres import page as superres_page

    seeded = {"seeds": seeds, "first_seed": first_seed}
    found: dict[str, Any] = {"scale": scale}
    pages: dict[str, Page] = {}
    digits_evidence = digits_page.Evidence(store, digits.SCALES[scale], **seeded)
    if digits_evidence.stored:
        found = {**digits_page.results(digits_evidence, scale), **seeded}
        pages["Digits"] = digits_page.page_of(found, digits_evidence, folder)
    superres_evidence = superres_page.Evidence(store, superres.SCALES[scale], **seeded)
    if superres_evidence.stored:
        ours = {**superres_page.results(superres_evidence), **seeded}
        pages["Super-resolution"] = superres_page.page_of(ours, superres_evidence, folder, scale)
        found["superres"] = ours
    if not pages:
        raise ValueError(f"{folder} holds no finished runs: there is nothing to report on")
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
    parser.add_argument(
        "--scale",
        choices=SCALES,
        help="Size of the experiment. Default: the scale of the folder, or quick for a new folder.",
    )
    parser.add_argument(
        "--seeds",
        type=count,
        metavar="N",
        help="Number of random subsets per point. Default: 5 at scale paper, otherwise 2.",
    )
    parser.add_argument(
        "--seed", type=not_negative, default=0, metavar="N", help="Number of the first random subset. Default: 0."
    )
    only = {"type": names, "metavar": "GROUP[,GROUP]", "help": "Compute only these groups of runs."}
    common = ("--out", "--only", "--jobs", "--budget", "--report-only")
    add_options(parser, *common, out={"required": True, "help": "Folder for runs, results and page."}, only=only)
    parser.add_argument("--no-report", action="store_true", help="Compute without writing the page.")
    add_options(parser, "--device", "--data-dir", "--json")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    if options.report_only and options.no_report:
        raise UsageError("pass one of --report-only and --no-report, not both")
    stored = options.out / "results.json"
    if options.report_only and stored.is_file() and not (options.out / _SETTINGS_FILE).is_file():
        # Results without their runs, such as those in the repository.
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
    "digits": "Experiments 1 and 2 of the paper: denoising, filters, reconstruction and classification of digits.",
    "denoise": "Part of digits: denoising of nines.",
    "filters": "Part of digits: how Haar-like the learned filters are.",
    "reconstruction": "Part of digits: reconstruction error.",
    "classification": "Part of digits: error of the nearest-neighbor classifier and of other methods.",
    "superres": "Experiment 3 of the paper: super-resolution of photographs.",
    "all": "Experiments 1, 2 and 3 of the paper.",
}


def _write_patches(options: Options) -> tuple[Mapping[str, Any], str]:
    from studies.data import write_patches

    paths = [str(path) for path in write_patches(options.out)]
    return {"files": paths}, "\n".join(paths)


#: One command per experiment, and one that prepares data for machines without scikit-image.
COMMANDS = {
    **{name: Command(_HELP[name], _add, _run, "--scale quick --out runs/quick") for name in EXPERIMENTS},
    "patches": Command(
        "Write patches of photographs to files, for a machine without scikit-image.",
        lambda parser: add_options(parser, "--out", "--json", out={"required": True}),
        _write_patches,
        "--out data",
    ),
}
