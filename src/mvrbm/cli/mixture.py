"""The ``mvrbm mixture`` command, which fits a density of real-valued arrays and saves it."""

from typing import Annotated

import typer

from mvrbm.cli import options as opt
from mvrbm.cli import resuming

_COMPONENTS_HELP = "Number of components, or auto to choose it by the likelihood of held-out samples."
_CONTRASTS_HELP = "Number of contrasts per component."
_GATE_HELP = "Let each coefficient be a mixture of three Gaussians, or a single Gaussian."
_LEVEL_HELP = "Model the mean over the entries of a sample separately. This suits images and signals with an offset."
_SHAPE_HELP = "Shape of a sample, if the input contains rows of features."
_EPOCHS_DEFAULT = "15 to 200, fewer for more samples"


def _parse_components(value: str | int) -> str | int:
    """Parse a number of components, or ``auto``."""
    text = str(value)
    if text == "auto":
        return text
    if not text.isdecimal() or not int(text):
        raise typer.BadParameter(f"expected a positive number or auto, got {text!r}")
    return int(text)


_COMPONENTS = typer.Option(help=_COMPONENTS_HELP, parser=_parse_components, metavar="N|auto")


def mixture(
    source: opt.Input,
    out: opt.ModelOut,
    components: Annotated[str, _COMPONENTS] = "auto",
    contrasts: Annotated[int, typer.Option(min=1, help=_CONTRASTS_HELP)] = 4,
    gate: Annotated[bool | None, typer.Option("--gate/--no-gate", help=_GATE_HELP, show_default="auto")] = None,
    level: Annotated[bool, opt.new(_LEVEL_HELP, "--level")] = False,
    shape: Annotated[opt.Shape | None, opt.new(_SHAPE_HELP, "--shape", **opt.SHAPE)] = None,
    epochs: Annotated[int | None, opt.new("Number of epochs.", "--epochs", default=_EPOCHS_DEFAULT, min=1)] = None,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Fit a density to real-valued samples, with exact likelihoods, and save it to a folder.

    NaN marks missing entries. Use the commands likelihood, score, sample, inpaint and transform with the saved model.
    After Ctrl-C or SIGTERM, the partially trained model is saved.
    """
    opt.check_model_out(out, force)
    from mvrbm import MatrixMixture
    from mvrbm.io.arrays import known_entries

    samples = opt.read(source, data_dir, rows)
    known = known_entries(samples, source)
    model = MatrixMixture(
        components,
        n_contrasts=contrasts,
        gate="auto" if gate is None else gate,
        level=level,
        visible_shape=shape,
        n_epochs=epochs,
        random_state=seed,
        device=device,
        verbose=not quiet,
    )
    seconds, interrupt = resuming.fit(model, samples)
    # Samples with missing entries have no score.
    complete = samples if known is None else samples[known.reshape(len(samples), -1).all(1)]
    scored = "the" if len(complete) == len(samples) else f"{len(complete):,} complete"
    result = {
        "model": str(model.save(out, overwrite=True)),
        "log_likelihood": model.score(complete) if len(complete) else None,
        "components": model.n_components_,
        "gate": model.unit_.gate,
        "parameters": model.n_parameters_,
        "epochs": len(model.history_),
        "seconds": round(seconds, 3),
        "interrupted": model.interrupted_,
    }
    rows_shown = [
        ("model", result["model"]),
        ("components", f"{result['components']}, {'with' if result['gate'] else 'without'} gates"),
        ("parameters", f"{result['parameters']:,}"),
        ("epochs", f"{result['epochs']} in {seconds:.1f} s"),
    ]
    if len(complete):
        shown = f"{result['log_likelihood']:.4f} nats"
        rows_shown.insert(1, (f"mean log-likelihood of {scored} training samples", shown))
    opt.show(result, as_json, opt.table(rows_shown))
    if interrupt is not None:
        raise opt.Interrupted(
            f"interrupted after {result['epochs']} epochs; {out} contains the model so far", interrupt
        )
