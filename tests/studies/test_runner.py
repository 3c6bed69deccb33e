"""The runner: dependencies, failures, budgets, and what a killed command leaves behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from studies.runner import run_parts, run_plan
from studies.runs import Outcome, Place, Run, RunError, Store

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}


def double(settings, place):
    return Outcome({"twice": 2 * settings["x"]})


def breaks(settings, place):
    raise ArithmeticError("no\nway")


def make(x, work=double, **options):
    return Run(f"run-{x}", "group", work, {"x": x}, **options)


@pytest.fixture
def place(tmp_path):
    return Place(Store(tmp_path / "runs"), "cpu")


def quietly(runs, place, **options):
    return run_plan(runs, place, say=lambda line: None, **options)


def test_one_runs_trouble_is_not_the_others(place):
    broken = Run("broken", "group", breaks, {})
    behind = Run("behind", "group", double, {"x": 5}, after=(broken,))
    foreign = make(7, needs=("a_package_that_is_not",))
    summary = quietly([broken, behind, foreign, make(1)], place)
    assert summary.failed == {"broken": "ArithmeticError: no way"}
    assert summary.lacking == {"run-7": "a_package_that_is_not"}
    assert (summary.left, summary.stored) == (("behind",), ("run-1",))


def test_no_run_is_begun_after_the_time_is_up(place):
    def slow(settings, place):
        time.sleep(0.15)
        return Outcome({})

    summary = quietly([Run(f"slow-{i}", "group", slow, {}) for i in range(5)], place, budget=0.2)
    assert (len(summary.computed), len(summary.left)) == (2, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"jobs": 0}, "jobs must be at least 1, got 0"), ({"budget": -1}, "budget must be positive, got -1")],
)
def test_arguments_of_a_run_are_checked(place, options, message):
    with pytest.raises(ValueError, match=message):
        quietly([make(1)], place, **options)


def test_names_are_their_own(place):
    with pytest.raises(ValueError, match="unique names, got several of"):
        quietly([make(1), make(1)], place)


def test_failures_are_raised_after_all_parts(place):
    runs = [Run("broken", "one", breaks, {}), Run("good", "two", double, {"x": 1})]
    with pytest.raises(RunError, match="1 of 1 runs failed; the first: broken: ArithmeticError: no way"):
        run_parts(runs, ["one", "two"], place)
    assert place.store.has(runs[1])


# -- killed -----------------------------------------------------------------------------------------

# Every run writes to a log that it has begun, so that lost work shows.
WORKER = """
import sys, time
from pathlib import Path
import numpy as np
from studies.runs import Run, Outcome, Place, Store
from studies.runner import run_plan

def work(settings, place):
    with open(place.data_dir, "a") as log:
        log.write(f"{settings['i']}\\n")
    time.sleep(0.2)
    return Outcome({"value": float(np.random.default_rng(settings["i"]).random())})

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    runs = [Run(f"c{i}", "g", work, {"i": i}) for i in range(8)]
    run_plan(runs, Place(Store.within(folder), "cpu", str(folder / "log")), jobs=int(sys.argv[2]))
"""


def values(folder):
    return {path.name: json.loads(path.read_text())["numbers"] for path in (folder / "runs").glob("*.json")}


def start(folder, jobs):
    folder.mkdir(exist_ok=True)
    script = folder / "worker.py"
    script.write_text(WORKER)
    arguments = [sys.executable, str(script), str(folder), str(jobs)]
    return subprocess.Popen(arguments, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True)


def until_stored(folder, count, process):
    end = time.monotonic() + 60
    while len(values(folder)) < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.02)


def is_gone(group):
    """Whether nobody is left of a process group, a moment granted."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_killed_anywhere_at_most_one_run_is_lost(tmp_path):
    process = start(tmp_path / "killed", 1)
    until_stored(tmp_path / "killed", 3, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    process = start(tmp_path / "killed", 1)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    begun = (tmp_path / "killed" / "log").read_text().split()
    assert len(begun) <= 8 + 1
    assert set(begun) == set(map(str, range(8)))
    expected = {f"c{i}.json": {"value": float(np.random.default_rng(i).random())} for i in range(8)}
    assert values(tmp_path / "killed") == expected


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_keeps_what_is_done(tmp_path):
    process = start(tmp_path / "stopped", 2)
    until_stored(tmp_path / "stopped", 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    errors = process.communicate(timeout=30)[1]
    assert process.returncode != 0
    assert re.search(r"interrupted: \d of 8 runs are stored, repeat the command to resume", errors)
    assert is_gone(process.pid)
    process = start(tmp_path / "stopped", 2)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 0, errors
    assert len((tmp_path / "stopped" / "log").read_text().split()) <= 8 + 2
    assert len(values(tmp_path / "stopped")) == 8
