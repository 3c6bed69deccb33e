"""The command ``mvrbm train``: an estimator from options, its fit, and what is shown of it."""

from __future__ import annotations

import ast
import contextlib
import math
import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mvrbm.cli import options as opt
from mvrbm.interrupt import INTERRUPTS

if TYPE_CHECKING:
    from mvrbm.training import Callback

Negative = StrEnum("Negative", ["CD", "PCD", "TEMPERED"])

_HIDDEN_HELP = "Shape of the hidden layer: 500 makes an RBM, 25x25 an MVRBM, 5x5x20 a TVRBM."
_LABELS_HELP = (
    "Label of each sample: a .npy or idx file, a .txt file with one label per line, a column of a table "
    "(file.csv:name), a folder with one folder of images per class, or a data set. The model then has the label as a "
    "second visible layer, and draws samples of a label."
)
_RECIPE_HELP = f"{opt.RECIPE_HELP} Default: default; with --labels, generative."
_EPOCHS = 20
_EPOCHS_HELP = "Number of epochs; default: 20, or 100 with the generative recipe."
_SWEEP_HELP = (
    "Train one model for each combination, such as 'rank=1,2;learning_rate=0.01,0.1;random_state=0,1', and keep the "
    "one that scores best on a tenth of the samples, which is held out."
)


def train(
    source: opt.Input,
    out: opt.ModelOut,
    hidden: Annotated[opt.Shape | None, opt.new(_HIDDEN_HELP, **opt.SHAPE)] = None,
    init: Annotated[Path | None, opt.new("Continue from this saved model, instead of --hidden.")] = None,
    rank: Annotated[int | None, opt.new("Number of Kronecker products in the sum; default: 1.", min=1)] = None,
    coupling: Annotated[str | None, opt.new("Other coupling: cp:4, mpo:3, tucker:4x4, dense.")] = None,
    labels: Annotated[str | None, opt.new(_LABELS_HELP)] = None,
    epochs: Annotated[int | None, opt.new(_EPOCHS_HELP, min=1)] = None,
    batch_size: Annotated[int | None, opt.new("Samples per update; default: the recipe's.", min=1)] = None,
    visible: Annotated[str | None, opt.new("Unit of the data, such as gaussian; default: bernoulli, 0 to 1.")] = None,
    hidden_unit: Annotated[str | None, opt.new("Unit of the hidden layer; default: bernoulli.")] = None,
    recipe: Annotated[opt.Recipe | None, opt.new(_RECIPE_HELP)] = None,
    learning_rate: Annotated[float | None, opt.new("Learning rate; default: the recipe's.")] = None,
    shape: Annotated[opt.Shape | None, opt.new("Shape of a sample, if the input has rows.", **opt.SHAPE)] = None,
    negative: Annotated[Negative | None, opt.new("Chains of the negative phase; default: the recipe's.")] = None,
    chains: Annotated[int | None, opt.new("Number of chains of pcd and tempered.", min=1)] = None,
    steps: Annotated[int | None, opt.new("Gibbs steps per update; default: the recipe's.", min=1)] = None,
    log: Annotated[Path | None, opt.new("CSV file for the metrics of every epoch.")] = None,
    checkpoints: Annotated[Path | None, opt.new(opt.CHECKPOINTS_HELP)] = None,
    sweep: Annotated[str | None, opt.new(_SWEEP_HELP, metavar="NAME=VALUES[;NAME=VALUES]")] = None,
    missing_nan: opt.MissingNan = False,
    rows: opt.Rows = None,
    quiet: opt.Quiet = False,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a model on data and write it to a folder.

    Ctrl-C or SIGTERM ends training after the current batch and saves; the same command with --checkpoints resumes it.
    """
    if hidden is None and init is None:
        raise typer.BadParameter("give one of the two", param_hint="'--hidden' and '--init'")
    if init is not None and any(part is not None for part in (hidden, rank, coupling, visible, hidden_unit)):
        reason = "the saved model has its layers: leave out --hidden, --rank, --coupling, --visible and --hidden-unit"
        raise typer.BadParameter(reason, param_hint="'--init'")
    from mvrbm.distributed import World, leave

    if labels is not None:
        _check_labeled(
            init=init, hidden_unit=hidden_unit, negative=negative, chains=chains, steps=steps, log=log,
            sweep=sweep, missing_nan=missing_nan or None,
        )  # fmt: skip
    usual = None if init is not None else opt.Recipe.DEFAULT if labels is None else opt.Recipe.GENERATIVE
    recipe = recipe or usual  # a saved model keeps its recipe
    params: dict[str, Any] = {"batch_size": batch_size, "learning_rate": learning_rate, "random_state": seed}
    params |= {"negative": negative and negative.value, "n_chains": chains, "gibbs_steps": steps}
    params |= {"recipe": recipe and recipe.value, "n_epochs": epochs}
    world = World.here()  # one process, unless torchrun started several
    with world.raise_together(ValueError, OSError):
        resumed = _check_outputs(out, log, checkpoints, force)
        if init is not None:
            model = opt.load_model(init, device, "fit").set_params(warm_start=True)
            shape = shape or opt.Shape(model.visible_shape_)
        else:
            model = _new_model(hidden or opt.Shape(), rank, coupling, visible, hidden_unit, labels is not None)
        samples, known = _samples(source, data_dir, shape, hidden or opt.Shape(), missing_nan, rows)
        model.set_params(**{key: value for key, value in params.items() if value is not None}, device=device.value)
        if labels is not None:
            samples, y = samples[:], _labels(labels, data_dir, len(samples), rows)
        if epochs is None:
            model.set_params(n_epochs=None if model.recipe == "generative" else _EPOCHS)
    if sweep is not None:
        if known is not None or any(path is not None for path in (init, log)):
            raise ValueError("--sweep cannot be combined with --init, --missing-nan or --log")
        (result, text), cause = _sweep(model, sweep, samples, out, checkpoints=checkpoints, force=force), None
    else:
        callbacks = _callbacks(samples, known, log, checkpoints if labels is None else None, quiet)
        if labels is not None or len(getattr(model, "machines_", ())) > 1:
            # A monitor of the data suits machines that have nothing else as visible layers, and are not stacked.
            callbacks = [callback for callback in callbacks if not callback.logs]
        settings = {"mask": known, "resume": checkpoints} if labels is None else {"y": y, "checkpoints": checkpoints}
        result, text, cause = _fit(model, samples, out, callbacks=callbacks, force=force, **settings)
    leave()
    if world.is_main:
        opt.show({**result, "resumed": resumed}, as_json, text)
    if cause is not None:
        then = "the same command with --force resumes it" if checkpoints else "with --checkpoints it could be resumed"
        raise opt.Interrupted(
            f"interrupted after {result['updates']:,} updates: the model so far is in {out}; {then}", cause
        )


def _check_labeled(**others: Any) -> None:
    """Raise an error of usage for options that models with labels do not have."""
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None]
    if given:
        raise typer.BadParameter(f"cannot be combined with {', '.join(given)}", param_hint="'--labels'")


def _labels(source: str, data_dir: Path | None, n: int, rows: slice | None) -> Any:
    from mvrbm.io.arrays import read_labels

    labels = opt.chosen(read_labels(source, data_dir=data_dir), rows, source)
    if len(labels) != n:
        raise ValueError(f"{source} has {len(labels):,} labels, but there are {n:,} samples")
    return labels


def _check_outputs(out: Path, log: Path | None, checkpoints: Path | None, force: bool) -> bool:
    """Raise ValueError for outputs that cannot be written. Returns whether there is a checkpoint to resume from."""
    from mvrbm.io.atomic import check_folder, check_output
    from mvrbm.training.checkpoints import newest

    # If torchrun has restarted this process, the files that exist are from the previous attempt.
    force = force or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    opt.check_model_out(out, force)
    for name, path in (("--log", log), ("--checkpoints", checkpoints)):
        if path is not None and out.resolve() in (path.resolve(), *path.resolve().parents):
            raise ValueError(f"{name} {path} lies in the model's folder {out}: choose another place")
    resumed = checkpoints is not None and newest(check_folder(checkpoints)) is not None
    if log is not None:
        check_output(log, force or resumed)
    return resumed


def _new_model(
    hidden: opt.Shape,
    rank: int | None,
    coupling: str | None,
    visible: str | None,
    hidden_unit: str | None,
    labeled: bool,
) -> Any:
    """Build the estimator for a hidden layer of this shape."""
    from mvrbm import MVRBM, RBM, TVRBM, ClassificationMVRBM
    from mvrbm.couplings import make_coupling

    if rank is not None and (coupling is not None or len(hidden) == 1):
        reason = "an RBM has full weights" if coupling is None else "--coupling has its own"
        raise typer.BadParameter(f"{reason}: leave it out", param_hint="'--rank'")
    parts: Any = {"visible": visible or "bernoulli", "coupling": None if coupling is None else make_coupling(coupling)}
    if labeled:
        if len(hidden) == 1 and coupling is None:
            parts["coupling"] = make_coupling("dense")
        return ClassificationMVRBM(tuple(hidden), rank=rank or 1, mode="generative", **parts)
    parts["hidden"] = hidden_unit or "bernoulli"
    if len(hidden) == 1:
        return RBM(hidden[0], **parts)
    return (MVRBM if len(hidden) == 2 else TVRBM)(tuple(hidden), rank=rank or 1, **parts)


def _samples(
    source: str,
    data_dir: Path | None,
    shape: opt.Shape | None,
    hidden: opt.Shape,
    missing_nan: bool,
    rows: slice | None,
) -> tuple[Any, Any]:
    """Read samples and give them their shape: `shape`, their own, or a square. Returns them and the known entries."""
    from mvrbm.io.arrays import known_entries, read_samples
    from mvrbm.io.shards import Rows

    samples = opt.chosen(read_samples(source, data_dir=data_dir), rows, source)
    entries = math.prod(samples.shape[1:])
    if shape is None and samples.ndim == 2 and len(hidden) > 1:
        shape = opt.Shape((math.isqrt(entries),) * 2)
        if len(hidden) > 2 or math.prod(shape) != entries:
            raise ValueError(
                f"--hidden {hidden} has {len(hidden)} axes, samples have 1 ({entries} entries): pass --shape"
            )
    if shape is not None:
        if math.prod(shape) != entries:
            raise ValueError(f"--shape {shape} has {math.prod(shape)} entries, but samples have {entries}")
        samples = samples.reshape(len(samples), *shape)
    if isinstance(samples, Rows) and missing_nan:
        raise ValueError("--missing-nan does not support a folder of shards")
    return samples, None if isinstance(samples, Rows) else known_entries(samples, nan_is_missing=missing_nan)


def _callbacks(samples: Any, known: Any, log: Path | None, checkpoints: Path | None, quiet: bool) -> list[Callback]:
    from mvrbm.training import Checkpoint, CSVLog, EpochLines, Monitor, ProgressBar

    callbacks: list[Callback] = []
    if log is not None:
        callbacks += [Monitor.on(samples, known), CSVLog(log)]
    elif known is None or known.reshape(len(known), -1).all(1).any():
        callbacks.append(Monitor.on(samples, known, pseudo_sites=0))
    if not quiet:
        callbacks.append(ProgressBar() if sys.stderr.isatty() else EpochLines())
    if checkpoints is not None:
        callbacks.append(Checkpoint(checkpoints))
    return callbacks


def _fit(model: Any, samples: Any, out: Path, **settings: Any) -> tuple[dict[str, Any], str, BaseException | None]:
    """Fit, save, and describe the result; with what has interrupted it, if anything."""
    began, cause = time.perf_counter(), None
    try:
        model.fit(samples, **settings)
    except INTERRUPTS as error:
        if not getattr(model, "interrupted_", False):
            raise  # a second Ctrl-C: at once
        cause = error
    seconds = time.perf_counter() - began
    model.save(out)
    kind, hidden, parameters = type(model).__name__, model.machine_.hidden.shape, model.machine_.n_parameters
    metrics = model.history_[-1] if model.history_ else {}
    result = {"model": str(out), "class": kind, "visible_shape": model.visible_shape_, "hidden_shape": hidden}
    result |= {"parameters": parameters, "samples": len(samples), "seconds": round(seconds, 3), "metrics": metrics}
    result |= {"epochs": model.n_epochs_, "updates": model.n_updates_, "interrupted": model.interrupted_}
    text = f"{out}: {kind} {opt.times(model.visible_shape_)} -> {opt.times(hidden)}, {parameters:,} parameters"
    text += f", {model.n_epochs_:,} epoch{'s' if model.n_epochs_ != 1 else ''} in {seconds:.1f} s"
    if "reconstruction_error" in metrics:
        text += f", squared reconstruction error {metrics['reconstruction_error']:.4g} per sample"
    return result, text, cause


def _sweep(model: Any, text: str, samples: Any, out: Path, **kept: Any) -> tuple[dict[str, Any], str]:
    """Train one model per combination of 'name=value,value;name=value', save the best, and describe all."""
    from mvrbm.estimators.sweep import Sweep

    grid: dict[str, list[Any]] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, _, values = part.partition("=")
        if not values.strip():
            raise typer.BadParameter(f"'{part}' is not NAME=VALUE,VALUE", param_hint="'--sweep'")
        grid[name.strip()] = [_value(value.strip()) for value in values.split(",")]
    fitted = Sweep(model, grid).fit(samples, **kept)
    fitted.best_estimator_.save(out)
    rows, lines = [], []
    for one in fitted.candidates_:
        rows.append({"params": one.params, "score": one.score, "diverged": one.diverged, "seconds": one.seconds})
        words = ", ".join(f"{key}={value}" for key, value in one.params.items())
        lines.append(f"{words}: " + ("diverged" if one.diverged else f"score {one.score:.6g}, {one.seconds:.1f} s"))
    lines.append(f"{out}: the best of {len(rows)}, score {fitted.best_score_:.6g}")
    result = {"model": str(out), "best": fitted.best_params_, "score": fitted.best_score_, "candidates": rows}
    return result, "\n".join(lines)


def _value(text: str) -> Any:
    with contextlib.suppress(ValueError, SyntaxError):
        return ast.literal_eval(text)
    return text
