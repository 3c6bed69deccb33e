"""Convert errors to exit codes and one-line messages on standard error."""

import re
import sys
from typing import Any, cast

import typer

__all__ = ["FAILURE", "WRONG_USAGE", "CommandLineError", "UsageError", "complain", "describe", "with_options"]

# Arguments that messages of the library recommend, and the options of the commands that set them.
_OPTIONS = {
    "force=True": "--force",
    "column=NAME": "--column NAME",
    "data_dir": "--data-dir",
    "fixed must have": "--fixed must have",
    "fixed contains": "--fixed contains",
    "MVRBMImputer": "mvrbm impute",
    "method of": "--method of",
    "damage must": "--damage must",
    "n_chains requires": "--chains requires",
    "negative='pcd' or negative='tempered'": "--negative pcd or tempered",
    "dayfirst=True": "--day-first",
    "dayfirst=False": "--month-first",
}

FAILURE = 1
WRONG_USAGE = 2

# Depending on its version, typer either bundles click or depends on it. BadParameter derives from click's classes in
# both cases.
_usage_error, _click_exception = typer.BadParameter.__mro__[1:3]
#: Invalid usage of a command. The exit code is 2.
UsageError = cast("type[Exception]", _usage_error)
#: Base class of all errors raised while parsing the command line.
CommandLineError = cast("type[Exception]", _click_exception)


def describe(error: Exception) -> tuple[str, int] | None:
    """Return the message and the exit code for an error, or None if the error is unexpected."""
    if isinstance(error, CommandLineError):
        code = WRONG_USAGE if isinstance(error, UsageError) else FAILURE
        return _describe_usage(error), code
    reason = _describe_failure(error)
    return None if reason is None else (reason, FAILURE)


def _describe_usage(error: Any) -> str:
    message = str(error.format_message()).replace("Value error, ", "")  # remove pydantic's prefix
    given = _rejected_value(error)
    if given is not None and given not in message:
        message += f", got {given}"
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message} (see {context.command_path} --help)"


def _rejected_value(error: Exception) -> str | None:
    """Return the option value that pydantic rejected, or None if pydantic did not raise the error."""
    cause: Any = error.__cause__
    if not hasattr(cause, "errors"):
        return None
    return repr(cause.errors()[0]["input"])


def _describe_failure(error: Exception) -> str | None:
    """Return the message for an error caused by data, files or memory, or None if the error is unexpected."""
    from mvrbm.errors import MVRBMError

    text = str(error)
    if isinstance(error, MVRBMError):
        return with_options(text)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in text:
        return "out of memory; use a smaller model, batch or input"
    if isinstance(error, RuntimeError) and any(word in text.lower() for word in ("gloo", "nccl")):
        return "another process of this training run failed or is not responding; see its error message"
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return with_options(text) if isinstance(error, (ValueError, OSError)) else None


def with_options(text: str) -> str:
    """Replace argument names in a message from the library with the corresponding command-line options."""
    for argument, option in _OPTIONS.items():
        text = re.sub(rf"(?<![\w.]){argument}(?!\w)", option, text)
    return text


def complain(reason: str, code: int) -> int:
    """Print an error message as one line on standard error and return the exit code."""
    print(f"error: {' '.join(reason.split())}", file=sys.stderr)
    return code
