"""The command ``mvrbm topics``: a topic model of documents, and the words of its topics."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from mvrbm.cli import options as opt

_INPUT_HELP = (
    "A folder of .txt files, a .txt file with one document per line, a .csv file with a column of texts, or word "
    "counts: a file in svmlight format (.svm, .libsvm, .feat) or a sparse matrix of SciPy (.npz)."
)


def topics(
    source: Annotated[Path, opt.argument("INPUT", _INPUT_HELP)],
    n_topics: Annotated[int, typer.Option("-n", "--topics", min=1, help="Number of topics.")] = 50,
    words: Annotated[int, typer.Option(min=1, help="Words to show per topic.")] = 10,
    column: Annotated[str | None, opt.new("Column of texts of a .csv file; default: text, or the only one.")] = None,
    vocabulary: Annotated[Path | None, opt.new("File with the words of counts, one per line.")] = None,
    max_words: Annotated[int, typer.Option(min=1, help="Size of the vocabulary of texts.")] = 2000,
    out: Annotated[Path | None, opt.new("Folder for the model; default: it is not saved.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs.")] = 50,
    seed: opt.Seed = 0,
    device: opt.Where = opt.Device.AUTO,
    force: opt.Force = False,
    quiet: opt.Quiet = False,
    as_json: opt.AsJson = False,
) -> None:
    """Find topics in documents, and show the words of each topic."""
    if out is not None:
        opt.check_model_out(out, force)
    import numpy as np

    from mvrbm import ReplicatedSoftmax
    from mvrbm.io.documents import read_documents
    from mvrbm.training import EpochLines, ProgressBar

    counts, names = read_documents(source, column=column, vocabulary=vocabulary, max_words=max_words)
    if not quiet:
        opt.note(f"{counts.shape[0]:,} documents, {counts.shape[1]:,} words in the vocabulary")
    model = ReplicatedSoftmax(n_topics, n_epochs=epochs, random_state=seed, device=device)
    began = time.perf_counter()
    model.fit(counts, callbacks=[] if quiet else [ProgressBar() if sys.stderr.isatty() else EpochLines()])
    seconds = time.perf_counter() - began
    model.feature_names_in_ = np.asarray(names, dtype=object)  # saved with the model
    found = model.top_words(n=words)
    result = {"topics": found, "documents": counts.shape[0], "vocabulary": counts.shape[1]}
    result |= {"epochs": epochs, "seconds": round(seconds, 3), "model": None if out is None else str(model.save(out))}
    opt.show(result, as_json, opt.table([(f"{number}", " ".join(row)) for number, row in enumerate(found, start=1)]))
