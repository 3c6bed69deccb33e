"""Super-resolution against the same computation patch by patch and pixel by pixel."""

import json
import shutil

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from sklearn.base import clone

from mvrbm import MVRBM, Gaussian, load
from mvrbm.couplings import Dense
from mvrbm.errors import DivergenceError, StorageError
from mvrbm.io.pictures import Picture, write_picture
from mvrbm.machine import BoltzmannMachine
from mvrbm.models import multimodal_mvrbm
from mvrbm.random import RandomSource
from mvrbm.training import Monitor
from mvrbm.training.backprop import DescentSettings, Objective, descend
from mvrbm.units import Bernoulli
from mvrbm.vision import (
    SuperResolver,
    TrainingStep,
    enlarge_image,
    luminance,
    psnr_ssim,
    reduce_image,
    super_resolution,
)
from mvrbm.vision import stages as stages_module
from mvrbm.vision.back_projection import back_project
from mvrbm.vision.degradation import SimulatedReduction
from mvrbm.vision.images import turned
from mvrbm.vision.stage_training import cut_crops, cut_patches, image_loss, patch_loss
from mvrbm.vision.stages import DERIVATIVES, HIGH, MachineStage, StageSequence, full_weights
from mvrbm.vision.super_resolution import CONFIGURATIONS
from studies.baselines.ycbcr import from_ycbcr, to_ycbcr

LAYERS = (HIGH, *DERIVATIVES)


@pytest.fixture
def random():
    return np.random.default_rng(0)


@torch.no_grad()
def a_machine(patch, hidden=(3, 4), rank=2, seed=0):
    """A machine with random parameters, in double precision."""
    machine = multimodal_mvrbm({name: Gaussian((patch, patch)) for name in LAYERS}, hidden, rank).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in machine.parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return machine


def a_model(scale=2, patch=5, **settings):
    """An untrained model with such a machine."""
    given = {name: settings.pop(name) for name in ("hidden", "rank", "seed") if name in settings}
    machine = a_machine(patch, **given)
    size = {"hidden_shape": machine.hidden.shape, "rank": given.get("rank", 2), "symmetric": False}
    return SuperResolver(scale, patch, **size, **settings, device="cpu").use_machine(machine)


def photo(name, rows=slice(None), columns=slice(None)):
    data = pytest.importorskip("skimage.data", reason="scikit-image is not installed")
    return np.asarray(getattr(data, name)())[rows, columns]


# -- patch by patch ---------------------------------------------------------------------------------------


def endless(low, scale, margin):
    """The bicubic image, continued with its edge pixels by `margin` pixels on each side."""
    return np.pad(enlarge_image(low.astype(float), scale), margin, mode="edge")


def derivatives(b):
    """x, y, xx and yy of an image, two pixels smaller on each side."""
    y, x = slice(2, -2), slice(2, -2)
    return {
        "Z1": b[y, 3:-1] - b[y, 1:-3],
        "Z2": b[3:-1, x] - b[1:-3, x],
        "Z3": b[y, 4:] - 2 * b[y, x] + b[y, :-4],
        "Z4": b[4:, x] - 2 * b[y, x] + b[:-4, x],
    }


def patch_by_patch(model, low):
    """Enlarge luminance by asking the machine itself, one patch after another; no back-projection."""
    scale, patch, machine = model.scale, model.patch, model.machine_
    stride = model.stride or scale
    margin = 2 * patch + 4
    wide = endless(low, scale, margin)  # pixel (0, 0) of the result is at (margin, margin)
    z = derivatives(wide)  # and at (margin - 2, margin - 2) of these
    total, count = np.zeros_like(wide), np.zeros_like(wide)
    height, width = low.shape[0] * scale, low.shape[1] * scale
    for top in range(-(patch // stride + 1) * stride, height, stride):
        for left in range(-(patch // stride + 1) * stride, width, stride):
            y, x = margin - 2 + top, margin - 2 + left
            cut = {name: torch.from_numpy(each[y : y + patch, x : x + patch]) for name, each in z.items()}
            size = torch.stack(list(cut.values())).square().mean().sqrt() + model.floor
            seen = {name: (each / size)[None] for name, each in cut.items()}
            found = torch.zeros(1, patch, patch, dtype=torch.float64)
            with torch.no_grad():
                for _ in range(model.cycles):
                    found = machine.visible_mean(machine.hidden_mean({HIGH: found, **seen}))[HIGH]
            where = (slice(margin + top, margin + top + patch), slice(margin + left, margin + left + patch))
            total[where] += (found[0] * size).numpy()
            count[where] += 1
    inner = (slice(margin, margin + height), slice(margin, margin + width))
    return wide[inner] + total[inner] / count[inner]


@pytest.mark.parametrize("cycles", [1, 2])
@pytest.mark.parametrize(("scale", "patch", "stride"), [(2, 5, None), (3, 7, None), (4, 9, None), (2, 5, 1), (3, 6, 4), (4, 6, 6), (2, 4, 3)])  # fmt: skip # noqa: E501
def test_inference_is_the_machines_own_patch_by_patch(scale, patch, stride, cycles, random):
    model = a_model(scale, patch, stride=stride, cycles=cycles, back_projection=0)
    low = random.random((7, 6)).astype(np.float32)
    found = model.upscale_luminance(low)
    assert abs(found - enlarge_image(low, scale)).max() > 0.1
    np.testing.assert_allclose(found, patch_by_patch(model, low), atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 1), (3, 3)])
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_the_smallest_images(scale, shape, random):
    model = a_model(scale, 8, back_projection=0)
    low = random.random(shape).astype(np.float32)
    np.testing.assert_allclose(model.upscale_luminance(low), patch_by_patch(model, low), atol=2e-6)
    model.back_projection = 3
    assert model.upscale((255 * low).astype(np.uint8)).shape == (shape[0] * scale, shape[1] * scale)


@pytest.mark.parametrize(("scale", "stride"), [(2, None), (3, None), (4, None), (2, 3), (3, 1)])
def test_blocks_of_rows_do_not_show(scale, stride, random, monkeypatch):
    model = a_model(scale, 7, stride=stride)
    low = random.random((19, 23)).astype(np.float32)
    whole = model.upscale_luminance(low)
    monkeypatch.setattr(stages_module, "_CPU_ENTRIES", 1)  # one row of patches at a time
    calls = []
    np.testing.assert_allclose(model.upscale_luminance(low, progress=lambda *n: calls.append(n)), whole, atol=1e-6)
    assert len(calls) >= 15
    assert calls == sorted(calls)
    assert calls[-1] == (100, 100)


def test_full_weights_are_the_couplings_own():
    for link in a_machine(4).links.values():
        torch.testing.assert_close(full_weights(link), link.dense().reshape(12, 16))


# -- training samples -------------------------------------------------------------------------------------


@pytest.mark.fixed_seed  # patches may be chosen twice
@pytest.mark.parametrize(("scale", "patch", "stride"), [(2, 5, 2), (2, 6, 1), (3, 7, 3), (4, 8, 2)])
def test_patches_are_pieces_of_the_images(scale, patch, stride, random):
    """Every patch is found in the image by its X, at a multiple of the stride; the derivatives are those there."""
    image = random.integers(0, 256, (30, 37), dtype=np.uint8)
    high = image[: 30 // scale * scale, : 37 // scale * scale] / 255
    stage = MachineStage(a_machine(patch), stride, 0.01)
    cut = cut_patches([image], scale, stage, 20)
    b = endless(reduce_image(image, scale) / 255, scale, 4)
    missing, z = high - b[4:-4, 4:-4], {name: each[2:-2, 2:-2] for name, each in derivatives(b).items()}
    patches = sliding_window_view(missing, (patch, patch))[::stride, ::stride]
    z = {name: sliding_window_view(each, (patch, patch))[::stride, ::stride] for name, each in z.items()}
    layers = {name: each.numpy() for name, each in cut.layers(stage).items()}
    assert len(cut.scales) == 20
    for number, size in enumerate(cut.scales.tolist()):
        distance = abs(patches - layers[HIGH][number] * size).max((2, 3))
        place = np.unravel_index(distance.argmin(), distance.shape)
        assert distance[place] < 1e-5
        truth = {name: each[place] for name, each in z.items()}
        assert size == pytest.approx(0.01 + np.sqrt(np.mean([each**2 for each in truth.values()])), rel=1e-5)
        for name, each in truth.items():
            np.testing.assert_allclose(layers[name][number] * size, each, atol=1e-5)
    every = cut_patches([image], scale, stage, 10_000)
    assert len(every.scales) == len(np.unique(every.missing, axis=0)) == np.prod(patches.shape[:2])


def test_flat_patches_are_left_out_and_flips_come_in(random):
    stage = MachineStage(a_machine(6), 2)
    image = np.full((40, 40), 99, np.uint8)
    image[:20] = random.integers(0, 256, (20, 40))
    many = cut_patches([image], 2, stage, 10_000, flat=0.01)
    assert len(many.scales) < 0.7 * 18 * 18
    assert many.scales.min() >= 0.015
    eight = cut_patches([image], 2, stage, 10_000, flat=0.01, augment=True)
    assert len(eight.scales) == 8 * len(many.scales)
    with pytest.raises(ValueError, match="all patches are flat"):
        cut_patches([np.full((40, 40), 99, np.uint8)], 2, stage, 10)
    with pytest.raises(ValueError, match=r"at least one image must be as large as a patch \(6 x 6 pixels\)"):
        cut_patches([np.zeros((5, 40), np.uint8)], 2, stage, 10)


def test_crops_are_pieces_of_the_images(random):
    image = random.integers(0, 256, (40, 60, 3), dtype=np.uint8)
    gray = luminance(image)
    for color, truth in ((True, image), (False, gray[..., None])):
        crops = cut_crops([image, image[:10]], 16, 5, color=color, augment=False, seed=3)
        windows = sliding_window_view(truth, (16, 16), (0, 1))
        for crop in crops.numpy():
            assert (windows == crop).all((2, 3, 4)).any()
    turns = cut_crops([image], 16, 50, color=False, augment=True, seed=3).numpy()
    windows = sliding_window_view(gray, (16, 16))
    assert 0 < sum((windows == crop[0]).all((2, 3)).any() for crop in turns) < 50


# -- back-projection --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 1, 2, 7])
@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (6, 9), (300, 5)])
def test_back_projection_is_the_plain_loop(scale, rounds, shape, random):
    low, high = random.random(shape), random.random((shape[0] * scale, shape[1] * scale))
    expected = high.copy()
    for _ in range(rounds):
        expected += enlarge_image(low - reduce_image(expected, scale), scale)
    found = back_project(torch.from_numpy(low), torch.from_numpy(high.copy()), scale, rounds)
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_the_result_is_consistent_with_the_image(scale, random):
    low = enlarge_image(random.random((10, 12)), 2).clip(0, 1).astype(np.float32)
    errors = []
    for rounds in (0, 5, 20):
        found = a_model(scale, 6, back_projection=rounds).upscale_luminance(low)
        errors.append(float(np.sqrt(((reduce_image(found, scale) - low) ** 2).mean())))
    assert errors[0] > 10 * errors[1] > 20 * errors[2]
    assert errors[2] < 1e-3


@torch.no_grad()
def test_every_stage_corrects_the_consistent_result_of_the_one_before(random):
    model = SuperResolver(2, (4, 6), (2, 2), 2, back_projection=3, steps=(), device="cpu").fit([np.eye(20)])
    generator = torch.Generator().manual_seed(0)
    for parameter in model.stages_.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    low = random.random((6, 9)).astype(np.float32)
    expected = enlarge_image(low, 2)
    for stage in model.stages_:
        expected += stage(torch.from_numpy(expected)[None, None])[0, 0].numpy()
        for _ in range(3):
            expected += enlarge_image(low - reduce_image(expected, 2), 2)
    assert np.abs(expected - enlarge_image(low, 2)).max() > 0.05
    np.testing.assert_allclose(model.upscale_luminance(low), expected, atol=1e-5)


# -- kinds of images --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return a_model(2, 6, seed=1)


@pytest.fixture(scope="module")
def picture():
    """RGBA, bytes, neither black nor white anywhere."""
    coarse = np.random.default_rng(1).integers(60, 196, (9, 11, 4), dtype=np.uint8)
    return enlarge_image(coarse, 2)


def by_chroma(model, rgb):
    """RGB enlarged as luminance by the model, chroma bicubic; floats."""
    low = to_ycbcr(rgb.astype(np.float64) / np.iinfo(rgb.dtype).max)
    high = np.stack([model.upscale_luminance(low[..., 0]), *(enlarge_image(low[..., c], 2) for c in (1, 2))], -1)
    return from_ycbcr(high, np.float64)


@pytest.mark.parametrize("factor", [1, 257])
def test_color_is_luminance_by_the_model_and_the_rest_bicubic(model, picture, factor):
    image = picture[..., :3] * (np.uint8(1) if factor == 1 else np.uint16(factor))
    top = 255 * factor
    found = model.upscale(image)
    assert found.dtype == image.dtype
    assert found.shape == (36, 44, 3)
    np.testing.assert_allclose(found / top, by_chroma(model, image), atol=0.51 / top + 1e-5)
    assert abs(found.astype(int) - enlarge_image(image, 2)).max() > 2 * factor


def on_white(rgba):
    colors, alpha = rgba[..., :3] / 255, rgba[..., 3:] / 255
    return np.rint(255 * (1 - alpha * (1 - colors))).astype(np.uint8)


@pytest.mark.parametrize("soft", [False, True])
def test_colors_under_transparent_pixels_do_not_show(soft):
    """A red disc on transparent green, enlarged and seen on white, is the enlarged disc on white."""
    model = SuperResolver.pretrained(2, device="cpu")
    distance = np.hypot(*(np.mgrid[:100, :100] - 49.5))
    alpha = np.clip(30.5 - distance, 0, 1) if soft else distance <= 30
    disc = np.zeros((100, 100, 4), np.uint8)
    disc[..., 3] = np.rint(255 * alpha)
    disc[..., :3] = np.where(disc[..., 3:] > 0, [255, 0, 0], [0, 255, 0])
    calls = []
    found = model.upscale(disc, progress=lambda done, total: calls.append((done, total)))
    error = np.abs(on_white(found).astype(int) - model.upscale(on_white(disc))).max(2)
    assert (error > 3).sum() <= 4
    alpha = model.upscale(disc[..., 3])
    assert (found[..., 3] >= alpha).all()
    assert (found[..., 3] > alpha + 20.0).mean() < 0.01
    assert calls[-1] == (600, 600)  # three stages, twice
    assert calls == sorted(calls)


def test_an_opaque_image_is_enlarged_as_without_alpha(model, picture):
    opaque = picture.copy()
    opaque[..., 3] = 255
    found = model.upscale(opaque)
    np.testing.assert_array_equal(found[..., 3], 255)
    np.testing.assert_allclose(found[..., :3].astype(int), model.upscale(picture[..., :3]), atol=1)


def test_types_differ_by_rounding_alone(model, picture):
    for image in (picture[..., 0], picture[..., :3], picture):
        bytes_ = model.upscale(image)
        floats = model.upscale(image / 255)
        assert floats.dtype == np.float64
        np.testing.assert_allclose(bytes_ / 255, floats, atol=0.51 / 255)
        np.testing.assert_allclose(model.upscale(image * np.uint16(257)) / 65535, floats, atol=0.51 / 65535 + 1e-6)
        single = model.upscale((image / 255).astype(np.float32))
        assert single.dtype == np.float32
        np.testing.assert_allclose(single, floats, atol=1e-5)
        assert bytes_.ndim == image.ndim


def test_a_gray_image_is_its_own_luminance_and_is_not_touched(model, picture):
    gray = picture[..., 0].copy()
    found = model.upscale(gray)
    expected = model.upscale_luminance(gray.astype(np.float32) / 255).clip(0, 1)
    np.testing.assert_array_equal(found, np.floor(expected * 255 + 0.5))
    np.testing.assert_array_equal(gray, picture[..., 0])


def test_views_of_any_order_are_taken(model, picture):
    turned_ = np.asfortranarray(picture)[::-1, ::-2]
    np.testing.assert_array_equal(model.upscale(turned_), model.upscale(np.ascontiguousarray(turned_)))


def test_rows_at_once_do_not_show(model, picture, monkeypatch):
    whole = model.upscale(picture)
    monkeypatch.setattr(super_resolution, "_ROWS_AT_ONCE", 5)
    np.testing.assert_array_equal(model.upscale(picture), whole)


def test_self_ensemble_is_the_mean_over_flips_and_turns(model, picture):
    gray = picture[:, :13, 0].astype(np.float32) / 255
    one = model.upscale_luminance
    every = [np.rot90(one(np.rot90(gray, k)), -k) for k in range(4)]
    every += [np.fliplr(np.rot90(one(np.rot90(np.fliplr(gray), k)), -k)) for k in range(4)]
    ensemble = model.upscale_luminance(gray, self_ensemble=True)
    np.testing.assert_allclose(ensemble, np.mean(every, 0), atol=1e-6)
    assert abs(ensemble - one(gray)).max() > 1e-3
    again = model.upscale_luminance(np.ascontiguousarray(np.rot90(gray).T), self_ensemble=True)
    np.testing.assert_allclose(again, np.rot90(ensemble).T, atol=1e-6)
    calls = []
    model.upscale(picture[..., :3], self_ensemble=True, progress=lambda *n: calls.append(n))
    assert calls == sorted(calls)
    assert calls[-1] == (800, 800)


def test_the_eight_turns_are_eight():
    image = np.arange(6).reshape(2, 3)
    assert len({turned(image, turn).tobytes() + bytes(turned(image, turn).shape) for turn in range(8)}) == 8


BAD_IMAGES = [
    (np.zeros((4, 4, 2), np.uint8), "image must be grayscale, RGB or RGBA, got 2 channels"),
    (np.zeros((4, 4), np.int32), "uint8, uint16 or float, got int32"),
    (np.full((4, 4), 1.5), "float images must have values from 0 to 1, got 1.5 to 1.5"),
    (np.full((4, 4), -0.1), "float images must have values from 0 to 1"),
    (np.full((4, 4), np.nan), "float images must have values from 0 to 1, got nan"),
    (np.zeros((0, 4), np.uint8), "must be nonempty and have shape (rows, columns[, channels]), got shape (0, 4)"),
    (np.zeros((2, 4, 4, 3), np.uint8), "got shape (2, 4, 4, 3)"),
]


@pytest.mark.parametrize(("image", "message"), BAD_IMAGES)
def test_arrays_that_are_not_images_raise_one_line(model, image, message):
    with pytest.raises(ValueError, match="image") as error:
        model.upscale(image)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"scale": 5}, "scale must be one of [2, 3, 4], got 5"),
        ({"patch": 0}, "patch must be a whole number of at least 1, got 0"),
        ({"rank": 1.5}, "rank must be a whole number of at least 1, got 1.5"),
        ({"cycles": 0}, "cycles must be a whole number from 1 to 1,000, got 0"),
        ({"back_projection": -1}, "back_projection must be a whole number from 0 to 1,000, got -1"),
        ({"stride": 9, "patch": 8}, "stride must be at most 8 (the side length of a patch), got 9"),
        ({"patch": (8, 6)}, "patch must be a single integer if symmetric is False, got (8, 6)"),
        ({"floor": 0.0}, "floor must be positive and below 1, got 0.0"),
        ({"n_patches": 0}, "n_patches must be a whole number of at least 1, got 0"),
    ],
)
def test_invalid_parameters_raise_one_line(setting, message):
    with pytest.raises(ValueError, match="must") as error:
        SuperResolver(**setting, symmetric=False).fit([np.zeros((40, 40), np.uint8)])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"cycles": 2}, "cycles must be a whole number from 1 to 1, got 2"),
        ({"patch": 7}, "patch must be a multiple of the stride (2), got 7"),
        (
            {"steps": [TrainingStep("words")]},
            "objective must be one of ['divergence', 'patches', 'images'], got 'words'",
        ),
        ({"steps": [TrainingStep(n_samples=0)]}, "n_samples must be a whole number of at least 1, got 0"),
    ],
)
def test_invalid_parameters_of_symmetric_stages_raise_one_line(setting, message):
    with pytest.raises(ValueError, match="must") as error:
        SuperResolver(**setting).fit([np.zeros((40, 40), np.uint8)])
    assert str(error.value) == message


@pytest.mark.parametrize(
    "setting", [{"n_epochs": 7}, {"n_patches": 3}, {"batch_size": 5}, {"learning_rate": 0.1}, {"recipe": "paper"}]
)
def test_settings_without_an_effect_raise(setting):
    (name,) = setting
    with pytest.raises(ValueError, match=f"^{name}=.* has no effect if symmetric is True: pass it to a TrainingStep"):
        SuperResolver(**setting).fit([np.zeros((40, 40), np.uint8)])
    with pytest.raises(ValueError, match="callbacks have no effect if symmetric is True"):
        SuperResolver().fit([np.zeros((40, 40), np.uint8)], callbacks=[Monitor(np.zeros((4, 4)))])


def test_no_images_and_an_unfitted_model_raise(random):
    with pytest.raises(ValueError, match="images must contain at least one image"):
        SuperResolver().fit([])
    with pytest.raises(ValueError, match="not fitted yet"):
        SuperResolver().upscale(np.zeros((4, 4), np.uint8))
    with pytest.raises(ValueError, match=r"objective must be one of .*'patches', 'images'.*, got 'words'"):
        a_model().fine_tune([random.random((50, 50))], TrainingStep("words"))
    with pytest.raises(ValueError, match="at least one image must be 18 x 18 pixels or larger"):
        a_model().fine_tune([random.random((10, 50))], TrainingStep("images"))
    with pytest.raises(AttributeError, match="machine_ is not available if symmetric is True"):
        SuperResolver.pretrained(2, device="cpu").machine_  # noqa: B018


# -- files ------------------------------------------------------------------------------------------------


def test_saved_and_loaded_it_enlarges_the_same(picture, tmp_path):
    model = a_model(3, 6, stride=2, cycles=2, back_projection=4, floor=0.01)
    model.use_machine(model.machine_.float())
    again = load(model.save(tmp_path / "model"), device="cpu")
    assert type(again) is SuperResolver
    mine, theirs = (each.get_params() for each in (model, again))
    assert mine == theirs
    np.testing.assert_array_equal(again.upscale(picture), model.upscale(picture))
    SuperResolver.pretrained(3, tmp_path / "model", device="cpu")
    clone(again)


def test_folders_of_other_models_raise_one_line(tmp_path):
    folder = a_model(3, 6).save(tmp_path / "model")

    def message_of(folder=folder, **settings):
        with pytest.raises(StorageError) as error:
            SuperResolver.pretrained(folder=folder, device="cpu", **settings)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert f"{folder} contains a model for scale 3, but scale 2 was requested" == message_of(scale=2)
    other = MVRBM((2, 2), n_epochs=1, device="cpu").fit(np.eye(9).reshape(9, 3, 3)).save(tmp_path / "other")
    assert "does not contain a SuperResolver" in message_of(other)
    message_of(tmp_path / "nowhere")
    for number, change in enumerate(
        [{"scale": 5}, {"patch": 7}, {"hidden_shape": [4, 3]}, {"color": 1}, {"stride": 9}]
    ):
        damaged = shutil.copytree(folder, tmp_path / str(number))
        config = json.loads((damaged / "config.json").read_text())
        config["estimator"]["params"] |= change
        (damaged / "config.json").write_text(json.dumps(config))
        assert f"the estimator's description in {damaged} is corrupted" in message_of(damaged)
    layers = {name: Gaussian((6, 6)) for name in LAYERS}
    dense = a_model(3, 6)
    dense.stages_ = StageSequence(
        [MachineStage(BoltzmannMachine(layers, Bernoulli((3, 4)), {name: Dense() for name in LAYERS}), 3)]
    )
    assert "couplings are not Kronecker products" in message_of(dense.save(tmp_path / "dense"))


# -- the weights in the package ---------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "gain"), [(2, 1.5), (3, 0.6), (4, 0.35)])
def test_the_shipped_weights_beat_bicubic_on_a_photo_outside_their_training_data(scale, gain):
    shipped = SuperResolver.pretrained(scale, device="cpu")
    assert shipped.scale == scale
    truth = photo("rocket", slice(420), slice(636))
    low = reduce_image(truth, scale)
    ours, bicubic = shipped.upscale(low), enlarge_image(low, scale)
    for protocol in ("paper", "literature"):
        mine, theirs = (psnr_ssim(truth, each, protocol, scale) for each in (ours, bicubic))
        assert mine.psnr > theirs.psnr + gain
        assert mine.ssim > theirs.ssim
    assert abs(reduce_image(ours, scale).astype(int) - low).mean() < 1
    gray = luminance(low)[:20, :30]
    np.testing.assert_array_equal(shipped.upscale(gray, self_ensemble=True), shipped.upscale(gray))
    np.testing.assert_allclose(shipped.upscale(gray.T.copy()).T.astype(int), shipped.upscale(gray), atol=1)


def test_the_shipped_weights_are_for_three_scales():
    assert SuperResolver.pretrained(device="cpu").scale == 2
    for scale in (1, 5, 2.5, "2"):
        with pytest.raises(ValueError, match=r"^scale must be one of \[2, 3, 4\], got [^\n]+$"):
            SuperResolver.pretrained(scale)


# -- learning ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos():
    """Two photographs to learn from and one to test on."""
    train = [photo("camera", slice(60, 220), slice(140, 300)), photo("astronaut", slice(0, 160), slice(150, 310))]
    return train, photo("coffee", slice(100, 260), slice(200, 360))


def gain(model, image):
    """PSNR of a model minus that of bicubic interpolation, in dB."""
    truth = luminance(image)
    low = reduce_image(truth, model.scale)
    found = [psnr_ssim(truth, each).psnr for each in (model.upscale(low), enlarge_image(low, model.scale))]
    return found[0] - found[1]


@pytest.fixture(scope="module")
def learned(photos):
    settings = {"patch": 8, "hidden_shape": (12, 12), "rank": 2, "n_patches": 4000, "n_epochs": 8, "device": "cpu"}
    stage = MachineStage(a_machine(8), 2)
    others = cut_patches([photos[1]], 2, stage, 300).layers(stage)
    model = SuperResolver(**settings, symmetric=False, back_projection=0)
    return model.fit(photos[0], callbacks=[Monitor(others, pseudo_sites=0)])


def copied(model):
    """A copy of the model, to be trained further."""
    machine = a_machine(model.patch, model.hidden_shape, model.rank).float()
    machine.load_state_dict(model.machine_.state_dict())
    return clone(model).use_machine(machine)


def test_contrastive_divergence_learns_to_enlarge(learned, photos):
    errors = [row["reconstruction_error"] for row in learned.history_]
    assert len(errors) == 8
    assert errors[-1] < 0.5 * errors[0]
    assert gain(learned, photos[1]) > 0.1


TUNING = {
    "patches": {"n_samples": 4000, "n_epochs": 6, "batch_size": 50, "learning_rate": 5e-3},
    "images": {"n_samples": 40, "n_epochs": 8, "batch_size": 4, "learning_rate": 5e-3, "averaging": 0.9},
}


@pytest.mark.slow
@pytest.mark.parametrize("objective", TUNING)
def test_fine_tuning_learns_more_and_again_the_same(objective, learned, photos):
    tuned, again, other = copied(learned), copied(learned), copied(learned).set_params(random_state=1)
    for each in (tuned, again, other):
        each.fine_tune(photos[0], TrainingStep(objective, **TUNING[objective]))
    losses = [row["loss"] for row in tuned.history_]
    assert len(losses) == TUNING[objective]["n_epochs"]
    assert losses[-1] < 0.95 * losses[0]
    assert gain(tuned, photos[1]) > gain(learned, photos[1]) + 0.25
    assert tuned.history_ == again.history_ != other.history_
    for name, parameter in tuned.machine_.state_dict().items():
        assert torch.equal(parameter, again.machine_.state_dict()[name])


def test_fitting_is_the_same_by_seed_and_another_by_another(photos):
    settings = {"patch": 6, "hidden_shape": (3, 3), "n_patches": 300, "n_epochs": 2, "device": "cpu"}
    settings |= {"symmetric": False}
    left, right, other = (SuperResolver(**settings, random_state=seed).fit(photos[0]) for seed in (3, 3, 4))
    for name, parameter in left.machine_.state_dict().items():
        assert torch.equal(parameter, right.machine_.state_dict()[name])
    assert not torch.equal(left.machine_.hidden.bias, other.machine_.hidden.bias)


SMALL_STAGES = {"patch": (6, 4), "hidden_shape": (3, 4), "rank": 3, "device": "cpu"}
SMALL_STEPS = [
    TrainingStep("divergence", n_samples=40, batch_size=8, learning_rate=2e-3),
    TrainingStep("patches", n_samples=4000, n_epochs=6, batch_size=50, learning_rate=5e-3),
    TrainingStep("images", n_samples=60, n_epochs=4, batch_size=4, learning_rate=3e-3, averaging=0.9),
]


@pytest.fixture(scope="module")
def staged(photos):
    return SuperResolver(**SMALL_STAGES, steps=SMALL_STEPS).fit(photos[0])


def test_symmetric_stages_learn_to_enlarge(staged, photos):
    assert len(staged.history_) == 1 + 6 + 4
    assert gain(staged, photos[1]) > 0.8
    turned_photo = np.ascontiguousarray(np.rot90(luminance(photos[1])))
    upright = staged.upscale(luminance(photos[1])).astype(int)
    np.testing.assert_allclose(np.rot90(staged.upscale(turned_photo), -1), upright, atol=1)


def test_symmetric_stages_are_saved_and_trained_again_the_same(staged, photos, tmp_path):
    again = load(staged.save(tmp_path / "model"), device="cpu")
    assert again.get_params() == {**staged.get_params(), "steps": tuple(SMALL_STEPS)}
    np.testing.assert_array_equal(again.upscale(photos[1]), staged.upscale(photos[1]))
    same, other = (SuperResolver(**SMALL_STAGES, steps=SMALL_STEPS, random_state=seed) for seed in (0, 1))
    assert same.fit(photos[0]).history_ == staged.history_ != other.fit(photos[0]).history_
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for number, change in enumerate([{"patch": 7}, {"patch": [6]}, {"rank": 2}, {"symmetric": False}, {"steps": 3}]):
        damaged = shutil.copytree(tmp_path / "model", tmp_path / str(number))
        described = {**config["estimator"], "params": {**config["estimator"]["params"], **change}}
        (damaged / "config.json").write_text(json.dumps({**config, "estimator": described}))
        with pytest.raises(StorageError):
            load(damaged, device="cpu")


def test_symmetric_stages_resume_bit_for_bit(staged, photos, tmp_path):
    first = SuperResolver(**SMALL_STAGES, steps=SMALL_STEPS).fit(photos[0], checkpoints=tmp_path)
    again = SuperResolver(**SMALL_STAGES, steps=SMALL_STEPS).fit(photos[0], checkpoints=tmp_path)
    for model in (first, again):
        for name, parameter in staged.stages_.state_dict().items():
            assert torch.equal(parameter, model.stages_.state_dict()[name])


def test_a_folder_of_pictures_is_a_list_of_images(photos, tmp_path):
    for number, image in enumerate(photos[0]):
        write_picture(tmp_path / f"{number}.png", Picture(image))
    steps = [TrainingStep(n_samples=8)]
    left, right = (SuperResolver(**SMALL_STAGES, steps=steps).fit(given) for given in (photos[0], tmp_path))
    assert left.history_ == right.history_


@pytest.mark.parametrize(("scale", "stride"), [(2, 1), (2, 3), (3, 2)])
def test_crops_have_a_multiple_of_the_scale_and_of_the_stride(scale, stride, photos):
    settings = {"patch": 6, "hidden_shape": (2, 2), "rank": 1, "stride": stride, "device": "cpu"}
    steps = [TrainingStep(n_samples=4)]
    for symmetric in (True, False):
        machine = {} if symmetric else {"n_patches": 50, "n_epochs": 1}
        model = SuperResolver(scale, **settings, symmetric=symmetric, steps=steps, **machine).fit(photos[0])
        assert np.isfinite(model.history_[-1]["loss"])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations_have_valid_parameters(name):
    for scale in (2, 3, 4):
        SuperResolver(scale, **CONFIGURATIONS[name]).check()


def test_the_default_has_the_shape_of_the_shipped_weights():
    for scale in (2, 3, 4):
        shipped = SuperResolver.pretrained(scale, device="cpu")
        new = SuperResolver(scale, steps=(), device="cpu").fit([np.zeros((40, 40), np.uint8)])
        assert [stage.arguments for stage in new.stages_] == [stage.arguments for stage in shipped.stages_]


# -- losses and their gradients ---------------------------------------------------------------------------


def a_stage(cycles, stride=2):
    """A tiny stage, and an image to learn from."""
    return MachineStage(a_machine(3, (2, 2)), stride, 0.05, cycles), np.random.default_rng(2).random((30, 30))


def a_patch_loss(cycles=2, stride=1):
    stage, image = a_stage(cycles, stride)
    patches = cut_patches([image], 2, stage, 12)
    return stage.machine, (patches, stage), *patch_loss(stage, patches, stage.machine.like)


def an_image_loss(cycles=2, rounds=3):
    stage, image = a_stage(cycles)
    crops = cut_crops([image], 24, 3, color=False, augment=True, seed=1)
    loss, weights = image_loss(StageSequence([stage]), SimulatedReduction(2, rounds), crops, RandomSource(0))
    return stage.machine, crops, loss, weights


@pytest.mark.parametrize("make", [a_patch_loss, an_image_loss])
@pytest.mark.parametrize("cycles", [1, 3])
def test_gradients_of_the_unrolled_pass_are_differences(make, cycles):
    machine, _, loss, _ = make(cycles)
    rows = torch.arange(3)
    value = loss(rows)
    value.backward()
    random = np.random.default_rng(0)
    nonzero = 0
    for name, parameter in machine.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        direction = torch.from_numpy(random.standard_normal(parameter.shape))
        with torch.no_grad():
            parameter += 1e-5 * direction
            more = float(loss(rows))
            parameter -= 2e-5 * direction
            less = float(loss(rows))
            parameter += 1e-5 * direction
        found = float((gradient * direction).sum())
        assert found == pytest.approx((more - less) / 2e-5, rel=1e-5, abs=1e-7), name
        nonzero += abs(found) > 1e-5
    assert nonzero == 12  # ten factors, the hidden bias and that of X; the other biases do not count


@pytest.mark.parametrize("cycles", [1, 2])
def test_the_loss_of_patches_is_that_of_the_machines_own_mean_field(cycles):
    machine, (patches, stage), loss, weights = a_patch_loss(cycles)
    rows = torch.tensor([1, 4, 5])
    with torch.no_grad():
        layers = {name: each.double() for name, each in patches.layers(stage, rows).items()}
        found = torch.zeros_like(layers[HIGH])
        for _ in range(cycles):
            found = machine.visible_mean(machine.hidden_mean({**layers, HIGH: found}))[HIGH]
        errors = (found - layers[HIGH]).square().mean((1, 2))
        total = float((errors * patches.scales[rows].double() ** 2).sum())
        assert float(loss(rows)) == pytest.approx(total, rel=1e-5)
    torch.testing.assert_close(weights, patches.scales.double() ** 2)


@pytest.mark.parametrize("rounds", [0, 4])
def test_the_loss_of_images_is_that_of_the_enlarged_crops(rounds):
    machine, crops, loss, weights = an_image_loss(1, rounds)
    model = SuperResolver(2, 3, (2, 2), 2, symmetric=False, back_projection=rounds, floor=0.05, device="cpu")
    model.use_machine(machine)
    total = 0.0
    for truth in crops[:, 0].numpy() / 255:
        error = model.upscale_luminance(reduce_image(truth, 2)).astype(float) - truth
        total += float((error[8:-8, 8:-8] ** 2).mean())
    with torch.no_grad():
        # The constant level of a reduction is 0.1.
        assert float(loss(torch.arange(3))) == pytest.approx(100 / 0.104 * total, rel=1e-4)
    assert weights.tolist() == [1, 1, 1]


def test_a_descent_goes_down_and_leaves_what_does_not_learn():
    machine, _, loss, weights = a_patch_loss(1, 2)
    before = {name: each.clone() for name, each in machine.state_dict().items()}
    settings = DescentSettings(30, 12, 0.01, 0.0, "cosine", 0.0, None)
    history = descend(machine, Objective(loss, weights), settings, RandomSource(0)).history
    assert history[-1]["loss"] < 0.85 * history[0]["loss"]
    changed = {name for name, each in machine.state_dict().items() if not torch.equal(each, before[name])}
    assert not any("log_variance" in name for name in changed)
    assert len(changed) == 12  # ten factors, the hidden bias and that of X


# -- failures and odd inputs ------------------------------------------------------------------------------


def photograph():
    rows, columns = np.mgrid[:64, :64]
    return (127 + 80 * np.sin(rows / 3 + (columns / 9) ** 2) + rows % 5).astype(np.uint8)


def test_fine_tuning_that_diverges_leaves_the_machine_as_it_was():
    image = photograph()
    settings = {"patch": 6, "hidden_shape": (4, 4), "rank": 2, "n_patches": 200, "n_epochs": 1, "device": "cpu"}
    model = SuperResolver(**settings, symmetric=False).fit([image])
    before = {key: value.clone() for key, value in model.machine_.state_dict().items()}
    with pytest.raises(DivergenceError, match="learning_rate"):
        model.fine_tune([image], TrainingStep("patches", n_epochs=3, n_samples=100, learning_rate=1e30))
    for key, value in model.machine_.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_an_image_too_small_for_a_pixel_is_left_out_and_numbers_of_other_kinds_are_saved(tmp_path):
    images = [photograph(), np.zeros((1, 1), np.uint8)]
    settings = {"patch": 6, "hidden_shape": (4, 4), "rank": 2, "n_patches": 200, "n_epochs": 1, "device": "cpu"}
    model = SuperResolver(np.int64(2), floor=np.float32(0.01), symmetric=False, **settings).fit(images)
    model.save(tmp_path / "model")
    assert SuperResolver.pretrained(folder=tmp_path / "model", device="cpu").scale == 2
    with pytest.raises(ValueError, match="from 0 to 1, got 0 to 255"):
        model.fit([np.linspace(0, 255, 4096).reshape(64, 64)])
    with pytest.raises(ValueError, match="n_samples must be"):
        model.fine_tune(images, TrainingStep(n_samples=0))


def test_fit_is_contrastive_divergence_and_then_the_steps(photos):
    settings = {"patch": 6, "hidden_shape": (3, 3), "n_patches": 300, "n_epochs": 1, "device": "cpu"}
    settings |= {"symmetric": False}
    step = TrainingStep("patches", n_samples=200, n_epochs=1, batch_size=50)
    colored = [np.dstack([image] * 4) if image.ndim == 2 else image for image in photos[0]]
    both = SuperResolver(**settings, steps=[step]).fit(colored)
    rgb = [image[..., :3] for image in colored]
    plain = SuperResolver(**settings).fit(rgb).fine_tune(rgb, step)
    assert both.history_ == plain.history_
    for name, parameter in both.machine_.state_dict().items():
        assert torch.equal(parameter, plain.machine_.state_dict()[name])


# -- models of earlier versions ---------------------------------------------------------------------------


def test_a_folder_of_version_0_2_is_a_plain_machine(tmp_path, picture):
    model = a_model(2, 6, cycles=2)
    model.use_machine(model.machine_.float())
    folder = model.save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for name in ("symmetric", "steps"):  # which version 0.2 did not have
        del config["estimator"]["params"][name]
    (folder / "config.json").write_text(json.dumps(config))
    again = load(folder, device="cpu")
    assert (again.symmetric, again.cycles) == (False, 2)
    np.testing.assert_array_equal(again.upscale(picture), model.upscale(picture))
