"""What several commands share: options, the parsing of shapes, loading a model, and showing a result."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mvrbm.interrupt import exit_code

if TYPE_CHECKING:
    from numpy.typing import NDArray

Device = StrEnum("Device", ["AUTO", "CPU", "CUDA"])
Recipe = StrEnum("Recipe", ["DEFAULT", "GENERATIVE", "PAPER"])


CHECKPOINTS_HELP = "Folder to save in after every epoch, and to resume from."


class Interrupted(Exception):  # noqa: N818  (it is not an error)
    """Training was ended by Ctrl-C or SIGTERM, and everything is saved. `code` is the exit code."""

    def __init__(self, message: str, cause: BaseException) -> None:
        super().__init__(message)
        self.code = exit_code(cause)


class Shape(tuple[int, ...]):
    """A shape such as 25x25."""

    def __str__(self) -> str:
        return times(self)


def times(shape: Iterable[int]) -> str:
    """Write a shape as people do: 25x25."""
    return "x".join(map(str, shape))


def parse_shape(value: str | Shape) -> Shape:
    """Read a shape such as 25x25."""
    text = str(value)
    if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", text):
        raise typer.BadParameter(f"{text!r} is not a shape such as 25x25")
    shape = Shape(int(size) for size in text.split("x"))
    if math.prod(shape) > 2**31:
        raise typer.BadParameter(f"{text} has {math.prod(shape):,} entries, which is too large")
    return shape


#: Settings of an option that takes a shape.
SHAPE: Any = {"parser": parse_shape, "metavar": "SHAPE"}


def new(help_text: str, *names: str, **settings: Any) -> Any:
    """Declare an option whose default needs no mention, or is part of the help text."""
    return typer.Option(*names, help=help_text, show_default=False, **settings)


def argument(metavar: str, help_text: str) -> Any:
    """Declare a required argument."""
    return typer.Argument(metavar=metavar, help=help_text, show_default=False)


_INPUT_HELP = (
    "A .npy, .npz (file.npz:key) or idx file, a table (.csv, .parquet; file.csv:-a leaves out column a), a .h5 or "
    ".zarr file, an image, a folder of images, of folders of images or of .npy files, or a data set (mnist-5k, "
    "mnist:test)."
)
_ROWS_HELP = "Only some samples of the input: 100 (the first), 100:200, or ::10 (every tenth)."
_MODEL_HELP = "Folder of a saved model, or a model that comes with mvrbm: digits, labeled-digits."
#: Tiles of a contact sheet, unless more are requested.
MOST_TILES = 100

Input = Annotated[str, argument("INPUT", _INPUT_HELP)]
ModelFolder = Annotated[Path, argument("MODEL", _MODEL_HELP)]
ArrayOut = Annotated[Path, argument("OUT", "A .npy file.")]
ImagesOut = Annotated[Path, argument("OUT", "A .npy file, or an image for a contact sheet.")]
ModelOut = Annotated[Path, new("Folder for the model.")]
MissingNan = Annotated[bool, new("NaN marks missing entries.", "--missing-nan")]
RECIPE_HELP = "Training recipe: default for features, generative for samples and filling in, paper for Algorithm 1."
RecipeOption = Annotated[Recipe, typer.Option("--recipe", help=RECIPE_HELP)]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Random seed.")]
Where = Annotated[Device, typer.Option("--device", help="Device to compute on; auto: a GPU if there is one.")]
AsJson = Annotated[bool, new("Print the result as one JSON object.", "--json")]
Force = Annotated[bool, new("Replace an existing file or model.", "--force")]
Quiet = Annotated[bool, new("Show no progress.", "--quiet")]
DataDir = Annotated[Path | None, new("Folder with local copies of data sets.", "--data-dir")]


def parse_rows(value: str | slice) -> slice:
    """Read a number of samples, such as 100, or a slice, such as 100:200."""
    text = value if isinstance(value, str) else ""
    if isinstance(value, slice):
        return value
    if not re.fullmatch(r"[0-9]{1,12}|[0-9]{0,12}:[0-9]{0,12}(:[0-9]{0,12})?", text) or text in ("0", ":0"):
        raise typer.BadParameter(f"{text!r} is not a number of samples, such as 100, or a slice, such as 100:200")
    parts = [int(part) if part else None for part in text.split(":")]
    if len(parts) == 3 and parts[2] == 0:
        raise typer.BadParameter(f"{text!r} has a step of 0")
    return slice(*parts)


Rows = Annotated[slice | None, new(_ROWS_HELP, "-n", "--rows", parser=parse_rows, metavar="N|SLICE")]


#: What has a method that nothing else has.
_KNOWN_BY = {"explain": "an outlier detector", "standard_deviation": "an imputer"}


def load_model(folder: Path, device: str, method: str, seed: int | None = None) -> Any:
    """Load an estimator that has a method and takes one array per sample."""
    import mvrbm

    model = mvrbm.load(folder, device)
    kind = type(model).__name__
    if not hasattr(model, method):
        lacks = f"is not {_KNOWN_BY[method]}" if method in _KNOWN_BY else f"has no method '{method}'"
        raise ValueError(f"{folder} holds a model of class {kind}, which {lacks}")
    if not hasattr(model, "visible_shape_"):
        raise ValueError(f"{folder} holds a model of class {kind}, which takes more than one array: use Python")
    if seed is not None:
        model.set_params(random_state=seed)
    return model


def check_model_out(out: Path, force: bool) -> None:
    """Raise ValueError, before the work, if a model cannot be saved to a folder."""
    from mvrbm.io.atomic import check_folder
    from mvrbm.saving import is_replaceable

    full = check_folder(out).is_dir() and any(out.iterdir())
    if full and not is_replaceable(out):
        raise ValueError(f"{out} holds other files than a model: choose another folder")
    if full and not force:
        raise ValueError(f"{out} exists: use --force to replace the model in it")


def check_absent(reason: str, **settings: Any) -> None:
    """Raise an error of usage, for a reason, if there are settings, given by the names of their options."""
    for name, value in settings.items():
        if value is not None:
            raise typer.BadParameter(f"{reason}: leave it out", param_hint=f"'--{name.replace('_', '-')}'")


def check_not_training(model_folder: Path | None, **settings: Any) -> None:
    """Raise an error of usage if a saved model comes with settings of training, given by the names of their options."""
    if model_folder is not None and any(value is not None for value in settings.values()):
        *names, last = [f"--{name.replace('_', '-')}" for name in settings]
        raise typer.BadParameter(f"leave out {', '.join(names)} and {last}", param_hint="'--model'")


def trained_or_loaded(
    train: Callable[[], Any], save: Path | None, model_folder: Path | None, device: str, method: str
) -> Any:
    """Return the estimator in a folder, which must have a method; without a folder, train one, and save it if asked."""
    if model_folder is not None:
        return load_model(model_folder, device, method)
    model = train()
    if save is not None:
        model.save(save)
    return model


def read(source: str, data_dir: Path | None, rows: slice | None = None, out: Path | None = None) -> Any:
    """Read samples into memory: some rows, or all of them, but no more than a contact sheet `out` has tiles."""
    from mvrbm.io.arrays import read_samples

    samples = read_samples(source, data_dir=data_dir)
    return chosen(samples, rows if out is None else tiles(rows, out, len(samples)), source)[:]


def tiles(rows: slice | None, out: Path, n: int) -> slice | None:
    """Return the rows of n samples to be written: by default, no more than a contact sheet has tiles."""
    if rows is not None or is_array(out) or n <= MOST_TILES:
        return rows
    note(f"{out} shows the first {MOST_TILES} of {n:,} samples: -n shows others, or more")
    return slice(MOST_TILES)


def chosen(samples: Any, rows: slice | None, source: str) -> Any:
    """Return the rows of samples that an option chooses; None: all."""
    if rows is None:
        return samples
    some = samples[rows]
    if not len(some):
        raise ValueError(f"-n chooses no sample: {source} has {len(samples):,}")
    return some


def check_out(out: Path, force: bool, *, images: bool = True) -> None:
    """Raise ValueError, before the work, if samples cannot be written to a .npy file or an image."""
    from mvrbm.io.atomic import check_output
    from mvrbm.io.formats import IMAGE_SUFFIXES

    check_output(out, force, (".npy", *IMAGE_SUFFIXES) if images else (".npy",))


def is_array(out: Path) -> bool:
    """Return whether an output is a file of arrays, not an image."""
    return out.suffix.lower() == ".npy"


def write_samples(
    out: Path,
    array: NDArray[Any],
    shape: Sequence[int],
    force: bool,
    as_json: bool,
    details: dict[str, Any] | None = None,
    words: str = "",
) -> None:
    """Write samples of a shape to a .npy file or as a contact sheet, and show their shape, dtype and details."""
    from mvrbm.io.arrays import write_output

    plain = is_array(out)
    stretch = not plain and bool(array.min() < 0 or array.max() > 1)
    write_output(out, array if plain else array.reshape(-1, *shape), force, stretch=stretch)
    result = {"out": str(out), "shape": array.shape, "dtype": str(array.dtype), **(details or {})}
    show(result, as_json, f"{out}: {times(array.shape)} {array.dtype}{words and ', '}{words}")


def show(result: dict[str, Any], as_json: bool, text: str) -> None:
    """Print a result, as JSON or as text."""
    print(json.dumps(result, default=str) if as_json else text)


def table(rows: Sequence[tuple[str, Any]]) -> str:
    """Align names and values in two columns."""
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


@contextlib.contextmanager
def progress() -> Iterator[None]:
    """Show on a terminal how many samples, Gibbs steps or epochs are done, as soon as that takes more than 2 s."""
    from mvrbm.progress import listening

    began = shown = time.monotonic()
    counts: dict[str, int] = {}
    width = 0

    def show_counts(unit: str, count: int) -> None:
        nonlocal shown, width
        counts[unit] = counts.get(unit, 0) + count
        now = time.monotonic()
        if now - shown > (0.5 if width else 2):
            text = ", ".join(f"{number:,} {name}" for name, number in counts.items()) + f" in {now - began:.0f} s"
            shown, width = now, max(width, len(text))
            print(f"\r{text:<{width}}", end="", file=sys.stderr, flush=True)

    try:
        with listening(show_counts) if sys.stderr.isatty() else contextlib.nullcontext():
            yield
    finally:
        if width:
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Print a note to standard error."""
    print(f"note: {text}", file=sys.stderr)
