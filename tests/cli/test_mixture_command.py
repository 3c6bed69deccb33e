"""mvrbm mixture, and the commands that use the saved density: results equal those of the estimator."""

import json

import numpy as np
import pytest

import mvrbm as package


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    samples = random.normal(size=(60, 4, 5)).cumsum(2).astype(np.float32)
    np.save("samples.npy", samples)
    np.save("rows.npy", samples.reshape(60, 20))
    holes = samples.copy()
    holes[::3, 1, 2:4] = np.nan
    np.save("holes.npy", holes)
    np.save("infinite.npy", [[1.0, np.inf], [2.0, 3.0]])
    return tmp_path


def fitted(mvrbm, *more):
    code, out, err = mvrbm("mixture samples.npy --components 2 --epochs 3 --out model --quiet --json", *more)
    assert code == 0, err
    return json.loads(out), package.load("model")


def test_fits_and_saves_a_density(mvrbm, place):
    result, model = fitted(mvrbm)
    expected = package.MatrixMixture(2, n_epochs=3, random_state=0).fit(np.load("samples.npy"))
    np.testing.assert_allclose(
        model.score_samples(np.load("rows.npy").reshape(-1, 4, 5)).mean(), result["log_likelihood"], rtol=1e-5
    )
    np.testing.assert_allclose(expected.score(np.load("samples.npy")), result["log_likelihood"], rtol=1e-5)
    assert (result["components"], result["parameters"]) == (2, model.n_parameters_)


def test_only_complete_samples_are_scored(mvrbm, place):
    command = "mixture holes.npy --components 2 --epochs 3 --out model --quiet --force"
    code, out, err = mvrbm(command)
    assert code == 0, err
    holes = np.load("holes.npy")
    score = package.load("model").score(holes[~np.isnan(holes).any((1, 2))])
    assert f"mean log-likelihood of 40 complete training samples  {score:.4f} nats" in out
    holes[:, 0, 0] = np.nan
    np.save("none.npy", holes)
    code, out, err = mvrbm(command.replace("holes", "none"))
    assert code == 0, err
    assert "likelihood" not in out


def test_options_reach_the_estimator(mvrbm, place):
    code, _, err = mvrbm(
        "mixture rows.npy --shape 4x5 --components auto --contrasts 2 --no-gate --level --epochs 2 --out m"
    )
    assert code == 0, err
    model = package.load("m")
    assert (model.n_components, model.n_contrasts, model.gate, model.level) == ("auto", 2, False, True)
    assert model.visible_shape_ == (4, 5)


def test_likelihoods_and_scores_are_exact(mvrbm, place):
    _, model = fitted(mvrbm)
    code, out, err = mvrbm("likelihood model samples.npy --json")
    assert code == 0, err
    np.testing.assert_allclose(json.loads(out)["mean"], model.score(np.load("samples.npy")))
    assert mvrbm("score model samples.npy scores.npy")[0] == 0
    np.testing.assert_allclose(np.load("scores.npy"), model.score_samples(np.load("samples.npy")))


def test_draws_do_not_need_steps(mvrbm, place):
    _, model = fitted(mvrbm)
    assert mvrbm("sample model drawn.npy -n 7 --seed 3")[0] == 0
    np.testing.assert_array_equal(np.load("drawn.npy"), model.set_params(random_state=3).sample(7)[0])
    code, _, err = mvrbm("sample model other.npy --steps 5")
    assert code == 2
    assert "exact" in err


def test_missing_entries_are_filled_in(mvrbm, place):
    fitted(mvrbm, "--force")
    code, _, err = mvrbm("inpaint model holes.npy filled.npy --missing-nan")
    assert code == 0, err
    holes, filled = np.load("holes.npy"), np.load("filled.npy")
    assert np.isfinite(filled).all()
    np.testing.assert_array_equal(filled[~np.isnan(holes)], holes[~np.isnan(holes)])


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("mixture samples.npy --components 0 --out m", 2, "expected a positive number or auto, got '0'"),
        ("mixture samples.npy --components some --out m", 2, "expected a positive number or auto, got 'some'"),
        ("mixture absent.npy --out m", 1, "absent.npy"),
        ("mixture infinite.npy --out m", 1, "infinite.npy contains an infinite entry at index"),
        ("mixture rows.npy --shape 3x5 --out m", 1, "20"),
    ],
)
def test_mistakes_are_one_line(mistake, command, code, says):
    mistake(None, command, code, says)
