"""The command ``mvrbm``: the table of its commands, the entry point `main`, and how errors become one line.

Results go to standard output, progress and errors to standard error. Commands are grouped in one module each; they
parse arguments, make one library call and show the result. They import the library when they run, so that help
appears at once. ``MVRBM_DEBUG=1`` shows the traceback of an error.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, cast

import typer

from mvrbm.cli import data, demo, images, models, train, use
from mvrbm.cli.options import Interrupted, note

__all__ = ["app", "main"]

_INTERRUPTED = 130

_COMMANDS: list[tuple[Callable[..., None], str]] = [
    (train.train, "train digits.npy --hidden 25x25 --rank 1 --epochs 20 --out model/"),
    (models.info, "info model/"),
    (use.transform, "transform model/ digits.npy features.npy"),
    (use.reconstruct, "reconstruct model/ digits.npy reconstructed.png"),
    (use.score, "score model/ digits.npy scores.npy"),
    (use.predict, "predict classifier/ digits.npy labels.npy"),
    (use.sample, "sample model/ samples.png -n 100 --steps 1000"),
    (use.inpaint, "inpaint model/ digits.npy filled.png --hide right"),
    (images.denoise, "denoise noisy.png clean.png --model model/ --noise salt-and-pepper"),
    (images.superres, "superres photo.jpg large.png --scale 2"),
    (images.superres_train, "superres-train photos/ --out model/ --scale 2"),
    (models.export, "export model/ features.onnx --method transform"),
    (demo.demo, "demo --out report.html"),
]
_DATA_COMMANDS: list[tuple[Callable[..., None], str, str]] = [
    (data.list_sets, "list", "data list"),
    (data.where, "where", "data where mnist"),
    (data.fetch, "fetch", "data fetch mnist"),
]


def _example(text: str) -> str:
    return f"\b\nExample:\n  mvrbm {text}"


app = typer.Typer(
    name="mvrbm",
    help="Structured Boltzmann machines for arrays: train a model, inspect it, reconstruct, sample, fill in.",
    epilog=_example("train mnist-5k --hidden 25x25 --out model/"),
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
_data_app = typer.Typer(
    help="Named data sets: list them, find them, download them.",
    epilog=_example("data fetch mnist"),
    rich_markup_mode=None,
)
for _function, _text in _COMMANDS:
    app.command(_function.__name__.replace("_", "-"), epilog=_example(_text))(_function)
for _function, _name, _text in _DATA_COMMANDS:
    _data_app.command(_name, epilog=_example(_text))(_function)
app.add_typer(_data_app, name="data")


def _version(asked: bool) -> None:
    if asked:
        import mvrbm

        print(f"mvrbm {mvrbm.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# -- entry ------------------------------------------------------------------------------------------

# typer contains click or depends on it, according to its version: its classes are found through typer's own names.
_UsageError, _ClickError = (cast("type[Exception]", base) for base in typer.BadParameter.__mro__[1:3])


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 success, 1 failure, 2 wrong usage, 130 interrupted."""
    command = typer.main.get_command(app)
    if "torch" not in sys.modules:
        # Threads that wait for work by spinning take the cores from threads that have some: on busy cores that
        # made a command ten times slower.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with warnings.catch_warnings():
            _show_warnings_as_notes()
            code = command.main(
                list(sys.argv[1:] if args is None else args) or ["--help"], "mvrbm", standalone_mode=False
            )
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()
        return 1
    except SystemExit as stop:  # typer's answer to a broken pipe
        _silence()
        return stop.code if isinstance(stop.code, int) else 1
    except (KeyboardInterrupt, Interrupted) as error:
        return _complain(str(error) or "interrupted", _INTERRUPTED)
    except Exception as error:
        if os.environ.get("MVRBM_DEBUG") == "1":
            raise
        if getattr(error, "said_by_main", False):  # the main process of a distributed run prints it
            return 1
        if isinstance(error, _ClickError):
            return _complain(_usage(error), 2 if isinstance(error, _UsageError) else 1)
        reason = _reason(error)
        if reason is None:
            raise
        return _complain(reason, 1)
    if code == _INTERRUPTED:  # typer has caught Ctrl-C
        return _complain("interrupted", _INTERRUPTED)
    return code if isinstance(code, int) else 0


def _show_warnings_as_notes() -> None:
    """Print warnings about the user's data as one line each, and no others."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", UserWarning)
    # Files have no column names, whatever the model was trained on.
    warnings.filterwarnings("ignore", message="X does not have valid feature names")
    warnings.showwarning = lambda message, *_, **__: note(" ".join(str(message).split()))


def _usage(error: Any) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return f"{error.format_message()}{hint}"


def _reason(error: Exception) -> str | None:
    """Return the message for an error of data, files or memory, or None for an error in this package."""
    from mvrbm.errors import MVRBMError

    text = str(error)
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


def _silence() -> None:
    """Discard further output: nobody reads the pipe any more."""
    with open(os.devnull, "w") as nowhere:
        try:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        except (OSError, ValueError):  # not a real file
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
