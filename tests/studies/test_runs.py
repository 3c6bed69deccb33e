"""Stores find finished runs by their settings or names, and ignore partial files; plans are ordered."""

import json

import pytest
import torch

from mvrbm import models
from mvrbm.errors import StorageError
from studies.runner import run_parts, run_plan
from studies.runs import Outcome, Place, Rows, Run, Store, with_dependencies

CALLS = []


def double(settings, place):
    CALLS.append(settings["x"])
    return Outcome({"twice": 2 * settings["x"]}, {"x": torch.tensor([settings["x"]])})


def sum_of_doubles(settings, place):
    CALLS.append("sum")
    return Outcome({"sum": sum(place.store.numbers(run)["twice"] for run in DOUBLES)})


def breaks(settings, place):
    raise ArithmeticError("no\nway")


def with_machine(settings, place):
    return Outcome({"nothing": float("nan")}, machine=models.mvrbm((3, 2), (2, 2), seed=1))


def make(x, work=double, **options):
    return Run(f"run-{x}", "group", work, {"x": x}, **options)


DOUBLES = (make(1), make(2))


@pytest.fixture
def place(tmp_path):
    CALLS.clear()
    return Place(Store(tmp_path / "runs"), "cpu")


def quietly(runs, place, **options):
    return run_plan(runs, place, say=lambda line: None, **options)


def test_what_is_stored_is_not_computed_again(place):
    assert quietly(DOUBLES, place).computed == ("run-1", "run-2")
    assert quietly(DOUBLES, place).computed == ()
    assert CALLS == [1, 2]
    assert place.store.numbers(DOUBLES[1]) == {"twice": 4}
    assert place.store.arrays(DOUBLES[1])["x"].tolist() == [2]


def test_other_settings_are_another_run_and_so_is_what_comes_after(place):
    def runs(x):
        first = Run("first", "group", double, {"x": x})
        return first, Run("second", "group", double, {"x": 0}, after=(first,))

    quietly(runs(1), place)
    assert quietly(runs(1), place).computed == ()
    assert quietly(runs(3), place).computed == ("first", "second")
    assert place.store.numbers(runs(3)[0]) == {"twice": 6}


def test_a_damaged_file_is_no_result(place):
    quietly(DOUBLES, place)
    (place.store.folder / "run-1.json").write_text("{")
    assert quietly(DOUBLES, place).computed == ("run-1",)


def test_a_run_waits_for_those_it_reads(place):
    total = Run("sum", "group", sum_of_doubles, {}, after=DOUBLES)
    assert quietly([total, *DOUBLES], place).computed == ("run-1", "run-2", "sum")
    assert place.store.numbers(total) == {"sum": 6}


def test_machines_are_kept_and_numbers_are_json(place):
    one = Run("machine", "group", with_machine, {})
    quietly([one], place)
    assert place.store.numbers(one) == {"nothing": None}
    machine = with_machine({}, place).machine
    for name, tensor in place.store.machine(one).state_dict().items():
        torch.testing.assert_close(tensor, machine.state_dict()[name])


def test_two_runs_do_not_share_a_folder(place):
    with place.store.locked():
        (place.store.folder / ".half-written").write_text("")
        with pytest.raises(StorageError, match="another command is computing in"):
            quietly(DOUBLES, place)
    quietly(DOUBLES, place)
    assert not (place.store.folder / ".half-written").exists()


def test_runs_stored_by_earlier_versions_are_found_in_their_folder(tmp_path):
    Store(tmp_path / "cells").write(DOUBLES[0], Outcome({"twice": 2}), {"seconds": 1.0})
    assert Store.within(tmp_path).numbers(DOUBLES[0]) == {"twice": 2}
    assert not (tmp_path / "cells").exists()
    assert Store.within(tmp_path).has(DOUBLES[0])


# -- plans ------------------------------------------------------------------------------------------


def test_a_plan_has_every_run_once_and_after_the_runs_that_it_reads():
    total = Run("sum", "group", sum_of_doubles, {}, after=DOUBLES)
    assert with_dependencies([total, DOUBLES[1]]) == [*DOUBLES, total]
    with pytest.raises(ValueError, match="two runs have the name run-1"):
        with_dependencies([DOUBLES[0], Run("run-1", "group", double, {"x": 5})])


# -- keys of version 0.1.0 --------------------------------------------------------------------------


def test_runs_with_former_names_of_settings_are_found(place):
    one = Run("one", "group", double, {"x": 1, "numbers": {"n_epochs": 3, "recipe": "paper"}})
    quietly([one], place)
    path = place.store.folder / "one.json"
    record = json.loads(path.read_text())
    record["key"]["settings"]["numbers"] = {"n_iter": 3, "preset": "paper"}
    path.write_text(json.dumps(record))
    assert quietly([one], place).computed == ()
    record["key"]["settings"]["numbers"]["n_iter"] = 4
    path.write_text(json.dumps(record))
    assert quietly([one], place).computed == ("one",)


# -- rows -------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path):
    CALLS.clear()
    return Place(Rows(tmp_path / "results", tmp_path / "models"), "cpu")


def test_rows_of_a_group_share_a_file(rows):
    (rows.store.folder).mkdir()
    (rows.store.folder / "few.json").write_text(json.dumps({"a name, n100": {"twice": 7}}))
    runs = [Run(name, group, double, {"x": 2}) for group in ("few", "full") for name in ("a name, n100", "b")]
    assert run_parts(runs, ["few", "full"], rows)["computed"] == 3  # by name: one was there
    assert rows.store.rows("few")["a name, n100"] == {"twice": 7}
    assert rows.store.rows("few")["b"]["twice"] == 4
    assert set(rows.store.rows("full")["b"]) == {"twice", "seconds", "device"}
    assert run_parts(runs, ["few", "full"], rows)["computed"] == 0
    assert CALLS == [2, 2, 2]
    assert rows.store.rows("nothing") == {}


def test_the_model_of_a_row_is_in_a_folder_of_its_own(rows):
    one = Run("x2, fine-tuned", "ship", with_machine, {})
    run_parts([one], ["ship"], rows)
    assert rows.store.model_folder("ship", "x2, fine-tuned").name == "x2-fine-tuned"
    assert (rows.store.model_folder("ship", "x2, fine-tuned") / "config.json").is_file()


def test_hidden_files_next_to_rows_are_kept(rows):
    rows.store.folder.mkdir()
    (rows.store.folder / ".git").mkdir()
    (rows.store.folder / ".mvrbm-half").write_text("")
    with rows.store.locked():
        pass
    assert (rows.store.folder / ".git").is_dir()
    assert not (rows.store.folder / ".mvrbm-half").exists()


def test_parts_can_be_limited_to_names(rows):
    runs = [Run(name, "part", double, {"x": 1}) for name in ("open x2", "T91 x2")]
    assert run_parts(runs, ["part"], rows, only="open")["stored"] == 1
    assert list(rows.store.rows("part")) == ["open x2"]
