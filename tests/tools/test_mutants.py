"""The table of deliberate errors matches the code; whether tests catch the errors is checked by the tool itself."""

import ast

import pytest

from tools.mutants import FIRST, LAST, MUTANTS, NEVER, ROOT, apply, ordered_tests


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_each_mutant_changes_one_place_and_is_still_python(mutant, tmp_path):
    source = ROOT / "src" / "mvrbm" / mutant.file
    copy = tmp_path / "src" / "mvrbm" / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text(source.read_text())
    apply(mutant, tmp_path)
    changed = [
        (a, b) for a, b in zip(source.read_text().splitlines(), copy.read_text().splitlines(), strict=True) if a != b
    ]
    assert len(changed) == 1
    ast.parse(copy.read_text())


def test_cheap_tests_come_first_and_none_is_forgotten():
    order = [name.removeprefix("tests/") for name in ordered_tests(ROOT, [])]
    assert order[: len(FIRST)] == FIRST
    assert order[-len(LAST) :] == LAST
    files = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(order) >= files - set(NEVER)
    assert not set(order) & set(NEVER)
