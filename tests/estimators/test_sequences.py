"""SequenceRBM against enumeration, against the same machine on one-hot arrays, and with bad input."""

import dataclasses
import itertools
import json
import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone

import mvrbm
from mvrbm import MVRBM, SequenceRBM, Sweep
from mvrbm.data.sequence_weights import identity_weights
from mvrbm.errors import AlignmentWarning, InputError, MixingWarning, StorageError
from mvrbm.io.alignments import as_alignment, read_alignment, write_fasta
from mvrbm.io.alphabets import ALPHABETS, Alphabet
from mvrbm.likelihood import log_partition
from mvrbm.sequences import load_lattice_proteins
from mvrbm.training import Checkpoint, Monitor
from mvrbm.updates.recipe import RECIPES

LETTERS = "ABC"
SITES = 4
SETTINGS = {"rank": 2, "n_epochs": 3, "batch_size": 16, "random_state": 0, "alphabet": LETTERS}
EVERY = ["".join(letters) for letters in itertools.product(LETTERS, repeat=SITES)]


def family(n=60, seed=0):
    """Sequences in which sites 0 and 3 agree, and copies of one of them."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 3, (n, SITES))
    codes[:, 3] = codes[:, 0]
    codes[: n // 3] = codes[0]
    return ["".join(LETTERS[code] for code in row) for row in codes]


@pytest.fixture(scope="module")
def model():
    return SequenceRBM((2, 2), **{**SETTINGS, "n_epochs": 30, "learning_rate": 0.3}).fit(family())


@pytest.fixture(scope="module")
def probabilities(model):
    """The probability of every sequence, by enumeration of visible states and hidden states one by one."""
    machine = model.machine_
    visible = torch.from_numpy(as_alignment(EVERY, LETTERS).one_hot()).to(machine.like)
    hidden = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4)), dtype=visible.dtype).reshape(-1, 2, 2)
    weights = torch.zeros(len(visible), dtype=torch.float64)
    for state in hidden:
        repeated = state.expand(len(visible), 2, 2)
        weights += torch.exp(-machine.energy(visible, repeated).detach().double())
    return dict(zip(EVERY, (weights / weights.sum()).tolist(), strict=True))


def test_it_is_the_machine_of_one_hot_arrays(model):
    """The same settings, data and weights give the same MVRBM."""
    data = as_alignment(family(), LETTERS)
    arrays = MVRBM((2, 2), visible="categorical", recipe="sequences", rank=2, n_epochs=30, learning_rate=0.3,
                   batch_size=16, random_state=0)  # fmt: skip
    weights = identity_weights(data.codes, 0.8)
    arrays.fit(data.one_hot(), sample_weight=weights)
    np.testing.assert_array_equal(model.components_, arrays.components_)
    np.testing.assert_array_equal(model.transform(family()), arrays.transform(data.one_hot()))
    np.testing.assert_array_equal(model.free_energy(family()), arrays.free_energy(data.one_hot()))
    assert model.n_effective_ == pytest.approx(weights.sum())


def test_hidden_units_share_the_embeddings_of_the_letters():
    """With a number of hidden units, W has a matrix of rank `rank` between the letters and everything else."""
    fitted = SequenceRBM(5, **SETTINGS).fit(family())
    weights = fitted.machine_.links["visible"].dense().detach().reshape(5 * SITES, len(LETTERS))
    assert torch.linalg.matrix_rank(weights) == SETTINGS["rank"]
    assert fitted.transform(family()).shape == (60, 5)
    dense = SequenceRBM(5, **{**SETTINGS, "rank": None}).fit(family())
    assert dense.n_parameters_ == 5 * SITES * 3 + SITES * 3 + 5


def gain_over_independent_sites(train, test, **options):
    """Return by how many nats per site held-out sequences are more likely than under independent sites."""
    model = SequenceRBM(random_state=0, **options).fit(train)
    counts = train.one_hot().sum(0) + 1
    independent = np.log(counts / counts.sum(1, keepdims=True))
    scores = model.score_samples(test) - (test.one_hot() * independent).sum((1, 2))
    return (scores.mean() - model.log_partition(n_chains=50, n_steps=200).log_z) / test.n_sites


@pytest.mark.slow
def test_the_default_does_not_overfit_a_small_family():
    every, _ = load_lattice_proteins()
    order = np.random.default_rng(0).permutation(len(every))
    train, test = every[order[:300]], every[order[300:1300]]
    gain = gain_over_independent_sites(train, test)
    assert gain > 0.1
    assert gain_over_independent_sites(train, test, n_epochs=300) > gain - 0.02  # more training does no harm
    no_prior = dataclasses.replace(RECIPES["sequences"], prior_precision=0)
    assert gain_over_independent_sites(train, test, recipe=no_prior) < 0


def test_parts_of_the_data_have_the_same_prior_as_all_data():
    def decay(model):
        return model.trainer_.update_settings().recipe.weight_decay

    settings = {**SETTINGS, "n_epochs": 1, "identity": None}
    whole = SequenceRBM((2, 2), **settings).fit(family())
    parts = SequenceRBM((2, 2), **settings)
    for _ in range(2):  # parts that occur again count once
        for first in range(3):
            parts.partial_fit(family()[first::3])
    assert decay(parts) == decay(whole)
    assert decay(whole.partial_fit(family(20, seed=1))) == pytest.approx(decay(parts) * 60 / 80)
    whole.set_params(warm_start=True).fit(family(20, seed=1))
    assert decay(whole) == pytest.approx(decay(parts) * 3)  # `fit` is given all data


def test_weights_by_identity_are_the_default():
    data = family()
    given = SequenceRBM((2, 2), **SETTINGS).fit(data, sample_weight=identity_weights(as_alignment(data, LETTERS).codes))
    default, plain = SequenceRBM((2, 2), **SETTINGS).fit(data), SequenceRBM((2, 2), identity=None, **SETTINGS).fit(data)
    np.testing.assert_array_equal(default.components_, given.components_)
    assert not np.array_equal(default.components_, plain.components_)
    assert plain.n_effective_ == len(data)
    assert default.n_effective_ == given.n_effective_ < len(data)


def test_scores_are_log_probabilities(model, probabilities):
    expected = np.log([probabilities[one] for one in EVERY])
    log_z = float(log_partition(model.machine_))
    np.testing.assert_allclose(model.score_samples(EVERY) - log_z, expected, atol=1e-5)
    interval = model.log_partition(n_chains=200, n_steps=200)
    assert interval.lower - 0.02 < log_z < interval.upper + 0.02
    np.testing.assert_allclose(model.score_samples(EVERY, normalized=True), expected, atol=0.02)


@pytest.mark.parametrize("pattern", ["?AB?", "A???", "???C", "????"])
def test_scores_of_incomplete_sequences_sum_over_the_unknown_letters(monkeypatch, model, probabilities, pattern):
    matching = [p for one, p in probabilities.items() if all(b in ("?", a) for a, b in zip(one, pattern, strict=True))]
    expected = math.log(sum(matching)) + float(log_partition(model.machine_))
    tolerance = 1e-5 if set(pattern) > {"?"} else 0.02
    complete = model.score_samples(["ABCA"])
    found = model.score_samples([pattern, "ABCA"])
    assert found[0] == pytest.approx(expected, abs=tolerance)
    np.testing.assert_array_equal(found[1:], complete)
    monkeypatch.setattr("mvrbm.estimators.sequences._MOST_BITS", -1)  # estimated instead
    assert model.score_samples([pattern])[0] == pytest.approx(expected, abs=0.02)


def test_pseudo_likelihood_is_the_sum_of_conditional_log_probabilities(model, probabilities):
    def exact(sequence):
        total = 0.0
        for site in range(SITES):
            others = sum(probabilities[sequence[:site] + letter + sequence[site + 1 :]] for letter in LETTERS)
            total += math.log(probabilities[sequence] / others)
        return total

    np.testing.assert_allclose(model.pseudo_likelihood(EVERY), [exact(one) for one in EVERY], atol=1e-5)
    with pytest.raises(ValueError, match="requires complete sequences"):
        model.pseudo_likelihood(["AB?A"])


@pytest.mark.parametrize("start", ["chains", "noise"])
@pytest.mark.parametrize(
    ("fixed", "temperatures"), [(None, None), ("????", None), ("A??B", None), ("?C??", None), (None, 3), ("A??B", 3)]
)
def test_samples_have_the_conditional_distribution(model, probabilities, fixed, start, temperatures):
    n = 4000
    drawn = model.sample(n, steps=60, fixed=fixed, init=start, temperatures=temperatures)
    allowed = [one for one in EVERY if all(b in ("?", a) for a, b in zip(one, fixed or "????", strict=True))]
    assert set(drawn) <= set(allowed)
    weights = np.array([probabilities[one] for one in allowed])
    weights /= weights.sum()
    counts = np.array([drawn.count(one) for one in allowed])
    distance = np.abs(counts / n - weights).sum() / 2
    # The expected distance of n independent draws is at most the sum of the standard deviations divided by 2.
    assert distance < np.sqrt(weights * (1 - weights) / n).sum() / 2 + 0.02


def test_samples_of_every_kind(model):
    assert all(len(one) == SITES and set(one) <= set(LETTERS) for one in model.sample(5, steps=3))
    codes = model.sample(5, steps=3, as_array=True)
    assert model.alphabet_.decode(codes) == model.sample(5, steps=3)
    means = model.sample(5, steps=3, mean=True)
    np.testing.assert_allclose(means.sum(2), 1, rtol=1e-5)
    started = model.sample(2, steps=3, init=["A?B?", "CC?A"])
    assert [(one[0], one[2]) for one in started[:1]] == [("A", "B")]
    assert (started[1][:2], started[1][3]) == ("CC", "A")
    assert len(model.sample(1, steps=1)) == 1


def test_completed_sequences_have_the_most_probable_letter(model, probabilities):
    for pattern in ("?BCA", "AB?C"):
        shares = {one: probabilities[one] for one in (pattern.replace("?", letter) for letter in LETTERS)}
        found, unchanged = model.complete([pattern, "ABCA"], steps=4000)
        assert shares[found] > max(shares.values()) - 0.1 * sum(shares.values())  # two letters may be equally probable
        assert unchanged == "ABCA"


def test_chains_that_remember_their_states_are_reported(model):
    """Chains of a machine whose hidden units copy the letters are stuck."""
    stuck = SequenceRBM((SITES, 3), **{**SETTINGS, "rank": 1}).fit(family())
    with torch.no_grad():
        for factor, scale in zip(stuck.machine_.links["visible"].parameters(), (16.0, 1.0), strict=True):
            factor.copy_(scale * torch.eye(factor.shape[-1])[None])
        stuck.machine_.hidden.bias.fill_(-8.0)
    with pytest.warns(MixingWarning, match=r"the chains remember \d+% of their states after 20 Gibbs steps"):
        stuck.sample(2000, steps=40, init="noise")
    assert stuck.memory_ > 0.9
    with pytest.warns(MixingWarning, match="the chains remember"):
        stuck.sample(60, steps=10, init=family(60))
    assert stuck.memory_ > 0.5
    stuck.sample(60, steps=10, init=["A?B?"] * 60)
    assert math.isnan(stuck.memory_)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MixingWarning)
        stuck.sample(1000, steps=200, init="noise", temperatures=8)
    assert stuck.memory_ < 0.6
    model.sample(2000, steps=40)
    assert abs(model.memory_) < 0.1
    assert model.check_mixing(family(2000), n_chains=2000, steps=64).mixed


def test_fasta_files(model, tmp_path):
    path = model.to_fasta(tmp_path / "new.fasta", 7, steps=5, fixed="A???")
    assert read_alignment(path, LETTERS).sequences == model.sample(7, steps=5, fixed="A???")
    np.testing.assert_array_equal(model.score_samples(path), model.score_samples(read_alignment(path, LETTERS)))
    with pytest.raises(InputError, match="already exists"):
        model.to_fasta(path, 7, steps=5)


def test_incomplete_sequences_are_learned_from():
    """Unknown letters are sampled: the letter of site 3 is learned where it is known."""
    data = [one if n % 2 else one[:3] + "?" for n, one in enumerate(family(200))]
    fitted = SequenceRBM((2, 2), **SETTINGS).fit(data)
    assert np.isfinite(fitted.score_samples(EVERY)).all()


def test_saved_models_are_loaded(model, tmp_path):
    other = SequenceRBM((2, 2), **{**SETTINGS, "alphabet": Alphabet("-ABC", "mine")}).fit(family())
    for fitted in (model, other):
        fitted.save(tmp_path / "model", overwrite=True)
        loaded = mvrbm.load(tmp_path / "model")
        assert loaded.get_params()["alphabet"] == fitted.alphabet
        assert (loaded.alphabet_, loaded.n_sites_, loaded.n_effective_) == (
            fitted.alphabet_,
            SITES,
            fitted.n_effective_,
        )
        np.testing.assert_array_equal(loaded.score_samples(EVERY), fitted.score_samples(EVERY))
        assert loaded.sample(3, steps=5) == fitted.sample(3, steps=5)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["estimator"]["letters"] = "-AB"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(StorageError, match="the alphabet has 3 letters, but the model has 4"):
        mvrbm.load(tmp_path / "model")


def test_runs_resume(tmp_path):
    def fit(n_epochs, identity=0.8, **arguments):
        settings = {**SETTINGS, "n_epochs": n_epochs, "identity": identity}
        return SequenceRBM((2, 2), **settings).fit(family(), **arguments)

    # The learning rate of the recipe falls to zero over the planned epochs, so both runs plan four.
    whole = fit(4)
    fit(4, callbacks=[Checkpoint(tmp_path, keep=10)])
    (newest,) = sorted(tmp_path.glob("update-*"))[-1:]
    for path in newest.rglob("*"):
        path.unlink()
    newest.rmdir()
    np.testing.assert_array_equal(fit(4, resume=tmp_path).components_, whole.components_)
    with pytest.raises(StorageError, match="sample_weight has different values"):
        fit(5, identity=None, resume=tmp_path)


def test_estimator_interface(model):
    assert clone(model).get_params() == model.get_params()
    assert "visible" not in model.get_params()
    assert model.get_feature_names_out()[0] == "sequencerbm0"
    assert model.transform(EVERY).shape == (81, 4)
    assert model.hidden_maps(EVERY).shape == (81, 2, 2)
    assert model.inverse_transform(model.transform(EVERY)).shape == (81, SITES, 3)
    assert model.score(EVERY) == pytest.approx(model.pseudo_likelihood(EVERY).mean())
    found = model.log_likelihood(family(), n_steps=50)
    assert found.lower <= found.upper < 0
    continued = clone(model).set_params(warm_start=True, n_epochs=1).fit(family())
    before = continued.n_updates_
    assert continued.fit(family()).n_updates_ == 2 * before
    assert continued.partial_fit(family()).n_updates_ == 3 * before
    best = Sweep(SequenceRBM((2, 2), **SETTINGS), {"rank": [1, 2]}).fit(family())
    assert len(best.candidates_) == 2
    monitored = clone(model).fit(family(), callbacks=[Monitor.on(as_alignment(family(), LETTERS).one_hot())])
    assert "pseudo_log_likelihood" in monitored.history_[-1]


def test_a_sweep_accepts_sequences_of_every_kind(tmp_path):
    """Only a held-out sequence has a gap, and every candidate has the alphabet of all sequences."""
    held = np.random.default_rng(0).permutation(40)[0]
    sequences = [("ACGU", "GGCU", "ACCA")[row % 3] for row in range(40)]
    sequences[held] = "AC-U"
    path = write_fasta(tmp_path / "family.fasta", sequences)
    scores = []
    for data in (sequences, path, read_alignment(path)):
        sweep = Sweep(SequenceRBM(3, n_epochs=1, random_state=0), {"learning_rate": [0.1, 0.2]}).fit(data)
        assert sweep.best_estimator_.alphabet_.letters == "-ACGU"
        scores.append([candidate.score for candidate in sweep.candidates_])
    assert scores[0] == scores[1] == scores[2]
    sequences[held] = "AC?U"
    with pytest.raises(ValueError, match="1 of 4 held-out samples contain unknown letters"):
        Sweep(SequenceRBM(3, n_epochs=1), {"rank": [1]}).fit(sequences)


def test_alphabets_are_learned():
    protein = ALPHABETS["protein"].letters
    for sequences, letters in [(["ACG-", "CGTT"] * 5, "-ACGT"), (["MKW", "AAK"] * 5, protein[1:])]:
        fitted = SequenceRBM((2, 2), n_epochs=1, random_state=0).fit(sequences)
        assert fitted.alphabet_.letters == letters
    with pytest.warns(AlignmentWarning, match="ambiguous"):
        SequenceRBM((2, 2), n_epochs=1, random_state=0).fit(["ACXD", "CDDA"] * 5)


BAD = [
    (lambda model: model.score_samples(["ABC"]), "the sequences have 3 sites, but the model has 4; align them"),
    (lambda model: model.score_samples(["ABCX"]), "'X' at site 3 is not a letter of the custom alphabet ABC"),
    (lambda model: model.sample(3, fixed="AB"), "fixed must have one character for each of the 4 sites, got 2"),
    (lambda model: model.sample(3, fixed="A1??"), "fixed contains '1' at site 1; use letters of the alphabet"),
    (lambda model: model.sample(1, fixed="AB??", init=["ABCA"]), "fixed cannot be combined"),
    (lambda model: model.sample(1, temperatures=4, init=["ABCA"]), "temperatures cannot be combined"),
    (lambda model: model.sample(2, temperatures=1), "temperatures must be"),
    (lambda model: model.sample(0), "n must be"),
    (lambda model: clone(model).fit(["ABCA"] * 5, sample_weight=[1, 2]), "sample_weight"),
    (lambda model: clone(model).fit([]), "contains no sequences"),
    (lambda model: clone(model).set_params(identity=80).fit(family()), "threshold must be at least 0 and at most 1"),
    (lambda model: clone(model).set_params(hidden_shape=(4, 2, 2)).fit(family()), "hidden_shape .* has 3 axes"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_named(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)
