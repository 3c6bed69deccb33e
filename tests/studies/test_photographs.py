"""The study of the shipped weights: a tiny training run, and the cells of the committed results."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mvrbm.vision import pretrained
from mvrbm.vision.pretrained import read_stages
from studies.photographs import collecting, images, measuring, training
from studies.runs import Place, Rows

COMMITTED = Path(__file__).parents[2] / "results"


def test_committed_results_are_runs():
    names = {}
    for cell in measuring.cells():
        names.setdefault(cell.group, set()).add(cell.name)
    assert set(names) == set(measuring.GROUPS)
    for group, folder in measuring.GROUPS.items():
        assert set(Rows(COMMITTED / folder, COMMITTED).rows(group)) <= names[group]


def test_shipped_weights_are_those_that_are_trained():
    assert {path.stem for path in pretrained.WEIGHTS.glob("*.safetensors")} == set(training.MODELS)


@pytest.fixture
def archive(tmp_path):
    """Crops of noise that is smooth along rows."""
    random = np.random.default_rng(0)
    with zipfile.ZipFile(tmp_path / "crops.zip", "w") as file:
        for name in ("gray/a", "gray/b", "color/c", "valid/d"):
            pixels = np.repeat(random.integers(0, 256, (192, 48, 3), dtype=np.uint8), 4, 1)
            content = io.BytesIO()
            Image.fromarray(pixels[..., 0] if name.startswith("gray") else pixels).save(content, "WEBP", lossless=True)
            file.writestr(f"{name}.webp", content.getvalue())
    return tmp_path / "crops.zip"


@pytest.mark.parametrize("name", ["x2", "color", "salt"])
def test_a_tiny_training_makes_better_images(name, archive, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "_VALIDATION_SIDE", {1: 32, 2: 32})
    monkeypatch.setattr(training, "_BATCH", 8)
    stride = 2 if name == "x2" else (2,)
    tiny = {"patch": (4,), "stride": stride, "hidden_shape": (2, 2), "rank": 2}
    row = training.train(name, archive, 20, tmp_path / "out", "cpu", **tiny)
    starts, ends = np.array(list(row["valid"].values())).T
    assert (ends > starts - 0.6).all()
    assert ends.mean() > starts.mean() - 0.35
    assert read_stages(tmp_path / "out" / f"{name}.safetensors").n_parameters == row["parameters"]


def test_low_resolution_in_three_protocols():
    truth = np.random.default_rng(0).integers(64, 192, (24, 24), dtype=np.uint8)  # so that nothing is clipped
    floats, whole, mirrored = (measuring._reduced(truth, 2, each) for each in ("floats", "bytes", "mirrored"))
    np.testing.assert_allclose(floats, whole, atol=1.1 / 255)  # rounded twice, with weights of sum 1.19 in magnitude
    np.testing.assert_allclose(floats[3:-3, 3:-3], mirrored[3:-3, 3:-3], atol=1e-6)
    assert abs(floats - mirrored).max() > 1e-3


def test_a_run_measures_salt(tmp_path):
    row = measuring.salt({"image": "microaneurysms", "share": 0.1}, Place(Rows(tmp_path, tmp_path), "cpu")).numbers
    assert row["noisy"] < row["median"] < row["stages"]


def test_crops_of_photographs_come_with_the_most_detailed_first():
    image = np.full((400, 600, 3), 90, np.uint8)
    image[:192, 192:384] = np.random.default_rng(0).integers(0, 256, (192, 192, 1))
    image[192:384, :192] = np.random.default_rng(1).integers(80, 100, (192, 192, 1))
    found = collecting.crops(image)
    assert len(found) == 6
    np.testing.assert_array_equal(found[0][1], image[:192, 192:384])
    np.testing.assert_array_equal(found[1][1], image[192:384, :192])
    assert found[0][0] > found[1][0] > found[2][0] == 0


def test_each_photograph_to_train_with_has_a_license_that_is_known():
    known = ("CC0-1.0", "CC-BY-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "GPL-2+", "LGPL-3")
    listed = {name: text for _, licenses in collecting.PHOTOGRAPHS.values() for name, text in licenses.items()}
    assert {text.split(", ")[0] for text in listed.values()} <= set(known)
    assert set(collecting.HELD_OUT) <= {*listed, *images.LICENSES}


def test_every_open_image_has_a_license():
    assert set(images.open_images()) == set(images.LICENSES)
