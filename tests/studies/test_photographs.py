"""The study of the shipped stages: what they learn to undo, a tiny training, and cells of the committed results."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage.data import camera

from mvrbm.vision import shipped
from mvrbm.vision.shipped import ShippedStages
from studies.photographs import collecting, degrading, images, measuring, training
from studies.runs import Place, Rows

COMMITTED = Path(__file__).parents[2] / "results"


def test_committed_results_are_runs():
    names = {}
    for cell in measuring.cells():
        names.setdefault(cell.group, set()).add(cell.name)
    assert set(names) == set(measuring.GROUPS)
    for group, folder in measuring.GROUPS.items():
        assert set(Rows(COMMITTED / folder, COMMITTED).rows(group)) <= names[group]


def test_shipped_weights_are_of_the_sizes_that_are_trained():
    for name in training.TASKS:
        parameters = sum(p.numel() for p in training.Model(name).parameters())
        assert ShippedStages(name, torch.device("cpu")).n_parameters == parameters
    assert {path.stem for path in shipped.WEIGHTS.glob("*.safetensors")} == set(training.TASKS)


@pytest.mark.parametrize("quality", [20, 75, 95])
def test_jpeg_is_as_bad_as_pillows(quality, monkeypatch):
    monkeypatch.setattr(torch, "randint", lambda *given, **options: torch.zeros(2, 1, 1, dtype=torch.long))
    gray = camera()[100:228, 200:320]
    file = io.BytesIO()
    Image.fromarray(gray).save(file, "JPEG", quality=quality)
    expected = np.asarray(Image.open(file)).astype(float)
    y = (torch.from_numpy(gray).float()[None, None] * 219 / 255 + 16) / 255  # as luminance
    found, amount = degrading.jpeg(y, torch.tensor([float(quality)]))
    found = ((found[0, 0] * 255 - 16) * 255 / 219).numpy()
    assert np.abs(found - expected).mean() < 0.3
    np.testing.assert_allclose(np.square(found - gray).mean(), np.square(expected - gray).mean(), rtol=0.01)
    assert 0 < amount < 0.2


def test_blocks_of_jpeg_begin_anywhere():
    torch.manual_seed(0)
    images = torch.rand(1, 1, 16, 16).expand(8, 1, 16, 16)
    found, _ = degrading.jpeg(images, torch.full((8,), 30.0))
    assert len({tuple(each.flatten().tolist()) for each in found}) > 1


@pytest.mark.parametrize("task", ["gray", "color", "jpeg", "salt"])
def test_images_are_degraded_by_as_much_as_is_said(task):
    rng = torch.Generator().manual_seed(0)
    truth = torch.rand(3, 3 if task == "color" else 1, 16, 16, generator=rng) * 0.8 + 0.1
    found = degrading.degrade(task, truth, rng)
    assert found.images.shape == truth.shape
    assert (found.amount > 0).all()
    assert (found.mask is not None) == (task == "salt")
    level = {"gray": 20, "color": 20, "jpeg": 50, "salt": 0.25}[task]
    some = degrading.degrade(task, truth.expand(-1, -1, -1, -1).repeat(1, 1, 4, 4), rng, level)
    if task in ("gray", "color"):
        goal = degrading.opponent(truth) if task == "color" else truth
        assert (some.images - goal.repeat(1, 1, 4, 4)).std() == pytest.approx(20 / 255, rel=0.05)
    if task == "salt":
        assert some.mask.mean() == pytest.approx(0.25, abs=0.03)


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
    tiny = training.TASKS[name]._replace(patches=(4,), strides=(2,), hidden=(2, 2), rank=2, crop=32, share=1.0)
    monkeypatch.setitem(training.TASKS, name, tiny)
    monkeypatch.setattr(training, "_WARM_UP", 1)
    monkeypatch.setattr(training, "_RATE", 0.02)
    monkeypatch.setattr(training, "_DIVERGENCE", 0.3)
    monkeypatch.setattr(training, "_VALID", {0: 32, 2: 32})
    row = training.train(name, archive, 0.5, tmp_path / "out", "cpu")
    assert row["updates"] > 0
    # How many updates half a second has depends on the machine: after a few, pictures with little noise may be worse.
    starts, ends = np.array(list(row["valid"].values())).T
    assert (ends > starts - 0.5).all()
    assert ends.mean() > starts.mean() - 0.02
    found = ShippedStages(tmp_path / "out" / f"{name}.safetensors", torch.device("cpu"))
    assert found.n_parameters == row["parameters"]
    again = training.train(name, archive, 0.1, tmp_path / "again", "cpu", tmp_path / "out" / f"{name}.pt")
    assert again["parameters"] == row["parameters"]


def test_low_resolution_in_three_protocols():
    truth = np.random.default_rng(0).integers(0, 256, (24, 24), dtype=np.uint8)
    floats, whole, mirrored = (measuring._reduced(truth, 2, each) for each in ("floats", "bytes", "mirrored"))
    np.testing.assert_allclose(floats, whole, atol=1.01 / 255)
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
