"""Run the paper's experiments: compute what is not stored yet, then write results, figures and the report.

Computing needs PyTorch, NumPy and scikit-learn only; so does, on a machine without the command line's packages,

    python -m studies.reproduce digits --scale paper --out runs/digits --device cuda --jobs 4 --budget 540
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mvrbm.saving import StorageError, read_json
from studies.cells import Cell, Place, Store, Summary, run, whole
from studies.digits import plan as digits
from studies.superres import plan as superres

__all__ = ["ReproduceError", "reproduce"]

#: What can be asked for by name, and groups of cells.
EXPERIMENTS = {
    **digits.EXPERIMENTS,
    **superres.EXPERIMENTS,
    "all": (*digits.EXPERIMENTS["digits"], *superres.EXPERIMENTS["superres"]),
}
SCALES = digits.SCALES  # by the same names as those of super-resolution

_RUN = "run.json"
_DRAWS_WITH = ("matplotlib", "jinja2", "PIL", "scipy")


class ReproduceError(ValueError):
    """A run that cannot be begun, or that ended without all of its cells."""


@dataclass(frozen=True)
class _Run:
    """What the cells of a folder belong to."""

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
    """Compute an experiment's cells, as far as they are not stored, and write its report.

    Parameters
    ----------
    experiment : {"all", "digits", "denoise", "filters", "reconstruction", "classification", "superres"}
        What to run; ``"digits"`` is experiments 1 and 2, of which the next four are parts, ``"superres"`` is 3.
    out : path
        Folder for cells, results, figures and the report. If it has cells already, the run goes on.
    scale : {"quick", "paper", "tiny"}, optional
        How large; that of the folder if not given, and ``"quick"`` in a new one.
    data_dir : path, optional
        Where MNIST and the photographs are, if not where ``MVRBM_DATA`` says.
    device : str
        Where to compute.
    seeds : int, optional
        Random subsets a point to compute; the folder's, or in a new one the scale's, if not given.
    first_seed : int
        Number of the first subset.
    only : sequence of str, optional
        Groups of cells to compute, out of those of the experiment.
    jobs : int
        Processes that share the work.
    budget : float, optional
        Seconds after which no further cell is begun.
    report : bool
        Whether to write the report after computing.
    report_only : bool
        Whether to compute nothing.

    Returns
    -------
    dict
        Numbers of cells (``stored``, ``computed``, ``left``, ``lacking``), and where ``results`` and ``report`` are.

    Raises
    ------
    ReproduceError
        If an argument is wrong, or cells failed. The others are stored, and the report is written.
    """
    groups = _groups(experiment, only)
    folder = Path(out)
    where = _device(device)
    now, former = _taken_up(folder, scale, seeds, first_seed, report_only)
    store = Store(folder / "cells")
    data = None if data_dir is None else str(Path(data_dir).resolve())
    cells = _cells(groups, now, seeds)
    result: dict[str, Any] = {"out": str(folder), "scale": now.scale, "seeds": now.seeds, "cells": len(cells)}
    summary = None
    if not report_only:
        _check_data(groups, now.scale, data)  # told now and once, not by every cell
        if now != former:
            _write_down(folder, now)
        summary = run(cells, Place(store, where, data), jobs=jobs, budget=budget)
        result |= {
            "stored": len(summary.stored),
            "computed": len(summary.computed),
            "left": len(summary.left),
            "lacking": len(summary.lacking),
        }
    if report or report_only:
        result |= _report(folder, now, store)
    _complain_about(summary)
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


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ReproduceError(f"device must be auto, cpu or cuda, got '{device}'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ReproduceError("device cuda: PyTorch finds no CUDA device here, use cpu or auto")
    return device


def _check_data(groups: Sequence[str], scale: str, data_dir: str | None) -> None:
    from mvrbm.io.datasets import load, where

    if any(group in superres.GROUPS for group in groups):
        superres.check_data(superres.SCALES[scale], data_dir)
    name = digits.SCALES[scale].data
    if any(group in digits.GROUPS for group in groups) and where(name, data_dir) is None:
        load(name, data_dir=data_dir)  # raises, and says what to do


def _taken_up(
    folder: Path, scale: str | None, seeds: int | None, first_seed: int, report_only: bool
) -> tuple[_Run, _Run | None]:
    """Return what the folder's cells will belong to, and what they do so far."""
    if scale is not None and scale not in SCALES:
        raise ReproduceError(f"unknown scale '{scale}': choose one of {', '.join(SCALES)}")
    if seeds is not None and seeds < 1:
        raise ReproduceError(f"seeds must be at least 1, got {seeds}")
    path = folder / _RUN
    former = None
    if path.is_file():
        stored = read_json(path)
        try:
            former = _Run(str(stored["scale"]), int(stored["seeds"]), int(stored["first_seed"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ReproduceError(f"{path} is damaged: scale, seeds and first_seed are expected") from error
        if former.scale not in SCALES:
            raise ReproduceError(f"{path} has the unknown scale '{former.scale}'")
        if scale not in (None, former.scale):
            raise ReproduceError(f"{folder} holds cells of scale {former.scale}, not {scale}: choose another folder")
        if first_seed != former.first_seed:
            raise ReproduceError(f"{folder} begins with subset {former.first_seed}, not {first_seed}")
    elif report_only:
        raise ReproduceError(f"{folder} has no {_RUN}: there is nothing to report on, run without --report-only first")
    chosen = former.scale if former is not None else scale or "quick"
    if former is not None:
        return _Run(chosen, max(seeds or 1, former.seeds), first_seed), former
    return _Run(chosen, seeds or SCALES[chosen].seeds, first_seed), None


def _write_down(folder: Path, now: _Run) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with whole(folder / _RUN) as staging:
            staging.write_text(json.dumps(vars(now)) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error


def _report(folder: Path, now: _Run, store: Store) -> dict[str, str]:
    missing = [package for package in _DRAWS_WITH if importlib.util.find_spec(package) is None]
    if missing:
        _say(f"the report needs {', '.join(missing)}: write it with --report-only where they are installed")
        return {}
    if any(store.has(cell) for cell in _cells(list(superres.GROUPS), now)):
        from studies.superres.page import write_report
    else:
        from studies.digits.page import write_report

    return write_report(folder, now.scale, store, seeds=now.seeds, first_seed=now.first_seed)


def _complain_about(summary: Summary | None) -> None:
    if summary is None or not summary.failed:
        return
    name, reason = next(iter(summary.failed.items()))
    failed, all_of_them = len(summary.failed), len(summary.failed) + len(summary.stored)
    raise ReproduceError(f"{failed} of {all_of_them} cells failed; the first: {name}: {reason}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- without the command line's packages ------------------------------------------------------------


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--out": ("out", Path),
    "--scale": ("scale", str),
    "--data-dir": ("data_dir", Path),
    "--device": ("device", str),
    "--seeds": ("seeds", int),
    "--seed": ("first_seed", int),
    "--only": ("only", _names),
    "--jobs": ("jobs", int),
    "--budget": ("budget", float),
}
_FLAGS = {"--report-only": {"report_only": True}, "--no-report": {"report": False}}


def main(args: Sequence[str]) -> int:
    """Run with the arguments of `mvrbm reproduce`, or write patches of photographs to a folder (`patches FOLDER`)."""
    try:
        if len(args) == 2 and args[0] == "patches":
            from studies.digits.data import write_photographs

            print(write_photographs(Path(args[1])))
            return 0
        print(json.dumps(reproduce(**_parsed(args)), indent=1))
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parsed(args: Sequence[str]) -> dict[str, Any]:
    if not args or args[0] not in EXPERIMENTS:
        raise ReproduceError(f"give an experiment first: one of {', '.join(EXPERIMENTS)}; or: patches FOLDER")
    given: dict[str, Any] = {"experiment": args[0]}
    rest = iter(args[1:])
    for option in rest:
        if option in _FLAGS:
            given |= _FLAGS[option]
        elif option in _OPTIONS:
            name, kind = _OPTIONS[option]
            value = next(rest, None)
            if value is None:
                raise ReproduceError(f"{option} needs a value")
            try:
                given[name] = kind(value)
            except ValueError as error:
                raise ReproduceError(f"{option}: {value!r} is not a number") from error
        else:
            raise ReproduceError(f"unknown option {option}: choose from {', '.join([*_OPTIONS, *_FLAGS])}")
    if "out" not in given:
        raise ReproduceError("--out DIR is missing")
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
