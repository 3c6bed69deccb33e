"""The ``mvrbm impute`` command, which trains a model on data with missing entries and fills in those entries."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from mvrbm.cli import options as opt

_OUT_HELP = "A .npy file, an image file for a contact sheet, or a .csv or .tsv file if INPUT is a table."
_TRAIN_HELP = "Training data, in the same format as INPUT. It may have missing entries too."
_MODEL_HELP = "Use the saved imputer in this folder instead of training one."
_DEVIATIONS_HELP = "Also write the standard deviation of each missing entry to this .npy file."
_CATEGORICAL_HELP = "Numeric columns to treat as categorical. Text columns are always categorical."
_CLIP_HELP = "Whether to limit filled-in values to the range of the training data."
_AXES_HELP = "Number of leading axes that index samples."
_AXES_DEFAULT = "chosen on held-out entries"
# Maximum number of distinct integers in a numeric column that is reported because it may be categorical.
_FEW_VALUES = 10
# Maximum number of digits in a 64-bit integer. Columns with longer integers are treated as text.
_MOST_DIGITS = 20
# Suffixes of OUT if INPUT is a table.
_TABLES = (".csv", ".tsv")


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
    missing too. All other fields of a table are written as they are. A column without known entries, or with text that
    differs in most rows, stays empty.
    """
    settings = {
        "categorical": categorical,
        "sample_axes": sample_axes,
        "epochs": epochs,
        "day_first": dayfirst,
        "clip": clip,
    }
    opt.check_not_training(model_folder, train=train, save=save, **settings)
    is_table = out.suffix.lower() in _TABLES
    if categorical is not None and not is_table:
        raise ValueError(f"--categorical requires a table as INPUT and a .csv or .tsv file as OUT, got {out}")
    if dayfirst is not None and not is_table:
        opt.check_absent("requires a table as INPUT and a .csv or .tsv file as OUT", day_first=dayfirst)
    _check_outputs(out, deviations, save, force)
    opt.check_columns(columns, out)
    imputer = None if model_folder is None else opt.load_model(model_folder, device, "standard_deviation")
    training = None if train is None else _read(train, data_dir, is_table, categorical)
    text = opt.text_columns_of_table(training) if imputer is None else opt.text_columns_of(imputer)
    samples = opt.chosen(_read(source, data_dir, is_table, categorical, text), rows, source)
    written = opt.chosen(_read_text(source), rows, source) if is_table else None
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
        with warnings.catch_warnings():
            # The command reports these columns itself.
            warnings.filterwarnings("ignore", message="columns .* are (excluded from the model|dropped)")
            return imputer.fit(samples if training is None else training)

    if imputer is None:
        imputer = train_imputer()
        if save is not None:
            imputer.save(save, overwrite=True)
    if not is_table and rows is None:
        samples = opt.chosen(samples, opt.tiles(None, out, len(samples)), source)
    details: dict[str, Any] = {"missing": _n_missing(samples), "n_factors": imputer.n_factors_}
    if deviations is not None:
        from mvrbm.io.arrays import write_output

        found = _with_empty_columns(imputer.standard_deviation(samples), imputer.encoding_, has_one_hot=True)
        write_output(deviations, found, force)
        details["deviations"] = str(deviations)
    if is_table:
        _write_table(out, imputer, samples, written, as_json, details)
    else:
        _write_array(out, imputer, samples, force, as_json, details, columns)


def _write_array(
    out: Path, imputer: Any, samples: Any, force: bool, as_json: bool, details: dict[str, Any], columns: int | None
) -> None:
    """Fill in missing entries of an array and write it to a file."""
    from mvrbm.io.formats import some_of

    filled = imputer.transform(samples)
    if filled.ndim == 2:
        filled = _with_empty_columns(filled, imputer.encoding_)
    left = _n_missing(filled)
    details |= {"filled": details["missing"] - left, "left_empty": left}
    empty = (~imputer.encoding_.returned).nonzero()[0]
    words = _summary(details, samples.size, f"{some_of(map(str, empty))} without known entries")
    opt.write_samples(out, filled, filled.shape[1:], force, as_json, details, words, columns)


def _summary(details: dict[str, Any], n_entries: int, where: str) -> str:
    """Describe how many entries were missing, filled in and left empty. `where` describes the empty columns."""
    words = f"{details['missing']:,} of {n_entries:,} entries were missing: {details['filled']:,} filled in"
    left = details["missing"] - details["filled"]
    return f"{words}, {left:,} left empty in columns {where}" if left else words


def _with_empty_columns(rows: Any, encoding: Any, *, has_one_hot: bool = False) -> Any:
    """Insert columns of NaN for the columns that the imputer drops because they have no known entries.

    If `has_one_hot` is True, `rows` has one column per category of a categorical column.
    """
    import numpy as np

    returned = encoding.returned
    if returned.all():
        return rows
    widths = [len(encoding.categories.get(column, [0])) if has_one_hot else 1 for column in range(len(returned))]
    starts = np.cumsum([0, *(width * kept for width, kept in zip(widths, returned, strict=True))])
    return np.insert(rows, starts[:-1][~returned], np.nan, axis=1)


def _check_outputs(out: Path, deviations: Path | None, save: Path | None, force: bool) -> None:
    """Raise ValueError if any output cannot be written. This check runs before training starts."""
    from mvrbm.io.atomic import check_output
    from mvrbm.io.formats import IMAGE_SUFFIXES

    check_output(out, force, (".npy", *_TABLES, *IMAGE_SUFFIXES))
    if deviations is not None:
        opt.check_out(deviations, force, images=False)
    if save is not None:
        opt.check_model_out(save, force)
    opt.check_different({"OUT": out, "--deviations": deviations, "--save": save})


def _read(source: str, data_dir: Path | None, is_table: bool, categorical: str | None, text: Sequence[str] = ()) -> Any:
    """Read an array or a table.

    `categorical` lists the columns of a table to treat as categorical, as in ``"a,b"``, and `text` the columns to read
    as text.
    """
    from mvrbm.io.arrays import known_entries, split_key

    if not is_table:
        samples = opt.read(source, data_dir)
        known_entries(samples, source)  # raises an error if an entry is infinite
        return samples
    from mvrbm.io.tables import TABLES, read_table

    path, columns = split_key(source)
    if not path.name.endswith(TABLES):
        raise ValueError(f"a .csv or .tsv file as OUT requires a table as INPUT ({', '.join(TABLES)}), got {source}")
    frame = read_table(path, columns, text=text)
    names = [] if categorical is None else categorical.split(",")
    unknown = [name for name in names if name not in frame.columns]
    if unknown:
        raise ValueError(f"--categorical names the column '{unknown[0]}', but {source} has only {list(frame.columns)}")
    # pandas reads whole numbers as floats if some are missing.
    return frame.assign(**{name: frame[name].convert_dtypes().astype("category") for name in names})


def _read_text(source: str) -> Any:
    """Read the text of a table."""
    from mvrbm.io.arrays import split_key
    from mvrbm.io.tables import read_table_text

    return read_table_text(*split_key(source))


def _write_table(out: Path, imputer: Any, table: Any, text: Any, as_json: bool, details: dict[str, Any]) -> None:
    """Fill in missing entries of a table, write the table to a file, and report how columns were treated.

    The missing entries are replaced in `text`. All other fields are written unchanged.
    """
    import numpy as np

    from mvrbm.io.atomic import replace_file
    from mvrbm.io.csv_text import quoted
    from mvrbm.io.formats import some_of

    if len(text) != len(table):
        raise ValueError(
            f"the table has {len(table):,} rows, but {len(text):,} rows of text; check its quotation marks"
        )
    imputer.set_output(transform="pandas")
    filled = imputer.transform(table)
    encoding = imputer.encoding_
    missing = table.isna()
    has_commas = _has_decimal_commas(table, text)
    for name in filled.columns:
        place = table.columns.get_loc(name)
        rows = np.flatnonzero(missing[name] & filled[name].notna())
        values = filled[name].iloc[rows].astype(str)
        if place in encoding.categories:
            fields = _categories_as_fields(values, table[name], text, place)
        else:
            has_points = place in encoding.dates or any("." in field for field in text.column(place))
            if has_commas and not has_points:
                values = values.str.replace(".", ",")
            fields = [quoted(value, text.separator) for value in values]
        for row, field in zip(rows.tolist(), fields, strict=True):
            text.replace(row, place, field)
    separator = text.separator
    if (out.suffix.lower() == ".tsv") != (separator == "\t"):
        separator = "\t" if out.suffix.lower() == ".tsv" else ";" if has_commas else ","
    with replace_file(out) as file:
        text.write(file, separator)
    n_left = missing.sum() - (missing & filled.reindex(columns=table.columns).notna()).sum()
    left = {str(name): int(n) for name, n in n_left.items() if n}
    details |= {"filled": details["missing"] - sum(left.values()), "left_empty": left}
    treatment = _treatment_of_columns(table, encoding)
    for reason in _reasons_for_text(table, text, encoding):
        opt.note(reason)
    text_markers = _columns_with_markers(table)
    if text_markers:
        opt.note(
            f"columns {', '.join(text_markers)} contain text such as NA or None, which is treated as a category; leave "
            "a field empty to mark it as missing"
        )
    lines = [f"{out}: {_summary(details, table.size, some_of(left))}"]
    lines += [f"{what}: {', '.join(names)}" for what, names in treatment.items() if names]
    opt.show({"out": str(out), **details, **treatment}, as_json, "\n".join(lines))


def _categories_as_fields(values: Any, column: Any, text: Any, place: int) -> list[str]:
    """Return the fields for categories, with the spelling of the file, such as "true" for True or "07" for 7."""
    from mvrbm.io.csv_text import quoted

    known = column.notna().to_numpy().nonzero()[0].tolist()
    spelling = {str(column.iloc[row]): text.field(row, place) for row in known}
    return [spelling.get(value, quoted(value, text.separator)) for value in values]


def _has_decimal_commas(table: Any, text: Any) -> bool:
    """Return whether any column of numbers has decimal commas."""
    places = [place for place, dtype in enumerate(table.dtypes) if dtype.kind == "f"]
    return any("," in field for place in places for field in text.column(place))


def _reasons_for_text(table: Any, text: Any, encoding: Any) -> list[str]:
    """Return a note for each column that is treated as text although more than half of its values are numbers."""
    from mvrbm.io.csv_text import is_number

    notes = []
    for place in [*encoding.copied, *encoding.categories]:
        known = table.iloc[:, place].dropna()
        if table.dtypes.iloc[place].kind != "O" or table.dtypes.iloc[place].name == "category":
            continue
        is_text = known.astype(str).map(
            lambda value: not is_number(value, text.separator) or (value.isdecimal() and len(value) > _MOST_DIGITS)
        )
        if 0 < is_text.sum() < len(known) / 2:
            label = is_text.idxmax()
            line = text.line(table.index.get_loc(label))
            notes.append(
                f"column '{known.name}' is text because of '{known[label]}' in line {line}; leave a field empty to "
                "mark it as missing"
            )
    return notes


def _columns_with_markers(table: Any) -> list[str]:
    """Return the names of text columns with a marker that means a missing entry in columns of numbers."""
    from mvrbm.io.tables import MISSING, text_columns

    return [name for name in text_columns(table) if table[name].isin(MISSING - {""}).any()]


def _treatment_of_columns(table: Any, encoding: Any) -> dict[str, list[str]]:
    """Return the names of the columns to report, grouped by how they were treated."""
    numeric = set(table.select_dtypes("number").columns)
    kept = [name for name in table.columns[encoding.kept] if name in numeric]
    return {
        "categorical columns": list(table.columns[list(encoding.categories)]),
        "columns of dates": list(table.columns[list(encoding.dates)]),
        "columns without known entries": list(table.columns[~encoding.returned]),
        "columns not used because their texts differ in most rows (see --categorical)": list(
            table.columns[encoding.copied]
        ),
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
