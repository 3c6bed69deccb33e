"""The ``mvrbm sequences`` commands that train, sample and score models of aligned sequences.

The commands that analyze a model are in :mod:`mvrbm.cli.sequence_analysis`.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mvrbm.cli import options as opt
from mvrbm.cli import resuming
from mvrbm.cli.inference import Start

_FAMILY_HELP = "Aligned sequences: a FASTA, A2M, A3M or Stockholm file, which may be compressed with gzip."
_ALPHABET_HELP = "protein, rna, dna, or the letters themselves."
_HIDDEN_HELP = "Number of hidden units, or shape of the hidden layer, such as 40x10."
_IDENTITY_HELP = "Sequences that agree at this fraction of the sites share one weight. none: all weights are equal."
_LOG_HELP = "CSV file for metrics of up to 500 sequences, one row per epoch."
_FASTA_HELP = "FASTA file for the new sequences. If the name ends in .gz, the file is compressed."
_FIXED_HELP = "Letters that every sequence must have, and question marks at all other sites, such as 'MK??A'."
_TEMPERATURES_HELP = "Number of temperatures of parallel tempering, which helps chains to move between modes."
_START_HELP = "Initial states of the Gibbs chains."
_NORMALIZE_HELP = "Subtract an estimate of log Z, so that scores are log-likelihoods in nats."

Family = Annotated[Path, opt.argument("FAMILY", _FAMILY_HELP)]
ModelFolder = Annotated[Path, opt.argument("MODEL", "Folder of a model that was trained with `mvrbm sequences train`.")]
TableOut = Annotated[Path, opt.argument("OUT", "A .csv file.")]


def load_model(folder: Path, device: str, seed: int | None = None) -> Any:
    """Load a sequence model and set its random state to `seed`, if given."""
    import mvrbm

    model = mvrbm.load(folder, device)
    if not hasattr(model, "alphabet_"):
        raise ValueError(
            f"{folder} contains a model of class {type(model).__name__}; train a model with mvrbm sequences train"
        )
    return model if seed is None else model.set_params(random_state=seed)


def write_table(out: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write rows to a .csv file."""
    from mvrbm.io.atomic import replace_file

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    with replace_file(out) as file:
        file.write(text.getvalue().encode())


def parse_identity(value: str) -> float | None:
    """Parse a fraction, or ``none``."""
    try:
        found = None if value == "none" else float(value)
    except ValueError:
        found = -1.0
    if found is not None and not 0 <= found <= 1:
        reason = f"expected a fraction from 0 to 1, such as 0.8, or none, got {value!r}"
        raise typer.BadParameter(reason, param_hint="'--identity'")
    return found


def train(
    family: Family,
    out: opt.ModelOut,
    alphabet: Annotated[str | None, opt.new(_ALPHABET_HELP, default="detected")] = None,
    identity: Annotated[str, opt.new(_IDENTITY_HELP, default="0.8", metavar="FRACTION|none")] = "0.8",
    hidden: Annotated[opt.Shape | None, opt.new(_HIDDEN_HELP, **opt.SHAPE)] = None,
    rank: Annotated[int | None, opt.new("Number of Kronecker products in the weights.", min=1)] = None,
    coupling: Annotated[str | None, opt.new("Weight structure, such as kronecker:8 or dense.")] = None,
    epochs: Annotated[int | None, opt.new("Number of epochs.", min=1)] = None,
    batch_size: Annotated[int | None, opt.new("Number of sequences per update.", min=1)] = None,
    learning_rate: Annotated[float | None, opt.new("Learning rate.")] = None,
    chains: Annotated[int | None, opt.new("Number of persistent chains.", min=1)] = None,
    gibbs_steps: Annotated[int | None, opt.new("Number of Gibbs steps per update.", min=1)] = None,
    log: Annotated[Path | None, opt.new(_LOG_HELP)] = None,
    checkpoints: resuming.Folder = None,
    resume: resuming.Resume = False,
    ignore_mismatch: resuming.IgnoreMismatch = False,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Train a model on aligned sequences and save it to a folder.

    Ctrl-C or SIGTERM stops training and saves the model. With --checkpoints, running the same command with --resume
    continues training.
    """
    share = parse_identity(identity)
    run = resuming.Resuming(out, checkpoints, resume, ignore_mismatch, force, log)
    resumed = run.check()
    from mvrbm import SequenceRBM
    from mvrbm.io.alignments import read_alignment
    from mvrbm.training import Checkpoint, CSVLog, Monitor

    settings: dict[str, Any] = {
        "hidden_shape": None if hidden is None else tuple(hidden),
        "rank": rank,
        "coupling": coupling,
        "n_epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "n_chains": chains,
        "gibbs_steps": gibbs_steps,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    model = SequenceRBM(alphabet=alphabet, identity=share, random_state=seed, device=device.value, **given)
    alignment = read_alignment(family, alphabet, unknown=True)
    if not quiet:
        opt.note(f"{len(alignment):,} sequences of {alignment.n_sites:,} sites, letters {alignment.alphabet.letters}")
    callbacks: list[Any] = []
    if log is not None:
        callbacks += [Monitor.on(alignment[:: -(-len(alignment) // 500)].one_hot()), CSVLog(log, overwrite=True)]
    if checkpoints is not None:
        callbacks.append(Checkpoint(checkpoints))
    callbacks += opt.progress_callbacks(quiet)
    with run.training():
        seconds, interrupt = resuming.fit(
            model, alignment, callbacks=callbacks, resume=checkpoints, ignore_mismatch=ignore_mismatch
        )
    model.save(out, overwrite=True)
    result = {
        "model": str(out),
        "sequences": len(alignment),
        "effective_sequences": round(model.n_effective_, 1),
        "sites": model.n_sites_,
        "letters": model.alphabet_.letters,
        "hidden_shape": model.machine_.hidden.shape,
        "parameters": model.n_parameters_,
        "epochs": model.n_epochs_,
        "updates": model.n_updates_,
        "seconds": round(seconds, 3),
        "interrupted": model.interrupted_,
        "resumed": resumed,
    }
    hidden_shape = opt.times(model.machine_.hidden.shape)
    text = (
        f"{out}: {model.n_sites_:,} sites x {len(model.alphabet_)} letters -> {hidden_shape}, "
        f"{model.n_parameters_:,} parameters, {len(alignment):,} sequences ({model.n_effective_:,.0f} effective), "
        f"{model.n_epochs_:,} {'epoch' if model.n_epochs_ == 1 else 'epochs'} in {seconds:.1f} s"
    )
    opt.show(result, as_json, text)
    resuming.note_trained(resumed, epochs, model.n_epochs_)
    if interrupt is not None:
        raise run.interrupted(f" after {model.n_updates_:,} updates", interrupt, saved=True)


def sample(
    model_folder: ModelFolder,
    out: Annotated[Path, opt.new(_FASTA_HELP, "--out")],
    n: Annotated[int, typer.Option("-n", "--number", min=1, help="Number of sequences to draw.")] = 1000,
    fixed: Annotated[str | None, opt.new(_FIXED_HELP, metavar="PATTERN")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of Gibbs steps per chain.")] = 1000,
    temperatures: Annotated[int | None, opt.new(_TEMPERATURES_HELP, default="no tempering", min=2)] = None,
    start: Annotated[Start | None, opt.new(_START_HELP, default="the training chains, if available")] = None,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Draw new sequences from a model and write them to a FASTA file.

    The output shows how much the chains remember of their states halfway through the run.
    """
    from mvrbm.io.alignments import write_fasta
    from mvrbm.io.atomic import check_output

    check_output(out, force)
    model = load_model(model_folder, device, seed)
    init = None if start is None else start.value
    sequences = model.sample(n, steps=steps, init=init, fixed=fixed, temperatures=temperatures)
    write_fasta(out, sequences, force=force)
    result = {"out": str(out), "sequences": n, "steps": steps, "memory": round(model.memory_, 4), "fixed": fixed}
    text = f"{out}: {n:,} sequences, {steps:,} Gibbs steps"
    if n > 1:
        text += f", the chains remember {max(0.0, model.memory_):.1%} of their states halfway through the run"
    opt.show(result, as_json, text)


def score(
    model_folder: ModelFolder,
    family: Family,
    out: TableOut,
    normalize: Annotated[bool, opt.new(_NORMALIZE_HELP, "--normalize")] = False,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> None:
    """Score sequences by their log-likelihood, up to the constant log Z, and write the scores to a table.

    Question marks in the sequences are unknown letters, which are summed over.
    """
    from mvrbm.io.atomic import check_output

    check_output(out, force, [".csv"])
    model = load_model(model_folder, device, seed)
    alignment = model.align(family)
    scores = model.score_samples(alignment)
    log_z = model.log_partition() if normalize else None
    if log_z is not None:
        scores = scores - log_z.log_z
    names = alignment.names or []
    write_table(out, [("name", "score"), *((name, f"{one:.6f}") for name, one in zip(names, scores, strict=True))])
    result: dict[str, Any] = {"out": str(out), "sequences": len(alignment), "mean": float(scores.mean())}
    text = f"{out}: {len(alignment):,} sequences, mean score {scores.mean():.4f}"
    if log_z is not None:
        result |= {"log_z": log_z.log_z, "lower": log_z.lower, "upper": log_z.upper}
        text += f" nats, log Z {log_z.log_z:.3f} (interval {log_z.lower:.3f} to {log_z.upper:.3f})"
    opt.show(result, as_json, text)


#: Name and function of each command, and the arguments for the example in its help text.
COMMANDS: list[tuple[str, Any, str]] = [
    ("train", train, "family.fasta --out model/"),
    ("sample", sample, "model/ -n 1000 --out new.fasta"),
    ("score", score, "model/ other.fasta scores.csv"),
]
