"""The scikit-learn face: what it returns, what it refuses, and that it fits in with scikit-learn's tools."""

import os
import signal

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import BernoulliRBM
from sklearn.pipeline import make_pipeline

from mvrbm import MMVRBM, MVRBM, RBM, TVRBM
from mvrbm.learning import PCD, Callback, Monitor, Recipe
from mvrbm.likelihood import pseudo_log_likelihood
from mvrbm.saving import StorageError


@pytest.fixture(scope="module")
def digits():
    return (load_digits().images / 16).astype(np.float32)  # (1797, 8, 8)


@pytest.fixture(scope="module")
def labels():
    return load_digits().target


@pytest.fixture(scope="module")
def model(digits):
    return MVRBM((6, 5), n_epochs=30, random_state=0).fit(digits)


def test_features_are_the_hidden_probabilities(model, digits):
    U, V = (factor.detach().numpy()[0] for factor in model.machine_.links["visible"].factors)
    C = model.machine_.hidden.bias.detach().numpy()
    by_hand = 1 / (1 + np.exp(-(U @ digits[:7] @ V.T + C)))
    np.testing.assert_allclose(model.hidden_maps(digits[:7]), by_hand, rtol=1e-4)
    np.testing.assert_allclose(model.transform(digits[:7]), by_hand.reshape(7, -1), rtol=1e-4)


def test_filters_are_outer_products(model):
    U, V = (factor.detach().numpy()[0] for factor in model.machine_.links["visible"].factors)
    filters = model.components()
    assert filters.shape == (30, 8, 8)
    np.testing.assert_allclose(filters[3 * 5 + 2], np.outer(U[3], V[2]), rtol=1e-5)
    np.testing.assert_array_equal(model.components([17, 2]), filters[[17, 2]])
    with pytest.raises(ValueError, match=r"0\.\.29"):
        model.components([30])


def test_reconstruction_is_better_than_the_mean(model, digits):
    error = ((model.reconstruct(digits) - digits) ** 2).sum()
    assert error < 0.8 * ((digits.mean(0) - digits) ** 2).sum()


def test_reconstruction_is_the_inverse_of_the_features(model, digits):
    np.testing.assert_allclose(
        model.inverse_transform(model.transform(digits[:9])), model.reconstruct(digits[:9]), rtol=1e-5, atol=1e-6
    )


def test_rows_and_arrays_are_the_same_data(model, digits):
    rows = digits.reshape(len(digits), -1)
    flat = MVRBM((6, 5), visible_shape=(8, 8), n_epochs=30, random_state=0).fit(rows)
    np.testing.assert_array_equal(flat.transform(rows), model.transform(digits))
    assert flat.reconstruct(rows[:3]).shape == (3, 64)
    assert flat.sample(3, steps=2).shape == (3, 64)
    assert model.sample(3, steps=2).shape == (3, 8, 8)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_data_may_be_backwards_or_read_only_and_stays_as_it_is(model, digits, dtype):
    data = digits[:50].astype(dtype)
    features, before = model.transform(data), data.copy()
    np.testing.assert_allclose(model.transform(data[::-1]), features[::-1], atol=1e-6)
    model.reconstruct(data)
    model.score_samples(data)
    np.testing.assert_array_equal(data, before)
    packed = np.zeros(len(data), dtype=[("tag", "i1"), ("digit", dtype, data.shape[1:])])
    packed["digit"] = data
    np.testing.assert_array_equal(model.transform(packed["digit"]), features)
    data.flags.writeable = False
    np.testing.assert_array_equal(model.transform(data), features)


def test_bytes_are_scaled(digits):
    as_bytes = np.round(digits * 255).astype(np.uint8)
    from_bytes = MVRBM((4, 4), n_epochs=2, random_state=0).fit(as_bytes)
    from_floats = MVRBM((4, 4), n_epochs=2, random_state=0).fit(as_bytes / np.float32(255))
    np.testing.assert_allclose(
        from_bytes.transform(as_bytes), from_floats.transform(as_bytes / np.float32(255)), atol=1e-4
    )


def test_partial_fit_goes_on(digits):
    whole = MVRBM((4, 4), n_epochs=3, random_state=1).fit(digits)
    piecewise = MVRBM((4, 4), random_state=1)
    for _ in range(3):
        assert piecewise.partial_fit(digits) is piecewise
    np.testing.assert_array_equal(piecewise.transform(digits), whole.transform(digits))


def test_partial_fit_after_loading_keeps_what_was_learned(model, digits, tmp_path):
    model.save_pretrained(tmp_path / "model")
    loaded = MVRBM.from_pretrained(tmp_path / "model").partial_fit(digits)
    before, after = model.transform(digits), loaded.transform(digits)
    assert 0 < np.abs(after - before).mean() < 0.1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtype_is_kept(digits, dtype):
    fitted = TVRBM((4, 4), n_epochs=1).fit(digits.astype(dtype))
    assert fitted.transform(digits.astype(dtype)).dtype == dtype


def test_scores_are_deterministic_and_rise_with_learning(digits):
    start = MVRBM((6, 5), n_epochs=0, random_state=0).fit(digits)
    end = MVRBM((6, 5), n_epochs=20, random_state=0).fit(digits)
    np.testing.assert_array_equal(end.score_samples(digits[:50]), end.score_samples(digits[:50]))
    assert end.score(digits[:200]) > start.score(digits[:200]) + 1
    direct = pseudo_log_likelihood(end.machine_, torch.from_numpy(digits[:50])).values
    np.testing.assert_allclose(end.score_samples(digits[:50]), direct.numpy(), rtol=1e-5)


def test_inpainting_keeps_the_known_and_beats_the_mean(digits):
    fitted = MVRBM((8, 8), rank=4, n_epochs=100, random_state=0).fit(digits[:1500])
    mask = np.ones((8, 8), bool)
    mask[:, 4:] = False
    hidden = np.where(mask, digits[1500:], 0).astype(np.float32)
    filled = fitted.inpaint(hidden, mask)
    np.testing.assert_array_equal(filled[:, mask], digits[1500:][:, mask])
    truth, mean = digits[1500:][:, ~mask], digits[:1500].mean(0)[~mask]
    assert ((filled[:, ~mask] - truth) ** 2).sum() < 0.85 * ((mean - truth) ** 2).sum()


def test_samples_follow_the_seed_and_the_mask(model, digits):
    assert np.array_equal(model.sample(4, steps=5), model.sample(4, steps=5))
    mask = np.zeros((8, 8), bool)
    mask[:3] = True
    drawn = model.sample(5, steps=3, init=digits[:5], mask=mask)
    np.testing.assert_array_equal(drawn[:, :3], digits[:5, :3])
    assert set(np.unique(drawn[:, 3:])) <= {0.0, 1.0}
    with pytest.raises(ValueError, match="needs init"):
        model.sample(5, mask=mask)


def test_missing_entries_are_drawn(digits):
    mask = np.random.default_rng(0).random(digits.shape) < 0.7
    broken = np.where(mask, digits, 0.0).astype(np.float32)
    fitted = MVRBM((6, 6), n_epochs=15, random_state=0).fit(broken, mask=mask)
    zeros = MVRBM((6, 6), n_epochs=15, random_state=0).fit(broken)
    truth = digits.mean(0)

    def bias_of(estimator):
        return np.abs(estimator.reconstruct(digits).mean(0) - truth).mean()

    assert bias_of(fitted) < 0.5 * bias_of(zeros)


def test_what_is_unknown_may_be_anything(digits, halves):
    mask = np.random.default_rng(1).random((8, 8)) < 0.6
    broken = np.where(mask, digits[:300], np.nan).astype(np.float32)
    zeros = np.where(mask, digits[:300], 0).astype(np.float32)
    for wrong in (broken, np.where(mask, zeros, -7).astype(np.float32)):
        one = MVRBM((4, 4), n_epochs=2, random_state=0).fit(wrong, mask=mask)
        other = MVRBM((4, 4), n_epochs=2, random_state=0).fit(zeros, mask=mask)
        np.testing.assert_array_equal(one.components(), other.components())
        np.testing.assert_array_equal(one.inpaint(wrong, mask), other.inpaint(zeros, mask))
    with pytest.raises(ValueError, match="NaN"):
        MVRBM((4, 4), n_epochs=1).fit(broken)
    gone = {"left": halves["left"], "right": np.full_like(halves["right"], np.nan)}
    kinds = {"left": "bernoulli", "right": "gaussian"}
    fitted = MMVRBM((4, 4), visible=kinds, n_epochs=1, random_state=0).fit(halves)
    assert np.isfinite(fitted.inpaint(gone, {"right": np.zeros((8, 4), bool)})["right"]).all()


def test_callbacks_and_recipes(digits):
    monitor = Monitor(digits[:100], digits[100:200])
    recipe = Recipe(negative=PCD(20), batch_size=50)
    fitted = MVRBM((4, 4), recipe=recipe, n_epochs=3, random_state=0).fit(digits[:500], callbacks=[monitor])
    assert [row["epoch"] for row in fitted.history_] == [1, 2, 3]
    assert fitted.history_[0]["update"] == 10


def test_the_reference_backend_learns_the_same(digits):
    fast = MVRBM((4, 4), n_epochs=2, random_state=0).fit(digits.astype(np.float64))
    slow = MVRBM((4, 4), n_epochs=2, random_state=0, backend="reference").fit(digits.astype(np.float64))
    np.testing.assert_allclose(fast.components(), slow.components(), rtol=1e-8, atol=1e-10)


# -- with scikit-learn ------------------------------------------------------------------------------


def test_in_a_pipeline_and_a_grid_search(digits, labels):
    rows = digits.reshape(len(digits), -1)[:600]
    pipeline = make_pipeline(
        MVRBM((8, 8), visible_shape=(8, 8), n_epochs=20, random_state=0), LogisticRegression(max_iter=2000)
    )
    search = GridSearchCV(pipeline, {"mvrbm__rank": [1, 4]}, cv=2).fit(rows, labels[:600])
    assert search.best_params_ == {"mvrbm__rank": 4}
    assert search.best_score_ > 0.6


def test_clone_and_names(digits):
    estimator = clone(MVRBM((3, 2), visible_shape=(8, 8), n_epochs=1, recipe=Recipe(momentum=0.9)))
    frame = pd.DataFrame(digits.reshape(len(digits), -1), columns=[f"pixel{i}" for i in range(64)])
    out = estimator.set_output(transform="pandas").fit_transform(frame)
    assert list(out.columns) == [f"mvrbm{i}" for i in range(6)]
    assert list(estimator.feature_names_in_) == list(frame.columns)


def test_takes_over_a_bernoulli_rbm(digits):
    rows = digits.reshape(len(digits), -1).astype(np.float64)
    theirs = BernoulliRBM(12, n_iter=3, random_state=0).fit(rows)
    ours = RBM.from_sklearn(theirs)
    np.testing.assert_allclose(ours.transform(rows), theirs.transform(rows), rtol=1e-10)
    free = ours.machine_.free_energy(torch.from_numpy(rows)).detach().numpy()
    np.testing.assert_allclose(free, theirs._free_energy(rows), rtol=1e-10)


# -- several modalities -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halves(digits):
    return {"left": digits[:, :, :4], "right": digits[:, :, 4:] * 10 - 3}


def test_a_whole_modality_is_found_from_the_other(halves):
    kinds = {"left": "bernoulli", "right": "gaussian"}
    fitted = MMVRBM((8, 8), rank=4, visible=kinds, n_epochs=40, random_state=0).fit(halves)
    right = np.ones_like(halves["right"], dtype=bool)
    nothing = {"left": halves["left"], "right": np.zeros_like(halves["right"])}
    found = fitted.inpaint(nothing, {"right": ~right})
    truth = halves["right"]
    # Linear regression from the left half gets to 0.68.
    assert ((found["right"] - truth) ** 2).sum() < 0.9 * ((truth.mean(0) - truth) ** 2).sum()
    assert fitted.transform(halves).shape == (len(truth), 64)
    assert set(fitted.components()) == set(halves)
    assert fitted.sample(2, steps=2)["right"].shape == (2, 8, 4)


def test_a_tuple_is_a_dict_of_numbers(halves):
    pair = (halves["left"], np.clip(halves["left"], 0, 1))
    fitted = MMVRBM((4, 4), n_epochs=1, random_state=0).fit(pair)
    assert fitted.modalities_ == ["0", "1"]
    np.testing.assert_array_equal(fitted.transform(pair), fitted.transform({"0": pair[0], "1": pair[1]}))


# -- files ------------------------------------------------------------------------------------------

FITTED = {
    "RBM": lambda X: RBM(5, n_epochs=1, random_state=0).fit(X),
    "MVRBM": lambda X: MVRBM((3, 4), rank=2, n_epochs=1, random_state=0).fit(X),
    "TVRBM": lambda X: TVRBM((2, 2, 2), visible_shape=(4, 4, 4), n_epochs=1, random_state=0).fit(X.reshape(-1, 64)),
    "gaussian": lambda X: MVRBM(visible="gaussian", n_epochs=1, random_state=0).fit(X),
}


@pytest.mark.parametrize("name", FITTED)
def test_saved_and_loaded(name, digits, tmp_path):
    fitted = FITTED[name](digits)
    X = digits.reshape(-1, 64) if name == "TVRBM" else digits
    fitted.save_pretrained(tmp_path / "model")
    loaded = type(fitted).from_pretrained(tmp_path / "model")
    np.testing.assert_array_equal(loaded.transform(X), fitted.transform(X))
    assert loaded.reconstruct(X[:2]).shape == fitted.reconstruct(X[:2]).shape
    assert {k: v for k, v in loaded.get_params().items() if k in ("rank", "visible", "hidden_shape")} == {
        k: v if k != "hidden_shape" or not isinstance(v, int) else (v,)
        for k, v in fitted.get_params().items()
        if k in ("rank", "visible", "hidden_shape")
    }


def test_a_saved_multimodal_model(halves, tmp_path):
    fitted = MMVRBM((3, 3), visible={"left": "bernoulli", "right": "gaussian"}, n_epochs=1).fit(halves)
    fitted.save_pretrained(tmp_path / "model")
    np.testing.assert_array_equal(
        MMVRBM.from_pretrained(tmp_path / "model").transform(halves), fitted.transform(halves)
    )


def test_another_class_is_refused(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(StorageError, match="does not hold a TVRBM but a MVRBM"):
        TVRBM.from_pretrained(tmp_path / "model")


def test_an_interrupted_fit_ends_what_called_it(digits):
    class Interrupt(Callback):
        def on_batch_end(self, trainer, batch):
            if trainer.update == 3:
                os.kill(os.getpid(), signal.SIGINT)

    estimator = MVRBM((3, 3), n_epochs=100, random_state=0)
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(digits, callbacks=[Interrupt()])
    assert estimator._trainer.update == 3
    before = estimator.transform(digits[:5])
    after = estimator.partial_fit(digits[:150]).transform(digits[:5])
    assert estimator._trainer.update == 5  # both batches of the new data
    assert not np.array_equal(before, after)


def test_equal_models_score_equally(digits):
    fitted = MVRBM((6, 5), rank=3, n_epochs=5, random_state=0).fit(digits)
    dense = RBM(30, n_epochs=0).fit(digits.reshape(len(digits), -1))
    with torch.no_grad():
        dense.machine_.links["visible"].weight.copy_(fitted.machine_.links["visible"].dense().reshape(30, 64))
        dense.machine_.layers["visible"].bias.copy_(fitted.machine_.layers["visible"].bias.reshape(64))
        dense.machine_.hidden.bias.copy_(fitted.machine_.hidden.bias.reshape(30))
    assert dense.score(digits[:100].reshape(100, -1)) == pytest.approx(fitted.score(digits[:100]), rel=1e-5)


def test_bytes_that_are_bits_are_pointed_out(digits):
    with pytest.warns(UserWarning, match="divided by 255"):
        MVRBM((3, 3), n_epochs=1).fit((digits > 0.5).astype(np.uint8))


# -- refusals ---------------------------------------------------------------------------------------

IMAGES = np.full((10, 6, 4), 0.5)

REFUSED = [
    ("beyond [0, 1]", lambda: MVRBM().fit(IMAGES * 3), "from 0 to 1, got 1.5 to 1.5.*visible='gaussian'"),
    ("unknown unit", lambda: MVRBM(visible="poisson").fit(IMAGES), "visible must be one of"),
    ("unknown recipe", lambda: MVRBM(recipe="fast").fit(IMAGES), "unknown recipe 'fast'"),
    ("unknown backend", lambda: MVRBM(backend="gpu").fit(IMAGES), "backend must be"),
    ("order 3 for matrices", lambda: MVRBM().fit(np.zeros((5, 2, 2, 2))), "use TVRBM"),
    ("shape that does not fit", lambda: MVRBM(visible_shape=(5, 5)).fit(np.zeros((9, 24))), "25 entries.*24 features"),
    (
        "shape that contradicts",
        lambda: MVRBM(visible_shape=(4, 6)).fit(IMAGES),
        r"\(4, 6\), but samples",
    ),
    (
        "vectors for a matrix",
        lambda: MVRBM((3, 3)).fit(np.zeros((9, 24))),
        "say what array a row is",
    ),
    ("rank 0", lambda: MVRBM(rank=0).fit(IMAGES), "rank must be a whole number"),
    ("batch size 0", lambda: MVRBM(batch_size=0).fit(IMAGES), "batch_size must be a whole number of at least 1"),
    (
        "other shape later",
        lambda: MVRBM(n_epochs=1).fit(IMAGES).transform(np.zeros((3, 4, 6))),
        r"must have shape \(6, 4\)",
    ),
    ("mask of numbers", lambda: MVRBM(n_epochs=1).fit(IMAGES).inpaint(IMAGES, np.ones((6, 4))), "mask must be boolean"),
    ("mask of another size", lambda: MVRBM(n_epochs=1).fit(IMAGES).inpaint(IMAGES, np.ones(3, bool)), "mask must have"),
    (
        "mask turned round",
        lambda: MVRBM(n_epochs=1).fit(IMAGES).inpaint(IMAGES, np.ones((4, 6), bool)),
        "mask must have",
    ),
    (
        "mask of an unknown modality",
        lambda: MMVRBM(n_epochs=1).fit({"a": IMAGES}, mask={"b": IMAGES > 0}),
        "mask names",
    ),
    (
        "hidden rows of another size",
        lambda: MVRBM(n_epochs=1).fit(IMAGES).inverse_transform(np.ones((2, 12))),
        "expected",
    ),
    ("a list for MMVRBM", lambda: MMVRBM().fit([IMAGES]), "a dict or a tuple"),
    ("modality beyond [0, 1]", lambda: MMVRBM().fit({"a": IMAGES, "b": IMAGES + 1}), "modality 'b'.*'gaussian'"),
    ("unequal modalities", lambda: MMVRBM().fit({"a": IMAGES, "b": IMAGES[:3]}), "same number of samples"),
]


@pytest.mark.parametrize(("name", "call", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refusals_say_what_is_wrong(name, call, message):
    with pytest.raises(ValueError, match=message):
        call()
