"""The outlier detector: scikit-learn's checks, scores of data with known outliers, maps, and saved models."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.utils.estimator_checks import parametrize_with_checks

import mvrbm
from mvrbm import TVRBM, Dense, MVRBMOutlierDetector, RandomSource
from mvrbm.errors import StorageError
from mvrbm.estimators.outliers import masked_prediction
from mvrbm.estimators.table_encoding import TableEncoding
from mvrbm.likelihood.masked_prediction import block_masks, masked_errors


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.fixed_seed  # two checks require at least one outlier in the training data
@parametrize_with_checks([MVRBMOutlierDetector(), MVRBMOutlierDetector(n_epochs=1, n_masks=2)])
def test_scikit_learn_check(estimator, check):
    check(estimator)


def bars(n, rng):
    """Pictures of bars, 8 x 8: half of the rows or half of the columns have ink."""
    lines = rng.permuted(np.tile([1.0, 1, 1, 1, 0, 0, 0, 0], (n, 1)), axis=1)
    pictures = np.repeat(lines[:, :, None], 8, 2)
    flipped = rng.random(n) < 0.5
    pictures[flipped] = pictures[flipped].transpose(0, 2, 1)
    return pictures.astype(np.float32)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    normal, broken = bars(600, rng), bars(100, rng)
    broken[:, 2:5, 2:5] = 1 - broken[:, 2:5, 2:5]
    return normal[:500], normal[500:], broken


@pytest.fixture(scope="module")
def detector(data):
    return MVRBMOutlierDetector(device="cpu").fit(data[0])


@pytest.fixture(scope="module")
def with_machine(data):
    return MVRBMOutlierDetector((8, 8), rank=4, n_epochs=20, random_state=0, device="cpu").fit(data[0])


@pytest.mark.parametrize("name", ["detector", pytest.param("with_machine", marks=pytest.mark.slow)])
def test_broken_pictures_score_lower_and_are_outliers(data, name, request):
    _, normal, broken = data
    detector = request.getfixturevalue(name)
    assert (detector.score_samples(normal)[:, None] > detector.score_samples(broken)).mean() > 0.93
    assert (detector.predict(broken) == -1).mean() > 0.9
    np.testing.assert_array_equal(detector.decision_function(broken), detector.score_samples(broken) - detector.offset_)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "low", "high"), [(50, 0.0, 0.2), (400, 0.08, 0.135)])  # nested cross-validation or not
def test_a_share_of_new_normal_samples_are_outliers(n, low, high):
    shares = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        mixing = rng.normal(size=(2, 6))
        x = rng.gamma(2.0, size=(n + 500, 2)) @ mixing + 0.3 * rng.normal(size=(n + 500, 6))
        shares.append((MVRBMOutlierDetector(false_alarms=0.1).fit(x[:n]).predict(x[n:]) == -1).mean())
    assert low < np.mean(shares) < high


def test_outliers_in_the_training_data_are_found(data):
    mixed = np.concatenate([data[1], data[2][:3]])
    detector = MVRBMOutlierDetector()
    assert (detector.fit_predict(mixed)[-3:] == -1).sum() >= 2
    assert detector.fit(mixed).predict(mixed).tolist() == detector.fit_predict(mixed).tolist()


def test_training_samples_have_the_scores_of_cross_validation():
    x = np.random.default_rng(0).normal(size=(40, 60))  # more entries than samples, which the fit knows by heart
    detector = MVRBMOutlierDetector(contamination=0.1).fit(x)
    scores = detector.score_samples(x)
    new = detector.score_samples(x + 1e-6)
    assert (detector.predict(x) == -1).sum() == 4
    assert np.abs(scores - new).max() > 0.3


def test_values_outside_the_range_are_scored(data, detector, with_machine):
    bright = data[1][:5].copy()
    bright[:, 3, 3] = 40.0
    for found in (detector, with_machine):
        assert (found.predict(bright) == -1).all()
        assert (found.score_samples(bright) < found.score_samples(data[1][:5])).all()


def test_infinity_is_named(detector, data):
    with pytest.raises(ValueError, match="X contains infinity"):
        detector.predict(np.where(data[1] > 0, np.inf, data[1]))


def test_maps_show_where_a_picture_is_broken(data, detector):
    maps = detector.explain(data[2])
    assert maps.shape == data[2].shape
    inside = maps[:, 2:5, 2:5].mean((1, 2))
    outside = (maps.sum((1, 2)) - maps[:, 2:5, 2:5].sum((1, 2))) / (64 - 9)
    assert (inside > outside + 0.1).mean() > 0.95
    np.testing.assert_allclose(detector.explain(data[2][:3].reshape(3, -1)), maps[:3].reshape(3, -1), atol=1e-5)


def test_maps_are_smoothed_means_over_shifted_blocks():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 1, 1)) + rng.normal(size=(50, 4, 6))
    x[0, 1, 2] = np.nan
    detector = MVRBMOutlierDetector(block_shape=(2, 4)).fit(x)
    linear = detector._ensemble.linear
    rows, _ = detector._ensemble.read(x.reshape(50, -1))
    numbers = np.arange(24).reshape(4, 6)
    expected = np.zeros((50, 4, 6))
    for row_cuts in ([0, 2, 4], [0, 1, 3, 4]):
        for column_cuts in ([0, 4, 6], [0, 2, 6]):
            cells = [
                numbers[i:j, k:end].ravel()
                for i, j in itertools.pairwise(row_cuts)
                for k, end in itertools.pairwise(column_cuts)
            ]
            expected += linear.excess(rows, cells).reshape(50, 4, 6) / 4
    expected[0, 1, 2] = 0
    padded = np.pad(expected, [(0, 0), (0, 0), (1, 1)], mode="edge")
    expected = np.lib.stride_tricks.sliding_window_view(padded, 3, 2).mean(3)
    np.testing.assert_allclose(detector.explain(x), expected, atol=1e-9)


def errors_and_variances(detector, x, block, parts, rounds):
    """Squared errors, predicted variances and known entries of masked predictions."""
    observed = torch.from_numpy(~np.isnan(x))
    masks = block_masks(x.shape[1:], block, RandomSource(0), parts=parts, rounds=rounds)
    filled = torch.from_numpy(np.nan_to_num(x))
    found = masked_errors(detector.model_.machine_, filled, masks, observed=observed)
    return (*(part.numpy() for part in found), observed.numpy())


def test_the_machine_compares_errors_with_variances_times_the_dispersion():
    rng = np.random.default_rng(0)
    x = rng.beta(2, 2, size=(40, 9, 8)) * rng.random((40, 9, 1))  # gray values vary less than zeros and ones
    x[rng.random(x.shape) < 0.1] = np.nan
    detector = MVRBMOutlierDetector((3, 3), block_shape=(4, 4), n_masks=6, n_epochs=5, random_state=0).fit(x)
    errors, variances, observed = errors_and_variances(detector, x, (4, 4), parts=2, rounds=3)
    counts = observed.sum((1, 2))
    expected = errors.sum((1, 2)) / counts, variances.sum((1, 2)) / counts
    np.testing.assert_allclose(detector._masked.means(x), expected, atol=1e-9)
    assert expected[0].mean() / expected[1].mean() == pytest.approx(detector.dispersion_, rel=0.2)  # by other machines
    assert detector.dispersion_ < 0.8  # far from 1
    parts = detector._ensemble.parts
    assert len(parts.center) == 2 + 1 + 2 + 1  # rows, columns, blocks, two distances and the machine
    new = np.where(np.isnan(x), x, x + 1e-6)
    raw = np.array(detector._masked.means(new))
    others = (raw[0] - detector.dispersion_ * raw[1])[:, None]
    scores = -detector._ensemble.scores(new.reshape(40, -1), others)
    np.testing.assert_allclose(detector.score_samples(new), scores)
    np.testing.assert_array_equal(detector.score_samples(x), -detector._held_out)


def test_the_model_is_one_trained_without_the_detector():
    x = np.random.default_rng(0).normal(size=(30, 4))
    detector = MVRBMOutlierDetector(n_epochs=2, batch_size=10, learning_rate=0.1, random_state=5).fit(x)
    settings = {"visible": "gaussian", "recipe": "generative", "n_epochs": 2, "batch_size": 10, "learning_rate": 0.1}
    alone = TVRBM((4,), coupling=Dense(), random_state=5, **settings).fit(x)
    np.testing.assert_array_equal(detector.model_.components_, alone.components_)


def test_bytes_are_the_same_data(data, detector):
    pictures = (255 * data[2][:5]).astype(np.uint8)
    np.testing.assert_allclose(detector.score_samples(pictures), detector.score_samples(data[2][:5]), atol=1e-6)


@pytest.mark.parametrize("name", ["detector", pytest.param("with_machine", marks=pytest.mark.slow)])
def test_a_saved_detector_gives_the_same_answers(data, name, request, tmp_path):
    detector = request.getfixturevalue(name)
    loaded = mvrbm.load(detector.save(tmp_path / "model"), "cpu")
    assert type(loaded) is MVRBMOutlierDetector
    assert loaded.get_params() == detector.get_params()
    assert loaded.n_parameters_ == detector.n_parameters_
    for samples in (data[0], data[2]):
        np.testing.assert_array_equal(loaded.decision_function(samples), detector.decision_function(samples))
        np.testing.assert_array_equal(loaded.explain(samples), detector.explain(samples))
    again = mvrbm.load(loaded.save(tmp_path / "again"), "cpu")
    np.testing.assert_array_equal(again.score_samples(data[2]), detector.score_samples(data[2]))


def test_a_damaged_detector_is_an_error(detector, tmp_path):
    folder = detector.save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for key, value in (("n_samples", 499), ("shape", [8, 4]), ("byte_scale", 0)):
        damaged = {**config, "estimator": {**config["estimator"], "ensemble": {**config["estimator"]["ensemble"]}}}
        damaged["estimator"]["ensemble"][key] = value
        (folder / "config.json").write_text(json.dumps(damaged))
        with pytest.raises(StorageError):
            mvrbm.load(folder, "cpu")


def test_a_loaded_detector_knows_the_names_of_its_columns(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(np.random.default_rng(0).normal(size=(20, 2)), columns=["height", "width"])
    detector = MVRBMOutlierDetector(n_epochs=1, random_state=0).fit(frame)
    loaded = mvrbm.load(detector.save(tmp_path / "model"), "cpu")
    assert loaded.feature_names_in_.tolist() == ["height", "width"]
    with pytest.raises(ValueError, match="feature names"):
        loaded.predict(frame.rename(columns={"width": "depth"}))


def test_columns_that_agree_reveal_a_row_that_does_not_even_with_missing_entries():
    rng = np.random.default_rng(0)
    table = 100 * (rng.normal(size=(300, 1)) + 0.1 * rng.normal(size=(300, 5)))  # in any unit
    table[rng.random(table.shape) < 0.1] = np.nan
    detector = MVRBMOutlierDetector(n_epochs=30, contamination=0.05, random_state=0).fit(table)
    assert (detector.predict(table) == -1).sum() == 15
    good, bad = np.full((1, 5), 100.0), np.array([[200.0, 200, np.nan, -200, 200]])
    assert detector.predict(np.concatenate([good, bad])).tolist() == [1, -1]
    assert np.nanargmax(detector.explain(bad)[0]) == 3


@pytest.mark.parametrize(("shape", "coupling"), [((9, 6, 5), "kronecker"), ((3, 4, 2), "dense"), ((12,), "dense")])
def test_arrays_of_every_order_are_scored(shape, coupling):
    values = np.random.default_rng(0).random((30, *shape))
    detector = MVRBMOutlierDetector(n_epochs=1, n_masks=2, random_state=0).fit(values)
    assert detector.score_samples(values).shape == (30,)
    assert detector.explain(values).shape == values.shape
    assert detector.model_.coupling.name == coupling


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"contamination": 0.7}, "contamination"),
        ({"contamination": 0}, "contamination"),
        ({"n_masks": 3}, "n_masks must be even"),
        ({"block_shape": (2, 2)}, "block_shape must have 1 axis"),
        ({"block_shape": (10**12,)}, r"block_shape must not exceed the sample shape \(\d+,\), got"),
        ({"visible": "gray"}, "visible must be one of"),
        ({"n_epochs": -1}, "n_epochs"),
        ({"n_epochs": None, "rank": 3}, "rank=3 has no effect without a machine: pass hidden_shape or n_epochs"),
        ({"n_epochs": None, "recipe": "paper"}, "recipe='paper' has no effect"),
        ({"false_alarms": 0.0}, "false_alarms"),
        ({"visible_shape": (2, 3)}, r"visible_shape \(2, 3\) has 6 entries, but samples have 4 features"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        MVRBMOutlierDetector(**{"n_epochs": 1, **settings}).fit(np.random.default_rng(0).random((10, 4)))


def test_no_samples_are_named(detector):
    with pytest.raises(ValueError, match=r"Found array with 0 sample\(s\)"):
        detector.predict(np.zeros((0, 8, 8)))


def test_many_columns_reduce_the_default_work():
    rng = np.random.default_rng(0)
    detector = MVRBMOutlierDetector(random_state=0)
    detector._encoding = TableEncoding()
    model = detector._new_model(rng.normal(size=(5, 100_000)), 5)
    assert (model.hidden_shape, model.n_epochs, model.n_chains) == ((16,), 100, 10)
    model = detector._new_model(rng.normal(size=(500, 1000)), 500)
    assert (model.hidden_shape, model.n_epochs, model.n_chains) == ((256,), 600, None)
    rows = rng.normal(size=(5, 3000))
    scores = MVRBMOutlierDetector(random_state=0, n_epochs=2).fit(rows).score_samples(rows)
    assert np.isfinite(scores).all()


def animals(n, rng):
    """Tables whose columns agree: the animal, its sound and its weight."""
    kind = rng.integers(0, 3, n)
    weight = np.array([4.0, 20.0, 500.0])[kind] * rng.uniform(0.9, 1.1, n)
    names, sounds = np.array(["cat", "dog", "cow"])[kind], np.array(["meow", "woof", "moo"])[kind]
    return pd.DataFrame({"animal": names, "weight": np.log(weight), "sound": sounds})


@pytest.fixture(scope="module")
def of_table():
    table = animals(300, np.random.default_rng(0))
    table.loc[5, "sound"] = None
    return MVRBMOutlierDetector(n_epochs=100, random_state=0, device="cpu").fit(table)


def test_text_columns_of_a_table_are_categories(of_table):
    normal = animals(100, np.random.default_rng(1))
    wrong = normal.assign(sound=normal["sound"].map({"meow": "woof", "woof": "moo", "moo": "meow"}))
    assert of_table.n_features_in_ == 3
    assert of_table.visible_shape_ == (3 + 1 + 3,)
    assert of_table.score_samples(wrong).max() < of_table.score_samples(normal).min()
    maps = of_table.explain(wrong)
    assert maps.shape == (100, 3)
    assert (of_table.explain(normal).mean(0) < maps.mean(0)).all()
    assert maps.mean(0).argmax() == 2


def test_the_columns_of_a_category_are_masked_together(of_table, monkeypatch):
    masks = []
    monkeypatch.setattr(masked_prediction, "masked_errors", lambda *args, **options: masks.append(args[2]) or 1 // 0)
    with pytest.raises(ZeroDivisionError):
        of_table.score_samples(animals(2, np.random.default_rng(0)))
    (found,) = masks
    for first, end in ((0, 3), (4, 7)):
        assert (found[:, first:end] == found[:, first, None]).all()
    assert not (found[:, 0] == found[:, 3]).all()


def test_a_new_category_is_unusual(of_table):
    known = pd.DataFrame({"animal": ["cow"], "weight": [np.log(500.0)], "sound": ["moo"]})
    assert of_table.predict(known) == 1
    assert of_table.predict(known.assign(sound="quack")) == -1


def test_a_detector_of_a_table_is_saved(of_table, tmp_path):
    table = animals(20, np.random.default_rng(2))
    again = mvrbm.load(of_table.save(tmp_path / "model"), "cpu")
    np.testing.assert_array_equal(again.score_samples(table), of_table.score_samples(table))
    assert again.n_features_in_ == 3
    assert again.feature_names_in_.tolist() == ["animal", "weight", "sound"]
    with pytest.raises(ValueError, match="feature names should match"):
        again.score_samples(table[["weight", "animal", "sound"]])


def test_empty_and_copied_columns_of_a_table_are_not_scored(of_table):
    table = animals(60, np.random.default_rng(0))
    table.insert(1, "empty", pd.Series([None] * 60, dtype=object))
    table["name"] = [f"name {number}" for number in range(60)]
    detector = MVRBMOutlierDetector(n_epochs=5, random_state=0, device="cpu")
    with pytest.warns(UserWarning, match=r"columns \['name'\] are excluded from the model"):
        detector.fit(table)
    maps = detector.explain(table)
    assert maps.shape == (60, 5)
    assert (maps[:, [1, 4]] == 0).all()
    assert (maps[:, [0, 2, 3]] != 0).all()
    with (
        pytest.raises(ValueError, match="X has no columns that the model can use"),
        pytest.warns(UserWarning, match="excluded"),
    ):
        detector.fit(table[["name"]])


def test_tables_with_text_have_no_other_shape():
    with pytest.raises(ValueError, match="visible_shape must be None for tables with text columns"):
        MVRBMOutlierDetector(visible_shape=(1, 3)).fit(animals(5, np.random.default_rng(0)))


@pytest.mark.parametrize("n_epochs", [None, 1])
def test_bytes_and_floats_of_the_same_values_have_the_same_scores(n_epochs, tmp_path):
    """What is divided by 255 must not depend on the type alone."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (60, 4, 5), dtype=np.uint8)
    bits = (pixels > 100).astype(np.uint8)
    for train, others in (
        (pixels, [pixels.astype(float)]),
        (pixels.astype(float), [pixels]),
        (pixels / 255, [pixels]),
        (bits, [bits.astype(bool), bits.astype(float), 255 * bits]),
        (bits.astype(bool), [bits, 255 * bits]),
    ):
        fitted = MVRBMOutlierDetector(n_epochs=n_epochs, random_state=0, device="cpu").fit(train[:50])
        loaded = mvrbm.load(fitted.save(tmp_path / "model", overwrite=True), "cpu")
        for other in others:
            np.testing.assert_allclose(loaded.score_samples(other), fitted.score_samples(train), rtol=1e-4)
            np.testing.assert_allclose(loaded.explain(other), fitted.explain(train), rtol=1e-4, atol=1e-6)
