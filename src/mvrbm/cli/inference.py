"""Commands that apply a saved model: transform, score, predict, likelihood, reconstruct, sample and inpaint.

Each command calls a method of the estimator and works for every model that has this method.
"""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mvrbm.cli import options as opt
from mvrbm.cli.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Half = StrEnum("Half", ["LEFT", "RIGHT", "TOP", "BOTTOM"])
Start = StrEnum("Start", ["CHAINS", "NOISE"])

_START_IN_WORDS = {Start.CHAINS: "the training chains", Start.NOISE: "noise"}
_CHAINS_HELP = "Number of annealing chains in each direction."
_TEMPERATURES_HELP = "Number of annealing temperatures. More temperatures give a narrower interval."
_RECONSTRUCT_STEPS_HELP = "Number of mean-field passes to the hidden layer and back."
_LABEL_HELP = "Draw samples of this class. Requires a model trained with --labels."
_LABELS_OUT_HELP = "Also write the label of each sample to this .npy file. Requires a model trained with --labels."
_MEANS_HELP = "Write the means of the visible units, or values drawn from their distribution."
_MEANS_DEFAULT = "means for images, draws for .npy"
_START_HELP = "Initial state of the Gibbs chains."
_START_DEFAULT = "the saved training chains if available, otherwise noise"
_DATA_HELP = "Start the Gibbs chains at these samples. Accepts the same formats as INPUT of mvrbm train."
_MASK_HELP = "Array file or image that is true where entries are known. One mask for all samples, or one per sample."
_HIDE_HELP = "Fill in this half of each sample."

# Default number of Gibbs steps per chain, as in the `sample` method.
_STEPS = 1000
# Attributes of the log-likelihood estimate to include in the JSON result.
_LIKELIHOOD_FIELDS = ("mean", "forward", "reverse", "lower", "upper", "bounds")


def _row_command(
    command: str, method: str, description: str, model_help: str = opt.UNLABELED_HELP
) -> Callable[..., None]:
    """Build a command that calls a method of the estimator and writes the result with one row per sample."""

    def run(
        model_folder: Annotated[Path, opt.argument("MODEL", model_help)],
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

    run.__name__ = command
    run.__doc__ = description
    return run


transform = _row_command(
    "transform", "transform", "Compute features: the means of the hidden units, one row per sample."
)
score = _row_command(
    "score",
    "score_samples",
    "Compute the score of each sample: its log-density for mixtures, its score for outlier detectors, and its "
    "pseudo-log-likelihood for all other models. Higher is more normal.",
)
predict = _row_command(
    "predict", "predict", "Predict the class of each sample with a saved classifier.", opt.LABELED_HELP
)


def _is_exact(model: Any) -> bool:
    """Return whether a model has exact likelihoods and draws. Only these models have a `bic` method."""
    return hasattr(model, "bic")


def likelihood(
    model_folder: opt.UnlabeledFolder,
    source: opt.Input,
    chains: Annotated[int | None, opt.new(_CHAINS_HELP, "--chains", default="100", min=2)] = None,
    temperatures: Annotated[int | None, opt.new(_TEMPERATURES_HELP, "--temperatures", default="1000", min=1)] = None,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    as_json: opt.AsJson = False,
) -> None:
    """Estimate the mean log-likelihood of samples in nats, with an uncertainty interval.

    The interval combines estimates from forward and reverse annealed importance sampling. The likelihood of a model
    that was trained with `mvrbm mixture` is exact.
    """
    model = opt.load_model(model_folder, device, "score_samples", seed)
    samples = opt.read(source, data_dir, rows)
    if _is_exact(model):
        opt.check_absent("has no effect because the likelihood is exact", chains=chains, temperatures=temperatures)
        mean = model.score(samples)
        opt.show({"mean": mean}, as_json, f"{mean:.4f} nats per sample (exact)")
        return
    model = opt.load_model(model_folder, device, "log_likelihood", seed)
    given = {"n_chains": chains, "n_steps": temperatures}
    found = model.log_likelihood(samples, **{name: value for name, value in given.items() if value is not None})
    result = {name: getattr(found, name) for name in _LIKELIHOOD_FIELDS}
    opt.show(result, as_json, str(found))


def reconstruct(
    model_folder: opt.UnlabeledFolder,
    source: opt.Input,
    out: opt.ImagesOut,
    steps: Annotated[int, typer.Option(min=1, help=_RECONSTRUCT_STEPS_HELP)] = 1,
    rows: opt.Rows = None,
    columns: opt.Columns = None,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Reconstruct samples from the means of the hidden units."""
    opt.check_out(out, force)
    opt.check_columns(columns, out)
    model = opt.load_model(model_folder, device, "reconstruct")
    opt.check_pictures(out, model.visible_shape_)
    reconstructed = model.reconstruct(opt.read(source, data_dir, rows, out), steps=steps)
    opt.write_samples(out, reconstructed, model.visible_shape_, force, as_json, columns=columns)


def sample(
    model_folder: opt.ModelFolder,
    out: opt.ImagesOut,
    n: Annotated[int, typer.Option("-n", "--number", min=1, help="Number of samples to draw.")] = 100,
    steps: Annotated[
        int | None, opt.new("Number of Gibbs steps per chain.", "--steps", default=str(_STEPS), min=1)
    ] = None,
    label: Annotated[str | None, opt.new(_LABEL_HELP)] = None,
    labels_out: Annotated[Path | None, opt.new(_LABELS_OUT_HELP)] = None,
    means: Annotated[bool | None, opt.new(_MEANS_HELP, "--means/--draws", default=_MEANS_DEFAULT)] = None,
    start: Annotated[Start | None, opt.new(_START_HELP, default=_START_DEFAULT)] = None,
    data: Annotated[str | None, opt.new(_DATA_HELP)] = None,
    columns: opt.Columns = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Draw samples from a model by Gibbs sampling.

    A model that was trained with `mvrbm mixture` is sampled exactly, without Gibbs steps.
    """
    if data is not None:
        opt.check_conflicts("--data", "the samples in --data are the initial states", start=start, label=label)
    opt.check_out(out, force)
    opt.check_columns(columns, out)
    if labels_out is not None:
        opt.check_out(labels_out, force, images=False)
        opt.check_different({"OUT": out, "--labels-out": labels_out})
    model = opt.load_model(model_folder, device, "sample", seed)
    opt.check_pictures(out, model.visible_shape_)
    if _is_exact(model):
        reason = "has no effect because the draws are exact"
        opt.check_absent(reason, steps=steps, label=label, labels_out=labels_out, means=means, start=start, data=data)
        drawn, _ = model.sample(n)
        opt.write_samples(out, drawn, model.visible_shape_, force, as_json, {"values": "draws"}, "draws", columns)
        return
    steps = _STEPS if steps is None else steps
    labeled = hasattr(model, "classes_")
    if not labeled and label is not None:
        raise ValueError(f"--label {label} requires a model trained with --labels, but {model_folder} has no labels")
    if not labeled and labels_out is not None:
        raise ValueError(f"--labels-out requires a model trained with --labels, but {model_folder} has no labels")
    if data is not None and labeled:
        raise ValueError(f"--data {data} is not supported for {model_folder}, which contains a model with labels")
    init, origin = _initial_states(model, n, start, data, data_dir)
    mean = not opt.is_array(out) if means is None else means
    of_label = {} if label is None else {"label": label}
    drawn = model.sample(n, steps=steps, init=init, mean=mean, **of_label)
    samples = drawn[0] if labeled else drawn
    values = "means" if mean else "draws"
    details = {"values": values, "start": origin, "steps": steps, **of_label}
    kind = values if label is None else f"{values} of {label}"
    words = f"{kind}, {steps:,} Gibbs steps from {origin}"
    if labels_out is not None:
        details["labels"] = str(labels_out)
    opt.write_samples(out, samples, model.visible_shape_, force, as_json, details, words, columns)
    if labels_out is not None:
        from mvrbm.io.arrays import write_output

        labels = drawn[1]
        write_output(labels_out, labels if labels.dtype != object else labels.astype(str), force)


def _initial_states(
    model: Any, n: int, start: Start | None, data: str | None, data_dir: Path | None
) -> "tuple[Start | NDArray[Any], str]":
    """Return the `init` argument of the `sample` method, and a description of the initial states."""
    if data is not None:
        states = opt.read(data, data_dir)
        return states.take(range(n), 0, mode="wrap"), data
    if start is None:
        start = Start.CHAINS if model.chains_ else Start.NOISE
    return start, _START_IN_WORDS[start]


def inpaint(
    model_folder: opt.UnlabeledFolder,
    source: opt.Input,
    out: opt.ImagesOut,
    mask: Annotated[Path | None, opt.new(_MASK_HELP)] = None,
    hide: Annotated[Half | None, opt.new(_HIDE_HELP)] = None,
    missing_nan: opt.MissingNan = False,
    steps: Annotated[int, typer.Option(min=1, help="Number of Gibbs steps to average over.")] = 100,
    burn_in: Annotated[int, typer.Option(min=0, help="Number of initial Gibbs steps to discard.")] = 50,
    rows: opt.Rows = None,
    columns: opt.Columns = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Fill in the missing entries of samples, given their known entries, with a trained model.

    mvrbm impute predicts missing entries more accurately, and needs no trained model.

    Specify the missing entries with exactly one of --mask, --hide and --missing-nan.
    """
    given = opt.given_options(mask=mask, hide=hide, missing_nan=missing_nan or None)
    if len(given) != 1:
        got = " and ".join(given) or "none of them"
        raise UsageError(f"specify missing entries with exactly one of --mask, --hide and --missing-nan, got {got}")
    opt.check_out(out, force)
    opt.check_columns(columns, out)
    from mvrbm.io.arrays import read_samples

    model = opt.load_model(model_folder, device, "inpaint", seed)
    opt.check_pictures(out, model.visible_shape_)
    every = read_samples(source, data_dir=data_dir)
    rows = opt.tiles(rows, out, len(every))
    samples = opt.chosen(every, rows, source)[:]
    if mask is not None:
        known = _read_mask(mask, model.visible_shape_, len(every), rows)
    else:
        known = _known_entries(samples, model.visible_shape_, hide, source)
    filled = model.inpaint(samples, known, steps=steps, burn_in=burn_in)
    opt.write_samples(out, filled, model.visible_shape_, force, as_json, columns=columns)


def _read_mask(path: Path, shape: tuple[int, ...], n: int, rows: slice | None) -> "NDArray[Any]":
    """Read a single mask for all samples, or the masks of the selected `rows` if there is one mask per sample."""
    from mvrbm.io.arrays import read_mask

    known = read_mask(path, (n, *shape))
    return known if known.shape == shape else opt.chosen(known, rows, str(path))


def _known_entries(samples: Any, shape: tuple[int, ...], hide: Half | None, source: str) -> "NDArray[Any]":
    """Return a mask that is True for known entries.

    Entries in the half `hide` are treated as missing. If `hide` is None, NaN entries are treated as missing instead.
    """
    from mvrbm.io.arrays import half_mask, known_entries

    if hide is not None:
        return half_mask(shape, hide)
    known = known_entries(samples, source)
    if known is None:
        raise ValueError(f"--missing-nan requires missing entries, but {source} contains no NaN")
    return known
