"""Every Python example of the documentation and the README runs, page by page."""

import re
from pathlib import Path

import pytest
import torch

from mvrbm.couplings import COUPLINGS
from mvrbm.units import UNITS

ROOT = Path(__file__).parents[1]
NOT_RUN = "<!-- not run -->"
BLOCK = re.compile(r"^```python[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(text):
    """Line number and code of each block that is to be run."""
    for match in BLOCK.finditer(text):
        if not text[: match.start()].rstrip().endswith(NOT_RUN):
            yield text.count("\n", 0, match.start("code")), match["code"]


PAGES = [
    page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if any(examples(page.read_text()))
]


@pytest.fixture
def registries():
    """Forget the units and couplings that examples define, which register themselves."""
    before = [(registry, dict(registry)) for registry in (UNITS, COUPLINGS)]
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page_run_in_order(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):  # examples make up data with torch.rand
        torch.manual_seed(0)
        for line, code in examples(page.read_text()):
            # Blank lines in front make a traceback point to the line of the page.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_blocks_are_found_and_marked_ones_left_out():
    text = "# Page\n\n```python\na = 1\n```\n\n<!-- not run -->\n```python\nb = 2\n```\n\n```bash\nc\n```\n"
    assert list(examples(text)) == [(3, "a = 1\n")]
