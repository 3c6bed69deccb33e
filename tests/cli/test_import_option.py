"""``mvrbm --import``: units and couplings that the user defines."""

import sys

import numpy as np
import pytest

import own_module
from mvrbm import cli
from mvrbm.couplings import COUPLINGS
from mvrbm.units import UNITS


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with data and a module of units. Afterwards, nothing of the module is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "units_of_a_command.py").write_text(own_module.SOURCE)
    np.save("data.npy", (np.arange(24 * 6).reshape(24, 2, 3) % 5 < 2).astype(np.float32))
    yield tmp_path
    for registry, name in ((UNITS, "bit"), (COUPLINGS, "full"), (sys.modules, "units_of_a_command")):
        registry.pop(name, None)


def test_commands_know_the_units_and_couplings_of_the_module(place, capsys):
    train = "train data.npy --visible bit --coupling full --hidden 2x2 --epochs 1 --quiet --out model"
    assert cli.main(["--import", "units_of_a_command", *train.split()]) == 0
    assert cli.main(["--import", "units_of_a_command", "info", "model"]) == 0
    shown = capsys.readouterr().out
    assert "bit 2x3" in shown
    assert "full" in shown


def test_without_the_module_the_name_is_unknown(place, capsys):
    assert cli.main(["train", "data.npy", "--visible", "bit", "--hidden", "2x2", "--out", "model"]) == 1
    assert "got 'bit'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "content", "reason"),
    [
        ("no_such_module", None, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken_module", "def (", "SyntaxError: invalid syntax"),
        ("failing_module", "1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_that_cannot_be_imported_is_an_error_of_one_line(place, capsys, module, content, reason):
    if content is not None:
        (place / f"{module}.py").write_text(content)
    assert cli.main(["--import", module, "info", "digits"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert f"'--import': cannot import '{module}' ({reason}" in line
