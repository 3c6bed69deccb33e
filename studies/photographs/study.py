"""The command of the study of the shipped stages.

They are trained with the photographs that `studies.photographs.collecting` collects, each task in a process of its own
if a GPU is to be shared, and measured::

    python -m studies photographs train --tasks x2 --seconds 460 --archive photographs.zip --device cuda
    python -m studies photographs enlarging degraded time denoising pictures

Set5 and T91 are found through ``--data-dir`` or ``MVRBM_DATA``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mvrbm.devices import resolve_device
from studies.arguments import Command, Options, add_options, add_parts
from studies.photographs import measuring, training
from studies.photographs.pictures import write_pictures
from studies.runner import run_parts
from studies.runs import Place, Rows

__all__ = ["COMMANDS", "PARTS"]

#: Parts of the study: weights, the groups of cells, and the pictures of the documentation.
PARTS = ("train", *measuring.GROUPS, "pictures")


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    add_options(
        parser,
        *("--out", "--work", "--only", "--jobs", "--budget", "--report-only", "--device", "--data-dir", "--json"),
        out={"default": Path("results"), "help": "Folder of the folders for results. Default: results."},
        work={"default": Path("runs/photographs"), "help": "Folder for new weights. Default: runs/photographs."},
    )
    parser.add_argument("--archive", type=Path, default=Path("photographs.zip"), help="Crops to train with.")
    parser.add_argument("--start", type=Path, help="Folder of weights to start from.")
    parser.add_argument("--tasks", nargs="*", choices=tuple(training.TASKS), help="Tasks to train. Default: all.")
    parser.add_argument("--seconds", type=float, default=460.0, help="Time for each task. Default: 460.")


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    stores = {group: Rows(options.out / folder, options.work) for group, folder in measuring.GROUPS.items()}
    if options.report_only:
        rows = {group: store.rows(group) for group, store in stores.items()}
        lines = (f"{group} | {name} | {row}" for group, some in rows.items() for name, row in some.items())
        return rows, "\n".join(lines)
    result, device = dict[str, Any](), resolve_device(options.device).type
    for part in options.parts or PARTS[1:]:
        if part == "train":
            for task in options.tasks or training.TASKS:
                start = None if options.start is None else options.start / f"{task}.pt"
                result[task] = training.train(task, options.archive, options.seconds, options.work, device, start)
        elif part == "pictures":
            result[part] = write_pictures(Path("docs/_static"))
        else:
            place = Place(stores[part], "cpu", options.data_dir, options.work)
            cells = [cell for cell in measuring.cells() if cell.group == part]
            settings = {"only": options.only, "jobs": options.jobs, "budget": options.budget}
            result[part] = run_parts(cells, [part], place, **settings)
    return result, "\n".join(f"{part}: {found}" for part, found in result.items())


COMMANDS = {
    "photographs": Command(
        "The shipped stages for photographs: training, and how well they enlarge and denoise.",
        _add,
        _run,
        "enlarging denoising",
    )
}
