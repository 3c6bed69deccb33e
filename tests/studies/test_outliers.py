"""The application outliers: it finds the defects that it plants, and its runs cover every tool."""

import numpy as np
import pytest

from studies.applications import outliers
from studies.runner import run_plan
from studies.runs import Place, Store


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


def test_every_class_is_compared_with_every_tool():
    runs = outliers.plan()
    assert len(runs) == (10 + 1 + 3 + 10) * (3 + len(outliers.TOOLS))  # two tools with two seeds
    assert len({run.name for run in runs}) == len(runs)


def test_a_tool_on_a_table_has_the_area_of_its_scores(tmp_path):
    runs = [run for run in outliers.plan(["wine"]) if run.settings["tool"] in ("lof", "5-nearest", "pca-error")]
    store = Store(tmp_path)
    assert not run_plan(runs, Place(store, "cpu"), say=lambda _: None).failed
    table = outliers.table(store, runs)
    assert list(table) == ["wine"]
    assert table["wine"]["lof"] == pytest.approx(0.976, abs=0.04)
    assert all(0.85 < area <= 1 for area in table["wine"].values())
