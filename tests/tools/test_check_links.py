"""Tests of the check of links in built pages."""

import pytest

from tools.check_links import main, problems

GOOD = '<a href="b.html#place">b</a><a href="https://elsewhere.org">out</a><img src="p.png"><a href="#t" id="t">t</a>'
BROKEN = [
    ("a link to a page", '<a href="c.html">c</a>', "c.html: there is no such file"),
    ("a link to a place", '<a href="b.html#other">b</a>', "b.html#other: the page has no such anchor"),
    ("a place of its own page", '<a href="#other">b</a>', "#other: the page has no such anchor"),
    ("a picture", '<img src="q.png">', "q.png: there is no such file"),
    ("a script from elsewhere", '<script src="https://elsewhere.org/x.js"></script>', "is loaded from another site"),
    ("a style from elsewhere", '<link rel="stylesheet" href="//elsewhere.org/x.css">', "is loaded from another site"),
]


@pytest.fixture
def pages(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="place">b</h1>')
    (tmp_path / "p.png").write_bytes(b"")
    (tmp_path / "a.html").write_text(GOOD)
    return tmp_path


def test_good_pages_have_no_problems(pages):
    assert list(problems(pages)) == []
    assert main([str(pages)]) == 0


@pytest.mark.parametrize(("_", "html", "told"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_each_kind_of_problem_is_found(pages, _, html, told, capsys):
    (pages / "a.html").write_text(GOOD + html)
    assert main([str(pages)]) == 1
    assert told in capsys.readouterr().out
