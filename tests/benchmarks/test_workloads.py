"""The benchmark of workloads: every row runs at tiny sizes, and floors are those of the counted products."""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest

from benchmarks import floors, problems, workloads
from benchmarks.__main__ import main
from benchmarks.problems import Problem
from benchmarks.workloads import Workload
from mvrbm.backends.choose import BACKENDS
from mvrbm.errors import DatasetError


def tiny(workload):
    order = len(workload.visible)
    shapes = {"visible": (6, 5, 4)[:order], "hidden": (4, 3, 2)[:order], "rank": min(workload.rank, 2)}
    sizes = {"batch_size": 10, "chains": 8 if workload.chains else 0, "models": min(workload.models, 2)}
    return dataclasses.replace(workload, **shapes, **sizes, n_samples=20, temperatures=min(workload.temperatures, 2))


@pytest.fixture
def small(monkeypatch, tmp_path):
    images = np.random.default_rng(0).random((20, 8, 8)).astype(np.float32)
    monkeypatch.setattr(problems, "_source", lambda: (images, "noise"))
    monkeypatch.setattr(workloads, "WORKLOADS", {name: tiny(each) for name, each in workloads.WORKLOADS.items()})
    monkeypatch.setattr(workloads, "REPETITIONS", 1)
    monkeypatch.setattr(workloads, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(workloads, "ANNEALED", (2, 4))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_every_row_is_timed_and_one_that_fails_leaves_the_others(small, monkeypatch, capfd):
    broken = dataclasses.replace(workloads.WORKLOADS["rank 4, CD-1"], hidden=(4,))
    monkeypatch.setitem(workloads.WORKLOADS, "rank 4, CD-1", broken)
    assert main(["workloads", "--device", "cpu", "--out", "w.json"]) == 0
    out = capfd.readouterr().out
    rows = json.loads((small / "w.json").read_text())["workloads"]
    assert rows.keys() == workloads.WORKLOADS.keys()
    for name, row in rows.items():
        assert f"| {name} " in out
        if name == "rank 4, CD-1":
            assert "(4,)" in row["missing"] or "order" in row["missing"]
        elif "missing" in row:  # only kernels train many models together
            assert row["missing"] == "rbms" or ("64 models" in name and "together" in row["missing"]), (name, row)
        else:
            assert row["microseconds"]["median"] != 0
    # A second run has nothing left but the row that failed.
    before = (small / "runs/workloads/cells/rank-1-CD-1.json").stat().st_mtime_ns
    assert main(["workloads", "--device", "cpu", "--only", "rank 1"]) == 0
    assert (small / "runs/workloads/cells/rank-1-CD-1.json").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("name", "path"), [("64 models, rank 1, PCD(100)", "PerSampleBackend")])
def test_whole_epochs_are_timed_by_the_path_that_the_trainer_chooses(name, path, small):
    row = workloads.measure(small, only=name, device="cpu")["workloads"][name]
    assert row["path"] == path
    assert row["microseconds"]["median"] > 0


def test_noise_stands_in_for_digits(monkeypatch):
    def load(name):
        raise DatasetError(name)

    monkeypatch.setattr(problems.datasets, "load", load)
    images, what = problems._source.__wrapped__()
    assert images.shape == (5000, 28, 28)
    assert what.startswith("noise")


def test_operations_are_those_of_the_products():
    structured, dense = Problem((28, 28), (25, 25), 4, 100), Problem((28, 28), (20, 25), 1, 100)
    assert workloads.counts(Workload(rank=4))["operations"] == floors.flops(structured, "cd")
    same = Workload(rank=4, chains=100)
    assert workloads.counts(same)["operations"] == floors.flops(structured, "pcd")
    twice = dataclasses.replace(same, models=2)
    assert workloads.counts(twice)["operations"] == 2 * floors.flops(structured, "pcd")
    full = Workload(hidden=(20, 25), rank=0)
    assert workloads.counts(full)["operations"] == floors.flops(dense, "cd", dense=True)
    assert workloads.counts(full)["random numbers"] == floors.random_numbers(dense, "cd")
    assert workloads.counts(full)["bytes"] == sum(floors.traffic(dense, "cd", dense=True).values())
    # Twice the chains: three fields and one gradient of them more.
    field, gradient = floors.per_sample(dense, dense=True)
    more = dataclasses.replace(full, chains=200)
    assert workloads.counts(more)["operations"] == 100 * (7 * field + 3 * gradient)
    # A rank that takes more than the full matrix counts as the full matrix.
    assert workloads.counts(Workload(hidden=(20, 25), rank=400))["operations"] == floors.flops(dense, "cd", dense=True)


def test_the_floor_is_the_slowest_part():
    rates = {"flops_fp32": 1e12, "flops_tf32": 1e12, "bytes": 1e15, "random": 1e15, "node": 1e-9}
    found = workloads.floor(Workload(), rates)
    assert (found["floor"], found["limit"]) == (pytest.approx(44.1), "arithmetic")
    assert workloads.floor(Workload(), {**rates, "node": 1.0})["limit"] == "one graph node"


def test_every_backend_is_timed_on_the_workloads_that_it_can_compute(small, capfd):
    assert main(["backends", "--device", "cpu", "--only", "rank 16, CD-1", "--out", "b.json"]) == 0
    out = capfd.readouterr().out
    (row,) = json.loads((small / "b.json").read_text())["workloads"].values()
    assert "| rank 16, CD-1 " in out
    assert row["chosen"] in ("native", "gemm")
    for name in ("gemm", "reference"):
        assert row["backends"][name]["median"] > 0
    assert "cpu" in row["backends"]["graph"]["unsupported"]
    assert row["backends"].keys() == BACKENDS.keys()
