"""Commands that use a saved model: transform, score, likelihood, predict, reconstruct, sample, inpaint.

Each calls the estimator's method and works for every model that has it.
"""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mvrbm.cli import options as opt

Half = StrEnum("Half", ["LEFT", "RIGHT", "TOP", "BOTTOM"])
Start = StrEnum("Start", ["CHAINS", "NOISE"])

_STARTS = {Start.CHAINS: "the chains of training", Start.NOISE: "noise"}
_MEANS_HELP = "Write the means given the last hidden states, or draws; default: means for images, draws for .npy."
_START_HELP = "Where chains start; default: at the chains of training, if these were saved with the model."


def _rows(command: str, method: str, description: str) -> Callable[..., None]:
    """Make a command that writes one row per sample, which a method of the estimator computes."""

    def run(
        model_folder: opt.ModelFolder,
        source: opt.Input,
        out: opt.ArrayOut,
        rows: opt.Rows = None,
        device: opt.Where = opt.Device.AUTO,
        data_dir: opt.DataDir = None,
        force: opt.Force = False,
        as_json: opt.AsJson = False,
    ) -> None:
        opt.check_out(out, force, images=False)
        model = opt.load_model(model_folder, device, method)
        found = getattr(model, method)(opt.read(source, data_dir, rows))
        opt.write_samples(out, found, found.shape[1:], force, as_json)

    run.__name__, run.__doc__ = command, description
    return run


transform = _rows("transform", "transform", "Write the means of the hidden units, one row per sample.")
score = _rows("score", "score_samples", "Write the pseudo-log-likelihood of each sample.")
predict = _rows("predict", "predict", "Write the predicted class of each sample. Needs the model of a classifier.")


def likelihood(
    model_folder: opt.ModelFolder,
    source: opt.Input,
    chains: Annotated[int, typer.Option(min=2, help="Number of chains in each direction.")] = 100,
    steps: Annotated[int, typer.Option(min=1, help="Number of temperatures; more narrow the interval.")] = 1000,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    as_json: opt.AsJson = False,
) -> None:
    """Estimate the mean log-likelihood of data in nats per sample, with an interval from both sides."""
    model = opt.load_model(model_folder, device, "log_likelihood", seed)
    found = model.log_likelihood(opt.read(source, data_dir, rows), n_chains=chains, n_steps=steps)
    numbers = ("mean", "forward", "reverse", "lower", "upper", "bounds")
    opt.show({name: getattr(found, name) for name in numbers}, as_json, str(found))


def reconstruct(
    model_folder: opt.ModelFolder,
    source: opt.Input,
    out: opt.ImagesOut,
    steps: Annotated[int, typer.Option(min=1, help="Number of mean-field steps up and down.")] = 1,
    rows: opt.Rows = None,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Pass data up and down through the model, and write the reconstruction."""
    opt.check_out(out, force)
    model = opt.load_model(model_folder, device, "reconstruct")
    back = model.reconstruct(opt.read(source, data_dir, rows, out), steps=steps)
    opt.write_samples(out, back, model.visible_shape_, force, as_json)


def sample(
    model_folder: opt.ModelFolder,
    out: opt.ImagesOut,
    n: Annotated[int, typer.Option("-n", "--number", min=1, help="Number of samples.")] = 100,
    steps: Annotated[int, typer.Option(min=1, help="Gibbs steps of each chain.")] = 1000,
    label: Annotated[str | None, opt.new("Draw samples of this class. Needs a model trained with --labels.")] = None,
    means: Annotated[bool | None, opt.new(_MEANS_HELP, "--means/--draws")] = None,
    start: Annotated[Start | None, opt.new(_START_HELP)] = None,
    data: Annotated[str | None, opt.new("Start chains at these samples, in the form of INPUT of train.")] = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Draw samples from the model by Gibbs sampling."""
    if data is not None and (start is not None or label is not None):
        raise typer.BadParameter("leave out --start and --label, or this", param_hint="'--data'")
    opt.check_out(out, force)
    model = opt.load_model(model_folder, device, "sample", seed)
    if (label is not None) > hasattr(model, "classes_"):
        raise ValueError(f"{model_folder} has no labels: train a model with --labels, or use labeled-digits")
    if data is not None and hasattr(model, "classes_"):
        raise ValueError(f"{model_folder} holds a model with labels, whose chains cannot start at --data")
    init: Any = start or (Start.CHAINS if model.chains_ else Start.NOISE)
    origin = _STARTS[init] if data is None else data
    if data is not None:
        states = opt.read(data, data_dir)
        init = states.take(range(n), 0, mode="wrap")
    mean = not opt.is_array(out) if means is None else means
    given = {} if label is None else {"label": label}
    drawn = model.sample(n, steps=steps, init=init, mean=mean, **given)
    samples = drawn[0] if isinstance(drawn, tuple) else drawn  # classifiers draw (samples, labels)
    details = {"values": "means" if mean else "draws", "start": origin, "steps": steps, **given}
    words = f"{details['values']}{'' if label is None else f' of {label}'}, {steps:,} Gibbs steps from {origin}"
    opt.write_samples(out, samples, model.visible_shape_, force, as_json, details, words)


def inpaint(
    model_folder: opt.ModelFolder,
    source: opt.Input,
    out: opt.ImagesOut,
    mask: Annotated[Path | None, opt.new("Array of the shape of a sample or of the input, true where known.")] = None,
    hide: Annotated[Half | None, opt.new("Half of every sample to fill in.")] = None,
    missing_nan: opt.MissingNan = False,
    steps: Annotated[int, typer.Option(min=1, help="Gibbs steps to average over.")] = 100,
    burn_in: Annotated[int, typer.Option(min=0, help="Gibbs steps before those.")] = 50,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Fill in the missing entries of the data, given the known ones."""
    if (mask is not None) + (hide is not None) + missing_nan != 1:
        raise typer.BadParameter("give one of --mask, --hide and --missing-nan", param_hint="missing entries")
    opt.check_out(out, force)
    from mvrbm.io.arrays import half_mask, known_entries, read_mask, read_samples

    model = opt.load_model(model_folder, device, "inpaint", seed)
    every = read_samples(source, data_dir=data_dir)
    rows = opt.tiles(rows, out, len(every))
    samples = opt.chosen(every, rows, source)[:]
    if mask is not None:
        known: Any = read_mask(mask, (len(every), *model.visible_shape_))
        known = known if known.shape == model.visible_shape_ else opt.chosen(known, rows, str(mask))
    elif hide is not None:
        known = half_mask(model.visible_shape_, hide)
    else:
        known = known_entries(samples, nan_is_missing=True)
    if known is None:
        raise ValueError(f"{source} has no NaN: there is nothing to fill in")
    filled = model.inpaint(samples, known, steps=steps, burn_in=burn_in)
    opt.write_samples(out, filled, model.visible_shape_, force, as_json)
