"""The names that the package exports, and that importing it is quick."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mvrbm


def test_public_names_exist():
    assert {"MVRBM", "Bernoulli", "Kronecker", "load", "save"} <= set(mvrbm.__all__)
    assert all(hasattr(mvrbm, name) for name in mvrbm.__all__)
    assert set(mvrbm.__all__) <= set(dir(mvrbm))
    names = {}
    exec("from mvrbm import *", names)
    assert set(mvrbm.__all__) <= set(names)


def test_every_unit_and_coupling_is_exported():
    for registered in (*mvrbm.units.UNITS.values(), *mvrbm.couplings.COUPLINGS.values()):
        kind = getattr(registered, "func", registered)
        assert getattr(mvrbm, kind.__name__) is kind


@pytest.mark.parametrize("name", ["nothing", "Nothing", "base", "UNITS", "_private", "from_pretrained"])
def test_other_names_do_not_exist(name):
    with pytest.raises(AttributeError, match=f"module 'mvrbm' has no attribute '{name}'"):
        getattr(mvrbm, name)


def test_the_version_is_the_same_everywhere():
    root = Path(__file__).parents[1]
    cited = re.search(r"^version: (.+)\ndate-released: (.+)$", (root / "CITATION.cff").read_text(), re.MULTILINE)
    logged = re.search(r"^## \[(\d.+)\] - (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert cited.groups() == logged.groups()
    assert mvrbm.__version__ == cited[1]


def test_importing_the_package_does_not_import_torch():
    code = "import sys, mvrbm; mvrbm.__version__; sys.exit('torch' in sys.modules or 'sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
