"""The ``mvrbm topics`` command, which trains a topic model on documents and shows the topics."""

from pathlib import Path
from typing import Annotated

import typer

from mvrbm.cli import options as opt
from mvrbm.cli import resuming

_INPUT_HELP = (
    "Documents (a folder of .txt files, a .txt file with one document per line, or a .csv file) or word counts (a file "
    "in svmlight format with suffix .svm, .libsvm or .feat, or a sparse SciPy matrix in a .npz file)."
)
_COLUMN_HELP = "Column of the .csv file that contains the text."
_COLUMN_DEFAULT = "text, or the only column"
_VOCABULARY_HELP = "File with the vocabulary for word counts, one word per line."
_MAX_WORDS_HELP = "Maximum size of the vocabulary built from documents."


def topics(
    source: Annotated[Path, opt.argument("INPUT", _INPUT_HELP)],
    n_topics: Annotated[int, typer.Option("--topics", min=1, help="Number of topics.")] = 50,
    words: Annotated[int, typer.Option(min=1, help="Number of words to show per topic.")] = 10,
    column: Annotated[str | None, opt.new(_COLUMN_HELP, default=_COLUMN_DEFAULT)] = None,
    vocabulary: Annotated[Path | None, opt.new(_VOCABULARY_HELP)] = None,
    max_words: Annotated[int, typer.Option(min=1, help=_MAX_WORDS_HELP)] = 2000,
    save: opt.SaveModel = None,
    checkpoints: resuming.Folder = None,
    resume: resuming.Resume = False,
    ignore_mismatch: resuming.IgnoreMismatch = False,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs.")] = 50,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Find topics in documents and show the top words of each topic.

    Ctrl-C or SIGTERM stops training after the current batch, shows the topics found so far and saves the model. If you
    use --checkpoints, running the same command again with --resume continues training.
    """
    run = resuming.Resuming(save, checkpoints, resume, ignore_mismatch, force)
    resumed = run.check()
    import numpy as np

    from mvrbm import ReplicatedSoftmax
    from mvrbm.io.documents import read_documents
    from mvrbm.training import Checkpoint

    counts, names = read_documents(source, column=column, vocabulary=vocabulary, max_words=max_words)
    n_documents, n_words = counts.shape
    if not quiet:
        opt.note(f"{n_documents:,} documents, {n_words:,} words in the vocabulary")
    model = ReplicatedSoftmax(n_topics, n_epochs=epochs, random_state=seed, device=device)
    callbacks = opt.progress_callbacks(quiet)
    if checkpoints is not None:
        callbacks.append(Checkpoint(checkpoints))
    with run.training():
        seconds, interrupt = resuming.fit(
            model, counts, callbacks=callbacks, resume=checkpoints, ignore_mismatch=ignore_mismatch
        )
    model.feature_names_in_ = np.asarray(names, dtype=object)  # saves the words with the model
    found = model.top_words(n=words)
    result = {
        "topics": found,
        "documents": n_documents,
        "vocabulary": n_words,
        "epochs": model.n_epochs_,
        "seconds": round(seconds, 3),
        "model": None if save is None else str(model.save(save, overwrite=True)),
        "interrupted": model.interrupted_,
        "resumed": resumed,
    }
    rows = [(str(number), " ".join(topic)) for number, topic in enumerate(found, start=1)]
    opt.show(result, as_json, opt.table(rows))
    if interrupt is not None:
        raise run.interrupted(f" after {model.n_epochs_:,} epochs", interrupt, saved=save is not None)
