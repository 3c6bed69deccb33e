"""The command of the study of super-resolution by one machine: choice of settings, training and measurements.

T91, Set5 and Lena are found through ``--data-dir`` or ``MVRBM_DATA``. The stages that come with the package are the
study `photographs`; here they are measured next to the models of this study.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mvrbm.devices import resolve_device
from studies.arguments import Command, Options, add_options, add_parts
from studies.cells import Place, Rows
from studies.runner import run_parts
from studies.weights import measuring, training
from studies.weights.images import collect

__all__ = ["COMMANDS", "PARTS"]

#: Groups of cells, in their order.
GROUPS = ("starts", "paper", "choose", "t91", "cpu", "speed", "generative")
#: Parts of the study: the open images, and all groups.
PARTS = ("collect", *GROUPS)


def table(store: Rows) -> str:
    """Return all stored results as text."""
    lines = []
    for group in GROUPS:
        for name, row in store.rows(group).items():
            shown = {k: v for k, v in row.items() if not k.endswith("_loss")} if isinstance(row, dict) else row
            lines.append(f"{group} | {name} | {shown}")
    return "\n".join(lines)


def _add(parser: argparse.ArgumentParser) -> None:
    add_parts(parser, PARTS)
    add_options(
        parser,
        *("--out", "--work", "--only", "--jobs", "--budget", "--report-only", "--device", "--data-dir", "--json"),
        out={"default": Path("results/superres"), "help": "Folder for the results. Default: results/superres."},
        work={"default": Path("runs/superres"), "help": "Folder for models and open images. Default: runs/superres."},
    )
    parser.add_argument("--tf32", action="store_true", help="Use TF32 for products on a GPU.")
    parser.add_argument(
        "--tiny", action="store_true", help="Train too little to learn anything, to try that everything runs."
    )


def _run(options: Options) -> tuple[Mapping[str, Any], str]:
    store = Rows(options.out, options.work)
    if options.report_only:
        return {group: store.rows(group) for group in GROUPS}, table(store)
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    place = Place(store, resolve_device(options.device).type, options.data_dir, options.work)
    parts, lines, result = options.parts or PARTS, [], dict[str, Any]()
    if "collect" in parts:
        lines += collect(options.work)
    for part in parts:
        if part in GROUPS:  # planned anew for each: later groups depend on the results of earlier ones
            cells = [*training.cells(place, tiny=options.tiny), *measuring.cells(place)]
            result[part] = run_parts(cells, [part], place, only=options.only, jobs=options.jobs, budget=options.budget)
    return result, "\n".join([*lines, *(f"{part}: {counts}" for part, counts in result.items())])


COMMANDS = {
    "superres-weights": Command(
        "Super-resolution by one machine: choice of settings, training on T91 and measurements.",
        _add,
        _run,
        "choose t91 --device cuda --tf32",
    )
}
