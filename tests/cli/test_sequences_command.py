"""mvrbm sequences train, sample and score: the same results as the estimator, and one line for bad input."""

import csv
import gzip
import json
import os
import signal

import numpy as np
import pytest

import mvrbm
from mvrbm import SequenceRBM
from mvrbm.cli import main
from mvrbm.io.alignments import read_alignment
from mvrbm.training import Checkpoint

QUICK = ["--hidden", "3x2", "--epochs", "2", "--batch-size", "16", "--seed", "5", "--device", "cpu", "--quiet"]
OPTIONS = [*QUICK, "--rank", "2"]


def family(n=60, sites=6, letters="-ACDEF", seed=0):
    rng = np.random.default_rng(seed)
    return ["".join(letters[code] for code in row) for row in rng.integers(0, len(letters), (n, sites))]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sequences = family()
    text = "".join(f">name{n}\n{one}\n" for n, one in enumerate(sequences))
    (tmp_path / "family.fasta").write_text(text)
    (tmp_path / "family.fasta.gz").write_bytes(gzip.compress(text.encode()))
    return sequences


@pytest.fixture
def trained(place):
    assert main(["sequences", "train", "family.fasta", "--out", "model", *OPTIONS]) == 0
    return mvrbm.load("model", "cpu")


def table():
    with open("scores.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_training_options_are_those_of_the_estimator(place, capsys):
    more = ["--coupling", "kronecker:3", "--alphabet", "protein", "--chains", "20", "--gibbs-steps", "2"]
    words = ["sequences", "train", "family.fasta.gz", "--out", "model", *QUICK, *more, "--learning-rate", "0.1"]
    assert main([*words, "--identity", "0.5", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    model = SequenceRBM(
        (3, 2), coupling="kronecker:3", alphabet="protein", n_chains=20, gibbs_steps=2, n_epochs=2, batch_size=16,
        learning_rate=0.1, identity=0.5, random_state=5, device="cpu",
    ).fit(place)  # fmt: skip
    loaded = mvrbm.load("model", "cpu")
    assert {**loaded.get_params(), "coupling": None} == {**model.get_params(), "coupling": None}
    np.testing.assert_array_equal(loaded.components_, model.components_)
    assert printed["effective_sequences"] == round(model.n_effective_, 1)
    assert (printed["sequences"], printed["sites"], printed["letters"]) == (60, 6, model.alphabet_.letters)
    assert (printed["epochs"], printed["parameters"]) == (2, model.n_parameters_)


def test_all_weights_may_be_equal(place):
    assert main(["sequences", "train", "family.fasta", "--out", "model", *OPTIONS, "--identity", "none"]) == 0
    assert mvrbm.load("model").identity is None


def test_samples_are_those_of_the_model(trained, capsys):
    assert main(["sequences", "sample", "model", "-n", "8", "--out", "new.fasta", "--steps", "20", "--seed", "3"]) == 0
    assert "8 sequences, 20 Gibbs steps" in capsys.readouterr().out
    trained.set_params(random_state=3)
    found = read_alignment("new.fasta", trained.alphabet_)
    assert found.sequences == trained.sample(8, steps=20)
    words = [
        "sequences",
        "sample",
        "model",
        "-n",
        "8",
        "--out",
        "fixed.fasta.gz",
        "--fixed",
        "A??-?C",
        "--start",
        "noise",
    ]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["sequences"], result["fixed"]) == (8, "A??-?C")
    for one in read_alignment("fixed.fasta.gz", trained.alphabet_).sequences:
        assert one[0] + one[3] + one[5] == "A-C"


def test_scores_are_those_of_the_model(trained, place, capsys):
    assert main(["sequences", "score", "model", "family.fasta", "scores.csv"]) == 0
    assert [row["name"] for row in table()] == [f"name{n}" for n in range(60)]
    np.testing.assert_allclose([float(row["score"]) for row in table()], trained.score_samples(place), atol=1e-5)
    capsys.readouterr()
    assert main(["sequences", "score", "model", "family.fasta", "scores.csv", "--normalize", "--force", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["lower"] <= result["log_z"] <= result["upper"]
    scores = [float(row["score"]) for row in table()]
    np.testing.assert_allclose(scores, trained.score_samples(place) - result["log_z"], atol=1e-5)
    assert result["mean"] == pytest.approx(np.mean(scores), abs=1e-5)


def test_incomplete_sequences_are_scored(trained, tmp_path):
    (tmp_path / "part.fasta").write_text(">part\nAC??-F\n")
    assert main(["sequences", "score", "model", "part.fasta", "scores.csv"]) == 0
    assert float(table()[0]["score"]) == pytest.approx(trained.score_samples(["AC??-F"])[0], abs=1e-5)


def test_a_run_resumes(place, capsys):
    words = ["sequences", "train", "family.fasta", *OPTIONS, "--checkpoints", "runs", "--log", "log.csv"]
    assert main([*words, "--out", "whole"]) == 0
    (newest,) = sorted(os.scandir("runs"), key=lambda entry: entry.name)[-1:]
    capsys.readouterr()
    assert main([*words, "--out", "whole", "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed"]
    assert newest.name.startswith("update-")
    with open("log.csv", newline="") as file:
        assert "pseudo_log_likelihood" in next(csv.DictReader(file))
    assert main([*words[:-2], "--out", "other"]) == 1
    assert "use --resume to continue that run, or --force to start over" in capsys.readouterr().err
    assert main([*words, "--out", "other", "--resume", "--identity", "0.1"]) == 1
    assert "sample_weight has different values" in capsys.readouterr().err


def test_an_interrupted_model_is_saved(place, monkeypatch, capsys):
    class Interrupt(Checkpoint):
        def on_epoch_end(self, trainer):
            super().on_epoch_end(trainer)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("mvrbm.training.Checkpoint", Interrupt)
    words = [
        "sequences",
        "train",
        "family.fasta",
        "--out",
        "model",
        *OPTIONS,
        "--epochs",
        "50",
        "--checkpoints",
        "runs",
    ]
    assert main(words) == 130
    assert (
        "the partially trained model was saved to model; run the same command with --resume" in capsys.readouterr().err
    )
    assert mvrbm.load("model").n_epochs_ == 1


ERRORS = [
    (["train", "missing.fasta", "--out", "new"], "missing.fasta: no such file", 1),
    (["train", "empty.fasta", "--out", "new"], "empty.fasta is empty", 1),
    (["train", "unequal.fasta", "--out", "new"], "line 3, sequence 'b' has 2 sites, but the first sequence has 3", 1),
    (["train", "family.fasta", "--out", "new", "--alphabet", "dna"], "is not a letter of the dna alphabet", 1),
    (["train", "family.fasta", "--out", "new", "--alphabet", "A"], "alphabet must be one of", 1),
    (["train", "family.fasta", "--out", "new", "--identity", "80"], "'--identity': expected a fraction from 0 to 1", 2),
    (["train", "family.fasta", "--out", "model"], "model already exists; use --force", 1),
    (["sample", "model", "--out", "family.fasta"], "family.fasta already exists; use --force to replace it", 1),
    (["sample", "model", "--out", "new.fasta", "--fixed", "A?"], "error: --fixed must have one character for each", 1),
    (["sample", "model", "--out", "new.fasta", "--fixed", "A1????"], "error: --fixed contains '1' at site 1; use", 1),
    (["sample", "digits", "--out", "new.fasta"], "digits contains a model of class MVRBM; train a model with", 1),
    (["score", "model", "unequal.fasta", "scores.csv"], "unequal.fasta, line 3", 1),
    (["score", "model", "short.fasta", "scores.csv"], "the sequences have 3 sites, but the model has 6", 1),
    (["score", "model", "family.fasta", "scores.txt"], "scores.txt must end in .csv", 1),
]


def test_errors_are_one_line(trained, tmp_path, capsys):
    (tmp_path / "empty.fasta").write_text("")
    (tmp_path / "unequal.fasta").write_text(">a\nACD\n>b\nAC\n")
    (tmp_path / "short.fasta").write_text(">a\nACD\n>b\nACC\n")
    for words, message, code in ERRORS:
        quiet = ["--quiet"] if words[0] == "train" else []
        assert main(["sequences", *words, *quiet]) == code, words
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert message in line


def test_notes_name_what_was_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [f">{n}\n{one[:3]}gg{one[3:]}\n" for n, one in enumerate(family(letters="ACDX"))]
    (tmp_path / "family.a3m").write_text("".join(rows))
    assert main(["sequences", "train", "family.a3m", "--out", "model", *OPTIONS]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes[0] == "note: family.a3m: inserts were removed (120 lower-case letters)"
    assert notes[1].startswith("note: family.a3m: ambiguous letters were replaced with gaps (")
