"""Inputs of commands: rows, tables, folders of classes; contact sheets and progress."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from mvrbm import MVRBM, MVRBMClassifier
from mvrbm.cli import progress
from mvrbm.io.arrays import read_array
from mvrbm.progress import listening

DATA = (np.random.default_rng(0).random((120, 3, 4)) < 0.5).astype(np.float32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "model"
    return MVRBM((2, 2), recipe="generative", n_epochs=1, random_state=0, device="cpu").fit(DATA).save(folder)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("data.npy", DATA)
    return tmp_path


@pytest.mark.parametrize(("rows", "chosen"), [("5", slice(5)), ("100:", slice(100, None)), ("1:9:3", slice(1, 9, 3))])
def test_rows_are_chosen(mvrbm, place, trained, rows, chosen):
    code, _, err = mvrbm(f"transform {trained} data.npy out.npy -n {rows}")
    assert code == 0, err
    whole = mvrbm(f"transform {trained} data.npy whole.npy")
    assert whole[0] == 0
    np.testing.assert_allclose(np.load("out.npy"), np.load("whole.npy")[chosen], atol=1e-6)


def test_masks_of_all_samples_go_with_their_rows(mvrbm, place, trained):
    known = np.random.default_rng(1).random(DATA.shape) < 0.7
    np.save("mask.npy", known)
    assert mvrbm(f"inpaint {trained} data.npy out.npy --mask mask.npy -n 50:60 --steps 2")[0] == 0
    np.testing.assert_array_equal(np.load("out.npy")[known[50:60]], DATA[50:60][known[50:60]])


@pytest.mark.parametrize("command", ["reconstruct {} data.npy", "inpaint {} data.npy --hide left --steps 2"])
def test_a_contact_sheet_has_a_hundred_tiles_unless_more_are_requested(mvrbm, place, trained, command):
    command = command.format(trained)
    code, _, err = mvrbm(f"{command} out.png")
    assert (code, err) == (
        0,
        "note: out.png shows the first 100 of 120 samples; use -n to select other or more samples\n",
    )
    assert read_array("out.png").shape == (1, 6 * (10 * 4 - 1), 6 * (10 * 5 - 1))
    code, _, err = mvrbm(f"{command} more.png -n 120")
    assert (code, err) == (0, "")
    assert read_array("more.png").shape == (1, 6 * (11 * 4 - 1), 6 * (11 * 5 - 1))


COLUMNS = [
    "sample {} -n 5 --steps 2",
    "reconstruct {} data.npy -n 5",
    "inpaint {} data.npy -n 5 --hide left --steps 2",
    "impute data.npy -n 5 --epochs 1 --sample-axes 1",
    "outliers data.npy --epochs 1 -n 5 scores.npy --maps",
    "denoise data.npy -n 5 --model {}",
]


@pytest.mark.parametrize("command", COLUMNS)
def test_a_contact_sheet_has_the_given_number_of_columns(mvrbm, place, trained, command):
    command = command.format(trained)
    code, _, err = mvrbm(f"{command} out.png --columns 4")
    assert code == 0, err
    height, width = read_array("out.png").shape[1:]
    # A map is shown to the right of its sample, and both are enlarged six times.
    tile = (6 * 3 + 1, 6 * 9 + 1) if "--maps" in command else (4, 5)
    assert height / width == (2 * tile[0] - 1) / (4 * tile[1] - 1)
    code, _, err = mvrbm(f"{command} out.npy --columns 4 --force")
    assert code == 2
    assert "'--columns': has no effect without a contact sheet" in err


def test_a_table_with_its_labels_and_a_folder_of_classes(mvrbm, place):
    frame = pd.DataFrame(DATA.reshape(120, -1)[:30]).assign(animal=["cat", "dog", "emu"] * 10)
    frame.to_csv("table.csv", index=False)
    train = "--hidden 2x2 --epochs 1 --quiet --out"
    assert mvrbm(f"train table.csv:-animal --labels table.csv:animal --shape 3x4 {train} a -n 9")[0] == 0
    assert mvrbm("sample a out.npy -n 2 --label emu --steps 2")[0] == 0
    for name, number in itertools.product(("cat", "dog"), range(3)):
        Path("animals", name).mkdir(parents=True, exist_ok=True)
        Image.fromarray((DATA[number] * 255).astype(np.uint8)).save(f"animals/{name}/{number}.png")
    assert mvrbm(f"train animals --labels animals {train} b")[0] == 0
    assert mvrbm("sample b two.npy -n 2 --label dog --steps 2")[0] == 0


def test_long_commands_show_progress_on_a_terminal(monkeypatch, capsys):
    times = itertools.count()
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(times)))
    for terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        with progress.progress_line():
            MVRBM((2, 2), n_epochs=1, random_state=0).fit(DATA).inpaint(
                np.where(DATA, np.nan, DATA), steps=4, burn_in=0
            )
        err = capsys.readouterr().err
        assert ("4 Gibbs steps, 120 samples in " in err) == terminal
        assert err == "" or err.endswith("\r")


def test_fine_tuning_shows_its_epochs(capsys):
    seen = []
    with listening(lambda *what: seen.append(what)):
        MVRBMClassifier((2, 2), n_epochs=3, verbose=1).fit(DATA, np.arange(120) % 2)
    assert seen.count(("epochs", 1)) == 3
    assert "3/3" in capsys.readouterr().err
