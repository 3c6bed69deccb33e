"""The plan changes one setting at a time, and stored results are complete."""

import json
from pathlib import Path

from studies import hyperparameters
from studies.__main__ import main

STORED = Path(__file__).parents[2] / "results" / "hyperparameters" / "results.json"


def test_runs_differ_from_the_start_in_one_setting_at_most():
    plan = hyperparameters.plan()
    assert len({run.name for run in plan}) == len(plan)
    for run in plan:
        assert sum(run.settings[key] != value for key, value in hyperparameters.START.items()) <= 1


def test_stored_results_are_those_of_the_plan():
    stored = json.loads(STORED.read_text())
    assert stored["start"] == hyperparameters.START
    found = [{key: row[key] for key in hyperparameters.START} for row in stored["rows"]]
    assert found == [dict(run.settings) for run in hyperparameters.plan()]


def test_stored_results_are_printed(capsys):
    assert main(["hyperparameters", "--out", str(STORED.parent), "--report-only"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(hyperparameters.plan())
