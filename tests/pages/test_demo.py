"""The demo's report: self-contained, with the numbers of its run."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mvrbm.pages import demo


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "report.html"
    numbers = demo.run(path, seed=1, device="cpu", quick=True)
    return path.read_text(encoding="utf-8"), numbers


def test_nothing_is_fetched_from_outside(report):
    html, _ = report
    tags = Tags()
    tags.feed(html)
    for tag, attributes in tags.found:
        for key in ("src", "href", "xlink:href"):
            address = attributes.get(key) or ""
            # the page to play with lies next to the report
            assert address in ("", "report-playground.html") or address.startswith(("data:", "#")), (tag, address)
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
    assert len(pictures) == 13
    assert len(drawings) == 3
    assert all(len(attributes["alt"]) > 5 for attributes in pictures)
    assert all(len(attributes["aria-label"]) > 5 for attributes in drawings)


def test_numbers_on_the_page_are_those_of_the_run(report):
    html, numbers = report
    for key in ("error_raw_pixels", "error_mvrbm", "error_classic_rbm"):
        assert f"{100 * numbers[key]:.1f}%" in html
    assert f"{numbers['parameters_mvrbm']:,}" in html
    assert numbers["parameters_mvrbm"] == 2 * 25 * 28 + 28 * 28 + 25 * 25
    assert f"{numbers['psnr_denoised']:.1f} dB" in html
    assert f"{numbers['parameters_generative']:,} parameters" in html
    assert f"recognizes the requested digit in {100 * numbers['agreement']:.0f}%" in html
    assert f"predicts the label of {100 * numbers['named_from_half']:.0f}%" in html
