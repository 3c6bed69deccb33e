"""The command `mvrbm`. Results go to standard output, progress and errors to standard error.

What a command needs is imported when it runs: help has to come at once. Every user's mistake becomes one
line in :func:`main`, and nowhere else; ``MVRBM_DEBUG=1`` shows where it came from.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mvrbm.estimators.rbm import MVRBM, RBM, TVRBM
    from mvrbm.learning import Callback

    Array = NDArray[Any]
    Model = MVRBM | RBM | TVRBM

__all__ = ["app", "main"]

_ROWS_AT_ONCE = 1024
_TUNING_OF_CROPS: Any = {"n_epochs": 12, "batch_size": 16, "learning_rate": 1e-3, "averaging": 0.999}
_MONITORED = 500
_INTERRUPTED = 130


class Device(StrEnum):
    """Where to compute."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Visible(StrEnum):
    """What entries of the data are."""

    BERNOULLI = "bernoulli"
    GAUSSIAN = "gaussian"


class Preset(StrEnum):
    """Which numbers to train with."""

    DEFAULT = "default"
    PAPER = "paper"


class Negative(StrEnum):
    """What the chains of the negative phase do."""

    CD = "cd"
    PCD = "pcd"
    TEMPERED = "tempered"


class Half(StrEnum):
    """Which half of a sample."""

    LEFT = "left"
    RIGHT = "right"
    TOP = "top"
    BOTTOM = "bottom"


class Experiment(StrEnum):
    """Which of the paper's experiments."""

    ALL = "all"
    DIGITS = "digits"
    DENOISE = "denoise"
    FILTERS = "filters"
    RECONSTRUCTION = "reconstruction"
    CLASSIFICATION = "classification"
    SUPERRES = "superres"


class Scale(StrEnum):
    """How large an experiment."""

    QUICK = "quick"
    PAPER = "paper"
    TINY = "tiny"


class NoiseKind(StrEnum):
    """What noise images have."""

    SALT_AND_PEPPER = "salt-and-pepper"
    GAUSSIAN = "gaussian"


class DenoisingMethod(StrEnum):
    """How clean images are inferred."""

    MEAN_FIELD = "mean-field"
    GIBBS = "gibbs"


class ExportMethod(StrEnum):
    """What an ONNX file computes."""

    TRANSFORM = "transform"
    RECONSTRUCT = "reconstruct"
    PREDICT_PROBA = "predict_proba"


class _Interrupted(Exception):  # noqa: N818  (it is not an error)
    """Training was ended by Ctrl-C, and all is saved."""


_EXPERIMENT_HELP = "digits: denoise, filters, reconstruction and classification. superres. all: both."
_INPUT_HELP = "A .npy, .npz (file.npz:key) or idx file, a folder of images, or a named set (mnist-5k, mnist:test)."

Input = Annotated[str, typer.Argument(metavar="INPUT", help=_INPUT_HELP, show_default=False)]
ModelFolder = Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that train wrote.", show_default=False)]
ArrayOut = Annotated[Path, typer.Argument(metavar="OUT", help="A .npy file.", show_default=False)]
ImagesOut = Annotated[
    Path, typer.Argument(metavar="OUT", help="A .npy file, or an image for a contact sheet.", show_default=False)
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Of everything random.")]
Where = Annotated[Device, typer.Option("--device", help="Where to compute; auto is a GPU if there is one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder with local copies of named sets.", show_default=False)
]

app = typer.Typer(
    name="mvrbm",
    help="Structured Boltzmann machines for arrays: train, look inside, reconstruct, sample, fill in.",
    epilog="\b\nExample:\n  mvrbm train mnist-5k --hidden 25x25 --out model/",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
data_app = typer.Typer(
    help="The named sets: list them, show where they are, fetch them.",
    epilog="\b\nExample:\n  mvrbm data fetch mnist",
    rich_markup_mode=None,
)
app.add_typer(data_app, name="data")


# -- entry ------------------------------------------------------------------------------------------

# typer has click within itself or beside itself, depending on its version: found here through its own names.
_UsageError, _ClickError = (cast("type[Exception]", base) for base in typer.BadParameter.__mro__[1:3])


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0 all is well, 1 it failed, 2 it was called wrongly."""
    command = typer.main.get_command(app)
    given = list(sys.argv[1:] if args is None else args) or ["--help"]
    if given[0] != "bench" and "torch" not in sys.modules:
        # Threads that wait for work by spinning take the cores from those that have some: on busy cores that
        # made a command ten times slower. A benchmark is to measure what people have.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = command.main(given, prog_name="mvrbm", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence()
        return 1
    except SystemExit as stop:  # typer's answer to a broken pipe
        _silence()
        return stop.code if isinstance(stop.code, int) else 1
    except (KeyboardInterrupt, _Interrupted) as error:
        return _complain(str(error) or "interrupted", _INTERRUPTED)
    except Exception as error:
        if os.environ.get("MVRBM_DEBUG") == "1":
            raise
        if getattr(error, "said_by_main", False):
            return 1
        if isinstance(error, _ClickError):
            return _complain(_usage(error), 2 if isinstance(error, _UsageError) else 1)
        reason = _users_mistake(error)
        if reason is None:
            raise
        return _complain(reason, 1)
    if code == _INTERRUPTED:  # typer has caught Ctrl-C
        return _complain("interrupted", _INTERRUPTED)
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return f"{error.format_message()}{hint}"


def _users_mistake(error: Exception) -> str | None:
    """Return what to tell about an error of data, files or memory, None if it is ours."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: use a smaller model, batch or input"
    if isinstance(error, RuntimeError) and "allocate memory" in str(error):
        return "out of memory: use a smaller model, batch or input"
    if isinstance(error, RuntimeError) and any(word in str(error).lower() for word in ("gloo", "nccl")):
        return "another process of this training has failed, or does not answer: see what it says"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    if isinstance(error, ValueError) or type(error).__name__ in ("DivergenceError", "DistributedError"):
        return str(error)
    return None


def _complain(reason: str, code: int) -> int:
    print(f"error: {' '.join(reason.split())}", file=sys.stderr)
    return code


def _silence() -> None:
    """Let nothing more be written to a pipe that nobody reads."""
    with open(os.devnull, "w") as nowhere:
        try:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        except (OSError, ValueError):  # not a real file
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115


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


def _example(text: str) -> str:
    return f"\b\nExample:\n  {text}"


# -- train ------------------------------------------------------------------------------------------


@app.command(epilog=_example("mvrbm train digits.npy --hidden 25x25 --rank 1 --epochs 20 --out model/"))
def train(
    source: Input,
    hidden: Annotated[
        str,
        typer.Option(
            help="Shape of the hidden layer: 500 makes an RBM, 25x25 an MVRBM, 5x5x20 a TVRBM.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the model.", show_default=False)],
    rank: Annotated[int, typer.Option(min=1, help="Number of Kronecker products that are added up.")] = 1,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples an update.")] = 100,
    visible: Annotated[Visible, typer.Option(help="Entries from 0 to 1 (or bytes), or real.")] = Visible.BERNOULLI,
    recipe: Annotated[Preset, typer.Option(help="Numbers to train with; paper is Algorithm 1.")] = Preset.DEFAULT,
    learning_rate: Annotated[
        float | None, typer.Option(help="Size of a step; the recipe's if not given.", show_default=False)
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Shape of a sample, such as 28x28, if the input has rows.", show_default=False)
    ] = None,
    negative: Annotated[Negative, typer.Option(help="What the chains do.")] = Negative.CD,
    steps: Annotated[int, typer.Option(min=1, help="Gibbs steps of the chains an update.")] = 1,
    log: Annotated[Path | None, typer.Option(help="CSV file for metrics of every pass.", show_default=False)] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder to save in after every pass, and to go on from.", show_default=False)
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUES[;NAME=VALUES]",
            help="Train one model for each combination, such as 'rank=1,2;learning_rate=0.01,0.1;random_state=0,1', "
            "and keep the one that scores best on a tenth of the samples held out.",
            show_default=False,
        ),
    ] = None,
    missing_nan: Annotated[bool, typer.Option("--missing-nan", help="NaN marks what is not known.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    data_dir: DataDir = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Learn a model from data and write it to a folder.

    Ctrl-C ends training after the batch and saves; the same command with --checkpoints goes on from there.
    """
    hidden_shape = _shape("--hidden", hidden)
    if len(hidden_shape) == 1 and rank > 1:
        raise typer.BadParameter("a hidden layer of one mode has full weights: leave it out", param_hint="'--rank'")
    given_shape = None if shape is None else _shape("--shape", shape)
    from mvrbm.io.shards import Shards, is_folder_of_shards
    from mvrbm.learning.distributed import World, leave

    world = World.here()  # of one, unless torchrun started us
    force = force or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # what is there is of a former attempt
    with world.together(ValueError, OSError):
        _check_model_out(out, force)
        for option, path in (("--log", log), ("--checkpoints", checkpoints)):
            if path is not None and out.resolve() in (path.resolve(), *path.resolve().parents):
                raise ValueError(f"{option} {path} lies in the model's folder {out}: choose another place")
        resumed = _check_checkpoints(checkpoints)
        if log is not None:
            from mvrbm.io.arrays import check_output

            check_output(log, force or resumed)
        samples: Any
        known = None
        if is_folder_of_shards(source):
            if missing_nan:
                raise ValueError("--missing-nan does not go with a folder of shards")
            samples = _as_samples(Shards(source), given_shape, hidden_shape)
        else:
            samples = _as_samples(_read(source, data_dir), given_shape, hidden_shape)
            samples, known = _known_entries(samples, missing_nan)
    small_bytes = samples.dtype == "uint8" and not isinstance(samples, Shards) and int(samples.max()) <= 1
    if visible is Visible.BERNOULLI and small_bytes and world.is_main:
        _note("bytes count from 0 to 255, and the largest here is 1: store 0/1 data as booleans or floats")
    model = _new_model(hidden_shape, rank, recipe, negative, steps)
    model.set_params(
        visible=visible.value,
        n_epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        random_state=seed,
        device=_device(device),
    )
    if sweep is not None:
        _sweep(model, sweep, samples, known, (log, checkpoints), out, as_json)
        leave()
        return
    watchers = _watchers(samples, known, log, checkpoints, quiet)
    began = time.perf_counter()
    warnings.simplefilter("ignore", UserWarning)  # said above, in one line
    try:
        model.fit(samples, mask=known, callbacks=watchers, resume=checkpoints)
    except KeyboardInterrupt:
        if model._trainer is None or not model._trainer.interrupted:
            raise  # a second Ctrl-C: at once
    seconds = time.perf_counter() - began
    model.save_pretrained(out)

    trainer = model._trainer
    assert trainer is not None
    metrics = model.history_[-1] if model.history_ else {}
    parameters = sum(parameter.numel() for parameter in model.machine_.parameters())
    result = {
        "model": str(out),
        "class": type(model).__name__,
        "visible_shape": model.visible_shape_,
        "hidden_shape": hidden_shape,
        "parameters": parameters,
        "samples": len(samples),
        "epochs": trainer.epoch,
        "updates": trainer.update,
        "seconds": round(seconds, 3),
        "resumed": resumed,
        "interrupted": trainer.interrupted,
        "metrics": metrics,
    }
    error = metrics.get("reconstruction_error")
    leave()
    if not world.is_main:
        return
    _show(
        result,
        as_json,
        f"{out}: {type(model).__name__} {_times(model.visible_shape_)} -> {_times(hidden_shape)}, "
        f"{parameters:,} parameters, {trainer.epoch} passes in {seconds:.1f} s"
        + ("" if error is None else f", squared reconstruction error {error:.4g} a sample"),
    )
    if trainer.interrupted:
        then = "the same command with --force goes on" if checkpoints else "with --checkpoints it could have gone on"
        raise _Interrupted(f"interrupted after {trainer.update:,} updates: the model so far is in {out}; {then}")


def _sweep(
    model: Model, text: str, samples: Any, known: Array | None, files: Sequence[Path | None], out: Path, as_json: bool
) -> None:
    """Train many, save the best, and show how each fared."""
    from mvrbm.estimators.sweep import Sweep
    from mvrbm.learning.distributed import World

    if known is not None or any(path is not None for path in files):
        raise ValueError("--sweep does not go with --missing-nan, --log or --checkpoints")
    grid = _grid(text, model)
    fitted = Sweep(model, grid).fit(samples)
    fitted.best_estimator_.save_pretrained(out)
    if not World.here().is_main:
        return
    rows = [
        {"params": one.params, "score": one.score, "diverged": one.diverged, "seconds": round(one.seconds, 3)}
        for one in fitted.candidates_
    ]
    lines = [
        "diverged" if one.diverged else f"score {one.score:.6g}, {one.seconds:.1f} s" for one in fitted.candidates_
    ]
    named = [", ".join(f"{key}={value}" for key, value in one.params.items()) for one in fitted.candidates_]
    table = "\n".join(f"{name}: {line}" for name, line in zip(named, lines, strict=True))
    best = ", ".join(f"{key}={value}" for key, value in fitted.best_params_.items())
    result = {"model": str(out), "best": fitted.best_params_, "score": fitted.best_score_, "candidates": rows}
    _show(result, as_json, f"{table}\n{out}: the best of {len(rows)}, {best}")


def _grid(text: str, model: Model) -> dict[str, list[Any]]:
    """Read 'name=value,value;name=value' into values by parameter."""
    grid: dict[str, list[Any]] = {}
    names = set(model.get_params())
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, equals, values = part.partition("=")
        name = name.strip()
        if not equals or not values.strip():
            raise typer.BadParameter(f"'{part}' is not NAME=VALUE,VALUE", param_hint="'--sweep'")
        if name not in names:
            raise typer.BadParameter(
                f"'{name}' is no setting: choose from {', '.join(sorted(names))}", param_hint="'--sweep'"
            )
        grid[name] = [_value(value.strip()) for value in values.split(",")]
    if not grid:
        raise typer.BadParameter("no settings are given", param_hint="'--sweep'")
    return grid


def _value(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _new_model(hidden_shape: tuple[int, ...], rank: int, recipe: Preset, negative: Negative, steps: int) -> Model:
    import dataclasses

    from mvrbm.estimators.rbm import MVRBM, RBM, TVRBM
    from mvrbm.learning import CD, PCD, RECIPES, TemperedPCD

    phases: dict[Negative, Any] = {Negative.CD: CD, Negative.PCD: PCD, Negative.TEMPERED: TemperedPCD}
    recipe = dataclasses.replace(RECIPES[recipe.value], negative=phases[negative](steps=steps))
    if len(hidden_shape) == 1:
        return RBM(hidden_shape[0], recipe=recipe)
    return (MVRBM if len(hidden_shape) == 2 else TVRBM)(hidden_shape, rank=rank, recipe=recipe)


def _watchers(
    samples: Any, known: Array | None, log: Path | None, checkpoints: Path | None, quiet: bool
) -> list[Callback]:
    import numpy as np

    from mvrbm.learning import Callback, Checkpoint, CSVLog, Monitor, ProgressBar, Trainer

    class Lines(Callback):
        """A line a pass, for a log or a pipe, where a bar would be a mess."""

        main_process_only = True

        def on_epoch_end(self, trainer: Trainer) -> None:
            error = trainer.history[-1].get("reconstruction_error") if trainer.history else None
            detail = "" if error is None else f", reconstruction error {error:.4g}"
            print(f"pass {trainer.epoch} of {trainer.n_epochs}{detail}", file=sys.stderr, flush=True)

    complete = np.arange(len(samples)) if known is None else np.flatnonzero(known.reshape(len(known), -1).all(1))
    rows = complete[np.unique(np.linspace(0, len(complete) - 1, min(len(complete), _MONITORED)).astype(int))]
    watchers: list[Callback] = []
    if len(rows):
        watchers.append(Monitor(samples[rows], pseudo_sites=0 if log is None else 32))
    if log is not None:
        if not len(rows):
            raise ValueError("--log needs at least one sample without missing entries to measure on")
        watchers.append(CSVLog(log))
    if not quiet:
        watchers.append(ProgressBar() if sys.stderr.isatty() else Lines())
    if checkpoints is not None:
        watchers.append(Checkpoint(checkpoints))
    return watchers


def _check_model_out(out: Path, force: bool) -> None:
    _check_folder(out)
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not force:
        raise ValueError(f"{out} exists: use --force to replace the model in it")
    from mvrbm.saving import _replaceable

    if not _replaceable(out):  # told now, not after the training
        raise ValueError(f"{out} holds other files than a model: choose another folder")


def _check_checkpoints(folder: Path | None) -> bool:
    """Return whether there is something to go on from."""
    if folder is None:
        return False
    from mvrbm.learning.checkpoint import newest

    _check_folder(folder)
    return newest(folder) is not None


def _check_folder(folder: Path) -> None:
    """Refuse, before the work, a folder that cannot be made."""
    for place in (folder, *folder.absolute().parents):
        try:
            if not place.exists():
                continue
        except OSError as error:
            raise ValueError(f"{folder} cannot be written: {error.strerror}") from error
        if not place.is_dir():
            raise ValueError(f"{folder} cannot be a folder: {place} is a file")
        if not os.access(place, os.W_OK):
            raise ValueError(f"{folder} cannot be written: no permission to write in {place}")
        return


# -- using a model ----------------------------------------------------------------------------------


@app.command(epilog=_example("mvrbm transform model/ digits.npy features.npy"))
def transform(
    model_folder: ModelFolder,
    source: Input,
    out: ArrayOut,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    data_dir: DataDir = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write hidden probabilities, a row a sample."""
    from mvrbm.io.arrays import check_output, write_output

    check_output(out, force, (".npy",))
    model = _load_model(model_folder, device, seed)
    samples = _for_model(_read(source, data_dir), model, missing_nan=None)[0]
    features = _joined(model.transform(samples[rows]) for rows in _batches(samples, "transform"))
    write_output(out, features, force)
    _show_written(out, features, as_json)


@app.command(epilog=_example("mvrbm reconstruct model/ digits.npy reconstructed.png"))
def reconstruct(
    model_folder: ModelFolder,
    source: Input,
    out: ImagesOut,
    steps: Annotated[int, typer.Option(min=1, help="Passes up and down.")] = 1,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    data_dir: DataDir = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Pass data up and down through the model, and write what comes back."""
    _check_images_out(out, force)
    model = _load_model(model_folder, device, seed)
    samples = _for_model(_read(source, data_dir), model, missing_nan=None)[0]
    back = _joined(model.reconstruct(samples[rows], steps=steps) for rows in _batches(samples, "reconstruct"))
    _write(model, out, back, force, as_json)


@app.command(epilog=_example("mvrbm sample model/ samples.png -n 100 --steps 1000"))
def sample(
    model_folder: ModelFolder,
    out: ImagesOut,
    n: Annotated[int, typer.Option("-n", "--number", min=1, help="Number of samples.")] = 100,
    steps: Annotated[int, typer.Option(min=1, help="Gibbs steps of each chain, from noise.")] = 1000,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Draw samples from the model by Gibbs sampling."""
    _check_images_out(out, force)
    model = _load_model(model_folder, device, seed)
    if sys.stderr.isatty():
        _note(f"drawing {n:,} samples in {steps:,} Gibbs steps")
    _write(model, out, model.sample(n, steps=steps), force, as_json)


@app.command(epilog=_example("mvrbm inpaint model/ digits.npy filled.png --hide right"))
def inpaint(
    model_folder: ModelFolder,
    source: Input,
    out: ImagesOut,
    mask: Annotated[
        Path | None,
        typer.Option(help="Array of a sample's or the input's shape, true where known.", show_default=False),
    ] = None,
    hide: Annotated[Half | None, typer.Option(help="Half of every sample to fill in.", show_default=False)] = None,
    missing_nan: Annotated[bool, typer.Option("--missing-nan", help="NaN marks what is to be filled in.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Gibbs steps to average over.")] = 100,
    burn_in: Annotated[int, typer.Option(min=0, help="Gibbs steps before these.")] = 50,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    data_dir: DataDir = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Fill in what is not known of the data, given what is."""
    if (mask is not None) + (hide is not None) + missing_nan != 1:
        raise typer.BadParameter("give one of --mask, --hide and --missing-nan", param_hint="what is not known")
    _check_images_out(out, force)
    model = _load_model(model_folder, device, seed)
    samples, known = _for_model(_read(source, data_dir), model, missing_nan)
    if mask is not None:
        known = _read_mask(mask, samples, model.visible_shape_)
    elif hide is not None:
        known = _half(hide, model.visible_shape_)
    if known is None:
        raise ValueError(f"{source} has no NaN: there is nothing to fill in")
    whole = known.reshape(-1, *samples.shape[1:])
    filled = _joined(
        model.inpaint(samples[rows], whole[rows] if len(whole) > 1 else whole[0], steps=steps, burn_in=burn_in)
        for rows in _batches(samples, "inpaint")
    )
    _write(model, out, filled, force, as_json)


def _read_mask(path: Path, samples: Array, shape: tuple[int, ...]) -> Array:
    import numpy as np

    from mvrbm.io.arrays import read_array

    array = np.asarray(read_array(path))
    if array.size not in (samples.size, math.prod(shape)):
        raise ValueError(
            f"{path} has shape {_times(array.shape)}: a mask has a sample's, {_times(shape)}, or the input's, "
            f"{_times(samples.shape)}"
        )
    values = np.unique(array)
    if array.dtype != bool and not (np.isin(values, (0, 1)).all() or np.isin(values, (0, 255)).all()):
        raise ValueError(f"{path} is not a mask: true or 1 (or 255) where a value is known, false or 0 elsewhere")
    return array.astype(bool)


def _half(hide: Half, shape: tuple[int, ...]) -> Array:
    import numpy as np

    if len(shape) < 2:
        raise ValueError(f"a sample of shape {_times(shape)} has no {hide.value} half: use --mask")
    known = np.ones(shape, bool)
    rows, columns = shape[0] // 2, shape[1] // 2
    if hide is Half.TOP:
        known[:rows] = False
    elif hide is Half.BOTTOM:
        known[rows:] = False
    elif hide is Half.LEFT:
        known[:, :columns] = False
    else:
        known[:, columns:] = False
    return known


@app.command(epilog=_example("mvrbm denoise noisy.png clean.png --model model/ --noise salt-and-pepper"))
def denoise(
    source: Input,
    out: ImagesOut,
    model_folder: Annotated[Path, typer.Option("--model", help="A folder that train wrote.", show_default=False)],
    noise: Annotated[NoiseKind, typer.Option(help="What is to be removed.")] = NoiseKind.SALT_AND_PEPPER,
    level: Annotated[
        float | None,
        typer.Option(
            help="Share of pixels hit, or standard deviation (black to white is 1); estimated if not given.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[DenoisingMethod, typer.Option(help="How to infer.")] = DenoisingMethod.MEAN_FIELD,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of mean field.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Gibbs steps to average over.")] = 100,
    burn_in: Annotated[int, typer.Option(min=0, help="Gibbs steps before these.")] = 20,
    stride: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Pixels from patch to patch, for images larger than the model's; a quarter of a patch if not given.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    data_dir: DataDir = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Remove noise from images, the model being the prior. A .npy input of two modes is one image."""
    from mvrbm.io.arrays import write_output
    from mvrbm.vision import denoise as remove
    from mvrbm.vision import estimate_level

    _check_images_out(out, force)
    model = _load_model(model_folder, device, seed)
    images = _known_entries(_read(source, data_dir), None)[0]
    asked = level
    if level is None:
        level = estimate_level(model, images, noise=noise.value, stride=stride)
    clean = remove(
        model,
        images,
        noise=noise.value,
        level=level,
        method=method.value,
        rounds=rounds,
        steps=steps,
        burn_in=burn_in,
        stride=stride,
        seed=seed,
    )
    write_output(out, clean if out.suffix.lower() == ".npy" or clean.ndim == 3 else clean[None], force)
    result = {"out": str(out), "shape": clean.shape, "dtype": str(clean.dtype), "noise": noise.value, "level": level}
    how = "estimated" if asked is None else "given"
    _show(result, as_json, f"{out}: {_times(clean.shape)} {clean.dtype}, {noise.value} of level {level:.4g} ({how})")


def _scale(scale: int | None) -> int | None:
    if scale not in (None, 2, 3, 4):
        raise typer.BadParameter(f"{scale} is not one of 2, 3, 4", param_hint="'--scale'")
    return scale


@app.command(epilog=_example("mvrbm superres photo.jpg large.png --scale 2"))
def superres(
    source: Annotated[Path, typer.Argument(metavar="IN", help="An image.", show_default=False)],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A .png, .jpg, .tif, .webp or .bmp file.", show_default=False)
    ],
    scale: Annotated[
        int | None,
        typer.Option(
            callback=_scale,
            metavar="2|3|4",
            help="Pixels made of one, a side; the model's if not given, or 2.",
            show_default=False,
        ),
    ] = None,
    model_folder: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="A folder that superres-train wrote; the weights in the package if not given.",
            show_default=False,
        ),
    ] = None,
    self_ensemble: Annotated[
        bool, typer.Option("--self-ensemble", help="Average over flips and turns: a little better, 8 times slower.")
    ] = False,
    device: Where = Device.AUTO,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Enlarge an image: grey or colour, 8 or 16 bits, with or without transparency.

    The result is upright, and keeps the ICC profile and EXIF.
    """
    from mvrbm.io.arrays import check_output
    from mvrbm.io.pictures import FORMATS, check_format, read_picture, write_picture
    from mvrbm.vision.superres import SuperResolver

    check_output(out, force, tuple(FORMATS))
    where = _device(device)
    picture = read_picture(source)
    model = SuperResolver.from_pretrained(model_folder, scale=scale, device=where)
    for note in (*picture.notes, *check_format(out, picture, model.scale)):
        _note(note)
    began = time.perf_counter()
    with _progress("superres", "tile") as progress:
        large = picture.with_pixels(model.upscale(picture.pixels, self_ensemble=self_ensemble, progress=progress))
    seconds = time.perf_counter() - began
    write_picture(out, large, force)
    result = {
        "out": str(out),
        "from": picture.pixels.shape[:2],
        "shape": large.pixels.shape,
        "dtype": str(large.pixels.dtype),
        "scale": model.scale,
        "seconds": round(seconds, 3),
    }
    _show(result, as_json, f"{out}: {picture.size} -> {large.size} in {seconds:.1f} s")


@contextlib.contextmanager
def _progress(what: str, unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show how much of a total is done, on a terminal only, and if it takes a while."""
    from tqdm import tqdm

    with tqdm(desc=what, unit=unit, file=sys.stderr, disable=None, leave=False, delay=0.5) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


@app.command("superres-train", epilog=_example("mvrbm superres-train photos/ --out model/ --scale 2"))
def superres_train(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of images.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for the model.", show_default=False)],
    scale: Annotated[
        int, typer.Option(callback=_scale, metavar="2|3|4", help="How many pixels are to be made of one, a side.")
    ] = 2,
    patch: Annotated[int, typer.Option(min=1, help="Side of a patch of the large image.")] = 10,
    hidden: Annotated[str, typer.Option(help="Shape of the hidden layer.")] = "24x24",
    rank: Annotated[int, typer.Option(min=1, help="Number of Kronecker products that are added up.")] = 16,
    patches: Annotated[int, typer.Option(min=1, help="Patches to learn from by contrastive divergence.")] = 10_000,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over them; the recipe's if not given.", show_default=False)
    ] = None,
    recipe: Annotated[Preset, typer.Option(help="Numbers to train with.")] = Preset.DEFAULT,
    fine_tune: Annotated[
        bool, typer.Option("--fine-tune/--no-fine-tune", help="Train inference by backpropagation afterwards.")
    ] = True,
    tuning_patches: Annotated[int, typer.Option(min=1, help="Patches to fine-tune with.")] = 100_000,
    tuning_epochs: Annotated[int, typer.Option(min=1, help="Passes over them.")] = 15,
    tuning_crops: Annotated[
        int, typer.Option(min=0, help="Crops to fine-tune with after that, 20000 say: better, but it wants a GPU.")
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Learn to enlarge images from a folder of large ones. Sizes and kinds may differ."""
    hidden_shape = _shape("--hidden", hidden)
    if len(hidden_shape) != 2:
        raise typer.BadParameter(f"{hidden} has {len(hidden_shape)} modes, 2 are wanted", param_hint="'--hidden'")
    where = _device(device)
    _check_model_out(out, force)
    from mvrbm.io.pictures import read_pictures
    from mvrbm.vision.fine_tuning import CROP_SIDE
    from mvrbm.vision.superres import SuperResolver

    images = [
        picture.pixels[..., :3] if picture.pixels.ndim == 3 else picture.pixels for picture in read_pictures(folder)
    ]
    if tuning_crops and not fine_tune:
        raise ValueError("--tuning-crops is part of fine-tuning, and --no-fine-tune leaves that out: give one of them")
    side = CROP_SIDE * scale
    if tuning_crops and not any(min(image.shape[:2]) >= side for image in images):
        raise ValueError(f"--tuning-crops: images must have at least {side} pixels a side, none of {len(images)} has")
    model = SuperResolver(
        scale,
        patch,
        (hidden_shape[0], hidden_shape[1]),
        rank,
        n_patches=patches,
        n_epochs=epochs,
        recipe=recipe.value,
        random_state=seed,
        device=where,
        verbose=int(not quiet),
    )
    began = time.perf_counter()
    model.fit(images)
    if fine_tune:
        model.fine_tune(images, n_samples=tuning_patches, n_epochs=tuning_epochs)
        if tuning_crops:
            model.fine_tune(images, objective="images", n_samples=tuning_crops, **_TUNING_OF_CROPS)
    seconds = time.perf_counter() - began
    model.save_pretrained(out)
    result = {
        "model": str(out),
        "scale": scale,
        "patch": patch,
        "hidden_shape": hidden_shape,
        "rank": rank,
        "fine_tuned": fine_tune,
        "images": len(images),
        "parameters": model.machine_.n_parameters,
        "seconds": round(seconds, 3),
    }
    _show(
        result,
        as_json,
        f"{out}: x{scale}, patches of {patch}x{patch} -> {hidden}, rank {rank}, "
        f"{model.machine_.n_parameters:,} parameters, from {len(images)} images in {seconds:.1f} s",
    )


@app.command(epilog=_example("mvrbm export model/ features.onnx --method transform"))
def export(
    model_folder: ModelFolder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .onnx file.", show_default=False)],
    method: Annotated[ExportMethod, typer.Option(help="What the file is to compute.")] = ExportMethod.TRANSFORM,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write what a model computes as an ONNX file, compared with the model by onnxruntime.

    (--seed and --device do nothing here.)
    """
    from mvrbm.io.arrays import check_output

    check_output(out, force, (".onnx",))
    model = _load_any_model(model_folder)
    try:
        from mvrbm.export import OPSET, to_onnx

        to_onnx(model, out, method.value)
    except ImportError as error:
        raise ValueError(str(error)) from error
    size = out.stat().st_size
    result = {"out": str(out), "class": type(model).__name__, "method": method.value, "opset": OPSET, "bytes": size}
    _show(result, as_json, f"{out}: {type(model).__name__}.{method.value}, ONNX opset {OPSET}, {size:,} bytes")


def _load_any_model(folder: Path) -> Any:
    """Load a model of any class that the package names, on the CPU."""
    import mvrbm
    from mvrbm.saving import StorageError, read_config

    described = read_config(folder).get("estimator")
    name = described.get("class") if isinstance(described, dict) else None
    kind = getattr(mvrbm, name) if isinstance(name, str) and name in mvrbm.__all__ else None
    if not isinstance(kind, type) or not hasattr(kind, "from_pretrained"):
        what = "a machine without an estimator" if name is None else f"{name!r:.100}, which is no estimator"
        raise StorageError(f"{folder} holds {what}: only estimators are exported")
    return kind.from_pretrained(folder, device="cpu")


@app.command(epilog=_example("mvrbm info model/"))
def info(
    model_folder: ModelFolder,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    as_json: AsJson = False,
) -> None:
    """Show what a model is: its class, layers, shapes, parameters and files. (--seed and --device do nothing here.)"""
    from mvrbm.saving import CONFIG, MODEL, machine_config, read_config, read_machine

    config = read_config(model_folder)
    machine = read_machine(model_folder)
    estimator = config.get("estimator")
    described = machine_config(machine)
    result = {
        "model": str(model_folder),
        "class": estimator.get("class") if isinstance(estimator, dict) else type(machine).__name__,
        "visible": described["visible"],
        "hidden": described["hidden"],
        "couplings": described["couplings"],
        "parameters": sum(parameter.numel() for parameter in machine.parameters()),
        "dtype": described["dtype"],
        "files": {name: (model_folder / name).stat().st_size for name in (CONFIG, MODEL)},
    }
    lines = [
        ("class", result["class"]),
        *((f"visible '{name}'", _in_words(part, "unit")) for name, part in described["visible"].items()),
        ("hidden", _in_words(described["hidden"], "unit")),
        *((f"coupling '{name}'", _in_words(part, "coupling")) for name, part in described["couplings"].items()),
        ("parameters", f"{result['parameters']:,}"),
        ("dtype", described["dtype"]),
        *((f"file {name}", f"{size:,} bytes") for name, size in result["files"].items()),
    ]
    _show(result, as_json, _table(lines))


def _in_words(part: dict[str, Any], kind: str) -> str:
    shape = part.get("shape")
    words = [str(part[kind])] if shape is None else [str(part[kind]), _times(shape)]
    words += [f"{key} {value}" for key, value in part.items() if isinstance(value, int) and value is not False]
    return " ".join(words)


# -- the paper's experiments ------------------------------------------------------------------------


@app.command(epilog=_example("mvrbm reproduce digits --scale quick --out digits/"))
def reproduce(
    experiment: Annotated[Experiment, typer.Argument(metavar="EXPERIMENT", help=_EXPERIMENT_HELP, show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder for cells, results, figures and the report.", show_default=False)],
    scale: Annotated[
        Scale | None,
        typer.Option(help="quick: minutes, embedded data. paper: the paper's data. tiny: a trial.", show_default=False),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Random subsets a point; 5 at scale paper.", show_default=False)
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="GROUP[,GROUP]", help="Groups of cells to compute.", show_default=False)
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the work.")] = 1,
    budget: Annotated[
        float | None, typer.Option(help="Seconds after which no further cell is begun.", show_default=False)
    ] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="Compute nothing, write the report.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Compute only.")] = False,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Run the paper's experiments, and set its numbers beside ours in a report.

    What is computed is kept in OUT: the same command goes on where it was stopped. --seed is the number of the
    first random subset.
    """
    if report_only and no_report:
        raise typer.BadParameter("give one of --report-only and --no-report", param_hint="'--report-only'")
    where = _device(device)
    from studies.reproduce import reproduce as run_experiment

    result = run_experiment(
        experiment.value,
        out,
        scale=None if scale is None else scale.value,
        data_dir=data_dir,
        device=where,
        seeds=seeds,
        first_seed=seed,
        only=None if only is None else [name.strip() for name in only.split(",")],
        jobs=jobs,
        budget=budget,
        report=not no_report,
        report_only=report_only,
    )
    _show(result, as_json, str(result.get("report", out)))


# -- demo and data ----------------------------------------------------------------------------------


@app.command(epilog=_example("mvrbm demo --out report.html"))
def demo(
    out: Annotated[Path, typer.Option(help="The report, an HTML page.")] = Path("report.html"),
    quick: Annotated[bool, typer.Option("--quick", help="Little data, few passes: a trial of a few seconds.")] = False,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Train on 5,000 digits and write a report of what the model can do. The last line is its path."""
    from mvrbm.io.arrays import check_output

    check_output(out, force, (".html", ".htm"))
    where = _device(device)
    try:
        from studies import demo as experiment
    except ImportError as error:
        raise ValueError(f"the demo needs more packages ({error.name}): pip install 'mvrbm[demo]'") from error

    result = experiment.run(out, seed=seed, device=where, quick=quick)
    _show(result, as_json, str(result["report"]))


@app.command(epilog=_example("mvrbm bench --quick --out bench/"))
def bench(
    quick: Annotated[
        bool, typer.Option("--quick", help="Two sizes, short turns: about a minute on two cores.")
    ] = False,
    sizes: Annotated[
        str | None,
        typer.Option(help="Such as 28x28:25x25,64x64:50x50; 28x28:25x25:4 is rank 4.", show_default=False),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Ranks in which the first size is learned, such as 1,2,4.", show_default=False)
    ] = None,
    contestants: Annotated[
        str | None,
        typer.Option(help="Some of mvrbm,rbm,sklearn,rbms,learnergy,torch; all if not given.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples an update, and chains of PCD.")] = 100,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Samples a pass; up to 5,000 within 32 MiB if not given.", show_default=False),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads on the CPU; one a core if not given.", show_default=False)
    ] = None,
    recipe: Annotated[Preset, typer.Option(help="Numbers that mvrbm trains with.")] = Preset.PAPER,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Rounds; 7, or 3 if quick.", show_default=False)
    ] = None,
    min_seconds: Annotated[
        float | None,
        typer.Option(min=0.0, help="Length of a turn, about; 0.3, or 0.05 if quick.", show_default=False),
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="GiB a contestant may need; half of what is free if not given.", show_default=False
        ),
    ] = None,
    inference: Annotated[
        int | None,
        typer.Option(min=0, help="Digits to infer on, 60,000, or 5,000 if quick; 0: none.", show_default=False),
    ] = None,
    memory: Annotated[bool, typer.Option(help="Measure peak memory.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder for bench.json, bench.md and plots.", show_default=False)
    ] = None,
    seed: Seed = 0,
    device: Where = Device.AUTO,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of learning and inference beside other packages and beside what this machine could do."""
    if out is not None:
        _check_folder(out)
        if (out / "bench.json").exists() and not force:
            raise ValueError(f"{out} holds results: use --force to replace them")
    where = _device(device)

    import benchmarks as package

    given = {
        "sizes": None if sizes is None else sizes.split(","),
        "ranks": None if ranks is None else _whole_numbers("--ranks", ranks),
        "contestants": None if contestants is None else contestants.split(","),
        "samples": samples,
        "threads": threads,
        "repetitions": repetitions,
        "min_seconds": min_seconds,
        "memory_limit": memory_limit,
        "inference": inference,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    fixed = {"batch_size": batch_size, "recipe": recipe.value, "memory": memory, "seed": seed, "device": where}
    settings = package.Settings(**{**(package.QUICK if quick else {}), **asked, **fixed})
    result = package.run(settings, _note)
    if out is not None:
        for reason in package.write(result, out):
            _note(reason)
    _show(result, as_json, package.tables(result))


def _whole_numbers(option: str, text: str) -> list[int]:
    if not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
        raise typer.BadParameter(f"{text!r} is not a list such as 1,2,4", param_hint=f"'{option}'")
    return [int(number) for number in text.split(",")]


@data_app.command("list", epilog=_example("mvrbm data list"))
def data_list(
    seed: Seed = 0,
    device: Where = Device.AUTO,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List the named sets, and whether they are here. (--seed and --device do nothing here.)"""
    from mvrbm.io import datasets

    places = {name: datasets.where(name, data_dir) for name in datasets.NAMES}
    result = {
        name: {"description": datasets.describe(name), "path": None if place is None else str(place)}
        for name, place in places.items()
    }
    rows = [(name, f"{'here' if place else 'absent':<8}{datasets.describe(name)}") for name, place in places.items()]
    _show({"sets": result}, as_json, _table(rows))


@data_app.command("where", epilog=_example("mvrbm data where mnist"))
def data_where(
    name: Annotated[str, typer.Argument(help="Name of a set.", show_default=False)],
    seed: Seed = 0,
    device: Where = Device.AUTO,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Show where a set is on this machine. (--seed and --device do nothing here.)"""
    from mvrbm.io import datasets

    place = datasets.where(name, data_dir)
    if place is None:
        raise datasets.DatasetError(
            f"'{name}' is not on this machine: run 'mvrbm data fetch {name}', or point MVRBM_DATA at a copy"
        )
    _show({"name": name, "path": str(place)}, as_json, str(place))


@data_app.command("fetch", epilog=_example("mvrbm data fetch mnist"))
def data_fetch(
    name: Annotated[str, typer.Argument(help="Name of a set.", show_default=False)],
    seed: Seed = 0,
    device: Where = Device.AUTO,
    as_json: AsJson = False,
) -> None:
    """Download a set from its public mirrors into the cache, and compare checksums.

    (--seed and --device do nothing here.)
    """
    from mvrbm.io import datasets

    place = datasets.fetch(name, show_progress=sys.stderr.isatty())
    _show({"name": name, "path": str(place)}, as_json, str(place))


# -- helpers ----------------------------------------------------------------------------------------


def _shape(option: str, text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9][0-9]{0,8}(x[1-9][0-9]{0,8})*", text):
        raise typer.BadParameter(f"{text!r} is not a shape such as 25x25", param_hint=f"'{option}'")
    shape = tuple(int(size) for size in text.split("x"))
    if math.prod(shape) > 2**31:
        raise typer.BadParameter(
            f"{text} has {math.prod(shape):,} entries, which is too large", param_hint=f"'{option}'"
        )
    return shape


def _times(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _device(device: Device) -> str:
    if device is Device.CUDA:
        import torch

        if not torch.cuda.is_available():
            raise ValueError("--device cuda: PyTorch finds no CUDA device here, use cpu or auto")
    return device.value


def _read(source: str, data_dir: Path | None) -> Array:
    import numpy as np

    from mvrbm.io.arrays import read_array

    array = read_array(source, data_dir=data_dir)
    if array.ndim < 2:
        raise ValueError(f"{source} has shape {array.shape}: samples along the first axis are wanted, in 2 or more")
    if array.dtype not in (np.uint8, np.float32, np.float64) or not array.dtype.isnative:
        array = array.astype(np.float64 if array.dtype.itemsize == 8 and array.dtype.kind == "f" else np.float32)
    return array


def _as_samples(array: Any, shape: tuple[int, ...] | None, hidden_shape: tuple[int, ...]) -> Any:
    """Give samples their shape: the one asked for, their own, or a square."""
    n, own = len(array), array.shape[1:]
    if shape is not None:
        if math.prod(shape) != math.prod(own):
            raise ValueError(
                f"--shape {_times(shape)} has {math.prod(shape)} entries, but samples of shape {_times(own)} "
                f"have {math.prod(own)}"
            )
        return array.reshape(n, *shape)
    if len(own) == 1 and len(hidden_shape) > 1:
        side = math.isqrt(own[0])
        if len(hidden_shape) > 2 or side**2 != own[0]:
            raise ValueError(
                f"rows of {own[0]} entries are not square images: say with --shape what array a row is, for "
                f"--hidden {_times(hidden_shape)} one of {len(hidden_shape)} modes"
            )
        return array.reshape(n, side, side)
    return array


def _known_entries(samples: Array, missing_nan: bool | None) -> tuple[Array, Array | None]:
    """Return finite samples, and which of their entries are known if not all are; None: the command cannot ask."""
    import numpy as np

    if samples.dtype == np.uint8 or np.isfinite(samples).all():
        return samples, None
    count = int((~np.isfinite(samples)).sum())
    if not missing_nan or np.isinf(samples).any():
        raise ValueError(
            f"{count:,} entries of the input are NaN or infinite: mend them"
            + (", or use --missing-nan if NaN marks what is not known" if missing_nan is False else "")
        )
    known = ~np.isnan(samples)
    if not known.any():
        raise ValueError("no entry of the input is known: all are NaN")
    return np.where(known, samples, np.zeros((), samples.dtype)), known


def _for_model(array: Array, model: Model, missing_nan: bool | None) -> tuple[Array, Array | None]:
    """Return samples in the model's shape, and which entries are known if not all are."""
    shape, own = model.visible_shape_, array.shape[1:]
    if own not in (shape, (math.prod(shape),)):
        raise ValueError(f"the model takes samples of shape {_times(shape)}, the input has {_times(own)}")
    return _known_entries(array, missing_nan)


def _load_model(folder: Path, device: Device, seed: int) -> Model:
    import numpy as np

    from mvrbm.estimators.rbm import MVRBM, RBM, TVRBM
    from mvrbm.saving import StorageError, read_config

    where = _device(device)
    described = read_config(folder).get("estimator")
    name = described.get("class") if isinstance(described, dict) else None
    kinds: dict[Any, type[Model]] = {kind.__name__: kind for kind in (RBM, MVRBM, TVRBM)}
    if not isinstance(name, str) or name not in kinds:
        what = "a machine without an estimator" if name is None else f"a {name}"
        raise StorageError(f"{folder} holds {what}: the command line uses {', '.join(kinds)}; use Python for others")
    model = kinds[name].from_pretrained(folder, device=where)
    model.set_params(random_state=np.random.RandomState(seed))  # one stream for all batches
    # Files have no column names, whatever the model was trained on.
    warnings.filterwarnings("ignore", message="X does not have valid feature names")
    return model


def _batches(samples: Array, what: str) -> Iterator[slice]:
    from tqdm import tqdm

    with tqdm(total=len(samples), desc=what, unit="sample", file=sys.stderr, disable=None) as bar:
        for first in range(0, len(samples), _ROWS_AT_ONCE):
            yield slice(first, first + _ROWS_AT_ONCE)
            bar.update(min(_ROWS_AT_ONCE, len(samples) - first))


def _joined(pieces: Iterator[Array]) -> Array:
    import numpy as np

    return np.concatenate(list(pieces))


def _check_images_out(out: Path, force: bool) -> None:
    from mvrbm.io.arrays import IMAGE_SUFFIXES, check_output

    check_output(out, force, (".npy", *IMAGE_SUFFIXES))


def _write(model: Model, out: Path, array: Array, force: bool, as_json: bool) -> None:
    from mvrbm.io.arrays import write_output

    shaped = array if out.suffix.lower() == ".npy" else array.reshape(-1, *model.visible_shape_)
    write_output(out, shaped, force, stretch=model.visible == "gaussian")
    _show_written(out, array, as_json)


def _show_written(out: Path, array: Array, as_json: bool) -> None:
    result = {"out": str(out), "shape": array.shape, "dtype": str(array.dtype)}
    _show(result, as_json, f"{out}: {_times(array.shape)} {array.dtype}")


def _show(result: dict[str, Any], as_json: bool, text: str) -> None:
    print(json.dumps(result, default=str) if as_json else text)


def _table(rows: Sequence[tuple[str, Any]]) -> str:
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
