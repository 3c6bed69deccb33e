"""PSNR and SSIM against their definitions."""

from math import log10

import numpy as np
import pytest

from mvrbm.vision import luminance, psnr, psnr_ssim


@pytest.fixture
def random():
    return np.random.default_rng(0)


def test_psnr_of_known_errors():
    truth = np.zeros((4, 4))
    assert psnr(truth, truth + 0.1) == pytest.approx(20)
    assert psnr(truth.astype(np.uint8), np.full((4, 4), 51, np.uint8), 255) == pytest.approx(20 * log10(5))
    assert psnr(truth, truth) == np.inf


@pytest.mark.parametrize(("protocol", "shave"), [("literature", 3), ("paper", 0)])
def test_psnr_is_the_definition_inside_the_border(protocol, shave, random):
    truth, image = (random.integers(0, 256, (31, 40, 3), dtype=np.uint8) for _ in range(2))
    image = image[:30, :39]
    left, right = (luminance(each).astype(float)[shave : 30 - shave, shave : 39 - shave] for each in (truth, image))
    quality = psnr_ssim(truth, image, protocol, 3)
    assert quality.psnr == pytest.approx(10 * log10(255**2 / ((left - right) ** 2).mean()))
    assert abs(quality.ssim) < 0.1  # they have nothing in common


def test_quality_does_not_depend_on_the_type_and_the_truth_is_perfect(random):
    truth, image = (random.integers(0, 256, (30, 30), dtype=np.uint8) for _ in range(2))
    bytes_, words = psnr_ssim(truth, image), psnr_ssim(truth * np.uint16(257), image * np.uint16(257))
    np.testing.assert_allclose(bytes_, words, rtol=1e-6)
    np.testing.assert_allclose(bytes_, psnr_ssim(truth / 255, image / 255), rtol=1e-6)
    assert psnr_ssim(truth, truth) == (np.inf, pytest.approx(1.0))
    small = psnr_ssim(truth[:12, :12], image[:12, :12])
    assert np.isnan(small.ssim)
    assert small.psnr > 0


def test_ssim_is_its_definition_at_one_pixel(random):
    """An image of 11 x 11 pixels has one window, whose weights are written out here."""
    left, right = random.random((2, 11, 11))
    weights = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    weights = np.outer(weights, weights) / weights.sum() ** 2
    a, b = (weights * left).sum(), (weights * right).sum()
    aa, bb, ab = (weights * left**2).sum() - a**2, (weights * right**2).sum() - b**2, (weights * left * right).sum()
    expected = (2 * a * b + 0.01**2) * (2 * (ab - a * b) + 0.03**2)
    expected /= (a**2 + b**2 + 0.01**2) * (aa + bb + 0.03**2)
    assert psnr_ssim(left, right, "paper").ssim == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": "mine"}, r"protocol must be one of \['literature', 'paper'\], got 'mine'"),
        ({"scale": 5}, "scale must be one of"),
        ({"truth": np.zeros((10, 12), np.uint8)}, "truth must have the same size as the image"),
        ({"truth": np.zeros((9, 9), np.uint8)}, "truth must have the same size as the image"),
        ({"truth": np.zeros((10, 10))}, r"truth must have the same dtype as the image \(uint8\), got float64"),
        (
            {"truth": np.zeros((4, 9), np.uint8), "image": np.zeros((4, 9), np.uint8)},
            r"larger than twice the border \(2 pixels\)",
        ),
    ],
)
def test_arrays_that_cannot_be_compared_raise(change, message):
    given = {"truth": np.zeros((10, 10), np.uint8), "image": np.zeros((10, 10), np.uint8)}
    with pytest.raises(ValueError, match=message):
        psnr_ssim(**(given | change))
