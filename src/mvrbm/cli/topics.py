"""The ``mvrbm topics`` command, which trains a topic model on documents and shows the topics."""

import time
from pathlib import Path
from typing import Annotated

import typer

from mvrbm.cli import options as opt

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
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs.")] = 50,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Find topics in documents and show the top words of each topic."""
    if save is not None:
        opt.check_model_out(save, force)
    import numpy as np

    from mvrbm import ReplicatedSoftmax
    from mvrbm.io.documents import read_documents

    counts, names = read_documents(source, column=column, vocabulary=vocabulary, max_words=max_words)
    n_documents, n_words = counts.shape
    if not quiet:
        opt.note(f"{n_documents:,} documents, {n_words:,} words in the vocabulary")
    model = ReplicatedSoftmax(n_topics, n_epochs=epochs, random_state=seed, device=device)
    began = time.perf_counter()
    model.fit(counts, callbacks=opt.progress_callbacks(quiet))
    seconds = time.perf_counter() - began
    model.feature_names_in_ = np.asarray(names, dtype=object)  # saves the words with the model
    found = model.top_words(n=words)
    result = {
        "topics": found,
        "documents": n_documents,
        "vocabulary": n_words,
        "epochs": epochs,
        "seconds": round(seconds, 3),
        "model": None if save is None else str(model.save(save)),
    }
    rows = [(str(number), " ".join(topic)) for number, topic in enumerate(found, start=1)]
    opt.show(result, as_json, opt.table(rows))
