"""The command `impute`: learn from data with missing entries, and fill them in."""

from pathlib import Path
from typing import Annotated, Any

from mvrbm.cli import options as opt

_OUT_HELP = "A .npy file, an image for a contact sheet, or, for a table, a .csv file."
_TRAIN_HELP = "Data to learn from, in the form of INPUT, with or without missing entries; default: INPUT itself."
_MODEL_HELP = "Use the imputer in this folder instead of training one."
_DEVIATIONS_HELP = "Also write the standard deviation of every missing entry, to a .npy file."
_AXES_HELP = "How many leading axes count samples; default: chosen on hidden entries."


def impute(
    source: opt.Input,
    out: Annotated[Path, opt.argument("OUT", _OUT_HELP)],
    train: Annotated[str | None, opt.new(_TRAIN_HELP)] = None,
    model_folder: Annotated[Path | None, opt.new(_MODEL_HELP, "--model")] = None,
    save: Annotated[Path | None, opt.new("Folder to save the trained imputer in.")] = None,
    deviations: Annotated[Path | None, opt.new(_DEVIATIONS_HELP)] = None,
    sample_axes: Annotated[int | None, opt.new(_AXES_HELP, min=1)] = None,
    epochs: Annotated[int | None, opt.new("Number of epochs; default: 3,000 to 6,000 updates.", min=1)] = None,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Fill in missing entries (NaN; empty fields of tables) with their means given the known ones."""
    from mvrbm.io.atomic import check_output, replace_file

    opt.check_not_training(model_folder, train=train, save=save, sample_axes=sample_axes, epochs=epochs)
    tables = out.suffix == ".csv"
    if tables:
        check_output(out, force)
    else:
        opt.check_out(out, force)
    if deviations is not None:
        opt.check_out(deviations, force, images=False)
    if save is not None:
        opt.check_model_out(save, force)
    samples = opt.chosen(_read(source, data_dir, tables), rows, source)

    def trained() -> Any:
        import mvrbm

        return mvrbm.MVRBMImputer(
            sample_axes="auto" if sample_axes is None else sample_axes,
            n_epochs=epochs,
            random_state=seed,
            device=device,
            verbose=int(not quiet),
        ).fit(samples if train is None else _read(train, data_dir, tables))

    imputer = opt.trained_or_loaded(trained, save, model_folder, device, "standard_deviation")
    if tables:
        imputer.set_output(transform="pandas")
    elif rows is None:
        samples = samples[opt.tiles(None, out, len(samples)) or slice(None)]
    filled, count = imputer.transform(samples), _n_missing(samples)
    details: dict[str, Any] = {"missing": count, "n_factors": imputer.n_factors_}
    words = f"{count:,} of {samples.size:,} entries were missing"
    if deviations is not None:
        from mvrbm.io.arrays import write_output

        write_output(deviations, imputer.standard_deviation(samples), force)
        details["deviations"] = str(deviations)
    if tables:
        with replace_file(out) as staging:
            filled.to_csv(staging, index=False)
        opt.show({"out": str(out), **details}, as_json, f"{out}: {words}")
    else:
        opt.write_samples(out, filled, filled.shape[1:], force, as_json, details, words)


def _read(source: str, data_dir: Path | None, table: bool) -> Any:
    """Read an array, or a table whose columns may be texts."""
    if not table:
        return opt.read(source, data_dir)
    if Path(source).suffix != ".csv":
        raise ValueError(f"a .csv file can only be made from a .csv file, got {source}")
    from mvrbm.io.tables import read_table

    return read_table(Path(source))


def _n_missing(samples: Any) -> int:
    import numpy as np

    return int(samples.isna().sum().sum()) if hasattr(samples, "isna") else int(np.isnan(samples).sum())
