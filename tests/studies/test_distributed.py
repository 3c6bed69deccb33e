"""The study of distributed training: the predicted speedups follow from the committed measurements."""

import json
from pathlib import Path

import pytest

from studies import distributed
from studies.runs import Outcome, Store

CURVE = json.loads((Path(__file__).parents[2] / "results" / "distributed" / "curve.json").read_text())


def test_the_committed_curves_follow_from_the_committed_times(tmp_path):
    store = Store(tmp_path)
    for run in distributed.PLAN:
        workload = CURVE["workloads"][run.settings["workload"]]
        numbers = workload["measured_seconds"][str(run.settings["processes"])]
        store.write(run, Outcome(numbers), {"seconds": 1.0})
    found = json.loads(json.dumps(distributed.results(store)))
    assert found["processes"] == CURVE["processes"]
    assert found["workloads"].keys() == CURVE["workloads"].keys()
    for mine, committed in zip(found["workloads"].values(), CURVE["workloads"].values(), strict=True):
        for key in ("bytes_per_update", "speed_up_loopback", "speed_up_fast_network"):
            assert mine[key] == committed[key]
        assert mine["loopback"] == pytest.approx(committed["loopback"])


def test_one_process_is_no_faster_than_itself_and_talking_costs():
    alone = {"100": 1e-3, "10000": 1e-1}
    free = distributed.speed_up(alone, 0.0, 1e30, 1)
    slow = distributed.speed_up(alone, 1.0, 1e30, 1)
    assert all(curve[0] == 1 for curve in (*free.values(), *slow.values()))
    assert free["1000000"][-1] == pytest.approx(1000, rel=0.01)
    assert slow["100"][1] < 0.01
