"""Pages and figures: escaped, in the colors of the page, written whole."""

import numpy as np
import pytest
from jinja2 import UndefinedError

from mvrbm.pages import Page, Section, Table, curves, image_grid


def test_text_is_escaped_and_curves_follow_the_colors(tmp_path):
    figure = curves({"a": ([0, 1], [1, 2])}, 'up & "up"', "caption", x_label="x", y_label="y")
    page = Page("<b>", "lead", [Section("s", ["<i>"], [Table(["a", "b"], [["<u>", "1"]])], [figure])])
    html = page.write(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>" not in html
    assert "<i>" not in html
    assert "<u>" not in html
    assert "currentColor" in html
    assert "&quot;up&quot;" in html


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path):
    path = tmp_path / "page.html"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(UndefinedError):
        Page("t", "l", [None]).write(path)
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_filters_are_gray_where_they_are_zero():
    figure = image_grid(np.zeros((3, 4, 4)), "none", "none", columns=2, symmetric=True)
    assert 'alt="none"' in figure.html
