"""Simulated degradation: it is as strong as it says, and JPEG compression agrees with Pillow."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from skimage.data import camera

from mvrbm.random import RandomSource
from mvrbm.vision.degradation import (
    SimulatedJpeg,
    SimulatedNoise,
    SimulatedReduction,
    SimulatedSalt,
    compress,
    to_opponent,
)
from mvrbm.vision.resampling import enlarge_image, reduce_image


@pytest.mark.parametrize("quality", [20, 75, 95])
def test_jpeg_is_as_bad_as_pillows(quality):
    gray = camera()[100:228, 200:320]
    file = io.BytesIO()
    Image.fromarray(gray).save(file, "JPEG", quality=quality)
    expected = np.asarray(Image.open(file)).astype(float)
    y = (torch.from_numpy(gray).float()[None, None] * 219 / 255 + 16) / 255  # as luminance
    found, amount = compress(y, torch.tensor([float(quality)]), torch.zeros(2, 1, 1, dtype=torch.long))
    found = ((found[0, 0] * 255 - 16) * 255 / 219).numpy()
    assert np.abs(found - expected).mean() < 0.3
    np.testing.assert_allclose(np.square(found - gray).mean(), np.square(expected - gray).mean(), rtol=0.01)
    assert 0 < amount < 0.2


def test_blocks_of_jpeg_begin_anywhere():
    images = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)).expand(8, 1, 16, 16)
    found = SimulatedJpeg()(images, RandomSource(0), 30).images
    assert len({tuple(each.flatten().tolist()) for each in found}) > 1


SIMULATIONS = {
    "gray": (SimulatedNoise(), 1, 20),
    "color": (SimulatedNoise(), 3, 20),
    "jpeg": (SimulatedJpeg(), 1, 50),
    "salt": (SimulatedSalt(), 1, 0.25),
}


@pytest.mark.parametrize("kind", SIMULATIONS)
def test_images_are_degraded_by_as_much_as_is_said(kind):
    simulation, channels, level = SIMULATIONS[kind]
    rng = RandomSource(0)
    truth = rng.uniform((3, channels, 16, 16), torch.empty(0)) * 0.8 + 0.1
    found = simulation(truth, rng)
    assert found.images.shape == truth.shape
    assert (found.level > 0).all()
    assert (found.mask is not None) == (kind == "salt")
    torch.testing.assert_close(found.goal, to_opponent(truth) if kind == "color" else truth)
    some = simulation(truth.repeat(1, 1, 4, 4), rng, level)
    if kind in ("gray", "color"):
        assert (some.images - some.goal).std() == pytest.approx(20 / 255, rel=0.05)
        torch.testing.assert_close(some.level, torch.full((3,), 20 / 255))
    if kind == "salt":
        assert some.mask.mean() == pytest.approx(0.25, abs=0.03)


def test_half_of_salt_and_pepper_is_white():
    # No pixel has an uncorrupted neighbor, so the noise remains.
    found = SimulatedSalt()(torch.full((1, 1, 100, 100), 0.5), RandomSource(0), 1.0).images
    assert ((found == 0) | (found == 1)).all()
    assert found.mean() == pytest.approx(0.5, abs=0.025)  # 5 standard errors


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_reduction_is_the_bicubic_image_and_projection_is_back_projection(scale):
    truth = np.random.default_rng(0).random((24, 24))
    image = torch.from_numpy(truth)[None, None]
    simulation = SimulatedReduction(scale, rounds=3)
    bicubic = enlarge_image(reduce_image(truth, scale), scale)
    found = simulation(image, RandomSource(0)).images
    np.testing.assert_allclose(found[0, 0], bicubic, atol=1e-12)
    expected = np.zeros_like(truth)
    for _ in range(3):
        expected += enlarge_image(reduce_image(truth - expected, scale), scale)
    np.testing.assert_allclose(simulation.project(torch.zeros_like(image), image)[0, 0], expected, atol=1e-10)
