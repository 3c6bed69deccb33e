"""Every rule finds its habit, and stays silent on good English that looks similar."""

from pathlib import Path

import pytest

from tools import check_english
from tools.check_english import NAMES, RULES, findings, main, phrases

# habit, text with it, text without it
HABITS = [
    ("X a Y", "Samples an update.", "Samples per update."),
    ("X a Y", "Returns a row a sample.", "Returns one row per sample."),
    ("X a Y", "It takes 3 milliseconds an update.", "It takes 3 milliseconds per update."),
    ("X a Y", "There are 20 Gibbs steps an epoch.", "It takes 20 Gibbs steps and draws a sample."),
    ("X a Y", "Mean squared error an image.", "Each entry a unit takes is a number."),
    ("passive", "The caller is told.", "Reports the error to the caller."),
    ("passive", "A missing value is not seen.", "Missing values are not detected."),
    ("passive", "The loss is looked at.", "The loss is checked."),
    ("passive", "It looks for a GPU.", "It searches for a GPU."),
    ("passive", "Negative values are refused.", "Raises ValueError for negative values."),
    ("manners", "Real-valued data wants Gaussian units.", "Use Gaussian units if you want real values."),
    ("manners", "The layers want arrays.", "The layers require arrays."),
    ("manners", "A unit knows its energy.", "The mask is True where values are known."),
    ("manners", "It has the manners of scikit-learn.", "It works in the manual mode."),
    ("go on", "Training can be gone on from.", "Training can resume on one process."),
    ("headless", "Replace what is there.", "Replace an existing file. Is it there?"),
    ("headless", "Fill in what is left.", "Fill in the remaining entries."),
    ("headless", "For who wants to draw.", "To draw samples, call sample."),
    ("headless", "It waits for those that end early.", "It waits for processes that end early."),
    ("private word", "After every pass.", "After every epoch, in a forward pass."),
    ("private word", "Passes over the data.", "Passes the data to the model, and one pass up and down."),
    ("private word", "The fastest way is chosen.", "Do it the same way, one way or another."),
    ("private word", "A training that was killed.", "A training run, and a training set."),
    ("private word", "Ten trainings.", "Ten training runs."),
    ("private word", "The weights leave the finite numbers.", "All entries are finite. Numbers follow."),
    ("private word", "It learns by heart.", "The heart of the method."),
    ("private word", "A slip in the paper.", "An erratum of the paper; slippery."),
    ("private word", "Numbers beside the paper's.", "Numbers compared with the paper's. Besides, they agree."),
    ("if not given", "The recipe's value if not given.", "Default: the recipe's value. If given, it is used."),
    ("if not given", "The rank is 1 unless it is given.", "The rank is 1 unless it is larger. Given that."),
    ("fragment", "Of everything random.", "Random seed. Of course it is used."),
    ("fragment", "Where to.", "Output path. It says where to look up."),
    ("a / an", "Train a MVRBM.", "Train an MVRBM, a machine, a `BoltzmannMachine`."),
    ("a / an", "Build a :class:`RBM`.", "Build an :class:`RBM`."),
    ("a / an", "a array", "an array, a unit, a unique one, a uniform draw, a European, a used one"),
    ("a / an", "an matrix and an unit", "an hour, an honest coin, an npz file, an update, an unknown"),
    ("count", "It has 1 modes.", "It has 1 axis, 21 axes, rank-1 factors, and takes 0.1 s."),
    ("count", "It took 1 epochs.", "It took 1 epoch, then 11 epochs."),
]  # fmt: skip


@pytest.mark.parametrize(("habit", "bad", "good"), HABITS)
def test_each_habit_is_found_and_its_replacement_is_not(habit, bad, good):
    assert habit in {rule.habit for _, rule, _ in phrases(bad)}
    assert [phrase for _, _, phrase in phrases(good)] == []


@pytest.mark.parametrize("number", range(len(RULES)))
def test_no_rule_is_idle(number):
    found = [rule for _, bad, _ in HABITS for _, rule, _ in phrases(bad)]
    assert RULES[number] in found


@pytest.mark.parametrize("text", ["is refused", "is\n    refused", "x is\trefused", "IS REFUSED"])
def test_phrases_are_found_across_lines_and_in_capitals(text):
    assert [phrase.lower() for _, _, phrase in phrases(text)] == ["refused"]


@pytest.mark.parametrize("text", ["`refuses`", "``wants``", ">>> wants()", "    >>> go(on) # wants", ":func:`refuses`"])
def test_code_in_prose_is_no_prose(text):
    assert list(phrases(text)) == []


PLACES = [
    ("a docstring", 'def f():\n    """It refuses."""\n', 2),
    ("a later line of a docstring", '"""First.\n\nThis is\nrefused.\n"""\n', 4),
    ("a comment", "x = 1\ny = 2  # refused\n", 2),
    ("a comment of several lines", "# Some goes\n# on here.\n", 1),
    ("a message", 'raise ValueError("this is refused")\n', 1),
    ("a formatted message", 'raise ValueError(f"{x} is refused, {y}")\n', 1),
    ("a message in two parts", 'print(\n    "this goes "\n    "on"\n)\n', 2),
    ("a help text", 'Option(help="Where to write.")\n', 1),
    ("a function's name", "class A:\n    def refuses(self):\n        pass\n", 2),
    ("a constant's name", "X = 1\nSTEPS_AN_UPDATE = 3\n", 2),
]


PAGE_PLACES = [
    ("a paragraph", "# Page\n\nThis is\nrefused.\n", [4]),
    ("a row of a table", "| a | b |\n|---|---|\n| is refused | x |\n", [3]),
    ("after a block of code", "```python\nx = wants()\n```\n\nIt refuses.\n", [5]),
    ("code, formulas, comments, targets", "```\nrefuses\n```\n$wants$ <!-- refuses --> [x](refuses.md) `wants`\n", []),
]


@pytest.mark.parametrize(("_", "source", "lines"), PAGE_PLACES)
def test_habits_are_found_in_pages(_, source, lines):
    assert [finding.line for finding in findings(Path("x.md"), source)] == lines


@pytest.mark.parametrize(("_", "source", "line"), PLACES)
def test_habits_are_found_where_people_read(_, source, line):
    assert [finding.line for finding in findings(Path("x.py"), source)] == [line]


@pytest.mark.parametrize(
    "source",
    [
        "refuses = 1\nx.refused(wants)\n",
        'x = {"wants": "refused"}\n',
        '"""Draws `wants`."""\n',
        "def gradient(): ...\n",
    ],
)
def test_code_itself_is_left_alone(source):
    assert findings(Path("x.py"), source) == []


@pytest.mark.parametrize("source", ["int a;\n/* it\n * goes on */\n", "int a;\n// It goes on\nint goes_on;\n"])
def test_comments_of_c_code_are_read(source):
    assert [finding.habit for finding in findings(Path("x.c"), source)] == ["go on"]


def test_better_names_are_not_on_the_list():
    assert not set(NAMES.values()) & set(NAMES)


def test_command_lists_findings_and_fails_only_if_there_are_some(tmp_path, capsys):
    (tmp_path / "good.py").write_text('"""Raises an error."""\n')
    assert main([str(tmp_path)]) == 0
    (tmp_path / "bad.py").write_text('\n"""The caller is told."""\n')
    assert main([str(tmp_path)]) == 1
    assert "bad.py:2: passive: 'is told' -> reports" in capsys.readouterr().out


def test_every_folder_of_code_is_checked_by_default():
    covered = {path.relative_to(check_english.ROOT).parts[0] for path in check_english.files(
        [check_english.ROOT / folder for folder in check_english.FOLDERS]
    )}  # fmt: skip
    assert covered == set(check_english.FOLDERS)
