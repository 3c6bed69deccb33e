"""The command sample, and train --labels: classes, means and draws, where chains start, and what is reported."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mvrbm as package
from mvrbm import MVRBM, ClassificationMVRBM

BARS = np.repeat((np.arange(60)[:, None] % 2 == np.arange(6) % 2)[:, None, :], 4, 1).astype(np.float32)  # (60, 4, 6)
NAMES = np.array(["even", "odd"] * 30)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Models with chains, without chains, and with labels, made once."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {"n_epochs": 100, "batch_size": 10, "random_state": 0, "device": "cpu"}
    MVRBM((3, 2), recipe="generative", **settings).fit(BARS).save(folder / "chains")
    MVRBM((3, 2), **settings).fit(BARS).save(folder / "plain")
    ClassificationMVRBM((3, 2), mode="generative", **settings).fit(BARS, NAMES).save(folder / "named")
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    np.save("data.npy", BARS)
    np.save("codes.npy", np.arange(60) % 2)
    np.save("few.npy", np.arange(3))
    np.save("cube.npy", np.zeros((60, 2, 2)))
    np.save("long.npy", np.resize(BARS, (60, 5, 5)).reshape(60, 25)[:, :23])
    Path("names.txt").write_text("\n".join(NAMES))
    return tmp_path


def found(result):
    code, out, err = result
    assert (code, [line for line in err.splitlines() if not line.startswith("note: ")]) == (0, []), err
    return json.loads(out)


def test_pictures_show_means_and_arrays_hold_draws(mvrbm):
    assert found(mvrbm("sample chains a.npy -n 9 --json"))["values"] == "draws"
    assert set(np.unique(np.load("a.npy"))) <= {0, 1}
    assert found(mvrbm("sample chains b.npy -n 9 --json --means"))["values"] == "means"
    assert len(np.unique(np.load("b.npy"))) > 10
    assert found(mvrbm("sample chains a.png -n 9 --json"))["values"] == "means"
    assert found(mvrbm("sample chains b.png -n 9 --json --draws"))["values"] == "draws"
    with Image.open("a.png") as means, Image.open("b.png") as draws:
        assert set(np.unique(means)) - {0, 128, 255}
        assert set(np.unique(draws)) <= {0, 128, 255}


def test_what_was_done_is_reported(mvrbm):
    assert mvrbm("sample chains a.png -n 4 --steps 2000") == (
        0, "a.png: 4x4x6 float32, means, 2,000 Gibbs steps from the training chains\n", "",
    )  # fmt: skip
    assert found(mvrbm("sample chains b.png --steps 3 --start noise --json"))["start"] == "noise"
    assert found(mvrbm("sample chains c.png --steps 3 --data data.npy --json"))["start"] == "data.npy"
    code, out, err = mvrbm("sample plain d.png -n 4 --steps 3")
    assert (code, out) == (0, "d.png: 4x4x6 float32, means, 3 Gibbs steps from noise\n")
    assert err.splitlines() == [
        "note: the model was trained with CD(steps=1); training with recipe='generative' gives better samples"
    ]


def test_chains_start_at_the_data(mvrbm):
    np.save("one.npy", np.ones((1, 4, 6)))
    found(mvrbm("sample chains a.npy -n 3 --steps 1 --data one.npy --json"))
    expected = package.load("chains").set_params(random_state=0).sample(3, steps=1, init=np.ones((3, 4, 6)))
    np.testing.assert_array_equal(np.load("a.npy"), expected)


@pytest.mark.parametrize("labels", ["codes.npy", "names.txt"])
def test_samples_of_a_class(mvrbm, labels):
    told = found(mvrbm(f"train data.npy --hidden 3x2 --labels {labels} --batch-size 10 --out new --quiet --json"))
    assert (told["class"], told["epochs"], told["updates"]) == ("ClassificationMVRBM", 100, 600)
    for code, label in enumerate(["0", "1"] if labels == "codes.npy" else ["even", "odd"]):
        told = found(mvrbm(f"sample new {label}.npy --label {label} -n 20 --steps 100 --means --json"))
        assert (told["label"], told["start"]) == (label, "the training chains")
        close = np.abs(np.load(f"{label}.npy") - BARS[code]).mean((1, 2)) < 0.2
        assert close.mean() > 0.8
    found(mvrbm("predict new data.npy classes.npy --json"))
    assert (np.load("classes.npy") == (np.load(labels) if labels == "codes.npy" else NAMES)).mean() > 0.9


# the command; exit code; what the line says
MISTAKES = [
    ("sample named o.npy --label third", 1, r"label must be one of \['even', 'odd'\], got 'third'"),
    (
        "sample chains o.npy --label odd",
        1,
        "--label odd requires a model trained with --labels, but chains has no labels",
    ),
    ("sample plain o.npy --start chains", 1, "has no chains to start from"),
    ("sample plain o.npy --start data", 2, "'data' is not one of 'chains', 'noise'"),
    ("sample chains o.npy --start noise --data data.npy", 2, "--data cannot be combined with --start"),
    ("sample named o.npy --data data.npy", 1, "--data data.npy is not supported for named.*model with labels"),
    ("sample chains o.npy --data cube.npy", 1, r"samples must have shape \(4, 6\), got \(2, 2\)"),
    ("train data.npy --hidden 2x2 --labels few.npy --out new", 1, "few.npy has 3 labels, but there are 60 samples"),
    ("train data.npy --hidden 2x2 --labels cube.npy --out new", 1, "expected one label or one-hot vector per sample"),
    ("train data.npy --hidden 2x2 --labels gone.txt --out new", 1, "gone.txt: no such file"),
    ("train data.npy --hidden 2x2 --labels natural-images --out new", 1, "does not have one label per sample"),
    ("train data.npy --hidden 2x2 --labels codes.npy --chains 5 --out new", 2, "cannot be combined with --chains"),
    ("train data.npy --labels codes.npy --init plain --out new", 2, "cannot be combined with --init"),
    ("train data.npy --hidden 2x2 --recipe fast --out new", 2, "'fast' is not one of"),
]


@pytest.mark.parametrize(("command", "code", "says"), MISTAKES)
def test_a_mistake_is_one_clear_line(mistake, command, code, says):
    mistake(None, command, code, says)


def test_models_that_come_with_the_package_are_taken_by_name(mvrbm):
    assert found(mvrbm("sample labeled-digits a.png --label 7 -n 4 --steps 20 --json"))["shape"] == [4, 28, 28]
    code, out, err = mvrbm("info digits")
    assert (code, err) == (0, "")
    assert "15,409" in out
    code, out, err = mvrbm("sample digit b.png")
    assert (code, out) == (1, "")
    assert err == "error: digit does not exist and is not the name of an included model (digits, labeled-digits)\n"


@pytest.mark.parametrize("name", ["named", "labeled-digits"])
@pytest.mark.parametrize("call", ["transform {} data.npy o.npy", "score {} data.npy o.npy", "likelihood {} data.npy",
                                  "reconstruct {} data.npy o.npy", "inpaint {} data.npy o.npy --hide top"])  # fmt: skip
def test_commands_without_labels_name_those_with_labels(mistake, mvrbm, name, call):
    mistake(None, call.format(name), 1, r"because it is a model with labels; use mvrbm predict or mvrbm sample$")
    code, out, _ = mvrbm(f"{call.split()[0]} --help")
    assert (code, "labeled-digits" in out) == (0, False)


def test_help_names_the_models_with_labels(mvrbm, mistake):
    assert "labeled-digits" in mvrbm("predict --help")[1]
    assert "labeled-digits" in mvrbm("sample --help")[1]
    mistake(None, "export named o.onnx", 1, "error: --method of ClassificationMVRBM must be one of")


def test_labels_of_samples_are_written(mvrbm, place):
    details = found(mvrbm("sample named a.npy -n 40 --steps 5 --labels-out labels.npy --json"))
    assert details["labels"] == "labels.npy"
    drawn, labels = package.load("named", "cpu").set_params(random_state=0).sample(40, steps=5)
    np.testing.assert_array_equal(np.load("a.npy"), drawn)
    np.testing.assert_array_equal(np.load("labels.npy"), labels)
    assert set(labels) == set(NAMES)
    for command, message in (
        ("sample named b.npy --labels-out labels.npy", "labels.npy already exists; use --force to replace it"),
        ("sample named b.npy --labels-out labels.png", "labels.png"),
        ("sample plain b.npy --labels-out l.npy", "--labels-out requires a model trained with --labels, but"),
    ):
        code, _, err = mvrbm(command)
        assert code != 0
        assert message in err
        assert not Path("b.npy").exists()


NOT_IMAGES = r"samples of shape \(23,\) are not images; write a .npy file instead"


@pytest.mark.parametrize(
    ("command", "method"),
    [
        ("sample model out.png --labels-out labels.npy", "sample"),
        ("reconstruct plain_model long.npy out.png", "reconstruct"),
        ("inpaint plain_model long.npy out.png --missing-nan", "inpaint"),
        ("outliers long.npy scores.npy --maps out.png", "fit"),
    ],
)
def test_samples_that_are_no_images_are_an_error_before_computing(place, mistake, monkeypatch, command, method):
    kinds = {"sample": ClassificationMVRBM, "fit": package.MVRBMOutlierDetector}
    dense = {"coupling": "dense", "n_epochs": 1}
    ClassificationMVRBM((3,), mode="generative", **dense).fit(np.load("long.npy"), NAMES).save("model")
    package.RBM(3, n_epochs=1).fit(np.load("long.npy")).save("plain_model")
    monkeypatch.setattr(kinds.get(method, package.RBM), method, lambda *_, **__: pytest.fail("this takes time"))
    mistake(None, command, 1, f"out.png cannot be written: {NOT_IMAGES}")


def test_labels_and_samples_need_separate_files(mistake):
    mistake(
        None, "sample named a.npy --labels-out ./a.npy", 2, "OUT and --labels-out must be different files, got a.npy"
    )


def test_models_with_commands_of_their_own_name_them(mvrbm, place):
    package.SequenceRBM(3, n_epochs=1, random_state=0).fit(["ACDE", "CDEA", "DEAC"] * 10).save("letters")
    package.ReplicatedSoftmax(3, n_epochs=1).fit(np.eye(8)).save("topics")
    for folder, command in (("letters", "mvrbm sequences"), ("topics", "mvrbm topics")):
        for call in ("transform {} data.npy o.npy", "sample {} o.npy", "score {} data.npy o.npy"):
            code, _, err = mvrbm(call.format(folder))
            assert (code, f"which is not a model of arrays; use {command} or the Python interface" in err) == (1, True)
