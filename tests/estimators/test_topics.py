"""ReplicatedSoftmax: topics from sparse counts, predicted words against enumeration, files, errors."""

import math
import pickle

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.utils.estimator_checks import parametrize_with_checks

import mvrbm
from mvrbm import Bernoulli, BoltzmannMachine, Counts, Dense, ReplicatedSoftmax
from mvrbm.estimators.topics import halves
from mvrbm.training import Checkpoint


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([ReplicatedSoftmax(3, n_epochs=2)])
def test_scikit_learn_check(estimator, check):
    check(estimator)


def documents(n=300, n_topics=3, words_per_topic=8, seed=0):
    """Return documents of different lengths, each about one topic with its own words."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((n, n_topics * words_per_topic))
    for row in counts:
        first = rng.integers(n_topics) * words_per_topic
        np.add.at(row, first + rng.integers(words_per_topic, size=rng.integers(4, 40)), 1)
    return sparse.csr_matrix(counts)


@pytest.fixture(scope="module")
def fitted():
    return ReplicatedSoftmax(5, learning_rate=0.05, n_epochs=40, random_state=0).fit(documents())


def test_learns_topics_that_have_words_of_their_own(fitted):
    perplexity = fitted.perplexity(documents(seed=1))
    assert perplexity < 9.5  # 8 words per topic; 24 words in all
    assert fitted.score(documents(seed=1)) == pytest.approx(-math.log(perplexity))
    topics = [{int(word) // 8 for word in words} for words in fitted.top_words(n=3)]
    assert sum(len(kinds) == 1 for kinds in topics) >= 3


def test_top_words_weigh_weights_by_the_deviation_of_counts():
    model = ReplicatedSoftmax(2, n_epochs=1, random_state=0).fit(np.eye(3))
    with torch.no_grad():
        model.machine_.links["words"].weight.copy_(torch.tensor([[3, 2.5, 1], [1, -3, 9]]))
        model.machine_.layers["words"].bias.copy_(torch.tensor([0.01, 0.25, 1]).log())
    # Square roots of the frequencies: 0.1, 0.5 and 1. Products with the weights: 0.3, 1.25, 1 and 0.1, -1.5, 9.
    assert model.top_words(["rare", "usual", "often"], n=3) == [["usual", "often", "rare"], ["often", "rare", "usual"]]
    assert model.top_words(n=1) == [["1"], ["2"]]


def test_predicted_words_are_those_of_the_enumerated_model(fitted):
    """p(next word | document) is the ratio of sums over all topics of documents with and without the word."""
    document = documents(2, seed=2).toarray()
    W, b, c = (np.float64(a) for a in (fitted.components_, fitted.intercept_visible_, fitted.intercept_hidden_))
    hidden = np.array(list(np.ndindex(*[2] * 5)), dtype=float)  # (32, 5)

    def weight(x):  # of all orders of the words, summed over topics
        return np.exp(hidden @ (W @ x + c)).sum() * np.exp(b @ x)

    joint = np.array([[weight(x + word) for word in np.eye(24)] for x in document])
    np.testing.assert_allclose(fitted.predict_words(document), joint / joint.sum(1, keepdims=True), rtol=1e-4)
    later = documents(2, seed=3)
    log_p = np.log(joint / joint.sum(1, keepdims=True))
    expected = np.exp(-(later.toarray() * log_p).sum() / later.sum())
    assert fitted.perplexity(later, observed=document) == pytest.approx(expected, rel=1e-5)


def test_the_vocabulary_may_be_large():
    """An identity matrix of the vocabulary would take 40 GB."""
    model = ReplicatedSoftmax(1)
    model._set_machine(BoltzmannMachine({"words": Counts(100_000)}, Bernoulli(1), {"words": Dense()}))
    model.n_features_in_ = 100_000
    document = sparse.csr_matrix(([3.0], ([0], [99_999])), shape=(1, 100_000), dtype=np.float32)
    np.testing.assert_allclose(model.predict_words(document).sum(), 1, rtol=1e-3)


def test_parts_of_the_data_have_the_same_prior_as_all_data():
    counts = documents(60)
    whole = ReplicatedSoftmax(3, n_epochs=1, random_state=0).fit(counts)
    parts = ReplicatedSoftmax(3, random_state=0)
    for _ in range(2):  # parts that occur again count once
        for first in range(0, 60, 20):
            parts.partial_fit(counts[first : first + 20])
    decays = [model.trainer_.state.optimizer.param_groups[0]["weight_decay"] for model in (whole, parts)]
    assert decays[0] == decays[1]
    later = whole.partial_fit(documents(20, seed=5)).trainer_.state.optimizer.param_groups[0]["weight_decay"]
    assert later == pytest.approx(decays[0] * 60 / 80)


def test_halves_divide_the_words_of_every_document():
    counts = documents(50)
    one, other = halves(counts)
    np.testing.assert_array_equal((one + other).toarray(), counts.toarray())
    lengths = [np.asarray(part.sum(1)).ravel() for part in (one, other)]
    assert set(lengths[0] - lengths[1]) == {0, 1}
    assert (halves(counts, seed=1)[0] != one).nnz > 0
    shares = halves(sparse.csr_matrix(np.full((400, 2), 3)))[0].toarray().mean(0)
    np.testing.assert_allclose(shares, 1.5, atol=0.15)  # no word is preferred


def test_sparse_and_dense_counts_give_the_same_model():
    kinds = documents(), documents().toarray().astype(int)
    one, other = (ReplicatedSoftmax(5, n_epochs=2, random_state=0).fit(counts).components_ for counts in kinds)
    np.testing.assert_array_equal(one, other)


def test_sparse_counts_are_made_dense_batch_by_batch(monkeypatch):
    counts = sparse.random(3000, 500, density=0.01, random_state=0, format="csr", dtype=np.float32)
    counts.data[:] = 1
    sizes, toarray = [], sparse.csr_matrix.toarray
    monkeypatch.setattr(
        sparse.csr_matrix, "toarray", lambda self, *args, **kwargs: sizes.append(len(x := toarray(self))) or x
    )
    model = ReplicatedSoftmax(2, n_epochs=1, random_state=0).fit(counts)
    model.transform(counts)
    model.perplexity(counts[:1500])
    assert max(sizes) == 1024
    assert sum(sizes) >= 3 * 3000  # moments, updates, features


def test_files_and_pickles_give_the_same_features(fitted, tmp_path):
    features = fitted.transform(documents())
    fitted.save(tmp_path / "model")
    loaded = mvrbm.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.transform(documents()), features)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).transform(documents()), features)
    assert loaded.get_params() == fitted.get_params()
    assert loaded.n_epochs_ == 40


def test_resumed_training_gives_the_same_model(tmp_path):
    settings = {"n_epochs": 4, "random_state": 0, "n_components": 3}
    whole = ReplicatedSoftmax(**settings).fit(documents())

    class Stop(mvrbm.training.Callback):
        def on_epoch_end(self, trainer):
            trainer.stop = trainer.epoch == 2

    ReplicatedSoftmax(**settings).fit(documents(), callbacks=[Stop(), Checkpoint(tmp_path, every=1)])
    resumed = ReplicatedSoftmax(**settings).fit(documents(), resume=tmp_path)
    np.testing.assert_array_equal(resumed.components_, whole.components_)


def test_the_learning_rate_decays_linearly_to_zero():
    rates = []

    class Record(mvrbm.training.Callback):
        def on_batch_end(self, trainer, batch):
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    ReplicatedSoftmax(3, n_epochs=4, learning_rate=0.08, batch_size=300).fit(documents(), callbacks=[Record()])
    np.testing.assert_allclose(rates, [0.08, 0.06, 0.04, 0.02])


def test_training_continues():
    model = ReplicatedSoftmax(3, n_epochs=2, random_state=0, warm_start=True).fit(documents())
    before = model.components_.copy()
    model.fit(documents()).partial_fit(documents()).partial_fit(documents())
    assert model.n_epochs_ == 6
    assert not np.array_equal(model.components_, before)
    with pytest.raises(
        ValueError, match="training cannot continue because the model has 3 topics, but n_components is 4"
    ):
        model.set_params(n_components=4).fit(documents())


ERRORS = [
    (lambda m: m.fit(-np.ones((2, 3))), "Negative values in data passed to X"),
    (lambda m: m.set_params(n_components=0).fit(documents()), "n_components"),
    (lambda m: m.set_params(learning_rate=0).fit(documents()), "learning_rate"),
    (lambda m: m.fit(documents()).top_words(["a"]), "feature_names must contain 24 names.* got 1"),
    (lambda m: m.fit(documents()).perplexity(documents(5), documents(4)), "observed must have the same shape as X"),
    (lambda m: m.fit(documents()).perplexity(np.zeros((2, 24))), "X contains no words"),
]


@pytest.mark.parametrize(("act", "message"), ERRORS)
def test_errors_say_what_is_wanted(act, message):
    with pytest.raises(ValueError, match=message):
        act(ReplicatedSoftmax(2, n_epochs=1))


def test_a_folder_of_another_model_is_an_error(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    config = (tmp_path / "model" / "config.json").read_text()
    (tmp_path / "model" / "config.json").write_text(config.replace('"words"', '"image"'))
    with pytest.raises(mvrbm.errors.StorageError):
        mvrbm.load(tmp_path / "model")


def test_empty_documents_are_documents(fitted):
    empty = np.zeros((1, 24))
    assert fitted.transform(empty).shape == (1, 5)
    assert bool(torch.isfinite(torch.from_numpy(fitted.predict_words(empty))).all())


def test_features_have_names():
    fitted = ReplicatedSoftmax(3, n_epochs=1, random_state=0).fit(documents())
    assert fitted.get_feature_names_out().tolist() == ["replicatedsoftmax0", "replicatedsoftmax1", "replicatedsoftmax2"]
