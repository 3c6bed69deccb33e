"""Estimators of one visible layer: outputs, parameters, continued training, and scikit-learn's tools."""

import os
import signal

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neural_network import BernoulliRBM
from sklearn.pipeline import make_pipeline

import mvrbm
from enumeration import Written
from mvrbm import CP, MMVRBM, MPO, MVRBM, RBM, TVRBM, DeepMVRBM, Dense, Kronecker, RandomSource, ReplicatedSoftmax
from mvrbm.estimators.parameters import seed_of
from mvrbm.likelihood import log_likelihood_interval, pseudo_log_likelihood
from mvrbm.training import CD, PCD, Callback, Checkpoint, Monitor, Recipe, TemperedPCD
from tables import generator, randomize


@pytest.fixture(scope="module")
def digits():
    return (load_digits().images / 16).astype(np.float32)  # (1797, 8, 8)


@pytest.fixture(scope="module")
def labels():
    return load_digits().target


@pytest.fixture(scope="module")
def model(digits):
    return MVRBM((6, 5), n_epochs=30, random_state=0).fit(digits)


def test_partial_fit_does_not_decay_the_learning_rate_to_zero(digits):
    def trained(linear_decay, **settings):
        model = MVRBM((3, 3), recipe=Recipe(linear_decay=linear_decay), batch_size=50, random_state=0, **settings)
        if settings:
            return model.fit(digits[:200]).components_
        return model.partial_fit(digits[:200]).partial_fit(digits[:200]).components_

    np.testing.assert_array_equal(trained(True), trained(False))
    assert not np.allclose(trained(True, n_epochs=2), trained(False, n_epochs=2))


@pytest.mark.parametrize("negative", ["cd", "pcd"])
def test_reverse_annealing_starts_from_chains_or_from_samples_spread_over_the_data(negative, digits):
    model = MVRBM((3, 3), n_epochs=1, negative=negative, random_state=3).fit(digits[:100])
    options = {"n_chains": 4, "n_steps": 10, "burn_in": 1}
    x = torch.from_numpy(digits[:100].round())
    init = model.chains_ or {"visible": x[[0, 33, 66, 99]]}
    rng = RandomSource(seed_of(3))
    expected = log_likelihood_interval(model.machine_, {"visible": x}, rng, init=init, **options)
    found = model.log_likelihood(x.numpy(), **options)
    assert (found.forward, found.reverse) == (expected.forward, expected.reverse)


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
    with pytest.raises(ValueError, match=r"must be from 0 to 29"):
        model.components([30])


def test_reconstruction_is_better_than_the_mean(digits):
    # One model in ten learns slowly, so the test takes the mean of five.
    models = [MVRBM((6, 5), n_epochs=30, random_state=seed).fit(digits) for seed in range(5)]
    error = np.mean([((model.reconstruct(digits) - digits) ** 2).sum() for model in models])
    assert error < 0.87 * ((digits.mean(0) - digits) ** 2).sum()


def test_reconstruction_is_the_inverse_of_the_features(model, digits):
    np.testing.assert_allclose(
        model.inverse_transform(model.transform(digits[:9])), model.reconstruct(digits[:9]), rtol=1e-5, atol=1e-6
    )


def test_partial_fit_goes_on(digits):
    whole = MVRBM((4, 4), n_epochs=3, random_state=1).fit(digits)
    piecewise = MVRBM((4, 4), random_state=1)
    for _ in range(3):
        assert piecewise.partial_fit(digits) is piecewise
    np.testing.assert_array_equal(piecewise.transform(digits), whole.transform(digits))


def test_partial_fit_after_loading_keeps_what_was_learned(model, digits, tmp_path):
    model.save(tmp_path / "model")
    loaded = mvrbm.load(tmp_path / "model").partial_fit(digits)
    before, after = model.transform(digits), loaded.transform(digits)
    assert 0 < np.abs(after - before).mean() < 0.1


def test_scores_are_deterministic_and_rise_with_learning(digits):
    rises = []
    for seed in (2, 1, 0):
        start = MVRBM((6, 5), n_epochs=0, random_state=seed).fit(digits)
        end = MVRBM((6, 5), n_epochs=20, random_state=seed).fit(digits)
        rises.append(end.score(digits[:200]) - start.score(digits[:200]))
    assert np.minimum(rises, 2).mean() > 0.3  # large rises vary most
    np.testing.assert_array_equal(end.score_samples(digits[:50]), end.score_samples(digits[:50]))
    x = torch.from_numpy(digits[:50])
    for exact, n_sites in ((True, None), (False, 16)):
        direct = pseudo_log_likelihood(end.machine_, x, n_sites=n_sites).values
        np.testing.assert_allclose(end.score_samples(digits[:50], exact=exact), direct.numpy(), rtol=1e-5)
    assert end.score(digits[:50], exact=True) == pytest.approx(end.score(digits[:50]), rel=0.1)


FREE_ENERGIES = {
    "RBM": lambda X: RBM(2, n_epochs=1).fit(X.reshape(len(X), -1)),
    "MVRBM": lambda X: MVRBM((2, 1), n_epochs=1).fit(X),
    "TVRBM": lambda X: TVRBM((2, 1, 1), visible_shape=(2, 2, 1), n_epochs=1).fit(X.reshape(len(X), -1)),
    "MMVRBM": lambda X: MMVRBM((2, 1), n_epochs=1).fit({"a": X, "b": X}),
    "stack: of its lowest machine": lambda X: DeepMVRBM(((2, 1), (1, 1)), n_epochs=1).fit(X),
}


@pytest.mark.parametrize("name", FREE_ENERGIES)
def test_free_energy_sums_out_the_hidden_layer(name):
    X = (generator("free energy").random((5, 2, 2)) < 0.5).astype(np.float64)
    model = FREE_ENERGIES[name](X)
    machine = randomize(model.machine_, generator("free energy"))
    layers = {key: torch.from_numpy(X).reshape(5, *unit.shape) for key, unit in machine.layers.items()}
    given = dict.fromkeys(layers, X) if len(layers) > 1 else X.reshape(5, *model.visible_shape_)
    expected = Written(machine).free_energy(layers).detach().numpy()
    np.testing.assert_allclose(model.free_energy(given), expected, rtol=1e-10)


def test_inpainting_keeps_the_known_and_beats_the_mean(digits):
    fitted = MVRBM((8, 8), rank=4, n_epochs=100, random_state=0).fit(digits[:1500])
    mask = np.ones((8, 8), bool)
    mask[:, 4:] = False
    hidden = np.where(mask, digits[1500:], 0).astype(np.float32)
    filled = fitted.inpaint(hidden, mask)
    np.testing.assert_array_equal(filled[:, mask], digits[1500:][:, mask])
    truth, mean = digits[1500:][:, ~mask], digits[:1500].mean(0)[~mask]
    assert ((filled[:, ~mask] - truth) ** 2).sum() < 0.9 * ((mean - truth) ** 2).sum()


def test_samples_follow_the_seed_and_the_mask(model, digits):
    assert np.array_equal(model.sample(4, steps=5), model.sample(4, steps=5))
    mask = np.zeros((8, 8), bool)
    mask[:3] = True
    drawn = model.sample(5, steps=3, init=digits[:5], mask=mask)
    np.testing.assert_array_equal(drawn[:, :3], digits[:5, :3])
    assert set(np.unique(drawn[:, 3:])) <= {0.0, 1.0}
    with pytest.raises(ValueError, match="init is required when mask is given"):
        model.sample(5, mask=mask)


def test_callbacks_and_recipes(digits):
    monitor = Monitor(digits[:100], digits[100:200])
    recipe = Recipe(negative=PCD(20), batch_size=50)
    fitted = MVRBM((4, 4), recipe=recipe, n_epochs=3, random_state=0).fit(digits[:500], callbacks=[monitor])
    assert [row["epoch"] for row in fitted.history_] == [1, 2, 3]
    assert fitted.history_[0]["update"] == 10


def test_the_reference_backend_learns_the_same(digits):
    fast = MVRBM((4, 4), n_epochs=2, random_state=0).fit(digits.astype(np.float64))
    slow = MVRBM((4, 4), n_epochs=2, random_state=0, backend="autograd").fit(digits.astype(np.float64))
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
    fitted.save(tmp_path / "model")
    loaded = mvrbm.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.transform(X), fitted.transform(X))
    assert loaded.reconstruct(X[:2]).shape == fitted.reconstruct(X[:2]).shape
    assert type(loaded) is type(fitted)
    assert loaded.get_params() == fitted.get_params()
    assert (loaded.n_epochs_, loaded.n_updates_) == (fitted.n_epochs_, fitted.n_updates_) == (1, 18)


def test_an_interrupted_fit_ends_what_called_it(digits):
    class Interrupt(Callback):
        def on_batch_end(self, trainer, batch):
            if trainer.update == 3:
                os.kill(os.getpid(), signal.SIGINT)

    estimator = MVRBM((3, 3), n_epochs=100, random_state=0)
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(digits, callbacks=[Interrupt()])
    assert estimator.n_updates_ == 3
    before = estimator.transform(digits[:5])
    after = estimator.partial_fit(digits[:150]).transform(digits[:5])
    assert estimator.n_updates_ == 5  # both batches of the new data
    assert not np.array_equal(before, after)


def test_equal_models_score_equally(digits):
    fitted = MVRBM((6, 5), rank=3, n_epochs=5, random_state=0).fit(digits)
    dense = RBM(30, n_epochs=0).fit(digits.reshape(len(digits), -1))
    with torch.no_grad():
        dense.machine_.links["visible"].weight.copy_(fitted.machine_.links["visible"].dense().reshape(30, 64))
        dense.machine_.layers["visible"].bias.copy_(fitted.machine_.layers["visible"].bias.reshape(64))
        dense.machine_.hidden.bias.copy_(fitted.machine_.hidden.bias.reshape(30))
    assert dense.score(digits[:100].reshape(100, -1)) == pytest.approx(fitted.score(digits[:100]), rel=1e-5)


# -- parameters -------------------------------------------------------------------------------------------

UNITS = {
    "bernoulli": lambda X: X,
    "gaussian": lambda X: 3 * X - 1,
    "gaussian-learned": lambda X: 3 * X - 1,
    "gaussian-axes": lambda X: 3 * X - 1,
    "gaussian-one": lambda X: 3 * X - 1,
    "rectified": lambda X: 3 * X,
    "poisson": lambda X: np.round(9 * X),
    "categorical": lambda X: (np.arange(8) == X.argmax(2)[..., None]).astype(X.dtype),
}


@pytest.mark.parametrize("kind", UNITS)
def test_units_by_name(kind, digits, tmp_path):
    X = UNITS[kind](digits[:200])
    fitted = MVRBM((4, 4), visible=kind, n_epochs=1, random_state=0).fit(X)
    loaded = mvrbm.load(fitted.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.transform(X), fitted.transform(X))
    assert fitted.sample(2, steps=2).shape == (2, 8, 8)
    if kind in ("gaussian-learned", "gaussian-axes", "gaussian-one"):
        assert any(p.requires_grad for name, p in loaded.machine_.named_parameters() if "variance" in name)


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian", "rectified", "categorical"])
def test_hidden_units_by_name(kind, digits):
    fitted = MVRBM((4, 4), hidden=kind, n_epochs=2, random_state=0).fit(digits[:300])
    assert fitted.machine_.hidden.name == kind
    assert np.isfinite(fitted.transform(digits[:9])).all()


@pytest.mark.parametrize("coupling", ["kronecker:3", "cp:4", "mpo:2", "dense", Kronecker(3), CP(4), MPO(2), Dense()])
def test_every_coupling(coupling, digits, tmp_path):
    name = coupling if isinstance(coupling, str) else coupling.name
    hidden = 7 if name.startswith(("cp", "dense")) else (4, 3)
    fitted = MVRBM(hidden, coupling=coupling, n_epochs=1, random_state=0).fit(digits[:200])
    assert fitted.machine_.links["visible"].name == name.partition(":")[0]
    assert not getattr(coupling, "connected", False)
    loaded = mvrbm.load(fitted.save(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.transform(digits), fitted.transform(digits))
    loaded.set_params(warm_start=True).fit(digits[:200])
    clone(fitted).fit(digits[:100])


@pytest.mark.parametrize(
    ("settings", "phase"),
    [
        ({}, CD(1)),
        ({"gibbs_steps": 3}, CD(3)),
        ({"negative": "pcd"}, PCD(100)),
        ({"negative": "pcd", "n_chains": 20, "gibbs_steps": 2}, PCD(20, 2)),
        ({"negative": "tempered", "n_chains": 12}, TemperedPCD(12)),
        ({"recipe": Recipe(negative=PCD(30)), "gibbs_steps": 2}, PCD(30, 2)),
        ({"recipe": Recipe(negative=PCD(30)), "negative": "cd"}, CD(1)),
    ],
)
def test_the_negative_phase_is_a_parameter(settings, phase, digits, tmp_path):
    fitted = MVRBM((3, 3), n_epochs=1, random_state=0, **settings).fit(digits[:100])
    assert fitted.trainer_.recipe.negative == phase
    other = MVRBM((3, 3), n_epochs=1, random_state=0, recipe=Recipe(negative=phase)).fit(digits[:100])
    np.testing.assert_array_equal(fitted.components_, other.components_)
    assert mvrbm.load(fitted.save(tmp_path / "model")).get_params() == fitted.get_params()


def test_weights_and_biases_as_of_bernoulli_rbm(model, digits, monkeypatch):
    np.testing.assert_allclose(model.components_, model.components().reshape(30, 64), rtol=1e-5)
    hidden = 1 / (1 + np.exp(-(digits.reshape(-1, 64) @ model.components_.T + model.intercept_hidden_)))
    np.testing.assert_allclose(hidden, model.transform(digits), rtol=1e-3)
    assert model.intercept_visible_.shape == (64,)
    assert not hasattr(MVRBM(), "components_")
    monkeypatch.setattr("mvrbm.estimators.features._LARGEST_DENSE", 30 * 64 - 1)
    assert not hasattr(model, "components_")
    with pytest.raises(AttributeError, match="of size 30 x 64"):
        model.components_  # noqa: B018


# -- training that continues ------------------------------------------------------------------------------


def test_warm_start_is_training_for_longer(digits):
    whole = MVRBM((4, 4), n_epochs=4, random_state=1).fit(digits)
    parts = MVRBM((4, 4), n_epochs=1, random_state=1, warm_start=True).fit(digits)
    machine = parts.machine_
    parts.set_params(n_epochs=3).fit(digits)
    assert parts.machine_ is machine
    np.testing.assert_array_equal(parts.components_, whole.components_)
    assert (parts.n_epochs_, parts.n_updates_) == (whole.n_epochs_, whole.n_updates_) == (4, 72)
    anew = parts.set_params(n_epochs=4, warm_start=False).fit(digits)
    np.testing.assert_array_equal(anew.components_, whole.components_)
    assert anew.n_epochs_ == 4


def test_warm_start_continues_after_loading(model, digits, tmp_path):
    loaded = mvrbm.load(model.save(tmp_path / "model"))
    assert (loaded.n_epochs_, loaded.trainer_) == (30, None)
    before = loaded.transform(digits)
    loaded.set_params(warm_start=True, n_epochs=1).fit(digits)
    assert 0 < np.abs(loaded.transform(digits) - before).mean() < 0.1
    assert loaded.n_epochs_ == 31


def test_warm_start_with_other_settings(digits):
    fitted = MVRBM((4, 4), n_epochs=1, random_state=1, warm_start=True).fit(digits)
    before, trainer = fitted.components_, fitted.trainer_
    fitted.set_params(learning_rate=0.001, negative="pcd").fit(digits)
    assert fitted.trainer_ is not trainer
    assert fitted.trainer_.recipe.negative == PCD(100)
    assert 0 < np.abs(fitted.components_ - before).max() < 0.2
    with pytest.raises(ValueError, match="training cannot continue because the parameters describe a different model"):
        fitted.set_params(rank=2).fit(digits)
    with pytest.raises(ValueError, match=r"samples must have shape \(8, 8\)"):
        fitted.set_params(rank=1).fit(digits[:, :7])


def test_an_interrupted_fit_can_be_continued(digits):
    class Interrupt(Callback):
        def on_batch_end(self, trainer, batch):
            if trainer.update == 30:
                os.kill(os.getpid(), signal.SIGINT)

    estimator = MVRBM((3, 3), n_epochs=5, random_state=0, warm_start=True)
    with pytest.raises(KeyboardInterrupt):
        estimator.fit(digits, callbacks=[Interrupt()])
    assert (estimator.interrupted_, estimator.n_epochs_, estimator.n_updates_) == (True, 1, 30)
    estimator.set_params(n_epochs=1).fit(digits)
    assert (estimator.interrupted_, estimator.n_epochs_, estimator.n_updates_) == (False, 2, 48)


def test_fit_resumes_from_checkpoints(digits, tmp_path):
    def make(n_epochs):
        return MVRBM((3, 3), n_epochs=n_epochs, negative="pcd", n_chains=20, random_state=0)

    make(2).fit(digits, callbacks=[Checkpoint(tmp_path)])
    resumed, whole = make(4).fit(digits, resume=tmp_path), make(4).fit(digits)
    np.testing.assert_array_equal(resumed.components_, whole.components_)
    assert (resumed.n_epochs_, resumed.n_updates_) == (4, 72)
    np.testing.assert_array_equal(make(4).fit(digits, resume=tmp_path / "nothing").components_, whole.components_)


def test_a_wrong_parameter_leaves_the_fitted_model(model, digits):
    fitted = clone(model).set_params(n_epochs=1).fit(digits)
    before = fitted.components_
    for wrong in ({"backend": "gpu"}, {"n_epochs": -1}, {"hidden_shape": (3, 3, 3)}, {"recipe": "fast"}):
        with pytest.raises(ValueError, match=r"must be|axes"):
            clone(fitted).set_params(**wrong).fit(digits)
        with pytest.raises(ValueError, match=r"must be|axes"):
            fitted.set_params(**wrong).fit(digits)
        fitted.set_params(**{name: model.get_params()[name] for name in wrong})
        np.testing.assert_array_equal(fitted.components_, before)
    unfitted = MVRBM(backend="gpu")
    with pytest.raises(ValueError, match="backend must be one of"):
        unfitted.fit(digits)
    assert not hasattr(unfitted, "machine_")


@pytest.mark.parametrize(
    "estimator", [RBM(2), MVRBM(), TVRBM(), MMVRBM(), DeepMVRBM()], ids=lambda one: type(one).__name__
)
def test_an_unfitted_model_says_so(estimator):
    names = ["machine_", "chains_", "components_", "intercept_visible_", "intercept_hidden_", "n_parameters_"]
    for read in [*(lambda name=name: getattr(estimator, name) for name in names),
                 lambda: estimator.inverse_transform(np.zeros((2, 9))), lambda: estimator.components()]:  # fmt: skip
        with pytest.raises(NotFittedError, match="is not fitted yet"):
            read()
    assert not hasattr(estimator, "machine_")


class Watch(Callback):
    def __init__(self):
        self.epochs = []

    def on_epoch_end(self, trainer):
        self.epochs.append(trainer.epoch)

    def for_layer(self, number):
        return self


class StopAfterOneEpoch(Callback):
    def on_epoch_end(self, trainer):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    "model",
    [
        MVRBM((2, 2), n_epochs=3, random_state=0, device="cpu"),
        DeepMVRBM(((2, 2), (2, 1)), n_epochs=3, random_state=0, device="cpu"),
        ReplicatedSoftmax(3, n_epochs=3, random_state=0, device="cpu"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_fit_continues_from_the_folder_of_checkpoints(model, tmp_path):
    rng = generator("checkpoints")
    counts = isinstance(model, ReplicatedSoftmax)
    data = rng.integers(0, 3, (60, 8)) if counts else rng.random((60, 3, 4)).astype(np.float32)
    with pytest.raises(KeyboardInterrupt):
        clone(model).fit(data, callbacks=[StopAfterOneEpoch()], checkpoints=tmp_path)
    watch = Watch()
    resumed = clone(model).fit(data, callbacks=[watch], checkpoints=tmp_path)
    whole = clone(model).fit(data)
    np.testing.assert_array_equal(resumed.transform(data), whole.transform(data))
    assert watch.epochs[0] == 2  # the first epoch is not repeated
    with pytest.raises(ValueError, match="resume has no effect together with checkpoints"):
        clone(model).fit(data, checkpoints=tmp_path, resume=tmp_path)


def test_weights_are_the_third_argument_as_in_scikit_learn():
    rng = generator("third argument")
    data, weights = rng.random((40, 3, 4)), rng.random(40)
    model = MVRBM((2, 2), n_epochs=1, random_state=0)
    by_name = clone(model).fit(data, sample_weight=weights).transform(data)
    np.testing.assert_array_equal(clone(model).fit(data, None, weights).transform(data), by_name)
    by_name = clone(model).partial_fit(data, sample_weight=weights).transform(data)
    np.testing.assert_array_equal(clone(model).partial_fit(data, None, weights).transform(data), by_name)
