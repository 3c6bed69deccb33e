"""Luminance and chroma against their definition."""

from math import floor

import numpy as np
import pytest

from mvrbm.vision import luminance
from studies.baselines.ycbcr import from_ycbcr, to_ycbcr


@pytest.fixture
def random():
    return np.random.default_rng(0)


def test_luminance_is_the_definition(random):
    rgb = random.integers(0, 256, (40, 50, 3), dtype=np.uint8)
    expected = [
        [floor(16 + (65.481 * float(r) + 128.553 * float(g) + 24.966 * float(b)) / 255 + 0.5) for r, g, b in row]
        for row in rgb
    ]
    np.testing.assert_array_equal(luminance(rgb), expected)
    exact = 16 / 255 + rgb / 255 @ np.array([65.481, 128.553, 24.966]) / 255
    np.testing.assert_allclose(luminance(rgb / 255), exact, rtol=1e-12)
    np.testing.assert_allclose(luminance(rgb.astype(np.uint16) * 257) / 65535, exact, atol=0.51 / 65535)


def test_black_white_and_gray(random):
    assert luminance(np.array([[[0, 0, 0], [255, 255, 255]]], np.uint8)).tolist() == [[16, 235]]
    assert luminance(np.array([[[0, 0, 0], [65535] * 3]], np.uint16)).tolist() == [[16 * 257, 235 * 257]]
    gray = random.integers(0, 256, (4, 5), dtype=np.uint8)
    assert luminance(gray) is gray
    chroma = to_ycbcr(np.full((1, 1, 3), 99, np.uint8))[..., 1:]
    np.testing.assert_allclose(chroma, 128 / 255, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
def test_chroma_and_back(dtype, random):
    top = np.iinfo(dtype).max if np.dtype(dtype).kind == "u" else 1
    rgb = (random.random((30, 30, 3)) * top).astype(dtype)
    np.testing.assert_allclose(from_ycbcr(to_ycbcr(rgb), dtype), rgb, atol=0 if top > 1 else 1e-6)
    np.testing.assert_allclose(to_ycbcr(rgb)[..., 0], luminance(rgb / top), atol=1e-6)


def test_arrays_without_luminance_raise():
    for function in (luminance, to_ycbcr, from_ycbcr):
        with pytest.raises(ValueError, match=r"RGB array of shape \(rows, columns, 3\), got shape \(2, 2, 4\)"):
            function(np.zeros((2, 2, 4)))
