"""A sweep gives the same models as separate training runs."""

import dataclasses

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

from mvrbm import MMVRBM, MVRBM, TVRBM, DeepMVRBM, MatrixMixture, MVRBMClassifier, SequenceRBM
from mvrbm.distributed import World, single_process
from mvrbm.estimators import Sweep
from mvrbm.models import mvrbm
from mvrbm.training import RECIPES, DivergenceError, Recipe, Trainer, fit_together

X = (np.random.default_rng(0).random((120, 6, 5)) < np.linspace(0.1, 0.9, 6)[:, None]).astype(np.float32)


def test_candidates_are_what_the_estimator_would_have_learned():
    grid = {"rank": [1, 2], "random_state": [0, 3]}
    sweep = Sweep(MVRBM((4, 3), n_epochs=3, device="cpu"), grid, random_state=1).fit(X)
    assert len(sweep.candidates_) == 4
    held = np.sort(np.random.default_rng(1).permutation(120)[:12])
    kept = np.setdiff1d(np.arange(120), held)
    for candidate in sweep.candidates_:
        alone = MVRBM((4, 3), n_epochs=3, device="cpu", **candidate.params).fit(X[kept])
        np.testing.assert_array_equal(candidate.estimator.components(), alone.components())
        assert candidate.score == pytest.approx(alone.score(X[held]))
    assert sweep.best_score_ == max(candidate.score for candidate in sweep.candidates_)
    assert sweep.best_estimator_.transform(X).shape == (120, 12)


def test_scoring_may_use_labels():
    seen = []

    def scoring(estimator, X, y):
        seen.append(y)
        return -abs(estimator.rank - 2)

    sweep = Sweep(MVRBM((4, 3), n_epochs=1), {"rank": [1, 2, 3]}, scoring=scoring).fit(X, np.arange(120))
    assert sweep.best_params_ == {"rank": 2}
    assert len(seen[0]) == 12


def test_scoring_gets_the_labels_of_the_held_out_samples():
    y = np.random.default_rng(0).permutation(40)
    X = (y[:, None] >> np.arange(6) & 1).reshape(40, 2, 3).astype(np.float32)  # the label in binary
    seen = []

    def scoring(estimator, X, y):
        seen.extend(y)
        np.testing.assert_array_equal(X.reshape(-1, 6) @ 2 ** np.arange(6), y)
        return 0.0

    Sweep(MVRBM((2, 2), n_epochs=1), {"rank": [1]}, scoring=scoring, validation_fraction=0.3).fit(X, y)
    assert len(set(seen)) == 12


def test_those_that_diverge_do_not_stop_the_others():
    recipe = dataclasses.replace(RECIPES["paper"], factor_std=1.0, weight_decay=0.0)
    grid = {"learning_rate": [1e30, 0.01]}
    sweep = Sweep(MVRBM((4, 3), n_epochs=3, recipe=recipe, device="cpu"), grid).fit(X)
    assert [candidate.diverged for candidate in sweep.candidates_] == [True, False]
    assert sweep.best_params_ == {"learning_rate": 0.01}
    with pytest.raises(DivergenceError, match="all 1 training runs diverged"):
        Sweep(MVRBM((4, 3), n_epochs=3, recipe=recipe, device="cpu"), {"learning_rate": [1e30]}).fit(X)


def test_invalid_validation_fractions_raise_errors():
    with pytest.raises(ValueError, match=r"validation_fraction must be positive and below 1, got 1\.5"):
        Sweep(MVRBM(), {"rank": [1]}, validation_fraction=1.5).fit(X)
    with pytest.raises(ValueError, match="cannot hold out 1 of 1"):
        Sweep(MVRBM(), {"rank": [1]}).fit(X[:1])


def test_unknown_entries_are_not_data():
    """Without the mask, NaN would be an error, and placeholders would be learned."""
    holes = np.where(np.random.default_rng(1).random(X.shape) < 0.3, np.nan, X)
    sweep = Sweep(MVRBM((4, 3), n_epochs=3, device="cpu"), {"random_state": [0, 3]}, scoring=lambda *_: 0.0).fit(holes)
    held = np.random.default_rng(0).permutation(120)[:12]
    for candidate in sweep.candidates_:
        alone = MVRBM((4, 3), n_epochs=3, device="cpu", **candidate.params).fit(np.delete(holes, held, 0))
        np.testing.assert_array_equal(candidate.estimator.components(), alone.components())
    with pytest.raises(ValueError, match="12 of 12 held-out samples contain NaN, but score requires complete samples"):
        Sweep(MVRBM((4, 3), n_epochs=3), {"rank": [1]}).fit(holes)


def test_candidates_may_differ_in_the_shape_of_samples():
    rows = X.reshape(120, -1)
    sweep = Sweep(TVRBM(n_epochs=2, device="cpu", random_state=0), {"visible_shape": [(6, 5), (5, 3, 2)]}).fit(rows)
    kept = np.delete(np.arange(120), np.random.default_rng(0).permutation(120)[:12])
    for candidate in sweep.candidates_:
        alone = TVRBM(n_epochs=2, device="cpu", random_state=0, **candidate.params).fit(rows[kept])
        np.testing.assert_array_equal(candidate.estimator.components(), alone.components())


@pytest.mark.parametrize("values", [[np.nan, 1.0, 0.5], [1.0, np.nan, 0.5], [0.5, np.nan, 1.0]])
def test_a_score_that_is_nan_is_never_the_best(values):
    value_of = dict(zip([1, 2, 3], values, strict=True))
    sweep = Sweep(MVRBM((4, 3), n_epochs=1), {"rank": [1, 2, 3]}, scoring=lambda model, *_: value_of[model.rank]).fit(X)
    assert sweep.best_score_ == 1.0
    with pytest.raises(ValueError, match="all 2 scores are NaN or minus infinity"):
        Sweep(MVRBM((4, 3), n_epochs=1), {"rank": [1, 2]}, scoring=lambda *_: np.nan).fit(X)


@pytest.mark.parametrize("estimator", [MMVRBM(), MVRBMClassifier(), DeepMVRBM(), MatrixMixture()])
def test_other_estimators_raise(estimator):
    message = (
        f"must be RBM, MVRBM, TVRBM or SequenceRBM, got {type(estimator).__name__}; use scikit-learn's GridSearchCV"
    )
    with pytest.raises(ValueError, match=message):
        Sweep(estimator, {"random_state": [0]}).fit(X, np.arange(120) % 2)


def test_sequence_models_are_compared_by_a_normalized_score():
    """The scores of `score_samples` omit log Z, which differs between models."""
    rng = np.random.default_rng(0)
    sequences = np.array(["".join(rng.choice(list("ACDE"), size=6)) for _ in range(100)])
    model = SequenceRBM(4, random_state=0, alphabet="ACDE", identity=None)
    sweep = Sweep(model, {"n_epochs": [1, 20]}).fit(sequences)
    held = sequences[np.sort(np.random.default_rng(0).permutation(100)[:10])]
    for candidate in sweep.candidates_:
        assert candidate.score == pytest.approx(np.mean(candidate.estimator.pseudo_likelihood(held)))
    search = GridSearchCV(model, {"n_epochs": [1, 20]}, cv=[(np.arange(50), np.arange(50, 100))]).fit(sequences)
    fitted = [clone(model).set_params(n_epochs=n).fit(sequences[:50]) for n in (1, 20)]
    expected = [np.mean(one.pseudo_likelihood(sequences[50:])) for one in fitted]
    np.testing.assert_allclose(search.cv_results_["mean_test_score"], expected, rtol=1e-6)


def test_a_single_process_is_a_world_of_one():
    with single_process():
        assert World.here() == World(0, 1)


# Ranks 3 and 4 use the same kernel. Ranks 1 and 2 alone use separate kernels, which round other products to 16 bits.
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "rtol"), [([3, 4], 1e-4), ([1, 2], 2e-3)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
@pytest.mark.usefixtures("interpreted")
def test_the_kernels_train_each_of_many_as_they_train_it_alone(ranks, rtol):
    pytest.importorskip("triton")
    recipes = [Recipe(n_epochs=2, batch_size=6, learning_rate=rate, weight_decay=decay)
               for rate, decay in [(0.2, 0.0), (0.05, 0.1)]]  # fmt: skip

    def trainers():
        return [
            Trainer(mvrbm((6, 5), (4, 3), rank=rank), recipe, seed=seed)
            for seed, (recipe, rank) in enumerate(zip(recipes, ranks, strict=True))
        ]

    data = X[:12]
    many, alone = trainers(), trainers()
    assert fit_together(many, [data] * 2)[0][0] is False
    for trainer in alone:
        trainer.fit(data, initialize=True)
    for mine, other in zip(many, alone, strict=True):
        assert (mine.update, mine.epoch) == (other.update, other.epoch) == (4, 2)
        for key, value in other.machine.state_dict().items():
            torch.testing.assert_close(mine.machine.state_dict()[key], value, rtol=rtol, atol=rtol / 10)
