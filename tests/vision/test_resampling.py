"""Resampling against a transcription, closed forms, other libraries and published numbers."""

import os
from fractions import Fraction
from math import floor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mvrbm.vision import enlarge_image, luminance, psnr_ssim, reduce_image, resampling
from mvrbm.vision.resampling import crop_to_multiple, enlarge_rows

SHARED = Path(os.environ.get("MVRBM_DATA", "../shared/data")) / "superres"
needs_set5 = pytest.mark.skipif(not (SHARED / "Set5").is_dir(), reason="MVRBM_DATA names no folder with superres/Set5")
needs_lena = pytest.mark.skipif(not (SHARED / "Lena").is_dir(), reason="MVRBM_DATA names no folder with superres/Lena")
SET5 = ("baby", "bird", "butterfly", "head", "woman")


@pytest.fixture
def random():
    return np.random.default_rng(0)


def read(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("L" if image.mode == "L" else "RGB"))


# -- a plain transcription --------------------------------------------------------------------------------
# Pixels are numbered from 1, as in the definition; all numbers are fractions.


def cubic(x):
    x, a = abs(x), Fraction(-1, 2)
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else Fraction(0)


def line(pixels, k, kind):
    """Resample a line of pixels by k: values before rounding."""
    size = len(pixels)
    values = []
    for i in range(1, (size // k if kind == "reduce" else size * k) + 1):
        if kind == "reduce":
            u, width = i * k + Fraction(1 - k, 2), k
        else:
            u, width = (i - Fraction(1 - k, 2)) / k, 1
        reach = range(floor(u) - 2 * width - 1, floor(u) + 2 * width + 2)
        weights = {j: cubic((u - j) / width) for j in reach}
        total = sum(weights.values())
        values.append(sum(w * pixels[min(max(j, 1), size) - 1] for j, w in weights.items()) / total)
    return values


def plain(image, k, kind, top=None):
    """Resample an image (H, W): rows first, rounded half up and clipped to 0..top along each axis."""

    def tidy(value):
        return value if top is None else min(max(floor(value + Fraction(1, 2)), 0), top)

    if kind == "reduce":
        image = image[: image.shape[0] // k * k, : image.shape[1] // k * k]
    rows = [[Fraction(x) for x in row] for row in image.tolist()]
    tall = zip(*[[tidy(x) for x in line(column, k, kind)] for column in zip(*rows, strict=True)], strict=True)
    return np.array([[tidy(x) for x in line(row, k, kind)] for row in tall], float)


RESAMPLE = {"reduce": reduce_image, "enlarge": enlarge_image}


@pytest.mark.parametrize("kind", RESAMPLE)
@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "top"), [(np.uint8, 255), (np.uint16, 65535), (np.float64, None)])
def test_resampling_is_the_definition(kind, scale, dtype, top, random):
    shape = (3 * scale + 1, 4 * scale + 2) if kind == "reduce" else (3, 5)
    values = random.choice([0, 0.02, 0.5, 0.98, 1], shape) * (top or 1)  # what overshoots is to be clipped
    image = values.astype(dtype)
    found = RESAMPLE[kind](image, scale)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, plain(image, scale, kind, top), rtol=0, atol=0 if top else 1e-13)


@pytest.mark.parametrize("kind", RESAMPLE)
def test_ties_are_rounded_up(kind, random):
    # By 2, weights are whole numbers over 128: two pixels of two values give ties in plenty.
    image = random.choice([0, 64, 128, 192], (12, 12)).astype(np.uint8)
    np.testing.assert_array_equal(RESAMPLE[kind](image, 2), plain(image, 2, kind, 255))


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_far_from_the_edge_it_is_pillows(scale, random):
    """Pillow leaves taps beyond the edge out instead of repeating the edge."""
    image = random.random((12 * scale, 15 * scale)).astype(np.float32)
    pillow = Image.fromarray(image)
    for found, inner in ((reduce_image(image, scale), 2), (enlarge_image(image, scale), 2 * scale)):
        theirs = np.asarray(pillow.resize(found.shape[::-1], Image.Resampling.BICUBIC))
        inside = (slice(inner, -inner), slice(inner, -inner))
        np.testing.assert_allclose(found[inside], theirs[inside], atol=2e-6)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_quadratics_are_enlarged_exactly(scale):
    y, x = np.mgrid[:9, :11].astype(float)
    v, u = ((np.mgrid[: 9 * scale, : 11 * scale] + 0.5) / scale - 0.5).astype(float)
    inner = (slice(2 * scale, -2 * scale), slice(2 * scale, -2 * scale))
    found = enlarge_image(x**2 - 3 * x * y + 2 * y**2 + 5 * y, scale)
    np.testing.assert_allclose(found[inner], (u**2 - 3 * u * v + 2 * v**2 + 5 * v)[inner], rtol=1e-12)


@pytest.mark.parametrize("kind", RESAMPLE)
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_channels_are_resampled_alone_flat_stays_flat_and_blocks_do_not_show(kind, scale, monkeypatch, random):
    image = random.integers(0, 256, (17, 21, 4), dtype=np.uint8)
    whole = RESAMPLE[kind](image, scale)
    np.testing.assert_array_equal(whole, np.stack([RESAMPLE[kind](image[..., c], scale) for c in range(4)], -1))
    assert (RESAMPLE[kind](np.full((8, 9), 77, np.uint8), scale) == 77).all()
    monkeypatch.setattr(resampling, "_ENTRIES_AT_ONCE", 1)
    np.testing.assert_array_equal(RESAMPLE[kind](image, scale), whole)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_some_rows_are_those_of_the_whole(scale, random):
    image = random.integers(0, 65536, (9, 7, 3), dtype=np.uint16)
    whole = enlarge_image(image.astype(np.float64), scale)
    for rows in (slice(0, 1), slice(3, 5 * scale), slice(9 * scale - 2, 9 * scale)):
        np.testing.assert_allclose(enlarge_rows(image, scale, rows), whole[rows], rtol=1e-5, atol=0.05)


def test_the_smallest_images():
    assert (enlarge_image(np.full((1, 1), 9, np.uint8), 4) == 9).all()
    assert reduce_image(np.arange(9, dtype=np.uint8).reshape(3, 3), 3).shape == (1, 1)
    image = np.arange(20, dtype=np.uint8).reshape(4, 5)
    np.testing.assert_array_equal(crop_to_multiple(image, 3), [[0, 1, 2], [5, 6, 7], [10, 11, 12]])


@pytest.mark.parametrize(
    ("image", "scale", "message"),
    [
        (np.zeros((4, 4), np.uint8), 5, "scale must be one of [2, 3, 4], got 5"),
        (np.zeros((4, 4), np.uint8), "2", "scale must be one of [2, 3, 4], got '2'"),
        (np.zeros((2, 9), np.uint8), 3, "at least 3 x 3 pixels, got shape (2, 9)"),
        (
            np.zeros((0, 9), np.uint8),
            2,
            "must be nonempty and have shape (rows, columns[, channels]), got shape (0, 9)",
        ),
        (np.zeros(9, np.uint8), 2, "got shape (9,)"),
        (np.zeros((4, 4), np.int64), 2, "uint8, uint16 or float, got int64"),
        (np.zeros((4, 4), bool), 2, "uint8, uint16 or float, got bool"),
    ],
)
def test_arrays_that_cannot_be_resampled_raise_one_line(image, scale, message):
    with pytest.raises(ValueError, match="must") as error:
        reduce_image(image, scale)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


# -- the literature's numbers -----------------------------------------------------------------------------


@needs_set5
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_reduced_set5_is_set5_lr_pixel_for_pixel(scale):
    for number, name in enumerate(SET5, start=1):
        theirs = read(SHARED / "Set5_LR" / f"img_{number:03d}_SRF_{scale}_LR.png")
        np.testing.assert_array_equal(reduce_image(read(SHARED / "Set5" / f"{name}_GT.bmp"), scale), theirs)


@needs_set5
@pytest.mark.parametrize(("scale", "published"), [(2, 33.64), (3, 30.39), (4, 28.42)])
def test_bicubic_on_set5_has_the_published_psnr(scale, published):
    found = []
    for name in SET5:
        truth = crop_to_multiple(luminance(read(SHARED / "Set5" / f"{name}_GT.bmp")), scale)
        found.append(psnr_ssim(truth, enlarge_image(reduce_image(truth, scale), scale), "literature", scale).psnr)
    assert np.mean(found) == pytest.approx(published, abs=0.02)


@needs_lena
def test_bicubic_on_the_papers_lena_has_the_papers_psnr():
    truth = read(SHARED / "Lena" / "lena_scsr_512.bmp")
    found = enlarge_image(reduce_image(truth, 2), 2)
    assert psnr_ssim(truth, found, "paper").psnr == pytest.approx(34.1282, abs=0.001)
