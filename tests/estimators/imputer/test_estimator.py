"""The imputer: exact conditional means, automatic settings, tables, scikit-learn's checks, saved models."""

import json

import numpy as np
import pytest
import torch
from sklearn.impute import KNNImputer, SimpleImputer
from sklearn.utils.estimator_checks import parametrize_with_checks

import mvrbm
from environment import fixed_seeds
from mvrbm import MVRBMImputer, RandomSource
from mvrbm.estimators.imputer import correction
from mvrbm.estimators.imputer.factor_analysis import Factors
from mvrbm.estimators.imputer.masking import hold_out
from mvrbm.estimators.imputer.selection import choose_linear, entry_weights
from mvrbm.estimators.parameters import seed_of


def kronecker_normal(n, seed=0):
    """Draw matrices with covariance kron(A, B), and return them with this covariance; entries have mean 3."""
    rng = np.random.default_rng(seed)
    parts = [0.9 ** np.abs(np.subtract.outer(np.arange(size), np.arange(size))) for size in (4, 5)]
    covariance = np.kron(*parts) + 0.05 * np.eye(20)
    return 3 + (rng.normal(size=(n, 20)) @ np.linalg.cholesky(covariance).T).reshape(n, 4, 5), covariance


def exact_mean(x, hidden, covariance):
    rows, masks = x.reshape(len(x), -1) - 3, hidden.reshape(len(x), -1)
    filled = rows.copy()
    for row, out, u in zip(rows, filled, masks, strict=True):
        out[u] = covariance[np.ix_(u, ~u)] @ np.linalg.solve(covariance[np.ix_(~u, ~u)], row[~u])
    return 3 + filled.reshape(x.shape)


def test_conditional_means_of_a_normal_distribution_approach_the_exact_ones():
    train, covariance = kronecker_normal(2000)
    test, _ = kronecker_normal(200, seed=1)
    hidden = np.random.default_rng(2).random(test.shape) < 0.4
    best = exact_mean(test, hidden, covariance)
    imputer = MVRBMImputer(correction="none", random_state=0).fit(train)
    found = imputer.transform(np.where(hidden, np.nan, test))
    excess = ((found - best)[hidden] ** 2).mean() / ((test - best)[hidden] ** 2).mean()
    assert excess < 0.06  # of the error that nobody can avoid
    deviation = imputer.standard_deviation(np.where(hidden, np.nan, test))
    assert (deviation[~hidden] == 0).all()
    assert ((test - found)[hidden] / deviation[hidden]).std() == pytest.approx(1, abs=0.25)
    draws = np.stack(imputer.draw(np.where(hidden, np.nan, test), 40))
    np.testing.assert_array_equal(draws[0][~hidden], test[~hidden])
    assert (draws.std(0)[hidden] / deviation[hidden]).mean() == pytest.approx(1, abs=0.1)


def conditional_normal(x, hidden, mean, covariance):
    """Means and standard deviations of the hidden entries given the others, and 0 for all other entries."""
    means, deviations = np.zeros_like(x), np.zeros_like(x)
    for row, u, m, d in zip(x, hidden, means, deviations, strict=True):
        line = np.linalg.solve(covariance[np.ix_(~u, ~u)], covariance[np.ix_(~u, u)])
        m[u] = mean[u] + (row - mean)[~u] @ line
        d[u] = np.sqrt(np.diag(covariance[np.ix_(u, u)] - covariance[np.ix_(u, ~u)] @ line))
    return means, deviations


@pytest.mark.fixed_seed  # for which no residuals are chosen, as the transcription assumes
def test_deviations_and_draws_are_scaled_to_the_errors_on_held_out_entries():
    rng = np.random.default_rng(0)
    x = rng.standard_t(3, size=(60, 5)) * [1, 2, 3, 4, 5] + rng.normal(size=(60, 1)) ** 3  # not normal
    imputer = MVRBMImputer(correction="none", n_factors=1, random_state=0).fit(x)
    units = imputer.units_
    data = x
    x = data / units
    everything = torch.ones(x.shape, dtype=torch.bool)
    rng = RandomSource(seed_of(0))
    samples = hold_out(torch.tensor(x), everything, (5,), rng)  # as in fit
    hidden = samples.held.numpy()
    weights = entry_weights(samples.x, everything, per_entry=True)
    chosen = choose_linear(samples, weights, (5,), 1, 1, lambda *_: None)
    assert chosen.linear.residuals is None

    def predictions(factors, hidden):
        covariance = (factors.loadings @ factors.loadings.T + torch.diag(factors.noise)).numpy()
        return conditional_normal(x, hidden, factors.mean.numpy(), covariance)

    # The calibration belongs to the models that were fitted without the held-out entries. There are three more of them,
    # because few samples have held-out entries.
    rounds = [(chosen.linear, hidden)]
    for _ in range(3):
        more = hold_out(torch.tensor(x), everything, (5,), rng)
        rounds.append((chosen.refit(more.x, more.shown), more.held.numpy()))
    ratios = []
    for linear, held in rounds:
        means, deviations = predictions(linear.factors, held)
        ratios.append(np.abs(x - means)[held] / deviations[held])
    assert sum(map(len, ratios)) < 400  # the calibration has one level
    calibration = np.quantile(np.concatenate(ratios), 0.9545) / 2
    assert abs(calibration - 1) > 0.05  # otherwise, the comparison would not show whether it is used
    factors = Factors.of(imputer.machine_)
    means, deviations = predictions(factors, hidden)
    gaps = np.where(hidden, np.nan, data)
    np.testing.assert_allclose(imputer.standard_deviation(gaps), calibration * deviations * units, rtol=1e-6)
    drawn = factors.draw(torch.tensor(x), torch.tensor(~hidden), RandomSource(seed_of(0))).numpy()
    scaled = np.clip(means + calibration * (drawn - means), x.min(0), x.max(0))
    np.testing.assert_allclose(imputer.draw(gaps, 1)[0], np.where(hidden, scaled * units, data), rtol=1e-6)


def walks(n, seed):
    """Arrays of two random walks, with a bit of noise."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 2, 30)).cumsum(2) + 0.1 * rng.normal(size=(n, 2, 30))


def test_long_series_are_interpolated_and_drawn_with_smooth_errors(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 1, 600)).cumsum(2)
    hidden = np.zeros(x.shape, dtype=bool)
    for series in hidden[:, 0]:
        for start in rng.integers(590, size=12):
            series[start : start + 10] = True
    gaps = np.where(hidden, np.nan, x)
    imputer = MVRBMImputer("none", sample_axes=1, random_state=0).fit(gaps)
    filled = imputer.transform(gaps)
    times = np.arange(600)
    rows = zip(x[:, 0], hidden[:, 0], strict=True)
    lines = np.stack([np.interp(times, times[~mask], row[~mask]) for row, mask in rows])[:, None]
    assert ((filled - x)[hidden] ** 2).mean() < 1.5 * ((lines - x)[hidden] ** 2).mean()
    (drawn,) = imputer.draw(gaps, 1)
    both = hidden[..., 1:] & hidden[..., :-1]
    errors = drawn - filled
    assert np.corrcoef(errors[..., 1:][both], errors[..., :-1][both])[0, 1] > 0.6
    again = mvrbm.load(imputer.save(tmp_path / "model"), device="cpu")
    np.testing.assert_allclose(again.transform(gaps), filled, atol=1e-5)
    np.testing.assert_allclose(again.standard_deviation(gaps), imputer.standard_deviation(gaps), atol=1e-5)


@pytest.mark.slow
def test_two_standard_deviations_cover_the_errors_of_holes_in_series():
    shares = []
    for seed in range(5):
        x = walks(80, seed)
        hidden = np.random.default_rng(seed + 5).random(x.shape) < 0.3
        gaps = np.where(hidden, np.nan, x)
        imputer = MVRBMImputer("none", sample_axes=1, random_state=seed)
        errors = np.abs(imputer.fit_transform(gaps) - x)[hidden]
        shares.append((errors <= 2 * imputer.standard_deviation(gaps)[hidden]).mean())
    assert 0.905 < np.mean(shares) < 0.99


def test_a_correction_learns_what_is_not_linear():
    a = np.random.default_rng(0).normal(size=(400, 1))
    x = np.concatenate([a, np.abs(a), np.minimum(a, 0)], axis=1)
    holes = np.where(np.arange(400)[:, None] % 4 == [0, 1, 2], np.nan, x)

    def error(imputer):
        return ((imputer.fit_transform(holes) - x)[np.isnan(holes)] ** 2).mean()

    corrected = MVRBMImputer(n_epochs=100, n_hidden=20, n_factors=1, learning_rate=0.05, random_state=0)
    linear = MVRBMImputer(correction="none", n_factors=1, random_state=0)
    assert error(corrected) < 0.7 * error(linear)  # over 12 seeds: 0.02 to 0.19
    assert corrected.correction_ is not None
    assert linear.correction_ is None


def test_a_tensor_is_cut_into_the_samples_that_predict_best():
    rng = np.random.default_rng(0)
    curves = rng.normal(size=(6 * 8, 1)) * np.sin(np.linspace(0, 6, 30)) + rng.normal(size=(48, 1))
    tensor = curves.reshape(6, 8, 30) + 0.01 * rng.normal(size=(6, 8, 30))
    missing = rng.random(tensor.shape) < 0.3
    imputer = MVRBMImputer(random_state=0)
    found = imputer.fit_transform(np.where(missing, np.nan, tensor))
    assert imputer.sample_axes_ == 2
    assert np.abs(found - tensor)[missing].max() < 0.3
    knn = KNNImputer(keep_empty_features=True)
    rows = knn.fit_transform(np.where(missing, np.nan, tensor).reshape(6, -1)).reshape(tensor.shape)
    assert np.abs(rows - tensor)[missing].max() > 1


def test_tables_with_numbers_and_categories():
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    kind = rng.integers(3, size=300)
    table = pandas.DataFrame(
        {
            "size": kind + 0.1 * rng.normal(size=300),
            "color": np.array(["blue", "green", "red"], dtype=object)[kind],
            "big": kind == 2,
        }
    )
    holes = table.astype({"big": object})
    holes.iloc[:10, 1], holes.iloc[10:20, 2], holes.iloc[20:30, 0] = None, None, np.nan
    imputer = MVRBMImputer(random_state=0, correction="none")
    found = imputer.fit_transform(holes)
    assert list(found.columns) == list(imputer.get_feature_names_out()) == ["size", "color", "big"]
    others = [MVRBMImputer(random_state=seed, correction="none").fit_transform(holes) for seed in range(1, 5)]
    five, truth = pandas.concat([found, *others]), pandas.concat([table] * 5)
    # Ten entries of each column are missing. With the same value in all of them, the means are 0.978, 0.989 and 0.7.
    assert (five["color"] == truth["color"]).mean() > 0.985
    assert (five["big"] == truth["big"]).mean() > 0.995
    assert np.abs(five["size"] - truth["size"]).sum() / 50 < 0.45
    with pytest.raises(
        ValueError, match=r"column 'color' has categories that were not in the training data, such as 'pink'"
    ):
        imputer.transform(holes.assign(color="pink"))


def test_predictions_stay_in_the_range_of_the_data():
    rng = np.random.default_rng(0)
    line = -1 - rng.random((50, 1))  # all values are negative
    x = line * [1, 2, 3] + 0.01 * rng.normal(size=(50, 3))
    x[rng.random(x.shape) < 0.1] = np.nan
    extremes = [[-9, np.nan, np.nan], [0, np.nan, np.nan]]
    low, high = np.nanmin(x, 0), np.nanmax(x, 0)
    by_column = MVRBMImputer("none", random_state=0).fit(x).transform(extremes)
    np.testing.assert_allclose(by_column, [[-9, *low[1:]], [0, *high[1:]]])
    whole = MVRBMImputer("none", sample_axes=1, random_state=0).fit(x.reshape(50, 1, 3))
    np.testing.assert_allclose(
        whole.transform(np.reshape(extremes, (2, 1, 3)))[:, 0], [[-9, *[low.min()] * 2], [0, *[high.max()] * 2]]
    )


def test_without_clipping_predictions_and_draws_leave_the_range():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 1)) * [1, 2, 3] + 0.01 * rng.normal(size=(60, 3))
    far = [[10, np.nan, np.nan]]
    settings = {"n_factors": 1, "n_epochs": 5, "random_state": 0, "clip": False}
    for kind in ("none", "rectified"):
        imputer = MVRBMImputer(kind, **settings).fit(x)
        np.testing.assert_allclose(imputer.transform(far), [[10, 20, 30]], rtol=0.05)
    assert not imputer.correction_.bounded
    with fixed_seeds():
        columns = np.random.default_rng(0).normal(size=(100, 2))  # from -2.4 to 2.0
    (draws,) = MVRBMImputer("none", **settings).fit(columns).draw(np.full((20_000, 2), np.nan), 1)
    assert (draws < columns.min(0)).any(0).all()  # at least 160 are expected
    assert (draws > columns.max(0)).any(0).all()


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_corrections_get_samples_in_standard_deviations(shape):
    x = np.random.default_rng(0).normal(size=(40, *shape)) * np.arange(1, 7).reshape(shape)
    scaling = MVRBMImputer("rectified", n_factors=1, n_epochs=1, random_state=0).fit(x)._predictor.scaling
    variances = (x.reshape(40, 6) / scaling.units.numpy()).var(0)
    expected = np.sqrt(variances if len(shape) == 1 else np.full(6, variances.mean()))
    np.testing.assert_allclose(scaling.scale, expected)


def test_columns_without_values_are_dropped_or_zero():
    x = np.random.default_rng(0).normal(size=(30, 4))
    x[:, 2] = np.nan
    x[0, 0] = np.nan
    with pytest.warns(UserWarning, match=r"columns \[2\] are dropped because they have no known entries"):
        imputer = MVRBMImputer(random_state=0).fit(x)
    assert imputer.transform(x).shape == (30, 3)
    assert list(imputer.get_feature_names_out()) == ["x0", "x1", "x3"]
    kept = MVRBMImputer(random_state=0, keep_empty_features=True).fit_transform(x)
    assert kept.shape == (30, 4)
    assert (kept[:, 2] == 0).all()


@pytest.mark.fixed_seed  # the choice of the model depends on the data
@pytest.mark.slow
@pytest.mark.parametrize("correction", ["none", "rectified"])
@pytest.mark.parametrize("correlated", [False, True])
def test_loaded_imputers_fill_in_the_same(correction, correlated, tmp_path):
    x = np.random.default_rng(0).normal(size=(50, 2, 40)).astype(np.float32)
    x = x.cumsum(2) if correlated else x
    x[np.random.default_rng(1).random(x.shape) < 0.2] = np.nan
    imputer = MVRBMImputer(correction, n_epochs=2, random_state=0).fit(x)
    again = mvrbm.load(imputer.save(tmp_path / "model"), device="cpu")
    np.testing.assert_allclose(again.transform(x), imputer.transform(x), atol=1e-5)
    np.testing.assert_allclose(again.standard_deviation(x), imputer.standard_deviation(x), atol=1e-5)
    assert (imputer._predictor.linear.residuals is not None) == correlated
    assert (again.n_factors_, again.errors_) == (imputer.n_factors_, imputer.errors_)


@pytest.mark.parametrize(("former", "present"), [("gaussian", "none"), ("rectified", "rectified"), ("auto", "auto")])
def test_models_of_version_0_2_are_loaded_under_the_new_parameter_name(former, present, tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 3))
    x[::4, 1] = np.nan
    imputer = MVRBMImputer(present, n_factors=1, n_epochs=1, random_state=0).fit(x)
    config = imputer.save(tmp_path / "model") / "config.json"
    content = json.loads(config.read_text())
    params = content["estimator"]["params"]
    del params["correction"]
    params["hidden"] = former  # until version 0.2, this parameter selected the correction
    config.write_text(json.dumps(content))
    again = mvrbm.load(tmp_path / "model", device="cpu")
    assert again.correction == present
    np.testing.assert_allclose(again.transform(x), imputer.transform(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correction": "softmax"}, "correction must be one of"),
        ({"sample_axes": 3}, r"sample_axes must be at most 2 for data with 3 axes, got 3"),
        ({"n_factors": 0}, "n_factors"),
        (
            {"categorical_features": "all"},
            "categorical_features must be 'from_dtype', a list of columns or None, got 'all'",
        ),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MVRBMImputer(**settings).fit(np.zeros((5, 3, 4)))


def test_other_shapes_are_an_error():
    imputer = MVRBMImputer(random_state=0).fit(np.random.default_rng(0).normal(size=(9, 3, 4)))
    with pytest.raises(ValueError, match=r"samples must have shape \(3, 4\), got \(4, 3\)"):
        imputer.transform(np.zeros((9, 4, 3)))


@parametrize_with_checks([MVRBMImputer(random_state=0)])
def test_scikit_learn_check(estimator, check):
    check(estimator)


def test_seeds_determine_the_result():
    x = np.random.default_rng(0).normal(size=(250, 5))
    x[np.random.default_rng(1).random(x.shape) < 0.2] = np.nan
    first, second = (MVRBMImputer(n_epochs=2, random_state=3).fit_transform(x) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert torch.isfinite(torch.from_numpy(first)).all()


def test_nothing_known_and_columns_in_another_order_are_one_clear_error():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(ValueError, match="all entries are missing"):
        MVRBMImputer().fit(np.full((5, 3), np.nan))
    frame = pandas.DataFrame({"size": np.arange(20.0), "color": ["red", "blue"] * 10})
    imputer = MVRBMImputer(n_epochs=1, random_state=0).fit(frame)
    with pytest.raises(ValueError, match="must be in the same order"):
        imputer.transform(frame[["color", "size"]])
    with pytest.raises(ValueError, match=r"not in the data: \['nowhere'\]"):
        MVRBMImputer(categorical_features=["nowhere"]).fit(frame)


@pytest.mark.fixed_seed  # for which one model is tried
def test_progress_says_which_error_it_is_and_what_was_chosen(capsys):
    data = np.random.default_rng(0).normal(size=(30, 4))
    data[::3, 0] = np.nan
    imputer = MVRBMImputer(n_factors=1, correction="none", device="cpu", random_state=0, verbose=1).fit(data)
    ((tried, error),) = imputer.errors_.items()
    assert capsys.readouterr().err.splitlines() == [
        f"{tried}: error on held-out entries is {error:.4g} standard deviations",
        "selected: sample_axes=1, n_factors=1, no correction",
    ]


def test_long_training_says_how_long_it_takes(capsys, monkeypatch):
    clock = iter([0.0, 10.2])  # for two trials of 34 epochs each
    monkeypatch.setattr("mvrbm.estimators.imputer.correction.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr(correction.CorrectionTrainer, "_train_one", lambda trainer, filled, n_epochs: (0.5, None))
    data = np.random.default_rng(0).normal(size=(500, 3))
    MVRBMImputer("rectified", n_epochs=1000, n_factors=1, device="cpu", random_state=0, verbose=1).fit(data)
    assert "training the correction, about 2 min left\n" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:columns", "ignore:Skipping features")
@pytest.mark.parametrize("seed", range(5))
def test_one_row_is_filled_in_as_by_simple_imputer(seed):
    for row in ([[1.0, np.nan]], [[np.nan, 2.0, 3.0]], [[1.0]]):
        filled = MVRBMImputer(random_state=seed).fit_transform(row)
        np.testing.assert_array_equal(filled, SimpleImputer().fit_transform(row))
        kept = MVRBMImputer(random_state=seed, keep_empty_features=True).fit_transform(row)
        np.testing.assert_array_equal(kept, SimpleImputer(keep_empty_features=True).fit_transform(row))


def test_standard_deviations_that_cannot_be_calibrated_are_announced():
    imputer = MVRBMImputer(random_state=0).fit([[1.0, 2.0, 3.0]])
    for method in (imputer.standard_deviation, imputer.draw):
        with pytest.warns(UserWarning, match="standard deviations are not calibrated: no known entries"):
            method([[1.0, np.nan, 3.0]])


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_arrays_are_cut_and_calibrated(n):
    ratios, covered = [], []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(n, 20, 2)) @ rng.normal(size=(2, 30)) + 0.1 * rng.normal(size=(n, 20, 30))
        hidden = rng.random(x.shape) < 0.2
        gaps = np.where(hidden, np.nan, x)
        imputer = MVRBMImputer(random_state=seed).fit(gaps)
        errors = (imputer.transform(gaps) - x)[hidden]
        ratios.append((errors**2).mean() ** 0.5)
        covered.append((np.abs(errors) < 2 * imputer.standard_deviation(gaps)[hidden]).mean())
        assert min(imputer.errors_.values()) > 0
    assert np.mean(ratios) < 0.3  # the deviation of the noise is 0.1, that of the data 1.4
    assert np.mean(covered) > 0.85


def test_few_samples_with_many_columns_are_filled_in():
    x = np.random.default_rng(0).normal(size=(4, 20_000))
    x[0, :10] = np.nan
    filled = MVRBMImputer(random_state=0).fit_transform(x)
    low, high = x[1:, :10].min(0), x[1:, :10].max(0)
    assert ((filled[0, :10] >= low) & (filled[0, :10] <= high)).all()


@pytest.mark.parametrize(
    ("scale", "message"),
    [(1e30, r"X contains values of magnitude .*e\+30.*; rescale X"), (1e-30, "differ by .*; rescale X")],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_scales_are_refused(scale, message, dtype):
    x = (scale * np.random.default_rng(0).normal(size=(20, 3))).astype(dtype)
    with pytest.raises(ValueError, match=message):
        MVRBMImputer().fit(x)
