"""The application imputation: the missing entries, low-rank tools on a matrix of low rank, and the page."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorly")
from studies.__main__ import main
from studies.applications import filling, imputation, page, subsets


def test_the_kinds_of_missing_entries():
    assert imputation.hide((200, 8, 8), "20").mean() == pytest.approx(0.2, abs=0.02)
    blocks = imputation.hide((50, 8, 6), "block")
    assert (blocks.sum((1, 2)) == 4 * 3).all()
    right = filling.missing((3, 4, 6), "right half")
    assert right[:, :, 3:].all()
    assert not right[:, :, :3].any()


@pytest.mark.parametrize(("fill", "setting"), [(imputation.soft_impute, 0.5), (imputation.probabilistic_pca, 2)])
@pytest.mark.parametrize("shape", [(60, 10), (30, 60)])
def test_low_rank_tools_complete_a_matrix_of_low_rank(fill, setting, shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(shape[0], 2)) @ rng.normal(size=(2, shape[1]))
    missing = rng.random(x.shape) < 0.2
    found = fill(np.where(missing, np.nan, x), setting)
    np.testing.assert_array_equal(found[~missing], x[~missing])
    assert ((found - x)[missing] ** 2).mean() < 0.05 * x.var()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["20", "50"])
def test_settings_are_chosen_on_known_entries_whatever_the_seed(kind, seed):
    x = np.where(imputation.hide((100, 30), kind, seed), np.nan, 0.0)
    hidden = []
    imputation._chosen(x, lambda shown, _: hidden.append(np.isnan(shown) & ~np.isnan(x)) or np.zeros(x.shape), [1])
    assert hidden[0].sum() == pytest.approx(0.1 * (~np.isnan(x)).sum(), rel=0.25)


def test_tools_for_tables_take_the_cuts_of_a_tensor_that_are_fast_enough():
    def fill(rows):
        if rows.shape[1] > 10:
            raise TimeoutError
        return rows

    assert len(imputation._best_rows(fill)(np.zeros((3, 4, 5)), every_cut=True)) == 1


def test_principal_components_with_ridge_predict_a_linear_relation():
    rng = np.random.default_rng(0)
    train, test = (rng.normal(size=(n, 30)).astype(np.float32) for n in (400, 20))
    train[:, 1], test[:, 1] = train[:, 0], test[:, 0]
    x = np.where(np.arange(30) == 1, np.nan, test)
    assert (
        (filling._ridge(train, x, 25, 1.0)[:, 1] - test[:, 1]) ** 2
    ).mean() < 0.3  # other components are noise as large as it


def test_the_page_has_one_row_per_task():
    text = page.page({"imputation": {"digits, 20": {"mean": 0.27, "mvrbm": 0.13, "iterative": None}}})
    assert "| task | mean | mvrbm | iterative |" in text
    assert "| digits, 20 | 0.27 | **0.13** | - |" in text


def test_results_of_several_runs_add_up(tmp_path):
    former = {"imputation": {"frey, 20": {"mean": 9.0}, "digits, 20": {"mean": 9.0}}}
    former["topics"] = {"20news": {"lda": 771.0}}
    (tmp_path / "results.json").write_text(json.dumps(former))
    rows = {f"imputation-digits-20-{tool}-0": {"rmse": rmse} for tool, rmse in (("mean", 0.25), ("mvrbm", 0.125))}
    rows["imputation-digits-20-mean-1"] = {"rmse": 0.75}  # a seed that one tool has is left out
    (tmp_path / "imputation.json").write_text(json.dumps(rows))
    assert main(["applications", "imputation", "--out", str(tmp_path), "--report-only"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    errors = {"frey, 20": {"mean": 9.0}, "digits, 20": {"mean": 0.25, "mvrbm": 0.125}}
    assert found == {"imputation": errors, "topics": former["topics"]}


def test_gaps_channels_and_interpolation():
    gaps, channels = (subsets.hide((6, 3, 10), kind, 0) for kind in ("gap", "channel"))
    assert (gaps.sum(2) == 2).all()
    assert (np.diff(gaps.astype(int), axis=2) != 0).sum(2).max() <= 2  # one piece
    assert (channels.all(2).sum(1) == 1).all()
    assert channels.sum() == 6 * 10
    line = np.array([[np.nan, 1, np.nan, np.nan, 4, np.nan], [np.nan] * 6])
    np.testing.assert_allclose(subsets.interpolate(line), [[1, 1, 2, 3, 4, 4], [2.5] * 6])


def test_all_cases_are_planned():
    names = [run.name for run in imputation.plan()]
    assert len(names) == len(set(names)) == 3 * 6 * 3 * len(imputation.TOOLS)
    assert len(subsets.plan()) == 3 * len(subsets.CASES) * len(subsets.TOOLS)
    assert len(filling.plan()) == 2 * 4 + len(filling.EPOCHS)


def test_the_figure_has_multiples_of_the_best_result():
    tables = {
        "imputation": {"digits, 20": {"mean": 0.3, "mvrbm": 0.1, "iterative": None}},
        "outliers": {"wine": {"lof": 0.9, "mvrbm": 0.8}, "wine, share": {"mvrbm": 1.0}},
    }
    assert page.multiples("imputation", tables["imputation"])["digits, 20"] == pytest.approx({"mean": 3, "mvrbm": 1})
    assert page.multiples("outliers", tables["outliers"]) == {"wine": pytest.approx({"lof": 1, "mvrbm": 2})}
    assert [ax.get_title() for ax in page.draw(tables).canvas.axes] == ["imputation", "outliers"]


def test_the_stored_page_is_the_one_that_the_study_writes():
    folder = Path(__file__).parents[2] / "results/applications"
    tables = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert page.page(tables) == (folder / "README.md").read_text(encoding="utf-8")
