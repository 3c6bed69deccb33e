"""The command ``mvrbm``: the table of its commands, the entry point `main`, and how errors become one line.

Results go to standard output, progress and errors to standard error. Commands are grouped in one module each; they
parse arguments, make one library call and show the result. They import the library when they run, so that help
appears at once. ``MVRBM_DEBUG=1`` shows the traceback of an error.
"""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

import typer

from mvrbm import __version__
from mvrbm.cli import data, demo, images, impute, models, outliers, page, topics, train, use
from mvrbm.cli.options import Interrupted, new, note, progress
from mvrbm.interrupt import INTERRUPTS, exit_code, terminate_in_order

__all__ = ["app", "main"]

_COMMANDS: list[tuple[Callable[..., None], str]] = [
    (train.train, "train digits.npy --hidden 25x25 --rank 1 --epochs 20 --out model/"),
    (models.info, "info model/"),
    (use.transform, "transform model/ digits.npy features.npy"),
    (use.reconstruct, "reconstruct model/ digits.npy reconstructed.png"),
    (use.score, "score model/ digits.npy scores.npy"),
    (use.likelihood, "likelihood model/ digits.npy --steps 10000"),
    (use.predict, "predict classifier/ digits.npy labels.npy"),
    (use.sample, "sample labeled-digits sevens.png --label 7"),
    (use.inpaint, "inpaint model/ digits.npy filled.png --hide right"),
    (impute.impute, "impute measurements.npy filled.npy --deviations deviations.npy"),
    (outliers.outliers, "outliers digits.npy scores.npy --maps maps.png"),
    (images.denoise, "denoise photo.png clean.png"),
    (images.denoise_train, "denoise-train photos/ --out model/ --kind color"),
    (images.repair, "repair photo.png whole.png --mask scratches.png"),
    (images.superres, "superres photo.jpg large.png --scale 2"),
    (images.superres_train, "superres-train photos/ --out model/ --scale 2"),
    (topics.topics, "topics letters/ --topics 20 --out model/"),
    (models.export, "export model/ features.onnx --method transform"),
    (page.page, "page digits --out page.html"),
    (demo.demo, "demo --out report.html"),
    (data.list_sets, "data list"),
    (data.where, "data where mnist"),
    (data.fetch, "data fetch mnist"),
]
_HELP = "Structured Boltzmann machines for arrays: train a model, inspect it, reconstruct, sample, fill in."


_DATA_HELP = "Named data sets: list them, find them, download them."


def _example(text: str) -> str:
    return f"\b\nExample:\n  mvrbm {text}"


_GROUP: Any = {"rich_markup_mode": None, "add_completion": False, "pretty_exceptions_enable": False}
_GROUP |= {"context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100}}
app = typer.Typer(name="mvrbm", help=_HELP, epilog=_example("train mnist-5k --hidden 25x25 --out model/"), **_GROUP)
_data = typer.Typer(name="data", help=_DATA_HELP, epilog=_example("data fetch mnist"), **_GROUP)
app.add_typer(_data)
for _function, _text in _COMMANDS:
    _command = _text.split()[: 2 if _text.startswith("data ") else 1]
    (_data if len(_command) > 1 else app).command(_command[-1], epilog=_example(_text))(_function)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"mvrbm {__version__}")
        raise typer.Exit


@app.callback()
def _top(version: Annotated[bool, new("Print the version.", callback=_print_version, is_eager=True)] = False) -> None:
    pass


# typer contains click or depends on it, according to its version: its classes are found through typer's own names.
_UsageError, _ClickError = (cast("type[Exception]", base) for base in typer.BadParameter.__mro__[1:3])


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 success, 1 failure, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM."""
    command, words = typer.main.get_command(app), sys.argv[1:] if args is None else args
    if "torch" not in sys.modules:
        # Threads that wait for work by spinning take the cores from threads that have some: on busy cores that
        # made a command ten times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with terminate_in_order(), warnings.catch_warnings(), progress():
            _show_warnings_as_notes()
            code = command.main(list(words) or ["--help"], "mvrbm", standalone_mode=False)
        sys.stdout.flush()
    except (Interrupted, *INTERRUPTS) as error:
        return _complain(str(error) if isinstance(error, Interrupted) else "interrupted", exit_code(error))
    except (BrokenPipeError, SystemExit):  # SystemExit: typer's answer to a broken pipe
        with contextlib.suppress(OSError, ValueError):  # ValueError: standard output is not a real file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("MVRBM_DEBUG") == "1":
            raise
        if getattr(error, "said_by_main", False):  # the main process of a distributed run prints it
            return 1
        if isinstance(error, _ClickError):
            context = getattr(error, "ctx", None)
            hint = "" if context is None else f" (see {context.command_path} --help)"
            # New versions of typer put pydantic's words before ours.
            said = cast("Any", error).format_message().replace("Value error, ", "")
            return _complain(said + hint, 2 if isinstance(error, _UsageError) else 1)
        if (reason := _reason(error)) is None:
            raise
        return _complain(reason, 1)
    if code == exit_code(KeyboardInterrupt()):  # typer has caught Ctrl-C
        return _complain("interrupted", code)
    return code if isinstance(code, int) else 0


def _show_warnings_as_notes() -> None:
    """Print warnings about the user's data as one line each, and no others."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", UserWarning)
    # Files have no column names, whatever the model was trained on.
    warnings.filterwarnings("ignore", message="X does not have valid feature names")
    warnings.showwarning = lambda message, *_, **__: note(" ".join(str(message).split()))


def _reason(error: Exception) -> str | None:
    """Return the message for an error of data, files or memory, or None for an error in this package."""
    from mvrbm.errors import MVRBMError

    text = str(error)
    if isinstance(error, MVRBMError):
        return text
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in text:
        return "out of memory: use a smaller model, batch or input"
    if isinstance(error, RuntimeError) and any(word in text.lower() for word in ("gloo", "nccl")):
        return "another process of this training run has failed or does not answer: see its own message"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return text if isinstance(error, (MVRBMError, ValueError, OSError)) else None


def _complain(reason: str, code: int) -> int:
    print(f"error: {' '.join(reason.split())}", file=sys.stderr)
    return code
