"""The study of deep learning: choices are made by rule, and committed results are those of its runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from studies import deep
from studies.runs import Place, Rows, RunError

COMMITTED = Rows(Path(__file__).parents[2] / "results" / "deep", Path("runs/deep"))


def test_choices_are_those_of_the_committed_results():
    for kind in deep.FULL:
        settings = {row["settings"] for name, row in COMMITTED.rows("full").items() if name.startswith(f"{kind} s")}
        assert settings == {deep.chosen(kind, COMMITTED.rows("choose"))}
    for row in deep.FEW:
        for n in deep.SIZES:
            stored = COMMITTED.rows("few").get(f"{row} n{n} s0")
            if stored is not None:
                assert stored["settings"] == deep.chosen_few(row, n, COMMITTED.rows("choose-few")), (row, n)


def test_nothing_is_chosen_without_results():
    with pytest.raises(RunError, match="nothing is chosen for 'deep' yet: run the part 'choose' first"):
        deep.chosen("deep", {"two, dropout 0.4": {"parameters": 10**6}})
    with pytest.raises(RunError, match="'labels alone' and 100 labels yet: run the part 'choose-few' first"):
        deep.chosen_few("labels alone", 100, {})


def test_most_committed_runs_are_in_the_plan():
    """Some were computed with settings that were dropped later."""
    for part in ("few", "baselines", "full"):
        stored, planned = COMMITTED.rows(part), {run.name for run in deep.PLAN if run.group == part}
        assert sum(name in planned for name in stored) >= 0.9 * len(planned & set(stored)) > 0


@pytest.fixture
def place(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (300, 28, 28), dtype=np.uint8), np.arange(300) % 10
    monkeypatch.setattr(deep, "digits", lambda split, data_dir: (images, labels))
    monkeypatch.setattr(deep, "subset", lambda size, n, seed: np.arange(n))
    monkeypatch.setattr(deep, "SHAPES", {"one": ((4, 4),), "two": ((4, 4), (3, 3)), "wide": ((5, 5),)})
    return Place(Rows(tmp_path / "results", tmp_path / "models"), "cpu", work=tmp_path / "work")


@pytest.mark.parametrize("row", ["labels alone", "unlabeled, semi-supervised", "unlabeled, pre-trained"])
def test_a_run_of_few_labels(row, place, monkeypatch):
    name, (make, uses) = next(iter(deep.FEW[row].items()))
    small = lambda n, seed, device: make(n, seed, device).set_params(n_epochs=1)  # noqa: E731
    monkeypatch.setitem(deep.FEW[row], name, (small, uses))
    settings = {"row": row, "candidate": name, "n": 100, "seed": 0}
    monkeypatch.setattr(deep, "HELD_OUT", 200)
    numbers = deep.few(settings, place).numbers
    assert 0 <= numbers["validation_error"] <= 1
    assert numbers["settings"] == name


def test_baselines_and_logistic_regression(place):
    numbers = deep.baseline({"baseline": deep.LOGISTIC, "n": 50, "seed": 0}, place).numbers
    assert set(numbers) == {"test_error", "C", "parameters"}
    assert numbers["test_error"] < 0.9


def test_the_table_of_the_committed_results():
    text = deep.table(COMMITTED)
    rows = json.loads((COMMITTED.folder / "full.json").read_text())
    errors = [row["test_error"] for name, row in rows.items() if name.startswith("one layer s")]
    assert f"| full | one layer | one, distance 1.2, dropout 0.2 | 102,410 | {np.mean(errors):.4f} ±" in text
