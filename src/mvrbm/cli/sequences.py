"""The ``mvrbm sequences`` commands, which train and use models of aligned sequences."""

import time
from pathlib import Path
from typing import Annotated, Any

from mvrbm.cli import options as opt
from mvrbm.cli import resuming
from mvrbm.interrupt import INTERRUPTS

_FAMILY_HELP = "Aligned sequences: a FASTA, A2M, A3M or Stockholm file, which may be compressed with gzip."
_ALPHABET_HELP = "protein, rna, dna, or the letters themselves."

Family = Annotated[Path, opt.argument("FAMILY", _FAMILY_HELP)]
ModelFolder = Annotated[Path, opt.argument("MODEL", "Folder of a model that was trained with `mvrbm sequences train`.")]
Epochs = Annotated[int | None, opt.new("Number of epochs.", min=1)]


def load_model(folder: Path, device: str, seed: int | None = None) -> Any:
    """Load a sequence model and set its random state to `seed`, if given."""
    import mvrbm

    model = mvrbm.load(folder, device)
    if not hasattr(model, "alphabet_"):
        raise ValueError(
            f"{folder} contains a model of class {type(model).__name__}; train a model with mvrbm sequences train"
        )
    return model if seed is None else model.set_params(random_state=seed)


def train(
    family: Family,
    out: opt.ModelOut,
    alphabet: Annotated[str | None, opt.new(_ALPHABET_HELP, default="detected")] = None,
    epochs: Epochs = None,
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
    run = resuming.Resuming(out, checkpoints, resume, ignore_mismatch, force)
    resumed = run.check()
    from mvrbm import SequenceRBM
    from mvrbm.io.alignments import read_alignment
    from mvrbm.training import Checkpoint

    alignment = read_alignment(family, alphabet)
    model = SequenceRBM(alphabet=alphabet, random_state=seed, device=device.value, n_epochs=epochs)
    callbacks = opt.progress_callbacks(quiet)
    if checkpoints is not None:
        callbacks.append(Checkpoint(checkpoints))
    began = time.perf_counter()
    interrupt = None
    try:
        with run.training():
            model.fit(alignment, callbacks=callbacks, resume=checkpoints, ignore_mismatch=ignore_mismatch)
    except INTERRUPTS as error:
        if not getattr(model, "interrupted_", False):
            raise  # a second Ctrl-C stops training immediately, without saving
        interrupt = error
    seconds = time.perf_counter() - began
    model.save(out, overwrite=True)
    result = {
        "model": str(out),
        "sequences": len(alignment),
        "sites": model.n_sites_,
        "letters": model.alphabet_.letters,
        "parameters": model.n_parameters_,
        "epochs": model.n_epochs_,
        "updates": model.n_updates_,
        "seconds": round(seconds, 3),
        "interrupted": model.interrupted_,
        "resumed": resumed,
    }
    text = (
        f"{out}: {len(alignment):,} sequences of {model.n_sites_:,} sites, letters {model.alphabet_.letters}, "
        f"{model.n_parameters_:,} parameters, {model.n_epochs_:,} epochs in {seconds:.1f} s"
    )
    opt.show(result, as_json, text)
    if interrupt is not None:
        raise run.interrupted(f" after {model.n_updates_:,} updates", interrupt, saved=True)


#: Name and function of each command, and the arguments for the example in its help text.
COMMANDS: list[tuple[str, Any, str]] = [("train", train, "family.fasta --out model/")]
