"""The trained models that come with the package: they load by name, and are as good as their cards say."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

import mvrbm
from mvrbm.errors import StorageError
from mvrbm.hub import find
from mvrbm.model_card import SHIPPED

# Digits of 8x8 pixels, each pixel as 3x3 of 28x28.
IMAGES = np.pad(np.kron(load_digits().images[:4] > 8, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2))).astype(np.float32)
FREE_ENERGIES = {
    "digits": [-1024.395, -1025.0195, -990.0530, -1013.6697],
    "labeled-digits": [-656.5681, -678.0318, -630.8918, -655.2923],
}


@pytest.fixture(scope="module")
def models():
    return {name: mvrbm.load(name, "cpu").set_params(random_state=0) for name in SHIPPED}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", SHIPPED)
def test_free_energies_are_those_of_the_models_that_were_measured(models, name):
    np.testing.assert_allclose(models[name].free_energy(IMAGES), FREE_ENERGIES[name], rtol=1e-5)


def test_samples_start_at_chains_and_are_digits(models):
    model, judge = models["digits"], models["labeled-digits"]
    assert model.chains_["visible"].shape == (100, 28, 28)
    drawn = model.sample(200, steps=100, mean=True)
    assert drawn.shape == (200, 28, 28)
    assert (judge.predict_proba(drawn).max(1) > 0.9).mean() > 0.65
    assert (model.free_energy(drawn) < model.free_energy(np.flip(drawn, 1))).mean() > 0.9


def test_samples_of_a_label_are_of_that_label(models):
    labels = np.tile(np.arange(10), 6)
    drawn, given = models["labeled-digits"].sample(label=labels, steps=100, mean=True)
    assert np.array_equal(given, labels)
    assert (models["labeled-digits"].predict(drawn) == labels).mean() > 0.9
    assert len({row.tobytes() for row in drawn > 0.5}) == 60


def test_hidden_halves_are_filled_in(models):
    whole = models["digits"].chains_["visible"].numpy()
    known = np.broadcast_to(np.arange(28) < 14, (28, 28))
    filled = models["digits"].inpaint(whole, known, steps=100, burn_in=300)
    assert np.array_equal(filled[:, known], whole[:, known])
    by_mean = np.where(known, whole, whole.mean(0))
    wrong, guessed = (((one - whole) ** 2).sum() for one in (filled, by_mean))
    assert wrong < 0.9 * guessed  # halves of other digits: 1.5


def test_a_folder_of_that_name_comes_first(elsewhere):
    mine = mvrbm.MVRBM((2, 2), n_epochs=1, random_state=0).fit(IMAGES[:, 8:12, 8:12])
    mine.save("digits")
    assert find("digits") == elsewhere.joinpath("digits").relative_to(elsewhere)
    assert mvrbm.load("digits", "cpu").n_parameters_ == mine.n_parameters_


def test_unknown_names_list_the_names(elsewhere):
    with pytest.raises(StorageError, match=r"is not the name of an included model \(digits, labeled-digits\)$"):
        mvrbm.load("sevens")


@pytest.mark.parametrize("name", SHIPPED)
def test_cards_have_the_license_the_command_and_the_figures(name):
    card = (find(name) / "README.md").read_text(encoding="utf-8")
    assert f'mvrbm.load("{name}")' in card
    for part in ("CC BY-SA 3.0", "python -m studies generative", "confidence of the judge above 0.9", "bsd-3-clause"):
        assert part in card


def test_they_are_small():
    assert sum(path.stat().st_size for name in SHIPPED for path in find(name).iterdir()) < 200_000


@pytest.mark.parametrize("name", SHIPPED)
def test_bytes_of_binary_digits_are_binary_digits(models, name):
    """The models were trained on binary digits, so that bytes of 0 and 1 must not become 0 and 1/255."""
    bits = models[name].chains_["visible"].numpy()[:5].astype(np.uint8)
    expected = models[name].free_energy(bits.astype(np.float32))
    np.testing.assert_array_equal(models[name].free_energy(bits), expected)
    np.testing.assert_allclose(models[name].free_energy(255 * bits), expected, rtol=1e-5)
