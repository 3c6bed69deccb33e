"""`python -m studies digits` from end to end at the smallest scale; errors are printed as one line."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from environment import fixed_seeds
from studies.__main__ import commands, main
from studies.arguments import parse
from studies.digits.plan import EXPERIMENTS

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATHS)}


@pytest.fixture(scope="module")
@fixed_seeds()  # the warning about constant entries depends on the choice of so few digits
def tiny(tmp_path_factory):
    """Run all experiments on digits at the smallest scale through the command line."""
    folder = tmp_path_factory.mktemp("tiny")
    code = main(["digits", "--scale", "tiny", "--seeds", "1", "--out", str(folder), "--device", "cpu"])
    assert code == 0
    return folder


@pytest.mark.slow
def test_a_tiny_run_makes_everything(tiny, capfd):
    found = json.loads((tiny / "results.json").read_text())
    assert found["runs"] == {"stored": found["runs"]["planned"], "planned": found["runs"]["planned"]}
    assert found["comparable_with_the_paper"] is False
    assert all("better_than_the_paper" not in row for row in found["numbers"])
    assert all(row["ours"] is not None for row in found["numbers"])
    assert "not to be compared" in (tiny / "report.html").read_text(encoding="utf-8")
    assert len(list((tiny / "figures").iterdir())) == 14
    capfd.readouterr()
    before = {path: path.stat().st_mtime_ns for path in (tiny / "runs").glob("*.json")}
    assert main(["classification", "--out", str(tiny), "--json", "--device", "cpu"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["computed"], result["left"]) == (0, 0)
    assert {path: path.stat().st_mtime_ns for path in (tiny / "runs").glob("*.json")} == before


@pytest.mark.slow
def test_the_report_comes_from_the_runs_alone(tiny, capfd, monkeypatch):
    former = (tiny / "results.json").read_bytes()
    monkeypatch.setattr("mvrbm.io.datasets.load", None)
    (tiny / "results.json").unlink()
    assert main(["digits", "--out", str(tiny), "--report-only"]) == 0
    assert capfd.readouterr().out == f"{tiny / 'report.html'}\n"
    assert (tiny / "results.json").read_bytes() == former


MISTAKES = [
    ("", 2, "a command is missing: choose from digits, denoise"),
    ("nothing --out x", 2, "unknown command 'nothing': choose from digits, denoise"),
    ("digits", 2, "required: --out"),
    ("digits --out", 2, "argument --out: expected one argument"),
    ("digits --out x --fast", 2, "unrecognized arguments: --fast"),
    ("digits --out x --scale huge", 2, "argument --scale: invalid choice: 'huge'"),
    ("digits --out x --device tpu", 2, "argument --device: invalid choice: 'tpu'"),
    ("digits --out x --seeds 0", 2, "argument --seeds: must be at least 1, got 0"),
    ("digits --out x --seed -1", 2, "argument --seed: must not be negative, got -1"),
    ("digits --out x --jobs 0", 2, "argument --jobs: must be at least 1, got 0"),
    ("digits --out x --jobs two", 2, "argument --jobs: expected a whole number, got 'two'"),
    ("digits --out x --scale tiny --only raw --budget -3", 2, "argument --budget: must be positive, got -3"),
    ("digits --out x --only denoise,sums", 1, "only: unknown group 'sums', 'digits' has against-t, points,"),
    ("denoise --out x --only raw", 1, "only: unknown group 'raw', 'denoise' has denoise"),
    ("superres --out x --only denoise", 1, "only: unknown group 'denoise', 'superres' has patch-size, fine-tuned,"),
    ("digits --out x --report-only", 1, "x has no run.json: there is nothing to report on"),
    ("digits --out x --report-only --no-report", 2, "pass one of --report-only and --no-report, not both"),
    ("digits --out x --scale paper", 1, "'mnist' is not on this machine"),
    ("superres --out x --scale paper", 1, "not on this machine: point MVRBM_DATA or --data-dir at"),
    ("digits --out file", 1, "file cannot be written"),
    ("learning nonsense", 2, "argument PART: unknown part 'nonsense': choose from defaults, seeds,"),
    ("learning grid --report-only --out x", 1, "x has no results of grid"),
    ("distributed --report-only --out x", 1, "x has no curve.json"),
    ("indian-pines --report-only --out x", 1, "x has no results.json"),
    ("indian-pines --draws 0", 2, "argument --draws: must be at least 1, got 0"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), MISTAKES)
def test_mistakes_are_one_line(arguments, code, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MVRBM_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "file").write_text("")
    assert main([*arguments.split()]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_more_subsets_can_follow_and_fewer_take_none_away(tmp_path, capfd):
    def stored(*options):
        arguments = ["classification", "--out", str(tmp_path), "--only", "raw", "--no-report", "--json"]
        assert main([*arguments, "--device", "cpu", *options]) == 0
        result = json.loads(capfd.readouterr().out)
        return result["computed"], result["seeds"]

    assert stored("--scale", "tiny", "--seeds", "1") == (4, 1)
    assert stored("--seeds", "2") == (4, 2)
    assert stored("--seeds", "1") == (0, 2)
    assert stored() == (0, 2)


@pytest.mark.slow
def test_a_folder_is_of_one_scale(tiny, capfd):
    assert main(["digits", "--out", str(tiny), "--scale", "quick"]) == 1
    assert "holds runs of scale tiny, not quick: choose another folder" in capfd.readouterr().err
    assert main(["digits", "--out", str(tiny), "--seed", "3"]) == 1
    assert "begins with subset 0, not 3" in capfd.readouterr().err


def test_help_names_the_commands(capfd):
    assert main(["--help"]) == 0
    out = capfd.readouterr().out
    others = "superres all patches photographs indian-pines deep learning distributed hyperparameters"
    for word in (*EXPERIMENTS, *others.split()):
        assert f"\n    {word}" in out


@pytest.mark.parametrize("name", commands())
def test_help_of_a_command_has_an_example_that_parses(name, capfd):
    assert main([name, "--help"]) == 0
    out = capfd.readouterr().out
    assert "--json" in out
    (example,) = (line.strip() for line in out.splitlines() if line.startswith("  python -m studies"))
    command, *options = example.removeprefix("python -m studies ").split()
    assert command == name
    parsed = parse("python -m studies", commands(name), [command, *options])
    assert parsed.command == name


def test_the_options_of_an_experiment(capfd):
    assert main(["digits", "--help"]) == 0
    out = capfd.readouterr().out
    for word in (
        "--scale",
        "--seeds",
        "--only",
        "--jobs",
        "--budget",
        "--report-only",
        "--seed",
        "--device",
        "--data-dir",
    ):
        assert word in out


def test_committed_results_are_found(capfd, monkeypatch):
    """The results in the repository, some of which are stored without their runs."""
    expected = {
        "digits": ("--out results/digits", "error, N = 10,000, T = 300, paper's recipe: 0.0482"),
        "superres": ("--out results/superres", "Lena, MMVRBM, fine-tuned"),
        "photographs": ("", "enlarging | x2, floats |"),
        "indian-pines": ("", "svm   TVRBM               overall 0.464"),
        "deep": ("", "| full | one layer |"),
        "learning": ("", "== likelihood,"),
        "distributed": ("", "speed_up_loopback:"),
    }
    monkeypatch.chdir(ROOT)
    for command, (options, line) in expected.items():
        assert main([command, "--report-only", *options.split()]) == 0
        assert line in capfd.readouterr().out, command


@pytest.mark.slow
def test_computing_needs_no_more_than_pytorch(tmp_path):
    code = """
        import sys
        for name in ("matplotlib", "skimage", "mlxtend", "typer", "jinja2", "tensorly", "PIL", "tqdm"):
            sys.modules[name] = None  # importing it is an error
        import numpy as np
        from pathlib import Path
        from studies import __main__, paper
        from studies.runs import Place, Store
        from studies import data
        from studies.digits import plan, run as computing
        from studies.runner import run_plan

        assert "digits" in __main__.commands("digits")

        random = np.random.default_rng(0)
        images, labels = random.integers(0, 256, (600, 28, 28), dtype=np.uint8), np.arange(600) % 10
        computing.digits = lambda *about: data.Digits(images[:500], labels[:500], images[500:], labels[500:])
        groups = [group for group in plan.GROUPS if group not in ("denoise", "growth")]
        runs = plan.plan(plan.SCALES["tiny"], groups, seeds=1)
        summary = run_plan(runs, Place(Store(Path(sys.argv[1])), "cpu"))
        assert len(summary.computed) == len(runs), summary
    """
    arguments = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
