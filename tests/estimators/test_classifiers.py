"""Classifiers: against enumeration, finite differences, networks by hand, and scikit-learn's own checks."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

import mvrbm
from mvrbm import MVRBM, ClassificationMVRBM, DeepMVRBM, DeepMVRBMClassifier, Dense, MVRBMClassifier, RandomSource
from mvrbm.errors import StorageError
from mvrbm.estimators import Layer
from mvrbm.estimators.adversarial_loss import virtual_adversarial_loss
from mvrbm.training import DivergenceError, backprop

FAST = {"n_epochs": 8, "batch_size": 20, "learning_rate": 0.02, "random_state": 0}
WITHOUT_NOISE = {"dropout": 0.0, "perturbation": 0.0}  # of which a sample twice would get two draws
EVERY_KIND = {
    "one layer": lambda: MVRBMClassifier((6, 6), rank=2, dropout=0.1, **FAST),
    "another coupling": lambda: MVRBMClassifier((12,), coupling=Dense(), hidden="bernoulli", **FAST),
    "pre-trained stack": lambda: DeepMVRBMClassifier(
        ((7, 7), Layer(20, Dense())), rank=2, pretraining=2, dropout=(0.1, 0.0), **FAST
    ),
    "averaged, stopped early": lambda: DeepMVRBMClassifier(
        ((6, 6),), hidden="bernoulli", early_stopping=True, averaging=0.9, **FAST
    ),
    "discriminative": lambda: ClassificationMVRBM((6, 6), rank=2, **FAST),
    "generative": lambda: ClassificationMVRBM((6, 6), rank=2, mode="generative", **{**FAST, "learning_rate": None}),
    "hybrid": lambda: ClassificationMVRBM((12,), coupling=Dense(), mode="hybrid", blend=0.1, **FAST),
}


@pytest.mark.parametrize("visible", ["bernoulli", "gaussian"])
def test_before_fine_tuning_features_are_those_of_the_stack(digits, labels, visible):
    X = 3 + 20 * digits if visible == "gaussian" else digits
    settings = {"rank": 2, "hidden": "bernoulli", "visible": visible, "random_state": 4}
    model = DeepMVRBMClassifier(((6, 6), (5, 5)), pretraining=2, n_epochs=0, **settings).fit(X, labels)
    stack = DeepMVRBM(((6, 6), (5, 5)), n_epochs=2, **settings).fit(X)
    np.testing.assert_array_equal(model.stack_.transform(X), stack.transform(X))
    np.testing.assert_allclose(model.hidden_maps(X), stack.hidden_maps(X), atol=1e-5)
    np.testing.assert_allclose(model.predict_proba(X), 0.1)


def test_unlabeled_data_and_a_fitted_stack_are_where_it_starts(digits, labels):
    settings = {"rank": 2, "hidden": "bernoulli", "random_state": 4}
    make = lambda: MVRBMClassifier((6, 6), pretraining=2, n_epochs=3, perturbation=0, **settings)  # noqa: E731
    by_data = make().fit(digits[:90], labels[:90], unlabeled=digits)
    stack = DeepMVRBM(((6, 6),), n_epochs=2, **settings).fit(digits)
    before = stack.transform(digits)
    by_stack = make().fit(digits[:90], labels[:90], stack=stack)
    np.testing.assert_array_equal(by_data.predict_proba(digits), by_stack.predict_proba(digits))
    np.testing.assert_array_equal(stack.transform(digits), before)
    without = make().fit(digits[:90], labels[:90])
    assert not np.array_equal(by_data.predict_proba(digits), without.predict_proba(digits))
    with pytest.raises(ValueError, match="stack must have the same layers"):
        MVRBMClassifier((6, 5), **settings).fit(digits, labels, stack=stack)
    with pytest.raises(ValueError, match="samples in unlabeled must have the same shape"):
        make().fit(digits[:90], labels[:90], unlabeled=digits[:, :7])
    with pytest.raises(ValueError, match="unlabeled has no effect"):
        MVRBMClassifier((6, 6), perturbation=0).fit(digits, labels, unlabeled=digits)


def test_a_loss_that_is_not_finite_ends_training(digits, labels):
    with pytest.raises(DivergenceError, match="use a learning_rate below"):
        MVRBMClassifier((6, 6), learning_rate=1e30, n_epochs=5, random_state=0).fit(digits, labels)


# -- predictions that change slowly -----------------------------------------------------------------------


def test_perturbation_makes_predictions_change_slowly_at_the_unlabeled_samples(digits, labels):
    settings = {"hidden_shape": (8, 8), "rank": 4, "dropout": 0, **FAST, "n_epochs": 30, "learning_rate": 0.01}

    def change(model):
        return float(
            virtual_adversarial_loss(model.network_, torch.from_numpy(digits[300:]), 0.5, RandomSource(0))
            .detach()
            .mean()
        )

    plain = MVRBMClassifier(perturbation=0, **settings).fit(digits[:100], labels[:100])
    smooth = MVRBMClassifier(perturbation=0.5, **settings).fit(digits[:100], labels[:100])
    smoother = MVRBMClassifier(perturbation=0.5, unlabeled_batch_size=100, **settings)
    smoother.fit(digits[:100], labels[:100], unlabeled=digits)
    assert change(smooth) < 0.9 * change(plain)
    assert change(smoother) < 0.6 * change(smooth)
    assert smoother.score(digits[300:], labels[300:]) > 0.6


@pytest.mark.parametrize(
    ("shape", "rank", "hidden"),
    [
        ((28, 28), 16, (28, 28)),
        ((8, 8), 16, (16, 16)),
        ((3, 2), 2, (16, 16)),
        ((30,), 1, (256,)),
        ((4, 9, 2), 16, (7, 9, 7)),
    ],
)
def test_rank_and_size_follow_from_the_shape_of_a_sample(shape, rank, hidden):
    model = MVRBMClassifier(n_epochs=0).fit(np.zeros((4, *shape)), [0, 1, 0, 1])
    (machine,) = model.network_.stack
    assert machine.hidden.shape == hidden
    assert machine.links["visible"].rank == rank


def test_small_data_makes_small_batches_and_at_least_a_thousand_updates(digits, labels):
    for n, epochs, size in [(200, 80, 16), (2000, 30, 50), (60_000, 30, 100)]:
        plan = MVRBMClassifier()._plan(n, 0.003)
        assert (plan.n_epochs, plan.batch_size) == (epochs, size)
        assert plan.n_epochs * n / plan.batch_size >= 999
    assert MVRBMClassifier(n_epochs=3, batch_size=7)._plan(200, 0.003)[:2] == (3, 7)


def test_the_automatic_perturbation_is_a_share_of_the_distance_between_classes(digits, labels):
    rows = digits.reshape(len(digits), -1)
    each = [min(np.linalg.norm(rows[labels != label] - row, axis=1)) for row, label in zip(rows, labels, strict=True)]
    settings = {"hidden_shape": (4, 4), "n_epochs": 1, "random_state": 0}
    automatic = MVRBMClassifier(**settings).fit(digits, labels)
    given = MVRBMClassifier(perturbation=float(0.17 * np.median(each)), **settings).fit(digits, labels)
    np.testing.assert_allclose(automatic.predict_proba(digits), given.predict_proba(digits), atol=1e-3)
    # A copy of a sample in every class leaves no room.
    same = MVRBMClassifier(n_epochs=1).fit(np.ones((6, 2, 2)), [0, 1, 2] * 2)
    np.testing.assert_allclose(same.predict_proba(np.ones((1, 2, 2))).sum(), 1)


def test_scales_of_gaussian_entries_do_not_matter():
    X, scales = np.random.default_rng(0).random((200, 4, 4)), np.linspace(1, 5, 4)
    y = X[:, 0, 0] > X[:, 2, 3]
    settings = {"hidden_shape": (4, 4), "visible": "gaussian", "n_epochs": 5, "random_state": 0}
    one, other = (MVRBMClassifier(**settings).fit(data, y) for data in (X, 7 + X * scales))
    np.testing.assert_allclose(one.predict_proba(X), other.predict_proba(7 + X * scales), atol=1e-8)


@pytest.mark.parametrize(("name", "value"), [("perturbation", -1.0), ("certainty", -1.0), ("unlabeled_batch_size", 0)])
def test_senseless_perturbations_are_refused(name, value, digits, labels):
    with pytest.raises(ValueError, match=name):
        MVRBMClassifier((4, 4), **{name: value}).fit(digits, labels)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replayed_updates_are_the_updates(digits, labels, monkeypatch):
    make = lambda: DeepMVRBMClassifier(  # noqa: E731
        ((8, 8), (6, 6)), rank=2, n_epochs=5, batch_size=64, dropout=0.2, perturbation=0.5, averaging=0.9,
        random_state=0, device="cuda",
    )  # fmt: skip
    replayed = make().fit(digits, labels)
    monkeypatch.setattr(backprop, "_EAGER_UPDATES", math.inf)
    launched = make().fit(digits, labels)
    np.testing.assert_allclose(replayed.predict_proba(digits), launched.predict_proba(digits), atol=1e-3)
    assert replayed.history_[-1]["loss"] == pytest.approx(launched.history_[-1]["loss"], rel=1e-3)


# -- weights, labels, files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: MVRBMClassifier((4, 4), rank=2, **WITHOUT_NOISE, batch_size=1000, n_epochs=10, random_state=0),
        lambda: ClassificationMVRBM((4, 4), rank=2, batch_size=1000, n_epochs=10, random_state=0),
    ],
)
def test_weight_two_is_a_sample_twice_and_weight_zero_none(make, digits, labels):
    X, y = digits[:60].astype(float), labels[:60]
    weights = np.array([2, 1, 0] * 20)
    rows = np.repeat(np.arange(60), weights)
    by_weight, by_rows = make().fit(X, y, sample_weight=weights), make().fit(X[rows], y[rows])
    np.testing.assert_allclose(by_weight.predict_proba(X), by_rows.predict_proba(X), rtol=1e-6)
    assert not np.allclose(by_weight.predict_proba(X), make().fit(X, y).predict_proba(X), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_saved_and_loaded_it_predicts_the_same(kind, digits, labels, tmp_path):
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])[labels]
    model = EVERY_KIND[kind]().fit(digits, names)
    assert model.score(digits, names) > 0.5
    again = mvrbm.load(model.save(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict_proba(digits), model.predict_proba(digits))
    np.testing.assert_array_equal(again.predict(digits[:9]), model.predict(digits[:9]))
    assert again.classes_.tolist() == sorted(set(names.tolist()))
    apart = ("coupling", "layers", "device")
    mine = {k: v for k, v in model.get_params().items() if k not in apart}
    assert {k: again.get_params()[k] for k in mine} == mine
    np.testing.assert_allclose(model.predict_proba(digits).sum(1), 1, rtol=1e-5)
    clone(again).set_params(n_epochs=1).fit(digits[:50], labels[:50])


@pytest.mark.parametrize("classes", [[3, 7], [1.0, 2.0], [True, False], np.array(["x", "yy"], dtype=object)])
def test_labels_of_every_kind_come_back(classes, digits, tmp_path):
    y = np.asarray(classes)[np.arange(30) % 2]
    model = MVRBMClassifier((3, 3), n_epochs=1, random_state=0).fit(digits[:30], y)
    again = mvrbm.load(model.save(tmp_path / "model"))
    assert again.predict(digits[:5]).dtype == model.predict(digits[:5]).dtype == y.dtype
    assert again.classes_.tolist() == sorted(classes)


def test_damaged_files_are_refused(digits, labels, tmp_path):
    folder = tmp_path / "model"
    model = MVRBMClassifier((3, 3), n_epochs=1, random_state=0).fit(digits, labels)
    model.save(folder)
    config = (folder / "config.json").read_text()
    for old, new in [('"values": [', '"values": [11, '), ('"classes"', '"class"'), ('"dtype": "<i8"', '"dtype": "M8"'),
                     ('"visible": "bernoulli"', '"visible": "gaussian"')]:  # fmt: skip
        assert old in config
        (folder / "config.json").write_text(config.replace(old, new))
        with pytest.raises(StorageError):
            mvrbm.load(folder)


# -- inputs -----------------------------------------------------------------------------------------------


def test_early_stopping_holds_out_a_share_of_every_class(digits, labels):
    model = MVRBMClassifier((6, 6), early_stopping=True, validation_fraction=0.2, n_epochs=3, random_state=0)
    data = model._read_labeled(digits, labels, None, torch.device("cpu"))
    learns, held = model._split(data, RandomSource(0))
    assert len(learns.codes) + len(held.codes) == 600
    whole, part = np.bincount(labels), np.bincount(held.codes, minlength=10)
    assert np.abs(part - 0.2 * whole).max() <= 1
    model.fit(digits, labels)
    assert set(model.history_[0]) == {"epoch", "loss", "validation_error", "validation_loss"}
    best = min((row["validation_error"], row["validation_loss"]) for row in model.history_)
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    _, held = model._split(data, RandomSource(seed).split(4)[1])
    assert model._error_and_loss(held) == pytest.approx(best, rel=1e-6)


def test_bytes_rows_frames_and_arrays_are_the_same_data(digits, labels):
    gray = np.round(digits * 255).astype(np.uint8)
    make = lambda: MVRBMClassifier((5, 5), visible_shape=(8, 8), n_epochs=2, random_state=0)  # noqa: E731
    by_bytes, by_floats = make().fit(gray, labels), make().fit((gray / 255).astype(np.float32), labels)
    np.testing.assert_allclose(by_bytes.predict_proba(gray), by_floats.predict_proba(gray / 255), atol=1e-4)
    rows = digits.reshape(600, -1)
    by_rows, by_arrays = make().fit(rows, labels), make().fit(digits, labels)
    np.testing.assert_array_equal(by_rows.predict_proba(digits), by_arrays.predict_proba(rows))
    frame = pd.DataFrame(rows, columns=[f"p{k}" for k in range(64)])
    assert make().fit(frame, labels).feature_names_in_[3] == "p3"
    assert cross_val_score(make().set_params(**FAST), rows, labels, cv=2).mean() > 0.5


MISTAKES = [
    ({"n_epochs": -1}, "n_epochs must be a whole number of at least 0, got -1"),
    ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
    ({"learning_rate": 0.0}, "learning_rate must be positive"),
    ({"schedule": "linear"}, "schedule must be one of .*got 'linear'"),
    ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ({"dropout": (0.1, 0.2)}, r"dropout must be a single number or a sequence with one number per layer \(length 1\)"),
    ({"input_dropout": -0.1}, "input_dropout must be at least 0"),
    ({"averaging": 1.0}, "averaging must be at least 0 and below 1"),
    ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
    ({"pretraining": -1}, "pretraining must be a whole number of at least 0"),
    ({"early_stopping": True, "validation_fraction": 1.5}, "validation_fraction must be positive and below 1"),
    ({"early_stopping": True, "patience": 0}, "patience must be a whole number of at least 1"),
    ({"hidden": "logistic"}, "hidden units of layer 0 must be one of"),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES)
def test_mistakes_are_named(settings, message, digits, labels):
    with pytest.raises(ValueError, match=message):
        MVRBMClassifier((3, 3), **{"n_epochs": 1, **settings}).fit(digits[:40], labels[:40])


def test_data_and_labels_are_checked(digits, labels):
    with pytest.raises(ValueError, match="at least two classes, got only"):
        MVRBMClassifier((3, 3)).fit(digits, np.ones(600))
    model = MVRBMClassifier((3, 3), n_epochs=1).fit(digits, labels)
    with pytest.raises(ValueError, match=r"samples must have shape \(8, 8\), got \(7, 8\)"):
        model.predict(digits[:, :7])
    assert isinstance(MVRBM((3, 3), n_epochs=1).fit(digits).transform(digits), np.ndarray)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.fixed_seed  # scikit-learn chose its data by seeds
@parametrize_with_checks(
    [
        MVRBMClassifier(16, visible="gaussian", **WITHOUT_NOISE, batch_size=1000, n_epochs=40, learning_rate=0.03),
        DeepMVRBMClassifier(
            (16, 16), visible="gaussian", **WITHOUT_NOISE, batch_size=1000, n_epochs=40, learning_rate=0.03
        ),
        ClassificationMVRBM(16, visible="gaussian", batch_size=1000, n_epochs=40, learning_rate=0.03),
    ]
)
def test_scikit_learn_check(estimator, check):
    check(estimator)
