"""The command ``mvrbm train``: an estimator from options, its fit, and what is shown of it."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mvrbm.cli import options as opt

if TYPE_CHECKING:
    from mvrbm.learning import Callback

Negative = StrEnum("Negative", ["CD", "PCD", "TEMPERED"])

_HIDDEN_HELP = "Shape of the hidden layer: 500 makes an RBM, 25x25 an MVRBM, 5x5x20 a TVRBM."
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
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs.")] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per update.")] = 100,
    visible: Annotated[str | None, opt.new("Unit of the data, such as gaussian; default: bernoulli, 0 to 1.")] = None,
    hidden_unit: Annotated[str | None, opt.new("Unit of the hidden layer; default: bernoulli.")] = None,
    recipe: opt.RecipeOption = opt.Recipe.DEFAULT,
    learning_rate: Annotated[float | None, opt.new("Learning rate; default: the recipe's.")] = None,
    shape: Annotated[opt.Shape | None, opt.new("Shape of a sample, if the input has rows.", **opt.SHAPE)] = None,
    negative: Annotated[Negative | None, opt.new("Chains of the negative phase; default: the recipe's.")] = None,
    chains: Annotated[int | None, opt.new("Number of chains of pcd and tempered.", min=1)] = None,
    steps: Annotated[int | None, opt.new("Gibbs steps per update; default: the recipe's.", min=1)] = None,
    log: Annotated[Path | None, opt.new("CSV file for the metrics of every epoch.")] = None,
    checkpoints: Annotated[Path | None, opt.new("Folder to save in after every epoch, and to resume from.")] = None,
    sweep: Annotated[str | None, opt.new(_SWEEP_HELP, metavar="NAME=VALUES[;NAME=VALUES]")] = None,
    missing_nan: opt.MissingNan = False,
    quiet: opt.Quiet = False,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a model on data and write it to a folder.

    Ctrl-C ends training after the current batch and saves; the same command with --checkpoints resumes it.
    """
    if hidden is None and init is None:
        raise typer.BadParameter("give one of the two", param_hint="'--hidden' and '--init'")
    if init is not None and any(part is not None for part in (hidden, rank, coupling, visible, hidden_unit)):
        reason = "the saved model has its layers: leave out --hidden, --rank, --coupling, --visible and --hidden-unit"
        raise typer.BadParameter(reason, param_hint="'--init'")
    from mvrbm.learning.distributed import World, leave

    params = {"n_epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "recipe": recipe.value}
    params |= {"negative": negative and negative.value, "n_chains": chains, "gibbs_steps": steps, "random_state": seed}
    world = World.here()  # one process, unless torchrun started several
    with world.raise_together(ValueError, OSError):
        resumed = _check_outputs(out, log, checkpoints, force)
        if init is not None:
            model = _saved_model(init, device)
        else:
            model = _new_model(hidden or opt.Shape(), rank, coupling, visible, hidden_unit)
        samples, known = _samples(source, data_dir, shape, hidden, missing_nan)
        model.set_params(**params, device=device.value)
    if sweep is not None:
        if known is not None or any(path is not None for path in (init, log, checkpoints)):
            raise ValueError("--sweep cannot be combined with --init, --missing-nan, --log or --checkpoints")
        result, text = _sweep(model, sweep, samples, out)
    else:
        callbacks = _callbacks(samples, known, log, checkpoints, quiet)
        result, text = _fit(model, samples, known, callbacks, checkpoints, out)
    leave()
    if world.is_main:
        opt.show({**result, "resumed": resumed}, as_json, text)
    if result.get("interrupted"):
        then = "the same command with --force resumes it" if checkpoints else "with --checkpoints it could be resumed"
        raise opt.Interrupted(f"interrupted after {result['updates']:,} updates: the model so far is in {out}; {then}")


# -- the parts of it --------------------------------------------------------------------------------


def _check_outputs(out: Path, log: Path | None, checkpoints: Path | None, force: bool) -> bool:
    """Raise ValueError for outputs that cannot be written. Returns whether there is a checkpoint to resume from."""
    from mvrbm.io.atomic import check_folder, check_output
    from mvrbm.learning.checkpoint import newest

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
    hidden: opt.Shape, rank: int | None, coupling: str | None, visible: str | None, hidden_unit: str | None
) -> Any:
    """Build the estimator for a hidden layer of this shape."""
    from mvrbm import MVRBM, RBM, TVRBM
    from mvrbm.couplings import make_coupling
    from mvrbm.units import unit_names

    for name, unit in (("--visible", visible), ("--hidden-unit", hidden_unit)):
        if unit is not None and unit not in unit_names():
            raise typer.BadParameter(f"{unit!r} is not one of {', '.join(unit_names())}", param_hint=f"'{name}'")
    if rank is not None and (coupling is not None or len(hidden) == 1):
        reason = "an RBM has full weights" if coupling is None else "--coupling has its own"
        raise typer.BadParameter(f"{reason}: leave it out", param_hint="'--rank'")
    parts: Any = {"visible": visible or "bernoulli", "hidden": hidden_unit or "bernoulli"}
    parts["coupling"] = None if coupling is None else make_coupling(coupling)
    if len(hidden) == 1:
        return RBM(hidden[0], **parts)
    return (MVRBM if len(hidden) == 2 else TVRBM)(tuple(hidden), rank=rank or 1, **parts)


def _saved_model(folder: Path, device: opt.Device) -> Any:
    """Load a model to continue from."""
    model = opt.load_model(folder, device, "fit")
    if "warm_start" not in model.get_params():
        raise ValueError(f"{folder} holds a model of class {type(model).__name__}, which cannot be trained further")
    return model.set_params(warm_start=True)


def _samples(
    source: str, data_dir: Path | None, shape: opt.Shape | None, hidden: opt.Shape | None, missing_nan: bool
) -> tuple[Any, Any]:
    """Read samples and give them their shape: `shape`, their own, or a square. Returns them and the known entries."""
    from mvrbm.io.arrays import known_entries, read_samples
    from mvrbm.io.shards import Shards

    samples = read_samples(source, data_dir=data_dir)
    own = samples.shape[1:]
    if shape is None and len(own) == 1 and len(hidden or ()) > 1:
        shape = opt.Shape((math.isqrt(own[0]),) * 2)
        if len(hidden or ()) > 2 or math.prod(shape) != own[0]:
            raise ValueError(
                f"--hidden {hidden} has {len(hidden or ())} axes, but samples have 1 ({own[0]} entries): pass --shape"
            )
    if shape is not None:
        if math.prod(shape) != math.prod(own):
            raise ValueError(
                f"--shape {shape} has {math.prod(shape)} entries, but samples of shape {opt.times(own)} have "
                f"{math.prod(own)}"
            )
        samples = samples.reshape(len(samples), *shape)
    if isinstance(samples, Shards):
        if missing_nan:
            raise ValueError("--missing-nan does not support a folder of shards")
        return samples, None
    return samples, known_entries(samples, nan_is_missing=missing_nan)


def _callbacks(samples: Any, known: Any, log: Path | None, checkpoints: Path | None, quiet: bool) -> list[Callback]:
    from mvrbm.learning import Checkpoint, CSVLog, EpochLines, Monitor, ProgressBar

    callbacks: list[Callback] = []
    if known is None or known.reshape(len(known), -1).all(1).any():
        callbacks.append(Monitor.on(samples, known, pseudo_sites=0 if log is None else 32))
    elif log is not None:
        raise ValueError("--log needs at least one sample without missing entries to measure on")
    if log is not None:
        callbacks.append(CSVLog(log))
    if not quiet:
        callbacks.append(ProgressBar() if sys.stderr.isatty() else EpochLines())
    if checkpoints is not None:
        callbacks.append(Checkpoint(checkpoints))
    return callbacks


def _fit(
    model: Any, samples: Any, known: Any, callbacks: Sequence[Callback], checkpoints: Path | None, out: Path
) -> tuple[dict[str, Any], str]:
    """Fit, save, and describe the result."""
    began = time.perf_counter()
    try:
        model.fit(samples, mask=known, callbacks=callbacks, resume=checkpoints)
    except KeyboardInterrupt:
        if not getattr(model, "interrupted_", False):
            raise  # a second Ctrl-C: at once
    seconds = time.perf_counter() - began
    model.save(out)
    kind, hidden, parameters = type(model).__name__, model.machine_.hidden.shape, model.machine_.n_parameters
    metrics = model.history_[-1] if model.history_ else {}
    result = {"model": str(out), "class": kind, "visible_shape": model.visible_shape_, "hidden_shape": hidden}
    result |= {"parameters": parameters, "samples": len(samples), "epochs": model.n_epochs_}
    result |= {"updates": model.n_updates_, "interrupted": model.interrupted_}
    result |= {"seconds": round(seconds, 3), "metrics": metrics}
    text = f"{out}: {kind} {opt.times(model.visible_shape_)} -> {opt.times(hidden)}, {parameters:,} parameters"
    text += f", {opt.count(model.n_epochs_, 'epoch')} in {seconds:.1f} s"
    if "reconstruction_error" in metrics:
        text += f", squared reconstruction error {metrics['reconstruction_error']:.4g} per sample"
    return result, text


# -- sweeps -----------------------------------------------------------------------------------------


def _sweep(model: Any, text: str, samples: Any, out: Path) -> tuple[dict[str, Any], str]:
    """Train one model per combination, save the best, and describe all."""
    from mvrbm.estimators.sweep import Sweep

    fitted = Sweep(model, _grid(text, model)).fit(samples)
    fitted.best_estimator_.save(out)
    rows = [
        {"params": one.params, "score": one.score, "diverged": one.diverged, "seconds": round(one.seconds, 3)}
        for one in fitted.candidates_
    ]
    lines = [
        f"{_in_words(one.params)}: " + ("diverged" if one.diverged else f"score {one.score:.6g}, {one.seconds:.1f} s")
        for one in fitted.candidates_
    ]
    lines.append(f"{out}: the best of {len(rows)}, {_in_words(fitted.best_params_)}")
    result = {"model": str(out), "best": fitted.best_params_, "score": fitted.best_score_, "candidates": rows}
    return result, "\n".join(lines)


def _in_words(params: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in params.items())


def _grid(text: str, model: Any) -> dict[str, list[Any]]:
    """Read 'name=value,value;name=value' into values by parameter."""
    grid: dict[str, list[Any]] = {}
    names = sorted(model.get_params())
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, _, values = (piece.strip() for piece in part.partition("="))
        if not values:
            raise typer.BadParameter(f"'{part}' is not NAME=VALUE,VALUE", param_hint="'--sweep'")
        if name not in names:
            reason = f"'{name}' is not a parameter: choose from {', '.join(names)}"
            raise typer.BadParameter(reason, param_hint="'--sweep'")
        grid[name] = [_value(value.strip()) for value in values.split(",")]
    if not grid:
        raise typer.BadParameter("no parameters are given", param_hint="'--sweep'")
    return grid


def _value(text: str) -> Any:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
