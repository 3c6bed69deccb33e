"""The ``mvrbm outliers`` command, which trains an outlier detector, scores samples and locates unusual entries."""

import contextlib
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mvrbm.cli import options as opt

_TRAIN_HELP = "Normal samples to train on, in the same format as INPUT."
_MODEL_HELP = "Use the saved detector in this folder instead of training one."
_MAPS_HELP = (
    "Also write maps that show how unlikely each entry is given the others. A .npy file contains one map per sample. "
    "An image shows each sample next to its map, starting with the most unusual samples."
)
_EPOCHS_HELP = "Also train a machine for this number of epochs."
_SHARE_HELP = "Fraction of outliers in the training data, above 0 and below 0.5."
_SHARE_DEFAULT = "2% of new normal samples are outliers"
# Number of the most unusual samples to list.
_MOST_SHOWN = 10
# Percentage of the entries of all maps in a contact sheet that are not white.
_NOT_WHITE = 99
# Minimum length in pixels of the shorter side of a sample in a contact sheet. Smaller samples are enlarged, unless the
# longer side of a sample and its map would exceed a limit.
_SHORTEST_SIDE = 16
_LONGEST_SIDE = 2000


def _parse_share(value: str | float) -> float:
    """Parse a fraction above 0 and below 0.5. The bounds of typer's options are inclusive."""
    with contextlib.suppress(ValueError):
        if 0 < float(value) < 0.5:
            return float(value)
    raise typer.BadParameter(f"expected a number above 0 and below 0.5, got '{value}'")


_SHARE = opt.new(_SHARE_HELP, default=_SHARE_DEFAULT, parser=_parse_share, metavar="FRACTION")


def outliers(
    source: opt.Input,
    out: opt.ArrayOut,
    train: Annotated[str | None, opt.new(_TRAIN_HELP, default="INPUT")] = None,
    model_folder: Annotated[Path | None, opt.new(_MODEL_HELP, "--model")] = None,
    save: opt.SaveModel = None,
    maps: Annotated[Path | None, opt.new(_MAPS_HELP)] = None,
    contamination: Annotated[float | None, _SHARE] = None,
    epochs: Annotated[int | None, opt.new(_EPOCHS_HELP, default="no machine", min=1)] = None,
    dayfirst: opt.DayFirst = None,
    rows: opt.Rows = None,
    columns: opt.Columns = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Find unusual samples.

    The command writes one score per sample and lists the most unusual samples. Outliers have negative scores.
    """
    settings = {"contamination": contamination, "epochs": epochs, "day_first": dayfirst}
    opt.check_not_training(model_folder, train=train, save=save, **settings)
    opt.check_out(out, force, images=False)
    if maps is not None:
        opt.check_out(maps, force)
    opt.check_columns(columns, maps)
    if save is not None:
        opt.check_model_out(save, force)
    opt.check_different({"OUT": out, "--maps": maps, "--save": save})
    from mvrbm.io.arrays import known_entries

    detector = None if model_folder is None else opt.load_model(model_folder, device, "explain")
    samples, training = _read(source, train, data_dir, rows, detector)
    if train is not None:
        opt.check_same_size(samples, training, source, train)
    is_mixed = hasattr(samples, "iloc")
    if not is_mixed:
        known_entries(samples, source)  # raises an error if an entry is infinite
        opt.check_absent("requires a table with text columns as INPUT", day_first=dayfirst)
    if maps is not None:
        _check_maps(maps, samples, source, training.shape[1:] if detector is None else detector.visible_shape_)

    def train_detector() -> Any:
        import mvrbm

        detector = mvrbm.MVRBMOutlierDetector(
            contamination="auto" if contamination is None else contamination,
            n_epochs=epochs,
            dayfirst=dayfirst,
            random_state=seed,
            device=device,
            verbose=int(not quiet and sys.stderr.isatty()),  # a progress bar would clutter a log file
        )
        with warnings.catch_warnings():
            # The command reports these columns itself.
            warnings.filterwarnings("ignore", message="columns .* are excluded from the model")
            return detector.fit(training)

    if detector is None:
        detector = train_detector()
        if save is not None:
            detector.save(save, overwrite=True)
    scores = detector.decision_function(samples)
    order = [int(row) for row in scores.argsort()]
    count = int((scores < 0).sum())
    most_unusual = {row: round(float(scores[row]), 4) for row in order[:_MOST_SHOWN]}
    details: dict[str, Any] = {"outliers": count, "most_unusual": most_unusual}
    treatment = _treatment_of_columns(samples, detector.encoding_) if is_mixed else {}
    details |= treatment
    if maps is not None:
        _write_maps(maps, detector, samples, order, force, columns)
        details["maps"] = str(maps)
    listed = ", ".join(f"{row} ({score:g})" for row, score in most_unusual.items())
    words = f"{count:,} of {len(scores):,} samples are outliers; lowest scores: {listed}"
    words += "".join(f"; {what}: {', '.join(names)}" for what, names in treatment.items() if names)
    opt.write_samples(out, scores, (), force, as_json, details, words)


def _read(source: str, train: str | None, data_dir: Path | None, rows: slice | None, detector: Any) -> tuple[Any, Any]:
    """Read the samples to score and the samples to train on, which are the same if `train` is None.

    If any table has text columns, or if the training data of `detector` (None if there is none yet) had, tables are
    read as data frames, and text columns are treated as categorical. Otherwise, tables are read as arrays. Columns
    that are text in the training data are read as text.
    """
    training = None if train is None else _read_frame(train)
    text = opt.text_columns_of_table(training) if detector is None else opt.text_columns_of(detector)
    samples = _read_frame(source, text)
    is_mixed = detector is not None and detector.encoding_.is_mixed
    if not is_mixed and not any(_text_columns(frame) for frame in (samples, training)):
        samples, training = _numbers(samples, source), _numbers(training, train)
    samples = opt.read(source, data_dir, rows) if samples is None else opt.chosen(samples, rows, source)
    if train is None:
        return samples, samples
    return samples, opt.read(train, data_dir) if training is None else training


def _read_frame(source: str, text: Sequence[str] = ()) -> Any:
    """Read a table into a data frame, or return None if the source is not a table.

    `text` contains names of columns to read as text.
    """
    from mvrbm.io.arrays import split_key
    from mvrbm.io.tables import TABLES, read_table

    path, columns = split_key(source)
    return read_table(path, columns, text=text) if path.name.endswith(TABLES) and path.exists() else None


def _numbers(frame: Any, source: str | None) -> Any:
    """Convert a table without text columns to an array, or return None if the table is None."""
    from mvrbm.io.tables import table_samples

    return None if frame is None else table_samples(frame, Path(str(source)))


def _text_columns(samples: Any) -> list[str]:
    """Return the names of the text columns of a data frame, or an empty list for other samples."""
    from mvrbm.io.tables import text_columns

    return text_columns(samples) if hasattr(samples, "iloc") else []


def _treatment_of_columns(table: Any, encoding: Any) -> dict[str, list[str]]:
    """Return the names of the columns that are not numeric for the model, grouped by how they were treated."""
    return {
        "categorical columns": list(table.columns[list(encoding.categories)]),
        "columns of dates": list(table.columns[list(encoding.dates)]),
        "columns not used because their texts differ in most rows": list(table.columns[encoding.copied]),
    }


def _check_maps(out: Path, samples: Any, source: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError if `out` is an image but the samples, of the given shape each, are not images."""
    if not hasattr(samples, "iloc"):
        opt.check_pictures(out, shape)
    elif not opt.is_array(out):
        raise ValueError(f"--maps {out} must be a .npy file because {source} has text columns")


def _write_maps(out: Path, detector: Any, samples: Any, order: list[int], force: bool, columns: int | None) -> None:
    """Write the maps of all samples to a .npy file, or the maps of the first samples in `order` to an image."""
    from mvrbm.io.arrays import write_output

    explained = samples if opt.is_array(out) else samples[order[: opt.MOST_TILES]]
    found = detector.explain(explained)
    if not hasattr(explained, "iloc"):
        found = found.reshape(len(explained), *detector.visible_shape_)
    shown = found
    if not opt.is_array(out):
        shown = _side_by_side(explained.reshape(found.shape), found)
        n, height, width = shown.shape
        columns = columns or math.ceil(math.sqrt(n * (height + 1) / (width + 1)))  # a sheet as wide as high
    write_output(out, shown, force, columns=columns)


def _side_by_side(samples: Any, maps: Any) -> Any:
    """Return images that show each sample to the left of its map, separated by a gray line.

    Small images are enlarged by an integer factor.
    """
    import numpy as np

    left = _stretched(samples)
    right = _stretched(maps, _NOT_WHITE)
    line = np.full_like(left[..., :1], 0.5)
    pairs = np.concatenate([left, line, right], 2)
    times = max(1, min(-(-_SHORTEST_SIDE // min(left.shape[1:])), _LONGEST_SIDE // max(pairs.shape[1:])))
    return pairs.repeat(times, 1).repeat(times, 2)


def _stretched(samples: Any, percentage: float = 100) -> Any:
    """Convert samples to images and rescale their values to [0, 1]. Missing entries become black.

    The values above the given percentage of all values become white.
    """
    import numpy as np

    from mvrbm.io.arrays import as_pictures

    values = as_pictures(samples).astype(np.float64)
    low = np.nanmin(values)
    high = np.nanpercentile(values, percentage)
    return np.nan_to_num((values - low) / (high - low or 1.0)).clip(max=1)
