"""The command `outliers`: learn what is normal, score samples, and show where they are unusual."""

import sys
from pathlib import Path
from typing import Annotated, Any

from mvrbm.cli import options as opt

_TRAIN_HELP = "Normal samples to learn from, in the form of INPUT; default: INPUT itself."
_MODEL_HELP = "Use the detector in this folder instead of training one."
_SAVE_HELP = "Folder to save the trained detector in."
_MAPS_HELP = (
    "Also write how unlikely each entry is given the rest: a .npy file, or an image that shows each sample and its map "
    "to the right, in the order of the printed list, the most unusual one first; at most 100."
)
_SHARE_HELP = "Share of outliers in the training data; default: outliers are beyond Tukey's fence."
_MOST_SHOWN = 10


def outliers(
    source: opt.Input,
    out: opt.ArrayOut,
    train: Annotated[str | None, opt.new(_TRAIN_HELP)] = None,
    model_folder: Annotated[Path | None, opt.new(_MODEL_HELP, "--model")] = None,
    save: Annotated[Path | None, opt.new(_SAVE_HELP)] = None,
    maps: Annotated[Path | None, opt.new(_MAPS_HELP)] = None,
    contamination: Annotated[float | None, opt.new(_SHARE_HELP, min=0, max=0.5)] = None,
    epochs: Annotated[int | None, opt.new("Number of epochs; default: about 3,000 updates.", min=1)] = None,
    rows: opt.Rows = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    data_dir: opt.DataDir = None,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Find unusual samples: write a score for each, negative for outliers, and list the most unusual ones."""
    opt.check_not_training(model_folder, train=train, save=save, contamination=contamination, epochs=epochs)
    opt.check_out(out, force, images=False)
    if maps is not None:
        opt.check_out(maps, force)
    if save is not None:
        opt.check_model_out(save, force)
    samples = opt.read(source, data_dir, rows)

    def trained() -> Any:
        import mvrbm

        return mvrbm.MVRBMOutlierDetector(
            contamination="auto" if contamination is None else contamination,
            n_epochs=epochs,
            random_state=seed,
            device=device,
            verbose=int(not quiet and sys.stderr.isatty()),  # a bar is unreadable in a file or a pipe
        ).fit(samples if train is None else opt.read(train, data_dir))

    detector = opt.trained_or_loaded(trained, save, model_folder, device, "explain")
    scores = detector.decision_function(samples)
    order = [int(row) for row in scores.argsort()]
    count = int((scores < 0).sum())
    most_unusual = {row: round(float(scores[row]), 4) for row in order[:_MOST_SHOWN]}
    listed = ", ".join(f"{row} ({score:g})" for row, score in most_unusual.items())
    words = f"{count:,} of {len(scores):,} samples are outliers; lowest scores: {listed}"
    details = {"outliers": count, "most_unusual": most_unusual}
    if maps is not None:
        from mvrbm.io.arrays import write_output

        chosen = samples if opt.is_array(maps) else samples[order[: opt.MOST_TILES]]
        found = detector.explain(chosen).reshape(len(chosen), *detector.visible_shape_)
        write_output(maps, found if opt.is_array(maps) else _pairs(chosen.reshape(found.shape), found), force)
        details["maps"] = str(maps)
    opt.write_samples(out, scores, (), force, as_json, details, words)


def _pairs(samples: Any, maps: Any) -> Any:
    """Return pictures of samples, each with its map to the right. Smallest values are black, as missing ones are."""
    import numpy as np

    from mvrbm.io.arrays import as_pictures

    pictures = []
    for part in map(as_pictures, (samples, maps)):
        values = part.astype(np.float64)
        low, high = np.nanmin(values), np.nanmax(values)
        pictures.append(np.nan_to_num((values - low) / (high - low or 1.0)))
    return np.concatenate([pictures[0], np.full_like(pictures[0][..., :1], 0.5), pictures[1]], 2)
