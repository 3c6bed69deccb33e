"""Options and helpers shared by several commands.

The first part declares the options that have the same name and meaning in every command. The second part checks
options, loads models, reads samples and prints results. Options used by only one command are declared next to that
command.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mvrbm.cli.errors import UsageError
from mvrbm.interrupt import exit_code

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mvrbm.training import Callback

# -- declaring options ------------------------------------------------------------------------------

Device = StrEnum("Device", ["AUTO", "CPU", "CUDA"])
# Names of the recipes in mvrbm.training.RECIPES, repeated here because importing that module imports PyTorch.
Recipe = StrEnum("Recipe", ["DEFAULT", "GENERATIVE", "SEQUENCES", "PAPER"])

# Maximum number of entries in a shape given on the command line.
_MAX_ENTRIES = 2**31


class Shape(tuple[int, ...]):
    """Tuple of axis lengths whose string representation has the form ``25x25``."""

    def __str__(self) -> str:
        return times(self)


def times(shape: Iterable[int]) -> str:
    """Format a shape as ``25x25``."""
    return "x".join(map(str, shape))


def parse_shape(value: str | Shape) -> Shape:
    """Parse a shape such as ``25x25``."""
    text = str(value)
    if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", text):
        raise typer.BadParameter(f"expected a shape such as 25x25, got {text!r}")
    shape = Shape(int(size) for size in text.split("x"))
    if math.prod(shape) > _MAX_ENTRIES:
        raise typer.BadParameter(
            f"{text} has {math.prod(shape):,} entries, which exceeds the limit of {_MAX_ENTRIES:,}"
        )
    return shape


def parse_rows(value: str | slice) -> slice:
    """Parse a number of samples, such as ``100``, or a range of samples, such as ``100:200``."""
    if isinstance(value, slice):
        return value
    if not re.fullmatch(r"[0-9]{1,12}|[0-9]{0,12}:[0-9]{0,12}(:[0-9]{0,12})?", value) or value in ("0", ":0"):
        raise typer.BadParameter(f"{value!r} is neither a number of samples, such as 100, nor a slice, such as 100:200")
    parts = [int(part) if part else None for part in value.split(":")]
    if len(parts) == 3 and parts[2] == 0:
        raise typer.BadParameter(f"the step of {value!r} must not be 0")
    return slice(*parts)


#: Settings for an option whose value is a shape.
SHAPE: Any = {"parser": parse_shape, "metavar": "SHAPE"}


def new(help_text: str, *names: str, default: str | bool = False, **settings: Any) -> Any:
    """Declare an option. If `default` is a string, the help text shows it as the default value."""
    return typer.Option(*names, help=help_text, show_default=default, **settings)


def argument(metavar: str, help_text: str) -> Any:
    """Declare a required argument."""
    return typer.Argument(metavar=metavar, help=help_text, show_default=False)


_INPUT_HELP = (
    "Samples: an array file (.npy, .npz:KEY, .h5, .zarr, idx), a table (.csv, .parquet), an image, a folder of images "
    "or .npy files, or a dataset name (mnist-5k)."
)
_ROWS_HELP = "Use only these samples: 100 (the first 100), 100:200 or ::10."
_MODEL_HELP = "Folder of a saved model, or the name of a model that comes with mvrbm (digits, labeled-digits)."
# Help for commands that support only models without labels, or only models with labels.
UNLABELED_HELP = "Folder of a saved model without labels, or digits, a model that comes with mvrbm."
LABELED_HELP = "Folder of a saved model with labels, or labeled-digits, a model that comes with mvrbm."
_OUT_IMAGES_HELP = "A .npy file, or an image file (such as .png) for a contact sheet."
_DATES_HELP = "How to read dates such as 05/03/2021 if both ways are possible for a whole column."
_COLUMNS_HELP = "Number of columns in the contact sheet."
RECIPE_HELP = "Training recipe: default (for features), generative (for sampling), sequences or paper."

# Maximum number of samples on a contact sheet, unless --rows selects more.
MOST_TILES = 100

Input = Annotated[str, argument("INPUT", _INPUT_HELP)]
ModelFolder = Annotated[Path, argument("MODEL", _MODEL_HELP)]
UnlabeledFolder = Annotated[Path, argument("MODEL", UNLABELED_HELP)]
ArrayOut = Annotated[Path, argument("OUT", "A .npy file.")]
ImagesOut = Annotated[Path, argument("OUT", _OUT_IMAGES_HELP)]
ModelOut = Annotated[Path, new("Folder to save the model to.", "--out")]
SaveModel = Annotated[Path | None, new("Also save the trained model to this folder.", "--save")]
Columns = Annotated[int | None, new(_COLUMNS_HELP, "--columns", min=1)]
DayFirst = Annotated[bool | None, new(_DATES_HELP, "--day-first/--month-first", default="month first")]
MissingNan = Annotated[bool, new("Treat NaN entries as missing.", "--missing-nan")]
Rows = Annotated[slice | None, new(_ROWS_HELP, "-n", "--rows", parser=parse_rows, metavar="N|SLICE")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Random seed.")]
Where = Annotated[Device, typer.Option("--device", help="Device to use. auto selects a GPU if available.")]
AsJson = Annotated[bool, new("Print the result as one JSON object.", "--json")]
Force = Annotated[bool, new("Overwrite existing output.", "--force")]
Quiet = Annotated[bool, new("Do not show progress.", "--quiet")]
DataDir = Annotated[Path | None, new("Folder with local copies of datasets.", "--data-dir")]


# -- checking options -------------------------------------------------------------------------------


class Interrupted(Exception):  # noqa: N818  (it is not an error)
    """Raised after Ctrl-C or SIGTERM has stopped training and the model has been saved. `code` is the exit code."""

    def __init__(self, message: str, cause: BaseException) -> None:
        super().__init__(message)
        self.code = exit_code(cause)


def option_name(parameter: str) -> str:
    """Return the option name for a parameter, such as ``--batch-size`` for ``batch_size``."""
    return f"--{parameter.replace('_', '-')}"


def given_options(**settings: Any) -> list[str]:
    """Return the names of the options whose values are not None."""
    return [option_name(name) for name, value in settings.items() if value is not None]


def check_absent(reason: str, **settings: Any) -> None:
    """Raise a usage error if any of the options in `settings` was given.

    `reason` follows the name of the option in the message, such as "has no effect without --model".
    """
    for option in given_options(**settings):
        raise typer.BadParameter(f"{reason}; omit it", param_hint=f"'{option}'")


def check_conflicts(option: str, reason: str, **settings: Any) -> None:
    """Raise a usage error if any of the options in `settings` was given together with `option`."""
    given = given_options(**settings)
    if given:
        raise UsageError(f"{option} cannot be combined with {' or '.join(given)} because {reason}")


def check_not_training(model_folder: Path | None, **settings: Any) -> None:
    """Raise a usage error if --model was given together with any of the training options in `settings`."""
    if model_folder is not None:
        check_conflicts("--model", f"the model in {model_folder} is already trained", **settings)


def check_out(out: Path, force: bool, *, images: bool = True) -> None:
    """Raise ValueError unless `out` is a writable path to a .npy file or, if `images` is True, to an image file."""
    from mvrbm.io.atomic import check_output
    from mvrbm.io.formats import IMAGE_SUFFIXES

    check_output(out, force, (".npy", *IMAGE_SUFFIXES) if images else (".npy",))


def check_pictures(out: Path, shape: Sequence[int]) -> None:
    """Raise ValueError if `out` is an image file but samples of the given shape are not images."""
    from mvrbm.io.arrays import picture_shape

    if not is_array(out):
        try:
            picture_shape(shape)
        except ValueError as error:
            raise ValueError(f"{out} cannot be written: {error}") from error


def check_different(outputs: Mapping[str, Path | None]) -> None:
    """Raise a usage error if two outputs have the same path. The keys are the names of their options."""
    seen: dict[Path, str] = {}
    for name, path in outputs.items():
        if path is not None and (other := seen.setdefault(path.resolve(), name)) != name:
            raise UsageError(f"{other} and {name} must be different files, got {path} for both")


def check_columns(columns: int | None, *outputs: Path | None) -> None:
    """Raise a usage error if --columns was given but none of the outputs is an image."""
    if all(out is None or out.suffix.lower() in (".npy", ".csv", ".tsv") for out in outputs):
        check_absent("has no effect without a contact sheet", columns=columns)


def check_model_out(out: Path, force: bool) -> None:
    """Raise ValueError if a model cannot be saved to the folder `out`."""
    from mvrbm.io.atomic import check_folder
    from mvrbm.saving import is_replaceable

    occupied = check_folder(out).is_dir() and any(out.iterdir())
    if occupied and not is_replaceable(out):
        raise ValueError(f"{out} contains files that are not part of a model; choose another folder")
    if occupied and not force:
        raise ValueError(f"{out} already exists; use --force to replace the model in it")


# -- models -----------------------------------------------------------------------------------------

# Models that have commands of their own.
_OTHER_COMMANDS = {"SequenceRBM": "mvrbm sequences", "ReplicatedSoftmax": "mvrbm topics"}
# Estimators that are identified by a method that no other estimator has.
_KIND_BY_METHOD = {"explain": "an outlier detector", "standard_deviation": "an imputer"}


def load_model(folder: Path, device: str, method: str, seed: int | None = None) -> Any:
    """Load an estimator and set its random state to `seed`, if given.

    Raises ValueError unless the estimator has the given method and accepts one array per sample.
    """
    import mvrbm

    model = mvrbm.load(folder, device)
    kind = type(model).__name__
    if kind in _OTHER_COMMANDS:
        raise ValueError(
            f"{folder} contains a model of class {kind}, which is not a model of arrays; use {_OTHER_COMMANDS[kind]} "
            "or the Python interface"
        )
    if not hasattr(model, method):
        lacks = f"is not {_KIND_BY_METHOD[method]}" if method in _KIND_BY_METHOD else f"has no method '{method}'"
        advice = ""
        if hasattr(model, "classes_"):
            commands = [f"mvrbm {name}" for name in ("predict", "sample") if hasattr(model, name)]
            advice = f" because it is a model with labels; use {' or '.join(commands)}"
        raise ValueError(f"{folder} contains a model of class {kind}, which {lacks}{advice}")
    if not hasattr(model, "visible_shape_"):
        raise ValueError(
            f"{folder} contains a model of class {kind}, which requires more than one array per sample; "
            "use the Python interface instead"
        )
    if seed is not None:
        model.set_params(random_state=seed)
    return model


def text_columns_of_table(table: Any) -> list[str]:
    """Return the names of the columns of a data frame that contain text and no dates.

    Columns of dtype "category" are left out. For other samples, the list is empty.
    """
    from mvrbm.io.dates import date_formats
    from mvrbm.io.tables import text_columns

    names = text_columns(table) if hasattr(table, "iloc") else []
    return [name for name in names if table[name].dtype.name != "category" and not date_formats(table[name])]


def text_columns_of(model: Any) -> list[str]:
    """Return the names of the columns whose categories are text, for an estimator that was trained on a table."""
    names = getattr(model, "feature_names_in_", None)
    if names is None:
        return []
    return [str(names[column]) for column, found in model.encoding_.categories.items() if found.dtype.kind == "U"]


def progress_callbacks(quiet: bool) -> list[Callback]:
    """Return the callbacks that show progress: a progress bar on a terminal, or one line per epoch elsewhere.

    If `quiet` is True, the list is empty.
    """
    from mvrbm.training import EpochLines, ProgressBar

    if quiet:
        return []
    return [ProgressBar() if sys.stderr.isatty() else EpochLines()]


# -- input ------------------------------------------------------------------------------------------


def read(source: str, data_dir: Path | None, rows: slice | None = None, out: Path | None = None) -> Any:
    """Read the selected samples into memory.

    If `rows` is None, all samples are selected, or the first `MOST_TILES` samples if `out` is an image.
    """
    from mvrbm.io.arrays import read_samples

    samples = read_samples(source, data_dir=data_dir)
    return chosen(samples, rows if out is None else tiles(rows, out, len(samples)), source)[:]


def tiles(rows: slice | None, out: Path, n: int) -> slice | None:
    """Return the slice of samples to write to `out`, or None to write all samples.

    If `rows` is None and `out` is an image, only the first `MOST_TILES` of the n samples are written.
    """
    if rows is not None or is_array(out) or n <= MOST_TILES:
        return rows
    note(f"{out} shows the first {MOST_TILES} of {n:,} samples; use -n to select other or more samples")
    return slice(MOST_TILES)


def chosen(samples: Any, rows: slice | None, source: str) -> Any:
    """Return the samples selected by --rows, or all samples if `rows` is None."""
    if rows is None:
        return samples
    some = samples[rows]
    if not len(some):
        raise ValueError(f"-n selects none of the {len(samples):,} samples in {source}")
    return some


def check_same_size(samples: Any, training: Any, source: str, train: str) -> None:
    """Raise ValueError if the samples in `samples` and `training` have different numbers of entries."""
    if math.prod(training.shape[1:]) != math.prod(samples.shape[1:]):
        raise ValueError(
            f"--train {train} has samples of shape {times(training.shape[1:])}, "
            f"but {source} has samples of shape {times(samples.shape[1:])}"
        )


# -- results ----------------------------------------------------------------------------------------


def is_array(out: Path) -> bool:
    """Return whether a path refers to an array file rather than an image."""
    return out.suffix.lower() == ".npy"


def write_samples(
    out: Path,
    array: NDArray[Any],
    shape: Sequence[int],
    force: bool,
    as_json: bool,
    details: dict[str, Any] | None = None,
    words: str = "",
    columns: int | None = None,
) -> None:
    """Write samples to a .npy file or a contact sheet and print their shape and dtype.

    `shape` is the shape of one sample. `details` is added to the JSON output, and `words` is added to the text output.
    `columns` is the number of columns in the contact sheet.
    """
    from mvrbm.io.arrays import write_output

    plain = is_array(out)
    stretch = not plain and bool(array.min() < 0 or array.max() > 1)
    write_output(out, array if plain else array.reshape(-1, *shape), force, stretch=stretch, columns=columns)
    result = {"out": str(out), "shape": array.shape, "dtype": str(array.dtype), **(details or {})}
    text = f"{out}: {times(array.shape)} {array.dtype}"
    show(result, as_json, f"{text}, {words}" if words else text)


def show(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print `result` as a JSON object if `as_json` is True, or `text` otherwise."""
    print(json.dumps(result, default=str) if as_json else text)


def table(rows: Sequence[tuple[str, Any]]) -> str:
    """Format names and values as a table with two aligned columns."""
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def note(text: str) -> None:
    """Print a note to standard error."""
    print(f"note: {text}", file=sys.stderr)
