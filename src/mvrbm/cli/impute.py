"""The ``mvrbm impute`` command, which trains a model on data with missing entries and fills in those entries."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from mvrbm.cli import options as opt

_OUT_HELP = "A .npy file, an image file for a contact sheet, or a .csv file if INPUT is a table."
_TRAIN_HELP = "Training data, in the same format as INPUT. It may have missing entries too."
_MODEL_HELP = "Use the saved imputer in this folder instead of training one."
_DEVIATIONS_HELP = "Also write the standard deviation of each missing entry to this .npy file."
_CATEGORICAL_HELP = "Numeric columns to treat as categorical. Text columns are always categorical."
_CLIP_HELP = "Whether to limit filled-in values to the range of the training data."
_AXES_HELP = "Number of leading axes that index samples."
_AXES_DEFAULT = "chosen on held-out entries"
# Maximum number of distinct integers in a numeric column that is reported because it may be categorical.
_FEW_VALUES = 10


def impute(
    source: opt.Input,
    out: Annotated[Path, opt.argument("OUT", _OUT_HELP)],
    train: Annotated[str | None, opt.new(_TRAIN_HELP, default="INPUT")] = None,
    model_folder: Annotated[Path | None, opt.new(_MODEL_HELP, "--model")] = None,
    save: opt.SaveModel = None,
    deviations: Annotated[Path | None, opt.new(_DEVIATIONS_HELP)] = None,
    categorical: Annotated[str | None, opt.new(_CATEGORICAL_HELP, metavar="NAME[,NAME]")] = None,
    sample_axes: Annotated[int | None, opt.new(_AXES_HELP, default=_AXES_DEFAULT, min=1)] = None,
    epochs: Annotated[int | None, opt.new("Number of epochs.", default="600 to 6,000 updates", min=1)] = None,
    dayfirst: opt.DayFirst = None,
    clip: Annotated[bool | None, opt.new(_CLIP_HELP, "--clip/--no-clip", default="clip")] = None,
    rows: opt.Rows = None,
    columns: opt.Columns = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Fill in missing entries with their expected values given the known entries.

    Missing entries are NaN in arrays and empty fields in tables. In columns of numbers or dates, fields such as NA are
    missing too. All other fields of a table are written as they are.
    """
    settings = {
        "categorical": categorical,
        "sample_axes": sample_axes,
        "epochs": epochs,
        "day_first": dayfirst,
        "clip": clip,
    }
    opt.check_not_training(model_folder, train=train, save=save, **settings)
    is_table = out.suffix == ".csv"
    if categorical is not None and not is_table:
        raise ValueError(f"--categorical requires a table as INPUT and a .csv file as OUT, got {out}")
    if dayfirst is not None and not is_table:
        opt.check_absent("requires a table as INPUT and a .csv file as OUT", day_first=dayfirst)
    _check_outputs(out, deviations, save, force)
    opt.check_columns(columns, out)
    imputer = None if model_folder is None else opt.load_model(model_folder, device, "standard_deviation")
    training = None if train is None else _read(train, data_dir, is_table, categorical)
    text = opt.text_columns_of_table(training) if imputer is None else opt.text_columns_of(imputer)
    samples = opt.chosen(_read(source, data_dir, is_table, categorical, text), rows, source)
    fields = opt.chosen(_fields(source), rows, source) if is_table else None
    if train is not None and not is_table:
        opt.check_same_size(samples, training, source, train)

    def train_imputer() -> Any:
        import mvrbm

        imputer = mvrbm.MVRBMImputer(
            sample_axes="auto" if sample_axes is None else sample_axes,
            n_epochs=epochs,
            clip=clip is not False,
            dayfirst=dayfirst,
            random_state=seed,
            device=device,
            verbose=int(not quiet),
        )
        return imputer.fit(samples if training is None else training)

    if imputer is None:
        imputer = train_imputer()
        if save is not None:
            imputer.save(save, overwrite=True)
    if not is_table and rows is None:
        samples = opt.chosen(samples, opt.tiles(None, out, len(samples)), source)
    count = _n_missing(samples)
    details: dict[str, Any] = {"missing": count, "n_factors": imputer.n_factors_}
    words = f"{count:,} of {samples.size:,} entries were missing"
    if deviations is not None:
        from mvrbm.io.arrays import write_output

        write_output(deviations, imputer.standard_deviation(samples), force)
        details["deviations"] = str(deviations)
    if is_table:
        _write_table(out, imputer, samples, fields, as_json, details, words)
    else:
        filled = imputer.transform(samples)
        opt.write_samples(out, filled, filled.shape[1:], force, as_json, details, words, columns)


def _check_outputs(out: Path, deviations: Path | None, save: Path | None, force: bool) -> None:
    """Raise ValueError if any output cannot be written. This check runs before training starts."""
    from mvrbm.io.atomic import check_output

    if out.suffix == ".csv":
        check_output(out, force)
    else:
        opt.check_out(out, force)
    if deviations is not None:
        opt.check_out(deviations, force, images=False)
    if save is not None:
        opt.check_model_out(save, force)


def _read(source: str, data_dir: Path | None, is_table: bool, categorical: str | None, text: Sequence[str] = ()) -> Any:
    """Read an array or a table.

    `categorical` lists the columns of a table to treat as categorical, as in ``"a,b"``, and `text` the columns to read
    as text.
    """
    if not is_table:
        return opt.read(source, data_dir)
    from mvrbm.io.arrays import split_key
    from mvrbm.io.tables import TABLES, read_table

    path, columns = split_key(source)
    if not path.name.endswith(TABLES):
        raise ValueError(f"a .csv file as OUT requires a table as INPUT ({', '.join(TABLES)}), got {source}")
    frame = read_table(path, columns, text=text)
    names = [] if categorical is None else categorical.split(",")
    unknown = [name for name in names if name not in frame.columns]
    if unknown:
        raise ValueError(f"--categorical names the column '{unknown[0]}', but {source} has only {list(frame.columns)}")
    # pandas reads whole numbers as floats if some are missing.
    return frame.assign(**{name: frame[name].convert_dtypes().astype("category") for name in names})


def _fields(source: str) -> Any:
    """Read the fields of a table as text."""
    from mvrbm.io.arrays import split_key
    from mvrbm.io.tables import read_fields

    return read_fields(*split_key(source))


def _write_table(
    out: Path, imputer: Any, table: Any, fields: Any, as_json: bool, details: dict[str, Any], words: str
) -> None:
    """Fill in missing entries of a table, write the table to a .csv file, and report how columns were treated.

    Known entries are written as they are in `fields`.
    """
    from mvrbm.io.atomic import replace_file

    imputer.set_output(transform="pandas")
    filled = imputer.transform(table)
    kept = list(filled.columns)
    written = filled.astype(object).where(table[kept].isna(), fields[kept])
    with replace_file(out) as file:
        written.to_csv(file, index=False)
    treatment = _treatment_of_columns(table, filled, imputer.encoding_)
    text_markers = _columns_with_markers(table)
    if text_markers:
        opt.note(
            f"columns {', '.join(text_markers)} contain text such as NA or None, which is treated as a category; leave "
            "a field empty to mark it as missing"
        )
    lines = [f"{out}: {words}"]
    lines += [f"{what}: {', '.join(names)}" for what, names in treatment.items() if names]
    opt.show({"out": str(out), **details, **treatment}, as_json, "\n".join(lines))


def _columns_with_markers(table: Any) -> list[str]:
    """Return the names of text columns with a marker that means a missing entry in columns of numbers."""
    from mvrbm.io.tables import MISSING, text_columns

    return [name for name in text_columns(table) if table[name].isin(MISSING - {""}).any()]


def _treatment_of_columns(table: Any, filled: Any, encoding: Any) -> dict[str, list[str]]:
    """Return the names of the columns to report, grouped by how they were treated."""
    numeric = table.select_dtypes("number").columns
    kept = numeric.intersection(filled.columns, sort=False)
    return {
        "categorical columns": list(table.columns[list(encoding.categories)]),
        "columns of dates": list(table.columns[list(encoding.dates)]),
        "columns dropped because no entry is known": list(table.columns.difference(filled.columns, sort=False)),
        "columns with few whole numbers, treated as numeric (see --categorical)": [
            name for name in kept if _may_be_categorical(table[name])
        ],
    }


def _may_be_categorical(column: Any) -> bool:
    few = 1 < column.nunique() <= min(_FEW_VALUES, len(column) // 5)
    return few and bool((column.dropna() % 1 == 0).all())


def _n_missing(samples: Any) -> int:
    import numpy as np

    return int(samples.isna().sum().sum()) if hasattr(samples, "isna") else int(np.isnan(samples).sum())
