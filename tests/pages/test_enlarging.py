"""The enlarging page: in a real browser, with the values that Python computes."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image

from mvrbm.io.templates import write_html
from mvrbm.pages import write_enlarging_page
from mvrbm.pages.enlarging import template_values
from mvrbm.vision import SuperResolver
from mvrbm.vision.back_projection import back_project
from mvrbm.vision.pretrained import read_stages, write_stages
from mvrbm.vision.resampling import enlarge_rows
from mvrbm.vision.stages import SymmetricStage

pytestmark = pytest.mark.browser


@torch.no_grad()
def some_stage(patch, stride, hidden, rank):
    stage, rng = SymmetricStage(1, patch, stride, hidden, rank), np.random.default_rng(patch)
    for parameter in stage.parameters():
        parameter.copy_(torch.from_numpy(rng.normal(0, 0.4, parameter.shape)))
    return stage


STAGES = {
    "even patches": [(8, 2, (6, 5), 3)],
    "odd patches": [(9, 3, (2, 5), 2)],
    "several": [(6, 3, (3, 3), 2), (5, 1, (2, 4), 1), (4, 4, (3, 2), 2)],
}


@pytest.mark.parametrize(("scale", "rounds"), [(2, 20), (3, 1), (4, 0)])
@pytest.mark.parametrize("name", STAGES)
def test_luminance_equals_that_of_python(visit, tmp_path, name, scale, rounds):
    write_stages([some_stage(*each) for each in STAGES[name]], tmp_path / "stages.safetensors")
    stages = read_stages(tmp_path / "stages.safetensors")  # weights of 16 bits, as on the page
    low = np.random.default_rng(0).random((13, 18), np.float32)
    small = torch.from_numpy(low)
    bicubic = torch.from_numpy(enlarge_rows(low, scale, slice(0, 13 * scale)).copy())
    expected = stages.run(bicubic[None], lambda image: back_project(small, image[0], scale, rounds)[None])[0]
    values = template_values({scale: list(stages)}, rounds)
    page = visit(write_html("mvrbm.pages", "enlarge.html", tmp_path / "page.html", **values)).page
    run = """(low) => {
        const image = {height: 13, width: 18, data: Float64Array.from(low)};
        const resampler = new Resampler(13, 18, models[0].scale);
        return new Enlarger(models[0]).luminance(image, resampler).then((large) => [...large.data]);
    }"""
    found = np.array(page.evaluate(run, low.flatten().tolist())).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(found - bicubic.numpy()).max() > 0.05  # the stages do something


@pytest.fixture(scope="module")
def enlarger(tmp_path_factory):
    return write_enlarging_page(tmp_path_factory.mktemp("page") / "page.html")


def photograph(path, kind):
    """A smooth picture of 40 x 31 pixels with an edge: gray, in color, or transparent."""
    y, x = np.mgrid[:40, :31] / 40
    edge = 1 / (1 + np.exp(-30 * (x + 0.6 * y - 0.8)))
    colors = np.stack([edge, 0.8 * edge + 0.1 * y, 0.3 + 0.5 * x], -1)
    array = np.round(255 * (edge if kind == "gray" else colors)).astype(np.uint8)
    Image.fromarray(array).save(path)
    return array


def result_of(page):
    page.locator("#status", has_text="pixels in").wait_for()
    width, height = page.evaluate("[byId('after').width, byId('after').height]")
    read = "[...byId('after').getContext('2d').getImageData(0, 0, byId('after').width, byId('after').height).data]"
    return np.array(page.evaluate(read)).reshape(height, width, 4)


@pytest.mark.parametrize(("kind", "scale"), [("gray", 2), ("color", 2), ("color", 3), ("color", 4)])
def test_photographs_are_enlarged_as_by_python(visit, enlarger, tmp_path, kind, scale):
    array = photograph(tmp_path / "photo.png", kind)
    expected = SuperResolver.pretrained(scale, device="cpu").upscale(array).astype(int)
    page = visit(enlarger).page
    page.get_by_label(f"× {scale}", exact=True).check()
    page.locator("#file").set_input_files(tmp_path / "photo.png")
    page.locator("#status", has_text="31 × 40 →").wait_for()
    found = result_of(page)
    assert f"31 × 40 → {31 * scale} × {40 * scale} pixels" in page.locator("#status").inner_text()
    if kind == "gray":
        expected = np.repeat(expected[..., None], 3, -1)
    assert np.abs(found[..., :3] - expected).max() <= 1  # rounding of halves
    assert np.mean(found[..., :3] != expected) < 0.01
    assert (found[..., 3] == 255).all()
    assert page.evaluate("byId('progress').value") == 1


def test_the_example_can_be_stopped_compared_and_saved(visit, enlarger):
    page = visit(enlarger).page
    page.get_by_label("× 4", exact=True).check()
    page.get_by_role("button", name="Example").click()
    page.get_by_role("button", name="Stop").click()
    assert page.locator("#status").inner_text() == "Stopped."
    assert page.get_by_role("button", name="Save the result").is_disabled()
    page.get_by_label("× 2", exact=True).check()  # another scale enlarges what is there
    result_of(page)
    page.locator("#at").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("byId('compare').style.getPropertyValue('--at')") == "51%"
    with page.expect_download() as download:
        page.get_by_role("button", name="Save the result").click()
    with Image.open(download.value.path()) as saved:
        assert saved.size == (192, 192)


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_starts_with_an_example_whose_sizes_are_true(visit, enlarger, width):
    page = visit(enlarger, width=width).page
    shown = {}
    for scale in (2, 4):
        page.get_by_label(f"× {scale}", exact=True).check()
        page.locator("#status", has_text=f"96 × 96 → {96 * scale} × {96 * scale} pixels").wait_for()
        original, large = (page.locator(f"#{name}").bounding_box() for name in ("original", "after"))
        shown[scale] = large["width"]
        assert large["width"] == pytest.approx(scale * original["width"], abs=0.1)
        assert large["height"] == pytest.approx(large["width"], abs=0.1)
        assert large["x"] + large["width"] <= width
    assert shown[4] == pytest.approx(2 * shown[2], abs=0.2)


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_jpeg_artifacts_stay_and_the_page_says_so(visit, enlarger, tmp_path, kind):
    noise = np.random.default_rng(0).normal(0, 12, (40, 32))
    smooth = 255 / (1 + np.exp(-np.add.outer(np.arange(40.0), np.arange(32.0)) / 4 + 9))
    array = np.clip(smooth + noise, 0, 255).astype(np.uint8)
    Image.fromarray(np.stack([array] * 3, -1)).save(
        tmp_path / f"photo.{kind}", **({"quality": 30} if kind == "jpeg" else {})
    )
    page = visit(enlarger).page
    page.locator("#file").set_input_files(tmp_path / f"photo.{kind}")
    page.locator("#status", has_text="32 × 40 →").wait_for()
    assert ("JPEG artifacts" in page.locator("#status").inner_text()) == (kind == "jpeg")
    with Image.open(tmp_path / f"photo.{kind}") as file:
        expected = SuperResolver.pretrained(2, device="cpu").upscale(np.asarray(file)).astype(int)
    assert np.abs(result_of(page)[..., :3] - expected).max() <= 1


def test_a_photograph_is_dropped_and_large_ones_are_cut(visit, enlarger, tmp_path):
    page = visit(enlarger).page
    drop = """async ([width, height]) => {
        const canvas = new OffscreenCanvas(width, height);
        canvas.getContext("2d").fillRect(0, 0, 9, 9);
        const transfer = new DataTransfer();
        transfer.items.add(new File([await canvas.convertToBlob()], "photo.png", {type: "image/png"}));
        document.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, cancelable: true}));
    }"""
    page.evaluate(drop, [20, 30])
    page.locator("#status", has_text="20 × 30 →").wait_for()
    assert result_of(page).shape == (60, 40, 4)
    page.evaluate(drop, [4000, 3000])
    page.locator("#status", has_text="Enlarging").wait_for()
    assert page.evaluate("[picture.width, picture.height]") == [591, 443]
    page.get_by_role("button", name="Stop").click()


def test_a_file_that_is_no_image_is_named(visit, enlarger, tmp_path):
    (tmp_path / "notes.png").write_text("no image")
    page = visit(enlarger).page
    page.locator("#file").set_input_files(tmp_path / "notes.png")
    page.locator("#status", has_text="This browser cannot read notes.png as an image.").wait_for()


@pytest.mark.parametrize(("width", "scheme"), [*itertools.product([390, 1280], ["light", "dark"])])
def test_the_page_fits_the_screen_in_light_and_dark(visit, enlarger, width, scheme):
    visited = visit(enlarger, width=width, scheme=scheme)
    visited.page.get_by_role("button", name="Example").click()
    result_of(visited.page)
    visited.check_looks(scheme)
