"""Tests of the structure checks: each finds its problem in a small tree, and nothing in a good tree."""

import ast
from pathlib import Path

import pytest

from tools import check_structure as checks

GOOD = {
    "src/mvrbm/__init__.py": '"""A package for the tests of the checks."""\n',
    "src/mvrbm/units/__init__.py": '"""The units live in this folder."""\n',
    "studies/__init__.py": '"""The studies live in this folder."""\n',
    "benchmarks/__init__.py": '"""The benchmarks live in this folder."""\n',
    "tools/__init__.py": '"""The tools live in this folder."""\n',
    "tests/test_all.py": "",
    "tests/units/test_base.py": "",
    "tests/studies/test_digits.py": "",
    "pyproject.toml": '[tool.setuptools.packages.find]\nwhere = ["src"]\n',
}

# Check, files that replace those of the good tree, beginning of the report.
PROBLEMS = [
    (checks.check_docstrings, {"studies/new.py": "x = 1\n"}, "studies/new.py:1: "),
    (checks.check_docstrings, {"src/mvrbm/new.py": '"""Binary entries."""\n'}, "src/mvrbm/new.py:1: "),
    (checks.check_docstrings, {"src/mvrbm/new.py": '"""Units of a layer without a stop"""\n'}, "src/mvrbm/new.py:1: "),
    (
        checks.check_docstrings,
        {"tools/new.py": '"""Notes on units.\n\n    Notes ----- A unit is a layer.\n"""\n'},
        "tools/new.py:3: ",
    ),
    (checks.check_private, {"tools/new.py": "from mvrbm.units import Unit, _sum\n"}, "tools/new.py:1: "),
    (checks.check_private, {"src/mvrbm/a.py": "import mvrbm.units as u\n\nu._sum()\n"}, "src/mvrbm/a.py:3: "),
    (checks.check_tests, {"tests/unit/test_x.py": ""}, "tests/unit: "),
    (checks.check_tests, {"tests/backends/wide/test_x.py": ""}, "tests/backends/wide: "),
    (
        checks.check_test_imports,
        {"tests/units/test_x.py": "from units.test_base import helper\n"},
        "tests/units/test_x.py:1: ",
    ),
    (checks.check_test_imports, {"tests/units/test_x.py": "import units.test_base\n"}, "tests/units/test_x.py:1: "),
    (checks.check_test_imports, {"tests/test_x.py": "\nfrom units import test_base\n"}, "tests/test_x.py:2: "),
    (checks.check_test_imports, {"tests/test_x.py": "from tests.test_all import f\n"}, "tests/test_x.py:1: "),
    (checks.check_test_imports, {"tests/helpers.py": "import test_all\n"}, "tests/helpers.py:1: "),
    (checks.check_packages, {"pyproject.toml": '[tool.setuptools.packages.find]\nwhere = ["src", "."]\n'}, "pyproject"),
    (checks.check_packages, {"src/studies/__init__.py": ""}, "src:1: would be installed next to mvrbm: studies"),
]


def written(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(
    "check", list(dict.fromkeys(check for check, _, _ in PROBLEMS)), ids=lambda check: check.__name__
)
def test_a_good_tree_has_no_problems(check, tmp_path):
    assert list(check(written(tmp_path, GOOD))) == []


@pytest.mark.parametrize(("check", "files", "report"), PROBLEMS)
def test_each_problem_is_reported_once(check, files, report, tmp_path):
    (found,) = check(written(tmp_path, GOOD | files))
    assert found.startswith(report)


USES = [
    ("another module's name", "import m\nm._x", True),
    ("a name of a module under another name", "import a.b as m\nm._x", True),
    ("another module's name, even if it is used here too", "import m\ndef _x(): m._x", True),
    ("another object's attribute", "def f(machine): return machine._layers", True),
    ("an attribute of an attribute", "class A:\n    def f(self): return self.model._layers", True),
    ("self", "class A:\n    def f(self): return self._layers", False),
    ("the class", "class A:\n    @classmethod\n    def f(cls): return cls._layers", False),
    ("an object of the same class", "class A(B):\n    def f(self):\n        a = type(self)(1)\n        a._x()", False),
    ("an object of another class", "class A(B):\n    def f(self):\n        a = C(1)\n        a._x()", True),
    ("super", "class A(B):\n    def f(self): return super()._layers", False),
    ("an object of the own class", "class A:\n    def _x(self): ...\n    def f(self, a): return a._x()", False),
    ("an attribute set by the own class", "class A:\n    def f(self, a):\n        self._x = a._x", False),
    ("an attribute of the class body", "class A:\n    _x: int = 0\ndef f(a): return a._x", False),
    ("a special method", "def f(a): return a.__class__", False),
    ("a discarded value", "from m import _\n_('text')", False),
    ("a method of named tuples", "def f(a): return a._replace(b=1)", False),
    ("a public name", "import m\nfrom m import x\nm.x", False),
]


@pytest.mark.parametrize(("_", "source", "private"), USES)
def test_private_names_of_other_modules_are_found(_, source, private):
    assert bool(checks.PrivateNames(ast.parse(source)).found) is private


def test_helpers_and_functions_may_be_named_like_tests(tmp_path):
    files = {"tests/tables.py": "", "tests/test_x.py": "from tables import UNITS\nfrom mvrbm import test_of_fit\n"}
    assert list(checks.check_test_imports(written(tmp_path, GOOD | files))) == []


@pytest.mark.parametrize(
    ("name", "belongs"),
    [
        ("mvrbm/units/base.py", True),
        ("mvrbm/compiled/_native.abi3.so", True),
        ("mvrbm-0.1.0.dist-info/METADATA", True),
        ("studies/__init__.py", False),
        ("mvrbm/studies/digits.py", False),
        ("benchmarks/run.py", False),
        ("mvrbm/tests/conftest.py", False),
        ("mvrbm/units/test_base.py", False),
        ("tools/fuzz.py", False),
    ],
)
def test_files_that_do_not_belong_in_a_wheel_are_found(name, belongs):
    assert (list(checks.check_wheel([name])) == []) is belongs


@pytest.mark.parametrize(
    ("wheel", "files", "right"),
    [
        ("mvrbm-0.1.0-cp311-abi3-linux_x86_64.whl", ["mvrbm/a.py", "mvrbm/a.abi3.so"], True),
        ("mvrbm-0.1.0-py3-none-any.whl", ["mvrbm/a.py"], True),
        ("mvrbm-0.1.0-cp311-abi3-linux_x86_64.whl", ["mvrbm/a.py"], False),
        ("mvrbm-0.1.0-cp311-cp311-linux_x86_64.whl", ["mvrbm/a.abi3.so"], False),
        ("mvrbm-0.1.0-py3-none-any.whl", ["mvrbm/a.abi3.so"], False),
    ],
)
def test_the_tag_of_a_wheel_depends_on_compiled_code(wheel, files, right):
    assert (list(checks.check_tag(wheel, files)) == []) is right


def test_files_missing_from_a_wheel_are_found(tmp_path):
    tree = written(tmp_path, GOOD | {"src/mvrbm/py.typed": "", "src/mvrbm/a.c": "", "src/mvrbm/weights/x.json": ""})
    names = ["mvrbm/__init__.py", "mvrbm/units/__init__.py", "mvrbm/py.typed"]
    assert list(checks.check_data(names, tree)) == ["wheel: mvrbm/weights/x.json is missing"]
    assert list(checks.check_data([*names, "mvrbm/weights/x.json"], tree)) == []


def test_allowed_names_are_in_use():
    found = {
        name
        for folder in checks.PACKAGES
        for path in checks.modules(checks.ROOT, folder)
        for _, name in checks.PrivateNames(ast.parse(Path(path).read_text())).found
    }
    assert [end for end in checks.ALLOWED if not any(name.endswith(end) for name in found)] == []
