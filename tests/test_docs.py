"""Examples of pages and docstrings print what they show, every public name is documented, and figures are current."""

import contextlib
import doctest
import importlib
import io
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

import mvrbm
from mvrbm.couplings import COUPLINGS
from mvrbm.training import RECIPES
from mvrbm.units import UNITS
from tools import measured

ROOT = Path(__file__).parents[1]
NOT_RUN = "<!-- not run -->"
BLOCK = re.compile(
    r"^```python[^\n]*\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<output>.*?)^```$)?", re.MULTILINE | re.DOTALL
)


def examples(text):
    """Line number, code and shown output of each block that is to be run."""
    for match in BLOCK.finditer(text):
        if not text[: match.start()].rstrip().endswith(NOT_RUN):
            yield text.count("\n", 0, match.start("code")), match["code"], match["output"]


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


def without_decimals(text):
    """Text to compare: training amplifies the last bits, in which processors differ, so decimals are not compared."""
    return " ".join(re.sub(r"-?\d+\.\d*", "#", text).replace("[", "[ ").split())


@pytest.mark.slow
@pytest.mark.fixed_seed
@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page_run_in_order(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):  # examples make up data with torch.rand
        torch.manual_seed(0)
        for line, code, shown in examples(page.read_text()):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                # Blank lines in front make a traceback point to the line of the page.
                exec(compile("\n" * line + code, str(page), "exec"), namespace)
            assert shown is None or doctest.OutputChecker().check_output(
                without_decimals(shown), without_decimals(printed.getvalue()), doctest.ELLIPSIS
            )


def test_blocks_are_found_and_marked_ones_left_out():
    text = "# Page\n\n```python\na = 1\n```\n\n<!-- not run -->\n```python\nb = 2\n```\n\n```bash\nc\n```\n"
    text += "```python\nprint(a)\n```\n\n```text\n1\n```\n"
    assert list(examples(text)) == [(3, "a = 1\n", None), (15, "print(a)\n", "1\n")]


# Characters of a line of code that a page shows beside its menus on a screen of 1280 pixels, without a prompt.
WIDTH = 75


def shown_code(path):
    """Lines of Python that a page of the documentation shows."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [line for match in BLOCK.finditer(text) for line in match["code"].splitlines()]
    cells = re.split(r"^# %%.*\n(?:#.*\n)*", text.split('"""', 2)[2], flags=re.MULTILINE)
    return [line for cell in cells for line in cell.splitlines()]


SHOWN = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_pages_show_whole_lines_of_code(path):
    assert [line for line in shown_code(path) if len(line) > WIDTH] == []


def test_lines_of_code_are_found_in_pages_and_examples(tmp_path):
    (tmp_path / "a.md").write_text("text\n\n```python\na = 1\n```\n\n```console\n$ ls\n```\n")
    (tmp_path / "b.py").write_text('"""Title\n=====\n"""\n\na = 1\n# one\n\n# %%\n# Text\n# more\nb = 2\n')
    assert shown_code(tmp_path / "a.md") == ["a = 1"]
    assert [line for line in shown_code(tmp_path / "b.py") if line] == ["a = 1", "# one", "b = 2"]


# -- reference --------------------------------------------------------------------------------------


def documented():
    """The names that the reference has a page for, with their modules."""
    module, names = "", []
    pages = [(ROOT / "docs" / name).read_text() for name in ("api.md", "api-building-blocks.md")]
    for line in "\n".join(pages).splitlines():
        if found := re.match(r"\.\. (?:current)?module:: (\S+)", line):
            module = found[1]
        elif found := re.fullmatch(r" {3}([A-Za-z]\w*)", line):
            names.append(f"{module}.{found[1]}")
    return names


PACKAGES = ["mvrbm", "mvrbm.estimators", "mvrbm.sequences", "mvrbm.training", "mvrbm.vision"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_a_page(package):
    listed = {name.rsplit(".", 1)[1] for name in documented()}
    missing = set(importlib.import_module(package).__all__) - listed
    assert not missing, f"docs/api.md does not list {sorted(missing)} of {package}"


def test_every_page_of_the_reference_is_of_a_name_that_exists():
    assert len(documented()) == len(set(documented()))
    for name in documented():
        module, attribute = name.rsplit(".", 1)
        assert hasattr(importlib.import_module(module), attribute), name


@pytest.fixture
def api_pages(monkeypatch):
    pytest.importorskip("sphinx", reason="Sphinx is in the extra docs")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    return importlib.import_module("api_pages")


def test_related_names_have_pages_and_guides(api_pages):
    names = set(documented())
    for guide, text in api_pages.GROUPS:
        members = api_pages.members_of(text)
        assert len(members) > 1
        assert set(members) <= names
        assert (ROOT / "docs" / f"{guide}.md").exists()


def test_objects_without_see_also_get_their_guide_and_relatives(api_pages):
    lines = ["Detector."]
    api_pages.add_relatives(None, "class", "mvrbm.MVRBMOutlierDetector", mvrbm.MVRBMOutlierDetector, {}, lines)
    assert "   Guides: :doc:`/outliers`, :doc:`/density`" in lines
    assert ":obj:`~mvrbm.MatrixMixture`" in lines[-1]
    own = ["Text.", ".. seealso::", "   x"]
    api_pages.add_relatives(None, "class", "mvrbm.MVRBMOutlierDetector", mvrbm.MVRBMOutlierDetector, {}, own)
    assert own == ["Text.", ".. seealso::", "   x"]


def test_pages_of_classes_list_methods_for_users(api_pages):
    methods, others = api_pages.documented_members(mvrbm.MVRBM)
    assert {"fit", "transform", "inpaint", "save"} <= {*methods}
    assert "machine_" in others
    assert {"prepare", "get_params", "set_fit_request", "_fit"}.isdisjoint([*methods, *others])
    assert {"sample", "energy"}.isdisjoint(api_pages.documented_members(mvrbm.Bernoulli)[0])  # documented by Unit


@pytest.mark.parametrize(
    ("function", "docstring", "expected"),
    [
        (mvrbm.MVRBM.transform, ["Text."], ["Text.", "", "Returns", "-------", "ndarray", ""]),
        (mvrbm.MVRBM.transform, ["Text.", "", "Returns", "-------", "x"], ["Text.", "", "Returns", "-------", "x"]),
        (mvrbm.RandomSource.uniform, ["A.", "", "Raises", "------", "E"], ["Returns", "Tensor", "Raises"]),
    ],
)
def test_returned_types_are_added_before_later_sections(api_pages, function, docstring, expected):
    api_pages.add_returns(None, "method", "", function, None, docstring)
    assert [line for line in docstring if line in expected] == expected


@pytest.mark.parametrize("name", mvrbm.__all__)
def test_docstrings_have_all_sections(name):
    validate = pytest.importorskip("numpydoc.validate", reason="numpydoc is in the extra docs")
    checks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["numpydoc_validation"]["checks"]
    assert [error for error in validate.validate(f"mvrbm.{name}")["errors"] if error[0] in checks] == []


WITHOUT_EXAMPLES = {"Coupling", "Unit", "push_to_hub"}  # abstract; needs a network


@pytest.mark.parametrize("name", sorted({*mvrbm.__all__} - {"MMVRBM"}))
def test_examples_of_docstrings_fit_the_page(name):
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(mvrbm, name), name, globs={})
    assert [line for example in test.examples for line in example.source.splitlines() if len(line) > WIDTH] == []


@pytest.mark.fixed_seed
@pytest.mark.parametrize("name", sorted({*mvrbm.__all__} - WITHOUT_EXAMPLES))
def test_examples_of_docstrings_print_what_they_show(name):
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(mvrbm, name), name, globs={})
    assert test.examples, f"{name} has no section Examples"
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


DENSE = ("Dense, 500", "random")

# -- figures, links ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page", measured.PAGES)
def test_figures_are_those_of_the_stored_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert measured.PAGES[page](text) == text, "run python -m tools.measured --write"


def test_pages_quote_figures_that_exist():
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"\{measured\}`([^`]+)`", text):
            assert measured.value(name)
        for name in re.findall(r"\{measured-table\} (\S+)", text):
            with contextlib.suppress(FileNotFoundError):  # not measured yet, as the page says
                assert measured.table(name).rows, f"{page.name}: the table {name} is empty"


def test_pages_type_no_measured_figure():
    """Those of others, as published or from the paper, are all that may be typed."""
    for page in set((ROOT / "docs").glob("*.md")) - {ROOT / "docs" / "errata.md"}:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for paragraph in text.split("\n\n"):
            typed = re.findall(r"\d+\.\d+ (?:dB|nats)\b", paragraph)
            assert not typed or re.search("published|paper", paragraph), f"{page.name}: {typed}"


def test_pages_state_the_sizes_of_the_weights_for_photographs():
    folder = ROOT / "src" / "mvrbm" / "vision" / "weights"

    def kilobytes(*names):
        return round(sum((folder / f"{name}.safetensors").stat().st_size for name in names) / 1000)

    enlarging, denoising = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("super-resolution", "denoising"))
    for name in ("x2", "x3", "x4", "jpeg"):
        count = sum(tensor.size for tensor in load_file(folder / f"{name}.safetensors").values())
        assert f"{count:,}" in enlarging
    assert f"{kilobytes('x2', 'x3', 'x4', 'jpeg')} kB" in enlarging
    assert f"{kilobytes('gray', 'color', 'salt')} kB" in denoising


def test_the_table_of_recipes_is_that_of_the_code():
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    recipes = [RECIPES[name] for name in ("default", "generative", "paper")]
    for name in ("n_epochs", "batch_size", "momentum"):
        cells = next(line for line in text.splitlines() if f"`{name}` |" in line).split("|")[2:5]
        assert [float(cell.replace(",", "")) for cell in cells] == [getattr(recipe, name) for recipe in recipes]
    assert f"{RECIPES['generative'].rate_factor:g} times that (`rate_factor`)" in text


def test_the_readme_compares_with_the_best_classic_rbm_and_states_both_budgets():
    found = measured.read("results/generative/results.json")
    dense = [(row["median"], row["updates"]) for row in found["table"] if (row["title"], row["data"]) == DENSE]
    dense += [(row["test"], row["updates"]) for row in found["seconds_table"] if row["title"] == DENSE[0]]
    best, updates = max(dense)
    _, _, theirs, conditions = measured.table("front").rows[0]
    assert theirs.endswith(f"{best:.1f}")
    assert measured.value("digits.updates") in conditions
    assert f"{updates:,}" in conditions


def test_tables_of_training_times_name_the_machine():
    found = measured.read("results/generative/results.json")["seconds_table"]
    table = measured.table("schedule")
    trained_on = [row[table.header.index("trained on")] for row in table.rows]
    assert [text.startswith("CPU") for text in trained_on] == [row["device"] == "cpu" for row in found]


def test_a_missing_figure_is_an_error():
    with pytest.raises(KeyError):
        measured.value("digits.nonsense")


def test_the_readme_is_written_again_where_a_figure_differs():
    text = "a\n<!-- measured: begin -->\n| 1 |\n<!-- measured: end -->\nb\n"
    assert measured.table("front").plain() in measured.readme(text)
    assert re.fullmatch(r"a\n<!.*>\nb\n", measured.readme(text), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "studies/baselines/README.md"])
def test_links_of_pages_outside_of_the_documentation_exist(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8")):
        assert target.startswith("http") or (folder / target).exists(), target


@pytest.mark.parametrize("address", [None, "https://x.org/mvrbm/"])
def test_published_pages_have_a_version_switcher(address, monkeypatch):
    pytest.importorskip("sphinx_gallery", reason="the settings need the extra docs")
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delenv("MVRBM_DOCS_URL", raising=False)
    if address is not None:
        monkeypatch.setenv("MVRBM_DOCS_URL", address)
    options = runpy.run_path(str(ROOT / "docs" / "conf.py"))["html_theme_options"]
    assert options.get("switcher", {}).get("json_url") == (address and "https://x.org/mvrbm/versions/switcher.json")
    assert ("version-switcher" in options["navbar_end"]) is (address is not None)
