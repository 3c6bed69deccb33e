"""The demo's report: self-contained, with the numbers of its run."""

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mvrbm.pages import demo_report
from mvrbm.pages.enlarging import EXAMPLE


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "report.html"
    numbers = demo_report.run(path, seed=1, device="cpu", quick=True)
    return path.read_text(encoding="utf-8"), numbers


def test_nothing_is_fetched_from_outside(report):
    html, _ = report
    tags = Tags()
    tags.feed(html)
    for tag, attributes in tags.found:
        for key in ("src", "href", "xlink:href"):
            address = attributes.get(key) or ""
            # the pages that the report links to lie next to it
            assert address in ("", "report-playground.html", "report-enlarge.html") or address.startswith(
                ("data:", "#")
            ), (tag, address)
    assert not re.search(r"url\((?!#)|@import|<script", html)


def test_the_model_of_the_report_can_be_played_with(report):
    html, numbers = report
    assert 'href="report-playground.html"' in html
    page = Path(numbers["playground"]).read_text(encoding="utf-8")
    assert f"{numbers['parameters_generative']:,} parameters" in page
    assert len(page) < 400_000


def test_every_picture_says_what_it_shows(report):
    html, _ = report
    tags = Tags()
    tags.feed(html)
    pictures = [attributes for tag, attributes in tags.found if tag == "img"]
    drawings = [attributes for tag, attributes in tags.found if tag == "svg"]
    assert len(pictures) == 4
    assert len(drawings) == 1
    assert all(len(attributes["alt"]) > 5 for attributes in pictures)
    assert all(len(attributes["aria-label"]) > 5 for attributes in drawings)


def test_numbers_on_the_page_are_those_of_the_run(report):
    html, numbers = report
    for key in ("error_raw_pixels", "error_mvrbm", "error_classic_rbm"):
        assert f"{100 * numbers[key]:.1f}%" in html
    assert f"{numbers['parameters_mvrbm']:,}" in html
    assert numbers["parameters_mvrbm"] == 2 * 25 * 28 + 28 * 28 + 25 * 25
    assert f"Bicubic interpolation reaches {numbers['psnr_bicubic']:.1f} dB" in html
    assert f"the model {numbers['psnr_model']:.1f} dB" in html
    assert f"{numbers['parameters_generative']:,} parameters" in html
    assert f"found the requested digit in {100 * numbers['agreement']:.0f}%" in html
    assert f"names {100 * numbers['named_from_half']:.0f}%" in html


def test_the_report_leads_with_the_playground_and_ends_with_code_that_runs(report, tmp_path, monkeypatch):
    html, numbers = report
    headings = re.findall(r"<h2>(.*?)</h2>", html)
    assert headings[0] == "Play with this model"
    assert headings[-1] == "Your own data in six lines"
    code = unescape(re.search(r"<pre><code>(.*?)</code></pre>", html, re.DOTALL)[1])
    assert len(code.splitlines()) == 6
    assert Path(numbers["enlarging_page"]).exists()
    monkeypatch.chdir(tmp_path)
    images = (np.random.default_rng(0).random((64, 6, 7)) < 0.3).astype(np.float32)
    damaged = np.where(np.arange(7) < 3, images[:2], np.nan)
    few = code.replace("images = ...", "images = given").replace(
        '"generative"', '"generative", n_epochs=1, device="cpu"'
    )
    found = {"given": images, "damaged": damaged}
    exec(few, found)
    assert found["samples"].shape == (20, 6, 7)
    np.testing.assert_array_equal(found["filled"][:, :, :3], images[:2, :, :3])
    assert (tmp_path / "model" / "config.json").exists()


def test_the_photograph_is_better_than_by_interpolation(report):
    _, numbers = report
    with Image.open(EXAMPLE) as file:
        truth = np.asarray(file.convert("YCbCr"))[..., 0] / 255 * 219 + 16
        small = file.convert("RGB").resize((48, 48), Image.Resampling.BICUBIC)
    # Pillow's interpolation has other rounding, and its luminance another range.
    bicubic = np.asarray(small.resize((96, 96), Image.Resampling.BICUBIC).convert("YCbCr"))[..., 0] / 255 * 219 + 16
    assert numbers["psnr_bicubic"] == pytest.approx(10 * np.log10(255**2 / np.mean((truth - bicubic) ** 2)), abs=0.3)
    assert numbers["psnr_model"] > numbers["psnr_bicubic"] + 0.5
