"""The studies of super-resolution: committed results have its cells, and its cells run on small images."""

from pathlib import Path

import numpy as np
import pytest

from studies.cells import Cell, Place, Rows
from studies.photographs import collecting as photographs
from studies.runner import run_parts
from studies.weights import images, measuring, study, training

COMMITTED = Path(__file__).parents[2] / "results" / "superres"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Twelve noisy pictures in the place of the open images, and of T91, Set5 and Lena."""
    random = np.random.default_rng(0)
    small = {name: random.integers(0, 256, (56, 56, 3), dtype=np.uint8) for name in images.LICENSES}
    for module in (training, measuring):
        for name, found in {
            "open_images": lambda work: dict(small),
            "set5": lambda data_dir: list(small.values())[:2],
            "lena": lambda data_dir: small["camera"],
            "split_t91": lambda data_dir: (list(small.values())[:4], list(small.values())[4:6]),
            "has_files": lambda data_dir: True,
            "training_images": lambda name, data_dir: list(small.values())[:4],
            "named_training_images": lambda name, data_dir: dict(small),
        }.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, found)
    return Place(Rows(tmp_path / "results", tmp_path / "models"), "cpu", work=tmp_path)


def test_committed_results_are_cells_of_the_plan(tmp_path):
    store = Rows(COMMITTED, tmp_path)
    for scale in (2, 3, 4):
        (store.model_folder("t91", f"x{scale}")).mkdir(parents=True)
    place = Place(store, "cpu")
    names = {}
    for cell in (*training.cells(place), *measuring.cells(place)):
        names.setdefault(cell.group, set()).add(cell.name)
    assert tuple(names) == study.GROUPS
    for group in ("paper", "choose", "t91", "cpu", "speed", "generative"):
        assert set(store.rows(group)) <= names[group], group
        assert store.rows(group)


def test_a_tiny_model_goes_from_start_to_measurement(place, monkeypatch):
    monkeypatch.setattr(training, "SETTINGS", {"p6": {"patch": 6, "hidden_shape": (3, 3), "rank": 1}})
    model = {"patch": 6, "hidden_shape": (3, 3), "rank": 1}
    start = {"name": "p6", "scale": 2, "images": "T91, part", "cd": 1, "model": model, "tiny": True}
    tune = {"setting": "p6", "start": "p6", "cd": 1, "patches": training.PATCHES, "crops": training.CROPS, "tiny": True}
    cells = [Cell("p6", "starts", training.start, start), Cell("p6", "choose", training.choose, tune)]
    counts = run_parts(cells, ["starts", "choose"], place)
    assert counts["computed"] == 2
    row = place.store.rows("choose")["p6"]
    assert len(row["patches_loss"]) == len(row["images_loss"]) == 2
    assert len(row["held_out"]) == 2
    assert place.store.model_folder("choose", "p6").is_dir()


def test_bicubic_is_measured_in_both_protocols(place):
    row = measuring.cpu({"model": "bicubic", "scale": 2}, place).numbers
    assert set(row) == {"set5", "set5_paper", "lena_paper", "lena_literature"}


def test_missing_open_images_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="is missing: run the part 'collect' first"):
        images.open_images(tmp_path)


def test_crops_of_photographs_come_with_the_most_detailed_first():
    image = np.full((400, 600, 3), 90, np.uint8)
    image[:192, 192:384] = np.random.default_rng(0).integers(0, 256, (192, 192, 1))
    image[192:384, :192] = np.random.default_rng(1).integers(80, 100, (192, 192, 1))
    found = photographs.crops(image)
    assert len(found) == 6
    np.testing.assert_array_equal(found[0][1], image[:192, 192:384])
    np.testing.assert_array_equal(found[1][1], image[192:384, :192])
    assert found[0][0] > found[1][0] > found[2][0] == 0


def test_each_photograph_to_train_with_has_a_license_that_is_known():
    known = ("CC0-1.0", "CC-BY-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "GPL-2+", "LGPL-3")
    listed = {name: text for _, licenses in photographs.PHOTOGRAPHS.values() for name, text in licenses.items()}
    assert {text.split(", ")[0] for text in listed.values()} <= set(known)
    assert set(photographs.HELD_OUT) <= {*listed, *images.LICENSES}
