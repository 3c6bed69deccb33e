"""Entry point and subcommands of the ``mvrbm`` command.

Each module contains one group of commands. A command parses its arguments, makes one library call and prints the
result. Results go to standard output; progress and errors go to standard error. Commands import the library only when
they run, so the help and the version appear immediately. Set ``MVRBM_DEBUG=1`` to see the traceback of an error.
"""

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from mvrbm import __version__
from mvrbm.cli import (
    data,
    images,
    impute,
    inference,
    mixture,
    models,
    outliers,
    pages,
    sequence_analysis,
    sequences,
    topics,
    train,
)
from mvrbm.cli.errors import FAILURE, complain, describe, with_options
from mvrbm.cli.options import Interrupted, new, note
from mvrbm.cli.progress import progress_line
from mvrbm.interrupt import INTERRUPTS, exit_code, terminate_in_order

__all__ = ["app", "main"]

# Name and function of each command, and the arguments for the example in its help text.
_COMMANDS: list[tuple[str, Callable[..., None], str]] = [
    ("train", train.train, "digits.npy --hidden 25x25 --epochs 20 --out model/"),
    ("info", models.info, "model/"),
    ("transform", inference.transform, "model/ digits.npy features.npy"),
    ("reconstruct", inference.reconstruct, "model/ digits.npy reconstructed.png"),
    ("score", inference.score, "model/ digits.npy scores.npy"),
    ("likelihood", inference.likelihood, "model/ digits.npy --temperatures 10000"),
    ("predict", inference.predict, "classifier/ digits.npy labels.npy"),
    ("sample", inference.sample, "labeled-digits sevens.png --label 7"),
    ("inpaint", inference.inpaint, "model/ digits.npy filled.png --hide right"),
    ("impute", impute.impute, "measurements.npy filled.npy --deviations deviations.npy"),
    ("outliers", outliers.outliers, "digits.npy scores.npy --maps maps.png"),
    ("mixture", mixture.mixture, "spectra.npy --components auto --out model/"),
    ("denoise", images.denoise, "photo.png clean.png"),
    ("denoise-train", images.denoise_train, "photos/ --out model/ --kind color"),
    ("repair", images.repair, "photo.png whole.png --damage scratches.png"),
    ("superres", images.superres, "photo.jpg large.png --scale 2"),
    ("superres-train", images.superres_train, "photos/ --out model/ --scale 2"),
    ("topics", topics.topics, "letters/ --topics 20 --save model/"),
    ("export", models.export, "model/ features.onnx --method transform"),
    ("page", pages.page, "digits --out page.html"),
    ("demo", pages.demo, "--out report.html"),
]
_DATA_COMMANDS: list[tuple[str, Callable[..., None], str]] = [
    ("list", data.list_sets, ""),
    ("where", data.where, "mnist"),
    ("fetch", data.fetch, "mnist"),
]
_HELP = "Train and use structured Boltzmann machines for array data."
_DATA_HELP = "List, locate and download the named datasets."
_SEQUENCES_HELP = "Train and use models of aligned sequences of proteins, RNA or DNA."
_IMPORT_HELP = (
    "Import this Python module first, from the current folder or an installed package. The module can define units and "
    "couplings. Can be repeated."
)
_SETTINGS: Any = {
    "rich_markup_mode": None,
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}


def _example(command: str) -> str:
    return f"\b\nExample:\n  mvrbm {command.rstrip()}"


app = typer.Typer(name="mvrbm", help=_HELP, epilog=_example("train mnist-5k --hidden 25x25 --out model/"), **_SETTINGS)
_data_app = typer.Typer(name="data", help=_DATA_HELP, epilog=_example("data fetch mnist"), **_SETTINGS)
app.add_typer(_data_app)
_sequences_app = typer.Typer(
    name="sequences", help=_SEQUENCES_HELP, epilog=_example("sequences train family.fasta --out model/"), **_SETTINGS
)
app.add_typer(_sequences_app)
for _name, _function, _arguments in _COMMANDS:
    app.command(_name, epilog=_example(f"{_name} {_arguments}"))(_function)
for _name, _function, _arguments in _DATA_COMMANDS:
    _data_app.command(_name, epilog=_example(f"data {_name} {_arguments}"))(_function)
for _name, _function, _arguments in [*sequences.COMMANDS, *sequence_analysis.COMMANDS]:
    _sequences_app.command(_name, epilog=_example(f"sequences {_name} {_arguments}"))(_function)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"mvrbm {__version__}")
        raise typer.Exit


def _import_module(name: str) -> None:
    """Import a module from the current folder or an installed package. Raise a usage error if the import fails."""
    sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(name)
    except Exception as error:
        reason = f"cannot import '{name}' ({type(error).__name__}: {error})"
        raise typer.BadParameter(reason, param_hint="'--import'") from error


_Version = Annotated[bool, new("Print the version and exit.", "--version", callback=_print_version, is_eager=True)]
_Modules = Annotated[list[str] | None, new(_IMPORT_HELP, "--import", metavar="MODULE")]


@app.callback()
def _top(modules: _Modules = None, version: _Version = False) -> None:
    for name in modules or ():
        _import_module(name)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command-line interface and return the exit code.

    The exit code is 0 on success, 1 on failure, 2 for invalid usage, 130 after Ctrl-C and 143 after SIGTERM.
    """
    if "torch" not in sys.modules:
        # By default, idle OpenMP threads spin while they wait for work. On a busy machine, this made commands ten times
        # slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if args is None else args)
    try:
        with terminate_in_order(), warnings.catch_warnings(), progress_line():
            _show_warnings_as_notes()
            code = typer.main.get_command(app).main(words or ["--help"], "mvrbm", standalone_mode=False)
        sys.stdout.flush()
    except Interrupted as error:
        return complain(str(error), error.code)
    except INTERRUPTS as error:
        return complain("interrupted", exit_code(error))
    except (BrokenPipeError, SystemExit):  # typer raises SystemExit on a broken pipe
        _discard_output()
        return FAILURE
    except Exception as error:
        return _handle(error)
    if code == exit_code(KeyboardInterrupt()):  # typer catches Ctrl-C and returns this code
        return complain("interrupted", code)
    return code if isinstance(code, int) else 0


def _handle(error: Exception) -> int:
    """Print a one-line error message and return the exit code.

    Unexpected errors are raised again. If ``MVRBM_DEBUG=1`` is set, all errors are raised again.
    """
    if os.environ.get("MVRBM_DEBUG") == "1":
        raise error
    if getattr(error, "said_by_main", False):  # the main process of the distributed run prints the message
        return FAILURE
    described = describe(error)
    if described is None:
        raise error
    return complain(*described)


def _discard_output() -> None:
    """Redirect standard output to the null device so that flushing it at exit does not raise another error."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: standard output is not a real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_warnings_as_notes() -> None:
    """Print each UserWarning as a one-line note, and ignore all other warnings."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", UserWarning)
    # scikit-learn warns if a model was trained on a table with column names and is applied to an array without names.
    warnings.filterwarnings("ignore", message="X does not have valid feature names")
    warnings.showwarning = lambda message, *_, **__: note(with_options(" ".join(str(message).split())))
