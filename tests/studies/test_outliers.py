"""The applications outliers and alarms: families of data, planted defects, and runs of every tool."""

import numpy as np
import pytest

from studies.applications import alarms, outlier_families, outliers, page, unseen
from studies.runner import run_plan
from studies.runs import Outcome, Place, Store


def test_defects_are_squares_of_the_stroke_and_are_found_where_they_are():
    rng = np.random.default_rng(0)
    images = (rng.random((20, 12, 12)) < 0.3).astype(np.float32)
    changed, where = outliers.plant_defects(images, rng)
    np.testing.assert_array_equal(np.abs(changed - images), where)
    assert (where.sum((1, 2)) == 9).all()
    centers = [np.argwhere(mask).mean(0).astype(int) for mask in where]
    assert all(image[tuple(center)] == 1 for image, center in zip(images, centers, strict=True))
    noise = 0.1 * rng.random(where.shape)
    assert outliers.share_found(where + noise, where) == 1  # 5 % of 144 entries are 8 of the 9 that were changed
    assert outliers.share_found(noise, where) == 0


@pytest.mark.parametrize("family", ["digits", "textures", "lfw", "eeg-like", "spectrograms", "tables"])
def test_tasks_have_normal_samples_and_others(family):
    tasks, load = outlier_families.FAMILIES[family]
    for name in (tasks[0], tasks[-1]):
        task = load(name, np.random.default_rng(0), None)
        assert task.train.shape[1:] == task.normal.shape[1:] == task.outliers.shape[1:]
        assert min(map(len, task)) > 10
        rows = [{row.tobytes() for row in part} for part in task]
        assert not rows[0] & rows[1]  # no test sample is a training sample
        assert not rows[2] & (rows[0] | rows[1])


@pytest.mark.parametrize("family", ["textures", "eeg-like", "spectrograms"])
def test_normal_samples_are_distinct(family):
    found = outlier_families.normal_samples(family, 20, 0, None)
    assert len({sample.tobytes() for sample in found}) == 20


@pytest.mark.slow
def test_every_task_is_a_run_with_every_tool(tmp_path):
    runs = outliers.plan()
    tasks = sum(len(names) for names, _ in outlier_families.FAMILIES.values())
    assert len(runs) == len({run.name for run in runs}) == 2 * tasks
    chosen = [run for run in outliers.plan(["tables"]) if run.settings["task"].startswith("wine")]
    store = Store(tmp_path)
    assert not run_plan(chosen, Place(store, "cpu"), say=lambda _: None).failed
    table = outliers.table(store, chosen)
    assert list(table) == ["tables"]
    assert set(table["tables"]) == {outliers.OURS, *outliers.TOOLS}
    assert all(0.5 < area <= 1 for area in table["tables"].values())


@pytest.mark.slow
def test_false_alarms_are_counted_for_every_detector(tmp_path):
    runs = [run for run in alarms.plan([50]) if run.settings["family"] == "spectrograms"]
    store = Store(tmp_path)
    assert not run_plan(runs[:2], Place(store, "cpu"), say=lambda _: None).failed
    table = alarms.table(store, runs[:2])
    assert list(table) == ["50 training samples"]
    assert set(table["50 training samples"]) == set(alarms.DETECTORS)
    assert all(0 <= share < 0.5 for share in table["50 training samples"].values())
    assert page.multiples("alarms", table) == {}


@pytest.mark.parametrize("family", ["pictures", "tissue in color", "shapes"])
def test_unseen_tasks_have_normal_samples_and_others(family):
    pytest.importorskip("skimage")
    tasks, load, _ = unseen.FAMILIES[family]
    for name in (tasks[0], tasks[-1]):
        task = load(name, np.random.default_rng(0))
        assert task.train.shape[1:] == task.normal.shape[1:] == task.outliers.shape[1:]
        assert len(task.train) == 1000
        rows = [{row.tobytes() for row in part} for part in task]
        # Patches at random places, and unchanged ones, may coincide.
        assert len(rows[0] & rows[1]) + len(rows[2] & (rows[0] | rows[1])) < 0.02 * len(task.train)


def test_unseen_results_are_means_over_tasks_and_families(tmp_path):
    runs = unseen.plan()
    assert len(runs) == len({run.name for run in runs})
    store = Store(tmp_path)
    families = list(unseen.FAMILIES)
    for run in runs:
        if run.settings["n"] == 50:
            number = families.index(run.settings["family"]) / 10
            numbers = {"auc": {"mvrbm": number, "lof": 0.5}, "alarms": {"mvrbm": 0.02, "lof": 0.0}, "n_training": 50}
            store.write(run, Outcome(numbers), {"seconds": 1.0, "on": {"device": "cpu"}})
    found = unseen.table(store, runs)
    assert found["shapes, 50 training samples"] == {"mvrbm": pytest.approx(0.2), "lof": 0.5}
    assert found["mean of the families, 50 training samples"]["mvrbm"] == pytest.approx(0.25)
    assert found["false alarms, 50 training samples"]["mvrbm"] == pytest.approx(0.02)
    assert not any("200" in name for name in found)  # no results yet


def test_false_alarms_nearest_to_the_wanted_share_are_bold():
    areas, alarms_of = {"mvrbm": 0.7, "lof": 0.6}, {"mvrbm": 0.024, "lof": 0.056}
    text = page.page({"unseen": {"mean of the families, 50": areas, "false alarms, 50": alarms_of}})
    assert "| mean of the families, 50 | **0.7** | 0.6 |" in text
    assert "| false alarms, 50 | **0.024** | 0.056 |" in text
