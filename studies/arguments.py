"""The command line that `python -m studies` and `python -m benchmarks` share.

A :class:`Command` has options, and a function that takes the parsed options and returns a result. Each study defines
its own. This module has the parser, the options that several commands share, and the handling of errors. It imports
little, so that runs can be computed on a machine that has PyTorch and not much else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mvrbm.interrupt import INTERRUPTS, exit_code, terminate_in_order

__all__ = [
    "Command",
    "Options",
    "UsageError",
    "add_options",
    "add_parts",
    "add_study_options",
    "count",
    "main",
    "names",
    "not_negative",
    "positive",
    "say",
]

# Exit codes.
_FAILED = 1
_MISUSED = 2

Options = argparse.Namespace


class UsageError(Exception):
    """Arguments that cannot be parsed or that contradict each other."""


@dataclass(frozen=True)
class Command:
    """One command.

    Parameters
    ----------
    help : str
        What the command does, in one sentence.
    add : callable
        Adds the options of the command to a parser.
    run : callable
        Takes the parsed options, and returns plain values to print for ``--json`` and the text to print otherwise.
    example : str
        Arguments of the example in the help.
    """

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Options], tuple[Mapping[str, Any], str]]
    example: str


# -- types of values --------------------------------------------------------------------------------


def _number(text: str, kind: type[int] | type[float], what: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    value: int = _number(text, int, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def not_negative(text: str) -> int:
    """Parse an integer of at least 0."""
    value: int = _number(text, int, "a whole number")
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def positive(text: str) -> float:
    """Parse a positive number."""
    value: float = _number(text, float, "a number")
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def seconds(text: str) -> float:
    """Parse a number of at least 0."""
    value: float = _number(text, float, "a number")
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


def names(text: str) -> list[str]:
    """Parse names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


# -- options ----------------------------------------------------------------------------------------

#: Options that several commands share, with their arguments for `add_argument`.
OPTIONS: dict[str, dict[str, Any]] = {
    "--out": {"type": Path, "metavar": "DIR", "help": "Output folder."},
    "--work": {"type": Path, "metavar": "DIR", "help": "Folder for stored runs, models and checkpoints."},
    "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto", "help": "Device to compute on. Default: auto."},
    "--data-dir": {"metavar": "DIR", "help": "Folder with the data sets. Default: $MVRBM_DATA."},
    "--jobs": {"type": count, "default": 1, "metavar": "N", "help": "Number of processes. Default: 1."},
    "--budget": {"type": positive, "metavar": "SECONDS", "help": "Start no further run after this many seconds."},
    "--only": {"metavar": "TEXT", "help": "Compute only the runs whose name contains TEXT."},
    "--report-only": {"action": "store_true", "help": "Report on the stored results without computing anything."},
    "--json": {"action": "store_true", "help": "Print the result as JSON."},
}


def add_options(parser: argparse.ArgumentParser, *options: str, **changes: Mapping[str, Any]) -> None:
    """Add common options to a parser.

    Parameters
    ----------
    parser : ArgumentParser
        The command's parser.
    *options : str
        Keys of :data:`OPTIONS`.
    **changes : mapping
        Arguments for `add_argument` that differ from the table, by option (``data_dir`` for ``--data-dir``).
    """
    for option in options:
        parser.add_argument(option, **{**OPTIONS[option], **changes.get(option.strip("-").replace("-", "_"), {})})


def add_study_options(parser: argparse.ArgumentParser, name: str, *options: str, **changes: Mapping[str, Any]) -> None:
    """Add the options that every study has, and further common options.

    Parameters
    ----------
    parser : ArgumentParser
        The command's parser.
    name : str
        Name of the study. Results are in ``results/NAME``, other files in ``runs/NAME``.
    *options : str
        Further keys of :data:`OPTIONS`.
    **changes : mapping
        As for :func:`add_options`.
    """
    folders = {
        "out": {"default": Path("results") / name, "help": f"Folder for the results. Default: results/{name}."},
        "work": {
            "default": Path("runs") / name,
            "help": f"Folder for stored runs, models and checkpoints. Default: runs/{name}.",
        },
    }
    add_options(parser, "--out", "--work", *options, "--report-only", "--json", **{**folders, **changes})


def add_parts(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """Add the positional argument that selects parts of a study."""

    def part(text: str) -> str:
        if text not in parts:
            raise argparse.ArgumentTypeError(f"unknown part '{text}': choose from {', '.join(parts)}")
        return text

    parser.add_argument(
        "parts", nargs="*", type=part, metavar="PART", help=f"Parts to run: {', '.join(parts)}. Default: all."
    )


# -- running ----------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(
    program: str, about: str, commands: Mapping[str, Command], args: Sequence[str], default: str | None = None
) -> int:
    """Parse arguments, run the command, print its result, and return the exit code.

    Results go to standard output, progress and errors to standard error. An error is printed as one line. With
    ``MVRBM_DEBUG=1`` in the environment it is raised instead.

    Parameters
    ----------
    program : str
        Command line that starts the program, such as ``python -m studies``.
    about : str
        Description for the help.
    commands : mapping of str to Command
        The commands by name.
    args : sequence of str
        Arguments without the program's name.
    default : str, optional
        The command to run if the arguments do not begin with the name of a command.

    Returns
    -------
    int
        0, 1 after a failure, 2 for wrong arguments, 130 after Ctrl-C, 143 after SIGTERM.
    """
    if default is not None and (not args or args[0].startswith("-")):
        args = [default, *args]
    try:
        if not args or (args[0] not in commands and not args[0].startswith("-")):
            given = f"unknown command '{args[0]}'" if args else "a command is missing"
            raise UsageError(f"{given}: choose from {', '.join(commands)}")
        options = parse(program, commands, args, about, default)
        with terminate_in_order():
            result, text = commands[options.command].run(options)
    except INTERRUPTS as error:
        return exit_code(error)
    except SystemExit as end:  # after --help
        return int(end.code or 0)
    except UsageError as error:
        say(f"error: {error}")
        return _MISUSED
    except (ValueError, ArithmeticError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("MVRBM_DEBUG"):
            raise
        say(f"error: {' '.join(str(error).split()) or type(error).__name__}")
        return _FAILED
    text = json.dumps(result, default=str) if options.json else text
    if text:
        print(text)
    return 0


def parse(
    program: str, commands: Mapping[str, Command], args: Sequence[str], about: str = "", default: str | None = None
) -> Options:
    """Return the parsed arguments, with the name of the command as `command`. Parameters are those of :func:`main`."""
    return _parser(program, about, commands, default).parse_args(args)


def _parser(program: str, about: str, commands: Mapping[str, Command], default: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog=program, description=about, allow_abbrev=False)
    found = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, command in commands.items():
        start = program if name == default else f"{program} {name}"
        others = [f"{program} {other}: {commands[other].help}" for other in commands if other != name]
        epilog = [f"example:\n  {start} {command.example}", *(others if name == default else [])]
        each = found.add_parser(
            name,
            prog=start,
            help=command.help,
            description=command.help,
            epilog="\n\n".join(epilog),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add(each)
    return parser


def say(line: str) -> None:
    """Print a line of progress to standard error, without buffering."""
    print(line, file=sys.stderr, flush=True)
