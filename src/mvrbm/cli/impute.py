"""The command `impute`: learn from data with missing entries, and fill them in."""

from pathlib import Path
from typing import Annotated, Any

from mvrbm.cli import options as opt

_OUT_HELP = "A .npy file, an image for a contact sheet, or, for a table, a .csv file."
_TRAIN_HELP = "Data to learn from, in the form of INPUT, with or without missing entries; default: INPUT itself."
_MODEL_HELP = "Use the imputer in this folder instead of training one."
_DEVIATIONS_HELP = "Also write the standard deviation of every missing entry, to a .npy file."
_CATEGORICAL_HELP = "Columns of numbers that are categories, NAME[,NAME]; columns of texts always are."
_FEW = 10  # whole numbers of so few kinds may be codes
_AXES_HELP = "How many leading axes count samples; default: chosen on hidden entries."


def impute(
    source: opt.Input,
    out: Annotated[Path, opt.argument("OUT", _OUT_HELP)],
    train: Annotated[str | None, opt.new(_TRAIN_HELP)] = None,
    model_folder: Annotated[Path | None, opt.new(_MODEL_HELP, "--model")] = None,
    save: Annotated[Path | None, opt.new("Folder to save the trained imputer in.")] = None,
    deviations: Annotated[Path | None, opt.new(_DEVIATIONS_HELP)] = None,
    categorical: Annotated[str | None, opt.new(_CATEGORICAL_HELP)] = None,
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

    settings = {"categorical": categorical, "sample_axes": sample_axes, "epochs": epochs}
    opt.check_not_training(model_folder, train=train, save=save, **settings)
    tables = out.suffix == ".csv"
    if categorical is not None and not tables:
        raise ValueError(f"--categorical is for tables, from a table to a .csv file, got {out}")
    if tables:
        check_output(out, force)
    else:
        opt.check_out(out, force)
    if deviations is not None:
        opt.check_out(deviations, force, images=False)
    if save is not None:
        opt.check_model_out(save, force)
    samples = opt.chosen(_read(source, data_dir, tables, categorical), rows, source)

    def trained() -> Any:
        import mvrbm

        return mvrbm.MVRBMImputer(
            sample_axes="auto" if sample_axes is None else sample_axes,
            n_epochs=epochs,
            random_state=seed,
            device=device,
            verbose=int(not quiet),
        ).fit(samples if train is None else _read(train, data_dir, tables, categorical))

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
        notes = _notes(samples, filled)
        lines = [f"{out}: {words}", *(f"{what}: {', '.join(names)}" for what, names in notes.items() if names)]
        opt.show({"out": str(out), **details, **notes}, as_json, "\n".join(lines))
    else:
        opt.write_samples(out, filled, filled.shape[1:], force, as_json, details, words)


def _read(source: str, data_dir: Path | None, table: bool, categorical: str | None) -> Any:
    """Read an array, or a table whose columns may be texts, or categories if they are named in ``"a,b"``."""
    if not table:
        return opt.read(source, data_dir)
    from mvrbm.io.arrays import split_key
    from mvrbm.io.tables import TABLES, read_table

    path, columns = split_key(source)
    if not path.name.endswith(TABLES):
        raise ValueError(f"a .csv file can only be made from a table ({', '.join(TABLES)}), got {source}")
    frame, names = read_table(path, columns), [] if categorical is None else categorical.split(",")
    if unknown := [name for name in names if name not in frame.columns]:
        raise ValueError(f"--categorical names the column '{unknown[0]}', but {source} has only {list(frame.columns)}")
    # Whole numbers are read as floats where some are missing.
    return frame.assign(**{name: frame[name].convert_dtypes().astype("category") for name in names})


def _notes(table: Any, filled: Any) -> dict[str, list[str]]:
    """Return names of columns that a user may have expected otherwise, by what was made of them."""
    numbers = table.select_dtypes("number").columns
    whole = [
        name
        for name in numbers.intersection(filled.columns, sort=False)
        if 1 < table[name].nunique() <= min(_FEW, len(table) // 5) and bool((table[name].dropna() % 1 == 0).all())
    ]
    return {
        "columns of categories": list(table.columns.difference(numbers, sort=False)),
        "columns left out, without any known entry": list(table.columns.difference(filled.columns, sort=False)),
        "columns of few whole numbers, taken as numbers (see --categorical)": whole,
    }


def _n_missing(samples: Any) -> int:
    import numpy as np

    return int(samples.isna().sum().sum()) if hasattr(samples, "isna") else int(np.isnan(samples).sum())
