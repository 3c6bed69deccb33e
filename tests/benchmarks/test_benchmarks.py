"""The benchmark: what it counts, what it compares and what it writes. No time is asserted."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import benchmarks as bench
from benchmarks import floors, measure, problems
from benchmarks.__main__ import main
from benchmarks.contestants import CONTESTANTS
from benchmarks.problems import Problem
from mvrbm.couplings import Kronecker

run = sys.modules["benchmarks.run"]  # the module: in the package the name is the function's
ROOT = Path(__file__).parents[2]
TINY = Problem((6, 5), (4, 3), 1, 10, 40)


@pytest.fixture(autouse=True)
def few_digits(monkeypatch):
    """Digits without the time it takes to read a file of them."""
    images = np.random.default_rng(0).random((50, 8, 8)).astype(np.float32)
    monkeypatch.setattr(problems, "_source", lambda: (images, "noise"))


# -- operations -------------------------------------------------------------------------------------


def structured_update(problem, phase):
    """The products of an update of a matrix machine, one by one, sharing what can be shared."""
    n, R = problem.batch_size, problem.rank
    U, V = (torch.randn(R, 1, k, i) for k, i in zip(problem.hidden, problem.visible, strict=True))

    def up(X):
        XV = X @ V.mT  # (R, n, I, L)
        return XV, (U @ XV).sum(0)

    def down(Y):
        UY = U.mT @ Y  # (R, n, I, L)
        return UY, (UY @ V).sum(0)

    def gradient(X, Y, XV):
        by_u = torch.einsum("nkl,rnil->rki", Y, XV)
        by_v = torch.einsum("rnil,nij->rlj", U.mT @ Y, X)
        return by_u, by_v

    X = torch.randn(n, *problem.visible)
    XV, Y = up(X)
    start = Y if phase == "cd" else up(X)[1]
    chain = down(start)[1]
    gradient(X, Y, XV)
    chain_XV, chain_Y = up(chain)
    gradient(chain, chain_Y, chain_XV)


def dense_update(problem, phase):
    X, W = torch.randn(problem.batch_size, problem.n_visible), torch.randn(problem.n_hidden, problem.n_visible)
    Y = X @ W.T
    chain = (Y if phase == "cd" else X @ W.T) @ W
    _ = Y.T @ X, (chain @ W.T).T @ chain


@pytest.mark.parametrize("phase", ["cd", "pcd"])
@pytest.mark.parametrize(("dense", "update"), [(False, structured_update), (True, dense_update)])
@pytest.mark.parametrize("rank", [1, 3])
def test_operations_are_those_of_the_products(phase, dense, update, rank):
    # Hidden and visible shapes for which the last mode is the cheaper one to carry over first, as in the update above.
    problem = Problem((6, 7), (5, 4), rank, 10)
    with FlopCounterMode(display=False) as counter:
        update(problem, phase)
    assert floors.flops(problem, phase, dense=dense) == counter.get_total_flops()


def test_operations_of_the_papers_update():
    papers = Problem((28, 28), (25, 25))
    carried = 28 * 28 * 25, 28 * 25 * 25  # multiplications of X V', and of U times that
    assert floors.flops(papers, "cd") == 2 * 100 * (5 * carried[0] + 7 * carried[1]) == 44_100_000
    assert floors.random_numbers(papers, "cd") == 100 * (28 * 28 + 25 * 25)


@pytest.mark.parametrize("shapes", [((6, 5), (4, 3)), ((4, 5, 6), (3, 2, 4)), ((2, 3, 4, 5), (5, 2, 2, 3))])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_field_costs_what_the_coupling_says(shapes, rank):
    problem = Problem(*shapes, rank, 10)
    more = floors.flops(problem, "pcd") - floors.flops(problem, "cd")  # one field
    coupling = Kronecker(rank)
    coupling.connect(*shapes)
    assert more == 2 * problem.batch_size * coupling.operations


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("shapes", [((6, 5), (4, 3)), ((4, 5, 6), (3, 2, 4))])
def test_bare_products_are_the_products_that_were_counted(dense, shapes):
    problem = Problem(*shapes, 2, 10)
    run = floors.bare_products(problem, "cd", dense=dense)
    with FlopCounterMode(display=False) as counter:
        run(3)
    assert counter.get_total_flops() == 3 * floors.flops(problem, "cd", dense=dense)


def test_the_gpus_floor_is_its_slowest_part():
    rates = {"flops_fp32": 1e12, "flops_tf32": 8e12, "bytes": 1e12, "random": 1e12, "node": 1e-9}
    floor = floors.gpu_floor(Problem((28, 28), (25, 25)), "cd", rates)
    assert (floor["limit"], floor["seconds"]) == ("arithmetic, fp32", pytest.approx(44.1e-6))
    assert floors.gpu_floor(Problem((28, 28), (25, 25)), "cd", {**rates, "node": 1.0})["limit"] == "one graph node"


# -- measuring --------------------------------------------------------------------------------------


def test_the_exponent_of_a_power_law():
    sizes = [784.0, 4096.0, 16384.0]
    assert measure.exponent(sizes, [3e-6 * size**1.5 for size in sizes]) == pytest.approx(1.5)
    assert measure.exponent([784.0, 784.0], [1.0, 2.0]) is None
    with pytest.raises(ValueError, match="equally many, got 1 and 2"):
        measure.exponent([1.0], [1.0, 2.0])


def test_all_take_turns_and_a_failure_is_ones_own():
    calls = []

    def broken(passes):
        raise RuntimeError("out of memory\nhere")

    def noting(name):
        return measure.Entry(lambda: lambda passes: calls.append((name, passes)))

    entries = {"a": noting("a"), "broken": measure.Entry(lambda: broken), "b": noting("b")}
    measure.take_turns(entries, repetitions=3, min_seconds=0.0)
    assert [len(entries[name].seconds) for name in "ab"] == [3, 3]
    assert (entries["broken"].failure, entries["broken"].seconds) == ("RuntimeError: out of memory", [])
    # A warm-up before the first turn of each; then in turns, each round starting at another one.
    assert [name for name, _ in calls] == ["a", "a", "b", "b", "b", "a", "b", "a"]


def test_what_does_not_fit_together_is_built_for_every_turn():
    built = []
    entry = measure.Entry(lambda: built.append(1) or (lambda passes: None), keep=False)
    measure.take_turns({"large": entry}, repetitions=3, min_seconds=0.0)
    assert len(built) == len(entry.seconds) == 3


def test_spread_is_median_and_quartiles():
    spread = measure.Spread.of([1.0, 2.0, 3.0, 4.0, 100.0], scale=0.5)
    assert (spread.median, spread.low, spread.high, spread.n) == (1.5, 1.0, 2.0, 5)


# -- contestants ------------------------------------------------------------------------------------


def bars(n):
    """Half of the samples with a bar above, half with a bar below."""
    data = torch.full((n, 6, 5), 0.05)
    data[: n // 2, :2] = 0.95
    data[n // 2 :, 4:] = 0.95
    return data[torch.randperm(n, generator=torch.Generator().manual_seed(0))]


@pytest.mark.parametrize(
    ("key", "phase"), [(kind.key, phase) for kind in CONTESTANTS.values() for phase in kind.phases]
)
def test_every_update_learns(key, phase):
    kind = CONTESTANTS[key]
    if kind.package is not None:
        pytest.importorskip(kind.package)
    torch.manual_seed(0)
    data = bars(TINY.n_samples)
    contestant = kind(TINY, phase, data, recipe="default")
    contestant.run(1)
    start = float(((contestant.reconstruct(data) - data) ** 2).mean())
    contestant.run(100)
    end = float(((contestant.reconstruct(data) - data) ** 2).mean())
    assert end < 0.5 * start
    weights = floors.parameters(TINY, dense=kind.dense)
    assert contestant.n_parameters == weights


class Absent(CONTESTANTS["rbms"]):
    key, title, package = "absent", "an absent one", "no_package_of_this_name"


def test_who_is_missing_is_reported(monkeypatch, capfd):
    monkeypatch.setitem(CONTESTANTS, "absent", Absent)
    settings = bench.Settings(
        sizes=("6x5:4x3",),
        ranks=(1,),
        contestants=("mvrbm", "absent"),
        batch_size=10,
        samples=20,
        repetitions=1,
        min_seconds=0.0,
        inference=0,
        memory=False,
        threads=1,
        device="cpu",
    )
    result = bench.run(settings)
    (row,) = (row for row in result["rows"] if row["contestant"] == "absent")
    assert row["skipped"] == "no_package_of_this_name is not installed: pip install no_package_of_this_name"
    assert "  an absent one skipped: no_package_of_this_name is not installed" in capfd.readouterr().err
    assert "skipped: an absent one: no_package" in bench.tables(result)
    assert {row["phase"] for row in result["rows"] if row["contestant"] == "mvrbm"} == {"cd", "pcd"}


def test_what_is_too_large_is_skipped_before_it_is_allocated():
    huge = Problem((256, 256), (128, 128), 1, 100, 200)
    dense = CONTESTANTS["rbm"]
    assert dense.unsupported_reason(huge, 8 * 2**30) == "needs about 20.1 GiB, the limit is 8.0 GiB"
    assert dense.unsupported_reason(huge, 80 * 2**30) is None
    assert CONTESTANTS["mvrbm"].unsupported_reason(huge, 8 * 2**30) is None
    assert dense.bytes_needed(huge) > 4 * huge.n_visible * huge.n_hidden
    assert dense.unsupported_reason(Problem((6, 5), (4, 3), 2)) == "full weights have no rank"


def test_several_models_at_once_count_as_several(monkeypatch):
    class Three(CONTESTANTS["torch"]):
        key, title, models = "three", "three at once", 3

    monkeypatch.setitem(CONTESTANTS, "three", Three)
    settings = bench.Settings(
        sizes=("6x5:4x3",), ranks=(), contestants=("three", "sklearn"), batch_size=10, samples=20, repetitions=2,
        min_seconds=0.0, inference=0, memory=False, threads=1, device="cpu",
    )  # fmt: skip
    rows = bench.run(settings)["rows"]
    three = next(row for row in rows if row["contestant"] == "three" and row["phase"] == "pcd")
    other = next(row for row in rows if row["contestant"] == "sklearn")
    assert three["times_faster_than"]["sklearn"] == pytest.approx(other["update"]["median"] / three["update"]["median"])
    assert three["pass"]["median"] == pytest.approx(2 * three["update"]["median"])


# -- problems ---------------------------------------------------------------------------------------


def test_digits_have_the_shape_that_is_asked_for():
    for shape in ((8, 8), (12, 10), (4, 4, 4), (4, 3, 2, 3)):
        data, what = problems.digits(shape, 60)
        assert data.shape == (60, *shape)
        assert (data.dtype, data.min() >= 0, data.max() <= 1) == (np.float32, True, True)
        assert what.startswith("noise")
        assert what.endswith("repeated to 60")


def test_further_modes_are_neighboring_pixels():
    whole, _ = problems.digits((8, 8), 5)
    blocks, _ = problems.digits((4, 4, 4), 5)
    np.testing.assert_array_equal(blocks[:, 1, 2], whole[:, 2:4, 4:6].reshape(5, 4))


def test_samples_fill_whole_batches():
    assert Problem((28, 28), (25, 25)).n_samples == 5000
    assert Problem((256, 256), (128, 128)).n_samples == 200
    assert Problem((28, 28), (25, 25), batch_size=64, n_samples=1000).n_samples == 960


@pytest.mark.parametrize(
    "text", ["28x28", "28x28:25", "28:25", "28x28:25x25:x", "0x3:2x2", "28x28:25x25:1:2", "axb:2x2"]
)
def test_a_wrong_size_raises(text):
    with pytest.raises(ValueError, match=r"such as 28x28:25x25|same order"):
        problems.parse(text)


def test_settings_name_what_is_wrong():
    for wrong, message in (
        ({"contestants": ("mvrbm", "nobody")}, "contestants must be some of .*got .'nobody'"),
        ({"device": "tpu"}, "device must be one of .*'auto', 'cpu', 'cuda'.*, got 'tpu'"),
        ({"recipe": "mine"}, "recipe must be one of"),
        ({"repetitions": 0}, "repetitions must be at least 1"),
        ({"ranks": (0,)}, "ranks at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.Settings(**wrong)


# -- the whole --------------------------------------------------------------------------------------


def test_the_command_writes_json_table_and_plot(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = "--sizes 6x6:4x4,8x8:5x5,3x3x4:2x2x2 --ranks 1,2 --batch-size 10 --samples 20 --repetitions 2 --threads 1 "
    asked += "--min-seconds 0 --inference 50 --device cpu --no-memory --out b"
    command = ["--quick", *asked.split()]
    assert main(command) == 0
    out, err = capfd.readouterr()
    result = json.loads((tmp_path / "b" / "bench.json").read_text())
    assert out == (tmp_path / "b" / "bench.md").read_text()
    assert "8x8 -> 5x5: 20 samples in batches of 10" in err
    for title in (
        "6x6 -> 4x4, rank 2",
        "3x3x4 -> 2x2x2",
        "mvrbm MVRBM",
        "BernoulliRBM",
        "floors",
        "growth",
        "free energy",
    ):
        assert title in out
    assert {part["contestant"] for part in result["exponents"]} >= {"mvrbm", "rbm", "sklearn", "torch"}
    for row in result["rows"]:
        if row["skipped"]:
            continue
        update = row["update"]
        assert 0 < update["low"] <= update["median"] <= update["high"]
        assert row["pass"]["median"] == pytest.approx(2 * update["median"])
        if row["floor"]:
            assert row["floor"]["times"] == pytest.approx(update["median"] / row["floor"]["seconds"])
        theirs = {
            (other["contestant"], other["phase"]): other
            for other in result["rows"]
            if other["problem"] == row["problem"]
        }
        if "sklearn" in row["times_faster_than"]:
            ratio = theirs["sklearn", "pcd"]["update"]["median"] / update["median"]
            assert row["times_faster_than"]["sklearn"] == pytest.approx(ratio)
    assert len(result["inference"]["rows"]) == 9
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "b" / "bench.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / "b" / "bench.svg").read_text()
    assert main(command) == 1
    assert "holds results: use --force" in capfd.readouterr().err
    (tmp_path / "b" / "bench.md").unlink()
    assert main(["--report-only", "--out", "b"]) == 0
    assert (tmp_path / "b" / "bench.md").read_text() == capfd.readouterr().out == out
    assert not (tmp_path / "b" / "cells").exists()


def test_an_interrupted_run_resumes(tmp_path, monkeypatch):
    settings = bench.Settings(
        sizes=("6x5:4x3", "6x6:4x3"), ranks=(), contestants=("torch",), batch_size=10, samples=20, repetitions=1,
        min_seconds=0.0, inference=0, memory=False, threads=1, device="cpu",
    )  # fmt: skip
    times, original = [], run.take_turns

    def once(*args, **options):
        times.append(1)
        if len(times) == 2:
            raise KeyboardInterrupt
        original(*args, **options)

    monkeypatch.setattr(run, "take_turns", once)
    with pytest.raises(KeyboardInterrupt):
        bench.run(settings, tmp_path / "cells")
    rows = bench.run(settings, tmp_path / "cells")["rows"]
    assert [row["problem"] for row in rows if row["phase"] == "cd"] == ["6x5 -> 4x3", "6x6 -> 4x3"]
    assert len(times) == 3


@pytest.mark.parametrize(("device", "recipe"), [("cpu", "paper"), ("gpu", "default")])
def test_tables_and_plots_of_the_committed_results(device, recipe, tmp_path, capfd):
    shutil.copy(ROOT / "benchmarks" / device / "bench.json", tmp_path)
    assert main(["--report-only", "--out", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert f"Recipe '{recipe}', batch size 100" in out
    assert out == (tmp_path / "bench.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} >= {"bench.json", "bench.md"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("nonsense", 2, "unknown command 'nonsense': choose from speed, workloads, backends, kernels"),
        ("--sizes 28", 1, "expected a size such as 28x28:25x25"),
        ("--ranks 1,x", 2, "argument --ranks: expected a whole number, got 'x'"),
        ("--contestants me", 1, "contestants must be some of"),
        ("--recipe mine", 2, "argument --recipe: invalid choice: 'mine'"),
        ("--min-seconds -1", 2, "argument --min-seconds: must not be negative, got -1"),
        ("--min-seconds x", 2, "argument --min-seconds: expected a number, got 'x'"),
        ("--fast", 2, "unrecognized arguments: --fast"),
        ("--report-only", 2, "--report-only needs --out DIR with a bench.json"),
    ],
)
def test_mistakes_are_one_line(arguments, code, message, capfd):
    assert main(arguments.split()) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_need_a_gpu(capfd):
    assert main(["kernels"]) == 1
    assert "the kernels need a CUDA device" in capfd.readouterr().err


def test_help_has_an_example_and_names_the_other_command(capfd):
    assert main(["--help"]) == 0
    out = capfd.readouterr().out
    assert "python -m benchmarks --quick --out" in out
    assert "python -m benchmarks kernels: " in out
    assert all(option in out for option in ("--seed", "--device", "--json"))
    assert main(["kernels", "--help"]) == 0
    assert "python -m benchmarks kernels --out" in capfd.readouterr().out


@pytest.mark.slow
def test_memory_is_that_of_the_model():
    # 4 bytes x 1,024 x 8,192 weights: 32 MiB, held more than once.
    large = Problem((32, 32), (128, 64), 1, 10, 20)
    jobs = [measure.MemoryJob(key, CONTESTANTS[key].phases[0], large) for key in ("sklearn", "torch")]
    dense, structured = measure.peaks_on_cpu(jobs, 1)
    if dense is None:
        pytest.skip("this system does not tell the memory of a process")
    assert 64 * 2**20 < dense < 16 * CONTESTANTS["sklearn"].bytes_needed(large)
    assert structured < 32 * 2**20
