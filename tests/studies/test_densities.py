"""Studies of densities: the other tools are densities, and patches are scored as in the literature."""

import json

import numpy as np
import pytest
from scipy import integrate, stats

from environment import fixed_seeds
from mvrbm import MatrixMixture
from studies import __main__, densities, natural_patches
from studies.densities import OURS, SETS, TOOLS
from studies.runs import Place, Store

with fixed_seeds():  # whether FastICA converges depends on the data
    rng = np.random.default_rng(0)
    ROWS = rng.standard_normal((200, 3)) @ np.array([[2.0, 0.3, 0], [0, 1, 0.4], [0, 0, 0.5]]) + [1, 2, 3]


def place(tmp_path, data_dir=None):
    return Place(Store(tmp_path / "runs"), "cpu", data_dir, tmp_path / "work")


@pytest.mark.filterwarnings("ignore:FastICA did not converge")
@pytest.mark.parametrize("name", [name for name in TOOLS if name != OURS])
def test_scores_of_other_tools_are_log_densities(name):
    """The integral of the density of a single feature is 1, and the density follows the scale of the data."""
    choices, fit = TOOLS[name]
    choice = choices[-1] | ({"n_components": 1} if "n_components" in choices[-1] else {})
    score, parameters = fit(ROWS[:, :1], choice, 0)
    total, _ = integrate.quad(lambda x: np.exp(score(np.array([[x]]))), -60, 60, points=[1], limit=500)
    assert total == pytest.approx(1, abs=2e-3)
    assert parameters > 0
    one, _ = fit(ROWS, choice, 0)
    other, _ = fit(10 * ROWS, choice, 0)
    assert other(10 * ROWS) == pytest.approx(one(ROWS) - 3 * np.log(10), abs=1e-6)


def test_gaussians_without_shrinkage_are_those_of_scipy():
    score, parameters = TOOLS["Gaussian, shrunk"][1](ROWS, {"shrinkage": 0.0}, 0)
    exact = stats.multivariate_normal(ROWS.mean(0), np.cov(ROWS.T, ddof=0)).logpdf(ROWS).mean()
    assert score(ROWS) == pytest.approx(exact, rel=1e-9)
    assert parameters == 9


def test_freedoms_and_scales_of_heavy_tails_are_found():
    columns = stats.t(3, [0, 5], [1, 0.1]).rvs((20_000, 2), random_state=0)
    freedom, center, scale = densities._student(columns, np.zeros(2))
    np.testing.assert_array_equal(freedom, [3, 3])
    np.testing.assert_allclose(center, [0, 5], atol=0.05)
    np.testing.assert_allclose(scale, [1, 0.1], rtol=0.05)


def test_parts_of_ordered_samples_do_not_overlap():
    parts = densities._in_order(np.arange(1000.0)[:, None])
    found = [set(part.ravel()) for part in (parts.train, parts.valid, parts.test)]
    assert [len(part) for part in found] == [600, 200, 200]
    assert len(set.union(*found)) == 1000


def test_a_run_of_each_tool(tmp_path, monkeypatch):
    monkeypatch.setitem(SETS, "tiny", (lambda data_dir: densities._shuffled(ROWS), ()))
    for tool in TOOLS:
        numbers = densities.measure({"set": "tiny", "tool": tool, "seed": 0}, place(tmp_path)).numbers
        assert numbers["samples"] == [120, 40, 40]
        assert -3 < numbers["nats"] < 0, tool
    assert "densities" in __main__.commands("densities")


def test_patches_are_scored_without_their_means_and_last_pixels():
    mixing = rng.standard_normal((8, 8)) + 3 * np.eye(8)
    patches = (rng.standard_normal((400, 8, 8)) @ mixing).astype(np.float32)
    model = MatrixMixture(
        1, n_contrasts=1, gate=False, level=True, means="one", n_epochs=20, visible_shape=(8, 8), random_state=0
    ).fit(patches.astype(float))
    # The covariance of a Gaussian from its conditional means: x_a given x_b is linear in x_b.
    drawn = natural_patches.without_means(model.sample(40_000)[0])
    exact = stats.multivariate_normal(drawn.mean(0), np.cov(drawn.T)).logpdf(natural_patches.without_means(patches))
    assert natural_patches.score(model, patches.astype(float)) == pytest.approx(exact.mean(), abs=0.3)


def test_the_command_scores_patches(tmp_path, capsys):
    bytes_ = rng.integers(0, 256, (23_000, 8, 8), dtype=np.uint8)
    (tmp_path / "patches").mkdir()
    np.savez(tmp_path / "patches" / "bsds_8x8.npz", train=bytes_, test=bytes_[:50])
    folders = ["--data-dir", str(tmp_path), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    arguments = ["natural-patches", "ours", "--only", "100-seed0", "--epochs", "0.1", "--device", "cpu", "--validate"]
    assert __main__.main([*arguments, *folders]) == 0
    (row,) = json.loads((tmp_path / "out" / "validation.json").read_text())["rows"]
    assert row["parameters"] <= 100
    # Uniform noise over 256 gray values has about zero nats; a Gaussian of the same variance has fewer.
    assert -30 < row["nats"] < 0
    assert "at most 100 parameters" in capsys.readouterr().out


def test_flips_keep_the_values_of_each_patch():
    patches = rng.random((50, 8, 8))
    found = natural_patches.flipped(patches, np.random.default_rng(0))
    np.testing.assert_array_equal(np.sort(found.reshape(50, -1)), np.sort(patches.reshape(50, -1)))
    assert 0.05 < np.mean([np.array_equal(a, b) for a, b in zip(found, patches, strict=True)]) < 0.4
