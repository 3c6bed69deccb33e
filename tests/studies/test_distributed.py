"""The study of distributed training: its model of the speed-up against the committed measurements."""

import json
from pathlib import Path

import pytest

from studies import distributed
from studies.cells import Outcome, Store

CURVE = json.loads((Path(__file__).parents[2] / "results" / "distributed" / "curve.json").read_text())


def test_the_committed_curves_follow_from_the_committed_times(tmp_path):
    store = Store(tmp_path)
    for cell in distributed.CELLS:
        numbers = CURVE["measured_seconds"][str(cell.settings["processes"])]
        store.write(cell, Outcome(numbers), {"seconds": 1.0})
    found = json.loads(json.dumps(distributed.results(store)))
    for key in ("bytes_an_update", "processes", "speed_up_loopback", "speed_up_fast_network"):
        assert found[key] == CURVE[key]
    assert found["loopback"] == pytest.approx(CURVE["loopback"])


def test_one_process_is_no_faster_than_itself_and_talking_costs():
    alone = {"100": 1e-3, "10000": 1e-1}
    free = distributed.speed_up(alone, 0.0, 1e30, 1)
    slow = distributed.speed_up(alone, 1.0, 1e30, 1)
    assert all(curve[0] == 1 for curve in (*free.values(), *slow.values()))
    assert free["1000000"][-1] == pytest.approx(1000, rel=0.01)
    assert slow["100"][1] < 0.01
