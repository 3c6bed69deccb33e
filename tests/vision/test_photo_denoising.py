"""Photographs: estimating noise and JPEG compression, and removing them by shipped and by trained stages."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from skimage.data import page, rocket
from skimage.restoration import inpaint_biharmonic

from mvrbm import load
from mvrbm.vision import (
    Degradation,
    PhotoDenoiser,
    TrainingStep,
    add_noise,
    clean_photograph,
    denoise_photograph,
    estimate_degradation,
    estimate_noise,
    estimate_salt,
    jpeg_level,
    repair_photograph,
)
from mvrbm.vision.color import OPPONENT, luminance
from mvrbm.vision.degradation import jpeg_quality, jpeg_steps, median_of_uncorrupted
from mvrbm.vision.photo_denoising import KINDS
from mvrbm.vision.quality import psnr

PHOTO = rocket()[300:396, 500:612]  # not trained on
LETTERS = page()[40:136, 200:312]


def _noisy(image, sigma):
    noise = np.random.default_rng(0).normal(0, sigma, image.shape)
    return np.clip(np.rint(image + noise), 0, 255).astype(np.uint8)


def _compressed(image, quality):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=quality)
    with Image.open(file) as found:
        return np.asarray(found), list(found.quantization[0])


def test_steps_are_those_of_libjpeg():
    for quality in (5, 30, 50, 75, 95):
        _, table = _compressed(LETTERS, quality)
        assert sorted(table) == sorted(jpeg_steps(quality))
        assert jpeg_quality(table) == quality


@pytest.mark.parametrize("sigma", [5, 15, 40])
def test_noise_is_estimated(sigma):
    truth = rocket()[:200, :300].astype(np.float32) / 255
    noisy = truth + sigma / 255 * np.random.default_rng(0).standard_normal(truth.shape).astype(np.float32)
    assert estimate_noise(noisy) == pytest.approx(sigma / 255, rel=0.1)
    assert estimate_noise(noisy[..., 0]) == pytest.approx(sigma / 255, rel=0.15)


@pytest.mark.parametrize("sigma", [10, 25])
def test_noise_is_estimated_where_black_does_not_cut_it_off(sigma):
    image = np.repeat(np.linspace(0, 160, 8), 24)[:, None] + np.zeros((192, 160))  # an eighth is black
    assert estimate_noise(_noisy(image, sigma)) == pytest.approx(sigma / 255, rel=0.1)


def test_noise_of_hardly_any_pixels():
    assert estimate_noise(np.zeros((1, 5), np.uint8)) == 0
    assert estimate_noise(np.zeros((3, 70, 3), np.uint8)) == 0


def test_opponent_colors_are_orthonormal():
    np.testing.assert_allclose(OPPONENT @ OPPONENT.T, np.eye(3), atol=1e-12)


@pytest.mark.parametrize(("image", "sigma", "gain"), [(PHOTO, 25, 6), (LETTERS, 25, 4), (PHOTO, 5, 0.5)])
def test_noise_is_removed_and_color_stays(image, sigma, gain):
    noisy = _noisy(image, sigma)
    clean = denoise_photograph(noisy, level=sigma / 255, device="cpu")
    assert (clean.shape, clean.dtype) == (image.shape, image.dtype)
    assert psnr(image, clean, 255) > psnr(image, noisy, 255) + gain


def test_other_types_and_alpha():
    noisy = _noisy(PHOTO, 25)
    alpha = np.arange(noisy[..., :1].size, dtype=np.uint8).reshape(noisy[..., :1].shape)
    found = denoise_photograph(np.concatenate([noisy, alpha], 2), level=0.1, device="cpu")
    np.testing.assert_array_equal(found[..., 3:], alpha)
    floats = denoise_photograph(noisy.astype(np.float32) / 255, level=0.1, device="cpu")
    assert floats.dtype == np.float32
    np.testing.assert_allclose(floats * 255, found[..., :3], atol=0.51)
    deep = denoise_photograph(noisy.astype(np.uint16) * 257, level=0.1, device="cpu")
    np.testing.assert_allclose(deep / 257, found[..., :3], atol=0.51)


@pytest.mark.parametrize("shape", [(96, 96), (96, 96, 3)])
def test_no_pattern_of_alternating_pixels_is_left(shape):
    noisy = (0.5 + 0.2 * np.random.default_rng(0).standard_normal(shape)).astype(np.float32)
    clean = denoise_photograph(noisy, noise="gaussian", level=0.2, device="cpu").reshape(*shape[:2], -1)
    places = clean.reshape(48, 2, 48, 2, -1).mean((0, 2))  # in squares of 2x2 pixels
    assert np.abs(places - places.mean((0, 1))).max() < 0.001


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_salt_and_pepper_is_removed_better_than_by_the_median(share):
    noisy = add_noise(LETTERS, "salt-and-pepper", share, seed=0)
    pixels = torch.from_numpy(noisy / np.float32(255))[None, None]
    median = median_of_uncorrupted(pixels, ((pixels <= 0) | (pixels >= 1)).float())[0, 0].numpy() * 255
    clean = denoise_photograph(noisy, noise="salt-and-pepper", device="cpu")
    assert psnr(LETTERS, clean, 255) > psnr(LETTERS, median, 255) + 0.5
    kept = (noisy > 0) & (noisy < 255)
    np.testing.assert_array_equal(clean[kept], noisy[kept])


@pytest.mark.parametrize("image", [PHOTO, LETTERS, np.round(LETTERS, -1)])
def test_salt_and_pepper_is_found_where_it_is(image):
    noisy = add_noise(image[..., 0] if image.ndim == 3 else image, "salt-and-pepper", 0.1, seed=0)
    assert estimate_salt(noisy) == pytest.approx(0.1, rel=0.2)
    assert [estimate_salt(each) for each in (image, _noisy(image, 10), _noisy(image, 60))] == [0, 0, 0]
    assert estimate_salt(np.where(LETTERS > 128, 255, 0).astype(np.uint8)) == 0  # black on white
    found = denoise_photograph(noisy, device="cpu")
    np.testing.assert_array_equal(found, denoise_photograph(noisy, noise="salt-and-pepper", device="cpu"))


@pytest.mark.parametrize(("black", "white"), [(2, 2), (20, 300)])  # of 10,000 pixels
def test_a_few_dots_and_stars_are_no_salt_and_pepper(black, white):
    image = np.full((100, 100), 60, np.uint8)
    places = [(row, column) for row in range(1, 99, 3) for column in range(1, 99, 3)]
    for number, place in enumerate(places[: black + white]):
        image[place] = 0 if number < black else 255
    assert estimate_salt(image) == 0


def test_pixels_without_salt_and_pepper_stay():
    image = np.full((9, 9, 3), 100, np.uint8)
    np.testing.assert_array_equal(denoise_photograph(image, noise="salt-and-pepper", device="cpu"), image)


def test_median_is_that_of_uncorrupted_neighbors():
    image = torch.tensor([[[[0.2, 0.3, 1.0], [0.0, 1.0, 0.4], [0.5, 1.0, 0.0]]]])
    mask = ((image <= 0) | (image >= 1)).float()
    found = median_of_uncorrupted(image, mask)[0, 0]
    assert found[1, 1] == pytest.approx(0.3)  # of 0.2, 0.3, 0.4, 0.5, the lower one of the two in the middle
    assert found[0, 0] == pytest.approx(0.2)
    white = torch.ones(1, 1, 4, 4)
    torch.testing.assert_close(median_of_uncorrupted(white, torch.ones_like(white)), white)


@pytest.mark.parametrize("image", [PHOTO, LETTERS])
def test_traces_of_jpeg_are_removed(image):
    compressed, table = _compressed(image, 40)
    found = estimate_degradation(compressed, table)
    assert found.quality == 40
    clean = clean_photograph(compressed, found, device="cpu")
    assert psnr(image, clean, 255) > psnr(image, compressed, 255)
    np.testing.assert_array_equal(clean_photograph(compressed, found, strength=0, device="cpu"), compressed)


def test_artifacts_of_jpeg_are_removed_before_noise_at_a_share_of_both_levels():
    image = (128 + np.random.default_rng(0).normal(0, 10, (24, 30))).astype(np.uint8)
    first = PhotoDenoiser.pretrained("jpeg", device="cpu").denoise(image, level=0.5 * jpeg_level(30))
    expected = denoise_photograph(first, level=0.5 * 0.04, device="cpu")
    found = clean_photograph(image, Degradation(30, 0.04), strength=0.5, device="cpu")
    np.testing.assert_array_equal(found, expected)
    assert (first != image).any()
    assert (expected != first).any()


def test_jpeg_artifacts_are_removed_from_luminance_alone():
    model = PhotoDenoiser.pretrained("jpeg", device="cpu")
    image = (0.2 + 0.6 * _compressed(PHOTO, 20)[0] / 255).astype(np.float32)
    found = model.denoise(image, level=jpeg_level(20))
    before, expected = luminance(image), model.denoise(luminance(image), level=jpeg_level(20))
    assert abs(expected - before).max() > 0.02
    np.testing.assert_allclose(luminance(found), expected, atol=1e-5)
    change = found - image
    np.testing.assert_allclose(change, np.broadcast_to(change[..., :1], change.shape), atol=1e-5)


def test_nothing_is_removed_from_a_clean_photograph():
    clean = np.full((64, 64), 90, np.uint8)
    found = estimate_degradation(clean, list(jpeg_steps(98)))
    assert (found, str(found)) == (Degradation(None, 0.0), "nothing")
    np.testing.assert_array_equal(clean_photograph(clean, found), clean)
    assert str(Degradation(75, 5 / 255)) == "JPEG artifacts (quality 75) and noise (standard deviation 5.0/255)"


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="image must be grayscale, RGB or RGBA, got 2 channels"):
        denoise_photograph(np.zeros((4, 4, 2), np.uint8))
    wrong_level = r"level, as a fraction of the white level \(0.098 for 25/255\), must be .*, got 25"
    with pytest.raises(ValueError, match=wrong_level):
        denoise_photograph(LETTERS, level=25)
    with pytest.raises(ValueError, match="level must be None for salt-and-pepper noise on photographs, got 25"):
        denoise_photograph(LETTERS, noise="salt-and-pepper", level=25)
    with pytest.raises(ValueError, match="strength must be"):
        clean_photograph(LETTERS, Degradation(None, 0.0), strength=5)


@pytest.mark.parametrize("white", [255, np.nan])
def test_floats_must_be_from_0_to_1(white):
    image = np.float64([[0, white]])
    for call in (
        denoise_photograph,
        lambda image: repair_photograph(image, np.zeros(image.shape, bool)),
        lambda image: clean_photograph(image, Degradation(None, 0.0)),
    ):
        with pytest.raises(ValueError, match="float images must have values from 0 to 1, got"):
            call(image)


@pytest.mark.parametrize("image", [PHOTO, LETTERS])
def test_scratches_are_filled_better_than_by_biharmonic_interpolation(image):
    mask = np.zeros(image.shape[:2], np.uint8)
    mask[20:22, 5:90], mask[30:90, 60:62], mask[np.arange(80), np.arange(80)] = 255, 200, 255
    broken = np.where(mask[..., None] > 0, 255, np.atleast_3d(image)).astype(np.uint8).reshape(image.shape)
    found = repair_photograph(broken, mask, device="cpu")
    np.testing.assert_array_equal(found[mask == 0], image[mask == 0])
    axis = None if image.ndim == 2 else -1
    plain = 255 * inpaint_biharmonic(broken / 255, mask > 0, channel_axis=axis)
    assert psnr(image, found, 255) > psnr(image, plain, 255)


def test_masks_are_checked():
    with pytest.raises(
        ValueError, match=r"damage must have the same size as the image \(96, 112\), got shape \(4, 4\)"
    ):
        repair_photograph(LETTERS, np.zeros((4, 4)))
    with pytest.raises(ValueError, match="damage must not cover the whole image"):
        repair_photograph(LETTERS, np.ones(LETTERS.shape, bool))
    gradient = np.linspace(0, 255, LETTERS.size).reshape(LETTERS.shape)
    for picture in (gradient.astype(np.uint8), gradient / 255):
        with pytest.raises(ValueError, match="damage must be black and white, but 50% of its pixels are gray"):
            repair_photograph(LETTERS, picture)


# -- the estimator ----------------------------------------------------------------------------------

SMALL = {"patch": (6,), "stride": (2,), "hidden_shape": (3, 4), "rank": 3, "device": "cpu"}
STEPS = [
    TrainingStep("divergence", n_samples=16, batch_size=8, learning_rate=2e-3),
    TrainingStep("images", n_samples=100, n_epochs=4, batch_size=4, learning_rate=1e-2, averaging=0.9),
]


@pytest.fixture(scope="module")
def trained():
    photos = [rocket()[:160, 400:560], page()[:150, :150]]
    return {kind: PhotoDenoiser(kind, **SMALL, steps=STEPS).fit(photos) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_denoiser_improves_photographs_and_is_saved(trained, kind, tmp_path):
    model = trained[kind]
    assert len(model.history_) == 1 + 4
    image = PHOTO if kind == "color" else LETTERS
    level = {"jpeg": jpeg_level(20), "salt": None}.get(kind, 40 / 255)
    degraded = {
        "jpeg": lambda: _compressed(image, 20)[0],
        "salt": lambda: add_noise(image, "salt-and-pepper", 0.3, seed=0),
    }.get(kind, lambda: _noisy(image, 40))()
    found = model.denoise(degraded, level=level)
    assert (found.shape, found.dtype) == (image.shape, image.dtype)
    assert psnr(image, found, 255) > psnr(image, degraded, 255)
    again = load(model.save(tmp_path / "model"), device="cpu")
    assert again.get_params() == {**model.get_params(), "steps": tuple(STEPS)}
    np.testing.assert_array_equal(again.denoise(degraded, level=level), found)


def test_a_gray_denoiser_treats_channels_one_by_one(trained):
    noisy = _noisy(PHOTO, 25)
    found = trained["gray"].denoise(noisy, level=0.1)
    for channel in range(3):
        alone = trained["gray"].denoise(np.ascontiguousarray(noisy[..., channel]), level=0.1)
        np.testing.assert_allclose(found[..., channel].astype(int), alone, atol=1)
    with pytest.raises(
        ValueError, match="image must be RGB or RGBA for a denoiser of kind 'color', got a grayscale image"
    ):
        trained["color"].denoise(LETTERS, level=0.1)


def test_the_default_denoisers_have_the_shape_of_the_shipped_weights():
    for kind in KINDS:
        shipped = PhotoDenoiser.pretrained(kind, device="cpu")
        new = PhotoDenoiser(kind, steps=(), device="cpu").fit([LETTERS])
        assert [stage.arguments for stage in new.stages_] == [stage.arguments for stage in shipped.stages_]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"kind": "snow"}, "kind must be one of"),
        ({"patch": (8,)}, "patch and stride must have one entry per stage, got 1 and 3"),
        ({"patch": (8,), "stride": (9,)}, "stride must be a whole number from 1 to 8, got 9"),
        ({"patch": (8,), "stride": (3,)}, r"patch must be a multiple of the stride \(3\), got 8"),
        ({"floor": 0.0}, "floor must be positive and below 1"),
        ({"steps": [TrainingStep("patches")]}, "objective must be 'divergence' or 'images' for this estimator"),
    ],
)
def test_invalid_parameters_raise(setting, message):
    with pytest.raises(ValueError, match=message):
        PhotoDenoiser(**{"device": "cpu", **setting}).fit([PHOTO])


def test_a_level_is_required_for_jpeg_and_an_unfitted_denoiser_raises():
    with pytest.raises(ValueError, match="level is required for JPEG artifacts"):
        PhotoDenoiser.pretrained("jpeg", device="cpu").denoise(LETTERS)
    with pytest.raises(ValueError, match="not fitted yet"):
        PhotoDenoiser("gray").denoise(LETTERS)
