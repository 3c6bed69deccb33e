"""The study of learning: every kind of run works, and results have the form of the committed ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from studies import learning
from studies.data import Digits
from studies.runs import Place, Store

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (60, 28, 28), dtype=np.uint8), np.arange(60) % 10
    monkeypatch.setattr(learning, "digits", lambda *about: Digits(images, labels, images[:40], labels[:40]))
    monkeypatch.setattr(learning, "subset", lambda size, n, seed: np.arange(50))
    monkeypatch.setattr(learning, "all_photographs", lambda data_dir: random.integers(0, 256, (30, 128, 128), "uint8"))
    monkeypatch.setattr(learning, "EPOCHS", (1,))
    monkeypatch.setattr(learning, "UPDATES", 22)
    return Place(Store(tmp_path / "runs"), "cpu", work=tmp_path / "work")


SMALL = {
    "seeds": {"seed": 0},
    "grid": {"unit": "gaussian", "visible": (4, 4), "hidden": (3, 3), "rank": 2, "seed": 0, "updates": 10},
    "paper": {"seed": 0, "epochs": 1},
    "reconstruction": {"each": 4, "epochs": 2},
    "likelihood": {"negative": "PCD-1", "seed": 0},
    "memory": {"bytes": 784 * 1000, "updates": 5},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_run_has_the_columns_of_the_committed_results(name, place):
    numbers = learning.PARTS[name].compute(SMALL[name], place).numbers
    committed = json.loads((ROOT / "results" / "learning" / f"{name}.json").read_text())["rows"]
    columns = {key for row in committed for key in row if not key.startswith("error at") and not key.isdigit()}
    if name == "grid":
        columns |= {"least standard deviation"}
    assert {key for key in numbers if not key.startswith("error at") and not key.isdigit()} == columns


def test_defaults_measure_after_the_given_epochs(place, monkeypatch):
    numbers = learning.defaults({"seed": 0}, place).numbers
    assert set(numbers) == {"subset", "raw", "norm peak / final"}  # 50 samples make one update, 100 are an epoch


def test_reconstruction_resumes(place):
    learning.reconstruction({"each": 4, "epochs": 1}, place)
    both = learning.reconstruction({"each": 4, "epochs": 3}, place).numbers
    assert both["passes"] == 3


def test_summaries_of_the_committed_rows_are_the_committed_summaries():
    for name, part in learning.PARTS.items():
        committed = json.loads((ROOT / "results" / "learning" / f"{name}.json").read_text())
        found = json.loads(json.dumps(part.summary(committed["rows"])))
        assert set(found) == set(committed["summary"])
        for key, value in committed["summary"].items():
            assert found[key] == pytest.approx(value, rel=1e-3), (name, key)


def test_the_plan_has_as_many_runs_as_the_committed_results():
    for name, part in learning.PARTS.items():
        committed = json.loads((ROOT / "results" / "learning" / f"{name}.json").read_text())
        assert len(part.settings) == len(committed["rows"])


def test_results_are_written_from_the_runs(tmp_path, monkeypatch, place, capfd):
    part = learning.Part(learning.seeds, [{"seed": 0}, {"seed": 1}], learning._worst)
    runs = [learning.Run(f"seeds-{n}", "seeds", part.compute, part.settings[n]) for n in range(2)]
    monkeypatch.setattr(learning, "PARTS", {"seeds": part})
    monkeypatch.setattr(learning, "PLAN", runs)
    options = ["learning", "seeds", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "w")]
    from studies.__main__ import main

    assert main(options) == 0
    out = capfd.readouterr().out
    assert "worst norm peak / final:" in out
    assert [row["seed"] for row in json.loads((tmp_path / "out" / "seeds.json").read_text())["rows"]] == [0, 1]
    assert main([*options, "--report-only"]) == 0
    assert capfd.readouterr().out == out
