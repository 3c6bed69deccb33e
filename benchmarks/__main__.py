"""The program `python -m benchmarks`: speed next to other packages, workloads next to floors, and GPU kernels alone."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import run
from studies import arguments
from studies.arguments import Command, Options, add_options, count, names, not_negative, positive, say, seconds
from studies.runs import write_json

__all__ = ["COMMANDS", "main"]

_CELLS = "cells"  # of a run that is not finished, in the output folder


def _ranks(text: str) -> list[int]:
    return [count(rank) for rank in names(text)]


# -- speed ------------------------------------------------------------------------------------------


def _add_speed(parser: argparse.ArgumentParser) -> None:
    from mvrbm.training import RECIPES

    option = parser.add_argument
    option("--quick", action="store_true", help="Two sizes and short turns: about a minute on two cores.")
    option("--sizes", type=names, help="Sizes such as 28x28:25x25,64x64:50x50; 28x28:25x25:4 has rank 4.")
    option("--ranks", type=_ranks, help="Further ranks of the first size, such as 1,2,4.")
    option("--contestants", type=names, help="Some of mvrbm,rbm,sklearn,rbms,learnergy,torch. Default: all of them.")
    option("--batch-size", type=count, default=100, metavar="N", help="Samples per update. Default: 100.")
    option("--samples", type=count, metavar="N", help="Samples per epoch. Default: up to 5,000 within 32 MiB.")
    option("--threads", type=count, metavar="N", help="Threads on the CPU. Default: one per core.")
    option("--recipe", choices=sorted(RECIPES), default="paper", help="Recipe of mvrbm's machines. Default: paper.")
    option("--repetitions", type=count, metavar="N", help="Rounds. Default: 7, or 3 with --quick.")
    option("--min-seconds", type=seconds, metavar="S", help="Length of a turn. Default: 0.3, or 0.05 with --quick.")
    option("--memory-limit", type=positive, metavar="GIB", help="Memory per contestant. Default: half of what is free.")
    option(
        "--inference",
        type=not_negative,
        metavar="N",
        help="Digits to infer on. Default: 60,000, or 5,000 with --quick.",
    )
    option("--no-memory", action="store_true", help="Do not measure peak memory.")
    option("--seed", type=not_negative, default=0, metavar="N", help="Random seed. Default: 0.")
    out = {"help": "Folder for bench.json, bench.md and plots. A run that was interrupted resumes there."}
    report = {"help": "Measure nothing, and write tables and plots from bench.json in --out."}
    add_options(parser, "--out", "--report-only", "--device", "--json", out=out, report_only=report)
    option("--force", action="store_true", help="Replace the results in --out.")


def _run_speed(options: Options) -> tuple[Mapping[str, Any], str]:
    from benchmarks import QUICK, Settings, tables, write

    path = None if options.out is None else options.out / "bench.json"
    if options.report_only:
        if path is None or not path.is_file():
            raise arguments.UsageError("--report-only needs --out DIR with a bench.json")
        result = json.loads(path.read_text())
        for message in write(result, options.out, report_only=True):
            say(message)
        return result, tables(result)
    if path is not None and path.exists() and not options.force:
        raise ValueError(f"{options.out} holds results: use --force to replace them")
    given = {
        name: getattr(options, name)
        for name in ("sizes", "ranks", "contestants", "samples", "threads", "repetitions", "min_seconds")
    }
    given |= {"memory_limit": options.memory_limit, "inference": options.inference}
    asked = {name: value for name, value in given.items() if value is not None}
    asked |= {name: getattr(options, name) for name in ("batch_size", "recipe", "seed", "device")}
    settings = Settings(**{**(QUICK if options.quick else {}), **asked, "memory": not options.no_memory})
    result = run(settings, None if options.out is None else options.out / _CELLS)
    if options.out is not None:
        for message in write(result, options.out):
            say(message)
        shutil.rmtree(options.out / _CELLS, ignore_errors=True)
    return result, tables(result)


# -- kernels ----------------------------------------------------------------------------------------


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-learning", action="store_true", help="Time the cases alone: no training runs, no errors.")
    only = {"default": "", "help": "Time only the cases whose name contains TEXT."}
    work = {"default": Path("runs/kernels"), "help": "Folder for finished cells. Default: runs/kernels."}
    out = {"metavar": "FILE", "help": "JSON file to write."}
    add_options(parser, "--out", "--work", "--only", "--data-dir", "--json", out=out, work=work, only=only)


def _run_kernels(options: Options) -> tuple[Mapping[str, Any], str]:
    from benchmarks.kernels import measure

    some = {"only": options.only, "learning": not options.no_learning, "data_dir": options.data_dir}
    result = measure(options.work / _CELLS, **some)
    if options.out is not None:
        write_json(options.out, result)
    return result, json.dumps(result, indent=1)


# -- workloads --------------------------------------------------------------------------------------


def _add_workloads(parser: argparse.ArgumentParser) -> None:
    only = {"default": "", "help": "Time only the workloads whose name contains TEXT."}
    work = {"default": Path("runs/workloads"), "help": "Folder for finished rows. Default: runs/workloads."}
    out = {"metavar": "FILE", "help": "JSON file to write."}
    options = "--out", "--work", "--only", "--budget", "--device", "--json"
    add_options(parser, *options, out=out, work=work, only=only)


def _run_workloads(options: Options) -> tuple[Mapping[str, Any], str]:
    from benchmarks.workloads import measure, table

    result = measure(options.work / _CELLS, only=options.only, device=options.device, budget=options.budget)
    if options.out is not None:
        write_json(options.out, result)
    return result, table(result)


COMMANDS = {
    "speed": Command(
        "Speed and memory of training and inference, next to other packages and to the least possible time.",
        _add_speed,
        _run_speed,
        "--quick --out runs/bench",
    ),
    "workloads": Command(
        "Updates of generative models, next to the least possible time: higher ranks, many chains, labels, order 3.",
        _add_workloads,
        _run_workloads,
        "--out benchmarks/gpu/workloads.json",
    ),
    "kernels": Command(
        "The fused GPU kernels by themselves: time, divergence and what they learn.",
        _add_kernels,
        _run_kernels,
        "--out benchmarks/gpu/kernels.json",
    ),
}


def main(args: Sequence[str]) -> int:
    """Run a command, and return the exit code."""
    about = "Speed of training and inference. Without a command: speed."
    return arguments.main("python -m benchmarks", about, COMMANDS, args, default="speed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
