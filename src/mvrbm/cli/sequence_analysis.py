"""The ``mvrbm sequences contacts`` and ``mutations`` commands, which analyze models of aligned sequences."""

from pathlib import Path
from typing import Annotated, Any

from mvrbm.cli import options as opt
from mvrbm.cli.sequences import ModelFolder, TableOut, load_model, write_table

_CONTACTS_PLOT_HELP = "Also draw the contact map (.png, .svg or .pdf)."
_MUTATIONS_PLOT_HELP = "Also draw the effects as a heat map (.png, .svg or .pdf)."
_DISTANCES_HELP = (
    "Distances in a known structure, in angstroms, to measure the precision: lines with two sites (from 1) and their "
    "distance, or a matrix (text or .npy)."
)
_THRESHOLD_HELP = "Distance below which two sites are in contact."
_AVERAGE_HELP = "Sequences to average the couplings over, such as the training sequences."
_SEPARATION_HELP = "Exclude pairs of sites that are at most this far apart along the sequence."
_REFERENCE_HELP = "The sequence to mutate: its letters, or a file whose first sequence is used."
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def contacts(
    model_folder: ModelFolder,
    out: TableOut,
    plot: Annotated[Path | None, opt.new(_CONTACTS_PLOT_HELP, "--plot")] = None,
    distances: Annotated[Path | None, opt.new(_DISTANCES_HELP, "--distances")] = None,
    threshold: Annotated[float | None, opt.new(_THRESHOLD_HELP, "--threshold", default="8.0", min=0)] = None,
    sequences: Annotated[Path | None, opt.new(_AVERAGE_HELP, "--sequences", default="drawn from the model")] = None,
    separation: Annotated[int, opt.new(_SEPARATION_HELP, "--separation", default="4", min=0)] = 4,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Score how likely each pair of sites is in contact, and write the pairs to a table, best first."""
    _check_outputs(out, plot, force)
    if distances is None:
        opt.check_absent("has no effect without --distances", threshold=threshold)
    threshold = 8.0 if threshold is None else threshold
    model = load_model(model_folder, device)
    from mvrbm.io.distances import read_distances
    from mvrbm.sequences import contact_map, contact_precision, plot_contact_map, ranked_pairs

    if separation >= model.n_sites_ - 1:
        raise ValueError(
            f"--separation {separation} excludes all pairs of sites because the sequences have {model.n_sites_:,} sites"
        )
    known = None if distances is None else read_distances(distances, model.n_sites_)
    scores = contact_map(model, sequences)
    first, second = ranked_pairs(scores, separation=separation)
    header = ["site_1", "site_2", "score"]
    rows = [[i + 1, j + 1, f"{scores[i, j]:.6g}"] for i, j in zip(first.tolist(), second.tolist(), strict=True)]
    if known is not None:
        header.append("distance")
        for row, distance in zip(rows, known[first, second].tolist(), strict=True):
            row.append("" if distance != distance else f"{distance:g}")
    write_table(out, [header, *rows])
    result: dict[str, Any] = {"out": str(out), "pairs": len(rows)}
    text = f"{out}: {len(rows):,} pairs of sites"
    if known is not None:
        precision = contact_precision(scores, known, threshold=threshold, separation=separation)
        sites = len(scores)
        marks = {"L/2": sites // 2, "L": sites, "2L": 2 * sites}
        found = {name: float(precision[n - 1]) for name, n in marks.items() if 1 <= n <= len(precision)}
        result["precision"] = found
        text += "".join(f"\nprecision at {name:4s}{value:.2f}" for name, value in found.items())
    if plot is not None:
        settings = {"threshold": threshold, "separation": separation}
        _save_plot(plot, plot_contact_map, scores, known, **settings)
        result["plot"] = str(plot)
    opt.show(result, as_json, text)


def mutations(
    model_folder: ModelFolder,
    out: TableOut,
    reference: Annotated[str, opt.new(_REFERENCE_HELP, "--reference", metavar="LETTERS|FASTA")],
    plot: Annotated[Path | None, opt.new(_MUTATIONS_PLOT_HELP, "--plot")] = None,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Write the change in the log-likelihood for each single mutation of a sequence to a table."""
    _check_outputs(out, plot, force)
    model = load_model(model_folder, device)
    from mvrbm.sequences import mutation_scan, plot_mutations

    letters = model.alphabet_.letters
    sequence = _reference(model, reference)
    scan = mutation_scan(model, sequence)
    rows = [
        [f"{old}{site}{new}", site, old, new, f"{change:.6g}"]
        for site, (old, changes) in enumerate(zip(sequence, scan.tolist(), strict=True), start=1)
        for new, change in zip(letters, changes, strict=True)
        if new != old
    ]
    write_table(out, [["mutation", "site", "from", "to", "change"], *rows])
    if plot is not None:
        _save_plot(plot, plot_mutations, scan, sequence, letters)
    result = {"out": str(out), "mutations": len(rows), "reference": sequence, "plot": plot and str(plot)}
    opt.show(result, as_json, f"{out}: {len(rows):,} mutations of {sequence}")


def _reference(model: Any, reference: str) -> str:
    """Return the reference sequence, read from a file if there is one with that name."""
    path = Path(reference)
    if not path.is_file() and ("/" in reference or "." in path.name.rstrip(".")):
        raise ValueError(f"--reference {reference}: no such file")
    alignment = model.align(path if path.is_file() else [reference])
    if len(alignment) > 1:
        named = f" ({alignment.names[0]})" if alignment.names else ""
        opt.note(f"{reference} contains {len(alignment):,} sequences; the first one{named} is used")
    found: str = alignment.sequences[0]
    return found


def _check_outputs(out: Path, plot: Path | None, force: bool) -> None:
    from mvrbm.io.atomic import check_output

    check_output(out, force, [".csv"])
    if plot is not None:
        check_output(plot, force, _PLOT_SUFFIXES)


def _save_plot(path: Path, draw: Any, *arguments: Any, **settings: Any) -> None:
    """Draw a plot without a window, and save it."""
    from mvrbm.extras import require
    from mvrbm.io.atomic import replace_file

    require("matplotlib", "a plot", "demo").use("agg")
    axes = draw(*arguments, **settings)
    with replace_file(path) as file:
        axes.figure.savefig(file, format=path.suffix[1:].lower(), dpi=150)


#: Name and function of each command, and the arguments for the example in its help text.
COMMANDS: list[tuple[str, Any, str]] = [
    ("contacts", contacts, "model/ contacts.csv --plot map.png"),
    ("mutations", mutations, "model/ scan.csv --reference wild-type.fasta --plot scan.png"),
]
