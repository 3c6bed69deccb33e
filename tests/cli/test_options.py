"""Options: the same defaults as in Python, the same meaning in every command, and help that fits on a screen."""

import inspect
import subprocess
import sys

import pytest
import typer

import mvrbm as package
from mvrbm import MVRBM, ClassificationMVRBM, MVRBMImputer, MVRBMOutlierDetector, ReplicatedSoftmax, cli
from mvrbm.cli.options import Recipe
from mvrbm.io.documents import read_documents
from mvrbm.pages import demo_report
from mvrbm.training import RECIPES

GROUP = typer.main.get_command(cli.app)
COMMANDS = {
    **{name: command for name, command in GROUP.commands.items() if name != "data"},
    **{f"data {name}": command for name, command in GROUP.commands["data"].commands.items()},
}
# Lines of the help at a width of 100 columns.
SCREEN = 50


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def default_on_the_command_line(command, parameter):
    (found,) = [each for each in COMMANDS[command].params if each.name == parameter]
    return found.default


# A command, its parameter, and the function and the parameter that it is passed to.
SAME_DEFAULTS = [
    ("reconstruct", "steps", MVRBM.reconstruct, "steps"),
    ("sample", "start", MVRBM.sample, "init"),
    ("inpaint", "steps", MVRBM.inpaint, "steps"),
    ("inpaint", "burn_in", MVRBM.inpaint, "burn_in"),
    ("topics", "n_topics", ReplicatedSoftmax, "n_components"),
    ("topics", "epochs", ReplicatedSoftmax, "n_epochs"),
    ("topics", "words", ReplicatedSoftmax.top_words, "n"),
    ("topics", "max_words", read_documents, "max_words"),
    ("outliers", "epochs", MVRBMOutlierDetector, "n_epochs"),
    ("impute", "epochs", MVRBMImputer, "n_epochs"),
    ("export", "method", package.export.to_onnx, "method"),
    ("demo", "seed", demo_report.run, "seed"),
    ("demo", "quick", demo_report.run, "quick"),
    *(
        ("train", ours, MVRBM, theirs)
        for ours, theirs in [
            ("epochs", "n_epochs"),
            ("batch_size", "batch_size"),
            ("learning_rate", "learning_rate"),
            ("negative", "negative"),
            ("chains", "n_chains"),
            ("gibbs_steps", "gibbs_steps"),
            ("coupling", "coupling"),
        ]
    ),
]


@pytest.mark.parametrize(("command", "ours", "function", "theirs"), SAME_DEFAULTS)
def test_defaults_are_those_of_python(command, ours, function, theirs):
    assert default_on_the_command_line(command, ours) == inspect.signature(function).parameters[theirs].default


# Options whose absence matters: their default is None, and the help text shows what a model without it uses.
SHOWN_DEFAULTS = [
    ("sample", "steps", MVRBM.sample, "steps"),
    ("likelihood", "chains", MVRBM.log_likelihood, "n_chains"),
    ("likelihood", "temperatures", MVRBM.log_likelihood, "n_steps"),
]


@pytest.mark.parametrize(("command", "ours", "function", "theirs"), SHOWN_DEFAULTS)
def test_the_help_text_shows_the_defaults_of_python(command, ours, function, theirs):
    (found,) = [each for each in COMMANDS[command].params if each.name == ours]
    assert found.default is None
    assert found.show_default == str(inspect.signature(function).parameters[theirs].default)


@pytest.mark.parametrize(("labels", "kind"), [("", MVRBM), ("--labels labels.txt", ClassificationMVRBM)])
def test_train_leaves_settings_that_are_not_given_to_the_estimator(mvrbm, place, monkeypatch, labels, kind):
    (place / "labels.txt").write_text("a\nb\n" * 30)
    place.joinpath("rows.csv").write_text("\n".join(["a,b,c,d", *["0,1,1,0", "1,0,0,1"] * 30]))
    fitted = []
    monkeypatch.setattr(kind, "fit", lambda model, *_, **__: fitted.append(model) or 1 // 0)
    with pytest.raises(ZeroDivisionError):
        mvrbm(f"train rows.csv --shape 2x2 --hidden 2x2 --out model --seed 7 {labels}")
    expected = kind((2, 2), random_state=7, **({"mode": "generative"} if labels else {}))
    assert fitted[0].get_params() == expected.get_params()


def test_recipes_have_the_names_of_python():
    assert {recipe.value for recipe in Recipe} == set(RECIPES)


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_are_shown_in_brackets(command):
    for each in COMMANDS[command].params:
        assert "Default:" not in (getattr(each, "help", None) or "")


# Options that every command must declare in the same way: short and long names, default and help.
SHARED = ["seed", "device", "force", "as_json", "quiet", "data_dir", "rows", "missing_nan", "save"]


@pytest.mark.parametrize("name", SHARED)
def test_an_option_means_the_same_in_every_command(name):
    found = {
        (tuple(each.opts), each.default, each.help)
        for command in COMMANDS.values()
        for each in command.params
        if each.name == name
    }
    assert len(found) == 1


def test_short_options_have_one_meaning():
    names = {}
    for command in COMMANDS.values():
        for each in command.params:
            for option in each.opts:
                if len(option) == 2:
                    names.setdefault(option, set()).add(each.name)
    assert names == {"-n": {"rows", "n"}}  # how many samples: to read, or to draw


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_on_a_screen_and_has_an_example(mvrbm, place, command):
    code, out, err = mvrbm(command, "--help")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= SCREEN
    line = out.split("Example:\n")[1].split("\n")[0]
    assert line == line.rstrip()
    example = line.strip()
    assert example.startswith(f"mvrbm {command}")
    GROUP.make_context("mvrbm", example.split()[1:])


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["train", "--help"]])
def test_version_and_help_do_not_import_the_library(arguments):
    code = f"""
import sys
from mvrbm.cli import main
main({arguments})
heavy = {{"torch", "sklearn", "scipy", "numpy", "PIL", "tqdm"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_version_is_a_plain_flag(mvrbm, place):
    assert mvrbm("--version") == (0, f"mvrbm {package.__version__}\n", "")
    assert "--no-version" not in mvrbm("--help")[1]
