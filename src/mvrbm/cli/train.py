"""The ``mvrbm train`` command, which builds an estimator from options, fits it, and prints a summary."""

from __future__ import annotations

import ast
import contextlib
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mvrbm.cli import options as opt
from mvrbm.cli import resuming
from mvrbm.cli.errors import UsageError
from mvrbm.interrupt import INTERRUPTS

if TYPE_CHECKING:
    from mvrbm.training import Callback

Negative = StrEnum("Negative", ["CD", "PCD", "TEMPERED"])

_HIDDEN_HELP = "Hidden shape: 500 (RBM), 25x25 (MVRBM) or 5x5x20 (TVRBM)."
_INIT_HELP = "Continue training this saved model. Use instead of --hidden."
_RANK_HELP = "Number of Kronecker products in the weights."
_COUPLING_HELP = "Alternative weight structure: cp:4, mpo:3, tucker:4x4 or dense."
_VISIBLE_HELP = "Visible unit type, such as gaussian."
_HIDDEN_UNIT_HELP = "Hidden unit type."
_LABELS_HELP = (
    "One label per sample: a .npy, idx or .txt file, file.csv:COLUMN, a folder with one subfolder of images per class, "
    "or a dataset. Allows sampling by class. Default recipe: generative."
)
_NEGATIVE_HELP = "Sampling method for the negative phase."
_CHAINS_HELP = "Number of chains for --negative pcd and tempered."
_GIBBS_STEPS_HELP = "Number of Gibbs steps per update."
_SHAPE_HELP = "Shape of a sample, if INPUT contains flattened samples."
_LOG_HELP = "CSV file for metrics of up to 500 samples, one row per epoch."
_SWEEP_HELP = "Train all combinations of values, such as 'rank=1,2;batch_size=50,100', and save the best model."


@dataclass(frozen=True)
class _Outcome:
    """Outcome of training: the JSON output, the text output, and the interrupt that ended training, if any."""

    result: dict[str, Any]
    text: str
    interrupt: BaseException | None = None


def train(
    source: opt.Input,
    out: opt.ModelOut,
    hidden: Annotated[opt.Shape | None, opt.new(_HIDDEN_HELP, **opt.SHAPE)] = None,
    init: Annotated[Path | None, opt.new(_INIT_HELP)] = None,
    rank: Annotated[int | None, opt.new(_RANK_HELP, default="1", min=1)] = None,
    coupling: Annotated[str | None, opt.new(_COUPLING_HELP)] = None,
    visible: Annotated[str | None, opt.new(_VISIBLE_HELP, default="bernoulli")] = None,
    hidden_unit: Annotated[str | None, opt.new(_HIDDEN_UNIT_HELP, default="bernoulli")] = None,
    labels: Annotated[str | None, opt.new(_LABELS_HELP)] = None,
    recipe: Annotated[opt.Recipe | None, opt.new(opt.RECIPE_HELP, default="default", metavar="NAME")] = None,
    epochs: Annotated[int | None, opt.new("Number of epochs.", min=1)] = None,
    batch_size: Annotated[int | None, opt.new("Number of samples per update.", min=1)] = None,
    learning_rate: Annotated[float | None, opt.new("Learning rate.")] = None,
    negative: Annotated[Negative | None, opt.new(_NEGATIVE_HELP)] = None,
    chains: Annotated[int | None, opt.new(_CHAINS_HELP, min=1)] = None,
    gibbs_steps: Annotated[int | None, opt.new(_GIBBS_STEPS_HELP, min=1)] = None,
    shape: Annotated[opt.Shape | None, opt.new(_SHAPE_HELP, **opt.SHAPE)] = None,
    missing_nan: opt.MissingNan = False,
    rows: opt.Rows = None,
    log: Annotated[Path | None, opt.new(_LOG_HELP)] = None,
    checkpoints: resuming.Folder = None,
    resume: resuming.Resume = False,
    ignore_mismatch: resuming.IgnoreMismatch = False,
    sweep: Annotated[str | None, opt.new(_SWEEP_HELP, metavar="GRID")] = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a model on samples and save it to a folder.

    The recipe provides the defaults for the training options. Ctrl-C or SIGTERM stops training and saves the model.
    With --checkpoints, running the same command with --resume continues training.
    """
    layers: dict[str, Any] = {"rank": rank, "coupling": coupling, "visible": visible, "hidden_unit": hidden_unit}
    _check_layers(hidden, init, **layers)
    if labels is not None:
        unsupported = {
            "init": init,
            "hidden_unit": hidden_unit,
            "negative": negative,
            "chains": chains,
            "gibbs_steps": gibbs_steps,
            "log": log,
            "sweep": sweep,
            "missing_nan": missing_nan or None,
        }
        opt.check_conflicts("--labels", "this is not supported for models with labels", **unsupported)
    if sweep is not None:
        reason = "each model in a sweep is trained from scratch on complete samples"
        opt.check_conflicts("--sweep", reason, init=init, log=log, missing_nan=missing_nan or None)
    settings = {
        "recipe": None if recipe is None else recipe.value,
        "n_epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "negative": None if negative is None else negative.value,
        "n_chains": chains,
        "gibbs_steps": gibbs_steps,
    }
    from mvrbm.distributed import World, leave

    world = World.here()  # a single process, unless torchrun started several
    with world.raise_together(ValueError, OSError):
        run = resuming.Resuming(out, checkpoints, resume, ignore_mismatch, force, log).after_restart()
        resumed = run.check()
        if init is not None:
            model = opt.load_model(init, device, "fit").set_params(warm_start=True)
            shape = shape or opt.Shape(model.visible_shape_)
        else:
            model = _new_model(hidden or opt.Shape(), labeled=labels is not None, **layers)
        given = {name: value for name, value in settings.items() if value is not None}
        model.set_params(**given, random_state=seed, device=device.value)
        samples = _read_samples(source, data_dir, rows, shape, hidden or opt.Shape())
        if hidden is not None and coupling is None:
            _check_axes(hidden, samples.shape[1:])
        quiet_nan = missing_nan or labels is not None or sweep is not None
        known = _known_entries(samples, source, missing_nan, quiet=quiet_nan)
        if sweep is not None and known is not None:
            raise ValueError(f"--sweep requires complete samples, but {source} contains NaN")
        classes = None if labels is None else _read_labels(labels, data_dir, rows, len(samples))
        grid = None if sweep is None else _parse_grid(sweep, model)
        callbacks = [] if labels or sweep else _callbacks(model, samples, known, log, checkpoints)
        callbacks += opt.progress_callbacks(quiet)
    how: dict[str, Any] = {"ignore_mismatch": ignore_mismatch}
    with run.training():
        if grid is not None:
            outcome = _sweep(model, grid, samples, out, run)
        elif classes is not None:
            outcome = _fit(model, samples[:], out, y=classes, callbacks=callbacks, checkpoints=checkpoints, **how)
        else:
            outcome = _fit(model, samples, out, mask=known, callbacks=callbacks, resume=checkpoints, **how)
    leave()
    if world.is_main:
        opt.show({**outcome.result, "resumed": resumed}, as_json, outcome.text)
        resuming.note_trained(resumed and init is None, epochs, outcome.result.get("epochs", 0))
    if outcome.interrupt is not None:
        raise run.interrupted(f" after {outcome.result['updates']:,} updates", outcome.interrupt, saved=True)


# -- checks before training -------------------------------------------------------------------------


def _check_layers(hidden: opt.Shape | None, init: Path | None, **layers: Any) -> None:
    """Raise a usage error unless either --hidden or a saved model defines the layers."""
    if hidden is None and init is None:
        raise UsageError("pass --hidden SHAPE to train a new model, or --init MODEL to continue training a saved one")
    if init is not None:
        opt.check_conflicts("--init", f"the model in {init} already defines the layers", hidden=hidden, **layers)


# -- the model and its data -------------------------------------------------------------------------


def _new_model(
    hidden: opt.Shape,
    *,
    rank: int | None,
    coupling: str | None,
    visible: str | None,
    hidden_unit: str | None,
    labeled: bool,
) -> Any:
    """Build the estimator for a hidden layer of the given shape."""
    from mvrbm import MVRBM, RBM, TVRBM, ClassificationMVRBM
    from mvrbm.couplings import make_coupling

    is_vector = len(hidden) == 1
    if rank is not None and coupling is not None:
        raise UsageError(f"--rank {rank} cannot be combined with --coupling {coupling}; omit one of them")
    if rank is not None and is_vector:
        raise UsageError(
            f"--rank {rank} has no effect with --hidden {hidden} because an RBM has dense weights; omit it"
        )
    parts: dict[str, Any] = {}
    if visible is not None:
        parts["visible"] = visible
    if hidden_unit is not None:
        parts["hidden"] = hidden_unit
    if rank is not None:
        parts["rank"] = rank
    if coupling is not None:
        parts["coupling"] = make_coupling(coupling)
    elif labeled and is_vector:
        parts["coupling"] = make_coupling("dense")
    if labeled:
        return ClassificationMVRBM(tuple(hidden), mode="generative", **parts)
    if is_vector:
        return RBM(hidden[0], **parts)
    return MVRBM(tuple(hidden), **parts) if len(hidden) == 2 else TVRBM(tuple(hidden), **parts)


def _read_samples(
    source: str, data_dir: Path | None, rows: slice | None, shape: opt.Shape | None, hidden: opt.Shape
) -> Any:
    """Read samples and reshape them to `shape`.

    If `shape` is None and the hidden layer has two axes, flat samples are reshaped to square matrices.
    """
    from mvrbm.io.arrays import read_samples

    samples = opt.chosen(read_samples(source, data_dir=data_dir), rows, source)
    entries = math.prod(samples.shape[1:])
    if shape is None and samples.ndim == 2 and len(hidden) > 1:
        side = math.isqrt(entries)
        if len(hidden) > 2 or side * side != entries:
            raise ValueError(
                f"--hidden {hidden} has {len(hidden)} axes, but samples have 1 ({entries} entries); pass --shape"
            )
        shape = opt.Shape((side, side))
    if shape is None:
        return samples
    if math.prod(shape) != entries:
        raise ValueError(f"--shape {shape} has {math.prod(shape)} entries, but samples have {entries}")
    return samples.reshape(len(samples), *shape)


def _check_axes(hidden: opt.Shape, shape: tuple[int, ...]) -> None:
    """Raise ValueError if the hidden layer has several axes, but not as many as a sample."""
    if len(hidden) > 1 and len(hidden) != len(shape):
        raise ValueError(
            f"--hidden {hidden} has {len(hidden)} axes, but samples have {len(shape)} ({opt.times(shape)}); "
            "pass --shape, or a hidden shape with the same number of axes"
        )


def _known_entries(samples: Any, source: str, missing_nan: bool, *, quiet: bool) -> Any:
    """Return a mask of the known entries, or None if all are known. Unless `quiet`, report that some are missing."""
    from mvrbm.io.arrays import known_entries
    from mvrbm.io.shards import Rows

    if not isinstance(samples, Rows):
        known = known_entries(samples, source)
        if known is not None and not quiet:
            count = int((~known).sum())
            opt.note(f"{count:,} of {known.size:,} entries are NaN, which is treated as missing")
        return known
    if missing_nan:
        raise ValueError("--missing-nan does not support a folder of shards; merge the shards into one array file")
    return None


def _read_labels(source: str, data_dir: Path | None, rows: slice | None, n: int) -> Any:
    from mvrbm.io.arrays import read_labels

    labels = opt.chosen(read_labels(source, data_dir=data_dir), rows, source)
    if len(labels) != n:
        raise ValueError(f"--labels {source} has {len(labels):,} labels, but there are {n:,} samples")
    return labels


# -- training ---------------------------------------------------------------------------------------


def _callbacks(model: Any, samples: Any, known: Any, log: Path | None, checkpoints: Path | None) -> list[Callback]:
    from mvrbm.training import Checkpoint, CSVLog, Monitor

    callbacks: list[Callback] = []
    if log is not None:
        callbacks += [Monitor.on(samples, known), CSVLog(log, overwrite=True)]  # the command has checked the file
    elif known is None or known.reshape(len(known), -1).all(1).any():
        callbacks.append(Monitor.on(samples, known, pseudo_sites=0))
    if checkpoints is not None:
        callbacks.append(Checkpoint(checkpoints))
    if len(getattr(model, "machines_", ())) > 1:
        # A monitor applies a single machine to the samples, so it cannot be used for a stack of machines.
        callbacks = [callback for callback in callbacks if not callback.logs]
    return callbacks


def _fit(model: Any, samples: Any, out: Path, **arguments: Any) -> _Outcome:
    """Fit and save the model, and return the outcome. If training is interrupted, save the partially trained model."""
    seconds, interrupt = resuming.fit(model, samples, **arguments)
    model.save(out, overwrite=True)
    kind = type(model).__name__
    hidden = model.machine_.hidden.shape
    parameters = model.machine_.n_parameters
    metrics = model.history_[-1] if model.history_ else {}
    result = {
        "model": str(out),
        "class": kind,
        "visible_shape": model.visible_shape_,
        "hidden_shape": hidden,
        "parameters": parameters,
        "samples": len(samples),
        "seconds": round(seconds, 3),
        "metrics": metrics,
        "epochs": model.n_epochs_,
        "updates": model.n_updates_,
        "interrupted": model.interrupted_,
    }
    parts = [
        f"{out}: {kind} {opt.times(model.visible_shape_)} -> {opt.times(hidden)}",
        f"{parameters:,} parameters",
        f"{model.n_epochs_:,} {'epoch' if model.n_epochs_ == 1 else 'epochs'} in {seconds:.1f} s",
    ]
    if "reconstruction_error" in metrics:
        parts.append(f"squared reconstruction error {metrics['reconstruction_error']:.4g} per sample")
    return _Outcome(result, ", ".join(parts), interrupt)


def _parse_grid(text: str, model: Any) -> dict[str, list[Any]]:
    """Parse a parameter grid such as ``name=value,value;name=value`` into lists of values keyed by parameter name."""
    grid: dict[str, list[Any]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, _, values = part.partition("=")
        if not values.strip():
            raise typer.BadParameter(f"{part!r} does not have the form NAME=VALUE,VALUE", param_hint="'--sweep'")
        found = [_parse_value(value.strip()) for value in values.split(",")]
        if name.strip() in grid:
            raise typer.BadParameter(f"names the parameter '{name.strip()}' more than once", param_hint="'--sweep'")
        if any(value in found[:number] for number, value in enumerate(found)):
            raise typer.BadParameter(f"{part!r} contains a value more than once", param_hint="'--sweep'")
        grid[name.strip()] = found
    if not grid:
        raise typer.BadParameter(f"{text!r} does not contain any parameters", param_hint="'--sweep'")
    parameters = model.get_params()
    for name in grid:
        if name not in parameters:
            raise ValueError(
                f"--sweep names the parameter '{name}', but {type(model).__name__} has only {', '.join(parameters)}"
            )
    return grid


def _parse_value(text: str) -> Any:
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text


def _sweep(model: Any, grid: dict[str, list[Any]], samples: Any, out: Path, run: resuming.Resuming) -> _Outcome:
    """Train one model per combination of parameter values, save the best model and return the scores of all models."""
    from mvrbm.estimators.sweep import Sweep

    try:
        fitted = Sweep(model, grid).fit(samples, checkpoints=run.checkpoints, ignore_mismatch=run.ignore_mismatch)
    except INTERRUPTS as error:
        raise run.interrupted("", error, saved=False) from error
    fitted.best_estimator_.save(out, overwrite=True)
    candidates = []
    lines = []
    for one in fitted.candidates_:
        candidates.append({"params": one.params, "score": one.score, "diverged": one.diverged, "seconds": one.seconds})
        params = ", ".join(f"{key}={value}" for key, value in one.params.items())
        outcome = "diverged" if one.diverged else f"score {one.score:.6g}, {one.seconds:.1f} s"
        lines.append(f"{params}: {outcome}")
    lines.append(f"{out}: best of {len(candidates)} models, score {fitted.best_score_:.6g}")
    result = {"model": str(out), "best": fitted.best_params_, "score": fitted.best_score_, "candidates": candidates}
    return _Outcome(result, "\n".join(lines))
