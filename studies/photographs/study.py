"""The command that trains and measures the shipped weights.

Training uses the photographs that `studies.photographs.collecting` collects. Several models can share a GPU if each is
trained in a separate process::

    python -m studies photographs train --models x2 --archive photographs.zip --device cuda
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

#: Parts of the study: training, the groups of measurements, and the pictures for the documentation.
PARTS = ("train", *measuring.GROUPS, "pictures")


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    add_options(
        parser,
        *("--out", "--work", "--only", "--jobs", "--budget", "--report-only", "--device", "--data-dir", "--json"),
        out={"default": Path("results"), "help": "Folder of the folders for results. Default: results."},
        work={"default": Path("runs/photographs"), "help": "Folder for new weights. Default: runs/photographs."},
    )
    parser.add_argument("--archive", type=Path, default=Path("photographs.zip"), help="Archive of crops to train with.")
    parser.add_argument("--models", nargs="*", choices=training.MODELS, help="Models to train. Default: all.")
    help_text = f"Updates of each model. Default: {training.UPDATES}."
    parser.add_argument("--updates", type=int, default=training.UPDATES, help=help_text)


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    stores = {group: Rows(options.out / folder, options.work) for group, folder in measuring.GROUPS.items()}
    if options.report_only:
        rows = {group: store.rows(group) for group, store in stores.items()}
        lines = (f"{group} | {name} | {row}" for group, some in rows.items() for name, row in some.items())
        return rows, "\n".join(lines)
    result = dict[str, Any]()
    device = resolve_device(options.device).type
    for part in options.parts or PARTS[1:]:
        if part == "train":
            for name in options.models or training.MODELS:
                result[name] = training.train(name, options.archive, options.updates, options.work, device)
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
        "Train the shipped weights for photographs, and measure how well they enlarge and denoise.",
        _add,
        _run,
        "enlarging denoising",
    )
}
