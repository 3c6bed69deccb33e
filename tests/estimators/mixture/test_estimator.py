"""The estimator: scores against dense mixtures of Gaussians, unknown entries against the dense formula, and files."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.covariance import LedoitWolf
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from mvrbm import MatrixMixture, load
from tables import generator


def samples(n=300, shape=(2, 3)):
    rng = generator("mixture")
    mixing = rng.standard_normal((2, 6, 6))
    which = rng.integers(2, size=n)
    x = np.einsum("nij,nj->ni", mixing[which], rng.laplace(size=(n, 6))) + 3 * which[:, None]
    return x.reshape(n, *shape)


def fitted(**options):
    settings = {"n_components": 2, "n_contrasts": 2, "n_epochs": 30, "random_state": 0} | options
    return MatrixMixture(**settings).fit(samples())


def gaussians(model):
    """Log-weights, means and covariances of the dense mixture of a model without gates."""
    unit = model.unit_
    own = {name: value.numpy() for name, value in unit.state_dict().items()}
    log_pi = unit.log_weights().numpy()
    rotation = np.kron(*(basis.numpy() for basis in unit.bases()))
    scale = np.exp(own["log_scale"]).ravel()
    found = []
    for k, c in itertools.product(range(unit.n_components), range(unit.n_contrasts)):
        whitening = np.kron(*(matrix[k].numpy() for matrix in unit.whitenings()))
        variances = np.exp(own["log_contrast"][k, c] - own["log_precision"][k])
        if unit.level:
            variances = np.append(np.exp(own["level_log_variance"]), variances)
        synthesis = scale[:, None] * (rotation.T @ np.linalg.inv(whitening))
        offset = np.concatenate([np.zeros(int(unit.level)), own["offset"][k]])
        mean = own["center"].ravel() + scale * (rotation.T @ offset)
        found.append((log_pi[k, c], mean, (synthesis * variances) @ synthesis.T))
    return found


def given_known(model, x, known):
    """Log-density of the known entries of one sample, and the conditional mixture of the unknown ones."""
    logs, means, covariances = [], [], []
    for log_weight, mean, covariance in gaussians(model):
        inner, outer = covariance[known][:, known], covariance[~known][:, known]
        gain = outer @ np.linalg.inv(inner)
        logs.append(log_weight + stats.multivariate_normal.logpdf(x[known], mean[known], inner))
        means.append(mean[~known] + gain @ (x[known] - mean[known]))
        covariances.append(covariance[~known][:, ~known] - gain @ outer.T)
    total = np.logaddexp.reduce(logs)
    return total, np.exp(np.array(logs) - total), np.array(means), np.array(covariances)


EXACT = {"gate": False}
KNOWN = np.array([True, False, True, True, False, True])


@pytest.mark.parametrize("level", [False, True])
def test_scores_and_probabilities_are_those_of_the_dense_mixture(level):
    model, x = fitted(**EXACT, level=level), samples(20)
    joint = np.array([w + stats.multivariate_normal.logpdf(x.reshape(20, 6), m, s) for w, m, s in gaussians(model)])
    scores = np.logaddexp.reduce(joint)
    np.testing.assert_allclose(model.score_samples(x), scores, rtol=1e-9)
    np.testing.assert_allclose(model.score(x), scores.mean(), rtol=1e-9)
    share = np.exp(joint - scores).reshape(2, 2, 20).sum(1).T
    np.testing.assert_allclose(model.predict_proba(x), share, rtol=1e-7, atol=1e-12)
    np.testing.assert_array_equal(model.predict(x), share.argmax(1))
    size = 2 * (2 + 2 + (6 - level) + (2 - level) ** 2 + (3 - level) ** 2 + (6 - level)) + level
    assert model.n_parameters_ == size
    np.testing.assert_allclose(model.bic(x), -2 * scores.sum() + size * np.log(20))
    np.testing.assert_allclose(model.aic(x), -2 * scores.sum() + 2 * size)


@pytest.mark.parametrize("level", [False, True])
def test_conditional_means_and_probabilities_are_exact_without_gates(level):
    model, x = fitted(**EXACT, level=level), samples(5)
    x.reshape(5, 6)[1:, ~KNOWN] = np.nan
    filled, shares = model.inpaint(x).reshape(5, 6), model.predict_proba(x)
    for row in range(1, 5):
        _, weights, means, _ = given_known(model, x.reshape(5, 6)[row], KNOWN)
        np.testing.assert_allclose(filled[row, ~KNOWN], weights @ means, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(shares[row], weights.reshape(2, 2).sum(1), rtol=1e-6, atol=1e-10)
    np.testing.assert_array_equal(filled[:, KNOWN], x.reshape(5, 6)[:, KNOWN])
    np.testing.assert_array_equal(filled[0], x.reshape(5, 6)[0])


def test_conditional_draws_have_the_moments_of_the_dense_formula():
    """Each of 6 numbers is within 5 standard errors: this fails by chance once in 100,000 runs."""
    model, x, n = fitted(**EXACT), samples(1), 20_000
    mask = KNOWN.reshape(2, 3)
    drawn = model.sample_given(np.repeat(x, n, 0), mask).reshape(n, 6)[:, ~KNOWN]
    _, weights, means, covariances = given_known(model, x.ravel(), KNOWN)
    second = np.einsum("m,mij->ij", weights, covariances + means[:, :, None] * means[:, None])
    products = drawn[:, :, None] * drawn[:, None]
    np.testing.assert_array_less(np.abs(drawn.mean(0) - weights @ means), 5 * drawn.std(0) / np.sqrt(n))
    np.testing.assert_array_less(np.abs(products.mean(0) - second), 5 * products.std(0) / np.sqrt(n))


def test_gibbs_sampling_with_gates_has_the_exact_conditional_mean():
    """One unknown entry: its density on a grid is that of the joint density, which is exact."""
    model, x = fitted(gate=True), samples(4)
    mask = np.ones((2, 3), dtype=bool)
    mask[0, 1] = False
    found = model.inpaint(x, mask, steps=1000)[:, 0, 1]
    steps = np.linspace(-60, 60, 6001)
    for row in range(4):
        grid = np.repeat(x[row : row + 1], len(steps), 0)
        grid[:, 0, 1] = steps
        density = np.exp((logs := model.score_samples(grid)) - logs.max())
        mean, spread = np.average(steps, weights=density), 0.0
        spread = np.sqrt(np.average((steps - mean) ** 2, weights=density))
        assert abs(found[row] - mean) < 0.25 * spread  # 1000 correlated steps


def test_filled_entries_do_not_depend_on_the_other_samples():
    model, x = fitted(gate=True, n_epochs=5), samples(12)
    x[generator("holes").random(x.shape) < 0.4] = np.nan
    filled = model.inpaint(x, steps=20)
    np.testing.assert_allclose(model.inpaint(x[5:], steps=20), filled[5:])
    np.testing.assert_allclose(model.inpaint(x[::-1], steps=20), filled[::-1])
    drawn = model.sample_given(np.repeat(np.full((1, 2, 3), np.nan), 3, 0), burn_in=1)
    assert len(np.unique(drawn)) == drawn.size  # draws are independent


def test_samples_have_the_moments_of_the_mixture():
    """Each of 6 numbers is within 5 standard errors: this fails by chance once in 100,000 runs."""
    model, n = fitted(**EXACT), 20_000
    x, labels = model.sample(n)
    assert x.shape == (n, 2, 3)
    mean = sum(np.exp(w) * m for w, m, _ in gaussians(model))
    flat = x.reshape(n, 6)
    np.testing.assert_array_less(np.abs(flat.mean(0) - mean), 5 * flat.std(0) / np.sqrt(n))
    np.testing.assert_allclose(np.bincount(labels) / n, model.weights_, atol=0.02)
    np.testing.assert_allclose(model.means_[0].ravel(), gaussians(model)[0][1])


def test_features_are_probabilities_and_white_coefficients():
    model, x = fitted(**EXACT, n_components=1, n_contrasts=1), samples()
    features = model.transform(x)
    assert features.shape == (300, 1 + 6)
    np.testing.assert_allclose(features[:, 0], 1)
    np.testing.assert_allclose(features[:, 1:].mean(0), 0, atol=0.05)
    np.testing.assert_allclose(features[:, 1:].var(0), 1, rtol=0.05)  # except for the pseudo-sample
    assert len(model.get_feature_names_out()) == 7


def test_missing_entries_are_drawn_from_the_model_in_training():
    x = samples(600)
    complete = MatrixMixture(2, random_state=0, n_epochs=40, gate=False).fit(x)
    holes = x.copy()
    holes[generator("holes").random(x.shape) < 0.1] = np.nan
    model = MatrixMixture(2, random_state=0, n_epochs=40, gate=False).fit(holes)
    assert model.score(x) > complete.score(x) - 0.3
    assert np.isfinite(model.transform(holes)).all()


def test_training_with_missing_entries_ends_when_the_likelihood_settles():
    x = samples(100)
    x[generator("holes").random(x.shape) < 0.1] = np.nan
    model = MatrixMixture(1, gate=False, n_contrasts=1, random_state=0).fit(x)
    assert model.converged_
    assert len(model.history_) < 100


@pytest.mark.parametrize("gate", [True, False])
def test_rows_are_arrays_of_a_given_shape(gate):
    x = samples()
    arrays = MatrixMixture(2, gate=gate, n_epochs=5, random_state=0).fit(x)
    rows = MatrixMixture(2, gate=gate, n_epochs=5, random_state=0, visible_shape=(2, 3)).fit(x.reshape(300, 6))
    np.testing.assert_array_equal(arrays.score_samples(x), rows.score_samples(x.reshape(300, 6)))
    assert rows.sample(3)[0].shape == (3, 6)
    assert rows.inpaint(x.reshape(300, 6)).shape == (300, 6)


def test_warm_start_continues_and_checks_the_settings():
    x = samples()
    model = fitted(n_epochs=4, tol=0, gate=True)
    before = model.score(x)
    model.set_params(warm_start=True).fit(x)
    assert len(model.history_) == 8
    assert model.score(x) >= before
    with pytest.raises(ValueError, match="gate is False, but the model has gate=True"):
        model.set_params(gate=False).fit(x)
    with pytest.raises(ValueError, match="n_components is 7, but the model has n_components="):
        model.set_params(gate=True, n_components=7).fit(x)


@pytest.mark.parametrize("gate", [False, "auto"])
def test_too_few_samples_for_the_components_warn(gate):
    x = samples()[:80]
    model = MatrixMixture(30, gate=gate, n_epochs=2, random_state=0, device="cpu", warm_start=True)
    with pytest.warns(UserWarning, match="8 components instead of 30, because each component requires 10 samples"):
        assert model.fit(x).n_components_ == 8
    with pytest.warns(UserWarning, match="8 components instead of 30"):
        assert model.fit(x).n_components_ == 8


def test_the_number_of_components_is_chosen_by_validation():
    rng = generator("three clusters")
    x = rng.standard_normal((400, 2)) + 12 * np.eye(3)[rng.integers(3, size=400)][:, :2]
    model = MatrixMixture("auto", random_state=0, n_contrasts=1, gate=False).fit(x)
    assert 2 <= model.n_components_ <= 8
    assert model.validation_scores_[model.n_components_, False] == max(model.validation_scores_.values())
    assert model.score(x) > MatrixMixture(1, random_state=0).fit(x).score(x)
    model.set_params(n_components=2).fit(x)
    assert not hasattr(model, "validation_scores_")


def test_progress_is_one_line_per_candidate_and_one_bar(capsys):
    x = generator("progress").standard_normal((60, 3))
    model = MatrixMixture(n_contrasts=1, n_epochs=5, random_state=0, verbose=1).fit(x)
    *lines, bars = capsys.readouterr().err.split("\n", len(model.validation_scores_))
    words = {
        f"{n} component{'s' * (n > 1)} {'with' if gate else 'without'} gates: "
        f"mean log-likelihood of held-out samples is {score:.4f} nats"
        for (n, gate), score in model.validation_scores_.items()
    }
    assert set(lines) == words
    assert len(words) == len(lines) >= 3
    assert bars.count("\n") == 1  # the bar is drawn again in the same line


def test_gates_are_chosen_by_validation():
    rng = generator("gates")
    mixing = rng.standard_normal((6, 6))
    gaussian = MatrixMixture(1, random_state=0).fit(rng.standard_normal((300, 6)) @ mixing)
    sparse = MatrixMixture(1, random_state=0).fit(rng.standard_normal((300, 6)) ** 3 @ mixing)
    assert not gaussian.unit_.gate
    assert sparse.unit_.gate
    for model in (gaussian, sparse):
        scores = model.validation_scores_
        assert set(scores) == {(1, False), (1, True)}
        assert model.unit_.gate == (scores[1, True] > scores[1, False])


def test_training_ends_where_held_out_samples_were_most_likely():
    """Gates fit 60 samples in 12 dimensions better and better, and other samples worse and worse."""
    rng = generator("few samples")
    x, new = rng.standard_normal((60, 12)), rng.standard_normal((2000, 12))
    chosen = MatrixMixture("auto", gate=True, n_contrasts=1, random_state=0).fit(x)
    long = MatrixMixture(chosen.n_components_, gate=True, n_contrasts=1, tol=0, random_state=0).fit(x)
    assert len(chosen.history_) < 60 < len(long.history_)
    assert chosen.score(new) > long.score(new) + 1


def test_few_samples_get_one_component_that_is_validated():
    model = MatrixMixture(random_state=0).fit(samples(19))
    assert model.n_components_ == 1
    assert set(model.validation_scores_) == {(1, False), (1, True)}
    model = MatrixMixture(random_state=0).fit(np.repeat(samples(2), 10, 0))
    assert (model.n_components_, model.unit_.gate, model.validation_scores_) == (1, False, {})


def test_few_samples_are_more_likely_than_under_a_shrunk_gaussian():
    """15 samples with 30 features, which expectation maximization would fit better and better."""
    x = StandardScaler().fit_transform(load_breast_cancer().data)
    x, new = np.split(generator("fewer samples").permutation(x), [15])
    shrunk = LedoitWolf().fit(x)
    expected = stats.multivariate_normal(shrunk.location_, shrunk.covariance_).logpdf(new).mean()
    assert MatrixMixture(random_state=0).fit(x).score(new) > expected - 10


def test_saved_models_are_the_same(tmp_path):
    model, x = fitted(level=True), samples(10)
    model.save(tmp_path / "model")
    again = load(tmp_path / "model", device="cpu")
    np.testing.assert_array_equal(again.score_samples(x), model.score_samples(x))
    assert again.get_params() | {"device": "auto"} == model.get_params() | {"device": "auto"}
    assert (again.history_, again.n_parameters_) == (model.history_, model.n_parameters_)
    assert again.set_params(warm_start=True, n_epochs=1).fit(samples()).n_components_ == 2


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_scale_of_the_data_does_not_matter(scale):
    x = samples()
    x[:, 1, 2] = 5.0  # a constant entry
    model = MatrixMixture(2, random_state=0, n_epochs=10).fit(x)
    scaled = MatrixMixture(2, random_state=0, n_epochs=10).fit(scale * x)
    np.testing.assert_allclose(scaled.score_samples(scale * x) + 6 * np.log(scale), model.score_samples(x), rtol=1e-4)
    assert np.isfinite(MatrixMixture(2, n_epochs=3).fit(np.full((30, 4), 7.0)).score(np.full((3, 4), 7.0)))


@pytest.mark.parametrize(
    ("dtype", "scale", "offset"),
    [
        (np.float64, [1e-12, 1, 1, 1e9], [0, 0, 0, 0]),
        (np.float32, [1e-6, 1e-3, 1, 1e4], [0, 0, 0, 0]),
        (np.float32, [1e5, 1, 1, 1], [1e8, 0, 0, 0]),
    ],
)
def test_units_of_columns_do_not_matter(dtype, scale, offset):
    x = generator("units").standard_normal((100, 4)) @ (np.eye(4) + 0.5)
    expected, found = (
        MatrixMixture(1, gate=False, n_epochs=5, random_state=0).fit(data).score_samples(data)
        for data in (x, (x * scale + offset).astype(dtype))
    )
    np.testing.assert_allclose(found + np.log(scale).sum(), expected, atol=0.05)


def test_candidates_are_compared_in_the_precision_of_the_data():
    """In single precision, the values in the first column would be multiples of 128."""
    x = generator("offset").standard_normal((60, 3))
    options = {"n_contrasts": 1, "n_epochs": 5, "random_state": 0}
    expected = MatrixMixture(**options).fit(x).validation_scores_
    found = MatrixMixture(**options).fit(x + np.array([1.7e9, 0, 0])).validation_scores_
    assert found == pytest.approx(expected, abs=0.01)


BAD = {
    "n_components must be a whole number": {"n_components": 0},
    "n_contrasts must be a whole number": {"n_contrasts": 1.5},
    "gate must be True or False": {"gate": "yes"},
    "means must be one of": {"means": "many"},
    "n_epochs must be a whole number": {"n_epochs": 0},
    "batch_size must be a whole number": {"batch_size": -1},
    "shrinkage must be at least 0": {"shrinkage": -1},
    "tol must be at least 0": {"tol": float("nan")},
    "visible_shape \\(4, 4\\) has 16 entries": {"visible_shape": (4, 4)},
    "level=True requires layers": {"level": True, "visible_shape": (1,)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_settings_are_one_line_that_names_them(message):
    options = BAD[message]
    x = samples().reshape(300, 6)[:, : 1 if options.get("visible_shape") == (1,) else 6]
    with pytest.raises(ValueError, match=message) as error:
        MatrixMixture(**options).fit(x)
    assert "\n" not in str(error.value)


def test_bad_data_is_one_line():
    model, x = fitted(), samples()
    for bad, message in [(np.inf, "contains infinity"), (1e20, "largest supported magnitude")]:
        broken = x.copy()
        broken[0, 0, 0] = bad
        with pytest.raises(ValueError, match=message):
            MatrixMixture().fit(broken)
    broken[0, 0, 0] = np.nan
    with pytest.raises(ValueError, match="score_samples requires complete samples"):
        model.score_samples(broken)
    with pytest.raises(ValueError, match="mask must be boolean"):
        model.inpaint(x, np.ones((2, 3)))
    with pytest.raises(ValueError, match="mask must have the shape of the data"):
        model.inpaint(x, np.ones(5, dtype=bool))
    with pytest.raises(ValueError, match=r"mask must have the shape of the data .* got \(3, 2\)"):
        model.inpaint(x, np.ones((3, 2), dtype=bool))
    with pytest.raises(ValueError, match="at least 2 samples"):
        MatrixMixture().fit(x[:1])


def test_ctrl_c_keeps_the_model_trained_so_far(monkeypatch):
    import signal

    from mvrbm.estimators.mixture import em

    epochs = []
    real = em.expectation

    def interrupted(*arguments, **options):
        epochs.append(1)
        if len(epochs) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **options)

    monkeypatch.setattr(em, "expectation", interrupted)
    model = MatrixMixture(2, gate=True, random_state=0, n_epochs=50)
    with pytest.raises(KeyboardInterrupt):
        model.fit(samples())
    assert model.interrupted_
    assert len(model.history_) == 3
    assert np.isfinite(model.score(samples()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning", "ignore:the mixture has 1 components")
@parametrize_with_checks([MatrixMixture(), MatrixMixture(2, gate=False, n_epochs=5)])
def test_scikit_learn_check(estimator, check):
    check(estimator)


def test_models_are_in_the_precision_of_the_data():
    x = samples()
    assert MatrixMixture(2, n_epochs=2).fit(x.astype(np.float32)).unit_.center.dtype == torch.float32
    assert fitted().unit_.center.dtype == torch.float64


def test_batches_of_spectra_reach_the_likelihood_of_a_gaussian():
    """Neighboring columns agree to a thousandth. One component without gates and contrasts is a Gaussian."""
    rng = generator("spectra")
    x = 0.1 * rng.standard_normal((300, 64)).cumsum(1) + 0.0002 * rng.standard_normal((300, 64)) + 5
    model = MatrixMixture(1, n_contrasts=1, gate=False, batch_size=50, n_epochs=8, shrinkage=0.0, random_state=0).fit(x)
    expected = GaussianMixture(1, reg_covar=1e-9).fit(x).score(x)
    np.testing.assert_allclose(model.score(x), expected, atol=0.1)


def test_curves_with_more_points_than_samples_are_as_likely_as_under_a_shrunk_gaussian():
    """40 random walks of 80 points. Without noise, unseen directions would have a nearly infinite density."""
    rng = generator("few curves")
    x, new = (0.1 * rng.standard_normal((n, 80)).cumsum(1) for n in (40, 500))
    shrunk = max(
        stats.multivariate_normal(x.mean(0), np.cov(x.T) + ridge * np.eye(80)).logpdf(new).mean()
        for ridge in (1e-3, 3e-3, 1e-2, 3e-2)
    )
    assert MatrixMixture(1, random_state=0).fit(x).score(new) > shrunk - 12
    assert MatrixMixture(1, random_state=0, shrinkage=0.0, n_epochs=5).fit(x).score(new) < shrunk - 100


@pytest.mark.parametrize("shrinkage", [0.0, 1.0])
@pytest.mark.parametrize(("n_components", "gate", "n"), [(3, False, 300), (4, True, 300), (8, False, 600)])
def test_training_on_discrete_data_ends_with_the_best_parameters(n_components, gate, n, shrinkage):
    """Repeated values bring variances to their bounds, where updates of all parameters at once can fail."""
    images = load_digits().images[:n]
    model = MatrixMixture(n_components, gate=gate, shrinkage=shrinkage, n_epochs=60, random_state=0).fit(images)
    settled = np.array(model.history_[10:])  # components are revived before
    assert len(settled) > 5
    # The objective never decreases. It is the likelihood plus a small log-prior.
    assert (np.diff(settled) > -5).all()
    assert model.score(images) == pytest.approx(settled[-1], abs=0.01)


@pytest.mark.parametrize(("first", "second"), [(np.float32, np.float64), (np.float64, np.float32)])
def test_a_warm_start_keeps_the_precision_of_the_model(first, second):
    x = generator("precision").standard_normal((60, 3, 2))
    model = MatrixMixture(1, gate=False, n_epochs=2, warm_start=True, random_state=0).fit(x.astype(first))
    assert model.fit(x.astype(second)).means_.dtype == first
