"""mvrbm outliers: the scores and maps of the detector, and one line for bad input."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import mvrbm
from mvrbm.cli import main
from mvrbm.cli import outliers as outliers_command


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = rng.permuted(np.tile(np.float32([1, 1, 0, 0]), (40, 1)), axis=1)
    pictures = np.repeat(lines[:, :, None], 8, 2)
    np.save("normal.npy", pictures)
    pictures[7] = [1, 0, 1, 0, 1, 0, 1, 0]
    np.save("mixed.npy", pictures)
    pictures[1, 2, 3] = np.inf
    np.save("infinite.npy", pictures)
    np.save("wide.npy", np.zeros((3, 4, 5)))
    return tmp_path


@pytest.mark.fixed_seed  # maps are all white if every entry of a sample is very unusual
def test_scores_and_maps_are_those_of_the_detector_that_is_saved(place, capsys):
    training = ["--train", "normal.npy", "--save", "detector", "--epochs", "200", "--device", "cpu", "--quiet"]
    training += ["--contamination", "0.1"]
    assert main(["outliers", "mixed.npy", "scores.npy", "--maps", "maps.npy", "--json", *training]) == 0
    shown = json.loads(capsys.readouterr().out)
    detector, mixed, scores = mvrbm.load(place / "detector", "cpu"), np.load("mixed.npy"), np.load("scores.npy")
    np.testing.assert_array_equal(scores, detector.decision_function(mixed))
    np.testing.assert_array_equal(np.load("maps.npy"), detector.explain(mixed))
    assert next(iter(shown["most_unusual"])) == "7"
    assert shown["outliers"] == (scores < 0).sum() >= 1
    assert main(["outliers", "mixed.npy", "again.npy", "--model", "detector", "--device", "cpu"]) == 0
    assert "of 40 samples are outliers; lowest scores: 7 (" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load("again.npy"), scores)
    assert main(["outliers", "mixed.npy", "some.npy", "--model", "detector", "--device", "cpu", "-n", "5:9"]) == 0
    np.testing.assert_allclose(np.load("some.npy"), scores[5:9], atol=1e-6)
    assert "of 4 samples" in capsys.readouterr().out
    assert main(["outliers", "wide.npy", "wide-scores.npy", "--model", "detector"]) == 1
    assert capsys.readouterr().err == "error: samples must have shape (4, 8), got (4, 5)\n"
    assert main(["outliers", "mixed.npy", "o.npy", "--model", "detector", "--device", "cpu", "--maps", "maps.png"]) == 0
    sheet = np.asarray(Image.open("maps.png"))
    # 40 pairs of 4x17 entries, 4 in a row, enlarged four times and with a border. The sheet is then enlarged twice.
    assert sheet.shape == (2 * (10 * 17 - 1), 2 * (4 * 69 - 1))
    small = sheet[:32:8, :136:8]
    np.testing.assert_array_equal(sheet[:32, :136], small.repeat(8, 0).repeat(8, 1))
    np.testing.assert_array_equal(small[:4, :8], 255 * mixed[7])  # the most unusual sample comes first
    found, explained = small[:4, 9:17].ravel(), detector.explain(mixed[7:8]).ravel()
    assert found[explained.argmax()] == found.max()  # bytes of similar values can be equal
    assert found[explained.argmin()] == found.min() < found.max()


@pytest.mark.usefixtures("place")
def test_options_are_those_of_the_detector():
    options = "--train normal.npy --contamination 0.2 --epochs 2 --seed 5 --device cpu --quiet"
    assert main(["outliers", "mixed.npy", "scores.npy", *options.split()]) == 0
    detector = mvrbm.MVRBMOutlierDetector(contamination=0.2, n_epochs=2, random_state=5, device="cpu")
    scores = detector.fit(np.load("normal.npy")).decision_function(np.load("mixed.npy"))
    np.testing.assert_array_equal(np.load("scores.npy"), scores)


@pytest.mark.usefixtures("place")
def test_a_model_of_another_kind_is_named_and_no_bar_goes_into_a_pipe(capfd):
    mvrbm.MVRBM((2, 2), n_epochs=1, device="cpu").fit(np.load("normal.npy")).save("drawer")
    assert main(["outliers", "mixed.npy", "o.npy", "--model", "drawer"]) == 1
    assert capfd.readouterr().err == "error: drawer contains a model of class MVRBM, which is not an outlier detector\n"
    assert main(["outliers", "mixed.npy", "o.npy", "--epochs", "1", "--device", "cpu"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nothing.npy", "scores.npy"], 1, "no such file"),
        (["mixed.npy", "scores.txt"], 1, ".npy"),
        (["mixed.npy", "scores.npy", "--contamination", "0.5"], 2, "'--contamination': expected a number above 0 and"),
        (["mixed.npy", "scores.npy", "--contamination", "0"], 2, "above 0 and below 0.5, got '0'"),
        (["mixed.npy", "scores.npy", "--contamination", "few"], 2, "above 0 and below 0.5, got 'few'"),
        (["mixed.npy", "scores.npy", "-n", "0:1"], 1, "fit requires at least 2 samples, got n_samples=1"),
        (
            ["mixed.npy", "scores.npy", "--train", "wide.npy"],
            1,
            "--train wide.npy has samples of shape 4x5, but mixed.npy has samples of shape 4x8",
        ),
        (["mixed.npy", "a.npy", "--maps", "./a.npy"], 2, "OUT and --maps must be different files, got a.npy for both"),
        (["infinite.npy", "scores.npy"], 1, "infinite.npy contains an infinite entry at index (1, 2, 3); replace it"),
        (["mixed.npy", "scores.npy", "--model", "nothing"], 1, "nothing does not exist"),
        (
            ["mixed.npy", "scores.npy", "--model", "a", "--train", "normal.npy"],
            2,
            "--model cannot be combined with --train",
        ),
    ],
)
@pytest.mark.usefixtures("place")
def test_bad_input_gives_one_line(capsys, words, code, message):
    assert main(["outliers", *words]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


@pytest.mark.usefixtures("place")
def test_text_columns_of_a_table_are_categories(capsys):
    rows = ["size,sound"] + ["1.5,meow", "9.5,woof"] * 30
    rows[8] = "1.5,woof"
    Path("table.csv").write_text("\n".join(rows))
    training = ["--save", "detector", "--epochs", "100", "--device", "cpu", "--quiet"]
    assert main(["outliers", "table.csv", "scores.npy", "--maps", "maps.npy", *training]) == 0
    shown = capsys.readouterr().out
    assert "lowest scores: 7 (" in shown
    assert shown.endswith("; categorical columns: sound\n")
    frame = pd.read_csv("table.csv")
    detector = mvrbm.load("detector", "cpu")
    np.testing.assert_array_equal(np.load("scores.npy"), detector.decision_function(frame))
    np.testing.assert_array_equal(np.load("maps.npy"), detector.explain(frame))
    with_model = ["--model", "detector", "--device", "cpu"]
    assert main(["outliers", "table.csv", "some.npy", *with_model, "-n", "5:9"]) == 0
    np.testing.assert_allclose(np.load("some.npy"), np.load("scores.npy")[5:9], atol=1e-6)
    assert main(["outliers", "table.csv", "o.npy", *with_model, "--maps", "maps.png"]) == 1
    assert "must be a .npy file because table.csv has text columns" in capsys.readouterr().err


def test_columns_have_the_same_types_as_in_the_training_data(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kinds = [("1", "2", "A")[n % 3] for n in range(60)]
    rows = [f"{kind},{5 * 'A12'.index(kind) + n % 7 / 10}" for n, kind in enumerate(kinds)]
    Path("all.csv").write_text("\n".join(["kind,x", *rows]))
    Path("some.csv").write_text("\n".join(["kind,x", *(row for row in rows if not row.startswith("A"))]))
    frame = pd.read_csv("all.csv", dtype={"kind": str})
    pd.read_csv("some.csv").to_parquet("some.parquet")
    expected = mvrbm.MVRBMOutlierDetector(random_state=0, device="cpu").fit(frame)
    expected = expected.decision_function(frame[frame["kind"] != "A"])
    assert (expected < 0).sum() <= 2
    assert main(["outliers", "some.csv", "a.npy", "--train", "all.csv", "--save", "detector", "--device", "cpu"]) == 0
    for source in ("some.csv", "some.parquet"):
        assert main(["outliers", source, f"{source}.npy", "--model", "detector", "--device", "cpu"]) == 0
        assert capsys.readouterr().out.endswith("; categorical columns: kind\n")
        np.testing.assert_allclose(np.load(f"{source}.npy"), expected, atol=1e-6)
    np.testing.assert_allclose(np.load("a.npy"), expected, atol=1e-6)


def test_the_treatment_of_columns_is_that_of_the_detector(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"c{n},{'ab'[n % 2]},2020-01-{n % 28 + 1:02},{n % 5}" for n in range(60)]
    Path("t.csv").write_text("\n".join(["id,city,sold,x", *rows]))
    assert main(["outliers", "t.csv", "s.npy", "--save", "detector", "--device", "cpu"]) == 0
    shown, notes = capsys.readouterr()
    assert notes == ""
    assert "; categorical columns: city; columns of dates: sold; " in shown
    assert shown.endswith("; columns not used because their texts differ in most rows: id\n")
    Path("new.csv").write_text("id,city,sold,x\n1,a,,3\n2,b,,4\n")  # no text in id, and no known dates
    assert main(["outliers", "new.csv", "n.npy", "--model", "detector", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["categorical columns"] == ["city"]
    assert shown["columns of dates"] == ["sold"]


def test_one_extreme_entry_does_not_darken_the_other_maps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(60, 5, 80))
    np.save("wide.npy", x)
    maps = np.random.default_rng(1).exponential(size=x.shape)
    maps[0, 0, 0] = 1e6

    class Detector:
        visible_shape_ = (5, 80)

        def explain(self, samples):
            return maps

    outliers_command._write_maps(Path("maps.png"), Detector(), x, list(range(60)), False, None)
    sheet = np.asarray(Image.open("maps.png"))
    assert sheet.shape == (30 * 21 - 1, 2 * 645 - 1)  # entries of 4x4 pixels, pairs of 20x644
    shown = sheet[:20:4, 324:644:4]
    limit = np.percentile(maps, 99)
    expected = np.rint(255 * ((maps[0] - maps.min()) / (limit - maps.min())).clip(max=1))
    np.testing.assert_array_equal(shown, expected)
